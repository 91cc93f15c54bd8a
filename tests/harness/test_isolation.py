"""Agents and evaluators in workers: the same tokens as in process, and faults that cost their episode only."""

import asyncio
import io
import os
from pathlib import Path

import pytest

import jaxft
from jaxft.harness.isolation.zygote import children
from jaxft.runs.console import Console

AGENTS = Path(__file__).parents[1] / "data" / "isolation" / "isolated_agents.py"

REASONS = {
    "busy_loop": "TimeoutError: the workflow gave no output within 8 s, at ",
    "sleep_in_c": "TimeoutError: the workflow gave no output within 8 s, at ",
    "swallowed_cancellation": "TimeoutError: the workflow gave no output within 8 s",
    "leak": "WorkerError: it took more memory than eval.general.workers.memory_mb, 256 MiB",
    "segfault": "WorkerError: its process was ended by SIGSEGV, at ",
    "exit_at_once": "WorkerError: it ended its process, with exit code 3",
    "children_left_behind": "WorkerError: it left 20 processes behind, the first of which is 'sleep 1000'",
    "filled_output": "WorkerError: it wrote more than eval.general.workers.max_output_mb, 1 MiB",
    "closed_descriptors": "WorkerError: its process broke down",
    "never_answers": "TimeoutError: the workflow gave no output within 8 s",
    "killed": "WorkerError: its process was ended by SIGKILL",
    "system_exit": "SystemExit: 4",
    "fork_asks": "ValueError: its child ended with 0",
    "local_result": "Local: an error that no pickle holds",
    "small_leak": "WorkerError: it took more memory than eval.general.workers.memory_mb, 256 MiB",
    "forkserver_child": "WorkerError: it left 1 processes behind, the first of which is ",
    "daemon": "WorkerError: it left ",
    "unreadable_error": "Unreadable: an error that no process reads",
    "foreign_error": "Foreign: an error of another module",
}
"""What the run says of each fault."""


def config_of(folder, *, how="chat", faults=(), judge_fault=None, general=None, llms=None, **changes):
    mapping = {
        "imports": [str(AGENTS)],
        "llms": {"policy": {"_type": "local_policy", "preset": "qwen3-50k", "slots": 8, "max_context_tokens": 48}},
        "workflow": {"_type": "isolated_agent", "llm": "policy", "how": how},
        "eval": {
            "general": {
                "max_concurrency": 4,
                "timeout_seconds": 100,
                "dataset": {"_type": "isolated_examples", "faults": list(faults)},
                **(general or {}),
            },
            "evaluators": {
                "size": {"_type": "isolated_size", "fault": judge_fault},
                "rank": {"_type": "isolated_rank"},
            },
        },
        "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": 4}},
        "trainer_adapters": {"local": {"_type": "local_trainer_adapter", "llm": "policy"}},
        "trainers": {"loop": {"_type": "grpo_trainer", "show_episodes_every": 1, "save_episodes": "all"}},
        "finetuning": {
            "enabled": True,
            "trainer": "loop",
            "trajectory_builder": "rollouts",
            "trainer_adapter": "local",
            "reward_function": {"name": "size"},
            "num_epochs": 1,
            "output_dir": str(folder / "run"),
        },
    }
    return jaxft.config_from_mapping(mapping | changes, base_dir=folder)


PROCESS = {"isolation": "process", "judge_isolation": "process", "workers": {"memory_mb": 256, "max_output_mb": 1}}


def train(folder, **options):
    """The deterministic files of a run of one epoch, without the reports of failed episodes."""

    async def main():
        async with jaxft.open_session(config_of(folder, **options), console=Console(io.StringIO())) as session:
            await session.train()

    asyncio.run(main())
    run = folder / "run"
    paths = [run / "training_metrics.jsonl", *sorted((run / "trajectories").iterdir())]
    return {path.name: path.read_bytes() for path in paths}


def evaluate(folder, **options):
    """Outcomes of all episodes by example, and what the console showed."""
    shown = io.StringIO()

    async def main():
        async with jaxft.open_session(config_of(folder, **options), console=Console(shown)) as session:
            evaluation = await session.builder.get_evaluation()
            items = await session.builder.get_dataset()
            return await evaluation.validate(items, temperature=None)

    outcomes = {outcome.item.id: outcome for outcome in asyncio.run(main())}
    return outcomes, shown.getvalue()


