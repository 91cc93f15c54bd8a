"""Sums and means over rows and batches, packed or not."""

import jax
import numpy as np
import pytest

from jaxft.core.reductions import aggregate, count_tokens, row_sums
from jaxft.core.types import Denominators

X = np.array([[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 64.0, 128.0]], np.float32)
MASK = np.array([[True, False, True, True], [False, False, False, True]])
SEGMENTS = np.array([[7, 7, 900, 900], [0, 5, 5, 5]])
"""Three sequences with a trained token; the ids are as large and as unordered as a caller may have them."""


count = jax.jit(count_tokens)
mean = jax.jit(aggregate, static_argnums=(3, 4))


def test_sums_of_rows_and_of_segments():
    np.testing.assert_array_equal(jax.jit(row_sums)(X), [[15.0], [240.0]])
    np.testing.assert_array_equal(jax.jit(row_sums)(X, SEGMENTS), [[3, 3, 12, 12], [16, 224, 224, 224]])


def test_counts():
    assert count(MASK)[:5] == (2, 4, 1, 2, None)
    assert count(MASK, SEGMENTS)[:5] == (3, 4, 1, 3, None)
    assert count(MASK[:1])[:5] == (1, 3, 0, 1, None)  # a row alone is no pair
    assert count(np.zeros((4, 3), bool))[:5] == (0, 0, 0, 0, None)


def test_trajectories_are_counted_by_their_tokens():
    # The first and the third sequence are one trajectory of two tokens; of the second a third is somewhere else.
    tokens = np.array([[2.0, 2.0, 3.0, 3.0], [7.0, 3.0, 3.0, 2.0]], np.float32)
    np.testing.assert_allclose(count(MASK, SEGMENTS, tokens)[3], 1 / 2 + 2 / 3 + 1 / 2, rtol=1e-7)
    both = np.full((2, 4), 4.0, np.float32)
    assert count(MASK, trajectory_tokens=both)[3] == count(MASK, SEGMENTS, both)[3] == 1
    nobody = np.zeros((1, 4), bool)
    parts = [count(mask, trajectory_tokens=both[:1])[3] for mask in (MASK[:1], MASK[1:], nobody)]
    assert parts == [0.75, 0.25, 0]


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("seq_mean_token_mean", 141 / 4), ("token_mean", 141 / 4), ("constant", 141 / 10)]
)
def test_a_trajectory_is_averaged_over_all_its_tokens(aggregation, expected):
    both = np.full(MASK.shape, 4.0, np.float32)
    counted = Denominators(*map(np.float32, (2, 4, 1, 1)))
    got = mean(X, MASK, counted, aggregation, 10, trajectory_tokens=both)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    parts = [
        mean(X[row], MASK[row], counted, aggregation, 10, trajectory_tokens=both[row])
        for row in (slice(1), slice(1, 2))
    ]
    np.testing.assert_allclose(np.sum(parts), expected, rtol=1e-6)


def test_counts_without_trajectories_are_refused():
    both, counted = np.full(MASK.shape, 4.0, np.float32), Denominators(np.float32(2), np.float32(4))
    with pytest.raises(ValueError, match=r"denominators\.trajectories is None"):
        mean(X, MASK, counted, "seq_mean_token_mean", None, trajectory_tokens=both)


@pytest.mark.parametrize(
    ("aggregation", "of_rows", "of_segments"),
    [
        ("seq_mean_token_mean", (13 / 3 + 128) / 2, (1 + 6 + 128) / 3),
        ("token_mean", 141 / 4, 141 / 4),
        ("constant", 141 / (2 * 10), 141 / (3 * 10)),
    ],
)
def test_aggregations_by_hand(aggregation, of_rows, of_segments):
    got = mean(X, MASK, Denominators(*map(np.float32, (2, 4, 1, 2))), aggregation, 10)
    np.testing.assert_allclose(got, of_rows, rtol=1e-6)
    got = mean(X, MASK, Denominators(*map(np.float32, (3, 4, 1, 3))), aggregation, 10, SEGMENTS)
    np.testing.assert_allclose(got, of_segments, rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean", "constant"])
def test_empty_masks_give_zero(aggregation):
    nothing = Denominators(*map(np.float32, (0, 0, 0, 0)))
    assert mean(X * np.nan, np.zeros(X.shape, bool), nothing, aggregation, 10) == 0


@pytest.mark.parametrize("budget", [0, -3])
def test_budgets_that_nothing_can_be_divided_by_are_refused(budget):
    with pytest.raises(ValueError, match=f"max_completion_tokens is {budget}; wanted at least 1"):
        mean(X, MASK, Denominators(np.float32(2), np.float32(4)), "constant", budget)
