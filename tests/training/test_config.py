import pytest
from pydantic import ValidationError

from jaxft.core.losses import PRESETS
from jaxft.training.config import LossConfig
from jaxft.training.update import make_loss


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("ppo", "dr_grpo")])
def test_every_name_makes_a_loss(name):
    assert make_loss(LossConfig(name=name, beta=0.1)).keywords["loss"].keywords["loss"] == name


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
        ({"name": "dppo_tv", "delta": 5.0}, "'dppo_tv' has no clipped surrogate"),
        ({"advantages": "max_rl", "beta": 0.1, "kl": "k1_in_reward"}, "'max_rl' would divide beta by"),
        ({"per_task": {"a": {"name": "gspo"}}}, "per_task.a.name is one for all tasks"),
        ({"per_task": {"a": {"advantages": "batch"}}}, "advantages is one for all tasks"),
        ({"per_task": {"a": {"weight": -1}}}, r"per_task.a.weight\n +must be greater than 0"),
        ({"per_task": {"words": {"wieght": 0.3}}}, "words.wieght is no option; did you mean 'weight'"),
        ({"per_task": {"a": {"overlong_buffer_tokens": 4}}}, r"per_task.a\n +overlong_buffer_tokens needs"),
        ({"name": "sft", "per_task": {"a": {}}}, "sft has no per_task"),
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
