"""One decoder for all families: flax nnx modules inside (`jaxft.models.block`), pure functions on plain dicts outside.

Training stacks the parameters of the layers on a leading axis; it goes through them one by one on GPUs, and elsewhere
scans over them, several at a time where layers of several kinds repeat. Decoding takes them layer by layer, joined
(`jaxft.models.layers`), each with its own pages of keys and values (`jaxft.models.paged`).
Letters: `B` rows, `T` tokens, `C` columns of a page table, `N` tokens of all rows, `D` hidden, `V` vocabulary.
"""

from collections.abc import Callable
from functools import cache, partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int

from jaxft.core.cache import SharedTables
from jaxft.core.packing import Branches
from jaxft.core.partition import ADAPTER, BASE
from jaxft.core.sharding import ROW_AXES, Sharding, by_rows, compute_platform, constrain, gather_params
from jaxft.core.types import Model, Params
from jaxft.models.block import PROJECTED, Block, make_context
from jaxft.models.config import DecoderConfig, LayerKind, LoraSpec
from jaxft.models.flash import saves_kernels
from jaxft.models.layers import WIDENED, decoding_layer, look_up, make_norm, project_to_vocabulary
from jaxft.models.lora import LORA_NAMES, has_adapters, merge_or_put_beside, put_beside
from jaxft.models.paged import LayerPages, init_pages, page_axis


@cache
def norm_binder(config: DecoderConfig) -> Callable[[Params], Any]:
    """Return `bind(plain dict) -> RMSNorm` of the residual stream."""
    return binder(lambda rngs: make_norm(config, config.hidden_size))


@cache
def block_binder(config: DecoderConfig, lora: LoraSpec | None, *, is_joined: bool = False) -> Callable[[Params], Any]:
    """Return `bind(plain dict) -> Block`, with projections apart or, to decode, joined."""
    return binder(lambda rngs: Block(config, rngs, is_joined, lora))


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


Remat = Literal["none", "dots", "projections", "attention", "full", "least"]
"""Checkpoint policies (arXiv 1604.06174), the fastest first: recompute nothing, all but products with weights and
attention kernels, all but attention kernels and their projections, all but attention kernels, or whole layers. From
`dots` on, attention of the reference is recomputed. `least` is `full` without what takes memory to be fast: layers are
scanned on GPUs too, and no head is fused."""

REMATS: tuple[Remat, ...] = get_args(Remat)


def auto_remats(platform: str) -> tuple[Remat, ...]:
    """Return the policies to choose from on devices of a platform, the fastest first.

    `none` is among them on GPUs only, whose layers are unrolled with all but `least`. A scan writes and reads all that
    it saves.
    """
    return REMATS if platform == "gpu" else REMATS[1:]


def _saves(*names: str) -> Callable[..., Any]:
    """Return the policy that saves the arrays of these names, and the results of attention kernels."""
    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(policies.save_only_these_names(*names), saves_kernels)


SAVEABLE = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": _saves(PROJECTED, WIDENED),
    "projections": _saves(PROJECTED),
    "attention": saves_kernels,
    "full": jax.checkpoint_policies.nothing_saveable,
    "least": jax.checkpoint_policies.nothing_saveable,
}


