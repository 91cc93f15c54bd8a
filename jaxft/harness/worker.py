"""A worker makes the components once, and calls one for each work that the run sends.

The agent runs in the main thread's event loop, as in a run without workers. A thread of its own reads the messages of
the run, so that replies arrive while the agent blocks that loop.
"""

import asyncio
import contextlib
import faulthandler
import io
import itertools
import json
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, cast

from filelock import FileLock
from pydantic import TypeAdapter

from jaxft.errors import ComponentError, RequestError, UserCodeError, WorkerError, user_code
from jaxft.harness import worker_processes as processes
from jaxft.harness.addresses import ServeConfig
from jaxft.harness.component_builder import ComponentBuilder
from jaxft.harness.config import Config
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.evaluators import WeightedSumConfig, scored_values
from jaxft.harness.registry import GroupEvaluatorConfig, import_installed, import_module
from jaxft.harness.supervision import Supervisor, is_async
from jaxft.harness.worker_protocol import Message, check_json, describe_error, out_of_memory, read_error, to_line
from jaxft.rollout.calls import Call, Reply
from jaxft.rollout.chat_request import ChatRequest, CompletionRequest, Delta
from jaxft.rollout.current import (
    current_functions,
    find_episode,
    is_outside_on_purpose,
    outside_calls,
    recording,
)
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.recorder import (
    Episode,
)
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory

CHILD_GRACE_SECONDS = 1.0
"""Time that processes of an agent have to end after it."""

REPLY, CALLS, DELTA = TypeAdapter(Reply), TypeAdapter(list[Call]), TypeAdapter(Delta)


def work(
    connection: socket.socket, trace: int, imports: Sequence[str], config: bytes, memory_mb: int | None, log_level: int
) -> None:
    """Serve the run until it closes the connection.

    Args:
        connection: the connection to the run.
        trace: file that the place of a crash is written to, and the present place when SIGUSR1 comes.
        imports: modules that register the user's components.
        config: the configuration of the run, pickled: its classes are in those modules.
        memory_mb: MiB that the worker may take beside what its imports took; None: no limit.
        log_level: lowest level of the records of `logging` that the run shows.
    """
    faulthandler.enable(file=trace)
    faulthandler.register(signal.SIGUSR1, file=trace)
    # Or the last lines before a crash would be lost, as standard output is a pipe.
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    run = RunConnection(connection)
    logging.getLogger().setLevel(log_level)
    logging.getLogger().handlers[:] = [_LogSender(run)]
    asyncio.run(_serve(run, imports, config, memory_mb))


async def _serve(run: "RunConnection", imports: Sequence[str], config: bytes, memory_mb: int | None) -> None:
    """Make the components, and call one for each work."""
    loop = asyncio.get_running_loop()
    works: asyncio.Queue[Message | None] = asyncio.Queue()
    run.listen(lambda work: loop.call_soon_threadsafe(works.put_nowait, work))
    worker = _Worker(run, memory_mb)
    run.end_work(await worker.done(worker.start(imports, config)))
    while (work := await works.get()) is not None:
        run.end_work(await worker.do(work))
    await worker.builder.__aexit__()


