"""The key-value cache of a decoder, in blocks of doubling size, so that short rows do not pay for long ones.

A cache is a tuple of blocks, each made by `Model.init_cache`, that hold consecutive positions. `Model.apply` takes as
many of the first blocks as are needed. Additional blocks change no bit: no token attends to them, and they add exact
zeros.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxft.core.types import Cache, Model, Params

FIRST_BLOCK = 64
"""Positions in the first block. The second block has as many; then each is as long as all before it."""

FEWEST_BLOCKS = 2
"""Minimum number of blocks that a program reads, if the cache has as many: XLA compiles the softmax over a single block
differently from one over several, and the last bits differ."""


def block_lengths(length: int) -> tuple[int, ...]:
    """Return the number of positions in each block of a cache for `length` tokens per row.

    >>> block_lengths(600), block_lengths(50)
    ((64, 64, 128, 256, 88), (50,))
    """
    lengths: list[int] = []
    while (covered := sum(lengths)) < length:
        lengths.append(min(max(covered, FIRST_BLOCK), length - covered))
    return tuple(lengths)


def block_capacities(length: int) -> dict[int, int]:
    """Map each number of blocks that a program may read to the tokens per row that these blocks hold, ascending.

    >>> block_capacities(600), block_capacities(50)
    ({2: 128, 3: 256, 4: 512, 5: 600}, {1: 50})
    """
    lengths = block_lengths(length)
    fewest = min(FEWEST_BLOCKS, len(lengths))
    return {count: sum(lengths[:count]) for count in range(fewest, len(lengths) + 1)}


def num_blocks_for(tokens: int, length: int) -> int:
    """Return the fewest blocks of a cache for `length` tokens that hold `tokens` tokens per row, or else all blocks.

    >>> num_blocks_for(128, 600), num_blocks_for(129, 600), num_blocks_for(9999, 600)
    (2, 3, 5)
    """
    capacities = block_capacities(length)
    return next((count for count, capacity in capacities.items() if capacity >= tokens), max(capacities))


def init_cache(model: Model, rows: int, length: int, dtype: Any) -> Cache:
    """Make an empty cache with room for `length` tokens in each of `rows` rows.

    >>> import jaxft
    >>> model = jaxft.from_function(lambda params, tokens, positions: jax.nn.one_hot(tokens, 4))
    >>> [block.shape for block in init_cache(model, 2, 150, jnp.float32)]  # this model caches the tokens themselves
    [(2, 64), (2, 64), (2, 22)]
    """
    return tuple(model.init_cache(rows, size, dtype) for size in block_lengths(length))


def keep_positions(model: Model, cache: Cache, counts: Int[Array, "B"]) -> Cache:
    """Return the cache with zeros in all but the first `counts` positions of each row.

    Raises:
        ValueError: an array of the cache has no position axis.

    >>> import jaxft
    >>> model = jaxft.from_function(lambda params, tokens, positions: jax.nn.one_hot(tokens, 4))
    >>> block = jnp.array([[5, 6, 7], [5, 6, 7]])  # this model caches the tokens themselves
    >>> [kept.tolist() for kept in keep_positions(model, (block, block), jnp.array([1, 4]))]
    [[[5, 0, 0], [5, 6, 7]], [[0, 0, 0], [5, 0, 0]]]
    """
    rows = counts.shape[0]
    one, two = (jax.eval_shape(lambda size=n: model.init_cache(rows, size, jnp.float32)) for n in (1, 2))
    axes = jax.tree.map(_growing_axis, one, two)
    kept, first = [], 0
    for block in cache:
        kept.append(jax.tree.map(partial(_zero_from, counts - first), block, axes))
        first += jax.tree.leaves(block)[0].shape[jax.tree.leaves(axes)[0]]
    return tuple(kept)


def _zero_from(counts: Int[Array, "B"], leaf: Array, axis: int) -> Array:
    """Return the leaf with zeros from entry `counts` of each row on, along `axis`."""
    is_kept = jnp.arange(leaf.shape[axis]) < counts[:, None]  # [B S]
    return jnp.where(jnp.expand_dims(is_kept, [i for i in range(1, leaf.ndim) if i != axis]), leaf, 0)


def _growing_axis(one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct) -> int:
    """Find the position axis of a cache array, by its shapes at one and at two positions."""
    for axis in range(1, one.ndim):
        if (one.shape[axis], two.shape[axis]) == (1, 2):
            return axis
    raise ValueError(
        f"init_cache makes an array {list(one.shape)} for one position per row and {list(two.shape)} for two; wanted "
        "arrays with rows on axis 0 and another axis whose length is the number of positions"
    )


def compute_dtype(params: Params) -> Any:
    """Return the dtype of activations and cache with these parameters.

    >>> print(compute_dtype({"a": jnp.ones(1, jnp.bfloat16), "b": jnp.ones(1, jnp.bfloat16)}))
    bfloat16
    """
    return jnp.result_type(*[leaf.dtype for leaf in jax.tree.leaves(params)])
