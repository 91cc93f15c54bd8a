"""The cache of a decoder, in blocks of doubling size, so that short rows are not made to read the places of long ones.

A cache is a tuple of blocks, each made by `Model.init_cache`, which hold consecutive places. `Model.apply` takes any
leading part of it. What a token is computed from, block by block, is the same whether more blocks follow or not: they
hold nothing that it may see, and add exact zeros.
"""

from typing import Any

import jax
import jax.numpy as jnp

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


def blocks_for(tokens: int, length: int) -> int:
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


def compute_dtype(params: Params) -> Any:
    """The dtype that activations have with these parameters.

    >>> print(compute_dtype({"a": jnp.ones(1, jnp.bfloat16), "b": jnp.ones(1, jnp.bfloat16)}))
    bfloat16
    """
    return jnp.result_type(*[leaf.dtype for leaf in jax.tree.leaves(params)])
