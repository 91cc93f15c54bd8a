"""Check messages and tools in OpenAI's format, and bring messages into one canonical form.

Clients write one message in many ways: content null or missing, text as a list of parts, arguments as text or as an
object, fields that are null. `canonical_messages` gives all of them the same form, so that messages can be compared and
every chat template can read them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxft.errors import PromptTooLongError, RequestError

Message = Mapping[str, Any]
"""A message in OpenAI's format; `role` and `content` are its main fields."""

Tool = Mapping[str, Any]
"""A function that the model may call: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

MAX_DEPTH = 64
"""Levels of nesting that tools and arguments may have."""

MAX_TOOLS = 128

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NAME_RULE = "1 to 64 letters, digits, '_', '-' or '.'"


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as the model wrote it.

    Attributes:
        id: name of the call, which the result refers to: nine letters and digits, the same when a run is repeated.
        name: name of the function.
        arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """Return the call as an entry of a message's `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def canonical_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    """Return the messages in one form: content is text, arguments are objects, and other fields are not empty.

    Raises:
        RequestError: there are no messages; one has no role or content; a part is not text; a tool call is malformed;
            a field is of another type; or a text holds half of a character.

    >>> canonical_messages([{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None}])
    ({'role': 'user', 'content': 'hi'},)
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is of type {type(messages).__name__}; wanted a list", param="messages")
    if not messages:
        raise RequestError("messages is empty; wanted at least one {'role': ..., 'content': ...}", param="messages")
    return tuple(_canonical(message, f"messages[{index}]") for index, message in enumerate(messages))


def comparison_key(message: Message) -> tuple[Any, ...]:
    """Return a key of a canonical message that is equal for two spellings of one message.

    Left out are the ids of tool calls, the reasoning and name of the assistant, and spaces around the text of a message
    that calls tools.
    """
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    content = message["content"].strip() if calls else message["content"]
    name = None if message["role"] == "assistant" else message.get("name")
    return template_role(message["role"]), content, calls, name


def readable_text(message: Message) -> str:
    """Return a canonical message as text for people, with its tool calls.

    >>> call = {"function": {"name": "look_up", "arguments": {"city": "Oslo"}}}
    >>> readable_text({"role": "assistant", "content": "", "tool_calls": [call]})
    'look_up({"city": "Oslo"})'
    """
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [f"{each['name']}({json.dumps(each['arguments'], ensure_ascii=False)})" for each in functions]
    return "\n".join([message["content"], *calls] if message["content"] else calls)


def template_role(role: str) -> str:
    """Return the role that chat templates know: `system` for `developer`, `tool` for `function`."""
    return {"developer": "system", "function": "tool"}.get(role, role)


def check_tools(tools: Any) -> None:
    """Raise a `RequestError` that names the tool unless each is a function with a name of its own.

    >>> check_tools([{"type": "function", "function": {"name": "look up"}}])
    Traceback (most recent call last):
    jaxft.errors.RequestError: tools[0].function.name is 'look up'; wanted 1 to 64 letters, digits, '_', '-' or '.'
    """
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools is of type {type(tools).__name__}; wanted a list of functions", param="tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are supported", param="tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise RequestError(
                f"{place} is no function; wanted {{'type': 'function', 'function': {{...}}}}", param=place
            )
        name = function.get("name")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise RequestError(f"{place}.function.name is {name!r}; wanted {NAME_RULE}", param=place)
        if name in names:
            raise RequestError(f"{place}.function.name repeats {name!r}; wanted one function per name", param=place)
        names.add(name)
        for field, kind in (("description", str), ("parameters", Mapping), ("strict", bool)):
            if not isinstance(function.get(field), kind | None):
                raise RequestError(
                    f"{place}.function.{field} is of type {type(function[field]).__name__}; wanted {kind.__name__}",
                    param=place,
                )
        check_json(tool, place)


