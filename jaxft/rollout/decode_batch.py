"""The arrays of an engine on the device, and the jitted programs that change them.

Prompts are prefilled chunk by chunk, each chunk straight into its pages; rows decode from the same pages, which they
find by page tables that come from the host with each call.

Letters: `R` slots, `P` rows of one program, `L` tokens of a chunk, `C` columns of a page table, `D` row shards, `N` key
ids, `S` stop ids, `M` biased tokens, `B` rows, `T` tokens of a row, `K` most likely tokens, `V` vocabulary.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxft.core.cache import (
    PAGE_TOKENS,
    AdaptedTables,
    SharedTables,
    compute_dtype,
    copy_pages,
    init_cache,
    page_axes,
    pages_for,
)
from jaxft.core.decode import DecodeState, Masks, RowParams, SampledTokens, decode, draw, next_logits
from jaxft.core.sampling import LogitBias, SamplingParams, fold_ids
from jaxft.core.sharding import by_rows
from jaxft.core.softmax import scaling_temperature
from jaxft.core.types import Cache, Model, Params

MAX_STOP_IDS = 8
MAX_BIASED_IDS = 32

PREFILL_PROGRAMS = {"cpu": ((1, 2),), "tpu": ((1, 32), (4, 8))}
PREFILL_PROGRAMS_ELSEWHERE = (1, 8), (1, 32), (1, 128)
"""Pages of a chunk of a prompt, and chunks, of each program that prefills, by platform; those of one width ascend.

