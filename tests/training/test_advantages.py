"""Rewards of trajectories and advantages of their tokens: estimators, step rewards, KL and length in the reward."""

import numpy as np
import pytest

from jaxft.core.advantages import group_advantages, leave_one_out_advantages
from jaxft.core.packing import pack, unpack
from jaxft.errors import TrajectoryError
from jaxft.harness.data_models import Trajectory
from jaxft.training.advantages import collect_rewards, compute_advantages, with_selected
from jaxft.training.batch import BatchPlanner, Row, make_batch
from jaxft.training.config import LossConfig


class Found:
    """Advantages, returns and lengths of trajectories, per sequence; and the metrics."""

    def __init__(self, batch, metrics):
        self.metrics = metrics
        for name in ("advantages", "returns", "trajectory_tokens"):
            table = getattr(batch.batch, name)
            setattr(self, name, None if table is None else unpack(batch.packing, table))
        assert batch.batch.advantages.dtype == np.float32


def found(groups, scores=None, behind=None, packed=False, **knobs):
    """Return advantages, returns and lengths of the sequences of the scorable trajectories.

    Args:
        scores: tables of numbers per token, the same for each sequence, or a list of those.
        behind: the value behind each sequence.
    """
    loss = LossConfig(**knobs)
    trajectories = [trajectory for group in groups for trajectory in group]
    rows = [
        Row(sequence, index)
        for index, trajectory in enumerate(trajectories)
        for sequence in trajectory.sequences
        if trajectory.scorable
    ]
    batch = make_batch(rows, BatchPlanner(64, packed))
    scores = scores if isinstance(scores, list) else [scores or {}] * len(rows)
    tables = {name: pack(batch.packing, [each[name] for each in scores], np.float32) for name in scores[0]}
    batch = batch._replace(sum_pi_squared=tables.pop("sum_pi_squared", None), bootstrap_values=behind)
    batch = batch._replace(batch=batch.batch._replace(**tables))
    return Found(*compute_advantages(batch, collect_rewards(groups, loss), loss))


def test_groups_without_a_positive_mean_are_counted_and_get_none(make_group):
    groups = [make_group(1.0, 0.0), make_group(0.0, 0.0), make_group(-1.0, 0.5), make_group(0.2, None)]
    groups.append(make_group(0.0, 0.0, shaped_rewards=[[1.0, 1.0], [0.0, 0.0]]))
    got = found(groups, advantages="max_rl")
    assert [set(each) for each in got.advantages[:6]] == [{1.0}, {-1.0}, {0.0}, {0.0}, {0.0}, {0.0}]
    assert got.metrics["nonpositive_mean_groups"] == 2
    assert "nonpositive_mean_groups" not in found(groups).metrics


def test_rows_share_the_advantage_of_their_trajectory(make_group):
    groups = [make_group(1.0, 0.0, None), make_group(2.0, 4.0)]
    groups[0][0].sequences.append(groups[0][0].sequences[0])
    got = found(groups).advantages
    first, second, _, third, fourth = group_advantages([1.0, 0.0, np.nan, 2.0, 4.0], [0, 0, 0, 1, 1])
    assert [set(each) for each in got] == [{np.float32(x)} for x in (first, first, second, third, fourth)]


