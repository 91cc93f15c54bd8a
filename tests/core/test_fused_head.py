"""Log-probabilities by the fused head against a softmax in float64: values, gradients, unlikely tokens, bad input."""

import inspect
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core import fused_head
from jaxft.core.fused_head import fused_token_logprobs, takes_fused_head
from jaxft.core.logprobs import token_logprobs
from jaxft.models.config import model_preset
from jaxft.models.decoder import decoder

TOKENS, VOCABULARY, WIDTH = 24, 300, 16
SLICED = TOKENS * 128  # logits: 3 slices of 128, 128 and 44 tokens
SCALE = 1.5
draw = np.random.default_rng(5)
HIDDEN = draw.normal(size=(TOKENS, WIDTH)).astype(jnp.bfloat16).astype(np.float32)
HEAD = (draw.normal(size=(VOCABULARY, WIDTH)) * 0.4).astype(jnp.bfloat16).astype(np.float32)
CHOSEN = draw.integers(0, VOCABULARY, TOKENS).astype(np.int32)
TEMPERATURES = np.linspace(0.4, 2.0, TOKENS, dtype=np.float32)
WEIGHTS = draw.normal(size=(2, TOKENS)).astype(np.float32)
EVERY = np.ones(TOKENS, bool)


@partial(jax.jit, static_argnames="leaves_out")
def scores_and_gradients(hidden, head, tokens, temperature, mask, leaves_out):
    """Scores, and gradients of a weighted sum of log-probabilities, normalizers and entropies."""

    def total(hidden, head):
        given = {"completion_mask": mask, "logit_scale": SCALE, "slice_logits": SLICED}
        scores = fused_token_logprobs(hidden, head, tokens, temperature, leaves_out=leaves_out, **given)
        of_logprobs, of_normalizers = WEIGHTS[:, : len(hidden)]
        sums = of_logprobs * scores.logprobs + of_normalizers * scores.log_normalizers + 7 * scores.entropy
        return jnp.where(mask, sums, 0.0).sum(), scores

    gradients, scores = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, head)
    return scores, gradients


def computed(
    hidden=HIDDEN, head=HEAD, tokens=CHOSEN, temperature=TEMPERATURES, mask=EVERY, dtype=np.float32, leaves_out=False
):
    found = scores_and_gradients(hidden.astype(dtype), head.astype(dtype), tokens, temperature, mask, leaves_out)
    return jax.tree.map(lambda x: np.asarray(x, None if x.dtype == bool else np.float32), jax.device_get(found))


def exact(hidden=HIDDEN, head=HEAD, tokens=CHOSEN, temperature=TEMPERATURES):
    """The same by the formula, in float64; the entropy has no gradient."""
    hidden, head, temperature = (np.asarray(x, np.float64) for x in (hidden, head, temperature))
    logits = SCALE * hidden @ head.T / temperature[:, None]
    shifted = logits - logits.max(axis=1, keepdims=True)
    normalizers = np.log(np.exp(shifted).sum(axis=1))
    logprobs = shifted - normalizers[:, None]
    probs = np.exp(logprobs)
    moved = WEIGHTS[0][:, None] * (np.eye(len(head))[tokens] - probs) + WEIGHTS[1][:, None] * probs
    moved *= SCALE / temperature[:, None]
    entropy = -np.where(probs > 0, probs * logprobs, 0).sum(axis=1)
    scores = logprobs[np.arange(len(hidden)), tokens], entropy, normalizers + logits.max(axis=1)
    return scores, (moved @ head, moved.T @ hidden)


