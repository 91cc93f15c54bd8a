"""Losses of a model on a batch: what they add to `policy_loss`."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.core.correction import sampler_agreement
from jaxft.core.logprobs import pack_bits
from jaxft.core.losses import policy_loss
from jaxft.core.objectives import dpo_loss, grpo_loss, ppo_loss, score_batch, sft_loss
from jaxft.core.reductions import count_tokens
from jaxft.core.types import Batch, Denominators

ECHO = json.loads((Path(__file__).parents[1] / "data" / "oracles" / "policy_losses_2026.json").read_text())["echo"]
TOKENS = np.random.default_rng(0).integers(5, size=(4, 6)).astype(np.int32)
MASK = np.array([[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1], [0] * 6, [0, 0, 1, 0, 0, 0]], bool)
BATCH = Batch(
    TOKENS,
    MASK,
    advantages=np.array([1.0, -1.0, 5.0, 2.0], np.float32),
    temperatures=np.full((4, 6), 0.8, np.float32),
)
COUNTS = Denominators(*(np.float32(count) for count in (3, 9, 1, 3)))
"""Denominators of the batch: rows, tokens, pairs and trajectories."""


@pytest.fixture(scope="module")
def params():
    draw = np.random.default_rng(7)
    return {
        "embedding": draw.normal(size=(5, 3)).astype(np.float32),
        "head": draw.normal(size=(3, 5)).astype(np.float32),
    }


jitted_score = jax.jit(score_batch, static_argnums=0)


def loss_of(loss_fn, model, params, batch):
    return jax.jit(loss_fn, static_argnums=0)(model, params, batch)


agreement = jax.jit(
    lambda old, drawn, mask, segments=None: sampler_agreement(
        old, drawn, mask, count_tokens(mask, segments), max_mean_diff=0.2, segment_ids=segments
    )
)


def test_sampler_agreement_by_hand():
    d = np.log(np.array([[2.0, 0.5, 9.0]], np.float32))
    mask = np.array([[True, True, False]])
    old = np.array([[-1.0, -2.0, np.nan]], np.float32)
    got = agreement(old, old - d, mask)
    expected = {
        "sampler_disagreement_fraction": 1.0,
        "sampler_logprob_diff_mean": np.log(2),
        "sampler_logprob_diff_max": np.log(2),
        "sampler_kl": ((2 - 1 - np.log(2)) + (0.5 - 1 + np.log(2))) / 2,  # e^d - 1 - d
        "sampler_kl_reverse": ((2 * np.log(2) - 2 + 1) + (-0.5 * np.log(2) - 0.5 + 1)) / 2,  # d e^d - e^d + 1
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)
    without_limit = jax.eval_shape(sampler_agreement, old, old, mask, COUNTS)
    assert without_limit.keys() == expected.keys() - {"sampler_disagreement_fraction"}


def test_rows_that_somebody_else_sampled_are_counted():
    """By the mean of a row, packed or not; of a row without a finite number nothing good can be said."""
    mask = np.array([[True, True, False, False]] * 3 + [[False] * 4])
    rows = [[0.3, 0.0, 9.0, 9.0], [-0.5, 0.3, 0.0, 0.0], [np.nan, 0.0, 0.0, 0.0], [9.0] * 4]
    drawn = np.array(rows, np.float32)
    figures = agreement(np.zeros((4, 4), np.float32), drawn, mask)
    np.testing.assert_allclose(figures["sampler_disagreement_fraction"], 2 / 3)
    packed, trained = np.concatenate([drawn[:2, :2], drawn[3:, :2]]).reshape(1, 6), np.array([[True] * 4 + [False] * 2])
    figures = agreement(np.zeros((1, 6), np.float32), packed, trained, np.array([[4, 4, 9, 9, 2, 2]]))
    np.testing.assert_allclose(figures["sampler_disagreement_fraction"], 1 / 2)


def test_scores_take_the_temperatures_of_the_tokens(bigram, params):
    scored = jitted_score(bigram, params, BATCH)
    logits = params["embedding"][TOKENS[:, :-1]] @ params["head"] / 0.8
    chosen = np.take_along_axis(logits, TOKENS[:, 1:, None], axis=-1)[..., 0]
    expected = np.where(BATCH.completion_mask[:, 1:], chosen - np.log(np.exp(logits).sum(-1)), 0.0)
    np.testing.assert_allclose(np.asarray(scored.logprobs)[:, 1:], expected, rtol=1e-5)


def test_grpo_loss_is_policy_loss_of_the_scores(bigram, params):
    old, ref = np.array(np.random.default_rng(1).normal(size=(2, 4, 6)) * 0.2 - 1.6, np.float32)
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
        entropy = score_batch(bigram, params, jax.tree.map(jnp.array, BATCH), entropy_gradient=True).entropy
        return jnp.sum(jnp.where(MASK, entropy, 0.0)) / 9

    def loss_with(coefficient):
        return lambda params: grpo_loss(bigram, params, jax.tree.map(jnp.array, BATCH), entropy_coef=coefficient)[0]

    @jax.jit
    def gradients(params):
        return [jax.value_and_grad(f)(params) for f in (loss_with(0.3), loss_with(0.0), mean_entropy)]

    with_bonus, without, entropy = jax.device_get(gradients(params))
    expected = jax.tree.map(lambda of_loss, of_entropy: of_loss - 0.3 * of_entropy, without, entropy)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), with_bonus, expected)


def test_sft_loss_is_the_mean_over_trained_tokens(bigram, params):
    value, metrics = loss_of(sft_loss, bigram, params, BATCH)
    scored = jax.tree.map(np.asarray, jitted_score(bigram, params, BATCH))
    np.testing.assert_allclose(value, -scored.logprobs[MASK].mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["entropy"], scored.entropy[MASK].mean(), rtol=1e-6)


@pytest.mark.parametrize("loss_fn", [grpo_loss, ppo_loss, sft_loss, dpo_loss])
def test_denominators_are_counted_where_none_are_given(bigram, params, loss_fn):
    values = np.zeros((4, 6), np.float32)
    batch = BATCH._replace(ref_logprobs=values - 1.6, old_values=values, returns=values + 1)
    if loss_fn is ppo_loss:
        params = {"policy": params, "value_head": {"kernel": np.ones(3, np.float32), "bias": np.float32(1)}}

    @jax.jit
    def of_counts(params, batch, counts):
        # Those of a larger batch make this one a part of it.
        twice = jax.tree.map(lambda count: 2 * count, counts)
        return [loss_fn(bigram, params, batch, each) for each in (None, counts, twice)]

    found, counted, half = of_counts(params, batch, COUNTS)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, counted)
    np.testing.assert_allclose(2 * half[0], counted[0], rtol=1e-6)


@pytest.mark.parametrize("missing", ["old_values", "returns"])
def test_ppo_wants_values_and_returns(bigram, params, missing):
    batch = BATCH._replace(old_values=np.zeros((4, 6), np.float32), returns=np.ones((4, 6), np.float32))._replace(
        **{missing: None}
    )
    with pytest.raises(ValueError, match=r"batch\.old_values or batch\.returns is None"):
        jax.eval_shape(lambda batch: ppo_loss(bigram, {"policy": params, "value_head": None}, batch), batch)


def test_refusals(bigram, params):
    with pytest.raises(ValueError, match=r"batch\.advantages is None; a policy loss needs one advantage per row"):
        loss_of(grpo_loss, bigram, params, BATCH._replace(advantages=None))


ALLOWED = np.array([[False, True, True], [True, False, False], [True, True, False]])
"""Tokens of a vocabulary of three that a grammar allows behind each token."""

ANSWERS = np.array([[2, 0, 1], [2, 0, 2], [2, 1, 0]])
"""The answers of two tokens that it allows behind a prompt of the token 2."""


def test_the_gradient_within_supports_is_that_of_enumeration():
    """The gradient is that of the expected reward over the allowed answers; forbidden tokens' logits have none."""
    rewards = np.array([1.0, -2.0, 0.5])
    model = jaxft.from_function(lambda params, tokens, positions: params["logits"][tokens])

    def probabilities(logits):
        weights = jnp.exp(logits) * ALLOWED
        chances = weights / weights.sum(axis=1, keepdims=True)
        return chances[ANSWERS[:, 0], ANSWERS[:, 1]] * chances[ANSWERS[:, 1], ANSWERS[:, 2]]

    @jax.jit
    def gradients(logits):
        bits = pack_bits(jnp.array(ALLOWED))[ANSWERS[:, :2]]
        advantages = jax.lax.stop_gradient(3 * probabilities(logits) * rewards)  # the loss is a mean over three rows
        mask = jnp.array([[False, True, True]] * 3)
        batch = Batch(jnp.array(ANSWERS), mask, advantages, supports=jnp.pad(bits, ((0, 0), (1, 0), (0, 0))))
        loss = partial(policy_loss, loss="reinforce", aggregation="constant", max_completion_tokens=1)
        got = jax.grad(lambda x: grpo_loss(model, {"logits": x}, batch, loss=loss)[0])(logits)
        return -got, jax.grad(lambda x: (probabilities(x) * rewards).sum())(logits)

    with jax.enable_x64(True):
        got, expected = jax.device_get(gradients(np.array([[0.3, -0.2, 0.9], [1.0, 0.1, -0.5], [-0.4, 0.6, 0.2]])))
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert np.abs(expected).max() > 0.1 and not got[~ALLOWED].any()


