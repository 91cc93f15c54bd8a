"""The protocol of the run and its workers: JSON lines over one Unix socket for each worker.

A worker says `done` when it can be given work. Then the run sends one work after the other, `call` of a component, and
the worker ends each with `done`. Meanwhile it sends requests with an `id`, which the run answers with `delta`, `result`
or `error` of that id, and messages without an answer: `cancel`, `note` and `log`. Requests and replies of language
models are those that the endpoint makes of HTTP requests.

Values of user code cross as JSON, too: those that JSON does not hold are refused, and tuples become lists.
"""

import asyncio
import builtins
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxft import errors
from jaxft.errors import UserCodeError, one_line

Message = dict[str, Any]

LINE_BYTES = 2**30
"""Largest size of a message."""

SHARED_ERRORS = {
    kind.__name__: kind
    for module in (builtins, errors, asyncio.exceptions)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
"""Errors that are raised again with their class in the other process, by name."""


def to_line(message: Mapping[str, Any]) -> bytes:
    """Return a message as a line of JSON, in which text that is no valid Unicode is escaped."""
    return json.dumps(message, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: vars(value)[field.name] for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__} is no JSON")


def check_json(value: Any) -> None:
    """Raise a TypeError that names the type of a part that JSON does not hold."""
    if isinstance(value, dict):
        check_json([*value.values()])
        value = next((name for name in value if not isinstance(name, str)), None)
    if isinstance(value, list | tuple):
        for part in value:
            check_json(part)
    elif not isinstance(value, str | int | float | None):
        raise TypeError(f"a value of type {type(value).__name__} is no JSON")


def describe_error(error: BaseException) -> Message:
    """Return an error as a message: the nearest class that every process has, its text and its plain attributes."""
    failure = error if isinstance(error, UserCodeError) else UserCodeError(error)
    error = failure.error
    kind = next(each.__name__ for each in type(error).__mro__ if SHARED_ERRORS.get(each.__name__) is each)
    try:
        text = str(error)
    except Exception:  # the __str__ of a user's class has a fault
        text = one_line(error)
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | None)}
    told = {"summary": failure.summary, "traceback": failure.traceback, "tail": failure.tail}
    return {"kind": kind, "text": text, "attributes": attributes, **told}


def read_error(message: Message) -> BaseException:
    """Return the error of `describe_error`; one whose class takes more than a text is a RuntimeError."""
    kind: Any = SHARED_ERRORS[message["kind"]]
    try:
        error = kind.__new__(kind, message["text"])
    except TypeError:
        return RuntimeError(message["summary"])
    vars(error).update(message["attributes"])
    return error


def read_failure(message: Message) -> UserCodeError:
    """Return the error of `describe_error` as one of user code, with its traceback in the other process."""
    return UserCodeError.of_another_process(
        read_error(message), message["summary"], message["traceback"], message["tail"]
    )


def out_of_memory(memory_mb: int) -> str:
    """Return the message about a worker that took more memory than it may."""
    return f"it took more memory than eval.general.worker_memory_mb, {memory_mb} MiB"
