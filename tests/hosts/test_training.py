"""Two processes train what one trains: the same tokens, gradients and checkpoints.

A signal ends both, and what they cannot share is refused. That they evaluate what one evaluates follows: the episodes
are shared in the same way.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxft.models.load import load_merged
from tests.faults.compare import differences

AGENT = """
import asyncio, os, signal
import jaxft

own = os.environ.get("JAXFT_PROCESS_ID", "0")
counts = {}

class AgentConfig(jaxft.WorkflowConfig, name="trained_agent"):
    llm: jaxft.LLMRef

@jaxft.register_workflow(config_type=AgentConfig)
async def trained_agent(config, builder):
    llm = await builder.get_llm(config.llm)
    async def run(row):
        if row["question"] == os.environ.get("STOPPED"):
            if jaxft.episode().generation == 0:  # a second signal ends a process at once
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        reply = await llm.chat([{"role": "user", "content": row["question"]}], max_tokens=8)
        counts[own] = counts.get(own, 0) + len(reply.token_ids)
        return sum(token % 2 for token in reply.token_ids) / 8
    yield run
    with open(f"tokens_of_{own}", "w") as file:
        file.write(str(counts.get(own, 0)))

class PointsConfig(jaxft.EvaluatorConfig, name="points"):
    pass

@jaxft.register_evaluator(config_type=PointsConfig)
async def points(config, builder):
    yield lambda item: item.output_obj
"""
CONFIGURATION = """
imports: [trained_agent.py]
llms:
  policy: {_type: local_policy, preset: qwen3-50k, max_context_tokens: 32, slots: 8, mesh: {data: 1, fsdp: -1},
           lora: {rank: 2}}
workflow: {_type: trained_agent, llm: policy}
eval:
  general: {dataset: {_type: jsonl, file_path: rows.jsonl, structure: {answer_key: null}}}
  evaluators: {points: {_type: points}}
trajectory_builders: {rollouts: {_type: grpo_trajectory_builder, num_generations: 4}}
trainer_adapters:
  local: {_type: local_trainer_adapter, llm: policy, optimizer: {name: sgd, learning_rate: 1.0}}
trainers: {loop: {_type: grpo_trainer, save_episodes: all}}
finetuning:
  {enabled: true, trainer: loop, trajectory_builder: rollouts, trainer_adapter: local, num_epochs: 3,
   reward_function: {name: points}, output_dir: run}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "trained_agent.py").write_text(AGENT)
    (tmp_path / "run.yml").write_text(CONFIGURATION)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{letter}"}}\n' for letter in "abcd"))
    return tmp_path


