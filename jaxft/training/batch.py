"""Trajectories as arrays for one update, in an order that depends on nothing but which episodes they are."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxft.core.packing import Packing, pack, plan_packing, plan_padding, segments
from jaxft.core.types import Batch
from jaxft.harness.data_models import Trajectory
from jaxft.rollout.sequences import TokenSequence
from jaxft.training.config import LossConfig

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
    packing: Packing

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
    rows: list[Row], *, microbatch_tokens: int, packed: bool = False, pairs: bool = False, row_shards: int = 1
) -> PlacedBatch:
    """The batch of these rows, when `packed` several short ones to a row of the batch; `pairs` stay together.

    Without packing the longest come first, so that the microbatches of short ones are narrow. Widths and sizes of
    microbatches are a few round ones, so that batches of any number of rows share compiled programs; each divides over
    the `row_shards` of a mesh. Filling rows train nothing.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("there are no rows to make a batch of")
    lengths = [len(row.sequence.tokens) for row in rows]
    width = padded_width(max(lengths))
    unit = 2 if pairs else 1
    if packed:
        packing = plan_packing(lengths, width)
        unit_lengths = [width] * packing.height
    else:
        longest = [max(lengths[start : start + unit]) for start in range(0, len(lengths), unit)]
        order = sorted(range(len(longest)), key=lambda pack: -longest[pack])
        unit_lengths = [longest[place] for place in order]
        ranks = np.argsort(order)
        packing = plan_padding(lengths, width)
        packing = packing._replace(rows=unit * ranks[packing.rows // unit] + packing.rows % unit)
    whole = math.lcm(unit, row_shards)
    shapes = microbatch_shapes(unit_lengths[:: whole // unit], microbatch_tokens, whole)
    height = sum(count for count, _ in shapes)

    fields: dict[str, Any] = {
        name: pack(packing, [dict(row.sequence)[name] for row in rows], dtype, height)
        for name, dtype in RECORDED.items()
    }
    for name in rows[0].signals:
        fields[name] = pack(packing, [row.signals[name] for row in rows], np.float32, height)
    batch = Batch(**fields)
    if packed:
        ids: dict[str, Any] = dict(zip(("segment_ids", "positions"), segments(packing, height), strict=True))
        batch = batch._replace(**ids)
    return PlacedBatch(batch, shapes, packing)


def largest_microbatch(width: int, microbatch_tokens: int, unit: int = 1) -> int:
    """The most units of rows that a microbatch has: a power of two, so that it can be halved.

    >>> [largest_microbatch(width, 1000) for width in (16, 96, 4096)]
    [32, 8, 1]
    """
    allowed = max(1, microbatch_tokens // width // unit)
    return 1 << (allowed.bit_length() - 1)


@dataclass(frozen=True)
class EmptyBatches:
    """What decides the shapes and fields of a learner's microbatches.

    Attributes:
        loss: which fields a microbatch has; dpo's rows come in pairs.
        microbatch_tokens: of one microbatch, at most.
        is_packed: several sequences may share a row.
        has_old: a job makes several updates, and notes the log-probabilities before the first.
        row_shards: parts of a mesh that rows divide over.
    """

    loss: LossConfig
    microbatch_tokens: int
    is_packed: bool
    has_old: bool
    row_shards: int = 1

    def all(self, longest: int) -> Iterator[Batch]:
        """One of each shape, for rows of up to `longest` tokens."""
        for width in sorted({padded_width(tokens) for tokens in range(1, longest + 1)}):
            for rows in self._sizes(width):
                yield self._make(rows, width)

    def largest(self, longest: int) -> Batch:
        """Of rows with `longest` tokens, as many as there can be."""
        width = padded_width(longest)
        return self._make(self._sizes(width)[0], width)

    def _sizes(self, width: int) -> list[int]:
        """Rows of the microbatches that there are of a width, largest first."""
        unit = math.lcm(2 if self.loss.name == "dpo" else 1, self.row_shards)
        largest = largest_microbatch(width, self.microbatch_tokens, unit)
        return sorted({unit * max(1, largest // part) for part in (1, 2, 4, 8)}, reverse=True)

    def _make(self, rows: int, width: int) -> Batch:
        loss, is_ppo = self.loss, self.loss.name == "ppo"
        floats: Any = np.zeros((rows, width), np.float32)
        whole: Any = np.zeros((rows, width), np.int32)
        return Batch(
            tokens=whole,
            completion_mask=whole.astype(np.bool_),
            advantages=floats if loss.is_policy_loss else None,
            temperatures=floats,
            sampler_logprobs=floats,
            behavior_logprobs=floats,
            old_logprobs=floats if self.has_old and loss.is_policy_loss else None,
            ref_logprobs=floats if loss.needs_reference else None,
            old_values=floats if is_ppo else None,
            returns=floats if is_ppo else None,
            positions=whole if self.is_packed else None,
            segment_ids=whole if self.is_packed else None,
            trajectory_tokens=floats if loss.averaged_over == "trajectories" else None,
        )
