"""The rotary angles of tokens (arXiv 2104.09864), and the rotation of queries and keys by them.

Letters: `B` rows, `T` tokens, `N` heads, `h` head width, `P` pairs of a head's components that a rotation turns.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxft.core.reductions import rounded
from jaxft.models.rope import LinearScaling, Rope


class Angles(NamedTuple):
    """Cosines and sines of the rotary angles of tokens, and the factor of their queries if it is not 1."""

    cos: Float[Array, "B T P"]
    sin: Float[Array, "B T P"]
    query_factor: Float[Array, "B T"] | None = None


def angles_of(rope: Rope, head_dim: int, positions: Int[Array, "B T"]) -> Angles:
    """Return the rotary angles of tokens at these positions."""
    frequencies = jnp.asarray(rope.frequencies(head_dim), jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.scaling is None:
        return Angles(cos, sin)
    if rope.scaling.angle_factor != 1:
        cos, sin = cos * rope.scaling.angle_factor, sin * rope.scaling.angle_factor
    if not rope.query_growth or isinstance(rope.scaling, LinearScaling):
        return Angles(cos, sin)
    spans = jnp.maximum(positions, 0) // rope.scaling.original_max_position_embeddings
    return Angles(cos, sin, 1 + rope.query_growth * jnp.log(1 + spans.astype(jnp.float32)))


def rotate(x: Float[Array, "B T N h"], angles: Angles, platform: str) -> Float[Array, "B T N h"]:
    """Rotate each pair (i, i + P) of the first 2 P components by its angle; the bits are the same on any `platform`."""
    turned_width = 2 * angles.cos.shape[-1]
    if turned_width < x.shape[-1]:
        turned = rotate(x[..., :turned_width], angles, platform)
        return jnp.concatenate([turned, x[..., turned_width:]], axis=-1)
    pairs = x.astype(jnp.promote_types(x.dtype, angles.cos.dtype)).reshape(*x.shape[:-1], 2, -1)  # [B T N 2 P]
    # GPUs fuse a reversal, unlike a concatenation, with what comes before and after; on CPUs it takes longer.
    swapped = jnp.concatenate([pairs[..., 1:, :], pairs[..., :1, :]], -2) if platform == "cpu" else jnp.flip(pairs, -2)
    turned = swapped * jnp.array([[-1.0], [1.0]], pairs.dtype)
    # Rounded, as XLA for CPU would make one operation of a product and the sum in some programs and not in others.
    mixed = rounded(pairs * angles.cos[:, :, None, None, :]) + rounded(turned * angles.sin[:, :, None, None, :])
    return mixed.reshape(x.shape).astype(x.dtype)
