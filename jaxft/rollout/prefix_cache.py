"""Which prompts an engine holds the keys and values of, and what has to be computed for a new one.

A row of the store holds a chain of parts: of a conversation the first prompt, then each answer with what was said to
it. How a prompt is cut into parts, and each part into pieces of a few fixed lengths, depends on the prompt and its
boundaries alone. So what is found in the store is bit for bit what would be computed: forgetting a row costs time and
changes no number. Nothing here touches the device.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

SMALLEST_PIECE, LARGEST_PIECE = 16, 512
"""Tokens of a piece: a power of two between these."""

Key = tuple[tuple[int, ...], bytes]
"""A chain of parts: where each ends, and the tokens of all."""


class PrefillChunk(NamedTuple):
    """Tokens whose keys and values are computed in one go, at consecutive places of a row of the store."""

    row: int
    start: int
    tokens: tuple[int, ...]

    @property
    def width(self) -> int:
        """The padded number of tokens."""
        return chunk_width(len(self.tokens))


class Copy(NamedTuple):
    """Two rows of the store, and how many tokens the second is to take over."""

    source: int
    target: int
    tokens: int


@dataclass
class PrefillPlan:
    """How a prompt comes into the store: a copy, if any, then its pieces one after the other.

    Attributes:
        row: where it will be.
        reused_tokens: of those, how many were there already.
    """

    row: int
    copy: Copy | None = None
    pieces: list[PrefillChunk] = field(default_factory=list)
    reused_tokens: int = 0


def chunk_width(tokens: int) -> int:
    """The padded length of a piece: the next power of two, at least 16.

    >>> [chunk_width(n) for n in (1, 33, 64, 65)]
    [16, 64, 64, 128]
    """
    return max(SMALLEST_PIECE, 1 << (tokens - 1).bit_length())


class PrefixCache:
    """The index of a store with a fixed number of rows; the longest unused goes first."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._chains: list[list[Key]] = []
        self._found: dict[Key, int] = {}
        self._last_used: list[int] = []
        self._clock = 0
        self._pinned: set[int] = set()
        self._unwritten: set[int] = set()
        self.clear()

    def clear(self) -> None:
        """Empties the store: other weights, or an error that may have taken the arrays."""
        self._chains = [[] for _ in range(self.rows)]
        self._found, self._last_used = {}, [0] * self.rows
        self.commit()

    def commit(self) -> None:
        """All plans given so far have been carried out, and their rows been read."""
        self._pinned, self._unwritten = set(), set()

    def plan(self, prompt_ids: tuple[int, ...], prefix_boundaries: tuple[int, ...]) -> PrefillPlan | None:
        """What to do for a prompt; its last token is left for decoding. None: first do what was planned, and `commit`.

        Args:
            prefix_boundaries: see `Request`.
        """
        ends = (*(cut for cut in prefix_boundaries if cut < len(prompt_ids) - 1), len(prompt_ids) - 1)
        if ends[-1] == 0:
            return PrefillPlan(0)  # one token: nothing comes before decoding
        keys = _keys(prompt_ids, ends)
        known = next((place for place in reversed(range(len(keys))) if keys[place] in self._found), -1)
        if known == len(keys) - 1:
            row = self._found[keys[known]]
            self._use(row)
            return PrefillPlan(row, reused_tokens=ends[-1])
        plan = self._place(keys, known, ends)
        if plan is None:
            return None
        starts = (0, *ends)
        for place in range(known + 1, len(ends)):
            plan.pieces += _pieces(plan.row, starts[place], prompt_ids[starts[place] : ends[place]])
        return plan

    def _place(self, keys: list[Key], known: int, ends: tuple[int, ...]) -> PrefillPlan | None:
        """A row that holds the known parts, to be made the row of all."""
        if known < 0:
            row = self._free_row()
            return None if row is None else self._take(PrefillPlan(row), keys)
        source, tokens = self._found[keys[known]], ends[known]
        if source in self._unwritten:
            return None  # it would be read before it has been written
        if self._chains[source][-1] == keys[known]:
            return self._take(PrefillPlan(source, reused_tokens=tokens), keys)  # it grows where it is
        self._pinned.add(source)
        row = self._free_row()
        if row is None:
            return None
        self._use(source)
        return self._take(PrefillPlan(row, Copy(source, row, tokens), reused_tokens=tokens), keys)

    def _take(self, plan: PrefillPlan, keys: list[Key]) -> PrefillPlan:
        row = plan.row
        for key in self._chains[row]:
            if key not in keys and self._found.get(key) == row:
                del self._found[key]
        self._chains[row] = keys
        # A part that another row holds too stays that row's.
        self._found |= {key: row for key in keys if key not in self._found}
        self._unwritten.add(row)
        self._use(row)
        return plan

    def _use(self, row: int) -> None:
        self._clock += 1
        self._last_used[row] = self._clock
        self._pinned.add(row)

    def _free_row(self) -> int | None:
        candidates = [row for row in range(self.rows) if row not in self._pinned]
        return min(candidates, key=self._last_used.__getitem__, default=None)


def _keys(prompt_ids: tuple[int, ...], ends: tuple[int, ...]) -> list[Key]:
    whole = np.asarray(prompt_ids, np.int32).tobytes()
    return [(ends[: place + 1], whole[: 4 * end]) for place, end in enumerate(ends)]


def _pieces(row: int, start: int, tokens: tuple[int, ...]) -> list[PrefillChunk]:
    return [
        PrefillChunk(row, start + first, tokens[first : first + LARGEST_PIECE])
        for first in range(0, len(tokens), LARGEST_PIECE)
    ]
