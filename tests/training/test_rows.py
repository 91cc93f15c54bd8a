"""From trajectories to training rows."""

import json
import math

import numpy as np
import pytest

from jaxft.errors import NothingToTrain, TrajectoryError
from jaxft.harness.data_models import EpisodeItem, Trajectory, TrajectoryCollection
from jaxft.rollout.calls import Prompt, logprobs_with_record, recorded_call
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.sequences import token_sequences
from jaxft.training.advantages import collect_rewards, group_rewards, with_usable_rewards
from jaxft.training.config import LossConfig
from jaxft.training.rows import check_lists, gather_examples, gather_rows


def test_the_order_in_which_episodes_ended_is_forgotten(make_sequence):
    def made(example_id, generation):
        fields = {"example_id": example_id, "generation": generation, "sequences": [make_sequence(generation)]}
        return Trajectory(episode=[], reward=0.0, **fields)

    groups = [[made("b", 2), made("b", 0), made("b", 1)], [made("a", 1), made("a", 0)]]
    gathered = gather_rows(TrajectoryCollection(trajectories=groups, run_id="any"), llm="policy", mask_truncated=False)
    order = [(each.example_id, each.generation) for group in gathered.groups for each in group]
    assert order == [("b", 0), ("b", 1), ("b", 2), ("a", 0), ("a", 1)]
    assert [row.trajectory for row in gathered.rows] == [0, 1, 2, 3, 4]
    assert [row.sequence.tokens[1] for row in gathered.rows] == [10, 11, 12, 10, 11]


def test_texts_are_of_no_version_and_of_no_chance(tokenizer):
    episode = [EpisodeItem(role=role, content=role, logprobs=[]) for role in ("user", "assistant")]
    texts = TrajectoryCollection(trajectories=[[Trajectory(episode=episode, reward=1.0)]], run_id="texts")
    (row,) = gather_examples(texts, ChatTemplate(tokenizer, (tokenizer.eos_token_id,)), None).rows
    given = row.sequence
    assert {*given.policy_versions} == {-1} and {*given.temperatures} == {1.0}
    assert {*given.sampler_logprobs} == {*given.behavior_logprobs} == {0.0}


def test_a_job_with_nothing_to_train_names_the_cause(make_group):
    def refusal(group, **metrics):
        collection = TrajectoryCollection(trajectories=[group], run_id="any", metrics=metrics)
        with pytest.raises(NothingToTrain) as refused:
            gather_rows(collection, llm="policy", mask_truncated=False)
        return str(refused.value)

    group = make_group(None, None)
    assert "2 of them without a usable reward" in refusal(group) and "`sequences` are None" not in refusal(group)
    assert "`sequences` are None" in refusal([each.model_copy(update={"sequences": None}) for each in group])
    assert "3 failed, 1 were dropped" in refusal(group, episodes=4, failed_episodes=3, dropped_episodes=1)


def test_rows_come_from_the_records_in_log_probabilities(make_call):
    first = make_call(0, (1, 2), [3, 4], messages=(), prompt=Prompt("", (1, 2), observations=(1,)))
    second = make_call(
        1, (1, 2, 3, 4, 5), [6], logprobs=[-1 / 3], finish_reason="length", messages=(), functions=("f",)
    )
    # Through JSON, as a file of another program would pass them on.
    logprobs = [json.loads(json.dumps(logprobs_with_record(call, str))) for call in (first, second)]
    assert [recorded_call(each) for each in logprobs] == [first, second]
    items = [
        EpisodeItem(role="user", content="q"),
        *(EpisodeItem(role="assistant", content="", logprobs=each) for each in logprobs),
    ]
    collection = TrajectoryCollection(trajectories=[[Trajectory(episode=items, reward=1.0)]], run_id="any")
    (row,) = gather_rows(collection, llm="policy", mask_truncated=False).rows
    assert row.sequence == token_sequences([first, second])[0]


