"""The verb `chat`: where its model is found, its options, and a conversation in a terminal and in a pipe."""

import asyncio
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxft.cli import main
from jaxft.core.partition import ADAPTER
from jaxft.models.config import LoraSpec
from jaxft.models.hf import save_model
from jaxft.models.load import init_model
from jaxft.models.peft import save_adapter
from jaxft.shipped.chat_command import load_policy

ROOT = Path(__file__).parents[2]
# A parent that runs in the background has SIGINT ignored.
PROGRAM = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(ROOT)!r})
from jaxft.cli import main
sys.exit(main())
"""


SHORT = ("--context-tokens", 96)
"""A context for which other tests have compiled already."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("models") / "model"
    model, params = init_model("qwen3-50k", jax.random.key(0))
    save_model(folder, model, params, tokenizer=tokenizer)
    return folder


def chat(monkeypatch, capsys, *arguments, text=b"hi\n"):
    """Exit code and output of the verb, in this process."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    code = main(["chat", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_chat_in_a_script(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = chat(monkeypatch, capsys, model_folder, "--max-tokens", 8, "--seed", 1, *SHORT, text=b"hi\n\xff")
    assert code == 0 and err.count("cut off after 8 tokens") == 2
    assert "\x1b" not in out + err and out.endswith("\n")
    assert not any(tmp_path.iterdir())


@pytest.fixture
def finished_run(model_folder, tmp_path):
    """Makes a run directory with a model and a configuration that has these settings of its policy."""

    def make(**settings):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "model").symlink_to(model_folder)
        policy = {"_type": "local_policy", "preset": "qwen3-50k", **settings}
        sections = {
            "imports": ["/nowhere/agent.py"],
            "llms": {"judge": {"_type": "openai", "model": "m"}, "policy": policy},
            "trainer_adapters": {"local": {"_type": "local_trainer_adapter", "llm": "policy"}},
            "finetuning": {"trainer_adapter": "local"},
        }
        (tmp_path / "run" / "config.yml").write_text(json.dumps(sections))
        return tmp_path / "run"

    return make


def test_the_settings_of_a_run_are_the_defaults(finished_run, model_folder):
    folder = finished_run(max_context_tokens=77, dtype="bfloat16", slots=64)
    policy = load_policy(folder, seed=0)
    assert (policy.engine.max_context_tokens, policy.engine.slots, policy.dtype) == (77, 1, "bfloat16")
    policy.close()
    for source, expected in ((folder, 50), (model_folder, 50)):
        policy = load_policy(source, seed=0, context_tokens=50)
        assert policy.engine.max_context_tokens == expected
        policy.close()
    policy = load_policy(model_folder, seed=0)
    assert (policy.engine.max_context_tokens, policy.dtype) == (4096, "float32")
    policy.close()


def test_a_mesh_that_is_not_here_says_what_to_do(finished_run, monkeypatch, capsys):
    folder = finished_run(mesh={"data": 4, "fsdp": 2, "tensor": 16})
    code, _, err = chat(monkeypatch, capsys, folder)
    assert code == 2 and err.count("\n") == 1 and f"jaxft chat {folder / 'model'}" in err


def test_settings_that_were_spoiled_are_named(finished_run, monkeypatch, capsys):
    folder = finished_run(max_context_tokens="many")
    code, _, err = chat(monkeypatch, capsys, folder)
    assert code == 2 and "llms.policy.max_context_tokens" in err and str(folder / "config.yml") in err


def test_nothing_is_written_to_a_run(finished_run, monkeypatch, capsys):
    folder = finished_run(max_context_tokens=96)
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}
    assert chat(monkeypatch, capsys, folder, "--max-tokens", 2)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))} == before


@pytest.fixture(scope="module")
def with_adapters(model_folder, tmp_path_factory, tokenizer):
    """Parameters of a model with adapters, and what a run that holds it loads: with a base of its own, and without."""
    model, params = init_model("qwen3-50k", jax.random.key(0), lora=LoraSpec(2, 4.0, ("q_proj",), False))
    params = jax.device_get(params)
    params |= {ADAPTER: jax.tree.map(lambda leaf: leaf + np.float32(0.5), params[ADAPTER])}
    loaded = []
    for base in (None, str(model_folder)):
        run = tmp_path_factory.mktemp("adapters") / "run"
        save_adapter(run / "model", model, params, base=base, tokenizer=tokenizer)
        policy = load_policy(run, seed=0, context_tokens=96)
        loaded.append((policy.model.lora.rank, asyncio.run(policy.read(jax.device_get))))
    assert asyncio.run(policy.is_healthy())
    policy.close()
    return params, loaded


@pytest.mark.parametrize("which", [0, 1])
def test_a_run_with_adapters(with_adapters, which):
    params, loaded = with_adapters
    rank, found = loaded[which]
    assert rank == 2
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_a_folder_without_a_model_says_what_to_do(tmp_path, monkeypatch, capsys):
    def refusal(folder=tmp_path):
        code, out, err = chat(monkeypatch, capsys, folder)
        assert code == 2 and out == "" and err.count("\n") == 1 and str(folder) in err
        return err

    assert "give a run directory" in refusal()
    assert "give a run directory" in refusal(tmp_path / "nowhere")
    (tmp_path / "config.yml").write_text("llms: {}")
    assert "no model yet" in refusal()
    assert not (tmp_path / "LOCK").exists()
    for step in ("9", "12"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "manifest.json").write_text("{}")
    assert f"jaxft resume {tmp_path} --set finetuning.num_epochs=12" in refusal()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    assert "config.json" in refusal()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--template-kwargs", "tokenize=true"], "'tokenize'"),
        (["--system", "\ud800"], "U+D800"),
        (["--context-tokens", "1"], "max_context_tokens 1"),
        (["--tools", "nowhere.py"], "nowhere.py"),
    ],
)
def test_options_that_cannot_be_are_one_line(model_folder, monkeypatch, capsys, options, reason):
    code, out, err = chat(monkeypatch, capsys, model_folder, *options)
    assert code == 2 and out == "" and err.count("\n") == 1 and reason in err


def test_a_template_that_cannot_write_tools_is_one_line(model_folder, tmp_path, tokenizer, monkeypatch, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "manifest.json").unlink()
    schemas = tmp_path / "schemas.json"
    schemas.write_text('[{"type": "function", "function": {"name": "look_up"}}]')
    code, _, err = chat(monkeypatch, capsys, folder, "--tools", schemas)
    assert code == 2 and err.count("\n") == 1 and "response_template" in err


@pytest.mark.parametrize(
    "option", ["--temperature=-1", "--max-tokens=0", "--seed=-1", "--template-kwargs=a", "--context-tokens=x"]
)
def test_options_say_what_they_want(capsys, option):
    with pytest.raises(SystemExit):
        main(["chat", "folder", option])
    assert f"{option.partition('=')[0]}: wants " in capsys.readouterr().err


@pytest.mark.slow
def test_a_chat_in_a_terminal(model_folder):
    """A greedy answer of this model goes on until the context is full: Ctrl-C ends it, and Ctrl-D the chat."""
    terminal, program = os.openpty()
    command = [sys.executable, "-c", PROGRAM, "chat", str(model_folder), "--context-tokens", "30000"]
    environment = os.environ | {"TERM": "xterm"}
    process = subprocess.Popen(
        [*command, "--temperature", "0"], stdin=program, stdout=program, stderr=program, env=environment,
        start_new_session=True,
    )  # fmt: skip
    os.close(program)
    shown = b""

    def wait_for(text):
        nonlocal shown
        while not (found := re.search(text, shown, re.DOTALL)):
            assert select.select([terminal], [], [], 60)[0], shown
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # the other end is closed
                raise AssertionError(shown) from None
        shown = shown[found.end() :]

    wait_for(rb"/help shows the commands\r\n.*> ")
    os.write(terminal, b"h\xc3\xa9\n")
    wait_for(rb"h\xc3\xa9\r\n.{20}")  # the line is echoed, and the model is at work
    process.send_signal(signal.SIGINT)
    wait_for(rb"stopped; .*> ")
    os.write(terminal, b"/help\n")
    wait_for(rb"/quit .*> ")
    os.write(terminal, b"\x04")
    assert process.wait(timeout=60) == 0
    os.close(terminal)