def row_errors(found, wanted):
    return np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 2e-6), (jnp.bfloat16, 0.006)], ids=["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_a_softmax(dtype, bound):
    (*scores, overflows), gradients = computed(dtype=dtype)
    wanted, wanted_gradients = exact()
    for found, value in zip(scores, wanted, strict=True):
        np.testing.assert_allclose(found, value, rtol=0, atol=1e-5)
    for found, value in zip(gradients, wanted_gradients, strict=True):
        assert row_errors(found, value).max() < bound
    assert not overflows.any()


def test_an_almost_certain_token_keeps_its_digits():
    """Exponentials relative to the largest logit would round to a single 1, without a gradient."""
    sure, tokens = HIDDEN.copy(), CHOSEN.copy()
    tokens[3] = np.linalg.norm(HEAD, axis=1).argmax()
    sure[3] = HEAD[tokens[3]] * 2
    (*scores, overflows), gradients = computed(sure, tokens=tokens)
    wanted, (of_hidden, _) = exact(sure, tokens=tokens)
    assert -1e-4 < wanted[0][3] < -1e-12
    np.testing.assert_allclose(scores[0][3], wanted[0][3], rtol=1e-4)
    np.testing.assert_allclose(gradients[0][3], of_hidden[3], rtol=1e-4, atol=1e-5 * np.abs(of_hidden[3]).max())
    assert not overflows.any()


def test_tokens_less_likely_than_float32_can_say_are_scored_and_counted():
    """Others keep their bits, and the gradients of all are right."""
    unlikely = HIDDEN.copy()
    unlikely[5], unlikely[9] = HEAD[CHOSEN[5]] * -30, HEAD[CHOSEN[9]] * -9
    (*scores, overflows), gradients = computed(unlikely)
    wanted, wanted_gradients = exact(unlikely)
    assert wanted[0][5] < -100 and -64 < wanted[0][9] < -60
    assert np.flatnonzero(overflows).tolist() == [5]
    for found, value in zip(scores, wanted, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-5)
    for found, value in zip(gradients, wanted_gradients, strict=True):
        assert row_errors(found, value).max() < 1e-5
    others = np.delete(np.arange(TOKENS), [5, 9])
    usual = computed()[0]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[others], b[others]), tuple(scores), tuple(usual)[:3])


def test_masked_tokens_and_impossible_temperatures_spoil_nothing():
    hidden, temperatures, mask = HIDDEN.copy(), TEMPERATURES.copy(), EVERY.copy()
    hidden[1], hidden[2], temperatures[12] = np.nan, HEAD[CHOSEN[2]] * -30, np.nan
    mask[[1, 2, 12]] = False
    temperatures[[4, 6, 8, 10]] = [-1, np.nan, np.inf, 0]
    (*scores, overflows), gradients = computed(hidden, temperature=temperatures, mask=mask)
    assert not overflows.any()
    for found in scores:
        assert np.flatnonzero(np.isnan(found)).tolist() == [4, 6, 8] and not found[~mask].any()
    left = np.delete(np.arange(TOKENS), [1, 2, 4, 6, 8, 12])
    wanted = exact(temperature=np.where((temperatures > 0) & (temperatures < np.inf), temperatures, 1.0))
    np.testing.assert_allclose(scores[0][left], wanted[0][0][left], rtol=0, atol=1e-5)
    assert row_errors(gradients[0][left], wanted[1][0][left]).max() < 2e-6
    assert np.isfinite(gradients[1]).all() and not np.delete(gradients[0], left, axis=0).any()


@pytest.mark.parametrize("count", [0, 1, 6, 7, 18, 24])
def test_masked_tokens_left_out_change_nothing(count):
    """The head has 6, 12, 18 or 24 tokens; one of them is less likely than float32 can say."""
    unlikely = HIDDEN.copy()
    unlikely[5] = HEAD[CHOSEN[5]] * -30
    mask = np.random.default_rng(count).permutation(TOKENS) < count
    found, expected = (computed(unlikely, mask=mask, leaves_out=leaves_out) for leaves_out in (True, False))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), found, expected)


def test_infinite_and_undefined_logits_are_scored_as_by_the_formula():
    """Entries of the vocabulary whose logits are -inf have no probability; NaN stays with its token."""
    hidden, head, tokens = np.abs(HIDDEN) + 1, HEAD.copy(), CHOSEN.copy()
    head[290:] = -3e38
    tokens[tokens >= 290] = 0
    tokens[7] = 295
    (*scores, _), gradients = computed(hidden, head, tokens)
    wanted, (of_hidden, _) = exact(hidden, head[:290], np.minimum(tokens, 289))
    others = np.delete(np.arange(TOKENS), 7)
    assert scores[0][7] == -np.inf
    for found, value in zip(scores, wanted, strict=True):
        np.testing.assert_allclose(found[others], value[others], rtol=1e-6, atol=1e-5)
    assert row_errors(gradients[0][others], of_hidden[others]).max() < 1e-5
    hidden[3] = np.nan
    logprobs = computed(hidden, head, tokens)[0].logprobs
    assert np.flatnonzero(np.isnan(logprobs)).tolist() == [3]