class Network(NamedTuple):
    """The settings that the functions of a decoder follow from; `decoder` says what each means."""

    config: DecoderConfig
    remat: Remat
    compute_dtype: Any
    lora: LoraSpec | None
    sharding: Sharding | None

    def narrow(self, params: Params) -> Params:
        """Return parameters in the dtype of products."""
        if self.compute_dtype is None:
            return params
        return jax.tree.map(
            lambda leaf: leaf.astype(self.compute_dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params
        )

    def gather(self, params: Any) -> Any:
        """Return parameters gathered along `fsdp`, as they are where they are used."""
        return params if self.sharding is None else gather_params(self.sharding, self.sharding.gathered(), params)


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
    `decoding_layers`, a list with a dict per layer (`jaxft.models.layers`).
    With `lora`, parameters are `{"base": ..., "adapter": ...}` as `jaxft.models.lora` says.

    Args:
        config: shape of the model.
        remat: checkpoint policy: the activations that the backward pass recomputes.
        compute_dtype: dtype of products and activations: parameters are cast to it wherever they are used, and once
            per policy version to decode. Parameters, gradients and optimizer state keep their own dtype, and logits
            are float32. None computes in the dtype of the parameters.
        lora: rank, scale and targets of adapters; None for a model without adapters.
        sharding: result of `sharding_for`, to compute on a mesh; None for one device.
    """
    # The dtype is normalised, so that equal models have one cache entry.
    return _model(Network(config, remat, None if compute_dtype is None else jnp.dtype(compute_dtype), lora, sharding))


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
    tables: Int[Any, "B C"] | SharedTables | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    branches: Branches | None = None,
) -> tuple[Float[Array, "B T D"], tuple[LayerPages, ...] | None]:
    """Return the hidden state of each token and the cache, as `Model.apply` says."""
    if cache is None:
        return score(net, params, tokens, positions, segment_ids, branches), None
    if segment_ids is not None:
        raise ValueError("segment_ids were given with a cache; packed rows can be scored but not decoded")
    return decode(net, params, tokens, positions, cache, tables)


def score(
    net: Network,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    branches: Branches | None,
) -> Float[Array, "B T D"]:
    """Return the hidden state of each token of whole rows, layer by layer."""
    config, sharding = net.config, net.sharding
    params = put_beside(net.narrow(params))
    norm = net.gather({"final_norm": params["final_norm"]})["final_norm"]
    x = embed(net, params, tokens, is_sampled=False)  # [B T D]
    positions = by_rows(sharding, positions)
    context = make_context(config, positions, None, segment_ids, sharding, dtype=x.dtype, branches=branches)
    spans = None if context.rows is None else context.rows.spans
    if spans is not None:  # rows whose segments cuDNN cannot keep apart are not silently wrong
        x = jnp.where(spans.is_refused[:, None, None], jnp.nan, x)

    def compute_layer(kind: LayerKind, x: Float[Array, "B T D"], layer: Params) -> Float[Array, "B T D"]:
        output: Array = block_binder(config, net.lora)(net.gather(layer))(x, kind, context, None)[0]
        return output

    x = apply_layers(compute_layer, net.remat, config.kinds, x, params["layers"], compute_platform(sharding))
    output: Array = norm_binder(config)(norm)(x, in_halves=context.in_halves)
    return output


def decode(
    net: Network,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: tuple[LayerPages, ...],
    tables: Int[Any, "B C"] | SharedTables | None,
) -> tuple[Float[Array, "B T D"], tuple[LayerPages, ...]]:
    """Write tokens to their pages, and return their hidden state and the cache, layer by layer."""
    config, sharding = net.config, net.sharding
    params = net.narrow(params) if "decoding_layers" in params else decode_layout(net, params)
    norm = net.gather({"final_norm": params["final_norm"]})["final_norm"]
    x = embed(net, params, tokens, is_sampled=True)  # [B T D]
    tables, shared = tables if isinstance(tables, SharedTables) else (tables, None)
    if sharding is not None:  # each device attends to its own part of the pages
        own_pages = cache[0].keys.shape[page_axis(sharding)] // sharding.row_shards
        tables = jax.lax.rem(jnp.asarray(tables, jnp.int32), jnp.int32(own_pages))
    context = make_context(config, by_rows(sharding, positions), tables, None, sharding, shared)
    layers, written = params["decoding_layers"], []
    bind = block_binder(config, net.lora if has_adapters(layers[0]) else None, is_joined=True)
    for layer, kind, pages in zip(map(bind, layers), config.kinds, cache, strict=True):
        with jax.named_scope("layers"):
            x, pages = layer(x, kind, context, pages)
        written.append(pages)
    return norm_binder(config)(norm)(x, in_halves=context.in_halves), tuple(written)


def embed(net: Network, params: Params, tokens: Int[Array, "B T"], *, is_sampled: bool) -> Float[Array, "B T D"]:
    """Return the residual stream before the first layer."""
    sharding, params, tokens = net.sharding, {"embed": params["embed"]}, by_rows(net.sharding, tokens)
    if sharding is None or sharding.devices == 1 or is_sampled:
        x = look_up(net.gather(params)["embed"], tokens)
    else:  # The gradients of a token's occurrences are summed on each device before they are exchanged.
        x = sharding.map_shards(lambda params, tokens: look_up(params["embed"], tokens), params, [tokens], ROW_AXES)
    scale = net.config.embedding_scale
    return by_rows(sharding, x if scale == 1 else x * jnp.asarray(scale, x.dtype))


def head(net: Network, params: Params) -> Params:
    """Return the parameters that `unembed` reads."""
    name = "embed" if net.config.tie_word_embeddings else "lm_head"
    return net.narrow({name: params.get(BASE, params)[name]})


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
    return sharding.constrain_logits(logits)  # few rows: each device computes a slice of the logits


def init_cache(net: Network, pages: int, dtype: Any) -> tuple[LayerPages, ...]:
    """Make empty pages of all layers."""
    config, sharding, axis = net.config, net.sharding, page_axis(net.sharding)
    cache = tuple(
        init_pages(pages, config.num_kv_heads, config.head_dim, dtype, compute_platform(sharding))
        for _ in range(config.num_layers)
    )
    if sharding is None or pages % sharding.row_shards:
        return cache
    return jax.lax.with_sharding_constraint(cache, sharding.page_shardings(jax.tree.map(lambda _: axis, cache)))


def decode_layout(net: Network, params: Params) -> Params:
    """Return the parameters to decode with: in the dtype of products, layer by layer, projections joined."""
    # Adapters are merged in full before anything is rounded; without them the cast comes first, which costs less.
    params = net.narrow(params) if net.lora is None else merge_or_put_beside(net.lora, params)
    layers = [
        decoding_layer(jax.tree.map(itemgetter(i), params["layers"]), net.config, net.sharding)
        for i in range(net.config.num_layers)
    ]
    others = {name: leaf for name, leaf in params.items() if name != "layers"}
    return net.narrow(net.gather({**others, "decoding_layers": layers}))


@partial(jax.jit, static_argnums=0)
def lay_out_adapters(config: DecoderConfig, params: Params) -> list[dict[tuple[str, ...], Array]]:
    """Return the adapters of each layer by their paths in `decoding_layers`; the base, of one device, is not copied."""
    layers = put_beside(params)["layers"]
    made = [decoding_layer(jax.tree.map(itemgetter(i), layers), config, None) for i in range(config.num_layers)]
    return [{path: leaf for path, leaf in flatten_dict(layer).items() if path[-1] in LORA_NAMES} for layer in made]


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


@jax.named_scope("layers")  # which `benchmarks/cost.py` reads
def apply_layers(
    compute: Callable[[LayerKind, Array, Params], Array],
    remat: Remat,
    kinds: tuple[LayerKind, ...],
    x: Float[Array, "B T D"],
    layers: Params,
    platform: str,
) -> Float[Array, "B T D"]:
    """Return the residual stream after all layers, whose parameters are stacked on axis 0.

    GPUs have no loop over layers unless `remat` is `least`.

    Args:
        compute: computes a layer.
        remat: checkpoint policy of each layer.
        kinds: kind of each layer.
        x: residual stream.
        layers: parameters of all layers.
        platform: platform of the devices.
    """
    flat = flatten_dict(layers)
    frozen = {path for path in flat if path[-1] not in LORA_NAMES} if has_adapters(layers) else set()
    if platform == "gpu" and remat != "least":
        return unroll_layers(compute, remat, kinds, x, flat, frozen)
    runs, whole, parts = layer_runs(kinds), dict[Any, Array](), [flat]
    if len(runs) > 1:
        whole = {path: flat[path] for path in frozen}
        split = split_layers(flat, frozen, [len(run.kinds) * run.repeats for run in runs])
        parts = [{path: pieces[i] for path, pieces in split.items()} for i in range(len(runs))]

    # The layer is cut in here, as the backward pass would otherwise keep a copy of it.
    @partial(jax.checkpoint, policy=SAVEABLE[remat], static_argnums=(0, 1))
    def compute_layer(run: LayerRun, place: int, x: Array, turn: Any, start: Any, whole: Any) -> Array:
        layer = {
            path: jax.lax.dynamic_index_in_dim(leaf, start + place, keepdims=False) for path, leaf in whole.items()
        }
        layer |= turn if len(run.kinds) == 1 else {path: leaf[place] for path, leaf in turn.items()}
        return compute(run.kinds[place], x, unflatten_dict(layer))

    first = 0
    for run, part in zip(runs, parts, strict=True):
        count = len(run.kinds)

        def step(x: Array, turn: Any, run: LayerRun = run) -> tuple[Array, None]:
            for place in range(len(run.kinds)):
                x = compute_layer(run, place, x, *turn, whole)
            return x, None

        if count > 1:
            part = {path: leaf.reshape(run.repeats, count, *leaf.shape[1:]) for path, leaf in part.items()}
        starts = first + count * jnp.arange(run.repeats)
        x = jax.lax.scan(step, x, (part, starts))[0]
        first += count * run.repeats
    return x


def split_layers(flat: dict[Any, Array], frozen: set[Any], sizes: list[int]) -> dict[Any, list[Array]]:
    """Split parameters that are trained after so many layers each.

    A split of parameters that were cast is part of the cast, and its gradient, a concatenation, part of the sum of
    gradients. The base of adapters would be copied: its layers are to be cut from the whole stack.
    """
    return {path: list(jax.lax.split(leaf, sizes)) for path, leaf in flat.items() if path not in frozen}


def unroll_layers(
    compute: Callable[[LayerKind, Array, Params], Array],
    remat: Remat,
    kinds: tuple[LayerKind, ...],
    x: Float[Array, "B T D"],
    flat: dict[Any, Array],
    frozen: set[Any],
) -> Float[Array, "B T D"]:
    """Return what `apply_layers` does, without a loop, and for `none` without a checkpoint: XLA keeps what it reads.

    XLA for GPUs copies what a scan keeps into stacks of all layers, and begins with zeros there.
    """
    whole, split = {path: flat[path] for path in frozen}, split_layers(flat, frozen, [1] * len(kinds))

    def compute_layer(place: int, x: Array, own: Any, whole: Any) -> Array:
        layer = {path: leaf[place] for path, leaf in whole.items()} | {path: leaf[0] for path, leaf in own.items()}
        return compute(kinds[place], x, unflatten_dict(layer))

    if remat != "none":
        compute_layer = jax.checkpoint(compute_layer, policy=SAVEABLE[remat], static_argnums=0)
    for place in range(len(kinds)):
        x = compute_layer(place, x, {path: pieces[place] for path, pieces in split.items()}, whole)
    return x
