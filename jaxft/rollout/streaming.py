"""An answer as it is sampled: where a stop string ends it, and its text in pieces that later tokens never change."""

from collections.abc import Callable, Sequence

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
        self._ids: list[int] = []
        self._start = 0  # first token that is decoded again
        self._end = 0  # number of tokens at the last complete character
        self._num_known = 0  # characters of these tokens' text that were returned

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that the tokens add; a character whose bytes are not complete waits for the next tokens."""
        self._ids += token_ids
        end = self._num_certain()
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

    def _num_certain(self) -> int:
        """Return the number of tokens before single bytes at the end, among which tokens without text may stand."""
        certain = end = len(self._ids)
        while end and (self._is_byte(self._ids[end - 1]) or not self._decode(self._ids[end - 1 : end])):
            end -= 1
            if self._is_byte(self._ids[end]):
                certain = end
        return certain


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
        """
        self._index, self._on_delta, self._stops = index, on_delta, tuple(stops)
        self._decoder = TextDecoder(decode, is_byte)
        self._held = ""
        self._parser = None if template is None else make_parser(template, prompt_text)
        has_reasoning = template is not None and "reasoning_content" in template.fields
        self._content = _FieldText(keeps_end=self._parser is None, keeps_start=not has_reasoning)
        self._reasoning = _FieldText(keeps_end=False, keeps_start=False)
        self._is_open = True  # False after a tool call or a stop string begins: `finish` delivers the rest
        if prefill and self._parser is not None:
            self._parse(prefill)

    def feed(self, token_ids: list[int], logprobs: list[float]) -> None:
        """Take newly sampled tokens."""
        if self._is_open:
            text = self._held + self._decoder.feed(token_ids)
            held = self._num_held(text)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
            if any(stop in text for stop in self._stops):
                self._is_open = False
            elif self._parser is None:
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

    def _num_held(self, text: str) -> int:
        """Return the number of last characters that may begin a stop string."""
        ends = (
            length
            for stop in self._stops
            for length in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:length])
        )
        return max(ends, default=0)

    def _parse(self, text: str) -> None:
        assert self._parser is not None
        try:
            events = self._parser.feed(text)
        except (
            ValueError,
            TypeError,
            KeyError,
            RecursionError,
        ):  # a malformed tool call: `ParsedAnswer` says what it is
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
    """Text that grows, with or without the spaces at its start and its end; what is certain is taken piece by piece."""

    def __init__(self, *, keeps_start: bool, keeps_end: bool) -> None:
        self._keeps_start, self._keeps_end = keeps_start, keeps_end
        self._text = ""
        self._taken = 0

    def add(self, text: str) -> None:
        self._text += text if self._keeps_start or self._text else text.lstrip()

    def take(self) -> str:
        """Return the text since the last call, without spaces that may turn out to be its end."""
        certain = self._text if self._keeps_end else self._text.rstrip()
        start, self._taken = self._taken, max(self._taken, len(certain))
        return certain[start:]

    def rest(self, whole: str) -> str:
        """Return what is left of the whole text."""
        taken = self._text[: self._taken]
        return whole[len(taken) :] if whole.startswith(taken) else ""


SLACK = 8
"""Characters searched back beyond the longest stop string: the first ones may be decoded differently without earlier
tokens."""


class StopFinder:
    """Finds the token that completes a stop string; called repeatedly with all tokens sampled so far.

    Each call searches only the new tokens, and the tokens before them in which a stop string may begin.
    """

    def __init__(
        self,
        text_of: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        is_byte: Callable[[int], bool] = lambda token_id: False,
    ) -> None:
        """Make a finder.

        Args:
            text_of: decodes tokens.
            stops: at least one string, and no empty one.
            is_byte: `TokenTexts.is_byte` of the tokenizer.
        """
        self._text_of, self._is_byte = text_of, is_byte
        self._stops = tuple(stops)
        self._reach = max(map(len, stops)) + SLACK
        self._checked = 0

    def __call__(self, token_ids: list[int]) -> int | None:
        """Return the fewest tokens whose text contains a stop string; None if the text of all tokens contains none."""
        checked, self._checked = self._checked, len(token_ids)
        begin, counts = self._begin(token_ids, checked), range(checked + 1, len(token_ids) + 1)
        # Later bytes may make the text of earlier ones invalid, so that only a part of the tokens has the stop string.
        if not any(map(self._is_byte, token_ids[checked:])) and not self._is_in(token_ids[begin:]):
            return None
        found = (count for count in counts if self._is_in(token_ids[begin:count]) and self._is_in(token_ids[:count]))
        return next(found, None)

    def _begin(self, token_ids: list[int], checked: int) -> int:
        """Return the index to search from; no stop string that ends in the unchecked tokens can begin before it."""
        tokens = self._reach
        while tokens < checked and len(self._text_of(token_ids[checked - tokens : checked])) < self._reach:
            tokens *= 2  # control tokens have no text, and some characters take several tokens
        begin = max(0, checked - tokens)
        while begin and self._is_byte(token_ids[begin]):  # a part of such a text may be invalid
            begin -= 1
        return begin

    def _is_in(self, token_ids: list[int]) -> bool:
        text = self._text_of(token_ids)
        return any(stop in text for stop in self._stops)


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return the first stop string of a text, behind its index; None if the text contains none.

    >>> find_stop("yes. No.", ["No", "."]), find_stop("yes", ["."])
    ((3, '.'), None)
    """
    # If two begin at one index, the shorter one ended the answer.
    found = [(start, len(stop), stop) for start, stop in ((text.find(stop), stop) for stop in stops) if start >= 0]
    if not found:
        return None
    start, _, stop = min(found)
    return start, stop


def cut_at_stop(text: str, stops: Sequence[str], *, include_stop: bool = False) -> str:
    """Return the text before its first stop string; with `include_stop`, up to the end of that string.

    >>> cut_at_stop("yes. No.", [".", "No"]), cut_at_stop("yes. No.", [".", "No"], include_stop=True)
    ('yes', 'yes.')
    """
    found = find_stop(text, stops)
    if found is None:
        return text
    start, stop = found
    return text[: start + len(stop)] if include_stop else text[:start]
