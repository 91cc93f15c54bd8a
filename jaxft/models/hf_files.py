"""Reading and writing of model folders: JSON, and safetensors one tensor at a time."""

import contextlib
import json
import mmap
import os
import shutil
import struct
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub  # whose parts are imported when they are used
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxft.errors import ManifestError, ModelFileError
from jaxft.files import MANIFEST, home_path, sync_folder, verify_manifest, write_manifest

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CARD = "README.md"
"""File of a model card."""

DTYPES = {
    name: jnp.dtype(kind)
    for name, kind in [("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16"), ("F64", "float64")]
}
"""Dtypes that weights may have, by their names in a safetensors header."""

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
CONVERT = (
    "convert them to safetensors: load them with transformers in an environment with PyTorch, then "
    "save_pretrained(folder, safe_serialization=True)"
)


class StoredTensor(NamedTuple):
    """File, byte offset, dtype and shape of a tensor in a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def local_folder(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """Return the local folder of a model; if `name` is not a folder, download the model of that id from the hub.

    Raises:
        ModelFileError: there is no such folder, and the download failed.
    """
    folder = home_path(path_or_hub_id)
    if folder.is_dir():
        return folder
    name = os.fspath(path_or_hub_id)
    if folder.exists() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        _refuse_pickle(folder)
        raise ModelFileError(f"{name} is not a folder; wanted one with config.json and {WEIGHTS}, or the id of a model")
    try:
        # Not all *.safetensors: some repositories hold the same weights twice, under other names.
        patterns = ["config.json", "generation_config.json", "model*.safetensors", INDEX]
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{name!r} is neither a folder here nor could it be downloaded ({type(error).__name__}: {error}); download "
            "the model by other means and pass the path of its folder"
        ) from error


def check_manifest(folder: Path) -> None:
    """Check every file that the manifest of a model folder lists; do nothing in a folder without a manifest.

    Raises:
        ModelFileError: the manifest is damaged, or a file is absent or differs from the exported one.
    """
    if not (folder / MANIFEST).exists():
        return
    try:
        verify_manifest(folder, only_listed=True)
    except ManifestError as error:
        raise ModelFileError(f"{error}; export it again, or remove {MANIFEST} to load it as it is") from error


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


def load_json(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        ModelFileError: the file is absent, or does not hold a JSON object.
    """
    if not file.is_file():
        raise ModelFileError(f"{file} does not exist; a model folder needs one")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{file} holds a {type(values).__name__}; wanted a JSON object")
    return values


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Write a JSON object with sorted keys, so that equal values give equal bytes."""
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write a tokenizer's files; versions 4 of transformers do not know the name that 5 gives to the class."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    if file.is_file() and (values := load_json(file)).get("tokenizer_class") == "TokenizersBackend":
        write_json(file, values | {"tokenizer_class": "PreTrainedTokenizerFast"})


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Find every tensor of a model folder, by name; only headers are read.

    Raises:
        ModelFileError: there are no safetensors, a file is corrupt, or the index disagrees with its shards.
    """
    if (folder / WEIGHTS).is_file():
        return tensors_of_file(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        for file in sorted(folder.iterdir()):
            _refuse_pickle(file)
        raise ModelFileError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}; if its weights are in other files, {CONVERT}"
        )
    index = folder / INDEX
    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelFileError(f"{index}: weight_map is {weight_map!r:.80}; wanted an object from tensor to file name")

    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        # Checked by name only: in the hub's cache a valid shard is a link to a file outside the folder.
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise ModelFileError(f"{index} names the file {shard!r}, which is outside of {folder}")
        _refuse_pickle(folder / shard)
        if not (folder / shard).is_file():
            raise ModelFileError(f"{index} names the file {shard!r}, which is not in {folder}")
        held = tensors_of_file(folder / shard)
        for name in held:
            if weight_map.get(name) != shard:
                place = f"puts it in {weight_map[name]!r}" if name in weight_map else "does not know it"
                raise ModelFileError(f"{folder / shard} holds the tensor {name!r}, but {index} {place}")
        stored |= held
    for name, shard in weight_map.items():
        if name not in stored:
            raise ModelFileError(f"{index} puts the tensor {name!r} in {shard!r}, which does not hold it")
    return stored


def _refuse_pickle(file: Path) -> None:
    if file.suffix.lower() in PICKLES:
        raise ModelFileError(
            f"{file}: weights in {file.suffix} files are pickles, which can run code while they are read, and are "
            f"never loaded; {CONVERT}"
        )


def tensors_of_file(file: Path) -> dict[str, StoredTensor]:
    """Find every tensor of a safetensors file, by name; only its header is read.

    Raises:
        ModelFileError: the file is absent or corrupt.
    """
    try:
        # The library checks the header against the file: lengths, overlaps, gaps.
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelFileError(
            f"{file} is no readable safetensors file ({error}); download or export it again"
        ) from error
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(file, held["dtype"], tuple(held["shape"]), 8 + length + held["data_offsets"][0])
        for name, held in header.items()
    }


def read_tensor(tensor: StoredTensor) -> np.ndarray:
    """Read the values of a tensor, whose dtype is one of `DTYPES`."""
    dtype = DTYPES[tensor.dtype]
    size = int(np.prod(tensor.shape)) * dtype.itemsize
    return np.fromfile(tensor.file, np.uint8, size, offset=tensor.offset).view(dtype).reshape(tensor.shape)


def tensor_rows(tensor: StoredTensor, first: int, count: int) -> StoredTensor:
    """Return some rows of a tensor, as a tensor.

    >>> tensor_rows(StoredTensor(Path("f"), "F32", (6, 10), 100), 2, 3)[2:]
    ((3, 10), 180)
    """
    of_row = int(np.prod(tensor.shape[1:])) * DTYPES[tensor.dtype].itemsize
    return tensor._replace(shape=(count, *tensor.shape[1:]), offset=tensor.offset + first * of_row)


def put_transposed(target: np.ndarray, source: np.ndarray) -> None:
    """Assign `target[...] = source.T` in strips as wide as a cache line, seven times as fast as numpy's copy.

    >>> target = np.zeros((2, 40))
    >>> put_transposed(target, np.arange(80.0).reshape(40, 2))
    >>> target[:, -2:].tolist()
    [[76.0, 78.0], [77.0, 79.0]]
    """
    width = 64 // target.itemsize
    for first in range(0, source.shape[0], width):
        target[:, first : first + width] = source[first : first + width].T


def scratch(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Make an uninitialised array whose memory returns to the system, not to the allocator's pool, when it is freed.

    >>> scratch((2, 3), np.float32).shape
    (2, 3)
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8, size).view(dtype).reshape(shape)


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
