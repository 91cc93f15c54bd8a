"""Microbatches that train nothing, of every shape that the jobs of a learner can have: to compile them beforehand."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxft.components.batching import largest_microbatch, padded_width
from jaxft.components.losses import LossConfig
from jaxft.core.types import Batch


@dataclass(frozen=True)
class EmptyBatches:
    """What decides the shapes and fields of a learner's microbatches.

    Attributes:
        loss: which fields a microbatch has; dpo's rows come in pairs.
        microbatch_tokens: of one microbatch, at most.
        is_packed: several sequences may share a row.
        has_old: a job makes several updates, and notes the log-probabilities before the first.
        row_shares: parts of a mesh that rows divide over.
    """

    loss: LossConfig
    microbatch_tokens: int
    is_packed: bool
    has_old: bool
    row_shares: int = 1

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
        unit = math.lcm(2 if self.loss.name == "dpo" else 1, self.row_shares)
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