@pytest.mark.parametrize(
    "knobs, count",
    [
        ({}, 4),
        ({"reward_weights": {"right": 1.0}}, 5),
        ({"reward_weights": {"right": 1.0, "short": 1.0}, "multi_objective_aggregation": "normalize_then_sum"}, 4),
        ({"name": "reinforce", "advantages": "reinforce_pp"}, 1),  # whitened over the batch; one group has no row
        ({"distillation": {"teacher": "teacher", "form": "reverse"}}, None),
    ],
)
def test_signal_is_an_advantage_other_than_0(make_group, knobs, count):
    named = [{"right": 1.0, "short": 0.0}, {"right": 1.0, "short": 2.0}]
    groups = [
        make_group(1.0, 3.0, named_rewards=named),  # differ by what has no weight in the second case
        make_group(2.0, 2.0, named_rewards=named[:1] * 2),
        make_group(0.0, 0.0, named_rewards=named[:1] * 2, shaped_rewards=[[1.0, 0.0], [0.0, 1.0]]),  # equal sums
        make_group(0.0, 9.0, named_rewards=named, shaped_rewards=[[1.0, 1.0], [1.0, 1.0]]),
        make_group(1.0, None, named_rewards=[named[0], None]),
        make_group(None, None, named_rewards=[None, None]),
    ]
    metrics = found(groups, **knobs).metrics
    assert metrics == ({} if count is None else {"no_signal_groups": count})


def test_rows_know_the_tokens_of_their_trajectory(make_group):
    groups = [make_group(1.0, 0.0)]
    groups[0][1].sequences.append(groups[0][1].sequences[0])
    assert [set(each) for each in found(groups).trajectory_tokens] == [{4}, {8}, {8}]
    for knobs in ({"weigh": "sequence"}, {"name": "dapo"}, {"name": "gspo", "aggregation": "token_mean"}):
        assert found(groups, **knobs).trajectory_tokens is None


def test_named_rewards_are_weighted_before_or_after_they_are_normalised(make_group):
    named = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 8.0}, {"right": 0.0, "short": 0.0}]
    group = make_group(1.0, 8.0, 0.0, named_rewards=named)
    weights = {"short": 0.5, "right": 2.0}
    summed = found([group], name="reinforce", advantages="leave_one_out", reward_weights=weights).advantages
    assert [each[0] for each in summed] == leave_one_out_advantages([2.0, 4.0, 0.0], [0, 0, 0]).tolist()
    apart = found([group], reward_weights=weights, multi_objective_aggregation="normalize_then_sum").advantages
    by_hand = 0.5 * group_advantages([0.0, 8.0, 0.0], [0] * 3) + 2 * group_advantages([1.0, 0.0, 0.0], [0] * 3)
    np.testing.assert_allclose([each[0] for each in apart], by_hand, rtol=ROUNDING)


def test_long_answers_lose_reward(make_group):
    group = make_group(1.0, 1.0)
    group[0].sequences.append(group[0].sequences[0])  # 8 trained tokens against 4
    loss = LossConfig(max_completion_tokens=8, overlong_buffer_tokens=4)
    credit = collect_rewards([group], loss)
    assert credit.rewards.tolist() == [0.0, 1.0]
    trained = {"trained_reward_mean": 0.5, "trained_reward_min": 0.0, "trained_reward_max": 1.0}
    assert credit.metrics == {"overlong_penalty_mean": -0.5, **trained}


def test_each_task_is_compared_with_itself(make_group):
    small = [t.model_copy(update={"task": "small"}) for t in make_group(0.0, 1.0)]
    large = [t.model_copy(update={"task": "large"}) for t in make_group(0.0, 300.0, 0.0)]
    scores = {"old_values": np.zeros(6, np.float32)}
    for knobs in ({"advantages": "batch"}, {"advantages": "reinforce_pp"}, {"name": "ppo", "advantages": "gae"}):
        together = found([small, large], scores, np.zeros(5, np.float32), **knobs).advantages
        alone = [found([each], scores, np.zeros(len(each), np.float32), **knobs).advantages for each in (small, large)]
        for each, by_itself in zip(together, [*alone[0], *alone[1]], strict=True):  # one spread would drown the small
            np.testing.assert_allclose(each, by_itself, rtol=ROUNDING)
    steps = [[t.model_copy(update={"shaped_rewards": [0.0, t.reward]}) for t in group] for group in (small, large)]
    own = [found([each], advantages="batch").advantages for each in steps]
    np.testing.assert_array_equal(found(steps, advantages="batch").advantages, [*own[0], *own[1]])


