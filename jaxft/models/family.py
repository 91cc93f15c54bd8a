"""A family of models is two tables: the keys of its `config.json`, and the tensors of its files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxft.errors import ModelFileError
from jaxft.models.config import DecoderConfig

FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers, as `layer_types` in a `config.json` has them."""


@dataclass(frozen=True)
class Keys:
    """Typed reader of a JSON object; every error names the file and the key."""

    file: Path
    values: Mapping[str, Any]

    def fault(self, key: str, wanted: str) -> ModelFileError:
        """Return the error of a key whose value is not what was wanted."""
        held = repr(self.values[key]) if key in self.values else "absent"
        return ModelFileError(f"{self.file}: {key} is {held}; wanted {wanted}")

    def is_null(self, key: str) -> bool:
        """True if a key is absent or null."""
        return self.values.get(key) is None

    def integer(self, key: str, least: int = 1) -> int:
        """Return a whole number."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fault(key, f"a whole number of at least {least}")
        return value

    def number(self, key: str) -> float:
        """Return a finite number above 0."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.fault(key, "a number above 0")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers above 0."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.fault(key, "a list of numbers above 0")
        return tuple(Keys(self.file, {key: each}).number(key) for each in value)

    def flag(self, key: str) -> bool:
        """Return true or false."""
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise self.fault(key, "true or false")
        return value

    def choice(self, key: str, options: Sequence[str]) -> str:
        """Return one of several texts."""
        value = self.values.get(key)
        if value not in options:
            raise self.fault(key, f"one of {', '.join(map(repr, options))}")
        return str(value)

    def table(self, key: str) -> dict[str, Any]:
        """Return an object, empty if the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.fault(key, "an object or null")
        return value or {}

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.integer("num_hidden_layers")


def same(value: Any) -> Any:
    """Return the value."""
    return value


def inverse(value: float) -> float:
    """Return `1 / value`, or a number of 12 digits whose inverse is the same, so that two of them cancel.

    >>> 1 / (1 / 49), inverse(inverse(49.0)), inverse(8.0)
    (49.00000000000001, 49.0, 0.125)
    """
    short = float(f"{1 / value:.12g}")
    return short if 1 / short == value else 1 / value


class Key(NamedTuple):
    """A key of `config.json`, the fields of `DecoderConfig` that it gives, and conversions where they differ."""

    name: str
    fields: tuple[str, ...]
    read: Callable[[Any], Any] = same
    write: Callable[[Any], Any] = same


def all_full(keys: Keys) -> list[str]:
    """Types of layers of which each sees all tokens before."""
    return [FULL] * keys.num_layers


def sliding_if_set(keys: Keys) -> list[str]:
    """Types of layers that all have the window, if there is a `sliding_window`."""
    return [FULL if keys.is_null("sliding_window") else SLIDING] * keys.num_layers


def full_every(number: int | str) -> Callable[[Keys], list[str]]:
    """Types of layers of which every so many-th sees all tokens; a name is the key that has the number."""

    def types(keys: Keys) -> list[str]:
        turn = keys.integer(number) if isinstance(number, str) else number
        return [FULL if (i + 1) % turn == 0 else SLIDING for i in range(keys.num_layers)]

    return types


def rope_everywhere(keys: Keys) -> list[bool]:
    """Layers that have rotary positions: all."""
    return [True] * keys.num_layers


def nothing_more(config: DecoderConfig) -> dict[str, Any]:
    """Return no keys."""
    return {}


COMMON_KEYS = (
    Key("vocab_size", ("vocab_size",)),
    Key("hidden_size", ("hidden_size",)),
    Key("intermediate_size", ("intermediate_size",)),
    Key("num_hidden_layers", ("num_layers",)),
    Key("num_attention_heads", ("num_heads",)),
    Key("num_key_value_heads", ("num_kv_heads",)),
    Key("head_dim", ("head_dim",)),
    Key("max_position_embeddings", ("max_position_embeddings",)),
    Key("rms_norm_eps", ("rms_norm_eps",)),
    Key("hidden_act", ("activation",)),
    Key("tie_word_embeddings", ("tie_word_embeddings",)),
)
ATTENTION_BIAS = Key("attention_bias", ("qkv_bias", "output_bias"))
MLP_BIAS = Key("mlp_bias", ("mlp_bias",))

COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": None,
    "rope_scaling": None,
}


def _projection(module: str) -> dict[str, tuple[str, ...]]:
    path, name = f"layers/{module.replace('.', '/')}", f"model.layers.*.{module}"
    return {f"{name}.weight": (f"{path}/kernel",), f"{name}.bias": (f"{path}/bias",)}


LLAMA_TENSORS: Mapping[str, tuple[str, ...]] = {
    "model.embed_tokens.weight": ("embed",),
    "model.layers.*.input_layernorm.weight": ("layers/input_layernorm/scale",),
    **_projection("self_attn.q_proj"),
    **_projection("self_attn.k_proj"),
    **_projection("self_attn.v_proj"),
    **_projection("self_attn.o_proj"),
    "model.layers.*.self_attn.q_norm.weight": ("layers/self_attn/q_norm/scale",),
    "model.layers.*.self_attn.k_norm.weight": ("layers/self_attn/k_norm/scale",),
    "model.layers.*.post_attention_layernorm.weight": ("layers/post_attention_layernorm/scale",),
    **_projection("mlp.gate_proj"),
    **_projection("mlp.up_proj"),
    **_projection("mlp.down_proj"),
    "model.norm.weight": ("final_norm/scale",),
    "lm_head.weight": ("lm_head",),
}
"""Parameters by the name of their tensor, as Llama's files have them and most others; see `Family.tensors`."""


