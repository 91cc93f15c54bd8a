"""The arrays of an engine on the device, and the jitted programs that change them.

A prompt is prefilled in a row of the prefix cache and copied from there into the slots that decode. So a prompt of many
generations is computed once, and a conversation continues in its row. The prefix cache and the cache of the slots have
the same form; a program reads and writes their first `num_blocks` blocks.

A request reads only keys and values of its own tokens, and zeros: the rest of a row or slot is cleared when a request
gets it. Masking alone would not do: a masked position has weight 0, and 0 times NaN is NaN.

Letters: `R` slots, `P` rows of one program, `L` tokens of a chunk, `N` key ids, `S` stop ids, `M` biased tokens,
`B` rows, `T` tokens of a row, `K` most likely tokens.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxft.core.cache import compute_dtype, init_cache, keep_positions
from jaxft.core.generate import DecodeState, Emitted, RowParams, decode_blocks
from jaxft.core.logprobs import scaling_temperature
from jaxft.core.sampling import LogitBias, SamplingParams, fold_ids
from jaxft.core.types import Cache, Model, Params

MAX_STOP_IDS = 8
MAX_BIASED_IDS = 32

LIKELY_TOKENS = 64
"""Positions that `most_likely` computes at a time."""


class DecodeBatch(NamedTuple):
    """The slots of the engine: their decoding state and parameters; every leaf has slots on axis 0."""

    state: DecodeState
    rows: RowParams


class PrefillChunks(NamedTuple):
    """Chunks of prompts to prefill. Padding has a row beyond the last, so that its results are dropped."""

    tokens: Int[Any, "P L"]
    starts: Int[Any, "P"]
    rows: Int[Any, "P"]


class Admission(NamedTuple):
    """Requests whose prompts are in the prefix cache, and their slots. Padding has a slot beyond the last."""

    prefix_rows: Int[Any, "P"]
    slots: Int[Any, "P"]
    tokens: Int[Any, "P"]
    positions: Int[Any, "P"]
    sampling: SamplingParams
    key_ids: UInt32[Any, "P N"]
    stop_ids: Int[Any, "P S"]
    limits: Int[Any, "P"]


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def empty_cache(model: Model, rows: int, length: int, dtype: Any) -> Cache:
    """Make a cache of zeros."""
    return init_cache(model, rows, length, dtype)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def empty_slots(model: Model, slots: int, cache_length: int, dtype: Any) -> DecodeBatch:
    """Make inactive slots with room for `cache_length` tokens each."""
    zeros = jnp.zeros(slots, jnp.int32)
    cache = init_cache(model, slots, cache_length, dtype)
    state = DecodeState(cache, zeros, zeros, jnp.zeros(slots, bool))
    bias = LogitBias(jnp.full((slots, MAX_BIASED_IDS), -1, jnp.int32), jnp.zeros((slots, MAX_BIASED_IDS)))
    sampling = SamplingParams(jnp.ones(slots), zeros, jnp.ones(slots), jnp.zeros(slots), bias)
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), slots)
    rows = RowParams(sampling, keys, jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32), zeros)
    return _constrain(model, DecodeBatch(state, rows))


def cache_shapes(model: Model, rows: int, length: int, dtype: Any) -> Cache:
    """Return the shapes, with shardings, of `empty_cache`."""
    cache = jax.eval_shape(lambda: empty_cache(model, rows, length, dtype))
    return cache if model.sharding is None else model.sharding.place_cache(cache)


def slot_shapes(model: Model, slots: int, cache_length: int, dtype: Any) -> DecodeBatch:
    """Return the shapes, with shardings, of `empty_slots`."""
    shapes = jax.eval_shape(lambda: empty_slots(model, slots, cache_length, dtype))
    if model.sharding is None:
        return shapes
    cache = model.sharding.place_cache(shapes.state.cache)
    state, rows = model.sharding.place_rows((shapes.state._replace(cache=()), shapes.rows))
    return DecodeBatch(state._replace(cache=cache), rows)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def prefill(model: Model, num_blocks: int, params: Params, prefix_cache: Cache, chunks: PrefillChunks) -> Cache:
    """Add the keys and values of prompt chunks to the prefix cache, each after the tokens that its row holds."""
    positions = chunks.starts[:, None] + jnp.arange(chunks.tokens.shape[1], dtype=jnp.int32)
    prefixes = keep_positions(model, _take_rows(prefix_cache[:num_blocks], chunks.rows), chunks.starts)
    _, written = model.apply(params, chunks.tokens, positions, cache=prefixes)
    return _constrain_cache(model, _put_blocks(prefix_cache, written, chunks.rows))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def copy_rows(
    model: Model, num_blocks: int, prefix_cache: Cache, sources: Int[Any, "P"], targets: Int[Any, "P"]
) -> Cache:
    """Copy the first blocks of some rows of the prefix cache to other rows."""
    copied = _take_rows(prefix_cache[:num_blocks], sources)
    return _constrain_cache(model, _put_blocks(prefix_cache, copied, targets))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def admit(
    model: Model,
    num_blocks: int,
    slots: DecodeBatch,
    prefix_cache: Cache,
    seed: UInt32[Array, "2"],
    admission: Admission,
) -> DecodeBatch:
    """Copy prompts into slots, which are then ready to decode, and clear the rest of the slots' blocks."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    state, keys = slots.state, jax.vmap(partial(fold_ids, key))(admission.key_ids)
    tokens, positions, active, rows = _put_rows(
        (state.tokens, state.positions, state.active, slots.rows),
        (
            admission.tokens,
            admission.positions,
            jnp.ones_like(admission.slots, bool),
            RowParams(admission.sampling, keys, admission.stop_ids, admission.limits),
        ),
        admission.slots,
    )
    prompts = keep_positions(model, _take_rows(prefix_cache[:num_blocks], admission.prefix_rows), admission.positions)
    cache = _put_blocks(state.cache, prompts, admission.slots)
    return _constrain(model, DecodeBatch(DecodeState(cache, tokens, positions, active), rows))


