"""Keeps the batches of updates whose loss, gradient or new parameters were not finite, to find out why.

    bad_batches/epoch_00007-1.npz     the arrays of the batch, for `numpy.load`
                epoch_00007-1.json    the metrics of the update, and which episodes lie where in the arrays

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
"""Batches that are kept of one run: what is wrong with the first is most likely wrong with the others."""


class BadUpdate(NamedTuple):
    """An update of a job that was not finite: its number in the job, from 1 on, its metrics, and its batch."""

    number: int
    metrics: Mapping[str, Any]
    batch: TrainingBatch


class BadBatches:
    """Writes the first few batches of a run that were not finite."""

    def __init__(
        self,
        directory: RunDirectory,
        log: Callable[[str], None],
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """`log` is called once when later batches are left out; `decode` gives the text of token ids, so that tokens
        that spell a secret are written as -1 (None: none are)."""
        self._directory, self._log, self._decode = directory, log, decode
        self._has_said = False

    def keep(self, run_id: str, updates: Sequence[BadUpdate], groups: Sequence[Sequence[Trajectory]]) -> list[str]:
        """Write the batches of a job while there is room for more; returns the names of the files with the arrays.

        Args:
            run_id: the job's.
            updates: the job's updates that were not finite.
            groups: the trajectories that sequences count; empty where they are not known.

        Raises:
            RunDirectoryError: the folder leads out of the run directory.
            DiskFull: there is no room for a batch.
        """
        names = []
        for update in updates:
            name = f"{FOLDER}/{safe_name(run_id)}-{update.number}"
            path = self._directory.file(f"{name}.npz")
            others = [other for other in path.parent.glob("*.npz") if other != path]
            if len(others) >= MAX_KEPT:
                self._say_once(f"{FOLDER} holds {len(others)} batches; those of later updates are not kept")
                break
            self._write(name, run_id, update, [trajectory for group in groups for trajectory in group])
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
        sequences = [
            {**_episode(number, trajectories), "row": row, "start": start, "tokens": length}
            for number, row, start, length in spans
        ]
        described = {
            "run_id": run_id,
            "update": update.number,
            "metrics": {metric: float(value) for metric, value in update.metrics.items()},
            "microbatch_shapes": [list(shape) for shape in batch.microbatch_shapes],
            "sequences": sequences,
        }
        self._directory.write_json(f"{name}.json", with_non_finite_named(described))

    def _say_once(self, message: str) -> None:
        if not self._has_said:
            self._has_said = True
            self._log(message)


def _episode(number: int, trajectories: list[Trajectory]) -> dict[str, Any]:
    if not trajectories:
        return {"trajectory": number}
    return {"example_id": trajectories[number].example_id, "generation": trajectories[number].generation}
