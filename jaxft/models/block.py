"""A layer of a decoder: attention and feed-forward as flax nnx modules, and what all layers of a call share.

What a layer has is read from the `DecoderConfig`, and its window and positions from the layer's `LayerKind`.
Letters: `B` rows, `T` tokens, `Q` tokens that attend, `C` columns of a page table, `S` tokens attended to, `D` hidden,
`H` query heads, `K` key/value heads, `N` heads, `h` head width.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxft.core.cache import SharedPages
from jaxft.core.packing import Branches
from jaxft.core.sharding import Sharding, by_heads, by_rows, compute_devices, compute_platform
from jaxft.models.attention import HeadRows, Scores, attend, attend_in_chunks, query_chunk, visible_keys
from jaxft.models.config import DecoderConfig, LayerKind, LoraSpec
from jaxft.models.experts import Mixture, Routing
from jaxft.models.flash import (
    AMPERE,
    MOST_SEGMENTS,
    Kernel,
    Spans,
    announce,
    choose_kernel,
    compute_capability,
    find_spans,
    layer_kernels,
    row_attention,
)
from jaxft.models.layers import QKV, Angles, FeedForward, Linear, RMSNorm, head_shards, make_norm, rotary_angles, rotate
from jaxft.models.lora import joined_adapter
from jaxft.models.paged import LayerPages, PagedRows, write_and_attend, write_experts
from jaxft.models.rope import Rope
from jaxft.models.shared_prefix import branch_rows, prefix_attention, takes_prefix, with_prefix

PROJECTED = "attention projections"
"""Checkpoint name of the outputs of attention's projections. An adapter's product is saved within its projection's."""


class RowMask(NamedTuple):
    """The keys that the last tokens of whole rows see."""

    visible: Mapping[int | None, Bool[Array, "B Q S"] | None]
    """By window; None where the reference computes chunk by chunk."""
    segment_ids: Int[Array, "B S"] | None
    spans: Spans | None  # of `segment_ids`, where cuDNN takes them


class Context(NamedTuple):
    """Rotary angles of the tokens and what they see, for every kind of layer."""

    angles: Mapping[Rope | None, Angles | None]
    rows: RowMask | None  # None with pages; with branches, the mask of the prefixes
    branch_rows: RowMask | None  # rows of a prefix and one branch, of the tokens of which only the branch asks
    branches: Branches | None
    paged: PagedRows | None  # None without a cache
    sharding: Sharding | None
    in_halves: bool  # for `invariant_sum`: sampling on a CPU
    places: Int[Array, "B"] | None = None  # of the adapters of the rows, where these have adapters of their own
    is_real: Bool[Array, "B T"] | None = None  # False for padding; None if that is not known


def make_context(
    config: DecoderConfig,
    positions: Int[Array, "B T"],
    tables: Int[Any, "B C"] | None,
    segment_ids: Int[Array, "B T"] | None,
    sharding: Sharding | None = None,
    shared: SharedPages | None = None,
    dtype: Any = jnp.float32,
    branches: Branches | None = None,
) -> Context:
    """Make rotary angles and attention mask: a token sees itself and earlier tokens of its segment, within the window.

    Without pages, tokens are ordered by their column, as positions restart in each packed segment; with pages, by their
    positions; rows may share the first of them. With `branches`, tokens see the prefix and their own branch. `dtype` is
    that of queries and keys, which decides the kernel of packed rows.
    """
    ropes = {kind.rope for kind in config.pattern}
    angles = {rope: None if rope is None else rotary_angles(rope, config.head_dim, positions) for rope in ropes}
    if tables is not None:
        counts = (positions >= 0).sum(axis=1, dtype=jnp.int32)
        paged = PagedRows(jnp.asarray(tables, jnp.int32), jnp.maximum(positions[:, 0], 0), counts, shared)
        in_halves = compute_platform(sharding) == "cpu"
        return Context(angles, None, None, None, paged, sharding, in_halves, is_real=positions >= 0)
    mask = partial(make_row_mask, config, sharding, dtype)
    if branches is None or segment_ids is None:
        rows = mask(segment_ids, positions.shape, positions.shape[1])
        is_real = None if segment_ids is None else segment_ids > 0
        return Context(angles, rows, None, None, None, sharding, in_halves=False, is_real=is_real)
    is_real = segment_ids > 0
    own = is_real.astype(jnp.int32)  # one sequence in each prefix with a branch, and padding
    prefix, ids = own[:, : branches.prefix_tokens], with_prefix(own, branches)
    most = 3  # spans of padding, tokens, padding
    rows = mask(prefix, prefix.shape, prefix.shape[1], most)
    branch_rows = mask(ids, ids.shape, ids.shape[1] - prefix.shape[1], most)
    return Context(angles, rows, branch_rows, branches, None, sharding, in_halves=False, is_real=is_real)