def test_each_task_has_options_of_its_own(make_group):
    groups = [[t.model_copy(update={"task": task}) for t in make_group(1.0, 0.0)] for task in ("short", "long")]
    per_task = {"long": {"weight": 0.5, "clip_high": 0.3}}
    knobs = {"name": "dapo", "advantages": "group_mean", "clip_high": 0.28}
    assert [each[2] for each in found(groups, per_task=per_task, **knobs).advantages] == [0.5, -0.5, 0.25, -0.25]
    loss = LossConfig(per_task=per_task, **knobs)
    rows = [Row(t.sequences[0], n) for n, t in enumerate(t for group in groups for t in group)]
    job, _ = compute_advantages(make_batch(rows, BatchPlanner(64)), collect_rewards(groups, loss), loss)
    clips = [each[2] for each in unpack(job.packing, job.batch.clip_high)]
    assert clips == pytest.approx([0.28, 0.28, 0.3, 0.3]) and job.batch.clip_low is None and job.batch.beta is None


def test_each_task_has_its_length_penalty_and_kl_in_the_reward(make_group):
    groups = [[t.model_copy(update={"task": task}) for t in make_group(1.0, 1.0)] for task in ("short", "long")]
    for group in groups:
        group[0].sequences.append(group[0].sequences[0])  # 8 trained tokens against 4
    buffers = {"short": {"max_completion_tokens": 8, "overlong_buffer_tokens": 4}}
    assert collect_rewards(groups, LossConfig(per_task=buffers)).rewards.tolist() == [0.0, 1.0, 1.0, 1.0]
    scores = {"old_logprobs": np.full(6, 0.5, np.float32), "ref_logprobs": np.zeros(6, np.float32)}
    knobs = {"name": "reinforce", "advantages": "group_mean", "beta": 0.1, "kl": "k1_in_reward"}
    got = found(groups, scores, per_task={"short": {"beta": 0.0}}, **knobs).advantages  # 8 and 4 tokens of k1 0.5
    assert [each[2] for each in got] == pytest.approx([0.0] * 3 + [-0.1, -0.1, 0.1])


def test_step_rewards_take_the_place_of_the_outcome_in_their_group(make_group, make_sequence):
    mixed = make_group(9.0, 9.0, 9.0, shaped_rewards=[[1.0, 2.0], [1.0, 0.0], None])
    outcomes = make_group(1.0, 0.0, None, shaped_rewards=[None, None, [5.0, 5.0]])
    outcomes[0].sequences[0] = make_sequence(0, turns=[-1, -1, 3, 3, 4, 4])  # more turns than any with step rewards
    outcomes[1].sequences[0] = make_sequence(1)  # of no turns, and its group needs none
    got = found([mixed, outcomes], name="dr_grpo", max_completion_tokens=8, gamma=0.5).advantages
    # To go: (2, 2), (1, 0), and (4.5, 9) for the one whose outcome counts at its last turn.
    expected = [[-0.5] * 2 + [-5 / 3] * 2, [-1.5] * 2 + [-11 / 3] * 2, [2.0] * 2 + [16 / 3] * 2, [0.5] * 4, [-0.5] * 4]
    np.testing.assert_allclose(np.array(got)[:, 2:], expected, rtol=ROUNDING)


def test_step_rewards_leave_the_named_rewards_of_other_groups_to_be_normalised(make_group):
    named = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 8.0}, {"right": 0.0, "short": 0.0}]
    knobs = {"reward_weights": {"right": 2.0, "short": 0.5}, "multi_objective_aggregation": "normalize_then_sum"}
    mixed = make_group(0.0, 0.0, 0.0, named_rewards=named, shaped_rewards=[[1.0, 2.0], [0.0, 0.0], None])
    group = make_group(0.0, 0.0, 0.0, named_rewards=named)
    got = np.array(found([mixed, group], **knobs).advantages)[:, [2, 4]].T
    # To go: (3, 2), (0, 0), and the weighted sum 0 of the third.
    steps = [group_advantages(to_go, [0] * 3) for to_go in ([3.0, 0.0, 0.0], [2.0, 0.0, 0.0])]
    apart = 2 * group_advantages([1.0, 0.0, 0.0], [0] * 3) + 0.5 * group_advantages([0.0, 8.0, 0.0], [0] * 3)
    np.testing.assert_allclose(got, [[*each, *apart] for each in steps], rtol=ROUNDING)


