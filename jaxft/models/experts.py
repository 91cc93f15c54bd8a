"""A mixture of experts in the place of a feed-forward layer (arXiv 1701.06538): routing, and products by expert.

Rows of tokens are put in the order of their experts, multiplied by `grouped_dot`, and put back: no token is dropped.
Letters: `n` tokens, `m` rows, one for each expert of each token, `E` experts, `k` experts of a token, `D` input width,
`F` output width, `r` rank of an adapter.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxft.core.sharding import EXPERT, Sharding, compute_devices, path_text
from jaxft.core.types import Params, RouterScores
from jaxft.models.config import EXPERTS, SHARED_EXPERT, DecoderConfig, LoraSpec
from jaxft.models.grouped import Products, choose_products, grouped_dot
from jaxft.models.layers import ACTIVATIONS, WIDENED, FeedForward, project_to_vocabulary
from jaxft.models.lora import joined_adapter
from jaxft.models.quantized import Quantized


class Routing(NamedTuple):
    """A router's logits, the experts of each token, and those that the router alone would choose.

    Those of several layers are stacked on axis 0.
    """

    logits: Float[Array, "*L B T E"]
    experts: Int[Array, "*L B T k"]
    own: Int[Array, "*L B T k"]


def router_scores(routing: Routing, config: DecoderConfig, counted: Bool[Array, "B T"]) -> RouterScores:
    """Return the `RouterScores` of one layer over the tokens of `counted`."""
    logits = routing.logits
    log_probs = jax.nn.log_softmax(jax.nn.log_sigmoid(logits) if config.router == "sigmoid" else logits)
    probs = jnp.where(counted[..., None], jnp.exp(log_probs), 0.0)
    differs = counted & (jnp.sort(routing.experts) != jnp.sort(routing.own)).any(axis=-1)
    return RouterScores(-(probs * log_probs).sum(), differs.sum(dtype=jnp.float32), probs.sum(axis=(0, 1)))


def route(
    logits: Float[Array, "n E"],
    config: DecoderConfig,
    chosen: Int[Array, "n k"] | None = None,
    selection_bias: Float[Array, " E"] | None = None,
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """Return the experts of each token, those of the highest scores first, and the weights of their outputs.

    Args:
        logits: logits of the router, in float32 or wider.
        config: kind of the router, number of experts, and what their weights are divided and multiplied by.
        chosen: experts to take in place of those of the highest scores; weights follow from the present logits.
        selection_bias: added to the scores that experts are chosen by.

    >>> config = DecoderConfig("mixtral", 8, 4, 4, 1, 1, 1, 4, num_experts_per_tok=2, norm_topk_prob=True)
    >>> experts, weights = jax.jit(route, static_argnums=1)(jnp.array([[0.0, 2.0, 2.0]]), config)
    >>> print(experts, weights)  # equal scores, divided by their sum
    [[1 2]] [[0.5 0.5]]
    """
    scores = logits
    if config.router != "topk_softmax":
        scores = jax.nn.softmax(logits) if config.router == "softmax" else jax.nn.sigmoid(logits)
    if chosen is None:
        ranked = scores if selection_bias is None else scores + selection_bias
        chosen = jax.lax.top_k(ranked, config.num_experts_per_tok)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.router == "topk_softmax":
        weights = jax.nn.softmax(weights)
    elif config.norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return chosen, weights * config.routed_scaling_factor


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_rows(
    x: Float[Array, "n D"], order: Int[Array, " m"], inverse: Int[Array, " m"], copies: int
) -> Float[Array, "m D"]:
    """Return so many copies of each row, in this order; the gradient is taken by the inverse one, not by a scatter."""
    return x[order // copies]


def _take_forward(x: Array, order: Array, inverse: Array, copies: int) -> tuple[Array, Array]:
    return take_rows(x, order, inverse, copies), inverse


def _take_backward(copies: int, inverse: Array, cotangent: Array) -> tuple[Array, None, None]:
    of_copies = cotangent[inverse].reshape(-1, copies, cotangent.shape[-1])
    return of_copies.sum(axis=1, dtype=jnp.float32).astype(cotangent.dtype), None, None


take_rows.defvjp(_take_forward, _take_backward)


class Groups(NamedTuple):
    """Rows in the order of their experts: the expert of each, and the number of rows of each expert."""

    experts: Int[Array, " m"]
    sizes: Int[Array, " E"]
    products: Products


class ExpertLinear(nnx.Module):
    """`x @ kernel[e] + bias[e]` for rows of the experts `e`, plus `scale * x @ A[e] @ B[e]` with an adapter."""

    def __init__(self, config: DecoderConfig, inputs: int, outputs: int, rngs: nnx.Rngs, lora: LoraSpec | None) -> None:
        experts, bound = config.num_experts, inputs**-0.5
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (experts, inputs, outputs)) * bound)
        self.bias = nnx.Param(jnp.zeros((experts, outputs))) if config.expert_bias else None
        shape = (experts, inputs, 0 if lora is None else lora.rank)
        drawn = None if lora is None else jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound)
        self.lora_a = None if drawn is None else nnx.Param(drawn)
        self.lora_b = None if lora is None else nnx.Param(jnp.zeros((experts, lora.rank, outputs)))
        self.lora_scale = 0.0 if lora is None else lora.scale

    def __call__(self, rows: Float[Array, "m D"], groups: Groups) -> Float[Array, "m F"]:
        def multiply(rows: Array, weights: Array) -> Array:
            return grouped_dot(rows, weights, groups.sizes, groups.products)

        kernel = self.kernel[...]
        if isinstance(kernel, Quantized):
            y = multiply(rows, kernel.values) * kernel.scale[groups.experts, 0].astype(rows.dtype)
        else:
            y = multiply(rows, kernel)
        if self.lora_a is not None and self.lora_b is not None:
            a, b = (matrix[...].astype(rows.dtype) for matrix in (self.lora_a, self.lora_b))
            y = y + self.lora_scale * multiply(multiply(rows, a), b)
        return y if self.bias is None else y + self.bias[...][groups.experts]


class ExpertProjections(nnx.Module):
    """The three projections of all experts."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, lora: LoraSpec | None) -> None:
        def linear(name: str, inputs: int, outputs: int) -> ExpertLinear:
            return ExpertLinear(config, inputs, outputs, rngs, joined_adapter(lora, [f"{EXPERTS}/{name}"]))

        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate_proj = linear("gate_proj", hidden, width)
        self.up_proj = linear("up_proj", hidden, width)
        self.down_proj = linear("down_proj", width, hidden)
        self.activate = ACTIVATIONS[config.activation]
        self.limit, self.alpha = config.swiglu_limit, config.swiglu_alpha

    def __call__(self, rows: Float[Array, "m D"], groups: Groups) -> Float[Array, "m D"]:
        gate, up = (checkpoint_name(each(rows, groups), WIDENED) for each in (self.gate_proj, self.up_proj))
        if self.limit is None:
            return self.down_proj(self.activate(gate) * up, groups)
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return self.down_proj(gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1), groups)


