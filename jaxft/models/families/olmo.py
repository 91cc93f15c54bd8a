"""OLMo 2 (arXiv 2501.00656) and OLMo 3."""

from jaxft.models.families.family import ATTENTION_BIAS, LLAMA_TENSORS, Family, full_every

ARITHMETIC = {"norm_places": "after", "qk_norm": "projections"}
DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
TENSORS = {
    **LLAMA_TENSORS,
    "model.layers.*.post_attention_layernorm.weight": ("layers/attention_output_norm/scale",),
    "model.layers.*.post_feedforward_layernorm.weight": ("layers/mlp_output_norm/scale",),
}

OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    arithmetic=ARITHMETIC,
    keys=(ATTENTION_BIAS,),
    defaults=DEFAULTS,
    tensors=TENSORS,
)

OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    arithmetic=ARITHMETIC,
    keys=(ATTENTION_BIAS,),
    defaults={**DEFAULTS, "sliding_window": 4096},
    layer_types=full_every(4),
    lists_types=True,
    rope_theta=5e5,
    local_rope_theta=5e5,
    tensors=TENSORS,
)
