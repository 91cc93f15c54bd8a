"""A cache in blocks: blocks after those of a row's own tokens change no bit of it, however many are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.cache import block_capacities, block_lengths, compute_dtype, init_cache, keep_positions, num_blocks_for
from jaxft.core.generate import DecodeState, RowParams, decode_blocks, generate
from jaxft.core.logprobs import token_logprobs
from jaxft.core.sampling import sampling_params

LENGTH = 300  # blocks of 64, 64, 128 and 44 positions


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 1000, 1024, 5000])
def test_blocks_cover_the_length_and_double(length):
    lengths = block_lengths(length)
    assert sum(lengths) == length == max(block_capacities(length).values())
    assert all(later <= max(64, sum(lengths[:place])) for place, later in enumerate(lengths))
    for tokens in (1, 128, 129, length, length + 1):
        count = num_blocks_for(tokens, length)
        assert count == len(lengths) or sum(lengths[:count]) >= tokens
        assert count == min(2, len(lengths)) or sum(lengths[: count - 1]) < tokens


@pytest.mark.parametrize(
    ("init", "shapes"),
    [
        (lambda rows, size, dtype: {"kept": jnp.zeros((rows, size)), "length": jnp.zeros(rows)}, r"\[3\].*\[3\]"),
        (lambda rows, size, dtype: jnp.zeros((rows, -(-size // 16) * 16, 4)), r"\[3, 16, 4\].*\[3, 16, 4\]"),
        (lambda rows, size, dtype: jnp.zeros((rows, 2 * size)), r"\[3, 2\].*\[3, 4\]"),
    ],
    ids=["counter", "rounded up", "twice"],
)
def test_a_cache_with_an_array_that_has_no_axis_of_positions_is_refused(bigram, init, shapes):
    model = bigram._replace(init_cache=init)
    with pytest.raises(ValueError, match=rf"init_cache .*{shapes}"):
        keep_positions(model, init_cache(model, 3, 20, jnp.float32), jnp.array([1, 2, 3]))


def state_at(tiny, positions):
    """Rows with random tokens before their positions, and different garbage after them."""
    model, params = tiny
    rows = len(positions)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, model.config.vocab_size, (rows, LENGTH)), jnp.int32)
    places = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    cache = init_cache(model, rows, LENGTH, compute_dtype(params))
    _, cache = jax.jit(model.apply)(params, tokens, places, cache=cache)
    positions = jnp.asarray(positions, jnp.int32)
    return DecodeState(cache, tokens[:, 0], positions, jnp.ones(rows, bool))


decode_jitted = jax.jit(decode_blocks, static_argnums=(0, 4, 5))


@pytest.mark.parametrize(("position", "fewest"), [(20, 2), (119, 2), (125, 3), (250, 4)])
@pytest.mark.slow
def test_blocks_behind_a_row_change_no_bit(tiny, position, fewest):
    model, params = tiny
    rows = RowParams(
        sampling_params(3), jax.random.split(jax.random.key(3), 3), jnp.full((3, 1), -1), jnp.full(3, LENGTH)
    )
    state = state_at(tiny, [position, position - 3, 1])
    results = [decode_jitted(model, params, state, rows, 9, blocks)[1] for blocks in range(fewest, 5)]
    assert results[0].counts.tolist() == [9] * 3
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)


@pytest.mark.slow
def test_a_row_grows_across_blocks_and_agrees_with_the_trainer(tiny):
    model, params = tiny
    prompts = [[7 * place % 48 for place in range(count)] for count in (119, 31, 122)]
    rollout = generate(model, params, prompts, jax.random.key(1), max_new_tokens=150)
    assert rollout.lengths.tolist() == [269, 181, 272]
    scored = token_logprobs(model, params, rollout.tokens)
    difference = jnp.abs(scored.logprobs - rollout.sampler_logprobs)[rollout.completion_mask]
    assert float(difference.max()) <= 1e-5
