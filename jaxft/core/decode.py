"""The one loop that samples: a fixed number of decoding steps for all rows of a batch.

`generate` and the engine call it. How many steps there are, and whether any row filters, is static, so that the device
decides nothing within a call and asks the host nothing.
Letters: `R` rows, `C` columns of a page table, `N` steps, `S` stop ids, `M` masked rows, `V` vocabulary, `W` words of
32 bits that hold `V` bits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxft.core.cache import AdaptedTables, SharedTables
from jaxft.core.sampling import Penalties, Sampled, SamplingParams, sample
from jaxft.core.sharding import Sharding, compute_platform
from jaxft.core.types import Cache, Model, Params

GROUP_ROWS = 8
"""Rows that are drawn at a time where some are masked: a call of one step would spend its time on mapping memory."""


class DecodeState(NamedTuple):
    """The state of rows that are being decoded.

    Attributes:
        tokens: the last token of each row, not yet in the cache.
        positions: the position of that token in its row.
        active: False once the row has ended.
    """

    tokens: Int[Array, "R"]
    positions: Int[Array, "R"]
    active: Bool[Array, "R"]


class RowParams(NamedTuple):
    """The parameters that a row is sampled with, the same from its first token to its last.

    Attributes:
        sampling: how tokens are drawn.
        keys: a PRNG key per row; the key of a token is this folded with the token's position.
        stop_ids: token ids that end the row, padded with -1.
        limits: maximum number of tokens of the row, prompt included.
    """

    sampling: SamplingParams
    keys: Any
    stop_ids: Int[Array, "R S"]
    limits: Int[Array, "R"]


class Masks(NamedTuple):
    """Tokens that some rows may draw (`pack_bits`), and penalties; a row number beyond the last is padding."""

    rows: Int[Any, "M"]
    allowed: UInt32[Any, "M W"]
    penalties: Penalties | None = None


class SampledTokens(NamedTuple):
    """Tokens sampled by one `decode`, left-aligned; the first `counts` of each row are real.

    `supports` are those of `Sampled`; None unless asked for.
    """

    tokens: Int[Any, "R N"]
    sampler_logprobs: Float[Any, "R N"]
    behavior_logprobs: Float[Any, "R N"]
    counts: Int[Any, "R"]
    supports: UInt32[Any, "R N W"] | None = None


def decode(
    model: Model,
    params: Params,
    cache: Cache,
    tables: Int[Any, "R C"] | SharedTables | AdaptedTables,
    state: DecodeState,
    rows: RowParams,
    num_steps: int,
    *,
    is_filtered: bool = True,
    has_supports: bool = False,
) -> tuple[Cache, DecodeState, SampledTokens]:
    """Sample `num_steps` tokens for every active row, fewer where a row ends before.

    A row depends on its own tokens, parameters and key only. On a CPU its tokens and log-probabilities have the same
    bits whatever the other rows and the page numbers are, as long as there are others: products with a single row are
    added in another order.

    Args:
        model: the model.
        params: weights to decode with.
        cache: pages that hold the tokens of each row before its last.
        tables: pages of each row, enough for `num_steps` more tokens; a decoder on GPUs also takes what rows share.
        state: where each row stands.
        rows: sampling parameters.
        num_steps: number of steps.
        is_filtered: False if no row has top-k, top-p, min-p or a logit bias, to spend no time on them; the results are
            the same.
        has_supports: True to return the supports of filtered rows.

    >>> import jaxft
    >>> from jaxft.core.cache import init_cache
    >>> from jaxft.core.sampling import sampling_params
    >>> def count(params, tokens, positions):  # gives the next number a probability of almost 1
    ...     return params["scale"] * jax.nn.one_hot(tokens + 1, 6)
    >>> model, params = jaxft.from_function(count), {"scale": jnp.array(50.0)}
    >>> cache, tables = init_cache(model, 1, 4, jnp.float32)
    >>> state = DecodeState(jnp.array([1]), jnp.array([0]), jnp.array([True]))
    >>> rows = RowParams(sampling_params(1), jax.random.split(jax.random.key(0), 1), jnp.array([[3]]), jnp.array([4]))
    >>> cache, state, sampled = decode(model, params, cache, tables, state, rows, num_steps=3)
    >>> print(sampled.tokens, sampled.counts, state.active)  # 3 is a stop id
    [[2 3 0]] [2] [False]
    """
    shape = state.tokens.shape[0], num_steps
    supports = None
    if has_supports and is_filtered:
        logits = jax.eval_shape(partial(next_logits, model), params, cache, tables, state)[1]
        supports = jnp.zeros((*shape, -(-logits.shape[1] // 32)), jnp.uint32)
    sampled = SampledTokens(
        jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(shape[0], jnp.int32), supports
    )

    def advance(
        step: Int[Array, ""], carry: tuple[Cache, DecodeState, SampledTokens]
    ) -> tuple[Cache, DecodeState, SampledTokens]:
        cache, state, sampled = carry
        active = state.active
        cache, logits = next_logits(model, params, cache, tables, state)
        state, drawn = draw(model, logits, state, rows, is_filtered=is_filtered, has_supports=has_supports)
        supports = sampled.supports
        sampled = SampledTokens(
            sampled.tokens.at[:, step].set(jnp.where(active, drawn.tokens, 0)),
            sampled.sampler_logprobs.at[:, step].set(jnp.where(active, drawn.sampler_logprobs, 0.0)),
            sampled.behavior_logprobs.at[:, step].set(jnp.where(active, drawn.behavior_logprobs, 0.0)),
            sampled.counts + active,
            None if supports is None or drawn.supports is None else supports.at[:, step].set(drawn.supports),
        )
        return cache, state, sampled

    return jax.lax.fori_loop(0, num_steps, advance, (cache, state, sampled))


def next_logits(
    model: Model,
    params: Params,
    cache: Cache,
    tables: Int[Any, "R C"] | SharedTables | AdaptedTables,
    state: DecodeState,
) -> tuple[Cache, Float[Array, "R V"]]:
    """Write the last token of every active row to its pages; return the pages, and the logits of the next token."""
    positions = jnp.where(state.active, state.positions, -1)  # nothing is written or read for a row that has ended
    hidden, cache = model.apply(params, state.tokens[:, None], positions[:, None], cache=cache, tables=tables)
    return cache, model.unembed(params, hidden[:, 0])


def draw(
    model: Model,
    logits: Float[Array, "R V"],
    state: DecodeState,
    rows: RowParams,
    *,
    is_filtered: bool,
    has_supports: bool,
    masks: Masks | None = None,
) -> tuple[DecodeState, Sampled]:
    """Draw the next token of every row from its logits; return where each row stands then, and the tokens.

    Masked rows are drawn once more, apart from the others, whose tokens thus have the bits that they have without.
    """
    following = state.positions + 1
    keys = jax.vmap(jax.random.fold_in)(rows.keys, following)
    in_halves = compute_platform(model.sharding) == "cpu"
    sample_rows = partial(sample, is_filtered=is_filtered, in_halves=in_halves, has_supports=has_supports)
    sample_free = partial(_sample, model.sharding, sample_rows, not is_filtered)
    if masks is None:
        drawn = sample_free(logits, keys, rows.sampling)
    else:
        groups = len(logits) // GROUP_ROWS if model.sharding is None and len(logits) % GROUP_ROWS == 0 else 1
        split = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), (logits, keys, rows.sampling))
        drawn = jax.lax.map(lambda given: sample_free(*given), split)
        drawn = jax.tree.map(lambda x: x.reshape(len(logits), *x.shape[2:]), drawn)
        given = logits, keys, rows.sampling, drawn
        taken, at, params, free = jax.tree.map(lambda x: x.at[masks.rows].get(mode="clip"), given)
        of_masks = partial(sample_rows, allowed=masks.allowed, drawn=free, penalties=masks.penalties)
        masked = _sample(model.sharding, of_masks, False, taken, at, params)
        if drawn.supports is None and masked.supports is not None:
            drawn = drawn._replace(supports=jnp.zeros((len(logits), masked.supports.shape[1]), jnp.uint32))
        drawn = jax.tree.map(lambda old, new: old.at[masks.rows].set(new, mode="drop"), drawn, masked)
    ended = (drawn.tokens[:, None] == rows.stop_ids).any(axis=-1) | (following + 1 >= rows.limits)
    active = state.active
    state = DecodeState(
        jnp.where(active, drawn.tokens, state.tokens), jnp.where(active, following, state.positions), active & ~ended
    )
    return state, drawn


def _sample(
    sharding: Sharding | None,
    sample_rows: Callable[..., Sampled],
    is_divided: bool,
    logits: Float[Array, "R V"],
    keys: Any,
    params: SamplingParams,
) -> Sampled:
    """Return `sample_rows`; on a mesh devices divide the vocabulary, or the rows where it is not divided."""
    if sharding is None:
        return sample_rows(logits, keys, params)
    shards = sharding.mesh.shape["tensor"]
    if shards == 1 or logits.shape[1] % shards:
        return sample_rows(sharding.constrain_spread(logits), keys, params)
    if not is_divided:
        return sample_rows(sharding.constrain_spread(logits), keys, params, shards=shards)
    of_rows = PartitionSpec(sharding.row_axes)
    return jax.shard_map(
        partial(sample_rows, axis="tensor"),
        mesh=sharding.mesh,
        in_specs=(PartitionSpec(sharding.row_axes, "tensor"), of_rows, of_rows),
        out_specs=of_rows,
        check_vma=False,
    )(logits, keys, params)
