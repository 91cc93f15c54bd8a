"""Advantages of groups: published numbers, a plain loop over groups, and the cases without a signal."""

import inspect
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.core.advantages import (
    ESTIMATORS,
    batch_advantages,
    estimate_advantages,
    gae,
    group_advantages,
    group_mean_advantages,
    leave_one_out_advantages,
    max_rl_advantages,
    normalize_then_sum,
    optimal_token_advantages,
    outcome_rewards,
    pass_at_k_advantages,
    reward_to_go,
    soft_overlong_punishment,
    step_advantages,
    weighted_sum,
    whiten,
)

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
VECTORS = json.loads((ORACLES / "advantages.json").read_text())["cases"]
PUBLISHED_2026 = json.loads((ORACLES / "advantages_2026.json").read_text())
VECTORS_2026 = PUBLISHED_2026["cases"]
GROUP_ESTIMATORS = [
    group_advantages,
    group_mean_advantages,
    leave_one_out_advantages,
    batch_advantages,
    max_rl_advantages,
    pass_at_k_advantages,
]
NAN, INF = float("nan"), float("inf")


def of_vectors(name, rewards, group_ids):
    if name == "group_eps_1e-6":
        return group_advantages(rewards, group_ids, eps=1e-6)
    return estimate_advantages(rewards, group_ids, name)


@jax.jit
def on_device(rewards, group_ids):
    """Advantages by every estimator."""
    return {estimator.__name__: estimator(rewards, group_ids) for estimator in GROUP_ESTIMATORS}


def one_group_at_a_time(estimator, rewards, group_ids, eps=1e-4):
    """The definitions again, written without a single trick of the code under test."""
    rewards, group_ids = np.asarray(rewards, np.float64), np.asarray(group_ids)
    scorable = np.isfinite(rewards)
    spread_of_batch = rewards[scorable].std(ddof=1) if scorable.sum() > 1 else 0.0
    result = np.zeros(len(rewards))
    for group in np.unique(group_ids):
        members = np.flatnonzero((group_ids == group) & scorable)
        of_group = rewards[members]
        if len(members) < 2 or np.ptp(of_group) < 1e-6 * max(1.0, np.abs(of_group).max()):
            continue
        centred = of_group - of_group.mean()
        is_positive = of_group.mean() > 1e-6 * np.abs(of_group).mean()
        first, second = np.sort(of_group)[[-1, -2]]
        result[members] = {
            max_rl_advantages: centred / of_group.mean() if is_positive else 0 * centred,
            pass_at_k_advantages: (of_group == first) * (first - second) / (of_group.std(ddof=1) + 1e-6),
            group_advantages: centred / (of_group.std(ddof=1) + eps),
            group_mean_advantages: centred,
            leave_one_out_advantages: of_group - (of_group.sum() - of_group) / (len(members) - 1),
            batch_advantages: centred / (spread_of_batch + eps),
        }[estimator]
    return result


@pytest.mark.parametrize("case", [*VECTORS, *VECTORS_2026], ids=["case0", "case1", "case2", "case3"])
def test_published_numbers(case):
    names = [each for each in case["expected"] if each in ("group_eps_1e-6", *ESTIMATORS)]

    @jax.jit
    def of_all(rewards, group_ids):
        return [of_vectors(name, rewards, group_ids) for name in names]

    jitted = of_all(np.array(case["rewards"], np.float32), np.array(case["group_ids"]))
    for name, fast in zip(names, jitted, strict=True):
        got = of_vectors(name, case["rewards"], case["group_ids"])
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, case["expected"][name], rtol=0, atol=1e-8)
        assert fast.dtype == np.float32
        np.testing.assert_allclose(fast, case["expected"][name], rtol=1e-5, atol=1e-5)


def of_tokens(case, rows=slice(None), dtype=np.float64):
    """`optimal_token_advantages` of some rows of a case."""
    tables = (np.array(case[name], dtype)[rows] for name in ("returns", "logprobs", "sum_pi_squared"))
    mask, group_ids = np.array(case["completion_mask"])[rows], np.array(case["group_ids"])[rows]
    return optimal_token_advantages(*tables, mask, group_ids)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-8), (np.float32, 1e-5)])
def test_optimal_baselines_of_tokens_are_verls(dtype, tolerance):
    case = PUBLISHED_2026["optimal_token"]
    np.testing.assert_allclose(of_tokens(case, dtype=dtype), case["advantages"], rtol=0, atol=tolerance)
    order = np.random.default_rng(1).permutation(9)
    expected = np.array(case["advantages"])[order]
    np.testing.assert_allclose(of_tokens(case, order, dtype), expected, rtol=0, atol=tolerance)


