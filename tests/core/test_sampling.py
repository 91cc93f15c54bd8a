"""Drawing tokens: frequencies, filters against a plain sort, and what a row must not depend on."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from jaxft.core.logprobs import token_logprobs, unpack_support
from jaxft.core.sampling import (
    LogitBias,
    Penalties,
    SamplingParams,
    _inverse_cdf,
    check_penalties,
    check_sampling,
    has_filters,
    kept_tokens,
    penalize,
    sample,
    sampling_params,
)
from jaxft.models.bridge import from_function

DRAWS, VOCABULARY = 5_000, 33
"""Shape of the tests of small distributions, which are padded with tokens that have no probability."""


@partial(jax.jit, static_argnames=("is_filtered", "in_halves", "shards"))
def jitted_sample(logits, key_data, params, is_filtered=True, in_halves=True, shards=1):
    keys = jax.random.wrap_key_data(key_data)
    return sample(logits, keys, params, is_filtered=is_filtered, in_halves=in_halves, shards=shards)


jitted_kept = jax.jit(kept_tokens, static_argnames=("digits", "in_halves"))


def key_data(seed, rows):
    return np.random.default_rng(seed).integers(2**32, size=(rows, 2), dtype=np.uint32)


def row_params(temperature, top_k, top_p, min_p):
    floats = [np.array(values, np.float32) for values in (temperature, top_p, min_p)]
    return SamplingParams(floats[0], np.array(top_k, np.int32), *floats[1:])


def equal_params(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return row_params(*(np.full(rows, value) for value in (temperature, top_k, top_p, min_p)))


def in_rows(logits, rows=DRAWS):
    """The same logits in every row, padded to `VOCABULARY`."""
    logits = np.pad(np.asarray(logits, np.float32), (0, VOCABULARY - len(logits)), constant_values=-np.inf)
    return np.broadcast_to(logits, (rows, VOCABULARY))


def assert_frequencies(drawn, probs):
    """Nothing without probability was drawn, the rest as often as chance allows (1 in 1000 fails; keys are fixed)."""
    counts = np.bincount(np.asarray(drawn), minlength=len(probs))
    possible = probs > 0
    assert not counts[len(probs) :].any()
    counts = counts[: len(probs)]
    assert not counts[~possible].any()
    expected = probs[possible] / probs.sum() * counts.sum()
    assert chisquare(counts[possible], expected).pvalue > 1e-3


@pytest.mark.parametrize(("size", "is_filtered"), [(VOCABULARY, True), (300, False)])
def test_tokens_of_all_blocks_are_drawn_in_proportion(size, is_filtered):
    weights = np.random.default_rng(size).exponential(size=size)
    weights[1::4] = 0.0
    rows = DRAWS if is_filtered else 20_000
    with np.errstate(divide="ignore"):
        logits = np.broadcast_to(np.log(weights).astype(np.float32), (rows, size))
    drawn = jitted_sample(logits, key_data(size, rows), equal_params(rows), is_filtered=is_filtered)
    assert_frequencies(drawn.tokens, weights)


def test_a_vocabulary_of_one_token():
    drawn = jitted_sample(np.zeros((6, 1), np.float32), key_data(0, 6), equal_params(6), is_filtered=False)
    assert not any(np.asarray(leaf).any() for leaf in drawn)


def test_blocks_may_begin_anew_in_every_part_of_the_vocabulary():
    """Parts of 150 tokens are a block of 128 and one of 22."""
    probs, rows = np.random.default_rng(1).dirichlet(np.full(600, 0.3)), 20_000
    logits, keys = np.broadcast_to(np.log(probs).astype(np.float32), (rows, 600)), key_data(1, rows)
    drawn = jitted_sample(logits, keys, equal_params(rows), is_filtered=False, shards=4)
    assert_frequencies(drawn.tokens, probs)
    np.testing.assert_allclose(drawn.sampler_logprobs, np.log(probs)[np.asarray(drawn.tokens)], rtol=0, atol=2e-6)
    params = equal_params(64)._replace(top_k=np.arange(64, dtype=np.int32) % 2 * 100)
    filtered = jitted_sample(logits[:64], keys[:64], params, shards=4)
    assert_same_bits(filtered, jax.tree.map(lambda x: np.asarray(x)[:64], drawn), slice(0, None, 2))
    assert np.isin(np.asarray(filtered.tokens)[1::2], np.argsort(-probs)[:100]).all()


@pytest.mark.parametrize("size", [600, pytest.param(1024, marks=pytest.mark.slow)])
def test_devices_that_share_the_vocabulary_draw_the_same_tokens(size):
    """`vmap` has the collectives of a mesh axis; parts of whole blocks are drawn as the whole."""
    logits = 3 * np.random.default_rng(2).normal(size=(64, size)).astype(np.float32)
    params = equal_params(64)._replace(temperature=np.tile([0.0, 0.7, 1.0, 2.0], 16).astype(np.float32))
    keys, parts = key_data(3, 64), logits.reshape(64, 4, -1)

    def shared(logits, key_data, params):
        return sample(logits, jax.random.wrap_key_data(key_data), params, is_filtered=False, axis="tensor")

    drawn = jax.jit(jax.vmap(shared, in_axes=(1, None, None), axis_name="tensor"))(parts, keys, params)
    for shards in (4, 1) if size == 1024 else (4,):
        whole = jitted_sample(logits, keys, params, is_filtered=False, shards=shards)
        np.testing.assert_array_equal(drawn.tokens, np.broadcast_to(whole.tokens, (4, 64)))
        expected = np.broadcast_to(whole.sampler_logprobs, (4, 64))
        np.testing.assert_allclose(drawn.sampler_logprobs, expected, rtol=0, atol=2e-6)


def test_no_entry_of_weight_zero_is_ever_drawn():
    """Prefix sums may rise by a rounding where the weight is 0; every such step is hit here on purpose."""
    rng, size = np.random.default_rng(0), 389
    weights = (rng.random((20, size)) * (rng.random((20, size)) < 0.2)).astype(np.float32)
    weights[:, size // 3] = 0.5
    cumulative = np.asarray(jax.jit(partial(jnp.cumsum, axis=-1))(weights))
    uniforms = np.clip(cumulative / cumulative[:, -1:], 0, 1 - 2**-23).astype(np.float32)  # [20 N]
    found = jax.jit(jax.vmap(_inverse_cdf, in_axes=(None, 1), out_axes=1))(weights, uniforms)
    assert np.all(np.take_along_axis(weights, np.asarray(found), axis=1) > 0)


def test_sample_draws_from_the_softmax():
    logits = np.random.default_rng(1).normal(size=10).astype(np.float32)
    logits[3] = -np.inf
    for temperature in (0.5, 2.0):
        drawn = jitted_sample(in_rows(logits), key_data(2, DRAWS), equal_params(DRAWS, temperature=temperature))
        probs = np.exp(logits.astype(np.float64) / temperature)
        assert_frequencies(drawn.tokens, probs)
        expected = (logits / temperature - np.log(probs.sum()))[drawn.tokens]
        np.testing.assert_allclose(drawn.sampler_logprobs, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(drawn.behavior_logprobs, drawn.sampler_logprobs)


def test_filtered_samples_follow_the_renormalised_distribution():
    probs = np.array([0.05, 0.3, 0.02, 0.25, 0.2, 0.03, 0.1, 0.05])
    # Top-k leaves the five largest, 0.9 in all (the lower id of the two at 0.05); 0.85 of that, 0.765, is reached with
    # 0.1; min-p asks for half of 0.3.
    kept = np.array([0, 1, 0, 1, 1, 0, 0, 0], bool)
    params = equal_params(DRAWS, top_k=5, top_p=0.85, min_p=0.5)
    drawn = jitted_sample(in_rows(np.log(probs)), key_data(5, DRAWS), params)
    assert_frequencies(drawn.tokens, np.where(kept, probs, 0))
    np.testing.assert_allclose(drawn.sampler_logprobs, np.log(probs[drawn.tokens]), rtol=1e-5)
    np.testing.assert_allclose(drawn.behavior_logprobs, np.log(probs[drawn.tokens] / 0.75), rtol=1e-5)


# --- Six rows of a vocabulary of three blocks, as each variant compiles it.

MIXED = row_params([1.0, 0.7, 0.0, 1.3, 1.0, 2.0], [0, 3, 0, 0, 0, 5], [1, 1, 1, 0.5, 1, 0.9], [0, 0, 0, 0, 0.2, 0.1])


@cache
def program(is_filtered, in_halves=True):
    """The program before and after its compilation."""
    shapes = np.zeros((6, 300), np.float32), key_data(0, 6), MIXED
    lowered = jitted_sample.lower(*shapes, is_filtered=is_filtered, in_halves=in_halves)
    return lowered.as_text(), lowered.compile()


@pytest.mark.parametrize(("is_filtered", "in_halves"), [(False, True), (True, True), (False, False), (True, False)])
def test_nothing_is_sorted_and_no_branch_and_no_loop_depends_on_values(is_filtered, in_halves):
    """On GPUs such a branch or loop asks the host at every step."""
    text, compiled = program(is_filtered, in_halves)
    assert not any(name in text for name in ("stablehlo.case", "stablehlo.if", "stablehlo.sort"))
    text = compiled.as_text()
    assert " conditional(" not in text and " sort(" not in text
    loops = [line for line in text.splitlines() if " while(" in line]
    assert all("known_trip_count" in line for line in loops)


def test_greedy_takes_the_first_of_ties_in_one_block_and_in_several():
    logits = np.zeros((6, 300), np.float32)
    for row, (first, second) in enumerate([(130, 290), (0, 299), (297, 298)]):
        logits[row, [first, second]] = 2.0
    logits[3:] = -np.inf
    logits[3:, :4] = [[1, 3, 3, 0], [2, 2, 2, 2], [0, -np.inf, 1, -np.inf]]
    mass = np.exp(logits.astype(np.float64)).sum(-1)
    # Filters mean nothing to it.
    for params in (equal_params(6, temperature=0.0), equal_params(6, temperature=0.0, top_k=1, top_p=0.1)):
        drawn = program(is_filtered=True)[1](logits, key_data(0, 6), params)
        np.testing.assert_array_equal(drawn.tokens, [130, 0, 297, 1, 0, 2])
        np.testing.assert_allclose(drawn.sampler_logprobs, [2, 2, 2, 3, 2, 1] - np.log(mass), rtol=1e-6)
        np.testing.assert_array_equal(drawn.behavior_logprobs, drawn.sampler_logprobs)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_a_row_with_nan_gets_a_token_of_the_vocabulary_and_nan(is_filtered):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 300)).astype(np.float32)
    logits[:4, rng.integers(300, size=4)] = np.nan
    logits[4] = np.nan
    params = row_params([1.0, 0.0] * 3, [3, 3, 0, 0, 3, 3], [0.5] * 6, [0] * 6) if is_filtered else equal_params(6)
    drawn = program(is_filtered)[1](logits, key_data(0, 6), params)
    assert np.all((np.asarray(drawn.tokens) >= 0) & (np.asarray(drawn.tokens) < 300))
    for logprobs in (drawn.sampler_logprobs, drawn.behavior_logprobs):
        np.testing.assert_array_equal(np.isnan(logprobs), np.arange(6) < 5)


# --- Which tokens are kept.


def kept_by_sorting(probs, top_k, top_p, min_p):
    """The filters in their order, in float64, on a sorted list; Python's sort leaves low ids first among equals."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        reached = np.cumsum(probs[order]) >= top_p * probs[order].sum()
        order = order[: int(np.argmax(reached)) + 1]
    order = [token for token in order if probs[token] >= min_p * probs.max()]
    return np.isin(np.arange(len(probs)), order)


