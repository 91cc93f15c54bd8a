"""Models in GGUF files, the format of llama.cpp: their metadata as a `config.json`, their tensors under our names.

The header is read here; the package `gguf` (extra `gguf`) dequantises blocks and knows the names of tensors in both
formats. Every tensor is float32 once it is read.
"""

import importlib
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxft.errors import ModelFileError
from jaxft.models.hf_files import GGUF, INDEX, WEIGHTS, StoredTensor, Tensor
from jaxft.models.rope import Llama3Scaling, Rope

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
"""The `model_type` of each architecture that is read."""

KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
"""Keys of a `config.json` by those of the metadata, without the architecture before them."""
REQUIRED = tuple(KEYS)[:6]

TOKEN_IDS = {"bos": "bos", "eos": "eos", "padding": "pad"}
WIDE_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the models with 27B parameters, whose attention is scaled by the width of the stream, as in llama.cpp."""

SCALARS, TEXT, ARRAY = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}, 8, 9
"""Formats, in `struct`, of the types of metadata, and the types of two that have a length."""
TYPES = tuple("F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split())  # noqa: SIM905
"""Types of tensors that are read."""
EMBEDDING, FREQUENCIES = "token_embd.weight", "rope_freqs.weight"
"""Names of the embedding, and of divisors of the rotary frequencies, which Llama 3.1 and later have."""
AGAIN, PART = "download the file again", re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


class Blocks(NamedTuple):
    """Type, shape and offset of a tensor in a GGUF file."""

    type: str
    shape: tuple[int, ...]
    offset: int


class Header(NamedTuple):
    """Metadata of a GGUF file, and its tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Blocks]


def gguf_file(place: Path) -> Path | None:
    """Return the GGUF file that a path names, or that is in a folder without safetensors; None for other models.

    Raises:
        ModelFileError: the folder holds several.
    """
    if not place.is_dir():
        return place if place.suffix.lower() == GGUF else None
    found = sorted(each for each in place.iterdir() if each.suffix.lower() == GGUF)
    if not found or (place / WEIGHTS).is_file() or (place / INDEX).is_file():
        return None
    if len(found) > 1 and not all(PART.search(each.name) for each in found):
        raise ModelFileError(f"{place} holds {', '.join(each.name for each in found)}; give the path of one of them")
    return found[0]


def config_file(place: Path) -> Path:
    """Return the file that describes a model: its GGUF file, or the `config.json` of its folder."""
    return gguf_file(place) or place / "config.json"


def read_header(file: Path) -> Header:
    """Read the metadata of a GGUF file, and where its tensors are.

    Raises:
        ModelFileError: the file is absent, cut off, damaged or a part of one, a tensor has a type that is not read, or
            the package `gguf` is not installed.
    """
    if not file.is_file():
        raise ModelFileError(f"{file} does not exist; wanted a GGUF file")
    return _read_header(file, file.stat().st_size, file.stat().st_mtime_ns)