A page is the least padding, and on a CPU the bits of a chunk then do not depend on the rest. Chunks of one prompt
follow each other in a program. A kernel on GPUs has blocks of a page of queries at most; that on TPUs has larger ones,
so that chunks of a page would read earlier pages twice as often.
"""

STEP_COST, ROW_COST = 10_000, 400
"""Costs of a decoding step and of each of its rows, in positions of the cache that are read in the same time. Measured
on two CPU cores with models of 2 and 58 million parameters (7,500 and 12,100 positions a step, 280 and 500 a row)."""


class DecodeBatch(NamedTuple):
    """The slots of the engine: their decoding state and parameters; every leaf has slots on axis 0."""

    state: DecodeState
    rows: RowParams


class PrefillChunks(NamedTuple):
    """Chunks of prompts to prefill: tokens, the position of the first one, the number of real ones, and the pages."""

    tokens: Int[Any, "P L"]
    starts: Int[Any, "P"]
    counts: Int[Any, "P"]
    tables: Int[Any, "P C"] | AdaptedTables


class Admission(NamedTuple):
    """Requests and the slots that they get. Padding has a slot beyond the last."""

    slots: Int[Any, "P"]
    tokens: Int[Any, "P"]
    positions: Int[Any, "P"]
    sampling: SamplingParams
    key_ids: UInt32[Any, "P N"]
    stop_ids: Int[Any, "P S"]
    limits: Int[Any, "P"]


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def empty_arrays(model: Model, pages: int, dtype: Any, slots: int) -> tuple[Cache, DecodeBatch]:
    """Make empty pages and inactive slots, in one program."""
    return model.init_cache(pages, dtype), _empty_slots(model, slots)


def _empty_slots(model: Model, slots: int) -> DecodeBatch:
    zeros = jnp.zeros(slots, jnp.int32)
    state = DecodeState(zeros, zeros, jnp.zeros(slots, bool))
    bias = LogitBias(jnp.full((slots, MAX_BIASED_IDS), -1, jnp.int32), jnp.zeros((slots, MAX_BIASED_IDS)))
    sampling = SamplingParams(jnp.ones(slots), zeros, jnp.ones(slots), jnp.zeros(slots), bias)
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), slots)
    rows = RowParams(sampling, keys, jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32), zeros)
    return by_rows(model.sharding, DecodeBatch(state, rows))


def page_shapes(model: Model, pages: int, dtype: Any) -> Cache:
    """Return the shapes, with shardings, of empty pages."""
    shapes = jax.eval_shape(lambda: model.init_cache(pages, dtype))
    return shapes if model.sharding is None else model.sharding.place_pages(shapes, page_axes(model))


def slot_shapes(model: Model, slots: int) -> DecodeBatch:
    """Return the shapes, with shardings, of inactive slots."""
    shapes = jax.eval_shape(lambda: _empty_slots(model, slots))
    return shapes if model.sharding is None else model.sharding.place_rows(shapes)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(model: Model, params: Params, cache: Cache, chunks: PrefillChunks) -> Cache:
    """Write the keys and values of chunks of prompts to their pages."""
    offsets = jnp.arange(chunks.tokens.shape[1], dtype=jnp.int32)
    positions = jnp.where(offsets < chunks.counts[:, None], chunks.starts[:, None] + offsets, -1)
    return model.apply(params, chunks.tokens, positions, cache=cache, tables=chunks.tables)[1]


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def copy(model: Model, cache: Cache, sources: Int[Any, "D P"], targets: Int[Any, "D P"]) -> Cache:
    """Run `copy_pages` in place."""
    return copy_pages(model, cache, sources, targets)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def admit(model: Model, slots: DecodeBatch, seed: UInt32[Array, "2"], admission: Admission) -> DecodeBatch:
    """Put requests into slots, which are ready to decode once their prompts are in their pages."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    keys = jax.vmap(partial(fold_ids, key))(admission.key_ids)
    new = DecodeBatch(
        DecodeState(admission.tokens, admission.positions, jnp.ones_like(admission.slots, bool)),
        RowParams(admission.sampling, keys, admission.stop_ids, admission.limits),
    )
    return by_rows(model.sharding, _put_rows(slots, new, admission.slots))


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def advance(
    model: Model,
    num_steps: int,
    is_filtered: bool,
    params: Params,
    cache: Cache,
    slots: DecodeBatch,
    tables: Int[Any, "B C"] | SharedTables | AdaptedTables,
    chosen: Bool[Any, "R"] | Int[Any, "P"],
) -> tuple[Cache, DecodeBatch, SampledTokens, Bool[Array, "B"]]:
    """Decode `num_steps` tokens of some slots; return pages, slots, and tokens and activity of each row.

    Args:
        model: the model.
        num_steps: number of tokens.
        is_filtered: as for `decode`.
        params: weights to decode with.
        cache: all pages.
        slots: all slots.
        tables: pages of each row, which of them rows share, and the adapters of rows.
        chosen: True for the slots to decode, where every slot is a row; or the slots of a few rows, of which padding
            has one beyond the last.
    """
    taken, state, is_chosen = _chosen(slots, chosen)
    cache, state, sampled = decode(
        model, params, cache, tables, state, taken.rows, num_steps, is_filtered=is_filtered, has_supports=True
    )
    slots, active = _put_chosen(model, slots, taken, state, chosen, is_chosen)
    return cache, slots, sampled, active


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def compute_logits(
    model: Model,
    params: Params,
    cache: Cache,
    slots: DecodeBatch,
    tables: Int[Any, "B C"] | AdaptedTables,
    chosen: Bool[Any, "R"] | Int[Any, "P"],
) -> tuple[Cache, Float[Array, "B V"]]:
    """Compute the logits of one token of some slots, while the host makes their masks; return pages and logits.

    Arguments are those of `advance`.
    """
    return next_logits(model, params, cache, tables, _chosen(slots, chosen)[1])


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def advance_masked(
    model: Model,
    is_filtered: bool,
    slots: DecodeBatch,
    chosen: Bool[Any, "R"] | Int[Any, "P"],
    masks: Masks,
    logits: Float[Array, "B V"],
) -> tuple[DecodeBatch, SampledTokens, Bool[Array, "B"]]:
    """Draw one token of some slots, some of them from masked logits; see `advance`.

    Args:
        model, is_filtered, slots, chosen: as for `advance`.
        masks: numbers of the masked rows of this program, and their masks.
        logits: those of `compute_logits`.
    """
    taken, state, is_chosen = _chosen(slots, chosen)
    was_active = state.active
    state, drawn = draw(model, logits, state, taken.rows, is_filtered=is_filtered, has_supports=True, masks=masks)
    counts, column = was_active.astype(jnp.int32), jax.tree.map(lambda x: x[:, None], drawn)
    sampled = SampledTokens(column.tokens, column.sampler_logprobs, column.behavior_logprobs, counts, column.supports)
    slots, active = _put_chosen(model, slots, taken, state, chosen, is_chosen)
    return slots, sampled, active


def _chosen(slots: DecodeBatch, chosen: Bool[Any, "R"] | Int[Any, "P"]) -> tuple[DecodeBatch, DecodeState, Any]:
    """Return the rows of a program, their state, in which only those to decode are active, and which these are."""
    is_all = chosen.dtype == bool
    taken = slots if is_all else jax.tree.map(lambda leaf: leaf.at[chosen].get(mode="clip"), slots)
    is_chosen = chosen if is_all else chosen < slots.state.active.shape[0]
    return taken, taken.state._replace(active=taken.state.active & is_chosen), is_chosen


def _put_chosen(
    model: Model, slots: DecodeBatch, taken: DecodeBatch, state: DecodeState, chosen: Any, is_chosen: Any
) -> tuple[DecodeBatch, Bool[Array, "B"]]:
    """Return the slots with the new state of the rows of a program, and which of the rows are active."""
    state = state._replace(active=jnp.where(is_chosen, state.active, taken.state.active))
    slots = slots._replace(state=state if chosen.dtype == bool else _put_rows(slots.state, state, chosen))
    return by_rows(model.sharding, slots), state.active


def _put_rows(tree: Any, new: Any, rows: Int[Any, "P"]) -> Any:
    """Write new rows into every leaf of a tree; rows out of range are dropped."""
    return jax.tree.map(lambda old, leaf: old.at[rows].set(leaf, mode="drop"), tree, new)