def tokens(outcome):
    return [(call.token_ids, call.sampler_logprobs, call.functions) for call in outcome.episode.calls]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Fails a test that leaves a process or a file descriptor behind."""

    def open_files():
        return {
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if Path(f"/proc/self/fd/{fd}").exists()
        }

    before = set(children(os.getpid()))
    yield
    assert set(children(os.getpid())) == before


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    return train(tmp_path_factory.mktemp("isolation"))


@pytest.mark.parametrize("how", ["chat", "client", "stream", "key", "sync", "blocking"])
def test_a_run_is_the_same_in_workers(tmp_path, in_process, how):
    assert train(tmp_path, how=how, general=PROCESS) == in_process


def test_a_run_is_the_same_in_a_thread(tmp_path, in_process):
    assert train(tmp_path, how="sync") == in_process


def test_each_fault_costs_its_episode_and_is_named(tmp_path):
    wanted, _ = evaluate(tmp_path)
    outcomes, _ = evaluate(
        tmp_path, faults=list(REASONS), general={**PROCESS, "max_concurrency": 16, "timeout_seconds": 8}
    )
    for name, reason in REASONS.items():
        assert reason in outcomes[name].error, (name, outcomes[name].error)
    for name in ("busy_loop", "sleep_in_c", "segfault"):
        assert "isolated_agents.py:" in outcomes[name].error and f" in {name}" in outcomes[name].error
    for name in ("a?", "bb?"):
        assert outcomes[name].error is None
        assert tokens(outcomes[name]) == tokens(wanted[name])
        assert outcomes[name].scores["size"] == wanted[name].scores["size"]
        assert outcomes[name].episode.step_rewards == wanted[name].episode.step_rewards != {}
    # What was asked before a fault is recorded.
    assert all(outcomes[name].episode.calls for name in REASONS)


@pytest.mark.parametrize(
    ("fault", "seconds", "reason"),
    [
        ("sleep_in_c", 1, "no score within 1 s, at "),
        ("segfault", 60, "ended by SIGSEGV"),
        ("leak", 60, "workers.memory_mb, 256 MiB"),
    ],
)
def test_a_fault_of_an_evaluator_costs_its_episode(tmp_path, fault, seconds, reason):
    evaluators = {"size": {"_type": "isolated_size", "fault": fault, "timeout_seconds": seconds}}
    section = {
        "general": {"dataset": {"_type": "isolated_examples"}, **PROCESS, "isolation": "none"},
        "evaluators": evaluators,
    }
    outcomes, _ = evaluate(tmp_path, eval=section)
    assert outcomes["a?"].error is None
    assert "evaluator 'size': " in outcomes["bb?"].error and reason in outcomes["bb?"].error


def test_what_an_agent_prints_and_logs_is_shown(tmp_path, capfd, caplog):
    outcomes, _ = evaluate(tmp_path, faults=["log"], general=PROCESS)
    assert outcomes["log"].error is None
    assert "printed by the agent" in capfd.readouterr().out
    assert "a warning of the agent" in caplog.text


def test_workers_are_replaced_after_their_episodes(tmp_path):
    async def main():
        general = {**PROCESS, "judge_isolation": "none", "workers": {"count": 1, "max_episodes": 2}}
        config = config_of(tmp_path, general=general)
        async with jaxft.open_session(config, console=Console(io.StringIO())) as session:
            evaluation = await session.builder.get_evaluation()
            items = await session.builder.get_dataset()
            for _ in range(3):
                await evaluation.validate(items)
            pool = await session.builder._components["workers"]
            return pool.num_started

    assert asyncio.run(main()) == 3  # of six episodes, two by each


def test_a_factory_that_fails_is_an_error_of_the_configuration(tmp_path):
    with pytest.raises(jaxft.ComponentError, match="KeyError: 'none'"):
        evaluate(tmp_path, general=PROCESS, workflow={"_type": "isolated_agent", "llm": "policy", "how": "none"})
