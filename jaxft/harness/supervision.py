"""Supervision of user code in an evaluation: deadlines, threads for blocking code, and a watchdog of the event loop.

An episode that does not end when it is cancelled is abandoned, and the run continues without it. Code can be cancelled
only where it awaits. A thread cannot be cancelled, but its later model calls fail.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import inspect
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import jaxft
from jaxft.errors import UserCodeError, user_code
from jaxft.harness.registry import REGISTRY
from jaxft.harness.signals import current_shutdown
from jaxft.rollout.current import context_episode, find_episode
from jaxft.rollout.recorder import Episode

GRACE_SECONDS = 5.0
"""Time that cancelled code may take to clean up before it is abandoned."""
BLOCKED_SECONDS = 5.0
"""Time that code may block the event loop before a message names it."""
BEAT_SECONDS = 1.0
"""Interval at which the watchdog pings the event loop."""

_LIBRARIES = (
    *{f"{Path(sysconfig.get_path(name)).resolve()}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    f"{Path(jaxft.__file__).resolve().parent}{os.sep}",
    "<frozen ",
)


def is_async(function: Callable[..., Any]) -> bool:
    """Return True if a call of the function returns a coroutine, so that it need not run in a thread.

    >>> async def answer(): ...
    >>> is_async(answer), is_async(len)
    (True, False)
    """
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@dataclass
class _Block:
    """An interval in which code blocked the event loop: name and position of the code, and the end of the interval."""

    name: str
    where: str
    until: float = float("inf")


class Supervisor:
    """Runs the user code of one evaluation.

    Attributes:
        num_abandoned: number of calls so far that did not end when cancelled.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        *,
        grace_seconds: float = GRACE_SECONDS,
        blocked_seconds: float | None = BLOCKED_SECONDS,
    ) -> None:
        """Make a supervisor.

        Args:
            log: shows a message; called from any thread.
            grace_seconds: time that cancelled code may take to clean up before it is abandoned.
            blocked_seconds: time that code may block the event loop before a message names it; None: any time.
        """
        self.num_abandoned = 0
        self._log = log
        self._grace_seconds = grace_seconds
        self._blocked_seconds = blocked_seconds
        self._names: dict[asyncio.Task[Any], str] = {}
        self._block: _Block | None = None
        self._told: set[str] = set()
        self._lock = threading.Lock()  # guards what follows
        self._watched: asyncio.AbstractEventLoop | None = None

    async def run(
        self,
        function: Callable[[Any], Any],
        argument: Any,
        *,
        name: str,
        run_in_thread: bool,
        seconds: float | None,
        late: str,
    ) -> Any:
        """Return `function(argument)`, awaited if it is awaitable; a result after the deadline is dropped.

        Args:
            function: user code.
            argument: argument of the function.
            name: name of this call in messages.
            run_in_thread: True to run it in a new thread instead of on the event loop.
            seconds: time limit; None: no limit.
            late: first words of the message of the `TimeoutError`.

        Raises:
            UserCodeError: the function raised an exception.
            TimeoutError: the call took longer than `seconds`.
        """
        task = asyncio.create_task(self._call(function, argument, name, run_in_thread), name=name)
        started = time.monotonic()
        self._names[task] = name
        self._watch()
        try:
            await asyncio.wait({task}, timeout=seconds)
            is_done = task.done()
        finally:
            await self._end(task)
            del self._names[task]
        if not is_done:
            raise TimeoutError(f"{late} within {seconds:g} s{self._blame(started)}") from _where_it_was(task)
        if task.cancelled():
            raise RuntimeError("it cancelled the task it runs in")
        error = task.exception()
        if error is not None:  # GeneratorExit is the one that passes `user_code`
            raise error if isinstance(error, UserCodeError) else UserCodeError(error)
        given, ended = task.result()
        if seconds is not None and ended - started > seconds:  # the event loop was blocked past the deadline
            blame = self._blame(started) or "; the event loop was blocked meanwhile, by it or by another episode"
            raise TimeoutError(f"{late} within {seconds:g} s{blame}")
        return given

    async def _call(
        self, function: Callable[[Any], Any], argument: Any, name: str, run_in_thread: bool
    ) -> tuple[Any, float]:
        """Return the function's result, and the `time.monotonic` of its end."""
        try:
            with user_code(), _own_cancellation():
                given = await self._in_thread(function, argument, name) if run_in_thread else function(argument)
                given = await given if inspect.isawaitable(given) else given
        except KeyboardInterrupt as error:
            if current_shutdown() is None:
                raise
            raise UserCodeError(error) from error  # Ctrl-C raises none while a program listens to signals
        return given, time.monotonic()

    async def _in_thread(self, function: Callable[[Any], Any], argument: Any, name: str) -> Any:
        """Run a blocking function in a new thread with the caller's context variables, and return its result.

        The thread is a daemon: unlike the thread of an executor, it does not keep the process alive if it hangs.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, UserCodeError | None]] = loop.create_future()

        def answer_with(value: Any, error: UserCodeError | None) -> None:
            if not answer.done():
                answer.set_result((value, error))
            elif inspect.iscoroutine(value):
                value.close()  # or it would complain that nobody awaits it

        def work() -> None:
            value, error = None, None
            try:
                value = function(argument)
            except BaseException as raised:  # in a thread even KeyboardInterrupt comes from the function
                error = UserCodeError(raised)
            with contextlib.suppress(RuntimeError):  # the loop has been closed in the meantime
                loop.call_soon_threadsafe(answer_with, value, error)

        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name=name, daemon=True)
        thread.start()
        try:
            value, error = await asyncio.shield(answer)
        except asyncio.CancelledError:
            episode = find_episode()
            if episode is not None and episode.end():  # the thread waits for a reply, and now gets an error
                await asyncio.wait({answer}, timeout=self._grace_seconds)
            if not answer.done():
                answer.cancel()
                frame = sys._current_frames().get(thread.ident or 0)
                self._count_abandoned(
                    name, innermost_user_frame(traceback.walk_stack(frame)) if frame is not None else None
                )
            raise
        if error is not None:
            raise error
        return value

    async def _end(self, task: "asyncio.Task[Any]") -> None:
        """Cancel a task, once, and wait for its end; abandon it if that takes too long."""
        if task.done():
            return
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=self._grace_seconds)
        finally:
            if not task.done():
                self._abandon(task)

    def _abandon(self, task: "asyncio.Task[Any]") -> None:
        asyncio.tasks._unregister_task(task)  # the event loop would wait for it when it closes
        # Kept alive: destroying it would throw GeneratorExit into code that may swallow it, too, and continue.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
        # Retrieved, or asyncio would complain of its error.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._count_abandoned(self._names[task], innermost_user_frame(_task_frames(task)))

    def _count_abandoned(self, name: str, where: str | None) -> None:
        self.num_abandoned += 1
        place = "" if where is None else f", at {where}"
        self._log(
            f"{name} did not end when it was cancelled{place}: it is abandoned, and its further calls fail "
            f"({self.num_abandoned} abandoned so far)"
        )

    def _blame(self, started: float) -> str:
        """Return the end of a time-out's message, which names code that blocked the event loop meanwhile; else ''."""
        if self._block is None or self._block.until < started:
            return ""
        return f"; {self._block.name} blocked the event loop meanwhile, at {self._block.where}"

    def _watch(self) -> None:
        """Start the watchdog of this event loop unless it runs."""
        if self._blocked_seconds is None:
            return
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._watched is loop:
                return
            self._watched = loop
        arguments = (loop, threading.get_ident(), self._blocked_seconds)
        threading.Thread(target=self._watchdog, args=arguments, name="watchdog", daemon=True).start()

    def _watchdog(self, loop: asyncio.AbstractEventLoop, thread: int, blocked_seconds: float) -> None:
        """Ping the event loop while user code runs, and log the code that blocks it."""
        while True:
            beat = threading.Event()
            with self._lock:
                if self._watched is not loop:
                    return
                if not self._names or loop.is_closed():
                    self._watched = None
                    return
            with contextlib.suppress(RuntimeError):  # the loop has been closed just now
                loop.call_soon_threadsafe(beat.set)
            if not beat.wait(blocked_seconds) and not loop.is_closed():
                self._tell(loop, thread, blocked_seconds)
                while not beat.wait(BEAT_SECONDS) and not loop.is_closed():
                    pass
                if self._block is not None:
                    self._block.until = time.monotonic()
            time.sleep(min(BEAT_SECONDS, blocked_seconds))

    def _tell(self, loop: asyncio.AbstractEventLoop, thread: int, blocked_seconds: float) -> None:
        """Record the code that blocks the event loop, and log it once per name."""
        task, frame = asyncio.current_task(loop), sys._current_frames().get(thread)
        if task is None or frame is None:
            return
        name, where = self._task_name(task), innermost_user_frame(traceback.walk_stack(frame))
        if where is None and task not in self._names:  # jaxft itself, such as tokenising
            return
        where = where or "a place in a library"
        self._block = _Block(name, where)
        if name in self._told:
            return
        self._told.add(name)
        self._log(
            f"{name} has blocked the event loop for {blocked_seconds:g} s, at {where}; all other episodes and "
            "all deadlines wait for it: await there, or let it run in a thread, as a workflow that is a plain function "
            "(def) and asks with llm.chat_sync does, and a plain evaluator that has timeout_seconds"
        )

    def _task_name(self, task: "asyncio.Task[Any]") -> str:
        if task in self._names:
            return self._names[task]
        if sys.version_info >= (3, 12):  # the context of a task tells its episode
            episode = context_episode(task.get_context())
            if episode is not None:
                return named(episode)
        return f"task '{task.get_name()}'"


