"""A worker makes the components once, and calls one for each work that the run sends.

The agent runs in the main thread's event loop, as in a run without workers. A thread of its own reads the messages of
the run, so that replies arrive while the agent blocks that loop.
"""

import asyncio
import contextlib
import faulthandler
import io
import itertools
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from logging.handlers import QueueHandler
from typing import Any, cast

from filelock import FileLock

from jaxft.errors import RequestError, UserCodeError, WorkerError, user_code
from jaxft.harness.component_builder import ComponentBuilder
from jaxft.harness.config import Config
from jaxft.harness.config_types import ServeConfig
from jaxft.harness.isolation import messages
from jaxft.harness.isolation.messages import Identity, Work
from jaxft.harness.isolation.zygote import command_of, flush_output, kill_descendants, kill_worker, started_by
from jaxft.harness.supervision import Supervisor, is_async
from jaxft.rollout.calls import Reply
from jaxft.rollout.chat_request import ChatRequest, CompletionRequest, Delta
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.recorder import (
    Episode,
    current_functions,
    find_episode,
    is_outside_on_purpose,
    outside_calls,
    recording,
)
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory

CHILD_GRACE_SECONDS = 1.0
"""Time that processes of an agent have to end after it."""


def work(connection: socket.socket, trace: int, config: Config, memory_bytes: int | None) -> None:
    """Serve the run until it closes the connection or says so.

    Args:
        connection: the connection to the run.
        trace: file that the place of a crash is written to, and the present place when SIGUSR1 comes.
        config: the configuration of the run.
        memory_bytes: memory that the worker may take; None: no limit.
    """
    faulthandler.enable(file=trace)
    faulthandler.register(signal.SIGUSR1, file=trace)
    # Or the last lines before a crash would be lost, as standard output is a pipe.
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    asyncio.run(_Worker(connection, config, memory_bytes).serve())


class RunConnection:
    """The connection of a worker to the run, for all threads and event loops of this process."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._pid = os.getpid()
        self._numbers = itertools.count()
        # By the number of the request.
        self._waiting: dict[int, tuple[asyncio.Future[Any], Callable[[Delta], None] | None]] = {}
        self.work: queue.SimpleQueue[Work | messages.Make | messages.Close] = queue.SimpleQueue()
        self.on_work: Callable[[], object] = lambda: None

    def listen(self) -> None:
        """Read messages in a new thread; the process ends when the run has gone."""
        threading.Thread(target=self._listen, name="jaxft worker", daemon=True).start()

    def send(self, message: Any, episode: Episode | None = None) -> None:
        """Send a message, of an episode if one is given.

        Raises:
            CancelledError: the episode has ended.
            RuntimeError: this is another process, that the agent made by a fork.
            WorkerError: the agent has closed the connection.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                "a process that an agent starts cannot use the agent's own clients: give it jaxft.episode().base_url "
                "of a run that serves its language models (llms.<name>.serve)"
            )
        content = messages.pack(message)
        try:
            with self._sending:
                if episode is not None and episode.is_over:  # the run takes what it asks for one of the next episode
                    raise episode.closed()
                self._socket.sendall(content)
        except OSError as error:
            raise WorkerError(f"the connection to the run is closed: {error}") from None

    async def ask(
        self,
        make: Callable[[int], Any],
        on_delta: Callable[[Delta], None] | None = None,
        episode: Episode | None = None,
    ) -> Any:
        """Send the request that `make` returns for a number, and return the answer to it."""
        loop = asyncio.get_running_loop()
        number, future = next(self._numbers), loop.create_future()
        self._waiting[number] = future, on_delta
        try:
            self.send(make(number), episode)
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(WorkerError):
                self.send(messages.Cancel(number))
            raise
        finally:
            del self._waiting[number]

    def _listen(self) -> None:
        while True:
            try:
                message = messages.receive(self._socket)
            except OSError:  # the agent has closed it
                return
            if message is None:
                kill_descendants(self._pid)
                os._exit(1)
            if isinstance(message, Work | messages.Make | messages.Close):
                self.work.put(message)
                self.on_work()
                continue
            waiting = self._waiting.get(message.number)
            if waiting is None:  # it was cancelled
                continue
            future, on_delta = waiting
            with contextlib.suppress(RuntimeError):  # the loop has been closed, and nobody waits in it
                if isinstance(message, messages.Piece):
                    if on_delta is not None:
                        future.get_loop().call_soon_threadsafe(on_delta, message.delta)
                else:
                    future.get_loop().call_soon_threadsafe(_set, future, message)


