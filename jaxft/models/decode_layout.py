"""The layout of a layer's weights for decoding: projections of the same input are joined, and kernels transposed.

A step of decoding reads all weights for a few tokens, so that fewer and larger products take less time. Outputs of a
joined product are ordered by shards of the heads (mesh axis `tensor`), and within a shard by projection: each device
has the queries, keys and values of its own heads.
Letters: `D` input width, `F` output width, `r` rank of an adapter.
"""

from collections.abc import Sequence
from itertools import accumulate

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxft.core.sharding import Sharding
from jaxft.core.types import Params
from jaxft.models.config import DecoderConfig

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Projections that are joined, to `qkv_proj` and to `gate_up_proj`."""


def head_shards(sharding: Sharding | None, size: int) -> int:
    """Return the size of mesh axis `tensor`, or 1 if it does not divide so many heads or columns."""
    shards = 1 if sharding is None else sharding.mesh.shape["tensor"]
    return 1 if size % shards else shards


def split_outputs(y: Float[Array, "*N F"], shards: int, sizes: Sequence[int]) -> list[Float[Array, "*N _"]]:
    """Split the output of a joined product into those of its projections, which have these sizes.

    >>> print(*split_outputs(jnp.arange(6.0), 2, (4, 2)))
    [0. 1. 3. 4.] [2. 5.]
    """
    cut = y.reshape(*y.shape[:-1], shards, -1)
    ends = [end // shards for end in accumulate(sizes)]
    return [part.reshape(*y.shape[:-1], -1) for part in jnp.split(cut, ends[:-1], axis=-1)]


def join_outputs(parts: Sequence[Float[Array, "*N _"]], shards: int) -> Float[Array, "*N F"]:
    """Invert `split_outputs`.

    >>> print(join_outputs([jnp.array([0.0, 1, 3, 4]), jnp.array([2.0, 5])], 2))
    [0. 1. 2. 3. 4. 5.]
    """
    joined = jnp.concatenate([x.reshape(*x.shape[:-1], shards, -1) for x in parts], axis=-1)
    return joined.reshape(*joined.shape[:-2], -1)


def join_projections(projections: Sequence[Params], shards: int) -> Params:
    """Return the projection that computes all of these; adapters become one, with blocks of zeros in its `lora_b`.

    >>> one, two = {"kernel": jnp.ones((3, 2))}, {"kernel": jnp.ones((3, 4))}
    >>> adapter = {"lora_a": jnp.ones((3, 1)), "lora_b": jnp.ones((1, 4))}
    >>> joined = join_projections([one, two | adapter], 1)
    >>> joined["kernel"].shape, joined["lora_b"].tolist()
    ((3, 6), [[0.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    """
    joined = {"kernel": join_outputs([each["kernel"] for each in projections], shards)}
    if "bias" in projections[0]:
        joined["bias"] = join_outputs([each["bias"] for each in projections], shards)
    adapters = [each["lora_a"] for each in projections if "lora_a" in each]
    if adapters:
        ends = list(accumulate(a.shape[-1] for a in adapters))
        blocks, starts = [], iter([0, *ends])
        for each in projections:
            block = jnp.zeros((ends[-1], each["kernel"].shape[-1]), adapters[0].dtype)
            if "lora_b" in each:
                start = next(starts)
                block = block.at[start : start + len(each["lora_b"])].set(each["lora_b"])
            blocks.append(block)
        joined |= {"lora_a": jnp.concatenate(adapters, axis=-1), "lora_b": join_outputs(blocks, shards)}
    return joined


def decoding_layer(layer: Params, config: DecoderConfig, sharding: Sharding | None) -> Params:
    """Return the parameters of a layer with joined projections and norms of heads, and transposed kernels.

    Args:
        layer: parameters of one layer.
        config: config of the model.
        sharding: sharding of the model, or None for one device.
    """
    attention, mlp = dict(layer["self_attn"]), dict(layer["mlp"])
    heads = config.num_heads, config.num_kv_heads
    shards = head_shards(sharding, config.num_kv_heads)
    attention["qkv_proj"] = join_projections([attention.pop(name) for name in QKV], shards)
    if config.qk_norm == "heads":
        scales = [attention.pop(name)["scale"] for name in ("q_norm", "k_norm")]
        each = [jnp.broadcast_to(x, (n // shards, *x.shape)) for x, n in zip(scales, heads, strict=True)]
        attention["qk_norm"] = {"scale": jnp.concatenate(each)}
    shards = head_shards(sharding, mlp["up_proj"]["kernel"].shape[-1])
    mlp["gate_up_proj"] = join_projections([mlp.pop(name) for name in GATE_UP], shards)
    joined = {**layer, "self_attn": attention, "mlp": mlp}
    for part in (attention, mlp):
        for name, projection in part.items():
            if "kernel" in projection:
                part[name] = {**projection, "kernel": projection["kernel"].T}
    return joined
