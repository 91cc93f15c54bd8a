"""Sampled text as an answer: its reasoning, its content and its tool calls.

The formats of model families are data (`assets/response_templates.json`), in the notation of transformers' response
templates, and are chosen by the chat template. A tokenizer may bring a `response_template` of its own.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from jaxft.errors import RequestError
from jaxft.rollout.messages import MAX_DEPTH, TOOL_NAME, Tool, ToolCall, check_json, read_arguments
from jaxft.rollout.token_text import TokenTexts

FAMILIES_FILE = Path(__file__).parent / "assets" / "response_templates.json"

BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class ParsedAnswer(NamedTuple):
    """Reasoning, content and tool calls parsed from sampled text.

    Attributes:
        content: text outside of reasoning and tool calls.
        reasoning_content: text of the reasoning; None without any.
        tool_calls: pairs of a name and the arguments, a JSON object as text.
        is_malformed: True if the text begins a tool call that cannot be parsed; `content` holds it then.
    """

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()
    is_malformed: bool = False


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
        fields = {} if spec is None else spec["fields"]
        self.has_reasoning = "reasoning_content" in fields
        self._tools_template = load_response_template(spec) if "tool_calls" in fields else None
        without = {name: field for name, field in fields.items() if name != "tool_calls"}
        self._plain_template = load_response_template({**spec, "fields": without}) if self.has_reasoning else None
        strings = json.dumps(fields, ensure_ascii=False).replace("\\\\", "\\")
        names = {token_id: tokens.text_of(token_id) for token_id in tokens.control_ids.union(stop_ids)}
        self._skipped_ids = {
            token_id for token_id, text in names.items() if text not in strings and re.escape(text) not in strings
        }

    def template(self, *, has_tools: bool) -> ResponseTemplate | None:
        """Return the template to parse an answer with; None if all of its text is content.

        Raises:
            RequestError: there are tools, and no response template says how the model calls them.
        """
        if has_tools and self._tools_template is None:
            raise RequestError(
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
        before, behind = self._forced_call
        return before if name is None else f"{before}{name}{behind}"

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
            return _answer(template, text, prompt_text, tools)
        except (ValueError, TypeError, KeyError, RecursionError):  # whatever the sampled JSON may cause
            if self._plain_template is None:
                return ParsedAnswer(text, is_malformed=True)
            return _answer(self._plain_template, text, prompt_text)._replace(is_malformed=True)


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


def _answer(template: ResponseTemplate, text: str, prompt_text: str, tools: Sequence[Tool] = ()) -> ParsedAnswer:
    """Return the parts of an answer.

    Raises:
        ValueError: a tool call is no JSON, has no name of a function, was cut off, or its arguments are no object.
    """
    parser = make_parser(template, prompt_text, tools)
    events = parser.feed(text)
    calls_field = template.fields.get("tool_calls")
    # JSON that is cut off is no JSON, but of tags the first ones could be taken for all.
    if calls_field is not None and calls_field.content == "xml-inline":
        ends = [event["type"] for event in events if event["field"] == "tool_calls" and event["type"] != "region_chunk"]
        if ends and ends[-1] == "region_open":
            raise ValueError("the tool call has no end")
    message, _ = parser.finalize()
    calls = tuple(_call(each["function"]) for each in message.get("tool_calls", ()))
    reasoning = message.get("reasoning_content", "").strip() or None
    content = message.get("content", "")
    # Space between the parts belongs to the format; an answer of content alone stays as it was sampled.
    content = content.lstrip() if "reasoning_content" in template.fields else content
    return ParsedAnswer(content.rstrip() if calls else content, reasoning, calls)


def _call(function: dict[str, Any]) -> tuple[str, str]:
    given, name = function["arguments" if "arguments" in function else "parameters"], function["name"]
    arguments = read_arguments(given) if isinstance(given, str | dict) else given
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name) or not isinstance(arguments, dict):
        raise ValueError(f"a tool call has the name {name!r} and arguments of type {type(arguments).__name__}")
    check_json({"name": name, "arguments": arguments}, "a tool call", depth=MAX_DEPTH // 2)
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