def jaxft(folder: Path, *arguments: str, processes: int = 2, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run jaxft in so many processes, which have two devices in all."""
    run = [sys.executable, "-P", "-m", "jaxft.cli"]
    command = [*run, *(["launch", "-n", str(processes), *run] if processes > 1 else []), *arguments]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    devices = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **devices, **variables}, capture_output=True, text=True, timeout=900
    )


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "training_metrics.jsonl").read_text().splitlines()]


SAMPLES = "trajectories/samples.jsonl"


@pytest.mark.slow
def test_two_processes_train_what_one_trains(folder):
    for processes in (1, 2):
        set_output = ("--set", f"finetuning.output_dir=of_{processes}")
        ended = jaxft(folder, "finetune", "--config-file", "run.yml", *set_output, processes=processes)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        if processes == 1:
            (folder / "tokens_of_0").rename(folder / "tokens")
    one, two = folder / "of_1", folder / "of_2"

    # What is sampled is the same while the weights are; rewards are those of all processes.
    first, second = ([json.loads(line) for line in (each / SAMPLES).read_text().splitlines()] for each in (one, two))
    assert [row for row in first if row["epoch"] == 0] == [row for row in second if row["epoch"] == 0]
    assert len(first) == len(second) == 48
    for mine, theirs in zip(metrics(one), metrics(two), strict=True):
        assert mine["reward_mean"] == theirs["reward_mean"] and mine["grad_norm"] > 0
        assert abs(mine["grad_norm"] - theirs["grad_norm"]) <= 1e-5 * mine["grad_norm"]

    # Each process sampled its part: two of four examples.
    tokens = {name: int((folder / name).read_text()) for name in ("tokens", "tokens_of_0", "tokens_of_1")}
    assert tokens["tokens_of_0"] + tokens["tokens_of_1"] == tokens["tokens"]
    assert abs(tokens["tokens_of_0"] - tokens["tokens"] / 2) <= 4 * 8

    # Adapters exported by both are those of one, to rounding, and can be merged.
    mine, theirs = (load_file(each / "model" / "adapter_model.safetensors") for each in (one, two))
    for name, values in mine.items():
        np.testing.assert_allclose(theirs[name], values, rtol=0, atol=1e-5 * max(1.0, np.abs(values).max()))
    load_merged(two / "model")

    # One process reads the checkpoint of two, bit for bit: at its end nothing is left to do.
    shutil.copytree(two, folder / "again")
    ended = jaxft(folder, "resume", "again", processes=1)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = differences(folder / "again", two)  # the card of the model says where it was made
    assert found in ([], ["model/README.md: bytes differ"])

    # A file that one of the processes wrote is damaged: it is named, and the checkpoint before is taken.
    damaged = max((two / "checkpoints" / "3").rglob("ocdbt.process_1/d/*"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(b"\x00" + damaged.read_bytes()[1:])
    ended = jaxft(folder, "resume", "of_2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "checkpoint 3 is damaged and is passed over" in ended.stdout and damaged.name in ended.stdout
    assert "continuing from checkpoint 2" in ended.stdout


LOGGED = """
llms: {policy: {_type: local_policy, preset: qwen3-50k, max_context_tokens: 32, slots: 8, mesh: {data: 1, fsdp: -1}}}
workflow: {_type: single_turn, llm: policy}
eval:
  general: {dataset: &logs {_type: jsonl, file_path: logs.jsonl, structure: {question_key: null, answer_key: null}}}
  validation: {dataset: *logs, interval: 1}
trajectory_builders: {rows: {_type: logged_trajectory_builder, llm: policy}}
trainer_adapters:
  local: {_type: local_trainer_adapter, llm: policy, optimizer: {name: sgd, learning_rate: 1.0}}
trainers: {loop: {_type: grpo_trainer, examples_per_update: 4}}
finetuning: {enabled: true, trainer: loop, trajectory_builder: rows, trainer_adapter: local, num_epochs: 2}
"""


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_two_processes_measure_held_out_rows_as_one_does(tmp_path, loss):
    answers = ("completion",) if loss == "sft" else ("chosen", "rejected")
    rows = [{"prompt": "ab"[: 1 + i % 2]} | {name: name[i:] * (i + 1) for name in answers} for i in range(5)]
    (tmp_path / "logs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "run.yml").write_text(LOGGED)
    histories = []
    for processes in (1, 2):
        options = f"--set trainer_adapters.local.loss.name={loss} --set finetuning.output_dir=of_{processes}".split()
        ended = jaxft(tmp_path, "finetune", "--config-file", "run.yml", *options, processes=processes)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        histories.append(json.loads((tmp_path / f"of_{processes}" / "validation_history.json").read_text()))
    mine, theirs = ([row.pop("loss") for row in history] for history in histories)
    assert theirs == pytest.approx(mine, rel=1e-5) and len(set(mine)) == 3
    assert histories[0] == histories[1]  # epochs, and how many pairs are ordered right


EVAL = ("eval", "--config-file", "run.yml", "--temperature", "own", "--num-generations", "3")


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_with_its_code(folder):
    ended = jaxft(folder, *EVAL, STOPPED="b")
    assert ended.returncode == 128 + signal.SIGTERM, ended.stdout
    for process in "01":
        assert f"[{process}] jaxft: terminated" in ended.stdout, ended.stdout


@pytest.mark.slow
def test_what_differs_is_named(folder):
    """Each process takes the seed of its number."""
    ended = jaxft(folder, *EVAL, "--set", "finetuning.seed=${JAXFT_PROCESS_ID}")
    assert ended.returncode == 2
    assert "finetuning.seed is 1 in process 1, and 0 in process 0: give all the same" in ended.stdout


@pytest.mark.slow
def test_more_processes_than_examples_are_refused(folder):
    (folder / "rows.jsonl").write_text('{"question": "a"}\n')
    ended = jaxft(folder, "finetune", "--config-file", "run.yml")
    assert ended.returncode == 2
    assert "2 processes cannot share" in ended.stdout
