import pytest
from pydantic import ValidationError

from jaxft.components.losses import LossConfig, make_loss


@pytest.mark.parametrize("name", ["grpo", "dapo", "bnpo", "gspo", "cispo", "reinforce"])
def test_every_name_makes_a_loss(name):
    assert make_loss(LossConfig(name=name, beta=0.1)).keywords["loss"] == name


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"name": "dr_grpo"}, "max_completion_tokens is None"),
        ({"name": "cispo", "delta": 5.0}, "'cispo' has no clipped surrogate"),
        ({"name": "dapo", "delta": 1.2}, "wanted more than 1 \\+ clip_high"),
    ],
)
def test_knobs_that_cannot_be_are_refused_before_anything_is_trained(knobs, message):
    with pytest.raises(ValueError, match=message):
        make_loss(LossConfig(**knobs))


@pytest.mark.parametrize("wrong", [{"name": "ppo"}, {"kl": "k1"}, {"clip_low": 0.0}, {"beta": -1.0}])
def test_impossible_values_are_refused(wrong):
    with pytest.raises(ValidationError):
        LossConfig(**wrong)
