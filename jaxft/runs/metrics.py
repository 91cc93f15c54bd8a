"""The figures of a run, one row per epoch: what is reproducible apart from what the clock says."""

import os
import socket
import time
from collections.abc import Mapping

from jaxft.files import disk_errors
from jaxft.runs.directory import RunDirectory

METRICS_FILE = "training_metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"


class MetricsLog:
    """Writes each epoch to `training_metrics.jsonl`, `timings.jsonl` and TensorBoard, all with the same number.

    Epochs count from 0. The metrics file of two equal runs is equal to the byte; everything that a clock measured goes
    to the timings.
    """

    def __init__(self, directory: RunDirectory, *, first_epoch: int = 0) -> None:
        """A run that is continued logs from `first_epoch` on; TensorBoard hides what earlier writers said of it."""
        self._directory = directory
        self._tensorboard = EventFile(directory, first_step=first_epoch)

    def log(
        self,
        epoch: int,
        metrics: Mapping[str, float | int | str],
        timings: Mapping[str, float | int | str],
    ) -> None:
        """Writes one epoch.

        Args:
            epoch: the first key of both rows and the step axis of TensorBoard.
            metrics: figures that the same run would give again. Slashes in names group them in TensorBoard. NaN and
                infinities are written as `RunDirectory.append_jsonl` says.
            timings: seconds, rates and other wall-clock figures.

        Raises:
            ValueError: a name occurs twice, or is `epoch`; nothing was written.
            DiskFull: there is no room for a row.
        """
        doubled = sorted((metrics.keys() & timings.keys()) | ({"epoch"} & (metrics.keys() | timings.keys())))
        if doubled:
            raise ValueError(f"epoch {epoch} has more than one figure called {', '.join(doubled)}: rename all but one")
        self._directory.append_jsonl(METRICS_FILE, {"epoch": epoch, **metrics})
        self._directory.commit()
        self._directory.append_jsonl(TIMINGS_FILE, {"epoch": epoch, **timings})
        self._tensorboard.add(epoch, {**metrics, **timings})

    def close(self) -> None:
        """Ends TensorBoard's writer; the run directory stays open."""
        self._tensorboard.close()


TENSORBOARD_FOLDER = "tensorboard"
FILE_VERSION = "brain.Event:2"


class EventFile:
    """One file of scalars and texts, from `__init__` to `close`."""

    def __init__(self, directory: RunDirectory, *, first_step: int = 0) -> None:
        """Begins a file; what earlier files of the folder say of `first_step` and later is hidden.

        Raises:
            DiskFull: there is no room for it.
        """
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = directory.file(f"{TENSORBOARD_FOLDER}/{name}")
        with disk_errors(self._path):
            self._records = RecordWriter(str(self._path))
        self._write(step=0, file_version=FILE_VERSION)
        if first_step:
            self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, step: int, figures: Mapping[str, float | int | str]) -> None:
        """Writes the figures of one step, which are on the disk afterwards.

        Raises:
            DiskFull: there is no room for them.
        """
        from tensorboardX.summary import scalar, text

        for name, value in figures.items():
            if isinstance(value, str):
                # What has no UTF-8 could not be read again.
                name, value = (each.encode("utf-8", "backslashreplace").decode() for each in (name, value))
                self._write(step=step, summary=text(name, value))
            else:
                self._write(step=step, summary=scalar(name, value))
        with disk_errors(self._path):
            self._records.flush()

    def close(self) -> None:
        """Ends the file; again does nothing."""
        with disk_errors(self._path):
            self._records.close()

    def _write(self, **fields: object) -> None:
        from tensorboardX.proto.event_pb2 import Event

        with disk_errors(self._path):
            self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
