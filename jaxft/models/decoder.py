"""One decoder for Llama, Mistral, Qwen2 and Qwen3: flax nnx modules, from outside pure functions on plain dicts.

Parameters of the blocks are stacked on a leading layer axis and scanned while training; decoding takes them one by one
(`decode_layout`), each layer with its own buffers of keys and values.
Letters: `B` rows, `T` tokens, `S` places of the cache (or tokens attended to), `D` hidden, `H` query heads, `K`
key/value heads, `G = H / K`, `h` head width, `P = h / 2` pairs that a rotation turns, `L` layers.
"""

from collections.abc import Callable
from functools import cache
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxft.core.types import Cache, Model, Params
from jaxft.models.attention import (
    LayerBlocks,
    LayerCache,
    attend,
    can_use_flash,
    flash_attention,
    joined,
    parted,
    write_token,
    write_tokens,
)
from jaxft.models.config import DecoderConfig, RopeScaling
from jaxft.models.sums import row_sum


class Context(NamedTuple):
    """What every layer needs to know of the tokens: their rotation, their places, and which of them they may see."""

    cos: Float[Array, "B T P"]
    sin: Float[Array, "B T P"]
    positions: Int[Array, "B T"]
    visible: Bool[Array, "B T S"]
    is_plain: bool  # each row is one sequence without a cache: what it sees is before it, and within the window


@jax.custom_vjp
def matmul(x: Float[Array, "N D"], kernel: Float[Array, "D F"]) -> Float[Array, "N F"]:
    """`x @ kernel`, with the kernel's gradient as one product over tokens in the kernel's own layout.

    Automatic differentiation forms it transposed, which makes a whole update on CPU 2 to 4 times slower.
    """
    return x @ kernel


def _matmul_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _matmul_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = saved
    return cotangent @ kernel.T, jax.lax.dot_general(x, cotangent, (((0,), (0,)), ((), ()))).astype(kernel.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


class Linear(nnx.Module):
    """`x @ kernel + bias` on the last axis; the kernel may be given transposed."""

    def __init__(self, inputs: int, outputs: int, use_bias: bool, rngs: nnx.Rngs, is_transposed: bool) -> None:
        kernel = jax.random.normal(rngs.params(), (inputs, outputs)) * inputs**-0.5
        self.kernel = nnx.Param(kernel.T if is_transposed else kernel)
        self.bias = nnx.Param(jnp.zeros(outputs)) if use_bias else None
        self.is_transposed = is_transposed

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N F"]:
        # Transposed, XLA for CPU gives a row the same bits in this product whether it is one of 8 or of 64.
        kernel = self.kernel[...].T if self.is_transposed else self.kernel[...]
        y = matmul(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale`, computed in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x: Float[Array, "B T *N D"]) -> Float[Array, "B T *N D"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = row_sum(wide**2, decoding=x.shape[1] == 1) / x.shape[-1]
        normed = wide * jax.lax.rsqrt(mean + self.eps)
        return normed.astype(x.dtype) * self.scale[...]


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, is_transposed: bool) -> None:
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, width, config.qkv_bias, rngs, is_transposed)
        self.k_proj = Linear(config.hidden_size, kv_width, config.qkv_bias, rngs, is_transposed)
        self.v_proj = Linear(config.hidden_size, kv_width, config.qkv_bias, rngs, is_transposed)
        self.o_proj = Linear(width, config.hidden_size, config.output_bias, rngs, is_transposed)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.window = config.sliding_window

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: LayerBlocks | None
    ) -> tuple[Float[Array, "B T D"], LayerBlocks | None]:
        rows, length, _ = x.shape
        q = self.q_proj(x).reshape(rows, length, self.heads, self.head_dim)
        k = self.k_proj(x).reshape(rows, length, self.kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(rows, length, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)

        if context.is_plain and can_use_flash(q.dtype, self.head_dim, jax.default_backend()):
            mixed = flash_attention(q, k, v, self.window, "cudnn")
            return self.o_proj(mixed.reshape(rows, length, -1)), None

        now = LayerCache(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))  # [B K h T], [B K T h]
        if cache is None:
            attended = attend(q, [now], context.visible)
        elif length == 1:
            cache = write_token(cache, now, context.positions[:, 0])
            attended = attend(q, cache, context.visible)
        else:
            whole = write_tokens(joined(cache), now, context.positions[:, 0])
            attended = attend(q, [whole], context.visible)
            cache = parted(whole, [block.values.shape[2] for block in cache])
        return self.o_proj(attended.reshape(rows, length, -1)), cache


class FeedForward(nnx.Module):
    """SwiGLU (arXiv 2002.05202): `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, is_transposed: bool) -> None:
        width, bias = config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(config.hidden_size, width, bias, rngs, is_transposed)
        self.up_proj = Linear(config.hidden_size, width, bias, rngs, is_transposed)
        self.down_proj = Linear(width, config.hidden_size, bias, rngs, is_transposed)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, is_transposed: bool) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rngs, is_transposed)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config, rngs, is_transposed)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: LayerBlocks | None
    ) -> tuple[Float[Array, "B T D"], LayerBlocks | None]:
        attended, cache = self.self_attn(self.input_layernorm(x), context, cache)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Ends(nnx.Module):
    """Everything but the blocks: the embedding, the last norm and the output projection."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape) * 0.02)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Stored as transformers stores it, a row per token, so that both kinds of head are the same product.
        self.lm_head = None if config.tie_word_embeddings else nnx.Param(jax.random.normal(rngs.params(), shape) * 0.02)


def as_functions(make: Callable[[nnx.Rngs], nnx.Module]) -> tuple[Callable[[Any], Params], Callable[[Params], Any]]:
    """`init(key) -> plain dict` and `bind(plain dict) -> module`: the only place where modules and dicts meet."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init(key: Any) -> Params:
        return nnx.to_pure_dict(nnx.split(make(nnx.Rngs(key)))[1])

    def bind(params: Params) -> Any:
        state = jax.tree.map(lambda variable: variable, shapes)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    return init, bind


