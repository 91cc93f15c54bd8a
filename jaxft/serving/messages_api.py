"""Anthropic's Messages API: from the JSON of a request to a `ChatRequest`, and from a `Reply` to JSON or events.

Blocks of thinking, text and tools become OpenAI's messages, in which the core speaks. A turn that a client sends back
becomes the message that the core has answered with, and so keeps its sampled token ids.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from jaxft import ChatRequest, Delta, Reply, ToolCall
from jaxft.serving.schemas import (
    VARIABLES,
    AllowedCallers,
    AnswerFormat,
    APIRequest,
    Caller,
    Count,
    Dialect,
    Many,
    Name,
    Natural,
    Refused,
    RequestObject,
    Stops,
    TextOr,
    Tools,
    function_tool,
)
from jaxft.serving.wire import APIError, count_tokens, event, id_of_error, make_id

OWN_TOOLS = Refused("Anthropic's own tools do not run here")

BILLING = "x-anthropic-billing-header:"
"""Beginning of a block of system text that Claude Code changes with every request; it is not for the model."""


class Cached(RequestObject):
    """An object that may be marked for Anthropic's prompt cache."""

    ignored = frozenset({"cache_control"})


class TextBlock(Cached):
    """A block of text."""

    ignored = Cached.ignored | {"parsed_output"}

    type: Literal["text"]
    text: str = Field(description="The text.")
    citations: Annotated[Any, Refused("leave it out: the policy cites nothing", [])] = None


class ThinkingBlock(RequestObject):
    """A block of reasoning."""

    ignored = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str = Field(description="Reasoning before an answer.")


class RedactedThinkingBlock(RequestObject):
    """A block of reasoning that is encrypted."""

    ignored = frozenset({"data"})

    type: Literal["redacted_thinking"]


class ToolUseBlock(Cached):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str = Field(description="Name of the call, which its result refers to.")
    name: Name = Field(description="Name of the function.")
    input: dict[str, Any] = Field(description="Arguments of the function.")
    caller: Caller = None
    toolset_name: Annotated[Any, OWN_TOOLS] = None


class ToolResultBlock(Cached):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(description="The `id` of the call.")
    content: TextOr[Many[TextBlock]] | None = Field(None, description="Text only.")
    is_error: bool | None = Field(None, description="True: a result without content says `error`.")
    toolset_name: Annotated[Any, OWN_TOOLS] = None


AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class UserMessage(RequestObject):
    """A message of the user, which has the results of tools as well."""

    role: Literal["user"]
    content: TextOr[Many[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]]]


class AssistantMessage(RequestObject):
    """A message of the assistant."""

    role: Literal["assistant"]
    content: TextOr[Many[Annotated[AssistantBlock, Field(discriminator="type")]]]


class SystemMessage(RequestObject):
    """A message of the system."""

    role: Literal["system"]
    content: TextOr[Many[TextBlock]]


AnyMessage = UserMessage | AssistantMessage | SystemMessage


class MessagesTool(Cached):
    """A function that the model may call."""

    ignored = Cached.ignored | {"eager_input_streaming"}

    type: Annotated[Any, Refused("Anthropic's own tools do not run here: give a function", "custom")] = None
    name: Name = Field(description="Name of the function.")
    description: str | None = Field(None, description="Purpose of the function.")
    input_schema: dict[str, Any] = Field(description="JSON schema of the arguments.")
    strict: bool | None = Field(None, description="A forced call has arguments of the schema.")
    input_examples: Annotated[Any, Refused("put them into the description", [])] = None
    defer_loading: Annotated[Any, Refused("every tool is in the prompt", False)] = None
    allowed_callers: AllowedCallers = None

    def as_tool(self, *, is_forced: bool) -> dict[str, Any]:
        """Return the function in OpenAI's format, `strict` only if a call is forced."""
        return function_tool(self.name, self.description, self.input_schema, is_forced and self.strict)


class ToolChoice(RequestObject):
    """Choice whether the answer calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"] = Field(description="`auto`, `any`, `tool` or `none`.")
    name: str | None = Field(None, validate_default=True, description="With `tool`: the function to call.")
    disable_parallel_tool_use: bool | None = Field(None, description="True: the first call of an answer counts.")

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None, info: ValidationInfo) -> str | None:
        if "type" in info.data and (info.data["type"] == "tool") != (name is not None):
            raise PydanticCustomError("impossible", "a name is wanted with the type 'tool', and with that only")
        return name

    def as_choice(self) -> str | dict[str, Any]:
        """Return OpenAI's `tool_choice`."""
        return function_tool(self.name) if self.name else "required" if self.type == "any" else self.type


