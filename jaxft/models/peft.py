"""Import and export of adapters in PEFT's file format: `adapter_config.json` and `adapter_model.safetensors`.

A file has two matrices per adapter and layer, `lora_A [r D]` and `lora_B [F r]`; our parameters stack the layers and
transpose the matrices, `lora_a [L D r]` and `lora_b [L r F]`. `jaxft_base.json`, which PEFT ignores, holds the
fingerprint of the base that the adapters belong to, and their projections where the base's files hold several in one.

Such a fused module has one adapter in PEFT. One that PEFT made is an adapter of each projection, all with the same
`lora_A`. Those of ours have their own, so that a fused one has their ranks in sum: `lora_A` holds one after the other,
and `lora_B` is zero but for a block of each.

Experts have a module each, `experts.3.gate_proj`, or, of a base that stores them in one tensor, adapters as PEFT has
them for parameters: `lora_A [E r, D]` and `lora_B [F, r E]` of `experts.base_layer`, gate and up, and of `experts`,
down. The path of either has a `*` for the expert here.
Letters: `L` layers, `E` experts, `r` rank, `D` inputs, `F` outputs.
"""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save

from jaxft.core.partition import ADAPTER, BASE
from jaxft.core.sharding import Sharding, to_host
from jaxft.core.types import Model, Params
from jaxft.errors import ModelFileError
from jaxft.files import home_path
from jaxft.models.config import EXPERTS, PROJECTIONS, DecoderConfig, LoraSpec, layers_with
from jaxft.models.families import FAMILIES
from jaxft.models.family import Keys
from jaxft.models.hf import file_tensors, new_folder, save_model, save_tokenizer, write_json
from jaxft.models.hf_config import IGNORED, accepted_keys, has_other_modalities
from jaxft.models.hf_files import (
    DTYPES,
    StoredTensor,
    check_manifest,
    cut_tensor,
    load_json,
    read_tensor,
    tensors_of_file,
)
from jaxft.models.lora import LORA_NAMES
from jaxft.models.quantized import dequantized, is_quantized

CONFIG, WEIGHTS, ABOUT_BASE = "adapter_config.json", "adapter_model.safetensors", "jaxft_base.json"
FINGERPRINT, FINGERPRINT_ROWS, TARGETS = "base_fingerprint", 8, "targets"

NAME = re.compile(
    r"base_model\.model\.(?:model\.|model\.language_model\.|language_model\.model\.)"
    r"layers\.(\d+)\.((?:self_attn|mlp|block_sparse_moe)\.[\w.]+)\.lora_([AB])\.weight"
)

EXPERT = re.compile(r"\bexperts\.(\d+)\.")
"""The number of an expert in the path of its module."""

PLAIN: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
}
"""Fields of `adapter_config.json` with one supported value: one rank in all layers, no biases, no other modules."""

PATTERNS = ("rank_pattern", "alpha_pattern")
"""Fields of `PLAIN` that have other values in adapters of fused projections that we wrote (`_patterns`)."""

NEUTRAL = """
    auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules inference_mode
    layers_pattern loftq_config lora_alpha lora_dropout lora_dtype lora_ga_config lorap_emb_lr lorap_lr_ratio
    megatron_config megatron_core peft_type peft_version qalora_group_size r revision runtime_config target_modules
    target_parameters task_type use_rslora
"""
"""Further fields that are known: those read here, and those that say nothing once the matrices are there."""

INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base as it is."""


Modules = Mapping[str, tuple[str, ...]]
"""The projections that a module of a layer holds in files, by the path of the module."""

Place = tuple[int, ...]
"""Number of a layer, and that of an expert if the module is one's."""


