"""`jaxft serve` as a process: what it says, and how a signal ends it."""

import signal
import socket
import subprocess
import sys

import openai
import pytest

from jaxft.cli import main
from jaxft.harness.strict_yaml import dump_yaml

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


@pytest.mark.slow
def test_a_signal_lets_running_requests_end(config_file):
    command = [sys.executable, "-m", "jaxft.cli", "serve", "--config_file", config_file({"port": 0, "api_key": KEY})]
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
    assert main(["serve", "--config_file", config_file(serve)]) == 2
    assert fault in capsys.readouterr().err


def test_a_port_in_use_is_named(config_file, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--config_file", config_file({"port": port})]) == 2
    assert f"llms.policy.serve: cannot listen on 127.0.0.1:{port}: " in capsys.readouterr().err
