"""Export of weights in Hugging Face's file format, and the tensors that the files of a model have.

A file has one tensor per layer and kernels as `[out, in]`; our parameters stack the layers on axis 0 and have kernels
as `[in, out]`. The family's table says which tensor holds which parameters (`jaxft.models.families`).
"""

import contextlib
import json
import os
import shutil
import struct
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jaxft.core.cache import compute_dtype
from jaxft.core.sharding import to_host
from jaxft.core.types import Model, Params
from jaxft.errors import ModelFileError
from jaxft.files import home_path, sync_folder, write_manifest
from jaxft.models.config import DecoderConfig, layers_with
from jaxft.models.decoder import parameter_shapes
from jaxft.models.families import FAMILIES
from jaxft.models.hf_config import CONFIG, GENERATION, config_json, source_files
from jaxft.models.hf_files import DTYPES, INDEX, WEIGHTS, Tensor, load_json
from jaxft.models.quantized import dequantized, map_kernels

CARD = "README.md"
"""File of a model card."""


@cache
def file_tensors(config: DecoderConfig) -> list[Tensor]:
    """Return the tensors of a model's files, in the order of exported ones.

    Raises:
        ValueError: the table of the family has no place for a parameter, or two.
    """
    shapes = {path: leaf.shape for path, leaf in flatten_dict(parameter_shapes(config), sep="/").items()}
    table = FAMILIES[config.family].tensors.items()
    tensors = [
        Tensor(
            name,
            paths,
            tuple(shapes[path] for path in paths),
            layers_with(config.kinds, tuple(paths[0].split("/")[1:])) if "*" in name else (),
            FAMILIES[config.family].is_interleaved,
        )
        for name, paths in table
        if shapes.keys() >= {*paths}
    ]
    placed = Counter(path for tensor in tensors for path in tensor.paths)
    wrong = sorted(path for path in shapes if placed[path] != 1)
    if wrong:
        raise ValueError(f"the table of tensors of {config.family} needs one place for each of {', '.join(wrong)}")
    return tensors


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
    flat = flatten_dict(map_kernels(dequantized, params), sep="/")
    _check_params(model.config, flat)
    if not writes:
        for tensor in file_tensors(model.config):
            for place in tensor.places:
                _for_file(flat, tensor, place)
        return
    source = source_files(model.config)
    values = source[CONFIG] | config_json(model.config, compute_dtype(flat).name)
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
    shards: list[list[tuple[str, Tensor, tuple[int, ...]]]] = [[]]
    filled = total = 0
    for tensor in file_tensors(config):
        size = sum(flat[path].nbytes for path in tensor.paths) // len(tensor.names)
        for place, name in zip(tensor.places, tensor.names, strict=True):
            if shards[-1] and filled + size > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append((name, tensor, place))
            filled += size
            total += size

    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        kinds = {name: (flat[tensor.paths[0]].dtype, tensor.shape) for name, tensor, _ in shard}
        write_tensors(folder / file, kinds, (_for_file(flat, tensor, place) for _, tensor, place in shard))
        weight_map |= {name: file for name, _, _ in shard}
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def is_on_one_cpu(array: jax.Array) -> bool:
    """True if an array is in the memory of the host in one piece."""
    return len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu"


def _for_file(flat: dict[str, Any], tensor: Tensor, place: tuple[int, ...]) -> np.ndarray:
    parts = []
    for path in tensor.paths:
        # Sliced before the copy to the host, where jax would cache the whole array for as long as the array lives; but
        # on a CPU there is no copy, and slicing would compile a program per shape.
        whole = flat[path]
        if isinstance(whole, jax.Array) and is_on_one_cpu(whole):
            whole = np.asarray(whole)
        parts.append(np.asarray(to_host(whole[place] if place else whole)))
    return tensor.join(parts)


@contextlib.contextmanager
def new_folder(folder: str | os.PathLike[str], card: str | None = None) -> Iterator[Path]:
    """Yield a temporary folder; at the end, write its manifest and rename it to `folder`, which is complete or absent.

    A model card, the text of `README.md`, is not in the manifest, as its owner may edit it.

    Raises:
        ModelFileError: the folder exists and is not empty.
    """
    folder = home_path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelFileError(f"{folder} exists and is not an empty folder; choose another one, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.unfinished")
    unfinished.mkdir()
    try:
        yield unfinished
        write_manifest(unfinished)
        if card is not None:
            (unfinished / CARD).write_text(card, encoding="utf-8")
        unfinished.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Write a JSON object with sorted keys, so that equal values give equal bytes."""
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write a tokenizer's files; versions 4 of transformers do not know the name that 5 gives to the class."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    if file.is_file() and (values := load_json(file)).get("tokenizer_class") == "TokenizersBackend":
        write_json(file, values | {"tokenizer_class": "PreTrainedTokenizerFast"})


def write_tensors(
    file: Path, kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]], values: Iterable[np.ndarray]
) -> None:
    """Write a safetensors file tensor by tensor; the library itself needs all of them in memory at once.

    Args:
        kinds: dtype (one of `DTYPES`) and shape of each tensor, by its name.
        values: values of each tensor, in the same order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    names, offset = {dtype: name for name, dtype in DTYPES.items()}, 0
    for name, (dtype, shape) in kinds.items():
        size = int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for each in values:
            np.ascontiguousarray(each).tofile(stream)
