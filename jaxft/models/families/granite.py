"""Granite 3 of IBM: Llama with factors of the embedding, the residual stream, the scores and the logits."""

from jaxft.models.families.family import ATTENTION_BIAS, MLP_BIAS, Family, Key, inverse

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
