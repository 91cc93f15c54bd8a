"""docs/agents-elsewhere.md is true: its agents train, its commands run, and its tables name what exists."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest

import jaxft
from jaxft.harness.addresses import ServeConfig
from jaxft.harness.config import EvalGeneralConfig
from jaxft.rollout.client import ChatClient
from jaxft.rollout.recorder import Episode
from jaxft.serving.app import make_app
from jaxft.serving.server import Server

PAGE = (Path(__file__).parents[1] / "docs" / "agents-elsewhere.md").read_text()
FILES = {
    name: text for text, name in re.findall(r"^```\w+\n((?:#|//) ([\w.]+)\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
}
SMALL = [
    *("--set", "finetuning.num_epochs=2"),
    *("--set", "llms.policy.slots=8"),
    *("--set", "trajectory_builders.rollouts.num_generations=2"),
    "--overwrite",
]
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the agents of the page")


def commands(containing):
    """The commands of the block that has this text, without their comments."""
    found = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    block = next(each for each in found if containing in each)
    return [line.partition("    #")[0].strip() for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path):
    """A folder with all files of the page, and the data set that its command makes."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    subprocess.run(commands("train.jsonl")[1], shell=True, check=True, cwd=tmp_path)
    return tmp_path


@contextlib.contextmanager
def agent(folder):
    """The agent of the page, at a port of its own; yields the port."""
    node = subprocess.Popen(
        ["node", "agent.js"], cwd=folder, env=os.environ | {"PORT": "0"}, stdout=subprocess.PIPE, text=True
    )
    with node:
        try:
            yield int(node.stdout.readline())
        finally:
            node.kill()


def run(folder, *arguments, program=("-m", "jaxft.cli"), **environment):
    """Run a command of jaxft, or another program of Python, in a folder; return what it showed."""
    root = str(Path(jaxft.__file__).parents[1])
    paths = os.pathsep.join([root, *[path for path in sys.path if path.endswith("site-packages")]])
    ended = subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def metrics(folder):
    return [json.loads(line) for line in (folder / "runs/elsewhere/training_metrics.jsonl").read_text().splitlines()]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_page_has_all_files():
    assert set(FILES) == {"agent.js", "rewards.py", "run.yml", "remote.yml", "my_agent.py", "player.js", "player.yml"}


@needs_node
@pytest.mark.long
def test_the_reward_rises_as_the_page_says(folder):
    """The agent's address is on the command line, as in the page's second way."""
    with agent(folder) as port:
        command = ["finetune", "--config-file", "run.yml", "--endpoint-timeout", "60"]
        run(folder, *command, "--endpoint", f"http://127.0.0.1:{port}/episode")
    for row in metrics(folder):
        assert (row["calls"], row["failed_episodes"]) == (2 * row["episodes"], 0)
        assert (row["sequences_per_trajectory"], row["outside_calls"]) == (1, 0)
    rewards = [row["reward_mean"] for row in metrics(folder)]
    assert rewards[0] < 0.1 and rewards[-1] > 0.95


@needs_node
@pytest.mark.slow
def test_an_agent_that_is_told_another_address_trains(folder):
    with agent(folder) as port:
        own = free_port()
        shown = run(
            folder, "finetune", "--config-file", "remote.yml", *SMALL,
            *("--set", f"workflow.url=http://127.0.0.1:{port}/episode"),
            *("--set", f"llms.policy.serve.port={own}", "--set", f"llms.policy.serve.url=http://127.0.0.2:{own}"),
            SERVE_KEY="a-key-of-the-server", AGENT_KEY="a-key-of-the-agent",
        )  # fmt: skip
    assert f"serving policy at http://0.0.0.0:{own}/v1" in shown
    assert [(row["applied_updates"], row["failed_episodes"]) for row in metrics(folder)] == [(1, 0)] * 2
    written = b"".join(path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file())
    assert b"a-key-of-the" not in written


