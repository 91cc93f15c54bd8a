"""Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786)."""

from typing import Any

from jaxft.models.config import DecoderConfig
from jaxft.models.families.family import ATTENTION_BIAS, LLAMA_TENSORS, Family, Key, full_every


def scaled_embedding(config: DecoderConfig) -> dict[str, Any]:
    """Return the factor of the embedding."""
    return {"embedding_scale": config.hidden_size**0.5}


ARITHMETIC = {"norm_places": "both", "norm_offset": True}
KEYS = (
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
DEFAULTS = {
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
TENSORS = {
    **LLAMA_TENSORS,
    "model.layers.*.post_attention_layernorm.weight": ("layers/attention_output_norm/scale",),
    "model.layers.*.pre_feedforward_layernorm.weight": ("layers/post_attention_layernorm/scale",),
    "model.layers.*.post_feedforward_layernorm.weight": ("layers/mlp_output_norm/scale",),
}

GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    arithmetic=ARITHMETIC,
    keys=(*KEYS, Key("attn_logit_softcapping", ("attention_soft_cap",))),
    defaults={
        **DEFAULTS,
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
    tensors=TENSORS,
)

GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    arithmetic={**ARITHMETIC, "qk_norm": "heads"},
    keys=KEYS,
    defaults={
        **DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
    },
    fixed={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    ignored=frozenset({"hidden_act"}),
    derived=scaled_embedding,
    layer_types=full_every("sliding_window_pattern"),
    lists_types=True,
    rope_theta=1e6,
    local_rope_theta=1e4,
    local_rope_key="rope_local_base_freq",
    tensors=TENSORS,
)