def _set(future: "asyncio.Future[Any]", message: Any) -> None:
    if future.done():
        return
    if isinstance(message, messages.Refusal):
        future.set_exception(messages.unpack_error(message.error, message.summary))
    else:
        future.set_result(message)


class WorkerClient(LanguageModel):
    """A language model of the run, which answers and records the calls."""

    def __init__(self, connection: RunConnection, name: str, max_context_tokens: int) -> None:
        self.name = name
        self.max_context_tokens = max_context_tokens
        self._connection = connection
        self._texts: dict[int, str] = {}

    async def answer(
        self, request: ChatRequest | CompletionRequest, on_delta: Callable[[Delta], None] | None = None
    ) -> Reply:
        """Answer a request like `chat`, and give `on_delta` the pieces of the answers as they are sampled."""
        episode = find_episode()
        place = "episode" if episode is not None else "outside" if is_outside_on_purpose() else "unknown"
        if episode is not None:
            await episode.check_open()
            episode.count_begun(request.n)
        try:
            answer = await self._connection.ask(
                lambda number: messages.Ask(
                    number, self.name, request, on_delta is not None, current_functions(), place
                ),
                on_delta,
                episode,
            )
        except RequestError:  # the run refused it before it began
            if episode is not None:
                episode.count_begun(-request.n)
            raise
        self._texts |= answer.texts
        if episode is not None:
            episode.texts_of_tokens[self.name] = self.token_text
            for call in answer.calls:
                episode.record(call)
        return answer.reply

    def token_text(self, token_id: int) -> str:
        """Return the text of a token of an earlier answer, control tokens included."""
        return self._texts[token_id]

    async def check(self) -> None:
        """Raise a `PolicyError` if the model can answer nothing any more."""
        await self._connection.ask(lambda number: messages.Check(number, self.name))


class WorkerBuilder(ComponentBuilder):
    """Makes components in a worker; the language models that the run has are asked there."""

    def __init__(self, config: Config, connection: RunConnection) -> None:
        path = config.finetuning.output_dir
        # The run has locked it.
        super().__init__(config, RunDirectory(path, FileLock(path / "unused.lock")), _WorkerConsole(connection))
        self._connection = connection

    async def get_llm(self, name: str, wrapper_type: str | Enum | None = None) -> Any:
        """Return the language model `llms.<name>`; see `ComponentBuilder.get_llm`."""
        self._config_of("llms", name)  # raises if there is none
        llm = await self._shared(f"llms.{name} of the run", lambda: self._find(name))
        if llm is None:  # one on a server, which needs nothing of the run
            return await super().get_llm(name, wrapper_type)
        if wrapper_type is None:
            return llm
        # Imported here, as it needs an extra.
        from jaxft.rollout.frameworks import client_of

        return client_of(llm, wrapper_type)

    async def get_server_url(self, default: ServeConfig | None = None, port: int | None = None) -> str:
        """Return the address of the run's server."""
        return (await self._connection.ask(messages.Serve)).url

    async def _find(self, name: str) -> WorkerClient | None:
        found = await self._connection.ask(lambda number: messages.Find(number, name))
        if found.max_context_tokens is None:
            return None
        return WorkerClient(self._connection, name, found.max_context_tokens)


class _WorkerConsole(Console):
    """The console of a worker, whose messages the run shows."""

    def __init__(self, connection: RunConnection) -> None:
        super().__init__(io.StringIO())
        self._connection = connection

    def message(self, text: str) -> None:
        self._connection.send(messages.Note(text))

    def status(self, text: Any) -> None:
        return None


