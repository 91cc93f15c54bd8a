"""Model cards of exported folders: their metadata, the lines that load them, and the cards of copies."""

import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard as HubCard

from jaxft.errors import ModelFileError
from jaxft.files import verify_manifest
from jaxft.models.config import LoraSpec
from jaxft.models.hf import save_model
from jaxft.models.load import load_model
from jaxft.models.model_card import SavedWeights, card_of_copy, card_text, make_card

DATA = Path(__file__).parents[1] / "data" / "hf"
CARD = make_card("Small", "About it.\n\n## Training\n\nLong.", "Qwen/Qwen3-0.6B", "grpo")


@pytest.mark.parametrize(
    ("weights", "library", "serving"),
    [
        (SavedWeights("bfloat16"), "transformers", "vllm serve PATH_OF_THIS_FOLDER\n"),
        (
            SavedWeights("bfloat16", LoraSpec(8, 16.0)),
            "peft",
            "vllm serve Qwen/Qwen3-0.6B --enable-lora --max-lora-rank 8 ",
        ),
        (
            SavedWeights("bfloat16", LoraSpec(65, 16.0), has_base=True),
            "peft",
            "vllm serve PATH_OF_THIS_FOLDER/base --tokenizer PATH_OF_THIS_FOLDER --enable-lora --max-lora-rank 128 ",
        ),
    ],
)
def test_a_card_is_one_of_the_hub_and_says_how_to_load_the_weights(weights, library, serving):
    text = card_text(CARD, weights)
    assert HubCard(text).data.to_dict() == {
        "base_model": "Qwen/Qwen3-0.6B",
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": ["jaxft", "grpo"],
    }
    assert serving in text and ("in bfloat16" in text) == (weights.lora is None or weights.has_base)
    assert ("PeftModel" in text) == (library == "peft") == ("lora=" in text)
    for code in re.findall("```python\n(.*?)```", text, re.S):
        compile(code, "card", "exec")


def test_an_adapter_of_a_base_on_this_machine_says_that_its_path_is_private():
    text = card_text(make_card("Small", "", None), SavedWeights("float32", LoraSpec(8, 16.0)))
    assert "base_model_name_or_path" in text and 'load_model("PATH_OF_THE_BASE", lora="PATH_OF_THIS_FOLDER")' in text


def test_a_card_is_kept_by_copies_with_what_its_owner_added(tmp_path):
    (tmp_path / "README.md").write_text(card_text(CARD, SavedWeights("float32", LoraSpec(8, 16.0))))
    assert card_text(card_of_copy(tmp_path, "unused"), SavedWeights("float32")) == card_text(
        CARD, SavedWeights("float32")
    )

    edited = (tmp_path / "README.md").read_text().replace("---\nbase", "---\nlicense: mit\nbase")
    (tmp_path / "README.md").write_text(edited.replace("Long.", "Longer."))
    text = card_text(card_of_copy(tmp_path, "unused"), SavedWeights("float32", is_merged=True))
    assert yaml.safe_load(text.split("---\n")[1])["license"] == "mit" and "Longer." in text and "are merged" in text


@pytest.mark.parametrize(
    ("readme", "licence"),
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# Theirs\n\n## Weights\n", " (apache-2.0)"),
        ("---\n: [broken\n---\n# Theirs\n", None),
        ("\xff", None),
        (None, None),
    ],
)
def test_a_copy_of_another_model_has_a_short_card(tmp_path, readme, licence):
    if readme is not None:
        (tmp_path / "README.md").write_text(readme, encoding="latin-1")
    card = card_of_copy(tmp_path, "theirs")
    added = "" if licence is None else f" The licence of that model{licence} applies to these weights, too."
    assert card.content == make_card("theirs", f"This model is a copy of `theirs`.{added}", None).content


def test_a_folder_of_the_hubs_cache_is_a_model_of_the_hub(tmp_path):
    folder = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "8b1f"
    folder.mkdir(parents=True)
    card = card_of_copy(folder, "8b1f")
    assert "# Qwen/Qwen3-0.6B\n" in card.text and card.data.base_model == "Qwen/Qwen3-0.6B"
    assert "licence of Qwen/Qwen3-0.6B applies" in card.text and str(tmp_path) not in card.text


def test_a_card_may_be_edited_and_weights_may_not(tmp_path):
    model, params = load_model(DATA / "qwen3")
    save_model(tmp_path / "m", model, params, card="# Mine\n")
    assert (tmp_path / "m" / "README.md").read_text() == "# Mine\n"
    assert "README.md" not in verify_manifest(tmp_path / "m", only_listed=True)["files"]
    (tmp_path / "m" / "README.md").write_text("# Edited\n")
    load_model(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"config.json: size"):
        load_model(tmp_path / "m")
    save_model(tmp_path / "without", model, params)
    assert not (tmp_path / "without" / "README.md").exists()
