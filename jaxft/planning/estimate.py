"""Memory of a run's compiled programs, estimated by arithmetic from shapes and sharding rules, without a compiler.

An update's gradient has three moments that need much memory: the backward pass of the head, with logits of one chunk
and the head's gradient in float32, the backward pass of a layer, with all that was recomputed of it, and, where layers
are scanned and several kinds take turns, the forward pass of a turn. All find the activations that all layers have
kept, and the weights in the dtype of products. Estimates are sums of such arrays, in the order in which the program
makes them. They promise to be within 25 % of the compilers' figures; for updates, they miss none of the cases of
`tests/planning/test_estimate.py` by more than 20 %. Along `expert` GPUs were seen to hold the rows of two layers at
once, which is 22 % more, or of less than one, which is 29 % less. Attention is that of fused kernels, and all bytes are
those of one device.
Letters: `B` rows, `T` tokens, `D` hidden, `F` feed-forward, `H` query heads, `K` key/value heads, `h` head width, `L`
layers, `V` vocabulary.
"""

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxft import DecoderConfig, LoraSpec, Sharding
from jaxft.core import ADAPTER, BASE, SLICE_LOGITS, default_chunk_tokens, device_bytes, takes_fused_head
from jaxft.models import (
    MOST_SEGMENTS,
    Kernel,
    Remat,
    block_weights,
    head_weights,
    layer_runs,
    parameter_shapes,
    projection_shapes,
)
from jaxft.rollout import prefill_programs

Platform = Literal["gpu", "tpu"]

MIB = 2**20

FLOAT32 = 4
"""Bytes of a number."""

VMEM_BYTES = 112 * MIB
"""On-chip memory of a TPU that the compiler places arrays in, and counts among the temporaries."""

BESIDE_HEAP_BYTES = 700 * MIB
"""Bytes that `memory_analysis()` says of an update for TPUs beyond the heap of the buffer assignment: 0.5 to 1.0 GiB in
the cases of the tests, VMEM among them, the rest unknown. `peak_memory_in_bytes` is without them."""


class Activations(NamedTuple):
    """Bytes of one layer's activations `[B T ...]` on a device, by their width."""

    hidden: int  # D
    queries: int  # H h
    keys: int  # K h, as large as values
    wide: int  # F, of a mixture that of all experts of a token
    routed: int  # k D, of a mixture: rows in the order of their experts, and as many outputs; along `expert` of all
    normalizers: int  # H, float32: log-sum-exp of a row of scores; cuDNN has them for each segment

    def kept(self, remat: Remat, everything: int) -> int:
        """Return the bytes that a layer keeps for its backward pass.

        Args:
            remat: checkpoint policy.
            everything: bytes of all that the layer computes, each step by itself.
        """
        full = self.hidden  # the input
        attention = full + self.queries + self.normalizers  # and the results of the kernel
        projections = attention + self.queries + 2 * self.keys + self.hidden  # and of the projections around it
        dots = projections + 2 * self.wide  # and gate and up; no gradient needs the result of down
        kept = {"none": everything, "dots": dots, "projections": projections, "attention": attention}
        return kept.get(remat, full)


