"""Conversion between `DecoderConfig` and the `config.json` of Hugging Face transformers, versions 4 and 5.

What the keys of a family mean is in its entry of `jaxft.models.families`; here is how all of them are read and written.
A key that is in no table is refused unless it is null, false or empty, as it may change the arithmetic.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from jaxft.errors import ModelFileError
from jaxft.models.config import DecoderConfig
from jaxft.models.families import FAMILIES, WRAPPERS
from jaxft.models.family import FULL, SLIDING, Family, Keys, read_family_config
from jaxft.models.gguf import gguf_config
from jaxft.models.hf_files import GGUF, load_json
from jaxft.models.mxfp4 import METHOD
from jaxft.models.rope import SCALINGS, Rope

CONFIG, GENERATION = "config.json", "generation_config.json"
WRAPPER, IGNORED = "wrapper", "ignored_keys"
"""Names, in `source_json`, of the model around a text model, and of keys that were accepted unknown."""

NOT_EXPORTED = ("_name_or_path", "auto_map", "quantization_config")
"""Keys of a `config.json` that an export drops: the path of the source, its code files, and how it was quantised."""

WRITTEN = ("architectures", "model_type", "dtype", "torch_dtype", "rope_parameters", "rope_scaling", "rope_theta")
"""Keys that every export writes anew."""

NEUTRAL = frozenset(
    """
    attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop bad_words_ids begin_suppress_tokens
    bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dropout early_stopping embd_pdrop encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing hidden_dropout hidden_dropout_prob id2label image_token_id initializer_factor
    initializer_range internal_version is_llama_config keys_to_ignore_at_inference label2id length_penalty max_length
    max_new_tokens max_sequence_length min_length model_max_length name_or_path neftune_noise_alpha
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    router_aux_loss_coef router_jitter_noise sep_token_id seq_length
    suppress_tokens task_specific_params temperature tie_encoder_decoder tokenizer_class top_k top_p
    transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16
    use_cache
    """.split()  # noqa: SIM905 a line for each otherwise
)
"""Keys that change no logits: token ids, dropout, defaults of sampling, and notes of transformers and other tools."""

FIXED = {"is_causal": True}
"""Keys of all families with the only value that is supported, beside `Family.fixed`."""


def load_config(file: Path, ignored_keys: Sequence[str] = ()) -> DecoderConfig:
    """Read a model folder's config; other fields of `config.json`, and `generation_config.json`, are `source_json`.

    Args:
        file: the `config.json`, or a GGUF file.
        ignored_keys: keys that change no arithmetic, though they are not known; an export has none of them.

    Raises:
        ModelFileError: a file is not a JSON object, or `config.json` is absent or describes an unsupported model.
    """
    is_gguf = file.suffix.lower() == GGUF
    whole = gguf_config(file) if is_gguf else load_json(file)
    values = text_values(whole, file)
    config = decoder_config(values, file, ignored_keys)
    known = {*FAMILIES[config.family].all_defaults, *config_json(config, "float32"), *NOT_EXPORTED, *WRITTEN}
    source: dict[str, Any] = {
        CONFIG: {name: value for name, value in values.items() if name not in {*known, *ignored_keys}},
        IGNORED: sorted({*ignored_keys} & {*values}),
    }
    generation = file.with_name(GENERATION)
    if generation.is_file() and not is_gguf:
        source[GENERATION] = load_json(generation)
    if whole.get("model_type") in WRAPPERS:
        source[WRAPPER] = {"model_type": whole["model_type"]}
    source = {name: held for name, held in source.items() if held}
    return replace(config, source_json=json.dumps(source, sort_keys=True)) if source else config


def has_other_modalities(config: DecoderConfig) -> bool:
    """True if a model was loaded from files of several modalities, where text has modules of its own."""
    return WRAPPER in _source(config)


def accepted_keys(config: DecoderConfig) -> tuple[str, ...]:
    """Return those of `ignored_keys` that the model's `config.json` held."""
    return tuple(_source(config).get(IGNORED, ()))


def _source(config: DecoderConfig) -> dict[str, Any]:
    return json.loads(config.source_json) if config.source_json else {}


def source_files(config: DecoderConfig) -> dict[str, dict[str, Any]]:
    """Return the fields of `config.json` and `generation_config.json` that `DecoderConfig` lacks, by file name.

    >>> config = DecoderConfig("llama", 8, 4, 4, 1, 1, 1, 4, source_json='{"config.json": {"use_cache": true}}')
    >>> source_files(config)
    {'config.json': {'use_cache': True}, 'generation_config.json': {}}
    """
    return {name: _source(config).get(name, {}) for name in (CONFIG, GENERATION)}


