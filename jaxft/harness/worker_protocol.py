"""The protocol of the run and its workers: each end of a Unix socket calls functions of the other, in lines of JSON.

A call has `id`, `call` (the function's name) and `arguments`. After any number of lines with `delta`, a line with
`result` or `error` and the same `id` answers it. `cancel` names a call that nobody waits for any more. A call whose
`id` is null has no answer. Requests and replies of language models are those that the endpoint makes of HTTP requests.

Values of user code cross as JSON has them: tuples become lists, and what JSON does not hold is refused.
"""

import asyncio
import builtins
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

from jaxft import errors
from jaxft.errors import UserCodeError, WorkerError, user_code

Message = dict[str, Any]

LINE_BYTES = 2**30
"""Largest size of a message."""

SHARED_ERRORS = {
    kind.__name__: kind
    for module in (builtins, errors, asyncio.exceptions)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, BaseExceptionGroup)
}
"""Errors that are raised again with their class in the other process, by name."""


class Peer:
    """One end of a connection.

    Any thread and event loop may call the other end. Its calls are answered in the event loop that made the peer.
    """

    def __init__(self, send: Callable[[bytes], object], *functions: Callable[..., Any]) -> None:
        """Make the end that sends by `send`, and answers by `functions`: coroutine functions, but for `tell`."""
        self._send, self._functions = send, {function.__name__: function for function in functions}
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._asked: dict[int, tuple[asyncio.Future[Any], Callable[[Any], object] | None]] = {}
        self._answers: dict[int, asyncio.Task[None]] = {}

    def tell(self, name: str, arguments: Message) -> None:
        """Call a function of the other end, and wait for no answer."""
        self._send(to_line({"id": None, "call": name, "arguments": arguments}))

    async def call(self, name: str, arguments: Message, on_delta: Callable[[Any], object] | None = None) -> Any:
        """Return the result of a function of the other end, which may send pieces of it to `on_delta` before.

        Raises:
            UserCodeError: it raised an error.
        """
        number, future = next(self._ids), asyncio.get_running_loop().create_future()
        self._asked[number] = future, on_delta
        try:
            question = {"id": number, "call": name, "arguments": arguments, "is_streamed": on_delta is not None}
            self._send(to_line(question))
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(WorkerError):
                self._send(to_line({"cancel": number}))
            raise
        finally:
            del self._asked[number]

    def take(self, line: bytes) -> None:
        """Take a message of the other end, in any thread."""
        message = json.loads(line)
        if "call" in message:
            self._loop.call_soon_threadsafe(self._begin, message)
        elif "cancel" in message:
            self._loop.call_soon_threadsafe(self._cancel, message["cancel"])
        elif message["id"] in self._asked:  # it was not cancelled
            future, on_delta = self._asked[message["id"]]
            with contextlib.suppress(RuntimeError):  # the loop has been closed, and nobody waits in it
                future.get_loop().call_soon_threadsafe(_deliver, message, future, on_delta)

    async def end_answers(self) -> None:
        """Cancel the calls of the other end that are being answered."""
        for number in self._answers:
            self._cancel(number)
        await asyncio.gather(*self._answers.values(), return_exceptions=True)

    def _cancel(self, number: int) -> None:
        if number in self._answers:
            self._answers[number].cancel()

    def _begin(self, message: Message) -> None:
        number, function, arguments = message["id"], self._functions[message["call"]], message["arguments"]
        if number is None:
            function(**arguments)
            return
        if message["is_streamed"]:
            arguments["on_delta"] = lambda delta: self._send(to_line({"id": number, "delta": delta}))
        self._answers[number] = self._loop.create_task(self._answer(number, function, arguments))
        self._answers[number].add_done_callback(lambda _: self._answers.pop(number))

    async def _answer(self, number: int, function: Callable[..., Any], arguments: Message) -> None:
        try:
            with user_code():
                answer = to_line({"id": number, "result": await function(**arguments)})
        except (UserCodeError, asyncio.CancelledError) as error:
            answer = to_line({"id": number, "error": describe_error(error)})
        self._send(answer)


def _deliver(message: Message, future: "asyncio.Future[Any]", on_delta: Callable[[Any], object] | None) -> None:
    """Give an answer, or a piece of it, to the call that waits for it."""
    if on_delta is not None and "delta" in message:
        on_delta(message["delta"])
    elif "error" in message and not future.done():
        future.set_exception(read_error(message["error"]))
    elif not future.done():
        future.set_result(message["result"])


def to_line(message: Message) -> bytes:
    """Return a message as a line of JSON, in which text that is no valid Unicode is escaped."""
    return json.dumps(message, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Return an object of jaxft as JSON holds it; raise a TypeError for one of the user's."""
    if not dataclasses.is_dataclass(value) or not type(value).__module__.startswith("jaxft."):
        raise TypeError(
            f"a value of type {type(value).__name__} is no JSON, and cannot cross to or from the process of an agent "
            "or evaluator: use plain values there, or set eval.general.isolation or judge_isolation to none"
        )
    return {field.name: vars(value)[field.name] for field in dataclasses.fields(value)}


def describe_error(error: BaseException) -> Message:
    """Return an error as a message: the nearest class that every process has, with arguments and attributes."""
    failure = error if isinstance(error, UserCodeError) else UserCodeError(error)
    error = failure.error
    return {
        "kind": next(each.__name__ for each in type(error).__mro__ if SHARED_ERRORS.get(each.__name__) is each),
        "arguments": [value for value in error.args if _is_plain(value)],
        "attributes": {name: value for name, value in vars(error).items() if _is_plain(value)},
        "texts": [failure.summary, failure.traceback, failure.tail],
    }


def _is_plain(value: Any) -> bool:
    """Return True for a value that JSON holds and that holds no others; Python writes no number of 4,300 digits."""
    return abs(value) < 2**63 if isinstance(value, int) else isinstance(value, str | float | None)


def read_error(message: Message) -> UserCodeError:
    """Return the error of `describe_error`, with its traceback in the other process."""
    kind: Any = SHARED_ERRORS[message["kind"]]
    error = kind.__new__(kind, *message["arguments"])
    vars(error).update(message["attributes"])
    return UserCodeError.of_another_process(error, *message["texts"])