def sum_experts(
    held: ExpertProjections,
    first: int | Array,
    products: Products,
    x: Float[Array, "B T D"],
    chosen: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
) -> Float[Array, "B T D"]:
    """Return the sum of the outputs of each token's experts, times their weights, of those that are held.

    Args:
        held: consecutive experts.
        first: number of the first of them.
        products: form of the products.
        x: tokens.
        chosen: experts of each token; those that are not held, such as -1, cost no products.
        weights: weights of the outputs.
    """
    count, copies = held.up_proj.kernel.shape[0], chosen.shape[-1]
    owners = chosen.reshape(-1) - first
    is_held = (owners >= 0) & (owners < count)
    owners = jnp.where(is_held, owners, count)
    order = jnp.argsort(owners)
    inverse = jnp.argsort(order)
    sizes = (owners[:, None] == jnp.arange(count)).sum(axis=0, dtype=jnp.int32)
    groups = Groups(jnp.minimum(owners[order], count - 1), sizes, products)
    rows = take_rows(x.reshape(-1, x.shape[-1]), order, inverse, copies)
    outputs = take_rows(held(rows, groups), inverse, order, 1).reshape(*chosen.shape, -1)  # [B T k D]
    weights = jnp.where(is_held.reshape(chosen.shape), weights, 0.0)
    return (outputs * weights[..., None]).sum(axis=2).astype(x.dtype)


