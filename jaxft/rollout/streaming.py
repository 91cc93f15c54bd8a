"""An answer as it is sampled: where a stop string ends it, and its text in pieces that later tokens never change."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from jaxft.rollout.chat_request import Delta
from jaxft.rollout.responses import ParsedAnswer, make_parser


class TextDecoder:
    """Decodes tokens one after the other, each with the tokens before it that its text may depend on.

    Single bytes of SentencePiece's tokenizers wait for the token that follows the last of them: before that, no text of
    theirs is certain.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], is_byte: Callable[[int], bool] = lambda token_id: False
    ) -> None:
        """`decode` returns the text of tokens; `is_byte` is that of `TokenTexts`."""
        self._decode, self._is_byte = decode, is_byte
        # Twice, because decoders strip the space that begins a text.
        self._has_text = functools.cache(lambda token_id: decode([token_id, token_id]) != "")
        self._ids: list[int] = []  # without control tokens, which have no text
        self._num_certain = 0  # tokens before single bytes at the end
        self._start = 0  # first token that is decoded again
        self._end = 0  # number of tokens at the last complete character
        self._num_known = 0  # characters of these tokens' text that were returned

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that the tokens add; a character whose bytes are not complete waits for the next tokens."""
        for token_id in filter(self._has_text, token_ids):
            self._ids.append(token_id)
            if not self._is_byte(token_id):
                self._num_certain = len(self._ids)
        end = self._num_certain
        text = self._decode(self._ids[self._start : end])
        # The bytes of an incomplete character, at most three, are decoded as replacement characters.
        held = len(text) - max(len(text.rstrip("\N{REPLACEMENT CHARACTER}")), len(text) - 3)
        new = text[self._num_known : len(text) - held]
        self._num_known += len(new)
        # The next tokens are decoded with these before them, if these have text: decoders strip what begins a text.
        if new and not held:
            self._start, self._end = self._end, end
            self._num_known = len(self._decode(self._ids[self._start : end]))
        return new


class Thoughts(NamedTuple):
    """Reasoning in the text of an answer, where no stop string is looked for but one that holds a tag of reasoning.

    Attributes:
        open, close: patterns of the tags around reasoning.
        is_begun: True if the prompt ends within the answer's reasoning.
    """

    open: Any
    close: Any
    is_begun: bool

    def content_spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of each piece of content, without the spaces before it, which belong to the format."""
        end, is_thinking = 0, self.is_begun
        while True:
            if is_thinking:
                closed = self.close.search(text, end)
                if closed is None:
                    return
                end = closed.end()
            opened = self.open.search(text, end)
            stop = len(text) if opened is None else opened.start()
            yield stop - len(text[end:stop].lstrip()), stop
            if opened is None:
                return
            end, is_thinking = opened.end(), True

    def is_tagged(self, stop: str) -> bool:
        """Return True if a stop string holds a tag of reasoning, such as the one that ends a thought."""
        return bool(self.open.search(stop) or self.close.search(stop))


def find_thoughts(template: ResponseTemplate | None, prompt_text: str) -> Thoughts | None:
    """Return the reasoning of an answer that follows this prompt; None if the response template knows none."""
    field = None if template is None else template.fields.get("reasoning_content")
    if template is None or field is None or field.open_re is None or field.close_re is None:
        return None
    events = make_parser(template, prompt_text).initial_events
    bounds = [each["type"] for each in events if each["field"] == field.name and each["type"] != "region_chunk"]
    return Thoughts(field.open_re, field.close_re, bounds[-1:] == ["region_open"])


