"""Kernels in eight bits, with a scale for each output channel; products compute in the dtype of the activations.

Only the weights are narrow, as in W8A16. XLA reads them in eight bits and widens them inside the product, on GPUs and
on TPUs, so that a step of decoding moves half of bfloat16's bytes; the scale multiplies the product. Embedding, head,
norms, biases, adapters, and a mixture's routers are not quantised; products of experts are `jaxft.models.grouped`'s.
Letters: `D` input width, `F` output width, `N` tokens of all rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from jaxft.core.types import Params
from jaxft.models.config import is_quantizable

EIGHT_BITS: dict[str, tuple[Any, float]] = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}
"""Dtype and largest value of each kind of number in eight bits."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A kernel `values * scale`, in the place of an array; leading axes, as of layers or experts, are its own.

    Attributes:
        values: the kernel in eight bits.
        scale: one number for each output channel, with length 1 on the axis of inputs; its dtype is the kernel's.
    """

    values: Any  # [... D F], transposed [F D]
    scale: Any  # [... 1 F], transposed [F 1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the kernel that this stands for."""
        return self.scale.dtype

    @property
    def T(self) -> "Quantized":
        """The kernel transposed."""
        return Quantized(self.values.T, self.scale.T)

    def __getitem__(self, index: Any) -> "Quantized":
        """Return the kernel of a layer, or the first rows of kernels."""
        return Quantized(self.values[index], self.scale[index])


def quantize(kernel: Float[Array, "*L D F"], kind: str, dtype: Any = None) -> Quantized:
    """Return a kernel in eight bits, each output channel divided by `max |w| / largest value` and rounded to nearest.

    A scale is rounded to its dtype before it divides, so it adds no error, and a kernel that was quantised before is
    found again. Channels with a NaN or an infinity stay not finite, by their scale.

    Args:
        kernel: the kernel.
        kind: "int8" or "fp8".
        dtype: dtype of the scales; None for the kernel's.

    >>> kernel = quantize(jnp.array([[127.0, 1.0], [-3.4, 0.0]]), "int8")
    >>> kernel.values.tolist(), dequantized(kernel).round().tolist()
    ([[127, 127], [-3, 0]], [[127.0, 1.0], [-3.0, 0.0]])
    """
    narrow, largest = EIGHT_BITS[kind]
    wide = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32))
    scale = (jnp.abs(wide).max(axis=-2, keepdims=True) / largest).astype(kernel.dtype if dtype is None else dtype)
    steps = jnp.clip(wide / jnp.where(scale == 0, 1, scale), -largest, largest)
    return Quantized((jnp.round(steps) if kind == "int8" else steps).astype(narrow), scale)


def dequantized(kernel: Any) -> Any:
    """Return a kernel as an array of its dtype; arrays are returned as they are."""
    if not isinstance(kernel, Quantized):
        return kernel
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    return (kernel.values.astype(wide) * kernel.scale.astype(wide)).astype(kernel.dtype)


def narrowed(x: Float[Array, "*n"], dtype: Any) -> Float[Array, "*n"]:
    """Return keys or values as a cache of this dtype has them, without a scale: in fp8 its largest at most, never NaN.

    >>> narrowed(jnp.array([1.05, -500.0]), jnp.float8_e4m3fn).tolist()
    [1.0, -448.0]
    """
    largest = EIGHT_BITS["fp8"][1]
    return jnp.clip(x, -largest, largest).astype(dtype) if jnp.dtype(dtype).itemsize == 1 else x


def scaled_product(x: Float[Array, "N D"], kernel: Quantized) -> Float[Array, "N F"]:
    """Return `x @ (values * scale)`, with the scale on the product; its gradient is that of `x` alone."""
    return (x @ kernel.values.astype(x.dtype)) * kernel.scale[0].astype(x.dtype)


def is_quantized(tree: Any) -> bool:
    """True if a kernel of a tree is in eight bits."""
    return any(isinstance(leaf, Quantized) for leaf in jax.tree.leaves(tree, is_leaf=_is_kernel))


def map_kernels(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with `function` applied to its leaves, of which a quantised kernel is one."""
    return jax.tree.map(function, tree, is_leaf=_is_kernel)


def with_quantized_kernels(params: Params, kind: str, dtype: Any = None) -> Params:
    """Return parameters, stacked by layer and without adapters, whose layers have kernels in eight bits.

    Args:
        params: the parameters; kernels that are in eight bits already stay as they are.
        kind: "int8" or "fp8".
        dtype: dtype of the scales; None for that of each kernel.
    """
    layers = {
        path: quantize(leaf, kind, dtype) if is_quantizable(path) and not isinstance(leaf, Quantized) else leaf
        for path, leaf in flatten_dict(params["layers"]).items()
    }
    return {**params, "layers": unflatten_dict(layers)}


def _is_kernel(leaf: Any) -> bool:
    return isinstance(leaf, Quantized)
