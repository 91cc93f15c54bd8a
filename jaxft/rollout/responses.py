"""Sampled text as an answer: its reasoning, its content and its tool calls.

The formats of model families are data (`assets/response_templates.json`), chosen by the chat template: where reasoning
and tool calls begin in the notation of transformers' response templates, and the grammar of a tool call. A call is good
if its grammar reads every character of it, so that the template, given the call, writes the same again but for what
carries no meaning. A tokenizer may bring a `response_template` of its own, which transformers then reads alone.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from jaxft.errors import RequestError, ToolsUnsupportedError
from jaxft.files import STRICT_JSON
from jaxft.rollout.messages import MAX_DEPTH, TOOL_NAME, Tool, ToolCall, check_json
from jaxft.rollout.tokenizer import TokenTexts

FAMILIES_FILE = Path(__file__).parent / "assets" / "response_templates.json"

PIECE_CHARACTERS = 4096
"""Characters that transformers' parser is given at once: what it reads beyond the beginning of a call is read again."""

PARAMETER = re.compile(
    r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
    r"(?=\s*(?:<parameter=[^>\n]+>|</function>\s*</tool_call>))",
    re.DOTALL,
)
"""One parameter in tags. A closing tag inside of its value is text: behind the value stands another tag of the call."""

JSON_TYPES = {bool: ["boolean"], int: ["integer", "number"], float: ["number"], list: ["array"], dict: ["object"]}
"""Types of JSON schemas that a value in tags, read as JSON, may have; strings have no quotes there."""

BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class ParsedAnswer(NamedTuple):
    """Reasoning, content and tool calls parsed from sampled text.

    Attributes:
        content: text outside of reasoning and tool calls.
        reasoning_content: text of the reasoning; None without any.
        tool_calls: pairs of a name and the arguments, a JSON object as text.
        is_malformed: True if the text begins a tool call that is no good one; `content` holds all of it then.
    """

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()
    is_malformed: bool = False


class ToolCallGrammar(NamedTuple):
    """Grammar of the tool calls of one format; only spaces between tags and JSON values carry no meaning there.

    Attributes:
        open: pattern before the content, with the name of the function if it is not in the content.
        content: `arguments`, `call` or `calls` (JSON: the arguments, an object with name and arguments, a list of
            these), or `parameters` (tags).
        close: pattern behind the content.
        tags: texts that stand in no content behind a call: one there shows that the call was read to a wrong end.
    """

    open: str
    content: str
    close: str
    tags: list[str]

    def read(self, text: str, start: int, tools: Sequence[Tool]) -> tuple[list[tuple[str, str]], int]:
        """Return the calls that begin at an index of a text, with their arguments as text, and the index of their end.

        Raises:
            ValueError: the grammar does not read the text.
        """
        opened = re.compile(rf"{self.open}\s*").match(text, start)
        if opened is None:
            raise ValueError("a tool call has no name")
        if self.content == "parameters":
            value, end = _read_parameters(text, opened.end(), opened["name"], tools)
        else:
            value, end = STRICT_JSON.raw_decode(text, opened.end())
        closed = re.compile(rf"\s*{self.close}").match(text, end)
        if closed is None:
            raise ValueError("a tool call has no end")
        functions = value if self.content == "calls" else [value]
        if self.content in ("arguments", "parameters"):
            functions = [{"name": opened["name"], "arguments": value}]
        if not isinstance(functions, list) or not functions:
            raise ValueError("there is no list of tool calls")
        return [_call(function) for function in functions], closed.end()


