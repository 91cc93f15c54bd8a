"""Where sequences of different lengths lie in a rectangle: a row each, or several to a row.

A layout is made on the host from lengths alone; `pack` and `unpack` carry numbers per token in and out. With
`segment_ids` and `positions` of a packed layout the model sees the same sequences as with a padded one, and losses and
gradients are the same. Letters: `N` sequences, `B` physical rows, `T` tokens of a row.
"""

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int


class Packing(NamedTuple):
    """Sequence i lies in row `rows[i]`, from `starts[i]` on, and is `lengths[i]` long."""

    rows: Int[np.ndarray, "N"]
    starts: Int[np.ndarray, "N"]
    lengths: Int[np.ndarray, "N"]
    height: int
    width: int


def plan_padding(lengths: Sequence[int], width: int) -> Packing:
    """Every sequence in a row of its own.

    Raises:
        ValueError: a sequence is longer than the rows.

    >>> print(plan_padding([2, 5], width=6).rows)
    [0 1]
    """
    _check_lengths(lengths, width)
    count = len(lengths)
    return Packing(np.arange(count), np.zeros(count, np.int64), np.array(lengths, np.int64), count, width)


def plan_packing(lengths: Sequence[int], width: int) -> Packing:
    """Few rows: longest first, each into the fullest row that still has room (best fit decreasing).

    Raises:
        ValueError: a sequence is longer than the rows.

    >>> layout = plan_packing([2, 5, 3, 1], width=6)
    >>> print(layout.rows, layout.starts, layout.height)  # 5 + 1 and 3 + 2
    [1 0 1 0] [3 0 0 5] 2
    """
    _check_lengths(lengths, width)
    rows, starts = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    height = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(room, (lengths[i], -1))
        if place == len(room):
            free, row, height = width, height, height + 1
        else:
            free, row = room.pop(place)
        rows[i], starts[i] = row, width - free
        bisect.insort(room, (free - lengths[i], row))
    return Packing(rows, starts, np.array(lengths, np.int64), height, width)


def pack(packing: Packing, values: Sequence[Any], dtype: Any, height: int | None = None) -> np.ndarray:
    """Each sequence's numbers (or one number for all its tokens) in their place, `[B T]`; 0 elsewhere.

    Args:
        height: rows of the result, if more than the layout's own: filling rows hold 0.

    >>> pack(plan_packing([2, 1], width=4), [[7, 8], [9]], int)
    array([[7, 8, 9, 0]])
    """
    table = np.zeros((height or packing.height, packing.width), dtype)
    for row, start, length, numbers in zip(packing.rows, packing.starts, packing.lengths, values, strict=True):
        table[row, start : start + length] = numbers
    return table


def unpack(packing: Packing, table: Any) -> list[np.ndarray]:
    """What `pack` put there, one array per sequence.

    >>> unpack(plan_packing([2, 1], width=4), np.array([[7, 8, 9, 0]]))
    [array([7, 8]), array([9])]
    """
    spans = zip(packing.rows, packing.starts, packing.lengths, strict=True)
    return [np.asarray(table[row, start : start + length]) for row, start, length in spans]


def segments(packing: Packing, height: int | None = None) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
    """`segment_ids`, counted from 1 in each row with 0 for padding, and `positions`, from 0 in each segment.

    >>> ids, positions = segments(plan_packing([2, 1], width=4))
    >>> print(ids, positions)
    [[1 1 2 0]] [[0 1 0 0]]
    """
    order = np.lexsort((packing.starts, packing.rows))
    nth = np.zeros(len(order), np.int64)
    seen = np.zeros(max(packing.height, 1), np.int64)
    for i in order:
        seen[packing.rows[i]] += 1
        nth[i] = seen[packing.rows[i]]
    ids = pack(packing, list(nth), np.int32, height)
    return ids, pack(packing, [np.arange(length) for length in packing.lengths], np.int32, height)


def _check_lengths(lengths: Sequence[int], width: int) -> None:
    longest = max(lengths, default=0)
    if longest > width:
        raise ValueError(f"a sequence has {longest} tokens and rows have {width}; make the rows wider")