ROWS = 600


def test_kept_sets_are_those_of_a_sort():
    draw = np.random.default_rng(0)
    counts = draw.integers(0, draw.integers(2, 8, size=(ROWS, 1)), size=(ROWS, 12))  # small counts: ties are common
    counts[:, 0] += ~counts.any(axis=1)
    probs = counts / counts.sum(axis=1, keepdims=True)
    top_k = draw.integers(0, 15, size=ROWS) * draw.integers(0, 2, size=ROWS)
    top_p = np.where(draw.random(ROWS) < 0.3, 1.0, draw.uniform(0.01, 0.999, size=ROWS))
    min_p = np.where(draw.random(ROWS) < 0.5, 0.0, draw.uniform(0.01, 0.99, size=ROWS))
    found = np.asarray(jitted_kept(probs.astype(np.float32), row_params(np.ones(ROWS), top_k, top_p, min_p)))
    # A bound that is met exactly in float64 may be met or missed by a rounding in float32.
    tighter, looser = 1 - 1e-5, 1 + 1e-5
    for kept, row, k, p, m in zip(found, probs, top_k, top_p, min_p, strict=True):
        drawable = row > 0  # what has no probability is never drawn, kept or not
        fewest = kept_by_sorting(row, k, p * tighter if p < 1 else 1.0, m * looser)
        most = kept_by_sorting(row, k, min(1.0, p * looser), m * tighter)
        assert np.all((fewest <= kept)[drawable]), f"a token that belongs was cut: {row, k, p, m}"
        assert np.all((kept <= most)[drawable]), f"a token that does not belong was kept: {row, k, p, m}"