def make_row_mask(
    config: DecoderConfig,
    sharding: Sharding | None,
    dtype: Any,
    segment_ids: Int[Array, "B S"] | None,
    shape: tuple[int, ...],
    queries: int,
    most_spans: int = MOST_SEGMENTS,
) -> RowMask:
    """Make the mask of the last `queries` tokens of rows of this shape, for every window of the model."""
    (rows, length), devices = shape, compute_devices(sharding)
    visible: dict[int | None, Array | None] = {kind.window: None for kind in config.pattern}
    if query_chunk((rows, queries, config.num_heads), length, 1 if sharding is None else sharding.devices) == queries:
        keys = jnp.arange(length)
        for window in visible:
            asking = None if segment_ids is None else segment_ids[:, -queries:]
            seen = visible_keys(keys[None, -queries:], keys, window, asking, segment_ids)
            visible[window] = jnp.broadcast_to(seen, (rows, queries, length))
    spans = None
    if segment_ids is not None:
        kernels = layer_kernels(config, dtype, devices, has_segments=True).values()
        spans = find_spans(segment_ids, most_spans) if "cudnn" in {choice.kernel for choice in kernels} else None
    return RowMask(visible, segment_ids, spans)


class Attention(nnx.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, is_joined: bool, lora: LoraSpec | None) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def linear(names: Sequence[str], inputs: int, outputs: int, use_bias: bool) -> Linear:
            adapter = joined_adapter(lora, [f"self_attn/{name}" for name in names])
            return Linear(inputs, outputs, use_bias, rngs, is_joined, adapter)

        if is_joined:
            self.qkv_proj = linear(QKV, hidden, width + 2 * kv_width, config.qkv_bias)
        else:
            self.q_proj = linear(["q_proj"], hidden, width, config.qkv_bias)
            self.k_proj = linear(["k_proj"], hidden, kv_width, config.qkv_bias)
            self.v_proj = linear(["v_proj"], hidden, kv_width, config.qkv_bias)
        self.o_proj = linear(["o_proj"], width, hidden, config.output_bias)
        self.norm_kind = config.qk_norm
        if config.qk_norm == "heads" and is_joined:
            self.qk_norm = make_norm(config, (config.num_heads + config.num_kv_heads, head_dim))
        elif config.qk_norm is not None:
            sizes = (head_dim, head_dim) if config.qk_norm == "heads" else (width, kv_width)
            self.q_norm, self.k_norm = (make_norm(config, size) for size in sizes)
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, head_dim
        self.scale, self.soft_cap, self.is_joined = config.score_scale, config.attention_soft_cap, is_joined
        self.sinks = nnx.Param(jnp.zeros(config.num_heads)) if config.attention_sinks else None

    def __call__(
        self, x: Float[Array, "B T D"], kind: LayerKind, context: Context, pages: LayerPages | None
    ) -> tuple[Float[Array, "B T D"], LayerPages | None]:
        rows, length, _ = x.shape
        angles = context.angles[kind.rope]
        scores = Scores(self.scale, kind.window, self.soft_cap, self.sinks is not None)
        heads = self.joined_heads(x, angles, context) if self.is_joined else self.separate_heads(x, angles, context)
        q, k, v = by_heads(context.sharding, heads)
        if angles is not None and angles.query_factor is not None:
            q = (q * angles.query_factor[:, :, None, None]).astype(q.dtype)
        if pages is None or context.paged is None:
            attended = self.attend(q, k, v, scores, context)
        else:
            sinks = None if self.sinks is None else self.sinks[...]
            attended, pages = write_and_attend(q, k, v, pages, context.paged, scores, context.sharding, sinks)
        return checkpoint_name(self.o_proj(attended.reshape(rows, length, -1), context.places), PROJECTED), pages

    def separate_heads(
        self, x: Float[Array, "B T D"], angles: Angles | None, context: Context
    ) -> tuple[Array, Array, Array]:
        """Return queries `[B T H h]`, keys and values `[B T K h]`."""
        projected = (checkpoint_name(project(x), PROJECTED) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.reshape(*x.shape[:2], -1, self.head_dim) for y in projected)
        return (*self.normed_and_rotated(q, k, angles, context), v)

    def joined_heads(
        self, x: Float[Array, "B T D"], angles: Angles | None, context: Context
    ) -> tuple[Array, Array, Array]:
        """Return what `separate_heads` does, from one product.

        Queries and keys are normed by head and rotated as one array, which saves launches on GPUs.
        """
        shards = head_shards(context.sharding, self.kv_heads)
        y = by_heads(context.sharding, self.qkv_proj(x, context.places)).reshape(
            *x.shape[:2], shards, -1, self.head_dim
        )
        queries, keys = self.heads // shards, self.kv_heads // shards

        def whole(part: Array) -> Array:
            return part.reshape(*x.shape[:2], -1, self.head_dim)

        qk, v = y[..., : queries + keys, :], whole(y[..., queries + keys :, :])
        if self.norm_kind == "projections":  # no norm of a part
            q, k = whole(qk[..., :queries, :]), whole(qk[..., queries:, :])
            return (*self.normed_and_rotated(q, k, angles, context), v)
        if self.norm_kind == "heads":
            qk = self.qk_norm(qk, in_halves=context.in_halves)
        qk = rotated(whole(qk), angles, context).reshape(qk.shape)
        return whole(qk[..., :queries, :]), whole(qk[..., queries:, :]), v

    def normed_and_rotated(
        self, q: Float[Array, "B T H h"], k: Float[Array, "B T K h"], angles: Angles | None, context: Context
    ) -> tuple[Array, Array]:
        """Return queries and keys with the norms and the positions that they have."""

        def normed(x: Array, norm: RMSNorm) -> Array:
            flat = x if self.norm_kind == "heads" else x.reshape(*x.shape[:2], -1)
            return norm(flat, in_halves=context.in_halves).reshape(x.shape)

        if angles is not None and self.has_kernel(angles, context):
            from jaxft.models.rope_kernel import norm_and_rotate  # here, as importing Pallas takes half a second

            cos, sin = (each.reshape(-1, each.shape[-1]) for each in (angles.cos, angles.sin))

            def computed(x: Array, norm: RMSNorm) -> Array:
                flat = x.reshape(-1, *x.shape[2:])
                return norm_and_rotate(flat, norm.scale[...], cos, sin, norm.eps).reshape(x.shape)

            return computed(q, self.q_norm), computed(k, self.k_norm)
        if self.norm_kind is not None:
            q, k = normed(q, self.q_norm), normed(k, self.k_norm)
        return rotated(q, angles, context), rotated(k, angles, context)

    def has_kernel(self, angles: Angles, context: Context) -> bool:
        """True if a kernel takes norm and rotation: on one of NVIDIA's GPUs, of whole heads of 2^n components."""
        devices, width = compute_devices(context.sharding), 2 * angles.cos.shape[-1]
        is_whole = width == self.head_dim and width.bit_count() == 1 and context.paged is None
        is_plain = self.norm_kind == "heads" and not self.q_norm.has_offset
        return is_whole and is_plain and len(devices) == 1 and compute_capability(devices[0]) >= AMPERE

    def attend(
        self,
        q: Float[Array, "B T H h"],
        k: Float[Array, "B T K h"],
        v: Float[Array, "B T K h"],
        scores: Scores,
        context: Context,
    ) -> Float[Array, "B T H h"]:
        """Return attention within whole rows; with a shared prefix, that within it and that of each branch."""
        branches, mask = context.branches, context.branch_rows
        assert context.rows is not None
        if branches is None or mask is None:
            return self.attend_rows(q, k, v, scores, context.rows, context)
        end, ids, sharding = branches.prefix_tokens, context.rows.segment_ids, context.sharding
        assert ids is not None
        longest = end + (q.shape[1] - end) // branches.count
        whole = scores._replace(window=None if (scores.window or longest) >= longest else scores.window)
        if takes_prefix(kernel_for(q, whole, sharding, has_segments=False), whole):
            lengths = ids.sum(axis=1)
            return prefix_attention(q, k, v, scale=scores.scale, branches=branches, lengths=lengths, sharding=sharding)
        prefix = self.attend_rows(q[:, :end], k[:, :end], v[:, :end], scores, context.rows, context)
        keys, values = with_prefix(k, branches), with_prefix(v, branches)
        attended = self.attend_rows(branch_rows(q, branches), keys, values, scores, mask, context)
        return jnp.concatenate([prefix, attended.reshape(len(q), -1, *q.shape[2:])], axis=1)

    def attend_rows(
        self,
        q: Float[Array, "B Q H h"],
        k: Float[Array, "B T K h"],
        v: Float[Array, "B T K h"],
        scores: Scores,
        mask: RowMask,
        context: Context,
    ) -> Float[Array, "B Q H h"]:
        """Return attention of the last tokens of whole rows by the kernel that takes them, or by the reference.

        The reference goes chunk by chunk where the scores of all queries are too large.
        """
        queries, length, sharding = q.shape[1], k.shape[1], context.sharding
        visible = mask.visible[scores.window]
        if scores.window is not None and scores.window >= length:
            scores = scores._replace(window=None)
        kernel = kernel_for(q, scores, sharding, has_segments=mask.segment_ids is not None)
        sinks = None if self.sinks is None else self.sinks[...]
        if kernel != "xla":
            segments = mask.spans if kernel == "cudnn" else mask.segment_ids
            given: dict[str, Any] = {"kernel": kernel, "scores": scores, "segments": segments, "sinks": sinks}
            return row_attention(q, k, v, sharding=sharding, **given)
        seen = HeadRows(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))  # [B K h T], [B K T h]
        if visible is not None:
            attended = attend(q, seen, visible, scores, sinks)
        else:
            chunk = query_chunk(q.shape, length, 1 if sharding is None else sharding.devices)
            places = jnp.arange(length - queries, length)[None]
            attended = attend_in_chunks(q, seen, places, scores, mask.segment_ids, chunk, sinks)
        return by_heads(sharding, attended)


