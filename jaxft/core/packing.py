"""Packing and padding of token sequences into tables: several sequences per row, or one; a shared beginning once.

A `Packing` is planned on the host from lengths alone; `pack` writes values per token into a `[B T]` table and `unpack`
reads them back. With the `segment_ids` and `positions` of a packed table the model sees the same sequences as in a
padded one, and losses and gradients are equal up to rounding.
Letters: `N` sequences, `B` rows of a table, `T` tokens of a row.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int


@jax.tree_util.register_static
@dataclass(frozen=True)
class Branches:
    """Columns of a row whose sequences share their first tokens: a prefix, then branches of one width.

    The prefix ends at column `prefix_tokens`, with its padding on the left, so that prefix and first branch are
    adjacent and hold a whole sequence; each further branch holds the rest of another one. The layout is static: it is
    part of the structure of a batch, not an array.

    Attributes:
        prefix_tokens: columns of the prefix.
        count: number of branches; they divide the other columns.
    """

    prefix_tokens: int
    count: int

    def width(self, branch_tokens: int) -> int:
        """Return the columns of a row with branches of so many columns."""
        return self.prefix_tokens + self.count * branch_tokens


class Family(NamedTuple):
    """Sequences that begin with the same `shared` tokens; only the first of `members` may have trained ones in them."""

    members: list[int]
    shared: int


class Packing(NamedTuple):
    """Position of each sequence in a table: `lengths[i]` tokens in row `rows[i]`, from column `starts[i]` on.

    `height` and `width` are the numbers of rows and columns. Rows without a sequence are padding. With `branches`, the
    first `shared[i]` tokens of a sequence are those of another one, at the end of the row's prefix, and `starts[i]` is
    the column of the first token behind them; they count in `lengths[i]`.
    """

    rows: Int[np.ndarray, "N"]
    starts: Int[np.ndarray, "N"]
    lengths: Int[np.ndarray, "N"]
    height: int
    width: int
    shared: Int[np.ndarray, "N"] | None = None
    branches: Branches | None = None

    @property
    def own(self) -> list[tuple[int, int, int, int]]:
        """Row, first column, number of tokens and number of shared tokens before them, of each sequence's own span."""
        shared = np.zeros_like(self.lengths) if self.shared is None else self.shared
        spans = zip(self.rows, self.starts, self.lengths - shared, shared, strict=True)
        return [(int(row), int(start), int(count), int(first)) for row, start, count, first in spans]


def plan_padding(lengths: Sequence[int], width: int) -> Packing:
    """Plan a table with one sequence per row, in order.

    Raises:
        ValueError: a sequence is longer than the rows.

    >>> print(plan_padding([2, 5], width=6).rows)
    [0 1]
    """
    _check_lengths(lengths, width)
    count = len(lengths)
    return Packing(np.arange(count), np.zeros(count, np.int64), np.array(lengths, np.int64), count, width)


def plan_packing(lengths: Sequence[int], width: int, most: int | None = None) -> Packing:
    """Plan a table of few rows by best fit decreasing: longest first, each into the fullest row with room for it.

    Args:
        lengths: tokens of each sequence.
        width: tokens of a row.
        most: largest number of sequences in a row; None for any number.

    Raises:
        ValueError: a sequence is longer than the rows.

    >>> packing = plan_packing([2, 5, 3, 1], width=6)
    >>> print(packing.rows, packing.starts, packing.height)  # 5 + 1 and 3 + 2
    [1 0 1 0] [3 0 0 5] 2
    """
    _check_lengths(lengths, width)
    rows, starts = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    counts: list[int] = []  # sequences of each row
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(room, (lengths[i], -1))
        if place == len(room):
            free, row = width, len(counts)
            counts.append(0)
        else:
            free, row = room.pop(place)
        rows[i], starts[i] = row, width - free
        counts[row] += 1
        if counts[row] != most:
            bisect.insort(room, (free - lengths[i], row))
    return Packing(rows, starts, np.array(lengths, np.int64), len(counts), width)


def pack(packing: Packing, values: Sequence[Any] | np.ndarray, dtype: Any, fill: float = 0) -> np.ndarray:
    """Write each sequence's values (or one value for all its tokens) into a `[B T]` table; `fill` elsewhere.

    >>> pack(plan_packing([2, 1], width=4), [[7, 8], [9]], int)
    array([[7, 8, 9, 0]])
    """
    table = np.full((packing.height, packing.width), fill, dtype)
    for (row, start, count, shared), numbers in zip(packing.own, values, strict=True):
        table[row, start : start + count] = numbers[shared:] if shared and np.ndim(numbers) else numbers
    return table


def unpack(packing: Packing, table: Any) -> list[np.ndarray]:
    """Read the values of each sequence from a `[B T]` table, one array per sequence.

    >>> unpack(plan_packing([2, 1], width=4), np.array([[7, 8, 9, 0]]))
    [array([7, 8]), array([9])]
    """
    index, ends = token_index(packing).tokens, np.cumsum(packing.lengths)[:-1]
    return np.split(np.asarray(table)[index], ends)


class TokenIndex(NamedTuple):
    """Indices of all tokens, sequence by sequence.

    Attributes:
        tokens: row and column in the packed table.
        places: row and column in a table with one sequence per row: index of the sequence, and position in it.
        is_own: False for tokens of a sequence that stand in the table as those of another one, which begins alike.
    """

    tokens: tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]
    places: tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]
    is_own: Bool[np.ndarray, "n"]