class ResponseFormat:
    """Parser of the reasoning and tool calls that the model of one tokenizer writes.

    Attributes:
        has_reasoning: True if answers may begin with reasoning.
    """

    def __init__(self, tokenizer: Any, tokens: TokenTexts, stop_ids: Sequence[int]) -> None:
        """Find the format of a tokenizer's chat template; `stop_ids` are the token ids that end an answer."""
        self._tokens = tokens
        own = tokenizer.response_template
        family = _family(str(tokenizer.get_chat_template(tools=[{}]))) if own is None else None
        spec = own if family is None else family["response_template"]
        self._forced_call: list[str] | None = None if family is None else family.get("forced_call")
        grammar = None if family is None else family.get("tool_call")
        self._grammar = None if grammar is None else ToolCallGrammar(**grammar)
        fields = {} if spec is None else spec["fields"]
        self.has_reasoning = "reasoning_content" in fields
        self._tools_template = load_response_template(spec) if "tool_calls" in fields else None
        without = {name: field for name, field in fields.items() if name != "tool_calls"}
        self._plain_template = load_response_template({**spec, "fields": without}) if self.has_reasoning else None
        strings = json.dumps([fields, grammar], ensure_ascii=False).replace("\\\\", "\\")
        names = {token_id: tokens.decoded_text(token_id) for token_id in tokens.control_ids.union(stop_ids)}
        self._skipped_ids = {
            token_id for token_id, text in names.items() if text not in strings and re.escape(text) not in strings
        }

    def template(self, *, has_tools: bool) -> ResponseTemplate | None:
        """Return the template to parse an answer with; None if all of its text is content.

        Raises:
            ToolsUnsupportedError: there are tools, and no response template says how the model calls them.
        """
        if has_tools and self._tools_template is None:
            raise ToolsUnsupportedError(
                "tools are given, but the chat template is of no family whose tool calls are known (Qwen 2.5 to 3.5, "
                "Hermes, SmolLM3, Llama 3, Mistral); give the tokenizer a response_template in its "
                "tokenizer_config.json",
                param="tools",
            )
        return self._tools_template if has_tools else self._plain_template

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled ids, with those control tokens only that belong to the response template."""
        return self._tokens.decode([token for token in token_ids if token not in self._skipped_ids])

    def forced_call(self, name: str | None) -> str:
        """Return the beginning of an answer that calls the function `name`; for None, any function.

        Raises:
            RequestError: the beginning is unknown, because the tokenizer brings its own response template.
        """
        if self._forced_call is None:
            raise RequestError("tool_choice can only be 'auto' or 'none' with this tokenizer", param="tool_choice")
        before, behind = self._forced_call[:2]
        return before if name is None else f"{before}{name}{behind}"

    @property
    def call_ends(self) -> tuple[str, str] | None:
        """Texts between name and arguments of a call, and behind the arguments; None if those are not JSON."""
        if self._forced_call is None or len(self._forced_call) < 3:
            return None
        return self._forced_call[1], self._forced_call[2]

    def parse(self, text: str, prompt_text: str, *, has_tools: bool, tools: Sequence[Tool] = ()) -> ParsedAnswer:
        """Return the parts of an answer; a malformed tool call is content.

        Args:
            text: the sampled text; it includes what `tool_choice` forced.
            prompt_text: the rendered conversation, which may end within the answer's reasoning.
            has_tools: True if the answer may call tools.
            tools: functions that it may call; arguments that the model writes without types get those of the function.
        """
        template = self.template(has_tools=has_tools)
        if template is None:
            return ParsedAnswer(text)
        try:
            return _answer(template, self._grammar, text, prompt_text, tools)
        except (ValueError, TypeError, KeyError, RecursionError):  # whatever the sampled JSON may cause
            if self._plain_template is None:
                return ParsedAnswer(text, is_malformed=True)
            return _answer(self._plain_template, None, text, prompt_text, ())._replace(is_malformed=True)


def make_parser(template: ResponseTemplate, prompt_text: str, tools: Sequence[Tool] = ()) -> ResponseParser:
    """Return transformers' parser of an answer that follows this prompt."""
    # Without its anchor the whole prompt would be parsed as a part of the answer.
    prefix = prompt_text if template.start_anchor_re.search(prompt_text) else ""
    return ResponseParser(template, prefix=prefix, tools=[dict(tool) for tool in tools] or None)


def tool_call_id(call_id: int, index: int) -> str:
    """Return the id of the tool call at an index of an answer: nine letters and digits, as Mistral's templates demand.

    Args:
        call_id: number of the language-model call, which depends on its prompt.
        index: number of the tool call in the answer.

    >>> tool_call_id(7, 0) == tool_call_id(7, 0), tool_call_id(7, 0) == tool_call_id(7, 1), len(tool_call_id(7, 0))
    (True, False, 9)
    """
    digest = hashlib.sha256(f"{call_id} {index}".encode()).digest()
    return "".join(BASE62[byte % len(BASE62)] for byte in digest[:9])


def number_tool_calls(answer: ParsedAnswer, call_id: int) -> tuple[ToolCall, ...]:
    """Return the tool calls of an answer with their ids."""
    calls = enumerate(answer.tool_calls)
    return tuple(ToolCall(tool_call_id(call_id, index), name, arguments) for index, (name, arguments) in calls)


def _family(chat_template: str) -> dict[str, Any] | None:
    """Return the first family whose marks are in a chat template."""
    for family in json.loads(FAMILIES_FILE.read_text(encoding="utf-8")):
        has_all = all(mark in chat_template for mark in family["chat_template_contains"])
        if has_all and not any(mark in chat_template for mark in family.get("chat_template_lacks", ())):
            return family
    return None