@partial(jax.jit, static_argnums=(0, 5))
def most_likely(
    model: Model,
    params: Params,
    tokens: Int[Any, "B T"],
    num_tokens: Int[Any, ""],
    temperature: Float[Any, ""],
    count: int,
    adapted: AdaptedTables | None = None,
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """Return log-probabilities and ids of the `count` tokens that are most likely to follow each token of a row.

    Log-probabilities are in nats, over the whole vocabulary at the temperature (at 1 when it is 0), the largest first;
    the lowest id comes first on ties. The row is computed page by page, as a prompt is prefilled; so scores and logits
    never exist for all positions.

    Args:
        model: the model.
        params: weights to decode with.
        tokens: the row, padded to whole pages, once for each row shard of a mesh.
        num_tokens: number of tokens of the row; results of later pages are 0.
        temperature: sampling temperature.
        count: number of tokens to return at each position.
        adapted: any tables with the adapter of the row; None for a row without one.
    """
    length, width = tokens.shape[1], PAGE_TOKENS
    cache, own = init_cache(model, len(tokens), length, compute_dtype(params))
    tables = own if adapted is None else adapted._replace(tables=own)
    found = jnp.zeros((length, count), jnp.float32), jnp.zeros((length, count), jnp.int32)

    def score(index: Any, carry: Any) -> Any:
        cache, (values, ids) = carry
        start = index * width
        positions = jnp.broadcast_to(start + jnp.arange(width, dtype=jnp.int32), (len(tokens), width))
        chunk = jax.lax.dynamic_slice_in_dim(tokens, start, width, axis=1)
        hidden, cache = model.apply(params, chunk, positions, cache=cache, tables=tables)
        logits = model.unembed(params, hidden[0]) / scaling_temperature(temperature)  # [L V]
        top = jax.lax.top_k(jax.nn.log_softmax(logits), count)
        put = jax.lax.dynamic_update_slice_in_dim
        return cache, (put(values, top[0], start, 0), put(ids, top[1], start, 0))

    _, found = jax.lax.fori_loop(0, (num_tokens + width - 1) // width, score, (cache, found))
    return found


def prefill_programs(platform: str, slots: int, length: int, num_pages: int | None = None) -> list[tuple[int, int]]:
    """Return width, and rows on a row shard, of each program that prefills; none has more rows than requests fill.

    Args:
        platform: platform of the devices.
        slots: slots of a row shard.
        length: maximum number of tokens of a request.
        num_pages: pages of a row shard; None for as many as all slots can need.

    >>> prefill_programs("gpu", slots=128, length=1024), prefill_programs("gpu", slots=4, length=192)
    ([(64, 8), (64, 32), (64, 128)], [(64, 8), (64, 12)])
    """
    columns, programs = pages_for(length), set()
    widest = 1 << (columns - 1).bit_length()
    for pages, rows in PREFILL_PROGRAMS.get(platform, PREFILL_PROGRAMS_ELSEWHERE):
        pages = min(pages, widest)
        most = slots * -(-columns // pages)  # each with a page of its own
        programs.add((pages * PAGE_TOKENS, min(rows, most, most if num_pages is None else num_pages)))
    return sorted(programs)


def split_batch(columns: Mapping[int, int], all_rows: int, few_rows: int | None) -> list[tuple[tuple[int, ...], bool]]:
    """Return the cheapest programs that decode slots which need different numbers of pages.

    Each is a tuple of slots, and True for a program of few rows, False for one of all rows. A program goes over as many
    columns of pages as its longest row has.

    Args:
        columns: the number of pages of each slot that is to decode.
        all_rows: rows of the program of all slots.
        few_rows: rows of the program of few slots; None if there is none.

    >>> split_batch({0: 2, 1: 16}, all_rows=64, few_rows=8)
    [((1, 0), True)]
    >>> uneven = {slot: 16 if slot == 7 else 2 for slot in range(64)}
    >>> split_batch(uneven, all_rows=64, few_rows=8)[0]
    ((7, 0, 1, 2, 3, 4, 5, 6), True)
    """
    longest_first = tuple(sorted(columns, key=lambda slot: -columns[slot]))
    ways: list[list[tuple[tuple[int, ...], bool]]] = [[(longest_first, False)]]
    if few_rows is None:
        return ways[0]
    few: list[tuple[tuple[int, ...], bool]] = []
    for start in range(0, len(longest_first), few_rows):
        few.append((longest_first[start : start + few_rows], True))
        rest = longest_first[start + few_rows :]
        ways.append([*few, (rest, False)] if rest else [*few])

    def cost(programs: Sequence[tuple[tuple[int, ...], bool]]) -> int:
        sizes = ((few_rows if is_few else all_rows, columns[slots[0]] * PAGE_TOKENS) for slots, is_few in programs)
        return sum(STEP_COST + rows * (ROW_COST + positions) for rows, positions in sizes)

    return min(ways, key=cost)