class OutputConfig(AnswerFormat):
    """Format of an answer."""

    effort: Annotated[Any, Refused("ask for it in the prompt")] = None


KEEPS_ALL: tuple[dict[str, Any], ...] = ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})


class MessagesRequest(APIRequest):
    """A request of messages."""

    ignored = frozenset({"metadata", "cache_control", "service_tier", "inference_geo", "speed", "diagnostics"})

    messages: Annotated[Many[Annotated[AnyMessage, Field(discriminator="role")]], Field(min_length=1)] = Field(
        description="The conversation, of text and tools only; the last message is not the assistant's."
    )
    max_tokens: Count = Field(description="Limit of sampled tokens.")
    system: TextOr[Many[TextBlock]] | None = Field(
        None,
        description="Text, or blocks of text: the first message, without the block of Claude Code's billing header.",
    )
    tools: Tools[MessagesTool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="`auto`, `any`, `none` or a function.")
    stop: Stops | None = Field(None, alias="stop_sequences", description="At most 1,024 strings that end the answer.")
    top_k: Natural | None = Field(None, description="Number of most likely tokens to draw from; 0 for all.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    thinking: Annotated[Any, Refused(VARIABLES, {"type": "adaptive"})] = None
    response_format: OutputConfig | None = Field(None, alias="output_config", description="`format`: JSON of a schema.")
    container: Annotated[Any, OWN_TOOLS] = None
    mcp_servers: Annotated[Any, Refused("give the agent the tools of the server", [])] = None
    context_management: Annotated[Any, Refused("send the conversation as it shall be read", *KEEPS_ALL)] = None

    @field_validator("messages")
    @classmethod
    def _check_end(cls, messages: list[Any]) -> list[Any]:
        if messages[-1].role == "assistant":
            raise PydanticCustomError(
                "impossible", "the last is the assistant's, and every reply is a new message: end with one of the user"
            )
        return messages

    def to_request(self) -> ChatRequest:
        """Return what to sample.

        >>> asked = {"role": "user", "content": [{"type": "text", "text": "?"}]}
        >>> body = {"model": "policy", "max_tokens": 5, "system": "Be brief.", "messages": [asked]}
        >>> MessagesRequest.model_validate(body).to_request().messages[0]
        {'role': 'system', 'content': 'Be brief.'}
        """
        arguments = self.arguments(ChatRequest)
        system = (
            self.system
            if isinstance(self.system, str)
            else [block for block in self.system or () if not block.text.startswith(BILLING)]
        )
        first = [{"role": "system", "content": _texts(system)}] if system else []
        arguments["messages"] = first + [each for message in self.messages for each in _messages(message)]
        is_forced = self.tool_choice is not None and self.tool_choice.as_choice() not in ("auto", "none")
        arguments["tools"] = [tool.as_tool(is_forced=is_forced) for tool in self.tools or ()]
        if self.response_format is not None:
            arguments["response_format"] = self.response_format.as_chat()
        if self.tool_choice is not None:
            arguments["tool_choice"] = self.tool_choice.as_choice()
            arguments["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return ChatRequest(**arguments)


class CountTokensRequest(MessagesRequest):
    """A request to count the tokens of messages."""

    ignored = MessagesRequest.ignored | {"max_tokens"}

    max_tokens: Any = None
    stream: Annotated[Any, Refused("a count comes whole", False)] = None


def _texts(content: str | Sequence[TextBlock]) -> str | list[dict[str, Any]]:
    """Return text, or blocks of text as OpenAI's parts of text."""
    return content if isinstance(content, str) else [{"type": "text", "text": block.text} for block in content]


def _messages(message: AnyMessage) -> Iterator[dict[str, Any]]:
    """Yield a message as OpenAI's messages: each result of a tool is one of its own."""
    if isinstance(message.content, str) or not message.content:
        yield {"role": message.role, "content": message.content or ""}
    elif isinstance(message, AssistantMessage):
        yield _answer(message.content)
    else:
        for _, run in itertools.groupby(message.content, type):
            blocks = list(run)
            texts = [block for block in blocks if isinstance(block, TextBlock)]
            results = [_result(block) for block in blocks if isinstance(block, ToolResultBlock)]
            yield from results or [{"role": message.role, "content": _texts(texts)}]


def _answer(blocks: Sequence[AssistantBlock]) -> dict[str, Any]:
    """Return the blocks of an answer as OpenAI's message."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts, between = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)], "\n"
    if (TextBlock, ThinkingBlock) in itertools.pairwise(map(type, blocks)):
        # A streamed answer that thinks again: its blocks are pieces of one text and one thought.
        texts, between = ["".join(texts)], ""
    message: dict[str, Any] = {"role": "assistant", "content": [{"type": "text", "text": text} for text in texts]}
    if thoughts:
        message["reasoning_content"] = between.join(thoughts)
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return message


def _result(block: ToolResultBlock) -> dict[str, Any]:
    """Return the result of a tool as OpenAI's message."""
    content = _texts(block.content or "") or ("error" if block.is_error else "")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


SIGNATURE = "unsigned"
"""The `signature` of thinking: some clients drop thinking without one."""


def message_json(asked: MessagesRequest, reply: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the JSON of a reply."""
    content: list[dict[str, Any]] = []
    if reply.reasoning_content is not None:
        content.append({"type": "thinking", "thinking": reply.reasoning_content, "signature": SIGNATURE})
    if reply.content:
        content.append({"type": "text", "text": reply.content})
    content += [_tool_use(tool_call, json.loads(tool_call.arguments)) for tool_call in reply.tool_calls]
    return {**_head(asked), "content": content, **_ending(reply), "usage": _usage(reply)}


def _head(asked: MessagesRequest) -> dict[str, Any]:
    return {"id": make_id("msg_"), "type": "message", "role": "assistant", "model": asked.model}


def _tool_use(tool_call: ToolCall, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": tool_call.id, "name": tool_call.name, "input": given}


def _ending(reply: Reply) -> dict[str, Any]:
    """Return the reason for which an answer ended."""
    stop_sequence = reply.stop_reason if reply.finish_reason == "stop" else None
    reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
    stop_reason = reasons[reply.finish_reason] if stop_sequence is None else "stop_sequence"
    return {"stop_reason": stop_reason, "stop_sequence": stop_sequence, "stop_details": None}


def _usage(reply: Reply) -> dict[str, int]:
    prompt, sampled = count_tokens(reply)
    return {"input_tokens": prompt, "output_tokens": sampled}


class MessageWriter:
    """Writes the events of one streamed message: thinking and text as they come, then the tool calls."""

    def __init__(self, asked: MessagesRequest, text_of_token: Callable[[int], str]) -> None:
        self._asked = asked
        self._has_begun = False
        self._open: str | None = None  # type of the block that is being written
        self._index = -1

    def events(self, piece: Delta | Reply) -> Iterator[bytes]:
        """Yield the events of a delta, or of the reply, which ends the message."""
        if not self._has_begun:
            self._has_begun = True
            # The prompt is counted at the end: the reply brings its token ids.
            usage = {"input_tokens": 0, "output_tokens": 0}
            ending = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
            yield _event("message_start", message={**_head(self._asked), "content": [], **ending, "usage": usage})
            yield _event("ping")
        if isinstance(piece, Delta):
            yield from self._text("thinking", piece.reasoning_content)
            yield from self._text("text", piece.content)
            return
        yield from self._close()
        for tool_call in piece.tool_calls:
            yield from self._begin("tool_use", _tool_use(tool_call, {}))
            yield self._delta("input_json_delta", partial_json=tool_call.arguments)
            yield from self._close()
        yield _event("message_delta", delta=_ending(piece), usage=_usage(piece))
        yield _event("message_stop")

    def error(self, error: APIError) -> bytes:
        """Return the event of an error that ends the stream."""
        return event(anthropic_error(error)[1], "error")

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        """Yield the events of more text in a block of this type."""
        if not text:
            return
        if self._open != kind:
            yield from self._close()
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin(kind, {"type": kind, kind: "", **signature})
        yield self._delta(f"{kind}_delta", **{kind: text})

    def _begin(self, kind: str, block: Mapping[str, Any]) -> Iterator[bytes]:
        self._open = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **more: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **more})

    def _close(self) -> Iterator[bytes]:
        """Yield the end of the open block, if one is open."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=SIGNATURE)
        self._open = None
        yield _event("content_block_stop", index=self._index)


def _event(kind: str, **more: Any) -> bytes:
    return event({"type": kind, **more}, kind)


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def anthropic_error(error: APIError) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of an error in Anthropic's format.

    >>> anthropic_error(APIError("there is no model 'x'", status=404))
    (404, {'type': 'error', 'error': {'type': 'not_found_error', 'message': "there is no model 'x'"}})
    """
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return error.status, {"type": "error", "error": {"type": kind, "message": error.message}, **id_of_error()}


MESSAGES = Dialect("/v1/messages", MessagesRequest, message_json, MessageWriter, anthropic_error)

COUNT_TOKENS = f"{MESSAGES.path}/count_tokens"
"""Path that counts the tokens of messages, which nothing answers."""
