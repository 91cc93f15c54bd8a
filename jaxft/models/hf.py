"""Import and export of weights in Hugging Face's file format.

A file has one tensor per layer and kernels as `[out, in]`; our parameters stack the layers on axis 0 and have kernels
as `[in, out]`. The family's table says which tensor holds which parameters (`jaxft.models.families`).
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding

from jaxft.core.sharding import Sharding, to_host
from jaxft.core.types import Model, Params
from jaxft.errors import ModelFileError
from jaxft.models.config import DecoderConfig
from jaxft.models.decoder import parameter_shapes
from jaxft.models.families import FAMILIES
from jaxft.models.hf_config import CONFIG, GENERATION, config_json, source_files
from jaxft.models.hf_files import (
    DTYPES,
    INDEX,
    WEIGHTS,
    StoredTensor,
    new_folder,
    put_transposed,
    read_tensor,
    save_tokenizer,
    scratch,
    stored_tensors,
    tensor_rows,
    write_json,
    write_tensors,
)


class Tensor(NamedTuple):
    """A tensor of a file, or one for each layer, and the parameters that it holds.

    Attributes:
        name: its name; `*` stands for the index of the layer.
        paths: parameters whose outputs it holds one after the other; mostly one.
        shapes: shapes of the parameters, stacked over layers.
    """

    name: str
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def is_per_layer(self) -> bool:
        """True if there is one for each layer."""
        return "*" in self.name

    @property
    def is_transposed(self) -> bool:
        """True if the file has it as `[out, in]`."""
        return self.paths[0].endswith("/kernel")

    @property
    def names(self) -> list[str]:
        """Names in the file, in order of layers."""
        return [self.name.replace("*", str(i)) for i in range(self.shapes[0][0])] if self.is_per_layer else [self.name]

    @property
    def part_shapes(self) -> list[tuple[int, ...]]:
        """Shape of each parameter in the file, for one layer."""
        shapes = [shape[1:] if self.is_per_layer else shape for shape in self.shapes]
        return [shape[::-1] if self.is_transposed else shape for shape in shapes]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        parts = self.part_shapes
        return sum(shape[0] for shape in parts), *parts[0][1:]


@cache
def file_tensors(config: DecoderConfig) -> list[Tensor]:
    """Return the tensors of a model's files, in the order of exported ones.

    Raises:
        ValueError: the table of the family has no place for a parameter, or two.
    """
    shapes = {path: leaf.shape for path, leaf in flatten_dict(parameter_shapes(config), sep="/").items()}
    table = FAMILIES[config.family].tensors.items()
    tensors = [
        Tensor(name, paths, tuple(shapes[path] for path in paths)) for name, paths in table if shapes.keys() >= {*paths}
    ]
    placed = Counter(path for tensor in tensors for path in tensor.paths)
    wrong = sorted(path for path in shapes if placed[path] != 1)
    if wrong:
        raise ValueError(f"the table of tensors of {config.family} needs one place for each of {', '.join(wrong)}")
    return tensors


PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Beginnings of names in files of several modalities, and what the text model's own files have in their place."""

OTHER_MODALITIES = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in ("vision_tower", "vision_model", "multi_modal_projector")
)
"""Beginnings of the names of tensors that no text needs."""


