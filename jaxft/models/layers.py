"""The parts of a decoder's layers: embedding, projections with adapters, RMSNorm, rotary positions, feed-forward.

To decode, projections of the same input are joined and kernels transposed (`decoding_layer`). A step of decoding reads
all weights for a few tokens, so that fewer and larger products take less time. Outputs of a joined product are ordered
by shards of the heads (mesh axis `tensor`), and within a shard by projection: each device has the queries, keys and
values of its own heads.
Letters: `B` rows, `T` tokens, `N` tokens of all rows or heads, `D` input width, `F` output width, `r` rank of an
adapter, `A` places of adapters, `V` vocabulary, `h` head width, `P` pairs of a head's components that a rotation turns.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from jaxft.core.reductions import invariant_sum, rounded
from jaxft.core.sharding import Sharding, by_heads, compute_platform
from jaxft.core.types import Params
from jaxft.models.config import Activation, DecoderConfig, LoraSpec
from jaxft.models.lora import joined_adapter
from jaxft.models.quantized import Quantized, scaled_product
from jaxft.models.rope import LinearScaling, Rope


@jax.custom_vjp
def look_up(embedding: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Return the embedding of each token; gradients of a token's occurrences are summed in float32 or wider.

    Automatic differentiation sums them in the dtype of the embedding. In bfloat16 a sum of ones stops at 256, so that
    a frequent token gets a fraction of its gradient.

    >>> gradient = jax.grad(lambda table: look_up(table, jnp.zeros((1, 1000), int)).sum())(jnp.ones((1, 1), "bfloat16"))
    >>> print(gradient)  # one for each position
    [[1000]]
    """
    return jnp.take(embedding, tokens, axis=0)