@partial(jax.jit, static_argnums=(0, 1, 5), donate_argnums=3)
def advance(
    model: Model, num_blocks: int, params: Params, slots: DecodeBatch, chosen: Bool[Any, "R"], max_steps: int
) -> tuple[DecodeBatch, Emitted, Bool[Array, "R"]]:
    """Decode up to `max_steps` tokens of the chosen slots; return the slots, the tokens, and which slots are active.

    The other slots stay unchanged, except for the cache at the position of their last token, which is overwritten
    before it is read.
    """
    was_active = slots.state.active
    state = slots.state._replace(active=was_active & chosen)
    state, emitted = decode_blocks(model, params, state, slots.rows, max_steps, num_blocks)
    state = state._replace(active=jnp.where(chosen, state.active, was_active))
    return _constrain(model, slots._replace(state=state)), emitted, state.active


@partial(jax.jit, static_argnums=(0, 1, 5), donate_argnums=3)
def advance_sub_batch(
    model: Model, num_blocks: int, params: Params, slots: DecodeBatch, rows: Int[Any, "P"], max_steps: int
) -> tuple[DecodeBatch, Emitted, Bool[Array, "P"]]:
    """Run `advance` on some rows only; padding rows have an index beyond the last slot."""
    state = slots.state._replace(cache=slots.state.cache[:num_blocks])
    taken = _take_rows(state, rows)
    taken = taken._replace(active=taken.active & (rows < state.active.shape[0]))
    taken, emitted = decode_blocks(model, params, taken, _take_rows(slots.rows, rows), max_steps, num_blocks)
    state = _put_rows(state, taken, rows)
    slots = slots._replace(state=state._replace(cache=(*state.cache, *slots.state.cache[num_blocks:])))
    return slots, emitted, taken.active


