"""Trajectories as arrays for one update, in an order that depends on nothing but which episodes they are."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxft.core.packing import Layout, packed_layout, padded_layout, place, segments
from jaxft.core.types import Batch
from jaxft.harness.data_models import Trajectory
from jaxft.policy.sequences import TokenSequence

RECORDED = {
    "tokens": np.int32,
    "completion_mask": np.bool_,
    "temperatures": np.float32,
    "sampler_logprobs": np.float32,
    "behavior_logprobs": np.float32,
}
"""What a sequence brings along, and the type it has in a batch."""


@dataclass
class Row:
    """One training row: a sequence, which trajectory it is part of, and what was found out about its tokens.

    Attributes:
        trajectory: its number among those of the job.
        signals: numbers per token (or one for all of them) by the name of the batch's field.
    """

    sequence: TokenSequence
    trajectory: int
    signals: dict[str, Any] = field(default_factory=dict)


class PlacedBatch(NamedTuple):
    """A batch, how many of its rows make a microbatch, and where each sequence lies in it."""

    batch: Batch
    microbatch_rows: int
    layout: Layout


def sort_trajectories(groups: list[list[Trajectory]]) -> list[Trajectory]:
    """All trajectories by (example, generation): the order in which episodes happened to end is forgotten.

    Examples keep the order of their groups.
    """
    return [
        trajectory
        for group in groups
        for trajectory in sorted(group, key=lambda trajectory: trajectory.generation or 0)
    ]


def padded_width(tokens: int) -> int:
    """The width of a batch whose longest row has so many tokens: at most an eighth of it is padding, or 15 tokens.

    >>> [padded_width(n) for n in (5, 80, 81, 300, 513)]
    [16, 80, 96, 320, 576]
    """
    step = max(16, (1 << (tokens - 1).bit_length()) // 16)
    return -(-tokens // step) * step


def rounded_count(count: int) -> int:
    """A number of rows, or of microbatches, that few batches differ in: at most a quarter more.

    >>> [rounded_count(n) for n in (1, 7, 9, 17, 37)]
    [1, 7, 10, 20, 40]
    """
    step = max(1, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step


def divided(count: int, largest: int) -> tuple[int, int]:
    """Into how many microbatches so many rows are divided, and how many rows each has: at most `largest`.

    >>> [divided(n, 16) for n in (3, 9, 16, 17, 160)]
    [(1, 3), (1, 10), (1, 16), (2, 16), (10, 16)]
    """
    rows = min(largest, rounded_count(count))
    return rounded_count(-(-count // rows)), rows


def make_batch(rows: list[Row], *, microbatch_tokens: int, packing: bool = False, pairs: bool = False) -> PlacedBatch:
    """The batch of these rows, packed where that is allowed and saves work; `pairs` of rows stay together.

    Width and height are rounded up, so that batches of about the same size (some episodes failed, some answers are
    longer) share a compiled program. Filling rows train nothing.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("there are no rows to make a batch of")
    lengths = [len(row.sequence.tokens) for row in rows]
    width = padded_width(max(lengths))
    unit = 2 if pairs else 1
    largest = max(1, microbatch_tokens // width // unit)
    layout = padded_layout(lengths, width)
    microbatches, microbatch_rows = divided(len(rows) // unit, largest)
    if packing:
        packed = packed_layout(lengths, width)
        fewer = divided(packed.height, largest)
        if math.prod(fewer) < microbatches * microbatch_rows:
            layout, (microbatches, microbatch_rows) = packed, fewer
    microbatch_rows *= unit
    height = microbatches * microbatch_rows
    is_packed = layout.height < len(rows)

    fields: dict[str, Any] = {
        name: place(layout, [dict(row.sequence)[name] for row in rows], dtype, height)
        for name, dtype in RECORDED.items()
    }
    for name in rows[0].signals:
        values = [row.signals[name] for row in rows]
        if name == "advantages" and not is_packed and all(np.ndim(value) == 0 for value in values):
            fields[name] = np.zeros(height, np.float32)
            fields[name][: len(rows)] = values
        else:
            fields[name] = place(layout, values, np.float32, height)
    batch = Batch(**fields)
    if is_packed:
        ids: dict[str, Any] = dict(zip(("segment_ids", "positions"), segments(layout, height), strict=True))
        batch = batch._replace(**ids)
    return PlacedBatch(batch, microbatch_rows, layout)
