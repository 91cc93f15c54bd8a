"""Agents and evaluators in workers: the same tokens as in process, and faults that cost their episode only.

The unmarked tests examine one session with workers, the one that the fixture `workers` makes: one forkserver for all.
"""

import asyncio
import contextlib
import gc
import io
import os
import signal
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxft
from jaxft.harness import isolation
from jaxft.harness.worker_processes import descendants
from jaxft.redaction import hiding
from jaxft.rollout.current import recording
from jaxft.rollout.recorder import TRAINING, Episode
from jaxft.runs.console import Console

AGENTS = Path(__file__).parents[1] / "data" / "isolation" / "isolated_agents.py"

REASONS = {
    "busy_loop": "TimeoutError: the workflow gave no output within 3 s",
    "sleep_in_c": "TimeoutError: the workflow gave no output within 3 s",
    "swallowed_cancellation": "TimeoutError: the workflow gave no output within 3 s",
    "leak": "WorkerError: it took more memory than it may: eval.general.worker_memory_mb is 128",
    "segfault": "WorkerError: its process was ended by SIGSEGV",
    "exit_at_once": "WorkerError: it ended its process, with exit code 3",
    "children_left_behind": "WorkerError: it left 20 processes behind, the first of which is 'sleep'",
    "filled_output": "WorkerError: it wrote more than 1 MiB to its standard output",
    "closed_descriptors": "WorkerError: it ended its process, with exit code 1",
    "garbled_line": "WorkerError: it sent what is no message of a worker",
    "large_key": "KeyError: its text cannot be shown, as that raises ValueError",
    "never_answers": "TimeoutError: the workflow gave no output within 3 s",
    "killed": "WorkerError: its process was ended by SIGKILL",
    "system_exit": "SystemExit: 4",
    "fork_asks": "ValueError: its child ended with 0",
    "local_result": "Local: an error that no pickle holds",
    "small_leak": "eval.general.worker_memory_mb is 128",
    "forkserver_child": "WorkerError: it left 1 processes behind, the first of which is ",
    "daemon": "WorkerError: it left ",
    "unreadable_error": "Unreadable: an error that no process reads",
    "foreign_error": "Foreign: an error of another module",
}
"""The error that the run reports for each fault."""

PLAIN = ["part of a character: \udce9, and half of one: \ud83d", [None, True, 0.1 + 0.2, 2**70, {"a": []}]]
"""Values that cross to a worker and back as they are."""

LATE = [name for name, reason in REASONS.items() if reason.startswith("TimeoutError")]
WAYS = ["chat", "client", "stream", "key", "blocking"]


def config_of(folder, *, how="chat", faults=(), judge_fault=None, general=None, preset="qwen3-50k", **changes):
    mapping = {
        "imports": [str(AGENTS)],
        "llms": {"policy": {"_type": "local_policy", "preset": preset, "slots": 8, "max_context_tokens": 48}},
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


MIXTURE = "qwen3-176k-a47k"
PROCESS = {"isolation": "process", "judge_isolation": "process", "worker_memory_mb": 128}


def train(folder, **options):
    """The deterministic files of a run of one epoch, without the reports of failed episodes."""

    async def main():
        async with jaxft.open_session(config_of(folder, **options), console=Console(io.StringIO())) as session:
            await session.train()

    asyncio.run(main())
    run = folder / "run"
    paths = [run / "training_metrics.jsonl", *sorted((run / "trajectories").iterdir())]
    return {path.name: path.read_bytes() for path in paths}


def item(name, question="x?", **row):
    return jaxft.EvalInputItem(id=name, full_dataset_entry={"question": question} | row, input_obj=question)


def asked(**row):
    """Two examples per way of asking a model; `row` says whether they are asked in that way."""
    ways = [(how, {"how": how} if row else {}) for how in WAYS]
    return [item(f"{how} {text}", text, **changes) for how, changes in ways for text in ("a?", "bb?")]


def wrong():
    """Examples whose episodes fail, or whose score does, and one that writes."""
    items = [item(name, fault=name) for name in (*REASONS, "log", "tells_secret") if name not in LATE]
    judges = ("sleep_in_c", "segfault", "leak")
    return [*items, *(item(f"judge {name}", "bb?", judge_fault=name) for name in judges)]


def use_session(folder, use, written=None, **options):
    """Run `use` in a session, with its evaluation; return what it returns. No task and no connection may be left."""
    stream = written or io.StringIO()

    async def main():
        connections = open_connections()
        async with jaxft.open_session(config_of(folder, **options), console=Console(stream)) as session:
            result = await use(session, await session.builder.get_evaluation())
        assert len(asyncio.all_tasks()) == 1 and open_connections() == connections
        return result

    return asyncio.run(main())


def tokens(outcome):
    calls = outcome.episode.calls
    return [(call.token_ids, call.sampler_logprobs, call.reply.completion.supports, call.functions) for call in calls]


def open_connections():
    """The number of pipes and of sockets of this process; files are opened by libraries, too, when they please."""
    gc.collect()  # earlier tests may have left some
    helpers = {forkserver._forkserver._forkserver_alive_fd, resource_tracker._resource_tracker._fd}
    links = []
    for number in {int(each) for each in os.listdir("/proc/self/fd")} - helpers:
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
    return links.count("pipe"), links.count("socket")


def running_children():
    """The processes that this one has started, without Python's own helpers."""
    helpers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    return descendants(os.getpid()).keys() - helpers


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Fails a test that leaves a process behind."""
    before = running_children()
    yield
    assert running_children() == before


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Outcomes of the same examples without workers, each asked in the plain way."""

    async def use(session, evaluation):
        outcomes = await evaluation.run(asked(), stream=TRAINING, rollout_index=0, num_generations=2)
        return {(outcome.item.id, outcome.generation): outcome for outcome in outcomes}

    return use_session(tmp_path_factory.mktemp("alone"), use)


def example(question):
    return jaxft.EvalInputItem(id=question, full_dataset_entry={"question": question}, output_obj=1.0, trajectory=[])


async def started_for_six_calls(pool):
    """The number of workers that do six calls one after the other when each does two."""
    await pool.close()  # its workers start again
    seen = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "MAX_CALLS", 2)
        for _ in range(6):
            await pool.function("size", None, "")(example("a?"))
            seen |= running_children()
    return len(seen) // 2  # each with its guardian


