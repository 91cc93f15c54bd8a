"""Making of models, with random weights or from files (Hugging Face's, GGUF, PEFT's), to train and to sample from."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, SingleDeviceSharding

from jaxft.core.cache import cast_params
from jaxft.core.partition import ADAPTER, BASE
from jaxft.core.sharding import Sharding, commit_like, constrain
from jaxft.core.types import Model, Params
from jaxft.errors import ModelFileError
from jaxft.files import home_path
from jaxft.models.config import DecoderConfig, LoraSpec, model_preset
from jaxft.models.decoder import Remat, decoder, init_params, parameter_shapes
from jaxft.models.decoder_sharding import sharding_for
from jaxft.models.gguf import config_file, gguf_file, gguf_tensors
from jaxft.models.hf import file_tensors
from jaxft.models.hf_config import load_config
from jaxft.models.hf_files import DTYPES, check_manifest, load_json, local_folder, read_weights, stored_tensors
from jaxft.models.lora import merge_and_drop
from jaxft.models.mxfp4 import dequantised
from jaxft.models.peft import CONFIG as ADAPTER_CONFIG
from jaxft.models.peft import load_adapter, load_lora_config, saved_ignored_keys
from jaxft.models.quantized import EIGHT_BITS, with_quantized_kernels

ADAPTER_STREAM = 4
"""Number folded into the key for fresh adapters, so that the base is the same with and without adapters."""

Lora = LoraSpec | str | os.PathLike[str]
"""Settings of fresh adapters, or a folder of adapters in PEFT's format."""


class Dtypes(NamedTuple):
    """Dtypes of parameters and of products, and the kind of kernels in eight bits, if they are."""

    params: Any
    compute: Any
    kernels: str | None = None


def init_model(
    config: DecoderConfig | str,
    key: Any,
    *,
    dtype: Any = jnp.float32,
    compute_dtype: Any = None,
    sampling_dtype: str | None = None,
    quantize_head: bool = False,
    kv_cache_dtype: str | None = None,
    remat: Remat = "dots",
    lora: Lora | None = None,
    mesh: Mesh | None = None,
) -> tuple[Model, Params]:
    """Make a decoder with random weights, from a config or the name of a preset; equal keys give equal bits.

    Args:
        dtype: dtype of the parameters; adapters are float32. With them it may be "int8": the kernels of the frozen base
            are then in eight bits (`jaxft.models.quantized`), and the rest of it in `compute_dtype`.
        compute_dtype: dtype of products and activations; None for that of the parameters.
        sampling_dtype: "int8" or "fp8" to sample with kernels in eight bits; None for the parameters.
        quantize_head: True to sample with a head in eight bits, too.
        kv_cache_dtype: "fp8" to sample with keys and values in eight bits, too.
        remat: activations that the backward pass recomputes to save memory: none, all but products with weights and
            attention kernels (`dots`), all but attention and its projections (`projections`), all but attention kernels
            (`attention`), or whole layers (`full`).
        lora: low-rank adapters, of which alone the weights are trained; None for a model without adapters.
        mesh: mesh of `make_mesh` to shard the parameters over, see `sharding_for`; None for one device.

    Raises:
        ValueError: no preset has this name, `dtype` or `compute_dtype` is not supported, or the model does not divide
            over `mesh`.
        ModelFileError: the folder of adapters is damaged, or its adapters belong to another base.
    """
    config = model_preset(config) if isinstance(config, str) else config
    dtypes = _checked_dtypes(dtype, compute_dtype, lora)
    sharding = None if mesh is None else sharding_for(config, mesh)
    options: dict[str, Any] = {"compute_dtype": dtypes.compute, "sampling_dtype": sampling_dtype}
    options |= {"quantize_head": quantize_head, "kv_cache_dtype": kv_cache_dtype}
    model = decoder(config, remat, **options, lora=lora_spec(lora), sharding=sharding)
    return model, _add_adapters(model, _init_base(config, dtypes, sharding, key), lora, key)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _init_base(config: DecoderConfig, dtypes: Dtypes, sharding: Sharding | None, key: Any) -> Params:
    params = cast_params(init_params(config, key), dtypes.params)
    return constrain(sharding, params if dtypes.kernels is None else with_quantized_kernels(params, dtypes.kernels))