def mix_experts(
    experts: ExpertProjections,
    sharding: Sharding | None,
    x: Float[Array, "B T D"],
    chosen: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
) -> Float[Array, "B T D"]:
    """Return `sum_experts` of all experts; on a mesh each device computes with those that it holds.

    Along `expert` devices gather each other's tokens and scatter the sums. For N devices and k experts a token that
    sends N - 1 copies of a token, and sending it to each of its experts k (N - 1) / N: more as long as N < k, of sizes
    that only the devices know.
    """
    kernel = experts.up_proj.kernel[...]
    weights_dtype = kernel.values.dtype if isinstance(kernel, Quantized) else kernel.dtype
    products = choose_products(compute_devices(sharding)[0], x.dtype, weights_dtype)
    if sharding is None:
        return sum_experts(experts, 0, products, x, chosen, weights)
    (graph, state), used, has_axis = nnx.split(experts), sharding.gathered(), EXPERT in sharding.mesh.shape
    params, rows = nnx.to_pure_dict(state), sharding.cut(x.shape, sharding.row_axes).spec
    specs = jax.tree_util.tree_map_with_path(
        lambda path, leaf: used.spec(f"experts/{path_text(path)}", leaf.shape), params
    )
    tensor = sharding.mesh.shape["tensor"] if "tensor" in used.spec("experts/up_proj/kernel", kernel.shape) else 1
    is_divided = has_axis and rows[0] is not None

    def compute(params: Params, *tokens: Array) -> Array:
        if "bias" in params["down_proj"]:  # which each device along `tensor` adds
            params["down_proj"]["bias"] = params["down_proj"]["bias"] / tensor
        nnx.replace_by_pure_dict(state, params)
        held, first = nnx.merge(graph, state), 0
        if has_axis:
            first = jax.lax.axis_index(EXPERT) * params["up_proj"]["kernel"].shape[0]
        if is_divided:
            tokens = tuple(jax.lax.all_gather(each, EXPERT, axis=0, tiled=True) for each in tokens)
        y = sum_experts(held, first, products, *tokens)
        y = jax.lax.psum(y, "tensor") if tensor > 1 else y
        if is_divided:
            return jax.lax.psum_scatter(y, EXPERT, scatter_dimension=0, tiled=True)
        return jax.lax.psum(y, EXPERT) if has_axis else y

    shards = jax.shard_map(
        compute, mesh=sharding.mesh, in_specs=(specs, rows, rows, rows), out_specs=rows, check_vma=False
    )
    return shards(params, x, chosen, weights)


class Router(nnx.Module):
    """A projection to logits, in float32 or wider; the kernel may be transposed."""

    def __init__(self, inputs: int, outputs: int, use_bias: bool, rngs: nnx.Rngs, is_transposed: bool) -> None:
        kernel = jax.random.normal(rngs.params(), (inputs, outputs)) * inputs**-0.5
        self.kernel = nnx.Param(kernel.T if is_transposed else kernel)
        self.bias = nnx.Param(jnp.zeros(outputs)) if use_bias else None
        self.is_transposed = is_transposed

    def __call__(self, x: Float[Array, "*n D"]) -> Float[Array, "*n E"]:
        logits = project_to_vocabulary(x, self.kernel[...] if self.is_transposed else self.kernel[...].T)
        return logits if self.bias is None else logits + self.bias[...]


class Mixture(nnx.Module):
    """The sum of a token's experts, times their weights, and of the shared expert if there is one."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, is_joined: bool, lora: LoraSpec | None) -> None:
        hidden, experts = config.hidden_size, config.num_experts
        self.router = Router(hidden, experts, config.router_bias, rngs, is_joined)
        self.selection_bias = nnx.Param(jnp.zeros(experts)) if config.selection_bias else None
        self.experts = ExpertProjections(config, rngs, lora)
        width = config.shared_width
        self.shared_expert = FeedForward(config, rngs, is_joined, lora, width, SHARED_EXPERT) if width else None
        self.shared_expert_gate = Router(hidden, 1, False, rngs, is_joined) if config.shared_expert_gate else None
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B T D"],
        sharding: Sharding | None,
        chosen: Integer[Array, "B T k"] | None,
        is_real: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Routing]:
        """Return the layer's output and its routing, which is `chosen` if that is given; padding has no experts."""
        config, shape, flat = self.config, x.shape[:2], x.reshape(-1, x.shape[-1])
        logits, bias = self.router(flat), self.selection_bias
        own, weights = route(logits, config, selection_bias=None if bias is None else bias[...])
        experts = own
        if chosen is not None:
            given = chosen.reshape(own.shape).astype(jnp.int32) - 1
            experts, weights = route(logits, config, jnp.where(given < 0, own, given))
        experts, weights = experts.reshape(*shape, -1), weights.reshape(*shape, -1)
        asked = experts if is_real is None else jnp.where(is_real[..., None], experts, -1)
        y = mix_experts(self.experts, sharding, x, asked, weights)
        if self.shared_expert is not None:
            shared = self.shared_expert(x, sharding)
            gate = None if self.shared_expert_gate is None else jax.nn.sigmoid(self.shared_expert_gate(x))
            y = y + (shared if gate is None else (shared * gate).astype(x.dtype))
        return y, Routing(*(each.reshape(*shape, -1) for each in (logits, experts, own)))
