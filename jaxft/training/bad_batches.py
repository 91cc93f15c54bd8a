"""Files with the batches of updates whose loss, gradient or new parameters were not finite, to find out why.

    bad_batches/epoch_00007-1.npz     the arrays of the batch, for `numpy.load`
                epoch_00007-1.json    the metrics of the update, and the position of each episode in the arrays

Equal runs write equal files.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxft.files import safe_name, with_non_finite_named
from jaxft.harness.data_models import Trajectory
from jaxft.redaction import redacted_tokens
from jaxft.runs.directory import RunDirectory
from jaxft.training.batch import TrainingBatch

FOLDER = "bad_batches"
MAX_KEPT = 3
"""Maximum number of batches per run: the later ones rarely show another cause than the first."""


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
        self,
        directory: RunDirectory,
        log: Callable[[str], None],
        decode: Callable[[Sequence[int]], str] | None = None,
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
        arrays: dict[str, Any] = {field: table for field, table in batch.batch._asdict().items() if table is not None}
        spans = list(zip(*(each.tolist() for each in (batch.trajectories, *batch.packing[:3])), strict=True))
        if self._decode is not None:
            arrays["tokens"] = np.array(arrays["tokens"])
            for _, row, start, length in spans:
                tokens = arrays["tokens"][row, start : start + length]
                tokens[:] = redacted_tokens(tokens.tolist(), self._decode)
        np.savez(content, **arrays)  # dates every array 1980-01-01
        self._directory.write_bytes(f"{name}.npz", content.getvalue())

        def episode(number: int) -> dict[str, Any]:
            if not trajectories:
                return {"trajectory": number}
            return {"example_id": trajectories[number].example_id, "generation": trajectories[number].generation}

        sequences = [
            {**episode(number), "row": row, "start": start, "tokens": length} for number, row, start, length in spans
        ]
        described = {
            "run_id": run_id,
            "update": update.number,
            "metrics": {metric: float(value) for metric, value in update.metrics.items()},
            "microbatch_shapes": [list(shape) for shape in batch.microbatch_shapes],
            "sequences": sequences,
        }
        self._directory.write_json(f"{name}.json", with_non_finite_named(described))
