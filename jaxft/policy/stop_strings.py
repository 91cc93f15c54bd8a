"""Where an answer ends because of what it says: found while it is sampled, in time that grows with its length."""

from collections.abc import Callable, Sequence

SLACK = 8
"""Characters looked at beyond the longest stop string: the first of a part of a text may be rendered otherwise."""


class StopFinder:
    """Called with the tokens sampled so far, again and again: how many of them complete a stop string, or None.

    What was looked at before is looked at again only as far back as a stop string may have begun there.
    """

    def __init__(self, text_of: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        """`text_of` says what tokens say; `stops` holds at least one string, none empty."""
        self._text_of = text_of
        self._stops = tuple(stops)
        self._reach = max(map(len, stops)) + SLACK
        self._checked = 0

    def __call__(self, token_ids: list[int]) -> int | None:
        """The smallest number of tokens whose text contains a stop string; None if all of them do not."""
        checked, self._checked = self._checked, len(token_ids)
        if not self._is_in(token_ids[self._begin(token_ids, checked) :]):
            return None
        counts = range(checked + 1, len(token_ids) + 1)
        return next((count for count in counts if self._is_in(token_ids[:count])), None)

    def _begin(self, token_ids: list[int], checked: int) -> int:
        """A place so far before the unchecked tokens that the text between would hold any stop string but its end."""
        tokens = self._reach
        while tokens < checked and len(self._text_of(token_ids[checked - tokens : checked])) < self._reach:
            tokens *= 2  # control tokens have no text, and some characters several tokens
        return max(0, checked - tokens)

    def _is_in(self, token_ids: list[int]) -> bool:
        text = self._text_of(token_ids)
        return any(stop in text for stop in self._stops)


def cut_at_stop(text: str, stops: Sequence[str], *, include_stop: bool = False) -> str:
    """The text before the first stop string in it; with `include_stop` up to the end of that string.

    >>> cut_at_stop("yes. No.", [".", "No"]), cut_at_stop("yes. No.", [".", "No"], include_stop=True)
    ('yes', 'yes.')
    """
    # Of two that begin at one place the shorter is the one that ended the answer.
    found = [(place, len(stop)) for place, stop in ((text.find(stop), stop) for stop in stops) if place >= 0]
    if not found:
        return text
    place, length = min(found)
    return text[: place + length] if include_stop else text[:place]
