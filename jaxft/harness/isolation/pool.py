"""The workers of a run: processes that run agents and evaluators, one at a time each, and that may be killed.

A worker that takes too long, breaks a limit or ends is replaced. What it did costs its episode and nothing else: the
calls of an episode are recorded here, and its random numbers depend on nothing but the episode.
"""

import asyncio
import contextlib
import contextvars
import errno
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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from jaxft.errors import ComponentError, PolicyError, UserCodeError, WorkerError
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
            work = Work(name, argument, identity, label)
            async with self._free, self._taken(name) as process:
                result = await process.do(work, episode, seconds, late)
            if isinstance(result, UserCodeError):
                raise result
            return result

        return call

    async def close(self) -> None:
        """End all workers."""
        for process in self._idle:
            self._retire(process)
        await asyncio.gather(*self._retiring)
        if self._zygote is not None:
            await self._zygote.close()

    @contextlib.asynccontextmanager
    async def _taken(self, name: str | None) -> AsyncIterator["_Process"]:
        """Yield a worker that has made a component; afterwards it is idle, or is replaced if it cannot go on."""
        self._idle = [process for process in self._idle if process.is_running]
        process = self._idle.pop() if self._idle else await self._start()
        try:
            if name not in process.made:
                modules = await process.make(name)
                if modules and self._zygote is not None:
                    self._zygote.preload(modules)
            yield process
        finally:
            if not process.is_usable:
                process.kill()
                await asyncio.shield(process.has_ended())
            elif process.num_done < (self._limits.max_episodes or sys.maxsize):
                self._idle.append(process)
            else:
                self._retire(process)

    async def _start(self) -> "_Process":
        async with self._starting:
            if self._zygote is None or self._zygote.has_ended:
                self._zygote = await _Zygote.start(self._config)
            self.num_started += 1
            memory = self._limits.memory_mb
            return await _Process.start(
                self._zygote,
                None if memory is None else memory * 2**20,
                self._limits.max_output_mb * 2**20,
                get_llm=self._get_llm,
                get_server_url=self._get_server_url,
                log=self._log,
            )

    def _retire(self, process: "_Process") -> None:
        task = asyncio.create_task(process.close())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


class _Zygote:
    """The process that forks the workers, from the side of the run."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
        self._process, self._control = process, control
        self._control.setblocking(False)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forked: asyncio.Queue[int] = asyncio.Queue()
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
        made = cls(*await asyncio.to_thread(zygote.start, preparation))
        await made._ready
        return made

    async def fork(self, files: tuple[int, int, int], memory_bytes: int | None) -> int:
        """Start a worker and return its process id."""
        try:
            zygote.fork(self._control, files, memory_bytes)
            pid = await self._forked.get()
        except OSError as error:
            raise WorkerError(f"no worker can be started: {error}") from error
        if pid < 0:
            raise WorkerError("no worker can be started: the process that forks them has ended")
        self._codes[pid] = asyncio.get_running_loop().create_future()
        return pid

    def preload(self, modules: tuple[str, ...]) -> None:
        """Let the zygote import what a worker has imported, so that later ones need not."""
        with contextlib.suppress(OSError):  # its queue is full, and the workers import for themselves
            zygote.preload(self._control, modules)

    async def code_of(self, pid: int) -> int | None:
        """Wait for the end of a worker and return its exit code; None if nobody knows it."""
        code = await asyncio.shield(self._codes[pid])
        return code

    async def close(self) -> None:
        """End the zygote, and with it all workers."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._control.close()
        await asyncio.to_thread(self._process.wait)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while report := await loop.sock_recv(self._control, zygote.MAX_MESSAGE_BYTES):
                self._take(json.loads(report))
        except OSError:
            pass
        self.has_ended = True
        self._forked.put_nowait(-1)
        if not self._ready.done():
            self._ready.set_exception(WorkerError("the process that forks workers ended before it was ready"))
        for code in self._codes.values():
            if not code.done():
                code.set_result(None)

    def _take(self, report: dict[str, Any]) -> None:
        if "forked" in report:
            self._forked.put_nowait(report["forked"])
        elif "ended" in report:
            code = self._codes.get(report["ended"])
            if code is not None and not code.done():
                code.set_result(report["code"])
        elif "failed" in report:
            self._ready.set_exception(
                ComponentError(f"eval.general.isolation: a worker cannot import the agent: {report['failed']}")
            )
        else:
            self._ready.set_result(None)


