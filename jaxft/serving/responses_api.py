"""OpenAI's Responses API: from the JSON of a request to a `ChatRequest`, and from a `Reply` to JSON or events.

Nothing is stored: each request has the whole conversation. Items of reasoning, text and calls that follow one another
become one message of the assistant, as the core has answered it, so that a turn keeps its sampled token ids.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxft.rollout.calls import Reply
from jaxft.rollout.chat_request import ChatRequest, Delta
from jaxft.rollout.messages import Message, Tool, ToolCall
from jaxft.serving.fields import make_table, object_schema, read_fields, read_one_of, short
from jaxft.serving.responses_fields import FIELDS, GIVEN, ITEMS, PARTS, ROLES, SAID, TOOL, TOOL_CHOICE
from jaxft.serving.wire import APIError, Dialect, count_output_tokens, event, make_id, openai_error

_FIELDS, _TOOL, _TOOL_CHOICE = make_table(FIELDS), {"function": make_table(TOOL)}, {"function": make_table(TOOL_CHOICE)}
_ITEMS = {kind: make_table(fields) for kind, fields in ITEMS.items()}
_PARTS = {kind: make_table(fields) for kind, fields in PARTS.items()}

ARGUMENTS = {
    **{field.name: field.name for field in FIELDS if field.name in ChatRequest.__dataclass_fields__},
    "max_output_tokens": "max_tokens",
}
"""Names of the arguments of `ChatRequest`, by the fields that give them."""

OWN_TOOLS = "OpenAI's own tools do not run here: give the agent a function"


class ResponsesCall(NamedTuple):
    """A request of responses.

    Attributes:
        model: name of the language model.
        request: what to sample.
        stream: True for server-sent events.
        settings: fields of the request that the response repeats.
    """

    model: str
    request: ChatRequest
    stream: bool
    settings: dict[str, Any]


def parse_responses(body: Mapping[str, Any]) -> ResponsesCall:
    """Return the call that the JSON of a request asks for.

    Raises:
        APIError: a field is missing, unknown, refused, or of another kind.
        RequestError: a field has an impossible value.

    >>> call = parse_responses({"model": "policy", "instructions": "Be brief.", "input": "?", "max_output_tokens": 5})
    >>> call.request.messages, call.request.max_tokens
    ([{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '?'}], 5)
    """
    given = read_fields(_FIELDS, body)
    arguments = {ARGUMENTS[name]: value for name, value in given.items() if name in ARGUMENTS}
    arguments["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given.get("tools", ()))]
    if isinstance(given.get("tool_choice"), dict):
        choice = read_one_of(_TOOL_CHOICE, given["tool_choice"], "tool_choice", OWN_TOOLS)
        arguments["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    messages: list[Message] = []
    if "instructions" in given:
        messages.append({"role": "system", "content": given["instructions"]})
    messages += [{"role": "user", "content": given["input"]}] if isinstance(given["input"], str) else _messages(given)
    request = ChatRequest(messages=messages, **arguments)
    settings = {
        "instructions": given.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "parallel_tool_calls": request.parallel_tool_calls,
        "temperature": request.temperature,
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_p": request.top_p,
    }
    return ResponsesCall(given["model"], request, given.get("stream", False), settings)


def _tool(tool: Mapping[str, Any], place: str) -> Tool:
    given = read_one_of(_TOOL, tool, place, OWN_TOOLS)
    return {
        "type": "function",
        "function": {name: given[name] for name in ("name", "description", "parameters") if name in given},
    }


def _messages(given: Mapping[str, Any]) -> list[Message]:
    """Return the items of an input as OpenAI's messages."""
    messages: list[Message] = []
    answer: dict[str, Any] | None = None  # message of the assistant that the next items may belong to
    for index, item in enumerate(given["input"]):
        place = f"input[{index}]"
        item = {**item, "type": "message"} if "role" in item and item.get("type") is None else item
        read = read_one_of(_ITEMS, item, place, f"the policy reads text only, and {OWN_TOOLS}")
        kind = read["type"]
        if kind == "function_call_output":
            content = _texts(read["output"], GIVEN, f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": read["call_id"], "content": content})
            answer = None
        elif kind == "message" and read["role"] != "assistant":
            messages.append(_message(read, place))
            answer = None
        else:
            # Within an answer, reasoning comes before text, and text before calls.
            ends = {"reasoning": ("reasoning_content", "content", "tool_calls"), "message": ("content", "tool_calls")}
            if answer is None or any(answer.get(name) is not None for name in ends.get(kind, ())):
                answer = {"role": "assistant", "content": None}
                messages.append(answer)
            if kind == "reasoning":
                answer["reasoning_content"] = _reasoning(read, place)
            elif kind == "message":
                answer |= _message(read, place)
            else:
                function = {"name": read["name"], "arguments": read["arguments"]}
                call = {"id": read["call_id"], "type": "function", "function": function}
                answer.setdefault("tool_calls", []).append(call)
    return messages


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = item["role"]
    if role not in ROLES:
        raise APIError(f"{place}.role is {short(role)}; wanted {', '.join(ROLES)}", param=f"{place}.role")
    return {"role": role, "content": _texts(item["content"], SAID, f"{place}.content")}


def _texts(content: str | Sequence[Mapping[str, Any]], kinds: Sequence[str], place: str) -> str | list[dict[str, Any]]:
    """Return text, or parts of the Responses API as those of a message."""
    if isinstance(content, str):
        return content
    tables = {kind: _PARTS[kind] for kind in kinds}
    parts = [
        read_one_of(tables, part, f"{place}[{index}]", "the policy reads text only")
        for index, part in enumerate(content)
    ]
    return [
        {"type": "refusal", "refusal": part["refusal"]}
        if part["type"] == "refusal"
        else {"type": "text", "text": part["text"]}
        for part in parts
    ]


def _reasoning(item: Mapping[str, Any], place: str) -> str:
    """Return the text of an item of reasoning: its content, or else its summary."""
    texts = {}
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = enumerate(item.get(name, ()))
        read = (read_one_of({kind: _PARTS[kind]}, part, f"{place}.{name}[{index}]") for index, part in parts)
        texts[name] = "\n".join(part["text"] for part in read)
    return texts["content"] or texts["summary"]


def response_json(call: ResponsesCall, reply: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the JSON of a reply."""
    output = []
    if reply.reasoning_content is not None:
        output.append(_text_item("reasoning", make_id("rs_"), reply.reasoning_content))
    if reply.content or not reply.tool_calls:
        output.append(_text_item("message", make_id("msg_"), reply.content))
    output += [_call_item(tool_call) for tool_call in reply.tool_calls]
    output[-1]["status"] = _status(reply)
    return _response(call, make_id("resp_"), int(time.time()), output, reply)


PART_TYPES = {"reasoning": "reasoning_text", "message": "output_text"}


def _text_item(kind: str, item_id: str, text: str) -> dict[str, Any]:
    """Return an item of reasoning, or a message."""
    more: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    return {"id": item_id, "type": kind, "status": "completed", **more, "content": [_part(kind, text)]}


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {} if kind == "reasoning" else {"annotations": [], "logprobs": []}
    return {"type": PART_TYPES[kind], "text": text, **more}


def _call_item(tool_call: ToolCall) -> dict[str, Any]:
    return {
        "id": make_id("fc_"),
        "type": "function_call",
        "status": "completed",
        "call_id": tool_call.id,
        "name": tool_call.name,
        "arguments": tool_call.arguments,
    }


def _status(reply: Reply) -> str:
    return "incomplete" if reply.finish_reason == "length" else "completed"


def _response(
    call: ResponsesCall, response_id: str, created_at: int, output: Sequence[Mapping[str, Any]], reply: Reply | None
) -> dict[str, Any]:
    """Return the JSON of a response, which is in progress until there is a reply."""
    status = "in_progress" if reply is None else _status(reply)
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": call.model,
        "output": output,
        **call.settings,
        "previous_response_id": None,
        "store": False,
        "background": False,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "metadata": {},
        "usage": None if reply is None else _usage(reply),
    }


def _usage(reply: Reply) -> dict[str, Any]:
    input_tokens, output_tokens = len(reply.prompt_ids), count_output_tokens(reply)
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


class ResponseWriter:
    """Writes the events of one streamed response: reasoning and text as they come, then the calls."""

    def __init__(self, call: ResponsesCall, text_of_token: Callable[[int], str]) -> None:
        self._call = call
        self._id, self._created_at = make_id("resp_"), int(time.time())
        self._num_events = 0
        self._output: list[dict[str, Any]] = []  # items that have ended
        self._open: tuple[str, str] | None = None  # type and id of the item that is being written
        self._text = ""

    def events(self, piece: Delta | Reply) -> Iterator[bytes]:
        """Yield the events of a delta, or of the reply, which ends the response."""
        if self._num_events == 0:
            yield self._event("response.created", response=self._response(None))
            yield self._event("response.in_progress", response=self._response(None))
        if isinstance(piece, Delta):
            if piece.reasoning_content:
                yield from self._add("reasoning", piece.reasoning_content)
            if piece.content:
                yield from self._add("message", piece.content)
            return
        if not piece.tool_calls and (self._open is None or self._open[0] != "message"):
            yield from self._add("message", "")
        status = _status(piece)
        yield from self._close("completed" if piece.tool_calls else status)
        for index, tool_call in enumerate(piece.tool_calls):
            is_last = index == len(piece.tool_calls) - 1
            yield from self._call_events(tool_call, status if is_last else "completed")
        yield self._event(f"response.{status}", response=self._response(piece))

    def error(self, error: APIError) -> bytes:
        """Return the event of an error that ends the stream."""
        body = openai_error(error)[1]
        # The fields that OpenAI documents, and the object that its client raises.
        return self._event("error", code=error.code, message=error.message, param=error.param, **body)

    def _response(self, reply: Reply | None) -> dict[str, Any]:
        return _response(self._call, self._id, self._created_at, self._output, reply)

    def _add(self, kind: str, text: str) -> Iterator[bytes]:
        """Yield the events of more text in an item of this type."""
        if self._open is None or self._open[0] != kind:
            yield from self._close("completed")
            self._open = kind, make_id({"reasoning": "rs_", "message": "msg_"}[kind])
            item = {**_text_item(*self._open, ""), "status": "in_progress", "content": []}
            yield self._item_event("response.output_item.added", item=item)
            yield self._part_event("response.content_part.added", part=_part(kind, ""))
        if text:
            self._text += text
            yield self._text_event("delta", delta=text)

    def _close(self, status: str) -> Iterator[bytes]:
        """Yield the end of the open item, if one is open."""
        if self._open is None:
            return
        item = {**_text_item(*self._open, self._text), "status": status}
        yield self._text_event("done", text=self._text)
        yield self._part_event("response.content_part.done", part=item["content"][0])
        yield self._item_event("response.output_item.done", item=item)
        self._output.append(item)
        self._open, self._text = None, ""

    def _call_events(self, tool_call: ToolCall, status: str) -> Iterator[bytes]:
        item = {**_call_item(tool_call), "status": status}
        begun = {**item, "status": "in_progress", "arguments": ""}
        arguments, kind = tool_call.arguments, "response.function_call_arguments"
        yield self._item_event("response.output_item.added", item=begun)
        yield self._item_event(f"{kind}.delta", item_id=item["id"], delta=arguments)
        yield self._item_event(f"{kind}.done", item_id=item["id"], name=tool_call.name, arguments=arguments)
        yield self._item_event("response.output_item.done", item=item)
        self._output.append(item)

    def _text_event(self, end: str, **more: Any) -> bytes:
        assert self._open is not None
        kind = self._open[0]
        logprobs: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        return self._part_event(f"response.{PART_TYPES[kind]}.{end}", **more, **logprobs)

    def _part_event(self, kind: str, **more: Any) -> bytes:
        assert self._open is not None
        return self._item_event(kind, item_id=self._open[1], content_index=0, **more)

    def _item_event(self, kind: str, **more: Any) -> bytes:
        return self._event(kind, output_index=len(self._output), **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1, **more}, kind)


RESPONSES = Dialect(
    "/v1/responses",
    object_schema(FIELDS),
    parse_responses,
    response_json,
    ResponseWriter,
    names={"messages": "input", "max_tokens": "max_output_tokens"},
)
