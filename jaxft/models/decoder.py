"""One decoder for all families: flax nnx modules inside (`jaxft.models.block`), pure functions on plain dicts outside.

Training stacks the parameters of the layers on a leading axis (`jaxft.models.layer_stack`). Decoding takes them layer
by layer, joined (`jaxft.models.layers`), each with its own pages of keys and values (`jaxft.models.paged`).
Letters: `B` rows, `T` tokens, `C` columns of a page table, `N` tokens of all rows, `D` hidden, `V` vocabulary.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxft.core.cache import AdaptedTables, SharedTables, cast_params
from jaxft.core.packing import Branches
from jaxft.core.partition import ADAPTER, BASE
from jaxft.core.sharding import Sharding, by_rows, compute_platform, constrain, gather_params
from jaxft.core.types import Model, Params, RouterScores
from jaxft.models.block import Block, make_context
from jaxft.models.config import DecoderConfig, LayerKind, LoraSpec, layers_with
from jaxft.models.experts import Routing, router_scores
from jaxft.models.layer_stack import CHOSEN, Remat, apply_layers, cut_layer, stacked
from jaxft.models.layers import GATE_UP, QKV, decoding_layer, look_up, make_norm, project_to_vocabulary
from jaxft.models.lora import LORA_NAMES, Leaves, has_adapters, merge_or_put_beside, put_beside
from jaxft.models.paged import EXPERTS_AXIS, LayerPages, init_pages, page_axis
from jaxft.models.quantized import EIGHT_BITS, quantize, with_quantized_kernels


@cache
def norm_binder(config: DecoderConfig) -> Callable[[Params], Any]:
    """Return `bind(plain dict) -> RMSNorm` of the residual stream."""
    return binder(lambda rngs: make_norm(config, config.hidden_size))


@cache
def block_binder(
    config: DecoderConfig, lora: LoraSpec | None, *, has_experts: bool = False, is_joined: bool = False
) -> Callable[[Params], Any]:
    """Return `bind(plain dict) -> Block`, with projections apart or, to decode, joined."""
    return binder(lambda rngs: Block(config, rngs, is_joined, lora, has_experts=has_experts))


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
        def init_block(has_experts: bool, key: Any) -> Params:
            return nnx.to_pure_dict(nnx.split(Block(config, nnx.Rngs(key), lora=lora, has_experts=has_experts))[1])

        def init_layers(keys: Any) -> Params:
            """Draw the layers of each kind, and stack each array over those that have it."""
            stacks: dict[tuple[str, ...], Any] = {}
            for has_experts in sorted({kind.has_experts for kind in config.kinds}, reverse=True):
                drawn = jax.vmap(partial(init_block, has_experts))(keys)
                for path, leaf in flatten_dict(drawn).items():
                    layers = layers_with(config.kinds, path)
                    stacks[path] = leaf if len(layers) == config.num_layers else leaf[np.array(layers)]
            return unflatten_dict(stacks)

        outer_key, layers_key = jax.random.split(key)
        rngs, shape = nnx.Rngs(outer_key), (config.vocab_size, config.hidden_size)
        params = {
            "embed": jax.random.normal(rngs.params(), shape) * 0.02,
            "layers": init_layers(jax.random.split(layers_key, config.num_layers)),
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


class Network(NamedTuple):
    """The settings that the functions of a decoder follow from; `decoder` says what each means."""

    config: DecoderConfig
    remat: Remat
    compute_dtype: Any
    sampling_dtype: str | None
    quantize_head: bool
    kv_cache_dtype: str | None
    lora: LoraSpec | None
    sharding: Sharding | None

    def narrow(self, params: Params) -> Params:
        """Return parameters in the dtype of products."""
        return params if self.compute_dtype is None else cast_params(params, self.compute_dtype)

    def gather(self, params: Any) -> Any:
        """Return parameters gathered along `fsdp`, as they are where they are used."""
        return params if self.sharding is None else gather_params(self.sharding, self.sharding.gathered(), params)


def decoder(
    config: DecoderConfig,
    remat: Remat = "dots",
    *,
    compute_dtype: Any = None,
    sampling_dtype: str | None = None,
    quantize_head: bool = False,
    kv_cache_dtype: str | None = None,
    lora: LoraSpec | None = None,
    sharding: Sharding | None = None,
) -> Model:
    """Make the `Model` of a config; equal arguments give the same functions, so nothing is compiled twice.

    Parameters are `{"embed": [V D], "layers": {...}, "final_norm": {...}}`, and `lm_head [V D]` unless it is tied to
    the embedding; each array of `layers` has the layer on axis 0. `decode_layout` replaces `layers` by
    `decoding_layers`, a list with a dict per layer (`jaxft.models.layers`).
    With `lora`, parameters are `{"base": ..., "adapter": ...}` as `jaxft.models.lora` says.

    Args:
        config: shape of the model.
        remat: checkpoint policy: the activations that the backward pass recomputes.
        compute_dtype: dtype of products and activations: parameters are cast to it wherever they are used, and once
            per policy version to decode. Parameters, gradients and optimizer state keep their own dtype, and logits
            are float32. None computes in the dtype of the parameters.
        sampling_dtype: "int8" or "fp8" to decode with kernels in eight bits, made of the parameters once per policy
            version (`jaxft.models.quantized`); None for the kernels themselves.
        quantize_head: True to decode with a head in eight bits as well, beside the embedding if it is tied to it.
        kv_cache_dtype: "fp8" to keep keys and values in eight bits, without a scale; None for those of products.
        lora: rank, scale and targets of adapters; None for a model without adapters.
        sharding: result of `sharding_for`, to compute on a mesh; None for one device.
    """
    if (quantize_head or kv_cache_dtype) and sampling_dtype is None:
        raise ValueError("quantize_head or kv_cache_dtype without a sampling_dtype; wanted int8 or fp8 there")
    # The dtype is normalised, so that equal models have one cache entry.
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    return _model(Network(config, remat, dtype, sampling_dtype, quantize_head, kv_cache_dtype, lora, sharding))


@cache
def _model(net: Network) -> Model:
    return Model(
        config=net.config,
        init=partial(init, net),
        apply=partial(apply, net),
        unembed=partial(unembed, net),
        init_cache=partial(init_cache, net),
        decode_layout=partial(decode_layout, net),
        sharding=net.sharding,
        lora=net.lora,
        head=partial(head, net),
        logit_scale=net.config.logit_scale if net.config.logit_soft_cap is None and net.remat != "least" else None,
        num_experts=net.config.num_experts,
        sampling_dtype=net.sampling_dtype,
        quantize_head=net.quantize_head,
        kv_cache_dtype=net.kv_cache_dtype,
        with_remat=lambda remat: _model(net._replace(remat=remat)),
    )


def init(net: Network, key: Any) -> Params:
    """Make random parameters, sharded over the mesh."""
    return constrain(net.sharding, init_params(net.config, key, net.lora))


def apply(
    net: Network,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: tuple[LayerPages, ...] | None = None,
    tables: Int[Any, "B C"] | SharedTables | AdaptedTables | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    branches: Branches | None = None,
    chosen: Integer[Array, "L B T k"] | None = None,
    counted: Bool[Array, "B T"] | None = None,
    *,
    returns_routing: bool = False,
) -> tuple[Any, ...]:
    """Return the hidden state of each token and the cache, as `Model.apply` says.

    Args:
        chosen: experts of each token in each layer that has any, counted from 1, in place of those that the routers
            choose; the router chooses for tokens with 0. Without a cache the second result are `RouterScores` of the
            others.
        counted: those of them to sum scores of; None for all.
        returns_routing: a third result is the `Routing` of these layers.
    """
    if cache is not None and segment_ids is not None:
        raise ValueError("segment_ids were given with a cache; packed rows can be scored but not decoded")
    if cache is None:
        hidden, routing = score(net, params, tokens, positions, segment_ids, branches, chosen, counted, returns_routing)
        return (hidden, None, routing) if returns_routing else (hidden, routing)
    hidden, cache, routing = decode(net, params, tokens, positions, cache, tables, chosen)
    return (hidden, cache, routing) if returns_routing else (hidden, cache)


def score(
    net: Network,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    branches: Branches | None,
    chosen: Integer[Array, "L B T k"] | None,
    counted: Bool[Array, "B T"] | None,
    returns_routing: bool,
) -> tuple[Float[Array, "B T D"], Routing | RouterScores | None]:
    """Return the hidden state of each token of whole rows, layer by layer, and the routing if it is asked for."""
    config, sharding = net.config, net.sharding
    params = put_beside(net.narrow(params))
    norm = net.gather({"final_norm": params["final_norm"]})["final_norm"]
    x = embed(net, params, tokens, is_sampled=False)  # [B T D]
    positions = by_rows(sharding, positions)
    context = make_context(config, positions, None, segment_ids, sharding, dtype=x.dtype, branches=branches)
    spans = None if context.rows is None else context.rows.spans
    if spans is not None:  # rows whose segments cuDNN cannot keep apart are not silently wrong
        x = jnp.where(spans.is_refused[:, None, None], jnp.nan, x)

    def compute_layer(kind: LayerKind, x: Float[Array, "B T D"], layer: Params) -> tuple[Array, Any]:
        mlp = dict(layer["mlp"])
        experts = mlp.pop(CHOSEN, None)
        block = block_binder(config, net.lora, has_experts=kind.has_experts)(net.gather({**layer, "mlp": mlp}))
        output, _, routing = block(x, kind, context, None, experts)
        if experts is None or returns_routing:
            return output, routing if returns_routing else None
        return output, router_scores(routing, config, is_known if counted is None else is_known & counted)

    layers = params["layers"]
    if chosen is not None:
        layers, is_known = {**layers, "mlp": {**layers["mlp"], CHOSEN: chosen}}, chosen[0, ..., 0] > 0
    x, routing = apply_layers(compute_layer, net.remat, config.kinds, x, layers, compute_platform(sharding))
    return norm_binder(config)(norm)(x, in_halves=context.in_halves), routing


def decode(
    net: Network,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: tuple[LayerPages, ...],
    tables: Int[Any, "B C"] | SharedTables | AdaptedTables | None,
    chosen: Integer[Array, "L B T k"] | None,
) -> tuple[Float[Array, "B T D"], tuple[LayerPages, ...], Routing | None]:
    """Write tokens to their pages, and return their hidden state, the cache and the routing, layer by layer."""
    config, sharding = net.config, net.sharding
    params = net.narrow(params) if "decoding_layers" in params else decode_layout(net, params)
    norm = net.gather({"final_norm": params["final_norm"]})["final_norm"]
    x = embed(net, params, tokens, is_sampled=True)  # [B T D]
    layers, lora, places = params["decoding_layers"], net.lora, None
    if isinstance(tables, AdaptedTables):  # beside a base without adapters
        layers = [unflatten_dict(flatten_dict(each) | own) for each, own in zip(layers, tables.layers, strict=True)]
        lora = LoraSpec(1, 1.0, adapted_projections(tables.layers[0]))
        tables, places = tables[:2]
    tables, shared = tables if isinstance(tables, SharedTables) else (tables, None)
    if sharding is not None:  # each device attends to its own part of the pages
        own_pages = cache[0].keys.shape[page_axis(sharding)] // sharding.row_shards
        tables = jax.lax.rem(jnp.asarray(tables, jnp.int32), jnp.int32(own_pages))
    context = make_context(config, by_rows(sharding, positions), tables, None, sharding, shared)._replace(places=places)
    written, routings = list[Any](), list[Routing]()
    lora = lora if any(map(has_adapters, layers)) else None
    for layer, kind, pages in zip(layers, config.kinds, cache, strict=True):
        block = block_binder(config, lora, has_experts=kind.has_experts, is_joined=True)(layer)
        experts = chosen[len(routings)] if chosen is not None and kind.has_experts else None
        with jax.named_scope("layers"):
            x, pages, routing = block(x, kind, context, pages, experts)
        written.append(pages)
        routings += [] if routing is None else [routing]
    return norm_binder(config)(norm)(x, in_halves=context.in_halves), tuple(written), stacked(routings)


def embed(net: Network, params: Params, tokens: Int[Array, "B T"], *, is_sampled: bool) -> Float[Array, "B T D"]:
    """Return the residual stream before the first layer."""
    sharding, params, tokens = net.sharding, {"embed": params["embed"]}, by_rows(net.sharding, tokens)
    if sharding is None or sharding.devices == 1 or is_sampled:
        x = look_up(net.gather(params)["embed"], tokens)
    else:  # The gradients of a token's occurrences are summed on each device before they are exchanged.
        x = sharding.map_shards(
            lambda params, tokens: look_up(params["embed"], tokens), params, [tokens], sharding.row_axes
        )
    scale = net.config.embedding_scale
    return by_rows(sharding, x if scale == 1 else x * jnp.asarray(scale, x.dtype))


def head(net: Network, params: Params) -> Params:
    """Return the parameters that `unembed` reads."""
    base = params.get(BASE, params)
    name = "lm_head" if "lm_head" in base else "embed"
    return net.narrow({name: base[name]})


def unembed(net: Network, params: Params, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
    """Return the logits, with the model's scale and soft cap."""
    config, sharding, own = net.config, net.sharding, head(net, params)
    (kernel,) = (own if sharding is None or len(params) == 1 else net.gather(own)).values()
    logits = project_to_vocabulary(hidden, kernel)
    if config.logit_scale != 1:
        logits = logits * config.logit_scale
    if config.logit_soft_cap is not None:
        logits = config.logit_soft_cap * jnp.tanh(logits / config.logit_soft_cap)
    if sharding is None or "decoding_layers" not in params:
        return logits
    # Few rows: each device computes a slice of the logits.
    return sharding.constrain_axes(logits, sharding.row_axes, "tensor")


