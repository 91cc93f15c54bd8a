"""Log-probabilities and entropies of tokens: against a plain float64 softmax, in chunks, packed; their gradients."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.logprobs import CHUNK_LOGITS, token_logprobs
from jaxft.core.softmax import logprobs_by, softmax_statistics
from jaxft.core.types import Model

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 7, 4, 11


def logits_logprobs(logits, tokens, temperature):
    return logprobs_by(softmax_statistics(logits, tokens, temperature), logits, tokens, temperature)


score_logits = jax.jit(logits_logprobs)
score = jax.jit(token_logprobs, static_argnames=("model", "entropy_gradient", "chunk_tokens", "with_sum_pi_squared"))


def random_params(vocabulary=VOCABULARY, width=WIDTH):
    draw = np.random.default_rng(3)
    return {
        "embedding": draw.normal(size=(vocabulary, width)).astype(np.float32),
        "head": draw.normal(size=(width, vocabulary)).astype(np.float32),
    }


def param_shapes(vocabulary, width):
    shapes = {"embedding": (vocabulary, width), "head": (width, vocabulary)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


PARAMS = random_params()
TOKENS = np.random.default_rng(4).integers(0, VOCABULARY, size=(ROWS, LENGTH)).astype(np.int32)


def plain_logprobs(params, tokens, temperature):
    """Log-probabilities of the whole vocabulary in float64, for all tokens but the first."""
    embedding, head = (np.asarray(params[name], np.float64) for name in ("embedding", "head"))
    scaled = (embedding[tokens[:, :-1]] @ head) / np.broadcast_to(temperature, tokens.shape)[:, 1:, None]
    scaled -= scaled.max(-1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))


def plain_scores(params, tokens, temperature):
    """Log-probabilities and entropies in float64, the first token 0."""
    tokens = np.asarray(tokens)
    logprobs = plain_logprobs(params, tokens, temperature)
    entropy = -(np.exp(logprobs) * logprobs).sum(-1)
    chosen = np.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    return np.pad(chosen, ((0, 0), (1, 0))), np.pad(entropy, ((0, 0), (1, 0)))


def relative_error(got, expected):
    return max(
        np.abs(a - b).max() / np.abs(b).max()
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    )


PER_ROW = np.array([0.5, 1.0, 1.7], np.float32)
PER_TOKEN = np.linspace(0.3, 2.0, ROWS * LENGTH, dtype=np.float32).reshape(ROWS, LENGTH)


@pytest.mark.parametrize("temperature", [1.0, 0.5, PER_ROW, PER_TOKEN], ids=["1", "0.5", "per row", "per token"])
def test_against_a_plain_softmax(bigram, temperature):
    given = {"temperature": np.float32(temperature), "with_sum_pi_squared": True}
    scored = jax.device_get(score(bigram, PARAMS, TOKENS, **given))
    temperature = temperature[:, None] if np.ndim(temperature) == 1 else temperature
    plain = plain_scores(PARAMS, TOKENS, temperature)
    squares = np.exp(2 * plain_logprobs(PARAMS, TOKENS, temperature)).sum(-1)
    np.testing.assert_allclose(scored.sum_pi_squared, np.pad(squares, ((0, 0), (1, 0))), rtol=0, atol=1e-5)
    assert scored.logprobs.dtype == scored.entropy.dtype == np.float32
    np.testing.assert_allclose(scored.logprobs, plain[0], rtol=0, atol=5e-6)
    np.testing.assert_allclose(scored.entropy, plain[1], rtol=0, atol=5e-6)
    assert np.all(scored.logprobs[:, 0] == 0)
    assert np.all(scored.entropy[:, 0] == 0)


@pytest.fixture(scope="module")
def gradient_of_good_tokens(bigram):
    def of_good_tokens(params, temperatures):
        tokens = jnp.array([[0, 1, 2, 3]])
        scored = token_logprobs(bigram, params, tokens, temperature=temperatures)
        is_good = jnp.array([[False, True, False, True]])
        return jnp.where(is_good, scored.logprobs, 0.0).sum(), scored

    return jax.jit(jax.grad(of_good_tokens, has_aux=True))


@pytest.mark.parametrize("temperature", [-1.0, np.nan, np.inf])
def test_impossible_temperatures_give_nan_and_spoil_no_gradient(gradient_of_good_tokens, temperature):
    temperatures = np.array([[1.0, 1.0, temperature, 1.0]], np.float32)
    grads, scored = jax.device_get(gradient_of_good_tokens(PARAMS, temperatures))
    assert np.isnan(scored.logprobs[0, 2]) and np.isnan(scored.entropy[0, 2])
    assert np.isfinite(scored.logprobs[0, [1, 3]]).all()
    assert all(np.isfinite(leaf).all() and np.any(leaf != 0) for leaf in jax.tree.leaves(grads))


def test_the_first_tokens_of_packed_segments_are_not_scored(bigram):
    segments = np.array([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1], [5, 5, 5, 5, 5, 5, 5]])
    scored = jax.device_get(score(bigram, PARAMS, TOKENS, segment_ids=segments))
    whole = score(bigram, PARAMS, TOKENS)
    firsts = np.array([[1, 0, 0, 1, 0, 1, 0], [1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]], bool)
    for packed, unpacked in zip(scored[:2], whole[:2], strict=True):
        np.testing.assert_allclose(packed, np.where(firsts, 0.0, unpacked), rtol=1e-6)
        assert np.all(packed[firsts] == 0)


def value_and_gradient(model, params, tokens, chunk_tokens):
    """Scores, and the gradient of a weighted sum of them all."""
    weights = np.arange(tokens.size, dtype=np.float32).reshape(tokens.shape)

    def total(params):
        scored = token_logprobs(
            model, params, tokens, temperature=0.7, entropy_gradient=True, chunk_tokens=chunk_tokens
        )
        return jnp.sum(weights * (scored.logprobs + 0.3 * scored.entropy)), scored

    (_, scored), gradient = jax.value_and_grad(total, has_aux=True)(params)
    return scored, gradient


jitted_value_and_gradient = jax.jit(value_and_gradient, static_argnums=(0, 3))


def test_chunks_change_nothing(bigram):
    whole, with_rest, without = (
        jax.device_get(jitted_value_and_gradient(bigram, PARAMS, TOKENS, chunk_tokens))
        for chunk_tokens in (100, 5, 6)  # 18 tokens are scored: 5 leaves a rest
    )
    assert relative_error(with_rest, whole) <= 1e-6
    assert relative_error(without, whole) <= 1e-6


def test_only_wanted_tokens_are_scored(bigram):
    """Their scores and the gradient are those of all tokens; those of others are 0."""

    def total(params, tokens, wanted, weights, is_partial):
        scored = token_logprobs(
            bigram,
            params,
            tokens,
            temperature=0.7,
            entropy_gradient=True,
            chunk_tokens=4,
            completion_mask=wanted if is_partial else None,
            with_sum_pi_squared=True,
        )
        if is_partial:  # what is not wanted has no gradient, whatever its weight
            weights = weights + 5.0 * ~wanted
        return jnp.sum(weights * (scored.logprobs + 0.3 * scored.entropy)), scored

    @jax.jit
    def both(*given):
        return [jax.value_and_grad(total, has_aux=True)(PARAMS, *given, is_partial) for is_partial in (True, False)]

    for count in (0, 1, 7, 18):
        wanted = np.zeros(TOKENS.shape, bool)
        wanted[:, 1:] = np.random.default_rng(count).permutation(np.arange(18) < count).reshape(3, 6)
        weights = np.where(wanted, np.arange(21.0).reshape(3, 7), 0).astype(np.float32)
        (of_wanted, gradient), (of_all, expected) = jax.device_get(both(TOKENS, wanted, weights))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), gradient, expected)
        np.testing.assert_allclose(of_wanted[1].logprobs[wanted], of_all[1].logprobs[wanted], rtol=1e-6)
        assert not of_wanted[1].logprobs[~wanted].any()
        squares, expected = (found[1].sum_pi_squared for found in (of_wanted, of_all))
        np.testing.assert_allclose(squares[wanted], expected[wanted], rtol=1e-5)
        assert not squares[~wanted].any() and np.all(squares[wanted] < 1)


def test_entropy_by_hand():
    logits = np.log(np.array([[0.5, 0.25, 0.25, 1e-30], [0.25, 0.25, 0.25, 0.25]], np.float32))
    logits[0, 3] = -np.inf
    logprobs, entropy = score_logits(logits, np.array([1, 3]), np.ones(2, np.float32))
    np.testing.assert_allclose(logprobs, np.log([0.25, 0.25]), rtol=1e-6)
    np.testing.assert_allclose(entropy, [1.5 * np.log(2), 2 * np.log(2)], rtol=1e-6)
    # At temperature 1/2 probabilities are squared: 4, 1, 1 of 6.
    logprobs, _ = score_logits(logits, np.array([0, 0]), np.full(2, 0.5, np.float32))
    np.testing.assert_allclose(np.exp(logprobs), [4 / 6, 1 / 4], rtol=1e-6)


@jax.jit
def sum_gradient(logits, temperature):
    """Gradients of log-probability and entropy of the first token of one row."""

    def score_of(logits):
        logprobs, entropy = logits_logprobs(logits, jnp.array([0]), temperature)
        return logprobs[0], entropy[0]

    return jax.jacrev(score_of)(logits)


def test_forbidden_tokens_have_no_gradient_and_spoil_none():
    logits = np.array([[1.0, -np.inf, 2.0, -np.inf]], np.float32)
    temperature = np.array([0.8], np.float32)
    gradient, without = (np.add(*sum_gradient(each, temperature)) for each in (logits, logits[:, ::2]))
    np.testing.assert_allclose(gradient, [[without[0, 0], 0, without[0, 1], 0]], rtol=1e-5, atol=1e-6)


def test_the_gradient_of_the_entropy_by_hand():
    # dH/dz_i = -p_i (log p_i + H), at temperature 1.
    logits = np.array([[0.3, -1.0, 0.8, -0.2]], np.float32)
    _, gradient = sum_gradient(logits, np.ones(1, np.float32))
    logprobs = logits - np.log(np.exp(logits).sum())
    entropy = -(np.exp(logprobs) * logprobs).sum()
    np.testing.assert_allclose(gradient, -np.exp(logprobs) * (logprobs + entropy), rtol=1e-5, atol=1e-7)


def test_the_entropy_has_a_gradient_only_when_asked(bigram):
    @jax.jit
    def gradients(params):
        def mean(params, wanted):
            return token_logprobs(bigram, params, jnp.array(TOKENS), entropy_gradient=wanted).entropy.mean()

        return [jax.grad(mean)(params, wanted) for wanted in (True, False)]

    wanted, unwanted = jax.device_get(gradients(PARAMS))
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(wanted))
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(unwanted))


def test_bfloat16_logits_are_scored_in_float32():
    logits = (np.random.default_rng(0).normal(size=(50, 200)) * 4).astype(jnp.bfloat16)
    tokens, temperature = np.zeros(50, np.int32), np.full(50, 1.3, np.float32)
    got = score_logits(logits, tokens, temperature)
    assert {x.dtype for x in got} == {np.dtype(np.float32)}
    wide = score_logits(logits.astype(np.float32), tokens, temperature)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, wide)


def test_float64_stays_float64(bigram):
    with jax.enable_x64(True):
        model = bigram._replace(unembed=lambda params, hidden: hidden @ params["head"])
        params = jax.tree.map(np.float64, PARAMS)
        scored = score(model, params, TOKENS, with_sum_pi_squared=True)
        squares = np.exp(2 * plain_logprobs(PARAMS, TOKENS, 1.0)).sum(-1)
        np.testing.assert_allclose(scored.sum_pi_squared[:, 1:], squares, rtol=0, atol=1e-12)
        np.testing.assert_allclose(scored.logprobs, plain_scores(PARAMS, TOKENS, 1.0)[0], rtol=0, atol=1e-12)


def test_full_chunks_pad_no_hidden_state(bigram):
    width = PARAMS["embedding"].shape[1]

    def pads(chunk_tokens):
        text = jitted_value_and_gradient.lower(bigram, PARAMS, TOKENS, chunk_tokens).as_text()
        return [line for line in text.splitlines() if "stablehlo.pad" in line and f"x{width}xf32>" in line]

    # One is of the gradient of leaving out the last token; another of 18 tokens in chunks of 5 leaves out the rest.
    assert [len(pads(chunk_tokens)) for chunk_tokens in (100, 6, 5)] == [1, 1, 2]


@pytest.mark.parametrize(("vocabulary", "cap"), [(262_144, 30.0), pytest.param(151_936, None, marks=pytest.mark.slow)])
def test_large_vocabularies_take_the_memory_of_one_chunk(bigram, vocabulary, cap):
    """Of 8,192 tokens, whose logits are 5 or 8 GB, only those of one default chunk exist, in at most two tables.

    Without a soft cap jaxlib 0.10.2 makes one table, and 0.10.0 two.
    """
    model = bigram
    if cap is not None:
        model = bigram._replace(unembed=lambda params, hidden: cap * jnp.tanh(bigram.unembed(params, hidden) / cap))
    params = param_shapes(vocabulary, 8)
    tokens = jax.ShapeDtypeStruct((4, 2049), jnp.int32)
    memory = jitted_value_and_gradient.lower(model, params, tokens, None).compile().memory_analysis()
    head_bytes, chunk_bytes = 8 * vocabulary * 4, 4 * CHUNK_LOGITS
    assert memory.temp_size_in_bytes < 2.25 * chunk_bytes + 2 * head_bytes


def test_rows_of_one_token(bigram):
    scored = score(bigram, PARAMS, TOKENS[:, :1])
    jax.tree.map(np.testing.assert_array_equal, tuple(scored[:2]), (np.zeros((3, 1)), np.zeros((3, 1))))
    assert scored.values is None and scored.next_values is None


def test_values_describe_what_a_token_was_chosen_after(bigram):
    """Values of the hidden state before each token; 0 where nothing stands before it."""
    head = {"kernel": np.array([1.0, -2.0, 0.5, 3.0], np.float32), "bias": np.float32(0.25)}
    segments = np.array([[0, 0, 0, 1, 1, 2, 2]] * 3)
    got = score(bigram, PARAMS, TOKENS, value_head=head, segment_ids=segments)
    expected, after = np.zeros(TOKENS.shape), np.zeros(TOKENS.shape)
    for row, t in np.ndindex(*TOKENS.shape):
        after[row, t] = PARAMS["embedding"][TOKENS[row, t]] @ head["kernel"] + 0.25
        if t not in (0, 3, 5):
            expected[row, t] = after[row, t - 1]
    np.testing.assert_allclose(got.values, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.next_values, after, rtol=1e-5, atol=1e-6)


def test_impossible_shapes_and_chunks_are_refused(bigram):
    # As users call it: without the checks of annotations that this test session adds.
    unchecked = inspect.unwrap(token_logprobs)
    with pytest.raises(ValueError, match=r"temperature has shape \(7,\); .*\(\), \(3,\) or \(3, 7\)"):
        unchecked(bigram, PARAMS, TOKENS, temperature=np.ones(7, np.float32))
    with pytest.raises(ValueError, match=r"chunk_tokens is 0; .* 1"):
        unchecked(bigram, PARAMS, TOKENS, chunk_tokens=0)


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_tokens_outside_the_vocabulary_are_refused(bigram, token):
    """As NaN they would reach the gradient, and through weights of 0 the tokens beside them."""
    tokens = TOKENS.copy()
    tokens[1, 2] = token

    def apply(params, tokens, positions, cache=None, tables=None, segment_ids=None):
        return jax.device_put(np.zeros((*tokens.shape, WIDTH), np.float32)), cache

    model = bigram._replace(apply=apply)
    with pytest.raises(ValueError, match=rf"tokens\[1, 2\] is {token}; .* {VOCABULARY} tokens"):
        token_logprobs(model, PARAMS, jnp.array(tokens))
    scored = jax.eval_shape(partial(token_logprobs, bigram), PARAMS, tokens)
    assert scored.logprobs.shape == TOKENS.shape  # under jit no id is known


@pytest.mark.slow
def test_scoring_outside_of_jit_makes_no_arrays_of_the_size_of_the_model():
    """Sums of gradients are float32 and as large as the model; a forward pass has no use for them."""
    wide = []

    def apply(params, tokens, positions, cache=None, tables=None, segment_ids=None):
        return params["embedding"][tokens], cache

    def unembed(params, hidden):
        wide.extend(x.shape for x in jax.live_arrays() if x.shape in {(71, 13), (13, 71)} and x.dtype == jnp.float32)
        return hidden @ params["head"]

    model = Model("wide", lambda key: {}, apply, unembed, lambda pages, dtype: {})
    params = {"embedding": jnp.ones((71, 13), jnp.bfloat16), "head": jnp.ones((13, 71), jnp.bfloat16)}
    for chunk_tokens in (None, 3):
        token_logprobs(model, params, jnp.zeros((2, 4), jnp.int32), chunk_tokens=chunk_tokens)
    assert not wide
