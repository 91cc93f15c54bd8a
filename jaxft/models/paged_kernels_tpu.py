"""Attention to a paged cache of keys and values on TPUs: a Mosaic kernel, as `jaxft.models.paged_kernels` has for GPUs.

One step of the grid loads the few next pages that a block of queries sees. Letters are those of the other kernels; `U`
blocks, `S` steps of `n` pages.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxft.models.attention import MASK_VALUE, Scores, Span, span_of_block, visible_slots
from jaxft.models.paged_kernels import block_size, group_size, initial_softmax, multiply, normalize, reweigh

STEP_BYTES, MOST_STEP_PAGES = 2**20, 16
"""Bytes of keys and values that a step of the TPU kernel loads, and its most pages.

A step costs about 0.35 microseconds besides its work, in which a v5e loads 280 KiB and a v6e 560 KiB.
"""

LANES, MOST_TILE, MOST_QUERIES = 128, 512, 2048
"""Lanes of a vector register; most rows of queries of a block, per key/value head and of all of them."""


class Steps(NamedTuple):
    """Steps of the TPU kernel's grid, in the scalar memory; `S` steps at most, of `n` pages each, in `U` blocks.

    Attributes:
        blocks: block of queries of each step, blocks counted through all rows.
        columns: column of the table of each step's first page.
        pages: number of each page of each step. A column that the block does not see repeats the page in the same
            place of the step before, which the kernel then does not load again.
        spans: what each block sees.
        starts: position of each block's first query.
    """

    blocks: Int[Array, "S"]
    columns: Int[Array, "S"]
    pages: Int[Array, "S*n"]
    spans: Span
    starts: Int[Array, "U"]


def plan_steps(
    tables: Int[Array, "R C"],
    starts: Int[Array, "R"],
    counts: Int[Array, "R"],
    length: int,
    block: int,
    step_pages: int,
    page_size: int,
    window: int | None,
) -> tuple[Steps, Int[Array, ""]]:
    """Return the steps that load the pages which blocks of queries see, and their number; those after it are unused.

    A step takes columns from a multiple of `step_pages` on. Blocks are looked up by comparisons and sums, as TPUs
    gather single numbers slowly.

    >>> tables, starts, counts = jnp.array([[7, 8, 9], [5, 6, 4]]), jnp.array([130, 70]), jnp.array([1, 1])
    >>> plan = jax.jit(partial(plan_steps, length=1, block=1, step_pages=2, page_size=64, window=None))
    >>> steps, number = plan(tables, starts, counts)
    >>> [x[:3].tolist() for x in steps[:2]], steps.pages[:6].reshape(3, 2).tolist(), int(number)
    ([[0, 0, 1], [0, 2, 0]], [[7, 8], [9, 8], [5, 6]], 3)
    """
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % step_pages)))
    offsets = jnp.arange(0, length, block, dtype=jnp.int32)  # [T/block]
    spans = span_of_block(starts[:, None], counts[:, None], offsets, block, page_size, window)
    spans = Span(*(jnp.broadcast_to(x, (len(starts), offsets.size)).reshape(-1) for x in spans))  # [U]
    first = jax.lax.div(spans.first, step_pages)
    lengths = jnp.where(spans.end > spans.first, jax.lax.div(spans.end - 1, step_pages) + 1 - first, 0)
    ends = jnp.cumsum(lengths)
    step = jnp.arange(offsets.size * tables.size // step_pages, dtype=jnp.int32)
    blocks = jnp.minimum((ends <= step[:, None]).sum(axis=1, dtype=jnp.int32), ends.size - 1)

    def of_block(x: Array) -> Array:  # [U] to [S]
        return jnp.where(blocks[:, None] == jnp.arange(ends.size), x, 0).sum(axis=1)

    places = jnp.minimum(step + of_block(first - (ends - lengths)), tables.shape[1] // step_pages - 1)
    own = jax.lax.div(blocks, offsets.size) * (tables.shape[1] // step_pages) + places
    pages = tables.reshape(-1, step_pages)[own]  # [S n]
    columns = places[:, None] * step_pages + jnp.arange(step_pages, dtype=jnp.int32)
    is_seen = (columns >= of_block(spans.first)[:, None]) & (columns < of_block(spans.end)[:, None])
    pages = jnp.where(is_seen & (step < ends[-1])[:, None], pages, -1)
    for distance in (2**i for i in range(len(step).bit_length())):  # the last page so far in each place
        before = jnp.pad(pages, ((distance, 0), (0, 0)), constant_values=-1)[: len(step)]
        pages = jnp.where(pages < 0, before, pages)
    queries = (starts[:, None] + offsets).reshape(-1)
    return Steps(blocks, columns[:, 0], jnp.maximum(pages, 0).reshape(-1), spans, queries), ends[-1]


def attend_tpu(
    q: Float[Array, "R T H h"],
    keys: Float[Array, "K N P w"],
    values: Float[Array, "K N P w"],
    tables: Int[Array, "R C"],
    starts: Int[Array, "R"],
    counts: Int[Array, "R"],
    sinks: Float[Array, "H"] | None = None,
    *,
    scores: Scores,
    interpret: bool = False,
) -> Float[Array, "R T H h"]:
    """Return causal softmax attention of each row's queries to its pages, on TPUs; arguments as of `attend_gpu`.

    The grid has as many steps as the rows' pages need, whatever `C` is; all key/value heads of a page are loaded at
    once. Outputs of queries after a row's `counts` are 0. Arrays are bfloat16 or float32. The list of steps, about six
    bytes per block of queries and column, has to fit into a scalar memory of 1 MiB: 256 rows of 512 pages do.

    The kernel reads a pool whose width is a multiple of 128, the lanes of a vector register, as it lies. A narrower
    pool XLA lays out with pages innermost, and copies it for each call; so heads of 64 want a pool of 128.

    Raises:
        ValueError: `T` is no power of two, or `H` no multiple of `K`.
    """
    rows, length, _, head_dim = q.shape
    kv_heads, _, page_size, width = keys.shape
    groups = group_size(q.shape[2], keys)
    page_bytes = 2 * kv_heads * page_size * -(-width // LANES) * LANES * keys.dtype.itemsize
    step_pages = min(max(1, STEP_BYTES // page_bytes), MOST_STEP_PAGES, tables.shape[1])
    block = block_size(length, groups, max(8, min(MOST_TILE, MOST_QUERIES // kv_heads)))
    plan = plan_steps(tables, starts, counts, length, block, step_pages, page_size, scores.window)
    # Queries of a head stand together in the tile, so that its rows' positions are remainders of a power of two.
    cut = q.reshape(rows, length // block, block, kv_heads, groups, head_dim).transpose(0, 1, 3, 4, 2, 5)
    cut = jnp.pad(cut.reshape(-1, kv_heads, block * groups, head_dim), [(0, 0)] * 3 + [(0, width - head_dim)])
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, groups), block, axis=1)[..., None]
    mixed = _call_tpu_kernel(cut, keys, values, sinks, plan, step_pages, block, scores, interpret)
    mixed = mixed[..., :head_dim].reshape(rows, length // block, kv_heads, groups, block, head_dim)
    mixed = mixed.transpose(0, 1, 4, 2, 3, 5).reshape(q.shape)
    # Blocks without a step are not written.
    is_real = jnp.arange(length) < counts[:, None]
    return jnp.where(is_real[:, :, None, None], mixed, 0)


def _call_tpu_kernel(
    cut: Array,
    keys: Array,
    values: Array,
    sinks: Array | None,
    plan: tuple[Steps, Array],
    step_pages: int,
    block: int,
    scores: Scores,
    interpret: bool,
) -> Array:
    """Return attention of queries that are cut into tiles, by the steps of a plan."""
    # From jax 0.11 on this import adds a setting to the key of every program. At the top of the file it would make
    # GPUs, which need none of it, compile again what was compiled before: seconds.
    from jax.experimental.pallas import tpu as pltpu

    (_, kv_heads, tile, width), page_size, (steps, number) = cut.shape, keys.shape[2], plan
    scalars, treedef = jax.tree.flatten(steps)

    def page(step: Array, steps: Steps, i: int) -> tuple[Any, ...]:
        return 0, steps.pages[step * step_pages + i], 0, 0

    def index(function: Any) -> Any:
        return lambda step, *refs: function(step, jax.tree.unflatten(treedef, refs))

    in_block = pl.BlockSpec((None, kv_heads, tile, width), index(lambda step, steps: (steps.blocks[step], 0, 0, 0)))
    in_pool = [pl.BlockSpec((kv_heads, None, page_size, width), index(partial(page, i=i))) for i in range(step_pages)]
    if not interpret:
        # Else XLA moves a small pool into the chip and back in every step.
        keys, values = (pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in (keys, values))
    shapes = (kv_heads, tile, 1), (kv_heads, tile, 1), (kv_heads, tile, width)
    given = [] if sinks is None else [sinks]
    whole = [pl.BlockSpec(each.shape, lambda *_: (0, 0, 0)) for each in given]
    mixed: Array = pl.pallas_call(
        partial(_tpu_kernel, treedef, step_pages=step_pages, block=block, scores=scores),
        out_shape=jax.ShapeDtypeStruct(cut.shape, cut.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(jnp.maximum(number, 1),),
            in_specs=[in_block, *in_pool, *in_pool, *whole],
            out_specs=in_block,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in shapes],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, cut, *[keys] * step_pages, *[values] * step_pages, *given)
    return mixed


def _tpu_kernel(treedef: Any, *refs: Any, step_pages: int, block: int, scores: Scores) -> None:
    scalars, refs = refs[: treedef.num_leaves], refs[treedef.num_leaves :]
    q_ref, keys_refs, values_refs = refs[0], refs[1 : 1 + step_pages], refs[1 + step_pages : 1 + 2 * step_pages]
    *sinks_refs, out_ref, largest_ref, mass_ref, mixed_ref = refs[1 + 2 * step_pages :]
    state = largest_ref, mass_ref, mixed_ref
    kv_heads, tile, width = q_ref.shape
    page_size = keys_refs[0].shape[1]
    steps: Steps = jax.tree.unflatten(treedef, scalars)
    step = pl.program_id(0)
    own, column = steps.blocks[step], steps.columns[step]
    span = Span(*(x[own] for x in steps.spans))

    @pl.when(column <= span.first)
    def _start() -> None:
        for ref, value in zip(state, initial_softmax((kv_heads, tile, 1), (kv_heads, tile, width)), strict=True):
            ref[...] = value

    @pl.when(column < span.end)
    def _attend() -> None:
        k, v = (
            jnp.concatenate([ref[...].astype(q_ref.dtype) for ref in refs], axis=1) for refs in (keys_refs, values_refs)
        )  # [K nP h]
        shape = kv_heads, tile, step_pages * page_size
        scored = scores.of(multiply(q_ref[...], k, ((2,), (2,)), ((0,), (0,))))  # [K tile nP]
        slots = column * page_size + jax.lax.broadcasted_iota(jnp.int32, shape, 2)
        queries = steps.starts[own] + (jax.lax.broadcasted_iota(jnp.int32, shape, 1) & (block - 1))
        visible = visible_slots(queries, slots, scores.window)
        largest, weights, correction = reweigh(jnp.where(visible, scored, MASK_VALUE), largest_ref[...])
        # Values that no query of the block sees may be NaN, and 0 * NaN is NaN.
        places = column * page_size + jax.lax.broadcasted_iota(jnp.int32, v.shape, 1)
        v = jnp.where((places >= span.earliest) & (places <= span.latest), v, 0)
        largest_ref[...] = largest
        mass_ref[...] = mass_ref[...] * correction + weights.sum(axis=-1, keepdims=True)
        product = multiply(weights.astype(v.dtype), v, ((2,), (1,)), ((0,), (0,)))
        mixed_ref[...] = mixed_ref[...] * correction + product

    @pl.when(column + step_pages >= span.end)
    def _finish() -> None:
        mass = mass_ref[...]
        for ref in sinks_refs:
            mass += jnp.exp(ref[...] - largest_ref[...])
        out_ref[...] = normalize(mass, mixed_ref[...]).astype(out_ref.dtype)
