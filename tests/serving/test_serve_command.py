"""`jaxft serve` as a process: what it says, and how a signal ends it."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import openai
import pytest

from jaxft.cli import main
from jaxft.components.model_source import model_configuration
from jaxft.harness.config import load_models
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.models.config import LoraSpec
from jaxft.models.load import init_model
from jaxft.models.peft import save_adapter

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"^(jaxft serve .*?) *#", (ROOT / "docs" / "agents.md").read_text(), re.MULTILINE)
KEY = "the-key-of-the-server"


@pytest.fixture
def config_file(tmp_path):
    """Writes a configuration of one policy with this `serve`, and returns its file."""

    def write(serve):
        (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}')
        policy = {"_type": "local_policy", "preset": "qwen3-50k", "slots": 8, "max_context_tokens": 96, "serve": serve}
        run = {
            "llms": {"policy": policy},
            "workflow": {"_type": "http_agent", "url": "http://127.0.0.1:9/"},
            "eval": {"general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}}},
        }
        file = tmp_path / "run.yml"
        file.write_text(dump_yaml(run))
        return str(file)

    return write


def asked_in_process(arguments, port, ask):
    """Exit code of the verb in this process, and the result of `ask(client)` once it serves; a signal then ends it."""
    results = []

    def be_a_client():
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as client:
            try:
                while True:
                    try:
                        results.append(ask(client))
                        return
                    except openai.APIConnectionError:
                        time.sleep(0.02)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=be_a_client, daemon=True)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a server that did not start
    asking.start()
    try:
        code = main(["serve", *arguments])
        asking.join(timeout=60)
    finally:
        signal.signal(signal.SIGTERM, before)
    return code, *results


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer):
    """The working directory of the commands of docs/agents.md: `run.yml`, and a run that trained adapters."""
    folder = tmp_path_factory.mktemp("serve")
    model, params = init_model("qwen3-50k", jax.random.key(0), lora=LoraSpec(2, 4.0, ("q_proj",), False))
    run = folder / "runs" / "my_agent"
    save_adapter(run / "model", model, params, tokenizer=tokenizer)
    policy = {"_type": "local_policy", "preset": "qwen3-50k", "slots": 8, "max_context_tokens": 96}
    judge = {"_type": "openai", "model": "m", "api_key": "${A_KEY_THAT_IS_NOT_SET}"}
    trained = policy | {"lora": {"rank": 2, "alpha": 4.0}, "serve": {"host": "0.0.0.0", "api_key": "***"}}
    sections = {
        "llms": {"judge": judge, "student": trained},
        "trainer_adapters": {"local": {"_type": "local_trainer_adapter", "llm": "student"}},
        "finetuning": {"trainer_adapter": "local"},
        "imports": ["/nowhere/agent.py"],
    }
    (run / "config.yml").write_text(dump_yaml(sections))
    workflow = {"_type": "http_agent", "url": "http://127.0.0.1:9/", "api_key": "${A_KEY_THAT_IS_NOT_SET}"}
    missing = {"general": {"dataset": {"_type": "jsonl", "file_path": "${A_FILE_THAT_IS_NOT_SET}"}}}
    mine = {"llms": {"policy": policy, "judge": judge}, "workflow": workflow, "eval": missing}
    (folder / "run.yml").write_text(dump_yaml(mine))
    return folder


@pytest.fixture
def folder(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


@pytest.fixture(scope="module")
def served(made):
    """Exit codes of the commands of the page, each with the names of the models that it served."""
    with contextlib.chdir(made):
        ended = []
        for command in COMMANDS:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            arguments = [*shlex.split(command)[2:], "--port", str(port)]
            ended.append(asked_in_process(arguments, port, lambda client: [model.id for model in client.models.list()]))
    return ended


def test_the_commands_of_the_page_serve_a_run_with_adapters_and_a_model_beside_a_judge(served):
    assert served == [(143, ["student"]), (143, ["policy"])]


def test_the_model_of_a_run_is_served_with_its_settings(folder):
    run = Path("runs", "my_agent")
    config = load_models(model_configuration(run), [("llms.student.slots", "3")], str(run))
    policy = config.llms["student"]
    own = folder / "runs" / "my_agent" / "model"
    assert (policy.path, policy.tokenizer, policy.lora.path) == (str(own / "base"), str(own), str(own))
    assert (policy.slots, policy.max_context_tokens, policy.preset, policy.serve) == (3, 96, None, None)


def test_the_model_of_a_folder_is_named_policy(made, tmp_path, capsys):
    (tmp_path / "${model}").symlink_to(made / "runs" / "my_agent" / "model" / "base")
    policy = load_models(model_configuration(tmp_path / "${model}"), [], "it").llms["policy"]
    assert policy.path == str(tmp_path / "${model}") and policy.lora is None
    assert (policy.dtype, policy.max_context_tokens) == ("float32", 4096)
    assert main(["serve", str(tmp_path)]) == 2
    assert f"{tmp_path}: holds no model" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["run", "--config-file", "run.yml"], ["run", "--port", "65536"]])
def test_what_is_served_is_said_once(capsys, arguments):
    with pytest.raises(SystemExit):
        main(["serve", *arguments])
    assert any(each in capsys.readouterr().err for each in ("--config-file", "65535"))


@pytest.mark.slow
def test_a_signal_lets_running_requests_end(config_file):
    command = [sys.executable, "-m", "jaxft.cli", "serve", "--config-file", config_file({"port": 0, "api_key": KEY})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said = iter(process.stdout.readline, "")
        address = next(line for line in said if line.startswith("serving policy at ")).split()[-1]
        with openai.OpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
            body = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "max_tokens": 80}
            chunks = iter(client.chat.completions.create(**body, logit_bias={"1": -100}, stream=True))
            texts = [next(chunks)]
            process.send_signal(signal.SIGTERM)
            texts += chunks
        assert texts[-1].choices[0].finish_reason == "length"
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 143
    assert "finishing the running requests" in output
    assert errors.splitlines()[-1] == "jaxft: terminated"
    assert KEY not in output + errors


@pytest.mark.parametrize(
    ("serve", "fault"),
    [
        ({"host": "0.0.0.0"}, "llms.policy.serve: host 0.0.0.0 can be reached from other machines: set api_key"),
        ({"port": 70000}, "llms.policy.serve.port: "),
        ({"api_key": ""}, "llms.policy.serve.api_key: "),
        ({"url": "trainer.example"}, "llms.policy.serve.url: must begin with http:// or https://"),
        ({"ports": 1}, "llms.policy.serve.ports: no such field"),
        ({"host": "no.such.host.invalid"}, "llms.policy.serve: host no.such.host.invalid can be reached"),
    ],
)
def test_what_cannot_be_served_is_refused(config_file, capsys, serve, fault):
    assert main(["serve", "--config-file", config_file(serve)]) == 2
    assert fault in capsys.readouterr().err


def test_a_port_in_use_is_named(config_file, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--config-file", config_file({"port": port})]) == 2
    assert f"llms.policy.serve: cannot listen on 127.0.0.1:{port}: " in capsys.readouterr().err