def test_optimal_baselines_need_a_group_that_differs():
    case = {name: np.array(values) for name, values in PUBLISHED_2026["optimal_token"].items()}
    alone = case | {"group_ids": np.arange(9)}
    equal = case | {"returns": np.ones((9, 7))}
    nothing = case | {"completion_mask": case["completion_mask"] & False}
    for each in (alone, equal, nothing):
        assert not of_tokens(each).any()
    # What is not trained counts nowhere, and a row without a trained token is not in its group.
    spoilt = {name: np.where(case["completion_mask"], case[name], np.nan) for name in ("returns", "logprobs")}
    np.testing.assert_array_equal(of_tokens(case | spoilt), of_tokens(case))
    shorter = case | {"completion_mask": case["completion_mask"] & (np.arange(9) != 4)[:, None]}
    np.testing.assert_array_equal(of_tokens(shorter)[np.arange(9) != 4], of_tokens(case, np.arange(9) != 4))
    certain = case | {"logprobs": np.zeros((9, 7)), "sum_pi_squared": np.ones((9, 7))}
    assert np.isfinite(of_tokens(certain)).all()
    # Squares in float32 are off by more than the energy of a nearly certain token: baselines stay within the returns.
    rng = np.random.default_rng(0)
    others = 10 ** rng.uniform(-6, -4, (9, 7))
    squares = ((1 - others) ** 2).astype(np.float32) + np.float32(3e-8) * rng.choice([-1, 1], (9, 7))
    close = case | {"logprobs": np.log1p(-others), "sum_pi_squared": squares, "returns": rng.integers(0, 2, (9, 7))}
    assert np.abs(of_tokens(close)).max() <= 1.0
    with pytest.raises(ValueError, match=r"logprobs has shape \(9, 6\); wanted that of returns, \(9, 7\)"):
        names = ("returns", "logprobs", "sum_pi_squared", "completion_mask", "group_ids")
        narrow = case | {"logprobs": case["logprobs"][:, 1:]}
        inspect.unwrap(optimal_token_advantages)(*(narrow[name] for name in names))


def test_batch_spread_counts_groups_that_have_no_signal_and_skips_unscorable_members():
    # The second group adds nothing but its rewards' spread: std of (0, 2, 5, 5) is sqrt(18 / 3).
    got = batch_advantages([0.0, 2.0, 5.0, 5.0, NAN], [0, 0, 1, 1, 0], eps=0.0)
    np.testing.assert_allclose(got, [-1 / np.sqrt(6), 1 / np.sqrt(6), 0, 0, 0], rtol=1e-12)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("on_host", [True, False], ids=["numpy", "jax"])
def test_no_signal_is_exactly_zero(estimator, on_host):
    # A lone member; equal rewards, also ones that f32 cannot hold exactly and ones that differ in their last digits.
    rewards = [0.7, 0.1, 0.1, 0.1, 1e6, 1e6 + 0.5, 0.3, 0.3 + 5e-7]
    groups = [0, 1, 1, 1, 2, 2, 3, 3]
    if on_host:
        got = estimator(rewards, groups)
    else:
        got = on_device(np.array(rewards, np.float32), np.array(groups))[estimator.__name__]
    assert np.array_equal(got, np.zeros(8))


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("on_host", [True, False], ids=["numpy", "jax"])
def test_unscorable_members_count_for_nobody(estimator, on_host):
    rewards = np.array([NAN, 1.0, INF, 0.0, -INF, 0.5, NAN, 4.0])
    groups = np.array([0, 0, 0, 0, 1, 1, 2, 3])  # the second group is left with one member, the third with none
    got = estimator(rewards, groups) if on_host else on_device(rewards.astype(np.float32), groups)[estimator.__name__]
    assert np.array_equal(np.flatnonzero(np.asarray(got)), [1] if estimator is pass_at_k_advantages else [1, 3])
    np.testing.assert_allclose(got, one_group_at_a_time(estimator, rewards, groups), rtol=1e-6)


reward = st.one_of(
    st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3)), st.sampled_from([0.0, 1.0, NAN, INF, -INF])
)


