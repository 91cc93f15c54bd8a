import pytest
from pydantic import ValidationError

from jaxft.core.losses import PRESETS
from jaxft.training.config import LossConfig
from jaxft.training.update import make_loss


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("ppo", "dr_grpo")])
def test_every_name_makes_a_loss(name):
    assert make_loss(LossConfig(name=name, beta=0.1)).keywords["loss"].keywords["loss"] == name


def test_a_task_may_have_no_kl_to_the_reference_of_the_others():
    loss = LossConfig(beta=0.1, reference={"update_every": 10}, per_task={"a": {"beta": 0}})
    assert loss.of_task("a").beta == 0 and loss.of_task("a").reference == loss.reference


def test_a_trajectory_may_have_one_token():
    assert LossConfig(name="dr_grpo", max_completion_tokens=1).max_completion_tokens == 1


def test_ppo_is_a_loss_of_its_own():
    assert make_loss(LossConfig(name="ppo", value_coef=0.1)).keywords["value_coef"] == 0.1


def test_a_kl_in_the_reward_is_none_in_the_loss():
    config = LossConfig(name="reinforce", advantages="leave_one_out", beta=0.1, kl="k1_in_reward")
    assert make_loss(config).keywords["loss"].keywords["beta"] == 0.0


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"name": "dr_grpo"}, "max_completion_tokens is None"),
        ({"name": "cispo", "delta": 5.0}, "'cispo' has no clipped surrogate"),
        ({"name": "dapo", "delta": 1.2}, "wanted more than 1 \\+ clip_high"),
        ({"name": "reinforce", "importance_level": "sequence"}, "'reinforce' has no ratio"),
        ({"name": "ppo", "aggregation": "seq_mean_token_mean"}, "ppo is averaged over tokens"),
        ({"name": "sapo", "clip_high": 0.3}, "sapo has no clip_high"),
        ({"name": "kl_cov", "clip_high": 0.3}, "kl_cov has no clip_high"),
        ({"name": "clip_cov", "cov_kl_coef": 0.3}, "clip_cov has no cov_kl_coef"),
        ({"name": "dapo", "cov_fraction": 0.3}, "dapo has no cov_fraction"),
        ({"name": "dppo_tv", "delta": 5.0}, "'dppo_tv' has no clipped surrogate"),
        ({"advantages": "max_rl", "beta": 0.1, "kl": "k1_in_reward"}, "'max_rl' would divide beta by"),
        ({"per_task": {"a": {"name": "gspo"}}}, "per_task.a.name is one for all tasks"),
        ({"per_task": {"a": {"advantages": "batch"}}}, "advantages is one for all tasks"),
        (
            {"name": "sapo", "per_task": {"a": {"clip_high": 0.3}}},
            "per_task.a.clip_high: set clip_high of the loss, too",
        ),
        ({"per_task": {"a": {"beta": 0.1}}}, "per_task.a.beta: set beta of the loss, too"),
        ({"clip_low": 0.2, "per_task": {"a": {"clip_low": None}}}, "per_task.a.clip_low is null: give a number"),
        ({"beta": 0.1, "per_task": {"a": {"beta": None}}}, "per_task.a.beta is null"),
        ({"clip_high": 0.2, "per_task": {"a": {"clip_high": -1}}}, r"per_task.a.clip_high\n +must be greater than 0"),
        ({"per_task": {"words": {"clip_hgh": 0.3}}}, "words.clip_hgh is no option; did you mean 'clip_high'"),
        (
            {"delta": 3.0, "clip_high": 0.2, "per_task": {"a": {"clip_high": 2.5}}},
            r"delta is 3.0, wanted above 1 \+ 2.5",
        ),
        ({"per_task": {"a": {"overlong_buffer_tokens": 4}}}, r"per_task.a\n +overlong_buffer_tokens needs"),
        ({"name": "sft", "per_task": {"a": {}}}, "sft has no per_task"),
        (
            {"name": "dr_grpo", "max_completion_tokens": 9, "per_task": {"a": {"max_completion_tokens": 4}}},
            "per_task.a.max_completion_tokens is for the length penalty alone",
        ),
        (
            {"function": "tests.own_functions:without_weight", "beta": 0.1, "per_task": {"a": {"beta": 0.2}}},
            "per_task.a.beta: .* takes no beta",
        ),
        ({"distillation": {"teacher": "self", "form": "reverse", "mixing": 0.3}}, "form 'reverse' has no mixing"),
    ],
)
def test_knobs_that_cannot_be_are_refused_before_anything_is_trained(knobs, message):
    with pytest.raises(ValueError, match=message):
        make_loss(LossConfig(**knobs))


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "vpg"},
        {"kl": "k1"},
        {"clip_low": 0.0},
        {"beta": -1.0},
        {"name": "ppo", "advantages": "group"},
        {"name": "grpo", "advantages": "gae"},
        {"beta": 0.1, "kl": "k1_in_reward"},
        {"name": "reinforce", "advantages": "reinforce_pp", "skip_zero_advantages": True},
        {"name": "ppo", "skip_zero_advantages": True},
        {"name": "sft", "skip_zero_advantages": True},
        {"distillation": {"teacher": "any"}, "skip_zero_advantages": True},
        {"name": "dr_grpo", "beta": 0.1, "kl": "k1_in_reward", "skip_zero_advantages": True},
        {"overlong_buffer_tokens": 4},
        {"overlong_buffer_tokens": 4, "max_completion_tokens": 3},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {
            "multi_objective_aggregation": "normalize_then_sum",
            "reward_weights": {"right": 1.0},
            "max_completion_tokens": 8,
            "overlong_buffer_tokens": 4,
        },
        {"correction": {"name": "token_mask", "low": 1.5}},
        {"name": "dapo", "weigh": "sequence"},
        {"name": "sft", "weigh": "sequence"},
        {"weigh": "row"},
        {"name": "grpo", "bootstrap": "none"},
    ],
)
def test_impossible_values_are_refused(wrong):
    with pytest.raises(ValidationError):
        LossConfig(**wrong)
