"""A worker makes the components once, and calls one for each call of the run.

The agent runs in the main thread's event loop, as in a run without workers. A thread of its own reads the messages of
the run, so that replies arrive while the agent blocks that loop.
"""

import asyncio
import contextlib
import faulthandler
import io
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Container, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any, cast

from filelock import FileLock
from pydantic import TypeAdapter

from jaxft.errors import RequestError, UserCodeError, WorkerError
from jaxft.harness.addresses import ServeConfig
from jaxft.harness.builder import Builder
from jaxft.harness.config import Config
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.evaluators import WeightedSumConfig, scored_values
from jaxft.harness.registry import GroupEvaluatorConfig, import_installed, import_module
from jaxft.harness.runtime import is_shown
from jaxft.harness.supervision import Supervisor, is_async
from jaxft.harness.tasks import workflow_of
from jaxft.harness.worker_processes import OUT_OF_MEMORY, descendants, limit_memory
from jaxft.harness.worker_protocol import Message, Peer, describe_error
from jaxft.rollout.calls import Call, Reply
from jaxft.rollout.chat_request import ChatRequest, CompletionRequest, Delta
from jaxft.rollout.current import current_functions, find_episode, note_outside_call, outside_calls, recording
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.recorder import Episode
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory

CHILD_GRACE_SECONDS = 1.0
"""Time that processes of an agent have to end after it."""

REPLY, CALLS, DELTA = TypeAdapter(Reply), TypeAdapter(list[Call]), TypeAdapter(Delta)


def work(connection: socket.socket, imports: Sequence[str], config: Config, log_level: int) -> None:
    """Answer calls of the run until it closes the connection.

    Args:
        connection: the connection to the run.
        imports: modules that register the user's components.
        config: the configuration of the run.
        log_level: lowest level of the records of `logging` that the run shows.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, chain=True)  # shows where a worker is that is killed
    # Or the last lines before a crash would be lost, as standard output is a pipe.
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    handler = logging.StreamHandler()
    handler.addFilter(is_shown)
    logging.basicConfig(level=log_level, format="%(levelname)s %(name)s: %(message)s", handlers=[handler], force=True)
    asyncio.run(_serve(connection, imports, config))
    sys.stdout.flush()


async def _serve(connection: socket.socket, imports: Sequence[str], config: Config) -> None:
    loop, is_closed, sending = asyncio.get_running_loop(), asyncio.Event(), threading.Lock()

    def send(line: bytes) -> None:
        try:
            with sending:
                connection.sendall(line)
        except OSError as error:
            raise WorkerError(
                f"the connection to the run is closed ({error}); a process that an agent starts asks the models at "
                "jaxft.episode().base_url of a run that serves them (llms.<name>.serve)"
            ) from None

    def listen() -> None:
        with contextlib.suppress(OSError), open(connection.fileno(), "rb", closefd=False) as lines:
            for line in lines:  # the agent may close it
                worker.run.take(line)
        loop.call_soon_threadsafe(is_closed.set)

    worker = Worker(send, imports, config)
    os.register_at_fork(after_in_child=connection.close)
    threading.Thread(target=listen, name="jaxft worker", daemon=True).start()
    await is_closed.wait()
    await worker.__aexit__()


class WorkerClient(LanguageModel):
    """A language model of the run, which answers and records the calls."""

    def __init__(self, run: "RunPeer", name: str, max_context_tokens: int) -> None:
        self.name = name
        self.max_context_tokens = max_context_tokens
        self._run = run
        self._texts: dict[int, str] = {}

    async def answer(
        self, request: ChatRequest | CompletionRequest, on_delta: Callable[[Delta], None] | None = None
    ) -> Reply:
        """Answer a request like `chat`, and give `on_delta` the pieces of the answers as they are sampled."""
        episode = find_episode()
        if episode is None:
            note_outside_call()
        else:
            await episode.check_open()
            episode.count_begun(request.n)
        episode_id = None if episode is None else episode.id
        question = {"llm": self.name, "request": request, "functions": current_functions(), "episode_id": episode_id}
        take = None if on_delta is None else lambda delta: on_delta(DELTA.validate_python(delta))
        try:
            answer = await self._run.ask("answer", question, take)
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

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt."""
        return await self._run.ask("count_tokens", {"name": self.name, "request": request})

    def token_text(self, token_id: int) -> str:
        """Return the text of a token of an earlier answer, control tokens included."""
        return self._texts[token_id]

    async def check(self) -> None:
        """Raise a `PolicyError` if the model can answer nothing any more."""
        await self._run.ask("find_llm", {"name": self.name})


