"""The sequences of a job as `[B T]` tables: laid out once, filled in on the way to the loss, cut into microbatches.

Letters: `N` sequences, `B` rows of a table, `T` tokens of a row.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxft.core.packing import Packing, pack, plan_packing, plan_padding, segments, token_index
from jaxft.core.types import Batch
from jaxft.rollout.sequences import TokenSequence
from jaxft.training.config import LossConfig

RECORDED = {
    "tokens": np.int32,
    "completion_mask": np.bool_,
    "temperatures": np.float32,
    "sampler_logprobs": np.float32,
    "behavior_logprobs": np.float32,
}
"""Fields of a batch that are recorded with a sequence, and their types."""

Shapes = tuple[tuple[int, int], ...]
"""Rows and width of each microbatch."""


class Row(NamedTuple):
    """A token sequence to train on, and the number of its trajectory in the job."""

    sequence: TokenSequence
    trajectory: int


class TrainingBatch(NamedTuple):
    """The sequences of a job, or of one of its minibatches, in tables.

    Attributes:
        batch: `[B T]` numpy tables. Scores and advantages are filled in once they are known; padding holds 0.
        packing: where each sequence lies in the tables.
        microbatch_shapes: rows and width of each microbatch, first rows first.
        trajectories: `[N]` the number of each sequence's trajectory in the job.
        tokens: the index (row, column) of every token in the tables, sequence by sequence.
        places: the index (sequence, position) of every token in a table of one sequence a row, in the same order.
        turns: `[B T]` the turn that a token belongs to, -1 where none.
        is_cut: `[N]` True where a length limit cut the episode off behind the sequence.
        bootstrap_values: `[N]` the value behind each sequence, 0 where the episode ended by itself; None but for ppo.
    """

    batch: Batch
    packing: Packing
    microbatch_shapes: Shapes
    trajectories: np.ndarray
    tokens: tuple[np.ndarray, np.ndarray]
    places: tuple[np.ndarray, np.ndarray]
    turns: np.ndarray
    is_cut: np.ndarray
    bootstrap_values: np.ndarray | None = None

    def microbatches(self) -> list[Batch]:
        """Slices of the tables, each as wide as its own rows need."""
        ends = list(itertools.accumulate(rows for rows, _ in self.microbatch_shapes))
        return [
            _cut(self.batch, slice(end - rows, end), width)
            for end, (rows, width) in zip(ends, self.microbatch_shapes, strict=True)
        ]


def _cut(batch: Batch, rows: slice, width: int) -> Batch:
    return jax.tree.map(lambda table: table[rows, :width], batch)


def padded_width(tokens: int) -> int:
    """The width of a table whose longest sequence has so many tokens: 16, 32, 48, 64, 96, 128, 192, 256, ...

    >>> [padded_width(n) for n in (5, 80, 97, 300, 513)]
    [16, 96, 128, 384, 768]
    """
    power = max(16, 1 << (tokens - 1).bit_length())
    return power * 3 // 4 if power >= 64 and tokens <= power * 3 // 4 else power


@dataclass(frozen=True)
class BatchPlanner:
    """Decides where sequences lie and how rows are divided into microbatches.

    Widths and heights of microbatches are a few round numbers, so that jobs of any size share compiled programs.

    Attributes:
        microbatch_tokens: most tokens of a microbatch, padding included; a microbatch has at least one row.
        packed: several short sequences may share a row.
        pairs: sequences `2 i` and `2 i + 1` lie in neighbouring rows of one microbatch; not for packed rows.
        row_shards: shards of a mesh that the rows of a microbatch divide over.
    """

    microbatch_tokens: int
    packed: bool = False
    pairs: bool = False
    row_shards: int = 1

    def plan(self, lengths: Sequence[int]) -> tuple[Packing, Shapes]:
        """Where sequences of these lengths lie, and the shapes of the microbatches.

        Without packing the longest come first, so that the microbatches of short ones are narrow.
        """
        width = padded_width(max(lengths))
        if self.packed:
            packing = plan_packing(lengths, width)
            row_lengths = [width] * packing.height
        else:
            unit = 2 if self.pairs else 1
            longest = np.repeat(np.reshape(lengths, (-1, unit)).max(axis=1), unit)
            order = np.argsort(-longest, kind="stable")
            packing = plan_padding(lengths, width)._replace(rows=np.argsort(order))
            row_lengths = longest[order].tolist()
        shapes = self.shapes(row_lengths)
        return packing._replace(height=sum(rows for rows, _ in shapes)), shapes

    def shapes(self, row_lengths: Sequence[int]) -> Shapes:
        """Rows and width of the microbatches of rows with these lengths, which descend; the last may hold filling rows.

        >>> [BatchPlanner(256).shapes([16] * n) for n in (3, 9, 17)]
        [((4, 16),), ((8, 16), (2, 16)), ((16, 16), (2, 16))]
        >>> BatchPlanner(256).shapes([64] + [16] * 20)
        ((4, 64), (16, 16), (2, 16))
        """
        shapes: list[tuple[int, int]] = []
        done = 0
        while done < len(row_lengths):
            width = padded_width(row_lengths[done])
            heights = self.heights(width)
            left = -(-(len(row_lengths) - done) // heights[-1]) * heights[-1]
            rows = next(height for height in heights if height <= left)
            shapes.append((rows, width))
            done += rows
        return tuple(shapes)

    def heights(self, width: int) -> list[int]:
        """Rows that a microbatch of this width may have: as many as its tokens allow, a half, a quarter, an eighth.

        >>> [BatchPlanner(1000).heights(width) for width in (16, 96, 4096)]
        [[32, 16, 8, 4], [8, 4, 2, 1], [1]]
        """
        unit = math.lcm(2 if self.pairs else 1, self.row_shards)
        allowed = max(1, self.microbatch_tokens // width // unit)
        largest = 1 << (allowed.bit_length() - 1)  # a power of two, so that it can be halved
        return [unit * rows for rows in sorted({max(1, largest // part) for part in (1, 2, 4, 8)}, reverse=True)]

    def all_shapes(self, longest: int) -> Shapes:
        """Every shape that a microbatch of sequences of up to `longest` tokens can have."""
        widths = sorted({padded_width(tokens) for tokens in range(1, longest + 1)})
        return tuple((rows, width) for width in widths for rows in self.heights(width))


def make_batch(rows: list[Row], planner: BatchPlanner) -> TrainingBatch:
    """The tables of these rows. Filling rows train nothing.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("there are no rows to make a batch of")
    packing, shapes = planner.plan([len(row.sequence.tokens) for row in rows])
    recorded: dict[str, Any] = {
        name: pack(packing, [getattr(row.sequence, name) for row in rows], dtype) for name, dtype in RECORDED.items()
    }
    if planner.packed:
        recorded["segment_ids"], recorded["positions"] = segments(packing)
    return TrainingBatch(
        Batch(**recorded),
        packing,
        shapes,
        np.array([row.trajectory for row in rows]),
        *token_index(packing),
        turns=pack(packing, [row.sequence.turns or -1 for row in rows], np.int32, fill=-1),
        is_cut=np.array([row.sequence.episode_truncated for row in rows]),
    )