def _answer(
    template: ResponseTemplate, grammar: ToolCallGrammar | None, text: str, prompt_text: str, tools: Sequence[Tool]
) -> ParsedAnswer:
    """Return the parts of an answer; without a grammar, the response template reads tool calls to their ends.

    Raises:
        ValueError: a tool call is not good.
    """
    content, thoughts, calls, end, is_call = [], [], list[tuple[str, str]](), 0, True
    while is_call:
        parser, events, is_call = make_parser(template, "" if calls else prompt_text, tools), [], False
        while end < len(text) and not is_call:
            events += parser.feed(text[end : end + PIECE_CHARACTERS])
            end = min(end + PIECE_CHARACTERS, len(text))
            is_call = grammar is not None and any(event["field"] == "tool_calls" for event in events)
        message, _ = parser.finalize()
        content.append(message.get("content", ""))
        thoughts.append(message.get("reasoning_content", ""))
        if grammar is None:
            calls = [_call(each["function"]) for each in message.get("tool_calls", ())]
            bounds = [each for each in events if each["field"] == "tool_calls" and each["type"] != "region_chunk"]
            if bounds and bounds[-1]["type"] == "region_open" and template.fields["tool_calls"].close_literals:
                raise ValueError("a tool call has no end")
        elif is_call := "tool_calls" in message:
            # Behind its beginning the parser takes all text for the call.
            read, end = grammar.read(text, end - len(message["tool_calls"]), tools)
            calls += read
    if grammar is not None and any(tag in "".join(content[1:]) for tag in grammar.tags):
        raise ValueError("a tool call ended before one of its tags")
    reasoning = "".join(thoughts).strip() or None
    # Space between the parts belongs to the format; an answer of content alone stays as it was sampled.
    said = "".join(content).lstrip() if "reasoning_content" in template.fields else "".join(content)
    return ParsedAnswer(said.rstrip() if calls else said, reasoning, tuple(calls))


def _call(function: Any) -> tuple[str, str]:
    """Return name and arguments of a call, which may have an id and the type `function`, and nothing else."""
    if not isinstance(function, Mapping):
        raise ValueError(f"a tool call is of type {type(function).__name__}")
    given = [value for key, value in function.items() if key in ("arguments", "parameters")]
    others = set(function) - {"name", "arguments", "parameters", "id", "type"}
    if len(given) != 1 or others or function.get("type", "function") != "function":
        raise ValueError(f"a tool call has the keys {', '.join(function)}")
    name, arguments = function["name"], given[0]
    if isinstance(arguments, str):
        arguments = STRICT_JSON.decode(arguments)
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name) or not isinstance(arguments, dict):
        raise ValueError(f"a tool call has the name {name!r} and arguments of type {type(arguments).__name__}")
    check_json({"name": name, "arguments": arguments}, "a tool call", depth=MAX_DEPTH // 2)
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _read_parameters(text: str, start: int, name: str, tools: Sequence[Tool]) -> tuple[dict[str, Any], int]:
    """Return the arguments in tags of a call, with the types that its function gives them, and the index of their end.

    Raises:
        ValueError: a parameter stands there twice, or its value holds another one, as if its closing tag were left out.
    """
    schemas = [tool["function"].get("parameters") or {} for tool in tools if tool["function"]["name"] == name]
    properties = schemas[0].get("properties") if schemas else None
    arguments: dict[str, Any] = {}
    while found := PARAMETER.match(text, start):
        key, value = found["key"], found["value"]
        if key in arguments or "<parameter=" in value:
            raise ValueError(f"the parameter {key!r} is there twice, or has no end")
        arguments[key] = _convert(value, _types(properties.get(key)) if isinstance(properties, Mapping) else set())
        start = found.end()
    return arguments, start


def _convert(written: str, types: set[str]) -> Any:
    """Return a value in tags as one of these types of JSON; text that is of none of them stays text.

    >>> _convert("3.0", {"integer"}), _convert("True", {"boolean"}), _convert("[1", {"array"})
    (3, True, '[1')
    """
    word = written.strip().lower()
    try:
        # Some templates write the constants of Python.
        value = STRICT_JSON.decode({"true": word, "false": word, "null": word, "none": "null"}.get(word, written))
    except ValueError:
        return written
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    return value if types.intersection(JSON_TYPES.get(type(value), ["null"] if value is None else [])) else written


def _types(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows, as far as it names them."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {"null"} if schema.get("nullable") else set()
    types |= {named} if isinstance(named, str) else {each for each in named or () if isinstance(each, str)}
    return types.union(*(_types(choice) for union in ("anyOf", "oneOf") for choice in schema.get(union) or ()))