@jax.jit
def draw_and_score(logits, later, key_data, params):
    """Tokens drawn from rows of logits, and their log-probabilities by later ones within what they were drawn from."""
    drawn = sample(logits, jax.random.wrap_key_data(key_data), params, has_supports=True)
    model = from_function(lambda params, tokens, positions: params["rows"][tokens])  # row `i` follows token `i`
    tokens = jnp.stack([jnp.arange(len(logits)), drawn.tokens], axis=1)
    supports = jnp.pad(drawn.supports[:, None], ((0, 0), (1, 0), (0, 0)))
    scored = token_logprobs(model, {"rows": later}, tokens, temperature=params.temperature, supports=supports)
    return drawn, scored.logprobs[:, 1], unpack_support(drawn.supports, logits.shape[1])


def test_ratios_of_filtered_tokens_are_those_of_float64():
    """Both probabilities of a ratio are taken over the tokens that the sampler kept."""
    draw = np.random.default_rng(4)
    logits, change = draw.normal(scale=[[[2.0]], [[0.5]]], size=(2, 64, 300)).astype(np.float32)
    temperature, top_p = draw.uniform(0.5, 1.5, 64).astype(np.float32), draw.uniform(0.3, 0.99, 64).astype(np.float32)
    params = row_params(temperature, draw.integers(0, 40, 64), top_p, draw.uniform(0.0, 0.05, 64))
    drawn, scored, kept = jax.device_get(draw_and_score(logits, logits + change, key_data(4, 64), params))
    for row, token in enumerate(drawn.tokens):
        now, later = (np.exp(np.float64(x[row]) / np.float64(temperature[row])) for x in (logits, logits + change))
        filters = params.top_k[row], np.float64(top_p[row]), np.float64(params.min_p[row])
        np.testing.assert_array_equal(kept[row], kept_by_sorting(now / now.sum(), *filters))
        for found, mass in ((drawn.behavior_logprobs[row], now), (scored[row], later)):
            np.testing.assert_allclose(found, np.log(mass[token] / mass[kept[row]].sum()), rtol=1e-6, atol=1e-6)
    assert np.abs(scored - drawn.behavior_logprobs).max() > 0.5 and kept.sum(axis=1).max() < 300