def select_sequences(job: TrainingBatch, chosen: np.ndarray, planner: BatchPlanner) -> TrainingBatch:
    """The tables of some sequences of a job, laid out anew as they alone need; the job itself if they are all of it.

    Args:
        job: with all its scores and advantages.
        chosen: numbers of the sequences, ascending.
        planner: that of the job.
    """
    if len(chosen) == len(job.trajectories):
        return job
    packing, shapes = planner.plan(job.packing.lengths[chosen].tolist())
    index, is_chosen = token_index(packing), np.isin(job.places[0], chosen)
    source = tuple(each[is_chosen] for each in job.tokens)

    def moved(table: Any, fill: int = 0) -> Any:
        result = np.full((packing.height, packing.width), fill, table.dtype)
        result[index.tokens] = table[source]
        return result

    batch: Batch = jax.tree.map(moved, job.batch)
    if planner.packed:
        ids: Any = segments(packing)[0]  # counted from 1 in each row
        batch = batch._replace(segment_ids=ids)
    turns = moved(job.turns, fill=-1)
    return TrainingBatch(batch, packing, shapes, job.trajectories[chosen], *index, turns, job.is_cut[chosen])


def empty_batch(loss: LossConfig, rows: int, width: int, *, packed: bool, has_old: bool) -> Batch:
    """A microbatch of zeros with the fields that the update of `loss` is given.

    Args:
        loss: decides which fields there are.
        rows: height of its tables.
        width: width of its tables.
        packed: it has segments and positions.
        has_old: a job makes several updates, and so keeps the log-probabilities of before the first.
    """
    floats: Any = np.zeros((rows, width), np.float32)
    whole: Any = np.zeros((rows, width), np.int32)
    is_ppo = loss.name == "ppo"
    return Batch(
        tokens=whole,
        completion_mask=whole.astype(np.bool_),
        advantages=floats if loss.is_policy_loss else None,
        temperatures=floats,
        sampler_logprobs=floats,
        behavior_logprobs=floats,
        old_logprobs=floats if has_old and loss.is_policy_loss else None,
        ref_logprobs=floats if loss.needs_reference else None,
        old_values=floats if is_ppo else None,
        returns=floats if is_ppo else None,
        positions=whole if packed else None,
        segment_ids=whole if packed else None,
        trajectory_tokens=floats if loss.averaged_over == "trajectories" else None,
    )
