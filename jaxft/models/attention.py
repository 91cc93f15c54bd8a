"""Rotary embeddings, attention over cache blocks, and the cache of keys and values.

Letters: `B` rows, `T` tokens, `S` positions of a block, `H` query heads, `K` key/value heads, `G = H / K`, `h` head
width, `P = h / 2` pairs that a rotation turns.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxft.models.config import DecoderConfig, RopeScaling
from jaxft.models.layers import invariant_sum


def rotary(config: DecoderConfig, positions: Int[Array, "B T"]) -> tuple[Float[Array, "B T P"], Float[Array, "B T P"]]:
    """Return cosines and sines of the rotary angles (arXiv 2104.09864), one per pair of a head's components."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = stretch_frequencies(frequencies, config.rope_scaling)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def stretch_frequencies(frequencies: Float[np.ndarray, "P"], scaling: RopeScaling) -> Float[np.ndarray, "P"]:
    """Scale rotary frequencies as Llama 3.1 (arXiv 2407.21783): long wavelengths by `1 / factor`, short ones not."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)


def rotate(
    x: Float[Array, "B T N h"], cos: Float[Array, "B T P"], sin: Float[Array, "B T P"]
) -> Float[Array, "B T N h"]:
    """Rotate each pair (i, i + h/2) of a head's components by its angle."""
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, cos.dtype)), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


MASK_VALUE = -1e30
"""Score of a masked key: finite, so that a row whose keys are all masked does not give NaN."""


class LayerCache(NamedTuple):
    """Keys and values of one layer, rows first; keys are transposed, which makes decoding's product 8 times faster."""

    keys: Float[Array, "B K h S"]
    values: Float[Array, "B K S h"]


LayerBlocks = list[LayerCache]
"""Cache blocks of one layer, in the order of their positions."""


def visible_keys(
    places: Int[Array, "#B T"],
    keys: Int[Array, "S"],
    window: int | None,
    query_segments: Int[Array, "B T"] | None = None,
    key_segments: Int[Array, "B S"] | None = None,
) -> Bool[Array, "#B T S"]:
    """Return which keys each query sees: its own place and earlier ones of its segment, within the window.

    >>> visible_keys(jnp.array([[1, 2]]), jnp.arange(3), 2).astype(int).tolist()
    [[[1, 1, 0], [0, 1, 1]]]
    """
    distance = places[:, :, None] - keys[None, None, :]  # [B T S]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if query_segments is not None and key_segments is not None:
        visible &= query_segments[:, :, None] == key_segments[:, None, :]
    return visible


MOST_SCORES = 2**28
"""Number of scores, on each device, from which on attention goes over its queries in chunks; 1 GiB in float32."""


