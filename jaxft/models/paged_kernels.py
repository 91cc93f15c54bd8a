"""Attention to a paged cache of keys and values: a Triton kernel for NVIDIA's GPUs and a Mosaic kernel for TPUs.

Keys and values lie in pages of a pool, anywhere in it; a table names the pages of each row in order of positions
(arXiv 2309.06180). Both kernels take the pool as it lies, load the pages that the queries of a row see and no others,
share a loaded page among the query heads of its key/value head, and keep a running softmax (arXiv 2205.14135): one
call on the device, no partial results. That for GPUs also writes the key and value of a single query. Decoding is one
query per row, a piece of a prompt is more. On a mesh the caller wraps them in `shard_map`, so that they see the heads
of one device.
Letters: `R` rows, `T` queries of a row, `H` query heads, `K` key/value heads, `G = H / K`, `h` head width, `N` pages
of the pool, `P` positions of a page, `w` width of the pool, `C` columns of the table: the most pages of a row.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jaxft.models.attention import MASK_VALUE, Scores, Span, span_of_block, visible_slots


def _block_size(length: int, groups: int, most: int) -> int:
    """Return the queries of a block: the largest power of two with at most `most` rows of a group's heads."""
    if length & (length - 1):
        raise ValueError(f"{length} queries per row: wanted a power of two, so pad them and set counts")
    size = length
    while size > 1 and size * groups > most:
        size //= 2
    return size


def _groups(heads: int, keys: Array) -> int:
    kv_heads = keys.shape[0]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} key/value heads")
    return heads // kv_heads


# --- NVIDIA's GPUs: one program per row, key/value head and block of queries.


def attend_gpu(
    q: Float[Array, "R T H h"],
    keys: Float[Array, "K N P w"],
    values: Float[Array, "K N P w"],
    tables: Int[Array, "R C"],
    starts: Int[Array, "R"],
    counts: Int[Array, "R"],
    *,
    scores: Scores,
    interpret: bool = False,
) -> Float[Array, "R T H h"]:
    """Return causal softmax attention of each row's queries to its pages, on GPUs.

    Query `t` of a row stands at position `starts + t`, where its own key and value are written already. Positions of
    the pool that a row does not hold may hold anything, NaN too, and so may columns of its table after its last page.
    Products of float32 are real float32, not TF32. Head widths that are no power of two are padded in registers.

    Args:
        q: queries; `T` is a power of two and `H` a multiple of `K`.
        keys: keys of the pool; `P` is a power of two of at least 16. A pool may be wider than heads, with zeros there.
        values: values of the pool.
        tables: numbers of each row's pages, in order of positions.
        starts: position of each row's first query.
        counts: real queries of each row; outputs of others are finite. A row of 0 reads no page and gives exactly 0.
        scores: scale, window and soft cap.
        interpret: True to run the kernel's operations on any device, to show its values.

    Raises:
        ValueError: `T` is no power of two, or `H` no multiple of `K`.
    """
    return _call_gpu_kernel(
        q, q.shape[2], (keys, values), (tables, starts, counts), scores, interpret, is_written=False
    )[0]


def write_and_attend_gpu(
    q: Float[Array, "R 1 H h"],
    k: Float[Array, "R 1 K h"],
    v: Float[Array, "R 1 K h"],
    keys: Float[Array, "K N P h"],
    values: Float[Array, "K N P h"],
    tables: Int[Array, "R C"],
    starts: Int[Array, "R"],
    counts: Int[Array, "R"],
    *,
    scores: Scores,
    interpret: bool = False,
) -> tuple[Float[Array, "R 1 H h"], Float[Array, "K N P h"], Float[Array, "K N P h"]]:
    """Return `attend_gpu` of one query a row, whose key and value are written in the same call, and the new pool.

    The pool is updated in place. Rows of 0 queries write nothing.
    """
    heads = q.shape[2]
    # One array, so that a single launch makes queries, keys and values; the compiler does not split it again.
    joined = jnp.concatenate([q, k.astype(q.dtype), v.astype(q.dtype)], axis=2)
    mixed, keys, values = _call_gpu_kernel(
        joined, heads, (keys, values), (tables, starts, counts), scores, interpret, is_written=True
    )
    return mixed, keys, values


