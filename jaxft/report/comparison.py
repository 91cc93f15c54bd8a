"""Comparison of runs: which settings differ, the figures of each group over its seeds, and which group is better.

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
from jaxft.report.compared_runs import COMPARISON_KIND, ComparedRun, LeftOut, default_last_epochs, find_runs
from jaxft.report.comparison_curves import REWARD, group_curves
from jaxft.report.run_groups import Difference, RunGroup, group_runs

MAX_PAIRED_GROUPS = 8
"""With more groups, each is compared with the best one only."""

COVERAGE = {2: 51, 3: 75, 4: 80, 5: 83, 10: 90, 20: 93}
"""Coverage of the 95 % bootstrap interval, in percent, by the number of values, drawn from a normal distribution."""


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
class Improvement:
    """Probability that a run of one group ends with a higher reward than a run of another group."""

    group: str
    other: str
    probability: float
    interval: intervals.Interval | None


@dataclass(frozen=True)
class Comparison:
    """Groups of runs side by side.

    Attributes:
        groups: the groups, in the order of their first runs.
        differences: settings that differ, with a value for each group.
        figures: for each figure an estimate per group; None where no finished run has it.
        improvements: one for each pair of groups, or for each group and the best one, of the final reward.
        x_axis: horizontal axis of the curves, a key of `comparison_curves.X_AXES`.
        last_epochs: number of epochs over which `final_reward` is the mean.
        left_out: paths that are not in the comparison, with the reasons.
        notes: what a reader has to know: runs without figures, few seeds, metrics that some runs lack.
    """

    groups: tuple[RunGroup, ...]
    differences: tuple[Difference, ...]
    figures: dict[str, tuple[MeanEstimate | None, ...]]
    improvements: tuple[Improvement, ...]
    x_axis: str
    last_epochs: int
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]

    @property
    def runs(self) -> tuple[ComparedRun, ...]:
        """All runs, group by group."""
        return tuple(run for group in self.groups for run in group.runs)


def compare_runs(paths: Iterable[str | Path], *, x_axis: str = "epochs", last_epochs: int | None = None) -> Comparison:
    """Compare runs, folded over their seeds.

    Args:
        paths: run directories, or globs such as `runs/sweep/*`.
        x_axis: horizontal axis of the curves, a key of `comparison_curves.X_AXES`.
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
        improvements=_improvements(groups, figures.get("final_reward", ())),
        x_axis=x_axis,
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
        "kind": COMPARISON_KIND,
        "format_version": 1,
        "level": intervals.LEVEL,
        "resamples": intervals.RESAMPLES,
        "curve_resamples": intervals.CURVE_RESAMPLES,
        **asdict(replace(comparison, groups=())),
        "groups": [
            {"name": group.name, "runs": [_run_json(run, comparison.last_epochs) for run in group.runs]}
            for group in comparison.groups
        ],
        "curves": {group.name: _curve_json(group, comparison.x_axis) for group in comparison.groups},
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
        values=tuple(values),
        mean=math.fsum(values) / len(values),
        interval=intervals.mean_interval(values),
    )


def _curve_json(group: RunGroup, x_axis: str) -> dict[str, Any] | None:
    curves = group_curves(group, REWARD, x_axis)
    if curves.mean is None:
        return None
    columns = {"x": curves.mean.xs, "mean": curves.mean.ys, "low": curves.lows, "high": curves.highs}
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


def _improvements(groups: Sequence[RunGroup], rewards: Sequence[MeanEstimate | None]) -> tuple[Improvement, ...]:
    known = [(group.name, reward) for group, reward in zip(groups, rewards, strict=False) if reward is not None]
    best = max(known, key=lambda each: each[1].mean, default=None)
    pairs = [(one, other) for at, one in enumerate(known) for other in known[at + 1 :]]
    if len(known) > MAX_PAIRED_GROUPS:
        pairs = [(one, best) for one in known if best is not None and one is not best]
    found = []
    for (name, first), (other, second) in pairs:
        # With one run each the probability is 0 or 1, and says nothing.
        if len(first.values) + len(second.values) > 2:
            probability = intervals.probability_of_improvement(first.values, second.values)
            found.append(
                Improvement(name, other, probability, intervals.probability_interval(first.values, second.values))
            )
    return tuple(found)


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
    yield from _notes_on_seeds(groups)
    total = sum(len(group.finished) for group in groups)
    for name, estimates in figures.items():
        count = sum(len(each.values) for each in estimates if each is not None)
        if count < total and name != "final_reward":
            yield f"{name} is in {count} of {total} finished runs"
    yield from _notes_on_separation(groups, figures.get("final_reward", ()))
    lengths = sorted({len(run.rewards) for group in groups for run in group.finished})
    if len(lengths) > 1:
        yield f"runs have from {lengths[0]} to {lengths[-1]} epochs; the mean of a group ends with its shortest run"


def _notes_on_seeds(groups: Sequence[RunGroup]) -> Iterable[str]:
    counts = sorted({len(group.finished) for group in groups})
    for count in counts:
        if count == 0:
            names = ", ".join(group.name for group in groups if not group.finished)
            yield f"no finished run, so no figures: {names}"
        if count == 1:
            yield "groups with 1 seed have no interval: a second seed would show how far runs scatter"
        if count in (2, 3):
            yield (
                f"with {count} seeds the interval is their range, which is wide and yet has the true mean in it only "
                f"{COVERAGE[count]} times in 100"
            )
    seeds = [{run.seed for run in group.finished} for group in groups if group.finished]
    if len(seeds) > 1 and not set.intersection(*seeds):
        yield "the groups have no seed in common; the intervals do not need it"


def _notes_on_separation(groups: Sequence[RunGroup], rewards: Sequence[MeanEstimate | None]) -> Iterable[str]:
    """Yield the chance of two groups that do not overlap, of which the bootstrap has no interval."""
    if len(groups) != 2 or len(rewards) != 2 or rewards[0] is None or rewards[1] is None:
        return
    first, second = rewards[0].values, rewards[1].values
    if len(first) + len(second) > 2 and (min(first) > max(second) or max(first) < min(second)):
        ways = math.comb(len(first) + len(second), len(first))
        yield (
            f"the final rewards of the two groups do not overlap; with {len(first)} and {len(second)} seeds of equal "
            f"groups that happens 2 times in {ways}"
        )