class RunPeer(Peer):
    """The run, which raises its errors as they are."""

    async def ask(self, name: str, arguments: Message, on_delta: Callable[[Any], object] | None = None) -> Any:
        """Return the result of a function of the run, or raise its error."""
        try:
            return await self.call(name, arguments, on_delta)
        except UserCodeError as failure:
            raise failure.error from None


class Worker(Builder):
    """Makes the components of a worker, which the run calls; the language models that the run has are asked there.

    Attributes:
        run: the connection to the run.
    """

    def __init__(self, send: Callable[[bytes], None], imports: Sequence[str], config: Config) -> None:
        path = config.finetuning.output_dir  # the run has locked it, and shows what is printed
        super().__init__(config, RunDirectory(path, FileLock(path / "unused.lock")), Console())
        self.run = RunPeer(send, self.start, self.call_component)
        self._imports = imports
        self._supervisor = Supervisor(print, blocked_seconds=None)

    async def get_server_url(self, default: ServeConfig | None = None, port: int | None = None) -> str:
        """Return the address of the run's server."""
        return await self.run.ask("get_server_url", {})

    async def _language_model(self, name: str) -> Any:
        self.get_llm_config(name)  # raises if there is none
        llm = await self._make_shared(f"llms.{name} of the run", lambda: self._find(name))
        return await super()._language_model(name) if llm is None else llm

    async def _find(self, name: str) -> WorkerClient | None:
        """Return the client of a language model of the run; None for one on a server, which needs nothing of it."""
        tokens = await self.run.ask("find_llm", {"name": name})
        return None if tokens is None else WorkerClient(self.run, name, tokens)

    async def start(self) -> None:
        """Import the user's modules, and make the components that run in workers."""
        import_installed()
        for name in self._imports:
            import_module(name)
        evaluators, general = self.config.eval.evaluators, self.config.eval.general
        if general.worker_memory_mb is not None:
            limit_memory(general.worker_memory_mb * 2**20)
        if general.isolation == "process":
            await self.get_workflow()
        for name, evaluator in evaluators.items():
            if general.judge_isolation == "process" and not isinstance(evaluator, WeightedSumConfig):
                await self.get_evaluator(name)

    async def call_component(self, name: str | None, argument: Any, identity: Message | None, api_key: str) -> Any:
        """Call a component in an episode, and return its result as JSON."""
        episode, outside = None, outside_calls()
        if identity is not None:
            episode = Episode(**identity)  # the worker's own record; that of the run is the one that counts
            episode.adopt_token(api_key)
        try:
            with recording(episode):
                return await self._call(name, argument)
        except UserCodeError as failure:
            if isinstance(failure.error, MemoryError):
                os._exit(OUT_OF_MEMORY)
            raise
        finally:
            told: Message = {"outside": outside_calls() - outside}
            if episode is not None:  # what only this process knows; the run itself records the calls
                episode.end()
                told["step_rewards"] = list(episode.step_rewards.items())
                told["candidates"] = [([call.index for call in calls], scores) for calls, scores in episode.candidates]
                told["remote_calls"] = episode.remote_calls
            self.run.tell("record", told)

    async def _call(self, name: str | None, argument: Any) -> Any:
        is_group, items = False, []
        if name is None:
            function = workflow_of(await self.get_workflow(), argument)
        else:
            function = await self.get_evaluator(name)
            is_group = isinstance(self.get_evaluator_config(name), GroupEvaluatorConfig)
            items = [EvalInputItem(**item) for item in argument]
            argument = items if is_group else items[0]
        before, in_thread = descendants(os.getpid()), not is_async(function)
        try:
            result = await self._supervisor.run(
                function, argument, name="", run_in_thread=in_thread, seconds=None, late=""
            )
        finally:
            await _check_children(before)
        if name is None:
            return result
        scores = scored_values(result, items, is_group=is_group)
        return [describe_error(each) if isinstance(each, UserCodeError) else each for each in scores]


async def _check_children(before: Container[int]) -> None:
    """Raise a `WorkerError` if processes beside those before are running, and go on for more than a second."""
    deadline = time.monotonic() + CHILD_GRACE_SECONDS
    own: list[Any] = [forkserver._forkserver, resource_tracker._resource_tracker]
    helpers = own[0]._forkserver_pid, own[1]._pid  # they live as long as this process
    while left := [name for pid, name in descendants(os.getpid()).items() if pid not in before and pid not in helpers]:
        if time.monotonic() > deadline:
            raise WorkerError(f"it left {len(left)} processes behind, the first of which is '{left[0]}'")
        await asyncio.sleep(0.02)