@settings(max_examples=60, deadline=None)
@given(members=st.lists(st.tuples(reward, st.integers(0, 5)), min_size=1, max_size=12), order=st.randoms())
def test_ragged_groups_in_any_order(members, order):
    rewards, groups = (list(column) for column in zip(*members, strict=True))
    permutation = list(range(len(members)))
    order.shuffle(permutation)
    for estimator in GROUP_ESTIMATORS:
        got = estimator(rewards, groups)
        np.testing.assert_allclose(got, one_group_at_a_time(estimator, rewards, groups), rtol=1e-9, atol=1e-9)
        permuted = estimator([rewards[i] for i in permutation], [groups[i] for i in permutation])
        np.testing.assert_allclose(permuted, got[permutation], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_batch_of_nothing(estimator):
    assert estimator([], np.zeros(0, np.int32)).shape == (0,)


def test_lengths_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"rewards have shape \(3,\) and group_ids \(2,\); wanted one of each"):
        group_advantages([1.0, 0.0, 1.0], [0, 0])


def test_negative_group_ids_are_refused():
    with pytest.raises(ValueError, match="group_ids holds -1; wanted numbers from 0 upwards"):
        group_advantages([1.0, 0.0], [0, -1])


def test_estimators_by_name():
    rewards, groups = [1.0, 0.0, 0.5], [0, 0, 0]
    names = ["group", "group_mean", "leave_one_out", "batch", "max_rl", "pass_at_k"]
    for name, estimator in zip(names, GROUP_ESTIMATORS, strict=True):
        assert np.array_equal(estimate_advantages(rewards, groups, name), estimator(rewards, groups))
    with pytest.raises(ValueError, match="estimator is 'median'; wanted one of group, group_mean"):
        estimate_advantages(rewards, groups, "median")


@pytest.mark.parametrize("jit", [lambda function: function, jax.jit], ids=["numpy", "jax"])
def test_several_rewards_by_hand(jit):
    rows = [[1.0, 10.0], [0.0, 30.0], [0.5, NAN], [NAN, NAN], [-np.inf, 20.0], [5.0, 5.0]]
    table = np.array(rows, np.float32)

    @jit
    def combined(table, group_ids):
        return weighted_sum(table, [1.0, 0.1]), normalize_then_sum(table, group_ids, [1.0, 3.0], eps=0.0)

    summed, normalized = combined(table, np.array([0, 0, 0, 0, 0, 1]))
    np.testing.assert_allclose(summed, [2.0, 3.0, 0.5, NAN, NAN, 5.5], rtol=1e-7)
    # (1, 0, 1/2) has mean and spread 1/2, and (10, 30) has spread sqrt(200); the last trajectory is alone.
    half = np.sqrt(0.5)
    np.testing.assert_allclose(normalized, [1 - 3 * half, -1 + 3 * half, 0.0, 0.0, 0.0, 0.0], rtol=1e-5)
    with pytest.raises(ValueError, match=r"rewards have shape \(6, 2\) and there are 1 weights"):
        weighted_sum(table, [1.0])


def steps_one_at_a_time(step_rewards, group_ids, gamma):
    """Rewards to go of ragged lists, each step's group found by hand."""
    to_go = [
        [sum(gamma ** (j - k) * reward for j, reward in enumerate(steps) if j >= k) for k in range(len(steps))]
        for steps in step_rewards
    ]
    return [
        [
            one_group_at_a_time(
                group_advantages,
                [other[k] for other in to_go if len(other) > k],
                [group for other, group in zip(to_go, group_ids, strict=True) if len(other) > k],
            )[[i for i, other in enumerate(to_go) if len(other) > k].index(row)]
            for k in range(len(to_go[row]))
        ]
        for row in range(len(to_go))
    ]


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.lists(st.floats(-5, 5).map(lambda x: round(x, 2)), max_size=4), min_size=1, max_size=6),
    gamma=st.sampled_from([1.0, 0.9]),
    draw=st.integers(0, 1000).map(np.random.default_rng),
)
def test_step_rewards_of_ragged_episodes(steps, gamma, draw):
    groups = draw.integers(0, 2, size=len(steps))
    table = np.full((len(steps), 4), NAN)
    for line, rewards in zip(table, steps, strict=True):
        line[: len(rewards)] = rewards
    got = step_advantages(table, groups, gamma=gamma)
    for line, expected in zip(got, steps_one_at_a_time(steps, groups, gamma), strict=True):
        np.testing.assert_allclose(line[: len(expected)], expected, rtol=1e-9, atol=1e-9)
        assert not line[len(expected) :].any()


def test_a_step_reward_that_is_missing_makes_the_trajectory_unscorable():
    got = step_advantages([[1.0, 0.0], [NAN, 1.0], [0.0, 0.0], [INF, 1.0]], [0] * 4, "group_mean")
    assert got.tolist() == [[0.5, 0.0], [0.0, 0.0], [-0.5, 0.0], [0.0, 0.0]]