def _look_up_forward(embedding: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return look_up(embedding, tokens), (embedding, tokens)


def _look_up_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    embedding, tokens = saved
    wide = jnp.promote_types(embedding.dtype, jnp.float32)
    zero = jnp.zeros((), wide)
    if embedding.dtype.itemsize < 4:
        # Else XLA for GPUs makes the table of zeros long before, together with that of the head's gradient.
        cotangent, zero = jax.lax.optimization_barrier((cotangent, zero))
    sums = jnp.broadcast_to(zero, embedding.shape).at[tokens].add(cotangent.astype(wide))
    return sums.astype(embedding.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


@jax.custom_vjp
def matmul(x: Float[Array, "N D"], kernel: Float[Array, "D F"]) -> Float[Array, "N F"]:
    """Return `x @ kernel`, with the kernel's gradient as one product over tokens in the kernel's own layout.

    Automatic differentiation forms that gradient transposed, which makes a whole update on CPU 2 to 4 times slower.
    """
    return x @ kernel


def _matmul_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _matmul_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = saved
    return cotangent @ kernel.T, jax.lax.dot_general(x, cotangent, (((0,), (0,)), ((), ()))).astype(kernel.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def product(x: Float[Array, "N D"], kernel: Float[Array, "D F"] | Quantized) -> Float[Array, "N F"]:
    """Return `x @ kernel` for a kernel that may be in eight bits, which has no gradient then."""
    return scaled_product(x, kernel) if isinstance(kernel, Quantized) else matmul(x, kernel)


def project_to_vocabulary(hidden: Float[Array, "*N D"], head: Float[Array, "V D"] | Quantized) -> Float[Array, "*N V"]:
    """Return the logits `hidden @ head.T`, in float32 or wider, for a head that may be in eight bits."""
    if isinstance(head, Quantized):
        logits = project_to_vocabulary(hidden, head.values.astype(hidden.dtype))
        return logits * head.scale[:, 0].astype(logits.dtype)
    flat = hidden.reshape(-1, hidden.shape[-1])
    is_narrow = flat.dtype.itemsize < 4
    logits = _logits_of_narrow(flat, head) if is_narrow else _logits(flat, head)
    return logits.reshape(*hidden.shape[:-1], -1)


def _logits(flat: Float[Array, "N D"], head: Float[Array, "V D"]) -> Float[Array, "N V"]:
    wide = jnp.promote_types(flat.dtype, jnp.float32)
    return jax.lax.dot_general(flat, head, (((1,), (1,)), ((), ())), preferred_element_type=wide)


@jax.custom_vjp
def _logits_of_narrow(flat: Float[Array, "N D"], head: Float[Array, "V D"]) -> Float[Array, "N V"]:
    """Return `_logits`; its gradients are products of narrow numbers, as those of float32 take GPUs 8 times as long."""
    return _logits(flat, head)


def _logits_forward(flat: Array, head: Array) -> tuple[Array, tuple[Array, Array]]:
    return _logits(flat, head), (flat, head)


def _logits_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    flat, head = saved
    cotangent = cotangent.astype(flat.dtype)
    of_flat = jax.lax.dot_general(cotangent, head, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    of_head = jax.lax.dot_general(cotangent, flat, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return of_flat.astype(flat.dtype), of_head.astype(head.dtype)


_logits_of_narrow.defvjp(_logits_forward, _logits_backward)


class Linear(nnx.Module):
    """`x @ kernel + bias` on the last axis, plus `scale * x @ A @ B` with an adapter; the kernel may be transposed."""

    def __init__(
        self, inputs: int, outputs: int, use_bias: bool, rngs: nnx.Rngs, is_transposed: bool, lora: LoraSpec | None
    ) -> None:
        kernel = jax.random.normal(rngs.params(), (inputs, outputs)) * inputs**-0.5
        self.kernel = nnx.Param(kernel.T if is_transposed else kernel)
        self.bias = nnx.Param(jnp.zeros(outputs)) if use_bias else None
        self.is_transposed = is_transposed
        # As in the paper's code: A is uniform and B zero, so that training begins at the base.
        shape, bound = (inputs, 0 if lora is None else lora.rank), inputs**-0.5
        drawn = None if lora is None else jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound)
        self.lora_a = None if drawn is None else nnx.Param(drawn)
        self.lora_b = None if lora is None else nnx.Param(jnp.zeros((lora.rank, outputs)))
        self.lora_scale = 0.0 if lora is None else lora.scale

    def __call__(self, x: Float[Array, "*N D"], places: Int[Array, "B"] | None = None) -> Float[Array, "*N F"]:
        """Return the product of each token; with the places of rows' adapters, `lora_a` and `lora_b` are stacks."""
        # With a transposed kernel, XLA for CPU gives a row the same bits among 8 rows as among 64.
        kernel = self.kernel[...].T if self.is_transposed else self.kernel[...]
        flat = x.reshape(-1, x.shape[-1])
        y = product(flat, kernel)
        if self.lora_a is not None and self.lora_b is not None:
            # In the dtype of activations.
            a, b = (matrix[...].astype(flat.dtype) for matrix in (self.lora_a, self.lora_b))
            if places is None:
                y = y + self.lora_scale * matmul(matmul(flat, a), b)
            else:
                y = y + adapter_product(flat, a, b, jnp.repeat(places, len(flat) // len(places)))
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias[...]


def adapter_product(
    x: Float[Array, "N D"], a: Float[Array, "A r D"], b: Float[Array, "A r F"], places: Int[Array, "N"]
) -> Float[Array, "N F"]:
    """Return `x @ A @ B` of each row with the adapter in its place; zeros for place -1.

    All rows are multiplied with all adapters: these are few and narrow, and each is read once.

    >>> a, b = jnp.array([[[1.0]], [[10.0]]]), jnp.array([[[2.0]], [[3.0]]])
    >>> adapter_product(jnp.ones((3, 1)), a, b, jnp.array([1, -1, 0])).tolist()
    [[30.0], [0.0], [2.0]]
    """
    hidden = (x @ a.reshape(-1, a.shape[-1]).T).reshape(len(x), *a.shape[:2])  # [N A r]
    is_own = places[:, None] == jnp.arange(len(a))
    return jnp.where(is_own[:, :, None], hidden, 0).reshape(len(x), -1) @ b.reshape(-1, b.shape[-1])


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last axis, computed in float32 or wider; the scale may be one for each head.

    With an offset it is `x / rms(x) * (1 + scale)`, all in float32, as `1 + scale` is no narrow number.
    """

    def __init__(self, shape: int | tuple[int, ...], eps: float, has_offset: bool = False) -> None:
        self.scale = nnx.Param(jnp.zeros(shape) if has_offset else jnp.ones(shape))
        self.eps, self.has_offset = eps, has_offset

    def __call__(self, x: Float[Array, "B T *N D"], *, in_halves: bool) -> Float[Array, "B T *N D"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = invariant_sum(wide**2, in_halves=in_halves) / x.shape[-1]
        normed = wide * jax.lax.rsqrt(mean + self.eps)
        if self.has_offset:
            return (normed * (1 + self.scale[...].astype(wide.dtype))).astype(x.dtype)
        return normed.astype(x.dtype) * self.scale[...]


def make_norm(config: DecoderConfig, shape: int | tuple[int, ...]) -> RMSNorm:
    """Return a norm of this shape as the model has it."""
    return RMSNorm(shape, config.rms_norm_eps, config.norm_offset)


class Angles(NamedTuple):
    """Cosines and sines of the rotary angles of tokens, and the factor of their queries if it is not 1."""

    cos: Float[Array, "B T P"]
    sin: Float[Array, "B T P"]
    query_factor: Float[Array, "B T"] | None = None


def rotary_angles(rope: Rope, head_dim: int, positions: Int[Array, "B T"]) -> Angles:
    """Return the rotary angles of tokens at these positions."""
    frequencies = jnp.asarray(rope.frequencies(head_dim), jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.scaling is None:
        return Angles(cos, sin)
    if rope.scaling.angle_factor != 1:
        cos, sin = cos * rope.scaling.angle_factor, sin * rope.scaling.angle_factor
    if not rope.query_growth or isinstance(rope.scaling, LinearScaling):
        return Angles(cos, sin)
    spans = jnp.maximum(positions, 0) // rope.scaling.original_max_position_embeddings
    return Angles(cos, sin, 1 + rope.query_growth * jnp.log(1 + spans.astype(jnp.float32)))


def rotate(x: Float[Array, "B T N h"], angles: Angles, platform: str) -> Float[Array, "B T N h"]:
    """Rotate each pair (i, i + P) of the first 2 P components by its angle; the bits are the same on any `platform`."""
    turned_width = 2 * angles.cos.shape[-1]
    if turned_width < x.shape[-1]:
        turned = rotate(x[..., :turned_width], angles, platform)
        return jnp.concatenate([turned, x[..., turned_width:]], axis=-1)
    pairs = x.astype(jnp.promote_types(x.dtype, angles.cos.dtype)).reshape(*x.shape[:-1], 2, -1)  # [B T N 2 P]
    # GPUs fuse a reversal, unlike a concatenation, with what comes before and after; on CPUs it takes longer.
    swapped = jnp.concatenate([pairs[..., 1:, :], pairs[..., :1, :]], -2) if platform == "cpu" else jnp.flip(pairs, -2)
    turned = swapped * jnp.array([[-1.0], [1.0]], pairs.dtype)
    # Rounded, as XLA for CPU would make one operation of a product and the sum in some programs and not in others.
    mixed = rounded(pairs * angles.cos[:, :, None, None, :]) + rounded(turned * angles.sin[:, :, None, None, :])
    return mixed.reshape(x.shape).astype(x.dtype)


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


WIDENED = "feed-forward projections"
"""Checkpoint name of the outputs of gate and up; no gradient needs that of down."""

ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


class FeedForward(nnx.Module):
    """A gated feed-forward layer (arXiv 2002.05202): `down(activation(gate(x)) * up(x))`; `place` is its path."""

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        is_joined: bool,
        lora: LoraSpec | None,
        width: int,
        place: str = "mlp",
    ) -> None:
        hidden = config.hidden_size

        def linear(names: Sequence[str], inputs: int, outputs: int) -> Linear:
            adapter = joined_adapter(lora, [f"{place}/{name}" for name in names])
            return Linear(inputs, outputs, config.mlp_bias, rngs, is_joined, adapter)

        if is_joined:
            self.gate_up_proj = linear(GATE_UP, hidden, 2 * width)
        else:
            self.gate_proj = linear(["gate_proj"], hidden, width)
            self.up_proj = linear(["up_proj"], hidden, width)
        self.down_proj = linear(["down_proj"], width, hidden)
        self.width, self.is_joined = width, is_joined
        self.activate = ACTIVATIONS[config.activation]

    def __call__(
        self, x: Float[Array, "B T D"], sharding: Sharding | None, places: Int[Array, "B"] | None = None
    ) -> Float[Array, "B T D"]:
        if self.is_joined:
            both = by_heads(sharding, self.gate_up_proj(x, places))
            gate, up = split_outputs(both, head_shards(sharding, self.width), (self.width, self.width))
        elif self.is_one_product(sharding):
            kernels = self.gate_proj.kernel[...], self.up_proj.kernel[...]
            kernel = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-1), *kernels)
            both = checkpoint_name(product(x.reshape(-1, x.shape[-1]), kernel), WIDENED)
            both = both.reshape(*x.shape[:-1], -1)
            gate, up = both[..., : self.width], both[..., self.width :]  # a split's gradient would be a copy
        else:
            gate, up = (checkpoint_name(project(x), WIDENED) for project in (self.gate_proj, self.up_proj))
        return self.down_proj(by_heads(sharding, self.activate(gate) * up), places)

    def is_one_product(self, sharding: Sharding | None) -> bool:
        """True if gate and up are one product in training, so that GPUs compute both of its gradients by one kernel.

        There the kernels are joined by their cast. On a mesh gathered ones would be copied.
        """
        is_plain = all(each.bias is None and each.lora_a is None for each in (self.gate_proj, self.up_proj))
        return is_plain and (sharding is None or sharding.devices == 1) and compute_platform(sharding) == "gpu"


def join_outputs(parts: Sequence[Shaped[Array, "*N _"]], shards: int) -> Shaped[Array, "*N F"]:
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
    kernels = [each["kernel"] for each in projections]
    joined = {"kernel": jax.tree.map(lambda *parts: join_outputs(parts, shards), *kernels)}
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
    attention = dict(layer["self_attn"])
    heads = config.num_heads, config.num_kv_heads
    shards = head_shards(sharding, config.num_kv_heads)
    attention["qkv_proj"] = join_projections([attention.pop(name) for name in QKV], shards)
    if config.qk_norm == "heads":
        scales = [attention.pop(name)["scale"] for name in ("q_norm", "k_norm")]
        each = [jnp.broadcast_to(x, (n // shards, *x.shape)) for x, n in zip(scales, heads, strict=True)]
        attention["qk_norm"] = {"scale": jnp.concatenate(each)}
    mlp = join_feed_forward(layer["mlp"], sharding)
    return {**layer, "self_attn": transpose_kernels(attention), "mlp": transpose_kernels(mlp)}


def join_feed_forward(mlp: Params, sharding: Sharding | None) -> Params:
    """Return a feed-forward layer with gate and up joined; of a mixture those of the shared expert."""
    if "experts" in mlp:
        shared = {name: join_feed_forward(part, sharding) for name, part in mlp.items() if name == "shared_expert"}
        return {**mlp, **shared}
    shards = head_shards(sharding, mlp["up_proj"]["kernel"].shape[-1])
    others = {name: projection for name, projection in mlp.items() if name not in GATE_UP}
    return {**others, "gate_up_proj": join_projections([mlp[name] for name in GATE_UP], shards)}


def transpose_kernels(part: Params) -> Params:
    """Return a part of a layer with transposed kernels of its projections, but for those of experts."""

    def transposed(name: str, held: Any) -> Any:
        if name == "shared_expert":
            return transpose_kernels(held)
        return {**held, "kernel": held["kernel"].T} if isinstance(held, Mapping) and "kernel" in held else held

    return {name: transposed(name, held) for name, held in part.items()}
