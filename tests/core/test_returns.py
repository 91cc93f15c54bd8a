"""Advantages of tokens: published numbers, definitions as plain loops, and what untrained tokens must not change."""

import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.core.returns import gae, outcome_rewards, reward_to_go, whiten

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "oracles" / "advantages.json").read_text())["cases"]
CASES = [(case, name) for case in range(2) for name in VECTORS[case]["expected"] if "gamma" in name]
QUICKLY = {"xla_backend_optimization_level": 0}


def of_vectors(name, rewards, token_rewards, values, mask):
    numbers = name.split("_")
    gamma = float(numbers[numbers.index("gamma") + 1])
    if name.startswith("gae"):
        advantages, returns = gae(token_rewards, values, mask, gamma=gamma, lam=float(numbers[-1]))
    else:
        advantages = returns = reward_to_go(outcome_rewards(rewards, mask), mask, gamma=gamma)
    return whiten(advantages, mask), returns


@pytest.mark.parametrize(("case", "name"), CASES)
def test_published_numbers(case, name):
    expected, case = VECTORS[case]["expected"][name], VECTORS[case]
    mask = np.array(case["completion_mask"], bool)
    arrays = [np.array(case[field]) for field in ("rewards", "token_rewards", "values")]
    on_host = of_vectors(name, *arrays, mask)
    jitted = jax.jit(of_vectors, static_argnums=0, compiler_options=QUICKLY)
    on_device = jitted(name, *(jnp.array(array, jnp.float32) for array in arrays), jnp.array(mask))
    for got, fast, field in zip(on_host, on_device, ("advantages", "returns"), strict=True):
        want = np.where(mask, expected[field], 0.0)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-8)
        np.testing.assert_allclose(fast, want, rtol=1e-4, atol=1e-5)
        assert (got.dtype, fast.dtype) == (np.float64, np.float32)


def one_row_at_a_time(rewards, values, mask, gamma, lam):
    """The recursion over the trained tokens alone, each row for itself; rewards in between moved back."""
    advantages, returns = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for row in range(len(rewards)):
        trained = np.flatnonzero(mask[row])
        for place in reversed(range(len(trained))):
            t = trained[place]
            last = place + 1 == len(trained)
            until = rewards.shape[1] if last else trained[place + 1]
            value_after = 0.0 if last else values[row, trained[place + 1]]
            advantage_after = 0.0 if last else advantages[row, trained[place + 1]]
            delta = rewards[row, t:until].sum() + gamma * value_after - values[row, t]
            advantages[row, t] = delta + gamma * lam * advantage_after
            returns[row, t] = advantages[row, t] + values[row, t]
    return advantages, returns


@pytest.mark.parametrize("xp", [np, jnp])
def test_a_row_that_was_cut_goes_on_with_its_value(xp):
    """Deltas of the first row 1 + 0.5 x 2 - 0.25 and 0.5 x 0.25 - 0.5; the second, not cut, ends with 0."""
    rewards, values = xp.array([[0.0, 9.0, 1.0, 0.0], [0.0] * 4]), xp.array([[0.5, 9.0, 0.25, 9.0], [0.5] * 4])
    mask = xp.array([[True, False, True, False], [False, True, False, False]])
    rewards = xp.where(mask, rewards, 0.0)
    got = gae(rewards, values, mask, gamma=0.5, lam=0.5, bootstrap_values=xp.array([2.0, 0.0]))
    np.testing.assert_allclose(got.advantages, [[-0.375 + 0.25 * 1.75, 0, 1.75, 0], [0, -0.5, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(got.returns, [[0.5625, 0, 2.0, 0], [0, 0, 0, 0]], rtol=1e-6)
    with pytest.raises(ValueError, match=r"bootstrap_values have shape \(3,\); wanted one per row, \(2,\)"):
        inspect.unwrap(gae)(rewards, values, mask, bootstrap_values=xp.zeros(3))


arrays = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@settings(max_examples=40, deadline=None)
@given(draw=arrays, gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_is_its_recursion_over_trained_tokens(draw, gamma, lam):
    rewards, values = draw.normal(size=(2, 3, 7))
    mask = draw.random((3, 7)) < 0.6
    got = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for mine, plain in zip(got, one_row_at_a_time(rewards, values, mask, gamma, lam), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=0, atol=1e-12)
    # With lam 1 the returns are the rewards to go, whatever the values.
    if lam == 1.0:
        np.testing.assert_allclose(got.returns, reward_to_go(rewards, mask, gamma=gamma), rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(draw=arrays)
def test_padding_and_what_stands_on_it_change_nothing(draw):
    rewards, values = draw.normal(size=(2, 3, 7))
    mask = draw.random((3, 7)) < 0.6
    rewards = np.where(mask, rewards, 0.0)
    wide = [np.pad(rewards, ((0, 0), (0, 4))), np.pad(values, ((0, 0), (0, 4)), constant_values=99.0)]
    wide_mask = np.pad(mask, ((0, 0), (0, 4)))
    for got, padded in zip(gae(rewards, values, mask), gae(*wide, wide_mask), strict=True):
        np.testing.assert_array_equal(padded[:, :7], got)
        assert not padded[:, 7:].any()
    np.testing.assert_allclose(whiten(wide[0], wide_mask)[:, :7], whiten(rewards, mask), rtol=0, atol=1e-12)


def test_the_outcome_stands_on_the_last_trained_token():
    mask = np.array([[False, True, True, False], [False] * 4])
    np.testing.assert_array_equal(outcome_rewards(np.array([3.0, 5.0]), mask), [[0, 0, 3, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("values", [[[2.0, 2.0, 2.0]], [[1e7, 1e7 + 1, 1e7]], [[0.1 + 0.2, 0.3, 0.3]]])
@pytest.mark.parametrize("xp", [np, jnp])
def test_equal_values_whiten_to_zero(values, xp):
    x = xp.asarray(values, xp.float32 if xp is jnp else np.float64)
    assert not np.any(whiten(x, xp.ones(x.shape, bool)))


@pytest.mark.parametrize("trained", [0, 1])
def test_too_few_to_whiten(trained):
    mask = np.zeros((2, 3), bool)
    mask[0, :trained] = True
    assert not whiten(np.arange(6.0).reshape(2, 3), mask).any()
