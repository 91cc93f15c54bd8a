"""The families of models whose files are read and written, one entry each."""

from collections.abc import Mapping

from jaxft.models.families.family import Family
from jaxft.models.families.gemma import GEMMA2, GEMMA3
from jaxft.models.families.granite import GRANITE
from jaxft.models.families.llama import LLAMA, MINISTRAL, MINISTRAL3, MISTRAL
from jaxft.models.families.olmo import OLMO2, OLMO3
from jaxft.models.families.phi import PHI3
from jaxft.models.families.qwen import QWEN2, QWEN3
from jaxft.models.families.smollm import SMOLLM3

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        LLAMA,
        MISTRAL,
        MINISTRAL,
        MINISTRAL3,
        QWEN2,
        QWEN3,
        GEMMA2,
        GEMMA3,
        OLMO2,
        OLMO3,
        SMOLLM3,
        PHI3,
        GRANITE,
    )
}
"""Families by the `model_type` of their `config.json`."""

WRAPPERS: Mapping[str, str] = {"gemma3": GEMMA3.name, "mistral3": MISTRAL.name}
"""Families of several modalities whose text model is read, by `model_type`, with the default `model_type` of it."""