def init_cache(net: Network, pages: int, dtype: Any) -> tuple[LayerPages, ...]:
    """Make empty pages of all layers."""
    config, sharding, axis = net.config, net.sharding, page_axis(net.sharding)
    dtype = dtype if net.kv_cache_dtype is None else EIGHT_BITS[net.kv_cache_dtype][0]
    chosen = None if config.expert_table is None else (config.num_experts_per_tok, config.expert_table.dtype)

    def init_layer(kind: LayerKind) -> LayerPages:
        experts = chosen if kind.has_experts else None
        return init_pages(pages, config.num_kv_heads, config.head_dim, dtype, compute_platform(sharding), experts)

    cache = tuple(map(init_layer, config.kinds))
    if sharding is None or pages % sharding.row_shards:
        return cache
    axes = jax.tree.map(lambda leaf: EXPERTS_AXIS if leaf.ndim > 4 else axis, cache)
    return jax.lax.with_sharding_constraint(cache, sharding.page_shardings(axes))


def decode_layout(net: Network, params: Params) -> Params:
    """Return the parameters to decode with: in the dtype of products, layer by layer, projections joined."""
    if net.sampling_dtype is not None:  # of the parameters in full
        base = with_quantized_kernels(params.get(BASE, params), net.sampling_dtype, net.compute_dtype)
        if net.quantize_head:
            table = base["lm_head" if "lm_head" in base else "embed"]
            base["lm_head"] = quantize(table.T, net.sampling_dtype, net.compute_dtype).T
        params = base if net.lora is None else {**params, BASE: base}
    # Adapters are merged in full before anything is rounded; without them the cast comes first, which costs less.
    params = net.narrow(params) if net.lora is None else merge_or_put_beside(net.lora, params)
    layers = [
        decoding_layer(cut_layer(net.config, params["layers"], layer), net.config, net.sharding)
        for layer in range(net.config.num_layers)
    ]
    others = {name: leaf for name, leaf in params.items() if name != "layers"}
    return net.narrow(net.gather({**others, "decoding_layers": layers}))


