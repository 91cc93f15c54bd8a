"""Attention to a paged cache of keys and values on NVIDIA's GPUs: Triton kernels.

Keys and values lie in pages of a pool, anywhere in it; a table names the pages of each row in order of positions
(arXiv 2309.06180). The kernel takes the pool as it lies, loads the pages that the queries of a row see and no others,
shares a loaded page among the query heads of its key/value head, and keeps a running softmax (arXiv 2205.14135) in one
call on the device. It also writes the key and value of a single query; there pages with which several rows begin may be
loaded once for all of them, by a call before it (arXiv 2402.05099). Decoding is one query per row, a chunk of a prompt
is more. On a mesh the caller wraps kernels in `shard_map`, so that they see the heads of one device. What a kernel for
TPUs has in common with these is here too (`jaxft.models.paged_kernels_tpu`).
Letters: `R` rows, `T` queries of a row, `H` query heads, `K` key/value heads, `G = H / K`, `h` head width, `N` pages
of the pool, `P` positions of a page, `w` width of the pool, `C` columns of the table: the most pages of a row, `S` sets
of rows that share pages, `M` the most rows of one.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jaxft.core.cache import SharedPages
from jaxft.models.attention import MASK_VALUE, Scores, span_of_block, visible_slots


def block_size(length: int, groups: int, most: int) -> int:
    """Return the queries of a block: the largest power of two with at most `most` rows of a group's heads."""
    if length & (length - 1):
        raise ValueError(f"{length} queries per row: wanted a power of two, so pad them and set counts")
    size = length
    while size > 1 and size * groups > most:
        size //= 2
    return size


def group_size(heads: int, keys: Array) -> int:
    kv_heads = keys.shape[0]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} key/value heads")
    return heads // kv_heads


# --- One program per row, key/value head and block of queries.