def text_tensors(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of the text model, by their names in its own files.

    >>> tensor = StoredTensor(Path("f"), "F32", (2,), 8)
    >>> list(text_tensors({"language_model.model.norm.weight": tensor, "vision_tower.a": tensor}))
    ['model.norm.weight']
    """
    if not any(name.startswith(prefix) for name in stored for prefix, _ in PREFIXES):
        return stored
    named = {}
    for name, tensor in stored.items():
        if not name.startswith(OTHER_MODALITIES):
            prefix, own = next((pair for pair in PREFIXES if name.startswith(pair[0])), ("", ""))
            named[own + name.removeprefix(prefix)] = tensor
    return named


def read_weights(folder: Path, config: DecoderConfig, dtype: np.dtype[Any], sharding: Sharding | None = None) -> Params:
    """Read the parameters of a decoder from the safetensors of a model folder, cast to `dtype`, onto their devices.

    Raises:
        ModelFileError: a file is absent, is corrupt or does not match the config.
    """
    stored, tensors = text_tensors(stored_tensors(folder)), file_tensors(config)
    _check_stored(folder, stored, tensors)
    one_device = SingleDeviceSharding(jnp.zeros(()).device)
    flat = {}
    for tensor in tensors:
        first = 0
        for path, shape, in_file in zip(tensor.paths, tensor.shapes, tensor.part_shapes, strict=True):
            target = one_device if sharding is None else sharding.leaf_sharding(path, shape)
            parts = (tensor_rows(stored[name], first, in_file[0]) for name in tensor.names)
            flat[path] = _read_parameter(tensor, shape, parts, dtype, target)
            first += in_file[0]
    return unflatten_dict(flat, sep="/")


def _read_parameter(
    tensor: Tensor, shape: tuple[int, ...], parts: Iterable[StoredTensor], dtype: Any, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Read a parameter layer by layer, sliced for the devices that hold it."""
    cuts: Any = sharding.addressable_devices_indices_map(shape)
    shares = {str(cut): (cut, scratch(sharding.shard_shape(shape), dtype)) for cut in cuts.values()}
    for layer, stored in enumerate(parts):
        values = read_tensor(stored)
        for cut, share in shares.values():
            part, of_layer = (share[layer], cut[1:]) if tensor.is_per_layer else (share, cut)
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


def _check_stored(folder: Path, stored: dict[str, StoredTensor], tensors: Sequence[Tensor]) -> None:
    extra = dict(stored)
    for tensor in tensors:
        wanted = tensor.shape
        for name in tensor.names:
            found = extra.pop(name, None)
            if found is None:
                hint = "download the file again, or take the config.json that belongs to it"
                if tensor.paths == ("lm_head",):
                    hint = "is tie_word_embeddings missing in config.json?"
                raise ModelFileError(f"{_weight_files(folder, stored)}: no tensor {name!r}, wanted {wanted}; {hint}")
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
            f"{extra[name].file}: tensor {name!r} has no place in the model of config.json ({len(unknown)} such); "
            "take the config.json that belongs to these weights, or export them without it"
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
    card: str | None = None,
    writes: bool = True,
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
        card: text of the model card, `README.md`, which the manifest does not list; None writes none.
        writes: False for a process that only helps another one to gather parameters on the devices of both.

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
    if not writes:
        for tensor in file_tensors(model.config):
            for layer in range(len(tensor.names)):
                _for_file(flat, tensor, layer)
        return
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

    with new_folder(folder, card) as unfinished:
        write_json(unfinished / CONFIG, values)
        if source[GENERATION]:
            write_json(unfinished / GENERATION, source[GENERATION])
        _write_weights(unfinished, model.config, flat, max_shard_bytes)
        if tokenizer is not None:
            save_tokenizer(unfinished, tokenizer)


def _check_params(config: DecoderConfig, flat: dict[str, Any]) -> None:
    shapes = {path: shape for each in file_tensors(config) for path, shape in zip(each.paths, each.shapes, strict=True)}
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
    for tensor in file_tensors(config):
        size = sum(flat[path].nbytes for path in tensor.paths) // len(tensor.names)
        for layer, name in enumerate(tensor.names):
            if shards[-1] and filled + size > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append((name, tensor, layer))
            filled += size
            total += size

    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        kinds = {name: (flat[tensor.paths[0]].dtype, tensor.shape) for name, tensor, _ in shard}
        write_tensors(folder / file, kinds, (_for_file(flat, tensor, layer) for _, tensor, layer in shard))
        weight_map |= {name: file for name, _, _ in shard}
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def is_on_one_cpu(array: jax.Array) -> bool:
    """True if an array is in the memory of the host in one piece."""
    return len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu"


def _for_file(flat: dict[str, Any], tensor: Tensor, layer: int) -> np.ndarray:
    parts = []
    for path in tensor.paths:
        # Sliced before the copy to the host, where jax would cache the whole array for as long as the array lives; but
        # on a CPU there is no copy, and slicing would compile a program per shape.
        whole = flat[path]
        if isinstance(whole, jax.Array) and is_on_one_cpu(whole):
            whole = np.asarray(whole)
        values = np.asarray(to_host(whole[layer] if tensor.is_per_layer else whole))
        parts.append(values.T if tensor.is_transposed else values)
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts))