def test_step_rewards_pay_for_length_and_kl_too(make_group):
    group = make_group(9.0, 9.0, shaped_rewards=[[1.0, 2.0], [0.0, 0.0]])
    credit = collect_rewards([group], LossConfig(max_completion_tokens=4, overlong_buffer_tokens=2))
    assert credit.step_rewards.tolist() == [[1.0, 1.0], [0.0, -1.0]]  # all four tokens of the budget used
    knobs = {"name": "reinforce", "advantages": "group_mean", "beta": 0.5, "kl": "k1_in_reward"}
    # To go: (1 - 0.5 + 2, 2) against (0, 0).
    assert found([group], [K1, NO_K1], **knobs).advantages[0].tolist() == [0, 0, 1.25, 1.25, 1.0, 1.0]


def test_step_rewards_need_turns(make_group, make_sequence):
    group = make_group(1.0, 1.0, shaped_rewards=[[1.0, 2.0], None])
    group[1].sequences[0] = make_sequence()
    with pytest.raises(TrajectoryError, match="generation 1: with shaped_rewards in a group every sequence has to"):
        collect_rewards([group], LossConfig())


K1 = {"old_logprobs": np.array([9.0, 9, -1, -1, -1, -1]), "ref_logprobs": np.array([0.0, 0, -2, -1, -1, -1])}
"""A KL of 1 on the first trained token; what stands on the prompt counts for nothing."""
NO_K1 = {"old_logprobs": K1["ref_logprobs"], "ref_logprobs": K1["ref_logprobs"]}

ROUNDING = 6e-8
"""Advantages are computed in float64 and kept in float32."""


def test_kl_in_the_reward_comes_before_the_baseline(make_group):
    group = make_group(1.0, 0.0)
    kl = {"beta": 0.5, "kl": "k1_in_reward", "name": "reinforce"}
    got = found([group], K1, advantages="leave_one_out", **kl)
    assert [set(each) for each in got.advantages] == [{1.0}, {-1.0}]  # the same divergence for both
    apart = found([group], [K1, NO_K1], advantages="leave_one_out", **kl)
    expected = {"kl": np.exp(-1) / 8, "kl_k1": 1 / 8, "no_signal_groups": 0}  # one of eight tokens, where k3 is 1 / e
    assert apart.metrics == pytest.approx(expected)
    assert [set(each) for each in apart.advantages] == [{0.5}, {-0.5}]


def test_reinforce_pp_is_outcome_minus_kl_to_go_whitened(make_group):
    knobs = {"name": "reinforce", "advantages": "reinforce_pp", "beta": 0.5, "kl": "k1_in_reward"}
    got = found([make_group(1.0, 0.0)], K1, **knobs).advantages
    to_go = np.array([[0.5, 1, 1, 1], [-0.5, 0, 0, 0]])
    expected = (to_go - to_go.mean()) / np.sqrt(to_go.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.array(got)[:, 2:], expected, rtol=ROUNDING)
    assert not np.array(got)[:, :2].any()


def test_reinforce_pp_takes_step_rewards_where_turns_end(make_group):
    groups = [make_group(9.0, 4.0, shaped_rewards=[[1.0, 2.0], None]), make_group(8.0)]
    got = found(groups, name="reinforce", advantages="reinforce_pp", gamma=0.5).advantages
    # From the back: 2, 2 / 2, 1 + 1 / 2, 1.5 / 2; and the outcomes of those without step rewards.
    to_go = np.array([[0.75, 1.5, 1.0, 2.0], [0.5, 1.0, 2.0, 4.0], [1.0, 2.0, 4.0, 8.0]])
    expected = (to_go - to_go.mean()) / np.sqrt(to_go.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.array(got)[:, 2:], expected, rtol=ROUNDING)