def without(tensors: Mapping[str, tuple[str, ...]], *modules: str) -> dict[str, tuple[str, ...]]:
    """Return a table of tensors without those of some modules of a layer."""
    return {name: paths for name, paths in tensors.items() if name.split(".")[-2] not in modules}


def fused(module: str, *parts: str) -> dict[str, tuple[str, ...]]:
    """Return the row of a tensor that holds several projections.

    >>> fused("mlp.gate_up_proj", "gate_proj", "up_proj")
    {'model.layers.*.mlp.gate_up_proj.weight': ('layers/mlp/gate_proj/kernel', 'layers/mlp/up_proj/kernel')}
    """
    place = module.partition(".")[0]
    return {f"model.layers.*.{module}.weight": tuple(f"layers/{place}/{part}/kernel" for part in parts)}


@dataclass(frozen=True)
class Family:
    """A published architecture, as data.

    Attributes:
        name: `model_type` in `config.json`.
        architecture: class of transformers that loads the files.
        arithmetic: fields of `DecoderConfig` that are the same in all of its models.
        keys: keys of `config.json` beside `COMMON_KEYS` that give a field of `DecoderConfig` each.
        defaults: values of absent keys, beside `COMMON_DEFAULTS`, as in transformers.
        fixed: further keys, each with the only value that is supported.
        ignored: further keys without a meaning.
        derived: fields of `DecoderConfig` that follow from others, by the config made without them.
        layer_types: types of the layers, `FULL` or `SLIDING`, where `layer_types` is not given.
        lists_types: `layer_types` may be given.
        window_switch: key that must be true for the `sliding_window` to be used.
        has_rope: which layers have rotary positions.
        layers_json: keys that `layer_types` and `has_rope` read, for a config.
        rope_theta: base of the rotary wavelengths if the file has none.
        local_rope_theta: the same of sliding layers whose positions are their own; None if all layers have the same.
        local_rope_key: key of that base in files of version 4 of transformers.
        has_partial_rope: `partial_rotary_factor` may be below 1.
        rope_types: kinds of scaling in files of this family, by the names there, if they differ from the usual ones.
        query_growth_key: key of the rotary parameters that gives `Rope.query_growth`.
        tensors: parameters of each tensor, by its name in a file, in the order of exported files; `*` stands for the
            index of the layer. Kernels are transposed. A tensor of several parameters holds their outputs one after the
            other. Of parameters that a config lacks there is no tensor.
    """

    name: str
    architecture: str
    arithmetic: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[Key, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    derived: Callable[[DecoderConfig], Mapping[str, Any]] = nothing_more
    layer_types: Callable[[Keys], Sequence[str]] = all_full
    lists_types: bool = False
    window_switch: str | None = None
    has_rope: Callable[[Keys], Sequence[bool]] = rope_everywhere
    layers_json: Callable[[DecoderConfig], dict[str, Any]] = nothing_more
    rope_theta: float = 1e4
    local_rope_theta: float | None = None
    local_rope_key: str = "rope_theta"
    has_partial_rope: bool = False
    rope_types: Mapping[str, str] = field(default_factory=dict)
    query_growth_key: str | None = None
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: LLAMA_TENSORS)

    @property
    def all_keys(self) -> dict[str, Key]:
        """The keys that give a field, by name; of two for one field that of the family."""
        own = {name for key in self.keys for name in key.fields}
        common = [key for key in COMMON_KEYS if own.isdisjoint(key.fields)]
        return {key.name: key for key in (*common, *self.keys)}

    @property
    def all_defaults(self) -> dict[str, Any]:
        """Values of absent keys."""
        held = self.all_keys
        common = {name: value for name, value in COMMON_DEFAULTS.items() if name in held or name.startswith("rope_")}
        return {**common, **self.defaults}
