"""Trajectories as padded arrays, in an order that depends on nothing but which episodes they are."""

from typing import Any, NamedTuple

import numpy as np

from jaxft.core.types import Batch
from jaxft.harness.data_models import Trajectory
from jaxft.policy.recorder import TokenSequence


class Row(NamedTuple):
    """One training row: a sequence, and the advantage of the trajectory that it is part of."""

    sequence: TokenSequence
    advantage: float


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


def make_batch(rows: list[Row], *, microbatch_tokens: int) -> tuple[Batch, int]:
    """The padded batch, and how many of its rows make a microbatch of at most `microbatch_tokens` tokens.

    Width is rounded up (`padded_width`) and height to a multiple of the microbatch, so that batches of about the same
    size share a compiled program. Filling rows train nothing.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("there are no rows to make a batch of")
    width = padded_width(max(len(row.sequence.tokens) for row in rows))
    microbatch_rows = max(1, min(microbatch_tokens // width, len(rows)))
    height = -(-len(rows) // microbatch_rows) * microbatch_rows

    def padded(name: str, dtype: type) -> Any:
        table: np.ndarray = np.zeros((height, width), dtype)
        for line, row in zip(table, rows, strict=False):
            values = dict(row.sequence)[name]
            line[: len(values)] = values
        return table

    advantages: Any = np.zeros(height, np.float32)
    advantages[: len(rows)] = [row.advantage for row in rows]
    batch = Batch(
        tokens=padded("tokens", np.int32),
        completion_mask=padded("completion_mask", np.bool_),
        advantages=advantages,
        temperatures=padded("temperatures", np.float32),
        sampler_logprobs=padded("sampler_logprobs", np.float32),
        behavior_logprobs=padded("behavior_logprobs", np.float32),
    )
    return batch, microbatch_rows
