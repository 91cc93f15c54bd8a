"""Lines about trouble: each kind begins after `PATIENCE` epochs, names its numbers and what helps, and ends."""

import json

import pytest

from jaxft.components.health import PATIENCE, TROUBLES, Health

GOOD = {
    "entropy": 2.0,
    "reward_mean": 0.2,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "varied_groups": 8,
    "completion_tokens_mean": 20.0,
    "episodes": 64,
    "calls": 128,
    "truncated_fraction": 0.0,
    "groups": 8,
    "no_signal_groups": 0,
    "effective_sample_fraction": 1.0,
    "sampler_logprob_diff_mean": 1e-7,
    "reward/right": 0.2,
    "train_mfu": 0.4,
    "decode_bandwidth_share": 0.7,
}

BAD = {
    "entropy collapse": ({"entropy": 0.1, "reward_mean": 0.4}, ["0.1 nats", "5.0%", "0.4", "below 1"]),
    "length growth": ({"completion_tokens_mean": 50.0, "truncated_fraction": 0.3}, ["25 tokens", "2.5 times", "30%"]),
    "cut answers": ({"truncated_fraction": 1.0}, ["100%", "10 tokens"]),
    "reward collapse": ({"reward_mean": 0.05}, ["0.05", "0.2 in", "below 0"]),
    "constant reward": (
        {"reward_mean": 0.1, "reward_min": 0.1, "reward_max": 0.1, "groups": None, "no_signal_groups": None},  # no job
        ["is 0.1", "8 of its"],
    ),
    "reward hacking": ({"reward_mean": 0.9, "reward/right": 0.1}, ["0.2 to 0.9", "'right'", "0.2 to 0.1"]),
    "off-policy": ({"effective_sample_fraction": 0.4, "staleness_mean": 3.0}, ["40%", "3 versions"]),
    "no signal": ({"no_signal_groups": 8, "reward_mean": 0.1}, ["8 of 8", "0.1"]),
    "slow device": ({"decode_bandwidth_share": 0.07}, ["40.0%", "7.0%", "docs/accelerators.md"]),
    "sampler mismatch": ({"sampler_logprob_diff_mean": 0.06}, ["0.06 nats"]),
}


def followed(health, *epochs):
    return [line for metrics in epochs for line in health.lines(metrics)]


def test_every_trouble_has_a_case():
    assert set(BAD) == set(TROUBLES)


FIRST = {"cut answers": GOOD | {"truncated_fraction": 1.0, "reward_mean": None}}
"""Epochs at the start, in the place of `GOOD`: all answers are cut, and no reward is usable."""


@pytest.mark.parametrize("name", TROUBLES)
def test_a_trouble_is_said_once_with_its_numbers_and_is_over_once(name):
    changed, said = BAD[name]
    patience, health = TROUBLES[name].patience, Health()
    assert followed(health, *[FIRST.get(name, GOOD)] * 3) == []
    assert followed(health, *[GOOD | changed] * (patience - 1), GOOD) == []
    (line,) = followed(health, *[GOOD | changed] * (PATIENCE + 4))
    assert line.startswith(f"{name}: ") and line.endswith(TROUBLES[name].advice)
    assert all(text in line for text in said), line
    assert followed(health, *[GOOD, GOOD | changed] * 3) == []
    assert followed(health, *[GOOD] * (PATIENCE + 2)) == [f"{name}: over"]


@pytest.mark.parametrize("name", TROUBLES)
def test_a_resumed_run_says_what_the_whole_run_says(name):
    epochs = [*[FIRST.get(name, GOOD)] * 4, *[GOOD | BAD[name][0]] * (PATIENCE + 1), *[GOOD] * PATIENCE]
    whole = followed(Health(), *epochs)
    for cut in range(len(epochs)):
        first, second = Health(), Health()
        said = followed(first, *epochs[:cut])
        second.restore(json.loads(json.dumps(first.state())))
        assert said + followed(second, *epochs[cut:]) == whole


def test_a_solved_task_is_no_trouble():
    solved = {"entropy": 0.01, "reward_mean": 0.99, "no_signal_groups": 8}
    assert followed(Health(), *[GOOD] * 3, *[GOOD | solved] * 5) == []


def test_trouble_is_judged_by_the_rewards_that_are_trained():
    weighed = GOOD | {"reward_mean": 5.0, "reward_max": 9.0, "trained_reward_mean": 0.2, "trained_reward_max": 1.0}
    alike = {"no_signal_groups": 8, "entropy": 0.01}
    solved, unsolved = weighed | alike | {"trained_reward_mean": 0.99}, weighed | alike | {"reward_mean": 8.9}
    assert followed(Health(), *[weighed] * 3, *[solved] * 5) == []
    lines = followed(Health(), *[weighed] * 3, *[unsolved] * 5)
    assert [line.partition(":")[0] for line in lines] == ["entropy collapse", "no signal"]


