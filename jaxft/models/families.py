"""The families of models whose files are read and written, each an entry of two tables (`jaxft.models.family`)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxft.models.config import DecoderConfig
from jaxft.models.family import (
    ATTENTION_BIAS,
    FULL,
    LLAMA_TENSORS,
    MLP_BIAS,
    SLIDING,
    Family,
    Key,
    Keys,
    full_every,
    fused,
    sliding_if_set,
    without,
)
from jaxft.models.mixtures import GRANITE, MIXTURES
from jaxft.models.rope import LongRopeScaling

# --- Llama, and the families of Mistral AI.

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    keys=(ATTENTION_BIAS, MLP_BIAS),
    defaults={"max_position_embeddings": 2048},
)

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    layer_types=sliding_if_set,
)

MINISTRAL = replace(MISTRAL, name="ministral", architecture="MinistralForCausalLM", lists_types=True)

MINISTRAL3 = Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    defaults={
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    layer_types=sliding_if_set,
    query_growth_key="llama_4_scaling_beta",
)


# --- Qwen2, which Qwen2.5 is too, and Qwen3.


def sliding_from_a_layer_on(keys: Keys) -> list[str]:
    """Types of layers of which the first `max_window_layers` see all tokens."""
    has_window = keys.flag("use_sliding_window") and not keys.is_null("sliding_window")
    num_full = keys.integer("max_window_layers", least=0) if has_window else keys.num_layers
    return [FULL if i < num_full else SLIDING for i in range(keys.num_layers)]


def window_keys(config: DecoderConfig) -> dict[str, Any]:
    """Return the key that `sliding_from_a_layer_on` reads."""
    first = [i for i, kind in enumerate(config.kinds) if kind.window is not None]
    return {"max_window_layers": min(first, default=config.num_layers)}


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    arithmetic={"qkv_bias": True},
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    fixed={"use_mrope": False},
    layer_types=sliding_from_a_layer_on,
    lists_types=True,
    window_switch="use_sliding_window",
    layers_json=window_keys,
)

QWEN3 = replace(
    QWEN2,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    arithmetic={"qk_norm": "heads"},
    keys=(ATTENTION_BIAS,),
    defaults={**QWEN2.defaults, "head_dim": 128},
    fixed={},
)


# --- Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786).


def scaled_embedding(config: DecoderConfig) -> dict[str, Any]:
    """Return the factor of the embedding."""
    return {"embedding_scale": config.hidden_size**0.5}


GEMMA_KEYS = (
    ATTENTION_BIAS,
    Key("hidden_activation", ("activation",)),
    Key("query_pre_attn_scalar", ("attention_scale",), lambda scalar: scalar**-0.5, lambda scale: round(scale**-2)),
    Key("final_logit_softcapping", ("logit_soft_cap",)),
)
GEMMA_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    arithmetic={"norm_places": "both", "norm_offset": True},
    keys=(*GEMMA_KEYS, Key("attn_logit_softcapping", ("attention_soft_cap",))),
    defaults={
        **GEMMA_DEFAULTS,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    fixed={"use_bidirectional_attention": False},
    ignored=frozenset({"hidden_act", "sliding_window_size"}),
    derived=scaled_embedding,
    layer_types=full_every(2),
    lists_types=True,
    tensors={
        **LLAMA_TENSORS,
        "model.layers.*.post_attention_layernorm.weight": ("layers/attention_output_norm/scale",),
        "model.layers.*.pre_feedforward_layernorm.weight": ("layers/post_attention_layernorm/scale",),
        "model.layers.*.post_feedforward_layernorm.weight": ("layers/mlp_output_norm/scale",),
    },
)

GEMMA3 = replace(
    GEMMA2,
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    arithmetic={**GEMMA2.arithmetic, "qk_norm": "heads"},
    keys=GEMMA_KEYS,
    defaults={
        **GEMMA_DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
    },
    fixed={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    ignored=frozenset({"hidden_act"}),
    layer_types=full_every("sliding_window_pattern"),
    rope_theta=1e6,
    local_rope_theta=1e4,
    local_rope_key="rope_local_base_freq",
)


# --- OLMo 2 (arXiv 2501.00656) and OLMo 3.

OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    arithmetic={"norm_places": "after", "qk_norm": "projections"},
    keys=(ATTENTION_BIAS,),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    tensors={
        **LLAMA_TENSORS,
        "model.layers.*.post_attention_layernorm.weight": ("layers/attention_output_norm/scale",),
        "model.layers.*.post_feedforward_layernorm.weight": ("layers/mlp_output_norm/scale",),
    },
)

OLMO3 = replace(
    OLMO2,
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={**OLMO2.defaults, "sliding_window": 4096},
    layer_types=full_every(4),
    lists_types=True,
    rope_theta=5e5,
    local_rope_theta=5e5,
)


# --- SmolLM3, whose every fourth layer has no positions (arXiv 2501.18795).


def smollm_rope(keys: Keys) -> list[bool]:
    """Which layers have positions: by `no_rope_layers`, which is 1 for those that have, or by their interval."""
    listed = keys.values["no_rope_layers"]
    if listed is None:
        interval = keys.integer("no_rope_layer_interval")
        return [(i + 1) % interval != 0 for i in range(keys.num_layers)]
    if not isinstance(listed, list) or len(listed) < keys.num_layers or not set(listed) <= {0, 1}:
        raise keys.fault("no_rope_layers", f"a list of {keys.num_layers}, each 0 or 1")
    return [bool(each) for each in listed[: keys.num_layers]]


def sliding_without_rope(keys: Keys) -> list[str]:
    """Types of layers of which those without positions have the window, if it is in use."""
    has_window = keys.flag("use_sliding_window") and not keys.is_null("sliding_window")
    return [SLIDING if has_window and not rope else FULL for rope in smollm_rope(keys)]


def rope_keys(config: DecoderConfig) -> dict[str, Any]:
    """Return the key that `smollm_rope` reads."""
    return {"no_rope_layers": [int(kind.rope is not None) for kind in config.kinds]}


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    keys=(ATTENTION_BIAS, MLP_BIAS),
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    ignored=frozenset({"max_window_layers"}),
    layer_types=sliding_without_rope,
    lists_types=True,
    window_switch="use_sliding_window",
    has_rope=smollm_rope,
    layers_json=rope_keys,
    rope_theta=2e6,
)


# --- Phi-3 (arXiv 2404.14219), which Phi-3.5, Phi-4 and Phi-4-mini are too.


def original_length(config: DecoderConfig) -> dict[str, Any]:
    """Return the length that LongRoPE extends, which these files have beside the rotary parameters."""
    rope = config.pattern[0].rope
    scaling = None if rope is None else rope.scaling
    if isinstance(scaling, LongRopeScaling):
        return {"original_max_position_embeddings": scaling.original_max_position_embeddings}
    return {"original_max_position_embeddings": config.max_position_embeddings}


PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
    },
    fixed={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1},
    ignored=frozenset({"interpolate_factor", "embd_layer"}),
    layer_types=sliding_if_set,
    layers_json=original_length,
    has_partial_rope=True,
    rope_types={"su": "longrope", "yarn": "longrope"},
    tensors={
        **without(LLAMA_TENSORS, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        **fused("self_attn.qkv_proj", "q_proj", "k_proj", "v_proj"),
        **fused("mlp.gate_up_proj", "gate_proj", "up_proj"),
    },
)


ALL = (LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, QWEN2, QWEN3, GEMMA2, GEMMA3, OLMO2, OLMO3, SMOLLM3, PHI3, GRANITE)
FAMILIES: Mapping[str, Family] = {family.name: family for family in (*ALL, *MIXTURES)}
"""Families by the `model_type` of their `config.json`."""

WRAPPERS: Mapping[str, str] = {"gemma3": GEMMA3.name, "mistral3": MISTRAL.name}
"""Families of several modalities whose text model is read, by `model_type`, with the default `model_type` of it."""
