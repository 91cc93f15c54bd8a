"""Reading of model folders: where they are, their JSON, and their weights, safetensors one tensor at a time."""

import json
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub  # whose parts are imported when they are used
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open

from jaxft.core.cache import leaf_dtype
from jaxft.core.types import Params
from jaxft.errors import ManifestError, ModelFileError, one_line
from jaxft.files import MANIFEST, home_path, verify_manifest
from jaxft.models.config import is_quantizable
from jaxft.models.quantized import quantize

WEIGHTS, INDEX, GGUF = "model.safetensors", "model.safetensors.index.json", ".gguf"
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
    """File, dtype, shape and byte offset of a tensor; `read` returns its values where the bytes there are others."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    read: Callable[[], np.ndarray] | None = None


MODEL_PATTERNS = ("config.json", "generation_config.json", "model*.safetensors", INDEX)
"""Files of a model on the hub; not all *.safetensors, as some repositories hold weights twice, under other names."""


def local_folder(path_or_hub_id: str | os.PathLike[str], patterns: Sequence[str] = MODEL_PATTERNS) -> Path:
    """Return the local folder of a model, or its GGUF file; a model that is named by its id is downloaded from the hub.

    Args:
        path_or_hub_id: folder, GGUF file, or id on the hub.
        patterns: names of the files to download.

    Raises:
        ModelFileError: there is no such folder, and the download failed.
    """
    folder, name = home_path(path_or_hub_id), os.fspath(path_or_hub_id)
    is_gguf = folder.suffix.lower() == GGUF
    if folder.is_dir() or (is_gguf and folder.is_file()):
        return folder
    if is_gguf or folder.exists() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        _refuse_pickle(folder)
        wanted = f"one with config.json and {WEIGHTS}, a GGUF file that is there, or the id of a model"
        raise ModelFileError(f"{name} is not a folder; wanted {wanted}")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{name!r} is neither a folder here nor could it be downloaded ({one_line(error)}); download the model by "
            "other means and pass the path of its folder"
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


quantize_leaf = jax.jit(quantize, static_argnums=1)


class Tensor(NamedTuple):
    """A tensor of a file, or one for each layer or for each expert of each layer, and the parameters that it holds.

    Attributes:
        name: its name; `*` stands for the index of the layer, a second one for that of the expert.
        paths: parameters whose outputs it holds one after the other; mostly one.
        shapes: shapes of the parameters, stacked over layers, and those of experts over these.
        layers: the layers that have it.
        is_interleaved: it holds the outputs of several parameters in turn.
    """

    name: str
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...] = ()
    is_interleaved: bool = False

    @property
    def stack_axes(self) -> int:
        """Number of leading axes of the parameters that there is a tensor for each index of."""
        return self.name.count("*")

    @property
    def is_transposed(self) -> bool:
        """True if the file has it as `[out, in]`, as weights of modules, unlike parameters that are no module's."""
        return self.paths[0].endswith("/kernel") and self.name.endswith(".weight")

    @property
    def places(self) -> list[tuple[int, ...]]:
        """Index, on the leading axes of the parameters, of each tensor of the file."""
        return [*np.ndindex(self.shapes[0][: self.stack_axes])]

    @property
    def names(self) -> list[str]:
        """Names in the file, in the order of `places`."""
        numbered = self.name.replace("*", "{}")
        return [numbered.format(*(self.layers[i] for i in place[:1]), *place[1:]) for place in self.places]

    @property
    def part_shapes(self) -> list[tuple[int, ...]]:
        """Shape of each parameter in one tensor of the file."""
        shapes = [shape[self.stack_axes :] for shape in self.shapes]
        return [(*shape[:-2], *shape[:-3:-1]) if self.is_transposed else shape for shape in shapes]

    @property
    def output_axis(self) -> int:
        """Axis of a tensor of the file that the outputs of several parameters are joined along."""
        return len(self.part_shapes[0]) - (2 if self.is_transposed else 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        parts, axis = self.part_shapes, self.output_axis
        return *parts[0][:axis], sum(shape[axis] for shape in parts), *parts[0][axis + 1 :]

    @property
    def part_cuts(self) -> list[tuple[slice, ...]]:
        """Index, into a tensor of the file, of each parameter."""
        axis, ends = self.output_axis, [0, *accumulate(shape[self.output_axis] for shape in self.part_shapes)]
        cuts = [slice(start, end) for start, end in pairwise(ends)]
        if self.is_interleaved:
            cuts = [slice(number, None, len(self.paths)) for number in range(len(self.paths))]
        return [(*[slice(None)] * axis, cut) for cut in cuts]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return a tensor of the file from its parameters at one of `places`."""
        parts = [part.swapaxes(-1, -2) for part in parts] if self.is_transposed else parts
        if self.is_interleaved and len(parts) > 1:
            return np.stack(parts, axis=self.output_axis + 1).reshape(self.shape)
        return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self.output_axis))


def read_weights(
    folder: Path,
    stored: dict[str, StoredTensor],
    tensors: Sequence[Tensor],
    dtype: np.dtype[Any],
    places: Params,
    eight_bits: str | None = None,
) -> Params:
    """Read parameters from the files of a model, cast to `dtype`, onto their devices.

    Args:
        folder: the folder, or the file.
        stored: the tensors in it, by their names in safetensors.
        tensors: the tensors that its files should have.
        dtype: dtype of the parameters.
        places: JAX's sharding of each parameter.
        eight_bits: kind of number that kernels are quantised to, each as soon as it is read; None for `dtype`.

    Raises:
        ModelFileError: a file is absent, is corrupt or does not match the config.
    """
    _check_stored(folder, stored, tensors)
    flat, place = {}, flatten_dict(places, sep="/")
    for tensor in tensors:
        for path, shape, cut in zip(tensor.paths, tensor.shapes, tensor.part_cuts, strict=True):
            parts = (stored[name] if len(tensor.paths) == 1 else cut_tensor(stored[name], cut) for name in tensor.names)
            leaf = _read_parameter(tensor, shape, parts, leaf_dtype(path, dtype), place[path])
            is_narrow = eight_bits is not None and is_quantizable(path.split("/"))
            flat[path] = quantize_leaf(leaf, eight_bits) if is_narrow else leaf
    return unflatten_dict(flat, sep="/")


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Find every tensor of a folder's model of text, by name; only headers are read.

    Raises:
        ModelFileError: there are no safetensors, a file is corrupt, or the index disagrees with its shards.
    """
    if (folder / WEIGHTS).is_file():
        return text_tensors(tensors_of_file(folder / WEIGHTS))
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
        stored |= tensors_of_file(folder / shard)
    return text_tensors(stored)


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


NESTED = re.compile(r"^language_model\.(?=model\.|lm_head\.)|(?<=^model\.)language_model\.")
"""The part of a tensor's name in files of several modalities that the text model's own files do not have."""

OTHER_MODALITIES = re.compile(r"(?:model\.)?(?:vision_tower|vision_model|multi_modal_projector)\.")
"""The beginning of the names of tensors that no text needs."""


def text_tensors(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of the text model, by their names in its own files.

    >>> tensor = StoredTensor(Path("f"), "F32", (2,), 8)
    >>> list(text_tensors({"language_model.model.norm.weight": tensor, "vision_tower.a": tensor}))
    ['model.norm.weight']
    """
    if not any(map(NESTED.search, stored)):
        return stored
    return {NESTED.sub("", name): tensor for name, tensor in stored.items() if not OTHER_MODALITIES.match(name)}


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


def _read_parameter(
    tensor: Tensor, shape: tuple[int, ...], parts: Iterable[StoredTensor], dtype: Any, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Read a parameter layer by layer, or expert by expert, sliced for the devices that hold it."""
    cuts: Any = sharding.addressable_devices_indices_map(shape)
    shares = {str(cut): (cut, scratch(sharding.shard_shape(shape), dtype)) for cut in cuts.values()}
    for place, stored in zip(tensor.places, parts, strict=True):
        values = None
        for cut, share in shares.values():
            held = [range(*each.indices(size)) for each, size in zip(cut, shape, strict=True)][: len(place)]
            if not all(index in rows for index, rows in zip(place, held, strict=True)):
                continue
            values = read_tensor(stored) if values is None else values
            part = share[tuple(rows.index(index) for index, rows in zip(place, held, strict=True))]
            inner = cut[len(place) :]
            if tensor.is_transposed:
                put_transposed(part, values[(*inner[:-2], *inner[:-3:-1])])
            else:
                part[...] = values[inner]
    arrays, waiting = [], [str(cut) for cut in cuts.values()]
    for device in cuts:
        own = waiting.pop(0)
        share = shares[own][1] if own in waiting else shares.pop(own)[1]  # freed after its last device
        arrays.append(jax.block_until_ready(jax.device_put(share, device)))
        del share
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def read_tensor(tensor: StoredTensor) -> np.ndarray:
    """Read the values of a tensor, whose dtype is one of `DTYPES`."""
    if tensor.read is not None:
        return tensor.read()
    return read_bytes(tensor, DTYPES[tensor.dtype])


def read_bytes(tensor: StoredTensor, dtype: Any = np.uint8) -> np.ndarray:
    """Read the bytes of a tensor as numbers of this dtype."""
    size = int(np.prod(tensor.shape)) * np.dtype(dtype).itemsize
    return np.fromfile(tensor.file, np.uint8, size, offset=tensor.offset).view(dtype).reshape(tensor.shape)


def cut_tensor(tensor: StoredTensor, cut: tuple[slice, ...]) -> StoredTensor:
    """Return a part of a tensor, as a tensor; of one with consecutive rows no other bytes are read.

    >>> cut_tensor(StoredTensor(Path("f"), "F32", (6, 10), 100), (slice(2, 5),))[2:4]
    ((3, 10), 180)
    """
    sizes = [len(range(*each.indices(size))) for each, size in zip(cut, tensor.shape, strict=False)]
    shape = (*sizes, *tensor.shape[len(cut) :])
    if tensor.read is not None or len(cut) > 1 or cut[0].step is not None:
        return tensor._replace(shape=shape, read=lambda: read_tensor(tensor)[cut])
    of_row = int(np.prod(tensor.shape[1:])) * DTYPES[tensor.dtype].itemsize
    return tensor._replace(shape=shape, offset=tensor.offset + cut[0].start * of_row)


def put_transposed(target: np.ndarray, source: np.ndarray) -> None:
    """Assign `target[...] = source.T` in strips as wide as a cache line, seven times as fast as numpy's copy.

    Of arrays with more than two axes the last two are exchanged.

    >>> target = np.zeros((2, 40))
    >>> put_transposed(target, np.arange(80.0).reshape(40, 2))
    >>> target[:, -2:].tolist()
    [[76.0, 78.0], [77.0, 79.0]]
    """
    if target.ndim > 2:
        for part, of_part in zip(target, source, strict=True):
            put_transposed(part, of_part)
        return
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
