"""Import and export of weights in Hugging Face's file format.

A file has one tensor per layer and kernels as `[out, in]`; our parameters stack the layers on axis 0 and have kernels
as `[in, out]`. `TENSORS` maps file names to parameters.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding

from jaxft.core.sharding import Sharding
from jaxft.core.types import Model, Params
from jaxft.errors import ModelFileError
from jaxft.models.config import DecoderConfig
from jaxft.models.decoder import parameter_shapes
from jaxft.models.hf_config import CONFIG, GENERATION, config_json, source_files
from jaxft.models.hf_files import (
    DTYPES,
    INDEX,
    WEIGHTS,
    StoredTensor,
    new_folder,
    put_transposed,
    read_tensor,
    scratch,
    stored_tensors,
    write_json,
    write_tensors,
)


class Tensor(NamedTuple):
    """A parameter's path in our dict, and its name in a file (`*` stands for the index of the layer)."""

    path: str
    name: str
    is_transposed: bool = False


def _linear(module: str) -> tuple[Tensor, Tensor]:
    path, name = f"layers/{module.replace('.', '/')}", f"model.layers.*.{module}"
    return Tensor(f"{path}/kernel", f"{name}.weight", is_transposed=True), Tensor(f"{path}/bias", f"{name}.bias")


TENSORS: tuple[Tensor, ...] = (
    Tensor("embed", "model.embed_tokens.weight"),
    Tensor("layers/input_layernorm/scale", "model.layers.*.input_layernorm.weight"),
    *_linear("self_attn.q_proj"),
    *_linear("self_attn.k_proj"),
    *_linear("self_attn.v_proj"),
    *_linear("self_attn.o_proj"),
    Tensor("layers/self_attn/q_norm/scale", "model.layers.*.self_attn.q_norm.weight"),
    Tensor("layers/self_attn/k_norm/scale", "model.layers.*.self_attn.k_norm.weight"),
    Tensor("layers/post_attention_layernorm/scale", "model.layers.*.post_attention_layernorm.weight"),
    *_linear("mlp.gate_proj"),
    *_linear("mlp.up_proj"),
    *_linear("mlp.down_proj"),
    Tensor("final_norm/scale", "model.norm.weight"),
    Tensor("lm_head", "lm_head.weight"),
)
"""All parameters that a decoder can have, in the order of the exported files."""


def read_weights(folder: Path, config: DecoderConfig, dtype: np.dtype[Any], sharding: Sharding | None = None) -> Params:
    """Read the parameters of a decoder from the safetensors of a model folder, cast to `dtype`, onto their devices.

    Raises:
        ModelFileError: a file is absent, is corrupt or does not match the config.
    """
    stored, shapes = stored_tensors(folder), _parameter_shapes(config)
    _check_stored(folder, stored, shapes)
    one_device = SingleDeviceSharding(jnp.zeros(()).device)
    flat = {}
    for tensor, shape in shapes.items():
        target = one_device if sharding is None else sharding.leaf_sharding(tensor.path, shape)
        flat[tensor.path] = _read_parameter(tensor, shape, stored, dtype, target)
    return unflatten_dict(flat, sep="/")


