"""LoRA (arXiv 2106.09685): a frozen base, and low-rank adapters beside its kernels, which alone are trained.

Parameters are `{"base": ..., "adapter": ...}`: the base as any decoder's, and a tree with `lora_a [L D r]` and
`lora_b [L r F]` of every projection that has an adapter. Training applies them beside the kernels; decoding uses merged
kernels, made once per policy version (`Model.decode_layout`), but for a base that is narrower than its adapters: there
merging would round most of what they say away.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxft.core.cache import compute_dtype
from jaxft.core.partition import ADAPTER, BASE
from jaxft.core.sharding import Sharding, constrain
from jaxft.core.types import Model, Params
from jaxft.models.config import DecoderConfig, LoraSpec
from jaxft.models.decoder import Remat, decoder


def lora_decoder(
    config: DecoderConfig, lora: LoraSpec, remat: Remat = "dots", sharding: Sharding | None = None
) -> Model:
    """A decoder with adapters; equal arguments give the same functions."""
    return _lora_decoder(config, lora, remat, sharding)


@cache
def _lora_decoder(config: DecoderConfig, lora: LoraSpec, remat: Remat, sharding: Sharding | None) -> Model:
    plain, beside = decoder(config, remat, sharding), decoder(config, remat, sharding, lora)

    def init(key: Any) -> Params:
        base_key, adapter_key = jax.random.split(key)
        flat = flatten_dict(beside.init(adapter_key))
        adapter = unflatten_dict({path: x for path, x in flat.items() if path[-1].startswith("lora_")})
        return {BASE: plain.init(base_key), ADAPTER: constrain(sharding, adapter)}

    def apply(params: Params, *arguments: Any, **named: Any) -> Any:
        if BASE in params:
            return beside.apply(together(params), *arguments, **named)
        return (beside if has_adapters(params) else plain).apply(params, *arguments, **named)

    def unembed(params: Params, hidden: Any) -> Any:
        return plain.unembed(params.get(BASE, params), hidden)

    def decode_layout(params: Params) -> Params:
        if params[BASE]["ends"]["embedding"].dtype.itemsize < jnp.dtype(jnp.float32).itemsize:
            dtype = compute_dtype(params[BASE])
            narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), params[ADAPTER])
            return beside.decode_layout(together({BASE: params[BASE], ADAPTER: narrow}))
        return plain.decode_layout(merge_lora(lora, params))

    def together(params: Params) -> Params:
        return unflatten_dict({**flatten_dict(params[BASE]), **flatten_dict(params[ADAPTER])})

    def has_adapters(params: Params) -> bool:
        return any(path[-1] == "lora_a" for path in flatten_dict(params["transposed_layers"][0]))

    return plain._replace(init=init, apply=apply, unembed=unembed, decode_layout=decode_layout, lora=lora)


def base_model(model: Model, remat: Remat = "dots") -> Model:
    """The model of the base alone, whose parameters are `params["base"]`."""
    assert isinstance(model.config, DecoderConfig)
    return decoder(model.config, remat, model.sharding)


@partial(jax.jit, static_argnums=0)
def init_adapter(model: Model, key: Any) -> Params:
    """Fresh adapters of such a decoder: A uniform in `±1/sqrt(D)`, B zero, so that they change nothing yet."""
    return model.init(key)[ADAPTER]


def merge_lora(lora: LoraSpec, params: Params) -> Params:
    """The base with every adapter added to its kernel: the parameters of a model without adapters."""
    flat, adapter = flatten_dict(params[BASE]), flatten_dict(params[ADAPTER])
    for path in [path for path in adapter if path[-1] == "lora_a"]:
        kernel = flat[(*path[:-1], "kernel")]
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        a, b = adapter[path].astype(wide), adapter[(*path[:-1], "lora_b")].astype(wide)
        delta = jnp.matmul(a, b, precision="highest")  # once per version: exact also where products are not by default
        flat[(*path[:-1], "kernel")] = (kernel + lora.scale * delta).astype(kernel.dtype)
    return unflatten_dict(flat)
