"""Anthropic's Messages API: from the JSON of a request to a `ChatRequest`, and from a `Reply` to JSON or events.

Blocks of thinking, text and tools become OpenAI's messages, in which the core speaks. A turn that a client sends back
becomes the message that the core has answered with, and so keeps its sampled token ids.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxft.rollout.calls import Reply
from jaxft.rollout.chat_request import ChatRequest, Delta
from jaxft.rollout.messages import MAX_TOOLS, Message, Tool, ToolCall
from jaxft.serving.fields import (
    AT_LEAST_0,
    NAME,
    Field,
    any_of,
    list_of,
    make_table,
    object_schema,
    read_fields,
    read_one_of,
    short,
)
from jaxft.serving.wire import APIError, Dialect, count_output_tokens, event, make_id


def _type(name: str) -> Field:
    return Field("type", "Anthropic", "taken", f"`{name}`.", "text", required=True, schema={"const": name})


TEXT = {"type": "string"}
CACHE_CONTROL = Field("cache_control", "Anthropic", "ignored", "The prefix cache needs no marks and changes no answer.")
TOOLSET_NAME = Field("toolset_name", "Anthropic", "refused", "Anthropic's own tools do not run here")

TEXT_BLOCK = (
    _type("text"),
    Field("text", "Anthropic", "taken", "The text.", "text", required=True),
    CACHE_CONTROL,
    Field("citations", "Anthropic", "refused", "leave it out: the policy cites nothing", unused=([],)),
    Field("parsed_output", "Anthropic", "ignored", "The client reads it from the text."),
)

TEXT_OR_BLOCKS = any_of(TEXT, list_of(object_schema(TEXT_BLOCK)))

BLOCKS = {
    "text": TEXT_BLOCK,
    "thinking": (
        _type("thinking"),
        Field("thinking", "Anthropic", "taken", "Reasoning before an answer.", "text", required=True),
        Field("signature", "Anthropic", "ignored", "Reasoning is not signed here."),
    ),
    "redacted_thinking": (
        _type("redacted_thinking"),
        Field("data", "Anthropic", "ignored", "Only Anthropic can read it."),
    ),
    "tool_use": (
        _type("tool_use"),
        Field("id", "Anthropic", "taken", "Name of the call, which its result refers to.", "text", required=True),
        Field("name", "Anthropic", "taken", "Name of the function.", "text", required=True, schema=NAME),
        Field("input", "Anthropic", "taken", "Arguments of the function.", "object", required=True),
        CACHE_CONTROL,
        Field("caller", "Anthropic", "refused", "only the model itself calls tools", unused=({"type": "direct"},)),
        TOOLSET_NAME,
    ),
    "tool_result": (
        _type("tool_result"),
        Field("tool_use_id", "Anthropic", "taken", "The `id` of the call.", "text", required=True),
        Field("content", "Anthropic", "taken", "Text only.", "text or list of objects", schema=TEXT_OR_BLOCKS),
        Field("is_error", "Anthropic", "taken", "True: a result without content says `error`.", "boolean"),
        CACHE_CONTROL,
        TOOLSET_NAME,
    ),
}
"""Fields of the blocks of messages, by their type."""

BLOCKS_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}

MESSAGE = (
    Field(
        "role",
        "Anthropic",
        "taken",
        "`user`, `assistant` or `system`.",
        "text",
        required=True,
        schema={"enum": list(BLOCKS_OF_ROLE)},
    ),
    Field(
        "content",
        "Anthropic",
        "taken",
        "Text, or blocks that this role may have.",
        "text or list of objects",
        required=True,
        schema=any_of(TEXT, list_of(any_of(*map(object_schema, BLOCKS.values())))),
    ),
)

TOOL = (
    Field("name", "Anthropic", "taken", "Name of the function.", "text", required=True, schema=NAME),
    Field("description", "Anthropic", "taken", "Purpose of the function.", "text"),
    Field("input_schema", "Anthropic", "taken", "JSON schema of the arguments.", "object", required=True),
    Field("type", "Anthropic", "refused", "Anthropic's own tools do not run here: give a function", unused=("custom",)),
    CACHE_CONTROL,
    Field("strict", "Anthropic", "ignored", "Arguments are a JSON object; sampling is not constrained further."),
    Field("eager_input_streaming", "Anthropic", "ignored", "Tool calls come whole, at the end."),
    Field("input_examples", "Anthropic", "refused", "put them into the description", unused=([],)),
    Field("defer_loading", "Anthropic", "refused", "every tool is in the prompt", unused=(False,)),
    Field("allowed_callers", "Anthropic", "refused", "only the model itself calls tools", unused=([], ["direct"])),
)

TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": "tool", "none": "none"}

TOOL_CHOICE = (
    Field(
        "type",
        "Anthropic",
        "taken",
        "`auto`, `any`, `tool` or `none`.",
        "text",
        required=True,
        schema={"enum": list(TOOL_CHOICES)},
    ),
    Field("name", "Anthropic", "taken", "With `tool`: the function that the answer must call.", "text"),
    Field("disable_parallel_tool_use", "Anthropic", "taken", "True: the first call of an answer counts.", "boolean"),
)

FIELDS = (
    Field("model", "Anthropic", "taken", "Name of the language model in the configuration.", "text", required=True),
    Field(
        "messages",
        "Anthropic",
        "taken",
        "The conversation, of text and tools only; the last message is not the assistant's.",
        "list of objects",
        required=True,
        schema=list_of(object_schema(MESSAGE), minItems=1),
    ),
    Field("max_tokens", "Anthropic", "taken", "Limit of sampled tokens.", "integer", required=True),
    Field(
        "system",
        "Anthropic",
        "taken",
        "Text, or blocks of text: the first message.",
        "text or list of objects",
        schema=TEXT_OR_BLOCKS,
    ),
    Field(
        "tools",
        "Anthropic",
        "taken",
        "Functions that the model may call.",
        "list of objects",
        schema=list_of(object_schema(TOOL), maxItems=MAX_TOOLS),
    ),
    Field(
        "tool_choice",
        "Anthropic",
        "taken",
        "Whether the answer calls tools, and which.",
        "object",
        schema=object_schema(TOOL_CHOICE),
    ),
    Field("stop_sequences", "Anthropic", "taken", "Strings that end the answer, any number of them.", "list of texts"),
    Field("temperature", "Anthropic", "taken", "An episode may set its own, as evaluations do.", "number"),
    Field("top_p", "Anthropic", "taken", "Nucleus sampling.", "number"),
    Field(
        "top_k",
        "Anthropic",
        "taken",
        "Number of most likely tokens to draw from; 0 for all.",
        "integer",
        schema=AT_LEAST_0,
    ),
    Field("stream", "Anthropic", "taken", "Server-sent events; tool calls come whole, at the end.", "boolean"),
    Field("metadata", "Anthropic", "ignored", "Names the end user, for Anthropic's monitoring."),
    CACHE_CONTROL,
    Field("service_tier", "Anthropic", "ignored", "There is one tier."),
    Field("inference_geo", "Anthropic", "ignored", "The policy runs on this machine."),
    Field("speed", "Anthropic", "ignored", "There is one speed."),
    Field("diagnostics", "Anthropic", "ignored", "They are about Anthropic's prompt cache."),
    Field(
        "thinking",
        "Anthropic",
        "refused",
        "give the chat template its own variable, as in chat_template_kwargs={'enable_thinking': false}",
        unused=({"type": "adaptive"},),
    ),
    Field(
        "output_config",
        "Anthropic",
        "refused",
        "sampling is not constrained: ask for format and effort in the prompt",
        unused=({},),
    ),
    Field("container", "Anthropic", "refused", "Anthropic's own tools do not run here"),
    Field("mcp_servers", "Anthropic", "refused", "give the agent the tools of the server", unused=([],)),
    Field("context_management", "Anthropic", "refused", "send the conversation as it shall be read"),
    Field("chat_template_kwargs", "vLLM", "taken", "Variables of the chat template.", "object"),
)
"""Every field of a request of messages."""

OBJECTS = {"message": MESSAGE, **BLOCKS, "tool": TOOL, "tool_choice": TOOL_CHOICE}
"""Fields of all objects in a request."""

_FIELDS, _MESSAGE, _TOOL, _TOOL_CHOICE = map(make_table, (FIELDS, MESSAGE, TOOL, TOOL_CHOICE))
_TEXT_BLOCK = {"text": make_table(TEXT_BLOCK)}
_BLOCKS_OF_ROLE = {role: {kind: make_table(BLOCKS[kind]) for kind in kinds} for role, kinds in BLOCKS_OF_ROLE.items()}

SIGNATURE = "unsigned"
"""The `signature` of thinking: some clients drop thinking without one."""


class MessagesCall(NamedTuple):
    """A request of messages: the language model's name, what to sample, and True for server-sent events."""

    model: str
    request: ChatRequest
    stream: bool


