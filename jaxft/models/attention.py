"""Rotary embeddings, and the reference of attention within whole rows.

Letters: `B` rows, `T` tokens, `S` tokens attended to, `H` query heads, `K` key/value heads, `G = H / K`, `h` head
width, `P = h / 2` pairs that a rotation turns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxft.core.reductions import rounded
from jaxft.models.config import DecoderConfig, RopeScaling


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
    x: Float[Array, "B T N h"], cos: Float[Array, "B T P"], sin: Float[Array, "B T P"], platform: str
) -> Float[Array, "B T N h"]:
    """Rotate each pair (i, i + h/2) of a head's components by its angle; the bits are the same on any `platform`."""
    pairs = x.astype(jnp.promote_types(x.dtype, cos.dtype)).reshape(*x.shape[:-1], 2, -1)  # [B T N 2 P]
    # GPUs fuse a reversal, unlike a concatenation, with what comes before and after; on CPUs it takes longer.
    swapped = jnp.concatenate([pairs[..., 1:, :], pairs[..., :1, :]], -2) if platform == "cpu" else jnp.flip(pairs, -2)
    turned = swapped * jnp.array([[-1.0], [1.0]], pairs.dtype)
    # Rounded, as XLA for CPU would make one operation of a product and the sum in some programs and not in others.
    mixed = rounded(pairs * cos[:, :, None, None, :]) + rounded(turned * sin[:, :, None, None, :])
    return mixed.reshape(x.shape).astype(x.dtype)


MASK_VALUE = -1e30
"""Score of a masked key: finite, so that a row whose keys are all masked does not give NaN."""


class HeadRows(NamedTuple):
    """Keys and values of whole rows, heads first; keys are transposed, as products want them."""

    keys: Float[Array, "B K h S"]
    values: Float[Array, "B K S h"]


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
    seen: HeadRows,
    places: Int[Array, "#B T"],
    window: int | None,
    segment_ids: Int[Array, "B T"] | None,
    chunk: int,
) -> Float[Array, "B T H h"]:
    """Return `attend` of `chunk` queries at a time, so that its memory, gradients included, is linear in tokens.

    Args:
        q: queries.
        seen: keys and values of the same tokens.
        places: position of each query among the keys.
        window: number of positions that a token sees, itself included; None for all before it.
        segment_ids: sequence of each token in packed rows; keys are those of the same tokens.
        chunk: queries of a row that are computed at once. Gradients of keys and values are summed over chunks in
            float32, as their own dtype, if bfloat16, rounds each time.
    """
    length = q.shape[1]
    keys = jnp.arange(seen.keys.shape[-1])
    wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), seen)

    def cut(x: Array) -> Array:  # [B T ...] to [T/chunk B chunk ...]
        x = jnp.pad(x, [(0, -length % chunk if i == 1 else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def attend_chunk(part: tuple[Array, Array, Array | None]) -> Array:
        q, places, segments = part
        narrow = jax.tree.map(lambda x, like: x.astype(like.dtype), wide, seen)
        return attend(q, narrow, visible_keys(places, keys, window, segments, segment_ids))

    parts = cut(q), cut(places), None if segment_ids is None else cut(segment_ids)
    mixed = jnp.moveaxis(jax.lax.map(attend_chunk, parts), 0, 1)  # [B T/chunk chunk H h]
    return mixed.reshape(q.shape[0], -1, *q.shape[2:])[:, :length]


def attend(q: Float[Array, "B T H h"], seen: HeadRows, visible: Bool[Array, "#B T S"]) -> Float[Array, "B T H h"]:
    """Return softmax attention of each token to the visible ones.

    Query heads of a group share one matrix product instead of repeating their keys and values.
    """
    rows, length, heads, head_dim = q.shape
    kv_heads = seen.keys.shape[1]
    grouped = q.reshape(rows, length, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)  # [B K G T h]
    flat = grouped.reshape(rows, kv_heads, -1, head_dim)  # [B K GT h]
    wide = jnp.promote_types(flat.dtype, jnp.float32)
    products = jnp.matmul(flat, seen.keys, preferred_element_type=wide)  # [B K GT S]
    # The float32 products are scaled, not the queries, which bfloat16 would round once more.
    products = products.reshape(*grouped.shape[:-1], -1) * head_dim**-0.5  # [B K G T S]
    scores = jnp.where(visible[:, None, None], products, MASK_VALUE)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    mass = weights.sum(axis=-1, keepdims=True)  # [B K G T 1]
    weights = weights.reshape(*flat.shape[:-1], -1).astype(q.dtype)
    mixed = jnp.matmul(weights, seen.values, preferred_element_type=wide)
    # A product with the inverse: XLA compiles a quotient to either form, and the two round differently.
    mixed = (mixed.reshape(grouped.shape) * (1.0 / mass)).astype(q.dtype)  # [B K G T h]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, head_dim)
