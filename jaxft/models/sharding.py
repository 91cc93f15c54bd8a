"""Which dimension of which parameter is cut along which axis of a mesh: a short table for each family of models."""

import math
import warnings
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxft.core.mesh import Layout, Rules, path_text
from jaxft.core.types import Params
from jaxft.models.config import DecoderConfig, Family
from jaxft.models.decoder import decoder

DECODER_RULES: Rules = (
    ("embedding", ("tensor", "fsdp")),  # [V D]
    ("lm_head", ("tensor", "fsdp")),  # [V D]
    ("transposed_layers/*/[qkv]_proj/kernel", ("tensor", "fsdp")),  # to decode with: [out in]
    ("transposed_layers/*/gate_proj/kernel", ("tensor", "fsdp")),
    ("transposed_layers/*/up_proj/kernel", ("tensor", "fsdp")),
    ("transposed_layers/*/kernel", ("fsdp", "tensor")),
    ("[qkv]_proj/kernel", ("fsdp", "tensor")),  # [in out], stacked or of one layer
    ("gate_proj/kernel", ("fsdp", "tensor")),
    ("up_proj/kernel", ("fsdp", "tensor")),
    ("o_proj/kernel", ("tensor", "fsdp")),
    ("down_proj/kernel", ("tensor", "fsdp")),
    ("[qkv]_proj/bias", ("tensor",)),
    ("gate_proj/bias", ("tensor",)),
    ("up_proj/bias", ("tensor",)),
)
"""Heads and the feed-forward's width along `tensor`, the other side of every kernel along `fsdp`, norms whole."""

NO_AXIS = "-"

RULES: Mapping[Family, Rules] = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), DECODER_RULES)


def layout_of(config: DecoderConfig, mesh: Mesh | AbstractMesh, *, strict: bool = False) -> Layout:
    """How a decoder lies on a mesh. A dimension that does not divide is whole on every device, which a warning says.

    Args:
        strict: raise instead of warning.

    Raises:
        ValueError: heads do not divide over `tensor`; or, if `strict`, any dimension over its axis.
    """
    tensor = mesh.shape["tensor"]
    for name in ("num_heads", "num_kv_heads"):
        heads = getattr(config, name)
        if heads % tensor:
            raise ValueError(
                f"{name} is {heads}, which does not divide over the {tensor} devices of mesh axis 'tensor'; wanted a "
                f"divisor of {heads} there"
            )
    layout = Layout(mesh, RULES[config.family])
    lines = layout.uneven(jax.eval_shape(decoder(config).init, jax.random.key(0)))
    if lines and strict:
        raise ValueError("\n".join(lines))
    if lines:
        warnings.warn("every device holds the whole of what does not divide: " + "; ".join(lines), stacklevel=2)
    return layout


def rules_table() -> str:
    """The rules of every family as text: the mesh axes of the last dimensions of each parameter.

    >>> print(rules_table().splitlines()[1])
    embedding                                tensor     fsdp
    """
    by_rules: dict[Rules, list[str]] = {}
    for family, rules in RULES.items():
        by_rules.setdefault(rules, []).append(family)
    lines = []
    for rules, families in by_rules.items():
        lines.append(", ".join(families))
        lines += [f"{path:<40} {'  '.join(f'{axis or NO_AXIS:<9}' for axis in axes)}".rstrip() for path, axes in rules]
        lines.append(f"{'all else':<40} {NO_AXIS}")
    return "\n".join(lines)


def parameters_table(shapes: Params, layout: Layout) -> str:
    """Every parameter (or shape) of a tree with its partition and the MiB of it on each device."""
    sizes = ", ".join(f"{name} {size}" for name, size in layout.mesh.shape.items())
    lines = [f"mesh: {sizes}", f"{'parameter':<52} {'shape':<22} {'cut along':<26} {'MiB a device':>12}"]
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = path_text(path)
        sharding = layout.sharding(name, leaf.shape)
        cut = ", ".join(axis or NO_AXIS for axis in sharding.spec) or NO_AXIS
        held = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        lines.append(f"{name:<52} {leaf.shape!s:<22} {cut:<26} {held / 2**20:>12.3f}")
        total += held
    return "\n".join([*lines, f"{'in all':<102} {total / 2**20:>12.3f}"])