def save_adapter(
    folder: str | os.PathLike[str],
    model: Model,
    params: Params,
    *,
    base: str | None = None,
    tokenizer: Any = None,
    card: str | None = None,
    writes: bool = True,
) -> None:
    """Write the adapters of a model, in one step, for `load_adapter` and for `PeftModel.from_pretrained`.

    Args:
        folder: folder to create, with its parents; it may exist if empty.
        base: path or hub id of the base; None writes the base into the subfolder `base`.
        tokenizer: an object with transformers' `save_pretrained`.
        card: text of the model card, `README.md`; None writes none.
        writes: as for `save_model`.

    Raises:
        ModelFileError: the model has no adapters, or the folder holds files.
    """
    lora, config = model.lora, model.config
    if not isinstance(lora, LoraSpec) or not isinstance(config, DecoderConfig):
        raise ModelFileError("the model has no adapters to save; save_model writes all of its parameters")
    modules, is_nested = _adapted_modules(config, lora), base is not None and has_other_modalities(config)
    layers = "model.language_model.layers" if is_nested else "model.layers"
    tensors = _adapter_tensors(config, lora, modules, params, layers)
    # Adapters of a quantised base are loaded beside the base itself, too, which has another fingerprint.
    about: dict[str, Any] = {} if is_quantized(params[BASE]) else {FINGERPRINT: base_fingerprint(params[BASE])}
    if accepted := accepted_keys(config):
        about[IGNORED] = list(accepted)
    if any(len(parts) > 1 for parts in modules.values()):
        about[TARGETS] = [part for parts in modules.values() for part in parts if lora.is_target(part)]
    if not writes:
        if base is None:
            save_model(folder, model, params[BASE], writes=False)
        return
    with new_folder(folder, card) as unfinished:
        settings = _adapter_config(lora, modules, base, is_nested=is_nested, stacked=_stacked_modules(config))
        write_json(unfinished / CONFIG, settings)
        # Not by save_file, whose files nobody but their owner may read.
        (unfinished / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))
        write_json(unfinished / ABOUT_BASE, about)
        if tokenizer is not None:
            save_tokenizer(unfinished, tokenizer)
        if base is None:
            save_model(unfinished / BASE, model, params[BASE])


def _adapter_tensors(
    config: DecoderConfig, lora: LoraSpec, modules: Modules, params: Params, layers: str
) -> dict[str, np.ndarray]:
    """Return the matrices of a file by their names, in which the layers are called `layers`."""
    adapters, stacked = flatten_dict(params[ADAPTER]["layers"], sep="/"), _stacked_modules(config)
    widths = {path: leaf.shape[-1] for path, leaf in flatten_dict(params[BASE]["layers"], sep="/").items()}
    tensors: dict[str, np.ndarray] = {}
    for module, parts in modules.items():
        adapted = [*filter(lora.is_target, parts)]
        for row, layer in enumerate(_layers_of(config, parts)):
            own = {part: [to_host(adapters[f"{part}/{kind}"][row]) for kind in LORA_NAMES] for part in adapted}
            experts = range(config.num_experts) if "*" in module else [()]
            joined = []
            for expert in experts:
                blocks = {
                    part: np.zeros((lora.rank * len(own), widths[f"{part}/kernel"]), np.float32) for part in parts
                }
                for place, (part, (_, b)) in enumerate(own.items()):
                    blocks[part][place * lora.rank :][: lora.rank] = b[expert]
                a = np.concatenate([a[expert] for a, _ in own.values()], axis=-1).T
                joined.append((a, _join_outputs(config, module, [*blocks.values()]).T))
            names = [module.replace("*", str(expert)) for expert in experts]
            if module in stacked:
                names = [_stacked_name(module, modules)]
                a, b = (np.stack(each) for each in zip(*joined, strict=True))  # [E r D], [E F r]
                joined = [(a.reshape(-1, a.shape[-1]), b.transpose(1, 2, 0).reshape(b.shape[1], -1))]
            for name, matrices in zip(names, joined, strict=True):
                for kind, each in zip("AB", matrices, strict=True):
                    path = f"base_model.model.{layers}.{layer}.{name.replace('/', '.')}.lora_{kind}.weight"
                    tensors[path] = np.ascontiguousarray(each)
    return tensors


def _layers_of(config: DecoderConfig, parts: tuple[str, ...]) -> tuple[int, ...]:
    """Return the layers that have these projections."""
    return layers_with(config.kinds, tuple(parts[0].split("/")))


def _join_outputs(config: DecoderConfig, module: str, blocks: list[np.ndarray]) -> np.ndarray:
    """Return the columns of several projections as the module has them: one after the other, or in turn."""
    if FAMILIES[config.family].is_interleaved and "*" in module:
        return np.stack(blocks, axis=-1).reshape(len(blocks[0]), -1)
    return np.concatenate(blocks, axis=-1)


def _stacked_modules(config: DecoderConfig) -> set[str]:
    """Return the modules of experts that the base stores in one tensor for all."""
    return {
        module_path(tensor.name, parts)
        for tensor, parts in ((tensor, projections(tensor.paths)) for tensor in file_tensors(config))
        if parts[0].startswith(EXPERTS) and tensor.stack_axes == 1
    }