class Streamer:
    """Turns the tokens of one answer into deltas, which joined give the content and reasoning of its `ParsedAnswer`.

    Text is held back while it may belong to a stop string, to a tool call or to the space before one.
    """

    def __init__(
        self,
        index: int,
        on_delta: Callable[[Delta], None],
        decode: Callable[[Sequence[int]], str],
        *,
        stops: Sequence[str],
        template: ResponseTemplate | None,
        prompt_text: str,
        prefill: str,
        is_byte: Callable[[int], bool] = lambda token_id: False,
        thoughts: Thoughts | None = None,
    ) -> None:
        """Make a streamer.

        Args:
            index: number of the answer.
            on_delta: takes each delta.
            decode: text of sampled ids, as the answer is parsed from.
            stops: strings that end the answer; a stop string that is part of the content comes with the last delta.
            template: response template that the answer is parsed with; None if all of its text is content.
            prompt_text: the rendered conversation.
            prefill: text that the answer begins with.
            is_byte: `TokenTexts.is_byte` of the tokenizer.
            thoughts: the answer's reasoning, if `template` knows any.
        """
        self._index, self._on_delta = index, on_delta
        self._decoder = TextDecoder(decode, is_byte)
        self._parser = None if template is None else make_parser(template, prompt_text)
        has_reasoning = template is not None and "reasoning_content" in template.fields
        tagged = () if thoughts is None else filter(thoughts.is_tagged, stops)
        self._text = _FieldText(tagged, keeps_end=True, keeps_start=True)
        self._content = _FieldText(stops, keeps_end=self._parser is None, keeps_start=not has_reasoning)
        self._reasoning = _FieldText((), keeps_end=False, keeps_start=False)
        self._is_open = True  # False after a tool call begins: `finish` delivers the rest
        if prefill and self._parser is not None:
            self._parse(prefill)

    def feed(self, token_ids: list[int], logprobs: list[float]) -> None:
        """Take newly sampled tokens."""
        if self._is_open:
            self._text.add(self._decoder.feed(token_ids))
            text = self._text.take()
            if self._parser is None:
                self._content.add(text)
            else:
                self._parse(text)
        self._on_delta(
            Delta(self._index, self._content.take(), self._reasoning.take(), tuple(token_ids), tuple(logprobs))
        )

    def finish(self, answer: ParsedAnswer) -> None:
        """Give the rest of the answer."""
        content = self._content.rest(answer.content)
        reasoning = self._reasoning.rest(answer.reasoning_content or "")
        if content or reasoning:
            self._on_delta(Delta(self._index, content, reasoning))

    def _parse(self, text: str) -> None:
        assert self._parser is not None
        try:
            events = self._parser.feed(text)
        except (ValueError, TypeError, KeyError, RecursionError):  # a malformed tool call, which `ParsedAnswer` reports
            self._is_open = False
            return
        for event in events:
            field = event["field"]
            if field == "tool_calls":
                self._is_open = False
                return
            if event["type"] == "region_chunk":
                (self._reasoning if field == "reasoning_content" else self._content).add(event["text"])


class _FieldText:
    """Text that grows up to a stop string, with or without the spaces at its start and its end.

    It is taken piece by piece, as far as it is certain.
    """

    def __init__(self, stops: Iterable[str], *, keeps_start: bool, keeps_end: bool) -> None:
        self._stops, self._keeps_start, self._keeps_end = tuple(stops), keeps_start, keeps_end
        self._taken: list[str] = []
        self._pending = ""
        self._is_over = False

    def add(self, text: str) -> None:
        if not self._is_over:
            self._pending += text if self._keeps_start or self._taken or self._pending else text.lstrip()

    def take(self) -> str:
        """Return the text since the last call, without spaces that may be its end and what may begin a stop string."""
        found = find_stop(self._pending, self._stops)
        if found is not None:
            self._pending, self._is_over = self._pending[: found[0]], True
        certain = self._pending[: len(self._pending) - (0 if self._is_over else self._num_held())]
        certain = certain if self._keeps_end else certain.rstrip()
        self._pending = self._pending[len(certain) :]
        if certain:
            self._taken.append(certain)
        return certain

    def rest(self, whole: str) -> str:
        """Return what is left of the whole text."""
        taken = "".join(self._taken)
        return whole[len(taken) :] if whole.startswith(taken) else ""

    def _num_held(self) -> int:
        """Return the number of last characters that may begin a stop string."""
        ends = (
            length
            for stop in self._stops
            for length in range(1, min(len(stop), len(self._pending) + 1))
            if self._pending.endswith(stop[:length])
        )
        return max(ends, default=0)


SLACK = 24
"""Characters searched back beyond the longest stop string: the first ones may be decoded differently without earlier
tokens, and a tag of reasoning may begin there."""


