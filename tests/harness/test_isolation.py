"""Agents and evaluators in workers: the same tokens as in process, and faults that cost their episode only."""

import asyncio
import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jaxft
from jaxft.harness.isolation.answering import RunSide
from jaxft.harness.isolation.pool import WorkerPool
from jaxft.harness.isolation.zygote import children, command_of, started_by
from jaxft.redaction import hiding
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
"""The error that the run reports for each fault."""


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


def open_connections():
    """The number of pipes and of sockets of this process; files are opened by libraries, too, when they please."""
    gc.collect()  # earlier tests may have left some
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
    return links.count("pipe"), links.count("socket")


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Fails a test that leaves a process behind."""
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
    late = [name for name, reason in REASONS.items() if reason.startswith("TimeoutError")]
    others = [name for name in REASONS if name not in late]
    outcomes, _ = evaluate(tmp_path, faults=others, general={**PROCESS, "max_concurrency": 12})
    hanging, _ = evaluate(tmp_path, faults=late, general={**PROCESS, "max_concurrency": 6, "timeout_seconds": 8})
    outcomes |= {name: hanging[name] for name in late}
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
    for name in ("system_exit", "local_result", "children_left_behind"):
        assert outcomes[name].episode.step_rewards != {}


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
    written = capfd.readouterr().out
    assert "printed by the agent, which was asked x?\n" in written
    assert "WARNING isolated_agents: a warning of a child\n" in written
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


async def no_llm(name):
    raise AssertionError(name)


@contextlib.asynccontextmanager
async def pool_of(folder, **options):
    """Workers without a policy, for evaluators; they leave no file descriptor and no task."""
    connections, shown = open_connections(), []
    pool = WorkerPool(config_of(folder, **options), 4, RunSide(no_llm, no_llm, shown.append))
    try:
        yield pool
    finally:
        await pool.close()
        assert len(asyncio.all_tasks()) == 1
        assert open_connections() == connections
        assert shown == []


def example(question):
    return jaxft.EvalInputItem(id=question, full_dataset_entry={"question": question}, output_obj=1.0, trajectory=[])


def test_the_run_goes_on_when_the_zygote_is_killed(tmp_path):
    async def main():
        async with pool_of(tmp_path, judge_fault="hangs_with_child") as pool:
            score = pool.function("size", None, "")
            hanging = asyncio.create_task(score(example("bb?")))
            while len(workers := started_by(os.getpid())) < 3:  # the zygote, a worker and what that has started
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
            os.kill(pool._zygote._process.pid, signal.SIGKILL)
            with pytest.raises(jaxft.errors.WorkerError):
                await hanging
            await asyncio.sleep(0.1)
            assert not [pid for pid in workers if command_of(pid)]
            assert await score(example("a?")) == 1.0

    asyncio.run(main())


def test_a_start_may_be_cancelled(tmp_path):
    async def main():
        async with pool_of(tmp_path) as pool:
            score = pool.function("size", None, "")
            for seconds in (0.01, None, 0.0, 0.002, 0.004, 0.01):  # the first cancels the start of the zygote
                if seconds is None:
                    await pool.check("size")
                    continue
                starting = asyncio.create_task(score(example("a?")))
                await asyncio.sleep(seconds)
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                for process in pool._idle:  # or the next one would not be started
                    process.kill()
            assert await asyncio.gather(*(score(example("a?")) for _ in range(4))) == [1.0] * 4

    asyncio.run(main())


def test_secrets_in_errors_of_workers_are_masked(tmp_path):
    async def main():
        async with pool_of(tmp_path, judge_fault="tells_secret") as pool:
            with pytest.raises(jaxft.errors.UserCodeError) as caught:
                await pool.function("size", None, "")(example("bb?"))
            return caught.value

    with hiding(["sk-of-the-run"]):
        failure = asyncio.run(main())
    assert failure.summary == "ValueError: the key *** is refused"
    assert "sk-of-the-run" not in failure.traceback + failure.tail


def test_a_script_from_standard_input_may_have_workers(tmp_path):
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.harness.test_isolation import example, pool_of
from pathlib import Path
async def main():
    async with pool_of(Path({str(tmp_path)!r})) as pool:
        print(await pool.function("size", None, "")(example("a?")))
asyncio.run(main())
"""
    run = subprocess.run([sys.executable], input=script, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert run.stdout == "1.0\n", run.stderr
