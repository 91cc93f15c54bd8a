"""The TensorBoard logger: metrics and timings of a run as scalars and texts, with the epoch as the step."""

import os
import re
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

GROUPS = {
    "reward": "reward|curriculum|signal|preference|priced",
    "sampler": "sampler|stale|effective|correction",
    "episodes": "episode|calls|prompts|completion|trajector|sequence|truncated",
    "loss": "loss|entropy|kl|clip|ratio|grad_norm|delta",
    "training": "",
}
"""Groups of metrics in TensorBoard, in the order in which they are looked through, and what names of each contain."""


class TensorBoardLogger(RunLogger):
    """Writes a file of events for each process of a run into the folder `tensorboard` of the run directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._file: EventFile | None = None

    def begin(self, run: LoggedRun) -> None:
        """Begin a file; TensorBoard then hides the epochs that are run again in the earlier files."""
        self._file = EventFile(self._directory, first_step=run.first_epoch)

    def metrics(self, epoch: int, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """Write metrics and timings, each under its group: `reward/reward_mean`, `time/seconds`."""
        assert self._file is not None
        tags = {name: grouped(name) for name in metrics}
        tags |= {name: f"{'memory' if name.endswith('_bytes') else 'time'}/{name}" for name in timings}
        self._file.add(epoch, {tags[name]: value for name, value in {**metrics, **timings}.items()})

    def end(self, status: Status, result: Mapping[str, Any]) -> None:
        """Close the file."""
        assert self._file is not None
        self._file.close()


def grouped(name: str) -> str:
    """Return a metric's name behind that of its group; a name with a slash has its own.

    >>> [grouped(name) for name in ("reward_mean", "sampler_kl", "kl", "learning_rate", "validation/avg_reward")]
    ['reward/reward_mean', 'sampler/sampler_kl', 'loss/kl', 'training/learning_rate', 'validation/avg_reward']
    """
    return name if "/" in name else f"{next(g for g, words in GROUPS.items() if re.search(words, name))}/{name}"


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
