"""OpenAI's Responses API: from the JSON of a request to a `ChatRequest`, and from a `Reply` to JSON or events.

Nothing is stored: each request has the whole conversation. Items of reasoning, text and calls that follow one another
become one message of the assistant, as the core has answered it, so that a turn keeps its sampled token ids.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from jaxft import ChatRequest, Delta, Reply, ToolCall
from jaxft.serving.schemas import (
    VARIABLES,
    AllowedCallers,
    AnswerFormat,
    Caller,
    ChatFields,
    Count,
    Dialect,
    Many,
    Name,
    Natural,
    Refused,
    RequestObject,
    TextOr,
    Tools,
    function_tool,
)
from jaxft.serving.wire import APIError, count_tokens, event, make_id, openai_error


class InputText(RequestObject):
    """A part of text."""

    ignored = frozenset({"prompt_cache_breakpoint"})

    type: Literal["input_text"]
    text: str = Field(description="The text.")


class OutputText(RequestObject):
    """A part of an answer."""

    ignored = frozenset({"annotations", "logprobs", "parsed"})

    type: Literal["output_text"]
    text: str = Field(description="The text.")


class Refusal(RequestObject):
    """A part of an answer in which the assistant refuses."""

    type: Literal["refusal"]
    refusal: str = Field(description="The text.")


class SummaryText(RequestObject):
    """A part of a summary of reasoning."""

    type: Literal["summary_text"]
    text: str = Field(description="The text.")


class ReasoningText(RequestObject):
    """A part of reasoning."""

    type: Literal["reasoning_text"]
    text: str = Field(description="The text.")


class Item(RequestObject):
    """An item of a conversation."""

    ignored = frozenset({"id", "status"})


class MessageItem(Item):
    """A message."""

    ignored = Item.ignored | {"phase"}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = Field(description="Who speaks.")
    content: TextOr[Many[Annotated[InputText | OutputText | Refusal, Field(discriminator="type")]]] = Field(
        description="Text, or parts of text."
    )


class ReasoningItem(Item):
    """Reasoning before an answer."""

    ignored = Item.ignored | {"encrypted_content"}

    type: Literal["reasoning"]
    content: Many[ReasoningText] | None = Field(None, description="Parts of `reasoning_text`.")
    summary: Many[SummaryText] | None = Field(
        None, description="Parts of `summary_text`, which are read if there is no content."
    )


class CallItem(Item):
    """Fields of a call of a function, and of its output."""

    call_id: str = Field(description="Name of the call, the same in the call and in its output.")
    caller: Caller = None
    namespace: Annotated[Any, Refused("tools have no namespaces")] = None


class FunctionCall(CallItem):
    """A call of a function."""

    ignored = Item.ignored | {"parsed_arguments"}

    type: Literal["function_call"]
    name: Name = Field(description="Name of the function.")
    arguments: str = Field(description="A JSON object, as text.")


class FunctionCallOutput(CallItem):
    """The output of a function."""

    ignored = Item.ignored | {"name"}

    type: Literal["function_call_output"]
    output: TextOr[Many[InputText]] = Field(description="Text, or parts of `input_text`.")


InputItem = MessageItem | ReasoningItem | FunctionCall | FunctionCallOutput


def _name_type(item: Any) -> Any:
    """Return an item with its type, which a message may leave out."""
    is_message = isinstance(item, dict) and "role" in item and item.get("type") is None
    return {**item, "type": "message"} if is_message else item


class ResponsesTool(RequestObject):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name = Field(description="Name of the function.")
    description: str | None = Field(None, description="Purpose of the function.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(None, description="A forced call has arguments of the schema.")
    defer_loading: Annotated[Any, Refused("every tool is in the prompt", False)] = None
    allowed_callers: AllowedCallers = None
    output_schema: Annotated[Any, Refused("put it into the description")] = None

    def as_tool(self, *, is_forced: bool) -> dict[str, Any]:
        """Return the function in the format of chat completions, `strict` only if a call is forced."""
        return function_tool(self.name, self.description, self.parameters, is_forced and self.strict)


class ResponsesToolChoice(RequestObject):
    """A function that the answer must call."""

    type: Literal["function"]
    name: str = Field(description="The function that the answer must call.")


class TextConfig(AnswerFormat):
    """Format of an answer."""

    verbosity: Annotated[Any, Refused("ask for it in the prompt", "medium")] = None


class ResponsesRequest(ChatFields):
    """A request of responses."""

    ignored = ChatFields.ignored | {"stream_options", "client_metadata", "access_programs", "max_tool_calls"}

    messages: TextOr[
        Annotated[
            Many[Annotated[InputItem, Field(discriminator="type"), BeforeValidator(_name_type)]], Field(min_length=1)
        ]
    ] = Field(
        alias="input",
        description="Text of the user, or the whole conversation as items of text, reasoning, calls and their outputs.",
    )
    instructions: str | None = Field(
        None,
        description="Text of the system: the first message, which system and developer messages at the beginning join.",
    )
    tools: Tools[ResponsesTool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: TextOr[ResponsesToolChoice] | None = Field(
        None, description="`auto`, `none`, `required` or a function."
    )
    max_tokens: Count | None = Field(None, alias="max_output_tokens", description="Limit of sampled tokens.")
    top_k: Natural | None = Field(None, description="Number of most likely tokens to draw from; 0 for all.")
    previous_response_id: Annotated[Any, Refused("responses are not stored: send the whole input")] = None
    conversation: Annotated[Any, Refused("conversations are not stored: send the whole input")] = None
    prompt: Annotated[Any, Refused("prompts are not stored: send instructions and input")] = None
    background: Annotated[Any, Refused("responses are not stored: wait for the answer", False)] = None
    background_options: Annotated[Any, Refused("responses are not stored: wait for the answer")] = None
    context_management: Annotated[Any, Refused("send the conversation as it shall be read", [])] = None
    truncation: Annotated[Any, Refused("set llms.<name>.long_prompts in the configuration", "disabled")] = None
    include: Annotated[
        Any, Refused("log-probabilities come with chat completions", [], ["reasoning.encrypted_content"])
    ] = None
    top_logprobs: Annotated[Any, Refused("log-probabilities come with chat completions", 0)] = None
    response_format: TextConfig | None = Field(None, alias="text", description="`format`: JSON, of a schema or any.")
    reasoning: Annotated[Any, Refused(VARIABLES, {})] = None
    image: Annotated[Any, Refused("the policy reads text only")] = None

    def to_request(self) -> ChatRequest:
        """Return what to sample.

        >>> body = {"model": "policy", "instructions": "Be brief.", "input": "?", "max_output_tokens": 5}
        >>> ResponsesRequest.model_validate(body).to_request().messages
        [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '?'}]
        """
        arguments = self.arguments(ChatRequest)
        is_forced = self.tool_choice not in (None, "auto", "none")
        arguments["tools"] = [tool.as_tool(is_forced=is_forced) for tool in self.tools or ()]
        if self.response_format is not None:
            arguments["response_format"] = self.response_format.as_chat()
        if isinstance(self.tool_choice, ResponsesToolChoice):
            arguments["tool_choice"] = function_tool(self.tool_choice.name)
        said = self.messages
        asked: list[dict[str, Any]] = [{"role": "user", "content": said}] if isinstance(said, str) else _messages(said)
        if self.instructions is not None:
            asked = [{"role": "system", "content": self.instructions}, *asked]
        leading = list(itertools.takewhile(lambda each: each["role"] in ("system", "developer"), asked))
        if len(leading) > 1:  # chat templates such as Qwen 3.5's take one such message
            contents = (each["content"] for each in leading)
            texts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents)
            asked[: len(leading)] = [{"role": "system", "content": [part for parts in texts for part in parts]}]
        return ChatRequest(**arguments | {"messages": asked})


def _messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the items of an input as OpenAI's messages."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # message of the assistant that the next items may belong to
    for before, item in zip((None, *items), items, strict=False):
        if isinstance(item, FunctionCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _texts(item.output)})
            answer = None
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _texts(item.content)})
            answer = None
            continue
        # Within an answer, calls come last. One that thinks again is streamed as reasoning and text by turns.
        has_ended = answer is None or "tool_calls" in answer or type(item) is type(before)
        if answer is None or (has_ended and not isinstance(item, FunctionCall)):
            answer = {"role": "assistant", "content": None}
            messages.append(answer)
        if isinstance(item, ReasoningItem):
            texts = ("\n".join(part.text for part in parts or ()) for parts in (item.content, item.summary))
            answer["reasoning_content"] = answer.get("reasoning_content", "") + next(filter(None, texts), "")
        elif isinstance(item, MessageItem):
            said, more = answer["content"], _texts(item.content)
            answer["content"] = more if said is None else _joined(said) + _joined(more)
        else:
            answer.setdefault("tool_calls", []).append(ToolCall(item.call_id, item.name, item.arguments).as_message())
    return messages


def _texts(content: str | Sequence[InputText | OutputText | Refusal]) -> str | list[dict[str, Any]]:
    """Return text, or parts of the Responses API as those of a message."""
    if isinstance(content, str):
        return content
    return [
        {"type": "refusal", "refusal": part.refusal}
        if isinstance(part, Refusal)
        else {"type": "text", "text": part.text}
        for part in content
    ]


def _joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part[part["type"]] for part in content)


def response_json(asked: ResponsesRequest, reply: Reply, text_of_token: Callable[[int], str]) -> dict[str, Any]:
    """Return the JSON of a reply."""
    output = []
    if reply.reasoning_content is not None:
        output.append(_text_item("reasoning", make_id("rs_"), reply.reasoning_content))
    if reply.content or not reply.tool_calls:
        output.append(_text_item("message", make_id("msg_"), reply.content))
    output += [_call_item(tool_call) for tool_call in reply.tool_calls]
    output[-1]["status"] = _status(reply)
    return _response(asked, make_id("resp_"), int(time.time()), output, reply)


PART_TYPES = {"reasoning": "reasoning_text", "message": "output_text"}


def _text_item(kind: str, item_id: str, text: str) -> dict[str, Any]:
    """Return an item of reasoning, or a message."""
    more: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    return {"id": item_id, "type": kind, "status": "completed", **more, "content": [_part(kind, text)]}


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {} if kind == "reasoning" else {"annotations": [], "logprobs": []}
    return {"type": PART_TYPES[kind], "text": text, **more}


def _call_item(tool_call: ToolCall) -> dict[str, Any]:
    call = {"call_id": tool_call.id, "name": tool_call.name, "arguments": tool_call.arguments}
    return {"id": make_id("fc_"), "type": "function_call", "status": "completed", **call}


def _status(reply: Reply) -> str:
    return "incomplete" if reply.finish_reason == "length" else "completed"


UNVARIED = {
    **{"object": "response", "error": None, "previous_response_id": None, "store": False, "background": False},
    **{"truncation": "disabled", "metadata": {}},
}
"""Fields of every response."""


def _response(
    asked: ResponsesRequest, response_id: str, created_at: int, output: Sequence[Mapping[str, Any]], reply: Reply | None
) -> dict[str, Any]:
    """Return the JSON of a response, which is in progress until there is a reply."""
    status, choice = "in_progress" if reply is None else _status(reply), asked.tool_choice
    return UNVARIED | {
        "id": response_id,
        "created_at": created_at,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": asked.model,
        "output": output,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_tokens,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "text": {"format": (asked.response_format and asked.response_format.format) or {"type": "text"}},
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "tool_choice": choice.model_dump() if isinstance(choice, ResponsesToolChoice) else choice or "auto",
        "tools": [tool.model_dump(exclude_unset=True) for tool in asked.tools or ()],
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "usage": None if reply is None else _usage(reply),
    }


def _usage(reply: Reply) -> dict[str, Any]:
    prompt, sampled = count_tokens(reply)
    counts = {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}
    no_cache = {"cached_tokens": 0, "cache_write_tokens": 0}
    return {**counts, "input_tokens_details": no_cache, "output_tokens_details": {"reasoning_tokens": 0}}


class ResponseWriter:
    """Writes the events of one streamed response: reasoning and text as they come, then the calls."""

    def __init__(self, asked: ResponsesRequest, text_of_token: Callable[[int], str]) -> None:
        self._asked = asked
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
            for kind, text in (("reasoning", piece.reasoning_content), ("message", piece.content)):
                if text:
                    yield from self._add(kind, text)
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
        return _response(self._asked, self._id, self._created_at, self._output, reply)

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


RESPONSES = Dialect("/v1/responses", ResponsesRequest, response_json, ResponseWriter)
