"""Conversations as token ids: the chat template, and how a turn continues the recorded ids of the turn before.

Text of messages never becomes a control token: control tokens in it are marked before the template is rendered, and
encoded as plain text.
"""

import copy
import functools
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import mark_control_tokens

from jaxft.errors import PromptTooLongError, RequestError, ToolsUnsupportedError
from jaxft.rollout.calls import Call, Prompt
from jaxft.rollout.grammar import Compiler
from jaxft.rollout.messages import (
    Message,
    Tool,
    canonical_messages,
    check_size,
    comparison_key,
    num_bytes,
    template_role,
)
from jaxft.rollout.responses import ResponseFormat
from jaxft.rollout.streaming import find_thoughts
from jaxft.rollout.tokenizer import CONTINUED, MARKED, TextEncoder, TokenTexts, eos_ids

Render = Callable[[Sequence[Message]], str]  # a conversation that asks for an answer, with given tools and variables

MIN_BYTE_LIMIT = 2**20
"""Bytes of text that are tokenised for any context size."""

MARKED_TEXTS, MARKED_CHARACTERS = 8192, 1024
"""Number of texts that are remembered with their control tokens marked, and characters of the longest."""

PROMPTS, PROMPT_CHARACTERS = 256, 16384
"""Number of conversations and of texts that are remembered with their prompts and tokens, and characters of each: all
generations of an example ask the same."""

RENDER_OPTIONS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}
"""Arguments of `apply_chat_template` that no `chat_template_kwargs` may replace."""

PLACEHOLDER, THOUGHT = "\U000f0002answer\U000f0003", "\U000f0002thought\U000f0003"
"""Stand for an answer and its reasoning in a rendered conversation; they have characters of Unicode's private use."""

QUESTION, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER}
"""A conversation by which a template shows how it writes answers."""

CLOCK = (
    "{%- macro strftime_now(form) -%}{%- set date = namespace(text=form) -%}"
    "{%- for code, value in run_clock.items() -%}{%- set date.text = date.text.replace(code, value) -%}{%- endfor -%}"
    "{{ date.text }}{%- endmacro %}\n"
)
"""Start of a chat template that replaces the clock of transformers, which lets no function into a template."""


def find_stop_ids(tokenizer: Any, model_folder: str | os.PathLike[str] | None = None) -> tuple[int, ...]:
    """Return the ids that end an answer, ascending: the tokenizer's, the chat template's, and `eos_ids` of a folder."""
    end_of_turn = tokenizer.convert_tokens_to_ids(ChatTemplate(tokenizer, ()).end_of_turn)
    return tuple(sorted({tokenizer.eos_token_id, end_of_turn, *eos_ids(model_folder)}))


