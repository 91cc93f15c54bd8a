"""Norm of heads and rotary positions of queries or keys by one Triton kernel, with its gradient, for NVIDIA's GPUs.

XLA makes a dozen kernels of them, which read and write a layer's queries several times.
Letters: `N` tokens of all rows, `H` heads, `h` head width, `P = h / 2` pairs of components.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

BLOCK_NUMBERS, WARPS = 8192, 8
"""Most numbers of a program's block, and its warps: 32 numbers a thread."""


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def norm_and_rotate(
    x: Float[Array, "N H h"],
    scale: Float[Array, "h"],
    cos: Float[Array, "N P"],
    sin: Float[Array, "N P"],
    eps: float,
    interpret: bool = False,
) -> Float[Array, "N H h"]:
    """Return `x / rms(x) * scale` of each head, with each pair (i, i + P) rotated by its angle.

    All is computed in float32, and rounded once; the angles have no gradient.

    Args:
        x: queries or keys; `h` is a power of two.
        scale: scale of the norm.
        cos: cosines of the tokens' angles.
        sin: sines of the tokens' angles.
        eps: added to the mean of squares.
        interpret: True to run the kernel's operations on any device, to show its values.

    >>> ones, angle = jnp.ones((1, 1, 2)), jnp.full((1, 1), jnp.pi / 2)
    >>> print(norm_and_rotate(ones, jnp.array([1.0, 2.0]), jnp.cos(angle).round(), jnp.sin(angle), 0.0, True))
    [[[-2.  1.]]]
    """
    return _forward(x, scale, cos, sin, eps, interpret)[0]


def _forward(x: Array, scale: Array, cos: Array, sin: Array, eps: float, interpret: bool) -> tuple[Array, Any]:
    return _call(_forward_kernel, [x], scale, cos, sin, eps, interpret)[0], (x, scale, cos, sin)


def _backward(eps: float, interpret: bool, saved: Any, cotangent: Array) -> tuple[Array, Array, None, None]:
    x, scale, cos, sin = saved
    of_x, of_scale = _call(_backward_kernel, [x, cotangent], scale, cos, sin, eps, interpret)
    return of_x, of_scale.sum(axis=(0, 1)).astype(scale.dtype), None, None


norm_and_rotate.defvjp(_forward, _backward)


def _call(kernel: Any, arrays: list[Array], scale: Array, cos: Array, sin: Array, eps: float, interpret: bool) -> Any:
    """Return what a kernel makes: an array like `x`, and in the backward pass the scale's gradient of each block."""
    tokens, heads, width = arrays[0].shape
    of_heads = math.gcd(heads, BLOCK_NUMBERS // width)  # sides of a block are powers of two
    of_tokens = math.gcd(tokens, BLOCK_NUMBERS // width // of_heads)
    grid = tokens // of_tokens, heads // of_heads
    block = pl.BlockSpec((of_tokens, of_heads, width), lambda i, j: (i, j, 0))
    angles = pl.BlockSpec((of_tokens, width // 2), lambda i, j: (i, 0))
    made = [(block, jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype))]
    if len(arrays) > 1:
        row = pl.BlockSpec((None, None, width), lambda i, j: (i, j, 0))
        made.append((row, jax.ShapeDtypeStruct((*grid, width), jnp.float32)))
    return pl.pallas_call(
        partial(kernel, pairs=width // 2, eps=eps),
        out_shape=[shape for _, shape in made],
        grid=grid,
        in_specs=[pl.BlockSpec((width,), lambda i, j: (0,)), angles, angles, *(block for _ in arrays)],
        out_specs=[spec for spec, _ in made],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="norm_and_rotate",
    )(scale, cos, sin, *arrays)


def _halves(ref: Any, pairs: int) -> tuple[Array, Array]:
    return ref[..., :pairs].astype(jnp.float32), ref[..., pairs:].astype(jnp.float32)


def _normed(x_ref: Any, pairs: int, eps: float) -> tuple[Array, Array, Array]:
    """Return the halves of `x / rms(x)`, and `1 / rms(x)`."""
    first, second = _halves(x_ref, pairs)
    factor = jax.lax.rsqrt((first * first + second * second).sum(axis=-1, keepdims=True) / (2 * pairs) + eps)
    return first * factor, second * factor, factor


def _forward_kernel(
    scale_ref: Any, cos_ref: Any, sin_ref: Any, x_ref: Any, y_ref: Any, *, pairs: int, eps: float
) -> None:
    (scale, other_scale), cos, sin = _halves(scale_ref, pairs), cos_ref[...][:, None, :], sin_ref[...][:, None, :]
    first, second, _ = _normed(x_ref, pairs, eps)
    first, second = first * scale, second * other_scale
    y_ref[..., :pairs] = (first * cos - second * sin).astype(y_ref.dtype)
    y_ref[..., pairs:] = (second * cos + first * sin).astype(y_ref.dtype)


def _backward_kernel(
    scale_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    x_ref: Any,
    cotangent_ref: Any,
    of_x_ref: Any,
    of_scale_ref: Any,
    *,
    pairs: int,
    eps: float,
) -> None:
    (scale, other_scale), cos, sin = _halves(scale_ref, pairs), cos_ref[...][:, None, :], sin_ref[...][:, None, :]
    first, second, factor = _normed(x_ref, pairs, eps)
    given, other_given = _halves(cotangent_ref, pairs)
    given, other_given = given * cos + other_given * sin, other_given * cos - given * sin  # rotated back
    of_scale_ref[:pairs] = (given * first).sum(axis=1).sum(axis=0)
    of_scale_ref[pairs:] = (other_given * second).sum(axis=1).sum(axis=0)
    given, other_given = given * scale, other_given * other_scale
    mean = (given * first + other_given * second).sum(axis=-1, keepdims=True) / (2 * pairs)
    of_x_ref[..., :pairs] = ((given - first * mean) * factor).astype(of_x_ref.dtype)
    of_x_ref[..., pairs:] = ((other_given - second * mean) * factor).astype(of_x_ref.dtype)
