"""The TensorBoard logger: metrics and timings of a run as scalars and texts, with the epoch as the step."""

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar, text

from jaxft.files import disk_errors
from jaxft.runs.directory import RunDirectory
from jaxft.runs.loggers import LoggedRun, RunLogger, Status

TENSORBOARD_FOLDER = "tensorboard"
FILE_VERSION = "brain.Event:2"


class TensorBoardLogger(RunLogger):
    """Writes a file of events for each process of a run into the folder `tensorboard` of the run directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._file: EventFile | None = None

    def begin(self, run: LoggedRun) -> None:
        """Begin a file; TensorBoard then hides the epochs that are run again in the earlier files."""
        self._file = EventFile(self._directory, first_step=run.first_epoch)

    def metrics(self, epoch: int, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """Write metrics and timings; slashes in names group them in TensorBoard."""
        assert self._file is not None
        self._file.add(epoch, {**metrics, **timings})

    def end(self, status: Status, result: Mapping[str, Any]) -> None:
        """Close the file."""
        assert self._file is not None
        self._file.close()


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
