"""Rotary embeddings, attention over cache blocks or fused, and the cache of keys and values.

Letters: `B` rows, `T` tokens, `S` positions of a block, `H` query heads, `K` key/value heads, `G = H / K`, `h` head
width, `P = h / 2` pairs that a rotation turns.
"""

from collections.abc import Iterable, Sequence
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

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


AMPERE, HOPPER = (8, 0), (9, 0)
"""Compute capabilities of NVIDIA's GPUs."""


def can_use_flash(dtype: Any, head_dim: int, devices: Iterable[Any]) -> bool:
    """Return True if cuDNN's fused attention supports heads of this width and dtype on all of these devices.

    The limits are those of `jax.nn.dot_product_attention`: NVIDIA's GPUs from Ampere on take heads of up to 128, those
    from Hopper on of up to 256.

    >>> can_use_flash(jnp.bfloat16, 128, jax.devices("cpu"))
    False
    """
    weakest = min(map(compute_capability, devices), default=(0, 0))
    widest = 256 if weakest >= HOPPER else 128 if weakest >= AMPERE else 0
    return dtype in (jnp.bfloat16, jnp.float16) and head_dim <= widest and head_dim % 8 == 0


def compute_capability(device: Any) -> tuple[int, ...]:
    """Return the compute capability of a CUDA GPU, such as (9, 0); (0, 0) for any other device, also AMD's GPUs.

    >>> compute_capability(jax.devices("cpu")[0])
    (0, 0)
    """
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return 0, 0
    return tuple(int(part) for part in device.compute_capability.split("."))


def flash_attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    window: int | None,
    implementation: Literal["xla", "cudnn"],
) -> Float[Array, "B T H h"]:
    """Return causal attention within rows of one sequence each, without writing the scores to memory.

    Right padding needs no mask, as no real token sees later positions.
    """
    mixed: Any = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
    return mixed


def attend(
    q: Float[Array, "B T H h"], blocks: Sequence[LayerCache], visible: Bool[Array, "B T S"]
) -> Float[Array, "B T H h"]:
    """Return softmax attention to all visible positions of all blocks.

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
    mass = reduce(jnp.add, [invariant_sum(w, decoding=length == 1) for w in weights])  # [B K G T 1]
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
