"""An evaluation that several processes share gives what one process gives, to the byte."""

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
    if row["question"] == os.environ.get("FATAL"):
        os.kill(os.getpid(), signal.SIGKILL)
    if row["question"] == os.environ.get("STOPPED"):
        if jaxft.episode().generation == 0:  # a second signal ends a process at once
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    if row["question"] == os.environ.get("UNSENDABLE"):
        return lambda: None
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


EVAL = ("eval", "--config_file", "run.yml", "--temperature", "own", "--num_generations", "3")


@pytest.mark.slow
def test_two_and_three_processes_give_what_one_gives(folder):
    for processes in (1, 2, 3):
        ended = jaxft(folder, *EVAL, "--set", f"eval.general.output_dir=of_{processes}", processes=processes)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stdout.count("episodes        15") == 1  # the others say nothing
    of_one, *others = ((folder / f"of_{count}" / "evaluation.json").read_bytes() for count in (1, 2, 3))
    assert others == [of_one, of_one] and b'"num_episodes": 15' in of_one


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_with_its_name(folder):
    ended = jaxft(folder, *EVAL, processes=2, FATAL="b")  # the second example is that of process 1
    assert ended.returncode in (1, 128 + signal.SIGKILL)
    assert "[0] jaxft: process 1 of 2 has gone" in ended.stdout


@pytest.mark.slow
def test_an_output_that_cannot_be_sent_ends_all(folder):
    ended = jaxft(folder, *EVAL, processes=2, UNSENDABLE="b")
    assert ended.returncode in (1, 2)  # whichever is seen first: that of process 1 is 2
    assert "[1] jaxft: error: the outcome of an episode cannot be sent to the other processes: " in ended.stdout
    assert "[0] jaxft: error: process 1 of 2 has ended before it sent " in ended.stdout


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
    ended = jaxft(folder, "finetune", "--config_file", "run.yml", processes=2)
    assert ended.returncode == 2
    assert "2 processes cannot share" in ended.stdout
