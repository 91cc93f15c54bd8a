"""Checks before the weights of a model folder are read: the manifest of an export, and no pickle in any disguise."""

import json
import pickle
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from jaxft.errors import ManifestError, ModelFileError
from jaxft.files import MANIFEST, verify_manifest
from jaxft.models.hf import save_model
from jaxft.models.load import load_model

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "hf"
WAY_OUT = "; export it again, or remove manifest.json to load it as it is"


def save(folder):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "jaxft" / "rollout" / "assets" / "char_tokenizer")
    save_model(folder, *load_model(DATA / "qwen3"), tokenizer, max_shard_bytes=100_000)
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model with every kind of file that an export has; no test changes it."""
    return save(tmp_path_factory.mktemp("exported") / "model")


@pytest.fixture
def folder(exported, tmp_path):
    return Path(shutil.copytree(exported, tmp_path / "model"))


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_manifest_lists_all_that_was_exported_and_loading_agrees(exported):
    assert len(list(exported.glob("model-*.safetensors"))) > 1
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < files_of(exported).keys()
    assert verify_manifest(exported)["files"].keys() == files_of(exported).keys() - {MANIFEST}
    load_model(exported)


def test_saving_twice_gives_equal_bytes(exported, tmp_path):
    assert files_of(save(tmp_path / "again")) == files_of(exported)


def test_every_damage_to_every_file_is_named_before_a_weight_is_read(folder):
    rng = random.Random(0)
    for name, content in files_of(folder).items():
        file = folder / name
        damaged = [content[:-1], content[: len(content) // 2], b"", content + b"\n"]
        for _ in range(5):
            place = rng.randrange(len(content))
            bit = 1 << rng.randrange(8)
            damaged.append(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        for changed in damaged:
            file.write_bytes(changed)
            with pytest.raises(ModelFileError) as caught:
                load_model(folder)
            assert f"{file} is damaged" in str(caught.value) or f"{name}: " in str(caught.value)
            assert str(folder) in str(caught.value) and str(caught.value).endswith(WAY_OUT)
        file.write_bytes(content)
    load_model(folder)


def test_missing_files_are_named_all_at_once(folder):
    shard = next(folder.glob("model-*.safetensors")).name
    for name in (shard, "tokenizer.json"):
        (folder / name).unlink()
    with pytest.raises(ModelFileError, match=f"{shard}: missing; tokenizer.json: missing; export it again"):
        load_model(folder)


def test_files_may_be_added_to_a_model(folder):
    (folder / "README.md").write_text("mine")
    (folder / "notes").mkdir()
    (folder / "notes" / "more").symlink_to(folder / "README.md")
    load_model(folder)
    with pytest.raises(ManifestError, match=r"README.md: unexpected file; notes/more: symbolic link$"):
        verify_manifest(folder)


def test_an_edited_model_loads_without_its_manifest(folder):
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# mine #}")
    with pytest.raises(ModelFileError, match=r"chat_template.jinja: size .* remove manifest.json to load it as it is"):
        load_model(folder)
    (folder / MANIFEST).unlink()
    load_model(folder)


def test_a_model_made_of_links_loads_as_in_the_cache_of_the_hub(exported, tmp_path):
    (tmp_path / "snapshot").mkdir()
    for file in exported.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    loaded, wanted = (load_model(folder)[1] for folder in (tmp_path / "snapshot", DATA / "qwen3"))
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, wanted))


class Payload:
    """An object that makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def pickled(tmp_path):
    mark = tmp_path / "mark"
    content = pickle.dumps(Payload(mark))
    pickle.loads(content)
    assert mark.exists()
    mark.unlink()
    yield content
    assert not mark.exists()


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".pkl", ".PKL"])
def test_pickles_are_refused_with_a_way_to_convert(suffix, pickled, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(DATA / "qwen3" / "config.json", folder)
    file = folder / f"pytorch_model{suffix}"
    file.write_bytes(pickled)
    index = folder / "model.safetensors.index.json"
    message = rf"pytorch_model{suffix}: .* are never loaded; convert .* save_pretrained\(.*, safe_serialization=True\)"
    for path in (folder, file):
        with pytest.raises(ModelFileError, match=message):
            load_model(path)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": file.name}}))
    with pytest.raises(ModelFileError, match=message):
        load_model(folder)
    index.unlink()
    file.rename(folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"model.safetensors is no readable safetensors file"):
        load_model(folder)
