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
    expert_tensors,
    experts_everywhere,
    full_every,
    fused,
    inverse,
    sliding_if_set,
    stacked,
    without,
)
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


# --- Mixtures of experts of Qwen: Qwen3's, such as 30B-A3B, and Qwen2's, with a shared expert.


def sliding_if_used(keys: Keys) -> list[str]:
    """Types of layers that all have the window, if it is in use."""
    return [SLIDING if keys.flag("use_sliding_window") else FULL] * keys.num_layers


def sparse_layers(keys: Keys) -> list[bool]:
    """Layers that are mixtures of experts: every so many-th, but for those that are listed."""
    step, dense = keys.integer("decoder_sparse_step"), keys.values["mlp_only_layers"] or []
    if not isinstance(dense, list) or not set(dense) <= {*range(keys.num_layers)}:
        raise keys.fault("mlp_only_layers", f"a list of layers, each below {keys.num_layers}")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(keys.num_layers)]


def dense_layers_json(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that `sparse_layers` reads."""
    dense = [layer for layer, kind in enumerate(config.kinds) if not kind.has_experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def sliding_in_turn(keys: Keys) -> list[str]:
    """Types of layers of which every other one of the first `max_window_layers` has the window, if it is in use."""
    last = keys.integer("max_window_layers", least=0) if keys.flag("use_sliding_window") else 0
    return [SLIDING if layer < last and layer % 2 == 0 else FULL for layer in range(keys.num_layers)]


EXPERT_KEYS = (
    Key("num_experts", ("num_experts",)),
    Key("num_experts_per_tok", ("num_experts_per_tok",)),
    Key("moe_intermediate_size", ("moe_intermediate_size",)),
    Key("norm_topk_prob", ("norm_topk_prob",)),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    arithmetic={"qk_norm": "heads"},
    keys=(ATTENTION_BIAS, *EXPERT_KEYS),
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    ignored=frozenset({"max_window_layers"}),
    layer_types=sliding_if_used,
    window_switch="use_sliding_window",
    has_experts=sparse_layers,
    layers_json=dense_layers_json,
    aliases={"num_local_experts": "num_experts"},
    tensors={**LLAMA_TENSORS, **expert_tensors()},
)


QWEN2_MOE = replace(
    QWEN3_MOE,
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    arithmetic={"num_shared_experts": 1, "shared_expert_gate": True},
    keys=(
        Key("qkv_bias", ("qkv_bias",)),
        *EXPERT_KEYS,
        Key("shared_expert_intermediate_size", ("shared_expert_intermediate_size",)),
    ),
    defaults={
        **QWEN3_MOE.defaults,
        "num_key_value_heads": 16,
        "max_window_layers": 28,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    ignored=frozenset(),
    layer_types=sliding_in_turn,
    lists_types=True,
)


# --- Mixtures of other houses whose layers all have experts, of the width of a feed-forward layer.

ALL_EXPERTS = (
    Key("intermediate_size", ("intermediate_size", "moe_intermediate_size")),
    Key("num_experts_per_tok", ("num_experts_per_tok",)),
)
LOCAL_EXPERTS = Key("num_local_experts", ("num_experts",))

MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    architecture="MixtralForCausalLM",
    arithmetic={"norm_topk_prob": True},
    keys=(*ALL_EXPERTS, LOCAL_EXPERTS),
    defaults={
        **MISTRAL.defaults,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    has_experts=experts_everywhere,
    aliases={"num_experts": "num_local_experts"},
    rope_theta=1e6,
    tensors={
        **LLAMA_TENSORS,
        **expert_tensors("block_sparse_moe.gate", "block_sparse_moe.experts.*", ("w1", "w3", "w2")),
    },
)

# gpt-oss (arXiv 2508.10925), whose published files are MXFP4.
GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    arithmetic={"router": "topk_softmax", "router_bias": True, "expert_bias": True, "attention_sinks": True},
    keys=(
        ATTENTION_BIAS,
        *ALL_EXPERTS,
        LOCAL_EXPERTS,
        Key("swiglu_limit", ("swiglu_limit",)),
        Key("swiglu_alpha", ("swiglu_alpha",)),
    ),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    ignored=frozenset({"experts_per_token", "initial_context_length"}),
    layer_types=full_every(2),
    lists_types=True,
    has_experts=experts_everywhere,
    aliases={"num_experts": "num_local_experts"},
    rope_theta=150000.0,
    tensors={
        **without(LLAMA_TENSORS, "gate_proj", "up_proj", "down_proj"),
        "model.layers.*.self_attn.sinks": ("layers/self_attn/sinks",),
        **expert_tensors("mlp.router", projections=()),
        "model.layers.*.mlp.experts.gate_up_proj": stacked("gate_proj/kernel", "up_proj/kernel"),
        "model.layers.*.mlp.experts.gate_up_proj_bias": stacked("gate_proj/bias", "up_proj/bias"),
        "model.layers.*.mlp.experts.down_proj": stacked("down_proj/kernel"),
        "model.layers.*.mlp.experts.down_proj_bias": stacked("down_proj/bias"),
    },
    is_interleaved=True,
)


# --- Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786).


def scaled_embedding(config: DecoderConfig) -> dict[str, Any]:
    """Return the factor of the embedding."""
    return {"embedding_scale": config.hidden_size**0.5}


GEMMA_KEYS = (
    ATTENTION_BIAS,
    Key("hidden_activation", ("activation",)),
    Key(
        "query_pre_attn_scalar",
        ("attention_scale",),
        read=lambda scalar: scalar**-0.5,
        write=lambda scale: round(scale**-2),
    ),
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


# --- Granite 3 of IBM: Llama with factors of the embedding, the residual stream, the scores and the logits.

GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    keys=(
        ATTENTION_BIAS,
        MLP_BIAS,
        Key("embedding_multiplier", ("embedding_scale",)),
        Key("residual_multiplier", ("residual_scale",)),
        Key("attention_multiplier", ("attention_scale",)),
        Key("logits_scaling", ("logit_scale",), inverse, inverse),
    ),
    defaults={
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
)


GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    arithmetic={"router": "topk_softmax"},
    keys=(*(key for key in GRANITE.keys if key is not MLP_BIAS), *ALL_EXPERTS, LOCAL_EXPERTS),
    defaults={**GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    has_experts=experts_everywhere,
    aliases={"num_experts": "num_local_experts"},
    tensors={
        **without(LLAMA_TENSORS, "gate_proj", "up_proj", "down_proj"),
        **expert_tensors("block_sparse_moe.router.layer", projections=()),
        "model.layers.*.block_sparse_moe.input_linear.weight": stacked("gate_proj/kernel", "up_proj/kernel"),
        "model.layers.*.block_sparse_moe.output_linear.weight": stacked("down_proj/kernel"),
    },
)


ALL = (LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, QWEN2, QWEN3, GEMMA2, GEMMA3, OLMO2, OLMO3, SMOLLM3, PHI3, GRANITE)
MIXTURES = (QWEN3_MOE, QWEN2_MOE, MIXTRAL, GPT_OSS, GRANITE_MOE)
FAMILIES: Mapping[str, Family] = {family.name: family for family in (*ALL, *MIXTURES)}
"""Families by the `model_type` of their `config.json`."""

WRAPPERS: Mapping[str, str] = {"gemma3": GEMMA3.name, "mistral3": MISTRAL.name}
"""Families of several modalities whose text model is read, by `model_type`, with the default `model_type` of it."""