def chunk_of(shape: Sequence[int], keys: int, devices: int) -> int:
    """Return how many queries of a row may be computed at once, for queries `[B T H ...]` that see this many keys.

    >>> chunk_of((8, 1024, 16), 1024, devices=1), chunk_of((8, 3072, 16), 3072, devices=1)
    (1024, 615)
    """
    rows, length, heads = shape[:3]
    most = max(1, MOST_SCORES * devices // (rows * heads * keys))
    chunks = -(-length // most)
    return -(-length // chunks)


def attend_in_chunks(
    q: Float[Array, "B T H h"],
    blocks: Sequence[LayerCache],
    places: Int[Array, "#B T"],
    window: int | None,
    segment_ids: Int[Array, "B T"] | None,
    chunk: int,
    *,
    is_trained: bool,
) -> Float[Array, "B T H h"]:
    """Return `attend` of `chunk` queries at a time, so that its memory, gradients included, is linear in tokens.

    Args:
        q: queries.
        blocks: keys and values of all positions.
        places: position of each query among the keys.
        window: number of positions that a token sees, itself included; None for all before it.
        segment_ids: sequence of each token in packed rows; keys are those of the same tokens.
        chunk: queries of a row that are computed at once.
        is_trained: True to sum the gradients of keys and values over chunks in float32, for which they are copied;
            their own dtype, if bfloat16, rounds each time.
    """
    length = q.shape[1]
    keys = jnp.arange(sum(block.keys.shape[-1] for block in blocks))
    own = list(blocks)
    wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), own) if is_trained else own

    def cut(x: Array) -> Array:  # [B T ...] to [T/chunk B chunk ...]
        x = jnp.pad(x, [(0, -length % chunk if i == 1 else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def attend_chunk(part: tuple[Array, Array, Array | None]) -> Array:
        q, places, segments = part
        narrow = jax.tree.map(lambda x, like: x.astype(like.dtype), wide, own)
        return attend(q, narrow, visible_keys(places, keys, window, segments, segment_ids))

    parts = cut(q), cut(places), None if segment_ids is None else cut(segment_ids)
    mixed = jnp.moveaxis(jax.lax.map(attend_chunk, parts), 0, 1)  # [B T/chunk chunk H h]
    return mixed.reshape(q.shape[0], -1, *q.shape[2:])[:, :length]


def attend(
    q: Float[Array, "B T H h"],
    blocks: Sequence[LayerCache],
    visible: Bool[Array, "#B T S"],
    *,
    in_halves: bool = False,
) -> Float[Array, "B T H h"]:
    """Return softmax attention to all visible positions of all blocks; `in_halves` is that of `invariant_sum`.

    Query heads of a group share one matrix product instead of repeating their keys and values. Blocks are computed one
    by one and added up, so that a block in which a row sees nothing changes no bit of its result.
    """
    rows, length, heads, head_dim = q.shape
    kv_heads = blocks[0].keys.shape[1]
    grouped = q.reshape(rows, length, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)  # [B K G T h]
    flat = grouped.reshape(rows, kv_heads, -1, head_dim)  # [B K GT h]
    wide = jnp.promote_types(flat.dtype, jnp.float32)
    scores, first = [], 0
    for block in blocks:
        seen = visible[..., first : first + block.keys.shape[-1]]  # [B T S] of this block
        products = jnp.matmul(flat, block.keys, preferred_element_type=wide)  # [B K GT S]
        # The float32 products are scaled, not the queries, which bfloat16 would round once more.
        products = products.reshape(*grouped.shape[:-1], -1) * head_dim**-0.5  # [B K G T S]
        scores.append(jnp.where(seen[:, None, None], products, MASK_VALUE))
        first += block.keys.shape[-1]
    largest = jax.lax.stop_gradient(reduce(jnp.maximum, [s.max(axis=-1, keepdims=True) for s in scores]))
    weights = [jnp.exp(s - largest) for s in scores]
    mass = reduce(jnp.add, [invariant_sum(w, in_halves=in_halves) for w in weights])  # [B K G T 1]
    parts = [
        jnp.matmul(w.reshape(*flat.shape[:-1], -1).astype(q.dtype), block.values, preferred_element_type=wide)
        for w, block in zip(weights, blocks, strict=True)
    ]
    # A product with the inverse: XLA compiles a quotient to either form, and the two round differently.
    mixed = (reduce(jnp.add, parts).reshape(grouped.shape) * (1.0 / mass)).astype(q.dtype)  # [B K G T h]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, head_dim)


def write_token(blocks: LayerBlocks, now: LayerCache, positions: Int[Array, "B"]) -> LayerBlocks:
    """Write the keys and values of one token per row into the blocks, at the row's own position."""
    rows, written, first = jnp.arange(positions.shape[0]), [], 0
    for block in blocks:
        size = block.keys.shape[-1]
        place = positions - first
        place = jnp.where(place < 0, size, place)  # positions outside of the block are dropped
        keys = block.keys.at[rows, :, :, place].set(now.keys[..., 0].astype(block.keys.dtype), mode="drop")
        values = block.values.at[rows, :, place].set(now.values[:, :, 0].astype(block.values.dtype), mode="drop")
        written.append(LayerCache(keys, values))
        first += size
    return written


def write_tokens(cache: LayerCache, now: LayerCache, starts: Int[Array, "B"]) -> LayerCache:
    """Write the keys and values of consecutive tokens from each row's own start on; tokens past the end are dropped."""
    size, length = cache.keys.shape[-1], now.keys.shape[-1]

    def put(row: Array, new: Array, start: Int[Array, ""], axis: int) -> Array:
        room = jnp.pad(row, [(0, length if i == axis else 0) for i in range(row.ndim)])
        moved = jax.lax.dynamic_update_slice_in_dim(room, new.astype(row.dtype), start, axis)
        return jax.lax.slice_in_dim(moved, 0, size, axis=axis)

    return LayerCache(
        jax.vmap(partial(put, axis=2))(cache.keys, now.keys, starts),
        jax.vmap(partial(put, axis=1))(cache.values, now.values, starts),
    )


def join_blocks(blocks: LayerBlocks) -> LayerCache:
    """Concatenate all blocks to one along positions."""
    return LayerCache(
        jnp.concatenate([block.keys for block in blocks], axis=-1),
        jnp.concatenate([block.values for block in blocks], axis=-2),
    )


def split_blocks(cache: LayerCache, sizes: Sequence[int]) -> LayerBlocks:
    """Invert `join_blocks`."""
    ends = np.cumsum(sizes)[:-1]
    keys, values = jnp.split(cache.keys, ends, axis=-1), jnp.split(cache.values, ends, axis=-2)
    return [LayerCache(*block) for block in zip(keys, values, strict=True)]
