"""The one loop that samples: a fixed number of decoding steps for all rows of a batch.

`generate` and the engine call it. How many steps there are, and whether any row filters, is static, so that the device
decides nothing within a call and asks the host nothing.
Letters: `R` rows, `C` columns of a page table, `N` steps, `S` stop ids.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxft.core.sampling import Sampled, SamplingParams, sample
from jaxft.core.sharding import ROW_AXES, Sharding, compute_platform
from jaxft.core.types import Cache, Model, Params


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


class SampledTokens(NamedTuple):
    """Tokens sampled by one `decode`, left-aligned; the first `counts` of each row are real."""

    tokens: Int[Any, "R N"]
    sampler_logprobs: Float[Any, "R N"]
    behavior_logprobs: Float[Any, "R N"]
    counts: Int[Any, "R"]


def decode(
    model: Model,
    params: Params,
    cache: Cache,
    tables: Int[Any, "R C"],
    state: DecodeState,
    rows: RowParams,
    num_steps: int,
    *,
    is_filtered: bool = True,
) -> tuple[Cache, DecodeState, SampledTokens]:
    """Sample `num_steps` tokens for every active row, fewer where a row ends before.

    A row depends on its own tokens, parameters and key only. On a CPU its tokens and log-probabilities have the same
    bits whatever the other rows and the page numbers are, as long as there are others: products with a single row are
    added in another order.

    Args:
        model: the model.
        params: weights to decode with.
        cache: pages that hold the tokens of each row before its last.
        tables: pages of each row, enough for `num_steps` more tokens.
        state: where each row stands.
        rows: sampling parameters.
        num_steps: number of steps.
        is_filtered: False if no row has top-k, top-p, min-p or a logit bias, to spend no time on them; the results are
            the same.

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
    sampled = SampledTokens(
        jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(shape[0], jnp.int32)
    )

    def advance(
        step: Int[Array, ""], carry: tuple[Cache, DecodeState, SampledTokens]
    ) -> tuple[Cache, DecodeState, SampledTokens]:
        cache, state, sampled = carry
        active = state.active
        positions = jnp.where(active, state.positions, -1)  # nothing is written or read for a row that has ended
        hidden, cache = model.apply(params, state.tokens[:, None], positions[:, None], cache=cache, tables=tables)
        following = state.positions + 1
        keys = jax.vmap(jax.random.fold_in)(rows.keys, following)
        logits = model.unembed(params, hidden[:, 0])
        drawn = _sample(model.sharding, is_filtered, logits, keys, rows.sampling)

        ended = (drawn.tokens[:, None] == rows.stop_ids).any(axis=-1) | (following + 1 >= rows.limits)
        sampled = SampledTokens(
            sampled.tokens.at[:, step].set(jnp.where(active, drawn.tokens, 0)),
            sampled.sampler_logprobs.at[:, step].set(jnp.where(active, drawn.sampler_logprobs, 0.0)),
            sampled.behavior_logprobs.at[:, step].set(jnp.where(active, drawn.behavior_logprobs, 0.0)),
            sampled.counts + active,
        )
        state = DecodeState(
            jnp.where(active, drawn.tokens, state.tokens),
            jnp.where(active, following, state.positions),
            active & ~ended,
        )
        return cache, state, sampled

    return jax.lax.fori_loop(0, num_steps, advance, (cache, state, sampled))


def _sample(
    sharding: Sharding | None, is_filtered: bool, logits: Float[Array, "R V"], keys: Any, params: SamplingParams
) -> Sampled:
    """Return `sample`; on a mesh devices divide the vocabulary, or the rows if these filter or it does not divide."""
    draw = partial(sample, is_filtered=is_filtered, in_halves=compute_platform(sharding) == "cpu")
    if sharding is None:
        return draw(logits, keys, params)
    shards = sharding.mesh.shape["tensor"]
    if shards == 1 or logits.shape[1] % shards:
        return draw(sharding.constrain_spread(logits), keys, params)
    if is_filtered:
        return draw(sharding.constrain_spread(logits), keys, params, shards=shards)
    of_rows = PartitionSpec(ROW_AXES)
    return jax.shard_map(
        partial(draw, axis="tensor"),
        mesh=sharding.mesh,
        in_specs=(PartitionSpec(ROW_AXES, "tensor"), of_rows, of_rows),
        out_specs=of_rows,
        check_vma=False,
    )(logits, keys, params)
