"""Attention of a layer over its pages of keys and values: tokens are written to their pages, then attend to them.

Only the innermost attention is chosen by platform: a kernel of `jaxft.models.paged_kernels` on NVIDIA's GPUs and on
TPUs, elsewhere the reference here, which goes over the pages column by column and adds up what each contributes.
Letters: `B` rows, `T` tokens, `C` columns of a page table, `N` pages, `P` tokens of a page, `H` query heads, `K`
key/value heads, `G = H / K`, `h` head width.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxft.core.cache import PAGE_TOKENS, SharedPages
from jaxft.core.reductions import invariant_sum, rounded_exp
from jaxft.core.sharding import Sharding, compute_devices, compute_platform
from jaxft.models.attention import MASK_VALUE, Scores
from jaxft.models.flash import AMPERE, compute_capability
from jaxft.models.quantized import narrowed

PagedKernel = Literal["reference", "triton", "mosaic"]


class LayerPages(NamedTuple):
    """Keys and values of one layer, and in one of experts those that each token was routed to, as in `Batch.experts`.

    On CPUs keys are `[N K h P]`, transposed, and values `[N K P h]`, so that products read them in order. Elsewhere
    both are `[K N P h]`, as kernels load them. They may be in fp8, which products widen. Experts have no heads to
    divide over a mesh.
    """

    keys: Float[Array, "..."]
    values: Float[Array, "..."]
    experts: UInt[Array, "1 1 N P k"] | None = None


class PagedRows(NamedTuple):
    """The rows of a call: their pages, the position of their first token, their numbers of real tokens.

    Decoding on GPUs reads `shared` pages once for all their rows; nothing else looks at them.
    """

    tables: Int[Array, "B C"]
    starts: Int[Array, "B"]
    counts: Int[Array, "B"]
    shared: SharedPages | None = None


def choose_paged_kernel(dtype: Any, devices: Sequence[Any]) -> PagedKernel:
    """Return the attention over pages that all of these devices can run.

    >>> choose_paged_kernel(jnp.bfloat16, jax.devices("cpu"))
    'reference'
    """
    platforms = {device.platform for device in devices}
    if platforms == {"gpu"} and min(map(compute_capability, devices)) >= AMPERE and jnp.dtype(dtype).itemsize <= 4:
        return "triton"
    return "mosaic" if platforms == {"tpu"} and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32) else "reference"


def page_axis(sharding: Sharding | None) -> Literal[0, 1]:
    """Return the axis of the pages in keys and values; heads are on the other of the first two."""
    return 0 if compute_platform(sharding) == "cpu" else 1


LANES = 128
"""Lanes of a TPU's vector register; a narrower array XLA lays out in another order, and copies it for a kernel."""


def init_pages(
    pages: int, kv_heads: int, head_dim: int, dtype: Any, platform: str, experts: tuple[int, Any] | None = None
) -> LayerPages:
    """Make empty pages of a layer, with `experts`, number and dtype, of each token; on TPUs heads are padded.

    >>> [init_pages(3, 2, 16, jnp.bfloat16, platform).keys.shape for platform in ("cpu", "gpu", "tpu")]
    [(3, 2, 16, 64), (2, 3, 64, 16), (2, 3, 64, 128)]
    """
    chosen = None if experts is None else jnp.zeros((1, 1, pages, PAGE_TOKENS, experts[0]), experts[1])
    if platform != "cpu":
        width = -(-head_dim // LANES) * LANES if platform == "tpu" else head_dim
        shape = kv_heads, pages, PAGE_TOKENS, width
        return LayerPages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), chosen)
    return LayerPages(
        jnp.zeros((pages, kv_heads, head_dim, PAGE_TOKENS), dtype),
        jnp.zeros((pages, kv_heads, PAGE_TOKENS, head_dim), dtype),
        chosen,
    )


