"""Loggers that are in order, fail, hang or are slow, called as a run calls them."""

import asyncio
import io
import threading
from pathlib import Path

import pytest

from jaxft.redaction import hiding
from jaxft.runs.console import Console
from jaxft.runs.loggers import LoggedEpisode, LoggedRun, Loggers, RunLogger


class Noting(RunLogger):
    """Notes its calls, and does at each what the test wants."""

    def __init__(self, **does):
        self.calls, self.does, self.threads = [], does, set()

    def _note(self, name, *values):
        self.calls.append((name, *values))
        self.threads.add(threading.current_thread())
        self.does.get(name, lambda: None)()

    def begin(self, run):
        self._note("begin", run.name, run.first_epoch)

    def metrics(self, epoch, metrics, timings):
        self._note("metrics", epoch, metrics, timings)

    def samples(self, episodes):
        self._note("samples", *episodes)

    def artifact(self, name, path):
        self._note("artifact", name, path)

    def end(self, status, result):
        self._note("end", status, result)


def begun(*loggers, directory=Path("nowhere")):
    """Loggers that have begun, and what the console shows."""
    shown = io.StringIO()
    made = Loggers(Console(shown))
    for number, logger in enumerate(loggers):
        made.add(f"number {number}", logger)
    made.run = LoggedRun("run", directory)
    made.begin(2)
    return made, shown


def raising(error):
    def fail():
        raise error

    return fail


def test_every_logger_gets_every_call_in_order_in_a_thread_of_its_own(tmp_path):
    first, second = Noting(), Noting()
    (tmp_path / "reward_plot.png").write_bytes(b"")
    loggers, shown = begun(first, second, directory=tmp_path)
    loggers.begin(7)  # a second time: nothing
    loggers.samples([])
    loggers.samples([LoggedEpisode(2, "a", 1.0, "said")])
    metrics = {}
    for epoch in range(2, 50):
        metrics["loss"] = epoch  # what is told stays as it was
        loggers.metrics(epoch, metrics, {"seconds": 0.5})
    loggers.artifact("model", tmp_path)
    loggers.end("completed", {"num_epochs": 50})
    expected = [
        ("begin", "run", 2),
        ("samples", LoggedEpisode(2, "a", 1.0, "said")),
        *[("metrics", epoch, {"loss": epoch}, {"seconds": 0.5}) for epoch in range(2, 50)],
        ("artifact", "model", tmp_path),
        ("artifact", "reward_plot", tmp_path / "reward_plot.png"),
        ("end", "completed", {"num_epochs": 50}),
    ]
    assert first.calls == second.calls == expected
    assert len(first.threads) == len(second.threads) == 1 and not first.threads & second.threads
    assert threading.current_thread() not in first.threads
    assert loggers.failures == 0 and shown.getvalue() == ""


def test_nothing_is_logged_before_a_run_begins(tmp_path):
    logger, made = Noting(), Loggers(Console(io.StringIO()))
    made.add("one", logger)
    made.begin(0)  # of no run
    made.metrics(0, {}, {})
    made.run = LoggedRun("run", tmp_path)
    made.end("failed", {})
    made.begin(2)
    made.end("completed", {})
    assert [name for name, *_ in logger.calls] == ["begin", "end"]


@pytest.mark.parametrize(
    "error", [OSError("no route"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), MemoryError()]
)
def test_a_logger_that_cannot_begin_gets_no_more_calls_and_the_others_go_on(error):
    bad, good = Noting(begin=raising(error)), Noting()
    loggers, shown = begun(bad, good)
    for epoch in (2, 3, 4):
        loggers.metrics(epoch, {}, {})
    loggers.end("completed", {})
    assert [call[0] for call in bad.calls] == ["begin"] and len(good.calls) == 5
    assert loggers._threads[0]._waiting.empty()  # which would hold all episodes of the run
    assert loggers.failures == 1
    lines = shown.getvalue().splitlines()
    assert len(lines) == 2 and type(error).__name__ in lines[0]
    assert all("number 0" in line for line in lines) and lines[1].endswith(" 1")


def test_a_logger_that_fails_now_and_then_goes_on():
    logger = Noting(samples=raising(ValueError("too long")))
    loggers, shown = begun(logger)
    for epoch in range(10):
        loggers.samples([LoggedEpisode(epoch, "a", None, "")])
        loggers.metrics(epoch, {}, {})
    loggers.end("completed", {})
    assert len(logger.calls) == 22 and loggers.failures == 10
    assert len(shown.getvalue().splitlines()) == 2


def test_the_end_waits_for_a_slow_logger_as_long_as_its_limit():
    slow = Noting(metrics=lambda: threading.Event().wait(0.005))
    loggers, shown = begun(slow)
    for epoch in range(20):
        loggers.metrics(epoch, {}, {})
    loggers.end("completed", {})
    assert len(slow.calls) == 22 and shown.getvalue() == ""


def test_calls_that_are_left_when_the_limit_is_over_are_not_made():
    hang = threading.Event()
    bad, good = Noting(metrics=lambda: hang.wait(60)), Noting()
    loggers, shown = begun(bad, good)
    for epoch in range(5):
        loggers.metrics(epoch, {}, {})
    loggers.end("stopped", {}, within_seconds=0.1)
    assert "0.1 seconds after the end of the run, it is still at metrics of epoch 0" in shown.getvalue()
    assert shown.getvalue().endswith(": 1\n") and loggers.failures == 1
    hang.set()
    for thread in bad.threads:
        thread.join(30)
        assert not thread.is_alive()
    assert [call[0] for call in bad.calls] == ["begin", "metrics"] and len(good.calls) == 7


def test_secrets_and_halves_of_characters_reach_no_logger_and_no_message():
    secret = "sk-0123456789"

    def fail():
        raise ValueError(f"key {secret} is refused")

    logger = Noting(artifact=fail)
    with hiding([secret]):
        loggers, shown = begun(logger)
        loggers.samples([LoggedEpisode(2, f"of {secret}", 1.0, f"user: {secret} \ud800")])
        loggers.metrics(2, {"stop": secret}, {"place": secret})
        loggers.artifact("model", Path("model"))
        loggers.end("failed", {"error": secret, "inner": [secret]})
    assert "key *** is refused" in shown.getvalue() and secret not in shown.getvalue() + str(logger.calls)
    assert logger.calls[1][1].text == "user: *** \\ud800"


def test_a_base_logger_wants_nothing():
    loggers, shown = begun(RunLogger())
    loggers.metrics(0, {}, {})
    loggers.samples([LoggedEpisode(0, "a", 1.0, "")])
    loggers.artifact("model", Path("model"))
    loggers.end("completed", {})
    assert (loggers.failures, shown.getvalue()) == (0, "")
