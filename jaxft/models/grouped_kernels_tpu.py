"""Products by expert on TPUs with weights in eight bits, which megablox refuses: a kernel in the form of its `gmm`.

A tile of weights is read in eight bits, and widened inside the TPU.
Letters: `n` rows, `E` experts, `d` input width, `f` output width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata
from jaxtyping import Array, Float, Int, Shaped

TILE_WEIGHTS = 2**21
"""Most weights of a tile."""


def multiply_tpu(
    rows: Float[Array, "n d"],
    block: int,
    weights: Shaped[Array, "E _ _"],
    sizes: Int[Array, " E"],
    *,
    is_transposed: bool = False,
) -> Float[Array, "n f"]:
    """Return the product of each row with the weights `[d f]` of its expert, or with the transpose of `[f d]`.

    Rows beyond the sum of the sizes are undefined. Experts without rows are not read.

    Args:
        rows: rows in the order of their experts, a multiple of `block`.
        block: rows of a tile.
        weights: weights of each expert.
        sizes: rows of each expert.
        is_transposed: True to multiply with the transpose.
    """
    (count, inner), width = rows.shape, weights.shape[1 if is_transposed else 2]
    tile = min(width, max(128, TILE_WEIGHTS // inner // 128 * 128))
    metadata, visits = make_group_metadata(
        group_sizes=sizes,
        m=count,
        tm=block,
        start_group=jnp.int32(0),
        num_nonzero_groups=len(sizes),
        visit_empty_groups=False,
    )

    def multiply(ends: Any, experts: Any, places: Any, rows_ref: Any, weights_ref: Any, made_ref: Any) -> None:
        visit = pl.program_id(1)
        row = places[visit] * block + jax.lax.broadcasted_iota(jnp.int32, made_ref.shape, 0)
        axes = ((1,), (1 if is_transposed else 0,)), ((), ())
        own = weights_ref[...].astype(rows_ref.dtype)
        product = jax.lax.dot_general(rows_ref[...], own, axes, preferred_element_type=jnp.float32)
        is_own = (row >= ends[experts[visit]]) & (row < ends[experts[visit] + 1])
        made_ref[...] = jnp.where(is_own, product.astype(made_ref.dtype), made_ref[...])  # others' are there already

    def weights_place(column: Any, visit: Any, ends: Any, experts: Any, places: Any) -> tuple[Any, ...]:
        return (experts[visit], column, 0) if is_transposed else (experts[visit], 0, column)

    made: Array = pl.pallas_call(
        multiply,
        out_shape=jax.ShapeDtypeStruct((count, width), rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(width, tile), visits),
            in_specs=[
                pl.BlockSpec((block, inner), lambda column, visit, ends, experts, places: (places[visit], 0)),
                pl.BlockSpec((None, tile, inner) if is_transposed else (None, inner, tile), weights_place),
            ],
            out_specs=pl.BlockSpec((block, tile), lambda column, visit, ends, experts, places: (places[visit], column)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="grouped_dot",
    )(*metadata, rows, weights)
    return made