def write_and_attend(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    pages: LayerPages,
    rows: PagedRows,
    scores: Scores,
    sharding: Sharding | None,
    sinks: Float[Array, "H"] | None = None,
) -> tuple[Float[Array, "B T H h"], LayerPages]:
    """Write keys and values of the real tokens to their pages, and return attention to all tokens up to each.

    On a mesh each device has its own rows, heads and pages, and nothing is exchanged. Results of other than real tokens
    mean nothing.

    Args:
        q: queries.
        k: keys of the same tokens.
        v: values of the same tokens.
        pages: pages of the layer.
        rows: where the tokens stand. Several tokens of a row begin at the first place of a page.
        scores: scale, window and soft cap.
        sharding: sharding of the model, or None for one device.
        sinks: score of nothing in each head.
    """
    axis, kernel = page_axis(sharding), choose_paged_kernel(q.dtype, compute_devices(sharding))
    compute = partial(_write_and_attend, scores, axis, kernel)
    if sharding is None:
        return compute(q, k, v, pages, rows, sinks)
    rows_over = sharding.row_axes
    heads, of_rows = PartitionSpec(rows_over, None, "tensor"), PartitionSpec(rows_over)
    of_pages = sharding.page_spec(axis)
    mapped = jax.shard_map(
        compute,
        mesh=sharding.mesh,
        in_specs=(heads, heads, heads, of_pages, of_rows, PartitionSpec("tensor")),
        out_specs=(heads, of_pages),
        check_vma=False,
    )
    return mapped(q, k, v, pages, rows, sinks)


def _write_and_attend(
    scores: Scores,
    axis: int,
    kernel: PagedKernel,
    q: Array,
    k: Array,
    v: Array,
    pages: LayerPages,
    rows: PagedRows,
    sinks: Array | None,
) -> tuple[Array, LayerPages]:
    k, v = (narrowed(x, pages.keys.dtype) for x in (k, v))
    if kernel != "reference":
        # Pallas takes half a second, which users of CPUs are spared.
        from jaxft.models import paged_kernels, paged_kernels_tpu

    if kernel == "triton" and q.shape[1] == 1:
        attended, *written = paged_kernels.write_and_attend_gpu(
            q, k, v, *pages[:2], *rows[:3], rows.shared, sinks, scores=scores
        )
        return attended, LayerPages(*written)
    if axis == 1 and (added := pages.keys.shape[-1] - k.shape[-1]):
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, added))) for x in (k, v))
    pages = write_token(pages, k, v, rows, axis) if q.shape[1] == 1 else write_tokens(pages, k, v, rows, axis)
    if kernel == "reference":
        return attend_reference(q, pages, rows, scores, axis, sinks), pages
    attend = paged_kernels.attend_gpu if kernel == "triton" else paged_kernels_tpu.attend_tpu
    return attend(q, pages.keys, pages.values, *rows[:3], sinks, scores=scores), pages


def write_token(pages: LayerPages, k: Array, v: Array, rows: PagedRows, axis: int) -> LayerPages:
    """Write the keys and values `[B 1 K h]` of one token a row; rows without a real token write nothing."""
    size, number = pages.keys.shape[axis], _numbers(rows, rows.starts // PAGE_TOKENS)
    number = jnp.where(rows.counts > 0, number, size)  # beyond the last page: dropped
    place = rows.starts % PAGE_TOKENS
    k, v = k[:, 0].astype(pages.keys.dtype), v[:, 0].astype(pages.values.dtype)  # [B K h]
    if axis == 0:
        return LayerPages(
            pages.keys.at[number, :, :, place].set(k, mode="drop"),
            pages.values.at[number, :, place].set(v, mode="drop"),
        )

    # Indexed by page and place, XLA for TPUs lays heads out next to their widths, and copies the whole pool for the
    # kernel and back in every step. As a table of rows the pool stays as the kernel takes it.
    kv_heads = pages.keys.shape[0]
    to = jnp.arange(kv_heads) * size * PAGE_TOKENS + (number * PAGE_TOKENS + place)[:, None]  # [B K]
    to = jnp.where(rows.counts[:, None] > 0, to, kv_heads * size * PAGE_TOKENS)

    def write(pool: Array, x: Array) -> Array:
        return pool.reshape(-1, pool.shape[-1]).at[to].set(x, mode="drop").reshape(pool.shape)

    return LayerPages(write(pages.keys, k), write(pages.values, v))


def write_tokens(pages: LayerPages, k: Array, v: Array, rows: PagedRows, axis: int) -> LayerPages:
    """Write keys and values `[B T K h]` page by page; places behind the last token of a row get anything finite."""
    size, columns = pages.keys.shape[axis], -(-k.shape[1] // PAGE_TOKENS)
    column = jnp.arange(columns)  # of this call
    number = _numbers(rows, rows.starts[:, None] // PAGE_TOKENS + column)  # [B columns]
    number = jnp.where(column * PAGE_TOKENS < rows.counts[:, None], number, size).reshape(-1)

    def by_page(x: Array, like: Array) -> Array:  # [B T K h] to [N' P K h]
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % PAGE_TOKENS), (0, 0), (0, 0))).astype(like.dtype)
        return x.reshape(-1, PAGE_TOKENS, *x.shape[2:])

    k, v = by_page(k, pages.keys), by_page(v, pages.values)
    if axis == 0:
        return LayerPages(
            pages.keys.at[number].set(k.transpose(0, 2, 3, 1), mode="drop"),
            pages.values.at[number].set(v.transpose(0, 2, 1, 3), mode="drop"),
        )
    k, v = k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3)
    return LayerPages(pages.keys.at[:, number].set(k, mode="drop"), pages.values.at[:, number].set(v, mode="drop"))


