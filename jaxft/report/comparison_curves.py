"""Curves of groups of runs: the mean over seeds with its bootstrap band, and each run for itself.

A point belongs to the policy that has trained for so many epochs, episodes, seconds or tokens: what came before the
epoch is counted, so that training and validation rewards of one policy stand above each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from jaxft.report.compared_runs import ComparedRun, column
from jaxft.report.intervals import mean_band
from jaxft.report.run_groups import RunGroup

X_AXES = {
    "epochs": "epochs",
    "episodes": "episodes",
    "seconds": "seconds of training",
    "tokens": "trained tokens",
}
"""Names of horizontal axes, with their labels."""

REWARD, VALIDATION, RATE = "reward_mean", "validation", "tokens_per_second"

CURVES = {
    REWARD: "training reward, of the evaluator",
    VALIDATION: "validation reward",
    "entropy": "entropy, nats per token",
    "kl": "KL to the reference",
    "completion_tokens_mean": "sampled tokens of a trajectory",
    "grad_norm": "gradient norm",
    "truncated_fraction": "truncated fraction",
    RATE: "tokens per second of sampling",
}
"""Metrics that are drawn, with their captions."""

GRID_POINTS = 200
"""Number of points at which runs are interpolated whose points are not the same."""


@dataclass(frozen=True)
class Curve:
    """Values at ascending positions; NaN is a gap."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True)
class GroupCurves:
    """The curves of a group.

    Attributes:
        group: the group.
        singles: each run that has values, with its curve.
        mean: mean of the finished runs, as far as the shortest of them goes; None if none has values.
        lows: lower ends of the bootstrap intervals of the mean; None for one run.
        highs: upper ends.
    """

    group: RunGroup
    singles: tuple[tuple[ComparedRun, Curve], ...]
    mean: Curve | None
    lows: tuple[float, ...] | None = None
    highs: tuple[float, ...] | None = None


def group_curves(group: RunGroup, metric: str, x_axis: str = "epochs") -> GroupCurves:
    """Return the curves of a group.

    Args:
        group: the group.
        metric: a key of `CURVES`, or another column of `training_metrics.jsonl`.
        x_axis: a key of `X_AXES`.
    """
    singles = tuple((run, curve) for run in group.runs if (curve := run_curve(run, metric, x_axis)).xs)
    finished = [curve for run, curve in singles if run.status == "finished"]
    if not finished:
        return GroupCurves(group, singles, None)
    xs, rows = _align_curves(finished)
    mean = Curve(tuple(xs), tuple(rows.mean(axis=0).tolist()))
    if len(rows) == 1:
        return GroupCurves(group, singles, mean)
    lows, highs = mean_band(rows)
    return GroupCurves(group, singles, mean, tuple(lows.tolist()), tuple(highs.tolist()))


def run_curve(run: ComparedRun, metric: str, x_axis: str = "epochs") -> Curve:
    """Return the curve of one run; empty if it has no finite value, or does not record what the axis counts."""
    if metric in (REWARD, VALIDATION):
        points = list(enumerate(run.rewards)) if metric == REWARD else run.validations
    else:
        points = column(run.records.timings if metric == RATE else run.records.metrics, metric)
    if not any(math.isfinite(y) for _, y in points):
        return Curve((), ())
    places = _places(run, x_axis, max(epoch for epoch, _ in points))
    kept = [(places[epoch], y) for epoch, y in points if epoch < len(places) and math.isfinite(places[epoch])]
    return Curve(tuple(x for x, _ in kept), tuple(y if math.isfinite(y) else math.nan for _, y in kept))


def _places(run: ComparedRun, x_axis: str, last: int) -> list[float]:
    """Return the position of each epoch from 0 to `last`; NaN from the first epoch on whose amount is not recorded."""
    if x_axis == "epochs":
        return [float(epoch) for epoch in range(last + 1)]
    if x_axis == "seconds":
        amounts = dict(column(run.records.timings, "seconds"))
    else:
        amounts = dict(column(run.records.metrics, "episodes" if x_axis == "episodes" else "trained_tokens"))
    return list(accumulate((amounts.get(epoch, math.nan) for epoch in range(last)), initial=0.0))


def _align_curves(curves: Sequence[Curve]) -> tuple[list[float], np.ndarray]:
    """Return common positions of some curves, and a row of values per curve."""
    shortest = min(len(curve.xs) for curve in curves)
    if len({curve.xs[:shortest] for curve in curves}) == 1:
        return list(curves[0].xs[:shortest]), np.asarray([curve.ys[:shortest] for curve in curves])
    start, end = max(curve.xs[0] for curve in curves), min(curve.xs[-1] for curve in curves)
    grid = np.linspace(start, max(end, start), GRID_POINTS if end > start else 1)
    return grid.tolist(), np.asarray([np.interp(grid, curve.xs, curve.ys) for curve in curves])