@pytest.mark.parametrize(("is_float64", "tolerance"), [(True, 1e-8), (False, 1e-5)])
def test_results_of_tools_cost_as_in_prime_rl(is_float64, tolerance):
    """At temperature 1, whatever the call's was; a row without any, and a batch without any, cost nothing."""
    case, dtype = ECHO, np.float64 if is_float64 else np.float32
    model = jaxft.from_function(lambda params, tokens, _: params["logits"][: len(tokens), : tokens.shape[1]])
    seen = np.array(case["observation_mask"])
    zeros = np.zeros(seen.shape, dtype)
    batch = Batch(np.array(case["tokens"], np.int32), ~seen, advantages=zeros, temperatures=zeros + 0.5)
    objective = partial(grpo_loss, model, observation_coef=case["observation_coef"])
    with jax.enable_x64(is_float64):
        params = {"logits": np.array(case["logits"], dtype)}
        compute = jax.jit(jax.value_and_grad(objective, has_aux=True))
        masks = seen, seen & False
        found = jax.device_get([compute(params, batch._replace(observation_mask=mask)) for mask in masks])
    ((loss, metrics), grads), ((none, no_metrics), no_grads) = found
    np.testing.assert_allclose(loss, case["loss"], rtol=0, atol=tolerance)
    np.testing.assert_allclose(grads["logits"], case["grad"], rtol=0, atol=tolerance)
    assert metrics["observation_loss"] == pytest.approx(case["loss"] / case["observation_coef"], rel=1e-5)
    assert none == no_metrics["observation_loss"] == 0.0 and not np.any(no_grads["logits"])


def test_results_of_tools_need_a_mask_and_a_count(bigram, params):
    objective = partial(grpo_loss, bigram, observation_coef=0.1)
    with pytest.raises(ValueError, match=r"batch\.observation_mask is None"):
        jax.eval_shape(objective, params, BATCH)
    with pytest.raises(ValueError, match=r"denominators\.observations is None"):
        jax.eval_shape(objective, params, BATCH._replace(observation_mask=~MASK), COUNTS)
    with pytest.raises(ValueError, match=r"batch\.observation_mask holds int32; wanted bools"):
        jax.eval_shape(objective, params, BATCH._replace(observation_mask=TOKENS))
