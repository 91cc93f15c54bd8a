"""Drawing tokens: frequencies, filters against a plain sort, and what a row must not depend on."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from jaxft.core.sampling import (
    LogitBias,
    SamplingParams,
    _inverse_cdf,
    check_sampling,
    fold_ids,
    has_filters,
    kept_tokens,
    sample,
    sampling_params,
)

DRAWS = 20_000
jitted_sample = jax.jit(sample, static_argnames=("is_filtered", "in_halves", "shards"))
jitted_kept = jax.jit(kept_tokens, static_argnames=("digits", "in_halves"))


def row_params(temperature, top_k, top_p, min_p):
    floats = [np.array(values, np.float32) for values in (temperature, top_p, min_p)]
    return SamplingParams(floats[0], np.array(top_k, np.int32), *floats[1:])


def assert_frequencies(drawn, probs):
    """Nothing without probability was drawn, the rest as often as chance allows (1 in 1000 fails; keys are fixed)."""
    counts = np.bincount(np.asarray(drawn), minlength=len(probs))
    possible = probs > 0
    assert len(counts) == len(probs)
    assert not counts[~possible].any()
    if possible.sum() > 1:
        expected = probs[possible] / probs.sum() * counts.sum()
        assert chisquare(counts[possible], expected).pvalue > 1e-3


@pytest.mark.parametrize(("size", "is_filtered"), [(1, False), (33, True), (300, False)])
def test_tokens_of_all_blocks_are_drawn_in_proportion(size, is_filtered):
    weights = np.random.default_rng(size).exponential(size=size)
    weights[1::4] = 0.0
    with np.errstate(divide="ignore"):
        logits = np.broadcast_to(np.log(weights).astype(np.float32), (DRAWS, size))
    keys = jax.random.split(jax.random.key(size), DRAWS)
    drawn = jitted_sample(logits, keys, sampling_params(DRAWS), is_filtered=is_filtered)
    assert_frequencies(drawn.tokens, weights)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_blocks_may_begin_anew_in_every_part_of_the_vocabulary(is_filtered):
    """Parts of 150 tokens are a block of 128 and one of 22."""
    probs = np.random.default_rng(1).dirichlet(np.full(600, 0.3))
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probs, jnp.float32)), (DRAWS, 600))
    keys = jax.random.split(jax.random.key(1), DRAWS)
    drawn = jitted_sample(logits, keys, sampling_params(DRAWS), is_filtered=is_filtered, shards=4)
    assert_frequencies(drawn.tokens, probs)
    np.testing.assert_allclose(drawn.sampler_logprobs, np.log(probs)[np.asarray(drawn.tokens)], rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [600, 1024])
def test_devices_that_share_the_vocabulary_draw_the_same_tokens(size):
    """`vmap` has the collectives of a mesh axis; parts of whole blocks are drawn as the whole."""
    logits = 3 * jax.random.normal(jax.random.key(2), (64, size))
    params = row_params(np.tile([0.0, 0.7, 1.0, 2.0], 16), np.zeros(64), np.ones(64), np.zeros(64))
    keys, parts = jax.random.split(jax.random.key(3), 64), logits.reshape(64, 4, -1)
    shared = partial(sample, is_filtered=False, axis="tensor")
    drawn = jax.jit(jax.vmap(shared, in_axes=(1, None, None), axis_name="tensor"))(parts, keys, params)
    for shards in (4, 1) if size == 1024 else (4,):
        whole = jitted_sample(logits, keys, params, is_filtered=False, shards=shards)
        for device in range(4):
            np.testing.assert_array_equal(drawn.tokens[device], whole.tokens)
            np.testing.assert_allclose(drawn.sampler_logprobs[device], whole.sampler_logprobs, rtol=0, atol=2e-6)


def test_no_entry_of_weight_zero_is_ever_drawn():
    """Prefix sums may rise by a rounding where the weight is 0; every such step is hit here on purpose."""
    rng = np.random.default_rng(0)
    for size in (64, 389):
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
        drawn = jitted_sample(
            jnp.broadcast_to(logits, (DRAWS, 10)),
            jax.random.split(jax.random.key(2), DRAWS),
            sampling_params(DRAWS, temperature=temperature),
        )
        probs = np.exp(logits.astype(np.float64) / temperature)
        assert_frequencies(drawn.tokens, probs)
        expected = (logits / temperature - np.log(probs.sum()))[drawn.tokens]
        np.testing.assert_allclose(drawn.sampler_logprobs, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(drawn.behavior_logprobs, drawn.sampler_logprobs)


def test_filtered_samples_follow_the_renormalised_distribution():
    probs = np.array([0.05, 0.3, 0.02, 0.25, 0.2, 0.03, 0.1, 0.05, 0.0, 0.0])
    # Top-k leaves the five largest, 0.9 in all (the lower id of the two at 0.05); 0.85 of that, 0.765, is reached with
    # 0.1; min-p asks for half of 0.3.
    kept = np.array([0, 1, 0, 1, 1, 0, 0, 0, 0, 0], bool)
    drawn = jitted_sample(
        jnp.broadcast_to(jnp.log(probs), (DRAWS, 10)),
        jax.random.split(jax.random.key(5), DRAWS),
        sampling_params(DRAWS, top_k=5, top_p=0.85, min_p=0.5),
    )
    assert_frequencies(drawn.tokens, np.where(kept, probs, 0))
    np.testing.assert_allclose(drawn.sampler_logprobs, np.log(probs[drawn.tokens]), rtol=1e-5)
    np.testing.assert_allclose(drawn.behavior_logprobs, np.log(probs[drawn.tokens] / 0.75), rtol=1e-5)


def test_greedy_takes_the_lowest_id_on_ties():
    logits = np.full((6, 33), -np.inf, np.float32)
    logits[:, :4] = [[1, 3, 3, 0], [2, 2, 2, 2], [0, -np.inf, 1, -np.inf]] * 2
    # Filters mean nothing to it.
    params = sampling_params(6, temperature=0.0, top_k=1, top_p=0.1)
    drawn = jitted_sample(logits, jax.random.split(jax.random.key(0), 6), params)
    np.testing.assert_array_equal(drawn.tokens, [1, 0, 2] * 2)
    mass = np.exp(logits.astype(np.float64)).sum(-1)
    np.testing.assert_allclose(drawn.sampler_logprobs, [3, 2, 1] * 2 - np.log(mass), rtol=1e-6)
    np.testing.assert_array_equal(drawn.behavior_logprobs, drawn.sampler_logprobs)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_a_row_with_nan_gets_a_token_of_the_vocabulary_and_nan(is_filtered):
    rng = np.random.default_rng(0)
    for size in (5, 300):
        logits = rng.normal(size=(6, size)).astype(np.float32)
        logits[:4, rng.integers(size, size=4)] = np.nan
        logits[4] = np.nan
        params = sampling_params(6)._replace(temperature=jnp.array([1.0, 0.0] * 3))
        if is_filtered:
            params = params._replace(top_k=jnp.array([3, 3, 0, 0, 3, 3]), top_p=jnp.full(6, 0.5))
        drawn = jitted_sample(logits, jax.random.split(jax.random.key(0), 6), params, is_filtered=is_filtered)
        assert np.all((np.asarray(drawn.tokens) >= 0) & (np.asarray(drawn.tokens) < size))
        for logprobs in (drawn.sampler_logprobs, drawn.behavior_logprobs):
            np.testing.assert_array_equal(np.isnan(logprobs), np.arange(6) < 5)


def test_greedy_takes_the_first_of_ties_in_several_blocks():
    logits = np.zeros((3, 300), np.float32)
    for row, (first, second) in enumerate([(130, 290), (0, 299), (297, 298)]):
        logits[row, [first, second]] = 2.0
    drawn = jitted_sample(logits, jax.random.split(jax.random.key(0), 3), sampling_params(3, temperature=0.0))
    np.testing.assert_array_equal(drawn.tokens, [130, 0, 297])


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


@settings(max_examples=300, deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=12, max_size=12).filter(any),
    top_k=st.integers(0, 14),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.99)),
)
def test_kept_sets_are_those_of_a_sort(counts, top_k, top_p, min_p):
    probs = np.array(counts, np.float64) / sum(counts)  # small counts: ties are common
    kept = jitted_kept(probs.astype(np.float32)[None], row_params([1.0], [top_k], [top_p], [min_p]))
    kept = np.asarray(kept)[0]
    drawable = probs > 0  # what has no probability is never drawn, kept or not
    # A bound that is met exactly in float64 may be met or missed by a rounding in float32.
    tighter, looser = 1 - 1e-5, 1 + 1e-5
    fewest = kept_by_sorting(probs, top_k, top_p * tighter if top_p < 1 else 1.0, min_p * looser)
    most = kept_by_sorting(probs, top_k, min(1.0, top_p * looser), min_p * tighter)
    assert np.all((fewest <= kept)[drawable]), "a token that belongs was cut"
    assert np.all((kept <= most)[drawable]), "a token that does not belong was kept"


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
    got = jitted_kept(jnp.array([probs]), sampling_params(1, **filters))
    np.testing.assert_array_equal(got[0], np.array(kept, bool))


def test_ties_in_several_blocks_keep_the_lowest_ids():
    counts = np.random.default_rng(0).integers(0, 5, size=(40, 300))
    probs = (counts / 4).astype(np.float32)
    top_k = np.arange(40) * 8
    params = row_params(np.ones(40), top_k, np.ones(40), np.zeros(40))
    kept = np.asarray(jitted_kept(probs, params))
    for row in range(40):
        np.testing.assert_array_equal(kept[row], kept_by_sorting(probs[row], top_k[row], 1.0, 0.0))


@pytest.mark.parametrize(("digits", "in_halves"), [(3, True), (1, False), (3, False)])
def test_kept_sets_do_not_depend_on_the_digits_of_a_sweep(digits, in_halves):
    rng = np.random.default_rng(1)
    probs = (rng.integers(0, 64, size=(32, 300)) / 64).astype(np.float32)  # their sums are exact in any order
    probs[::2] *= probs[::2]
    params = row_params(np.ones(32), np.arange(32) % 5 * 9, 1 - np.arange(32) % 3 * 0.25, np.arange(32) % 2 * 0.125)
    expected = jitted_kept(probs, params)
    np.testing.assert_array_equal(jitted_kept(probs, params, digits=digits, in_halves=in_halves), expected)


# --- What a row must not depend on.

MIXED = row_params([1.0, 0.7, 0.0, 1.3, 1.0, 2.0], [0, 3, 0, 0, 0, 5], [1, 1, 1, 0.5, 1, 0.9], [0, 0, 0, 0, 0.2, 0.1])


def assert_same_bits(got, expected, rows=slice(None)):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[rows], b[rows]), got, expected)


def test_a_row_does_not_know_its_neighbours():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(6, 33)).astype(np.float32)
    keys = jax.random.split(jax.random.key(2), 6)
    plain = jax.tree.map(np.asarray, sampling_params(6))
    together = jitted_sample(logits, keys, MIXED)
    for row in range(6):
        is_row = np.arange(6) == row
        others = rng.normal(size=(6, 33)).astype(np.float32)
        neighbours = jax.tree.map(partial(np.where, is_row), MIXED, plain)
        # The order of keys is turned, so that other rows draw with other noise.
        drawn = jitted_sample(
            np.where(is_row[:, None], logits, others), jnp.roll(keys, 1).at[row].set(keys[row]), neighbours
        )
        assert_same_bits(drawn, together, row)

    order = np.array([4, 2, 0, 5, 1, 3])
    permuted = jitted_sample(logits[order], keys[order], jax.tree.map(lambda x: x[order], MIXED))
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


@partial(jax.jit, static_argnames="is_filtered")
def sample_from_hidden(hidden, head, keys, params, is_filtered):
    logits = hidden @ head.T
    return logits, sample(logits, keys, params, is_filtered=is_filtered)


@pytest.mark.parametrize(
    "size", [5, 262, 390, *(pytest.param(n, marks=pytest.mark.slow) for n in (48, 256, 512, 1000, 4096, 32000))]
)
def test_bits_depend_neither_on_the_number_of_rows_nor_on_the_variant(size):
    rng = np.random.default_rng(size)
    # The sums of these products are exact in any order, so that the logits are equal to begin with.
    hidden, head = (rng.integers(-64, 64, shape).astype(np.float32) / 128 for shape in ((64, 32), (size, 32)))
    keys = jax.random.split(jax.random.key(size), 64)
    unfiltered = sampling_params(64)._replace(temperature=ALL_KINDS.temperature)
    logits, plain = sample_from_hidden(hidden, head, keys, unfiltered, is_filtered=False)
    _, mixed = sample_from_hidden(hidden, head, keys, ALL_KINDS, is_filtered=True)
    assert_same_bits(mixed, plain, np.asarray(~jax.jit(has_filters)(ALL_KINDS)))
    for is_filtered, params, expected in ((False, unfiltered, plain), (True, ALL_KINDS, mixed)):
        for rows in (1, 8, 16):
            for start in range(0, 64, max(rows, 7)):
                at = np.arange(start, start + rows) % 64
                part = jax.tree.map(lambda x, at=at: x[at], params)
                found, drawn = sample_from_hidden(hidden[at], head, keys[at], part, is_filtered)
                np.testing.assert_array_equal(found, logits[at])
                assert_same_bits(drawn, jax.tree.map(lambda x, at=at: x[at], expected))


@pytest.mark.parametrize(("is_filtered", "in_halves"), [(False, True), (True, True), (False, False), (True, False)])
def test_no_branch_and_no_loop_depends_on_values(is_filtered, in_halves):
    """On GPUs such a branch or loop asks the host at every step."""
    logits, keys = jnp.zeros((6, 300)), jax.random.split(jax.random.key(0), 6)
    lowered = jitted_sample.lower(logits, keys, MIXED, is_filtered=is_filtered, in_halves=in_halves)
    assert "stablehlo.case" not in lowered.as_text() and "stablehlo.if" not in lowered.as_text()
    compiled = lowered.compile().as_text()
    assert " conditional(" not in compiled
    loops = [line for line in compiled.splitlines() if " while(" in line]
    assert all("known_trip_count" in line for line in loops)


def test_nothing_is_sorted_and_new_values_do_not_compile_again():
    traces = []

    @jax.jit
    def counted(logits, keys, params):
        traces.append(1)
        return sample(logits, keys, params)

    logits, keys = jnp.zeros((6, 33)), jax.random.split(jax.random.key(0), 6)
    lowered = counted.lower(logits, keys, MIXED)
    assert "stablehlo.sort" not in lowered.as_text()
    assert " sort(" not in lowered.compile().as_text()
    traces.clear()
    for params in (MIXED, sampling_params(6), sampling_params(6, temperature=0.3, top_k=7, top_p=0.5, min_p=0.1)):
        counted(logits, keys, params)
    assert len(traces) <= 1


@pytest.mark.parametrize("vocabulary", [151_936, 262_144])
@pytest.mark.parametrize("in_halves", [False, True])
def test_large_vocabularies_take_a_few_tables_of_logits(vocabulary, in_halves):
    """Temporaries in tables of the logits: next to none without filters, but for sums in halves, as CPUs have them."""
    rows = 64
    logits = jax.ShapeDtypeStruct((rows, vocabulary), jnp.float32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    params = jax.eval_shape(lambda: sampling_params(rows))
    for is_filtered, tables in ((False, 2.5 if in_halves else 0.1), (True, 6 if in_halves else 11)):
        lowered = jitted_sample.lower(logits, keys, params, is_filtered=is_filtered, in_halves=in_halves)
        temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
        assert temporaries < tables * rows * vocabulary * 4


def test_fold_ids_folds_in_order():
    key = jax.random.key(3)
    ids = jnp.array([7, 2**32 - 1, 0], jnp.uint32)
    expected = key
    for number in (7, 2**32 - 1, 0):
        expected = jax.random.fold_in(expected, np.uint32(number))
    assert fold_ids(key, ids) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(temperature=-0.1), r"temperature is -0.1; .* 0 .* 1e-06 to 3.4e"),
        (dict(temperature=float("inf")), r"temperature is inf; "),
        (dict(temperature=float("nan")), r"temperature is nan; "),
        (dict(temperature=1e39), r"temperature is 1e\+39; "),
        (dict(temperature=1e-40), r"temperature is 1e-40; "),
        (dict(top_k=2**40), rf"top_k is {2**40}; "),
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
        sampling_params(2, **values)


@pytest.mark.parametrize("values", [dict(temperature=1e-6), dict(temperature=3.4e38), dict(top_p=1.0), dict(min_p=0.0)])
def test_the_ends_of_the_ranges_are_taken(values):
    check_sampling(**(dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) | values))
    sampling_params(2, **values)


# --- Logit bias.


def biased(rows, ids, values, **knobs):
    bias = LogitBias(jnp.array([ids] * rows), jnp.array([values] * rows, jnp.float32))
    return sampling_params(rows, **knobs)._replace(logit_bias=bias)


def test_a_bias_shifts_the_scaled_logits_and_only_behavior_logprobs():
    logits = np.random.default_rng(3).normal(size=8).astype(np.float32)
    params = biased(DRAWS, [2, 5, -1, 5], [1.5, -1.0, 50.0, -2.0], temperature=0.7)
    keys = jax.random.split(jax.random.key(4), DRAWS)
    drawn = jitted_sample(jnp.broadcast_to(logits, (DRAWS, 8)), keys, params)
    scaled = logits.astype(np.float64) / 0.7
    shifted = scaled + np.array([0, 0, 1.5, 0, 0, -3.0, 0, 0])
    assert_frequencies(drawn.tokens, np.exp(shifted))
    for found, z in ((drawn.sampler_logprobs, scaled), (drawn.behavior_logprobs, shifted)):
        np.testing.assert_allclose(found, (z - np.log(np.exp(z).sum()))[drawn.tokens], rtol=1e-5, atol=1e-6)


def test_a_forbidden_token_is_never_drawn_and_greedy_passes_over_it():
    logits = jnp.broadcast_to(jnp.array([0.0, 4.0, 3.0]), (200, 3))
    keys = jax.random.split(jax.random.key(0), 200)
    drawn = jitted_sample(logits, keys, biased(200, [1], [-np.inf]))
    assert set(np.asarray(drawn.tokens).tolist()) == {0, 2}
    greedy = jitted_sample(logits, keys, biased(200, [1], [-np.inf], temperature=0.0))
    assert set(np.asarray(greedy.tokens).tolist()) == {2}
    # As without a bias: at temperature 1, of the whole vocabulary.
    np.testing.assert_allclose(greedy.sampler_logprobs, 3 - np.log(np.exp([0, 4, 3]).sum()), rtol=1e-5)


def test_a_bias_comes_before_the_other_filters_and_leaves_other_rows_alone():
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.3, 0.2])), (2, 3))
    keys = jax.random.split(jax.random.key(1), 2)
    params = sampling_params(2, top_k=1)._replace(
        logit_bias=LogitBias(jnp.array([[2], [-1]]), jnp.array([[5.0], [5.0]]))
    )
    drawn = jitted_sample(logits, keys, params)
    assert drawn.tokens.tolist() == [2, 0]
    np.testing.assert_allclose(drawn.behavior_logprobs, [0.0, 0.0], atol=1e-6)
    plain = jitted_sample(logits, keys, sampling_params(2))
    unbiased = jitted_sample(logits, keys, biased(2, [-1], [5.0]))
    jax.tree.map(np.testing.assert_array_equal, plain, unbiased)