def named(episode: Episode) -> str:
    """Return the name of an episode for messages."""
    return f"episode {episode.id}"


def is_library(file: str) -> bool:
    """Return True if a source file is of Python, of an installed package or of jaxft, and not the user's own."""
    return file.startswith(_LIBRARIES)


def innermost_user_frame(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """Return file, line and function of the innermost user code in `frames`, which begin with the innermost.

    The result is None if the event loop's own frame comes first.
    """
    for frame, line in frames:
        code = frame.f_code
        if code.co_qualname == "Handle._run":
            return None
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        is_users = package in REGISTRY.packages() - {"jaxft"}  # installed, as those with an entry point are
        if is_users or not is_library(code.co_filename):
            return f"{code.co_filename}:{line} in {code.co_name}"
    return None


def _task_frames(task: "asyncio.Task[Any]") -> list[tuple[FrameType, int]]:
    """Return the frames of a waiting task, the innermost first."""
    frames: list[tuple[FrameType, int]] = []
    waiting: Any = task.get_coro()
    while inspect.iscoroutine(waiting):
        if waiting.cr_frame is not None:
            frames.insert(0, (waiting.cr_frame, waiting.cr_frame.f_lineno))
        waiting = waiting.cr_await
    return frames


@contextlib.contextmanager
def _own_cancellation() -> Iterator[None]:
    """Raise RuntimeError for a cancellation that nobody requested of this task: a bug in the user's code."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("it let the cancellation of a task of its own escape") from error


def _where_it_was(task: "asyncio.Task[Any]") -> BaseException | None:
    """Return the error of a cancelled task; its traceback shows where the task was waiting."""
    try:
        if task.done():
            task.result()
    except UserCodeError as failure:
        return failure.error
    except BaseException as error:
        return error
    return None
