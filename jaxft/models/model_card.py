"""Model cards: the `README.md` of an exported folder, in the form of the Hugging Face hub.

A card has metadata in YAML, a title, Markdown about the model, and a last section on the weights and how to load them.
The last section depends on how the weights are stored, so it is written anew when a model is exported again.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jaxft import __version__
from jaxft.files import home_path
from jaxft.models.config import LoraSpec
from jaxft.models.hf_files import CARD

TAG = "jaxft"
"""Tag of every card that jaxft writes."""
LAST_SECTION = "## Weights"
HUB_CACHE = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/[^/]+/?$")
THIS, BASE_FOLDER = "PATH_OF_THIS_FOLDER", "PATH_OF_THE_BASE"
"""Paths in the examples, which the reader replaces."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's option `--max-lora-rank`."""


class ModelCard(NamedTuple):
    """The content of a card, without the section on the weights.

    Attributes:
        title: heading of the card.
        about: Markdown below the heading.
        metadata: fields for the hub, such as `base_model`; `library_name` and `pipeline_tag` are added.
    """

    title: str
    about: str
    metadata: Mapping[str, Any]


class Weights(NamedTuple):
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


def card_text(card: ModelCard, weights: Weights) -> str:
    """Return the text of a card; equal arguments give equal texts."""
    library = "transformers" if weights.lora is None else "peft"
    metadata = {**card.metadata, "library_name": library, "pipeline_tag": "text-generation"}
    header = yaml.safe_dump(metadata, allow_unicode=True)
    last = _about_weights(card, weights)
    return f"---\n{header}---\n\n# {card.title}\n\n{card.about.strip()}\n\n{LAST_SECTION}\n\n{last}\n"


def card_of_copy(folder: Path, name: str) -> ModelCard:
    """Return the card of a copy of the model in a folder: that of the folder if jaxft wrote it, else a short one.

    Args:
        folder: the folder of the model, or of its adapters.
        name: name of the model, for a folder without a card by jaxft.
    """
    text = _read(folder / CARD)
    metadata = _metadata(text)
    found = re.search(rf"^---\n.*?^---\n\s*# (?P<title>[^\n]*)\n(?P<about>.*?)^{LAST_SECTION}$", text, re.M | re.S)
    if found is not None and TAG in _texts(metadata.get("tags")):
        return ModelCard(found["title"], found["about"].strip(), metadata)
    base = hub_id(folder)
    about = [f"This model is a copy of {reference(base, name)}.", *licence(folder)]
    return ModelCard(base or name, " ".join(about), metadata_of(base))


def metadata_of(base: str | None, *tags: str, **others: Any) -> dict[str, Any]:
    """Return the metadata of a card, without empty fields.

    >>> metadata_of("Qwen/Qwen3-0.6B", "grpo", datasets=[])
    {'base_model': 'Qwen/Qwen3-0.6B', 'tags': ['jaxft', 'grpo']}
    """
    values = {"base_model": base, "tags": [TAG, *tags], **others}
    return {name: value for name, value in values.items() if value}


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
    named = " ".join(_texts(_metadata(_read(folder / CARD)).get("license")))
    files = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    file = next((name for name in files if re.match(r"(?i)licen[cs]e(\.|$)", name)), None)
    if not named and file is None and base is None:
        return []
    about = f" ({named})" if named else f" (its file `{file}`)" if file is not None else ""
    return [f"The licence of {base or 'that model'}{about} applies to these weights, too."]


def _about_weights(card: ModelCard, weights: Weights) -> str:
    """Return the sentences on the stored weights, and the lines that load them."""
    lora = weights.lora
    base, peft, wrapped, serving, loading = THIS, "", "", "", ""
    if lora is None:
        merged = ", into which the adapters of its training are merged" if weights.is_merged else ""
        held = f"This folder holds the whole model{merged}, as safetensors in {weights.dtype}, and its tokenizer."
    else:
        base = f"{THIS}/base" if weights.has_base else card.metadata.get("base_model") or BASE_FOLDER
        held = f"This folder holds LoRA adapters of rank {lora.rank}, as safetensors in float32, and the tokenizer."
        rank = next((size for size in VLLM_RANKS if lora.rank <= size), lora.rank)
        peft, wrapped = "from peft import PeftModel\n", f'\nmodel = PeftModel.from_pretrained(model, "{THIS}")'
        serving = f" --enable-lora --max-lora-rank {rank} --lora-modules adapter={THIS}"
        loading = f', lora="{THIS}"'
    if weights.has_base:
        held += f" The base that they belong to is in the subfolder `base`, in {weights.dtype}."
        serving = f" --tokenizer {THIS}{serving}"
    elif base == BASE_FOLDER:
        held += (
            f" The base is not in it; below, `{base}` stands for its folder. `adapter_config.json` has the path of the "
            "base on the machine of the training, so change `base_model_name_or_path` there before you publish it."
        )
    return f"""{held} jaxft {__version__} wrote it.

With {"PEFT and " if lora else ""}transformers:

```python
{peft}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto"){wrapped}
tokenizer = AutoTokenizer.from_pretrained("{THIS}")
```

With vLLM{", where the model with adapters is called `adapter`" if lora else ""}:

```bash
vllm serve {base}{serving}
```

With jaxft:

```python
import jaxft

model, params = jaxft.load_model("{base}"{loading})
tokenizer = jaxft.load_tokenizer("{THIS}")
```"""


def _read(file: Path) -> str:
    """Return the text of a card, which may be anybody's; empty without one."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _metadata(text: str) -> Mapping[str, Any]:
    """Return the metadata of a card; empty if it has none that can be read."""
    found = re.match(r"---\n(.*?)^---$", text, re.M | re.S)
    try:
        values = None if found is None else yaml.safe_load(found[1])
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def _texts(value: Any) -> tuple[str, ...]:
    """Return a field of metadata that may be one text or a list of texts."""
    return tuple(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str))