NAMES = [name for name in VECTORS[0]["expected"] if "gamma" in name]


def of_returns(name, rewards, token_rewards, values, mask):
    numbers = name.split("_")
    gamma = float(numbers[numbers.index("gamma") + 1])
    if name.startswith("gae"):
        advantages, returns = gae(token_rewards, values, mask, gamma=gamma, lam=float(numbers[-1]))
    else:
        advantages = returns = reward_to_go(outcome_rewards(rewards, mask), mask, gamma=gamma)
    return whiten(advantages, mask), returns


@pytest.mark.parametrize("case", VECTORS, ids=["case0", "case1"])
def test_published_returns(case):
    mask = np.array(case["completion_mask"], bool)
    arrays = [np.array(case[field]) for field in ("rewards", "token_rewards", "values")]

    @jax.jit
    def of_all(*arrays):
        return [of_returns(name, *arrays) for name in NAMES]

    results = of_all(*(array.astype(np.float32) for array in arrays), mask)
    assert len(NAMES) == 6
    for name, on_device in zip(NAMES, results, strict=True):
        on_host = of_returns(name, *arrays, mask)
        for got, fast, field in zip(on_host, on_device, ("advantages", "returns"), strict=True):
            want = np.where(mask, case["expected"][name][field], 0.0)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-8, err_msg=name)
            np.testing.assert_allclose(fast, want, rtol=1e-4, atol=1e-5, err_msg=name)
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


@pytest.mark.parametrize("jit", [lambda function: function, jax.jit], ids=["numpy", "jax"])
def test_a_row_that_was_cut_goes_on_with_its_value(jit):
    """Deltas of the first row 1 + 0.5 x 2 - 0.25 and 0.5 x 0.25 - 0.5; the second, not cut, ends with 0."""
    rewards, values = (
        np.array(rows, np.float32) for rows in ([[0.0, 0.0, 1.0, 0.0], [0.0] * 4], [[0.5, 9.0, 0.25, 9.0], [0.5] * 4])
    )
    mask = np.array([[True, False, True, False], [False, True, False, False]])
    cut = jit(lambda *arrays: gae(*arrays[:3], gamma=0.5, lam=0.5, bootstrap_values=arrays[3]))
    got = cut(rewards, values, mask, np.array([2.0, 0.0], np.float32))
    np.testing.assert_allclose(got.advantages, [[-0.375 + 0.25 * 1.75, 0, 1.75, 0], [0, -0.5, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(got.returns, [[0.5625, 0, 2.0, 0], [0, 0, 0, 0]], rtol=1e-6)
    with pytest.raises(ValueError, match=r"bootstrap_values have shape \(3,\); wanted one per row, \(2,\)"):
        inspect.unwrap(gae)(rewards, values, mask, bootstrap_values=np.zeros(3))


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


jitted_whiten = jax.jit(whiten)


@pytest.mark.parametrize("values", [[[2.0, 2.0, 2.0]], [[1e7, 1e7 + 1, 1e7]], [[0.1 + 0.2, 0.3, 0.3]]])
def test_equal_values_whiten_to_zero(values):
    x, mask = np.array(values), np.ones((1, 3), bool)
    for found in (whiten(x, mask), jitted_whiten(x.astype(np.float32), mask)):
        assert not np.asarray(found).any()


@pytest.mark.parametrize("trained", [0, 1])
def test_too_few_to_whiten(trained):
    mask = np.zeros((2, 3), bool)
    mask[0, :trained] = True
    assert not whiten(np.arange(6.0).reshape(2, 3), mask).any()


LENGTHS, PENALTIES = [0, 80, 81, 95, 100, 400], [0.0, 0.0, -0.05, -0.75, -1.0, -1.0]


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint32, np.float32])
def test_by_hand(dtype):
    """Over the last 20 of 100; differences of unsigned lengths must not wrap around."""
    lengths = np.minimum(LENGTHS, 255).astype(dtype)
    got = soft_overlong_punishment(lengths, 100, 20)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, PENALTIES, rtol=1e-12)
    jitted = jax.jit(soft_overlong_punishment, static_argnums=(1, 2))(lengths, 100, 20)
    assert jitted.dtype == np.float32
    np.testing.assert_allclose(jitted, PENALTIES, rtol=1e-6)


@pytest.mark.parametrize("penalty_tokens", [0, -1, 101])
def test_refusals(penalty_tokens):
    with pytest.raises(ValueError, match=f"penalty_tokens is {penalty_tokens}; wanted 1 to max_completion_tokens, 100"):
        soft_overlong_punishment(np.array([1]), 100, penalty_tokens)
