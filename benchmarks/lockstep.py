"""Lockstep decoding, the baseline of the engine: batches of rows, each decoded until its last row has ended.

It does what `generate` does, with a limit of its own for every row: prompts are prefilled once, the cache is read in
growing blocks, and a batch stops early. Letters: `P` prompts, `R` rows, `L` prompt length.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxft.core.cache import block_capacities, compute_dtype, init_cache, num_blocks_for
from jaxft.core.generate import DecodeState, Emitted, RowParams, decode_blocks
from jaxft.core.sampling import sampling_params
from jaxft.core.types import Cache, Model, Params


@partial(jax.jit, static_argnums=(0, 3))
def prefilled(model: Model, params: Params, prompts: Int[Any, "P L"], cache_length: int) -> Cache:
    """Cache of prompts of one length. `params` are those that `Model.decode_layout` returns."""
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1], dtype=jnp.int32), prompts.shape)
    cache = init_cache(model, prompts.shape[0], cache_length, compute_dtype(params))
    num_blocks = num_blocks_for(prompts.shape[1], cache_length)
    _, written = model.apply(params, prompts, positions, cache=cache[:num_blocks])
    return (*written, *cache[num_blocks:])


@partial(jax.jit, static_argnums=1)
def repeated(cache: Cache, generations: int) -> Cache:
    """Cache with a row for each generation of each prompt, prompt-major."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, generations, axis=0), cache)


@partial(jax.jit, static_argnums=(0, 4, 5), donate_argnums=2)
def _decoded(
    model: Model, params: Params, state: DecodeState, rows: RowParams, max_steps: int, near_blocks: int
) -> tuple[DecodeState, Emitted]:
    return decode_blocks(model, params, state, rows, max_steps, near_blocks)


def decoded(
    model: Model, params: Params, state: DecodeState, rows: RowParams, position: int, cache_length: int
) -> tuple[DecodeState, Int[np.ndarray, "R"]]:
    """Decode rows that stand at one position until all have ended or the cache is full.

    Returns the last state and the number of tokens that each row got. The given state is donated.
    """
    counts = np.zeros(state.tokens.shape[0], np.int64)
    for near_blocks, reach in block_capacities(cache_length).items():
        steps = reach - position
        if steps > 0:
            state, emitted = _decoded(model, params, state, rows, steps, near_blocks)
            counts += np.asarray(emitted.counts)
            position = reach
            if not state.active.any():
                break
    return state, counts


def row_params(limits: Int[np.ndarray, "R"], seed: int) -> RowParams:
    """Sampling parameters of rows at temperature 1 that only their limit ends."""
    count = len(limits)
    keys = jax.random.split(jax.random.key(seed), count)
    return RowParams(sampling_params(count), keys, jnp.full((count, 1), -1, jnp.int32), jnp.asarray(limits, jnp.int32))


def state_at(cache: Cache, tokens: Int[np.ndarray, "R"], position: int) -> DecodeState:
    """State of rows that all stand at one position, whose last tokens are not in the cache yet."""
    count = len(tokens)
    return DecodeState(
        cache,
        jnp.asarray(tokens, jnp.int32),
        jnp.full(count, position, jnp.int32),
        jnp.ones(count, bool),
    )


def sample_batches(
    model: Model,
    params: Params,
    prompts: Int[np.ndarray, "P L"],
    generations: int,
    answer_tokens: Int[np.ndarray, "R"],
    batch_rows: int,
    most_tokens: int,
    seed: int,
) -> int:
    """Sample all rows, prompt-major, in batches of `batch_rows`, and return the number of sampled tokens.

    Args:
        params: those that `Model.decode_layout` returns.
        answer_tokens: number of tokens that each row samples.
        most_tokens: room for an answer in the cache, the same for all batches so that they share a program.
    """
    at_once, length = batch_rows // generations, prompts.shape[1]
    total = 0
    for first in range(0, len(prompts), at_once):
        chosen = prompts[first : first + at_once]
        limits = length + answer_tokens[first * generations : first * generations + batch_rows]
        cache = repeated(prefilled(model, params, chosen, length + most_tokens), generations)
        state = state_at(cache, np.repeat(chosen[:, -1], generations), length - 1)
        del cache  # it is donated with the state
        rows = row_params(limits, seed + first)
        _, counts = decoded(model, params, state, rows, length - 1, length + most_tokens)
        total += int(counts.sum())
    return total