class RunConnection:
    """The connection of a worker to the run, for all threads and event loops of this process."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._pid = os.getpid()
        self._ids = itertools.count()
        self.is_working = True
        self._waiting: dict[int, tuple[asyncio.Future[Any], Callable[[Delta], None] | None]] = {}  # by id of a request

    def listen(self, take_work: Callable[[Message | None], object]) -> None:
        """Read messages in a new thread, and pass on works, or None when the run wants no more.

        When the run has gone during a work, the process ends.
        """
        threading.Thread(target=self._listen, args=(take_work,), name="jaxft worker", daemon=True).start()

    def send(self, message: Message, episode: Episode | None = None) -> None:
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
        line = to_line(message)
        try:
            with self._sending:
                if episode is not None and episode.is_over:  # the run takes what it asks for one of the next episode
                    raise episode.closed()
                self._socket.sendall(line)
        except OSError as error:
            raise WorkerError(f"the connection to the run is closed: {error}") from None

    def end_work(self, done: Message) -> None:
        """Tell the run how a work ended."""
        processes.flush_output()
        self.is_working = False
        self.send({"done": done})

    async def ask(
        self,
        request: Message,
        on_delta: Callable[[Delta], None] | None = None,
        episode: Episode | None = None,
    ) -> Any:
        """Send a request, and return the result of it."""
        number, future = next(self._ids), asyncio.get_running_loop().create_future()
        self._waiting[number] = future, on_delta
        try:
            self.send({"id": number, **request}, episode)
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(WorkerError):
                self.send({"cancel": number})
            raise
        finally:
            del self._waiting[number]

    def _listen(self, take_work: Callable[[Message | None], object]) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:  # the agent may close it
            for line in lines:
                message = json.loads(line)
                if "id" not in message:
                    self.is_working = True
                    take_work(message)
                elif message["id"] in self._waiting:  # it was not cancelled
                    with contextlib.suppress(RuntimeError):  # the loop has been closed, and nobody waits in it
                        _deliver(message, *self._waiting[message["id"]])
            if self.is_working:
                processes.kill_all(partial(processes.descendants, self._pid))
                os._exit(1)
            take_work(None)


def _deliver(message: Message, future: "asyncio.Future[Any]", on_delta: Callable[[Delta], None] | None) -> None:
    """Give a message to the request that waits for it, in the event loop where it waits."""

    def end() -> None:
        if future.done():
            return
        if "error" in message:
            future.set_exception(read_error(message["error"]))
        else:
            future.set_result(message["result"])

    if "delta" not in message:
        future.get_loop().call_soon_threadsafe(end)
    elif on_delta is not None:
        future.get_loop().call_soon_threadsafe(on_delta, DELTA.validate_python(message["delta"]))


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
        if episode is not None:
            await episode.check_open()
            episode.count_begun(request.n)
        question = {
            "answer": self.name,
            "request": request,
            "is_streamed": on_delta is not None,
            "functions": current_functions(),
            "place": "episode" if episode is not None else "outside" if is_outside_on_purpose() else "unknown",
        }
        try:
            answer = await self._connection.ask(question, on_delta, episode)
        except RequestError:  # the run refused it before it began
            if episode is not None:
                episode.count_begun(-request.n)
            raise
        self._texts |= {int(token): text for token, text in answer["texts"].items()}
        if episode is not None:
            episode.texts_of_tokens[self.name] = self.token_text
            for call in CALLS.validate_python(answer["calls"]):
                episode.record(call)
        return REPLY.validate_python(answer["reply"])

    def token_text(self, token_id: int) -> str:
        """Return the text of a token of an earlier answer, control tokens included."""
        return self._texts[token_id]

    async def check(self) -> None:
        """Raise a `PolicyError` if the model can answer nothing any more."""
        await self._connection.ask({"check": self.name})


class WorkerBuilder(ComponentBuilder):
    """Makes components in a worker; the language models that the run has are asked there."""

    def __init__(self, config: Config, connection: RunConnection) -> None:
        path = config.finetuning.output_dir
        # The run has locked it.
        super().__init__(config, RunDirectory(path, FileLock(path / "unused.lock")), _WorkerConsole(connection))
        self._connection = connection

    async def get_server_url(self, default: ServeConfig | None = None, port: int | None = None) -> str:
        """Return the address of the run's server."""
        return await self._connection.ask({"serve": True})

    async def _language_model(self, name: str) -> Any:
        self.get_llm_config(name)  # raises if there is none
        llm = await self._make_shared(f"llms.{name} of the run", lambda: self._find(name))
        return await super()._language_model(name) if llm is None else llm

    async def _find(self, name: str) -> WorkerClient | None:
        """Return the client of a language model of the run; None for one on a server, which needs nothing of it."""
        tokens = await self._connection.ask({"find": name})
        return None if tokens is None else WorkerClient(self._connection, name, tokens)


class _WorkerConsole(Console):
    """The console of a worker, whose messages the run shows."""

    def __init__(self, connection: RunConnection) -> None:
        super().__init__(io.StringIO())
        self._connection = connection

    def message(self, text: str) -> None:
        self._connection.send({"note": text})

    def status(self, text: Any) -> None:
        return None


class _LogSender(logging.Handler):
    """Sends records of `logging` to the run, which shows them as it shows its own."""

    def __init__(self, connection: RunConnection) -> None:
        super().__init__()
        self._connection, self._pid = connection, os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if os.getpid() != self._pid:  # one that the agent has forked
            os.write(2, f"{record.levelname} {record.name}: {text}\n".encode(errors="replace"))
            return
        # `extra` may be anything; what the others hold is in the text.
        plain = {name: value for name, value in vars(record).items() if isinstance(value, str | int | float | None)}
        self._connection.send({"log": plain | {"msg": text, "args": None, "exc_text": None}})


