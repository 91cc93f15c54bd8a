"""Products of rows with the weights of their group, as a mixture of experts needs them, with gradients.

On CPUs a loop takes blocks of rows, each with the weights of its expert, so no more weights are read than those of
experts with rows. Weights may be in eight bits: these are widened where they are multiplied, and have no gradient.
Letters: `n` rows, `E` experts, `d` input width, `f` output width, `b` blocks.
"""

import logging
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import backends
from jaxtyping import Array, Float, Int, Shaped

from jaxft.models.flash import AMPERE, compute_capability

logger = logging.getLogger(__name__)

BLOCK_ROWS = {"cpu": (8, 32), "gpu": (16, 128)}
"""Fewest and most rows of a block, by platform; tensor cores multiply 16 at a time."""

TPU_BLOCK_ROWS = 128
"""Most rows of a tile on TPUs."""


Products = Literal["cpu", "gpu", "tpu"]
"""Form of the products: a loop, which runs anywhere, Triton kernels, or the kernels of megablox."""

LARGEST_DIFFERENCE = 0.02
"""Bound of `_difference`; one row of another expert is far above it, and rounding to bfloat16 below."""


def choose_products(device: Any, dtype: Any, weights_dtype: Any) -> Products:
    """Return the form of the products on a device: its kernels if their values are those of the loop there.

    They are compared once in a process for each dtype of rows and weights. GPUs that are not NVIDIA's, and those before
    Ampere, take the loop.
    """
    platform = device.platform
    if platform == "cpu" or (platform == "gpu" and compute_capability(device) < AMPERE):
        return "cpu"
    is_here = any(device.client is each for each in backends().values())  # and not described, to compile for
    difference = _difference(device, jnp.dtype(dtype), jnp.dtype(weights_dtype)) if is_here else 0.0
    if difference <= LARGEST_DIFFERENCE:
        return "tpu" if platform == "tpu" else "gpu"
    logger.warning(
        "products of experts are computed in a slow loop: those of the kernels differ by %.2g of their size on %s, "
        "with jax %s",
        *(difference, device.device_kind, jax.__version__),
    )
    return "cpu"


@cache
def _difference(device: Any, dtype: Any, weights_dtype: Any) -> float:
    """Return the largest difference of a value or gradient by kernels to that by the loop, relative to the largest."""
    draw, sizes = np.random.default_rng(0), np.array([40, 0, 170, 1])
    arrays = [draw.normal(size=shape).astype(dtype) for shape in ((230, 128), (4, 128, 256), (230, 256))]
    arrays[1] = (8 * arrays[1]).astype(weights_dtype)

    def gradients(products: Products, rows: Array, weights: Array, cotangent: Array) -> tuple[Array, ...]:
        made, pull = jax.vjp(lambda *given: grouped_dot(*given, jnp.asarray(sizes), products), rows, weights)
        return made, *pull(cotangent)[: 2 if weights.dtype.itemsize > 1 else 1]

    with jax.ensure_compile_time_eval(), jax.default_device(device):
        forms: tuple[Products, ...] = ("cpu", device.platform)
        exact, found = (jax.device_get(jax.jit(partial(gradients, form))(*arrays)) for form in forms)
    pairs = [(x.astype(np.float32), y.astype(np.float32)) for x, y in zip(exact, found, strict=True)]
    return float(max(np.abs(x - y).max() / np.abs(x).max() for x, y in pairs))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_dot(
    rows: Float[Array, "n d"], weights: Shaped[Array, "E d f"], sizes: Int[Array, " E"], products: Products = "cpu"
) -> Float[Array, "n f"]:
    """Return the product of each row with the weights of its expert, summed in float32.

    Rows stand in the order of their experts: the first `sizes[0]` belong to expert 0, the next `sizes[1]` to expert 1.
    An expert may have none. Rows beyond the sum of the sizes give 0, and cost nothing on CPUs and GPUs.

    Args:
        rows: rows in the order of their experts.
        weights: weights of each expert; those in eight bits have no gradient.
        sizes: rows of each expert.
        products: form of the products, which `choose_products` chooses.

    >>> jax.jit(grouped_dot)(jnp.array([[1.0]] * 3), jnp.array([[[2.0]], [[5.0]]]), jnp.array([1, 2])).tolist()
    [[2.0], [5.0], [5.0]]
    """
    return _multiply(rows, weights, sizes, products, is_transposed=False)