def rotated(x: Float[Array, "B T N h"], angles: Angles | None, context: Context) -> Float[Array, "B T N h"]:
    """Return queries or keys rotated by their angles, if the layer has positions."""
    return x if angles is None else rotate(x, angles, compute_platform(context.sharding))


def kernel_for(q: Float[Array, "B Q H h"], scores: Scores, sharding: Sharding | None, *, has_segments: bool) -> Kernel:
    """Return the kernel of rows without a cache, and log the choice."""
    devices = compute_devices(sharding)
    choice = choose_kernel(q.dtype, q.shape[-1], scores, devices, has_segments=has_segments)
    if q.shape[1] > 1:  # a single token only asks for shapes
        announce(choice, q.dtype, q.shape[-1], scores, devices[0], has_segments)
    return choice.kernel


class Block(nnx.Module):
    """Attention and feed-forward, each added to the residual stream; their inputs, outputs or both are normed.

    The names of the two norms of inputs are those of most files, where the second one comes after attention.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        is_joined: bool = False,
        lora: LoraSpec | None = None,
        *,
        has_experts: bool = False,
    ) -> None:
        before, after = config.norm_places != "after", config.norm_places != "before"
        self.self_attn = Attention(config, rngs, is_joined, lora)
        dense = (config, rngs, is_joined, lora)
        self.mlp = Mixture(*dense) if has_experts else FeedForward(*dense, config.intermediate_size)
        self.input_layernorm = make_norm(config, config.hidden_size) if before else None
        self.attention_output_norm = make_norm(config, config.hidden_size) if after else None
        self.post_attention_layernorm = make_norm(config, config.hidden_size) if before else None
        self.mlp_output_norm = make_norm(config, config.hidden_size) if after else None
        self.residual_scale = config.residual_scale

    def __call__(
        self,
        x: Float[Array, "B T D"],
        kind: LayerKind,
        context: Context,
        pages: LayerPages | None,
        chosen: Integer[Array, "B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerPages | None, Routing | None]:
        """Return the residual stream, the pages, and the routing of a mixture, which takes the `chosen` experts."""

        def normed(norm: RMSNorm | None, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
            return x if norm is None else by_rows(context.sharding, norm(x, in_halves=context.in_halves))

        def add(x: Float[Array, "B T D"], change: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
            if self.residual_scale != 1:
                change = change * jnp.asarray(self.residual_scale, x.dtype)
            return by_rows(context.sharding, x + change)

        held, recorded = (None, None) if pages is None else (pages._replace(experts=None), pages.experts)
        attended, held = self.self_attn(normed(self.input_layernorm, x), kind, context, held)
        x = add(x, normed(self.attention_output_norm, attended))
        inputs, routing = normed(self.post_attention_layernorm, x), None
        if isinstance(self.mlp, Mixture):
            changed, routing = self.mlp(inputs, context.sharding, chosen, context.is_real)
            if held is not None and recorded is not None and context.paged is not None:
                written = write_experts(recorded, routing.experts, context.paged, context.sharding)
                held = held._replace(experts=written)
        else:
            changed = self.mlp(inputs, context.sharding, context.places)
        return add(x, normed(self.mlp_output_norm, changed)), held, routing
