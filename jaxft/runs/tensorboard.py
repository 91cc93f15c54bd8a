"""The TensorBoard logger: metrics and timings of a run as scalars and texts, with the epoch as the step."""

import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tensorboardX import SummaryWriter

from jaxft.runs.directory import RunDirectory
from jaxft.runs.loggers import LoggedRun, RunLogger, Status

TENSORBOARD_FOLDER = "tensorboard"

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
        """Begin a file; TensorBoard then hides the epochs that are run again in the earlier files."""
        folder = self._directory.file(f"{TENSORBOARD_FOLDER}/events").parent
        self._writer = SummaryWriter(str(folder), purge_step=run.first_epoch or None)

    def metrics(self, epoch: int, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """Write metrics and timings, each under its group: `reward/reward_mean`, `time/seconds`."""
        tags = {name: grouped(name) for name in metrics}
        tags |= {name: f"{'memory' if name.endswith('_bytes') else 'time'}/{name}" for name in timings}
        for name, value in {**metrics, **timings}.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(tags[name], value, epoch)
        self._writer.flush()

    def end(self, status: Status, result: Mapping[str, Any]) -> None:
        """Close the file."""
        self._writer.close()


def grouped(name: str) -> str:
    """Return a metric's name behind that of its group; a name with a slash has its own.

    >>> [grouped(name) for name in ("reward_mean", "sampler_kl", "kl", "learning_rate", "validation/avg_reward")]
    ['reward/reward_mean', 'sampler/sampler_kl', 'loss/kl', 'training/learning_rate', 'validation/avg_reward']
    """
    return name if "/" in name else f"{next(g for g, words in GROUPS.items() if re.search(words, name))}/{name}"