class UpdateBytes(NamedTuple):
    """Temporaries of the `gradient` program on each device, in bytes, by what they hold.

    Attributes:
        kept: activations that all layers keep for the backward pass.
        weights: parameters of all layers in the dtype of products, sharded, if they are stored in another.
        layer_gradients: gradients of all layers, in the dtype of products, sharded; from the backward pass of the last
            layer on.
        head: the head, gathered or cast, in the dtype of products; until its backward pass ends.
        head_gradient: sums of the head's gradient, not sharded: in float32, but in the dtype of products if there is
            only one chunk; a fused head has them twice on GPUs, in slices and joined, and on TPUs in the place of
            exponentials that are no longer needed.
        exchanged: the head's gradient in the dtype of products, sharded; from the backward pass of the layers on.
        embedding_gradient: float32 sums of the embedding's gradient, not sharded.
        chunk: logits of one chunk in float32, their gradient in the dtype of products, and the hidden state of all
            tokens with its gradient, cut into chunks; of a fused head the exponentials of all tokens, and the hidden
            state in float32.
        turn: activations that the layers of one turn of a scan keep, before they are written to `kept`; with adapters
            the products with the base and with the adapter, which are added then.
        layer: activations and gradients of one layer during its backward pass.
        layer_weights: weights of one layer, cut from the stack or gathered, and on a mesh their gradients before they
            are exchanged.
        reserved: what the compiler for TPUs counts beside arrays (`BESIDE_HEAP_BYTES`).
        is_unrolled: True without a loop over layers: what is kept of a layer ends when its gradients begin.
        is_fused: True if the head computes its logits once.
        workspace: cuDNN's sums of a layer's gradients in packed rows, which a compiler without a device leaves out: of
            the queries in float32, and where query heads share a key, of keys and values for each of them.
    """

    kept: int
    weights: int
    layer_gradients: int
    head: int
    head_gradient: int
    exchanged: int
    embedding_gradient: int
    chunk: int
    turn: int
    layer: int
    layer_weights: int
    reserved: int
    is_unrolled: bool
    is_fused: bool
    workspace: int

    @property
    def peak(self) -> int:
        """Bytes at the moment that needs most."""
        base, stacks = self.kept + self.weights, (self.kept, self.layer_gradients)
        last_turn, head = base + self.turn, base + self.head + self.head_gradient + self.chunk
        # The backward pass of the last layer, or unrolled of the one that needs most.
        layer = (max if self.is_unrolled else sum)(stacks) + self.weights + self.exchanged
        layer += self.layer + self.layer_weights + self.workspace
        embedding = self.layer_gradients + self.exchanged + self.embedding_gradient  # no activations are left
        return max(last_turn, head, layer, embedding) + self.reserved

    @property
    def uncompiled(self) -> int:
        """Bytes of the peak that the figures of a compiler without a device leave out."""
        return self.peak - self._replace(workspace=0).peak


