"""One decoder for all families: flax nnx modules inside, pure functions on plain dicts outside.

What a family has is read from its `DecoderConfig`, never from its name.
Training stacks the parameters of the layers on a leading axis and scans over them, several at a time where layers of
several kinds repeat. Decoding takes them layer by layer, joined (`jaxft.models.decode_layout`), each with its own pages
of keys and values (`jaxft.models.paged`).
Letters: `B` rows, `T` tokens, `C` columns of a page table, `S` tokens attended to, `D` hidden, `H` query heads, `K`
key/value heads, `G = H / K`, `h` head width, `L` layers.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxft.core.partition import ADAPTER, BASE
from jaxft.core.sharding import ROW_AXES, Rules, Sharding, constrain, devices_of, gather_params, path_text, platform_of
from jaxft.core.types import Model, Params
from jaxft.models.attention import HeadRows, Scores, attend, attend_in_chunks, chunk_of, visible_keys
from jaxft.models.config import Activation, DecoderConfig, LayerKind, LoraSpec
from jaxft.models.decode_layout import GATE_UP, QKV, decoding_layer, head_shards, split_outputs
from jaxft.models.flash import Kernel, announce, choose_kernel, row_attention, saves_kernels
from jaxft.models.layers import Linear, RMSNorm, look_up, project_to_vocabulary
from jaxft.models.lora import LORA_NAMES, adapter_of, has_adapters, merge_or_put_beside, put_beside
from jaxft.models.paged import LayerPages, PagedRows, init_pages, page_axis, write_and_attend
from jaxft.models.rope import Rope
from jaxft.models.rotation import Angles, angles_of, rotate


class Context(NamedTuple):
    """Rotary angles of the tokens and what they see, for every kind of layer."""

    angles: Mapping[Rope | None, Angles | None]
    visible: Mapping[int | None, Bool[Array, "B T S"] | None]
    """By window; None where there are pages, or the reference computes chunk by chunk."""
    segment_ids: Int[Array, "B T"] | None
    paged: PagedRows | None  # None without a cache
    sharding: Sharding | None
    in_halves: bool  # for `invariant_sum`: sampling on a CPU


def by_rows(sharding: Sharding | None, tree: Any) -> Any:
    """Constrain arrays, on a mesh, so that only their rows are sharded."""
    return tree if sharding is None else sharding.constrain_rows(tree)


def by_heads(sharding: Sharding | None, tree: Any) -> Any:
    """Constrain activations `[B T N ...]`, on a mesh, so that rows and heads (or width) are sharded."""
    return tree if sharding is None else sharding.constrain_heads(tree)


def norm_of(config: DecoderConfig, shape: int | tuple[int, ...]) -> RMSNorm:
    """Return a norm of this shape as the model has it."""
    return RMSNorm(shape, config.rms_norm_eps, config.norm_offset)


class Attention(nnx.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, is_joined: bool, lora: LoraSpec | None) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def linear(names: Sequence[str], inputs: int, outputs: int, use_bias: bool) -> Linear:
            adapter = adapter_of(lora, [f"self_attn/{name}" for name in names])
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
            self.qk_norm = norm_of(config, (config.num_heads + config.num_kv_heads, head_dim))
        elif config.qk_norm is not None:
            sizes = (head_dim, head_dim) if config.qk_norm == "heads" else (width, kv_width)
            self.q_norm, self.k_norm = (norm_of(config, size) for size in sizes)
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, head_dim
        self.scale, self.soft_cap, self.is_joined = config.score_scale, config.attention_soft_cap, is_joined

    def __call__(
        self, x: Float[Array, "B T D"], kind: LayerKind, context: Context, pages: LayerPages | None
    ) -> tuple[Float[Array, "B T D"], LayerPages | None]:
        rows, length, _ = x.shape
        angles, scores = context.angles[kind.rope], Scores(self.scale, kind.window, self.soft_cap)
        heads = self.joined_heads(x, angles, context) if self.is_joined else self.separate_heads(x, angles, context)
        q, k, v = by_heads(context.sharding, heads)
        if angles is not None and angles.query_factor is not None:
            q = (q * angles.query_factor[:, :, None, None]).astype(q.dtype)
        if pages is None or context.paged is None:
            attended = self.attend(q, k, v, scores, context)
        else:
            attended, pages = write_and_attend(q, k, v, pages, context.paged, scores, context.sharding)
        return checkpoint_name(self.o_proj(attended.reshape(rows, length, -1)), PROJECTED), pages

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
        y = by_heads(context.sharding, self.qkv_proj(x)).reshape(*x.shape[:2], shards, -1, self.head_dim)
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

        if self.norm_kind is not None:
            q, k = normed(q, self.q_norm), normed(k, self.k_norm)
        return rotated(q, angles, context), rotated(k, angles, context)

    def attend(
        self,
        q: Float[Array, "B T H h"],
        k: Float[Array, "B T K h"],
        v: Float[Array, "B T K h"],
        scores: Scores,
        context: Context,
    ) -> Float[Array, "B T H h"]:
        """Return attention within whole rows by the kernel that takes them, or by the reference.

        The reference goes chunk by chunk where the scores of all queries are too large.
        """
        length, ids, sharding = q.shape[1], context.segment_ids, context.sharding
        visible = context.visible[scores.window]
        if scores.window is not None and scores.window >= length:
            scores = scores._replace(window=None)
        kernel = kernel_for(q, scores, context)
        if kernel != "xla":
            return row_attention(q, k, v, kernel=kernel, scores=scores, segment_ids=ids, sharding=sharding)
        seen = HeadRows(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))  # [B K h T], [B K T h]
        if visible is not None:
            attended = attend(q, seen, visible, scores)
        else:
            chunk = chunk_of(q.shape, length, 1 if sharding is None else sharding.devices)
            attended = attend_in_chunks(q, seen, jnp.arange(length)[None], scores, ids, chunk)
        return by_heads(sharding, attended)


def rotated(x: Float[Array, "B T N h"], angles: Angles | None, context: Context) -> Float[Array, "B T N h"]:
    """Return queries or keys rotated by their angles, if the layer has positions."""
    return x if angles is None else rotate(x, angles, platform_of(context.sharding))


def kernel_for(q: Float[Array, "B T H h"], scores: Scores, context: Context) -> Kernel:
    """Return the kernel of rows without a cache, and log the choice."""
    devices, has_segments = devices_of(context.sharding), context.segment_ids is not None
    choice = choose_kernel(q.dtype, q.shape[-1], scores, devices, has_segments=has_segments)
    if q.shape[1] > 1:  # a single token only asks for shapes
        announce(choice, q.dtype, q.shape[-1], scores, devices[0], has_segments)
    return choice.kernel


ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


class FeedForward(nnx.Module):
    """A gated feed-forward layer (arXiv 2002.05202): `down(activation(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, is_joined: bool, lora: LoraSpec | None) -> None:
        hidden, width = config.hidden_size, config.intermediate_size

        def linear(names: Sequence[str], inputs: int, outputs: int) -> Linear:
            adapter = adapter_of(lora, [f"mlp/{name}" for name in names])
            return Linear(inputs, outputs, config.mlp_bias, rngs, is_joined, adapter)

        if is_joined:
            self.gate_up_proj = linear(GATE_UP, hidden, 2 * width)
        else:
            self.gate_proj = linear(["gate_proj"], hidden, width)
            self.up_proj = linear(["up_proj"], hidden, width)
        self.down_proj = linear(["down_proj"], width, hidden)
        self.width, self.is_joined = width, is_joined
        self.activate = ACTIVATIONS[config.activation]

    def __call__(self, x: Float[Array, "B T D"], sharding: Sharding | None) -> Float[Array, "B T D"]:
        if self.is_joined:
            both = by_heads(sharding, self.gate_up_proj(x))
            gate, up = split_outputs(both, head_shards(sharding, self.width), (self.width, self.width))
        else:
            gate, up = (checkpoint_name(project(x), WIDENED) for project in (self.gate_proj, self.up_proj))
        return self.down_proj(by_heads(sharding, self.activate(gate) * up))


class Block(nnx.Module):
    """Attention and feed-forward, each added to the residual stream; their inputs, outputs or both are normed.

    The names of the two norms of inputs are those of Llama's files, where the second one comes after attention.
    """

    def __init__(
        self, config: DecoderConfig, rngs: nnx.Rngs, is_joined: bool = False, lora: LoraSpec | None = None
    ) -> None:
        before, after = config.norm_places != "after", config.norm_places != "before"
        self.input_layernorm = norm_of(config, config.hidden_size) if before else None
        self.self_attn = Attention(config, rngs, is_joined, lora)
        self.attention_output_norm = norm_of(config, config.hidden_size) if after else None
        self.post_attention_layernorm = norm_of(config, config.hidden_size) if before else None
        self.mlp = FeedForward(config, rngs, is_joined, lora)
        self.mlp_output_norm = norm_of(config, config.hidden_size) if after else None
        self.residual_scale = config.residual_scale

    def __call__(
        self, x: Float[Array, "B T D"], kind: LayerKind, context: Context, pages: LayerPages | None
    ) -> tuple[Float[Array, "B T D"], LayerPages | None]:
        def normed(norm: RMSNorm | None, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
            return x if norm is None else by_rows(context.sharding, norm(x, in_halves=context.in_halves))

        def add(x: Float[Array, "B T D"], change: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
            if self.residual_scale != 1:
                change = change * jnp.asarray(self.residual_scale, x.dtype)
            return by_rows(context.sharding, x + change)

        attended, pages = self.self_attn(normed(self.input_layernorm, x), kind, context, pages)
        x = add(x, normed(self.attention_output_norm, attended))
        changed = self.mlp(normed(self.post_attention_layernorm, x), context.sharding)
        return add(x, normed(self.mlp_output_norm, changed)), pages


def binder(make: Callable[[nnx.Rngs], nnx.Module]) -> Callable[[Params], Any]:
    """Return `bind(plain dict) -> module` for modules of this kind."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def bind(params: Params) -> Any:
        state = jax.tree.map(lambda variable: variable, shapes)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    return bind


def init_params(config: DecoderConfig, key: Any, lora: LoraSpec | None = None) -> Params:
    """Make random float32 parameters of a decoder; with `lora`, `{"base": ..., "adapter": ...}`.

    Kernels are normal with variance `1 / D`, embeddings normal with standard deviation 0.02. In adapters, `lora_a` is
    uniform in `±1 / sqrt(D)` and `lora_b` is zero, so that they do not change the model yet.
    """

    def draw(key: Any, lora: LoraSpec | None) -> Params:
        def init_block(key: Any) -> Params:
            return nnx.to_pure_dict(nnx.split(Block(config, nnx.Rngs(key), lora=lora))[1])

        outer_key, layers_key = jax.random.split(key)
        rngs, shape = nnx.Rngs(outer_key), (config.vocab_size, config.hidden_size)
        params = {
            "embed": jax.random.normal(rngs.params(), shape) * 0.02,
            "layers": jax.vmap(init_block)(jax.random.split(layers_key, config.num_layers)),
            "final_norm": {"scale": jnp.full(config.hidden_size, 0.0 if config.norm_offset else 1.0)},
        }
        if not config.tie_word_embeddings:
            # A row per token, as in transformers, so that a tied and an untied head are the same product.
            params["lm_head"] = jax.random.normal(rngs.params(), shape) * 0.02
        return params

    if lora is None:
        return draw(key, None)
    base_key, adapter_key = jax.random.split(key)
    flat = flatten_dict(draw(adapter_key, lora))
    adapter = unflatten_dict({path: leaf for path, leaf in flat.items() if path[-1] in LORA_NAMES})
    return {BASE: draw(base_key, None), ADAPTER: adapter}


@cache
def parameter_shapes(config: DecoderConfig, lora: LoraSpec | None = None) -> Params:
    """Return the tree of `init_params` with shapes instead of arrays."""
    shapes: Params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), lora))
    return shapes


Remat = Literal["none", "dots", "projections", "attention", "full"]
"""Checkpoint policies (arXiv 1604.06174), the fastest first: recompute nothing, all but products with weights and
attention kernels, all but attention kernels and their projections, all but attention kernels, or whole layers. From
`dots` on, attention of the reference is recomputed."""

REMATS: tuple[Remat, ...] = get_args(Remat)

AUTO_REMATS = REMATS[1:]
"""Policies to choose from, the fastest first. `none` is not among them: it saves no product that `dots` recomputes, and
moves 1.4 times as many bytes in an update of 0.6 billion parameters on an H200."""

PROJECTED, WIDENED = "attention projections", "feed-forward projections"
"""Checkpoint names of the outputs of all projections but the last, whose output no gradient needs. An adapter's product
is saved within its projection's."""


SAVEABLE = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_only_these_names(PROJECTED, WIDENED), saves_kernels
    ),
    "projections": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_only_these_names(PROJECTED), saves_kernels
    ),
    "attention": saves_kernels,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def decoder(
    config: DecoderConfig,
    remat: Remat = "dots",
    *,
    compute_dtype: Any = None,
    lora: LoraSpec | None = None,
    sharding: Sharding | None = None,
) -> Model:
    """Make the `Model` of a config; equal arguments give the same functions, so nothing is compiled twice.

    Parameters are `{"embed": [V D], "layers": {...}, "final_norm": {...}}`, and `lm_head [V D]` unless it is tied to
    the embedding; each array of `layers` has the layer on axis 0. `decode_layout` replaces `layers` by
    `decoding_layers`, a list with a dict per layer (`jaxft.models.decode_layout`).
    With `lora`, parameters are `{"base": ..., "adapter": ...}` as `jaxft.models.lora` says.

    Args:
        remat: checkpoint policy: the activations that the backward pass recomputes.
        compute_dtype: dtype of products and activations: parameters are cast to it wherever they are used, and once
            per policy version to decode. Parameters, gradients and optimizer state keep their own dtype, and logits
            are float32. None computes in the dtype of the parameters.
        lora: rank, scale and targets of adapters; None for a model without adapters.
        sharding: result of `sharding_for`, to compute on a mesh; None for one device.
    """
    # Defaults are filled in and the dtype is normalised, so that equal models have one cache entry.
    return _decoder(config, remat, None if compute_dtype is None else jnp.dtype(compute_dtype), lora, sharding)


@cache
def _decoder(
    config: DecoderConfig, remat: Remat, compute_dtype: Any, lora: LoraSpec | None, sharding: Sharding | None
) -> Model:
    bind_norm = binder(lambda rngs: norm_of(config, config.hidden_size))
    bind_block = binder(lambda rngs: Block(config, rngs, lora=lora))
    bind_joined = binder(lambda rngs: Block(config, rngs, is_joined=True))
    bind_adapted = binder(lambda rngs: Block(config, rngs, is_joined=True, lora=lora))

    def init(key: Any) -> Params:
        return constrain(sharding, init_params(config, key, lora))

    def apply(
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: tuple[LayerPages, ...] | None = None,
        tables: Int[Any, "B C"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[LayerPages, ...] | None]:
        is_laid_out = cache is None or "decoding_layers" in params
        params = put_beside(narrow(params)) if is_laid_out else decode_layout(params)
        norm = gather({"final_norm": params["final_norm"]})["final_norm"]
        is_sampled = cache is not None
        x = by_rows(sharding, embed({"embed": params["embed"]}, by_rows(sharding, tokens), is_sampled))  # [B T D]
        context = make_context(config, by_rows(sharding, positions), tables, segment_ids, sharding)

        def compute_layer(kind: LayerKind, x: Float[Array, "B T D"], layer: Params) -> Float[Array, "B T D"]:
            output: Array = bind_block(gather(layer))(x, kind, context, None)[0]
            return output

        if cache is None:
            compute = jax.checkpoint(compute_layer, policy=SAVEABLE[remat], static_argnums=0)
            x = scan_layers(compute, config.kinds, x, params["layers"])
        else:
            updated: list[Any] = []
            for layer, kind, pages in zip(bind_layers(params), config.kinds, cache, strict=True):
                x, written = layer(x, kind, context, pages)
                updated.append(written)
            cache = tuple(updated)
        return bind_norm(norm)(x, in_halves=context.in_halves), cache

    def embed(params: Params, tokens: Int[Array, "B T"], is_sampled: bool) -> Float[Array, "B T D"]:
        x = look_up_rows(params, tokens, is_sampled)
        return x if config.embedding_scale == 1 else x * jnp.asarray(config.embedding_scale, x.dtype)

    def look_up_rows(params: Params, tokens: Int[Array, "B T"], is_sampled: bool) -> Float[Array, "B T D"]:
        if sharding is None or sharding.devices == 1 or is_sampled:
            return look_up(gather(params)["embed"], tokens)
        # The gradients of a token's occurrences are summed on each device before they are exchanged.
        return sharding.map_shards(lambda params, tokens: look_up(params["embed"], tokens), params, [tokens], ROW_AXES)

    def bind_layers(params: Params) -> list[Block]:
        layers = params["decoding_layers"]
        return list(map(bind_adapted if has_adapters(layers[0]) else bind_joined, layers))

    def head(params: Params) -> Params:
        name = "embed" if config.tie_word_embeddings else "lm_head"
        return narrow({name: params.get(BASE, params)[name]})

    def unembed(params: Params, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
        (kernel,) = (head(params) if sharding is None or len(params) == 1 else gather(head(params))).values()
        logits = scaled_logits(config, project_to_vocabulary(hidden, kernel))
        if sharding is None or "decoding_layers" not in params:
            return logits
        return sharding.constrain_logits(logits)  # few rows: each device computes a slice of the logits

    def init_cache(pages: int, dtype: Any) -> tuple[LayerPages, ...]:
        axis, platform = page_axis(sharding), platform_of(sharding)
        cache = tuple(
            init_pages(pages, config.num_kv_heads, config.head_dim, dtype, platform) for _ in range(config.num_layers)
        )
        if sharding is None or pages % sharding.row_shards:
            return cache
        return jax.lax.with_sharding_constraint(cache, sharding.page_shardings(jax.tree.map(lambda _: axis, cache)))

    def decode_layout(params: Params) -> Params:
        # Adapters are merged in full before anything is rounded; without them the cast comes first, which costs less.
        params = narrow(params) if lora is None else merge_or_put_beside(lora, params)
        layers = [decoding_layer(each, config, sharding) for each in per_layer(params["layers"], config.num_layers)]
        others = {name: leaf for name, leaf in params.items() if name != "layers"}
        return narrow(gather({**others, "decoding_layers": layers}))

    def narrow(params: Params) -> Params:
        if compute_dtype is None:
            return params
        return jax.tree.map(
            lambda leaf: leaf.astype(compute_dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params
        )

    def gather(params: Any) -> Any:
        return params if sharding is None else gather_params(sharding, sharding.gathered(), params)

    def with_remat(remat: Remat) -> Model:
        return _decoder(config, remat, compute_dtype, lora, sharding)

    return Model(config, init, apply, unembed, init_cache, decode_layout, sharding, lora, head, with_remat)


def scaled_logits(config: DecoderConfig, logits: Float[Array, "*N V"]) -> Float[Array, "*N V"]:
    """Return logits with the model's scale and soft cap."""
    if config.logit_scale != 1:
        logits = logits * config.logit_scale
    if config.logit_soft_cap is not None:
        logits = config.logit_soft_cap * jnp.tanh(logits / config.logit_soft_cap)
    return logits


class LayerRun(NamedTuple):
    """Consecutive layers that have some kinds in turn, several times."""

    kinds: tuple[LayerKind, ...]
    repeats: int


@cache
def layer_runs(kinds: tuple[LayerKind, ...]) -> list[LayerRun]:
    """Divide layers into runs so that as few layers as possible are compiled, one for each kind of each run.

    >>> full, sliding = LayerKind(), LayerKind(window=8)
    >>> [(len(run.kinds), run.repeats) for run in layer_runs((sliding, sliding, full) * 5 + (sliding, sliding))]
    [(1, 2), (3, 5)]
    """
    fewest: list[list[LayerRun]] = [[]]  # runs of the last 0, 1, 2, ... layers
    for start in reversed(range(len(kinds))):
        ways = []
        for length in range(1, len(kinds) - start + 1):
            turn, repeats = kinds[start : start + length], 1
            while kinds[start + length * repeats :][:length] == turn:
                repeats += 1
            ways.append([LayerRun(turn, repeats), *fewest[len(kinds) - start - length * repeats]])
        fewest.append(min(ways, key=lambda runs: (sum(len(run.kinds) for run in runs), len(runs))))
    return fewest[-1]


def scan_layers(
    compute: Callable[[LayerKind, Array, Params], Array],
    kinds: tuple[LayerKind, ...],
    x: Float[Array, "B T D"],
    layers: Params,
) -> Float[Array, "B T D"]:
    """Return the residual stream after all layers, whose parameters are stacked on axis 0."""
    runs = layer_runs(kinds)
    if len(runs) == 1:
        parts = [layers]
    else:  # the gradient of a split is one concatenation
        sizes = [len(run.kinds) * run.repeats for run in runs]
        split = {path: jax.lax.split(leaf, sizes) for path, leaf in flatten_dict(layers).items()}
        parts = [unflatten_dict({path: pieces[i] for path, pieces in split.items()}) for i in range(len(runs))]
    for run, part in zip(runs, parts, strict=True):
        count = len(run.kinds)

        def step(x: Array, turn: Params, run: LayerRun = run, count: int = count) -> tuple[Array, None]:
            for kind, layer in zip(run.kinds, [turn] if count == 1 else per_layer(turn, count), strict=True):
                x = compute(kind, x, layer)
            return x, None

        if count > 1:
            part = jax.tree.map(lambda leaf, run=run: leaf.reshape(run.repeats, -1, *leaf.shape[1:]), part)
        x = jax.lax.scan(step, x, part)[0]
    return x


def per_layer(layers: Params, num_layers: int) -> list[Params]:
    """Split parameters that are stacked over layers into a list with a dict per layer."""
    return [jax.tree.map(itemgetter(i), layers) for i in range(num_layers)]


def make_context(
    config: DecoderConfig,
    positions: Int[Array, "B T"],
    tables: Int[Any, "B C"] | None,
    segment_ids: Int[Array, "B T"] | None,
    sharding: Sharding | None = None,
) -> Context:
    """Make rotary angles and attention mask: a token sees itself and earlier tokens of its segment, within the window.

    Without pages, tokens are ordered by their column, as positions restart in each packed segment; with pages, by their
    positions.

    Raises:
        ValueError: segments are given together with pages.
    """
    ropes = {kind.rope for kind in config.pattern}
    angles = {rope: None if rope is None else angles_of(rope, config.head_dim, positions) for rope in ropes}
    windows = {kind.window for kind in config.pattern}
    if tables is not None:
        if segment_ids is not None:
            raise ValueError("segment_ids were given with a cache; packed rows can be scored but not decoded")
        counts = (positions >= 0).sum(axis=1, dtype=jnp.int32)
        paged = PagedRows(jnp.asarray(tables, jnp.int32), jnp.maximum(positions[:, 0], 0), counts)
        nothing = dict.fromkeys(windows)
        return Context(angles, nothing, None, paged, sharding, in_halves=platform_of(sharding) == "cpu")
    (rows, length), devices = positions.shape, 1 if sharding is None else sharding.devices
    visible: dict[int | None, Array | None] = dict.fromkeys(windows)
    if chunk_of((rows, length, config.num_heads), length, devices) == length:
        keys = jnp.arange(length)
        for window in windows:
            seen = visible_keys(keys[None], keys, window, segment_ids, segment_ids)
            visible[window] = jnp.broadcast_to(seen, (rows, length, length))
    return Context(angles, visible, segment_ids, None, sharding, in_halves=False)


DECODER_RULES: Rules = (
    ("embed", ("tensor", "fsdp")),  # [V D]
    ("lm_head", ("tensor", "fsdp")),  # [V D]
    ("decoding_layers/*/qkv_proj/kernel", ("tensor", "fsdp")),  # for decoding: [out in]
    ("decoding_layers/*/gate_up_proj/kernel", ("tensor", "fsdp")),
    ("decoding_layers/*/kernel", ("fsdp", "tensor")),
    ("qkv_proj/bias", ("tensor",)),
    ("gate_up_proj/bias", ("tensor",)),
    ("[qkv]_proj/kernel", ("fsdp", "tensor")),  # [in out], stacked or of one layer
    ("gate_proj/kernel", ("fsdp", "tensor")),
    ("up_proj/kernel", ("fsdp", "tensor")),
    ("o_proj/kernel", ("tensor", "fsdp")),
    ("down_proj/kernel", ("tensor", "fsdp")),
    ("[qkv]_proj/bias", ("tensor",)),
    ("gate_proj/bias", ("tensor",)),
    ("up_proj/bias", ("tensor",)),
)
"""Sharding rules: heads and the feed-forward's width along `tensor`, the other side of a kernel along `fsdp`; norms are
replicated."""

NO_AXIS = "-"


def sharding_for(config: DecoderConfig, mesh: Mesh | AbstractMesh, *, strict: bool = False) -> Sharding:
    """Return the sharding of a decoder on a mesh; a dimension that does not divide is replicated, with a warning.

    Args:
        strict: True to raise instead of warning.

    Raises:
        ValueError: heads do not divide over `tensor`; or, with `strict`, any dimension over its axis.
    """
    tensor = mesh.shape["tensor"]
    for name in ("num_heads", "num_kv_heads"):
        heads = getattr(config, name)
        if heads % tensor:
            raise ValueError(
                f"{name} is {heads}, which does not divide over the {tensor} devices of mesh axis 'tensor'; wanted a "
                f"divisor of {heads} there"
            )
    sharding = Sharding(mesh, DECODER_RULES)
    lines = sharding.uneven(parameter_shapes(config))
    if lines and strict:
        raise ValueError("\n".join(lines))
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
