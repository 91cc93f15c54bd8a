"""One process with four devices, two with two each and four with one each train the same run."""

import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxft.harness.strict_yaml import dump_yaml
from jaxft.models.config import model_preset
from jaxft.models.hf import save_model
from jaxft.models.load import init_model
from jaxft.rollout.tokenizer import load_tokenizer

FAULTS = Path(__file__).parents[1] / "faults"
EPOCHS = 5
SGD, ADAM = {"name": "sgd", "learning_rate": 1.0}, {"name": "adamw", "learning_rate": 1e-2}
ROUNDING = 1e-5


def configuration(folder: Path, base: str, optimizer: dict[str, Any], **changes: Any) -> None:
    """Write `run.yml`, which goes on from one of the runs that are killed."""
    config = {
        "base": str(FAULTS / f"{base}.yml"),
        "llms": {"policy": {"mesh": {"data": -1}}},
        "trainer_adapters": {"local": {"optimizer": optimizer}},
        "trainers": {"loop": {"save_episodes": "all"}},
        "finetuning": {"num_epochs": EPOCHS},
    }
    for path, value in changes.items():
        *parents, name = path.split("__")
        inner = config
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    (folder / "run.yml").write_text(dump_yaml(config))


def train(folder: Path, processes: int) -> Path:
    """A run in so many processes, which have four devices in all; its directory."""
    run = [sys.executable, "-P", "-m", "jaxft.cli"]
    launched = [*run, "launch", "-n", str(processes)] if processes > 1 else []
    output = folder / f"of_{processes}"
    command = [*launched, *run, "finetune", "--config-file", "run.yml", "--set", f"finetuning.output_dir={output}"]
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        command, cwd=folder, env={**os.environ, **devices}, capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return output


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def recorded(run: Path) -> Path:
    """All episodes of a run; the pairs of DPO, which are collected before the first update."""
    (file,) = [
        run / "trajectories" / name
        for name in ("samples.jsonl", "pairs.jsonl")
        if (run / "trajectories" / name).exists()
    ]
    return file


def weights(run: Path) -> dict[str, np.ndarray]:
    """The exported model, or its adapter."""
    (file,) = (run / "model").glob("*model.safetensors")
    return load_file(file)


def tokens(row: dict[str, Any]) -> list[list[int]]:
    return [sequence["tokens"] for sequence in row["sequences"]]


def check_the_same(folder: Path, *, is_exact: bool = True) -> None:
    """The first collection has the same bits in all layouts; gradients and weights are those of one, to rounding.

    So are all tokens, if `is_exact`: Adam makes steps of one size of gradients of any, and so of rounding.
    """
    one, *others = (train(folder, processes) for processes in (1, 2, 4))
    for other in others:
        rows = list(zip(*(lines(recorded(run)) for run in (one, other)), strict=True))
        for mine, theirs in rows:
            if mine.get("epoch", 0) == 0:
                assert mine == theirs
        diverges = min((mine["epoch"] for mine, theirs in rows if tokens(mine) != tokens(theirs)), default=EPOCHS)
        compared = f"{other.name}: {diverges} of {EPOCHS} epochs with the same tokens"

        for mine, theirs in zip(*(lines(run / "training_metrics.jsonl") for run in (one, other)), strict=True):
            if "grad_norm" in mine and mine["epoch"] < diverges:
                assert mine["grad_norm"] > 0
                assert abs(mine["grad_norm"] - theirs["grad_norm"]) <= ROUNDING * mine["grad_norm"], compared
        mine, theirs = weights(one), weights(other)
        largest = max(np.abs(values).max() for values in mine.values())
        differs = max(np.abs(values - theirs[name]).max() for name, values in mine.items()) / largest
        print(f"{compared}, weights within {differs:.1e} of the largest")
        assert diverges == EPOCHS or not is_exact, compared
        if diverges == EPOCHS:
            assert differs <= ROUNDING, compared


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("base", ["grpo", "lora", "dpo"])
def test_layouts_train_the_same(tmp_path, base, optimizer):
    configuration(tmp_path, base, optimizer)
    check_the_same(tmp_path, is_exact=optimizer is SGD)


@pytest.mark.long
@pytest.mark.parametrize("policy", [{"preset": "qwen3-176k-a47k"}, {"sampling_dtype": "int8"}], ids=["mixture", "int8"])
def test_layouts_replay_experts_and_sample_in_eight_bits_alike(tmp_path, policy):
    configuration(tmp_path, "grpo", SGD, **{f"llms__policy__{name}": value for name, value in policy.items()})
    check_the_same(tmp_path)


@pytest.mark.long
def test_a_teacher_scores_the_tokens_of_all(tmp_path):
    model, params = init_model(model_preset("qwen3-50k"), jax.random.key(7, impl="threefry2x32"))
    save_model(tmp_path / "teacher", model, jax.tree.map(lambda leaf: 3 * leaf, params), tokenizer=load_tokenizer(None))
    teacher = {
        "_type": "local_policy",
        "path": str(tmp_path / "teacher"),
        "max_context_tokens": 64,
        "slots": 4,
        "mesh": {"data": -1},
    }
    distilled = {"name": "dapo", "distillation": {"teacher": "teacher", "form": "reverse"}}
    configuration(tmp_path, "grpo", SGD, llms__teacher=teacher, trainer_adapters__local__loss=distilled)
    check_the_same(tmp_path)


ADDRESSES: set[str] = set()
"""Where the agent asked for tokens."""


class Agent(http.server.BaseHTTPRequestHandler):
    """An agent at an address, which asks twice."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ADDRESSES.add(asked["base_url"].split("/e/")[0])
        url, json_type = asked["base_url"] + "/chat/completions", {"content-type": "application/json"}
        messages, points = [], 0
        for _ in range(2):
            messages.append({"role": "user", "content": asked["example"]["question"]})
            body = json.dumps({"model": asked["model"], "messages": messages, "max_tokens": 6}).encode()
            with urllib.request.urlopen(urllib.request.Request(url, body, json_type)) as response:
                messages.append(json.load(response)["choices"][0]["message"])
            points += len(messages[-1]["content"].encode()) % 4
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(points).encode())

    def log_message(self, *arguments: Any) -> None:
        """Not into the output of the tests."""


@pytest.mark.long
def test_an_agent_at_an_address_reaches_the_process_of_its_episode(tmp_path):
    http.server.ThreadingHTTPServer.request_queue_size = 128  # many connect at once
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Agent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        configuration(
            tmp_path, "grpo", SGD, workflow={"_type": "http_agent", "url": f"http://127.0.0.1:{server.server_port}"}
        )
        ADDRESSES.clear()
        check_the_same(tmp_path)
        server.shutdown()
    assert len(ADDRESSES) == 1 + 2 + 4
