"""Lockstep decoding, the baseline of the engine: batches of rows, each decoded until its last row has ended.

It does what `generate` does, with a limit of its own for every row and pages of its own: prompts are prefilled once and
copied for their generations, and a batch stops early.
Letters: `P` prompts, `R` rows, `L` prompt length, `C` columns of a page table.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxft.core.cache import compute_dtype, copy_pages, init_cache, pages_for
from jaxft.core.decode import DecodeState, RowParams, SampledTokens, decode
from jaxft.core.generate import PREFILL_TOKENS, PREFILL_TOKENS_ELSEWHERE
from jaxft.core.sampling import sampling_params
from jaxft.core.sharding import compute_platform
from jaxft.core.types import Cache, Model, Params

CALL_STEPS = 16
"""Tokens that a row samples before the host looks whether all rows have ended."""


@partial(jax.jit, static_argnums=(0, 3, 4))
def prefilled(
    model: Model, params: Params, prompts: Int[Any, "P L"], cache_length: int, generations: int = 1
) -> tuple[Cache, Int[Array, "R C"]]:
    """Cache and page tables of `generations` rows for each prompt, prompt-major, up to the last token of the prompts.

    `params` are those that `Model.decode_layout` returns.
    """
    count, length = prompts.shape
    cache, tables = init_cache(model, count * generations, cache_length, compute_dtype(params))
    columns = pages_for(length)
    by_prompt = tables[:, :columns].reshape(count, generations, columns)
    width = PREFILL_TOKENS.get(compute_platform(model.sharding), PREFILL_TOKENS_ELSEWHERE)
    tokens = jnp.pad(prompts, ((0, 0), (0, -length % width)))

    def prefill_piece(piece: Int[Array, ""], cache: Cache) -> Cache:
        positions = piece * width + jnp.arange(width, dtype=jnp.int32)
        positions = jnp.broadcast_to(jnp.where(positions < length - 1, positions, -1), (count, width))
        taken = jax.lax.dynamic_slice_in_dim(tokens, piece * width, width, axis=1)
        return model.apply(params, taken, positions, cache=cache, tables=by_prompt[:, 0])[1]

    cache = jax.lax.fori_loop(0, tokens.shape[1] // width, prefill_piece, cache)
    if generations > 1:
        sources = np.repeat(by_prompt[:, :1], generations - 1, axis=1)
        cache = copy_pages(model, cache, sources.reshape(1, -1), by_prompt[:, 1:].reshape(1, -1))
    return cache, jnp.asarray(tables)


@partial(jax.jit, static_argnums=0, donate_argnames=("cache", "state"))
def _decoded(
    model: Model, params: Params, cache: Cache, tables: Int[Any, "R C"], state: DecodeState, rows: RowParams
) -> tuple[Cache, DecodeState, SampledTokens]:
    return decode(model, params, cache, tables, state, rows, CALL_STEPS, is_filtered=False)


def decoded(
    model: Model,
    params: Params,
    cache: Cache,
    tables: Int[Any, "R C"],
    state: DecodeState,
    rows: RowParams,
    most_tokens: int,
) -> tuple[Cache, Int[np.ndarray, "R"]]:
    """Decode rows until all have ended, which they must after `most_tokens`.

    Returns the cache and the number of tokens that each row got. The given cache and state are donated.
    """
    counts = np.zeros(state.tokens.shape[0], np.int64)
    for _ in range(0, most_tokens, CALL_STEPS):
        cache, state, emitted = _decoded(model, params, cache, tables, state, rows)
        counts += np.asarray(emitted.counts)
        if not np.asarray(state.active).any():
            break
    return cache, counts


def row_params(limits: Int[np.ndarray, "R"], seed: int) -> RowParams:
    """Sampling parameters of rows at temperature 1 that only their limit ends."""
    count = len(limits)
    keys = jax.random.split(jax.random.key(seed), count)
    return RowParams(sampling_params(count), keys, jnp.full((count, 1), -1, jnp.int32), jnp.asarray(limits, jnp.int32))


def state_at(tokens: Int[np.ndarray, "R"], position: int) -> DecodeState:
    """State of rows that all stand at one position, whose last tokens are not in the cache yet."""
    count = len(tokens)
    return DecodeState(
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
        cache, tables = prefilled(model, params, chosen, length + most_tokens, generations)
        state = state_at(np.repeat(chosen[:, -1], generations), length - 1)
        cache, counts = decoded(model, params, cache, tables, state, row_params(limits, seed + first), most_tokens)
        del cache  # before the next batch has one
        total += int(counts.sum())
    return total
