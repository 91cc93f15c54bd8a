"""Rows as tables: padding, packing, microbatches of few shapes, and minibatches."""

from itertools import chain

import jax
import numpy as np
import pytest

from jaxft.core.advantages import group_advantages, leave_one_out_advantages
from jaxft.core.packing import pack, unpack
from jaxft.errors import TrajectoryError
from jaxft.harness.data_models import Trajectory
from jaxft.training.advantages import collect_rewards, compute_advantages
from jaxft.training.batch import BatchPlanner, Row, divide, make_batch, select_sequences
from jaxft.training.config import LossConfig


def test_rows_are_padded_and_filled_up(make_sequence):
    rows = [Row(make_sequence(number), number) for number in range(5)]
    made = make_batch(rows, BatchPlanner(2 * 16 + 1))
    batch = made.batch
    assert made.microbatch_shapes == ((2, 16), (2, 16), (1, 16))
    assert batch.tokens.shape == batch.completion_mask.shape == (5, 16)
    assert batch.tokens[4].tolist() == [3, 14, 20, 25, 22, 1] + [0] * 10
    assert batch.completion_mask.sum(1).tolist() == [4, 4, 4, 4, 4]
    assert made.trajectories.tolist() == [0, 1, 2, 3, 4]
    assert (made.turns == -1).all() and not made.is_cut.any()
    assert batch.temperatures[0, :6].tolist() == [1.0] * 6
    assert batch.sampler_logprobs[0, :6].tolist() == batch.behavior_logprobs[0, :6].tolist() == [0.0] * 2 + [-5.0] * 4
    assert {np.asarray(each).dtype.name for each in batch if each is not None} == {"int32", "bool", "float32"}


@pytest.mark.parametrize(
    ("rows", "microbatch_tokens", "expected"),
    [
        (3, 1, (1, 1, 1)),  # at least a row
        (3, 10_000, (128,)),  # at least a quarter
        (4, 32, (2, 2)),
        (5, 48, (2, 2, 1)),  # three rows would fit, but powers of two have quarters
        (37, 256, (16, 16, 4, 4)),
    ],
)
def test_microbatches_are_of_a_few_sizes(make_sequence, rows, microbatch_tokens, expected):
    placed = make_batch([Row(make_sequence(n), 0) for n in range(rows)], BatchPlanner(microbatch_tokens))
    parts = placed.microbatches()
    assert expected == tuple(len(part.tokens) for part in parts)
    assert placed.microbatch_shapes == tuple(part.tokens.shape for part in parts)
    for name in ("tokens", "completion_mask", "temperatures"):
        whole = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(whole, getattr(placed.batch, name))
    assert parts[0].segment_ids is None
    assert sum(part.completion_mask.any(axis=1).sum() for part in parts) == rows


def test_the_longest_row_sets_the_width(make_sequence):
    longer = make_sequence(**{name: values * 6 for name, values in make_sequence() if isinstance(values, list)})
    batch, *_ = make_batch([Row(make_sequence(), 0), Row(longer, 1)], BatchPlanner(2 * 48))
    assert batch.tokens.shape == (2, 48)


def test_short_sequences_share_rows(make_sequence):
    rows = [Row(make_sequence(number, turns=[-1, -1, 0, 0, 1, 1]), number) for number in range(5)]
    made = make_batch(rows, BatchPlanner(16, packed=True))
    batch, packing, shapes, turns = made.batch, made.packing, made.microbatch_shapes, made.turns
    assert (shapes, batch.tokens.shape, packing.rows.tolist()) == (((1, 16),) * 3, (3, 16), [0, 0, 1, 1, 2])
    assert batch.segment_ids[0].tolist() == [1] * 6 + [2] * 6 + [0] * 4
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5] * 2 + [0] * 4
    assert turns[1].tolist() == [-1, -1, 0, 0, 1, 1] * 2 + [-1] * 4


