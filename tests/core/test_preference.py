"""DPO and IPO against the formulas in float64 NumPy, and numbers by hand; then as the loss of a model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.objectives import dpo_loss, score
from jaxft.core.preference import preference_loss
from jaxft.core.reductions import count_trained
from jaxft.core.types import Batch


def plainly(chosen, rejected, ref_chosen, ref_rejected, beta, kind, label_smoothing):
    """The published formulas in float64."""
    h = (chosen - ref_chosen) - (rejected - ref_rejected)
    if kind == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    agree, disagree = -np.log1p(np.exp(-beta * h)), -np.log1p(np.exp(beta * h))
    return -(1 - label_smoothing) * agree - label_smoothing * disagree


@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize(("kind", "label_smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
def test_formulas_in_float64(beta, kind, label_smoothing):
    sums = np.random.default_rng(0).normal(size=(4, 16)) * 5 - 20
    with jax.enable_x64(True):
        got = preference_loss(*map(jnp.array, sums), beta=beta, kind=kind, label_smoothing=label_smoothing)
        np.testing.assert_allclose(got.losses, plainly(*sums, beta, kind, label_smoothing), rtol=1e-12)
    in_f32 = preference_loss(
        *(jnp.array(x, jnp.float32) for x in sums), beta=beta, kind=kind, label_smoothing=label_smoothing
    )
    np.testing.assert_allclose(in_f32.losses, plainly(*sums, beta, kind, label_smoothing), rtol=1e-4, atol=1e-5)


def test_by_hand():
    # h = (-10 + 12) - (-11 + 10) = 3; beta h = 1.5; -log sigmoid(1.5) = 0.2014133.
    sums = [jnp.array([x]) for x in (-10.0, -11.0, -12.0, -10.0)]
    losses, margins = preference_loss(*sums, beta=0.5)
    assert (float(margins[0]), float(losses[0])) == pytest.approx((3.0, 0.2014133))
    assert float(preference_loss(*sums, beta=0.5, label_smoothing=0.1).losses[0]) == pytest.approx(0.2014133 + 0.15)
    assert float(preference_loss(*sums, beta=0.5, kind="ipo").losses[0]) == pytest.approx(4.0)


def test_far_margins_stay_finite():
    far = [jnp.array([x]) for x in (-1e4, 0.0, 0.0, -1e4)]
    value, gradient = jax.value_and_grad(lambda x: preference_loss(x, *far[1:]).losses[0])(far[0])
    assert float(value) == pytest.approx(2e3) and float(gradient[0]) == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"beta": 0.0}, "beta is 0.0; a preference loss needs it above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5; wanted at least 0 and below 0.5"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "label_smoothing is for kind='sigmoid'"),
        ({"kind": "hinge"}, "kind is 'hinge'; wanted sigmoid or ipo"),
    ],
)
def test_refusals(knobs, message):
    with pytest.raises(ValueError, match=message):
        preference_loss(*[jnp.zeros(1)] * 4, **knobs)


TOKENS = jnp.array(np.random.default_rng(3).integers(5, size=(4, 6)), jnp.int32)
MASK = jnp.array([[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]], bool)


@pytest.fixture(scope="module")
def pairs(bigram):
    """Parameters, and a batch of two pairs scored by a reference."""
    params, ref = bigram.init(jax.random.key(0)), bigram.init(jax.random.key(1))
    batch = Batch(TOKENS, MASK)
    return params, batch._replace(ref_logprobs=score(bigram, ref, batch).logprobs)


def run(model, params, batch, **knobs):
    return jax.jit(partial(dpo_loss, model, **knobs))(params, batch, count_trained(batch.completion_mask))


@pytest.mark.parametrize("is_normalized", [False, True])
def test_the_loss_of_a_model_is_the_mean_over_pairs(bigram, pairs, is_normalized):
    params, batch = pairs
    lengths = np.array([3, 5, 2, 1]) if is_normalized else 1
    sums = np.where(MASK, score(bigram, params, batch).logprobs, 0).sum(1) / lengths
    refs = np.where(MASK, batch.ref_logprobs, 0).sum(1) / lengths
    expected = plainly(sums[::2], sums[1::2], refs[::2], refs[1::2], 0.3, "sigmoid", 0.1)
    loss, metrics = run(bigram, params, batch, beta=0.3, label_smoothing=0.1, length_normalized=is_normalized)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
    h = (sums[::2] - refs[::2]) - (sums[1::2] - refs[1::2])
    np.testing.assert_allclose(metrics["reward_margin"], 0.3 * h.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["preference_accuracy"], (h > 0).mean())
    np.testing.assert_allclose(
        metrics["chosen_reward"] - metrics["rejected_reward"], metrics["reward_margin"], rtol=1e-4
    )


def test_empty_pairs_are_out_of_the_mean(bigram, pairs):
    params, batch = pairs
    alone = jax.tree.map(lambda x: x[:2], batch)
    masked = batch._replace(completion_mask=MASK.at[2:].set(False))
    np.testing.assert_allclose(run(bigram, params, masked)[0], run(bigram, params, alone)[0], rtol=1e-6)


def test_a_pair_without_one_of_its_answers_is_no_pair(bigram, pairs):
    """Its other answer neither counts in the denominator nor has a gradient."""
    params, batch = pairs
    alone = jax.tree.map(lambda x: x[:2], batch)
    halved = batch._replace(completion_mask=MASK.at[3].set(False))
    loss, metrics = run(bigram, params, halved, sft_coef=0.5)
    expected, of_alone = run(bigram, params, alone, sft_coef=0.5)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name in ("reward_margin", "chosen_reward", "chosen_nll", "preference_accuracy"):
        np.testing.assert_allclose(metrics[name], of_alone[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("is_normalized", [False, True])
def test_the_imitation_term_is_the_mean_of_the_chosen_answers(bigram, pairs, is_normalized):
    params, batch = pairs
    logprobs = np.where(MASK, score(bigram, params, batch).logprobs, 0)
    nll = -np.mean([logprobs[0].sum() / 3, logprobs[2].sum() / 2])
    plain, metrics = run(bigram, params, batch, length_normalized=is_normalized)
    np.testing.assert_allclose(metrics["chosen_nll"], nll, rtol=1e-5)
    both, _ = run(bigram, params, batch, length_normalized=is_normalized, sft_coef=0.7)
    np.testing.assert_allclose(both - plain, 0.7 * nll, rtol=1e-4)


def test_batches_that_are_no_pairs_are_refused(bigram, pairs):
    params, batch = pairs
    with pytest.raises(ValueError, match="there are 3 rows; chosen and rejected answers alternate"):
        run(bigram, params, jax.tree.map(lambda x: x[:3], batch))
    with pytest.raises(ValueError, match=r"batch\.ref_logprobs is None"):
        run(bigram, params, batch._replace(ref_logprobs=None))
    uncounted = count_trained(MASK)._replace(pairs=None)
    with pytest.raises(ValueError, match=r"denominators\.pairs is None; count the whole batch with count_trained"):
        dpo_loss(bigram, params, batch, uncounted)
    with pytest.raises(ValueError, match=r"batch\.segment_ids is given; pairs are rows of their own, not packed"):
        run(bigram, params, batch._replace(segment_ids=jnp.zeros((4, 6), jnp.int32)))
