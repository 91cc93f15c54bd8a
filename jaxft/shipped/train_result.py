"""The runs of `jaxft.train`: their folders, and the history, plot and model that each leaves, read when asked for."""

import contextlib
import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxft.core.types import Model, Params
from jaxft.files import home_path
from jaxft.harness.session import MODEL_FOLDER
from jaxft.models.load import load_merged, load_model
from jaxft.models.peft import CONFIG as ADAPTER_CONFIG
from jaxft.runs.directory import PLOT_FILE
from jaxft.runs.records import RunRecords, read_run

RUNS = "runs/train-{}"
"""Folder of a run that is given none."""


def new_folder() -> Path:
    """Make the first of `runs/train-1`, `runs/train-2`, ... that is not there yet, and return it."""
    for folder in map(Path, map(RUNS.format, itertools.count(1))):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)  # two processes never get the same
            return folder
    raise AssertionError("there is always a next number")


@dataclass(frozen=True)
class RewardPlot:
    """The reward plot of a run, which a notebook shows.

    Attributes:
        path: the PNG file.
    """

    path: Path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True, repr=False)
class TrainResult:
    """A run in its directory. `TrainResult("runs/train-1")` opens one of another process, too.

    Attributes:
        output_dir: the run directory.
    """

    output_dir: Path

    def __init__(self, output_dir: str | Path) -> None:
        object.__setattr__(self, "output_dir", home_path(output_dir))

    @cached_property
    def _records(self) -> RunRecords:
        return read_run(self.output_dir)

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row of metrics per epoch, with `epoch` from 0, `reward_mean` and `reward/<name>` of each function."""
        return self._records.metrics

    @property
    def rewards(self) -> list[float | None]:
        """Mean reward of each epoch; None for an epoch without a usable one."""
        return [row.get("reward_mean") for row in self.history]

    @property
    def final(self) -> dict[str, Any]:
        """The figures in `result.json`: epochs, seconds, first, last and best rewards, versions."""
        return dict(self._records.result or {})

    @property
    def model(self) -> Path:
        """Folder of the trained model in Hugging Face's format, with its tokenizer."""
        return self.output_dir / MODEL_FOLDER

    def load(self) -> tuple[Model, Params]:
        """Return the trained model and its parameters; adapters are merged into their base.

        Raises:
            ModelFileError: the run has not written its model, or it is damaged.
        """
        is_adapter = (self.model / ADAPTER_CONFIG).is_file()
        return load_merged(self.model) if is_adapter else load_model(self.model)

    def plot(self) -> RewardPlot:
        """Return the plot of rewards over epochs, which a notebook shows; its file is in the run directory."""
        return RewardPlot(self.output_dir / PLOT_FILE)

    def __repr__(self) -> str:
        rewards = [reward for reward in self.rewards if reward is not None]
        learned = f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}" if rewards else "no reward"
        seconds = self.final.get("seconds")
        ended = "not ended" if seconds is None else f"{seconds:.0f} s"
        return f"TrainResult({str(self.output_dir)!r}: {len(self.history)} epochs, {learned}, {ended})"
