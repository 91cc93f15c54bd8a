"""Model cards: the `README.md` of an exported folder, in the form of the Hugging Face hub.

A card has metadata, a title, Markdown about the model, and a last section on the weights and how to load them, which
is written anew when a model is exported again, as it depends on how the weights are stored.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import ModelCard, ModelCardData

from jaxft import __version__
from jaxft.files import home_path
from jaxft.models.config import LoraSpec
from jaxft.models.hf import CARD

TAG, LAST_SECTION = "jaxft", "## Weights"
"""Tag of every card that jaxft writes, and the heading of the section on the weights."""
TEMPLATE = Path(__file__).with_name("model_card.md")
"""Template of a whole card."""
HUB_CACHE = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/[^/]+/?$")
THIS, BASE_FOLDER = "PATH_OF_THIS_FOLDER", "PATH_OF_THE_BASE"
"""Paths in the examples, which the reader replaces."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's option `--max-lora-rank`."""


class SavedWeights(NamedTuple):
    """The stored form of weights.

    Attributes:
        dtype: dtype of the whole model, or of the base of adapters.
        lora: settings of the adapters; None for a whole model.
        has_base: True if the base of the adapters is in the subfolder `base`.
        is_merged: True if adapters were merged into the whole model.
    """

    dtype: str
    lora: LoraSpec | None = None
    has_base: bool = False
    is_merged: bool = False


def make_card(title: str, about: str, base: str | None, *tags: str, datasets: list[str] | None = None) -> ModelCard:
    """Return a card without the section on the weights.

    >>> make_card("Small", "About it.", "Qwen/Qwen3-0.6B", "grpo").data.to_dict()
    {'base_model': 'Qwen/Qwen3-0.6B', 'tags': ['jaxft', 'grpo']}
    """
    data = ModelCardData(base_model=base, datasets=datasets, tags=[TAG, *tags])
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {title}\n\n{about}")


def card_text(card: ModelCard, weights: SavedWeights) -> str:
    """Return the text of a card with the section on the weights; equal arguments give equal texts."""
    lora, data = weights.lora, ModelCardData(**card.data.to_dict())
    base = data.base_model
    data.library_name, data.pipeline_tag = "transformers" if lora is None else "peft", "text-generation"
    whole = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        text=card.text.strip(),
        weights=weights,
        lora=lora,
        rank=lora and next((size for size in VLLM_RANKS if lora.rank <= size), lora.rank),
        base=THIS if lora is None else f"{THIS}/base" if weights.has_base else base or BASE_FOLDER,
        this=THIS,
        version=__version__,
    )
    return str(whole.content)


def card_of_copy(folder: Path, name: str) -> ModelCard:
    """Return the card of a copy of the model in a folder: that of the folder if jaxft wrote it, else a short one.

    Args:
        folder: the folder of the model, or of its adapters.
        name: name of the model, for a folder without a card by jaxft.
    """
    card, base = _read_card(folder), hub_id(folder)
    if card is not None and TAG in (card.data.tags or ()):
        card.text = card.text.partition(f"\n{LAST_SECTION}\n")[0]
        return card
    return make_card(
        base or name, " ".join([f"This model is a copy of {reference(base, name)}.", *licence(folder)]), base
    )


def hub_id(path_or_hub_id: str | Path) -> str | None:
    """Return the id of a model on the hub: the argument itself or, for a folder in the hub's cache, that of the folder.

    >>> hub_id("Qwen/Qwen3-0.6B"), hub_id("/c/models--Qwen--Qwen3-0.6B/snapshots/8b1f"), hub_id("/home/me/model")
    ('Qwen/Qwen3-0.6B', 'Qwen/Qwen3-0.6B', None)
    """
    path = home_path(path_or_hub_id)
    cached = HUB_CACHE.search(path.as_posix())
    if cached is not None:
        return f"{cached['owner']}/{cached['name']}"
    is_path = isinstance(path_or_hub_id, Path) or path.is_absolute() or path.exists()
    return None if is_path or len(path.parts) > 2 or ".." in path.parts else str(path_or_hub_id)


def reference(base: str | None, name: str) -> str:
    """Return a link to a model on the hub, or the name of another model as code."""
    return f"`{name}`" if base is None else f"[{base}](https://huggingface.co/{base})"


def licence(path_or_hub_id: str | Path) -> list[str]:
    """Return the sentence that the licence of this model applies; nothing if it is not known to have one.

    Only files on this machine are read: the metadata of a card, then the names of the files.
    """
    base, folder = hub_id(path_or_hub_id), home_path(path_or_hub_id)
    card, files = _read_card(folder), sorted(folder.iterdir()) if folder.is_dir() else []
    about = [f" ({card.data.license})"] if card is not None and card.data.license else []
    about += [f" (its file `{file.name}`)" for file in files if re.match(r"(?i)licen[cs]e(\.|$)", file.name)]
    about += [""] if base is not None else []
    return [f"The licence of {base or 'that model'}{each} applies to these weights, too." for each in about[:1]]


def _read_card(folder: Path) -> Any:
    """Return the card of a folder, which may be anybody's; None if there is none that can be read."""
    try:
        return ModelCard.load(folder / CARD, ignore_metadata_errors=True)
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return None
