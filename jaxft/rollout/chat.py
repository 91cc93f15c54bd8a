"""Conversations as token ids: the chat template, and the rule by which a turn continues the ids of the turn before.

Text that agents put into messages can never become a control token: it is marked before the template is filled in, and
what is marked is encoded as plain text.
"""

import functools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxft.errors import PromptTooLongError
from jaxft.rollout.recorder import Call

CHAR_TOKENIZER = Path(__file__).parent / "assets" / "char_tokenizer"
"""The embedded tokenizer: a token per byte, and the control tokens of a chat."""

MIN_BYTE_LIMIT = 2**20
"""Bytes of a text that are tokenised whatever the context: it takes the event loop less than a second."""

Message = Mapping[str, str]


class Prompt(NamedTuple):
    """A conversation, ready to be answered.

    Attributes:
        text: as rendered (control tokens of messages marked).
        ids: its tokens.
        prefix_boundaries: where the prompts of the turns that it goes on from ended, less their last token
            (`Request.prefix_boundaries`).
        truncated_tokens: how many tokens of the conversation stand before `ids` but were left out, here or in the call
            that it goes on from. Text that was left out before it was tokenised counts as many as the same number of
            bytes of the text that was kept has on average.
    """

    text: str
    ids: tuple[int, ...]
    prefix_boundaries: tuple[int, ...] = ()
    truncated_tokens: int = 0


def load_tokenizer(path_or_hub_id: str | os.PathLike[str] | None = None) -> Any:
    """A transformers tokenizer from a folder or a hub id; the embedded character-level one when None.

    Code that lies in the folder is never run.

    Raises:
        ValueError: nothing loadable there, or the tokenizer has no chat template; says how to give another.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would announce that PyTorch is missing
    from transformers import AutoTokenizer

    source = CHAR_TOKENIZER if path_or_hub_id is None else path_or_hub_id
    try:
        # Not asked for, transformers would ask the terminal whether to run code of the folder.
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
    """Ids that end an answer: the tokenizer's end token, and those that a model's folder adds.

    These are in its `generation_config.json`, or, without one, in its `config.json`, as for transformers.
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
        """The prompt that asks for the next answer, made of recorded ids as far as an earlier call reaches.

        When the conversation goes on from an earlier call (its messages, its answer, then new ones) and the template
        renders it so, the ids of that call are taken as they were fed and sampled, and only the text behind them is
        tokenised. Otherwise (an agent that edits its history, a template that drops reasoning) all of it is.

        Args:
            messages: the conversation.
            earlier: the calls that it may go on from.
            max_tokens: of the context. Much more text than it could ever hold is not tokenised, as that holds up the
                event loop; how many tokens the rest has is for the engine to judge. None: any text is.
            truncate_left: of so much text the beginning is left out, instead of an error.

        Raises:
            ValueError: no messages, one without role or content, or a template that refuses them.
            PromptTooLongError: there is too much text to be tokenised.
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
        """Finds a control token, with its marks where it has any."""
        tokens = [token for token in self.tokenizer.added_tokens_encoder if token.strip()]
        forms = sorted([*map(self._mark, tokens), *tokens], key=len, reverse=True)
        return re.compile("|".join(map(re.escape, forms)) or "(?!)")

    def _tail(self, text: str, max_bytes: int) -> str:
        """The end of a rendered text, of at most so many bytes; it does not begin inside of a control token.

        A part of one may be another one, and a marked one without its first mark would be a control token.
        """
        start = len(text) - len(text.encode(errors="replace")[-max_bytes:].decode(errors="ignore"))
        for found in self._controls_and_marked.finditer(text):
            if found.end() > start:
                return text[start if found.start() >= start else found.end() :]
        return text[start:]

    def _text_after(self, call: Call, messages: Sequence[Message], text: str) -> str | None:
        """What is to be tokenised behind the ids of a call; None when the conversation does not go on from it."""
        answered = [*call.messages, {"role": "assistant", "content": call.content}]
        if list(messages[: len(answered)]) != answered:
            return None
        said = call.prompt_text + self._mark(call.content)
        if not text.startswith(said):
            return None
        rest = text[len(said) :]
        if call.token_ids[-1] in self.stop_ids:
            # The stop token was sampled: it stands in the ids already, so the template's own must not follow it.
            stop_text = self.tokenizer.decode([call.token_ids[-1]])
            if not rest.startswith(stop_text):
                return None
            rest = rest[len(stop_text) :]
        return rest

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """A finished conversation as ids, with a mask that is True on the assistant's words and their end token.

        For supervised finetuning. The last message must be the assistant's.

        Raises:
            ValueError: the conversation does not end with the assistant, begins with it, holds something else than
                text, or the template does not render turns one behind the other.
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
            context, words = self._encode(asked[len(rendered) :]), self._encode(answer)
            ids += [*context, *words]
            mask += [False] * len(context) + [True] * len(words)
            rendered = asked + answer
        return ids, mask

    def answer_text(self, token_ids: Sequence[int]) -> str:
        """What sampled ids say, without control tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

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
        from transformers.utils.chat_template_utils import mark_control_tokens

        return mark_control_tokens(text, self._controls)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, sanitize_control_tokens=True)["input_ids"])


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def check_messages(messages: Sequence[Message]) -> None:
    """Refuses, with a `ValueError` that says which message, what is no conversation of texts."""
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
                    f"messages[{index}][{name!r}] holds half of a character, U+{ord(value[error.start]):04X}, at place "
                    f"{error.start}, and no tokenizer takes it; read it with errors='replace', or join it to its pair"
                ) from None