@pytest.mark.parametrize("name, knobs", [("ppo", {}), ("reinforce", {"advantages": "reinforce_pp"})])
def test_a_later_step_in_another_row_counts_for_the_earlier_one(make_group, make_sequence, name, knobs):
    """Two turns that are two rows: the first one led to the second, which alone was rewarded."""

    def rows(first):
        return [make_sequence(0, turns=[-1, -1, *[first] * 4]), make_sequence(1, turns=[-1, -1, *[1 - first] * 4])]

    good, bad = make_group(1.0, 0.0, shaped_rewards=[[0.0, 1.0], [0.0, 0.0]])
    for first in (0, 1):  # whichever row comes first
        groups = [[trajectory.model_copy(update={"sequences": rows(first)}) for trajectory in (good, bad)]]
        values = {"old_values": np.zeros(6)}
        made = found(groups, values, name=name, **knobs)
        got = made.advantages
        assert (got[0][2:] > got[2][2:]).all()
        assert np.allclose(got[0], got[1]) and np.allclose(got[2], got[3])
        if name == "ppo":
            assert made.returns[0][2:].tolist() == pytest.approx([0.95**3, 0.95**2, 0.95, 1.0])


def test_gae_goes_on_where_an_episode_was_cut(make_group):
    values, behind = {"old_values": np.zeros(6)}, np.array([0.0, 4.0])
    got = found([make_group(1.0, 1.0)], values, behind, name="ppo", gae_lambda=1.0, gamma=0.5)
    assert [each[2:].tolist() for each in got.returns] == [[0.125, 0.25, 0.5, 1], [0.375, 0.75, 1.5, 3]]


def test_gae_gives_returns_too(make_group):
    values = {"old_values": np.array([7.0, 7, 0.5, 0.5, 0.5, 0.5])}
    got = found([make_group(1.0, 0.0)], values, name="ppo", gae_lambda=1.0)
    np.testing.assert_allclose(got.returns, [[0, 0, 1, 1, 1, 1], [0] * 6])
    scale = 0.5 / np.sqrt(np.var([0.5] * 4 + [-0.5] * 4, ddof=1) + 1e-8)
    np.testing.assert_allclose(np.array(got.advantages)[:, 2:], [[scale] * 4, [-scale] * 4], rtol=ROUNDING)


def test_optimal_baselines_of_discounted_tokens_need_rewards_that_differ(make_sequence):
    """Equal rewards of other lengths, and rows of one trajectory, have none; a KL in the reward gives some."""

    def trajectory(reward, *starts, **fields):
        rows = [make_sequence(completion_mask=[False] * start + [True] * (6 - start)) for start in starts]
        rows = [row.model_copy(update={"turns": [0, 0, 0, 0, 0, 1]}) for row in rows]
        return Trajectory(episode=[], reward=reward, sequences=rows, **fields)

    steps = {"shaped_rewards": [0.25, 0.75]}
    silent = [
        [trajectory(1.0, 4), trajectory(1.0, 1)],
        [trajectory(1.0, 4, 1), trajectory(1.0, 2)],
        [trajectory(1.0, 4, 1)],
        [trajectory(1.0, 4, 1, **steps)],
        [trajectory(1.0, 4, 1), trajectory(0.0)],  # no row of the other is left
    ]
    half = dict.fromkeys(("old_logprobs", "ref_logprobs"), np.full(6, np.log(0.5)))
    scores, knobs = half | {"sum_pi_squared": np.full(6, 0.5)}, {"advantages": "optimal_token", "gamma": 0.9}
    got = found([*silent, [trajectory(1.0, 4), trajectory(0.0, 1)]], scores, **knobs)
    assert not np.any(got.advantages[:-2]) and np.all(np.any(got.advantages[-2:], axis=1))
    assert got.metrics["no_signal_groups"] == 5
    penalized = found(silent, scores | {"ref_logprobs": np.zeros(6)}, beta=0.1, kl="k1_in_reward", **knobs).advantages
    assert np.any(penalized, axis=1).tolist() == [True] * 5 + [False] * 6


