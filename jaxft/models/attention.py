"""Attention, the keys and values that it keeps, and the forms in which it is fast: in blocks, or fused.

Letters: `B` rows, `T` tokens, `S` places of a block, `H` query heads, `K` key/value heads, `G = H / K`, `h` head width.
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
    """Cosines and sines of the rotary angles (arXiv 2104.09864), one per pair of a head's components."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = stretch_frequencies(frequencies, config.rope_scaling)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def stretch_frequencies(frequencies: Float[np.ndarray, "P"], scaling: RopeScaling) -> Float[np.ndarray, "P"]:
    """Llama 3.1's rotary frequencies (arXiv 2407.21783): long wavelengths slowed by `factor`, short ones kept."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)


def rotate(
    x: Float[Array, "B T N h"], cos: Float[Array, "B T P"], sin: Float[Array, "B T P"]
) -> Float[Array, "B T N h"]:
    """Turns each pair (i, i + h/2) of a head's components by its angle."""
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, cos.dtype)), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


MASK_VALUE = -1e30
"""Score of a key that may not be seen: finite, so that a row that sees nothing gives numbers and not NaN."""


class LayerCache(NamedTuple):
    """Keys and values of one layer, rows first. Keys lie transposed: decoding multiplies by them 8 times faster."""

    keys: Float[Array, "B K h S"]
    values: Float[Array, "B K S h"]


LayerBlocks = list[LayerCache]
"""The blocks of one layer, in the order of their places."""


AMPERE, HOPPER = (8, 0), (9, 0)
"""Compute capabilities of NVIDIA's GPUs."""


def can_use_flash(dtype: Any, head_dim: int, devices: Iterable[Any]) -> bool:
    """Whether cuDNN's fused attention takes heads of this width and type on all of these devices: NVIDIA's from Ampere
    on, with heads of up to 128, and from Hopper on up to 256 (as `jax.nn.dot_product_attention` asks).

    >>> can_use_flash(jnp.bfloat16, 128, jax.devices("cpu"))
    False
    """
    weakest = min(map(compute_capability, devices), default=(0, 0))
    widest = 256 if weakest >= HOPPER else 128 if weakest >= AMPERE else 0
    return dtype in (jnp.bfloat16, jnp.float16) and head_dim <= widest and head_dim % 8 == 0


def compute_capability(device: Any) -> tuple[int, ...]:
    """The compute capability of a GPU under CUDA, such as (9, 0); (0, 0) of any other device, AMD's GPUs among them.

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
    """Causal attention within rows that are one sequence each, never writing the scores. Right padding needs no mask:
    it is behind all that sees anything real."""
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
    """Softmax attention to all places of all blocks.

    Heads of a group share one matrix product instead of repeating their keys and values. Each block is computed by
    itself and added to those before it, so that blocks that a row sees nothing of change no bit of what it gets.
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
        # The products are scaled, which are float32, and not the queries, which bfloat16 would round once more.
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
    # As a product: a quotient is compiled to one or the other as it comes, and they round differently.
    mixed = (reduce(jnp.add, parts).reshape(grouped.shape) * (1.0 / mass)).astype(q.dtype)  # [B K G T h]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, head_dim)


def write_token(blocks: LayerBlocks, now: LayerCache, positions: Int[Array, "B"]) -> LayerBlocks:
    """The blocks with the keys and values of one token put at each row's own place."""
    rows, written, first = jnp.arange(positions.shape[0]), [], 0
    for block in blocks:
        size = block.keys.shape[-1]
        place = positions - first
        place = jnp.where(place < 0, size, place)  # what lies outside is dropped
        keys = block.keys.at[rows, :, :, place].set(now.keys[..., 0].astype(block.keys.dtype), mode="drop")
        values = block.values.at[rows, :, place].set(now.values[:, :, 0].astype(block.values.dtype), mode="drop")
        written.append(LayerCache(keys, values))
        first += size
    return written


def write_tokens(cache: LayerCache, now: LayerCache, starts: Int[Array, "B"]) -> LayerCache:
    """The cache with the keys and values of consecutive tokens put at each row's own place, as far as there is one."""
    size, length = cache.keys.shape[-1], now.keys.shape[-1]

    def put(row: Array, new: Array, start: Int[Array, ""], axis: int) -> Array:
        room = jnp.pad(row, [(0, length if i == axis else 0) for i in range(row.ndim)])
        moved = jax.lax.dynamic_update_slice_in_dim(room, new.astype(row.dtype), start, axis)
        return jax.lax.slice_in_dim(moved, 0, size, axis=axis)

    return LayerCache(
        jax.vmap(partial(put, axis=2))(cache.keys, now.keys, starts),
        jax.vmap(partial(put, axis=1))(cache.values, now.values, starts),
    )


def joined(blocks: LayerBlocks) -> LayerCache:
    """All places of all blocks in one."""
    return LayerCache(
        jnp.concatenate([block.keys for block in blocks], axis=-1),
        jnp.concatenate([block.values for block in blocks], axis=-2),
    )


def parted(cache: LayerCache, sizes: Sequence[int]) -> LayerBlocks:
    """The inverse of `joined`."""
    ends = np.cumsum(sizes)[:-1]
    keys, values = jnp.split(cache.keys, ends, axis=-1), jnp.split(cache.values, ends, axis=-2)
    return [LayerCache(*block) for block in zip(keys, values, strict=True)]
