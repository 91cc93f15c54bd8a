"""The app's OpenAPI 3.1 schema: requests as the tables of fields have them, replies, and the errors of each status."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxft.serving.fields import any_of, list_of
from jaxft.serving.wire import Dialect, openai_error

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
NUMBER = {"type": "number"}
NULL = {"type": "null"}
IDS = list_of(COUNT)


def _object(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the schema of an object in a reply."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _counts(*names: str) -> dict[str, Any]:
    return _object(dict.fromkeys(names, COUNT))


FUNCTION_CALL = _object(
    {"id": TEXT, "type": {"const": "function"}, "function": _object({"name": TEXT, "arguments": TEXT})}
)
CHOICE = {"index": COUNT, "finish_reason": {"enum": ["stop", "length", "tool_calls"]}}
LOGPROB = _object({"token": TEXT, "logprob": NUMBER, "bytes": IDS, "top_logprobs": list_of({"type": "object"})})
USAGE = _counts("prompt_tokens", "completion_tokens", "total_tokens")


def _completion(kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    head = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}
    return _object({**head, "choices": list_of(choice, minItems=1), "usage": USAGE}, {"prompt_token_ids": IDS})


CHAT_COMPLETION = _completion(
    "chat.completion",
    _object(
        {
            **CHOICE,
            "message": _object(
                {"role": {"const": "assistant"}, "content": any_of(TEXT, NULL)},
                {"reasoning_content": TEXT, "tool_calls": list_of(FUNCTION_CALL)},
            ),
            "logprobs": any_of(NULL, _object({"content": list_of(LOGPROB)})),
        },
        {"token_ids": IDS},
    ),
)

TEXT_COMPLETION = _completion(
    "text_completion",
    _object(
        {
            **CHOICE,
            "text": TEXT,
            "logprobs": any_of(
                NULL,
                _object(
                    {
                        "tokens": list_of(TEXT),
                        "token_logprobs": list_of(NUMBER),
                        "top_logprobs": any_of(NULL, list_of({"type": "object", "additionalProperties": NUMBER})),
                        "text_offset": IDS,
                    }
                ),
            ),
            "stop_reason": {"type": ["string", "integer", "null"]},
        },
        {"token_ids": IDS, "prompt_token_ids": IDS},
    ),
)

MESSAGE = _object(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": list_of(
            any_of(
                _object({"type": {"const": "text"}, "text": TEXT}),
                _object({"type": {"const": "thinking"}, "thinking": TEXT, "signature": TEXT}),
                _object({"type": {"const": "tool_use"}, "id": TEXT, "name": TEXT, "input": {"type": "object"}}),
            )
        ),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": any_of(TEXT, NULL),
        "usage": _counts("input_tokens", "output_tokens"),
    }
)

ITEM = {"id": TEXT, "status": {"enum": ["completed", "incomplete"]}}

RESPONSE = _object(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": COUNT,
        "status": {"enum": ["completed", "incomplete"]},
        "model": TEXT,
        "output": list_of(
            any_of(
                _object({**ITEM, "type": {"const": "message"}, "content": list_of({"type": "object"})}),
                _object({**ITEM, "type": {"const": "reasoning"}, "content": list_of({"type": "object"})}),
                _object({**ITEM, "type": {"const": "function_call"}, "call_id": TEXT, "name": TEXT, "arguments": TEXT}),
            ),
            minItems=1,
        ),
        "usage": _counts("input_tokens", "output_tokens", "total_tokens"),
    }
)

REPLIES = {
    "/v1/chat/completions": CHAT_COMPLETION,
    "/v1/completions": TEXT_COMPLETION,
    "/v1/messages": MESSAGE,
    "/v1/responses": RESPONSE,
}
"""Schemas of whole replies, by the paths of dialects."""

MODEL = _object({"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT, "max_model_len": COUNT})

OPENAI_ERROR = _object(
    {"error": _object({"message": TEXT, "type": TEXT, "param": any_of(TEXT, NULL), "code": any_of(TEXT, NULL)})}
)
ANTHROPIC_ERROR = _object({"type": {"const": "error"}, "error": _object({"type": TEXT, "message": TEXT})})

STATUSES = {
    200: "The answer.",
    400: "A field is missing, unknown, refused or impossible.",
    401: "The key is missing or wrong, or the address is of an episode that is over.",
    403: "The request is one of a web page of another site.",
    404: "There is no such model.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    421: "The server is not called by its name.",
    429: "Too many requests are being answered.",
    500: "A fault of the policy or of jaxft.",
    503: "The policy can do no further work, or the server is stopping.",
}

OF_EVERY_ROUTE = (401, 403, 408, 413, 421, 429, 500, 503)
"""Statuses of errors on any route; most of them come from the `Guard` of a server."""


def openapi_schema(dialects: Sequence[Dialect], models: Sequence[str], address: str) -> dict[str, Any]:
    """Return the OpenAPI schema of an app.

    Args:
        dialects: the APIs that it serves.
        models: names of its language models.
        address: path that all paths are below, such as that of an episode; `/` for none.
    """
    known = {"enum": list(models)}
    name = {"name": "model", "in": "path", "required": True, "schema": known}
    cards = _object({"object": {"const": "list"}, "data": list_of(MODEL)})
    health = _object({"status": {"const": "ok"}})
    schema = _object({"openapi": TEXT, "info": {"type": "object"}, "paths": {"type": "object"}})
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxft", "version": "1", "description": "Language models that jaxft trains."},
        "servers": [{"url": address}],
        "paths": {
            **{dialect.path: {"post": _post(dialect, known)} for dialect in dialects},
            "/v1/models": {"get": _get("All language models.", cards)},
            "/v1/models/{model}": {"get": {**_get("A language model.", MODEL, 404), "parameters": [name]}},
            "/health": {"get": _get("Whether all language models can answer.", health)},
            "/openapi.json": {"get": _get("This schema.", schema)},
        },
    }


def _post(dialect: Dialect, models: Mapping[str, Any]) -> dict[str, Any]:
    properties = {**dialect.schema["properties"], "model": models}
    error = OPENAI_ERROR if dialect.error is openai_error else ANTHROPIC_ERROR
    responses = _responses(REPLIES[dialect.path], error, 400, 404)
    responses["200"]["content"]["text/event-stream"] = {"schema": {"description": "Events, each with its JSON."}}
    body = {"application/json": {"schema": {**dialect.schema, "properties": properties}}}
    return {
        "summary": "An answer, whole or as server-sent events.",
        "requestBody": {"required": True, "content": body},
        "responses": responses,
    }


def _get(summary: str, schema: Mapping[str, Any], *statuses: int) -> dict[str, Any]:
    return {"summary": summary, "responses": _responses(schema, OPENAI_ERROR, *statuses)}


def _responses(schema: Mapping[str, Any], error: Mapping[str, Any], *statuses: int) -> dict[str, Any]:
    """Return the responses of a route, which beside its own statuses has those of every route."""
    schemas = {status: error for status in sorted({*OF_EVERY_ROUTE, *statuses})}
    return {
        str(status): {"description": STATUSES[status], "content": {"application/json": {"schema": each}}}
        for status, each in {200: schema, **schemas}.items()
    }
