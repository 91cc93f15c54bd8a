"""A family of models is two tables: the keys of its `config.json`, read here, and the tensors of its files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from jaxft.errors import ModelFileError
from jaxft.models.config import DecoderConfig, LayerKind
from jaxft.models.rope import SCALINGS, LongRopeScaling, Rope, RopeScaling

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

    def typed(self, key: str, hint: Any) -> Any:
        """Return a value of the type that a field has."""
        readers: dict[Any, Callable[[str], Any]] = {int: self.integer, bool: self.flag, tuple[float, ...]: self.numbers}
        readers |= {float: self.number, float | None: self.number, int | None: self.integer}
        return readers[hint](key) if hint in readers else self.choice(key, get_args(hint))

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
    """A key of `config.json`, the fields of `DecoderConfig` that it gives, and conversions where they differ.

    A value is of the type of the first field, unless the key has a `type` of its own.
    """

    name: str
    fields: tuple[str, ...]
    read: Callable[[Any], Any] = same
    write: Callable[[Any], Any] = same
    type: Any = None


def plain_keys(*names: str) -> tuple[Key, ...]:
    """Keys with the names of their fields."""
    return tuple(Key(name, (name,)) for name in names)


def everywhere(value: Any) -> Callable[[Keys], list[Any]]:
    """The same type, or the same answer, for every layer."""
    return lambda keys: [value] * keys.num_layers


ALL_FULL, EVERY_LAYER, NO_LAYER = everywhere(FULL), everywhere(True), everywhere(False)
"""Types of layers of which each sees all tokens before, and answers of all layers or of none."""


def sliding_if_set(keys: Keys) -> list[str]:
    """Types of layers that all have the window, if there is a `sliding_window`."""
    return [FULL if keys.is_null("sliding_window") else SLIDING] * keys.num_layers


def full_every(number: int | str) -> Callable[[Keys], list[str]]:
    """Types of layers of which every so many-th sees all tokens; a name is the key that has the number."""

    def types(keys: Keys) -> list[str]:
        turn = keys.integer(number) if isinstance(number, str) else number
        return [FULL if (i + 1) % turn == 0 else SLIDING for i in range(keys.num_layers)]

    return types


def nothing_more(config: DecoderConfig) -> dict[str, Any]:
    """Return no keys."""
    return {}


COMMON_KEYS = (
    *plain_keys("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"),
    *plain_keys("rms_norm_eps", "tie_word_embeddings"),
    Key("num_hidden_layers", ("num_layers",)),
    Key("num_attention_heads", ("num_heads",)),
    Key("num_key_value_heads", ("num_kv_heads",)),
    Key("hidden_act", ("activation",)),
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


def _projection(module: str, path: str | None = None) -> dict[str, tuple[str, ...]]:
    path, name = f"layers/{path or module.replace('.', '/')}", f"model.layers.*.{module}"
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


def expert_tensors(
    router: str = "mlp.gate",
    experts: str = "mlp.experts.*",
    projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    shared_expert: str = "mlp.shared_expert",
) -> dict[str, tuple[str, ...]]:
    """Return the rows of a mixture's tensors; `projections` are gate, up and down of each expert, if it has its own."""
    ours = ("gate_proj", "up_proj", "down_proj")
    places = [(f"{experts}.{name}", f"mlp/experts/{own}") for name, own in zip(projections, ours, strict=False)]
    places += [(f"{shared_expert}.{name}", f"mlp/shared_expert/{name}") for name in ours]
    places += [(router, "mlp/router"), (f"{shared_expert}_gate", "mlp/shared_expert_gate")]
    rows = {name: paths for module, path in places for name, paths in _projection(module, path).items()}
    return rows | {f"model.layers.*.{router}.e_score_correction_bias": ("layers/mlp/selection_bias",)}