@partial(jax.jit, donate_argnums=0, keep_unused=True)
def trial_slots(slots: DecodeBatch, position: Int[Any, ""], filtering: Bool[Any, ""]) -> DecodeBatch:
    """Make active slots at positions up to `position`, with varied values in their caches, to compare programs on.

    With `filtering`, each eighth of the slots has other sampling parameters; without, no slot filters.
    """

    def varied(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros_like(leaf)
        axes = [jax.lax.broadcasted_iota(jnp.float32, leaf.shape, axis) for axis in range(leaf.ndim)]
        steps = sum((index * (1.0 + 0.37 * axis) for axis, index in enumerate(axes)), jnp.float32(0))
        return jnp.sin(steps).astype(leaf.dtype)

    count = slots.state.active.shape[0]
    kind = jnp.where(filtering, jnp.arange(count) * 8 // count, 0)

    def only(number: int, value: float, others: float, like: Array) -> Array:
        return jnp.where(kind == number, value, others).astype(like.dtype)

    old = slots.rows.sampling
    assert old.logit_bias is not None
    ids = jnp.where((kind == 6)[:, None], jnp.arange(MAX_BIASED_IDS), -1).astype(jnp.int32)
    sampling = SamplingParams(
        temperature=only(1, 0.7, 1.0, old.temperature) * only(5, 0.0, 1.0, old.temperature),
        top_k=only(2, 5, 0, old.top_k),
        top_p=only(3, 0.8, 1.0, old.top_p),
        min_p=only(4, 0.05, 0.0, old.min_p),
        logit_bias=LogitBias(ids, jnp.full_like(old.logit_bias.values, 0.5)),
    )
    state = DecodeState(
        cache=jax.tree.map(varied, slots.state.cache),
        tokens=jnp.zeros_like(slots.state.tokens),
        positions=(1 + jnp.arange(count) * (position - 1) // max(count - 1, 1)).astype(jnp.int32),
        active=jnp.ones_like(slots.state.active),
    )
    limits = jnp.full_like(slots.rows.limits, jnp.iinfo(jnp.int32).max)
    return DecodeBatch(state, slots.rows._replace(sampling=sampling, limits=limits))


def _constrain(model: Model, slots: DecodeBatch) -> DecodeBatch:
    """Constrain the slots to the sharding that they are decoded in."""
    if model.sharding is None:
        return slots
    cache = _constrain_cache(model, slots.state.cache)
    state, rows = model.sharding.constrain_rows((slots.state._replace(cache=()), slots.rows))
    return DecodeBatch(state._replace(cache=cache), rows)


def _constrain_cache(model: Model, cache: Cache) -> Cache:
    return cache if model.sharding is None else model.sharding.constrain_cache(cache)


def _take_rows(tree: Any, rows: Int[Any, "P"]) -> Any:
    """Take these rows of every leaf; an index out of range takes the last row."""
    return jax.tree.map(lambda leaf: leaf.at[rows].get(mode="clip"), tree)


def _put_rows(tree: Any, new: Any, rows: Int[Any, "P"]) -> Any:
    """Write new rows into every leaf of a tree; rows out of range are dropped."""
    return jax.tree.map(lambda old, leaf: old.at[rows].set(leaf, mode="drop"), tree, new)


def _put_blocks(cache: Cache, new: Cache, rows: Int[Any, "P"]) -> Cache:
    """Write new rows into the first blocks of a cache."""
    return (*_put_rows(cache[: len(new)], new, rows), *cache[len(new) :])


@partial(jax.jit, static_argnums=(0, 5))
def most_likely(
    model: Model,
    params: Params,
    tokens: Int[Any, "B T"],
    num_tokens: Int[Any, ""],
    temperature: Float[Any, ""],
    count: int,
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """Return log-probabilities and ids of the `count` tokens that are most likely to follow each token of a row.

    Log-probabilities are in nats, over the whole vocabulary at the temperature (at 1 when it is 0), the largest first;
    the lowest id comes first on ties. The row is computed `LIKELY_TOKENS` positions at a time, each with the keys and
    values of those before, as a prompt is prefilled; so scores and logits never exist for all positions.

    Args:
        model: the model.
        params: weights to decode with.
        tokens: the row, padded to a multiple of `LIKELY_TOKENS`, once for each row shard of a mesh.
        num_tokens: number of tokens of the row; results of later chunks are 0.
        temperature: sampling temperature.
        count: number of tokens to return at each position.
    """
    length, width = tokens.shape[1], LIKELY_TOKENS
    cache = init_cache(model, len(tokens), length, compute_dtype(params))
    found = jnp.zeros((length, count), jnp.float32), jnp.zeros((length, count), jnp.int32)

    def score(index: Any, carry: Any) -> Any:
        cache, (values, ids) = carry
        start = index * width
        positions = jnp.broadcast_to(start + jnp.arange(width, dtype=jnp.int32), (len(tokens), width))
        chunk = jax.lax.dynamic_slice_in_dim(tokens, start, width, axis=1)
        hidden, cache = model.apply(params, chunk, positions, cache=cache)
        logits = model.unembed(params, hidden[0]) / scaling_temperature(temperature)  # [L V]
        top = jax.lax.top_k(jax.nn.log_softmax(logits), count)
        put = jax.lax.dynamic_update_slice_in_dim
        return cache, (put(values, top[0], start, 0), put(ids, top[1], start, 0))

    chunks = (num_tokens + width - 1) // width
    _, found = jax.lax.fori_loop(0, chunks, score, (cache, found))
    return found
