"""Conversations as token ids: the chat template, and how a turn continues the recorded ids of the turn before.

Text of messages never becomes a control token: control tokens in it are marked before the template is rendered, and
encoded as plain text.
"""

import functools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from jaxft.errors import PromptTooLongError
from jaxft.rollout.recorder import Call

# Set before transformers is imported, which else announces that PyTorch is missing.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import mark_control_tokens

CHAR_TOKENIZER = Path(__file__).parent / "assets" / "char_tokenizer"
"""Folder of the embedded tokenizer, with a token per byte and the control tokens of a chat."""

MIN_BYTE_LIMIT = 2**20
"""Bytes of text that are tokenised for any context size; this blocks the event loop for less than a second."""

Message = Mapping[str, str]


class Prompt(NamedTuple):
    """A rendered and tokenised conversation that asks for an answer.

    Attributes:
        text: the rendered conversation, with control tokens in messages marked.
        ids: its token ids.
        prefix_boundaries: token counts at which the prompts of the turns that it continues ended, less their last token
            (`Request.prefix_boundaries`).
        truncated_tokens: the number of tokens left out before `ids`, here or in the call that it continues. For text
            that was left out before it was tokenised the number is estimated from the bytes per token of the rest.
    """

    text: str
    ids: tuple[int, ...]
    prefix_boundaries: tuple[int, ...] = ()
    truncated_tokens: int = 0


def load_tokenizer(path_or_hub_id: str | os.PathLike[str] | None = None) -> Any:
    """Load a transformers tokenizer from a folder or a hub id; for None, the embedded byte-level one.

    Code in the folder is never run.

    Raises:
        ValueError: no tokenizer can be loaded, or it has no chat template or no eos_token.
    """
    source = CHAR_TOKENIZER if path_or_hub_id is None else path_or_hub_id
    try:
        # Without the argument, transformers asks in the terminal whether to run code of the folder.
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"no tokenizer could be loaded from {str(source)!r} ({reason}); give the folder of a Hugging Face "
            "tokenizer, or leave `tokenizer` out for the embedded one"
        ) from error
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer in {str(source)!r} has no chat template; add a chat_template.jinja there")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {str(source)!r} names no eos_token, so nothing would end an answer")
    return tokenizer


def find_stop_ids(tokenizer: Any, model_folder: str | os.PathLike[str] | None = None) -> tuple[int, ...]:
    """Return the token ids that end an answer: the tokenizer's end token and the `eos_token_id` of a model's folder.

    The latter is read from `generation_config.json`, or without one from `config.json`, as in transformers.
    """
    stop_ids = [tokenizer.eos_token_id]
    names = ("generation_config.json", "config.json")
    files = [] if model_folder is None else [Path(model_folder, name) for name in names]
    for file in [file for file in files if file.is_file()][:1]:
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        stop_ids += listed if isinstance(listed, list) else [] if listed is None else [listed]
    return tuple(sorted(set(stop_ids)))


