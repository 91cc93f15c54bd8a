"""Where sequences of different lengths lie in a rectangle: a row each, or several to a row.

A layout is made on the host from lengths alone; `place` and `take` carry numbers per token in and out. With
`segment_ids` and `positions` of a packed layout the model sees the same sequences as with a padded one, and losses and
gradients are the same. Letters: `N` sequences, `B` physical rows, `T` tokens of a row.
"""

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int


class Layout(NamedTuple):
    """Sequence i lies in row `rows[i]`, from `starts[i]` on, and is `lengths[i]` long."""

    rows: Int[np.ndarray, "N"]
    starts: Int[np.ndarray, "N"]
    lengths: Int[np.ndarray, "N"]
    height: int
    width: int


def padded_layout(lengths: Sequence[int], width: int) -> Layout:
    """Every sequence in a row of its own.

    Raises:
        ValueError: a sequence is longer than the rows.

    >>> print(padded_layout([2, 5], width=6).rows)
    [0 1]
    """
    _check_lengths(lengths, width)
    count = len(lengths)
    return Layout(np.arange(count), np.zeros(count, np.int64), np.array(lengths, np.int64), count, width)


def packed_layout(lengths: Sequence[int], width: int) -> Layout:
    """Few rows: longest first, each into the fullest row that still has room (best fit decreasing).

    Raises:
        ValueError: a sequence is longer than the rows.

    >>> layout = packed_layout([2, 5, 3, 1], width=6)
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
    return Layout(rows, starts, np.array(lengths, np.int64), height, width)


def place(layout: Layout, values: Sequence[Any], dtype: Any, height: int | None = None) -> np.ndarray:
    """Each sequence's numbers (or one number for all its tokens) in their place, `[B T]`; 0 elsewhere.

    Args:
        height: rows of the result, if more than the layout's own: filling rows hold 0.

    >>> place(packed_layout([2, 1], width=4), [[7, 8], [9]], int)
    array([[7, 8, 9, 0]])
    """
    table = np.zeros((height or layout.height, layout.width), dtype)
    for row, start, length, numbers in zip(layout.rows, layout.starts, layout.lengths, values, strict=True):
        table[row, start : start + length] = numbers
    return table


def take(layout: Layout, table: Any) -> list[np.ndarray]:
    """What `place` put there, one array per sequence.

    >>> take(packed_layout([2, 1], width=4), np.array([[7, 8, 9, 0]]))
    [array([7, 8]), array([9])]
    """
    spans = zip(layout.rows, layout.starts, layout.lengths, strict=True)
    return [np.asarray(table[row, start : start + length]) for row, start, length in spans]


def segments(layout: Layout, height: int | None = None) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
    """`segment_ids`, counted from 1 in each row with 0 for padding, and `positions`, from 0 in each segment.

    >>> ids, positions = segments(packed_layout([2, 1], width=4))
    >>> print(ids, positions)
    [[1 1 2 0]] [[0 1 0 0]]
    """
    order = np.lexsort((layout.starts, layout.rows))
    nth = np.zeros(len(order), np.int64)
    seen = np.zeros(max(layout.height, 1), np.int64)
    for i in order:
        seen[layout.rows[i]] += 1
        nth[i] = seen[layout.rows[i]]
    ids = place(layout, list(nth), np.int32, height)
    return ids, place(layout, [np.arange(length) for length in layout.lengths], np.int32, height)


def _check_lengths(lengths: Sequence[int], width: int) -> None:
    longest = max(lengths, default=0)
    if longest > width:
        raise ValueError(f"a sequence has {longest} tokens and rows have {width}; make the rows wider")
