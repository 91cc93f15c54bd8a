"""The families of mixtures of experts, and Granite, whose factors its mixtures have too (`jaxft.models.families`)."""

from dataclasses import replace
from typing import Any

from jaxft.models.config import DecoderConfig
from jaxft.models.family import (
    ATTENTION_BIAS,
    EVERY_LAYER,
    FULL,
    LLAMA_TENSORS,
    MLP_BIAS,
    SLIDING,
    Family,
    Key,
    Keys,
    expert_tensors,
    full_every,
    inverse,
    plain_keys,
    sliding_if_set,
    stacked,
    without,
)

# --- Qwen: Qwen3's, such as 30B-A3B, and Qwen2's, with a shared expert.


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


EXPERT_KEYS = plain_keys("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
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
    keys=(*EXPERT_KEYS, *plain_keys("qkv_bias", "shared_expert_intermediate_size")),
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
    *plain_keys("num_experts_per_tok"),
)
LOCAL_EXPERTS = Key("num_local_experts", ("num_experts",))

MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    arithmetic={"norm_topk_prob": True},
    keys=(*ALL_EXPERTS, LOCAL_EXPERTS),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    layer_types=sliding_if_set,
    has_experts=EVERY_LAYER,
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
    keys=(ATTENTION_BIAS, *ALL_EXPERTS, LOCAL_EXPERTS, *plain_keys("swiglu_limit", "swiglu_alpha")),
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
    has_experts=EVERY_LAYER,
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


# --- OLMoE (arXiv 2409.02060).

OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    arithmetic={"qk_norm": "projections"},
    keys=(ATTENTION_BIAS, *ALL_EXPERTS, EXPERT_KEYS[0], EXPERT_KEYS[3]),
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    fixed={"clip_qkv": None},
    has_experts=EVERY_LAYER,
    aliases={"num_local_experts": "num_experts"},
    tensors={**LLAMA_TENSORS, **expert_tensors()},
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
    has_experts=EVERY_LAYER,
    aliases={"num_experts": "num_local_experts"},
    tensors={
        **without(LLAMA_TENSORS, "gate_proj", "up_proj", "down_proj"),
        **expert_tensors("block_sparse_moe.router.layer", projections=()),
        "model.layers.*.block_sparse_moe.input_linear.weight": stacked("gate_proj/kernel", "up_proj/kernel"),
        "model.layers.*.block_sparse_moe.output_linear.weight": stacked("down_proj/kernel"),
    },
)


# --- GLM-4.5 (arXiv 2508.06471): scores by the sigmoid, and experts chosen by a bias that their weights do not have.


def dense_first(keys: Keys) -> list[bool]:
    """Layers that are mixtures of experts: all but the first `first_k_dense_replace`."""
    dense = keys.integer("first_k_dense_replace", least=0)
    return [layer >= dense for layer in range(keys.num_layers)]


def dense_first_json(config: DecoderConfig) -> dict[str, Any]:
    """Return the key that `dense_first` reads."""
    return {"first_k_dense_replace": sum(not kind.has_experts for kind in config.kinds)}


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    arithmetic={"router": "sigmoid", "selection_bias": True},
    keys=(
        Key("attention_bias", ("qkv_bias",)),
        Key("n_routed_experts", ("num_experts",)),
        *EXPERT_KEYS[1:],
        *plain_keys("routed_scaling_factor"),
        Key("n_shared_experts", ("num_shared_experts",)),
        Key("use_qk_norm", ("qk_norm",), lambda used: "heads" if used else None, lambda norm: norm is not None, bool),
    ),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
        "use_qk_norm": False,
    },
    fixed={"n_group": 1, "topk_group": 1},
    ignored=frozenset({"num_nextn_predict_layers"}),
    has_experts=dense_first,
    layers_json=dense_first_json,
    aliases={"num_local_experts": "n_routed_experts"},
    has_partial_rope=True,
    tensors={**LLAMA_TENSORS, **expert_tensors(shared_expert="mlp.shared_experts")},
)


MIXTURES = (QWEN3_MOE, QWEN2_MOE, MIXTRAL, GPT_OSS, GRANITE_MOE, OLMOE, GLM4_MOE)
