"""SmolLM3, whose every fourth layer has no positions (arXiv 2501.18795)."""

from typing import Any

from jaxft.models.config import DecoderConfig
from jaxft.models.families.family import ATTENTION_BIAS, FULL, MLP_BIAS, SLIDING, Family, Keys


def has_rope(keys: Keys) -> list[bool]:
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
    return [SLIDING if has_window and not rope else FULL for rope in has_rope(keys)]


def rope_keys(config: DecoderConfig) -> dict[str, Any]:
    """Return the key that `has_rope` reads."""
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
    has_rope=has_rope,
    layers_json=rope_keys,
    rope_theta=2e6,
)
