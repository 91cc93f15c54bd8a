"""Index of an engine's prefix cache: the prompts in it, and the plan to prefill the missing tokens of a new prompt.

A row of the prefix cache holds one prompt, and so all prefixes of it that end at its boundaries. A prompt is split at
its boundaries, and then into chunks of a few fixed widths; both depend on the prompt and its boundaries alone. So a
cached prefix has the bits that a new prefill would have: evicting a row costs time and changes no result. This module
does not touch the device.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 16, 512
"""The padded width of a chunk is a power of two between these."""

Key = tuple[tuple[int, ...], bytes]
"""A prefix of a prompt: the boundaries up to its end, and its tokens."""


class PrefillChunk(NamedTuple):
    """Tokens that one program prefills at consecutive positions of a row of the prefix cache."""

    row: int
    start: int
    tokens: tuple[int, ...]

    @property
    def width(self) -> int:
        """The padded number of tokens."""
        return chunk_width(len(self.tokens))


class Copy(NamedTuple):
    """The first `tokens` tokens of one row of the prefix cache, to be copied to another row."""

    source: int
    target: int
    tokens: int


@dataclass
class PrefillPlan:
    """The work that puts a prompt into the prefix cache: a copy, if any, and then its chunks one after the other.

    Attributes:
        row: the row that will hold the prompt.
        copy: the copy of a cached prefix into that row; None if there is none, or it is in the row already.
        chunks: the tokens to prefill, in order.
        reused_tokens: the number of tokens that need no prefill.
    """

    row: int
    copy: Copy | None = None
    chunks: list[PrefillChunk] = field(default_factory=list)
    reused_tokens: int = 0


def chunk_width(tokens: int) -> int:
    """Return the padded width of a chunk: the next power of two, at least 16.

    >>> [chunk_width(n) for n in (1, 33, 64, 65)]
    [16, 64, 64, 128]
    """
    return max(MIN_CHUNK_TOKENS, 1 << (tokens - 1).bit_length())


class PrefixCache:
    """The index of a prefix cache with `rows` rows; the least recently used row is evicted first."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._keys: list[list[Key]] = []  # of each row, the shortest prefix first
        self._row_of: dict[Key, int] = {}
        self._last_used: list[int] = []
        self._clock = 0
        self._pinned: set[int] = set()
        self._unwritten: set[int] = set()
        self.clear()

    def clear(self) -> None:
        """Remove all prompts, as the weights change or an error may have lost the arrays."""
        self._keys = [[] for _ in range(self.rows)]
        self._row_of, self._last_used = {}, [0] * self.rows
        self.commit()

    def commit(self) -> None:
        """Record that all plans so far have been carried out and their rows copied into slots."""
        self._pinned, self._unwritten = set(), set()

    def plan(self, prompt_ids: tuple[int, ...], prefix_boundaries: tuple[int, ...]) -> PrefillPlan | None:
        """Plan the prefill of all tokens of a prompt but the last, which the first decoding step takes.

        The plan is None when earlier plans must be carried out first: carry them out, `commit`, and plan again.

        Args:
            prefix_boundaries: see `Request`.
        """
        ends = (*(boundary for boundary in prefix_boundaries if boundary < len(prompt_ids) - 1), len(prompt_ids) - 1)
        if ends[-1] == 0:
            return PrefillPlan(0)  # a prompt of one token: there is nothing to prefill
        keys = _prefix_keys(prompt_ids, ends)
        known = next((index for index in reversed(range(len(keys))) if keys[index] in self._row_of), -1)
        if known == len(keys) - 1:
            row = self._row_of[keys[known]]
            self._use(row)
            return PrefillPlan(row, reused_tokens=ends[-1])
        plan = self._plan_row(keys, known, ends)
        if plan is None:
            return None
        starts = (0, *ends)
        for index in range(known + 1, len(ends)):
            plan.chunks += _split(plan.row, starts[index], prompt_ids[starts[index] : ends[index]])
        return plan

    def _plan_row(self, keys: list[Key], known: int, ends: tuple[int, ...]) -> PrefillPlan | None:
        """Make a plan, without chunks yet, for a row that holds the prefixes up to index `known` (-1: none)."""
        if known < 0:
            row = self._free_row()
            return None if row is None else self._claim(PrefillPlan(row), keys)
        source, tokens = self._row_of[keys[known]], ends[known]
        if source in self._unwritten:
            return None  # it would be read before it is written
        if self._keys[source][-1] == keys[known]:
            return self._claim(PrefillPlan(source, reused_tokens=tokens), keys)  # the row is extended
        self._pinned.add(source)
        row = self._free_row()
        if row is None:
            return None
        self._use(source)
        return self._claim(PrefillPlan(row, Copy(source, row, tokens), reused_tokens=tokens), keys)

    def _claim(self, plan: PrefillPlan, keys: list[Key]) -> PrefillPlan:
        row = plan.row
        for key in self._keys[row]:
            if key not in keys and self._row_of.get(key) == row:
                del self._row_of[key]
        self._keys[row] = keys
        # A prefix that another row holds too stays with that row.
        self._row_of |= {key: row for key in keys if key not in self._row_of}
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


def _prefix_keys(prompt_ids: tuple[int, ...], ends: tuple[int, ...]) -> list[Key]:
    data = np.asarray(prompt_ids, np.int32).tobytes()
    return [(ends[: index + 1], data[: 4 * end]) for index, end in enumerate(ends)]


def _split(row: int, start: int, tokens: tuple[int, ...]) -> list[PrefillChunk]:
    return [
        PrefillChunk(row, start + first, tokens[first : first + MAX_CHUNK_TOKENS])
        for first in range(0, len(tokens), MAX_CHUNK_TOKENS)
    ]
