"""Agents and evaluators in processes of their own, which may hang, leak or crash without harm to the run.

A worker that takes too long, breaks a limit or ends is replaced. What it did costs its episode and nothing else: the
run answers what a worker asks and records the calls, and their random numbers depend on nothing but the episode.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pydantic import TypeAdapter

from jaxft.errors import PolicyError, UserCodeError, WorkerError
from jaxft.harness import worker_processes as processes
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.evaluators import EpisodeScore
from jaxft.harness.registry import locate_module
from jaxft.harness.worker_protocol import LINE_BYTES, Message, Peer, read_error
from jaxft.rollout.calls import RemoteCall
from jaxft.rollout.chat_request import ChatRequest, CompletionRequest
from jaxft.rollout.current import add_outside_calls, find_episode, named_functions, recording
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.recorder import Candidates, Episode

CLOSE_SECONDS = 5.0
"""Time that a worker has to close its components when it is retired."""

END_SECONDS = 1.0
"""Time that a worker has to end after it has closed its connection."""

MAX_CALLS = 1000
"""Episodes and evaluations after which a worker is replaced."""

MAX_OUTPUT_BYTES = 2**20
"""Size of what an episode or evaluation may write to its standard output."""

IDENTITY = ["run_seed", "stream", "rollout_index", "example_id", "generation", "temperature", "input_obj", "server_url"]
"""Fields of an episode that a worker needs: those that agents read, and its address."""

REMOTE_CALLS = TypeAdapter(list[RemoteCall])


class WorkerPool:
    """Workers of one configuration, which start when they are needed."""

    def __init__(self, builder: Any) -> None:
        """Make a pool of the workers that make the components of a `Builder`; nothing is started yet."""
        self._workers = [Worker(builder) for _ in range(builder.config.eval.general.max_concurrency)]
        self._free: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)

    async def check(self) -> None:
        """Start a worker.

        Raises:
            UserCodeError: it cannot import the user's modules, or the factory of a component raised an error.
            WorkerError: it ended.
        """
        try:
            await self._workers[-1].start()
        except WorkerError as error:
            raise WorkerError(
                f"{error}; is the program of the main script under `if __name__ == '__main__':`, and can the classes "
                "of the configuration be imported?"
            ) from error

    def function(self, name: str | None, seconds: float | None, late: str) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        """Return a component as a function that calls it in a worker, in the current episode if there is one.

        Args:
            name: name of an evaluator; None for the workflow.
            seconds: time limit of a call; None: no limit.
            late: first words of the message of the `TimeoutError`.
        """

        async def call(argument: Any) -> Any:
            is_group = name is not None and isinstance(argument, list)
            items = argument if is_group else [argument]
            given = argument if name is None else [_item(item) for item in items]
            worker = await self._free.get()
            try:
                result = await worker.call_component(name, given, seconds, late)
            finally:
                self._free.put_nowait(worker)
            if name is None:
                return result
            scores = [read_error(each) if isinstance(each, dict) else EpisodeScore(*each) for each in result]
            return scores if is_group else scores[0]

        return call

    async def close(self) -> None:
        """End all workers."""
        await asyncio.gather(*(worker.close() for worker in self._workers))


class Worker:
    """A worker, from the side of the run; its process starts when it is needed, and again when it cannot go on."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._starting: asyncio.Task[None] | None = None
        self._life: asyncio.Task[str] | None = None
        self._is_usable = False  # False while it works, too
        self._num_calls = self._output_bytes = 0
        self._episode: Episode | None = None

    async def start(self) -> None:
        """Start the process unless there is one that can go on; a start that is cancelled here goes on.

        Raises:
            UserCodeError: it cannot import the user's modules, or the factory of a component raised an error.
            WorkerError: it ended, or cannot be started.
        """
        if self._starting is None or (self._starting.done() and (not self._is_usable or self._num_calls >= MAX_CALLS)):
            await self.close()
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def call_component(self, name: str | None, argument: Any, seconds: float | None, late: str) -> Any:
        """Call a component in the current episode, and return its result; see `WorkerPool.function`.

        Raises:
            UserCodeError: the user's code raised an error.
            TimeoutError: it took longer than `seconds`.
            WorkerError: the worker ended, closed its connection or broke a limit.
        """
        await self.start()
        self._episode, identity, api_key = find_episode(), None, ""
        if self._episode is not None:
            identity, api_key = {name: vars(self._episode)[name] for name in IDENTITY}, self._episode.api_key
        self._num_calls += 1
        arguments = {"name": name, "argument": argument, "identity": identity, "api_key": api_key}
        try:
            return await self._call("call_component", arguments, seconds, late)
        finally:
            self._episode = None
            await self._peer.end_answers()

    async def close(self) -> None:
        """End the process, if there is one; it may close its components if it can go on."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._life is None:
            return
        if self._is_usable:
            self._writer.write_eof()
            await asyncio.wait({self._life}, timeout=CLOSE_SECONDS)
            if not self._life.done():
                self._builder.console.message(f"a worker did not close its components within {CLOSE_SECONDS:g} s")
        self._process.kill()
        await asyncio.shield(self._life)

    async def _start(self) -> None:
        imports = [str(locate_module(name)) for name in self._builder.config.imports]
        arguments = imports, self._builder.config, logging.getLogger().getEffectiveLevel()
        try:
            self._process = await asyncio.to_thread(processes.start_worker, *arguments)
        except Exception as error:  # of a user's class that cannot be pickled, too
            raise WorkerError(f"no worker can be started: {error or 'the forkserver has ended'}") from error
        reader, self._writer = await asyncio.open_unix_connection(sock=self._process.connection, limit=LINE_BYTES)
        self._peer = Peer(
            self._send, self.answer, self.find_llm, self.count_tokens, self.record, self._builder.get_server_url
        )
        self._num_calls = 0
        self._life = asyncio.create_task(self._live(reader))
        await self._call("start", {}, None, "")

    async def _call(self, name: str, arguments: Message, seconds: float | None, late: str) -> Any:
        assert self._life is not None
        self._is_usable, self._output_bytes = False, 0
        calling = asyncio.create_task(self._peer.call(name, arguments))
        try:
            await asyncio.wait({calling, self._life}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done() and not self._life.done():
                self._process.kill()
                await asyncio.shield(self._life)
                raise TimeoutError(f"{late} within {seconds:g} s")
            if not calling.done():
                raise WorkerError(self._life.result())
            failure = calling.exception()
            has_broken = isinstance(failure, UserCodeError) and isinstance(failure.error, WorkerError)
            self._is_usable = not has_broken and self._output_bytes <= MAX_OUTPUT_BYTES
            return calling.result()
        finally:
            calling.cancel()
            if not self._is_usable:
                self._process.kill()

    async def _live(self, reader: asyncio.StreamReader) -> str:
        """Take the worker's messages until its process ends; return why it did."""
        printing, is_garbled = asyncio.create_task(self._show_output()), False
        try:
            async for line in reader:
                self._peer.take(line)
        except ConnectionError:
            pass
        except Exception:  # whatever a line raises that is no message, or has no end
            is_garbled = True
            self._process.kill()
        code = await asyncio.to_thread(self._process.exit_code, END_SECONDS)
        if code is None:
            self._process.kill()
            await asyncio.to_thread(self._process.exit_code, None)
        await printing
        self._is_usable = False
        await self._peer.end_answers()
        for each in (self._writer, self._process.process):
            each.close()
        if self._output_bytes > MAX_OUTPUT_BYTES:
            return f"it wrote more than {MAX_OUTPUT_BYTES // 2**20} MiB to its standard output"
        if is_garbled:
            return "it sent what is no message of a worker"
        if code is None:
            return "it closed its connection to the run"
        limit = self._builder.config.eval.general.worker_memory_mb
        if code == processes.OUT_OF_MEMORY:
            return f"it took more memory than it may: eval.general.worker_memory_mb is {limit}"
        signals = {processes.SIGNALLED + each: each.name for each in signal.Signals}
        if code in signals:
            return f"its process was ended by {signals[code]}; eval.general.worker_memory_mb is {limit}"
        return f"it ended its process, with exit code {code}"

    async def _show_output(self) -> None:
        """Show what the worker prints, and where it was when it crashed or was killed; end it when that is too much."""
        reader = asyncio.StreamReader(limit=MAX_OUTPUT_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self._process.output)
        try:
            async for line in reader:
                self._output_bytes += len(line)
                if self._output_bytes > MAX_OUTPUT_BYTES:
                    break
                self._builder.console.message(line.decode(errors="replace").rstrip("\n"))
        except ValueError:  # the line is too long
            self._output_bytes = MAX_OUTPUT_BYTES + 1
        if self._output_bytes > MAX_OUTPUT_BYTES:
            self._is_usable = False
            self._process.kill()
            while await reader.read(2**16):  # or the agent would get an error before it is killed
                pass
        transport.close()

    def _send(self, line: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(line)

    async def answer(
        self, llm: str, request: Message, functions: Sequence[str], episode_id: str | None, on_delta: Any = None
    ) -> Message:
        """Answer a request of the worker as a call of its episode, or of none."""
        episode = None if episode_id is None else self._episode
        if episode_id is not None and (episode is None or episode.id != episode_id):  # of a thread that an agent left
            raise asyncio.CancelledError(f"episode {episode_id} has ended; its calls are not answered any more")
        client = await self._builder.get_llm(llm)
        if request["logit_bias"] is not None:  # names of JSON are texts
            request["logit_bias"] = {int(token): bias for token, bias in request["logit_bias"].items()}
        kind = CompletionRequest if "prompt_ids" in request else ChatRequest
        try:
            with recording(episode), named_functions(tuple(functions)):
                reply = await client.answer(kind(**request), on_delta)
        except PolicyError as error:
            if episode is not None:
                episode.policy_error = error
            raise
        indices = {choice.call_index for choice in reply.choices}
        calls = [] if episode is None else [call for call in episode.calls if call.index in indices]
        tokens = {token for choice in reply.choices for token in choice.token_ids}
        tokens |= {token for choice in reply.choices for most in choice.top_logprobs for token, _ in most}
        return {"reply": reply, "calls": calls, "texts": {token: client.token_text(token) for token in tokens}}

    async def find_llm(self, name: str) -> int | None:
        """Return `max_context_tokens` of a language model that can answer; None for one on a server."""
        client = await self._builder.get_llm(name)
        if not isinstance(client, LanguageModel):
            return None
        await client.check()
        return client.max_context_tokens

    async def count_tokens(self, name: str, request: Message) -> int:
        """Return the number of tokens of the prompt of a request of the worker."""
        client = await self._builder.get_llm(name)
        with recording(self._episode):
            return await client.count_tokens(ChatRequest(**request))

    def record(self, outside: int, step_rewards: Any = (), candidates: Any = (), remote_calls: Any = ()) -> None:
        """Add to the record of an episode what the worker's has beside the calls."""
        add_outside_calls(outside)
        if self._episode is not None:
            calls = {call.index: call for call in self._episode.calls}
            self._episode.step_rewards.update(step_rewards)
            for indices, scores in candidates:
                self._episode.candidates.append(Candidates(tuple(calls[each] for each in indices), tuple(scores)))
            for call in REMOTE_CALLS.validate_python(remote_calls):
                self._episode.record_remote(call)


def _item(item: EvalInputItem) -> Message:
    """Return an item for a message; its steps are the run's own, the other values the user's."""
    steps = {name: [step.model_dump() for step in dict(item)[name]] for name in ("trajectory", "expected_trajectory")}
    return dict(item) | steps
