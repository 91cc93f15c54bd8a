"""The workers of a run: processes that run agents and evaluators, one at a time each, and that may be killed.

A worker that takes too long, breaks a limit or ends is replaced. What it did costs its episode and nothing else: the
calls of an episode are recorded here, and its random numbers depend on nothing but the episode.
"""

import asyncio
import codecs
import contextlib
import contextvars
import json
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from jaxft.errors import ComponentError, PolicyError, UserCodeError, WorkerError, one_line
from jaxft.harness.config import Config
from jaxft.harness.isolation import messages, zygote
from jaxft.harness.isolation.messages import Identity, Work
from jaxft.harness.supervision import is_library
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.recorder import Candidates, Episode, add_outside_calls, find_episode, named_functions, recording

CLOSE_SECONDS = 5.0
"""Time that a worker has to close its components when it is retired."""

TRACE_SECONDS = 0.5
"""Time that a worker has to say where it is before it is killed."""

Find = Callable[[str], Coroutine[Any, Any, Any]]
"""Returns the component of a name."""


class WorkerPool:
    """Workers of one configuration, started as they are needed.

    Attributes:
        num_started: workers started so far.
    """

    def __init__(
        self,
        config: Config,
        max_workers: int,
        *,
        get_llm: Find,
        get_server_url: Callable[[], Coroutine[Any, Any, str]],
        log: Callable[[str], None],
    ) -> None:
        """Make a pool; nothing is started yet.

        Args:
            config: the configuration, whose workflow and evaluators the workers make.
            max_workers: maximum number of workers.
            get_llm: returns a language model of the run.
            get_server_url: returns the address of the run's server, and starts it if it does not run.
            log: shows a message.
        """
        self._config, self._limits = config, config.eval.general.workers
        self._get_llm, self._get_server_url, self._log = get_llm, get_server_url, log
        self._free = asyncio.Semaphore(max_workers)
        self._idle: list[_Process] = []
        self._running: set[_Process] = set()
        self._zygote: _Zygote | None = None
        self._starting = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()
        self.num_started = 0

    async def check(self, name: str | None) -> None:
        """Make a component in a worker.

        Args:
            name: name of an evaluator; None for the workflow.

        Raises:
            UserCodeError: its factory raised an error.
        """
        async with self._free, self._taken(name):
            pass

    def function(self, name: str | None, seconds: float | None, late: str) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        """Return a component as a function that calls it in a worker, in the current episode if there is one.

        Args:
            name: name of an evaluator; None for the workflow.
            seconds: time limit of a call; None: no limit.
            late: first words of the message of the `TimeoutError`.
        """

        async def call(argument: Any) -> Any:
            episode = find_episode()
            task = asyncio.current_task()
            label = "" if task is None else task.get_name()
            identity = None if episode is None else _identity(episode)
            try:
                work = messages.pack(Work(name, argument, identity, label))
            except Exception as error:  # of a user's class
                raise TypeError(
                    f"what it is given cannot be handed to another process ({error}): use plain values, or set "
                    f"{'isolation' if name is None else 'judge_isolation'} to none"
                ) from None
            async with self._free, self._taken(name) as process:
                result = await process.do(work, episode, seconds, late)
                process.num_done += 1
            if isinstance(result, UserCodeError):
                raise result
            return result

        return call

    async def close(self) -> None:
        """End all workers."""
        for process in self._idle:
            self._retire(process)
        self._idle = []
        await asyncio.gather(*self._retiring)
        if self._zygote is not None:
            await self._zygote.close()
        # Those of a call that was cancelled twice.
        await asyncio.gather(*(process.has_ended() for process in self._running))

    @contextlib.asynccontextmanager
    async def _taken(self, name: str | None) -> AsyncIterator["_Process"]:
        """Yield a worker that has made a component; afterwards it is idle, or is replaced if it cannot go on."""
        process = None
        while self._idle and process is None:
            process = self._idle.pop()
            if not process.is_fit:  # a thread that an agent left behind has ended it, or flooded its output
                self._retire(process)
                process = None
        process = await self._start() if process is None else process
        try:
            if name not in process.made:
                modules = await process.make(name)
                if modules and self._zygote is not None:
                    self._zygote.preload(modules)
            yield process
        finally:
            if not process.is_usable:
                process.kill()
                await process.has_ended()
            elif process.num_done < (self._limits.max_episodes or sys.maxsize):
                self._idle.append(process)
            else:
                self._retire(process)

    async def _start(self) -> "_Process":
        async with self._starting:
            if self._zygote is not None and self._zygote.has_ended:
                await self._zygote.close()
                self._zygote = None
            if self._zygote is None:
                self._zygote = await _Zygote.start(self._config)
            self.num_started += 1
            memory = self._limits.memory_mb
            process = await _Process.start(
                self._zygote,
                None if memory is None else memory * 2**20,
                self._limits.max_output_mb * 2**20,
                get_llm=self._get_llm,
                get_server_url=self._get_server_url,
                log=self._log,
            )
        self._running.add(process)
        process.on_end(self._running.discard)
        return process

    def _retire(self, process: "_Process") -> None:
        task = asyncio.create_task(process.close())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


