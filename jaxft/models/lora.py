"""LoRA (arXiv 2106.09685): low-rank adapters beside the kernels of a frozen base; only the adapters are trained.

Parameters are `{"base": ..., "adapter": ...}`: those of a decoder, and a tree with `lora_a [L D r]` and
`lora_b [L r F]` for every projection that has an adapter. Training applies adapters beside the kernels. Decoding uses
merged kernels, made once per policy version (`Model.decode_layout`), except with a base narrower than float32, where
merging would round most of a small change away, or in eight bits.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxft.core.cache import compute_dtype
from jaxft.core.partition import ADAPTER, BASE
from jaxft.core.types import Params
from jaxft.models.config import LoraSpec
from jaxft.models.quantized import is_quantized

Leaves = dict[tuple[str, ...], Any]
"""Leaves of parameters by their paths."""

LORA_NAMES = ("lora_a", "lora_b")
"""Names of the two adapter matrices."""


def put_beside(params: Params) -> Params:
    """Put each adapter beside its kernel, in one tree; return a tree without `"base"` and `"adapter"` unchanged."""
    if BASE not in params:
        return params
    return unflatten_dict({**flatten_dict(params[BASE]), **flatten_dict(params[ADAPTER])})


def joined_adapter(lora: LoraSpec | None, paths: Sequence[str]) -> LoraSpec | None:
    """Return the spec of the adapter of joined projections, or of a single one; None if none of them has one.

    >>> joined_adapter(LoraSpec(8, 16.0, ("q_proj", "v_proj")), ["self_attn/q_proj", "self_attn/v_proj"])
    LoraSpec(rank=16, alpha=32.0, targets=('*_proj',), use_rslora=False)
    """
    count = 0 if lora is None else sum(map(lora.is_target, paths))
    return None if lora is None or not count else LoraSpec(count * lora.rank, count * lora.rank * lora.scale)


def has_adapters(layer: Params) -> bool:
    """Return True if the parameters of a layer hold an adapter."""
    return any(path[-1] in LORA_NAMES for path in flatten_dict(layer))


def merge_or_put_beside(lora: LoraSpec, params: Params) -> Params:
    """Return the weights to decode with: merged kernels, or adapters in the dtype of a base narrower than float32.

    Beside kernels in eight bits they have that of the rest of the base.
    """
    dtype = compute_dtype(params[BASE])
    if jnp.dtype(dtype).itemsize >= jnp.dtype(jnp.float32).itemsize and not is_quantized(params[BASE]):
        return merge_lora(lora, params)
    return put_beside({**params, ADAPTER: jax.tree.map(lambda leaf: leaf.astype(dtype), params[ADAPTER])})


def merge_lora(lora: LoraSpec, params: Params) -> Params:
    """Merge adapters: return the parameters of the model without adapters, with kernels `W + scale A B`."""
    return merge_and_drop(lora, flatten_dict(params[BASE]), flatten_dict(params[ADAPTER]))


def merge_and_drop(lora: LoraSpec, base: Leaves, adapter: Leaves, dtype: Any = None) -> Params:
    """Merge adapters leaf by leaf, and take each leaf out of `base`, so that the device has few of them twice.

    Args:
        lora: settings of the adapters.
        base: leaves of the base; empty afterwards.
        adapter: leaves of the adapters.
        dtype: dtype of the result; None for that of each leaf.
    """
    merged: Leaves = {}
    for path in list(base):
        leaf = base.pop(path)
        merged[path] = _merge_leaf(lora, path, leaf, adapter).astype(leaf.dtype if dtype is None else dtype)
    return unflatten_dict(merged)


def _merge_leaf(lora: LoraSpec, path: tuple[str, ...], leaf: Any, adapter: Leaves) -> Any:
    """Return a leaf of the base, in its dtype, with its adapter if it is a kernel that has one."""
    a, b = (adapter.get((*path[:-1], name)) for name in LORA_NAMES)
    if path[-1] != "kernel" or a is None or b is None:
        return leaf
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    delta = jnp.matmul(a.astype(wide), b.astype(wide), precision="highest")  # affordable once per policy version
    return (leaf + lora.scale * delta).astype(leaf.dtype)