def test_no_tokens():
    scores, gradients = computed(HIDDEN[:0], HEAD, CHOSEN[:0], TEMPERATURES[:0], EVERY[:0])
    assert all(x.shape == (0,) for x in scores) and not gradients[1].any()


def test_dtypes_that_cannot_be_computed_are_refused():
    # As users call it: without the checks of annotations that this test session adds.
    unchecked = inspect.unwrap(fused_token_logprobs)
    given = HIDDEN, HEAD, CHOSEN
    half = [x.astype(np.float16) for x in given[:2]]
    with pytest.raises(ValueError, match=r"hidden holds float16 .* bfloat16"):
        unchecked(*half, CHOSEN)
    with pytest.raises(ValueError, match=r"hidden holds float32 and head bfloat16"):
        unchecked(given[0], given[1].astype(jnp.bfloat16), CHOSEN)
    with pytest.raises(ValueError, match=r"slice_logits is 0 .* 1"):
        unchecked(*given, slice_logits=0)
    with pytest.raises(ValueError, match=r"logit_scale -0\.5"):
        unchecked(*given, logit_scale=-0.5)
    with pytest.raises(ValueError, match=rf"tokens\[2\] is {VOCABULARY}; .* {VOCABULARY} tokens"):
        unchecked(*given[:2], np.where(np.arange(TOKENS) == 2, VOCABULARY, CHOSEN))


def test_it_is_taken_where_its_exponentials_fit():
    taken = partial(takes_fused_head, vocabulary=151_936, dtype=jnp.bfloat16, logit_scale=1.0)
    assert [taken("gpu", tokens) for tokens in (8 * 2048, 28_000, 29_000)] == [True, True, False]
    assert [taken("tpu", tokens) for tokens in (8192, 9000)] == [True, False]
    assert not taken("cpu", 16)
    assert not taken("gpu", 16, dtype=jnp.float32) and not taken("gpu", 16, logit_scale=None)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_scores_of_a_model_are_those_in_chunks(monkeypatch, is_tied):
    """As on an accelerator: with masked tokens, packed rows and temperatures of rows; a soft cap keeps the chunks."""
    monkeypatch.setattr(fused_head, "KEPT_BYTES", {"cpu": 2**20})
    config = replace(model_preset("qwen3-50k"), vocab_size=VOCABULARY, num_layers=1, tie_word_embeddings=is_tied)
    tokens = draw.integers(0, VOCABULARY, (3, 40)).astype(np.int32)
    options = {
        "temperature": np.array([0.7, 1.0, 1.6], np.float32),
        "segment_ids": np.sort(draw.integers(0, 3, tokens.shape), axis=1),
        "completion_mask": draw.random(tokens.shape) < 0.5,
    }
    weights = np.where(options["completion_mask"], draw.normal(size=tokens.shape), 0).astype(np.float32)

    @partial(jax.jit, static_argnums=(0, 1))
    def compute(model, chunk_tokens, params, tokens, options):
        def total(params):
            scored = token_logprobs(model, params, tokens, chunk_tokens=chunk_tokens, **options)
            return jnp.sum(weights * scored.logprobs), scored

        return jax.grad(total, has_aux=True)(params)

    params = jax.jit(decoder(config).init)(jax.random.key(0))
    narrow = decoder(config, compute_dtype=jnp.bfloat16)
    cases = (narrow, None), (narrow, 100), (decoder(config), 100)
    (found, scored), (_, in_chunks), (exact, _) = (
        jax.device_get(compute(*case, params, tokens, options)) for case in cases
    )
    assert scored.overflows is not None and in_chunks.overflows is None
    np.testing.assert_allclose(scored.logprobs, in_chunks.logprobs, rtol=0, atol=1e-5)
    np.testing.assert_allclose(scored.entropy, in_chunks.entropy, rtol=0, atol=1e-5)
    # The layers alone are off by 1 to 3 % in bfloat16, with either head.
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)
    assert decoder(replace(config, logit_soft_cap=20.0)).logit_scale is None
