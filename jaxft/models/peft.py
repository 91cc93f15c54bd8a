"""Import and export of adapters in PEFT's file format: `adapter_config.json` and `adapter_model.safetensors`.

A file has two matrices per adapter and layer, `lora_A [r D]` and `lora_B [F r]`; our parameters stack the layers and
transpose the matrices, `lora_a [L D r]` and `lora_b [L r F]`. `jaxft_base.json`, which PEFT ignores, holds the
fingerprint of the base that the adapters belong to.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from jaxft.core.partition import ADAPTER, BASE
from jaxft.core.sharding import Sharding
from jaxft.core.types import Model, Params
from jaxft.errors import ModelFileError
from jaxft.models.config import PROJECTIONS, DecoderConfig, LoraSpec
from jaxft.models.hf import save_model
from jaxft.models.hf_files import (
    DTYPES,
    StoredTensor,
    check_manifest,
    load_json,
    new_folder,
    read_tensor,
    tensors_of_file,
    write_json,
)

CONFIG, WEIGHTS, ABOUT_BASE = "adapter_config.json", "adapter_model.safetensors", "jaxft_base.json"
FINGERPRINT, FINGERPRINT_ROWS = "base_fingerprint", 8

NAME = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.((?:self_attn|mlp)\.\w+)\.lora_([AB])\.weight")

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

UNSUPPORTED = (
    *PLAIN,
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
)
"""Fields of `adapter_config.json` that must be absent, empty or as in `PLAIN`."""


def save_adapter(
    folder: str | os.PathLike[str],
    model: Model,
    params: Params,
    *,
    base: str | None = None,
    tokenizer: Any = None,
    card: str | None = None,
) -> None:
    """Write the adapters of a model, in one step, for `load_adapter` and for `PeftModel.from_pretrained`.

    Args:
        folder: folder to create, with its parents; it may exist if empty.
        base: path or hub id of the base; None writes the base into the subfolder `base`.
        tokenizer: an object with transformers' `save_pretrained`.
        card: text of the model card, `README.md`; None writes none.

    Raises:
        ModelFileError: the model has no adapters, or the folder holds files.
    """
    lora, config = model.lora, model.config
    if not isinstance(lora, LoraSpec) or not isinstance(config, DecoderConfig):
        raise ModelFileError("the model has no adapters to save; save_model writes all of its parameters")
    tensors = {}
    for path, leaf in flatten_dict(params[ADAPTER]["layers"]).items():
        *module, kind = path
        for layer in range(leaf.shape[0]):
            name = f"base_model.model.model.layers.{layer}.{'.'.join(module)}.lora_{kind[-1].upper()}.weight"
            tensors[name] = np.ascontiguousarray(np.asarray(leaf[layer]).T)
    values = {
        **PLAIN,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
        "target_modules": sorted(path.split("/")[-1] for path in PROJECTIONS if lora.is_target(path)),
    }
    with new_folder(folder, card) as unfinished:
        write_json(unfinished / CONFIG, values)
        save_file(tensors, unfinished / WEIGHTS, {"format": "pt"})
        write_json(unfinished / ABOUT_BASE, {FINGERPRINT: base_fingerprint(params[BASE])})
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        if base is None:
            save_model(unfinished / BASE, model, params[BASE])


def load_lora_config(folder: str | os.PathLike[str]) -> LoraSpec:
    """Read rank, scale and targets of the adapters in a folder.

    Raises:
        ModelFileError: the folder holds no adapters, or unsupported ones.
    """
    folder = Path(folder).expanduser()
    check_manifest(folder)
    file = folder / CONFIG
    values = load_json(file)
    if values.get("peft_type") != "LORA":
        raise ModelFileError(f"{file}: peft_type is {values.get('peft_type')!r}; wanted 'LORA'")
    for name in UNSUPPORTED:
        if values.get(name) not in (PLAIN.get(name), None, False, [], {}):
            raise ModelFileError(f"{file}: {name} is {values[name]!r}; only {PLAIN.get(name)!r} is supported")
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ModelFileError(f"{file}: r is {rank!r}; wanted a whole number of at least 1")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ModelFileError(f"{file}: lora_alpha is {alpha!r}; wanted a number")
    named = {module for module, _ in _stored(folder)}
    targets = tuple(path for path in PROJECTIONS if path in named)
    if not targets:
        raise ModelFileError(f"{folder / WEIGHTS}: holds no adapter of {', '.join(PROJECTIONS)}")
    return LoraSpec(rank, float(alpha), targets, bool(values.get("use_rslora")))


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
    folder = Path(folder).expanduser()
    lora, stored = load_lora_config(folder), _stored(folder)
    about = folder / ABOUT_BASE
    wanted = load_json(about).get(FINGERPRINT) if about.is_file() else None
    if wanted is not None and wanted != base_fingerprint(base):
        raise ModelFileError(
            f"{folder} holds an adapter of another base: its {ABOUT_BASE} does not fit this one's weights"
        )
    kernels = flatten_dict(base["layers"], sep="/")
    flat: dict[str, Any] = {}
    for path in lora.targets:
        inputs, outputs = kernels[f"{path}/kernel"].shape[1:]
        for kind, shape in (("a", (lora.rank, inputs)), ("b", (outputs, lora.rank))):
            layers = stored.pop((path, kind), {})
            if sorted(layers) != list(range(config.num_layers)):
                raise ModelFileError(
                    f"{folder / WEIGHTS}: lora_{kind.upper()} of {path} is there for layers {sorted(layers)}; the base "
                    f"has {config.num_layers}"
                )
            for layer, tensor in layers.items():
                if tensor.shape != shape or tensor.dtype not in DTYPES:
                    raise ModelFileError(
                        f"{folder / WEIGHTS}: lora_{kind.upper()} of {path} in layer {layer} is {tensor.dtype}"
                        f"{list(tensor.shape)}; the base asks for {list(shape)}"
                    )
            parts = [read_tensor(layers[layer]).T.astype(np.float32) for layer in range(config.num_layers)]
            flat[f"layers/{path}/lora_{kind}"] = jnp.asarray(np.stack(parts))
    adapter = unflatten_dict(flat, sep="/")
    return adapter if sharding is None else sharding.place(adapter)


def base_fingerprint(base: Params) -> str:
    """Return a SHA-256 of the first rows of every parameter, cast to bfloat16, so that it is the same in any dtype."""
    digest = hashlib.sha256()
    flat = flatten_dict(base, sep="/")
    # The order of the first version, which the fingerprints of saved adapters follow.
    first = [path for path in ("embed", "lm_head", "final_norm/scale") if path in flat]
    for path in first + sorted(flat.keys() - first):
        leaf = flat[path]
        rows = leaf[:, :FINGERPRINT_ROWS] if path.startswith("layers/") else leaf[:FINGERPRINT_ROWS]
        digest.update(np.asarray(jnp.asarray(rows, jnp.bfloat16)).tobytes())
    return digest.hexdigest()


def _stored(folder: Path) -> dict[tuple[str, str], dict[int, StoredTensor]]:
    """The tensors of an adapter's file, by module and matrix (`a` or `b`), then by layer."""
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelFileError(f"{folder} holds no {WEIGHTS}")
    found: dict[tuple[str, str], dict[int, StoredTensor]] = {}
    for name, tensor in tensors_of_file(file).items():
        match = NAME.fullmatch(name)
        if match is None or match[2].replace(".", "/") not in PROJECTIONS:
            raise ModelFileError(f"{file}: tensor {name!r} is no adapter of a decoder's projection")
        found.setdefault((match[2].replace(".", "/"), match[3].lower()), {})[int(match[1])] = tensor
    return found