async def scores_after_cancelled_starts(pool):
    score = pool.function("size", None, "")
    for seconds in (0.0, 0.002, 0.004, 0.01):
        await pool.close()  # its workers start again
        starting = asyncio.create_task(score(example("a?")))
        await asyncio.sleep(seconds)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    return await asyncio.gather(*(score(example("a?")) for _ in range(4)))


async def result_of(pool, returned):
    """The result of an agent that returns a value, or its error, and its episode."""
    episode = Episode(0, TRAINING, 3, "x?", 0)
    with recording(episode):
        try:
            return await pool.function(None, None, "")({"question": "x?", "returns": returned}), episode
        except (TypeError, jaxft.errors.UserCodeError) as error:
            return str(error), episode


async def error_of_late(pool, name):
    """The error of an agent that works for too long, and the number of its recorded calls."""
    episode = Episode(0, TRAINING, 2, name, 0)
    with recording(episode), pytest.raises(TimeoutError) as caught:
        call = pool.function(None, 3, "the workflow gave no output")
        await call({"question": "x?", "fault": name})
    return f"TimeoutError: {caught.value}", len(episode.calls)


def has_command(pid):
    """True of a process that has not ended, as a zombie has no command."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    return False


async def left_by_killed_forkserver(pool):
    """Kill the forkserver while an evaluator works for too long; return the processes that are left of its worker."""
    hanging = asyncio.create_task(pool.function("size", 3, "")(item("bb?", "bb?", judge_fault="hangs_with_child")))
    while "sleep" not in descendants(os.getpid()).values():
        await asyncio.sleep(0.02)
    workers = running_children()
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    with pytest.raises(TimeoutError):
        await hanging
    await pool.close()
    return [pid for pid in workers if has_command(pid)]


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """All that one session with workers does: every way to ask, every fault, starts that are cancelled, and a kill."""
    written = io.StringIO()

    async def use(session, evaluation):
        pool = await session.builder._components["workers"]
        ways = await evaluation.run(asked(how=True), stream=TRAINING, rollout_index=0, num_generations=2)
        failed = await evaluation.run(wrong(), stream=TRAINING, rollout_index=1)
        late = dict(zip(LATE, await asyncio.gather(*(error_of_late(pool, name) for name in LATE)), strict=True))
        return SimpleNamespace(
            ways={(outcome.item.id, outcome.generation): outcome for outcome in ways},
            failed={outcome.item.id: outcome for outcome in failed},
            late=late,
            results=[await result_of(pool, value) for value in (*PLAIN, "a set", {3, 4})],
            num_started_for_six=await started_for_six_calls(pool),
            left_by_killed_forkserver=await left_by_killed_forkserver(pool),
            after_cancelled=await scores_after_cancelled_starts(pool),
        )

    evaluators = {"size": {"_type": "isolated_size", "timeout_seconds": 5}, "rank": {"_type": "isolated_rank"}}
    dataset = {"dataset": {"_type": "isolated_examples"}}
    section = {"general": PROCESS | dataset | {"max_concurrency": 6}, "evaluators": evaluators}
    with hiding(["sk-of-the-run"]):
        found = use_session(tmp_path_factory.mktemp("workers"), use, written, eval=section)
    found.written = written.getvalue()
    return found


@pytest.mark.parametrize("how", WAYS)
def test_episodes_are_the_same_in_workers(alone, workers, how):
    compared = [name for name in alone if name[0].startswith(how)]
    assert len(compared) == 4
    for name in compared:
        inside, outside = workers.ways[name], alone[name]
        assert inside.error is None and inside.scores == outside.scores and inside.reward == outside.reward
        if how == "key":  # its thread inherits no names of functions
            assert [call[:3] for call in tokens(inside)] == [call[:3] for call in tokens(outside)]
        else:
            assert tokens(inside) == tokens(outside) and len(tokens(inside)) == 2
            assert all(len(supports) == len(ids) for ids, _, supports, _ in tokens(inside))
        assert inside.episode.step_rewards == outside.episode.step_rewards != {}
        assert inside.item.output_obj == outside.item.output_obj


@pytest.mark.parametrize("name", [name for name in REASONS if name not in LATE])
def test_a_fault_costs_its_episode_and_is_named(workers, name):
    outcome = workers.failed[name]
    assert REASONS[name] in outcome.error
    if name == "segfault":
        assert f" in {name}\n" in workers.written  # the traceback of the crash
    assert outcome.episode.calls  # what was asked before a fault is recorded
    if name in ("system_exit", "local_result", "children_left_behind"):
        assert outcome.episode.step_rewards != {}


@pytest.mark.parametrize("name", LATE)
def test_what_takes_too_long_is_ended_and_named(workers, name):
    error, num_calls = workers.late[name]
    assert REASONS[name] in error and num_calls == 1
    if name in ("busy_loop", "sleep_in_c"):
        assert f" in {name}\n" in workers.written


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("sleep_in_c", "no score within 5 s"),
        ("segfault", "ended by SIGSEGV"),
        ("leak", "worker_memory_mb is 128"),
    ],
)
def test_a_fault_of_an_evaluator_costs_its_episode(workers, fault, reason):
    error = workers.failed[f"judge {fault}"].error
    assert "evaluator 'size': " in error and reason in error


def test_values_cross_as_json_or_are_refused_with_their_type(workers):
    *plain, (returned, episode), (given, _) = workers.results
    assert [result for result, _ in plain] == PLAIN
    assert "a value of type set is no JSON" in returned and "a value of type set is no JSON" in given
    (candidates,) = episode.candidates
    assert candidates.calls == tuple(episode.calls) and candidates.scores == (0.0, 1.0)


def test_what_an_agent_prints_and_logs_is_shown(workers):
    assert workers.failed["log"].error is None
    assert "printed by the agent, which was asked x?\n" in workers.written
    assert "the last words before a crash\n" in workers.written
    assert "WARNING isolated_agents: a warning of the agent\n" in workers.written
    assert "WARNING isolated_agents: a warning of a child\n" in workers.written
    assert "INFO isolated_agents: asks http" in workers.written and "/e/***/v1\n" in workers.written
    assert "INFO httpx2" not in workers.written and "jaxft-episode-" not in workers.written


def test_workers_are_replaced_after_their_episodes(workers):
    assert workers.num_started_for_six == 3


def test_a_start_may_be_cancelled_and_another_forkserver_starts_when_one_was_killed(workers):
    assert workers.after_cancelled == [(1.0, None)] * 4


def test_a_worker_ends_in_time_without_its_forkserver(workers):
    assert workers.left_by_killed_forkserver == []


def test_secrets_in_errors_of_workers_are_masked(workers):
    outcome = workers.failed["tells_secret"]
    assert outcome.error == "ValueError: the key *** is refused" and "sk-of-the-run" not in outcome.traceback


@pytest.mark.slow
def test_a_run_is_the_same_in_workers(tmp_path):
    """A mixture replays its experts, and an agent that is no coroutine runs in a thread of a worker."""
    far = train(tmp_path / "workers", how="sync", general=PROCESS, preset=MIXTURE)
    assert far == train(tmp_path / "plain", preset=MIXTURE)
    assert b'"replayed_token_fraction": 1.0,' in far["training_metrics.jsonl"]


@pytest.mark.slow
def test_a_factory_that_fails_is_an_error_of_the_configuration(tmp_path):
    with pytest.raises(jaxft.ComponentError, match="KeyError: 'none'"):
        train(tmp_path, general=PROCESS, workflow={"_type": "isolated_agent", "llm": "policy", "how": "none"})