@pytest.mark.parametrize(
    ("probs", "filters", "kept"),
    [
        ([0.25, 0.25, 0.25, 0.25], dict(top_k=2), [1, 1, 0, 0]),
        ([0.25, 0.25, 0.25, 0.25], dict(top_p=0.6), [1, 1, 1, 0]),
        ([0.125, 0.5, 0.25, 0.125], dict(top_p=0.5), [0, 1, 0, 0]),  # reached exactly
        ([0.125, 0.5, 0.25, 0.125], dict(top_p=0.51), [0, 1, 1, 0]),  # the crossing token stays
        ([0.125, 0.5, 0.25, 0.125], dict(top_p=0.8), [1, 1, 1, 0]),
        ([0.125, 0.5, 0.25, 0.125], dict(min_p=0.5), [0, 1, 1, 0]),
        ([0.125, 0.5, 0.25, 0.125], dict(top_k=9), [1, 1, 1, 1]),
        # 0.6 of the whole takes two tokens; 0.6 of what top-k left takes one.
        ([0.125, 0.5, 0.25, 0.125], dict(top_k=2, top_p=0.6), [0, 1, 0, 0]),
        ([1.0, 0.0, 0.0, 0.0], dict(top_p=0.9), [1, 0, 0, 0]),
    ],
)
def test_kept_sets_by_hand(probs, filters, kept):
    padded = np.broadcast_to(np.pad(np.float32(probs), (0, 8)), (ROWS, 12))
    got = jitted_kept(padded, equal_params(ROWS, **filters))
    np.testing.assert_array_equal(np.asarray(got)[:, :4], np.broadcast_to(np.array(kept, bool), (ROWS, 4)))