def parse_messages(body: Mapping[str, Any]) -> MessagesCall:
    """Return the call that the JSON of a request asks for.

    Raises:
        APIError: a field is missing, unknown, refused, or of another kind.
        RequestError: a field has an impossible value.

    >>> asked = {"role": "user", "content": [{"type": "text", "text": "?"}]}
    >>> call = parse_messages({"model": "policy", "max_tokens": 5, "system": "Be brief.", "messages": [asked]})
    >>> call.request.messages[0], call.request.messages[1]["role"], call.request.max_tokens
    ({'role': 'system', 'content': 'Be brief.'}, 'user', 5)
    """
    given = read_fields(_FIELDS, body)
    messages: list[Message] = []
    if given.get("system"):
        messages.append({"role": "system", "content": _texts(given["system"], "system")})
    for index, message in enumerate(given["messages"]):
        messages += _messages(message, f"messages[{index}]")
    if messages and messages[-1]["role"] == "assistant":
        raise APIError(
            f"messages[{len(given['messages']) - 1}] is the assistant's, and every reply is a new message: end with a "
            "message of the user",
            param="messages",
        )
    choice = _read_tool_choice(given)
    request = ChatRequest(
        messages=messages,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(given.get("tools", ()))],
        tool_choice=choice,
        parallel_tool_calls=not given.get("tool_choice", {}).get("disable_parallel_tool_use"),
        max_tokens=given["max_tokens"],
        stop=given.get("stop_sequences", ()),
        temperature=given.get("temperature", 1.0),
        top_p=given.get("top_p", 1.0),
        top_k=given.get("top_k", 0),
        chat_template_kwargs=given.get("chat_template_kwargs"),
    )
    return MessagesCall(given["model"], request, given.get("stream", False))


