"""GGUF files in jaxft and in transformers: the same tensors, bit for bit, and the same tokens; needs torch."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxft.models.config import model_preset
from jaxft.models.decoder import decoder
from jaxft.models.gguf import TYPES, gguf_tensors
from jaxft.models.hf import file_tensors, save_model
from jaxft.models.hf_config import load_config
from jaxft.models.hf_files import read_tensor
from jaxft.rollout.tokenizer import load_tokenizer
from tests.models.gguf_files import CONTROLS, write_gguf
from tests.models.weights import random_params

pytestmark = pytest.mark.models

torch = pytest.importorskip("torch")

DATA = Path(__file__).parents[1] / "data" / "hf"
TEXTS = (
    "The quick brown fox doesn't jump.  Over 123 lazy dogs!",
    "  def f(x):\n    return x + 1\n\n\n",
    "naïve café ☃ 日本語 😀",
    f"{CONTROLS[1]}user\nhi{CONTROLS[2]}\n",
)


def assert_same_tensors(file):
    """Compare all tensors of a file, as jaxft and transformers read them, and return how many there are."""
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()
    ours = gguf_tensors(file, file_tensors(load_config(file)))
    assert ours.keys() == theirs.keys() - ({"lm_head.weight"} - ours.keys())
    for name, stored in ours.items():
        np.testing.assert_array_equal(read_tensor(stored), theirs[name].numpy(), name)
    return len(ours)


@pytest.fixture
def wide(tmp_path):
    """Return a function that writes a model of a family, of whole blocks of 256 values, in Hugging Face's format."""

    def write(family):
        config = replace(
            model_preset("qwen3-50k", vocab_size=264), hidden_size=256, intermediate_size=256, num_layers=2
        )
        own = {"qk_norm": "heads"} if family == "qwen3" else {"qk_norm": None}
        config = replace(config, family=family, num_heads=2, num_kv_heads=2, head_dim=128, **own)
        save_model(tmp_path / family, decoder(config), random_params(config))
        return tmp_path / family

    return write


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3_text"])
def test_tensors_of_each_family(family, tmp_path):
    write_gguf(tmp_path / "m.gguf", DATA / family, has_tokenizer=False)
    assert assert_same_tensors(tmp_path / "m.gguf") >= 20


@pytest.mark.parametrize("kind", TYPES)
def test_tensors_of_each_type(kind, wide, tmp_path):
    types = [(part, gguf.GGMLQuantizationType[kind]) for part in ("attn_q.", "attn_output.", "ffn_down", "token_embd")]
    write_gguf(tmp_path / "m.gguf", wide("llama"), types=types)
    assert assert_same_tensors(tmp_path / "m.gguf") >= 20


def test_tensors_of_qwen3(wide, tmp_path):
    """Its heads are 128 wide, as transformers does not read their width from the file."""
    write_gguf(tmp_path / "m.gguf", wide("qwen3"))
    assert assert_same_tensors(tmp_path / "m.gguf") >= 20


@pytest.mark.parametrize("split", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_tokens_of_bytes(split, wide, tmp_path):
    write_gguf(tmp_path / "m.gguf", wide("llama"), metadata={"tokenizer.ggml.pre": split})
    assert_same_tokens(tmp_path / "m.gguf")


def assert_same_tokens(file):
    ours, theirs = load_tokenizer(file), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours(text, add_special_tokens=False)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_tokens_of_sentencepiece(family, tmp_path):
    words = ["▁", "▁the", "▁q", "he", "th", "the", "▁t", *"abcdefghijklmnopqrstuvwxyz.!\n", "  ", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(words), *CONTROLS]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259 - 3), 3, 3, 3]
    keys = {
        "model": "llama",
        "tokens": tokens,
        "scores": [-float(index) for index in range(len(tokens))],
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
    write_gguf(tmp_path / "m.gguf", DATA / family, has_tokenizer=False, metadata=metadata)
    assert_same_tokens(tmp_path / "m.gguf")
    assert load_tokenizer(tmp_path / "m.gguf")("the")["input_ids"][0] == 1  # the older files' flag is set