def _forward(rows: Array, weights: Array, sizes: Array, products: Products) -> tuple[Array, Any]:
    return grouped_dot(rows, weights, sizes, products), (rows, weights, sizes)


def _backward(products: Products, saved: Any, cotangent: Array) -> tuple[Array, Array | None, None]:
    rows, weights, sizes = saved
    of_rows = _multiply(cotangent, weights, sizes, products, is_transposed=True)
    if weights.dtype.itemsize == 1:
        return of_rows, None, None
    return of_rows, _sum_outer(rows, cotangent, sizes, products, weights.dtype), None


grouped_dot.defvjp(_forward, _backward)


def _multiply(rows: Array, weights: Array, sizes: Array, products: Products, *, is_transposed: bool) -> Array:
    """Return the product of each row with the weights of its expert, or with their transpose; 0 beyond the sizes."""
    if products == "gpu":
        from jaxft.models.grouped_kernels import multiply_gpu  # here, as importing Pallas takes half a second

        block = _block(sizes, rows, products)
        made = multiply_gpu(rows, weights, row_blocks(sizes, len(rows), block), block, is_transposed=is_transposed)
    elif products == "tpu" and weights.dtype.itemsize == 1:
        from jaxft.models.grouped_kernels_tpu import multiply_tpu  # as above

        made = multiply_tpu(*_tpu_rows(rows), weights, sizes, is_transposed=is_transposed)[: len(rows)]
    elif products == "tpu":
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # as above

        padded, tiles = _tpu_tiles(rows, (rows.shape[1], weights.shape[1 if is_transposed else 2]), 2**22)
        made = gmm(padded, weights, sizes, rows.dtype, tiles, transpose_rhs=is_transposed)[: len(rows)]
    else:
        made = multiply_cpu(rows, weights, sizes, is_transposed=is_transposed)
    return jnp.where(jnp.arange(len(rows))[:, None] < sizes.sum(), made, 0)


def _sum_outer(rows: Array, others: Array, sizes: Array, products: Products, dtype: Any) -> Float[Array, "E d f"]:
    """Return the sum of the outer products of the rows of each expert, summed in float32."""
    if products == "gpu":
        from jaxft.models.grouped_kernels import sum_outer_gpu  # as above

        return sum_outer_gpu(rows, others, sizes, dtype)
    if products == "tpu":
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm  # as above

        padded, tiles = _tpu_tiles(rows, (rows.shape[1], others.shape[1]), 2**20)
        other = jnp.pad(others, ((0, len(padded) - len(rows)), (0, 0)))
        made: Array = tgmm(padded.swapaxes(0, 1), other, sizes, dtype, tiles)
        return made
    return sum_outer_cpu(rows, others, sizes, dtype)


