"""Agents and evaluators in processes of their own, which may hang, leak or crash without harm to the run.

A worker that takes too long, breaks a limit or ends is replaced. What it did costs its episode and nothing else: the
run answers what a worker asks and records the calls, and their random numbers depend on nothing but the episode.
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
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from multiprocessing import Pipe
from typing import Any

from pydantic import TypeAdapter

from jaxft.errors import ComponentError, PolicyError, WorkerError
from jaxft.harness import worker_processes as processes
from jaxft.harness import worker_protocol as protocol
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.evaluators import EpisodeScore
from jaxft.harness.registry import locate_module
from jaxft.harness.supervision import is_library
from jaxft.harness.worker_protocol import Message, to_line
from jaxft.rollout.calls import RemoteCall
from jaxft.rollout.chat_request import ChatRequest, CompletionRequest
from jaxft.rollout.current import add_outside_calls, find_episode, named_functions, recording
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.recorder import Candidates, Episode

CLOSE_SECONDS = 5.0
"""Time that a worker has to close its components when it is retired."""

TRACE_SECONDS = 0.5
"""Time that a worker has to say where it is before it is killed."""

MAX_EPISODES = 1000
"""Episodes and evaluations after which a worker is replaced."""

MAX_OUTPUT_BYTES = 2**20
"""Size of what an episode or evaluation may write to its standard output."""

IDENTITY = ["run_seed", "stream", "rollout_index", "example_id", "generation", "temperature", "input_obj", "server_url"]
"""Fields of an episode that a worker needs: those that agents read, and its address."""

REMOTE_CALLS = TypeAdapter(list[RemoteCall])


class WorkerPool:
    """Workers of one configuration, started as they are needed."""

    def __init__(self, builder: Any) -> None:
        """Make a pool of the workers that make the components of a `ComponentBuilder`; nothing is started yet."""
        self._builder = builder
        self._free = asyncio.Semaphore(builder.config.eval.general.max_concurrency)
        self._idle: list[Worker] = []
        self._tasks: set[asyncio.Task[Any]] = set()  # which start and end workers

    async def check(self) -> None:
        """Start a worker.

        Raises:
            UserCodeError: it cannot import the user's modules, or the factory of a component raised an error.
            WorkerError: it ended.
        """
        async with self._free, self._worker():
            pass

    def function(self, name: str | None, seconds: float | None, late: str) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        """Return a component as a function that calls it in a worker, in the current episode if there is one.

        Args:
            name: name of an evaluator; None for the workflow.
            seconds: time limit of a call; None: no limit.
            late: first words of the message of the `TimeoutError`.
        """

        async def call(argument: Any) -> Any:
            episode, task = find_episode(), asyncio.current_task()
            items = argument if isinstance(argument, list) else [argument]
            identity = None if episode is None else {field: vars(episode)[field] for field in IDENTITY}
            try:
                protocol.check_json(identity)
                if name is None:
                    protocol.check_json(argument)
                work = {
                    "call": name,
                    "argument": argument if name is None else [_item(item) for item in items],
                    "episode": identity,
                    "token": None if episode is None or not episode.is_served else episode.api_key,
                    "label": "" if task is None else task.get_name(),
                }
            except TypeError as error:
                raise TypeError(
                    f"what it is given cannot be handed to another process ({error}): use plain values, or set "
                    f"{'isolation' if name is None else 'judge_isolation'} to none"
                ) from None
            async with self._free, self._worker() as worker:
                result = await worker.do(to_line(work), episode, seconds, late)
            if name is None:
                return result
            scores = [
                protocol.read_failure(each["error"]) if isinstance(each, dict) else EpisodeScore(*each)
                for each in result
            ]
            return scores if isinstance(argument, list) else scores[0]

        return call

    async def close(self) -> None:
        """End all workers."""
        while self._tasks or self._idle:
            for worker in self._idle:
                self._begin(worker.close())
            self._idle = []
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator["Worker"]:
        """Yield a worker; afterwards it is idle, or is replaced if it cannot go on."""
        worker = await self._idle_or_new()
        try:
            yield worker
        finally:
            if not worker.is_usable:
                await asyncio.shield(self._begin(worker.end()))
            elif worker.num_done < MAX_EPISODES:
                self._idle.append(worker)
            else:
                self._begin(worker.close())

    async def _idle_or_new(self) -> "Worker":
        while self._idle:
            worker = self._idle.pop()
            if worker.is_fit:
                return worker
            self._begin(worker.close())  # a thread that an agent left behind has ended it, or flooded its output
        starting = self._begin(Worker.start(self._builder))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._keep)
            raise

    def _keep(self, starting: "asyncio.Task[Worker]") -> None:
        if starting.exception() is None:
            self._idle.append(starting.result())

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Worker:
    """A worker, from the side of the run.

    Attributes:
        num_done: calls of components that it has done.
        is_usable: False while it works, and for good after an error that it cannot recover from.
    """

    def __init__(self, builder: Any, process: Any, server: int, output: Any, trace: Any) -> None:
        self._builder, self._process, self._server = builder, process, server
        self._memory_mb = builder.config.eval.general.worker_memory_mb
        self._output, self._trace = output, trace
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._output_bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        loop = asyncio.get_running_loop()
        self._has_flooded: asyncio.Future[None] = loop.create_future()
        self._code: int | None = None
        self._place = ""  # the user's code that it was in when it was asked last, or crashed
        self.num_done = -1  # its start is no call
        self.is_usable = False
        for pipe in (output, trace):
            os.set_blocking(pipe.fileno(), False)
        loop.add_reader(output.fileno(), self._show_output)
        self._ending = asyncio.create_task(self._wait_for_end())

    @classmethod
    async def start(cls, builder: Any) -> "Worker":
        """Start a worker.

        Raises:
            ComponentError: the configuration cannot be handed to it.
            UserCodeError: it cannot import the user's modules, or the factory of a component raised an error.
            WorkerError: it ended.
        """
        config = builder.config
        imports = [str(locate_module(name)) for name in config.imports]
        try:
            pickled = pickle.dumps(config)
        except Exception as error:  # of a user's class
            raise ComponentError(
                f"eval.general.isolation: the configuration cannot be handed to another process ({error}): define its "
                "classes at the top level of modules that can be imported, or set isolation to none"
            ) from error
        arguments = imports, pickled, config.eval.general.worker_memory_mb, logging.getLogger().getEffectiveLevel()
        connection, theirs = socket.socketpair()
        (output, their_output), (trace, their_trace) = Pipe(duplex=False), Pipe(duplex=False)
        with theirs, their_output, their_trace:
            files = theirs, their_output, their_trace
            try:
                process, server = await asyncio.to_thread(processes.start_worker, imports, arguments, files)
            except (OSError, EOFError) as error:
                for end in (connection, output, trace):
                    end.close()
                raise WorkerError(f"no worker can be started: {error or 'the forkserver has ended'}") from error
        worker = cls(builder, process, server, output, trace)
        worker._reader, worker._writer = await asyncio.open_unix_connection(sock=connection, limit=protocol.LINE_BYTES)
        try:
            await worker.do(b"", None, None, "")
        except BaseException:
            await worker.end()
            raise
        return worker

    async def do(self, work: bytes, episode: Episode | None, seconds: float | None, late: str) -> Any:
        """Let the worker do a work, a message, and return its result.

        Raises:
            UserCodeError: the user's code raised an error.
            TimeoutError: it took longer than `seconds`.
            WorkerError: the worker ended, closed its connection or broke a limit.
        """
        self.is_usable, self._output_bytes = False, 0
        working = asyncio.create_task(self._converse(work, episode))
        watched: list[asyncio.Future[Any]] = [working, self._ending, self._has_flooded]
        try:
            await asyncio.wait(watched, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and not isinstance(working.exception(), OSError):
                done = working.result()
                self.is_usable = done["is_usable"]
                self.num_done += 1
                if done["error"] is not None:
                    raise protocol.read_failure(done["error"])
                return done["result"]
            if self._has_flooded.done():
                raise WorkerError(f"it wrote more than {MAX_OUTPUT_BYTES // 2**20} MiB to its standard output")
            if not working.done() and not self._ending.done():
                await self._ask_for_place()
                raise TimeoutError(f"{late} within {seconds:g} s{self._at_place()}")
            await asyncio.wait({self._ending}, timeout=1.0)
            raise WorkerError(self._reason())
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def close(self) -> None:
        """Let the worker close its components, and end it."""
        self._writer.close()
        await asyncio.wait({self._ending}, timeout=CLOSE_SECONDS)
        if not self._ending.done():
            self._builder.console.message(f"a worker did not close its components within {CLOSE_SECONDS:g} s")
        await self.end()

    async def end(self) -> None:
        """End the worker at once, with all processes that it started, and wait for that."""
        if not self._ending.done():
            await asyncio.to_thread(processes.kill_worker, self._process.pid)
        await asyncio.shield(self._ending)

    @property
    def is_fit(self) -> bool:
        """True if it can be given work."""
        return not self._ending.done() and not self._has_flooded.done()

    async def _converse(self, work: bytes, episode: Episode | None) -> Message:
        """Send a work, answer what the worker asks meanwhile, and return how the work ended."""
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            self._writer.write(work)
            await self._writer.drain()
            async for line in self._reader:
                match json.loads(line):
                    case {"done": done}:
                        _take_over(done, episode)
                        return done
                    case {"note": text}:
                        self._builder.console.message(text)
                    case {"log": attributes}:
                        record = logging.makeLogRecord(attributes)
                        logging.getLogger(record.name).handle(record)
                    case {"cancel": number}:
                        if number in tasks:
                            tasks[number].cancel()
                    case request:
                        # A call outside of episodes is one of an empty context: it is counted as such.
                        is_unknown = request.get("place") == "unknown"
                        context = contextvars.Context() if is_unknown else contextvars.copy_context()
                        answering = self._answer(request, episode)
                        tasks[request["id"]] = asyncio.get_running_loop().create_task(answering, context=context)
            raise ConnectionError("the worker has closed its connection")
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _answer(self, request: Message, episode: Episode | None) -> None:
        number = request["id"]
        try:
            self._send({"id": number, "result": await self._result(request, episode)})
        except (Exception, asyncio.CancelledError) as error:  # a thread that the agent left behind may wait
            if isinstance(error, PolicyError) and episode is not None:
                episode.policy_error = error
            self._send({"id": number, "error": protocol.describe_error(error)})

    async def _result(self, request: Message, episode: Episode | None) -> Any:
        """Return the result of a request of the worker."""
        match request:
            case {"find": name}:
                llm = await self._builder.get_llm(name)
                return llm.max_context_tokens if isinstance(llm, LanguageModel) else None
            case {"serve": _}:
                return await self._builder.get_server_url()
            case {"check": name}:
                return await (await self._builder.get_llm(name)).check()
        llm = await self._builder.get_llm(request["answer"])

        def send_delta(delta: Any) -> None:
            self._send({"id": request["id"], "delta": delta})

        with contextlib.ExitStack() as scope:
            if request["place"] == "outside":
                scope.enter_context(recording(None))
            scope.enter_context(named_functions(tuple(request["functions"])))
            reply = await llm.answer(_request(request["request"]), send_delta if request["is_streamed"] else None)
        indices = {choice.call_index for choice in reply.choices}
        calls = [] if episode is None else [call for call in episode.calls if call.index in indices]
        tokens = {token for choice in reply.choices for token in choice.token_ids}
        tokens |= {token for choice in reply.choices for most in choice.top_logprobs for token, _ in most}
        return {"reply": reply, "calls": calls, "texts": {token: llm.token_text(token) for token in tokens}}

    def _send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(to_line(message))

    async def _wait_for_end(self) -> None:
        loop = asyncio.get_running_loop()
        has_ended = asyncio.Event()
        loop.add_reader(self._process.sentinel, has_ended.set)
        await has_ended.wait()
        loop.remove_reader(self._process.sentinel)
        if processes.is_running(self._process.pid):  # the forkserver has ended, which alone knows the exit code
            processes.kill_worker(self._process.pid)
        else:
            self._code = self._process.exitcode
        self._show_output()
        self._read_place()
        loop.remove_reader(self._output.fileno())
        await asyncio.to_thread(processes.kill_left_behind, self._process.pid, self._server)
        for each in (self._output, self._trace, self._writer, self._process):
            each.close()

    def _show_output(self) -> None:
        """Write what the worker wrote to the run's own standard output, and count it."""
        while True:
            try:
                content = os.read(self._output.fileno(), 2**16)
            except BlockingIOError:
                return
            self._output_bytes += len(content)
            if not content or self._output_bytes > MAX_OUTPUT_BYTES:
                asyncio.get_running_loop().remove_reader(self._output.fileno())
                if content and not self._has_flooded.done():
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
            os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + TRACE_SECONDS
        while time.monotonic() < deadline and not self._place and not self._ending.done():
            await asyncio.sleep(0.01)
            self._read_place()

    def _read_place(self) -> None:
        with contextlib.suppress(OSError):  # it has said nothing, or has ended
            trace = os.read(self._trace.fileno(), 2**16).decode(errors="replace")
            frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', trace)
            users = [frame for frame in frames if not is_library(frame[0]) and not frame[0].startswith("<")]
            if users:
                self._place = "{}:{} in {}".format(*users[0])

    def _at_place(self) -> str:
        """Return the end of a message, which says where the worker is or was."""
        return f", at {self._place}" if self._place else ""

    def _reason(self) -> str:
        """Return why the worker can do no more."""
        code = self._code
        if not self._ending.done():
            return "it closed its connection to the run, as by closing all file descriptors"
        if code is None:
            return "its process has ended, with the forkserver"
        if code < 0:
            names = {each.value: each.name for each in signal.Signals}
            return f"its process was ended by {names.get(-code, f'signal {-code}')}{self._at_place()}"
        if code == processes.OUT_OF_MEMORY and self._memory_mb is not None:
            return protocol.out_of_memory(self._memory_mb)
        if code == processes.BROKEN:
            return "its process broke down, as when an agent closes files that it has not opened"
        main = "" if self.num_done >= 0 else "; is the program of the main script under `if __name__ == '__main__':`?"
        return f"it ended its process, with exit code {code}{main}"