def _read_parameter(
    tensor: Tensor, shape: tuple[int, ...], stored: dict[str, StoredTensor], dtype: Any, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Read a parameter layer by layer, sliced for the devices that hold it."""
    cuts: Any = sharding.addressable_devices_indices_map(shape)
    shares = {str(cut): (cut, scratch(sharding.shard_shape(shape), dtype)) for cut in cuts.values()}
    for layer, name in enumerate(_names(tensor, shape)):
        values = read_tensor(stored[name])
        for cut, share in shares.values():
            part, of_layer = (share[layer], cut[1:]) if _is_per_layer(tensor) else (share, cut)
            if tensor.is_transposed:
                put_transposed(part, values[of_layer[::-1]])
            else:
                part[...] = values[of_layer]
    arrays, waiting = [], [str(cut) for cut in cuts.values()]
    for device in cuts:
        own = waiting.pop(0)
        share = shares[own][1] if own in waiting else shares.pop(own)[1]  # freed after its last device
        arrays.append(jax.block_until_ready(jax.device_put(share, device)))
        del share
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _is_per_layer(tensor: Tensor) -> bool:
    return "*" in tensor.name


def _names(tensor: Tensor, shape: tuple[int, ...]) -> Iterator[str]:
    if not _is_per_layer(tensor):
        yield tensor.name
        return
    for layer in range(shape[0]):
        yield tensor.name.replace("*", str(layer))


@cache
def _parameter_shapes(config: DecoderConfig) -> dict[Tensor, tuple[int, ...]]:
    flat = flatten_dict(parameter_shapes(config), sep="/")
    return {tensor: flat[tensor.path].shape for tensor in TENSORS if tensor.path in flat}


def _shape_in_file(tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    one = shape[1:] if _is_per_layer(tensor) else shape
    return one[::-1] if tensor.is_transposed else one


def _check_stored(folder: Path, stored: dict[str, StoredTensor], shapes: dict[Tensor, tuple[int, ...]]) -> None:
    extra = dict(stored)
    for tensor, shape in shapes.items():
        wanted = _shape_in_file(tensor, shape)
        for name in _names(tensor, shape):
            found = extra.pop(name, None)
            if found is None:
                hint = "; is tie_word_embeddings missing in config.json?" if tensor.path == "lm_head" else ""
                raise ModelFileError(f"{_weight_files(folder, stored)}: no tensor {name!r}, wanted {wanted}{hint}")
            if found.dtype not in DTYPES:
                raise ModelFileError(
                    f"{found.file}: tensor {name!r} has dtype {found.dtype}; wanted one of {', '.join(DTYPES)}"
                )
            if found.shape != wanted:
                raise ModelFileError(
                    f"{found.file}: tensor {name!r} has shape {found.shape}; config.json asks for {wanted}"
                )
    head = extra.pop("lm_head.weight", None)
    if head is not None:
        _check_tied(head, stored["model.embed_tokens.weight"])
    # Rotary frequencies that old versions stored: they follow from the config.
    unknown = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]
    if unknown:
        name = min(unknown)
        raise ModelFileError(
            f"{extra[name].file}: tensor {name!r} has no place in the model of config.json ({len(unknown)} such)"
        )


def _weight_files(folder: Path, stored: dict[str, StoredTensor]) -> Path:
    files = {tensor.file for tensor in stored.values()}
    return files.pop() if len(files) == 1 else folder / INDEX


def _check_tied(head: StoredTensor, embedding: StoredTensor) -> None:
    is_same_kind = head.dtype == embedding.dtype and head.shape == embedding.shape
    if not is_same_kind or not np.array_equal(read_tensor(head), read_tensor(embedding)):
        raise ModelFileError(
            f"{head.file}: tensor 'lm_head.weight' differs from the embedding, though tie_word_embeddings is true in "
            "config.json; set it to false to use both"
        )


def save_model(
    folder: str | os.PathLike[str],
    model: Model,
    params: Params,
    tokenizer: Any = None,
    *,
    max_shard_bytes: float = 5e9,
) -> None:
    """Write a model folder that transformers and `load_model` read: `config.json`, safetensors, and the tokenizer.

    Fields of a loaded model's `config.json` and `generation_config.json` (stop ids, sampling defaults) that jaxft does
    not use are preserved; missing token ids are taken from the tokenizer. Weights keep their dtype, and are copied to
    the host one tensor at a time. The folder is written elsewhere and moved in one step, so it is complete or absent.
    A manifest lists the files; equal models give equal bytes.

    Args:
        folder: folder to create, with its parents; it may exist if empty.
        model: a decoder made by `load_model` or `init_model`.
        params: parameters of the model, without adapters.
        tokenizer: an object with transformers' `save_pretrained`.
        max_shard_bytes: maximum bytes of a weights file; more weights are split over several files with an index.

    Raises:
        ModelFileError: the folder holds files, the model is no decoder, or `params` do not fit its config.
        ValueError: `max_shard_bytes` below 1.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; wanted at least 1")
    if not isinstance(model.config, DecoderConfig):
        raise ModelFileError(f"the model's config is a {type(model.config).__name__}; only a decoder can be written")
    flat = flatten_dict(params, sep="/")
    _check_params(model.config, flat)
    dtypes = {leaf.dtype.name for leaf in flat.values()}
    source = source_files(model.config)
    values = source[CONFIG] | config_json(model.config, dtypes.pop() if len(dtypes) == 1 else "float32")
    if tokenizer is not None:
        ids = {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        values |= {name: token for name, token in ids.items() if values.get(name) is None}

    with new_folder(folder) as unfinished:
        write_json(unfinished / CONFIG, values)
        if source[GENERATION]:
            write_json(unfinished / GENERATION, source[GENERATION])
        _write_weights(unfinished, model.config, flat, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)


def _check_params(config: DecoderConfig, flat: dict[str, Any]) -> None:
    shapes = {tensor.path: shape for tensor, shape in _parameter_shapes(config).items()}
    if flat.keys() != shapes.keys():
        missing, extra = sorted(shapes.keys() - flat.keys()), sorted(flat.keys() - shapes.keys())
        raise ModelFileError(f"params lack {missing} and hold {extra} beyond what the model of this config has")
    for path, leaf in flat.items():
        if leaf.shape != shapes[path]:
            raise ModelFileError(f"params: {path} has shape {leaf.shape}; the model's config asks for {shapes[path]}")
        if leaf.dtype not in DTYPES.values():
            raise ModelFileError(f"params: {path} has dtype {leaf.dtype}; wanted a floating-point one")


def _write_weights(folder: Path, config: DecoderConfig, flat: dict[str, Any], max_shard_bytes: float) -> None:
    shards: list[list[tuple[str, Tensor, int]]] = [[]]
    filled = total = 0
    shapes = _parameter_shapes(config)
    for tensor, shape in shapes.items():
        size = flat[tensor.path].nbytes // (shape[0] if _is_per_layer(tensor) else 1)
        for layer, name in enumerate(_names(tensor, shape)):
            if shards[-1] and filled + size > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append((name, tensor, layer))
            filled += size
            total += size

    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        kinds = {name: (flat[tensor.path].dtype, _shape_in_file(tensor, shapes[tensor])) for name, tensor, _ in shard}
        write_tensors(folder / file, kinds, (_for_file(flat, tensor, layer) for _, tensor, layer in shard))
        weight_map |= {name: file for name, _, _ in shard}
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _for_file(flat: dict[str, Any], tensor: Tensor, layer: int) -> np.ndarray:
    leaf = flat[tensor.path]
    # Sliced before the copy to the host, where jax would cache the whole array for as long as the array lives.
    values = np.asarray(leaf[layer] if _is_per_layer(tensor) else leaf)
    return np.ascontiguousarray(values.T if tensor.is_transposed else values)
