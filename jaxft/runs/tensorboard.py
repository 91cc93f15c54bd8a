"""The TensorBoard logger: metrics and timings of a run as scalars and texts, with the epoch as the step."""

import os
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping
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


async def tensorboard_logger(config: Any, builder: Any) -> AsyncIterator[RunLogger]:
    """Yield the logger of TensorBoard."""
    yield TensorBoardLogger(builder.directory)


class TensorBoardLogger(RunLogger):
    """Writes a file of events for each process of a run into the folder `tensorboard` of the run directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def begin(self, run: LoggedRun) -> None:
        """Begin a file; TensorBoard then hides the epochs that are run again in the earlier files.

        Raises:
            DiskFull: there is no room for the file, as also in the other methods.
        """
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = self._directory.file(f"{TENSORBOARD_FOLDER}/{name}")
        with disk_errors(self._path):
            self._records = RecordWriter(str(self._path))
        self._write(step=0, file_version=FILE_VERSION)
        if run.first_epoch:
            self._write(step=run.first_epoch, session_log=SessionLog(status=SessionLog.START))

    def metrics(self, epoch: int, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """Write metrics and timings, each under its group: `reward/reward_mean`, `time/seconds`."""
        tags = {name: grouped(name) for name in metrics}
        tags |= {name: f"{'memory' if name.endswith('_bytes') else 'time'}/{name}" for name in timings}
        for name, value in {**metrics, **timings}.items():
            summary = text if isinstance(value, str) else scalar
            self._write(step=epoch, summary=summary(tags[name], value))
        with disk_errors(self._path):
            self._records.flush()

    def end(self, status: Status, result: Mapping[str, Any]) -> None:
        """Close the file."""
        with disk_errors(self._path):
            self._records.close()

    def _write(self, **fields: object) -> None:
        with disk_errors(self._path):
            self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())


def grouped(name: str) -> str:
    """Return a metric's name behind that of its group; a name with a slash has its own.

    >>> [grouped(name) for name in ("reward_mean", "sampler_kl", "kl", "learning_rate", "validation/avg_reward")]
    ['reward/reward_mean', 'sampler/sampler_kl', 'loss/kl', 'training/learning_rate', 'validation/avg_reward']
    """
    return name if "/" in name else f"{next(g for g, words in GROUPS.items() if re.search(words, name))}/{name}"
