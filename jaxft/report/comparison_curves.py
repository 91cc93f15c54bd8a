"""Curves of groups of runs: the mean over seeds with its bootstrap band, and each run for itself.

A point of a reward belongs to the policy that has trained for so many epochs, so that training and validation rewards
of one policy stand above each other.
"""

import math
from typing import NamedTuple

import numpy as np

from jaxft.report.compared_runs import ComparedRun, column
from jaxft.report.intervals import mean_band
from jaxft.report.run_groups import RunGroup

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


class GroupCurves(NamedTuple):
    """The curves of a group.

    Attributes:
        singles: each run that has values, with a value by epoch.
        epochs: the epochs that all finished runs have.
        means: mean of the finished runs at each of the epochs.
        lows: lower ends of the bootstrap intervals of the mean; None for one run.
        highs: upper ends.
    """

    singles: list[tuple[ComparedRun, dict[int, float]]]
    epochs: list[int]
    means: list[float]
    lows: list[float] | None = None
    highs: list[float] | None = None


def group_curves(group: RunGroup, metric: str) -> GroupCurves:
    """Return the curves of a group.

    Args:
        group: the group.
        metric: a key of `CURVES`, or another column of `training_metrics.jsonl`.
    """
    singles = [(run, curve) for run in group.runs if (curve := run_curve(run, metric))]
    finished = [curve for run, curve in singles if run.status == "finished"]
    if not finished:
        return GroupCurves(singles, [], [])
    epochs = [epoch for epoch in finished[0] if all(epoch in curve for curve in finished)]
    rows = np.asarray([[curve[epoch] for epoch in epochs] for curve in finished])
    means = rows.mean(axis=0).tolist()
    if len(rows) == 1:
        return GroupCurves(singles, epochs, means)
    lows, highs = mean_band(rows)
    return GroupCurves(singles, epochs, means, lows.tolist(), highs.tolist())


def run_curve(run: ComparedRun, metric: str) -> dict[int, float]:
    """Return the values of one run by epoch, NaN for a gap; empty if none is finite."""
    if metric in (REWARD, VALIDATION):
        points = dict(enumerate(run.rewards) if metric == REWARD else run.validations)
    else:
        points = dict(column(run.records.timings if metric == RATE else run.records.metrics, metric))
    if not any(map(math.isfinite, points.values())):
        return {}
    return {epoch: y if math.isfinite(y) else math.nan for epoch, y in points.items()}