def test_ties_in_several_blocks_keep_the_lowest_ids():
    counts = np.random.default_rng(0).integers(0, 5, size=(40, 300))
    probs = (counts / 4).astype(np.float32)
    top_k = np.arange(40) * 8
    params = row_params(np.ones(40), top_k, np.ones(40), np.zeros(40))
    kept = np.asarray(jitted_kept(probs, params))
    for row in range(40):
        np.testing.assert_array_equal(kept[row], kept_by_sorting(probs[row], top_k[row], 1.0, 0.0))


@pytest.mark.parametrize(
    ("digits", "in_halves"),
    [(3, False), pytest.param(3, True, marks=pytest.mark.slow), pytest.param(1, False, marks=pytest.mark.slow)],
)
def test_kept_sets_do_not_depend_on_the_digits_of_a_sweep(digits, in_halves):
    rng = np.random.default_rng(1)
    probs = (rng.integers(0, 64, size=(40, 300)) / 64).astype(np.float32)  # their sums are exact in any order
    probs[::2] *= probs[::2]
    params = row_params(np.ones(40), np.arange(40) % 5 * 9, 1 - np.arange(40) % 3 * 0.25, np.arange(40) % 2 * 0.125)
    expected = jitted_kept(probs, params)
    np.testing.assert_array_equal(jitted_kept(probs, params, digits=digits, in_halves=in_halves), expected)


# --- What a row must not depend on.


def assert_same_bits(got, expected, rows=slice(None)):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a)[rows], np.asarray(b)[rows]), got, expected)


def test_a_row_does_not_know_its_neighbours():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(6, 300)).astype(np.float32)
    keys, plain = key_data(2, 6), equal_params(6)
    draw = program(is_filtered=True)[1]
    together = jax.device_get(draw(logits, keys, MIXED))
    for row in range(6):
        is_row = np.arange(6) == row
        others = rng.normal(size=(6, 300)).astype(np.float32)
        neighbours = jax.tree.map(partial(np.where, is_row), MIXED, plain)
        # The order of keys is turned, so that other rows draw with other noise.
        turned = np.where(is_row[:, None], keys, np.roll(keys, 1, axis=0))
        drawn = draw(np.where(is_row[:, None], logits, others), turned, neighbours)
        assert_same_bits(drawn, together, row)

    order = np.array([4, 2, 0, 5, 1, 3])
    permuted = draw(logits[order], keys[order], jax.tree.map(lambda x: x[order], MIXED))
    assert_same_bits(permuted, jax.tree.map(lambda x: x[order], together))


ALL_KINDS = row_params(
    np.tile([1.0, 0.7, 0.0, 1.3, 1.0, 0.7, 1.0, 0.0], 8),
    np.tile([0, 0, 0, 0, 3, 0, 7, 0], 8),
    np.tile([1, 1, 1, 1, 1, 0.8, 0.5, 1], 8),
    np.tile([0, 0, 0, 0, 0, 0.05, 0, 0], 8),
)._replace(
    logit_bias=LogitBias(
        np.tile([[-1], [-1], [-1], [3], [-1], [-1], [1], [4]], (8, 1)), np.full((64, 1), 1.5, np.float32)
    )
)
UNFILTERED = equal_params(64)._replace(temperature=ALL_KINDS.temperature)


