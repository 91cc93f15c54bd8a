"""The runs of a comparison: found by path or glob, read, and the figures of each.

A figure is one number of a run. Damaged runs and folders without a run are left out, each with its reason.
"""

import glob
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jaxft.errors import RunDirectoryError
from jaxft.runs import CONFIG_FILE, Row, RunRecords, flat, read_run

RESULT_PREFIX = "result."
"""Beginning of the names of figures that come from `result.json`."""

SIGNALS = ("interrupted", "terminated")
"""Beginnings of what `run.log` says of a run that a signal ended; it can be resumed, and has not failed."""


@dataclass(frozen=True)
class LeftOut:
    """A path that was given and is not in the comparison, with the reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class ComparedRun:
    """A run with what the comparison says of it.

    Attributes:
        records: the files of the run.
        status: `finished` with a `result.json`, `failed` if it ended with an error, `unfinished` otherwise: it is going
            on, or was stopped or killed.
        ending: last words of a run that ended without a result; empty if there are none.
    """

    records: RunRecords
    status: Literal["finished", "failed", "unfinished"]
    ending: str = ""

    @cached_property
    def seed(self) -> int | None:
        """The seed of the configuration, or None."""
        seed = self.settings.get("finetuning.seed")
        return seed if isinstance(seed, int) else None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Values of the configuration by dotted path."""
        return flat(self.records.config)

    @property
    def resumes(self) -> int:
        """Number of times that the run was resumed."""
        return len(self.records.resumes)

    @property
    def num_epochs(self) -> int | None:
        """Number of epochs that the configuration asks for."""
        count = self.settings.get("finetuning.num_epochs")
        return count if isinstance(count, int) else None

    @cached_property
    def rewards(self) -> list[float]:
        """Mean training reward of each epoch; NaN where there was none."""
        rows = dict(column(self.records.rewards, "reward_mean"))
        return [rows.get(epoch, math.nan) for epoch in range(max(rows, default=-1) + 1)]

    @cached_property
    def validations(self) -> list[tuple[int, float]]:
        """Number of epochs before each validation, and its reward."""
        return column(self.records.validations, "avg_reward")

    def figures(self, last_epochs: int) -> dict[str, float]:
        """Return the figures of the run by name; those that it lacks are left out.

        Args:
            last_epochs: number of epochs at the end over which `final_reward` is the mean.
        """
        found: dict[str, float] = {}
        rewards = self.rewards[-last_epochs:]
        if rewards and all(map(math.isfinite, rewards)):
            found["final_reward"] = math.fsum(rewards) / len(rewards)
        known = [(epoch, reward) for epoch, reward in self.validations if math.isfinite(reward)]
        if known:
            epoch, reward = max(known, key=lambda each: (each[1], -each[0]))
            found |= {"best_validation_reward": reward, "best_validation_epoch": float(epoch)}
            best = next(row for row in reversed(self.records.validations) if row["epoch"] == epoch)
            found |= {
                f"validation.{name}": value
                for name in best
                if ("@" in name or "/" in name) and math.isfinite(value := number(best, name))
            }
        found["epochs"] = float(len(self.rewards))
        result = _result_figures(self.records.result or {})
        # Those of result.json count the warm start and all sessions.
        times, rates = (
            [value for row in self.records.timings if math.isfinite(value := number(row, name))]
            for name in ("seconds", "tokens_per_second")
        )
        seconds = result.pop("seconds", None) or sum(times) or None
        found |= {} if seconds is None else {"seconds": seconds}
        found |= {"tokens_per_second": statistics.median(rates)} if rates else {}
        return found | {RESULT_PREFIX + name: value for name, value in result.items()}


def find_runs(paths: Iterable[str | Path]) -> tuple[list[ComparedRun], list[LeftOut]]:
    """Read the runs at some paths, in their order, and return them with what was left out.

    Args:
        paths: run directories, or globs such as `runs/sweep/*`; a path that exists is no glob. A run that is named
            twice is read once.
    """
    runs, left_out, seen = [], [], set()
    for given in map(os.path.expanduser, paths):
        found = folders = [given]
        if not Path(given).exists() and glob.has_magic(given):
            found = sorted(glob.glob(given, recursive=True))
            folders = [path for path in found if Path(path).is_dir()]
        if not found:
            left_out.append(LeftOut(given, "matches nothing"))
        if len(folders) < len(found):
            left_out.append(LeftOut(given, f"matches {len(found) - len(folders)} files, which are no runs"))
        for path in map(Path, folders):
            reason = _why_no_run(path) or ("is given twice" if path.resolve() in seen else None)
            seen.add(path.resolve())
            try:
                runs += [] if reason else [read_compared(path)]
            except RunDirectoryError as error:
                reason = f"is damaged: {error}"
            if reason:
                left_out.append(LeftOut(str(path), reason))
    return runs, left_out


def read_compared(path: Path) -> ComparedRun:
    """Read one run.

    Raises:
        RunDirectoryError: the folder holds no run, or a file of it is damaged.
    """
    records = read_run(path)
    if records.result is not None:
        return ComparedRun(records, "finished")
    ending = _ending(records)
    has_failed = bool(ending) and not ending.startswith(SIGNALS)
    return ComparedRun(records, "failed" if has_failed else "unfinished", ending)


def default_last_epochs(epochs: int) -> int:
    """Return the number of epochs over which a final reward is the mean: a tenth, at least 3 and at most 25.

    >>> [default_last_epochs(epochs) for epochs in (0, 2, 20, 90, 500)]
    [1, 2, 3, 9, 25]
    """
    return min(max(epochs // 10, 3), 25, max(epochs, 1))


def number(row: Mapping[str, Any], name: str) -> float:
    """Return a value of a row as a float; NaN if it is missing, null, or no number."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def column(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """Return pairs of an epoch and a value of its row, by ascending epoch; the last row of an epoch counts."""
    return sorted({row["epoch"]: number(row, name) for row in rows}.items())


def _why_no_run(path: Path) -> str | None:
    if not path.is_dir():
        return "is no folder" if path.exists() else "does not exist"
    if (path / CONFIG_FILE).is_file():
        return None
    inner = sum((folder / CONFIG_FILE).is_file() for folder in path.iterdir() if folder.is_dir())
    if inner:
        return f"holds no run itself, but {inner} of its folders do: give '{path}/*'"
    return f"holds no run: it has no {CONFIG_FILE}"


def _ending(records: RunRecords) -> str:
    """Return what the last line of a run's log says of its end; empty if the run has not ended, or was killed."""
    date = "2026-01-01 00:00:00 "
    for line in (line[len(date) :] for line in reversed(records.log_tail(100))):
        if line.startswith("ended: "):
            return line.removeprefix("ended: ")
        if not line.startswith("  "):  # the command to resume stands below the last words
            return ""
    return ""


def _result_figures(result: Row) -> dict[str, float]:
    values = {name: number({name: value}, name) for name, value in flat(dict(result)).items() if name}
    return {name: value for name, value in values.items() if math.isfinite(value) and name != "seed"}
