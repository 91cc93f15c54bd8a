"""Loggers of a run: what they are told, and the threads that tell them without ever holding up or ending the run.

A logger subclasses `RunLogger` and overrides the methods that it wants. `Loggers` queues the calls of all of them. Each
logger has a thread of its own, which makes its calls one after the other. A call that raises is counted and shown. The
end of a run waits for one that hangs within its time limit only.
"""

import asyncio
import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxft.errors import UserCodeError, user_code
from jaxft.redaction import map_texts, redacted
from jaxft.runs.console import Console
from jaxft.runs.files import PLOT_FILE

CALL_SECONDS = 120.0
"""Time that the end of a run waits for the calls that are left."""

ARTIFACTS: dict[Literal["reward_plot", "report"], str] = {"reward_plot": PLOT_FILE, "report": "report.html"}
"""Files of the run directory that are logged at the end of a run, if they are there."""

Status = Literal["completed", "failed", "stopped"]
"""Ending of a run; a stopped run was ended by a signal and can be resumed."""


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger is told of when it begins.

    Attributes:
        name: the name of the run directory.
        directory: the run directory. Files of a logger belong into its folder `loggers`, which is removed with the run.
        config: the whole configuration as plain values, with the secrets masked.
        environment: the content of `environment.json`: versions, devices, commit.
        is_resumed: True if an earlier process has begun the run.
        first_epoch: the epoch that the run goes on from. What was logged of later epochs is logged again, as they are
            run again.
    """

    name: str
    directory: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    is_resumed: bool = False
    first_epoch: int = 0


class LoggedEpisode(NamedTuple):
    """An episode for a table of samples.

    Attributes:
        epoch: the epoch that it was sampled in.
        example: the id of its example.
        reward: its reward; None without a usable one.
        text: its messages, each with its role.
    """

    epoch: int
    example: str
    reward: float | None
    text: str


class RunLogger:
    """Base class of loggers. Each method does nothing unless it is overridden.

    `begin` comes first and `end` last, all calls from one thread. The texts that a logger gets have no secrets in them.
    """

    def begin(self, run: LoggedRun) -> None:
        """Begin to log a run, or go on with one."""

    def metrics(self, epoch: int, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """Log metrics and measured times, which are numbers or texts.

        An epoch, counted from 0, is told once when it has ended. A validation before it, after `epoch` epochs of
        training, is told by a call of its own, under names that begin with `validation/`.
        """

    def samples(self, episodes: Sequence[LoggedEpisode]) -> None:
        """Log episodes of one epoch: those that `trajectories/samples.jsonl` gets."""

    def artifact(self, name: Literal["model", "reward_plot", "report"], path: Path) -> None:
        """Log a file or folder that the run has written, near its end."""

    def end(self, status: Status, result: Mapping[str, Any]) -> None:
        """End the log; `result` is the content of `result.json`, with the `error` of a run that did not complete."""


class Loggers:
    """The loggers of a run. No method waits for them but `end`, and none raises what they raise.

    Attributes:
        run: what `begin` tells the loggers; its `first_epoch` comes with the call.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.run: LoggedRun | None = None
        self._console = console
        self._threads: list[_LoggerThread] = []
        self._has_begun = False

    def add(self, name: str, logger: RunLogger) -> None:
        """Add a logger, before `begin`; `name` is its name in messages."""
        assert self._console is not None
        self._threads.append(_LoggerThread(name, logger, self._console))

    @property
    def failures(self) -> int:
        """Number of calls up to now that failed."""
        return sum(thread.failed for thread in self._threads)

    def begin(self, first_epoch: int) -> None:
        """Begin; a second call does nothing, and without a call nothing is logged."""
        if self._has_begun or self.run is None:
            return
        self._has_begun, run = True, replace(self.run, first_epoch=first_epoch)
        self._call("begin", lambda logger: logger.begin(run))

    def metrics(self, epoch: int, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """Log the metrics of an epoch or of a validation."""
        now, times = map_texts(dict(metrics), _clean), map_texts(dict(timings), _clean)
        self._call(f"metrics of epoch {epoch}", lambda logger: logger.metrics(epoch, now, times))

    def samples(self, episodes: Sequence[LoggedEpisode]) -> None:
        """Log episodes of one epoch, if there are any."""
        if episodes:
            clean = [each._replace(example=_clean(each.example), text=_clean(each.text)) for each in episodes]
            self._call(f"samples of epoch {episodes[0].epoch}", lambda logger: logger.samples(clean))

    def artifact(self, name: Literal["model", "reward_plot", "report"], path: Path) -> None:
        """Log a file or folder."""
        self._call(f"artifact {name}", lambda logger: logger.artifact(name, path))

    def end(self, status: Status, result: Mapping[str, Any], *, within_seconds: float | None = None) -> None:
        """Log plot and report, end all loggers, wait for them, and show how many calls failed.

        Args:
            status: how the run ended.
            result: the content of `result.json`.
            within_seconds: the longest time to wait for all loggers, if that is less than `CALL_SECONDS`.
        """
        if not self._has_begun or self.run is None:
            return
        for name, file in ARTIFACTS.items():
            if (self.run.directory / file).is_file():
                self.artifact(name, self.run.directory / file)
        plain = map_texts(dict(result), _clean)
        self._call("end", lambda logger: logger.end(status, plain))
        seconds = min(CALL_SECONDS, within_seconds or CALL_SECONDS)
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.finish(until, seconds)

    def _call(self, what: str, call: Callable[[RunLogger], None]) -> None:
        for thread in self._threads if self._has_begun else ():
            thread.call(what, call)


class _LoggerThread:
    """A logger with its thread, its waiting calls, and its failures.

    Attributes:
        failed: number of calls that raised or did not return in time.
    """

    def __init__(self, name: str, logger: RunLogger, console: Console) -> None:
        self._name, self.failed = name, 0
        self._logger, self._console = logger, console
        self._waiting: queue.SimpleQueue[tuple[str, Callable[[RunLogger], None]]] = queue.SimpleQueue()
        self._running = "nothing"
        # In a copy of this context, which has the secrets. A daemon: a call that hangs keeps no process.
        work = functools.partial(copy_context().run, self._work)
        self._thread = threading.Thread(target=work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def call(self, what: str, call: Callable[[RunLogger], None]) -> None:
        """Queue a call, unless the thread has ended."""
        if self._thread.is_alive():
            self._waiting.put((what, call))

    def finish(self, until: float, seconds: float) -> None:
        """Wait for all calls until a time, so many seconds after the end of the run, and end the thread."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self.failed += 1
            self._say(f"{seconds:g} seconds after the end of the run, it is still at {self._running}")
            self._running = "end"
        if self.failed:
            self._say(f"failed calls, in all: {self.failed}")

    def _work(self) -> None:
        """Make the calls one after the other; without a `begin` that succeeds no others."""
        while self._running != "end":
            self._running, call = self._waiting.get()
            try:
                with user_code():
                    call(self._logger)
            # All but the first: the logger's own, in this thread.
            except (UserCodeError, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit) as error:
                failure = error if isinstance(error, UserCodeError) else UserCodeError(error)
                self._console.note(f"logger {self._name}: {failure.traceback}")
                self.failed += 1
                if self.failed == 1:
                    self._say(
                        f"{self._running} failed: {failure.summary}; the run goes on, and its log has each failure"
                    )
                if self._running == "begin":
                    self._waiting = queue.SimpleQueue()  # what waits holds episodes
                    return

    def _say(self, text: str) -> None:
        self._console.message(f"logger {self._name}: {text}")


def _clean(text: str) -> str:
    """Return a text without secrets and lone surrogates, which have no UTF-8 encoding."""
    return redacted(text).encode("utf-8", "backslashreplace").decode()
