"""Supervision of user code in an evaluation: deadlines, threads for blocking code, and a watch over the event loop.

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
from pathlib import Path
from types import FrameType
from typing import Any

import jaxft
from jaxft.errors import UserCodeError, user_code
from jaxft.harness.registry import REGISTRY
from jaxft.harness.signals import current_shutdown
from jaxft.rollout.current import find_episode
from jaxft.rollout.recorder import Episode

GRACE_SECONDS = 5.0
"""Time that cancelled code may take to clean up before it is abandoned."""
BLOCKED_SECONDS = 5.0
"""Time that code may block the event loop before a message names it."""
BEAT_SECONDS = 1.0
"""Interval at which the event loop is asked whether it goes on."""

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
        self._is_watched = False

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
        if self._blocked_seconds is not None and not self._is_watched:
            self._is_watched = True
            watched = asyncio.get_running_loop(), threading.get_ident(), self._blocked_seconds
            threading.Thread(target=self._watch, args=watched, name="watchdog", daemon=True).start()
        try:
            await asyncio.wait({task}, timeout=seconds)
            is_done = task.done()
        finally:
            await self._end(task)
            del self._names[task]
        if not is_done:
            raise TimeoutError(f"{late} within {seconds:g} s") from _where_it_was(task)
        if task.cancelled():
            raise RuntimeError("it cancelled the task it runs in")
        error = task.exception()
        if error is not None:  # GeneratorExit is the one that passes `user_code`
            raise error if isinstance(error, UserCodeError) else UserCodeError(error)
        given, ended = task.result()
        if seconds is not None and ended - started > seconds:  # the event loop was blocked past the deadline
            blame = "the event loop was blocked meanwhile, by it or by another episode"
            raise TimeoutError(f"{late} within {seconds:g} s; {blame}")
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

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int, seconds: float) -> None:
        """Name the code that holds the event loop for so long, while user code runs."""
        while self._names and not loop.is_closed():
            beat = threading.Event()
            with contextlib.suppress(RuntimeError):  # the loop has been closed just now
                loop.call_soon_threadsafe(beat.set)
            if not beat.wait(seconds) and not loop.is_closed():
                task, frame = asyncio.current_task(loop), sys._current_frames().get(thread)
                where = None if frame is None else innermost_user_frame(traceback.walk_stack(frame))
                if task is not None and where is not None:  # not jaxft itself, such as tokenising
                    self._log(
                        f"{task.get_name()} has held the event loop for {seconds:g} s, at {where}; all other episodes "
                        "and all deadlines wait for it: await there, or let it run in a thread, as a workflow that is "
                        "a plain function (def) and asks with llm.chat_sync does"
                    )
                while not beat.wait(BEAT_SECONDS) and not loop.is_closed():
                    pass
            time.sleep(min(BEAT_SECONDS, seconds))
        self._is_watched = False


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
