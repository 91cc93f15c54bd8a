"""Comparison of runs: which settings differ, and the figures of each group over its seeds.

    comparison = compare_runs(["runs/sweep/*"])
    print(comparison.figures["final_reward"])

Figures are those of finished runs; others are counted, and named in the notes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxft.errors import RunDirectoryError
from jaxft.report import intervals
from jaxft.report.compared_runs import ComparedRun, LeftOut, default_last_epochs, find_runs
from jaxft.report.comparison_curves import REWARD, group_curves
from jaxft.report.run_groups import Difference, RunGroup, group_runs


@dataclass(frozen=True)
class MeanEstimate:
    """A figure of a group.

    Attributes:
        values: the figure of each finished run that has it, by ascending seed.
        mean: their mean.
        interval: bootstrap interval of the mean; None for one run.
    """

    values: tuple[float, ...]
    mean: float
    interval: intervals.Interval | None


@dataclass(frozen=True)
class Comparison:
    """Groups of runs side by side.

    Attributes:
        groups: the groups, in the order of their first runs.
        differences: settings that differ, with a value for each group.
        figures: for each figure an estimate per group; None where no finished run has it.
        last_epochs: number of epochs over which `final_reward` is the mean.
        left_out: paths that are not in the comparison, with the reasons.
        notes: what a reader has to know: runs without figures, metrics that some runs lack.
    """

    groups: tuple[RunGroup, ...]
    differences: tuple[Difference, ...]
    figures: dict[str, tuple[MeanEstimate | None, ...]]
    last_epochs: int
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]

    @property
    def runs(self) -> tuple[ComparedRun, ...]:
        """All runs, group by group."""
        return tuple(run for group in self.groups for run in group.runs)


def compare_runs(paths: Iterable[str | Path], *, last_epochs: int | None = None) -> Comparison:
    """Compare runs, folded over their seeds.

    Args:
        paths: run directories, or globs such as `runs/sweep/*`.
        last_epochs: number of epochs at the end over which `final_reward` is the mean; by default a tenth of the
            shortest finished run, at least 3 and at most 25.

    Raises:
        RunDirectoryError: there is no readable run; the message names each path and its reason.
    """
    runs, left_out = find_runs(paths)
    if not runs:
        raise RunDirectoryError(no_runs_message(left_out))
    groups, differences = group_runs(runs)
    last_epochs = _last_epochs(runs) if last_epochs is None else last_epochs
    figures = _figures(groups, last_epochs)
    return Comparison(
        groups=groups,
        differences=differences,
        figures=figures,
        last_epochs=last_epochs,
        left_out=tuple(left_out),
        notes=tuple(_notes(groups, figures, last_epochs)),
    )


def no_runs_message(left_out: Sequence[LeftOut]) -> str:
    """Return the message of an error for paths among which there is no run."""
    reasons = "; ".join(f"'{each.path}' {each.reason}" for each in left_out[:5])
    more = f"; and {len(left_out) - 5} more" if len(left_out) > 5 else ""
    return f"no run to compare, give run directories: {reasons or 'no path was given'}{more}"


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values for JSON, with the curves of the training reward; NaN is null."""
    return {
        "format_version": 2,
        "level": intervals.LEVEL,
        "resamples": intervals.RESAMPLES,
        "curve_resamples": intervals.CURVE_RESAMPLES,
        **asdict(replace(comparison, groups=())),
        "groups": [
            {"name": group.name, "runs": [_run_json(run, comparison.last_epochs) for run in group.runs]}
            for group in comparison.groups
        ],
        "curves": {group.name: _curve_json(group) for group in comparison.groups},
    }


def _run_json(run: ComparedRun, last_epochs: int) -> dict[str, Any]:
    return {
        "path": str(run.records.path),
        "seed": run.seed,
        "status": run.status,
        "ending": run.ending,
        "resumes": run.resumes,
        "figures": run.figures(last_epochs),
    }


def estimate(values: Sequence[float]) -> MeanEstimate:
    """Return the figure of a group from those of its runs; at least one."""
    return MeanEstimate(
        values=tuple(values), mean=math.fsum(values) / len(values), interval=intervals.mean_interval(values)
    )


def _curve_json(group: RunGroup) -> dict[str, Any] | None:
    curves = group_curves(group, REWARD)
    if not curves.epochs:
        return None
    columns: dict[str, Sequence[float] | None] = {
        "x": curves.epochs,
        "mean": curves.means,
        "low": curves.lows,
        "high": curves.highs,
    }
    return {
        name: None if values is None else [value if math.isfinite(value) else None for value in values]
        for name, values in columns.items()
    }


def _last_epochs(runs: Sequence[ComparedRun]) -> int:
    lengths = [len(run.rewards) for run in runs if run.status == "finished" and run.rewards]
    return default_last_epochs(min(lengths or [len(run.rewards) for run in runs if run.rewards] or [0]))


def _figures(groups: Sequence[RunGroup], last_epochs: int) -> dict[str, tuple[MeanEstimate | None, ...]]:
    of_runs = [[run.figures(last_epochs) for run in group.finished] for group in groups]
    names = dict.fromkeys(name for group in of_runs for figures in group for name in figures)
    found: dict[str, tuple[MeanEstimate | None, ...]] = {}
    for name in names:
        values = [[figures[name] for figures in group if name in figures] for group in of_runs]
        found[name] = tuple(estimate(each) if each else None for each in values)
    return found


def _notes(
    groups: Sequence[RunGroup], figures: dict[str, tuple[MeanEstimate | None, ...]], last_epochs: int
) -> Iterable[str]:
    for group in groups:
        for run in group.runs:
            about = f"{run.records.path} (seed {run.seed})"
            if run.status != "finished":
                of = f" of {run.num_epochs}" if run.num_epochs else ""
                ending = f": {run.ending}" if run.ending else ""
                yield f"{about} {run.status}, {len(run.rewards)}{of} epochs{ending}; not in the figures"
            elif "final_reward" not in run.figures(last_epochs):
                yield f"{about} has an epoch without a finite reward in its last {last_epochs}; it has no final_reward"
            if run.resumes:
                yield f"{about} was resumed {run.resumes} times; an equal run ends with equal rewards"
    total = sum(len(group.finished) for group in groups)
    for name, estimates in figures.items():
        count = sum(len(each.values) for each in estimates if each is not None)
        if count < total and name != "final_reward":
            yield f"{name} is in {count} of {total} finished runs"
    lengths = sorted({len(run.rewards) for group in groups for run in group.finished})
    if len(lengths) > 1:
        yield f"runs have from {lengths[0]} to {lengths[-1]} epochs; the mean of a group ends with its shortest run"