def stacked(*parts: str) -> tuple[str, ...]:
    """Return the parameters of a tensor that holds a part, or several, of all experts.

    >>> stacked("gate_proj/bias", "up_proj/bias")
    ('layers/mlp/experts/gate_proj/bias', 'layers/mlp/experts/up_proj/bias')
    """
    return tuple(f"layers/mlp/experts/{part}" for part in parts)


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
        has_experts: which layers are mixtures of experts.
        layers_json: keys that `layer_types`, `has_rope` and `has_experts` read, for a config.
        aliases: other names of keys.
        rope_theta: base of the rotary wavelengths if the file has none.
        local_rope_theta: the same of sliding layers whose positions are their own; None if all layers have the same.
        local_rope_key: key of that base in files of version 4 of transformers.
        has_partial_rope: `partial_rotary_factor` may be below 1.
        rope_types: kinds of scaling in files of this family, by the names there, if they differ from the usual ones.
        query_growth_key: key of the rotary parameters that gives `Rope.query_growth`.
        tensors: parameters of each tensor, by its name in a file, in the order of exported files; `*` stands for the
            index of the layer. Kernels are transposed. A tensor of several parameters holds their outputs one after the
            other. A second `*` stands for the index of the expert; tensors without it hold those of all. Of parameters
            that a config lacks there is no tensor.
        is_interleaved: tensors of several parameters hold their outputs in turn.
    """

    name: str
    architecture: str
    arithmetic: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[Key, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    derived: Callable[[DecoderConfig], Mapping[str, Any]] = nothing_more
    layer_types: Callable[[Keys], Sequence[str]] = ALL_FULL
    lists_types: bool = False
    window_switch: str | None = None
    has_rope: Callable[[Keys], Sequence[bool]] = EVERY_LAYER
    has_experts: Callable[[Keys], Sequence[bool]] = NO_LAYER
    layers_json: Callable[[DecoderConfig], dict[str, Any]] = nothing_more
    aliases: Mapping[str, str] = field(default_factory=dict)
    rope_theta: float = 1e4
    local_rope_theta: float | None = None
    local_rope_key: str = "rope_theta"
    has_partial_rope: bool = False
    rope_types: Mapping[str, str] = field(default_factory=dict)
    query_growth_key: str | None = None
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: LLAMA_TENSORS)
    is_interleaved: bool = False

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


def read_family_config(family: Family, keys: Keys) -> DecoderConfig:
    """Return the config that the keys of a family's file give.

    Raises:
        ModelFileError: a key is missing, has the wrong type, or asks for what the decoder lacks.
    """
    read = [(key.fields, _read_key(key, keys)) for key in family.all_keys.values()]
    given = {name: value for names, value in read for name in names}
    try:
        config = DecoderConfig(family.name, pattern=_read_pattern(family, keys), **{**given, **family.arithmetic})
        return replace(config, **family.derived(config))
    except ModelFileError:
        raise
    except ValueError as error:
        raise ModelFileError(f"{keys.file}: {error}") from error


def _read_key(key: Key, keys: Keys) -> Any:
    """Return the value that a key gives to its fields; where it is null, two follow from other keys."""
    hint, is_null = key.type or get_type_hints(DecoderConfig)[key.fields[0]], keys.is_null(key.name)
    if key.name == "num_key_value_heads" and is_null:
        return keys.integer("num_attention_heads")
    if key.name == "head_dim" and is_null:
        hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
        if hidden_size % num_heads:
            place = f"{keys.file}: hidden_size {hidden_size} does not divide over {num_heads} heads"
            raise ModelFileError(f"{place}, and there is no head_dim")
        return hidden_size // num_heads
    return None if hint in (float | None, int | None) and is_null else key.read(keys.typed(key.name, hint))


def _read_pattern(family: Family, keys: Keys) -> tuple[LayerKind, ...]:
    """Return the kinds of all layers."""
    types = _read_layer_types(family, keys)
    window = keys.integer("sliding_window") if SLIDING in types else None
    ropes = _read_ropes(family, keys)
    return tuple(
        LayerKind(window if kind == SLIDING else None, ropes[kind] if has_rope else None, has_experts)
        for kind, has_rope, has_experts in zip(types, family.has_rope(keys), family.has_experts(keys), strict=True)
    )


def _read_layer_types(family: Family, keys: Keys) -> list[str]:
    switch, given = family.window_switch, keys.values.get("layer_types")
    has_window = not keys.is_null("sliding_window") and (switch is None or keys.flag(switch))
    usual = list(family.layer_types(keys)) if given is None or not family.lists_types else []
    if given is None:
        return usual
    if not isinstance(given, list) or len(given) != keys.num_layers or not set(map(str, given)) <= {FULL, SLIDING}:
        raise keys.fault("layer_types", f"a list of {keys.num_layers}, each {FULL!r} or {SLIDING!r}")
    if not family.lists_types and given != usual:
        raise keys.fault("layer_types", f"only {usual[0]!r}, which the sliding_window of a {family.name} asks for")
    if SLIDING in given and not has_window:
        raise keys.fault("layer_types", f"{FULL!r} only, as there is no sliding_window in use")
    return given


def _read_ropes(family: Family, keys: Keys) -> dict[str, Rope]:
    """Return the rotary positions of each type of layer.

    Version 5 writes `rope_parameters`, with a table for each type where they differ; version 4 writes `rope_theta`
    beside `rope_scaling`, which may be null and is that of layers that see all tokens.
    """
    scaling, parameters = keys.table("rope_scaling"), keys.table("rope_parameters")
    if family.local_rope_theta is None:
        return dict.fromkeys((FULL, SLIDING), _read_rope(family, keys, [scaling, parameters], family.rope_theta))
    inner = Keys(keys.file, parameters)
    if parameters and not set(parameters) <= {FULL, SLIDING}:
        raise keys.fault("rope_parameters", f"an object with {FULL!r} and {SLIDING!r}")
    local = Keys(keys.file, {name: value for name, value in keys.values.items() if name != "rope_theta"})
    if family.local_rope_key in keys.values:
        local = Keys(keys.file, {**local.values, "rope_theta": keys.values[family.local_rope_key]})
    return {
        FULL: _read_rope(family, keys, [scaling, inner.table(FULL)], family.rope_theta),
        SLIDING: _read_rope(family, local, [inner.table(SLIDING)], family.local_rope_theta),
    }


def _read_rope(family: Family, keys: Keys, tables: list[dict[str, Any]], default_theta: float) -> Rope:
    """Return rotary positions by tables of their parameters, of which the first that is not empty counts."""
    tables = [table for table in tables if table]
    rope = Keys(keys.file, tables[0] if tables else {})
    thetas = {Keys(keys.file, each).number("rope_theta") for each in (keys.values, *tables) if "rope_theta" in each}
    if len(thetas) > 1:
        raise ModelFileError(f"{keys.file}: rope_theta has several values, {sorted(thetas)}; wanted one")
    name = rope.values.get("rope_type", rope.values.get("type", "default"))
    kind = family.rope_types.get(name, name)
    if kind not in ("default", *SCALINGS):
        supported = ", ".join(map(repr, ("default", *SCALINGS)))
        raise ModelFileError(f"{keys.file}: rope_type is {name!r}; supported are {supported}")
    scaling = None if kind == "default" else _read_scaling(SCALINGS[kind], keys, rope)
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", family.query_growth_key}
    known |= {"max_position_embeddings", "original_max_position_embeddings"}
    known |= {field.name for each in SCALINGS.values() for field in fields(each)} - {"is_long"} | {"finetuned"}
    unknown = sorted({key for table in tables for key, value in table.items() if value is not None} - known)
    if unknown:
        raise ModelFileError(f"{keys.file}: the rotary parameters hold {unknown}, which is not supported")
    shares = [Keys(keys.file, each) for each in (keys.values, *tables) if each.get("partial_rotary_factor") is not None]
    for each in shares:
        if not family.has_partial_rope and each.values["partial_rotary_factor"] != 1:
            raise each.fault("partial_rotary_factor", "1: rotary positions on whole heads")
    share = shares[-1].number("partial_rotary_factor") if shares else 1.0
    growth = rope.values.get(family.query_growth_key or "")
    return Rope(
        theta=thetas.pop() if thetas else default_theta,
        scaling=scaling,
        share=share,
        query_growth=0.0 if growth is None else rope.number(family.query_growth_key or ""),
    )


def _read_scaling(kind: type[RopeScaling], keys: Keys, rope: Keys) -> RopeScaling:
    """Return the scaling of rotary parameters; some files have its lengths beside them."""
    own = {name: value for name, value in rope.values.items() if value is not None}
    if kind is LongRopeScaling:
        length = own.setdefault("original_max_position_embeddings", keys.values.get("original_max_position_embeddings"))
        if isinstance(length, int) and length > 0:
            own.setdefault("factor", keys.integer("max_position_embeddings") / length)
    table, hints, read = Keys(rope.file, own), get_type_hints(kind), dict[str, Any]()
    for each in fields(kind):
        if each.name != "is_long" and (each.name in own or each.default is MISSING):
            # A factor of 0 is as good as none, and stays for the export.
            is_zero = hints[each.name] == float | None and own.get(each.name) == 0
            read[each.name] = 0.0 if is_zero else table.typed(each.name, hints[each.name])
    return kind(**read)