def _tpu_rows(rows: Array) -> tuple[Array, int]:
    """Return rows padded to whole tiles, and the rows of a tile."""
    block = min(TPU_BLOCK_ROWS, -(-len(rows) // 16) * 16)
    return jnp.pad(rows, ((0, -len(rows) % block), (0, 0))), block


def _tpu_tiles(rows: Array, sides: tuple[int, int], most: int) -> tuple[Array, tuple[int, int, int]]:
    """Return rows padded to whole tiles, and the sides of a tile: of rows, and of a matrix with so many bytes at most.

    An expert's first and last tile may have rows of others, so tiles have few rows; but their matrix is as large as the
    memory inside a TPU allows, and few are read more than once.
    """
    padded, block = _tpu_rows(rows)
    high = min(sides[0], 2048 if most > 2**20 else 512)
    wide = min(sides[1], most // rows.dtype.itemsize // high // 128 * 128)
    return padded, (block, high, wide)


class RowBlocks(NamedTuple):
    """Blocks of rows of one expert each, in the order of the rows; only the first `num_blocks` of them are real."""

    experts: Int[Array, " b"]
    starts: Int[Array, " b"]
    ends: Int[Array, " b"]
    num_blocks: Int[Array, ""]


def row_blocks(sizes: Int[Array, " E"], rows: int, block: int) -> RowBlocks:
    """Divide the rows of each expert into blocks of at most this many.

    >>> blocks = jax.device_get(jax.jit(row_blocks, static_argnums=(1, 2))(jnp.array([3, 0, 1]), 4, 2))
    >>> [each[: blocks.num_blocks].tolist() for each in blocks[:3]]
    [[0, 0, 2], [0, 2, 3], [2, 3, 4]]
    """
    experts, counts = sizes.shape[0], -(-sizes // block)
    row_ends, block_ends = jnp.cumsum(sizes), jnp.cumsum(counts)
    places = jnp.arange(min(rows, rows // block + experts))
    found = jnp.minimum((block_ends <= places[:, None]).sum(axis=1), experts - 1)
    starts = (row_ends - sizes)[found] + (places - (block_ends - counts)[found]) * block
    return RowBlocks(found, starts, jnp.minimum(starts + block, row_ends[found]), block_ends[-1])


def _contract(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)


def _block(sizes: Array, rows: Array, products: Products) -> int:
    """Return the rows of a block: about the mean of an expert, to the next power of two."""
    least, most = BLOCK_ROWS[products]
    return min(max(1 << (len(rows) // len(sizes)).bit_length(), least), most)


def multiply_cpu(rows: Array, weights: Array, sizes: Array, *, is_transposed: bool) -> Array:
    """Return the product of each row with the weights of its expert, or with their transpose."""
    block = _block(sizes, rows, "cpu")
    blocks, padded = row_blocks(sizes, len(rows), block), jnp.pad(rows, ((0, block), (0, 0)))
    axis, width = (1, weights.shape[1]) if is_transposed else (0, weights.shape[2])

    def step(i: Array, made: Array) -> Array:
        start = blocks.starts[i]
        part = jax.lax.dynamic_slice_in_dim(padded, start, block)
        own = weights[blocks.experts[i]].astype(part.dtype)
        # Of the next expert's rows the product is wrong, until that expert's block writes over it.
        return jax.lax.dynamic_update_slice_in_dim(made, _contract(part, own, (1, axis)).astype(made.dtype), start, 0)

    return jax.lax.fori_loop(0, blocks.num_blocks, step, jnp.zeros((len(padded), width), rows.dtype))[: len(rows)]


def sum_outer_cpu(rows: Array, others: Array, sizes: Array, dtype: Any) -> Float[Array, "E d f"]:
    """Return the sum of the outer products of the rows of each expert, summed in float32."""
    block = _block(sizes, rows, "cpu")
    blocks = row_blocks(sizes, len(rows), block)
    rows, others = (jnp.pad(x, ((0, block), (0, 0))) for x in (rows, others))

    def step(i: Array, sums: Array) -> Array:
        start = blocks.starts[i]
        part, other = (jax.lax.dynamic_slice_in_dim(x, start, block) for x in (rows, others))
        part = jnp.where(start + jnp.arange(block)[:, None] < blocks.ends[i], part, 0)
        return sums.at[blocks.experts[i]].add(_contract(part, other, (0, 0)))

    zeros = jnp.zeros((len(sizes), rows.shape[1], others.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, blocks.num_blocks, step, zeros).astype(dtype)
