"""TensorBoard's event file, written where it is asked for.

tensorboardX's own writer hands events to a thread. When the disk is full that thread ends, nobody hears of it, and the
run waits for ever for room in its queue.
"""

import os
import socket
import time
from collections.abc import Mapping

from jaxft.runs.directory import RunDirectory
from jaxft.runs.disk import disk_errors

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
