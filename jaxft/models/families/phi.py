"""Phi-3 (arXiv 2404.14219), which Phi-3.5, Phi-4 and Phi-4-mini are too."""

from typing import Any

from jaxft.models.config import DecoderConfig
from jaxft.models.families.family import LLAMA_TENSORS, Family, fused, sliding_if_set, without
from jaxft.models.rope import LongRopeScaling


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