def _stacked_name(module: str, modules: Modules) -> str:
    """Return PEFT's name of a parameter's adapter: the last one of a module is the outer one."""
    container, _, name = module.partition("/*/")
    is_inner = name == GATE_UP_NAME and f"{container}/*/down_proj" in modules
    return f"{container}/base_layer" if is_inner else container


def _adapter_config(
    lora: LoraSpec, modules: Modules, base: str | None, *, is_nested: bool, stacked: set[str]
) -> dict[str, Any]:
    """Return the contents of `adapter_config.json`; in a base of several modalities the modules are nested."""
    targets = sorted({module.split("/")[-1] for module in modules if module not in stacked})
    parameters = [module.replace("/*/", ".").replace("/", ".") for module in modules if module in stacked]
    nested = rf"model\.language_model\.layers\.\d+\.\w+\.({'|'.join(targets)})"  # as transformers names them there
    return {
        **PLAIN,
        **_patterns(lora, modules),
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
        "target_modules": nested if is_nested else targets,
        **({"target_parameters": parameters} if parameters else {}),
    }


def load_lora_config(folder: str | os.PathLike[str]) -> LoraSpec:
    """Read rank, scale and targets of the adapters in a folder.

    Raises:
        ModelFileError: the folder holds no adapters, or unsupported ones.
    """
    folder = home_path(folder)
    check_manifest(folder)
    file = folder / CONFIG
    keys = Keys(file, load_json(file))
    if keys.values.get("peft_type") != "LORA":
        raise keys.fault("peft_type", "'LORA'")
    use_rslora = not keys.is_null("use_rslora") and keys.flag("use_rslora")
    rank, alpha = keys.integer("r"), keys.number("lora_alpha")
    about = _about_base(folder).get(TARGETS, [])
    _check_keys(keys, PLAIN | {name: keys.values.get(name) for name in PATTERNS} if about else PLAIN)
    modules = {module: file_projections()[module] for module, _ in _read_tensors(folder)}
    named = {part for parts in modules.values() for part in parts}
    targets = tuple(path for path in PROJECTIONS if path in named and (path in about or not about))
    if not targets:
        raise ModelFileError(f"{folder / WEIGHTS}: holds no adapter of {', '.join(PROJECTIONS)}")
    lora = LoraSpec(rank, alpha, targets, use_rslora)
    if about:
        _check_keys(keys, PLAIN | _patterns(lora, modules))
    return lora


def _check_keys(keys: Keys, supported: Mapping[str, Any]) -> None:
    """Raise a `ModelFileError` that names every key of an `adapter_config.json` that asks for more than is supported.

    Args:
        keys: the file's content.
        supported: the one value, beside null, false and empty ones, of each key that has one.
    """
    known, faults = NEUTRAL.split(), []
    for name, value in keys.values.items():
        values = INITS if name == "init_lora_weights" else (supported.get(name),)
        if name not in known and value not in (None, False, [], {}, *values):
            faults.append(f"{name} is {value!r}; only {' or '.join(map(repr, values))} is supported")
    if faults:
        raise ModelFileError(
            f"{keys.file}: {'; '.join(faults)}. In PEFT, merge_and_unload() gives a plain model of any adapters, and "
            "save_pretrained(folder, path_initial_model_for_weight_conversion=...) plain adapters of those whose "
            "init_lora_weights changed the base"
        )