class ChatTemplate:
    """Turns messages into prompts for one tokenizer.

    Attributes:
        tokenizer: a transformers tokenizer.
        stop_ids: token ids that end an answer.
        responses: the way in which the model writes reasoning and tool calls.
        tokens: text and bytes of tokens.
        grammars: compiles the grammars of constrained answers.
        now: time that a template which writes a date (`strftime_now`) writes; None for the present time.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self.now: datetime | None = None
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        self.tokens = TokenTexts(tokenizer)
        self.grammars = Compiler(tokenizer, self.stop_ids)
        self.responses = ResponseFormat(tokenizer, self.tokens, self.stop_ids)
        controls = sorted((token for token in tokenizer.added_tokens_encoder if token.strip()), key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, controls)) or "(?!)")
        # A conversation is rendered for each of its answers, with the same keys, roles and earlier messages.
        marked = functools.partial(mark_control_tokens, control_tokens_re=self._controls)
        self._marked_before = functools.lru_cache(MARKED_TEXTS)(marked)
        self._rendered_before = functools.lru_cache(PROMPTS)(lambda text: self._render_marked(*json.loads(text)))
        self._tokenise = TextEncoder(tokenizer)
        self._encoded_before = functools.lru_cache(PROMPTS)(self._tokenise)
        self._control_text = functools.cache(lambda token_id: self.text([token_id]))

    @functools.cached_property
    def end_of_turn(self) -> str:
        """The control token that the template writes after an answer; the tokenizer's end token if it writes none."""
        text = self._example([QUESTION, ANSWER], asks=False)
        found = self._controls.match(text.rpartition(PLACEHOLDER)[2])
        return str(self.tokenizer.eos_token) if found is None else found[0]

    def _example(self, messages: Sequence[Message], *, asks: bool) -> str:
        """Return a rendered conversation; empty if the template is one of other conversations, and refuses it."""
        try:
            return self._render(messages, (), {}, add_generation_prompt=asks)
        except RequestError:
            return ""

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text that the model continues as it stands.

        The tokens that the tokenizer writes before every text, such as a BOS, come first, unless the text begins with
        them, as a rendered chat does. Those that it writes behind every text, such as an end token, are left out.
        """
        ids = self._ids(text, add_special_tokens=False)
        start = self._start_ids
        return ids if ids[: len(start)] == start else start + ids

    @functools.cached_property
    def _start_ids(self) -> tuple[int, ...]:
        """Ids that the tokenizer writes before every text."""
        whole, own = self._ids("a", add_special_tokens=True), self._ids("a", add_special_tokens=False)
        starts = range(len(whole) - len(own) + 1)
        return next((whole[:start] for start in starts if whole[start : start + len(own)] == own), ())

    def _ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    @property
    def writes_date(self) -> bool:
        """True if a chat template of the tokenizer writes a date, which is that of `now`."""
        return "strftime_now" in str(self.tokenizer.chat_template)

    def has_chat_form(self, text: str) -> bool:
        """Return True if a text asks for an answer in the way in which the template does."""
        asked = self._example([{"role": "user", "content": PLACEHOLDER}], asks=True)
        return asked.rpartition(PLACEHOLDER)[2].strip() in text

    def prompt(
        self,
        messages: Sequence[Message],
        earlier: Sequence[Call] = (),
        *,
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        prefill: str = "",
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
            tools: functions that the answer may call.
            template_kwargs: variables of the chat template, such as `enable_thinking`.
            prefill: beginning of a forced call, control tokens included; `forced_start` of it is in `ids` and not in
                `text`.
            max_tokens: size of the context. Conversations that are far longer are refused before they are rendered or
                tokenised, which takes long; the engine checks if the tokens fit. None tokenises any text.
            truncate_left: True to leave out the beginning of such a text instead of raising an error.

        Raises:
            RequestError: messages or variables of the template are malformed, or the template refuses them.
            ToolsUnsupportedError: the template takes the conversation without the tools only.
            PromptTooLongError: there is too much text to tokenise.
        """
        given = canonical_messages(messages)
        render = functools.partial(self._render, tools=tools, kwargs=template_kwargs or {}, add_generation_prompt=True)
        max_bytes = None
        if max_tokens is not None:
            max_bytes = max(max_tokens * self._longest_token_bytes, MIN_BYTE_LIMIT)
            if not truncate_left:
                check_size(given, max_bytes, max_tokens)
        text = render(given)
        prefill = self.forced_start(prefill, text)
        keys = [comparison_key(message) for message in given]
        begun = [call for call in earlier if keys[: len(call.messages)] == call.message_keys]
        for call in sorted(begun, key=lambda call: len(call.messages), reverse=True):
            if not self._has_answer(call, given):
                continue
            rest = self._text_after(call, given, text, render)
            if rest is None:
                break  # the template changes what came before, so earlier calls fare no better
            if max_bytes is None or num_bytes(rest) <= max_bytes:
                ids = self._encode_after(call.token_ids, rest + prefill)
                spans, start = self._result_spans(call, given, text, render), len(text) - len(rest)
                spans = [(first - start, end - start) for first, end in spans]
                places = self.tokens.begin_within(ids, rest + prefill, spans) if spans else ()
                context = call.context_ids
                observations = tuple(len(context) + place for place in places)
                return Prompt(text, context + ids, call.prompt.truncated_tokens, observations=observations)
        is_retokenized = any(len(call.messages) < len(given) for call in begun)
        count = num_bytes(text)
        if max_tokens is not None and max_bytes is not None and not truncate_left:
            if (marked := text.count(MARKED)) > max_tokens:  # each is encoded by itself, to one token at least
                raise PromptTooLongError.of(f"{marked} control tokens in its messages", max_tokens)
            if count > max_bytes:
                raise PromptTooLongError.of(f"{count} bytes, of which at most {max_bytes} are tokenised", max_tokens)
        if max_bytes is None or count <= max_bytes:
            return Prompt(text, self._encode(text + prefill), is_retokenized=is_retokenized)
        kept = self._tail(text, max_bytes)
        ids, kept_bytes = self._encode(kept + prefill), num_bytes(kept)
        truncated_tokens = math.ceil((count - kept_bytes) * len(ids) / max(kept_bytes, 1))
        return Prompt(text, ids, truncated_tokens=truncated_tokens, is_retokenized=is_retokenized)

    def forced_start(self, forced_call: str, prompt_text: str) -> str:
        """Return the beginning of an answer that is forced to call a tool; it ends reasoning that the prompt began."""
        template = self.responses.template(has_tools=True) if forced_call else None
        thoughts = find_thoughts(template, prompt_text)
        if template is None or thoughts is None or not thoughts.is_begun:
            return forced_call
        return f"\n{template.fields['reasoning_content'].close_literals[0]}\n\n{forced_call}"

    @functools.cached_property
    def of_thread(self) -> "ChatTemplate":
        """The same template for another thread, with a tokenizer of its own, as one is changed while it encodes."""
        return ChatTemplate(copy.deepcopy(self.tokenizer), self.stop_ids)

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

    def _has_answer(self, call: Call, messages: Sequence[Message]) -> bool:
        """Return True if the answer of a call follows its messages in a conversation, however it is written."""
        if len(messages) <= len(call.messages):
            return False
        answer, known = messages[len(call.messages)], call.answer_message
        reasoning = answer.get("reasoning_content", answer.get("reasoning"))
        if call.reply.reasoning_content is not None:
            if reasoning is not None and reasoning.strip() != call.reply.reasoning_content:
                return False
            # Some clients write reasoning back into the content.
            *thought, content = answer["content"].rsplit("</think>", 1)
            answer = {**answer, "content": content.lstrip() if thought else content}
        return comparison_key(answer) == comparison_key(known)

    def _text_after(self, call: Call, messages: Sequence[Message], text: str, render: Render) -> str | None:
        """Return the text to tokenise after the ids of a call; None if the template renders the call differently now.

        Args:
            call: the call that the conversation continues.
            messages: the conversation.
            text: the conversation, rendered.
            render: what rendered it.
        """
        if not text.startswith(call.prompt.text):
            return None
        is_thinking = call.prompt.text.rstrip().endswith("<think>")  # the answer may end the thought before it begins
        if call.reply.tool_calls or call.reply.reasoning_content is not None or is_thinking:
            return self._text_after_marked(call, messages, text, render)
        after, known = text[len(call.prompt.text) :], self._mark(call.content)
        if not after.startswith(known):  # some templates strip the answer, and Mistral's write a space before it
            known = known.strip()
            after = after.lstrip() if known else after
        rest = after[len(known) :] if after.startswith(known) else None
        if rest is None or call.token_ids[-1] not in self.stop_ids:
            return rest
        # The sampled stop token is in the ids already, so the template's own must not follow it.
        stop_text = self.text([call.token_ids[-1]])
        return rest[len(stop_text) :] if rest.startswith(stop_text) else None

    def _text_after_marked(self, call: Call, messages: Sequence[Message], text: str, render: Render) -> str | None:
        """Return the text after an answer with tool calls or reasoning, which templates write in a way of their own.

        A placeholder in the answer shows where the template ends it: the stop text that follows is that of the answer.
        """
        asked = len(call.messages)
        answer: dict[str, Any] = {"role": "assistant", "content": call.content}
        if call.reply.reasoning_content is not None:
            answer["reasoning_content"] = THOUGHT
        if call.reply.tool_calls:
            first = {**call.reply.tool_calls[0].as_message(), "function": {"name": PLACEHOLDER, "arguments": {}}}
            answer["tool_calls"] = [first]
        else:
            answer["content"] = PLACEHOLDER
        try:
            marked = render([*messages[:asked], answer, *messages[asked + 1 :]])
        except RequestError:  # a template may compare results with calls
            return None
        place = marked.find(PLACEHOLDER, len(call.prompt.text))
        if place < 0 or not marked.startswith(call.prompt.text):
            return None
        if call.reply.reasoning_content is not None and THOUGHT not in marked[len(call.prompt.text) : place]:
            return None
        stop_texts = [self.text([stop]) for stop in self.stop_ids]
        ends = [(marked.find(stop, place), stop) for stop in stop_texts if stop in marked[place:]]
        if not ends:
            return None
        start, stop_text = min(ends)
        rest = marked[start:] if call.token_ids[-1] not in self.stop_ids else marked[start + len(stop_text) :]
        return rest if text.endswith(rest) else None

    def _result_spans(
        self, call: Call, messages: Sequence[Message], text: str, render: Render
    ) -> list[tuple[int, int]]:
        """Return where the results of tools that follow a call stand in a rendered conversation that continues it.

        Placeholders show the text around them. There are none if the template rewrites them, but for JSON.
        """
        behind = range(len(call.messages) + 1, len(messages))
        results = [index for index in behind if template_role(messages[index]["role"]) == "tool"]
        if not results:
            return []
        hidden = [{**each, "content": PLACEHOLDER} if i in results else each for i, each in enumerate(messages)]
        try:
            place, *around = render(hidden).split(PLACEHOLDER)
        except RequestError:
            return []
        spans, start = [], len(place) if len(around) == len(results) and text.startswith(place) else len(text)
        for index, after in zip(results, around, strict=False):
            content = self._mark(messages[index]["content"])
            forms = (content, content.strip(), json.dumps(content, ensure_ascii=False)[1:-1])
            form = next((form for form in forms if text.startswith(form + after, start)), None)
            if form is None:
                return []
            spans.append((start, start + len(form)))
            start += len(form + after)
        return spans

    def completion(self, prompt: str, text: str) -> tuple[list[int], list[bool]]:
        """Return a text that continues a prompt as ids with the end token, and a mask: True on text and end token."""
        context = list(self.text_ids(prompt))
        answer = [*self._encode_after(context, self._mark(text)), self.tokenizer.eos_token_id]
        return context + answer, [False] * len(context) + [bool(context) or place > 0 for place in range(len(answer))]

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), trained: Collection[int] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Return a conversation as ids for supervised finetuning, and a mask: True on answers and their end tokens.

        Answers are as the template writes them in the whole conversation, which ends with the last trained one.

        Args:
            messages: the conversation.
            tools: functions that its answers may call.
            trained: indices of the answers on which the mask is True; None for all.

        Raises:
            ValueError: the conversation begins with the assistant, does not end with it, holds something else than
                text and tool calls, or the template does not append turns to the turns before, or leaves something of
                an answer out.
        """
        given = canonical_messages(messages)
        if given[0]["role"] == "assistant" or given[-1]["role"] != "assistant":
            raise ValueError("a conversation to be learned must end with a message of the assistant, and not begin so")
        answers = {turn for turn, message in enumerate(given) if message["role"] == "assistant"}
        text = self._render(given, tools, {}, add_generation_prompt=False)
        ids: list[int] = []
        mask: list[bool] = []
        rendered = ""
        for turn in sorted(answers):
            is_trained = trained is None or turn in trained
            if not (is_trained or rendered):
                continue  # context of later answers, however the template writes it
            asked = self._render(given[:turn], tools, {}, add_generation_prompt=True)
            if not (asked.startswith(rendered) and text.startswith(asked)):
                raise ValueError(
                    f"the chat template rewrites what came before message {turn}, or writes it elsewhere than behind "
                    "its prompt, so it cannot be learned in one row: train the last answer alone"
                )
            if is_trained:
                context_ids = self._encode_after(ids, asked[len(rendered) :])
                ids += context_ids
                answer = self._rendered_answer(given, turn, tools, asked, text)
                answer_ids = self._encode_after(ids, answer)
                ids += answer_ids
                mask += [False] * len(context_ids) + [True] * len(answer_ids)
                rendered = asked + answer
        return ids, mask

    def _rendered_answer(
        self, messages: Sequence[Message], turn: int, tools: Sequence[Tool], asked: str, text: str
    ) -> str:
        """Return message `turn` as it stands behind its prompt `asked` in the rendered conversation, with its end."""
        message, behind = messages[turn], text[len(asked) :]
        content = self._mark(message["content"]).strip()
        end = re.compile(f"(?<!{MARKED}){re.escape(self.end_of_turn)}")  # text that spells it is marked
        if "tool_calls" in message or "reasoning_content" in message:
            # They may hold end tokens, and what later turns leave out of them would be learned as left out.
            own = self._render(messages[: turn + 1], tools, {}, add_generation_prompt=False)
            ends = [found.end() for found in end.finditer(own)]
            answer = own[len(asked) : ends[-1] if ends else 0]
            is_whole = answer != "" and own.startswith(asked) and behind.startswith(answer)
        else:
            answer = end.split(behind, 1)[0]
            is_whole = content in answer
            if answer == behind:  # the template writes no end tokens
                answer = answer[: answer.find(content) + len(content)]
            answer += self.end_of_turn
        if not is_whole:
            raise ValueError(
                f"the chat template leaves out text, tool calls or reasoning of message {turn}, or writes them "
                "elsewhere than in the answer, so they cannot be learned; reasoning belongs into reasoning_content"
            )
        return answer

    def answer_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled ids, without control tokens and stop tokens."""
        kept = [token_id for token_id in token_ids if token_id not in self.stop_ids]
        return self.tokens.decode(kept, skip_special_tokens=True)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, control tokens included."""
        return self.tokens.decode(token_ids)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        taken = RENDER_OPTIONS.intersection(kwargs)
        if taken:
            raise RequestError(
                f"chat_template_kwargs has {min(taken)!r}, which is no variable of a chat template",
                param="chat_template_kwargs",
            )
        asked = [{**message, "role": template_role(message["role"])} for message in messages]
        try:
            conversation = json.dumps([asked, list(tools), dict(kwargs), add_generation_prompt])
        except (TypeError, ValueError, RecursionError):  # a variable of the template may be any object
            conversation = None
        try:
            if conversation is None or len(conversation) > PROMPT_CHARACTERS:
                return self._render_marked(asked, list(tools), dict(kwargs), add_generation_prompt)
            return self._rendered_before(conversation)
        except Exception as error:  # a template is code of the model's, and may fail in any way
            roles, why = ", ".join(message["role"] for message in messages), " ".join(str(error).split())
            if tools and not kwargs and self._example(messages, asks=add_generation_prompt):
                raise ToolsUnsupportedError(f"the chat template refuses tools: {why}", param="tools") from error
            raise RequestError(
                f"the chat template refuses a conversation of roles {roles}: {why}", param="messages"
            ) from error

    def _render_marked(self, messages: list[Any], tools: list[Any], kwargs: dict[str, Any], asks: bool) -> str:
        return self.tokenizer.apply_chat_template(
            self._mark_controls(messages),
            tools=self._mark_controls(tools) or None,
            tokenize=False,
            add_generation_prompt=asks,
            **self._mark_controls(kwargs),
            **self._clock(tools),
        )

    def _clock(self, tools: list[Any]) -> dict[str, Any]:
        """Return the arguments of `apply_chat_template` for a template that writes a date: it writes that of `now`."""
        if self.now is None or not self.writes_date:
            return {}
        template = self.tokenizer.get_chat_template(tools=tools or None)
        codes = ("%-d", "%-m", "%-H", "%-I", "%-M", "%-S", *(f"%{code}" for code in "aAbBcdHIjmMpSUwWxXyYzZ%"))
        return {"chat_template": CLOCK + template, "run_clock": {code: self.now.strftime(code) for code in codes}}

    def _mark_controls(self, value: Any) -> Any:
        """Return JSON with control tokens marked in all its texts, keys included."""
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, Mapping):
            return {self._mark_controls(key): self._mark_controls(each) for key, each in value.items()}
        return [self._mark_controls(each) for each in value] if isinstance(value, list | tuple) else value

    def _mark(self, text: str) -> str:
        if len(text) > MARKED_CHARACTERS:
            return mark_control_tokens(text, self._controls)
        return self._marked_before(text)

    def _encode_after(self, token_ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Return the ids of text that follows tokens; some tokenizers write a space before text that stands alone."""
        if not token_ids:
            return self._encode(text)
        # A control token may take the space after it, as Phi-3's do. An unknown token stands for text.
        if token_ids[-1] in self.tokens.control_ids and token_ids[-1] != self.tokenizer.unk_token_id:
            last, *ids = self._encode(self._control_text(token_ids[-1]) + text)
            if last == token_ids[-1]:
                return tuple(ids)
        return self._encode(text if self._controls.match(text) else CONTINUED + text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return self._tokenise(text) if len(text) > PROMPT_CHARACTERS else self._encoded_before(text)