@pytest.mark.parametrize(
    ("places", "message"),
    [((0,), "first token of a sequence"), ((1, 4), "token 4 of a sequence is trained as sampled")],
)
def test_what_is_observed_has_a_context_and_is_not_sampled(make_group, make_sequence, places, message):
    (trajectory,) = make_group(1.0)
    sequence = make_sequence(observations=[place in places for place in range(6)])
    with pytest.raises(TrajectoryError, match=message):
        check_lists(trajectory, sequence)
    with pytest.raises(TrajectoryError, match=r"differ in length: .*'observations': 2"):
        check_lists(trajectory, make_sequence(observations=[False, True]))


@pytest.mark.parametrize("logprobs", [None, [], {}, {"content": None}, {"content": []}, {"content": [{"token": "a"}]}])
def test_log_probabilities_without_a_record_give_no_call(logprobs):
    assert recorded_call(logprobs) is None


NORMALIZED = {"multi_objective_aggregation": "normalize_then_sum"}


@pytest.mark.parametrize("knobs", [{}, NORMALIZED])
def test_a_reward_that_does_not_judge_an_answer_is_left_out(make_group, knobs):
    rows = [(1.0, None), (None, 4.0), (math.nan, 2.0), (math.inf, 1.0), (None, None)]
    named = [dict(zip(("right", "short"), row, strict=True)) | {"kind": 7.0} for row in rows] + [{"short": 8.0}]
    loss = LossConfig(reward_weights={"right": 2.0, "short": 0.5}, **knobs)
    (group,) = with_usable_rewards([make_group(*[1.0] * 6, named_rewards=named)], loss)
    assert [trajectory.scorable for trajectory in group] == [True, True, True, False, False, True]
    rewards = collect_rewards([group], loss)
    np.testing.assert_array_equal(rewards.rewards, [2.0, 2.0, 1.0, np.nan, np.nan, 4.0])
    if knobs:
        np.testing.assert_array_equal(rewards.named_rewards[:, 0], [1.0] + [np.nan] * 5)
        np.testing.assert_array_equal(rewards.named_rewards[:, 1], [np.nan, 4.0, 2.0, np.nan, np.nan, 8.0])


def test_no_weighted_reward_at_all_is_none(make_group):
    named = [{"right": 1.0, "short": 1.0}, {"short": 1.0}, {"right": math.nan, "short": 1.0}, None]
    loss = LossConfig(reward_weights={"right": 1.0})
    (group,) = with_usable_rewards([make_group(1.0, 1.0, 1.0, 1.0, named_rewards=named)], loss)
    assert [trajectory.scorable for trajectory in group] == [True, False, False, False]
    none = [{"right": None, "short": 1.0}] * 2  # known, and so no misspelt name
    groups = with_usable_rewards([make_group(1.0, 1.0, named_rewards=none)], loss)
    with pytest.raises(NothingToTrain, match=r"2 of them without a usable reward.*reward_weights.*unusable to zero"):
        gather_rows(TrajectoryCollection(trajectories=groups, run_id="any"), llm="policy", mask_truncated=False)
    with pytest.raises(TrajectoryError, match="reward_weights names rigth; the evaluator gave right, short"):
        with_usable_rewards([group], LossConfig(reward_weights={"rigth": 1.0}))
    (unchanged,) = with_usable_rewards([group], LossConfig())
    assert unchanged == group


@pytest.mark.parametrize("unusable", ["unscorable", "zero", "error"])
@pytest.mark.parametrize("knobs", [{}, NORMALIZED])
def test_a_job_need_not_hold_every_task_whose_rewards_have_weights(make_group, unusable, knobs):
    group = make_group(1.0, 0.0, named_rewards=[{"right": 1.0}, {"right": 0.0}], task=["words"] * 2)
    loss = LossConfig(reward_weights={"right": 2.0, "won": 1.0}, **knobs)
    (usable,) = with_usable_rewards([group], loss, unusable)
    assert usable == group and collect_rewards([group], loss).rewards.tolist() == [2.0, 0.0]
    with pytest.raises(TrajectoryError, match="reward_weights names rigth, won; the evaluator gave right"):
        with_usable_rewards([group], LossConfig(reward_weights={"rigth": 1.0, "won": 1.0}, **knobs), unusable)


