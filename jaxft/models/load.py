"""Models ready to train and to sample from: of random weights, or read from Hugging Face's and PEFT's files."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxft.core.partition import ADAPTER, BASE
from jaxft.core.sharding import Sharding, check_one_process, constrain
from jaxft.core.types import Model, Params
from jaxft.errors import ModelFileError
from jaxft.models.config import DecoderConfig, LoraSpec, model_preset
from jaxft.models.decoder import Remat, decoder, init_params, sharding_for
from jaxft.models.hf import read_weights
from jaxft.models.hf_config import load_config
from jaxft.models.hf_files import DTYPES, check_manifest, load_json, local_folder
from jaxft.models.lora import merge_lora
from jaxft.models.peft import CONFIG as ADAPTER_CONFIG
from jaxft.models.peft import load_adapter, load_lora_config

ADAPTER_STREAM = 4
"""Folded into the key to draw fresh adapters, so that the base is the one that the key gives without adapters."""

Lora = LoraSpec | str | os.PathLike[str]
"""Rank, scale and targets of fresh adapters, or a folder of adapters in PEFT's format."""


def init_model(
    config: DecoderConfig | str,
    key: Any,
    *,
    dtype: Any = jnp.float32,
    compute_dtype: Any = None,
    remat: Remat = "dots",
    lora: Lora | None = None,
    mesh: Mesh | None = None,
    strict: bool = False,
) -> tuple[Model, Params]:
    """A decoder with random weights, from a config or the name of a preset; equal keys give equal bits.

    Args:
        dtype: dtype of the parameters; adapters are float32.
        compute_dtype: dtype of products and activations; None for that of the parameters.
        remat: what the backward pass computes again to save memory: nothing, all but products with weights, or layers.
        lora: adapters beside the kernels, which alone are trained; None for a model without.
        mesh: of `make_mesh`, to have every device hold its share; see `sharding_for`. None for one device.
        strict: raise where a dimension does not divide over the mesh, instead of warning.

    Raises:
        ValueError: no preset has this name, weights cannot have `dtype` or `compute_dtype`, the model does not divide
            over `mesh`, or there are several processes.
        ModelFileError: the folder of adapters is damaged, or its adapters belong to another base.
    """
    check_one_process()
    config = model_preset(config) if isinstance(config, str) else config
    dtype = _checked_dtype("dtype", dtype)
    model = _make_model(config, compute_dtype, remat, lora, mesh, strict)
    return model, _add_adapters(model, _init_base(config, dtype, model.sharding, key), lora, key)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _init_base(config: DecoderConfig, dtype: Any, sharding: Sharding | None, key: Any) -> Params:
    return constrain(sharding, jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(config, key)))


def load_model(
    path_or_hub_id: str | os.PathLike[str],
    *,
    key: Any = None,
    dtype: Any = jnp.float32,
    compute_dtype: Any = None,
    remat: Remat = "dots",
    lora: Lora | None = None,
    mesh: Mesh | None = None,
    strict: bool = False,
) -> tuple[Model, Params]:
    """A Llama, Mistral, Qwen2 or Qwen3 from a folder, or from the hub when there is no such folder.

    Weights are read one tensor at a time, cast to `dtype`, and put on the devices that hold them: the host never has
    more than one parameter. Of `model.safetensors` and an index of shards, the single file wins, as in transformers.
    Where `save_model` left a manifest, the files it lists are checked first.

    Args:
        key: draws fresh adapters, when `lora` is a `LoraSpec`; None for `jax.random.key(0)`.
        dtype, compute_dtype, remat, lora, mesh, strict: as for `init_model`.

    Raises:
        ModelFileError: the download failed, or a file is absent, corrupt or not what `config.json` asks for; or the
            adapters belong to another base.
        ValueError: weights cannot have `dtype` or `compute_dtype`, the model does not divide over `mesh`, or there are
            several processes.
    """
    check_one_process()
    dtype = _checked_dtype("dtype", dtype)
    folder = local_folder(path_or_hub_id)
    check_manifest(folder)
    config = load_config(folder / "config.json")
    model = _make_model(config, compute_dtype, remat, lora, mesh, strict)
    return model, _add_adapters(model, read_weights(folder, config, dtype, model.sharding), lora, key)


def load_merged(folder: str | os.PathLike[str], *, dtype: Any = jnp.float32) -> tuple[Model, Params]:
    """The plain model that results from merging a folder's adapters into their base.

    Raises:
        ModelFileError: the base is not where `adapter_config.json` says, or the adapters belong to another one.
    """
    folder = Path(folder).expanduser()
    named = load_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    place = folder / BASE if (folder / BASE).is_dir() else named
    if not isinstance(place, str | Path):
        raise ModelFileError(f"{folder / ADAPTER_CONFIG}: base_model_name_or_path is {named!r}; wanted a path or an id")
    model, params = load_model(place, lora=folder)  # in full, and rounded once they are merged
    assert isinstance(model.lora, LoraSpec)
    return base_model(model), jax.tree.map(lambda leaf: leaf.astype(dtype), merge_lora(model.lora, params))


def base_model(model: Model, remat: Remat = "dots") -> Model:
    """The model of the base alone, whose parameters are `params["base"]`."""
    assert isinstance(model.config, DecoderConfig)
    return decoder(model.config, remat, sharding=model.sharding)


def _make_model(
    config: DecoderConfig, compute_dtype: Any, remat: Remat, lora: Lora | None, mesh: Mesh | None, strict: bool
) -> Model:
    """The decoder for these arguments of `init_model`."""
    return decoder(
        config,
        remat,
        compute_dtype=None if compute_dtype is None else _checked_dtype("compute_dtype", compute_dtype),
        lora=lora_spec(lora),
        sharding=None if mesh is None else sharding_for(config, mesh, strict=strict),
    )


def _add_adapters(model: Model, base: Params, lora: Lora | None, key: Any) -> Params:
    """The parameters of a model with these adapters, fresh or read from their folder; `base` itself without `lora`."""
    if lora is None:
        return base
    if isinstance(lora, LoraSpec):
        key = jax.random.key(0) if key is None else key
        return {BASE: base, ADAPTER: init_adapter(model, jax.random.fold_in(key, ADAPTER_STREAM))}
    assert isinstance(model.config, DecoderConfig)
    return {BASE: base, ADAPTER: load_adapter(lora, model.config, base, sharding=model.sharding)}


@partial(jax.jit, static_argnums=0)
def init_adapter(model: Model, key: Any) -> Params:
    """Fresh adapters of a decoder, which change nothing yet: `lora_b` is zero."""
    return model.init(key)[ADAPTER]


def lora_spec(lora: Lora | None) -> LoraSpec | None:
    """Rank, scale and targets of adapters, read from their folder where `lora` is one."""
    return lora if lora is None or isinstance(lora, LoraSpec) else load_lora_config(lora)


def _checked_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    wanted = jnp.dtype(dtype)
    if wanted not in DTYPES.values():
        raise ValueError(f"{name} is {wanted.name}; wanted float32, bfloat16, float16 or float64")
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise ValueError(f"{name} is {wanted.name}, which jax has switched off; set jax_enable_x64 or choose another")
    return wanted