@partial(jax.jit, static_argnames="is_filtered")
def sample_from_hidden(hidden, head, key_data, params, is_filtered):
    logits = hidden @ head.T
    return logits, sample(logits, jax.random.wrap_key_data(key_data), params, is_filtered=is_filtered)


@pytest.fixture(scope="module", params=[262, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 390, 512, 32000))])
def from_hidden(request):
    """Hidden states, a head, keys, logits, and tokens drawn from them without and with filters."""
    size, rng = request.param, np.random.default_rng(request.param)
    # The sums of these products are exact in any order, so that the logits are equal to begin with.
    hidden, head = (rng.integers(-64, 64, shape).astype(np.float32) / 128 for shape in ((64, 32), (size, 32)))
    keys = key_data(size, 64)
    logits, plain = sample_from_hidden(hidden, head, keys, UNFILTERED, is_filtered=False)
    _, mixed = sample_from_hidden(hidden, head, keys, ALL_KINDS, is_filtered=True)
    return hidden, head, keys, *jax.device_get((logits, plain, mixed))


def test_rows_that_filter_nothing_have_the_bits_of_the_other_variant(from_hidden):
    *_, plain, mixed = from_hidden
    assert_same_bits(mixed, plain, ~np.asarray(jax.jit(has_filters)(ALL_KINDS)))


@pytest.mark.parametrize("rows", [1, pytest.param(8, marks=pytest.mark.slow), 16])
def test_bits_do_not_depend_on_the_number_of_rows(from_hidden, rows):
    hidden, head, keys, logits, plain, mixed = from_hidden
    for is_filtered, params, expected in ((False, UNFILTERED, plain), (True, ALL_KINDS, mixed)):
        for start in range(0, 64, max(rows, 7)):
            at = np.arange(start, start + rows) % 64
            part = jax.tree.map(lambda x, at=at: x[at], params)
            found, drawn = sample_from_hidden(hidden[at], head, keys[at], part, is_filtered)
            np.testing.assert_array_equal(found, logits[at])
            assert_same_bits(drawn, jax.tree.map(lambda x, at=at: x[at], expected))


def test_new_values_do_not_compile_again():
    """All parameters are arrays of the same types, whatever their values are."""
    types = [
        jax.tree.map(jax.typeof, sampling_params(6, **values))
        for values in ({}, dict(temperature=0.3, top_k=7, top_p=0.5, min_p=0.1))
    ]
    assert types[0] == types[1] == jax.tree.map(jax.typeof, MIXED)


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "in_halves"), [(151_936, False), (262_144, True)])
def test_large_vocabularies_take_a_few_tables_of_logits(vocabulary, in_halves):
    """Temporaries in tables of the logits: next to none without filters, but for sums in halves, as CPUs have them."""
    rows = 64
    logits = jax.ShapeDtypeStruct((rows, vocabulary), jnp.float32)
    for is_filtered, tables in ((False, 2.5 if in_halves else 0.1), (True, 6 if in_halves else 11)):
        lowered = jitted_sample.lower(
            logits, key_data(0, rows), equal_params(rows), is_filtered=is_filtered, in_halves=in_halves
        )
        temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
        assert temporaries < tables * rows * vocabulary * 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(temperature=-0.1), r"temperature is -0.1; .* 0 .* 1e-06 to 3.4e"),
        (dict(temperature=float("inf")), r"temperature is inf; "),
        (dict(temperature=float("nan")), r"temperature is nan; "),
        (dict(temperature=1e39), r"temperature is 1e\+39; "),
        (dict(temperature=1e-40), r"temperature is 1e-40; "),
        (dict(top_k=2**40), rf"top_k is {2**40}; "),
        (dict(top_k=2**31), rf"top_k is {2**31}; "),
        (dict(top_p=1e-50), r"top_p is 1e-50; "),
        (dict(top_k=-1), r"top_k is -1; .* 0 .* below 2\^31"),
        (dict(top_p=0.0), r"top_p is 0.0; .*\(0, 1\]"),
        (dict(top_p=1.5), r"top_p is 1.5; "),
        (dict(top_p=float("nan")), r"top_p is nan; "),
        (dict(min_p=1.0), r"min_p is 1.0; .*\[0, 1\)"),
        (dict(min_p=-0.5), r"min_p is -0.5; "),
    ],
)
def test_values_outside_their_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        check_sampling(**(dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) | values))
    with pytest.raises(ValueError, match=message):
        sampling_params(6, **values)