def _call_gpu_kernel(
    q: Array,
    heads: int,
    pool: tuple[Array, Array],
    where: tuple[Array, Array, Array],
    scores: Scores,
    interpret: bool,
    *,
    is_written: bool,
) -> list[Array]:
    """Return attention, and with `is_written` the pool; heads of `q` after the queries are then keys and values."""
    rows, length, _, head_dim = q.shape
    groups = _groups(heads, pool[0])
    width = pl.next_power_of_2(head_dim)
    # More queries share a page, but a tile of them and of its result has to fit into the registers.
    is_exact = q.dtype == jnp.float32  # multiplied without tensor cores
    block = _block_size(length, groups, 16 if is_exact else 128 if width <= 128 else 64)
    tile = max(16, pl.next_power_of_2(block * groups))  # tensor cores multiply 16 rows at a time
    shapes = [jax.ShapeDtypeStruct((rows, length * heads, head_dim), q.dtype)]
    shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pool if is_written]
    warps = 8 if is_exact or tile * width > 2**13 else 4
    if is_exact and width > 128:
        warps = 16  # with 8 a thread spills up to 1,460 bytes of registers, on A100
    mixed, *written = pl.pallas_call(
        partial(_gpu_kernel, groups=groups, block=block, tile=tile, width=width, scores=scores),
        out_shape=shapes,
        grid=(rows, pool[0].shape[0], length // block),
        input_output_aliases={1: 1, 2: 2} if is_written else {},
        # A page's number is loaded two pages ahead, its keys and values one page ahead.
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=3),
        interpret=interpret,
        name="paged_attention",
    )(q.reshape(rows, -1, head_dim), *pool, *where)
    return [mixed.reshape(rows, length, heads, head_dim), *written]