class ChatTemplate:
    """Turns messages into prompts for one tokenizer."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        controls = sorted((token for token in tokenizer.added_tokens_encoder if token.strip()), key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, controls)) or "(?!)")

    def prompt(
        self,
        messages: Sequence[Message],
        earlier: Sequence[Call] = (),
        *,
        max_tokens: int | None = None,
        truncate_left: bool = False,
    ) -> Prompt:
        """Return the prompt that asks for the next answer; it begins with the ids of the earlier call it continues.

        A conversation continues a call if it has the call's messages, its answer and then new messages, and the
        template renders it so. Then the ids of that call are taken as they were fed and sampled, and only the new text
        is tokenised. Otherwise (the agent edits its history, the template drops reasoning) all text is tokenised.

        Args:
            messages: the conversation.
            earlier: calls that the conversation may continue.
            max_tokens: size of the context. Far longer texts are not tokenised, because that blocks the event loop; the
                engine checks if the tokens fit. None tokenises any text.
            truncate_left: True to leave out the beginning of such a text instead of raising an error.

        Raises:
            ValueError: there are no messages, one has no role or content, or the template refuses them.
            PromptTooLongError: there is too much text to tokenise.
        """
        text = self._render(messages, add_generation_prompt=True)
        max_bytes = None
        if max_tokens is not None:
            max_bytes = max(max_tokens * self._longest_token_bytes, MIN_BYTE_LIMIT)
        for call in sorted(earlier, key=lambda call: len(call.messages), reverse=True):
            rest = self._text_after(call, messages, text)
            if rest is not None and (max_bytes is None or _num_bytes(rest) <= max_bytes):
                last = len(call.prompt_ids) - 1
                prefix_boundaries = (*call.prompt_boundaries, last) if last > 0 else ()
                return Prompt(text, call.context_ids + self._encode(rest), prefix_boundaries, call.truncated_tokens)
        count = _num_bytes(text)
        if max_tokens is None or max_bytes is None or count <= max_bytes:
            return Prompt(text, self._encode(text))
        if not truncate_left:
            raise PromptTooLongError.of(f"{count} bytes, of which at most {max_bytes} are tokenised", max_tokens)
        kept = self._tail(text, max_bytes)
        ids, kept_bytes = self._encode(kept), _num_bytes(kept)
        return Prompt(text, ids, truncated_tokens=math.ceil((count - kept_bytes) * len(ids) / max(kept_bytes, 1)))

    @functools.cached_property
    def _longest_token_bytes(self) -> int:
        return max(len(token.encode(errors="replace")) for token in self.tokenizer.get_vocab())

    @functools.cached_property
    def _controls_and_marked(self) -> re.Pattern[str]:
        """Pattern of a control token, marked or not."""
        tokens = [token for token in self.tokenizer.added_tokens_encoder if token.strip()]
        forms = sorted([*map(self._mark, tokens), *tokens], key=len, reverse=True)
        return re.compile("|".join(map(re.escape, forms)) or "(?!)")

    def _tail(self, text: str, max_bytes: int) -> str:
        """Return the last `max_bytes` bytes of a rendered text, or a little less, to begin outside of control tokens.

        The end of a cut control token may be another one, and a marked one without its mark is a real one.
        """
        start = len(text) - len(text.encode(errors="replace")[-max_bytes:].decode(errors="ignore"))
        for found in self._controls_and_marked.finditer(text):
            if found.end() > start:
                return text[start if found.start() >= start else found.end() :]
        return text[start:]

    def _text_after(self, call: Call, messages: Sequence[Message], text: str) -> str | None:
        """Return the text to tokenise after the ids of a call; None if the conversation does not continue the call."""
        answered = [*call.messages, {"role": "assistant", "content": call.content}]
        if list(messages[: len(answered)]) != answered:
            return None
        known = call.prompt_text + self._mark(call.content)
        if not text.startswith(known):
            return None
        rest = text[len(known) :]
        if call.token_ids[-1] in self.stop_ids:
            # The sampled stop token is in the ids already, so the template's own must not follow it.
            stop_text = self.tokenizer.decode([call.token_ids[-1]])
            if not rest.startswith(stop_text):
                return None
            rest = rest[len(stop_text) :]
        return rest

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return a conversation as ids for supervised finetuning, and a mask: True on answers and their end tokens.

        Raises:
            ValueError: the conversation begins with the assistant, does not end with it, holds something else than
                text, or the template does not append turns to the turns before.
        """
        check_messages(messages)
        if messages[0]["role"] == "assistant" or messages[-1]["role"] != "assistant":
            raise ValueError("a conversation to be learned must end with a message of the assistant, and not begin so")
        ids: list[int] = []
        mask: list[bool] = []
        rendered = ""
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self._render(messages[:turn], add_generation_prompt=True)
            answer = self._mark(message["content"]) + self.tokenizer.eos_token
            if not asked.startswith(rendered):
                raise ValueError(
                    f"the chat template rewrites what came before message {turn}; it cannot be learned in one row"
                )
            context_ids, answer_ids = self._encode(asked[len(rendered) :]), self._encode(answer)
            ids += [*context_ids, *answer_ids]
            mask += [False] * len(context_ids) + [True] * len(answer_ids)
            rendered = asked + answer
        return ids, mask

    def answer_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled ids, without control tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        check_messages(messages)
        marked = [{name: self._mark(value) for name, value in message.items()} for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                marked, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template refuses a conversation of roles {roles}: {error}") from error

    def _mark(self, text: str) -> str:
        return mark_control_tokens(text, self._controls)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, sanitize_control_tokens=True)["input_ids"])


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def check_messages(messages: Sequence[Message]) -> None:
    """Raise a `ValueError` that names the message unless every message has a role, content, and text in all fields."""
    if not messages:
        raise ValueError("messages is empty; wanted at least one {'role': ..., 'content': ...}")
    for index, message in enumerate(messages):
        missing = [name for name in ("role", "content") if name not in message]
        if missing:
            raise ValueError(f"messages[{index}] has no {missing[0]!r}; wanted 'role' and 'content'")
        for name, value in message.items():
            if not isinstance(value, str):
                raise ValueError(f"messages[{index}][{name!r}] is of type {type(value).__name__}; wanted text")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"messages[{index}][{name!r}] holds half of a character, U+{ord(value[error.start]):04X}, at index "
                    f"{error.start}, and no tokenizer takes it; read it with errors='replace', or join it to its pair"
                ) from None
