"""Advantage and entropy of each token of the episodes that a run keeps, for people who read them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxft.training.rows import Gathered

DECIMALS = 5
"""Decimal places that are kept: more are not read by anybody, and would double the file."""


class TokenScores(NamedTuple):
    """Advantage and entropy of each token of a row, before the first update of its job.

    Attributes:
        advantages: `[T]`, 0 where the row is not trained.
        entropies: `[T]`, in nats, of the policy's distribution of each token, at its temperature.
    """

    advantages: np.ndarray
    entropies: np.ndarray


class KeptTokens:
    """Collects the `TokenScores` of the rows of some episodes.

    Attributes:
        indices: indices of these rows among the rows of the job, ascending.
    """

    def __init__(self, data: Gathered, episodes: Sequence[tuple[str, int]]) -> None:
        """Collect for the episodes of these example ids and generations, as far as the job has them."""
        wanted = set(episodes)
        self._trajectories = [t for group in data.groups for t in group if (t.example_id, t.generation) in wanted]
        sequences = {id(sequence) for trajectory in self._trajectories for sequence in trajectory.sequences or ()}
        # A row is the very object that its trajectory has.
        self._index_of = {id(row.sequence): i for i, row in enumerate(data.rows) if id(row.sequence) in sequences}
        self._scores: dict[int, TokenScores] = {}
        self.indices = sorted(self._index_of.values())

    def keep(self, row: int, scores: TokenScores) -> None:
        """Keep the scores of the row of this index."""
        self._scores[row] = scores

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per trajectory for JSON; empty if no row was scored.

        `advantages` and `entropies` have a list per sequence, with a value per token; null for a sequence that was not
        trained.
        """
        if not self._scores:
            return []
        return [
            {
                "example_id": trajectory.example_id,
                "generation": trajectory.generation,
                "advantages": [self._listed(sequence, "advantages") for sequence in trajectory.sequences or ()],
                "entropies": [self._listed(sequence, "entropies") for sequence in trajectory.sequences or ()],
            }
            for trajectory in self._trajectories
        ]

    def _listed(self, sequence: Any, name: str) -> list[float] | None:
        scores = self._scores.get(self._index_of.get(id(sequence), -1))
        return None if scores is None else np.round(np.asarray(scores._asdict()[name], np.float64), DECIMALS).tolist()
