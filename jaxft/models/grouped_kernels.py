"""Products by expert on NVIDIA's GPUs: two Triton kernels, which skip experts without rows.

JAX's Mosaic kernel would read the weights of all experts, also when a few rows are decoded.
Letters: `n` rows, `E` experts, `d` input width, `f` output width, `b` blocks.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Shaped

from jaxft.models.paged_kernels import multiply


def multiply_gpu(
    rows: Float[Array, "n d"],
    weights: Shaped[Array, "E _ _"],
    blocks: tuple[Int[Array, " b"], Int[Array, " b"], Int[Array, " b"], Int[Array, ""]],
    block: int,
    *,
    is_transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "n f"]:
    """Return the product of each row with the weights `[d f]` of its expert, or with the transpose of `[f d]`.

    Rows in no block are undefined. Experts without rows are not read.

    Args:
        rows: rows in the order of their experts.
        weights: weights of each expert, also in eight bits.
        blocks: expert, start and end of each block of rows, and the number of real blocks.
        block: most rows of a block, a power of two of at least 16.
        is_transposed: True to multiply with the transpose.
        interpret: True to run the kernel's operations on any device, to show its values.
    """
    (count, inner), width = rows.shape, weights.shape[1 if is_transposed else 2]
    tile, step = _tile(width, 128 if block > 32 else 64), _tile(inner, 64 if block > 32 else 128, rows.dtype)
    made: Array = pl.pallas_call(
        partial(_multiply_kernel, block=block, tile=tile, step=step, is_transposed=is_transposed),
        out_shape=jax.ShapeDtypeStruct((count, width), rows.dtype),
        grid=(pl.cdiv(width, tile), len(blocks[0])),  # neighbours share their rows
        compiler_params=plgpu.CompilerParams(num_warps=8 if block > 64 else 4, num_stages=4),
        interpret=interpret,
        name="grouped_dot",
    )(rows, weights, *blocks)
    return made


def _tile(size: int, most: int, dtype: Any = jnp.bfloat16) -> int:
    """Return a side of a tile: a power of two, in which float32 has half of the numbers that bfloat16 has."""
    return max(16, min(pl.next_power_of_2(size), most * 2 // jnp.dtype(dtype).itemsize))


def _multiply_kernel(
    rows_ref: Any, weights_ref: Any, *refs: Any, block: int, tile: int, step: int, is_transposed: bool
) -> None:
    experts_ref, starts_ref, ends_ref, num_ref, made_ref = refs
    first, own = pl.program_id(0) * tile, pl.program_id(1)
    inner, width, zero = rows_ref.shape[1], made_ref.shape[1], weights_ref.dtype.type(0)

    @pl.when(own < num_ref[...])
    def compute() -> None:
        expert = experts_ref[own]
        row = (starts_ref[own] + jax.lax.iota(jnp.int32, block))[:, None]
        column = (first + jax.lax.iota(jnp.int32, tile))[None, :]
        is_row, is_column = row < ends_ref[own], column < width

        def add(i: Array, total: Array) -> Array:
            place = i * step + jax.lax.iota(jnp.int32, step)
            across, down = place[None, :], place[:, None]
            part = plgpu.load(rows_ref.at[row, across], mask=is_row & (across < inner), other=0.0)
            at = (expert, column, down) if is_transposed else (expert, down, column)
            weights = plgpu.load(weights_ref.at[at], mask=(down < inner) & is_column, other=zero).astype(part.dtype)
            return total + multiply(part, weights, ((1,), (0,)))

        total = jax.lax.fori_loop(0, pl.cdiv(inner, step), add, jnp.zeros((block, tile), jnp.float32))
        plgpu.store(made_ref.at[row, column], total.astype(made_ref.dtype), mask=is_row & is_column)


def sum_outer_gpu(
    rows: Float[Array, "n d"],
    others: Float[Array, "n f"],
    sizes: Int[Array, " E"],
    dtype: Any,
    *,
    interpret: bool = False,
) -> Float[Array, "E d f"]:
    """Return the sum of the outer products of the rows of each expert, summed in float32; 0 of an expert without rows.

    Args:
        rows: rows in the order of their experts.
        others: rows in the same order.
        sizes: rows of each expert.
        dtype: dtype of the result.
        interpret: True to run the kernel's operations on any device, to show its values.
    """
    (inner, width), ends = (rows.shape[1], others.shape[1]), jnp.cumsum(sizes)
    high, wide, step = _tile(inner, 128), _tile(width, 128), _tile(len(rows), 64, rows.dtype)
    made: Array = pl.pallas_call(
        partial(_sum_outer_kernel, high=high, wide=wide, step=step),
        out_shape=jax.ShapeDtypeStruct((len(sizes), inner, width), dtype),
        grid=(pl.cdiv(width, wide), pl.cdiv(inner, high), len(sizes)),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=4),
        interpret=interpret,
        name="grouped_outer",
    )(rows, others, ends - sizes, ends)
    return made


def _sum_outer_kernel(
    rows_ref: Any, others_ref: Any, starts_ref: Any, ends_ref: Any, made_ref: Any, *, high: int, wide: int, step: int
) -> None:
    expert = pl.program_id(2)
    start, end = starts_ref[expert], ends_ref[expert]
    down = pl.program_id(1) * high + jax.lax.iota(jnp.int32, high)
    across = (pl.program_id(0) * wide + jax.lax.iota(jnp.int32, wide))[None, :]
    is_down, is_across = down < rows_ref.shape[1], across < others_ref.shape[1]

    def add(i: Array, total: Array) -> Array:
        row = start + i * step + jax.lax.iota(jnp.int32, step)
        is_row = row < end
        part = plgpu.load(rows_ref.at[row[None, :], down[:, None]], mask=is_row[None, :] & is_down[:, None], other=0.0)
        other = plgpu.load(others_ref.at[row[:, None], across], mask=is_row[:, None] & is_across, other=0.0)
        return total + multiply(part, other, ((1,), (0,)))

    total = jax.lax.fori_loop(0, pl.cdiv(end - start, step), add, jnp.zeros((high, wide), jnp.float32))
    at = expert, down[:, None], across
    plgpu.store(made_ref.at[at], total.astype(made_ref.dtype), mask=is_down[:, None] & is_across)