def update_bytes(
    config: DecoderConfig,
    *,
    rows: int,
    tokens: int,
    remat: Remat,
    platform: Platform,
    sharding: Sharding | None = None,
    lora: LoraSpec | None = None,
    compute_dtype: Any = jnp.bfloat16,
    param_dtype: Any = jnp.float32,
    kernel: Kernel = "cudnn",
    is_packed: bool = True,
    is_scored_alone: bool = True,
) -> UpdateBytes:
    """Return the bytes of temporaries, on each device, of the `gradient` program of `Update.programs`.

    Args:
        config: the model.
        rows: rows of a microbatch, counted over the whole mesh.
        tokens: tokens of a row.
        remat: checkpoint policy.
        platform: platform of the devices.
        sharding: sharding of the model; None for one device.
        lora: adapters, in float32, if only they are trained.
        compute_dtype: dtype of products and activations.
        param_dtype: dtype of the parameters, or of the base with adapters.
        kernel: kernel of attention; the reference counts as a fused one.
        is_packed: True if rows hold several sequences.
        is_scored_alone: True for a fused head where it fits, which a teacher or an entropy bonus excludes.

    >>> from jaxft.models.config import model_preset
    >>> given = {"config": model_preset("qwen3-0.6b"), "rows": 8, "tokens": 2048, "platform": "gpu"}
    >>> [f"{update_bytes(remat=remat, **given).peak / 2**30:.1f} GiB" for remat in ("dots", "full")]
    ['19.6 GiB', '8.0 GiB']
    """
    dtype = jnp.dtype(compute_dtype)
    itemsize, is_cast, has_gradient = dtype.itemsize, jnp.dtype(param_dtype) != dtype, lora is None
    row_shards, tensor = (1, 1) if sharding is None else (sharding.row_shards, sharding.mesh.shape["tensor"])
    is_gathered = sharding is not None and sharding.mesh.shape["fsdp"] > 1
    segments = MOST_SEGMENTS if is_packed and kernel == "cudnn" else 1
    experts = _expert_shards(sharding)
    activations = _layer_activations(config, rows // row_shards * tokens, itemsize, tensor, experts, segments)
    repeats_heads = kernel == "pallas"  # which has no grouped heads
    of_sums = FLOAT32 + (0 if config.num_heads == config.num_kv_heads else 2 * itemsize)
    shapes = parameter_shapes(config, lora)
    base, adapter = (shapes, {"layers": {}}) if lora is None else (shapes[BASE], shapes[ADAPTER])
    of_base, of_adapter = (_sharded_bytes(sharding, {"layers": tree["layers"]}, dtype) for tree in (base, adapter))
    vocabulary = head_weights(config)
    scored = -(-(rows // row_shards) * (tokens - 1) // tensor)
    is_unrolled = platform == "gpu" and remat != "least"
    scale = config.logit_scale if is_scored_alone and config.logit_soft_cap is None and remat != "least" else None
    is_fused = takes_fused_head(platform, scored, config.vocab_size, dtype, scale)
    chunks = -(-scored // default_chunk_tokens(config.vocab_size, scored, platform, is_partial=False))
    chunk = -(-scored // chunks) * config.vocab_size * (FLOAT32 + itemsize) + 2 * activations.hidden
    if is_fused:
        chunk = scored * (config.vocab_size * itemsize + 3 * config.hidden_size * FLOAT32)
        if platform == "gpu" and not has_gradient:  # else the slices of the head's gradient are larger
            chunk += min(scored * config.vocab_size, SLICE_LOGITS) * FLOAT32
    of_head = FLOAT32 if chunks > 1 else itemsize
    if is_fused:
        of_head = 2 * FLOAT32 if platform == "gpu" else 0
    everything = (_unrolled if platform == "gpu" else _everything)(activations, repeats_heads, config)
    every = replace(config, num_experts_per_tok=config.num_experts // experts)
    of_layer = max(block_weights(every, has_experts=kind.has_experts) for kind in config.kinds) // tensor * itemsize
    if platform == "gpu":  # gathered weights are kept, and the result of up without its adapter beside the sum
        everything += (of_layer if is_gathered else 0) + (0 if has_gradient else activations.wide)
    kept = activations.kept(remat, everything)
    of_turn = 0 if is_unrolled else max(len(run.kinds) for run in layer_runs(config.kinds)) * kept
    return UpdateBytes(
        kept=config.num_layers * kept,
        weights=(of_base if is_cast else 0) + of_adapter,
        layer_gradients=of_base if has_gradient else of_adapter,
        head=vocabulary * itemsize if is_gathered or is_cast else 0,
        head_gradient=vocabulary * of_head if has_gradient else 0,
        exchanged=_sharded_bytes(sharding, {"embed": base["embed"]}, dtype) if has_gradient else 0,
        embedding_gradient=vocabulary * FLOAT32 if has_gradient else 0,
        chunk=chunk,
        turn=of_turn * (1 if has_gradient else 2),
        # The feed-forward's three activations have a gradient each, the residual stream and its norm as well, and
        # outputs of experts; their rows have two, of gate and of up.
        layer=_recomputed_bytes(activations, repeats_heads, config)
        + 3 * activations.wide
        + 2 * activations.hidden
        + 3 * activations.routed,
        layer_weights=of_layer * (2 if is_gathered and has_gradient else 1),
        reserved=BESIDE_HEAP_BYTES if platform == "tpu" else 0,
        is_unrolled=is_unrolled,
        is_fused=is_fused,
        workspace=0 if segments == 1 else segments * activations.queries // itemsize * of_sums,
    )


def _expert_shards(sharding: Sharding | None) -> int:
    """Return the devices along `expert`, which have room for each other's tokens: all may choose one's experts."""
    return 1 if sharding is None else sharding.mesh.shape.get("expert", 1)


def _layer_activations(
    config: DecoderConfig, tokens: int, itemsize: int, tensor: int, experts: int, segments: int
) -> Activations:
    """Return the activations of one layer for these tokens of a device, of numbers of `itemsize` bytes."""
    per_token = tokens * itemsize
    return Activations(
        hidden=per_token * config.hidden_size,
        queries=per_token * config.num_heads * config.head_dim // tensor,
        keys=per_token * config.num_kv_heads * config.head_dim // tensor,
        wide=per_token * _wide(config, experts) // tensor,
        routed=per_token * config.num_experts_per_tok * config.hidden_size * experts,
        normalizers=segments * tokens * config.num_heads * FLOAT32 // tensor,
    )


def _wide(config: DecoderConfig, experts: int) -> int:
    """Return the width of a device's token in feed-forward layers, or in all its experts, whichever is larger."""
    blocks = (projection_shapes(config, has_experts=kind.has_experts) for kind in {*config.kinds})
    widths = (
        {path: math.prod(shape[1:]) for path, shape in block.items() if path.endswith("up_proj")} for block in blocks
    )
    return max(sum(wide * (experts if "/experts/" in path else 1) for path, wide in each.items()) for each in widths)


def _recomputed_bytes(activations: Activations, repeats_heads: bool, config: DecoderConfig) -> int:
    """Return the bytes of one layer's activations that its backward pass reads, and recomputes where it must.

    These are the input, its norm, queries, keys and values before and after norm and rotation, the kernel's output,
    the residual stream after attention, its norm, and gate, up and their product. Where outputs have a norm, it reads
    the outputs of attention and feed-forward. Experts have their rows and outputs.
    """
    hidden, queries, keys, wide, routed, normalizers = activations
    given = 3 * queries if repeats_heads else queries + 2 * keys
    of_stream = (2 + _norms(config)) * hidden
    return of_stream + queries + 2 * keys + given + queries + normalizers + 3 * wide + 2 * routed


def _everything(activations: Activations, repeats_heads: bool, config: DecoderConfig) -> int:
    """Return the bytes of one layer's activations if no step is computed again, as `everything_saveable` has it.

    The residual stream has five copies in the dtype of products, and for each norm two in float32, before and after
    division. So have queries and keys with a norm. The feed-forward's width has six, three of them of `silu`.
    """
    hidden, queries, keys, wide, routed, normalizers = activations
    given = 3 * queries if repeats_heads else queries + 2 * keys
    of_norms = 4 * (queries + keys) if config.qk_norm is not None else 0
    of_stream = (5 + 4 * _norms(config)) * hidden
    return of_stream + 3 * queries + keys + of_norms + given + normalizers + 6 * wide + 4 * routed


def _unrolled(activations: Activations, repeats_heads: bool, config: DecoderConfig) -> int:
    """Return the bytes of one layer's activations that are read again where XLA chooses them, without a checkpoint.

    These are the input, the residual stream after attention, inputs or results of their norms, queries and keys before
    norm and after rotation, values, the kernel's output, and gate, up and their product; it computes `silu` again, but
    keeps the dearer `gelu`.
    """
    hidden, queries, keys, wide, routed, normalizers = activations
    given = 3 * queries if repeats_heads else queries + 2 * keys
    of_norms = queries + keys if config.qk_norm is not None else 0
    of_stream = (2 + _norms(config)) * hidden
    of_experts = (3 if config.activation == "silu" else 4) * wide + 2 * routed
    return of_stream + of_norms + given + queries + normalizers + of_experts


def _norms(config: DecoderConfig) -> int:
    """Return the number of a layer's norms of the residual stream or of what is added to it."""
    return 4 if config.norm_places == "both" else 2


def _sharded_bytes(sharding: Sharding | None, shapes: Any, dtype: Any) -> int:
    """Return the bytes of parameters on each device, if they had this dtype."""
    return device_bytes(sharding, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes))


def sampling_bytes(
    config: DecoderConfig,
    *,
    slots: int,
    length: int,
    platform: Platform,
    sharding: Sharding | None = None,
    compute_dtype: Any = jnp.bfloat16,
) -> dict[str, int]:
    """Return the bytes of temporaries, on each device, of the programs of `ModelRunner.programs`, by name.

    `prefill` keeps the activations of a piece of a prompt, and `decode` the logits; on TPUs whose heads are not divided
    also copies of the kernels of queries, gate and up in the layout of their products.

    Args:
        config: the model.
        slots: slots of the whole mesh.
        length: maximum number of tokens of a request.
        platform: platform of the devices.
        sharding: sharding of the model; None for one device.
        compute_dtype: dtype of weights, activations and caches.
    """
    itemsize = jnp.dtype(compute_dtype).itemsize
    row_shards, tensor = (1, 1) if sharding is None else (sharding.row_shards, sharding.mesh.shape["tensor"])
    experts = _expert_shards(sharding)
    width = (2 * _wide(config, experts) + 2 * config.num_heads * config.head_dim) // tensor
    width += (4 + 2 * config.num_experts_per_tok * experts) * config.hidden_size
    logits, copied = slots // row_shards * config.vocab_size * FLOAT32, 0
    if platform == "tpu":
        dense = sum(not kind.has_experts for kind in config.kinds)
        outputs = config.num_layers * config.num_heads * config.head_dim + 2 * dense * config.intermediate_size
        copied = VMEM_BYTES + (config.hidden_size * outputs * itemsize if tensor == 1 else 0)
    places = max(math.prod(program) for program in prefill_programs(platform, slots // row_shards, length))
    return {"prefill": places * width * itemsize, "decode": logits + copied}