def _texts(content: str | Sequence[Mapping[str, Any]], place: str) -> str | list[dict[str, Any]]:
    """Return text, or blocks of text as OpenAI's parts of text."""
    if isinstance(content, str):
        return content
    blocks = (read_one_of(_TEXT_BLOCK, block, f"{place}[{index}]", TEXT_ONLY) for index, block in enumerate(content))
    return _parts(blocks)


TEXT_ONLY = "the policy reads text only"


def _parts(blocks: Iterator[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": block["text"]} for block in blocks]


def _messages(message: Mapping[str, Any], place: str) -> Iterator[Message]:
    """Yield a message as OpenAI's messages: each result of a tool is one of its own."""
    given = read_fields(_MESSAGE, message, place)
    role, content = given["role"], given["content"]
    if role not in BLOCKS_OF_ROLE:
        raise APIError(f"{place}.role is {short(role)}; wanted {', '.join(BLOCKS_OF_ROLE)}", param=f"{place}.role")
    if not content or isinstance(content, str):
        yield {"role": role, "content": content or ""}
        return
    tables, instead = _BLOCKS_OF_ROLE[role], TEXT_ONLY + ", and tools are functions of the agent's"
    blocks = [
        read_one_of(tables, block, f"{place}.content[{index}]", instead) | {"place": f"{place}.content[{index}]"}
        for index, block in enumerate(content)
    ]
    if role == "assistant":
        yield _answer(blocks)
        return
    for kind, run in itertools.groupby(blocks, lambda block: block["type"]):
        if kind == "text":
            yield {"role": role, "content": _parts(run)}
        else:
            yield from map(_result, run)


def _answer(blocks: Sequence[Mapping[str, Any]]) -> Message:
    """Return the blocks of an answer as OpenAI's message."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": _parts(block for block in blocks if block["type"] == "text"),
    }
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in blocks if block["type"] == "tool_use"]
    if calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["input"]}}
            for call in calls
        ]
    return message


def _result(block: Mapping[str, Any]) -> Message:
    """Return the result of a tool as OpenAI's message."""
    content = _texts(block.get("content", ""), f"{block['place']}.content")
    if not content and block.get("is_error", False):
        content = "error"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _tool(tool: Mapping[str, Any], place: str) -> Tool:
    given = read_fields(_TOOL, tool, place)
    description = {"description": given["description"]} if "description" in given else {}
    return {
        "type": "function",
        "function": {"name": given["name"], **description, "parameters": given["input_schema"]},
    }


def _read_tool_choice(given: Mapping[str, Any]) -> str | dict[str, Any]:
    """Return OpenAI's `tool_choice`."""
    if "tool_choice" not in given:
        return "auto"
    choice = read_fields(_TOOL_CHOICE, given["tool_choice"], "tool_choice")
    kind, name = choice["type"], choice.get("name")
    if kind not in TOOL_CHOICES:
        wanted = ", ".join(TOOL_CHOICES)
        raise APIError(f"tool_choice.type is {short(kind)}; wanted {wanted}", param="tool_choice.type")
    if (kind == "tool") != (name is not None):
        raise APIError(
            f"tool_choice.name is {short(name)} and tool_choice.type {kind!r}; a name is wanted with 'tool', and with "
            "that only",
            param="tool_choice.name",
        )
    return {"type": "function", "function": {"name": name}} if kind == "tool" else TOOL_CHOICES[kind]


def message_json(call: MessagesCall, reply: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the JSON of a reply."""
    content: list[dict[str, Any]] = []
    if reply.reasoning_content is not None:
        content.append({"type": "thinking", "thinking": reply.reasoning_content, "signature": SIGNATURE})
    if reply.content:
        content.append({"type": "text", "text": reply.content})
    content += [_tool_use(tool_call, json.loads(tool_call.arguments)) for tool_call in reply.tool_calls]
    return {**_head(call), "content": content, **_ending(reply), "usage": _usage(reply)}


def _head(call: MessagesCall) -> dict[str, Any]:
    return {"id": make_id("msg_"), "type": "message", "role": "assistant", "model": call.model}


def _tool_use(tool_call: ToolCall, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": tool_call.id, "name": tool_call.name, "input": given}


def _ending(reply: Reply) -> dict[str, Any]:
    """Return the reason for which an answer ended."""
    stop_sequence = reply.stop_reason if reply.finish_reason == "stop" else None
    reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
    stop_reason = reasons[reply.finish_reason] if stop_sequence is None else "stop_sequence"
    return {"stop_reason": stop_reason, "stop_sequence": stop_sequence, "stop_details": None}


def _usage(reply: Reply) -> dict[str, int]:
    return {"input_tokens": len(reply.prompt_ids), "output_tokens": count_output_tokens(reply)}


class MessageWriter:
    """Writes the events of one streamed message: thinking and text as they come, then the tool calls."""

    def __init__(self, call: MessagesCall, text_of_token: Callable[[int], str]) -> None:
        self._call = call
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
            yield _event("message_start", message={**_head(self._call), "content": [], **ending, "usage": usage})
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
    return error.status, {"type": "error", "error": {"type": kind, "message": error.message}}


MESSAGES = Dialect(
    "/v1/messages",
    object_schema(FIELDS),
    parse_messages,
    message_json,
    MessageWriter,
    anthropic_error,
    names={"stop": "stop_sequences"},
)
