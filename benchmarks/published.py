"""Shapes of published models of several families: what their `config.json` says, without what changes no array."""

from collections.abc import Mapping
from typing import Any

from jaxft.models.config import DecoderConfig
from jaxft.models.hf_config import decoder_config


def _shape(
    model_type: str, vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gemma-2-2b": _shape("gemma2", 256000, 2304, 9216, 26, 8, 4, head_dim=256, sliding_window=4096),
    "gemma-3-1b": _shape("gemma3_text", 262144, 1152, 6912, 26, 4, 1, head_dim=256, sliding_window=512),
    "olmo-3-7b": _shape("olmo3", 100278, 4096, 11008, 32, 32, 32, sliding_window=4096, max_position_embeddings=65536),
    "smollm3-3b": _shape("smollm3", 128256, 2048, 11008, 36, 16, 4, rope_theta=5e6, max_position_embeddings=65536),
    "phi-4-mini": _shape("phi3", 200064, 3072, 8192, 32, 24, 8, partial_rotary_factor=0.75, tie_word_embeddings=True),
}
"""Keys of `config.json` by model. Phi-4-mini's factors of long contexts are left out."""


def published(name: str) -> DecoderConfig:
    """Return the shape of a published model.

    >>> gemma = published("gemma-3-1b")
    >>> [kind.window for kind in gemma.pattern], gemma.num_layers
    ([512, 512, 512, 512, 512, None], 26)
    """
    return decoder_config(CONFIGS[name])