def check_json(value: Any, place: str, depth: int = 0) -> None:
    """Raise a `RequestError` unless a value is JSON of at most `MAX_DEPTH` levels, without halves of characters."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{place} is nested deeper than {MAX_DEPTH} levels", param=place)
    if isinstance(value, str):
        check_text(value, place)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise RequestError(f"{place} has the key {key!r}; wanted text", param=place)
            check_text(key, place)
            check_json(each, place, depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            check_json(each, place, depth + 1)
    elif not isinstance(value, bool | int | float | None):
        raise RequestError(f"{place} holds a value of type {type(value).__name__}; wanted plain JSON", param=place)


def check_text(text: str, place: str) -> None:
    """Raise a `RequestError` if a text holds half of a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{place} holds half of a character, U+{ord(text[error.start]):04X}, at index {error.start}, and no "
            "tokenizer takes it; read it with errors='replace', or join it to its pair",
            param=place,
        ) from None


def check_size(messages: Sequence[Message], max_bytes: int, max_tokens: int) -> None:
    """Raise unless messages may fit a context; each takes a token at least, and templates leave out thoughts alone.

    Raises:
        PromptTooLongError: they cannot.
    """
    if len(messages) > max_tokens:
        raise PromptTooLongError.of(f"{len(messages)} messages", max_tokens)
    size = sum(num_bytes(message["content"].rpartition("</think>")[2]) for message in messages)
    if size > max_bytes:
        raise PromptTooLongError.of(f"{size} bytes, of which at most {max_bytes} are tokenised", max_tokens)


def num_bytes(text: str) -> int:
    """Return the number of bytes of a text."""
    return len(text.encode(errors="replace"))


def _canonical(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{place} is of type {type(message).__name__}; wanted a message", param=place)
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{place} has no 'role'; wanted 'role' and 'content'", param=place)
    if message.get("function_call"):
        raise RequestError(f"{place}['function_call'] is OpenAI's former format; wanted 'tool_calls'", param=place)
    calls = message.get("tool_calls")
    calls = () if calls is None else calls
    content = message.get("content")
    is_silent = role == "assistant" and (bool(calls) or "content" in message or "refusal" in message)
    if content is None and not is_silent:
        raise RequestError(f"{place} has no 'content'; wanted 'role' and 'content'", param=place)
    canonical: dict[str, Any] = {"role": role, "content": _text(content, f"{place}['content']")}
    for name, value in message.items():
        if name in canonical or name == "tool_calls" or value is None or value in ("", [], {}):
            continue
        if not isinstance(value, str):
            raise RequestError(f"{place}[{name!r}] is of type {type(value).__name__}; wanted text", param=place)
        canonical[name] = value
    for name, value in canonical.items():
        check_text(value, f"{place}[{name!r}]")
    if not isinstance(calls, list | tuple) or (calls and role != "assistant"):
        raise RequestError(f"{place}['tool_calls'] must be a list, in a message of the assistant", param=place)
    if calls:
        canonical["tool_calls"] = [_tool_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return canonical


def _text(content: Any, place: str) -> str:
    """Return content as text; the texts of several parts are joined by line breaks, as vLLM does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{place} is of type {type(content).__name__}; wanted text", param=place)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get(kind) if isinstance(part, Mapping) and kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise RequestError(f"{place} has a part of type {kind!r}; wanted parts of text only", param=place)
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise RequestError(f"{place} calls no function; wanted {{'id', 'type', 'function'}}", param=place)
    name, arguments, call_id = function.get("name"), function.get("arguments"), call.get("id")
    call_id = "" if call_id is None else call_id
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise RequestError(f"{place} calls {name!r}; wanted {NAME_RULE}", param=place)
    if not isinstance(call_id, str) or not isinstance(arguments, str | Mapping | None):
        raise RequestError(f"{place} must have arguments and an id of text", param=place)
    canonical = {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": read_arguments(arguments or {})},
    }
    check_json(canonical, place)
    return canonical


def read_arguments(arguments: str | Mapping[str, Any]) -> Any:
    """Return arguments as an object if they are one, as text or not; any other text stays as it is.

    >>> read_arguments('{"a": 1}'), read_arguments('{"a": '), read_arguments("")
    ({'a': 1}, '{"a": ', '')
    """
    if not isinstance(arguments, str):
        return dict(arguments)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