class _Process:
    """A worker, from the side of the run.

    Attributes:
        num_done: calls of components that it has done.
        made: names of the components that it has made, None for the workflow.
        is_usable: False while it works, and for good after an error that it cannot recover from.
    """

    def __init__(
        self,
        zygote: _Zygote,
        pid: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output: int,
        trace: int,
        max_output_bytes: int,
        *,
        get_llm: Find,
        get_server_url: Callable[[], Coroutine[Any, Any, str]],
        log: Callable[[str], None],
    ) -> None:
        self._zygote, self._pid = zygote, pid
        self._reader, self._writer = reader, writer
        self._output, self._trace = output, trace
        self._max_output_bytes = max_output_bytes
        self._get_llm, self._get_server_url, self._log = get_llm, get_server_url, log
        self._told: dict[str, set[int]] = {}
        self._output_bytes = 0
        self._has_flooded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._code: int | None = None
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
        ours, theirs = socket.socketpair()
        output_reader, output_writer = os.pipe()
        trace_reader, trace_writer = os.pipe()
        try:
            pid = await zygote.fork((theirs.fileno(), output_writer, trace_writer), memory_bytes)
        except BaseException:
            ours.close()
            os.close(output_reader)
            os.close(trace_reader)
            raise
        finally:
            theirs.close()
            os.close(output_writer)
            os.close(trace_writer)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(zygote, pid, reader, writer, output_reader, trace_reader, max_output_bytes, **functions)

    async def make(self, name: str | None) -> tuple[str, ...]:
        """Let the worker make a component; return the modules that it has imported for it.

        Raises:
            UserCodeError: the factory raised an error.
            WorkerError: the worker ended.
        """
        made = await self.do(messages.Make(name), None, None, "")
        if isinstance(made, UserCodeError):
            raise made
        self.made.add(name)
        return made

    async def do(self, work: Any, episode: Episode | None, seconds: float | None, late: str) -> Any:
        """Let the worker do a work; return its result, or a `UserCodeError`.

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
                self.num_done += isinstance(work, Work)
                return result
            if self._has_flooded.done():
                raise WorkerError(
                    f"it wrote more than eval.general.workers.max_output_mb, {self._max_output_bytes / 2**20:.0f} MiB"
                )
            if not working.done() and not self._ending.done():
                raise TimeoutError(f"{late} within {seconds:g} s{await self._place()}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._ending), 1.0)
            raise WorkerError(self._why_it_ended())
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await answering.close()

    async def _work(self, work: Any, episode: Episode | None, answering: "_Answering") -> tuple[Any, bool]:
        self.send(work)
        await self._writer.drain()
        while True:
            message = await messages.read(self._reader)
            if isinstance(message, messages.Made):
                return message.modules, True
            if isinstance(message, messages.Done):
                if episode is not None:
                    _take_over(message, episode)
                add_outside_calls(message.outside_calls)
                return pickle.loads(message.result), True
            if isinstance(message, messages.Failed):
                error = RuntimeError(message.summary) if message.error is None else pickle.loads(message.error)
                failure = UserCodeError.of_another_process(error, message.summary, message.traceback, message.tail)
                return failure, not message.is_fatal
            answering.take(message)

    def send(self, message: Any) -> None:
        """Send a message to the worker."""
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
    def is_running(self) -> bool:
        """True until the process has ended."""
        return not self._ending.done()

    async def has_ended(self) -> None:
        """Wait for the end of the process, and close what belongs to it."""
        await self._ending
        if self._trace >= 0:
            os.close(self._trace)
            self._trace = -1

    async def close(self) -> None:
        """Let the worker close its components and end; kill it if that takes too long."""
        with contextlib.suppress(OSError):
            self.send(messages.Close())
        try:
            await asyncio.wait_for(asyncio.shield(self._ending), CLOSE_SECONDS)
        except TimeoutError:
            self._log(f"a worker did not close its components within {CLOSE_SECONDS:g} s and is killed")
        finally:
            self.kill()
            await self.has_ended()

    async def _wait_for_end(self) -> None:
        self._code = await self._zygote.code_of(self._pid)
        self._pass_on_output()
        asyncio.get_running_loop().remove_reader(self._output)
        os.close(self._output)
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
            sys.stdout.write(content.decode(errors="replace"))
            sys.stdout.flush()

    async def _place(self) -> str:
        """Return where the worker is now, for the end of a message; empty if it does not say."""
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGUSR1)
        deadline = time.monotonic() + TRACE_SECONDS
        told = ""
        while time.monotonic() < deadline and not told:
            await asyncio.sleep(0.01)
            told = self._last_place()
        return told

    def _last_place(self) -> str:
        try:
            trace = os.read(self._trace, 2**16).decode(errors="replace")
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EBADF):
                return ""
            raise
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', trace)
        users = [frame for frame in frames if not is_library(frame[0]) and not frame[0].startswith("<")]
        return "" if not users else ", at {}:{} in {}".format(*users[0])

    def _why_it_ended(self) -> str:
        if not self._ending.done():
            return "it closed its connection to the run, as by closing all file descriptors"
        code = self._code
        if code is None:
            return "its process has ended"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}{self._last_place()}"
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
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if isinstance(error, PolicyError) and self._episode is not None:
                self._episode.policy_error = error
            content = messages.pack_error(error)
            if content is None:
                content = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
            answer = messages.Refusal(message.number, content)
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


def _identity(episode: Episode) -> Identity:
    return Identity(
        episode.run_seed,
        episode.stream,
        episode.rollout_index,
        episode.example_id,
        episode.generation,
        episode.temperature,
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
