"""Llama, and the families of Mistral AI."""

from jaxft.models.families.family import ATTENTION_BIAS, MLP_BIAS, Family, sliding_if_set

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

MINISTRAL = Family(
    name="ministral",
    architecture="MinistralForCausalLM",
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    layer_types=sliding_if_set,
    lists_types=True,
)

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