def text_values(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the values of a `config.json`, of the text model if there are several modalities."""
    wrapper: Any = values.get("model_type")
    if wrapper not in WRAPPERS:
        aliases = FAMILIES[wrapper].aliases if wrapper in FAMILIES else {}
        return {aliases.get(name, name): value for name, value in values.items()}
    text = Keys(file, values).table("text_config")
    if not text:
        raise ModelFileError(f"{file}: model_type is {wrapper!r}, and there is no text_config")
    shared = {name: values[name] for name in ("tie_word_embeddings", "quantization_config") if name in values}
    tokens = {name: values[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in values}
    return {"model_type": WRAPPERS[wrapper], **tokens, **text, **shared}


def decoder_config(
    values: Mapping[str, Any], file: Path = Path(CONFIG), ignored_keys: Sequence[str] = ()
) -> DecoderConfig:
    """Convert the contents of a `config.json` to a `DecoderConfig`; `file` is named in errors.

    Raises:
        ModelFileError: a key is missing, has the wrong type, is not known, or asks for what the decoder lacks.
    """
    values = text_values(values, file)
    name: Any = values.get("model_type")
    if name not in FAMILIES:
        known = ", ".join([*FAMILIES, *WRAPPERS])
        raise ModelFileError(f"{file}: model_type is {name!r}; supported are {known}")
    family = FAMILIES[name]
    method = Keys(file, values).table("quantization_config").get("quant_method")
    if values.get("quantization_config") is not None and method != METHOD:
        raise ModelFileError(
            f"{file}: quantization_config has the quant_method {method!r}; wanted {METHOD!r} or unquantised weights, "
            "which the model's page often has too, or which transformers writes after dequantize()"
        )
    keys = Keys(file, {**family.all_defaults, **values})
    _check_keys(family, keys, ignored_keys)
    return read_family_config(family, keys)


def _check_keys(family: Family, keys: Keys, ignored_keys: Sequence[str]) -> None:
    """Raise a `ModelFileError` for all keys that are in no table, or a key whose value is not supported."""
    fixed = {**FIXED, **family.fixed}
    for name, wanted in fixed.items():
        if keys.values.get(name) not in (wanted, None):
            raise keys.fault(name, f"{json.dumps(wanted)}, the only value supported")
    known = {*family.all_defaults, *family.all_keys, *fixed, *family.ignored, *NEUTRAL, *WRITTEN, *NOT_EXPORTED}
    known |= {"layer_types", "partial_rotary_factor", family.local_rope_key, *ignored_keys}
    unknown = {}
    for name, value in keys.values.items():
        is_off = value is None or value is False or value in ([], {}, "")
        if name not in known and not name.startswith("_") and not is_off:
            unknown[name] = f"{name} = {json.dumps(value):.60}"
    if unknown:
        raise ModelFileError(
            f"{keys.file}: the meaning of {', '.join(unknown.values())} is not known for a {family.name}; if it "
            f"changes no arithmetic, set ignored_keys: {json.dumps([*unknown])} beside the model's path"
        )


def config_json(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the contents of a `config.json` for version 5 of transformers, with the keys of version 4 as well.

    Raises:
        ModelFileError: the family's `config.json` cannot express the config, such as a Mistral with biases.
    """
    if config.family not in FAMILIES:
        raise ModelFileError(f"family is {config.family!r}; files are written of {', '.join(FAMILIES)}")
    family = FAMILIES[config.family]
    held = {name: getattr(config, key.fields[0]) for name, key in family.all_keys.items()}
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **{
            name: None if held[name] is None and key.type is None else key.write(held[name])
            for name, key in family.all_keys.items()
        },
        **_layers_json(family, config),
        **_ropes_json(family, config),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    told = decoder_config(values)
    wanted = replace(config, source_json="").for_context(0)
    lost = [field.name for field in fields(config) if getattr(told, field.name) != getattr(wanted, field.name)]
    if lost:
        fields_lost = ", ".join(f"{name}={getattr(config, name)!r}" for name in lost)
        raise ModelFileError(
            f"the config.json of a {config.family} cannot express {fields_lost}; choose another family"
        )
    return values


def _layers_json(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of the kinds of layers."""
    windows = [kind.window for kind in config.kinds if kind.window is not None]
    values: dict[str, Any] = family.layers_json(config)
    if "sliding_window" in family.all_defaults:
        # Where the file lists types, transformers asks for a window even if no layer has it.
        unused = family.all_defaults["sliding_window"] if family.lists_types and family.window_switch is None else None
        values["sliding_window"] = windows[0] if windows else unused
    if family.window_switch is not None:
        values[family.window_switch] = bool(windows)
    if family.lists_types:
        values["layer_types"] = [FULL if kind.window is None else SLIDING for kind in config.kinds]
    return values


def _ropes_json(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of rotary positions, in the manner of both versions."""
    kinds = [kind for kind in config.kinds if kind.rope is not None]
    ropes = {FULL if kind.window is None else SLIDING: kind.rope for kind in kinds}
    full = ropes.get(FULL) or ropes.get(SLIDING) or Rope()
    table = _rope_json(family, full)
    scaling = {name: value for name, value in table.items() if name != "rope_theta"}
    old = {"rope_theta": full.theta, "rope_scaling": None if full.scaling is None else scaling}
    if family.local_rope_theta is None:
        share = {"partial_rotary_factor": full.share} if family.has_partial_rope else {}
        return {"rope_parameters": table, **old, **share}
    local = ropes.get(SLIDING) or Rope(family.local_rope_theta)
    is_old = local.scaling is None and (local.theta == full.theta or family.local_rope_key != "rope_theta")
    tables = {FULL: table, SLIDING: _rope_json(family, local)}
    return {"rope_parameters": tables, **(old | {family.local_rope_key: local.theta} if is_old else {})}


def _rope_json(family: Family, rope: Rope) -> dict[str, Any]:
    names = {kind: name for name, kind in SCALINGS.items()}
    values: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling is not None:
        held = asdict(rope.scaling)
        scaling = {name: value for name, value in held.items() if value is not None and name != "is_long"}
        values |= {"rope_type": names[type(rope.scaling)], **scaling}
    if family.has_partial_rope:
        values["partial_rotary_factor"] = rope.share
    if family.query_growth_key is not None and rope.query_growth:
        values[family.query_growth_key] = rope.query_growth
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
