"""Records of a job for people: batches of updates that were not finite, and scores of tokens of kept episodes.

The batches tell why loss, gradient or new parameters were not finite:

    bad_batches/epoch_00007-1.npz     the arrays of the batch, for `numpy.load`
                epoch_00007-1.json    the metrics of the update, and the position of each episode in the arrays

Equal runs write equal files.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxft.core.packing import unpack
from jaxft.files import safe_name, with_non_finite_named
from jaxft.harness.data_models import EpisodeIdentity, Trajectory
from jaxft.redaction import redacted_tokens
from jaxft.runs.directory import RunDirectory
from jaxft.training.batch import TrainingBatch
from jaxft.training.rows import JobRows

FOLDER = "bad_batches"
MAX_KEPT = 3
"""Maximum number of batches per run: the later ones rarely show another cause than the first."""

DECIMALS = 5
"""Decimal places that are kept: more are not read by anybody, and would double the file."""


class BadUpdate(NamedTuple):
    """An update whose loss, gradient or new parameters were not finite.

    Attributes:
        number: number of the update in its job, counted from 1.
        metrics: metrics of the update.
        batch: batch of the update.
    """

    number: int
    metrics: Mapping[str, Any]
    batch: TrainingBatch


class BadBatches:
    """Writes the batches of the first non-finite updates of a run."""

    def __init__(
        self, directory: RunDirectory, log: Callable[[str], None], decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        """Write into `directory`.

        Args:
            directory: the run directory.
            log: shows a message, once, when batches are left out.
            decode: decodes token ids, so that ids that spell a secret are written as -1; None writes all ids.
        """
        self._directory, self._log, self._decode = directory, log, decode
        self._has_logged = False

    def keep(self, run_id: str, updates: Sequence[BadUpdate], groups: Sequence[Sequence[Trajectory]]) -> list[str]:
        """Write the batches of a job while the run has fewer than `MAX_KEPT`; return the names of their `.npz` files.

        Args:
            run_id: name of the job.
            updates: the non-finite updates of the job.
            groups: the trajectories that `Row.trajectory` indexes; empty where they are not known.

        Raises:
            RunDirectoryError: the folder leads out of the run directory.
            DiskFull: there is no room for a batch.
        """
        trajectories = [trajectory for group in groups for trajectory in group]
        names = []
        for update in updates:
            name = f"{FOLDER}/{safe_name(run_id)}-{update.number}"
            path = self._directory.file(f"{name}.npz")
            others = [other for other in path.parent.glob("*.npz") if other != path]
            if len(others) >= MAX_KEPT:
                if not self._has_logged:
                    self._has_logged = True
                    self._log(
                        f"{FOLDER} holds {len(others)} batches, the maximum; batches of later updates are not written"
                    )
                break
            self._write(name, run_id, update, trajectories)
            names.append(f"{name}.npz")
        return names

    def _write(self, name: str, run_id: str, update: BadUpdate, trajectories: list[Trajectory]) -> None:
        content, batch = io.BytesIO(), update.batch
        arrays: dict[str, Any] = {
            field: table for field, table in batch.batch._replace(branches=None)._asdict().items() if table is not None
        }
        if self._decode is not None:
            hidden = [redacted_tokens(each.tolist(), self._decode) for each in unpack(batch.packing, arrays["tokens"])]
            arrays["tokens"] = np.array(arrays["tokens"])
            np.minimum.at(arrays["tokens"], batch.tokens, np.concatenate(hidden))  # -1 wherever a sequence has it
        np.savez(content, **arrays)  # dates every array 1980-01-01
        self._directory.write_bytes(f"{name}.npz", content.getvalue())

        def episode(number: int) -> dict[str, Any]:
            if not trajectories:
                return {"trajectory": number}
            return _named(trajectories[number])

        spans = zip(batch.trajectories.tolist(), batch.packing.own, strict=True)
        sequences = [
            {**episode(number), "row": row, "start": start, "tokens": tokens} | ({"shared": shared} if shared else {})
            for number, (row, start, tokens, shared) in spans
        ]
        described = {
            "run_id": run_id,
            "update": update.number,
            "metrics": {metric: float(value) for metric, value in update.metrics.items()},
            "microbatch_shapes": [list(shape) for shape in batch.microbatch_shapes],
            "sequences": sequences,
        }
        if batch.packing.branches is not None:  # behind which the shared tokens of a sequence end
            described["prefix_tokens"] = batch.packing.branches.prefix_tokens
        self._directory.write_json(f"{name}.json", with_non_finite_named(described))


class TokenScores(NamedTuple):
    """Advantage and entropy of each token of a row, before the first update of its job.

    Attributes:
        advantages: `[T]`, 0 where the row is not trained.
        entropies: `[T]`, in nats, of the policy's distribution of each token that it chose, at its temperature; else 0.
    """

    advantages: np.ndarray
    entropies: np.ndarray


class KeptTokens:
    """Collects the `TokenScores` of the rows of some episodes.

    Attributes:
        indices: indices of these rows among the rows of the job, ascending.
    """

    def __init__(self, data: JobRows, episodes: Sequence[EpisodeIdentity]) -> None:
        """Collect for the episodes of these identities, as far as the job has them."""
        wanted = set(episodes)
        self._trajectories = [t for group in data.groups for t in group if t.identity in wanted]
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
                **_named(trajectory),
                "advantages": [self._list_values(sequence, "advantages") for sequence in trajectory.sequences or ()],
                "entropies": [self._list_values(sequence, "entropies") for sequence in trajectory.sequences or ()],
            }
            for trajectory in self._trajectories
        ]

    def _list_values(self, sequence: Any, name: str) -> list[float] | None:
        scores = self._scores.get(self._index_of.get(id(sequence), -1))
        return None if scores is None else np.round(np.asarray(scores._asdict()[name], np.float64), DECIMALS).tolist()


def _named(trajectory: Trajectory) -> dict[str, str | int | None]:
    return dict(zip(("example_id", "generation", "rollout_index"), trajectory.identity, strict=True))