@lru_cache(maxsize=2)  # config, tokenizer and weights are read one after the other
def _read_header(file: Path, size: int, modified: int) -> Header:
    package = _package(file)
    with file.open("rb") as stream:
        begin = stream.read(8)
        if begin not in (b"GGUF\2\0\0\0", b"GGUF\3\0\0\0"):
            raise ModelFileError(f"{file} begins with {begin!r}; wanted GGUF, little-endian, version 2 or 3; {AGAIN}")
        try:
            num_tensors, num_keys = _scalars(stream, "QQ")
            metadata = {_text(stream): _read_value(stream, *_scalars(stream, "I")) for _ in range(num_keys)}
            infos = [_read_info(stream) for _ in range(num_tensors)]
        except (EOFError, UnicodeDecodeError, KeyError, struct.error) as error:
            place = f"at byte {stream.tell():,} of {size:,} ({type(error).__name__}: {error})"
            raise ModelFileError(f"{file}: the header is cut off or damaged {place}; {AGAIN}") from None
        alignment, parts = metadata.get("general.alignment") or 32, metadata.get("split.count", 1)
        if not (type(alignment) is type(parts) is int and alignment > 0):
            wanted = f"general.alignment is {alignment!r:.50} and split.count {parts!r:.50}; wanted whole numbers"
            raise ModelFileError(f"{file}: {wanted}; {AGAIN}")
        start = -(-stream.tell() // alignment) * alignment
    if parts > 1:
        merge = f"llama-gguf-split --merge FIRST_PART joined{GGUF}"
        raise ModelFileError(f"{file} is one of {parts} parts of a model; join them by {merge}")
    kinds, tensors = {each.value: each.name for each in package.GGMLQuantizationType}, dict[str, Blocks]()
    for name, shape, number, offset in infos:
        kind = kinds.get(number, str(number))
        if kind not in TYPES:
            other = "take another file of this model, such as that with Q8_0 in its name"
            raise ModelFileError(f"{file}: tensor {name!r} has the type {kind}; wanted {', '.join(TYPES)}; {other}")
        tensors[name] = Blocks(kind, shape, start + offset)
        if (end := start + offset + _num_bytes(package, tensors[name])) > size:
            raise ModelFileError(f"{file} ends at byte {size:,}, and its tensor {name!r} at byte {end:,}; {AGAIN}")
    return Header(metadata, tensors)


def _package(file: Path) -> Any:
    """Return the package `gguf`, which is imported here as it is an extra."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ModelFileError(f'{file}: GGUF files need a package ({error}): pip install "jaxft[gguf]"') from None


def _bytes(stream: BinaryIO, count: int) -> bytes:
    read = stream.read(min(count, 1 << 26))  # a length that is damaged takes no memory
    if len(read) < count:
        raise EOFError(f"{count:,} bytes are wanted there")
    return read


def _scalars(stream: BinaryIO, formats: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{formats}", _bytes(stream, struct.calcsize(f"<{formats}")))


def _text(stream: BinaryIO) -> str:
    return _bytes(stream, *_scalars(stream, "Q")).decode()


def _read_value(stream: BinaryIO, kind: int) -> Any:
    if kind == TEXT:
        return _text(stream)
    if kind != ARRAY:
        return _scalars(stream, SCALARS[kind])[0]
    kind, count = _scalars(stream, "IQ")
    if kind in SCALARS:
        return list(_scalars(stream, f"{count}{SCALARS[kind]}"))
    return [_read_value(stream, kind) for _ in range(count)]


def _read_info(stream: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    """Read name, shape, number of the type, and offset of a tensor; a file has the last axis of its shape first."""
    name, (rank,) = _text(stream), _scalars(stream, "I")
    *shape, kind, offset = _scalars(stream, f"{rank}QIQ")
    return name, tuple(shape[::-1]), kind, offset


def _num_bytes(package: Any, blocks: Blocks) -> int:
    values, size = package.GGML_QUANT_SIZES[package.GGMLQuantizationType[blocks.type]]
    return math.prod(blocks.shape) // values * size


def gguf_config(file: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file as the contents of a `config.json`.

    A key of the architecture that is not known keeps its name, and is refused as unknown keys of a `config.json` are.

    Raises:
        ModelFileError: the header is damaged, or the architecture is not one of `FAMILIES`.
    """
    metadata, tensors = read_header(file)
    architecture = metadata.get("general.architecture")
    if architecture not in FAMILIES:
        way_out = f"read are {', '.join(FAMILIES)}; take the safetensors of this model"
        raise ModelFileError(f"{file}: general.architecture is {architecture!r}; {way_out}")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix) and value != 0}
    missing = [prefix + key for key in REQUIRED if key not in own]
    if missing := [*missing, *({EMBEDDING} - tensors.keys())]:
        raise ModelFileError(f"{file}: there is no {', '.join(missing)}; {AGAIN}")
    values = {ours: own.pop(key) for key, ours in KEYS.items() if key in own}
    heads, width, layers = (values[key] for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    if not isinstance(heads, int) or not isinstance(width, int):  # a list has a number for each layer
        raise ModelFileError(f"{file}: head_count is {heads!r} and embedding_length {width!r}; wanted whole numbers")
    if layers != (found := len({name.split(".")[1] for name in tensors if name.startswith("blk.")})):
        raise ModelFileError(f"{file}: block_count is {layers!r}, and there are tensors of {found} layers; {AGAIN}")
    values = {"head_dim": width // heads, "num_key_value_heads": heads, "rope_theta": 10000.0} | values
    if architecture in WIDE_LAYERS:
        values["query_pre_attn_scalar"] = width // heads if layers == WIDE_LAYERS[architecture] else values["head_dim"]
    implied = {"attention.value_length": values["head_dim"], "rope.dimension_count": values["head_dim"]}
    implied["vocab_size"] = values["vocab_size"] = tensors[EMBEDDING].shape[0]
    ids = {f"{ours}_token_id": metadata.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in TOKEN_IDS.items()}
    scaling = _rope_scaling(file, own, Rope(values["rope_theta"]), values["head_dim"])
    return {
        "model_type": FAMILIES[architecture],
        "tie_word_embeddings": "output.weight" not in tensors,
        **values,
        **{key: value for key, value in (ids | {"rope_scaling": scaling}).items() if value is not None},
        **{prefix + key: value for key, value in own.items() if implied.get(key) != value},
    }


def _rope_scaling(file: Path, own: dict[str, Any], rope: Rope, head_dim: int) -> dict[str, Any] | None:
    """Return the scaling of rotary positions, whose keys are taken out of `own`; that of Llama 3.1 from its tensor."""
    names = {"factor": "factor", "original_context_length": "original_max_position_embeddings", "type": "rope_type"}
    given = {ours: own.pop(f"rope.scaling.{key}") for key, ours in names.items() if f"rope.scaling.{key}" in own}
    own.pop("rope.scaling.finetuned", None)
    blocks = read_header(file).tensors.get(FREQUENCIES)
    if blocks is None:
        kind = given.setdefault("rope_type", "linear" if "factor" in given else "none")  # as llama.cpp reads it
        return None if kind == "none" else given
    factors = _values(file, blocks)
    scaling = Llama3Scaling(float(factors.max()), 1.0, 4.0, 8192)
    wanted = rope.frequencies(head_dim) / replace(rope, scaling=scaling).frequencies(head_dim)
    if factors.shape != wanted.shape or not np.allclose(factors, wanted, rtol=1e-4):
        theirs = "Llama 3.1's, with low_freq_factor 1, high_freq_factor 4 and 8192 tokens"
        raise ModelFileError(f"{file}: {FREQUENCIES} is not {theirs}; take the safetensors of this model")
    return {"rope_type": "llama3", **asdict(scaling)}


def gguf_tensors(file: Path, tensors: Sequence[Tensor]) -> dict[str, StoredTensor]:
    """Find the tensors of a GGUF file, by the names that they have in safetensors.

    Args:
        file: the file, whose architecture `gguf_config` read.
        tensors: the tensors that the model has; others of the file keep their name.
    """
    package, (metadata, held) = _package(file), read_header(file)
    architecture = metadata["general.architecture"]
    kind = next(each for each, name in package.MODEL_ARCH_NAMES.items() if name == architecture)
    names = package.get_tensor_name_map(kind, metadata[f"{architecture}.block_count"])
    heads = metadata[f"{architecture}.attention.head_count"]
    kv_heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
    interleaved = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads} if architecture == "llama" else {}
    ours = {names.get_name(name, (".weight", ".bias")): name for tensor in tensors for name in tensor.names}
    stored = {}
    for theirs, blocks in held.items():
        name = ours.get(theirs, theirs)
        num_heads = next((count for part, count in interleaved.items() if part in name), None)
        is_offset = architecture.startswith("gemma") and name.endswith("norm.weight")
        read = partial(_values, file, blocks, interleaved_heads=num_heads, is_offset=is_offset)
        stored[name] = StoredTensor(file, "F32", blocks.shape, blocks.offset, read)
    stored.pop(FREQUENCIES, None)
    return stored


def _values(file: Path, blocks: Blocks, *, interleaved_heads: int | None = None, is_offset: bool = False) -> np.ndarray:
    """Read the values of a tensor, as float32.

    Args:
        interleaved_heads: heads of a projection of Llama's, in whose rows the two components that a rotation turns
            stand beside each other; elsewhere they are half a head apart.
        is_offset: the file has one more than the parameter, as of Gemma's norms.
    """
    package = _package(file)
    raw = np.fromfile(file, np.uint8, _num_bytes(package, blocks), offset=blocks.offset)
    rows = raw.reshape(*blocks.shape[:-1], -1)
    values = package.quants.dequantize(rows, package.GGMLQuantizationType[blocks.type]).reshape(blocks.shape)
    if interleaved_heads is not None:
        values = values.reshape(interleaved_heads, -1, 2, *blocks.shape[1:]).swapaxes(1, 2).reshape(blocks.shape)
    return values - np.float32(1) if is_offset else values
