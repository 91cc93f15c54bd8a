"""Sampler-to-trainer correction: each kind by hand, its bounds, and that long rows do not overflow."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.core.correction import ratio_moments, sampler_correction
from jaxft.core.losses import policy_loss
from jaxft.core.objectives import grpo_loss, score_batch
from jaxft.core.reductions import count_tokens
from jaxft.core.types import Batch

MASK = jnp.array([[True, True, True, False], [True, True, False, False]])
D = jnp.log(jnp.array([[3.0, 0.25, 1.0, 9.0], [1.5, 1.2, 9.0, 9.0]]))
"""Ratios of the trained tokens: 3, 0.25, 1 (product 0.75, geometric mean 0.909) and 1.5, 1.2 (1.8, 1.342)."""

EXPECTED = {
    "token_truncate": ([[2, 0.25, 1], [1.5, 1.2, 0]], 1 / 5),
    "token_mask": ([[0, 0, 1], [1.5, 1.2, 0]], 2 / 5),
    "sequence_truncate": ([[0.75] * 3, [1.8] * 3], 0),
    "sequence_mask": ([[0.75] * 3, [1.8] * 3], 0),
    "sequence_geometric_mask": ([[1] * 3, [1] * 3], 0),
    "ratio": ([[1] * 3, [1] * 3], 2 / 5),
    "none": ([[1] * 3, [1] * 3], 2 / 5),
}


def correct(d, mask, kind, **knobs):
    fixed = partial(sampler_correction, kind=kind, **knobs)
    return jax.jit(lambda d, mask: fixed(d - 1.0, jnp.full_like(d, -1.0), mask, count_tokens(mask)))(d, mask)


@pytest.mark.parametrize("kind", EXPECTED)
def test_by_hand(kind):
    weights, share, old = correct(D, MASK, kind)
    assert (old is None) == (kind != "ratio")
    trained = np.asarray(MASK)[:, :3]
    np.testing.assert_allclose(weights[:, :3][trained], np.array(EXPECTED[kind][0])[trained], rtol=1e-5)
    np.testing.assert_allclose(share, EXPECTED[kind][1], rtol=1e-6)


def test_bounds_of_sequences():
    assert correct(D, MASK, "sequence_truncate", high=1.5).weights[:, 0].tolist() == pytest.approx([0.75, 1.5])
    weights, share, _ = correct(D, MASK, "sequence_mask", high=1.5)
    assert weights[:, 0].tolist() == pytest.approx([0.75, 0.0])
    assert float(share) == pytest.approx(2 / 5)
    assert correct(D, MASK, "sequence_geometric_mask", high=1.3).weights[:, 0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kind", EXPECTED)
def test_long_rows_neither_overflow_nor_have_a_gradient(kind):
    d = jnp.full((1, 4000), 1.0)
    mask = jnp.ones(d.shape, bool)
    weights, gradient = jax.value_and_grad(lambda d: correct(d, mask, kind).weights.sum())(d)
    assert np.isfinite(weights) and not gradient.any()


def test_segments_are_rows():
    packed = jnp.concatenate([D[:1, :3], D[1:, :2]], axis=1)
    segments = jnp.array([[1, 1, 1, 2, 2]])
    mask = jnp.ones((1, 5), bool)
    got = sampler_correction(packed, jnp.zeros_like(packed), mask, kind="sequence_mask", segment_ids=segments)
    np.testing.assert_allclose(got.weights, [[0.75] * 3 + [1.8] * 2], rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "knobs", "message"),
    [
        ("token", {}, "correction is 'token'; wanted one of token_truncate"),
        ("token_mask", {"low": 0.0}, "the bounds of the correction are 0.0 and 2.0"),
        ("token_mask", {"high": 0.9}, "the bounds of the correction are 0.5 and 0.9"),
    ],
)
def test_refusals(kind, knobs, message):
    with pytest.raises(ValueError, match=message):
        sampler_correction(D, D, MASK, kind=kind, **knobs)


def tree(params, tokens, positions):
    """Two tokens, whose logits depend on the tokens before."""
    return params["logits"][jnp.where(positions == 0, 0, 1 + tokens)]


TREE = jaxft.from_function(tree)
NOW, BEFORE = ({"logits": jnp.array(rows)} for rows in ([[0.3, -0.2], [1.0, 0.1], [-0.4, 0.6]], jnp.zeros((3, 2))))
REWARDS = np.array([1.0, -0.5, 0.25, -2.0])
WIDE = {"clip_low": 1.0, "clip_high": 1e4}  # no clip bites


def every_answer(length):
    """All answers of this length to one prompt token."""
    answers = np.array(np.meshgrid(*[[0, 1]] * length, indexing="ij")).reshape(length, -1).T
    tokens = np.pad(answers, ((0, 0), (1, 0)))
    return Batch(jnp.asarray(tokens), jnp.asarray(np.pad(np.ones(answers.shape, bool), ((0, 0), (1, 0)))))


def probabilities(params, batch):
    logprobs = score_batch(TREE, params, batch).logprobs
    return jnp.exp(jnp.where(batch.completion_mask, logprobs, 0.0).sum(axis=1))


def stale_gradient(length, **correction):
    """Expected gradient of the loss on answers that BEFORE sampled, and the gradient of NOW's expected reward."""
    batch = every_answer(length)
    rewards = REWARDS[: 2**length]
    behavior = score_batch(TREE, BEFORE, batch).logprobs
    weighted = rewards * np.asarray(probabilities(BEFORE, batch), np.float64) * batch.completion_mask.sum()
    batch = batch._replace(advantages=jnp.asarray(weighted, jnp.float32), behavior_logprobs=behavior)
    options = {"loss": partial(policy_loss, loss="dapo", **WIDE)}
    if correction:
        options["correction"] = partial(sampler_correction, **correction)
    loss = partial(grpo_loss, TREE, batch=batch, **options)
    estimated = -jax.grad(lambda params: loss(params)[0])(NOW)["logits"]
    exact = jax.grad(lambda params: (probabilities(params, batch) * rewards).sum())(NOW)["logits"]
    return estimated, exact


@pytest.mark.parametrize("kind", ["ratio", "token_truncate", "sequence_truncate"])
def test_the_corrected_gradient_of_stale_answers_is_that_of_enumeration(kind):
    estimated, exact = stale_gradient(1, kind=kind, high=1e4)
    np.testing.assert_allclose(estimated, exact, atol=1e-6)


def test_several_tokens_need_the_weight_of_their_whole_sequence():
    estimated, exact = stale_gradient(2, kind="sequence_truncate", high=1e4)
    np.testing.assert_allclose(estimated, exact, atol=1e-6)
    # A ratio per token leaves out how likely the policies find the tokens before; here it errs as far as none at all.
    biases = [
        float(jnp.abs(stale_gradient(2, **options)[0] - exact).max() / jnp.abs(exact).max())
        for options in ({"kind": "ratio"}, {"kind": "token_truncate", "high": 1e4}, {"kind": "none"}, {})
    ]
    assert biases == pytest.approx([0.4264, 0.4264, 0.3068, 0.3068], abs=1e-4)


def test_moments_of_the_ratio():
    mean, square_mean = ratio_moments(D, jnp.zeros_like(D), MASK, count_tokens(MASK))
    ratios = np.array([3.0, 0.25, 1.0, 1.5, 1.2])
    np.testing.assert_allclose([mean, square_mean], [ratios.mean(), (ratios**2).mean()], rtol=1e-6)