Remat = Literal["none", "dots", "full"]
"""What the backward pass computes again (arXiv 1604.06174): nothing; all but products with weights; whole layers."""


def decoder(config: DecoderConfig, remat: Remat = "dots") -> Model:
    """The model contract for a config; equal arguments give the same functions, so nothing is compiled twice.

    Parameters are `{"ends": {...}, "layers": {...}}`; each array of `layers` has the layer on axis 0. To decode there
    is instead a list with a dict per layer, `transposed_layers`, whose kernels are.
    """
    return _decoder(config, remat)  # with a default filled in, or it would be cached as another


@cache
def _decoder(config: DecoderConfig, remat: Remat) -> Model:
    init_ends, bind_ends = as_functions(lambda rngs: Ends(config, rngs))
    init_block, bind_block = as_functions(lambda rngs: Block(config, rngs, is_transposed=False))
    _, bind_transposed = as_functions(lambda rngs: Block(config, rngs, is_transposed=True))

    def init(key: Any) -> Params:
        ends_key, layers_key = jax.random.split(key)
        layers = jax.vmap(init_block)(jax.random.split(layers_key, config.num_layers))
        return {"ends": init_ends(ends_key), "layers": layers}

    def apply(
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: Cache | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        ends = bind_ends(params["ends"])
        x = jnp.take(ends.embedding[...], tokens, axis=0)  # [B T D]
        context = make_context(config, positions, cache, segment_ids)
        if cache is None:
            x = _scan_layers(bind_block, params["layers"], x, context, remat)
        else:
            updated = []
            for index, layer in enumerate(bind_layers(params)):
                x, blocks = layer(x, context, [block[index] for block in cache])
                updated.append(blocks)
            cache = tuple(zip(*updated, strict=True))
        return ends.norm(x), cache

    def bind_layers(params: Params) -> list[Block]:
        if "transposed_layers" in params:
            return list(map(bind_transposed, params["transposed_layers"]))
        return list(map(bind_block, per_layer(params["layers"], config.num_layers)))

    def unembed(params: Params, hidden: Float[Array, "*N D"]) -> Float[Array, "*N V"]:
        ends = params["ends"]
        head = ends["embedding"] if config.tie_word_embeddings else ends["lm_head"]
        return _project_to_vocabulary(hidden, head)

    def init_cache(rows: int, places: int, dtype: Any) -> tuple[LayerCache, ...]:
        shape = rows, config.num_kv_heads
        return tuple(
            LayerCache(
                jnp.zeros((*shape, config.head_dim, places), dtype), jnp.zeros((*shape, places, config.head_dim), dtype)
            )
            for _ in range(config.num_layers)
        )

    def decode_layout(params: Params) -> Params:
        layers = per_layer(params["layers"], config.num_layers)
        transposed = jax.tree.map(lambda leaf: leaf.T if leaf.ndim == 2 else leaf, layers)
        return {"ends": params["ends"], "transposed_layers": transposed}

    return Model(config, init, apply, unembed, init_cache, decode_layout)


def _project_to_vocabulary(hidden: Float[Array, "*N D"], head: Float[Array, "V D"]) -> Float[Array, "*N V"]:
    flat = hidden.reshape(-1, hidden.shape[-1])
    wide = jnp.promote_types(flat.dtype, jnp.float32)
    logits = jax.lax.dot_general(flat, head, (((1,), (1,)), ((), ())), preferred_element_type=wide)
    return logits.reshape(*hidden.shape[:-1], -1)


def _scan_layers(
    bind_block: Callable[[Params], Block], layers: Params, x: Float[Array, "B T D"], context: Context, remat: Remat
) -> Float[Array, "B T D"]:
    saveable = {
        "none": jax.checkpoint_policies.everything_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "full": jax.checkpoint_policies.nothing_saveable,
    }[remat]

    def step(x: Float[Array, "B T D"], layer: Params) -> tuple[Float[Array, "B T D"], None]:
        return bind_block(layer)(x, context, None)[0], None

    return jax.lax.scan(jax.checkpoint(step, policy=saveable), x, layers)[0]


def per_layer(layers: Params, num_layers: int) -> list[Params]:
    """Stacked block parameters as a list with a dict per layer."""
    return [jax.tree.map(itemgetter(i), layers) for i in range(num_layers)]


def make_context(
    config: DecoderConfig,
    positions: Int[Array, "B T"],
    cache: Cache | None,
    segment_ids: Int[Array, "B T"] | None,
) -> Context:
    """Rotations, and who sees whom: earlier places of the same segment, within the window.

    The place of a token in its row (not its position, which restarts in each packed segment) orders tokens without a
    cache; with one, places and positions are the same thing.

    Raises:
        ValueError: segments together with a cache.
    """
    cos, sin = rotary(config, positions)
    if cache is None:
        query = key = jnp.arange(positions.shape[1])
        query = query[None, :, None]
    elif segment_ids is None:
        query, key = positions[:, :, None], jnp.arange(sum(block[0].keys.shape[-1] for block in cache))
    else:
        raise ValueError("segment_ids were given with a cache; packed rows can be scored but not decoded")
    distance = query - key[None, None, :]  # [B T S]
    visible = distance >= 0
    if config.sliding_window is not None:
        visible &= distance < config.sliding_window
    if segment_ids is not None:
        visible &= segment_ids[:, :, None] == segment_ids[:, None, :]
    visible = jnp.broadcast_to(visible, (*positions.shape, visible.shape[-1]))
    return Context(cos, sin, positions, visible, is_plain=cache is None and segment_ids is None)


def rotary(config: DecoderConfig, positions: Int[Array, "B T"]) -> tuple[Float[Array, "B T P"], Float[Array, "B T P"]]:
    """Cosines and sines of the rotary angles (arXiv 2104.09864), one per pair of a head's components."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = stretch_frequencies(frequencies, config.rope_scaling)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def stretch_frequencies(frequencies: Float[np.ndarray, "P"], scaling: RopeScaling) -> Float[np.ndarray, "P"]:
    """Llama 3.1's rotary frequencies (arXiv 2407.21783): long wavelengths slowed by `factor`, short ones kept."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)


def rotate(
    x: Float[Array, "B T N h"], cos: Float[Array, "B T P"], sin: Float[Array, "B T P"]
) -> Float[Array, "B T N h"]:
    """Turns each pair (i, i + h/2) of a head's components by its angle."""
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, cos.dtype)), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