@partial(jax.jit, static_argnums=(0, 1, 2))
def lay_out_adapter(config: DecoderConfig, scale: float, dtype: Any, params: Params) -> list[Leaves]:
    """Return an adapter of each layer by its paths in `decoding_layers`, as `adapter_product` takes it.

    Args:
        config: config of the base, which is on one device.
        scale: factor of the products of the adapter.
        dtype: dtype of the result.
        params: parameters with the adapter; those of the base are not copied.
    """
    layers = put_beside(params)["layers"]
    made = [decoding_layer(cut_layer(config, layers, layer), config, None) for layer in range(config.num_layers)]
    forms = {"lora_a": jnp.transpose, "lora_b": lambda leaf: scale * leaf}
    return [
        {path: forms[path[-1]](leaf).astype(dtype) for path, leaf in flatten_dict(layer).items() if path[-1] in forms}
        for layer in made
    ]


def adapted_projections(layer: Leaves) -> tuple[str, ...]:
    """Return the projections that have adapters in a layer to decode with; of joined ones, the first of them.

    >>> adapted_projections({("mlp", "gate_up_proj", "lora_a"): 1, ("mlp", "gate_up_proj", "lora_b"): 2})
    ('mlp/gate_proj',)
    """
    first = {"qkv_proj": QKV[0], "gate_up_proj": GATE_UP[0]}
    return tuple(dict.fromkeys(f"{part}/{first.get(name, name)}" for part, name, _ in layer))