def load_adapter(
    folder: str | os.PathLike[str], config: DecoderConfig, base: Params, *, sharding: Sharding | None = None
) -> Params:
    """Load the adapters in a folder, as the `adapter` of `{"base": ..., "adapter": ...}`.

    Args:
        folder: a folder in PEFT's format.
        config: config of the base.
        base: parameters of the base.
        sharding: result of `sharding_for`, to place the adapters on a mesh; None for one device.

    Raises:
        ModelFileError: a file is absent or damaged, a layer has no adapter, or the adapters belong to another base.
    """
    folder = home_path(folder)
    lora, stored = load_lora_config(folder), _read_tensors(folder, config.num_experts)
    about = _about_base(folder)
    wanted = about.get(FINGERPRINT)
    if wanted is not None and not is_quantized(base) and wanted != base_fingerprint(base):
        raise ModelFileError(
            f"{folder} holds an adapter of another base: its {ABOUT_BASE} does not fit this one's weights"
        )
    kernels = flatten_dict(base["layers"], sep="/")
    flat: dict[str, Any] = {}
    found = {module for module, _ in stored}
    for module, parts in file_projections().items():
        if module not in found:
            continue
        if f"{parts[0]}/kernel" not in kernels:
            raise ModelFileError(f"{folder / WEIGHTS}: {module} is no module of the base, a {config.family}")
        inputs = kernels[f"{parts[0]}/kernel"].shape[-2]
        outputs = [kernels[f"{part}/kernel"].shape[-1] for part in parts]
        adapted = [part for part in parts if part in lora.targets]
        rank = lora.rank * (len(adapted) if about.get(TARGETS) else 1)
        stack = kernels[f"{parts[0]}/kernel"].shape[:-2]
        experts = [range(config.num_experts)] if "*" in module else []
        places = [*product(_layers_of(config, parts), *experts)]
        a, b = (
            _read_layers(f"{folder / WEIGHTS}: lora_{kind} of {module}", stored[module, kind], shape, places)
            for kind, shape in (("A", (rank, inputs)), ("B", (sum(outputs), rank)))
        )
        a, b = a.reshape(*stack, *a.shape[1:]), b.reshape(*stack, *b.shape[1:])
        if len(parts) > 1 and experts and FAMILIES[config.family].is_interleaved:
            b = np.concatenate([b[..., number :: len(parts), :] for number in range(len(parts))], axis=-2)
        ends = list(accumulate(outputs))
        for part, end, size in zip(parts, ends, outputs, strict=True):
            if part in adapted:
                first = adapted.index(part) * lora.rank if rank > lora.rank else 0
                own = slice(first, first + lora.rank)
                flat[f"layers/{part}/lora_a"] = jnp.asarray(a[..., own, :].swapaxes(-1, -2))
                flat[f"layers/{part}/lora_b"] = jnp.asarray(b[..., end - size : end, own].swapaxes(-1, -2))
    adapter = unflatten_dict(flat, sep="/")
    return adapter if sharding is None else sharding.place(adapter)


