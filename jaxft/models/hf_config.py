"""Conversion between `DecoderConfig` and the `config.json` of Hugging Face transformers, versions 4 and 5."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from jaxft.errors import ModelFileError
from jaxft.models.config import DecoderConfig, RopeScaling
from jaxft.models.hf_files import load_json

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Supported `model_type`s, each with the class that transformers loads it with."""

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "sliding_window": None,
    "layer_types": None,
    "quantization_config": None,
}
_QWEN2 = _COMMON | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _COMMON | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    "mistral": _COMMON | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128, "attention_bias": False},
}
"""Default of an absent key, by `model_type`, as in transformers; sizes have none, as no default would be safe."""

CONFIG, GENERATION = "config.json", "generation_config.json"
NOT_EXPORTED = ("_name_or_path", "auto_map")
"""Keys of a `config.json` that an export drops: the path of the source, and its code files."""

DEFAULT_ROPE_THETA = 10000.0
_LLAMA3_KEYS = tuple(field.name for field in fields(RopeScaling))
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_LLAMA3_KEYS}


@dataclass(frozen=True)
class _Reader:
    """Typed reader of a JSON object; every error names the file and the key."""

    file: Path
    values: Mapping[str, Any]

    def fault(self, key: str, wanted: str) -> ModelFileError:
        held = repr(self.values[key]) if key in self.values else "absent"
        return ModelFileError(f"{self.file}: {key} is {held}; wanted {wanted}")

    def integer(self, key: str) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fault(key, "a whole number of at least 1")
        return value

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.fault(key, "a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise self.fault(key, "true or false")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.fault(key, "an object or null")
        return value or {}


def load_config(file: Path) -> DecoderConfig:
    """Read a model folder's config; other fields of `config.json`, and `generation_config.json`, are `source_json`.

    Raises:
        ModelFileError: a file is not a JSON object, or `config.json` is absent or describes an unsupported model.
    """
    values = load_json(file)
    config = decoder_config(values, file)
    known = {*DEFAULTS[config.family], *config_json(config, "float32"), *NOT_EXPORTED}
    source = {CONFIG: {name: value for name, value in values.items() if name not in known}}
    generation = file.with_name(GENERATION)
    if generation.is_file():
        source[GENERATION] = load_json(generation)
    source = {name: held for name, held in source.items() if held}
    return replace(config, source_json=json.dumps(source, sort_keys=True)) if source else config


def source_files(config: DecoderConfig) -> dict[str, dict[str, Any]]:
    """Return the fields of `config.json` and `generation_config.json` that `DecoderConfig` lacks, by file name.

    >>> config = DecoderConfig("llama", 8, 4, 4, 1, 1, 1, 4, source_json='{"config.json": {"use_cache": true}}')
    >>> source_files(config)
    {'config.json': {'use_cache': True}, 'generation_config.json': {}}
    """
    held = json.loads(config.source_json) if config.source_json else {}
    return {name: held.get(name, {}) for name in (CONFIG, GENERATION)}


def decoder_config(values: Mapping[str, Any], file: Path = Path("config.json")) -> DecoderConfig:
    """Convert the contents of a `config.json` to a `DecoderConfig`; `file` is named in errors.

    Raises:
        ModelFileError: a key is missing, has the wrong type, or asks for a feature that the decoder lacks.
    """
    family: Any = values.get("model_type")
    if family not in ARCHITECTURES:
        raise ModelFileError(f"{file}: model_type is {family!r}; supported are {', '.join(ARCHITECTURES)}")
    reader = _Reader(file, {**DEFAULTS[family], **values})
    if reader.values["hidden_act"] != "silu":
        raise reader.fault("hidden_act", "'silu', the only activation supported")
    if reader.values["quantization_config"] is not None:
        raise ModelFileError(f"{file}: quantization_config is set; wanted unquantised weights")

    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    num_layers = reader.integer("num_hidden_layers")
    has_attention_bias = family in ("llama", "qwen3") and reader.flag("attention_bias")
    rope_theta, rope_scaling = _rope(reader)
    try:
        return DecoderConfig(
            family=family,
            vocab_size=reader.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(reader, num_heads),
            head_dim=_head_dim(reader, hidden_size, num_heads),
            max_position_embeddings=reader.integer("max_position_embeddings"),
            rms_norm_eps=reader.number("rms_norm_eps"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            sliding_window=_sliding_window(reader, num_layers),
            qkv_bias=has_attention_bias or family == "qwen2",
            output_bias=has_attention_bias,
            mlp_bias=family == "llama" and reader.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            tie_word_embeddings=reader.flag("tie_word_embeddings"),
        )
    except ModelFileError:
        raise
    except ValueError as error:
        raise ModelFileError(f"{file}: {error}") from error


def _is_null(reader: _Reader, key: str) -> bool:
    return reader.values[key] is None


def _num_kv_heads(reader: _Reader, num_heads: int) -> int:
    return num_heads if _is_null(reader, "num_key_value_heads") else reader.integer("num_key_value_heads")


def _head_dim(reader: _Reader, hidden_size: int, num_heads: int) -> int:
    if not _is_null(reader, "head_dim"):
        return reader.integer("head_dim")
    if hidden_size % num_heads:
        raise ModelFileError(
            f"{reader.file}: hidden_size {hidden_size} does not divide over {num_heads} heads, and there is no head_dim"
        )
    return hidden_size // num_heads


def _rope(reader: _Reader) -> tuple[float, RopeScaling | None]:
    # Version 5 writes `rope_parameters`; version 4 writes `rope_theta` beside `rope_scaling`, which may be null.
    tables = [table for table in (reader.table("rope_scaling"), reader.table("rope_parameters")) if table]
    rope = _Reader(reader.file, tables[0] if tables else {})
    thetas = {_Reader(reader.file, t).number("rope_theta") for t in (reader.values, *tables) if "rope_theta" in t}
    if len(thetas) > 1:
        raise ModelFileError(f"{reader.file}: rope_theta has several values, {sorted(thetas)}; wanted one")
    theta = thetas.pop() if thetas else DEFAULT_ROPE_THETA

    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ModelFileError(f"{reader.file}: rope_type is {kind!r}; supported are 'default' and 'llama3'")
    unknown = sorted({key for table in tables for key in table} - _ROPE_KEYS)
    if unknown:
        raise ModelFileError(f"{reader.file}: the rotary parameters hold {unknown}, which is not supported")
    for table in (reader.values, *tables):
        if table.get("partial_rotary_factor") not in (None, 1.0):
            raise _Reader(reader.file, table).fault("partial_rotary_factor", "1: rotary positions on whole heads")
    if kind == "default":
        return theta, None
    return theta, RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )


def _sliding_window(reader: _Reader, num_layers: int) -> int | None:
    family = reader.values["model_type"]
    window = None
    if family != "llama" and not _is_null(reader, "sliding_window"):
        window = reader.integer("sliding_window")
    first_sliding = 0
    if family in ("qwen2", "qwen3"):
        window = window if reader.flag("use_sliding_window") else None
        first_sliding = num_layers if window is None else _first_sliding_layer(reader)
    full, sliding = "full_attention", "sliding_attention"
    kinds = {sliding} if window is not None and first_sliding < num_layers else set()
    kinds |= {full} if window is None or first_sliding > 0 else set()

    given = reader.values["layer_types"]
    if given is not None:
        if not isinstance(given, list) or len(given) != num_layers or not set(map(str, given)) <= {full, sliding}:
            raise reader.fault("layer_types", f"a list of {num_layers}, each {full!r} or {sliding!r}")
        if family in ("llama", "mistral") and set(given) != kinds:
            raise reader.fault("layer_types", f"only {kinds.pop()!r}, which the sliding_window of a {family} asks for")
        kinds = set(given)
    if len(kinds) > 1:
        raise ModelFileError(f"{reader.file}: layers mix full and sliding attention; wanted one kind in all of them")
    if kinds == {full}:
        return None
    if window is None:
        raise reader.fault("layer_types", "'full_attention' only, as there is no sliding_window in use")
    return window


def _first_sliding_layer(reader: _Reader) -> int:
    # 0 is allowed here, unlike for sizes: then every layer has the window.
    return 0 if reader.values["max_window_layers"] == 0 else reader.integer("max_window_layers")


def config_json(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the contents of a `config.json` for version 5 of transformers, with the keys of version 4 as well.

    Raises:
        ModelFileError: the family's `config.json` cannot express the config, such as a Mistral with biases.
    """
    is_qwen = config.family in ("qwen2", "qwen3")
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = {"rope_type": "llama3", **asdict(config.rope_scaling)}
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if config.family in ("llama", "qwen3"):
        values["attention_bias"] = config.output_bias
    if config.family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if config.family == "mistral" or is_qwen:
        values["sliding_window"] = config.sliding_window
    if is_qwen:
        kind = "full_attention" if config.sliding_window is None else "sliding_attention"
        values["use_sliding_window"] = config.sliding_window is not None
        values["max_window_layers"] = config.num_layers if config.sliding_window is None else 0
        values["layer_types"] = [kind] * config.num_layers

    told = decoder_config(values)
    wanted = replace(config, source_json="")
    lost = [field.name for field in fields(config) if getattr(told, field.name) != getattr(wanted, field.name)]
    if lost:
        held = ", ".join(f"{name}={getattr(config, name)!r}" for name in lost)
        raise ModelFileError(f"the config.json of a {config.family} cannot express {held}; choose another family")
    return values
