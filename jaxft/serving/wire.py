"""The parts that all dialects of the app share: JSON in and out, errors, server-sent events, ids and counts of tokens.

A dialect is one API to ask for answers by, such as OpenAI's chat completions.
"""

import itertools
import json
import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from jaxft.errors import RequestError
from jaxft.rollout.calls import Reply
from jaxft.rollout.chat_request import ChatRequest, CompletionRequest, Delta

MAX_BODY_BYTES = 2**24
"""Largest body of a request."""

MAX_DEPTH = 100
"""Most levels of lists and objects in a body."""

MAX_VALUES = 2**18
"""Most values in a body, those of lists and objects within it included: reading many small ones takes long."""

LOWEST_LOGPROB = -9999.0
"""The log-probability that stands for minus infinity, which JSON cannot hold."""


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
    return error.status, {"error": body}


class AnyCall(Protocol):
    """A request as a dialect has read it.

    Attributes:
        model: name of the language model.
        request: what to sample.
        stream: True for server-sent events.
    """

    @property
    def model(self) -> str: ...

    @property
    def request(self) -> ChatRequest | CompletionRequest: ...

    @property
    def stream(self) -> bool: ...


class EventWriter(Protocol):
    """Writes the server-sent events of one streamed reply."""

    def events(self, piece: Delta | Reply) -> Iterator[bytes]:
        """Yield the events of a piece of the answers, or of the reply, which is the last piece."""

    def error(self, error: APIError) -> bytes:
        """Return the event of an error that ends the stream."""


class Dialect(NamedTuple):
    """An API to ask for answers by.

    Attributes:
        path: path of its requests.
        schema: JSON schema of a request.
        parse: returns the call that the JSON of a request asks for.
        reply: returns the JSON of a reply to a call; the function gives the text of a token id.
        make_writer: returns the writer of a streamed reply, from the same arguments without the reply.
        error: returns status and JSON of an error.
        names: the dialect's names of arguments of `ChatRequest` and `CompletionRequest` that have another one there.
    """

    path: str
    schema: Mapping[str, Any]
    parse: Callable[[Mapping[str, Any]], Any]
    reply: Callable[[Any, Reply, Callable[[int], str]], dict[str, Any]]
    make_writer: Callable[[Any, Callable[[int], str]], EventWriter]
    error: Callable[[APIError], tuple[int, dict[str, Any]]] = openai_error
    names: Mapping[str, str] = {}


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        APIError: the body is no such object, or one that cannot be worked with: NaN, half characters, deep nesting.

    >>> parse_body(b'{"n": 2}')
    {'n': 2}
    """
    try:
        text = body.decode()
        value = _DECODER.decode(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # raises on half of a character
    except (ValueError, RecursionError) as error:
        raise APIError(f"the body is not JSON that can be read: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise APIError(f"the body is a JSON {type(value).__name__}; wanted an object")
    level: list[Any] = [value]
    depth = count = 0
    while level := [child for node in level if isinstance(node, dict | list) for child in _children(node)]:
        depth, count = depth + 1, count + len(level)
        if count > MAX_VALUES:
            raise APIError(f"the body holds more than {MAX_VALUES} values")
        if depth == MAX_DEPTH:
            raise APIError(f"the body is nested deeper than {MAX_DEPTH} levels")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"it holds {text[:30]}, which is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _children(node: Any) -> Any:
    return node.values() if isinstance(node, dict) else node


def encode(value: Mapping[str, Any]) -> bytes:
    """Return a value as JSON."""
    return _ENCODER.encode(value).encode()


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + encode(data) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
"""End of a stream of OpenAI's completions."""


def in_words_of(names: Mapping[str, str], error: RequestError, code: str | None = None) -> APIError:
    """Return the refusal of a request that cannot be answered, with a dialect's own name of the argument.

    >>> error = RequestError("max_tokens is 0; wanted an integer of at least 1", param="max_tokens")
    >>> in_words_of({"max_tokens": "max_output_tokens"}, error).message
    'max_output_tokens is 0; wanted an integer of at least 1'
    """
    message, param = str(error), error.param
    if param is not None and param in names:
        own = names[param]
        message = own + message.removeprefix(param) if message.startswith(f"{param} ") else message
        param = own
    return APIError(message, param=param, code=code)


_PREFIX, _numbers = uuid.uuid4().hex[:16], itertools.count()


def make_id(prefix: str) -> str:
    """Return a new id, such as `chatcmpl-` with 32 hexadecimal digits."""
    return f"{prefix}{_PREFIX}{next(_numbers):016x}"  # random bits for each would cost a tenth of a millisecond


def count_output_tokens(reply: Reply) -> int:
    """Return the number of tokens that were sampled for all answers of a reply."""
    return sum(len(choice.token_ids) for choice in reply.choices)


def openai_usage(reply: Reply) -> dict[str, int]:
    """Return the counts of tokens of a reply, in the format of OpenAI's completions."""
    prompt_tokens, completion_tokens = len(reply.prompt_ids), count_output_tokens(reply)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def fingerprint(*choices: Reply) -> str:
    """Return the `system_fingerprint` of choices: the versions of the parameters that sampled them.

    It is one version, unless an update came between the choices of one reply.
    """
    versions = sorted({choice.policy_version for choice in choices})
    return f"policy_version_{'_'.join(map(str, versions))}"
