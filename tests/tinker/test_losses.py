"""Tests of the losses, against the formulas in Tinker's documentation, and of the tables that data is laid out in."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.tinker.data import Datum
from jaxft.tinker.losses import LOSSES, check_datum, find_loss, make_parts, summed_loss
from jaxft.tinker.training import ONE

TOKENS = np.array([3, 1, 2, 0], np.int32)


def coin(params, tokens, positions):
    return jnp.broadcast_to(params["logits"], (*tokens.shape, 4))


MODEL, PARAMS = jaxft.from_function(coin), {"logits": jnp.array([0.5, -0.5, 1.0, 0.0])}
TARGETS, ADVANTAGES = np.array([1, 2, 0, 3]), np.array([1.0, -2.0, 0.5, 0.0])
SAMPLED = np.log(np.array([0.05, 0.6, 0.3, 0.2]))
"""Log-probabilities while sampling: ratios beyond both clips and within them; an advantage of 0 leaves the last out."""


def formula(name, lp):
    ratio, a = np.exp(lp - SAMPLED), ADVANTAGES
    clipped = np.clip(ratio, 0.9, 1.5)
    return {
        "cross_entropy": -(a * lp).sum(),
        "importance_sampling": -(ratio * a).sum(),
        "ppo": -np.minimum(ratio * a, clipped * a).sum(),
        "cispo": -(clipped * a * lp).sum(),
        "dro": -(lp * a - 0.5 * 0.25 * (lp - SAMPLED) ** 2).sum(),
    }[name]


def ratio_gradient(name, lp):
    """Derivative of a loss by each log-probability."""
    ratio, a = np.exp(lp - SAMPLED), ADVANTAGES
    clipped = np.clip(ratio, 0.9, 1.5)
    is_clipped = clipped * a < ratio * a
    return {
        "cross_entropy": -a,
        "importance_sampling": -ratio * a,
        "ppo": np.where(is_clipped, 0.0, -ratio * a),
        "cispo": -clipped * a,
        "dro": -a + 0.25 * (lp - SAMPLED),
    }[name]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_the_documented_sums(name):
    config = {"ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}, "dro": {"beta": 0.25}}
    config["cispo"] = config["ppo"]
    loss, keywords = find_loss(name, config.get(name))
    inputs = {"target_tokens": TARGETS, "logprobs": SAMPLED, "advantages": ADVANTAGES, "weights": ADVANTAGES}
    ((numbers, batch),) = make_parts([Datum(model_input=TOKENS, loss_fn_inputs=inputs)], loss, 64)
    summed = jax.value_and_grad(partial(summed_loss, MODEL, keywords=keywords), has_aux=True)
    (value, metrics), grads = jax.jit(summed)(PARAMS, batch, ONE)
    logits = np.asarray(PARAMS["logits"], np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    lp = np.log(probabilities)[TARGETS]
    np.testing.assert_allclose(metrics["logprobs"][0, 1:5], lp, rtol=1e-6)
    np.testing.assert_allclose(value, formula(name, lp), rtol=1e-6)
    wanted = ratio_gradient(name, lp) @ (np.eye(4)[TARGETS] - probabilities)
    np.testing.assert_allclose(grads["logits"], wanted, rtol=1e-5, atol=1e-7)
    assert numbers == [0]


def test_tables_have_few_shapes_and_every_datum_once():
    data = [
        Datum(
            model_input=np.arange(n, dtype=np.int32),
            loss_fn_inputs={"target_tokens": np.arange(n), "weights": np.ones(n)},
        )
        for n in (40, 5, 31, 32)
    ]
    parts = make_parts(data, LOSSES["cross_entropy"], 64)
    assert [(numbers, batch.tokens.shape) for numbers, batch in parts] == [
        ([1, 2], (2, 32)),
        ([0], (1, 64)),
        ([3], (1, 64)),
    ]
    _, batch = parts[0]
    assert batch.completion_mask.sum() == 5 + 31 and batch.advantages.sum() == 5 + 31
    assert batch.targets[1, 31] == 30 and batch.tokens[1, 30] == 30


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("dpo", None, "loss_fn is 'dpo'; served are cross_entropy, importance_sampling, ppo, cispo, dro"),
        ("cross_entropy", {"beta": 1}, r"'beta' is no option of cross_entropy; it has \[\]"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold': 1.5"),
    ],
)
def test_unknown_losses_and_options_are_refused(name, config, told):
    with pytest.raises(ValueError, match=told):
        find_loss(name, config)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"target_tokens": None}, r"data\[3\].loss_fn_inputs lacks 'target_tokens'; it has weights"),
        ({"weights": np.ones(3)}, r"weights has shape \[3\]; wanted \[4\]"),
        ({"target_tokens": np.ones((4, 2))}, r"target_tokens has shape \[4, 2\]; wanted \[4\], one number per token"),
        ({"weights": np.array([0, np.nan, 0, 0])}, "weights holds a number that is not finite"),
        ({"target_tokens": np.array([0, 1, 9, 2])}, r"target_tokens\[2\] is 9; wanted a token below 4"),
    ],
)
def test_data_that_cannot_be_trained_is_refused(changes, told):
    inputs = {"target_tokens": TARGETS, "weights": ADVANTAGES} | changes
    given = {name: value for name, value in inputs.items() if value is not None}
    datum = Datum(model_input=TOKENS, loss_fn_inputs=given)
    with pytest.raises(ValueError, match=told):
        check_datum("data[3]", datum, LOSSES["cross_entropy"], 4, 8)