def token_index(packing: Packing) -> TokenIndex:
    """Return the indices that read and write tables in the order of the sequences.

    >>> index = token_index(plan_packing([2, 1, 3], width=4))  # 3 + 1 and 2
    >>> np.array([[30, 31, 32, 20], [10, 11, 0, 0]])[index.tokens]
    array([10, 11, 20, 30, 31, 32])
    >>> print(index.places[0], index.places[1])
    [0 0 1 2 2 2] [0 1 0 0 1 2]
    """
    lengths = packing.lengths
    first = np.cumsum(lengths) - lengths  # index of each sequence's first token among all tokens
    positions = np.arange(lengths.sum()) - np.repeat(first, lengths)
    rows, columns = np.repeat(packing.rows, lengths), np.repeat(packing.starts, lengths) + positions
    is_own = np.ones(len(positions), bool)
    if packing.shared is not None and packing.branches is not None:
        shared = np.repeat(packing.shared, lengths)
        is_own = positions >= shared
        columns = np.where(is_own, columns, packing.branches.prefix_tokens + positions) - shared
    return TokenIndex((rows, columns), (np.repeat(np.arange(len(lengths)), lengths), positions), is_own)


def segments(packing: Packing) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
    """Return `segment_ids`, counted from 1 in each row with 0 for padding, and `positions`, from 0 in each segment.

    >>> ids, positions = segments(plan_packing([2, 1], width=4))
    >>> print(ids, positions)
    [[1 1 2 0]] [[0 1 0 0]]
    """
    nth, seen = np.zeros(len(packing.rows), np.int64), np.zeros(packing.height, np.int64)
    for i in np.lexsort((packing.starts, packing.rows)):
        seen[packing.rows[i]] += 1
        nth[i] = seen[packing.rows[i]]
    return pack(packing, nth, np.int32), pack(packing, [np.arange(n) for n in packing.lengths], np.int32)


def find_families(sequences: Sequence[Sequence[int] | np.ndarray], untrained: Sequence[int]) -> list[Family]:
    """Divide sequences into families that begin alike, so that few tokens are left when each family has them once.

    Neighbours in the order of their tokens are joined, those with the longest common beginning first, as long as that
    leaves fewer tokens. At least one token of each sequence is not shared, and a trained one only within its own.

    Args:
        sequences: token ids of each sequence.
        untrained: number of tokens of each sequence before its first trained one.

    >>> find_families([[1, 2, 3, 4], [7, 8], [1, 2, 3, 5], [1, 6]], untrained=[2, 1, 3, 1])  # the last saves less
    [Family(members=[0, 2], shared=3), Family(members=[3], shared=0), Family(members=[1], shared=0)]
    """
    ids = [np.asarray(each, ">u4") for each in sequences]  # whose bytes sort as the numbers
    order = sorted(range(len(ids)), key=lambda i: ids[i].tobytes())
    common = []
    for one, other in pairwise(order):
        length = max(0, min(len(ids[one]), len(ids[other])) - 1)
        differs = ids[one][:length] != ids[other][:length]
        common.append(int(differs.argmax()) if differs.any() else length)

    def family(first: int, end: int, shared: int) -> Family:
        members = sorted(order[first:end], key=lambda i: (untrained[i], i))
        limits = [untrained[members[1]], *(len(ids[i]) - 1 for i in members)] if len(members) > 1 else [0]
        return Family(members, min(shared, *limits) if len(members) > 1 else 0)

    spans = {first: (first + 1, family(first, first + 1, 0)) for first in range(len(order))}
    first_of = {end: first for first, (end, _) in spans.items()}
    for cut in sorted(range(1, len(order)), key=lambda cut: -common[cut - 1]):
        first, end = first_of[cut], spans[cut][0]
        joined = family(first, end, min(common[first : end - 1]))
        apart = [spans[first][1], spans[cut][1]]
        if _saved(joined) > sum(map(_saved, apart)):
            spans[first] = end, joined
            del spans[cut], first_of[cut]
            first_of[end] = first
    return [spans[first][1] for first in sorted(spans)]


def _saved(family: Family) -> int:
    return (len(family.members) - 1) * family.shared


def plan_branches(
    families: Sequence[Family], lengths: Sequence[int], branches: Branches, branch_tokens: int
) -> Packing:
    """Plan a table in whose rows the sequences of a family share their first tokens, `branches.count` in a row.

    Raises:
        ValueError: the tokens of a sequence do not fit its branch, or shared ones the prefix.

    >>> packing = plan_branches([Family([0, 1], 2)], [3, 4], Branches(3, count=2), branch_tokens=2)
    >>> print(pack(packing, [[7, 8, 1], [7, 8, 2, 3]], int), packing.shared)  # padding, prefix, two branches
    [[0 7 8 1 0 2 3]] [0 2]
    """
    rows, starts, shared = (np.zeros(len(lengths), np.int64) for _ in range(3))
    prefix, height = branches.prefix_tokens, 0
    for members, common in families:
        for begin in range(0, len(members), branches.count):
            for branch, i in enumerate(members[begin : begin + branches.count]):
                shared[i] = common if branch else 0
                # A sequence alone fills the prefix as far as that goes.
                before = max(0, min(prefix, lengths[i] - 1)) if len(members) == 1 else common
                if before > prefix or lengths[i] - before > branch_tokens:
                    raise ValueError(
                        f"sequence {i} has {before} tokens in the prefix and {lengths[i] - before} in a branch; there "
                        f"is room for {prefix} and {branch_tokens}: make the rows wider"
                    )
                rows[i], starts[i] = height, prefix + branch * branch_tokens - (0 if branch else before)
            height += 1
    return Packing(rows, starts, np.array(lengths, np.int64), height, branches.width(branch_tokens), shared, branches)


def _check_lengths(lengths: Sequence[int], width: int) -> None:
    longest = max(lengths, default=0)
    if longest > width:
        raise ValueError(f"a sequence has {longest} tokens and rows have {width}; make the rows wider")