EXPERTS_AXIS = 2
"""Axis of the pages in the experts of a layer."""


def write_experts(
    pool: UInt[Array, "1 1 N P k"], chosen: Int[Array, "B T k"], rows: PagedRows, sharding: Sharding | None
) -> UInt[Array, "1 1 N P k"]:
    """Write the experts of the real tokens, here counted from 0, to the pages of a layer."""

    def write(pool: Array, chosen: Array, rows: PagedRows) -> Array:
        offsets, beyond = jnp.arange(chosen.shape[1]), pool.shape[EXPERTS_AXIS] * PAGE_TOKENS
        places = rows.starts[:, None] + offsets  # [B T]
        to = _numbers(rows, places // PAGE_TOKENS) * PAGE_TOKENS + places % PAGE_TOKENS
        to = jnp.where(offsets < rows.counts[:, None], to, beyond)  # dropped
        return pool.reshape(beyond, -1).at[to].set(chosen.astype(pool.dtype) + 1, mode="drop").reshape(pool.shape)

    if sharding is not None:
        spec, of_rows = sharding.page_spec(EXPERTS_AXIS), PartitionSpec(sharding.row_axes)
        specs = spec, of_rows, of_rows
        write = jax.shard_map(write, mesh=sharding.mesh, in_specs=specs, out_specs=spec, check_vma=False)
    return write(pool, chosen, rows._replace(shared=None))


@partial(jax.jit, static_argnums=0)
def gather_experts(
    sharding: Sharding | None, cache: tuple[LayerPages, ...], numbers: Int[Any, "C"]
) -> UInt[Array, "T L k"]:
    """Return the experts of the tokens of these pages, in every layer that has some."""
    held = [pages.experts[0, 0, numbers] for pages in cache if pages.experts is not None]  # each [C P k]
    gathered = jnp.stack(held, axis=2).reshape(-1, len(held), held[0].shape[-1])
    return gathered if sharding is None else sharding.constrain_axes(gathered)


def _numbers(rows: PagedRows, columns: Int[Array, "B *n"]) -> Int[Array, "B *n"]:
    """Return the page numbers in these columns of each row's table."""
    flat = columns.reshape(columns.shape[0], -1)
    return jnp.take_along_axis(rows.tables, flat, axis=1, mode="clip").reshape(columns.shape)


def take_pages(pages: LayerPages, number: Int[Array, "B"], held: Bool[Array, "B P"], axis: int) -> tuple[Array, Array]:
    """Return keys `[B K h P]` and values `[B K P h]` of one page for each row; values that are not held are zeros.

    What is not held may be NaN, and 0 times NaN is NaN.
    """
    if axis == 1:
        keys, values = (leaf.at[:, number].get(mode="clip") for leaf in pages[:2])
        return keys.transpose(1, 0, 3, 2), jnp.where(held[:, None, :, None], values.swapaxes(0, 1), 0)

    def take() -> tuple[Array, Array]:
        keys, values = (leaf.reshape(len(leaf), -1).at[number].get(mode="clip") for leaf in pages[:2])
        is_held = jnp.broadcast_to(held[:, None, :, None], (len(held), *pages.values.shape[1:]))
        return keys, jnp.where(is_held.reshape(values.shape), values, 0)

    # XLA for CPU fuses a gather with the reshape of its result, and copies short axes number by number, which takes
    # twice as long. It fuses nothing across the border of a branch.
    shapes = jax.eval_shape(take)
    keys, values = jax.lax.cond(held[:, 0].any(), take, lambda: jax.tree.map(jnp.zeros_like, shapes))
    return keys.reshape(-1, *pages.keys.shape[1:]), values.reshape(-1, *pages.values.shape[1:])


def attend_reference(
    q: Float[Array, "B T H h"],
    pages: LayerPages,
    rows: PagedRows,
    scores: Scores,
    axis: int,
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "B T H h"]:
    """Return softmax attention of each token to the tokens of its row up to itself, column of pages by column.

    A column in which a row sees nothing changes no bit of its result, so that short rows have the same bits beside long
    ones. Keys and values behind a row's last token may hold anything, also NaN.
    """
    (batch, length, _, width), window = q.shape, scores.window
    kv_heads = pages.values.shape[1 - axis]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(batch, length, kv_heads, -1, width).transpose(0, 2, 3, 1, 4)  # [B K G T h]
    flat = grouped.reshape(batch, kv_heads, -1, width)  # [B K GT h]
    positions = rows.starts[:, None] + jnp.arange(length)  # [B T]
    ends = rows.starts + rows.counts  # 0 tokens of an idle row are visible, as it has no position below its end
    ends = jnp.where(rows.counts > 0, ends, 0)
    first = jnp.int32(0)
    if window is not None:
        first = jnp.min(jnp.where(rows.counts > 0, jnp.maximum(rows.starts - window + 1, 0), jnp.iinfo(jnp.int32).max))
        first = first // PAGE_TOKENS

    def add_column(column: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, mass, mixed = carry
        number = jax.lax.dynamic_index_in_dim(rows.tables, column, axis=1, keepdims=False)  # [B]
        places = column * PAGE_TOKENS + jnp.arange(PAGE_TOKENS)
        is_held = places < ends[:, None]  # [B P]
        keys, values = take_pages(pages, number, is_held, axis)
        # On TPUs heads are padded.
        keys, values = keys[:, :, :width].astype(q.dtype), values[..., :width].astype(q.dtype)
        visible = (places <= positions[:, :, None]) & is_held[:, None]  # [B T P]
        if window is not None:
            visible &= places > positions[:, :, None] - window
        visible = visible[:, None, None]  # [B 1 1 T P]
        products = jnp.matmul(flat, keys, preferred_element_type=wide)  # [B K GT P]
        # The float32 products are scaled, not the queries, which bfloat16 would round once more.
        scored = scores.of(products.reshape(*grouped.shape[:-1], PAGE_TOKENS))
        scored = jnp.where(visible, scored, MASK_VALUE)
        highest = jnp.maximum(largest, scored.max(axis=-1, keepdims=True))
        weights = jnp.where(visible, rounded_exp(scored - highest), 0.0)
        part = jnp.matmul(weights.reshape(*flat.shape[:-1], -1).astype(q.dtype), values, preferred_element_type=wide)
        kept = rounded_exp(largest - highest)
        mass = mass * kept + invariant_sum(weights, in_halves=True)
        return highest, mass, mixed * kept + part.reshape(grouped.shape)

    shape = *grouped.shape[:-1], 1
    start = jnp.full(shape, MASK_VALUE, wide), jnp.zeros(shape, wide), jnp.zeros(grouped.shape, wide)
    if sinks is not None:  # as if each query had seen one key already, whose value is zero
        start = jnp.broadcast_to(sinks.reshape(kv_heads, -1, 1, 1).astype(wide), shape), jnp.ones(shape, wide), start[2]
    last = jnp.max((ends + PAGE_TOKENS - 1) // PAGE_TOKENS)
    _, mass, mixed = jax.lax.fori_loop(first, last, add_column, start)
    # A product with the inverse: XLA compiles a quotient to either form, and the two round differently.
    mixed = (mixed * (1.0 / jnp.where(mass > 0, mass, 1.0))).astype(q.dtype)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(q.shape)