@pytest.mark.parametrize(
    "knobs",
    [
        {"name": "reinforce", "advantages": "leave_one_out", "beta": 0.1, "kl": "k1_in_reward"},
        {"name": "reinforce", "advantages": "reinforce_pp", "beta": 0.1, "kl": "k1_in_reward"},
        {"name": "reinforce", "advantages": "group_mean", "beta": 0.1, "kl": "k1_in_reward", "shaped": True},
        {"name": "dapo", "advantages": "optimal_token", "beta": 0.1, "kl": "k1_in_reward", "gamma": 0.9},
        {"name": "ppo", "shaped": True},
        {"name": "grpo"},
    ],
)
def test_every_layout_gives_the_same_bits(make_sequence, knobs):
    draw, knobs = np.random.default_rng(5), dict(knobs)
    is_shaped, group, scores = knobs.pop("shaped", False), [], []
    for place, times in enumerate((3, 1, 7, 2)):
        sequences = []
        for count in (times, 2):
            lists = {name: values * count for name, values in make_sequence(place) if isinstance(values, list)}
            turns = [turn if chosen else -1 for turn, chosen in enumerate(lists["completion_mask"])]
            sequences.append(make_sequence(**lists | {"turns": turns}))
            names = ("old_logprobs", "ref_logprobs", "old_values", "sum_pi_squared")
            scores.append(dict(zip(names, draw.normal(size=(4, 6 * count)), strict=True)))
        shaped = {"shaped_rewards": draw.normal(size=6 * times).tolist()} if is_shaped else {}
        group.append(Trajectory(episode=[], reward=draw.normal(), generation=place, sequences=sequences, **shaped))
    behind = draw.normal(size=len(scores))
    padded, packed = (found([group], scores, behind, packed, **knobs) for packed in (False, True))
    assert padded.metrics == packed.metrics
    for name in ("advantages", "returns", "trajectory_tokens"):
        first, second = getattr(padded, name), getattr(packed, name)
        assert (first is None) == (second is None)
        for one, other in zip(first or (), second or (), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_every_layout_and_only_the_seed_decides_what_is_selected(make_sequence, name):
    draw, loss = np.random.default_rng(6), LossConfig(name=name, cov_fraction=0.2)
    lists = [dict(make_sequence(place)) for place in range(8)]
    longer = [{key: values * 3 for key, values in each.items() if isinstance(values, list)} for each in lists]
    rows = [Row(make_sequence(**each), place) for place, each in enumerate(longer)]
    scores = {each: 2 * draw.normal(size=(8, 18)) - 3 for each in ("old_logprobs", "advantages")}

    def select(packed, seed):
        job = make_batch(rows, BatchPlanner(64, packed))
        tables = {each: pack(job.packing, values, np.float32) for each, values in scores.items()}
        job, metrics = with_selected(job._replace(batch=job.batch._replace(**tables)), loss, seed)
        assert not (job.batch.selected & ~job.batch.completion_mask).any()
        return np.concatenate(unpack(job.packing, job.batch.selected)), metrics

    (padded, metrics), (packed, same) = select(False, "a"), select(True, "a")
    np.testing.assert_array_equal(padded, packed)
    trained = np.concatenate([row.sequence.completion_mask for row in rows])
    assert metrics == same and metrics["selected_tokens"] == padded.sum() == int(0.2 * trained.sum())
    parts = np.cov(*(np.float32(scores[each]).ravel()[trained] for each in scores), ddof=0)
    assert metrics["covariance_mean"] == pytest.approx(parts[0, 1])
    assert (select(False, "b")[0] == padded).all() == (name == "kl_cov")