class StopFinder:
    """Finds the token that completes a stop string; called repeatedly with all tokens sampled so far.

    Each call searches only the new tokens, and the tokens before them in which a stop string may begin. While the
    answer thinks, only a stop string that holds a tag of reasoning can end it.
    """

    def __init__(
        self,
        decoded_text: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        is_byte: Callable[[int], bool] = lambda token_id: False,
        thoughts: Thoughts | None = None,
    ) -> None:
        """Make a finder.

        Args:
            decoded_text: decodes tokens.
            stops: at least one string, and no empty one.
            is_byte: `TokenTexts.is_byte` of the tokenizer.
            thoughts: the answer's reasoning, if it may have any.
        """
        self._text_of, self._is_byte, self._thoughts = decoded_text, is_byte, thoughts
        self._stops = tuple(stops)
        self._tagged = () if thoughts is None else tuple(filter(thoughts.is_tagged, stops))
        self._reach = max(map(len, stops)) + SLACK
        self._is_thinking, self._is_blank = False, True

    def __call__(self, token_ids: list[int], checked: int) -> int | None:
        """Return the fewest tokens whose text has a stop string; None without one, as for the first `checked` tokens.

        A request that loses its tokens begins again with none of them checked.
        """
        begin, counts = self._begin(token_ids, checked), range(checked + 1, len(token_ids) + 1)
        window = self._text_of(token_ids[begin:])
        stops = self._possible(window, token_ids, checked)
        # Later bytes may make the text of earlier ones invalid, so that only a part of the tokens has the stop string.
        if not any(map(self._is_byte, token_ids[checked:])) and not any(stop in window for stop in stops):
            return None
        for count in counts:
            window = self._text_of(token_ids[begin:count])
            # A window may begin in the middle of a character or of a thought: all of the text decides.
            text = self._text_of(token_ids[:count]) if any(stop in window for stop in stops) else ""
            if find_stop(text, stops, self._thoughts) is not None:
                return count
        return None

    def _possible(self, window: str, token_ids: list[int], checked: int) -> tuple[str, ...]:
        """Return the stop strings that new tokens may complete; note if the answer then thinks, or has no content."""
        if self._thoughts is None:
            return self._stops
        if not checked:
            self._is_thinking, self._is_blank = self._thoughts.is_begun, True
        was_thinking = self._is_thinking
        opened = [(found.end(), True) for found in self._thoughts.open.finditer(window)]
        closed = [(found.end(), False) for found in self._thoughts.close.finditer(window)]
        end, self._is_thinking = max([(0, was_thinking), *opened, *closed])
        # Without a whole tag in it, the window may begin with a part of one.
        last = window[end:] if end else self._text_of(token_ids[checked:])
        self._is_blank = (end > 0 or self._is_blank) and not last.strip()
        has_content = closed if was_thinking else opened or not self._is_blank
        return self._stops if has_content else self._tagged

    def _begin(self, token_ids: list[int], checked: int) -> int:
        """Return the index to search from; no stop string that ends in the unchecked tokens can begin before it."""
        tokens = self._reach
        while tokens < checked and len(self._text_of(token_ids[checked - tokens : checked])) < self._reach:
            tokens *= 2  # control tokens have no text, and some characters take several tokens
        begin = max(0, checked - tokens)
        while begin and self._is_byte(token_ids[begin]):  # a part of such a text may be invalid
            begin -= 1
        return begin


def find_stop(text: str, stops: Sequence[str], thoughts: Thoughts | None = None) -> tuple[int, str] | None:
    """Return the first stop string of a text outside of reasoning, behind its index; None if there is none.

    >>> find_stop("yes. No.", ["No", "."]), find_stop("yes", ["."])
    ((3, '.'), None)
    """
    whole = [(0, len(text))]
    spans = whole if thoughts is None else list(thoughts.content_spans(text))
    found = []
    for stop in stops:
        for first, last in whole if thoughts is not None and thoughts.is_tagged(stop) else spans:
            start = text.find(stop, first, last)
            if start >= 0:
                # If two begin at one index, the shorter one ended the answer.
                found.append((start, len(stop), stop))
                break
    if not found:
        return None
    start, _, stop = min(found)
    return start, stop