class _Zygote:
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
    async def start(cls, config: Config) -> "_Zygote":
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


class _Process:
    """A worker, from the side of the run.

    Attributes:
        num_done: calls of components that it has done.
        made: names of the components that it has made, None for the workflow.
        is_usable: False while it works, and for good after an error that it cannot recover from.
        place: the user's code that it was in when it was asked last, or crashed; empty if it has not said.
    """

    def __init__(
        self,
        zygote: _Zygote,
        pid: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output: int,
        trace: int,
        memory_bytes: int | None,
        max_output_bytes: int,
        *,
        get_llm: Find,
        get_server_url: Callable[[], Coroutine[Any, Any, str]],
        log: Callable[[str], None],
    ) -> None:
        self._zygote, self._pid = zygote, pid
        self._reader, self._writer = reader, writer
        self._output, self._trace = output, trace
        self._memory_bytes, self._max_output_bytes = memory_bytes, max_output_bytes
        self._get_llm, self._get_server_url, self._log = get_llm, get_server_url, log
        self._told: dict[str, set[int]] = {}
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
        cls, zygote: _Zygote, memory_bytes: int | None, max_output_bytes: int, **functions: Any
    ) -> "_Process":
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
        return cls(zygote, pid, reader, writer, output, trace, memory_bytes, max_output_bytes, **functions)

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
        answering = _Answering(self, episode)
        working = asyncio.create_task(self._work(work, episode, answering))
        watched: list[asyncio.Future[Any]] = [working, self._ending, self._has_flooded]
        try:
            await asyncio.wait(watched, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and not isinstance(working.exception(), asyncio.IncompleteReadError | OSError):
                result, self.is_usable = working.result()
                return result
            if self._has_flooded.done():
                raise WorkerError(
                    f"it wrote more than eval.general.workers.max_output_mb, {self._max_output_bytes / 2**20:.0f} MiB"
                )
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

    async def _work(self, work: bytes, episode: Episode | None, answering: "_Answering") -> tuple[Any, bool]:
        self._writer.write(work)
        await self._writer.drain()
        while True:
            message = await messages.read(self._reader)
            if isinstance(message, messages.Made):
                return message.modules, True
            if isinstance(message, messages.Done):
                if episode is not None:
                    _take_over(message, episode)
                add_outside_calls(message.outside_calls)
                return _unpickled_result(message.result), True
            if isinstance(message, messages.Failed):
                error = messages.unpack_error(message.error, message.summary)
                failure = UserCodeError.of_another_process(error, message.summary, message.traceback, message.tail)
                return failure, not message.is_fatal
            answering.take(message)

    def send(self, message: Any) -> None:
        """Send a message to the worker."""
        if not self._writer.is_closing():
            self._writer.write(messages.pack(message))

    async def found(self, message: messages.Find) -> messages.Found:
        """Return what the worker needs to know of a language model."""
        llm = await self._get_llm(message.llm)
        return messages.Found(message.number, llm.max_context_tokens if isinstance(llm, LanguageModel) else None)

    async def server_url(self) -> str:
        """Return the address of the run's server."""
        return await self._get_server_url()

    async def llm(self, name: str) -> LanguageModel:
        """Return a language model of the run."""
        return await self._get_llm(name)

    def log(self, text: str) -> None:
        """Show a message of the worker."""
        self._log(text)

    def new_texts(self, llm: LanguageModel, reply: Any) -> dict[int, str]:
        """Return the texts of the tokens of a reply that the worker was not told before, by their ids."""
        told = self._told.setdefault(llm.name, set())
        new = {token for choice in reply.choices for token in choice.token_ids} - told
        new |= {token for choice in reply.choices for most in choice.top_logprobs for token, _ in most} - told
        told |= new
        return {token: llm.token_text(token) for token in new}

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

    def on_end(self, call: Callable[["_Process"], object]) -> None:
        """Call a function with this worker when it has ended."""
        self._ending.add_done_callback(lambda _: call(self))

    async def close(self) -> None:
        """Let the worker close its components, and end it."""
        try:
            if self.is_fit:
                close = messages.pack(messages.Close())
                failure = await self.do(close, None, CLOSE_SECONDS, "it did not close its components")
                if isinstance(failure, UserCodeError):
                    self._log(f"a worker at its end: {failure.tail}")
        except (TimeoutError, WorkerError) as error:
            self._log(f"a worker at its end: {error}")
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


class _Answering:
    """The requests of a worker that are being answered for one work, in its episode."""

    def __init__(self, process: _Process, episode: Episode | None) -> None:
        self._process, self._episode = process, episode
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, message: Any) -> None:
        """Take a message of the worker."""
        if isinstance(message, messages.Note):
            self._process.log(message.text)
        elif isinstance(message, messages.LogEntry):
            record = logging.makeLogRecord(message.record)
            logging.getLogger(record.name).handle(record)
        elif isinstance(message, messages.Cancel):
            if message.number in self._tasks:
                self._tasks[message.number].cancel()
        else:
            # A call outside of episodes is one of an empty context: it is counted as such.
            is_unknown = isinstance(message, messages.Ask) and message.place == "unknown"
            context = contextvars.Context() if is_unknown else contextvars.copy_context()
            task = asyncio.get_running_loop().create_task(self._answer(message), context=context)
            self._tasks[message.number] = task
            task.add_done_callback(lambda _: self._tasks.pop(message.number))

    async def close(self) -> None:
        """Cancel all that is being answered."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, message: Any) -> None:
        try:
            answer = await self._answer_to(message)
        except asyncio.CancelledError as error:  # a thread that the agent left behind may wait
            self._process.send(messages.Refusal(message.number, messages.pack_error(error), ""))
            raise
        except Exception as error:
            if isinstance(error, PolicyError) and self._episode is not None:
                self._episode.policy_error = error
            answer = messages.Refusal(message.number, messages.pack_error(error), one_line(error))
        self._process.send(answer)

    async def _answer_to(self, message: Any) -> Any:
        if isinstance(message, messages.Find):
            return await self._process.found(message)
        if isinstance(message, messages.Serve):
            return messages.Served(message.number, await self._process.server_url())
        llm = await self._process.llm(message.llm)
        if isinstance(message, messages.Check):
            await llm.check()
            return messages.Answer(message.number, None, (), {})
        assert isinstance(message, messages.Ask)

        def send_piece(delta: Any) -> None:
            self._process.send(messages.Piece(message.number, delta))

        with _scope(message):
            reply = await llm.answer(message.request, send_piece if message.is_streamed else None)
        indices = {choice.call_index for choice in reply.choices}
        known = () if self._episode is None else tuple(self._episode.calls)
        calls = tuple(call for call in known if call.index in indices)
        return messages.Answer(message.number, reply, calls, self._process.new_texts(llm, reply))


@contextlib.contextmanager
def _scope(message: messages.Ask) -> Iterator[None]:
    """Run the block where the worker's call was made: under its functions, and in its episode or on purpose in none."""
    with contextlib.ExitStack() as stack:
        if message.place == "outside":
            stack.enter_context(recording(None))
        stack.enter_context(named_functions(message.functions))
        yield


def _unpickled_result(content: bytes) -> Any:
    try:
        return pickle.loads(content)
    except Exception as error:  # of a user's class
        raise TypeError(
            f"the result cannot be read outside of the process that made it ({type(error).__name__}: {error}): return "
            "plain values, or set isolation to none"
        ) from None


def _identity(episode: Episode) -> Identity:
    return Identity(
        episode.run_seed,
        episode.stream,
        episode.rollout_index,
        episode.example_id,
        episode.generation,
        episode.temperature,
        episode.input_obj,
        episode.server_url,
        episode.api_key if episode.is_served else None,
    )


def _take_over(done: messages.Done, episode: Episode) -> None:
    """Add to the run's record of an episode what the worker's has beside the calls."""
    calls = {call.index: call for call in episode.calls}
    episode.step_rewards.update(done.step_rewards)
    for indices, scores in done.candidates:
        episode.candidates.append(Candidates(tuple(calls[index] for index in indices), scores))
    for call in done.remote_calls:
        episode.record_remote(call)