def attend_gpu(
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
        sinks: score of nothing in each head.
        scores: scale, window and soft cap.
        interpret: True to run the kernel's operations on any device, to show its values.

    Raises:
        ValueError: `T` is no power of two, or `H` no multiple of `K`.
    """
    return _call_gpu_kernel(
        q, q.shape[2], (keys, values), (tables, starts, counts), sinks, scores, interpret, is_written=False
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
    shared: SharedPages | None = None,
    sinks: Float[Array, "H"] | None = None,
    *,
    scores: Scores,
    interpret: bool = False,
) -> tuple[Float[Array, "R 1 H h"], Float[Array, "K N P h"], Float[Array, "K N P h"]]:
    """Return `attend_gpu` of one query a row, whose key and value are written in the same call, and the new pool.

    The pool is updated in place. Rows of 0 queries write nothing. Pages that are `shared` are loaded once for their
    rows, by a call of its own; there is none with a window, of which rows see different parts, and in float32.
    """
    heads = q.shape[2]
    # One array, so that a single launch makes queries, keys and values; the compiler does not split it again.
    joined = jnp.concatenate([q, k.astype(q.dtype), v.astype(q.dtype)], axis=2)
    begun: tuple[Array, ...] = ()
    if shared is not None and scores.window is None and q.dtype != jnp.float32:
        begun = (shared.own, *_attend_to_shared(joined, heads, keys, values, tables, shared, scores, interpret))
    mixed, keys, values = _call_gpu_kernel(
        joined, heads, (keys, values), (tables, starts, counts, *begun), sinks, scores, interpret, is_written=True
    )
    return mixed, keys, values


def _attend_to_shared(
    q: Array,
    heads: int,
    keys: Array,
    values: Array,
    tables: Array,
    shared: SharedPages,
    scores: Scores,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """Return largest scores, masses and mixed values `[R H]`, `[R H]` and `[R H h]` of the rows that share pages.

    Those of other rows are undefined. Heads of `q` after the queries are not read.
    """
    rows, head_dim = q.shape[0], q.shape[3]
    groups, width, (sets, members) = group_size(heads, keys), pl.next_power_of_2(head_dim), shared.rows.shape
    block = block_size(members, groups, 128 if width <= 128 else 64)
    tile = max(16, pl.next_power_of_2(block * groups))
    begun: tuple[Array, Array, Array] = pl.pallas_call(
        partial(_shared_kernel, groups=groups, block=block, tile=tile, width=width, scores=scores),
        out_shape=tuple(jax.ShapeDtypeStruct((rows, heads, *last), jnp.float32) for last in ((), (), (head_dim,))),
        grid=(sets, keys.shape[0], members // block),
        compiler_params=plgpu.CompilerParams(num_warps=8 if tile * width > 2**13 else 4, num_stages=3),
        interpret=interpret,
        name="shared_paged_attention",
    )(q.reshape(rows, -1, head_dim), keys, values, tables, shared.rows, shared.columns)
    return begun


def _shared_kernel(*refs: Any, groups: int, block: int, tile: int, width: int, scores: Scores) -> None:
    # Whole arrays: queries [R H+2K h], pool, tables, and rows [S M] and columns [S] of the sets; the results.
    q_ref, keys_ref, values_ref, tables_ref, rows_ref, columns_ref, *begun_refs, mixed_ref = refs
    own, kv_head, offset = pl.program_id(0), pl.program_id(1), pl.program_id(2) * block
    (_, _, page_size, _), (num_rows, _, head_dim) = keys_ref.shape, q_ref.shape
    member = jax.lax.iota(jnp.int32, tile)
    is_member = member < block * groups
    row = plgpu.load(rows_ref.at[own, offset + jax.lax.div(member, groups)], mask=is_member, other=num_rows)[:, None]
    is_member = is_member[:, None] & (row < num_rows)  # [tile 1]
    place, dims = kv_head * groups + jax.lax.rem(member, groups)[:, None], jax.lax.iota(jnp.int32, width)[None, :]
    is_real = is_member & (dims < head_dim)
    q = plgpu.load(q_ref.at[row, place, dims], mask=is_real, other=0.0)
    first, slot = rows_ref[own, 0], jax.lax.iota(jnp.int32, page_size)[:, None]
    is_width = jnp.broadcast_to(dims < head_dim, (page_size, width))

    def attend_to_page(column: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at = kv_head, tables_ref[first, column], slot, dims
        return _add_page(q, keys_ref.at[at], values_ref.at[at], is_width, None, scores, carry)

    end = jnp.where(rows_ref[own, offset] < num_rows, columns_ref[own], 0)
    begun = jax.lax.fori_loop(0, end, attend_to_page, initial_softmax((tile, 1), (tile, width)))
    for ref, x in zip(begun_refs, begun, strict=False):
        plgpu.store(ref.at[row, place], x, mask=is_member)
    plgpu.store(mixed_ref.at[row, place, dims], begun[2], mask=is_real)


def _call_gpu_kernel(
    q: Array,
    heads: int,
    pool: tuple[Array, Array],
    where: tuple[Array, ...],
    sinks: Array | None,
    scores: Scores,
    interpret: bool,
    *,
    is_written: bool,
) -> list[Array]:
    """Return attention, and with `is_written` the pool; heads of `q` after the queries are then keys and values.

    After table, starts and counts `where` may have each row's first column to attend to, and what is known of those
    before it.
    """
    rows, length, _, head_dim = q.shape
    groups = group_size(heads, pool[0])
    width = pl.next_power_of_2(head_dim)
    # More queries share a page, but a tile of them and of its result has to fit into the registers.
    is_exact = q.dtype == jnp.float32  # multiplied without tensor cores
    block = block_size(length, groups, 16 if is_exact else 128 if width <= 128 else 64)
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
    )(q.reshape(rows, -1, head_dim), *pool, *where, *([] if sinks is None else [sinks]))
    return [mixed.reshape(rows, length, heads, head_dim), *written]


def _gpu_kernel(
    q_ref: Any,  # [R TH h], or with keys and values to write [R H+2K h]; references are to whole arrays
    keys_ref: Any,
    values_ref: Any,
    tables_ref: Any,
    starts_ref: Any,
    counts_ref: Any,
    *refs: Any,
    groups: int,
    block: int,
    tile: int,
    width: int,
    scores: Scores,
) -> None:
    # First column, largest score, mass and mixed values of each row, or nothing; sinks [H], or nothing; the result
    # [R TH h]; the pool, to write the key and value that follow the queries of a row, or nothing.
    begun_refs, refs = (refs[:4], refs[4:]) if len(refs) > 4 else ((), refs)
    sinks_refs, (out_ref, *written_refs) = (refs[:1], refs[1:]) if scores.has_sinks else ((), refs)
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
        slots = column * page_size + slot
        # Slots that no query of the block sees are not loaded: their values may be NaN, and 0 * NaN is NaN.
        is_seen = ((slots >= span.earliest) & (slots <= span.latest))[:, None] & (dims < head_dim)  # [P width]
        at = (kv_head, tables_ref[row, column], slot[:, None], dims)
        visible = visible_slots(start + query[:, None], slots[None, :], scores.window) & (slots <= span.latest)[None, :]
        return _add_page(q, keys_ref.at[at], values_ref.at[at], is_seen, visible, scores, carry)

    carry = initial_softmax((tile, 1), (tile, width))
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
        if begun_refs:
            own_ref, largest_ref, mass_ref, mixed_ref = begun_refs
            span = span._replace(first=own_ref[row])
            has_begun = (member < block * groups)[:, None] & (span.first > 0) & (count > 0)
            largest = plgpu.load(largest_ref.at[row, place[:, None]], mask=has_begun, other=MASK_VALUE)
            mass = plgpu.load(mass_ref.at[row, place[:, None]], mask=has_begun, other=0.0)
            mixed = plgpu.load(mixed_ref.at[q_at], mask=has_begun & (dims < head_dim), other=0.0)
            largest, weight, correction = reweigh(score, largest)
            carry = largest, mass * correction + weight, mixed * correction + weight * v
        span = span._replace(end=jnp.where(count > 0, pl.cdiv(start, page_size), 0), latest=start - 1)
    largest, mass, mixed = jax.lax.fori_loop(span.first, span.end, attend_to_page, carry)
    for ref in sinks_refs:
        head = kv_head * groups + jax.lax.rem(member, groups)
        mass += jnp.exp(plgpu.load(ref.at[head]).astype(jnp.float32)[:, None] - largest)
    plgpu.store(out_ref.at[q_at], normalize(mass, mixed).astype(out_ref.dtype), mask=is_member)


def _add_page(
    q: Array, k_ref: Any, v_ref: Any, is_seen: Array, visible: Array | None, scores: Scores, carry: Any
) -> tuple[Array, Array, Array]:
    """Return the running softmax after a page, of which only what `is_seen` is loaded; `visible` None is all of it."""
    largest, mass, mixed = carry
    k = plgpu.load(k_ref, mask=is_seen, other=0.0).astype(q.dtype)  # which may be in fp8
    scored = scores.of(multiply(q, k, ((1,), (1,))))  # [tile P]
    scored = scored if visible is None else jnp.where(visible, scored, MASK_VALUE)
    largest, weights, correction = reweigh(scored, largest)
    v = plgpu.load(v_ref, mask=is_seen, other=0.0).astype(q.dtype)
    mass = mass * correction + weights.sum(axis=1, keepdims=True)
    mixed = mixed * correction + multiply(weights.astype(v.dtype), v, ((1,), (0,)))
    return largest, mass, mixed


# --- Products and the running softmax of both kernels.


def multiply(a: Array, b: Array, contract: Any, batch: Any = ((), ())) -> Array:
    """Return a product in float32; that of float32 is not rounded to TF32 or bfloat16."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (contract, batch), precision=precision, preferred_element_type=jnp.float32)


def initial_softmax(shape: tuple[int, ...], mixed_shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Return the largest score, the mass and the mixed values before the first key."""
    return (
        jnp.full(shape, MASK_VALUE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(mixed_shape, jnp.float32),
    )


def reweigh(scored: Array, largest: Array) -> tuple[Array, Array, Array]:
    """Return the new largest score, the weights of these scores, and the factor of what is summed already.

    Masked keys weigh 1 in a query that has seen no other yet; its first visible key has a factor of 0 for them.
    """
    grown = jnp.maximum(largest, scored.max(axis=-1, keepdims=True))
    return grown, jnp.exp(scored - grown), jnp.exp(largest - grown)


def normalize(mass: Array, mixed: Array) -> Array:
    """Return mixed values over their mass; 0 of a block without queries, which saw no key."""
    return mixed / jnp.where(mass > 0, mass, 1.0)
