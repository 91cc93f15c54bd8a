"""Intervals of figures over seeds: the bootstrap in the manner of rliable.

A seed is one run from a random start, so the runs of a group are a sample, and their mean has an error. rliable
(Agarwal et al. 2021, https://arxiv.org/abs/2108.13264) draws the runs of each group again with replacement, each group
for itself (the strata of the stratified bootstrap), and takes the quantiles 0.025 and 0.975 of what it computes from
the draws. Curves are drawn as wholes: all epochs of a draw are of the same runs.

Draws are the same in every call, and do not depend on the order of the runs.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000
"""Number of draws of the bootstrap for a figure."""
CURVE_RESAMPLES = 2_000
"""Number of draws of the bootstrap for the band of a curve, at each of its points."""
LEVEL = 0.95


class Interval(NamedTuple):
    """An interval with both ends."""

    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the bootstrap interval of the mean; None for fewer than two values.

    Of two or three values it is their range: each extreme is drawn alone more often than one time in 40.

    >>> mean_interval([2.0, 6.0, 4.0])
    Interval(low=2.0, high=6.0)
    """
    if len(values) < 2:
        return None
    low, high = mean_band(np.asarray([values], float).T, RESAMPLES)
    return Interval(float(low[0]), float(high[0]))


def mean_band(curves: np.ndarray, resamples: int = CURVE_RESAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper ends of the bootstrap intervals of the mean, at each point of some curves.

    Args:
        curves: a row per run and a column per point; at least two rows. NaN at a point gives NaN there.
        resamples: number of draws.
    """
    curves = np.asarray(curves, float)
    curves = curves[np.lexsort(curves.T[::-1])]  # so that the order of the runs does not matter
    weights = _draws(len(curves), resamples)
    low, high = np.empty(curves.shape[1]), np.empty(curves.shape[1])
    for start in range(0, curves.shape[1], 256):  # in pieces, for memory
        piece = slice(start, start + 256)
        low[piece], high[piece] = _ends(weights @ curves[:, piece] / len(curves))
    # A mean of equal values may be off by rounding.
    return np.maximum(low, curves.min(axis=0)), np.minimum(high, curves.max(axis=0))


@lru_cache(maxsize=32)
def _draws(count: int, resamples: int) -> np.ndarray:
    """Return how often each of `count` runs is in each draw; a row per draw."""
    generator = np.random.default_rng([0, count])
    return generator.multinomial(count, np.full(count, 1 / count), size=resamples).astype(float)


def _ends(drawn: np.ndarray) -> np.ndarray:
    return np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
