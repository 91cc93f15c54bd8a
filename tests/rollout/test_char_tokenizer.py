"""The embedded byte tokenizer: lossless, one id per byte, and conversations that extend token by token."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "jaxft" / "rollout" / "assets" / "char_tokenizer"
SPECIALS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]

tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
texts = st.text(max_size=40)


def render(messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@settings(max_examples=40, deadline=None)
@given(texts)
@example("")
@example("  two  spaces , then ' n't ' . \r\n\t\x00\x7f")
@example("héllo 日本語 👩‍👩‍👧‍👦 e\u0301 \ufffd \U0010ffff")
@example("control <|end|> tokens <|user|> inside")
def test_text_comes_back_as_it_went_in(text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    if not any(special in text for special in SPECIALS):
        assert ids == [6 + byte for byte in text.encode()]


def test_special_tokens_are_the_first_ids():
    assert tokenizer.convert_tokens_to_ids(SPECIALS) == [0, 1, 2, 3, 4, 5]
    assert [tokenizer.encode(special) for special in SPECIALS] == [[0], [1], [2], [3], [4], [5]]
    assert set(tokenizer.all_special_ids) == {0, 1, 2, 3, 4, 5}
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert (tokenizer.bos_token_id, tokenizer.unk_token_id) == (None, None)
    assert len(tokenizer) == 262


def test_every_byte_has_its_own_token():
    names = tokenizer.convert_ids_to_tokens(range(6, 262))
    assert len(set(names)) == 256
    assert all(tokenizer.decode([6 + byte]) == chr(byte) for byte in range(128))


def test_template_renders_turns_without_anything_between():
    messages = [
        {"role": "system", "content": " Play.\n"},
        {"role": "user", "content": "x?"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "{1}"},
    ]
    rendered = "<|system|> Play.\n<|end|><|user|>x?<|end|><|assistant|><|end|><|tool|>{1}<|end|>"
    assert render(messages) == rendered
    assert render(messages, add_generation_prompt=True) == rendered + "<|assistant|>"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.encode(rendered + "<|assistant|>")


@settings(max_examples=40, deadline=None)
@given(texts, texts, texts)
def test_next_turn_extends_the_recorded_one(question, reply, answer):
    messages = [{"role": "user", "content": question}]
    recorded = render(messages, add_generation_prompt=True) + reply + "<|end|>"
    longer = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": answer}]
    assert render(longer, add_generation_prompt=True).startswith(recorded)
    ids, longer_ids = tokenizer.encode(recorded), tokenizer.encode(render(longer, add_generation_prompt=True))
    assert longer_ids[: len(ids)] == ids


@pytest.mark.parametrize("role", ["function", "environment"])
def test_functions_and_the_environment_speak_as_a_tool_does(role):
    assert render([{"role": role, "content": "{1}"}]) == "<|tool|>{1}<|end|>"


def test_unknown_role_is_named():
    with pytest.raises(TemplateError, match=r"message 1 .*'critic'.* system, user"):
        render([{"role": "user", "content": ""}, {"role": "critic", "content": ""}])


@pytest.mark.slow
def test_script_rebuilds_the_shipped_files(tmp_path):
    script = ROOT / "scripts" / "make_char_tokenizer.py"
    subprocess.run([sys.executable, script, tmp_path / "made"], check=True)
    made = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    assert made == {path.name: path.read_bytes() for path in SHIPPED.iterdir()}
    assert sorted(made) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