def _item(item: EvalInputItem) -> Message:
    """Return an item for a message; its steps are the run's own, the other values the user's."""
    steps = {name: [step.model_dump() for step in dict(item)[name]] for name in ("trajectory", "expected_trajectory")}
    values = {name: value for name, value in dict(item).items() if name not in steps}
    protocol.check_json(values)
    return values | steps


def _request(message: Message) -> ChatRequest | CompletionRequest:
    """Return a request as the worker made it; names of JSON are texts, those of `logit_bias` were numbers."""
    if message["logit_bias"] is not None:
        message["logit_bias"] = {int(token): bias for token, bias in message["logit_bias"].items()}
    return CompletionRequest(**message) if "prompt_ids" in message else ChatRequest(**message)


def _take_over(done: Message, episode: Episode | None) -> None:
    """Add to the run's record of an episode what the worker's has beside the calls."""
    add_outside_calls(done["outside_calls"])
    if episode is not None:
        calls = {call.index: call for call in episode.calls}
        episode.step_rewards.update(done["step_rewards"])
        for indices, scores in done["candidates"]:
            episode.candidates.append(Candidates(tuple(calls[index] for index in indices), tuple(scores)))
        for call in REMOTE_CALLS.validate_python(done["remote_calls"]):
            episode.record_remote(call)