def load_model(
    path_or_hub_id: str | os.PathLike[str],
    *,
    key: Any = None,
    dtype: Any = jnp.float32,
    compute_dtype: Any = None,
    sampling_dtype: str | None = None,
    quantize_head: bool = False,
    kv_cache_dtype: str | None = None,
    remat: Remat = "dots",
    lora: Lora | None = None,
    mesh: Mesh | None = None,
    context_tokens: int = 0,
    ignored_keys: Sequence[str] = (),
) -> tuple[Model, Params]:
    """Load a model of `jaxft.models.families` from a folder or a GGUF file, or from the hub when there is none.

    Weights are read one tensor at a time, cast to `dtype`, and copied to their devices, so that the host never has more
    than one parameter. If there are both `model.safetensors` and an index of shards, the single file is read, as in
    transformers. The files of a manifest by `save_model` are verified first.

    Args:
        key: PRNG key of fresh adapters, when `lora` is a `LoraSpec`; None for `jax.random.key(0)`.
        dtype, compute_dtype, sampling_dtype, quantize_head, kv_cache_dtype, remat, lora, mesh: as for `init_model`.
        context_tokens: tokens of the longest context, on which positions with LongRoPE depend, as of Phi-4-mini.
        ignored_keys: keys of `config.json` that change no arithmetic, though they are not known. A folder of adapters
            names those of its base.

    Raises:
        ModelFileError: the download failed, a file is absent, is corrupt or does not match `config.json`, or the
            adapters belong to another base.
        ValueError: `dtype` or `compute_dtype` is not supported, the model does not divide over `mesh`, or it knows no
            positions as high as `context_tokens`.
    """
    dtypes = _checked_dtypes(dtype, compute_dtype, lora)
    folder = local_folder(path_or_hub_id)
    check_manifest(folder)
    if lora is not None and not isinstance(lora, LoraSpec):
        ignored_keys = (*ignored_keys, *saved_ignored_keys(lora))
    config = load_config(config_file(folder), ignored_keys).for_context(context_tokens)
    tensors = file_tensors(config)
    sharding = None if mesh is None else sharding_for(config, mesh)
    options: dict[str, Any] = {"compute_dtype": dtypes.compute, "sampling_dtype": sampling_dtype}
    options |= {"quantize_head": quantize_head, "kv_cache_dtype": kv_cache_dtype}
    model = decoder(config, remat, **options, lora=lora_spec(lora), sharding=sharding)
    shapes, device = parameter_shapes(config), SingleDeviceSharding(jnp.zeros(()).device)
    places = jax.tree.map(lambda _: device, shapes) if sharding is None else sharding.shardings(shapes)
    file = gguf_file(folder)
    stored = dequantised(stored_tensors(folder)) if file is None else gguf_tensors(file, tensors)
    base = read_weights(folder, stored, tensors, dtypes.params, places, dtypes.kernels)
    return model, _add_adapters(model, base, lora, key)


def load_merged(folder: str | os.PathLike[str], *, dtype: Any = jnp.float32) -> tuple[Model, Params]:
    """Load a folder's adapters merged into their base, as a model without adapters.

    Raises:
        ModelFileError: the base that `adapter_config.json` names is not found, or the adapters belong to another one.
    """
    model, params = load_model(base_place(folder), lora=folder)  # in full, and rounded once they are merged
    assert isinstance(model.lora, LoraSpec)
    base, adapter = (flatten_dict(params.pop(name)) for name in (BASE, ADAPTER))
    return base_model(model), merge_and_drop(model.lora, base, adapter, dtype)


