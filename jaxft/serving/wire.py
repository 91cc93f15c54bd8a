"""JSON in and out, errors, server-sent events, ids and counts of tokens: all dialects of the app share them.

A dialect is one API to ask for answers by, such as OpenAI's chat completions.
"""

import itertools
import json
import uuid
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic_core import from_json

from jaxft import Delta, Reply

METRICS = "/metrics"
"""Path of a server's metrics."""


@dataclass
class Served:
    """A request that a server answers.

    Attributes:
        id: the client's `x-request-id`, or the server's.
        model: name of the language model that answered it; empty before.
        reply: the answer; None before its end, and without one.
    """

    id: str
    model: str = ""
    reply: Reply | None = None


SERVED: ContextVar[Served | None] = ContextVar("jaxft_served", default=None)
"""The request that is being answered; None in a process that asks its own app, without a server."""


def note_reply(model: str, reply: Reply) -> None:
    """Tell the server, if one is there, what answers the present request."""
    if (served := SERVED.get()) is not None:
        served.model, served.reply = model, reply


def id_of_error() -> dict[str, str]:
    """Return `request_id` for the JSON of an error; nothing without a server."""
    return {} if (served := SERVED.get()) is None else {"request_id": served.id}


class APIError(Exception):
    """A refusal; each dialect words it in its own format.

    Attributes:
        message: the reason and the way out.
        status: HTTP status.
        kind: OpenAI's `type` of the error.
        param: field that is refused; None if no single one is.
        code: OpenAI's `code` of the error; None for most.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code


def openai_error(error: APIError) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of an error in OpenAI's format."""
    body = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return error.status, {"error": {**body, **id_of_error()}}


class EventWriter(Protocol):
    """Writes the server-sent events of one streamed reply."""

    def events(self, piece: Delta | Reply) -> Iterator[bytes]:
        """Yield the events of a piece of the answers, or of the reply, which is the last piece."""

    def error(self, error: APIError) -> bytes:
        """Return the event of an error that ends the stream."""


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        APIError: the body is no such object, or has NaN, half characters or more than 200 levels.

    >>> parse_body(b'{"n": 2}')
    {'n': 2}
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise APIError(f"the body is not JSON that can be read: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise APIError(f"the body is a JSON {type(value).__name__}; wanted an object")
    return value


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode(value: Mapping[str, Any]) -> bytes:
    """Return a value as JSON."""
    return _ENCODER.encode(value).encode()


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + encode(data) + b"\n\n"


_PREFIX, _numbers = uuid.uuid4().hex[:16], itertools.count()


def make_id(prefix: str) -> str:
    """Return a new id, such as `chatcmpl-` with 32 hexadecimal digits."""
    return f"{prefix}{_PREFIX}{next(_numbers):016x}"  # random bits for each would cost a tenth of a millisecond


def count_tokens(reply: Reply) -> tuple[int, int]:
    """Return the number of tokens of a reply's prompt, and of those that were sampled for all its answers."""
    return len(reply.prompt_ids), sum(len(choice.token_ids) for choice in reply.choices)
