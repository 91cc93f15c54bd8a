"""Packing and padding of token sequences into tables: several sequences per row, or one.

A `Packing` is planned on the host from lengths alone; `pack` writes values per token into a `[B T]` table and `unpack`
reads them back. With the `segment_ids` and `positions` of a packed table the model sees the same sequences as in a
padded one, and losses and gradients are equal up to rounding.
Letters: `N` sequences, `B` rows of a table, `T` tokens of a row.
"""

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int


class Packing(NamedTuple):
    """Position of each sequence in a table: `lengths[i]` tokens in row `rows[i]`, from column `starts[i]` on.

    `height` and `width` are the numbers of rows and columns. Rows without a sequence are padding.
    """

    rows: Int[np.ndarray, "N"]
    starts: Int[np.ndarray, "N"]
    lengths: Int[np.ndarray, "N"]
    height: int
    width: int


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
    for row, start, length, numbers in zip(packing.rows, packing.starts, packing.lengths, values, strict=True):
        table[row, start : start + length] = numbers
    return table


def unpack(packing: Packing, table: Any) -> list[np.ndarray]:
    """Read the values of each sequence from a `[B T]` table, one array per sequence.

    >>> unpack(plan_packing([2, 1], width=4), np.array([[7, 8, 9, 0]]))
    [array([7, 8]), array([9])]
    """
    spans = zip(packing.rows, packing.starts, packing.lengths, strict=True)
    return [np.asarray(table[row, start : start + length]) for row, start, length in spans]


class TokenIndex(NamedTuple):
    """Indices of all tokens, sequence by sequence.

    Attributes:
        tokens: row and column in the packed table.
        places: row and column in a table with one sequence per row: index of the sequence, and position in it.
    """

    tokens: tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]
    places: tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]


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
    return TokenIndex((rows, columns), (np.repeat(np.arange(len(lengths)), lengths), positions))


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


def _check_lengths(lengths: Sequence[int], width: int) -> None:
    longest = max(lengths, default=0)
    if longest > width:
        raise ValueError(f"a sequence has {longest} tokens and rows have {width}; make the rows wider")