def with_adapters(model: Model, lora: LoraSpec, *, compute_dtype: Any = None) -> Model:
    """Return a base with adapters, whose parameters are `{"base": ..., "adapter": ...}`."""
    assert isinstance(model.config, DecoderConfig)
    return decoder(model.config, compute_dtype=compute_dtype, lora=lora, sharding=model.sharding)


def base_place(folder: str | os.PathLike[str]) -> str | Path:
    """Return the folder or hub id of the base of a folder's adapters: its subfolder `base`, or that of its config.

    Raises:
        ModelFileError: there is neither.
    """
    folder = home_path(folder)
    named = load_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    place = folder / BASE if (folder / BASE).is_dir() else named
    if not isinstance(place, str | Path):
        raise ModelFileError(f"{folder / ADAPTER_CONFIG}: base_model_name_or_path is {named!r}; wanted a path or an id")
    return place


def on_mesh(model: Model, mesh: Mesh | None, *, compute_dtype: Any = None) -> Model:
    """Return the same model on another mesh.

    Args:
        model: result of `init_model` or `load_model`.
        mesh: the other mesh; None for one device.
        compute_dtype: as for `init_model`.
    """
    assert isinstance(model.config, DecoderConfig) and isinstance(model.lora, LoraSpec | None)
    sharding = None if mesh is None else sharding_for(model.config, mesh)
    options: dict[str, Any] = {"sampling_dtype": model.sampling_dtype, "quantize_head": model.quantize_head}
    options |= {"kv_cache_dtype": model.kv_cache_dtype}
    return decoder(model.config, compute_dtype=compute_dtype, **options, lora=model.lora, sharding=sharding)


def base_model(model: Model) -> Model:
    """Return the model of the base alone, whose parameters are `params["base"]`."""
    assert isinstance(model.config, DecoderConfig)
    return decoder(model.config, sharding=model.sharding)


def _add_adapters(model: Model, base: Params, lora: Lora | None, key: Any) -> Params:
    """Add adapters, fresh or read from their folder, to the parameters of a base; without `lora`, return `base`."""
    if lora is None:
        return base
    if isinstance(lora, LoraSpec):
        key = jax.random.key(0) if key is None else key
        adapter = init_adapter(model, jax.random.fold_in(key, ADAPTER_STREAM))
    else:
        assert isinstance(model.config, DecoderConfig)
        adapter = load_adapter(lora, model.config, base, sharding=model.sharding)
    return {BASE: base, ADAPTER: commit_like(base, adapter)}


@partial(jax.jit, static_argnums=0)
def init_adapter(model: Model, key: Any) -> Params:
    """Make fresh adapters of a decoder, which do not change it yet, as `lora_b` is zero."""
    return model.init(key)[ADAPTER]


def lora_spec(lora: Lora | None) -> LoraSpec | None:
    """Return the settings of adapters; if `lora` is a folder, read them from it."""
    return lora if lora is None or isinstance(lora, LoraSpec) else load_lora_config(lora)


def _checked_dtypes(dtype: Any, compute_dtype: Any, lora: Lora | None) -> Dtypes:
    compute_dtype = _checked_dtype("compute_dtype", compute_dtype)
    if str(dtype) not in EIGHT_BITS:
        return Dtypes(_checked_dtype("dtype", dtype), compute_dtype)
    if lora is None:
        raise ValueError(f"dtype is {dtype}, in which nothing can be trained; wanted float32, or adapters (lora)")
    return Dtypes(jnp.dtype(jnp.float32) if compute_dtype is None else compute_dtype, compute_dtype, str(dtype))


def _checked_dtype(name: str, dtype: Any) -> Any:
    """Return a dtype that weights and products may have; None stays None."""
    if dtype is None:
        return None
    wanted = jnp.dtype(dtype)
    if wanted not in DTYPES.values():
        raise ValueError(f"{name} is {wanted.name}; wanted float32, bfloat16, float16 or float64")
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ValueError(f"{name} is {wanted.name}, which jax has switched off; set jax_enable_x64 or choose another")
    return wanted
