"""Qwen2, which Qwen2.5 is too, and Qwen3."""

from typing import Any

from jaxft.models.config import DecoderConfig
from jaxft.models.families.family import ATTENTION_BIAS, FULL, SLIDING, Family, Keys


def sliding_from_a_layer_on(keys: Keys) -> list[str]:
    """Types of layers of which the first `max_window_layers` see all tokens."""
    has_window = keys.flag("use_sliding_window") and not keys.is_null("sliding_window")
    num_full = keys.integer("max_window_layers", least=0) if has_window else keys.num_layers
    return [FULL if i < num_full else SLIDING for i in range(keys.num_layers)]


def window_keys(config: DecoderConfig) -> dict[str, Any]:
    """Return the key that `sliding_from_a_layer_on` reads."""
    first = [i for i, kind in enumerate(config.kinds) if kind.window is not None]
    return {"max_window_layers": min(first, default=config.num_layers)}


DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    arithmetic={"qkv_bias": True},
    defaults=DEFAULTS,
    fixed={"use_mrope": False},
    layer_types=sliding_from_a_layer_on,
    lists_types=True,
    window_switch="use_sliding_window",
    layers_json=window_keys,
)

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    arithmetic={"qk_norm": "heads"},
    keys=(ATTENTION_BIAS,),
    defaults={**DEFAULTS, "head_dim": 128},
    layer_types=sliding_from_a_layer_on,
    lists_types=True,
    window_switch="use_sliding_window",
    layers_json=window_keys,
)