class _Worker:
    builder: WorkerBuilder

    def __init__(self, run: RunConnection, memory_mb: int | None) -> None:
        self._run, self._memory_mb = run, memory_mb
        self._supervisor = Supervisor(lambda text: run.send({"note": text}), blocked_seconds=None)

    async def start(self, imports: Sequence[str], pickled: bytes) -> None:
        """Import the user's modules, and make the components that run in workers."""
        what = "modules of the agent"
        try:
            with user_code():
                import_installed()
                for name in imports:
                    import_module(name)
                what = "configuration, whose classes must be in modules that can be imported"
                config = pickle.loads(pickled)
        except UserCodeError as failure:
            raise ComponentError(
                f"eval.general.isolation: a worker cannot import the {what}: {failure.summary}"
            ) from None
        if self._memory_mb is not None:
            processes.limit_memory(self._memory_mb * 2**20)
        self.builder, general = WorkerBuilder(config, self._run), config.eval.general
        if general.isolation == "process":
            await self.builder.get_workflow()
        for name, evaluator in config.eval.evaluators.items():
            if general.judge_isolation == "process" and not isinstance(evaluator, WeightedSumConfig):
                await self.builder.get_evaluator(name)

    async def do(self, work: Message) -> Message:
        """Do a work, and return how it ended."""
        episode = None
        if work["episode"] is not None:
            episode = Episode(**work["episode"])  # the worker's own record; that of the run is the one that counts
            if work["token"] is not None:
                episode.adopt_token(work["token"])
        call = self._call(work["call"], work["argument"], work["label"], episode)
        done = await self.done(_leaving_nothing(call))
        if episode is not None:  # what only this process knows; the run itself records the calls
            candidates = [([call.index for call in calls], scores) for calls, scores in episode.candidates]
            done |= {"step_rewards": list(episode.step_rewards.items()), "candidates": candidates}
            done |= {"remote_calls": episode.remote_calls}
        return done

    async def done(self, working: Coroutine[Any, Any, Any]) -> Message:
        """Return how a coroutine ended, with its result or error."""
        outside, result, error, is_usable = outside_calls(), None, None, True
        try:
            with user_code():
                result = await working
        except UserCodeError as failure:
            is_usable = not isinstance(failure.error, WorkerError | MemoryError)
            if isinstance(failure.error, MemoryError) and self._memory_mb is not None:
                explained = WorkerError(out_of_memory(self._memory_mb))
                failure = UserCodeError(explained.with_traceback(failure.error.__traceback__))
            error = describe_error(failure)
        outside = outside_calls() - outside
        return {"result": result, "error": error, "is_usable": is_usable, "outside_calls": outside}

    async def _call(self, name: str | None, argument: Any, label: str, episode: Episode | None) -> Any:
        """Call a component, and return its result as JSON."""
        is_group, items = False, []
        if name is None:
            function = await self.builder.get_workflow()
        else:
            function = await self.builder.get_evaluator(name)
            items = [EvalInputItem(**item) for item in argument]
            is_group = isinstance(self.builder.get_evaluator_config(name), GroupEvaluatorConfig)
            argument = items if is_group else items[0]
        in_thread = not is_async(function)
        with recording(episode):
            try:
                given = await self._supervisor.run(
                    function, argument, name=label, run_in_thread=in_thread, seconds=None, late=""
                )
            finally:
                if episode is not None:
                    episode.end()
        if name is not None:
            scores = scored_values(given, items, is_group=is_group)
            return [{"error": describe_error(each)} if isinstance(each, UserCodeError) else each for each in scores]
        try:
            check_json(given)
        except TypeError as fault:
            raise TypeError(f"the result cannot leave the agent's process: {fault}; return plain values") from None
        return given


async def _leaving_nothing(working: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine, and end the processes that were started meanwhile and are still running.

    Raises:
        WorkerError: there are some.
    """
    before = processes.started_by(os.getpid())
    try:
        result = await working
    finally:
        deadline = time.monotonic() + CHILD_GRACE_SECONDS
        while (left := processes.started_by(os.getpid()) - before) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        command = processes.process_command(min(left))[:100] if left else ""
        processes.kill_all(lambda: processes.started_by(os.getpid()) - before)
    if left:
        raise WorkerError(f"it left {len(left)} processes behind, the first of which is '{command}'")
    return result
