"""Memory of a run's compiled programs, estimated by arithmetic from shapes and sharding rules, without a compiler.

An update's gradient has two moments that need much memory: the backward pass of the head, with logits of one chunk and
the head's gradient in float32, and the backward pass of a layer, with all that was recomputed of it. Both find the
activations that all layers have kept, and the weights in the dtype of products. Estimates are sums of such arrays, in
the order in which the program makes them, and within 25 % of the compilers' figures (`tests/planning/test_estimate.py`
has the cases). Attention is that of fused kernels; all bytes are those of one device.
Letters: `B` rows, `T` tokens, `D` hidden, `F` feed-forward, `H` query heads, `K` key/value heads, `h` head width, `L`
layers, `V` vocabulary.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxft.core.logprobs import CHUNK_LOGITS
from jaxft.core.partition import ADAPTER, BASE
from jaxft.core.sharding import Sharding, device_bytes
from jaxft.models.config import DecoderConfig, LoraSpec
from jaxft.models.decoder import Remat, parameter_shapes
from jaxft.planning.flops import block_weights, head_weights

Platform = Literal["gpu", "tpu"]

MIB = 2**20

FLOAT32 = 4
"""Bytes of a number."""

VMEM_BYTES = 112 * MIB
"""On-chip memory of a TPU that the compiler places arrays in, and counts among the temporaries."""

COLLECTIVE_BYTES = 9 * 64 * MIB
"""Memory in a TPU's HBM that the compiler sets aside for collectives over the mesh: 64 MiB for each of the nine that
exchange weights and their gradients."""


class Activations(NamedTuple):
    """Bytes of one layer's activations `[B T ...]` on a device, by their width."""

    hidden: int  # D
    queries: int  # H h
    keys: int  # K h, as large as values
    wide: int  # F
    normalizers: int  # H, float32: log-sum-exp of a row of scores

    def kept(self, remat: Remat, work: int) -> int:
        """Return the bytes that a layer keeps for its backward pass; `work` is what it would compute again."""
        kernel = self.queries + self.normalizers  # the kernel's output and normalizers
        projected = kernel + self.queries + 2 * self.keys + self.hidden  # and q, k, v and the output projection
        return (
            self.hidden
            + {
                "none": work,
                "dots": projected + 2 * self.wide,  # and gate and up; no gradient needs the result of down
                "projections": projected,
                "attention": kernel,
                "full": 0,
            }[remat]
        )


class UpdateBytes(NamedTuple):
    """Temporaries of the `gradient` program on each device, in bytes, by what they hold.

    Attributes:
        kept: activations that all layers keep for the backward pass.
        weights: parameters of all layers in the dtype of products, sharded, if they are stored in another.
        layer_gradients: gradients of all layers, in the dtype of products, sharded; from the backward pass of the last
            layer on.
        head: the head, gathered or cast, in the dtype of products; until its backward pass ends.
        head_gradient: float32 sums of the head's gradient, not sharded. They live until all layers are done, as XLA
            puts off their exchange.
        embedding_gradient: float32 sums of the embedding's gradient, not sharded.
        chunk: logits of one chunk in float32, their gradient in the dtype of products, and the hidden state of all
            tokens with its gradient, cut into chunks.
        layer: activations and gradients of one layer during its backward pass.
        layer_weights: weights of one layer, cut from the stack or gathered, and on a mesh their gradients before they
            are exchanged.
        reserved: memory that the compiler sets aside.
        is_early: True if the embedding's gradient is allocated before the head's backward pass.
    """

    kept: int
    weights: int
    layer_gradients: int
    head: int
    head_gradient: int
    embedding_gradient: int
    chunk: int
    layer: int
    layer_weights: int
    reserved: int
    is_early: bool

    @property
    def in_head(self) -> int:
        """Bytes during the backward pass of the head."""
        early = self.embedding_gradient if self.is_early else 0
        return self.kept + self.weights + self.head + self.head_gradient + early + self.chunk + self.reserved

    @property
    def in_layer(self) -> int:
        """Bytes during the backward pass of the last layer."""
        early = self.embedding_gradient if self.is_early else 0
        gradients = self.layer_gradients + self.head_gradient + early
        return self.kept + self.weights + gradients + self.layer + self.layer_weights + self.reserved

    @property
    def in_embedding(self) -> int:
        """Bytes during the backward pass of the embedding, when no activations are left."""
        return self.layer_gradients + self.head_gradient + self.embedding_gradient + self.reserved

    @property
    def peak(self) -> int:
        """Bytes at the moment that needs most."""
        return max(self.in_head, self.in_layer, self.in_embedding)


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
    is_packed: bool = True,
) -> int:
    """Return the bytes of temporaries, on each device, of the `gradient` program of `Update.programs`.

    Args:
        config: the model.
        rows: rows of a microbatch, counted over the whole mesh.
        tokens: tokens of a row.
        remat: checkpoint policy.
        platform: platform of the devices; attention is that of its fused kernels.
        sharding: sharding of the model; None for one device.
        lora: adapters, in float32, if only they are trained.
        compute_dtype: dtype of products and activations.
        param_dtype: dtype of the parameters, or of the base with adapters.
        is_packed: True if rows hold several sequences, which decides the kernel on GPUs.
    """
    contributions = update_contributions(
        config,
        rows=rows,
        tokens=tokens,
        remat=remat,
        platform=platform,
        sharding=sharding,
        lora=lora,
        compute_dtype=compute_dtype,
        param_dtype=param_dtype,
        is_packed=is_packed,
    )
    return contributions.peak