def test_a_named_reward_that_is_missing_may_be_zero_or_an_error(make_group):
    named = [{"right": 1.0, "short": 1.0}, {"right": None, "short": 1.0}, {}, {"right": math.inf}]
    group, loss = make_group(2.0, 1.0, 0.0, 0.0, named_rewards=named), LossConfig(reward_weights={"right": 1.0})
    (zeros,) = with_usable_rewards([group], loss, "zero")
    assert all(trajectory.scorable for trajectory in zeros)
    assert collect_rewards([zeros], loss).rewards.tolist() == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(TrajectoryError, match="generation 1: reward_weights names right"):
        with_usable_rewards([group], loss, "error")
    # An epoch in which the evaluator gave nothing at all does not tell that a name is wrong.
    (empty,) = with_usable_rewards([make_group(0.0, 0.0, named_rewards=[{}, {}])], loss, "zero")
    assert collect_rewards([empty], loss).rewards.tolist() == [0.0, 0.0]


def test_a_price_that_the_builder_set_is_the_weighted_sum(make_group):
    named = [{"right": 1.0}, {}, {"right": math.nan}]
    group, loss = make_group(1.0, -3.0, 1.0, named_rewards=named), LossConfig(reward_weights={"right": 2.0})
    (usable,) = with_usable_rewards([group], loss)
    assert collect_rewards([usable], loss).rewards.tolist() == pytest.approx([2.0, -3.0, math.nan], nan_ok=True)
    (zeros,) = with_usable_rewards([group], loss, "zero")
    assert collect_rewards([zeros], loss).rewards.tolist() == [2.0, -3.0, 0.0]
    with_usable_rewards([group[:2]], loss, "error")
    apart = LossConfig(reward_weights={"right": 2.0}, **NORMALIZED)
    (usable,) = with_usable_rewards([group], apart)
    assert [trajectory.scorable for trajectory in usable] == [True, False, False]


def test_groups_are_compared_by_the_rewards_that_are_trained(make_group):
    named = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 4.0}, None]
    alike = {"right": 0.5, "short": 2.0}
    groups = [
        make_group(1.0, 4.0, None, named_rewards=named),
        make_group(9.0, 9.0, named_rewards=[alike] * 2, shaped_rewards=[[2.0, -1.0], None]),  # an outcome of 2
        make_group(None),
        make_group(0.0, 9.0, named_rewards=[alike] * 2),
    ]
    weights = {"right": 2.0, "short": 0.5}
    summed = LossConfig(reward_weights=weights, gamma=0.5)
    assert group_rewards(groups, summed) == [(2.0, 0.0), (1.25, 3.0), (0.0, 0.0), (2.0, 0.0)]
    metrics = collect_rewards(groups, summed).metrics
    mean = (2 + 2 + 1.5 + 1 + 2 + 2) / 6
    assert metrics == {"trained_reward_mean": mean, "trained_reward_min": 1.0, "trained_reward_max": 2.0}
    apart = group_rewards(groups, LossConfig(reward_weights=weights, **NORMALIZED))
    assert apart == [(2.0, 2.0), (1.5, 3.0), (0.0, 0.0), (2.0, 0.0)]
    assert group_rewards(groups[::3], LossConfig()) == [(2.5, 3.0), (4.5, 9.0)]
    assert collect_rewards(groups[::3], LossConfig()).metrics == {}
    long = LossConfig(max_completion_tokens=4, overlong_buffer_tokens=2)
    assert group_rewards(groups[:1], long) == [(1.5, 3.0)]
    assert group_rewards([], summed) == []


def test_only_the_own_answers_have_a_length_to_be_paid_for(make_group, make_sequence):
    group = make_group(1.0)
    group[0].sequences.append(make_sequence(1, llm="opponent"))
    loss = LossConfig(max_completion_tokens=8, overlong_buffer_tokens=4)
    assert collect_rewards([group], loss, "policy").rewards.tolist() == [1.0]
    assert collect_rewards([group], loss).rewards.tolist() == [0.0]
