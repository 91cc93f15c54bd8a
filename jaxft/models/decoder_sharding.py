"""Rules that cut the parameters of a decoder over the axes of a mesh, and tables of the result."""

import math
import warnings

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxft.core.sharding import EXPERT, Rules, Sharding, path_text
from jaxft.core.types import Params
from jaxft.models.config import DecoderConfig
from jaxft.models.decoder import parameter_shapes

DECODER_RULES: Rules = (
    ("embed", ("tensor", "fsdp")),  # [V D]
    ("lm_head*", ("tensor", "fsdp")),  # [V D]
    ("router/kernel", ()),
    ("shared_expert_gate/kernel", ()),
    ("experts/down_proj/kernel*", ("expert", "tensor", "fsdp")),  # [E in out], stacked or of one layer
    ("experts/*/kernel*", ("expert", "fsdp", "tensor")),
    ("experts/down_proj/bias", ("expert", None)),  # [E out]
    ("experts/*/bias", ("expert", "tensor")),
    ("experts/down_proj/lora_a", ("expert", "tensor", None)),  # [E in rank]
    ("experts/down_proj/lora_b", ("expert", None, None)),
    ("experts/*/lora_b", ("expert", None, "tensor")),
    ("experts/*/lora_?", ("expert", None, None)),
    ("decoding_layers/*/qkv_proj/kernel*", ("tensor", "fsdp")),  # for decoding: [out in]
    ("decoding_layers/*/gate_up_proj/kernel*", ("tensor", "fsdp")),
    ("decoding_layers/*/kernel*", ("fsdp", "tensor")),
    ("qkv_proj/bias", ("tensor",)),
    ("gate_up_proj/bias", ("tensor",)),
    ("[qkv]_proj/kernel*", ("fsdp", "tensor")),  # [in out], stacked or of one layer
    ("gate_proj/kernel*", ("fsdp", "tensor")),
    ("up_proj/kernel*", ("fsdp", "tensor")),
    ("o_proj/kernel*", ("tensor", "fsdp")),
    ("down_proj/kernel*", ("tensor", "fsdp")),
    ("[qkv]_proj/bias", ("tensor",)),
    ("sinks", ("tensor",)),
    ("gate_proj/bias", ("tensor",)),
    ("up_proj/bias", ("tensor",)),
)
"""Sharding rules: heads and the feed-forward's width along `tensor`, the other side of a kernel along `fsdp`; norms are
replicated. Values and scales of a kernel in eight bits are cut alike."""

NO_AXIS = "-"


def sharding_for(config: DecoderConfig, mesh: Mesh | AbstractMesh) -> Sharding:
    """Return the sharding of a decoder on a mesh; a dimension that does not divide is replicated, with a warning.

    Raises:
        ValueError: heads do not divide over `tensor`, or experts over `expert`.
    """
    tensor = mesh.shape["tensor"]
    for name in ("num_heads", "num_kv_heads"):
        heads = getattr(config, name)
        if heads % tensor:
            raise ValueError(
                f"{name} is {heads}, which does not divide over the {tensor} devices of mesh axis 'tensor'; wanted a "
                f"divisor of {heads} there"
            )
    experts, shards = config.num_experts, mesh.shape.get(EXPERT, 1)
    if shards > 1 and (not experts or experts % shards):
        raise ValueError(
            f"num_experts is {experts}, which does not divide over the {shards} devices of mesh axis 'expert'; wanted "
            + (f"a divisor of {experts} there" if experts else "1 there, as this model is no mixture of experts")
        )
    sharding = Sharding(mesh, DECODER_RULES)
    lines = sharding.uneven(parameter_shapes(config))
    if lines:
        warnings.warn("dimensions that do not divide are replicated on every device: " + "; ".join(lines), stacklevel=2)
    return sharding


def rules_table() -> str:
    """Return the sharding rules as text: the mesh axes of the last dimensions of each parameter.

    >>> print(rules_table().splitlines()[0])
    embed                                    tensor     fsdp
    """
    lines = [
        f"{path:<40} {'  '.join(f'{axis or NO_AXIS:<9}' for axis in axes)}".rstrip() for path, axes in DECODER_RULES
    ]
    return "\n".join([*lines, f"{'all else':<40} {NO_AXIS}"])


def parameters_table(shapes: Params, sharding: Sharding) -> str:
    """Return a table of the parameters (or shapes) of a tree: shape, sharding, and MiB per device."""
    sizes = ", ".join(f"{name} {size}" for name, size in sharding.mesh.shape.items())
    lines = [f"mesh: {sizes}", f"{'parameter':<52} {'shape':<22} {'cut along':<26} {'MiB a device':>12}"]
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = path_text(path)
        of_leaf = sharding.leaf_sharding(name, leaf.shape)
        cut = ", ".join(axis or NO_AXIS for axis in of_leaf.spec) or NO_AXIS
        held = math.prod(of_leaf.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        lines.append(f"{name:<52} {leaf.shape!s:<22} {cut:<26} {held / 2**20:>12.3f}")
        total += held
    return "\n".join([*lines, f"{'in all':<102} {total / 2**20:>12.3f}"])
