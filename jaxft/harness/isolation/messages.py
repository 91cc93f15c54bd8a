"""Messages between the run and a worker: pickled values over a socket, and what they are.

The run asks a worker for one result at a time. Meanwhile the worker asks the run to answer requests of language models.
Both sides are one user's processes: a pickle protects a run from accidents of an agent, not from its malice.
"""

import contextlib
import pickle
import socket
import struct
from typing import Any, NamedTuple

from jaxft.errors import WorkerError
from jaxft.rollout.calls import Call, RemoteCall, Reply
from jaxft.rollout.chat_request import ChatRequest, CompletionRequest, Delta

_LENGTH = struct.Struct("!Q")


class Identity(NamedTuple):
    """The fields of an episode that a worker needs: those that agents read, and its addresses."""

    run_seed: int
    stream: int
    rollout_index: int
    example_id: str
    generation: int
    temperature: float | None
    input_obj: Any
    server_url: str
    token: str | None


class Work(NamedTuple):
    """Run to worker: call a component.

    Attributes:
        name: name of an evaluator; None for the workflow.
        argument: argument of the call.
        episode: the episode of the call; None for evaluators.
        label: name of the call in messages.
    """

    name: str | None
    argument: Any
    episode: Identity | None
    label: str


class Make(NamedTuple):
    """Run to worker: make a component, the evaluator of this name or, for None, the workflow."""

    name: str | None


class Made(NamedTuple):
    """Worker to run: the component is made; the modules that this process has imported for it, in their order."""

    modules: tuple[str, ...]


class Close(NamedTuple):
    """Run to worker: close the components; the answer is `Made`, without modules."""


class Remains(NamedTuple):
    """The parts of an episode that only its worker knows; the run itself records the calls.

    Attributes:
        step_rewards: sum of the rewards of each answer, by its index.
        candidates: indices of answers and their scores, for each decision.
        remote_calls: answers of remote models.
        outside_calls: number of calls of remote models outside of any episode.
    """

    step_rewards: dict[int, float]
    candidates: list[tuple[tuple[int, ...], tuple[float, ...]]]
    remote_calls: list[RemoteCall]
    outside_calls: int


class Done(NamedTuple):
    """Worker to run: the result of the work, pickled."""

    result: bytes
    remains: Remains


class Failed(NamedTuple):
    """Worker to run: the work raised an error; `error` is it, pickled, if it can be.

    Attributes:
        error: the error, pickled; None if it cannot be.
        summary, traceback, tail: see `UserCodeError`.
        is_fatal: True if the worker must be replaced.
        remains: what the episode has all the same; None if there was none.
    """

    error: bytes | None
    summary: str
    traceback: str
    tail: str
    is_fatal: bool
    remains: Remains | None = None


class Find(NamedTuple):
    """Worker to run: say what is known of a language model."""

    number: int
    llm: str


class Found(NamedTuple):
    """Run to worker: the context of a language model of the run; None if the worker is to make it itself."""

    number: int
    max_context_tokens: int | None


class Serve(NamedTuple):
    """Worker to run: say the address of the run's server."""

    number: int


class Served(NamedTuple):
    """Run to worker: the address of the run's server."""

    number: int
    url: str


class Ask(NamedTuple):
    """Worker to run: answer a request.

    Attributes:
        number: number of the request in this worker.
        llm: name of the language model.
        request: the request.
        is_streamed: True if pieces are wanted as they are sampled.
        functions: names of the functions that ask.
        place: "episode", "outside" on purpose (as evaluators are), or "unknown".
    """

    number: int
    llm: str
    request: ChatRequest | CompletionRequest
    is_streamed: bool
    functions: tuple[str, ...]
    place: str


class Check(NamedTuple):
    """Worker to run: raise the error of a language model that can answer nothing any more."""

    number: int
    llm: str


class Piece(NamedTuple):
    """Run to worker: a piece of an answer."""

    number: int
    delta: Delta


class Answer(NamedTuple):
    """Run to worker: the answer, the calls that were recorded, and texts of token ids that were not sent before."""

    number: int
    reply: Reply | None
    calls: tuple[Call, ...]
    texts: dict[int, str]


class Refusal(NamedTuple):
    """Run to worker: the error in the place of an answer, pickled, and its type and message."""

    number: int
    error: bytes | None
    summary: str


class Cancel(NamedTuple):
    """Worker to run: nobody waits for an answer any more."""

    number: int


class Note(NamedTuple):
    """Worker to run: a message for the console."""

    text: str


class LogEntry(NamedTuple):
    """Worker to run: a record of `logging`, as its dictionary."""

    record: dict[str, Any]


def pack(message: Any) -> bytes:
    """Return a message as bytes.

    Raises:
        Exception: a value in it cannot be pickled; the class of the error is the value's own choice.
    """
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


def receive(connection: socket.socket) -> Any:
    """Wait for a message and return it; None at the end of the connection."""
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    content = _exactly(connection, _LENGTH.unpack(head)[0])
    return None if content is None else pickle.loads(content)


async def read(reader: Any) -> Any:
    """`receive` from an asyncio stream.

    Raises:
        IncompleteReadError: the connection has ended.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def pack_error(error: BaseException) -> bytes | None:
    """Return an error, pickled; None if it cannot be read again from that."""
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:  # of a user's class
        return None
    return content


def unpack_error(content: bytes | None, summary: str) -> BaseException:
    """Return the error of `pack_error`, or a `RuntimeError` with this text if this process cannot read it."""
    if content is not None:
        with contextlib.suppress(Exception):  # its class is one of the other process, or has a fault
            error = pickle.loads(content)
            if isinstance(error, BaseException):
                return error
    return RuntimeError(summary)


def out_of_memory(memory_bytes: int) -> WorkerError:
    """Return the error of a worker that took more memory than it may."""
    return WorkerError(f"it took more memory than eval.general.worker_memory_mb, {memory_bytes / 2**20:.0f} MiB")


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    content = bytearray()
    while len(content) < count:
        part = connection.recv(min(count - len(content), 2**20))
        if not part:
            return None
        content += part
    return bytes(content)
