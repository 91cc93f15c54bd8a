"""The zygote and the workers from the side of the run: processes that are started, asked, watched and ended."""

import asyncio
import codecs
import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxft.errors import ComponentError, UserCodeError, WorkerError
from jaxft.harness.config import Config
from jaxft.harness.isolation import messages, zygote
from jaxft.harness.isolation.answering import Answering, RunSide
from jaxft.harness.supervision import is_library
from jaxft.rollout.recorder import Candidates, Episode, add_outside_calls

CLOSE_SECONDS = 5.0
"""Time that a worker has to close its components when it is retired."""

TRACE_SECONDS = 0.5
"""Time that a worker has to say where it is before it is killed."""


class ZygoteProcess:
    """The process that forks the workers, from the side of the run.

    Attributes:
        has_ended: True once it can fork no more workers.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
        self._process, self._control = process, control
        self._control.setblocking(False)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forking: deque[asyncio.Future[int]] = deque()  # in the order in which it answers
        self._codes: dict[int, asyncio.Future[int | None]] = {}
        self.has_ended = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, config: Config) -> "ZygoteProcess":
        """Start a zygote.

        Raises:
            ComponentError: the user's modules cannot be imported in it, or the configuration cannot be handed over.
        """
        try:
            preparation = zygote.prepare(config)
        except Exception as error:
            raise ComponentError(
                f"eval.general.isolation: the configuration cannot be handed to another process ({error}): define its "
                "classes at the top level of modules that can be imported, or set isolation to none"
            ) from error
        made = cls(*zygote.start(preparation))
        try:
            await made._ready
        except BaseException:
            await made.close()
            raise
        return made

    async def fork(self, files: Sequence[int], memory_bytes: int | None) -> int:
        """Start a worker and return its process id.

        Raises:
            WorkerError: there are too many processes, or the zygote has ended.
        """
        while True:
            try:
                zygote.fork(self._control, files, memory_bytes)
                break
            except BlockingIOError:  # its queue is full
                await asyncio.sleep(0.01)
            except OSError as error:
                raise WorkerError(f"no worker can be started: {error}") from error
        # If the caller is cancelled, it closes the files, and a worker without them ends.
        pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forking.append(pid)
        return await pid

    def preload(self, modules: tuple[str, ...]) -> None:
        """Let the zygote import what a worker has imported, so that later ones need not."""
        with contextlib.suppress(OSError):  # its queue is full, and the workers import for themselves
            zygote.preload(self._control, modules)

    async def code_of(self, pid: int) -> int | None:
        """Wait for the end of a worker and return its exit code; None if nobody knows it."""
        code = await self._codes[pid]
        del self._codes[pid]
        return code

    async def close(self) -> None:
        """End the zygote, and with it all workers."""
        with contextlib.suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_WR)
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # a module that it imports hangs
            zygote.kill_worker(self._process.pid)
            await asyncio.to_thread(self._process.wait)
        await self._listening
        self._control.close()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while report := await loop.sock_recv(self._control, zygote.MAX_MESSAGE_BYTES):
                self._take(json.loads(report))
        self.has_ended = True
        ended = WorkerError("no worker can be started: the process that forks them has ended")
        unanswered: list[asyncio.Future[Any]] = [self._ready, *self._forking]
        for waiting in unanswered:
            if not waiting.done():
                waiting.set_exception(ended)
        for pid, code in self._codes.items():
            if not code.done():
                zygote.kill_worker(pid)  # unless the zygote has done that at its own end
                code.set_result(None)

    def _take(self, report: dict[str, Any]) -> None:
        if "forked" in report or "refused" in report:
            pid = self._forking.popleft()
            if pid.done():  # nobody waits for it any more
                return
            if "refused" in report:
                pid.set_exception(WorkerError(f"no worker can be started: {report['refused']}"))
                return
            self._codes[report["forked"]] = asyncio.get_running_loop().create_future()
            pid.set_result(report["forked"])
        elif "ended" in report:
            if report["ended"] in self._codes:
                self._codes[report["ended"]].set_result(report["code"])
        elif self._ready.done():
            return
        elif "failed" in report:
            self._ready.set_exception(
                ComponentError(f"eval.general.isolation: a worker cannot import {report['failed']}")
            )
        else:
            self._ready.set_result(None)


class WorkerProcess:
    """A worker, from the side of the run.

    Attributes:
        num_done: calls of components that it has done.
        made: names of the components that it has made, None for the workflow.
        is_usable: False while it works, and for good after an error that it cannot recover from.
        place: the user's code that it was in when it was asked last, or crashed; empty if it has not said.
    """

    def __init__(
        self,
        zygote: ZygoteProcess,
        pid: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output: int,
        trace: int,
        memory_bytes: int | None,
        max_output_bytes: int,
        run: RunSide,
    ) -> None:
        self._zygote, self._pid = zygote, pid
        self._reader, self._writer = reader, writer
        self._output, self._trace = output, trace
        self._memory_bytes, self._max_output_bytes = memory_bytes, max_output_bytes
        self._run = run
        self._known_texts: dict[str, set[int]] = {}
        self._output_bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_flooded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._code: int | None = None
        self.place = ""
        self._ending = asyncio.create_task(self._wait_for_end())
        self.num_done = 0
        self.made: set[str | None] = set()
        self.is_usable = True
        os.set_blocking(output, False)
        os.set_blocking(trace, False)
        asyncio.get_running_loop().add_reader(output, self._pass_on_output)

    @classmethod
    async def start(
        cls, zygote: ZygoteProcess, memory_bytes: int | None, max_output_bytes: int, run: RunSide
    ) -> "WorkerProcess":
        """Start a worker."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:

            def pipe() -> tuple[int, int]:
                ends = os.pipe()
                for stack, end in zip((ours, theirs), ends, strict=True):
                    stack.callback(os.close, end)
                return ends

            connection, connection_of_worker = socket.socketpair()
            ours.enter_context(connection)
            theirs.enter_context(connection_of_worker)
            (output, output_writer), (trace, trace_writer) = pipe(), pipe()
            pid = await zygote.fork((connection_of_worker.fileno(), output_writer, trace_writer), memory_bytes)
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            ours.pop_all()
        return cls(zygote, pid, reader, writer, output, trace, memory_bytes, max_output_bytes, run)

    async def make(self, name: str | None) -> tuple[str, ...]:
        """Let the worker make a component; return the modules that it has imported for it.

        Raises:
            UserCodeError: the factory raised an error.
            WorkerError: the worker ended.
        """
        made = await self.do(messages.pack(messages.Make(name)), None, None, "")
        if isinstance(made, UserCodeError):
            raise made
        self.made.add(name)
        return made

    async def do(self, work: bytes, episode: Episode | None, seconds: float | None, late: str) -> Any:
        """Let the worker do a work, a packed message; return its result, or a `UserCodeError`.

        Raises:
            TimeoutError: it took longer than `seconds`.
            WorkerError: the worker ended, closed its connection or broke a limit.
        """
        self.is_usable, self._output_bytes = False, 0
        answering = Answering(self._run, self.send, self._known_texts, episode)
        working = asyncio.create_task(self._work(work, episode, answering))
        watched: list[asyncio.Future[Any]] = [working, self._ending, self._has_flooded]
        try:
            await asyncio.wait(watched, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and not isinstance(working.exception(), asyncio.IncompleteReadError | OSError):
                result, self.is_usable = working.result()
                return result
            if self._has_flooded.done():
                raise WorkerError(f"it wrote more than {self._max_output_bytes / 2**20:.0f} MiB to its standard output")
            if not working.done() and not self._ending.done():
                await self._ask_for_place()
                raise TimeoutError(f"{late} within {seconds:g} s{self._at_place()}")
            await asyncio.wait({self._ending}, timeout=1.0)
            if self._code == zygote.OUT_OF_MEMORY and self._memory_bytes is not None:
                raise messages.out_of_memory(self._memory_bytes)
            raise WorkerError(self._why_it_ended())
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await answering.close()

    async def _work(self, work: bytes, episode: Episode | None, answering: Answering) -> tuple[Any, bool]:
        self._writer.write(work)
        await self._writer.drain()
        while True:
            message = await messages.read(self._reader)
            if isinstance(message, messages.Made):
                return message.modules, True
            if isinstance(message, messages.Done):
                _take_over(message.remains, episode)
                return _unpickled_result(message.result), True
            if isinstance(message, messages.Failed):
                if message.remains is not None:
                    _take_over(message.remains, episode)
                error = messages.unpack_error(message.error, message.summary)
                failure = UserCodeError.of_another_process(error, message.summary, message.traceback, message.tail)
                return failure, not message.is_fatal
            answering.take(message)

    def send(self, message: Any) -> None:
        """Send a message to the worker."""
        if not self._writer.is_closing():
            self._writer.write(messages.pack(message))

    def kill(self) -> None:
        """End the worker at once, with all processes that it started."""
        if not self._ending.done():
            zygote.kill_worker(self._pid)

    @property
    def is_fit(self) -> bool:
        """True if it can be given work."""
        return not self._ending.done() and not self._has_flooded.done()

    async def has_ended(self) -> None:
        """Wait for the end of the process."""
        await asyncio.shield(self._ending)

    def on_end(self, call: Callable[["WorkerProcess"], object]) -> None:
        """Call a function with this worker when it has ended."""
        self._ending.add_done_callback(lambda _: call(self))

    async def close(self) -> None:
        """Let the worker close its components, and end it."""
        try:
            if self.is_fit:
                close = messages.pack(messages.Close())
                failure = await self.do(close, None, CLOSE_SECONDS, "it did not close its components")
                if isinstance(failure, UserCodeError):
                    self._run.log(f"a worker at its end: {failure.tail}")
        except (TimeoutError, WorkerError) as error:
            self._run.log(f"a worker at its end: {error}")
        finally:
            self.kill()
            await self.has_ended()

    async def _wait_for_end(self) -> None:
        self._code = await self._zygote.code_of(self._pid)
        self._pass_on_output()
        self._read_place()
        asyncio.get_running_loop().remove_reader(self._output)
        os.close(self._output)
        os.close(self._trace)
        self._writer.close()

    def _pass_on_output(self) -> None:
        """Write what the worker wrote to the run's own standard output, and count it."""
        while True:
            try:
                content = os.read(self._output, 2**16)
            except BlockingIOError:
                return
            if not content:
                asyncio.get_running_loop().remove_reader(self._output)
                return
            self._output_bytes += len(content)
            if self._output_bytes > self._max_output_bytes:
                asyncio.get_running_loop().remove_reader(self._output)
                if not self._has_flooded.done():
                    self._has_flooded.set_result(None)
                return
            # What is written to the console meanwhile must not stand within a character.
            text, encoding = self._decoder.decode(content), sys.stdout.encoding or "utf-8"
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
                sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
                sys.stdout.flush()

    async def _ask_for_place(self) -> None:
        """Let the worker say where it is, if it can."""
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGUSR1)
        deadline = time.monotonic() + TRACE_SECONDS
        while time.monotonic() < deadline and not self.place and not self._ending.done():
            await asyncio.sleep(0.01)
            self._read_place()

    def _read_place(self) -> None:
        try:
            trace = os.read(self._trace, 2**16).decode(errors="replace")
        except BlockingIOError:  # it has said nothing
            return
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', trace)
        users = [frame for frame in frames if not is_library(frame[0]) and not frame[0].startswith("<")]
        if users:
            self.place = "{}:{} in {}".format(*users[0])

    def _at_place(self) -> str:
        """Return the end of a message, which says where the worker is or was."""
        return f", at {self.place}" if self.place else ""

    def _why_it_ended(self) -> str:
        if not self._ending.done():
            return "it closed its connection to the run, as by closing all file descriptors"
        code = self._code
        if code is None:
            return "its process has ended"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}{self._at_place()}"
            return f"its process was ended by signal {-code}"
        if code == zygote.BROKEN:
            return "its process broke down, as when an agent closes files that it has not opened"
        return f"it ended its process, with exit code {code}"


def _unpickled_result(content: bytes) -> Any:
    try:
        return pickle.loads(content)
    except Exception as error:  # of a user's class
        raise TypeError(
            f"the result cannot be read outside of the process that made it ({type(error).__name__}: {error}): return "
            "plain values, or set isolation to none"
        ) from None


def _take_over(remains: messages.Remains, episode: Episode | None) -> None:
    """Add to the run's record of an episode what the worker's has beside the calls."""
    add_outside_calls(remains.outside_calls)
    if episode is None:
        return
    calls = {call.index: call for call in episode.calls}
    episode.step_rewards.update(remains.step_rewards)
    for indices, scores in remains.candidates:
        episode.candidates.append(Candidates(tuple(calls[index] for index in indices), scores))
    for call in remains.remote_calls:
        episode.record_remote(call)
