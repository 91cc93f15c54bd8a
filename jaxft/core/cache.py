"""The cache of a decoder, in blocks of doubling size, so that short rows are not made to read the places of long ones.

A cache is a tuple of blocks, each made by `Model.init_cache`, which hold consecutive places. `Model.apply` takes any
leading part of it. What a token is computed from, block by block, is the same whether more blocks follow or not: they
hold nothing that it may see, and add exact zeros.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxft.core.types import Cache, Model, Params

FIRST_BLOCK = 64
"""Places of the first block; as many again in the second, and from then on doubling."""

FEWEST_BLOCKS = 2
"""Read at least, where there are more. XLA compiles the softmax over a single block in another way than over several,
and its last bits are others."""


def block_lengths(length: int) -> tuple[int, ...]:
    """The places of each block of a cache for `length` tokens a row.

    >>> block_lengths(600), block_lengths(50)
    ((64, 64, 128, 256, 88), (50,))
    """
    lengths: list[int] = []
    while (covered := sum(lengths)) < length:
        lengths.append(min(max(covered, FIRST_BLOCK), length - covered))
    return tuple(lengths)


def reaches(length: int) -> dict[int, int]:
    """How many tokens the rows may have, for each number of blocks that decoding may read, ascending.

    >>> reaches(600), reaches(50)
    ({2: 128, 3: 256, 4: 512, 5: 600}, {1: 50})
    """
    lengths = block_lengths(length)
    fewest = min(FEWEST_BLOCKS, len(lengths))
    return {count: sum(lengths[:count]) for count in range(fewest, len(lengths) + 1)}


def num_blocks_for(tokens: int, length: int) -> int:
    """How many blocks of a cache for `length` tokens hold the first `tokens` of a row; all of them if it has more.

    >>> blocks_for(128, 600), blocks_for(129, 600), blocks_for(9999, 600)
    (2, 3, 5)
    """
    counts = reaches(length)
    return next((count for count, reach in counts.items() if reach >= tokens), max(counts))


def init_cache(model: Model, rows: int, length: int, dtype: Any) -> Cache:
    """An empty cache with room for `length` tokens in each of `rows` rows.

    >>> import jaxft
    >>> model = jaxft.from_function(lambda params, tokens, positions: jax.nn.one_hot(tokens, 4))
    >>> [block.shape for block in init_cache(model, 2, 150, jnp.float32)]  # its blocks are the tokens themselves
    [(2, 64), (2, 64), (2, 22)]
    """
    return tuple(model.init_cache(rows, places, dtype) for places in block_lengths(length))


def keep_places(model: Model, cache: Cache, counts: Int[Array, "B"]) -> Cache:
    """The cache with the first `counts` places of each row as they are, and zeros in all places behind them.

    Raises:
        ValueError: the cache has an array without an axis of places.

    >>> import jaxft
    >>> model = jaxft.from_function(lambda params, tokens, positions: jax.nn.one_hot(tokens, 4))
    >>> block = jnp.array([[5, 6, 7], [5, 6, 7]])  # its blocks are the tokens themselves
    >>> [kept.tolist() for kept in keep_places(model, (block, block), jnp.array([1, 4]))]
    [[[5, 0, 0], [5, 6, 7]], [[0, 0, 0], [5, 0, 0]]]
    """
    rows = counts.shape[0]
    one, two = (jax.eval_shape(lambda places=n: model.init_cache(rows, places, jnp.float32)) for n in (1, 2))
    axes = jax.tree.map(_growing_axis, one, two)
    kept, first = [], 0
    for block in cache:
        kept.append(jax.tree.map(partial(_keep_of_leaf, counts - first), block, axes))
        first += jax.tree.leaves(block)[0].shape[jax.tree.leaves(axes)[0]]
    return tuple(kept)


def _keep_of_leaf(counts: Int[Array, "B"], leaf: Array, axis: int) -> Array:
    is_kept = jnp.arange(leaf.shape[axis]) < counts[:, None]  # [B S]
    return jnp.where(jnp.expand_dims(is_kept, [i for i in range(1, leaf.ndim) if i != axis]), leaf, 0)


def _growing_axis(one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct) -> int:
    """The axis of places, of an array whose form is the model's own affair: its length is their number."""
    for axis in range(1, one.ndim):
        if (one.shape[axis], two.shape[axis]) == (1, 2):
            return axis
    raise ValueError(
        f"init_cache makes an array {list(one.shape)} for one place of each row and {list(two.shape)} for two; wanted "
        "rows on axis 0 and, on another axis of each array of a cache, exactly as many entries as places"
    )


def compute_dtype(params: Params) -> Any:
    """The dtype that activations have with these parameters.

    >>> print(compute_dtype({"a": jnp.ones(1, jnp.bfloat16), "b": jnp.ones(1, jnp.bfloat16)}))
    bfloat16
    """
    return jnp.result_type(*[leaf.dtype for leaf in jax.tree.leaves(params)])