def test_metrics_that_a_run_does_not_have_or_that_are_not_finite_are_no_trouble():
    nan = dict.fromkeys(GOOD, float("nan"))
    health = Health()
    assert followed(health, *[{}] * 5, *[nan] * 5, *[{"reward_mean": None}] * 5) == []
    assert "NaN" not in json.dumps(health.state())


def test_longer_episodes_with_answers_of_the_same_length_are_no_trouble():
    longer = GOOD | {"completion_tokens_mean": 60.0, "calls": 384}
    assert followed(Health(), *[GOOD] * 3, *[longer] * 5) == []


def test_troubles_of_the_first_epoch_are_said_at_its_end():
    """A reasoning model whose thoughts are cut, and an evaluator that reads the wrong column."""
    first = GOOD | BAD["cut answers"][0] | {"reward_mean": 0.0, "reward_min": 0.0, "reward_max": 0.0}
    lines = followed(Health(), first | {"no_signal_groups": 8})
    assert [line.partition(":")[0] for line in lines] == ["cut answers", "constant reward"]
    by_steps = {"reward_mean": 0.0, "reward_max": 0.0, "groups": 8, "no_signal_groups": 2}
    assert followed(Health(), GOOD | by_steps) == []
    assert followed(Health(), GOOD | by_steps | {"no_signal_groups": 8, "varied_groups": 0}) == []


def test_a_limit_that_cuts_single_tokens_is_no_trouble():
    assert followed(Health(), *[GOOD | {"truncated_fraction": 1.0, "completion_tokens_mean": 2.0}] * 5) == []


def test_a_solved_or_rare_reward_has_neither_collapsed_nor_is_it_broken():
    solved = GOOD | {"reward_mean": 1.0, "reward_min": 1.0}
    assert followed(Health(), *[GOOD] * 3, *[solved] * 2) == []
    rare = GOOD | {"reward_mean": 0.02}  # chance gives 0 of 64 episodes in a quarter of the epochs
    never = {"reward_mean": 0.0, "varied_groups": 0}
    assert followed(Health(), *[rare] * 3, *[GOOD | never] * 3) == []
    even = GOOD | {"reward_mean": 0.9, "reward_min": 0.9, "reward_max": 0.9, "varied_groups": 0}
    assert followed(Health(), *[even] * 3, *[even | {"reward_mean": 0.89, "reward_min": 0.4}] * 5) == []


def test_a_mismatch_is_judged_by_the_dtype_of_products():
    for dtype, healthy, wrong in (("float32", 9e-4, 2e-3), ("bfloat16", 0.04, 0.06)):
        for difference, said in ((healthy, []), (wrong, ["sampler mismatch"])):
            health = Health()
            health.dtype = dtype
            lines = followed(health, *[GOOD | {"sampler_logprob_diff_mean": difference}] * PATIENCE)
            assert [line.partition(":")[0] for line in lines] == said


def test_earlier_weights_are_no_mismatch():
    stale = GOOD | {"sampler_logprob_diff_mean": 0.1, "stale_token_fraction": 1.0}
    assert followed(Health(), *[stale] * 6) == []


def test_an_epoch_without_the_metric_ends_no_trouble():
    health, collapsed = Health(), GOOD | BAD["entropy collapse"][0]
    assert len(followed(health, *[GOOD] * 3, *[collapsed] * 4)) == 1
    assert followed(health, *[{"reward_mean": 0.4}] * 5) == []
    assert followed(health, *[GOOD] * 3) == ["entropy collapse: over"]


def test_failed_episodes_do_not_lengthen_answers():
    half = GOOD | {"failed_episodes": 32, "calls": 64}
    assert followed(Health(), *[GOOD] * 3, *[half] * 5) == []


def test_a_penalty_that_begins_is_no_hacked_reward():
    before, after = GOOD | {"reward/penalty": 0.0}, GOOD | {"reward/penalty": -1e-3, "reward_mean": 0.5}
    assert followed(Health(), *[before] * 3, *[after] * 5) == []


def test_an_entropy_of_zero_from_the_start_is_compared_with_nothing():
    assert followed(Health(), *[GOOD | {"entropy": 0.0}] * 3, *[GOOD | {"entropy": -1e-9}] * 5) == []
