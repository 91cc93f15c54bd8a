"""Losses of a model on a batch: what they add to `policy_loss`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.correction import sampler_agreement
from jaxft.core.losses import policy_loss
from jaxft.core.objectives import dpo_loss, grpo_loss, ppo_loss, score_batch, sft_loss
from jaxft.core.reductions import count_tokens
from jaxft.core.types import Batch

TOKENS = jnp.array(np.random.default_rng(0).integers(5, size=(4, 6)), jnp.int32)
MASK = jnp.array([[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1], [0] * 6, [0, 0, 1, 0, 0, 0]], bool)
BATCH = Batch(TOKENS, MASK, advantages=jnp.array([1.0, -1.0, 5.0, 2.0]), temperatures=jnp.full((4, 6), 0.8))


@pytest.fixture(scope="module")
def params(bigram):
    return bigram.init(jax.random.key(0))


jitted_score = jax.jit(score_batch, static_argnums=0)


def loss_of(loss_fn, model, params, batch):
    return jax.jit(loss_fn, static_argnums=0)(model, params, batch)


def test_sampler_agreement_by_hand():
    d = np.log(np.array([[2.0, 0.5, 9.0]]))
    mask = jnp.array([[True, True, False]])
    old = jnp.array([[-1.0, -2.0, jnp.nan]])
    got = sampler_agreement(old, old - jnp.array(d, jnp.float32), mask, count_tokens(mask))
    expected = {
        "sampler_logprob_diff_mean": np.log(2),
        "sampler_logprob_diff_max": np.log(2),
        "sampler_kl": ((2 - 1 - np.log(2)) + (0.5 - 1 + np.log(2))) / 2,  # e^d - 1 - d
        "sampler_kl_reverse": ((2 * np.log(2) - 2 + 1) + (-0.5 * np.log(2) - 0.5 + 1)) / 2,  # d e^d - e^d + 1
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def test_rows_that_somebody_else_sampled_are_counted():
    """By the mean of a row, packed or not; of a row without a finite number nothing good can be said."""
    old = jnp.zeros((4, 4))
    mask = jnp.array([[True, True, False, False]] * 3 + [[False] * 4])
    drawn = jnp.array([[0.3, 0.0, 9.0, 9.0], [-0.5, 0.3, 0.0, 0.0], [jnp.nan, 0.0, 0.0, 0.0], [9.0] * 4])
    figures = sampler_agreement(old, drawn, mask, count_tokens(mask), max_mean_diff=0.2)
    np.testing.assert_allclose(figures["sampler_disagreement_fraction"], 2 / 3)
    packed, trained = (
        jnp.concatenate([drawn[:2, :2], drawn[3:, :2]]).reshape(1, 6),
        jnp.array([[True] * 4 + [False] * 2]),
    )
    segments = jnp.array([[4, 4, 9, 9, 2, 2]])
    counted = count_tokens(trained, segments)
    figures = sampler_agreement(jnp.zeros((1, 6)), packed, trained, counted, max_mean_diff=0.2, segment_ids=segments)
    np.testing.assert_allclose(figures["sampler_disagreement_fraction"], 1 / 2)


def test_scores_take_the_temperatures_of_the_tokens(bigram, params):
    scored = jitted_score(bigram, params, BATCH)
    logits = np.asarray(params["embedding"])[TOKENS[:, :-1]] @ np.asarray(params["head"]) / 0.8
    chosen = np.take_along_axis(logits, np.asarray(TOKENS)[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(scored.logprobs[:, 1:], chosen - np.log(np.exp(logits).sum(-1)), rtol=1e-5)


def test_grpo_loss_is_policy_loss_of_the_scores(bigram, params):
    old, ref = (jnp.array(np.random.default_rng(i).normal(size=(4, 6)) * 0.2 - 1.6, jnp.float32) for i in (1, 2))
    batch = BATCH._replace(old_logprobs=old, ref_logprobs=ref, sampler_logprobs=old)
    knobs = dict(
        loss="cispo", importance_level="sequence", clip_high=1.1, beta=0.1, kl="k2", aggregation="seq_mean_token_mean"
    )
    bound = partial(policy_loss, **knobs)
    value, metrics = loss_of(partial(grpo_loss, loss=bound), bigram, params, batch)
    scored = jitted_score(bigram, params, BATCH)
    expected, _ = jax.jit(bound)(scored.logprobs, old, batch.advantages, MASK, ref_logprobs=ref)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["entropy"], np.asarray(scored.entropy)[MASK].mean(), rtol=1e-6)
    assert metrics["sampler_logprob_diff_max"] == 0


def test_entropy_bonus_is_taken_off_the_loss_with_its_gradient(bigram, params):
    def mean_entropy(params):
        entropy = score_batch(bigram, params, BATCH, entropy_gradient=True).entropy
        return jnp.sum(jnp.where(MASK, entropy, 0.0)) / MASK.sum()

    def loss_with(coefficient):
        return lambda params: grpo_loss(bigram, params, BATCH, count_tokens(MASK), entropy_coef=coefficient)[0]

    @jax.jit
    def gradients(params):
        return [jax.value_and_grad(f)(params) for f in (loss_with(0.3), loss_with(0.0), mean_entropy)]

    with_bonus, without, entropy = gradients(params)
    expected = jax.tree.map(lambda of_loss, of_entropy: of_loss - 0.3 * of_entropy, without, entropy)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), with_bonus, expected)


def test_sft_loss_is_the_mean_over_trained_tokens(bigram, params):
    value, metrics = loss_of(sft_loss, bigram, params, BATCH)
    scored = jax.tree.map(np.asarray, jitted_score(bigram, params, BATCH))
    np.testing.assert_allclose(value, -scored.logprobs[MASK].mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["entropy"], scored.entropy[MASK].mean(), rtol=1e-6)


@pytest.mark.parametrize("loss_fn", [grpo_loss, ppo_loss, sft_loss, dpo_loss])
def test_denominators_are_counted_where_none_are_given(bigram, params, loss_fn):
    batch = BATCH._replace(ref_logprobs=jnp.full((4, 6), -1.6))
    if loss_fn is ppo_loss:
        params = {"policy": params, "value_head": {"kernel": jnp.ones(3), "bias": jnp.ones(())}}
        batch = batch._replace(old_values=jnp.zeros((4, 6)), returns=jnp.ones((4, 6)))
    counted = jax.jit(loss_fn, static_argnums=0)(bigram, params, batch, count_tokens(MASK))
    jax.tree.map(np.testing.assert_array_equal, loss_of(loss_fn, bigram, params, batch), counted)
    # Those of a larger batch make this one a part of it.
    twice = jax.tree.map(lambda count: 2 * count, count_tokens(MASK))
    half, _ = jax.jit(loss_fn, static_argnums=0)(bigram, params, batch, twice)
    np.testing.assert_allclose(2 * half, counted[0], rtol=1e-6)


@pytest.mark.parametrize("missing", ["old_values", "returns"])
def test_ppo_wants_values_and_returns(bigram, params, missing):
    batch = BATCH._replace(old_values=jnp.zeros((4, 6)), returns=jnp.ones((4, 6)))._replace(**{missing: None})
    with pytest.raises(ValueError, match=r"batch\.old_values or batch\.returns is None"):
        ppo_loss(bigram, {"policy": params, "value_head": None}, batch)


def test_refusals(bigram, params):
    with pytest.raises(ValueError, match=r"batch\.advantages is None; a policy loss needs one advantage per row"):
        loss_of(grpo_loss, bigram, params, BATCH._replace(advantages=None))
