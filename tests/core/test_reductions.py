"""Sums and means over rows and batches, packed or not."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.reductions import aggregate, count_tokens, row_sums, token_mean
from jaxft.core.types import Denominators

X = jnp.array([[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 64.0, 128.0]])
MASK = jnp.array([[True, False, True, True], [False, False, False, True]])
SEGMENTS = jnp.array([[7, 7, 900, 900], [0, 5, 5, 5]])
"""Three sequences with a trained token; the ids are as large and as unordered as a caller may have them."""


def test_sums_of_rows_and_of_segments():
    np.testing.assert_array_equal(row_sums(X), [[15.0], [240.0]])
    np.testing.assert_array_equal(row_sums(X, SEGMENTS), [[3, 3, 12, 12], [16, 224, 224, 224]])


def test_counts():
    assert count_tokens(MASK) == (2, 4, 1, 2)
    assert count_tokens(MASK, SEGMENTS) == (3, 4, 1, 3)
    assert count_tokens(MASK[:1]) == (1, 3, 0, 1)  # a row alone is no pair
    assert count_tokens(jnp.zeros((4, 3), bool)) == (0, 0, 0, 0)


def test_trajectories_are_counted_by_their_tokens():
    # The first and the third sequence are one trajectory of two tokens; of the second a third is somewhere else.
    tokens = jnp.array([[2.0, 2.0, 3.0, 3.0], [7.0, 3.0, 3.0, 2.0]])
    np.testing.assert_allclose(count_tokens(MASK, SEGMENTS, tokens)[3], 1 / 2 + 2 / 3 + 1 / 2, rtol=1e-7)
    both = jnp.full((2, 4), 4.0)
    assert count_tokens(MASK, trajectory_tokens=both)[3] == count_tokens(MASK, SEGMENTS, both)[3] == 1
    parts = [count_tokens(MASK[row : row + 1], trajectory_tokens=both[:1])[3] for row in (0, 1)]
    assert parts == [0.75, 0.25]
    assert count_tokens(jnp.zeros((4, 3), bool), trajectory_tokens=jnp.zeros((4, 3)))[3] == 0


def test_a_trajectory_is_averaged_over_all_its_tokens():
    both = jnp.full(MASK.shape, 4.0)
    counted = count_tokens(MASK, trajectory_tokens=both)
    for aggregation, expected in (("seq_mean_token_mean", 141 / 4), ("token_mean", 141 / 4), ("constant", 141 / 10)):
        got = aggregate(X, MASK, counted, aggregation, 10, trajectory_tokens=both)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        parts = [
            aggregate(X[row], MASK[row], counted, aggregation, 10, trajectory_tokens=both[row])
            for row in (slice(1), slice(1, 2))
        ]
        np.testing.assert_allclose(sum(parts), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"denominators\.trajectories is None"):
        aggregate(X, MASK, Denominators(jnp.array(2.0), jnp.array(4.0)), "seq_mean_token_mean", trajectory_tokens=both)


@pytest.mark.parametrize(
    ("aggregation", "of_rows", "of_segments"),
    [
        ("seq_mean_token_mean", (13 / 3 + 128) / 2, (1 + 6 + 128) / 3),
        ("token_mean", 141 / 4, 141 / 4),
        ("constant", 141 / (2 * 10), 141 / (3 * 10)),
    ],
)
def test_aggregations_by_hand(aggregation, of_rows, of_segments):
    got = aggregate(X, MASK, count_tokens(MASK), aggregation, 10)
    np.testing.assert_allclose(got, of_rows, rtol=1e-6)
    got = aggregate(X, MASK, count_tokens(MASK, SEGMENTS), aggregation, 10, SEGMENTS)
    np.testing.assert_allclose(got, of_segments, rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean", "constant"])
def test_empty_masks_give_zero(aggregation):
    empty = jnp.zeros(X.shape, bool)
    assert aggregate(X * jnp.nan, empty, count_tokens(empty), aggregation, 10) == 0
    assert token_mean(X * jnp.nan, empty, count_tokens(empty)) == 0


@pytest.mark.parametrize("budget", [0, -3])
def test_budgets_that_nothing_can_be_divided_by_are_refused(budget):
    with pytest.raises(ValueError, match=f"max_completion_tokens is {budget}; wanted at least 1"):
        aggregate(X, MASK, Denominators(jnp.array(2.0), jnp.array(4.0)), "constant", budget)
