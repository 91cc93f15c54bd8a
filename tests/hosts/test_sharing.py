"""An evaluation that several processes share ends in all at a signal; what they cannot share is refused.

That it gives what one process gives is in test_training.py, whose episodes are shared in the same way.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

AGENT = """
import asyncio, os, signal
import jaxft

async def agent(row, llm):
    if row["question"] == os.environ.get("STOPPED"):
        if jaxft.episode().generation == 0:  # a second signal ends a process at once
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    reply = await llm.chat([{"role": "user", "content": row["question"]}], max_tokens=8)
    return reply.content

class AgentConfig(jaxft.WorkflowConfig, name="shared_agent"):
    llm: jaxft.LLMRef

@jaxft.register_workflow(config_type=AgentConfig)
async def shared_agent(config, builder):
    llm = await builder.get_llm(config.llm)
    async def run(row):
        return await agent(row, llm)
    yield run

class LengthConfig(jaxft.EvaluatorConfig, name="length"):
    pass

@jaxft.register_evaluator(config_type=LengthConfig)
async def length(config, builder):
    yield lambda item: float(len(str(item.output_obj)))
"""
CONFIGURATION = """
imports: [shared_agent.py]
llms: {policy: {_type: local_policy, preset: qwen3-50k, max_context_tokens: 32, slots: 6}}
workflow: {_type: shared_agent, llm: policy}
eval:
  general: {dataset: {_type: jsonl, file_path: rows.jsonl, structure: {answer_key: null}}}
  evaluators: {length: {_type: length}}
trajectory_builders: {rollouts: {_type: grpo_trajectory_builder, num_generations: 2}}
trainer_adapters: {local: {_type: local_trainer_adapter, llm: policy}}
trainers: {loop: {_type: grpo_trainer}}
finetuning:
  {enabled: true, trainer: loop, trajectory_builder: rollouts, trainer_adapter: local,
   reward_function: {name: length}, output_dir: run}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shared_agent.py").write_text(AGENT)
    (tmp_path / "run.yml").write_text(CONFIGURATION)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{letter}"}}\n' for letter in "abcde"))
    return tmp_path


def jaxft(folder: Path, *arguments: str, processes: int = 1, **variables: str) -> "subprocess.CompletedProcess[str]":
    run = [sys.executable, "-P", "-m", "jaxft.cli"]
    command = [*run, *arguments]
    if processes > 1:
        command = [*run, "launch", "-n", str(processes), *command]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300
    )


EVAL = ("eval", "--config-file", "run.yml", "--temperature", "own", "--num-generations", "3")


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_with_its_code(folder):
    ended = jaxft(folder, *EVAL, processes=2, STOPPED="b")
    assert ended.returncode == 128 + signal.SIGTERM, ended.stdout
    for process in "01":
        assert f"[{process}] jaxft: terminated" in ended.stdout, ended.stdout


@pytest.mark.slow
def test_what_differs_is_named(folder):
    """Each process takes the seed of its number."""
    by_number = "finetuning.seed=${JAXFT_PROCESS_ID}"
    ended = jaxft(folder, *EVAL, "--set", by_number, processes=2)
    assert ended.returncode == 2
    assert "finetuning.seed is 1 in process 1, and 0 in process 0: give all the same" in ended.stdout


@pytest.mark.slow
def test_more_processes_than_examples_are_refused(folder):
    (folder / "rows.jsonl").write_text('{"question": "a"}\n')
    ended = jaxft(folder, "finetune", "--config-file", "run.yml", processes=2)
    assert ended.returncode == 2
    assert "2 processes cannot share" in ended.stdout
