"""The metrics of a run, one row per epoch; timings are in a separate file, so that the metrics are reproducible."""

import os
import socket
import time
from collections.abc import Mapping

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar, text

from jaxft.files import disk_errors
from jaxft.runs.directory import METRICS_FILE, TIMINGS_FILE, RunDirectory

TENSORBOARD_FOLDER = "tensorboard"
FILE_VERSION = "brain.Event:2"


class MetricsLog:
    """Writes each epoch to `training_metrics.jsonl`, `timings.jsonl` and TensorBoard, under the same epoch number.

    Epochs count from 0. Equal runs write equal metrics, byte for byte; measured times are in the timings only.
    """

    def __init__(self, directory: RunDirectory, *, first_epoch: int = 0) -> None:
        """Log from `first_epoch` on; TensorBoard hides these epochs in the files of earlier writers."""
        self._directory = directory
        self._tensorboard = EventFile(directory, first_step=first_epoch)

    def log(
        self,
        epoch: int,
        metrics: Mapping[str, float | int | str],
        timings: Mapping[str, float | int | str],
    ) -> None:
        """Write one epoch.

        Args:
            epoch: number of the epoch: the first key of both rows, and the step in TensorBoard.
            metrics: values that are equal in equal runs. Slashes in names group them in TensorBoard. NaN and infinities
                are written as in `RunDirectory.append_jsonl`.
            timings: seconds, rates and other values that depend on the clock.

        Raises:
            ValueError: a name occurs twice, or is `epoch`; nothing was written.
            DiskFull: there is no room for a row.
        """
        doubled = sorted((metrics.keys() & timings.keys()) | ({"epoch"} & (metrics.keys() | timings.keys())))
        if doubled:
            raise ValueError(f"epoch {epoch} has more than one metric called {', '.join(doubled)}: rename all but one")
        self._directory.append_jsonl(METRICS_FILE, {"epoch": epoch, **metrics})
        self._directory.commit()
        self._directory.append_jsonl(TIMINGS_FILE, {"epoch": epoch, **timings})
        self._tensorboard.add(epoch, {**metrics, **timings})

    def close(self) -> None:
        """Close TensorBoard's file; the run directory stays open."""
        self._tensorboard.close()


class EventFile:
    """A TensorBoard file of scalars and texts, open from `__init__` to `close`."""

    def __init__(self, directory: RunDirectory, *, first_step: int = 0) -> None:
        """Begin a file; TensorBoard then hides steps from `first_step` on in the earlier files of the folder.

        Raises:
            DiskFull: there is no room for the file.
        """
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = directory.file(f"{TENSORBOARD_FOLDER}/{name}")
        with disk_errors(self._path):
            self._records = RecordWriter(str(self._path))
        self._write(step=0, file_version=FILE_VERSION)
        if first_step:
            self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """Write the metrics of one step, and flush them to the disk.

        Raises:
            DiskFull: there is no room for them.
        """
        for name, value in metrics.items():
            if isinstance(value, str):
                # A lone surrogate has no UTF-8 encoding and could not be read back.
                name, value = (each.encode("utf-8", "backslashreplace").decode() for each in (name, value))
                self._write(step=step, summary=text(name, value))
            else:
                self._write(step=step, summary=scalar(name, value))
        with disk_errors(self._path):
            self._records.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with disk_errors(self._path):
            self._records.close()

    def _write(self, **fields: object) -> None:
        with disk_errors(self._path):
            self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
