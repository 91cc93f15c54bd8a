"""Intervals against rliable and scipy, against numbers by hand, and under other orders of the runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxft.report.intervals import mean_band, mean_interval

# Made by rliable 1.2.0: get_interval_estimates with 50,000 draws of a generator of its own. An end of an interval is a
# quantile of draws, whose error is some thousandths of the spread of the values.
RLIABLE = json.loads((Path(__file__).parents[1] / "data" / "oracles" / "rliable.json").read_text())
GROUPS = RLIABLE["groups"]


def near(values, group, share=0.04):
    return pytest.approx(values, abs=share * np.std(GROUPS[group]))


@pytest.mark.parametrize("group", GROUPS)
def test_means_are_those_of_rliable(group):
    expected = RLIABLE["mean"][group]
    assert mean_interval(GROUPS[group]) == near(expected["interval"], group)
    assert np.mean(GROUPS[group]) == pytest.approx(expected["point"])


def test_two_or_three_values_give_their_range_and_one_gives_none():
    assert mean_interval([1.0]) is None
    assert mean_interval([3.0, 1.0]) == (1.0, 3.0)
    assert mean_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert mean_interval([0.1, 0.1, 0.1, 0.1]) == (0.1, 0.1)


def test_the_order_of_runs_changes_nothing():
    values = GROUPS["a"]
    assert mean_interval(values) == mean_interval(values[::-1])
    curves = np.random.default_rng(0).normal(size=(5, 300))
    np.testing.assert_array_equal(mean_band(curves), mean_band(curves[[3, 1, 4, 0, 2]]))


def test_a_missing_value_leaves_a_gap_in_the_band():
    curves = np.ones((3, 4))
    curves[1, 2] = np.nan
    low, high = mean_band(curves)
    assert np.isnan(low).tolist() == np.isnan(high).tolist() == [False, False, True, False]