# --- Logit bias.


def biased(ids, values, **knobs):
    """Parameters of all draws with these entries, of four."""
    ids, values = (
        np.pad(np.array(x, dtype), (0, 4 - len(x)), constant_values=-1)
        for x, dtype in ((ids, np.int32), (values, np.float32))
    )
    bias = LogitBias(*(np.broadcast_to(x, (DRAWS, 4)) for x in (ids, values)))
    return equal_params(DRAWS, **knobs)._replace(logit_bias=bias)


def test_a_bias_shifts_the_scaled_logits_and_only_behavior_logprobs():
    logits = np.random.default_rng(3).normal(size=8).astype(np.float32)
    params = biased([2, 5, -1, 5], [1.5, -1.0, 50.0, -2.0], temperature=0.7)
    drawn = jitted_sample(in_rows(logits), key_data(4, DRAWS), params)
    scaled = logits.astype(np.float64) / 0.7
    shifted = scaled + np.array([0, 0, 1.5, 0, 0, -3.0, 0, 0])
    assert_frequencies(drawn.tokens, np.exp(shifted))
    for found, z in ((drawn.sampler_logprobs, scaled), (drawn.behavior_logprobs, shifted)):
        np.testing.assert_allclose(found, (z - np.log(np.exp(z).sum()))[drawn.tokens], rtol=1e-5, atol=1e-6)


def test_a_forbidden_token_is_never_drawn_and_greedy_passes_over_it():
    logits, keys = in_rows([0.0, 4.0, 3.0]), key_data(0, DRAWS)
    drawn = jitted_sample(logits, keys, biased([1], [-np.inf]))
    assert set(np.asarray(drawn.tokens).tolist()) == {0, 2}
    greedy = jitted_sample(logits, keys, biased([1], [-np.inf], temperature=0.0))
    assert set(np.asarray(greedy.tokens).tolist()) == {2}
    # As without a bias: at temperature 1, of the whole vocabulary.
    np.testing.assert_allclose(greedy.sampler_logprobs, 3 - np.log(np.exp([0, 4, 3]).sum()), rtol=1e-5)


def test_a_bias_comes_before_the_other_filters_and_leaves_other_rows_alone():
    logits, keys = in_rows(np.log([0.5, 0.3, 0.2])), key_data(1, DRAWS)
    params = biased([2], [5.0], top_k=1)
    ids = np.where(np.arange(DRAWS)[:, None] % 2, -1, params.logit_bias.ids)
    drawn = jitted_sample(logits, keys, params._replace(logit_bias=params.logit_bias._replace(ids=ids)))
    np.testing.assert_array_equal(drawn.tokens, np.tile([2, 0], DRAWS // 2))
    np.testing.assert_allclose(drawn.behavior_logprobs, np.zeros(DRAWS), atol=1e-6)
    plain = jitted_sample(logits, keys, equal_params(DRAWS))
    assert_same_bits(jitted_sample(logits, keys, biased([-1], [5.0])), plain)


# --- Penalties.


def penalties(tokens, repetition=1.0, frequency=0.0, presence=0.0, rows=1):
    """The same penalties for all rows, with counts by token."""
    table = np.array([[*tokens, -1], [*tokens.values(), 0]], np.int32)
    weights = np.array([repetition, frequency, presence], np.float32)
    return Penalties(*np.repeat(table[:, None], rows, axis=1), *np.repeat(weights[:, None], rows, axis=1))


jitted_penalize = jax.jit(penalize)
PENALIZED_LOGITS = np.array([[1.0, -1.0, 0.5, 3.0, 0.0]], np.float32)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"repetition": 2.0}, [[0.5, -2.0, 0.5, 1.5, 0.0]]),
        ({"repetition": 0.5}, [[2.0, -0.5, 0.5, 6.0, 0.0]]),
        ({"frequency": 0.5}, [[1.0, -1.5, 0.5, 1.5, 0.0]]),
        ({"frequency": -1.0}, [[1.0, 0.0, 0.5, 6.0, 0.0]]),
        ({"presence": 0.5}, [[1.0, -1.5, 0.5, 2.5, 0.0]]),
        ({"repetition": 2.0, "frequency": 0.25, "presence": 1.0}, [[0.5, -3.25, 0.5, -0.25, 0.0]]),
        ({}, PENALIZED_LOGITS),
    ],
)
def test_penalties_by_hand(weights, expected):
    counts = {0: 0, 1: 1, 3: 3}  # token 0 is in the prompt alone
    np.testing.assert_array_equal(jitted_penalize(PENALIZED_LOGITS, penalties(counts, **weights)), expected)