def saved_ignored_keys(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the keys of the base's `config.json` that were accepted unknown when a folder's adapters were trained."""
    return tuple(_about_base(Path(folder).expanduser()).get(IGNORED, ()))


def base_fingerprint(base: Params) -> str:
    """Return a SHA-256 of the first rows of every parameter, cast to bfloat16, so that it is the same in any dtype."""
    digest = hashlib.sha256()
    flat = flatten_dict(base, sep="/")
    # The order of the first version, which the fingerprints of saved adapters follow.
    first = [path for path in ("embed", "lm_head", "final_norm/scale") if path in flat]
    for path in first + sorted(flat.keys() - first):
        leaf = flat[path]
        leading = (slice(None),) * (path.startswith("layers/") + (len(leaf.shape) == 4))  # layers, experts
        rows = leaf[(*leading, slice(FINGERPRINT_ROWS))]
        digest.update(to_host(jnp.asarray(dequantized(rows), jnp.bfloat16)).tobytes())
    return digest.hexdigest()


@cache
def file_projections() -> Modules:
    """Return the projections that a module of a layer holds in files, by the path of the module.

    >>> file_projections()["self_attn/q_proj"], file_projections()["mlp/gate_up_proj"]
    (('self_attn/q_proj',), ('mlp/gate_proj', 'mlp/up_proj'))
    """
    tables = (row for family in FAMILIES.values() for row in family.tensors.items())
    rows = ((name, projections(paths)) for name, paths in tables)
    return {module_path(name, parts): parts for name, parts in rows if {*parts} <= {*PROJECTIONS}}


GATE_UP_NAME = "gate_up_proj"


def projections(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the projections whose kernels have these paths."""
    return tuple(path.removeprefix("layers/").removesuffix("/kernel") for path in paths)


def module_path(name: str, parts: tuple[str, ...]) -> str:
    """Return the path, in a layer, of the module of a tensor; experts in one tensor have a module each in their stead.

    >>> module_path("model.layers.*.mlp.experts.*.up_proj.weight", ("mlp/experts/up_proj",))
    'mlp/experts/*/up_proj'
    >>> module_path("model.layers.*.mlp.experts.down_proj", ("mlp/experts/down_proj",))
    'mlp/experts/*/down_proj'
    """
    path = name.removeprefix("model.layers.*.").removesuffix(".weight").replace(".", "/")
    if not parts[0].startswith(EXPERTS) or "*" in path:
        return path
    return f"{path.split('/')[0]}/experts/*/{GATE_UP_NAME if len(parts) > 1 else 'down_proj'}"


def _adapted_modules(config: DecoderConfig, lora: LoraSpec) -> Modules:
    """Return the modules of the base's files that have an adapter, and their projections."""
    rows = ((tensor.name, projections(tensor.paths)) for tensor in file_tensors(config))
    return {
        module_path(name, parts): parts
        for name, parts in rows
        if {*parts} <= {*PROJECTIONS} and any(map(lora.is_target, parts))
    }


def _patterns(lora: LoraSpec, modules: Modules) -> dict[str, dict[str, float]]:
    """Return PEFT's settings of modules with the adapters of several projections: ranks in sum, and the same scale."""
    counts = {module.split("/")[-1]: sum(map(lora.is_target, parts)) for module, parts in modules.items()}
    fused = {name: count for name, count in counts.items() if count > 1}
    return {
        "rank_pattern": {name: count * lora.rank for name, count in fused.items()},
        "alpha_pattern": {
            name: lora.alpha * (count**0.5 if lora.use_rslora else count) for name, count in fused.items()
        },
    }


def _about_base(folder: Path) -> dict[str, Any]:
    """Return what `save_adapter` noted about the base; nothing of adapters that PEFT saved."""
    file = folder / ABOUT_BASE
    return load_json(file) if file.is_file() else {}


def _read_layers(
    name: str, held: Mapping[Place, StoredTensor], shape: tuple[int, int], places: Sequence[Place]
) -> np.ndarray:
    """Return `lora_A` or `lora_B` of a module, called `name` in errors, in all layers and experts, in float32.

    Raises:
        ModelFileError: a layer or an expert has none, or one of another shape.
    """
    if sorted(held) != places:
        layers, of_base = (sorted({place[0] for place in each}) for each in (held, places))
        counts = "" if layers != of_base else f", and of {len(held)} experts in place of {len(places)}"
        raise ModelFileError(f"{name} is there for layers {layers}{counts}; the base has {len(of_base)}")
    for place, tensor in held.items():
        if tensor.shape != shape or tensor.dtype not in DTYPES:
            found = f"{tensor.dtype}{list(tensor.shape)}"
            raise ModelFileError(f"{name} in layer {place[0]} is {found}; the base asks for {list(shape)}")
    return np.stack([read_tensor(held[place]).astype(np.float32) for place in places])


def _read_tensors(folder: Path, experts: int = 1) -> Mapping[tuple[str, str], Mapping[Place, StoredTensor]]:
    """Return the tensors of an adapter's file, by module and matrix (`A` or `B`), then by layer, and expert.

    Args:
        folder: the folder.
        experts: number of experts of the base, by which tensors of all experts are divided.
    """
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelFileError(f"{folder} holds no {WEIGHTS}")
    parameters = load_json(folder / CONFIG).get("target_parameters") or []
    outer = "down_proj" if any(str(each).endswith("down_proj") for each in parameters) else GATE_UP_NAME
    found: defaultdict[tuple[str, str], dict[Place, StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors_of_file(file).items():
        match = NAME.fullmatch(name)
        path, expert = ("", None) if match is None else (match[2].replace(".", "/"), EXPERT.search(match[2]))
        container = path.removesuffix("/base_layer")
        is_stacked = container.endswith("/experts")
        module = path if expert is None else EXPERT.sub("experts.*.", match[2]).replace(".", "/")  # type: ignore[index]
        if is_stacked:
            module = f"{container}/*/{outer if path == container else GATE_UP_NAME}"
        if match is None or module not in file_projections():
            raise ModelFileError(f"{file}: tensor {name!r} is no adapter of a decoder's projection")
        of_module, layer = found[module, match[3]], int(match[1])
        if is_stacked:
            parts = _cut_experts(tensor, match[3], max(experts, 1))
            of_module |= {(layer, number): part for number, part in enumerate(parts)}
        else:
            of_module[(layer,) if expert is None else (layer, int(expert[1]))] = tensor
    return found


def _cut_experts(tensor: StoredTensor, kind: str, experts: int) -> list[StoredTensor]:
    """Return the matrix of each expert in that of all, `lora_A [E r, D]` or `lora_B [F, r E]`."""
    rows, columns = tensor.shape
    if kind == "A":
        size = rows // experts
        return [cut_tensor(tensor, (slice(size * number, size * (number + 1)),)) for number in range(experts)]

    @cache
    def whole() -> np.ndarray:
        return np.moveaxis(read_tensor(tensor).reshape(rows, -1, experts), -1, 0)

    part = tensor._replace(shape=(rows, columns // experts))
    return [part._replace(read=partial(lambda number: whole()[number], number)) for number in range(experts)]