@needs_node
@pytest.mark.long
def test_programs_that_an_agent_starts_train_in_workers(folder):
    (line,) = commands("judge_isolation")
    run(folder, *line.split()[1:], *SMALL)
    assert [(row["applied_updates"], row["failed_episodes"]) for row in metrics(folder)] == [(1, 0)] * 2


@needs_node
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl plays the run")
def test_an_agent_is_tried_by_curl(folder):
    (folder / "jaxft").write_text(f'#!/bin/sh\nexec {sys.executable} -m jaxft.cli "$@"\n')
    (folder / "jaxft").chmod(0o755)
    own, environment = str(free_port()), os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(jaxft.__file__).parents[1]), *sys.path])
    lines = commands("jaxft serve")
    assert lines[0] == "jaxft serve --config-file run.yml &" and lines[-1] == "kill $!"
    lines[0] = f"jaxft serve --config-file run.yml --set llms.policy.serve.port={own} > served.txt &"
    with agent(folder) as port:
        script = "\n".join(lines).replace(":8000", f":{own}").replace(":9000", f":{port}").replace("curl ", "curl -s ")
        ended = subprocess.run(
            ["bash", "-euc", f"{script}\nwait $! || true"], cwd=folder, env=environment, capture_output=True, text=True
        )
    assert ended.returncode == 0, ended.stderr
    assert '{"status":"ok"}{"answer":"' in ended.stdout and '"object":"chat.completion"' in ended.stdout
    assert "finishing the running requests" in (folder / "served.txt").read_text()


def test_the_two_lines_of_python_ask_in_the_episode(policy):
    lines = next(text for text in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if text.startswith("client"))
    body = "".join(f"    {line}\n" for line in lines.splitlines())
    scope = {"openai": openai}
    exec(f"async def ask(episode, messages):\n{body}    return completion\n", scope)
    server = Server(make_app({"policy": ChatClient(policy, "policy")}))
    episode = Episode(0, 0, 0, "a", 0, server_url=server.url)
    told = {"base_url": episode.base_url, "api_key": episode.api_key, "model": "policy"}

    async def ask():
        try:
            return await scope["ask"](told, [{"role": "user", "content": "x?"}])
        finally:
            await server.close()

    completion = asyncio.run(ask())
    assert len(episode.calls) == 1 and len(episode.calls[0].token_ids) == completion.usage.completion_tokens


def test_the_configuration_of_another_machine_is_valid(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "train.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVE_KEY", "a-key-of-the-server")
    monkeypatch.setenv("AGENT_KEY", "a-key-of-the-agent")
    config = jaxft.load_config("remote.yml")
    assert config.llms["policy"].serve.url == "http://trainer.example:8000"
    assert config.workflow.api_key.get_secret_value() == "a-key-of-the-agent"


def test_the_tables_list_every_field():
    served = re.search(r"\| field of `serve` .*?\n\n", PAGE, re.DOTALL)[0]
    names = [
        name for cell in re.findall(r"^\| (`.*?) \|", served, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    ]
    assert names == list(ServeConfig.model_fields)
    workers = re.search(r"\| field of `eval.general` .*?\n\n", PAGE, re.DOTALL)[0]
    names = re.findall(r"^\| `([\w.]+)` \|", workers, re.MULTILINE)
    assert names == ["isolation", "judge_isolation", "worker_memory_mb"] and set(names) <= set(
        EvalGeneralConfig.model_fields
    )


@pytest.mark.long
def test_the_cost_of_a_worker_is_measured(tmp_path):
    script = Path(__file__).parents[1] / "benchmarks" / "isolation.py"
    out = tmp_path / "out.json"
    subprocess.run(
        [sys.executable, script, "--episodes", "8", "--repeats", "1", "--workers", "2", "--out", out], check=True
    )
    assert json.loads(out.read_text())["private_mb_of_a_worker"] > 0
