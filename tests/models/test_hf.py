"""Models in Hugging Face's format: logits as in transformers, equal bits after export and reload, damaged files."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from jaxft.cli import main
from jaxft.errors import ModelFileError
from jaxft.files import MANIFEST
from jaxft.models.bridge import from_function
from jaxft.models.config import DecoderConfig
from jaxft.models.decoder import decoder
from jaxft.models.hf import save_model
from jaxft.models.load import init_model, load_model
from jaxft.rollout.chat import find_stop_ids
from jaxft.rollout.tokenizer import load_tokenizer
from tests.models.weights import narrowed, random_params

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "hf"
FOLDERS = ["llama", "llama31-rope", "llama31-rope-v4", "mistral", "qwen2", "qwen3"]
BIASED = DecoderConfig("llama", 64, 16, 32, 2, 2, 1, 8, qkv_bias=True, output_bias=True, mlp_bias=True)


@partial(jax.jit, static_argnums=0)
def full_logits(model, params, tokens):
    hidden, _ = model.apply(params, tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    return model.unembed(params, hidden)


ELSEWHERE = ("llama", "mistral", "qwen3")
"""Families of which `test_families.py` compares logits in the default tests."""


def assert_as_expected(name, logits):
    expected = np.load(DATA / name / "expected.npz")
    is_real = expected["attention_mask"] == 1
    assert 0 < is_real.sum() < is_real.size
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(logits)[is_real], expected["logits"][is_real], rtol=0, atol=1e-4)


def model_and_rows(name):
    model, params = load_model(DATA / name)
    rows = np.load(DATA / name / "expected.npz")["input_ids"].astype(np.int32)
    return decoder(model.config.architecture), params, rows  # two folders share what is compiled


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ELSEWHERE)) for name in FOLDERS]
)
def test_logits_are_those_of_transformers(name):
    assert_as_expected(name, full_logits(*model_and_rows(name)))


def assert_same_bits(params, others):
    assert jax.tree.structure(params) == jax.tree.structure(others)
    for leaf, other in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        assert leaf.dtype == other.dtype
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("biases", "float32"), ("biases", "bfloat16"), ("llama", "float32"), ("qwen2", "bfloat16"), ("qwen3", "float32")],
)
def test_export_and_reload_keep_every_bit(name, dtype, tmp_path):
    model, params = (decoder(BIASED), random_params(BIASED)) if name == "biases" else load_model(DATA / name)
    params = jax.device_put(narrowed(params, jnp.dtype(dtype)))
    save_model(tmp_path / "whole", model, params)
    written = {file.name for file in (tmp_path / "whole").iterdir()}
    assert written == {"config.json", "model.safetensors", MANIFEST}
    save_model(tmp_path / "shards", model, params, max_shard_bytes=5_000)
    assert len(list((tmp_path / "shards").glob("model-0*.safetensors"))) > 1
    for folder in ("whole", "shards"):
        written = json.loads((tmp_path / folder / "config.json").read_text())
        assert written["dtype"] == written["torch_dtype"] == dtype
        again, reloaded = load_model(tmp_path / folder, dtype=jnp.dtype(dtype))
        assert again is model
        assert_same_bits(params, reloaded)


@pytest.mark.parametrize("name", FOLDERS)
def test_export_has_the_tensors_of_the_original(name, tmp_path):
    save_model(tmp_path / "copy", *load_model(DATA / name))
    original, copy = load_file(DATA / name / "model.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    assert original.keys() == copy.keys()
    assert all(np.array_equal(original[key], copy[key]) for key in original)
    with safe_open(tmp_path / "copy" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_hold_no_more_than_asked_and_the_index_adds_up(tmp_path):
    model, params = load_model(DATA / "qwen3")
    save_model(tmp_path / "m", model, params, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    shards = {file.name: load_file(file) for file in (tmp_path / "m").glob("*.safetensors")}
    assert sorted(shards) == sorted(set(index["weight_map"].values()))
    assert {key: name for name, shard in shards.items() for key in shard} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert max(sum(x.nbytes for x in shard.values()) for shard in shards.values()) <= 20_000


def test_weights_are_cast_while_loading(tmp_path):
    _, wide = load_model(DATA / "qwen2")
    _, narrow = load_model(DATA / "qwen2", dtype=jnp.bfloat16)
    assert_same_bits(narrowed(wide, jnp.bfloat16), narrow)
    with pytest.raises(ValueError, match="dtype is int32; wanted float32, bfloat16"):
        load_model(DATA / "qwen2", dtype=jnp.int32)
    with pytest.raises(ValueError, match="dtype is float64, which jax has switched off; set jax_enable_x64"):
        load_model(DATA / "qwen2", dtype=jnp.float64)


def test_equal_keys_initialise_equal_bits():
    model, params = init_model(BIASED, jax.random.key(3))
    again, others = init_model(replace(BIASED), jax.random.key(3))
    assert model is again
    assert_same_bits(params, others)
    _, different = init_model(BIASED, jax.random.key(4))
    assert not np.array_equal(params["embed"], different["embed"])
    narrow = jax.eval_shape(lambda key: init_model(BIASED, key, dtype=jnp.bfloat16)[1], jax.random.key(3))
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {jnp.dtype(jnp.bfloat16)}


def test_tokenizer_travels_with_the_model(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "jaxft" / "rollout" / "assets" / "char_tokenizer")
    save_model(tmp_path / "m", *load_model(DATA / "qwen3"), tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "m").encode("hé") == tokenizer.encode("hé")
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_export_keeps_stop_ids_sampling_defaults_and_unknown_fields(family, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(DATA / family, source)
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(source)
    stops = [tokenizer.eos_token_id, 7, 9]
    GenerationConfig(eos_token_id=stops, pad_token_id=3, temperature=0.6, top_p=0.9, do_sample=True).save_pretrained(
        source
    )
    given = json.loads((source / "config.json").read_text())
    given |= {
        "bos_token_id": 5,
        "eos_token_id": stops[1:],
        "pad_token_id": 3,
        "initializer_range": 0.5,
        "_of_my_own": {"nested": [1, None]},
    }
    (source / "config.json").write_text(json.dumps(given))

    assert main(["export", str(source), str(tmp_path / "once")]) == 0
    assert main(["export", str(tmp_path / "once"), str(tmp_path / "twice"), "--dtype", "bfloat16"]) == 0
    for folder in (tmp_path / "once", tmp_path / "twice"):
        assert find_stop_ids(load_tokenizer(folder), folder) == find_stop_ids(tokenizer, source) == (*sorted(stops),)
        assert GenerationConfig.from_pretrained(folder) == GenerationConfig.from_pretrained(source)
        written = json.loads((folder / "config.json").read_text())
        differing = {name for name in given if written[name] != given[name]}
        assert differing <= {"dtype", "max_window_layers", "sliding_window"}  # the last two where no layer slides
        assert AutoConfig.from_pretrained(folder).eos_token_id == stops[1:]


def test_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    folder = copy_of("qwen3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert_same_bits(load_model(folder)[1], load_model(DATA / "qwen3")[1])

    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"'lm_head.weight' differs from the embedding, though tie_"):
        load_model(folder)


def copy_of(name, tmp_path):
    return Path(shutil.copytree(DATA / name, tmp_path / name))


def drop(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


NORM, KERNEL = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(KERNEL), rf"model.safetensors: no tensor '{KERNEL}', wanted \(64, 32\); download the file again"),
        (drop("lm_head.weight"), "no tensor 'lm_head.weight', .*; is tie_word_embeddings missing in config.json"),
        (
            lambda tensors: tensors | {"model.norm.bias": np.ones(32, np.float32)},
            "tensor 'model.norm.bias' has no place",
        ),
        (
            lambda tensors: tensors | {"model.layers.3.mlp.up_proj.weight": tensors[KERNEL]},
            "model.safetensors: tensor 'model.layers.3.mlp.up_proj.weight' has no place",
        ),
        (
            lambda tensors: tensors | {KERNEL: np.ascontiguousarray(tensors[KERNEL].T)},
            rf"'{KERNEL}' has shape \(32, 64\); config.json asks for \(64, 32\)",
        ),
        (
            lambda tensors: tensors | {NORM: np.ones(32, np.int8)},
            "'model.norm.weight' has dtype I8; wanted one of F32, BF16, F16, F64",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path):
    folder = copy_of("llama", tmp_path)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=message):
        load_model(folder)


def header(shape, offsets):
    text = json.dumps({NORM: {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    return len(text).to_bytes(8, "little") + text


HEADERS = {
    "empty": b"",
    "short": b"\x10",
    "huge header": b"\xff" * 64,
    "header of 2**62": (2**62).to_bytes(8, "little") + b"{}",
    "header beyond the end": (10**8).to_bytes(8, "little") + b"{}",
    "no json": (8).to_bytes(8, "little") + b"{broken}",
    "deep json": (10**5).to_bytes(8, "little") + b"[" * 10**5,
    "shape and offsets differ": header(shape=[4], offsets=[0, 8]) + bytes(16),
    "offsets beyond the end": header(shape=[2], offsets=[0, 2**62]) + bytes(16),
    "offsets before the start": header(shape=[2], offsets=[-8, 0]) + bytes(8),
    "huge shape": header(shape=[2**62, 2**62], offsets=[0, 8]) + bytes(8),
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS)
def test_corrupt_headers_are_named(content, tmp_path):
    folder = copy_of("llama", tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model.safetensors is no readable safetensors file .*export it again"):
        load_model(folder)


def test_a_truncated_file_is_named(tmp_path):
    folder = copy_of("llama", tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    for length in (4, 100, len(content) // 2, len(content) - 1):
        (folder / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(ModelFileError, match=r"model.safetensors is no readable safetensors file"):
            load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: "../other.safetensors"}, r"index.json names the file '../other.safetensors', which is outside of"),
        ({NORM: "../../x"}, r"index.json names the file '../../x', which is outside of"),
        ({NORM: "a/../../x"}, r"index.json names the file 'a/../../x', which is outside of"),
        ({NORM: "/etc/passwd"}, "names the file '/etc/passwd', which is outside of"),
        ({"more": "model-0.safetensors"}, "names the file 'model-0.safetensors', which is not in"),
        ({NORM: None}, "weight_map is .*; wanted an object from tensor to file name"),
    ],
)
def test_an_index_that_lies_is_named(change, message, tmp_path):
    save_model(tmp_path / "m", *load_model(DATA / "llama"), max_shard_bytes=20_000)
    file = tmp_path / "m" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= change
    file.write_text(json.dumps(index))
    (tmp_path / "m" / MANIFEST).unlink()
    with pytest.raises(ModelFileError, match=message):
        load_model(tmp_path / "m")


def test_a_missing_tensor_of_shards_is_named(tmp_path):
    save_model(tmp_path / "m", *load_model(DATA / "llama"), max_shard_bytes=20_000)
    file = tmp_path / "m" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    last = index["weight_map"].pop(NORM)
    file.write_text(json.dumps(index))
    (tmp_path / "m" / MANIFEST).unlink()
    save_file(drop(NORM)(load_file(tmp_path / "m" / last)), tmp_path / "m" / last)
    with pytest.raises(ModelFileError, match=f"model.safetensors.index.json: no tensor '{NORM}'"):
        load_model(tmp_path / "m")


def test_folders_without_safetensors_are_refused(tmp_path):
    folder = copy_of("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"holds neither model.safetensors nor .*index.json; .* convert them to"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"config.json does not exist"):
        load_model(folder)


def test_what_is_no_folder_and_cannot_be_downloaded(tmp_path):
    with pytest.raises(ModelFileError, match=r"absent is not a folder; wanted one with config.json"):
        load_model(tmp_path / "absent")
    with pytest.raises(ModelFileError, match=r"\./absent is not a folder"):
        load_model("./absent")
    with pytest.raises(ModelFileError, match=r"'jaxft/absent' is neither .* pass the path of its folder"):
        load_model("jaxft/absent")  # the hub client is offline in tests


def test_saving_leaves_what_is_there(tmp_path):
    model, params = load_model(DATA / "llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(ModelFileError, match="full exists and is not an empty folder; choose another one"):
        save_model(tmp_path / "full", model, params)
    (tmp_path / "empty").mkdir()
    save_model(tmp_path / "empty", model, params)
    save_model(tmp_path / "a" / "b", model, params)
    assert_same_bits(load_model(tmp_path / "empty")[1], load_model(tmp_path / "a" / "b")[1])


def test_a_failed_save_leaves_nothing(tmp_path):
    class BadTokenizer:
        bos_token_id = eos_token_id = pad_token_id = None

        def save_pretrained(self, folder):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_model(tmp_path / "m", *load_model(DATA / "llama"), BadTokenizer())
    assert list(tmp_path.iterdir()) == []


def test_parameters_of_another_model_are_refused(tmp_path):
    model, params = load_model(DATA / "llama")
    with pytest.raises(ModelFileError, match=r"params lack \['lm_head'\] and hold \['lora'\]"):
        headless = {key: value for key, value in params.items() if key != "lm_head"}
        save_model(tmp_path / "m", model, {**headless, "lora": jax.device_put(np.ones(2))})
    other = decoder(replace(model.config, vocab_size=130))
    with pytest.raises(ModelFileError, match=r"params: \w+ has shape \(128, 32\); .* asks for \(130, 32\)"):
        save_model(tmp_path / "m", other, params)
    with pytest.raises(ModelFileError, match=r"params: .* has dtype int32; wanted a floating-point one"):
        save_model(tmp_path / "m", model, jax.device_put(narrowed(params, np.int32)))
    with pytest.raises(ModelFileError, match="config is a NetworkConfig; only a decoder can be written"):
        save_model(tmp_path / "m", from_function(lambda params, tokens, positions: None), params)
    with pytest.raises(ValueError, match="max_shard_bytes is 0; wanted at least 1"):
        save_model(tmp_path / "m", model, params, max_shard_bytes=0)
    assert list(tmp_path.iterdir()) == []
