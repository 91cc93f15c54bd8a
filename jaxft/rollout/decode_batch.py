"""What an engine keeps on the device, and the programs that change it.

Prompts are prefilled in the rows of a store, and from there copied into the slots that decode: a prompt of many
generations is computed once, a conversation goes on from its row. The store and the slots are caches of the same form;
`num_blocks` is how many of their blocks a program reads and writes, enough for the tokens at hand.

A request reads what was computed for its own tokens, and zeros: what others left in its row or its slot is cleared when
these are handed out. That a place may not be seen is not enough: its weight is 0, and 0 times NaN is NaN.

Letters: `R` slots, `P` rows of one program, `L` tokens of a piece, `N` key ids, `S` stop ids, `M` biased tokens.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from jaxft.core.cache import init_cache, keep_places
from jaxft.core.generate import DecodeState, Emitted, RowParams, decode_blocks
from jaxft.core.sampling import LogitBias, SamplingParams, fold_ids
from jaxft.core.types import Cache, Model, Params

MAX_STOP_IDS = 8
MAX_BIASED_IDS = 32


class DecodeBatch(NamedTuple):
    """All that the engine decodes with; every leaf has slots on axis 0."""

    state: DecodeState
    rows: RowParams


class PrefillChunks(NamedTuple):
    """Parts of prompts, to be prefilled. Filling ones have a row beyond the last, and are dropped."""

    tokens: Int[Any, "P L"]
    starts: Int[Any, "P"]
    rows: Int[Any, "P"]


class Admission(NamedTuple):
    """Requests whose prompts are in the store, and the slots they get. Filling ones have a slot beyond the last."""

    stored: Int[Any, "P"]
    slots: Int[Any, "P"]
    tokens: Int[Any, "P"]
    positions: Int[Any, "P"]
    sampling: SamplingParams
    key_ids: UInt32[Any, "P N"]
    stop_ids: Int[Any, "P S"]
    limits: Int[Any, "P"]


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def empty_cache(model: Model, rows: int, length: int, dtype: Any) -> Cache:
    """A cache of zeros."""
    return init_cache(model, rows, length, dtype)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def empty_slots(model: Model, slots: int, cache_length: int, dtype: Any) -> DecodeBatch:
    """Slots that nobody uses, with room for `cache_length` tokens each."""
    zeros = jnp.zeros(slots, jnp.int32)
    cache = init_cache(model, slots, cache_length, dtype)
    state = DecodeState(cache, zeros, zeros, jnp.zeros(slots, bool))
    bias = LogitBias(jnp.full((slots, MAX_BIASED_IDS), -1, jnp.int32), jnp.zeros((slots, MAX_BIASED_IDS)))
    sampling = SamplingParams(jnp.ones(slots), zeros, jnp.ones(slots), jnp.zeros(slots), bias)
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), slots)
    rows = RowParams(sampling, keys, jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32), zeros)
    return _constrained(model, DecodeBatch(state, rows))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def prefill(model: Model, num_blocks: int, params: Params, store: Cache, pieces: PrefillChunks) -> Cache:
    """Computes the keys and values of the pieces, each behind what its row holds already."""
    positions = pieces.starts[:, None] + jnp.arange(pieces.tokens.shape[1], dtype=jnp.int32)
    held = keep_places(model, _taken(store[:num_blocks], pieces.rows), pieces.starts)
    _, written = model.apply(params, pieces.tokens, positions, cache=held)
    return _constrained_cache(model, _put_blocks(store, written, pieces.rows))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def copy_rows(model: Model, num_blocks: int, store: Cache, sources: Int[Any, "P"], targets: Int[Any, "P"]) -> Cache:
    """The store with some rows' first blocks in other rows, too."""
    return _constrained_cache(model, _put_blocks(store, _taken(store[:num_blocks], sources), targets))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def admit(
    model: Model, num_blocks: int, slots: DecodeBatch, store: Cache, seed: UInt32[Array, "2"], admission: Admission
) -> DecodeBatch:
    """Copies prompts into slots, whose first blocks hold nothing else then, and makes these ready to decode."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    state, keys = slots.state, jax.vmap(partial(fold_ids, key))(admission.key_ids)
    tokens, positions, active, rows = _put(
        (state.tokens, state.positions, state.active, slots.rows),
        (
            admission.tokens,
            admission.positions,
            jnp.ones_like(admission.slots, bool),
            RowParams(admission.sampling, keys, admission.stop_ids, admission.limits),
        ),
        admission.slots,
    )
    prompts = keep_places(model, _taken(store[:num_blocks], admission.stored), admission.positions)
    cache = _put_blocks(state.cache, prompts, admission.slots)
    return _constrained(model, DecodeBatch(DecodeState(cache, tokens, positions, active), rows))


@partial(jax.jit, static_argnums=(0, 1, 5), donate_argnums=3)
def advance(
    model: Model, num_blocks: int, params: Params, slots: DecodeBatch, chosen: Bool[Any, "R"], max_steps: int
) -> tuple[DecodeBatch, Emitted, Bool[Array, "R"]]:
    """Decodes up to `max_steps` tokens of the chosen slots, and says which of all are still active.

    The others stay as they are, but for the place of their last token: what is written there now is overwritten before
    it is read.
    """
    was_active = slots.state.active
    state = slots.state._replace(active=was_active & chosen)
    state, emitted = decode_blocks(model, params, state, slots.rows, max_steps, num_blocks)
    state = state._replace(active=jnp.where(chosen, state.active, was_active))
    return _constrained(model, slots._replace(state=state)), emitted, state.active


@partial(jax.jit, static_argnums=(0, 1, 5), donate_argnums=3)
def advance_part(
    model: Model, num_blocks: int, params: Params, slots: DecodeBatch, rows: Int[Any, "P"], max_steps: int
) -> tuple[DecodeBatch, Emitted, Bool[Array, "P"]]:
    """Decodes up to `max_steps` tokens of some slots, and of no others. Filling ones are beyond the last slot."""
    state = slots.state._replace(cache=slots.state.cache[:num_blocks])
    part = _taken(state, rows)
    part = part._replace(active=part.active & (rows < state.active.shape[0]))
    part, emitted = decode_blocks(model, params, part, _taken(slots.rows, rows), max_steps, num_blocks)
    state = _put(state, part, rows)
    return (
        slots._replace(state=state._replace(cache=(*state.cache, *slots.state.cache[num_blocks:]))),
        emitted,
        part.active,
    )


@partial(jax.jit, donate_argnums=0, keep_unused=True)
def trial_slots(slots: DecodeBatch, position: Int[Any, ""], filtering: Bool[Any, ""]) -> DecodeBatch:
    """Slots that are all active at places up to `position`, with numbers of all kinds in their caches.

    With `filtering`, every eighth of them has a kind of sampling parameters of its own; without, none filters anything.
    """

    def some(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros_like(leaf)
        axes = [jax.lax.broadcasted_iota(jnp.float32, leaf.shape, axis) for axis in range(leaf.ndim)]
        steps = sum((axis * (1.0 + 0.37 * place) for place, axis in enumerate(axes)), jnp.float32(0))
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
        cache=jax.tree.map(some, slots.state.cache),
        tokens=jnp.zeros_like(slots.state.tokens),
        positions=(1 + jnp.arange(count) * (position - 1) // max(count - 1, 1)).astype(jnp.int32),
        active=jnp.ones_like(slots.state.active),
    )
    limits = jnp.full_like(slots.rows.limits, jnp.iinfo(jnp.int32).max)
    return DecodeBatch(state, slots.rows._replace(sampling=sampling, limits=limits))


def _constrained(model: Model, slots: DecodeBatch) -> DecodeBatch:
    """The slots, each on the devices that decode it."""
    if model.sharding is None:
        return slots
    cache = _constrained_cache(model, slots.state.cache)
    state, rows = model.sharding.constrain_rows((slots.state._replace(cache=()), slots.rows))
    return DecodeBatch(state._replace(cache=cache), rows)


def _constrained_cache(model: Model, cache: Cache) -> Cache:
    return cache if model.sharding is None else model.sharding.constrain_cache(cache)


def _taken(tree: Any, rows: Int[Any, "P"]) -> Any:
    """Some rows of every leaf; one out of range is the last."""
    return jax.tree.map(lambda leaf: leaf.at[rows].get(mode="clip"), tree)


def _put(tree: Any, new: Any, rows: Int[Any, "P"]) -> Any:
    """The tree with new rows in every leaf; those out of range are dropped."""
    return jax.tree.map(lambda old, leaf: old.at[rows].set(leaf, mode="drop"), tree, new)


def _put_blocks(cache: Cache, new: Cache, rows: Int[Any, "P"]) -> Cache:
    """The cache with new rows in its first blocks."""
    return (*_put(cache[: len(new)], new, rows), *cache[len(new) :])
