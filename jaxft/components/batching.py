"""Trajectories as arrays for one update, in an order that depends on nothing but which episodes they are."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
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
        bootstrap_value: the value head's output after the last token if a length limit cut the episode there; otherwise
            0.
    """

    sequence: TokenSequence
    trajectory: int
    signals: dict[str, Any] = field(default_factory=dict)
    bootstrap_value: float = 0.0


class PlacedBatch(NamedTuple):
    """A batch, rows and width of each microbatch, and where each sequence lies in the batch."""

    batch: Batch
    microbatch_shapes: tuple[tuple[int, int], ...]
    layout: Layout

    def microbatches(self) -> list[Batch]:
        """The rows of the batch in parts, each as wide as its own rows need."""
        ends = list(itertools.accumulate(rows for rows, _ in self.microbatch_shapes))
        return [
            _cut(self.batch, slice(end - rows, end), width)
            for end, (rows, width) in zip(ends, self.microbatch_shapes, strict=True)
        ]


def _cut(batch: Batch, rows: slice, width: int) -> Batch:
    return jax.tree.map(lambda table: table[rows, :width], batch)


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
    """The width of a batch whose longest row has so many tokens: 16, 32, 48, 64, 96, 128, 192, 256, ...

    >>> [padded_width(n) for n in (5, 80, 97, 300, 513)]
    [16, 96, 128, 384, 768]
    """
    power = max(16, 1 << (tokens - 1).bit_length())
    return power * 3 // 4 if power >= 64 and tokens <= power * 3 // 4 else power


def microbatch_shapes(lengths: Sequence[int], microbatch_tokens: int, unit: int = 1) -> tuple[tuple[int, int], ...]:
    """Rows and width of the microbatches that rows are divided into, the longest first.

    A microbatch is as wide as its longest row, and has as many rows as its tokens allow, or a half, a quarter or an
    eighth of that: few shapes are compiled and little is filled up.

    Args:
        lengths: of units of rows, descending.

    >>> [microbatch_shapes([16] * n, 256) for n in (3, 9, 17)]
    [((4, 16),), ((8, 16), (2, 16)), ((16, 16), (2, 16))]
    >>> microbatch_shapes([64] + [16] * 20, 256)
    ((4, 64), (16, 16), (2, 16))
    """
    shapes: list[tuple[int, int]] = []
    done = 0
    while done < len(lengths):
        width = padded_width(lengths[done])
        largest = largest_microbatch(width, microbatch_tokens, unit)
        smallest = max(1, largest // 8)
        left = -(-(len(lengths) - done) // smallest) * smallest
        size = next(size for size in (largest, largest // 2, largest // 4, smallest) if smallest <= size <= left)
        shapes.append((unit * size, width))
        done += size
    return tuple(shapes)


def make_batch(
    rows: list[Row], *, microbatch_tokens: int, packing: bool = False, pairs: bool = False, row_shares: int = 1
) -> PlacedBatch:
    """The batch of these rows, with `packing` several short ones to a row of the batch; `pairs` stay together.

    Without packing the longest come first, so that the microbatches of short ones are narrow. Widths and sizes of
    microbatches are a few round ones, so that batches of any number of rows share compiled programs; each divides over
    the `row_shares` of a mesh. Filling rows train nothing.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("there are no rows to make a batch of")
    lengths = [len(row.sequence.tokens) for row in rows]
    width = padded_width(max(lengths))
    unit = 2 if pairs else 1
    if packing:
        layout = packed_layout(lengths, width)
        unit_lengths = [width] * layout.height
    else:
        longest = [max(lengths[start : start + unit]) for start in range(0, len(lengths), unit)]
        order = sorted(range(len(longest)), key=lambda place: -longest[place])
        unit_lengths = [longest[place] for place in order]
        ranks = np.argsort(order)
        layout = padded_layout(lengths, width)
        layout = layout._replace(rows=unit * ranks[layout.rows // unit] + layout.rows % unit)
    whole = math.lcm(unit, row_shares)
    shapes = microbatch_shapes(unit_lengths[:: whole // unit], microbatch_tokens, whole)
    height = sum(count for count, _ in shapes)

    fields: dict[str, Any] = {
        name: place(layout, [dict(row.sequence)[name] for row in rows], dtype, height)
        for name, dtype in RECORDED.items()
    }
    for name in rows[0].signals:
        fields[name] = place(layout, [row.signals[name] for row in rows], np.float32, height)
    batch = Batch(**fields)
    if packing:
        ids: dict[str, Any] = dict(zip(("segment_ids", "positions"), segments(layout, height), strict=True))
        batch = batch._replace(**ids)
    return PlacedBatch(batch, shapes, layout)


def largest_microbatch(width: int, microbatch_tokens: int, unit: int = 1) -> int:
    """The most units of rows that a microbatch has: a power of two, so that it can be halved.

    >>> [largest_microbatch(width, 1000) for width in (16, 96, 4096)]
    [32, 8, 1]
    """
    allowed = max(1, microbatch_tokens // width // unit)
    return 1 << (allowed.bit_length() - 1)