def test_batches_of_any_size_share_a_few_shapes(make_sequence):
    def shapes(count, **options):
        placed = make_batch([Row(make_sequence(), n // 2) for n in range(count)], BatchPlanner(256, **options))
        return {part.tokens.shape for part in placed.microbatches()}

    for packed, expected in ((False, {(16, 16), (4, 16)}), (True, {(4, 64), (1, 64)})):
        found = set.union(*(shapes(count, packed=packed) for count in range(1, 100)))
        assert found == expected <= set(BatchPlanner(256, packed).all_shapes(16))
    found = set.union(*(shapes(count, pairs=True) for count in range(2, 100, 2)))
    assert found == {(16, 16), (4, 16)}


def longer(sequence, times):
    return sequence.model_copy(update={name: values * times for name, values in sequence if isinstance(values, list)})


@pytest.mark.parametrize("pairs", [False, True])
def test_microbatches_of_short_rows_are_narrow(make_sequence, pairs):
    times = [1, 1, 7, 1, 1, 1, 2, 3]
    rows = [Row(longer(make_sequence(n), k), n) for n, k in enumerate(times)]
    placed = make_batch(rows, BatchPlanner(96, pairs=pairs))
    assert placed.microbatch_shapes == (((2, 48), (2, 32), (4, 16)) if pairs else ((2, 48), (4, 16), (1, 16), (1, 16)))
    parts = placed.microbatches()
    assert [part.tokens.shape for part in parts] == list(placed.microbatch_shapes)
    assert sum(int(part.completion_mask.sum()) for part in parts) == 4 * sum(times)
    for place, row in zip(placed.packing.rows, rows, strict=True):
        tokens = row.sequence.tokens
        assert placed.batch.tokens[place, : len(tokens)].tolist() == tokens
    if pairs:
        assert (placed.packing.rows[1::2] == placed.packing.rows[::2] + 1).all()


def test_pairs_stay_together(make_sequence):
    rows = [Row(make_sequence(n), n // 2) for n in range(6)]
    for tokens, expected in ((1, (2, 2, 2)), (5 * 16, (4, 2)), (128, (2, 2, 2))):
        shapes = make_batch(rows, BatchPlanner(tokens, pairs=True)).microbatch_shapes
        assert tuple(count for count, _ in shapes) == expected


def test_packed_rows_are_as_wide_as_wastes_least():
    planner = BatchPlanner(1024, packed=True)
    for lengths, expected in (
        ([80, 48, 64, 64], (2, 128)),  # in 96 tokens each would lie alone
        ([80] * 4, (4, 96)),
        ([128, 100, 28], (2, 128)),
        ([600, 300, 120], (1, 1024)),
        ([80, 80, 80, 80, 48], (4, 128)),  # five rows of 96 are computed as six
        ([80, 48], (2, 96)),  # one row of 128 is computed as two
    ):
        packing, shapes = planner.plan(lengths)
        assert (int(packing.rows.max()) + 1, packing.width) == expected
        assert set(shapes) <= set(planner.all_shapes(max(lengths)))
    assert planner.plan([80, 48, 64, 64], job_width=96)[0].width == 96
    assert BatchPlanner(16384, packed=True).plan([80] * 33 + [48] * 24)[0].width == 96  # 33 rows of 128 mean 64
    assert BatchPlanner(100, packed=True).widths(80) == [96]  # no microbatch has 128 tokens
    assert BatchPlanner(512, packed=True, row_shards=8).widths(80) == [96]
    assert BatchPlanner(1024, packed=True, row_shards=8).widths(80) == [96, 128]


def test_jobs_of_other_lengths_have_packed_rows_of_one_width():
    planner = BatchPlanner(1024, packed=True)
    for longest in (10, 30, 48, 64):
        assert planner.plan([longest, *range(4, 10)] * 20)[0].width == 64
    assert planner.plan([43] * 20)[0].width == 48  # one row each, of 64 tokens a third more


def test_nothing_is_no_batch():
    with pytest.raises(ValueError, match="there are no rows"):
        make_batch([], BatchPlanner(64))


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"pairs": True}])
def test_selected_sequences_are_laid_out_as_if_they_were_alone(make_sequence, options):
    times, planner = [1, 1, 7, 1, 1, 1, 2, 2], BatchPlanner(96, **options)
    turns = [-1, -1, 0, 0, 1, 1]
    rows = [Row(longer(make_sequence(n, turns=turns, episode_truncated=n == 3), k), n) for n, k in enumerate(times)]
    job, chosen = make_batch(rows, planner), np.array([0, 2, 3, 6] if "pairs" not in options else [2, 3, 6, 7])
    got, expected = select_sequences(job, chosen, planner), make_batch([rows[i] for i in chosen], planner)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert select_sequences(job, np.arange(8), planner) is job
    short = select_sequences(job, np.array([0, 1]), planner).packing.width
    assert short == (48 if planner.packed else 16)  # packed parts of a job share its programs


def test_minibatches_take_every_trajectory_once_in_an_iteration(make_sequence):
    def divided(owners, seed="4 0"):
        planner = BatchPlanner(64)
        job = make_batch([Row(make_sequence(number), owner) for number, owner in enumerate(owners)], planner)
        return divide(job, planner, num_minibatches=3, num_iterations=2, seed=seed)

    minibatches = [each.trajectories.tolist() for each in divided(range(4))]
    assert [len(each) for each in minibatches] == [2, 1, 1] * 2
    assert sorted(chain(*minibatches[:3])) == sorted(chain(*minibatches[3:])) == [0, 1, 2, 3]
    assert minibatches[:3] != minibatches[3:]
    assert [each.trajectories.tolist() for each in divided(range(4))] == minibatches
    several = divided([0, 0, 1, 2, 2])
    assert sorted(len(each.trajectories) for each in several) == [1, 1, 2, 2, 2, 2]  # whole trajectories


def test_microbatches_divide_over_a_mesh(make_sequence):
    rows = [Row(make_sequence(number), number) for number in range(11)]
    for shares, pairs in ((4, False), (6, False), (4, True)):
        count = 10 if pairs else 11
        placed = make_batch(rows[:count], BatchPlanner(64, pairs=pairs, row_shards=shares))
        assert all(height % shares == 0 for height, _ in placed.microbatch_shapes)
        assert sum(height for height, _ in placed.microbatch_shapes) == placed.batch.tokens.shape[0] >= count
        assert placed.batch.completion_mask.any(axis=1).sum() == count


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
    batch = batch._replace(batch=batch.batch._replace(**tables), bootstrap_values=behind)
    return Found(*compute_advantages(batch, collect_rewards(groups, loss), loss))


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


@pytest.mark.parametrize(
    "knobs",
    [
        {"name": "reinforce", "advantages": "leave_one_out", "beta": 0.1, "kl": "k1_in_reward"},
        {"name": "reinforce", "advantages": "reinforce_pp", "beta": 0.1, "kl": "k1_in_reward"},
        {"name": "reinforce", "advantages": "group_mean", "beta": 0.1, "kl": "k1_in_reward", "shaped": True},
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
            names = ("old_logprobs", "ref_logprobs", "old_values")
            scores.append(dict(zip(names, draw.normal(size=(3, 6 * count)), strict=True)))
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