def test_a_repetition_penalty_is_that_of_transformers():
    """The numbers of its own test of RepetitionPenaltyLogitsProcessor."""
    logits = np.full((2, 5), 0.1, np.float32)
    logits[0, 0], logits[1, 4] = -0.1, 0.4
    ids, weights = np.array([[0, 1], [4, 0]]), np.array([[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]], np.float32)
    given = Penalties(ids, np.zeros_like(ids), *weights)
    expected = logits.copy()
    expected[0, :2], expected[1, [0, 4]] = (-0.2, 0.05), (0.05, 0.2)
    np.testing.assert_allclose(jitted_penalize(logits, given), expected, rtol=1e-6)


def test_penalties_come_before_the_temperature_and_the_filters():
    logits = np.random.default_rng(5).normal(size=8).astype(np.float32)
    given = penalties({2: 0, 5: 2}, repetition=1.5, frequency=0.5, presence=0.25, rows=DRAWS)

    @partial(jax.jit, static_argnames="is_filtered")
    def draw(params, given, is_filtered):
        keys, allowed = jax.random.wrap_key_data(key_data(6, DRAWS)), jnp.zeros((DRAWS, 2), jnp.uint32)
        options = {"is_filtered": is_filtered, "allowed": allowed, "penalties": given, "has_supports": True}
        return sample(jnp.asarray(in_rows(logits)), keys, params, **options)

    z = np.asarray(jitted_penalize(logits[None], penalties({2: 0, 5: 2}, 1.5, 0.5, 0.25)), np.float64)[0] / 0.7
    drawn = draw(equal_params(DRAWS, 0.7), given, is_filtered=False)
    assert_frequencies(drawn.tokens, np.exp(z))
    for found, scaled in ((drawn.sampler_logprobs, logits / 0.7), (drawn.behavior_logprobs, z)):
        log_probs = scaled - np.log(np.exp(scaled).sum())
        np.testing.assert_allclose(found, log_probs[drawn.tokens], rtol=1e-5, atol=1e-6)

    drawn = draw(equal_params(DRAWS, 0.7, top_k=3), given, is_filtered=True)
    kept = np.sort(np.argsort(-z)[:3])
    assert set(np.asarray(drawn.tokens).tolist()) == set(kept.tolist())
    assert set(np.asarray(drawn.supports)[:, 0].tolist()) == {sum(1 << token for token in kept.tolist())}
    for found, scaled in ((drawn.sampler_logprobs, logits / 0.7), (drawn.behavior_logprobs, z)):
        log_probs = scaled - np.log(np.exp(scaled[kept]).sum())
        np.testing.assert_allclose(found, log_probs[drawn.tokens], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "values",
    [
        {"presence_penalty": -2.1},
        {"frequency_penalty": 3.0},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
    ],
)
def test_penalties_outside_their_range_are_refused(values):
    ((name, value),) = values.items()
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        check_penalties(*({"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1} | values).values())