def update_contributions(
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
    is_packed: bool = True,
) -> UpdateBytes:
    """Return what `update_bytes` adds up; arguments are the same."""
    itemsize, is_cast = jnp.dtype(compute_dtype).itemsize, jnp.dtype(param_dtype) != jnp.dtype(compute_dtype)
    row_shards, tensor = (1, 1) if sharding is None else (sharding.row_shards, sharding.mesh.shape["tensor"])
    is_gathered = sharding is not None and sharding.mesh.shape["fsdp"] > 1
    rows_here = rows // row_shards

    per_token = rows_here * tokens * itemsize
    activations = Activations(
        hidden=per_token * config.hidden_size,
        queries=per_token * config.num_heads * config.head_dim // tensor,
        keys=per_token * config.num_kv_heads * config.head_dim // tensor,
        wide=per_token * config.intermediate_size // tensor,
        normalizers=rows_here * tokens * config.num_heads * FLOAT32 // tensor,
    )
    work = _recomputed(activations, is_packed and platform == "gpu")
    # At the peak the feed-forward's three activations have a gradient each, the residual stream and its norm as well.
    layer = work + 3 * activations.wide + 2 * activations.hidden

    shapes = parameter_shapes(config, lora)
    base, adapter = (shapes[BASE], shapes[ADAPTER]) if lora is not None else (shapes, {"layers": {}})
    dtype = jnp.dtype(compute_dtype)
    of_base, of_adapter = (_sharded_bytes(sharding, {"layers": tree["layers"]}, dtype) for tree in (base, adapter))
    has_gradient = lora is None
    vocabulary = head_weights(config)
    scored = -(-rows_here * (tokens - 1) // tensor)
    chunks = -(-scored // max(16, CHUNK_LOGITS // config.vocab_size))
    weights_of_layer = block_weights(config) // tensor * itemsize
    return UpdateBytes(
        kept=config.num_layers * activations.kept(remat, work),
        weights=(of_base if is_cast else 0) + of_adapter,
        layer_gradients=of_base if has_gradient else of_adapter,
        head=vocabulary * itemsize if is_gathered or is_cast else 0,
        head_gradient=vocabulary * FLOAT32 if has_gradient else 0,
        embedding_gradient=vocabulary * FLOAT32 if has_gradient else 0,
        chunk=-(-scored // chunks) * config.vocab_size * (FLOAT32 + itemsize) + 2 * activations.hidden,
        layer=layer,
        layer_weights=weights_of_layer * (2 if is_gathered and has_gradient else 1),
        reserved=0 if platform == "gpu" else VMEM_BYTES + (COLLECTIVE_BYTES if is_gathered else 0),
        # XLA for GPUs fills both sums with zeros in one kernel, or without an operand to wait for, at the start.
        is_early=platform == "gpu",
    )


def _recomputed(activations: Activations, repeats_heads: bool) -> int:
    """Return the bytes of one layer's activations that its backward pass reads, and recomputes where it must.

    These are the input, its norm, queries, keys and values before and after norm and rotation, the kernel's output,
    the residual stream after attention, its norm, and gate, up and their product.
    """
    hidden, queries, keys, wide, normalizers = activations
    # The Triton kernel has no grouped heads: keys and values are repeated for it.
    given = 3 * queries if repeats_heads else queries + 2 * keys
    return 4 * hidden + queries + 2 * keys + given + queries + normalizers + 3 * wide


def _sharded_bytes(sharding: Sharding | None, shapes: Any, dtype: Any) -> int:
    """Return the bytes of parameters on each device, if they had this dtype."""
    return device_bytes(sharding, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes))