def _gpu_kernel(
    q_ref: Any,  # [R TH h], or with keys and values to write [R H+2K h]; references are to whole arrays
    keys_ref: Any,
    values_ref: Any,
    tables_ref: Any,
    starts_ref: Any,
    counts_ref: Any,
    out_ref: Any,  # [R TH h]
    *written_refs: Any,  # the pool, to write the key and value that follow the queries of a row; or nothing
    groups: int,
    block: int,
    tile: int,
    width: int,
    scores: Scores,
) -> None:
    row, kv_head, offset = pl.program_id(0), pl.program_id(1), pl.program_id(2) * block
    (kv_heads, _, page_size, _), head_dim = keys_ref.shape, q_ref.shape[2]
    start, count = starts_ref[row], counts_ref[row]
    span = span_of_block(start, count, offset, block, page_size, scores.window)

    # Rows of the tile are the group's heads of the first query, then those of the second.
    member = jax.lax.iota(jnp.int32, tile)
    query = offset + jax.lax.div(member, groups)
    place = query * (kv_heads * groups) + kv_head * groups + jax.lax.rem(member, groups)
    dims = jax.lax.iota(jnp.int32, width)[None, :]
    is_member = (member < block * groups)[:, None] & (dims < head_dim)  # [tile width]
    q_at = (row, place[:, None], dims)
    q = plgpu.load(q_ref.at[q_at], mask=is_member, other=0.0)
    slot = jax.lax.iota(jnp.int32, page_size)

    def attend_to_page(column: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, mass, mixed = carry
        slots = column * page_size + slot
        # Slots that no query of the block sees are not loaded: their values may be NaN, and 0 * NaN is NaN.
        is_seen = ((slots >= span.earliest) & (slots <= span.latest))[:, None] & (dims < head_dim)  # [P width]
        at = (kv_head, tables_ref[row, column], slot[:, None], dims)
        k = plgpu.load(keys_ref.at[at], mask=is_seen, other=0.0)
        scored = scores.of(_multiply(q, k, ((1,), (1,))))  # [tile P]
        visible = visible_slots(start + query[:, None], slots[None, :], scores.window) & (slots <= span.latest)[None, :]
        largest, weights, correction = _reweigh(jnp.where(visible, scored, MASK_VALUE), largest)
        v = plgpu.load(values_ref.at[at], mask=is_seen, other=0.0)
        mass = mass * correction + weights.sum(axis=1, keepdims=True)
        mixed = mixed * correction + _multiply(weights.astype(v.dtype), v, ((1,), (0,)))
        return largest, mass, mixed

    carry = _initial((tile, 1), (tile, width))
    if written_refs:
        # The query's own key and value come from the registers, as what is stored here cannot be loaded here yet.
        is_own = (dims[0] < head_dim) & (count > 0)
        own = [kv_heads * (groups + i) + kv_head for i in range(2)]
        k, v = (plgpu.load(q_ref.at[row, place, dims[0]], mask=is_own, other=0.0) for place in own)
        page = tables_ref[row, jax.lax.div(start, page_size)]
        for ref, x in zip(written_refs, (k, v), strict=True):
            plgpu.store(ref.at[kv_head, page, jax.lax.rem(start, page_size), dims[0]], x.astype(ref.dtype), mask=is_own)
        k, v = k.astype(jnp.float32)[None, :], v.astype(jnp.float32)[None, :]
        score = scores.of((q.astype(jnp.float32) * k).sum(axis=1, keepdims=True))
        carry = score, jnp.ones_like(score), jnp.broadcast_to(v, (tile, width))
        span = span._replace(end=jnp.where(count > 0, pl.cdiv(start, page_size), 0), latest=start - 1)
    _, mass, mixed = jax.lax.fori_loop(span.first, span.end, attend_to_page, carry)
    plgpu.store(out_ref.at[q_at], _normalize(mass, mixed).astype(out_ref.dtype), mask=is_member)


# --- Products and the running softmax of both kernels.


def _multiply(a: Array, b: Array, contract: Any, batch: Any = ((), ())) -> Array:
    """Return a product in float32; that of float32 is not rounded to TF32 or bfloat16."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (contract, batch), precision=precision, preferred_element_type=jnp.float32)


def _initial(shape: tuple[int, ...], mixed_shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Return the largest score, the mass and the mixed values before the first key."""
    return (
        jnp.full(shape, MASK_VALUE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(mixed_shape, jnp.float32),
    )


def _reweigh(scored: Array, largest: Array) -> tuple[Array, Array, Array]:
    """Return the new largest score, the weights of these scores, and the factor of what is summed already.

    Masked keys weigh 1 in a query that has seen no other yet; its first visible key has a factor of 0 for them.
    """
    grown = jnp.maximum(largest, scored.max(axis=-1, keepdims=True))
    return grown, jnp.exp(scored - grown), jnp.exp(largest - grown)


def _normalize(mass: Array, mixed: Array) -> Array:
    """Return mixed values over their mass; 0 of a block without queries, which saw no key."""
    return mixed / jnp.where(mass > 0, mass, 1.0)


# --- TPUs: one step of the grid per few pages that a block of queries sees.

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
    groups = _groups(q.shape[2], keys)
    page_bytes = 2 * kv_heads * page_size * -(-width // LANES) * LANES * keys.dtype.itemsize
    step_pages = min(max(1, STEP_BYTES // page_bytes), MOST_STEP_PAGES, tables.shape[1])
    block = _block_size(length, groups, max(8, min(MOST_TILE, MOST_QUERIES // kv_heads)))
    plan = plan_steps(tables, starts, counts, length, block, step_pages, page_size, scores.window)
    # Queries of a head stand together in the tile, so that its rows' positions are remainders of a power of two.
    cut = q.reshape(rows, length // block, block, kv_heads, groups, head_dim).transpose(0, 1, 3, 4, 2, 5)
    cut = jnp.pad(cut.reshape(-1, kv_heads, block * groups, head_dim), [(0, 0)] * 3 + [(0, width - head_dim)])
    mixed = _call_tpu_kernel(cut, keys, values, plan, step_pages, block, scores, interpret)
    mixed = mixed[..., :head_dim].reshape(rows, length // block, kv_heads, groups, block, head_dim)
    mixed = mixed.transpose(0, 1, 4, 2, 3, 5).reshape(q.shape)
    # Blocks without a step are not written.
    is_real = jnp.arange(length) < counts[:, None]
    return jnp.where(is_real[:, :, None, None], mixed, 0)


def _call_tpu_kernel(
    cut: Array,
    keys: Array,
    values: Array,
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
    mixed: Array = pl.pallas_call(
        partial(_tpu_kernel, treedef, step_pages=step_pages, block=block, scores=scores),
        out_shape=jax.ShapeDtypeStruct(cut.shape, cut.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(jnp.maximum(number, 1),),
            in_specs=[in_block, *in_pool, *in_pool],
            out_specs=in_block,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in shapes],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, cut, *[keys] * step_pages, *[values] * step_pages)
    return mixed


def _tpu_kernel(treedef: Any, *refs: Any, step_pages: int, block: int, scores: Scores) -> None:
    scalars, refs = refs[: treedef.num_leaves], refs[treedef.num_leaves :]
    q_ref, keys_refs, values_refs = refs[0], refs[1 : 1 + step_pages], refs[1 + step_pages : 1 + 2 * step_pages]
    out_ref, *state = refs[1 + 2 * step_pages :]
    kv_heads, tile, width = q_ref.shape
    page_size = keys_refs[0].shape[1]
    steps: Steps = jax.tree.unflatten(treedef, scalars)
    step = pl.program_id(0)
    own, column = steps.blocks[step], steps.columns[step]
    span = Span(*(x[own] for x in steps.spans))

    @pl.when(column <= span.first)
    def _start() -> None:
        for ref, value in zip(state, _initial((kv_heads, tile, 1), (kv_heads, tile, width)), strict=True):
            ref[...] = value

    @pl.when(column < span.end)
    def _attend() -> None:
        largest_ref, mass_ref, mixed_ref = state
        k, v = (jnp.concatenate([ref[...] for ref in refs], axis=1) for refs in (keys_refs, values_refs))  # [K nP h]
        shape = kv_heads, tile, step_pages * page_size
        scored = scores.of(_multiply(q_ref[...], k, ((2,), (2,)), ((0,), (0,))))  # [K tile nP]
        slots = column * page_size + jax.lax.broadcasted_iota(jnp.int32, shape, 2)
        queries = steps.starts[own] + (jax.lax.broadcasted_iota(jnp.int32, shape, 1) & (block - 1))
        visible = visible_slots(queries, slots, scores.window)
        largest, weights, correction = _reweigh(jnp.where(visible, scored, MASK_VALUE), largest_ref[...])
        # Values that no query of the block sees may be NaN, and 0 * NaN is NaN.
        places = column * page_size + jax.lax.broadcasted_iota(jnp.int32, v.shape, 1)
        v = jnp.where((places >= span.earliest) & (places <= span.latest), v, 0)
        largest_ref[...] = largest
        mass_ref[...] = mass_ref[...] * correction + weights.sum(axis=-1, keepdims=True)
        product = _multiply(weights.astype(v.dtype), v, ((2,), (1,)), ((0,), (0,)))
        mixed_ref[...] = mixed_ref[...] * correction + product

    @pl.when(column + step_pages >= span.end)
    def _finish() -> None:
        out_ref[...] = _normalize(state[1][...], state[2][...]).astype(out_ref.dtype)