class _Worker:
    def __init__(self, connection: socket.socket, config: Config, memory_bytes: int | None) -> None:
        self._connection = RunConnection(connection)
        self._builder = WorkerBuilder(config, self._connection)
        self._supervisor = Supervisor(lambda text: self._connection.send(messages.Note(text)), blocked_seconds=None)
        self._memory_bytes = memory_bytes

    async def serve(self) -> None:
        """Do the work that the run sends, until it closes the connection or says so."""
        loop, has_work = asyncio.get_running_loop(), asyncio.Event()
        self._connection.on_work = lambda: loop.call_soon_threadsafe(has_work.set)
        self._connection.listen()
        _send_logs(self._connection)
        while True:
            await has_work.wait()
            has_work.clear()
            work = self._connection.work.get()
            done = await (self._do(work) if isinstance(work, Work) else self._make_or_close(work))
            flush_output()
            self._connection.send(done)

    async def _make_or_close(self, work: messages.Make | messages.Close) -> Any:
        """Make a component or close all, and return the message about that."""
        before = set(sys.modules)
        try:
            with user_code():
                if isinstance(work, messages.Make):
                    await self._component(work.name)
                else:
                    await self._builder.__aexit__()
        except UserCodeError as failure:
            return _failed(failure, is_fatal=True)
        # Python adds a module before those that it imports, but to import them one after the other is the same.
        return messages.Made(tuple(name for name in list(sys.modules) if name not in before))

    async def _component(self, name: str | None) -> Any:
        return await (self._builder.get_workflow() if name is None else self._builder.get_evaluator(name))

    async def _do(self, work: Work) -> Any:
        """Do a work and return the message about its result; end all processes that it leaves behind."""
        before = started_by(os.getpid())
        episode = None if work.episode is None else _episode(work.episode)
        outside = outside_calls()
        try:
            with user_code():
                try:
                    result = await self._call(work, episode)
                finally:
                    left = await _left_behind(before)
                if left:
                    raise WorkerError(f"it left {len(left)} processes behind, the first of which is {left[0]}")
            return messages.Done(result, _remains(episode, outside_calls() - outside))
        except UserCodeError as failure:
            error = failure.error
            if isinstance(error, MemoryError) and self._memory_bytes is not None:
                error = messages.out_of_memory(self._memory_bytes)
                failure = UserCodeError(error.with_traceback(failure.error.__traceback__))
            is_fatal = isinstance(error, WorkerError | MemoryError)
            return _failed(failure, is_fatal=is_fatal, remains=_remains(episode, outside_calls() - outside))

    async def _call(self, work: Work, episode: Episode | None) -> bytes:
        """Call a component and return its result, pickled."""
        function = await self._component(work.name)
        with recording(episode):
            try:
                result = await self._supervisor.run(
                    function,
                    work.argument,
                    name=work.label,
                    run_in_thread=not is_async(function),
                    seconds=None,
                    late="",
                )
            finally:
                if episode is not None:
                    episode.end()
        try:
            return pickle.dumps(result)
        except Exception as error:
            raise TypeError(
                f"the result is of type {type(result).__name__}, which cannot leave the agent's process ({error}): "
                "return plain values, or set isolation to none"
            ) from None


def _remains(episode: Episode | None, outside: int) -> messages.Remains:
    if episode is None:
        return messages.Remains({}, [], [], outside)
    candidates = [_indices(each) for each in episode.candidates]
    return messages.Remains(episode.step_rewards, candidates, episode.remote_calls, outside)


def _failed(failure: UserCodeError, *, is_fatal: bool, remains: messages.Remains | None = None) -> messages.Failed:
    error = messages.pack_error(failure.error)
    return messages.Failed(error, failure.summary, failure.traceback, failure.tail, is_fatal, remains)


def _episode(identity: Identity) -> Episode:
    """Return the worker's own record of an episode; the run's record is the one that counts."""
    fields: dict[str, Any] = identity._asdict()
    token = fields.pop("token")
    episode = Episode(**fields)
    if token is not None:
        episode.adopt_token(token)
    return episode


def _indices(candidates: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return tuple(call.index for call in candidates.calls), candidates.scores


async def _left_behind(before: set[int]) -> list[str]:
    """End the processes that were started meanwhile and are still running, and return their command lines."""
    deadline = time.monotonic() + CHILD_GRACE_SECONDS
    while (left := started_by(os.getpid()) - before) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    commands = [f"'{command_of(pid)[:100]}'" for pid in sorted(left)]
    for pid in left:
        kill_worker(pid)
    return commands


def _send_logs(connection: RunConnection) -> None:
    """Send records of `logging` to the run, which shows them as it shows its own."""

    own = os.getpid()

    class Sender(QueueHandler):
        def enqueue(self, record: logging.LogRecord) -> None:
            if os.getpid() != own:  # one that the agent has forked
                os.write(2, f"{record.levelname} {record.name}: {record.getMessage()}\n".encode(errors="replace"))
                return
            # `extra` may be anything; what the others hold is in the message by now.
            plain = {name: value for name, value in vars(record).items() if isinstance(value, str | int | float | None)}
            connection.send(messages.LogEntry(plain))

    root = logging.getLogger()
    root.handlers[:] = [Sender(queue.SimpleQueue())]
