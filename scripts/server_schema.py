"""The OpenAPI 3.1 schema of the server, for `fuzz_server.py`, made of the models of requests and replies."""

from typing import Annotated, Any, Literal

from openai.types import Completion, ErrorObject, Model
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from jaxft.core import LARGEST_FLOAT32
from jaxft.serving.app import DIALECTS
from jaxft.serving.messages_api import (
    COUNT_TOKENS,
    CountTokensRequest,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from jaxft.serving.responses_api import FunctionCall, MessageItem, ReasoningItem
from jaxft.serving.schemas import CompletionFields, Name, Tools
from jaxft.serving.wire import openai_error

Number = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32)]


class Function(BaseModel):
    """A function that the model may call, or must call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(BaseModel):
    """A tool in OpenAI's format."""

    type: Literal["function"]
    function: Function


class CalledFunction(BaseModel):
    """A function that an answer has called."""

    name: Name
    arguments: str | dict[str, Any] | None = None


class ChatToolCall(BaseModel):
    """A call of a tool in a message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    """A part of a message in which the assistant refuses."""

    type: Literal["refusal"]
    refusal: str


class ChatMessage(BaseModel):
    """A message; the chat template decides which roles it knows, and content is needed unless there are calls."""

    role: str
    content: str | list[TextPart | RefusalPart] | None = None
    tool_calls: list[ChatToolCall] | None = None


class CheckedByCore(BaseModel):
    """The fields of chats and completions whose values the core checks."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Tools[ChatTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChatTool | None = None
    logit_bias: dict[str, Bias] | None = None


class Usage(BaseModel):
    """Counts of tokens."""

    input_tokens: Number
    output_tokens: Number


class TokenCount(BaseModel):
    """Anthropic's count of the tokens of messages."""

    input_tokens: Number


class MessagesReply(BaseModel):
    """Anthropic's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: Usage


class Response(BaseModel):
    """OpenAI's response."""

    id: str
    object: Literal["response"]
    created_at: Number
    status: Literal["completed", "incomplete"]
    model: str
    output: Annotated[list[MessageItem | ReasoningItem | FunctionCall], Field(min_length=1)]
    usage: Usage


class ModelCard(Model):
    """A language model."""

    max_model_len: Number


class ModelList(BaseModel):
    """All language models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """The health of the server."""

    status: Literal["ok"]


class OpenAIError(BaseModel):
    """OpenAI's error."""

    error: ErrorObject


class AnthropicFault(BaseModel):
    """Anthropic's description of an error."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Anthropic's error."""

    type: Literal["error"]
    error: AnthropicFault
    request_id: str | None = None


REPLIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/messages": MessagesReply,
    COUNT_TOKENS: TokenCount,
    "/v1/responses": Response,
    "/v1/models": ModelList,
    "/v1/models/{model}": ModelCard,
    "/health": Health,
}
"""Models of whole replies, by path."""

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


def openapi_schema(models: tuple[str, ...]) -> dict[str, Any]:
    """Return the OpenAPI schema of an app that serves language models of these names."""
    requests = {dialect.path: dialect.request for dialect in DIALECTS} | {COUNT_TOKENS: CountTokensRequest}
    errors = {dialect.path: OpenAIError if dialect.error is openai_error else AnthropicError for dialect in DIALECTS}
    errors[COUNT_TOKENS] = AnthropicError
    everything = {CheckedByCore, *requests.values(), *REPLIES.values(), *errors.values()}
    references, definitions = models_json_schema(
        [(each, "validation") for each in sorted(everything, key=lambda each: each.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    schemas = definitions["$defs"]
    known = {"enum": list(models)}
    checked = schemas[CheckedByCore.__name__]["properties"]
    for request in requests.values():
        properties = schemas[request.__name__]["properties"]
        properties["model"] = known
        if issubclass(request, CompletionFields):
            properties |= {name: schema for name, schema in checked.items() if name in properties}

    def content(model: type[BaseModel], description: str) -> dict[str, Any]:
        return {
            "description": description,
            "content": {"application/json": {"schema": references[model, "validation"]}},
        }

    paths: dict[str, Any] = {}
    for path, reply in REPLIES.items():
        own = (400, 404) if path in requests else (404,) if "{model}" in path else ()
        error = errors.get(path, OpenAIError)
        responses = {str(status): content(error, STATUSES[status]) for status in sorted({*OF_EVERY_ROUTE, *own})}
        operation: dict[str, Any] = {
            "summary": reply.__doc__,
            "responses": {"200": content(reply, STATUSES[200]), **responses},
        }
        if path in requests and path != COUNT_TOKENS:
            operation["responses"]["200"]["content"]["text/event-stream"] = {
                "schema": {"description": "Events, each with its JSON."}
            }
            operation["requestBody"] = content(requests[path], "The request.") | {"required": True}
        if "{model}" in path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": known}]
        paths[path] = {"post" if path in requests else "get": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxft", "version": "1", "description": "Language models that jaxft trains."},
        "paths": paths,
        "components": {"schemas": schemas},
    }
