"""Agents that hold the event loop, that do not end when they are cancelled, and signals in spite of both."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from jaxft.cli import main
from jaxft.errors import UserCodeError
from jaxft.harness import supervision
from jaxft.harness.registry import REGISTRY
from jaxft.harness.signals import Shutdown, _shutdown
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.harness.supervision import Supervisor

SOON = 0.05


def supervised(function, said, seconds=None, *, run_in_thread=False, **options):
    """The result of a piece of user code; `said` gets the messages about it."""

    async def run():
        supervisor = Supervisor(said.append, grace_seconds=SOON, **options)
        try:
            return await supervisor.run(
                function, 1, name="episode a/0", run_in_thread=run_in_thread, seconds=seconds, late="nothing came"
            )
        finally:
            said.append(supervisor.num_abandoned)

    return asyncio.run(asyncio.wait_for(run(), timeout=20))


def hold(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


async def swallows(argument):
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(20)


def test_what_holds_the_event_loop_is_named_with_its_line():
    async def held(argument):
        hold(1.0)

    said = []
    with pytest.raises(TimeoutError, match=r"within 0\.05 s; the event loop was blocked"):
        supervised(held, said, SOON, blocked_seconds=0.2)
    line, abandoned = said
    assert "episode a/0 has held" in line and f"{__file__}:" in line and "llm.chat_sync" in line and abandoned == 0


@pytest.mark.parametrize("is_told", [True, False])
def test_the_processes_of_a_run_stop_together(is_told):
    """By a signal that another process tells, after which its own changes nothing, and by one that this one tells."""
    told, shutdown = [], Shutdown()
    shutdown.tell = told.append

    async def program():
        with shutdown.installed(), shutdown.listening() as signalled:
            if is_told:
                threading.Thread(target=shutdown.hear, args=(signal.SIGTERM,)).start()
                await asyncio.wait_for(signalled.wait(), 10.0)
            os.kill(os.getpid(), signal.SIGTERM)  # the whole group of processes gets it
            await asyncio.wait_for(signalled.wait(), 10.0)
            await asyncio.sleep(0.2)

    asyncio.run(program())
    assert (shutdown.signal, shutdown.exit_code) == (signal.SIGTERM, 143)
    assert told == ([] if is_told else [signal.SIGTERM])


def test_a_process_that_was_told_while_it_started_stops_at_once():
    async def program(shutdown):
        with shutdown.installed():
            await asyncio.sleep(10.0)

    shutdown = Shutdown()
    shutdown.hear(signal.SIGTERM)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(program(shutdown))


@pytest.fixture
def listens_to_signals():
    """As in a program of the command line, where Ctrl-C raises nothing."""
    token = _shutdown.set(Shutdown())
    yield
    _shutdown.reset(token)


def test_a_call_that_ends_in_time_gives_its_result_without_a_message():
    async def short(argument):
        await asyncio.sleep(0)
        return argument + 1

    said = []
    assert supervised(short, said, 20) == 2 and said == [0]
    assert supervised(lambda argument: argument + 2, said, 20, run_in_thread=True) == 3


def test_what_ignores_its_cancellation_is_abandoned():
    for function, run_in_thread in ((swallows, False), (lambda argument: threading.Event().wait(20), True)):
        said = []
        with pytest.raises(TimeoutError):
            supervised(function, said, SOON, run_in_thread=run_in_thread)
        assert "episode a/0" in said[0] and f"{__file__}:" in said[0] and said[1] == 1


@pytest.mark.parametrize("run_in_thread", [False, True])
@pytest.mark.parametrize(
    "error", [SystemExit(3), GeneratorExit(), KeyError("a"), StopIteration(), KeyboardInterrupt()], ids=repr
)
def test_whatever_is_raised_is_an_error_of_the_user_code(error, run_in_thread, listens_to_signals):
    def raises(argument):
        raise error

    with pytest.raises(UserCodeError, match=type(error).__name__):
        supervised(raises, [], run_in_thread=run_in_thread)


AGENT = """
    import asyncio, sys, time
    import jaxft

    class Config(jaxft.WorkflowConfig, name="agent"):
        how: str

    @jaxft.register_workflow(config_type=Config)
    async def agent(config, builder):
        async def work(example):
            if config.how == "late":
                time.sleep(0.3)
            if config.how == "thread":
                await asyncio.to_thread(time.sleep, 600)
            while config.how == "swallow":
                try:
                    await asyncio.sleep(600)
                except:
                    pass
        yield work
"""


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Arguments of a command that evaluates an agent on one example."""
    (tmp_path / "supervised_agent.py").write_text(textwrap.dedent(AGENT))
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}')
    dataset = {"_type": "jsonl", "file_path": "rows.jsonl"}
    run = {"imports": ["supervised_agent"], "workflow": {"_type": "agent"}, "eval": {"general": {"dataset": dataset}}}
    (tmp_path / "run.yml").write_text(dump_yaml(run))
    return ["eval", "--config-file", str(tmp_path / "run.yml"), "--set"]


def test_an_episode_that_held_the_event_loop_beyond_its_time_has_failed(arguments, tmp_path, capsys):
    options = ["--set", "eval.general.timeout_seconds=0.1", "--set", f"eval.general.output_dir={tmp_path / 'out'}"]
    assert main([*arguments, "workflow.how=late", *options]) == 3
    assert "within 0.1 s; the event loop was blocked meanwhile" in capsys.readouterr().err
    kept = (tmp_path / "out" / "run.log").read_text()
    assert "within 0.1 s; the event loop was blocked meanwhile" in kept.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["swallow", "thread"])
def test_what_cannot_be_cancelled_does_not_keep_the_process_from_ending(arguments, how):
    options = [f"workflow.how={how}", "--set", "eval.general.timeout_seconds=0.1"]
    command = [sys.executable, "-m", "jaxft.cli", *arguments, *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 3 and "within 0.1 s" in ended.stderr
    assert ("1 abandoned" in ended.stdout) == (how == "swallow")


def test_code_of_an_installed_agent_is_told_from_a_library(monkeypatch):
    frame = sys._getframe()
    monkeypatch.setattr(supervision, "_LIBRARIES", (str(Path(__file__).parent),))
    monkeypatch.setattr(REGISTRY, "packages", set)
    assert supervision.innermost_user_frame([(frame, 7)]) is None
    monkeypatch.setattr(REGISTRY, "packages", lambda: {__name__.partition(".")[0]})
    assert supervision.innermost_user_frame([(frame, 7)]).startswith(f"{__file__}:7 in ")
