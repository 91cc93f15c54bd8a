"""What each dialect takes, refuses and ignores, field by field; the pages list the same."""

import dataclasses
import json
import re
import typing
from pathlib import Path

import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import ValidationError

from jaxft.errors import RequestError
from jaxft.serving import messages_api, responses_api
from jaxft.serving.app import DIALECTS
from jaxft.serving.schemas import Refused, StreamOptions, as_refusal, read_request
from jaxft.serving.wire import APIError, encode, parse_body
from tests.serving.conftest import QUESTION, SCHEMA

DOCS = Path(__file__).parents[2] / "docs"
CHAT, COMPLETIONS, MESSAGES, RESPONSES = (dialect.request for dialect in DIALECTS)
USUAL = {
    CHAT: {"messages": QUESTION},
    COMPLETIONS: {"prompt": [5, 6]},
    MESSAGES: {"messages": QUESTION, "max_tokens": 9},
    RESPONSES: {"input": "x?"},
}
FUNCTION = {"name": "look", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
OWN_TOOL = {"name": "look", "input_schema": SCHEMA}
NAMED = {"type": "function", "function": {"name": "look"}}


FAULTS = [
    (CHAT, {"messages": [0] * 1000}),
    (CHAT, {"tools": [0] * 1000}),
    (CHAT, {"stop": ["a"] * 1025}),
    (MESSAGES, {"messages": [0] * 1000}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "a"}] * 1000}]}),
    (MESSAGES, {"tools": [0] * 100}),
    (RESPONSES, {"input": [0] * 1000}),
    *((model, {f"field {number}": 1 for number in range(1000)}) for model in USUAL),
]
"""Requests of which pydantic would tell a thousand faults."""


class Row(typing.NamedTuple):
    """A field of a model as the pages list it."""

    name: str
    treatment: str
    note: str
    unused: tuple


def rows(model):
    listed = [Row(name, "ignored", "", ()) for name in sorted(model.ignored)]
    for name, field in model.model_fields.items():
        refused = next((each for each in field.metadata if isinstance(each, Refused)), None)
        treatment = "refused" if refused else "taken"
        note = refused.note if refused else field.description
        if note is not None:  # else the name of a type
            listed.append(Row(field.alias or name, treatment, note, refused.unused if refused else ()))
    return listed


ROWS = [(model, row) for model in USUAL for row in rows(model)]


def with_treatment(treatment):
    chosen = [(model, row) for model, row in ROWS if row.treatment == treatment]
    return pytest.mark.parametrize(
        ("model", "row"), chosen, ids=lambda each: each.name if isinstance(each, Row) else each.__name__
    )


def read(model, /, **fields):
    """The values of a request, and of what it wants sampled."""
    try:
        asked = read_request(model, {"model": "policy"} | USUAL[model] | fields)
        return vars(asked) | dataclasses.asdict(asked.to_request())
    except RequestError as error:
        raise as_refusal(model, error) from None


def refusal(model, /, **fields):
    with pytest.raises(APIError) as caught:
        read(model, **fields)
    assert (caught.value.status, caught.value.kind) == (400, "invalid_request_error")
    return caught.value


SYSTEM = {"role": "system", "content": "s"}
SAID = [{"role": "user", "content": "!"}]
TAKEN = {
    "model": "other",
    "stream": True,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": -2,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "n": 3,
    "seed": 2**62,
    "stop": ["a", "b"],
    "stop_sequences": (["a"], {"stop": ["a"]}),
    "stop_token_ids": [4],
    "logit_bias": ({"5": -100}, {"logit_bias": {5: -100}}),
    "max_tokens": 7,
    "max_completion_tokens": (7, {"max_completion_tokens": 7, "max_tokens": 7}),
    "max_output_tokens": (7, {"max_tokens": 7}),
    "include_stop_str_in_output": (True, {"include_stop": True}),
    "parallel_tool_calls": False,
    "chat_template_kwargs": {"a": 1},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "stream_options": ({"include_usage": True}, {"stream_options": StreamOptions(include_usage=True)}),
    "prompt": ([7], {"prompt_ids": [7]}),
    "messages": SAID,
    "instructions": ("s", {"instructions": "s", "messages": [SYSTEM, *QUESTION]}),
    "system": ("s", {"system": "s", "messages": [SYSTEM, *QUESTION]}),
    "input": ("!", {"messages": SAID}),
    (CHAT, "tools"): [TOOL],
    (MESSAGES, "tools"): ([OWN_TOOL], {"tools": [TOOL]}),
    (RESPONSES, "tools"): ([{"type": "function", **FUNCTION, "strict": False}], {"tools": [TOOL]}),
    "tool_choice": "none",
    (MESSAGES, "tool_choice"): ({"type": "none"}, {"tool_choice": "none"}),
    (COMPLETIONS, "logprobs"): (3, {"top_logprobs": 3}),
    "response_format": {"type": "json_object"},
    "text": ({"format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
    "output_config": (
        {"format": {"type": "json_schema", "schema": {}}},
        {"response_format": {"type": "json_schema", "json_schema": {"type": "json_schema", "schema": {}}}},
    ),
    "guided_regex": "a",
    "min_tokens": 2,
    "ignore_eos": True,
    "guided_grammar": "start: 'a'",
    "logprobs": True,
    "top_logprobs": 2,
}
"""For each taken field, by its name alone where all dialects take it so: a value, and all that it changes if that is
not the field of this name."""

NEEDED = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}
"""Fields that others need."""


@with_treatment("taken")
def test_a_taken_field_has_its_effect_and_no_other(model, row):
    needed = NEEDED.get(row.name, {})
    taken = TAKEN.get((model, row.name)) or TAKEN[row.name]
    value, changes = taken if isinstance(taken, tuple) else (taken, {row.name: taken})
    assert read(model, **{row.name: value}, **needed) == read(model, **needed) | changes
    error = refusal(model, **{row.name: "1" if type(value) in (int, float) else 1}, **needed)
    assert (error.param, error.code) == (row.name, "invalid_type")
    if row.name not in {"model", *USUAL[model]}:
        assert read(model, **{row.name: None}) == read(model)


@with_treatment("refused")
def test_a_refused_field_is_named_with_a_way_out(model, row):
    error = refusal(model, **{row.name: "surprise"})
    assert (error.param, error.code) == (row.name, "unsupported_parameter")
    assert error.message == f'{row.name} is "surprise": {row.note}'
    for value in (None, *row.unused):
        assert read(model, **{row.name: value}) == read(model)


@with_treatment("ignored")
def test_an_ignored_field_changes_nothing(model, row):
    assert read(model, **{row.name: "surprise"}) == read(model)


@pytest.mark.parametrize(
    ("model", "theirs", "elsewhere"),
    [
        (CHAT, ChatParams, set()),
        (COMPLETIONS, CompletionCreateParamsBase, set()),
        (MESSAGES, MessageCreateParamsBase, {"user_profile_id", "workspace_id"}),  # headers
        (RESPONSES, ResponseCreateParamsBase, set()),
    ],
)
def test_every_field_of_the_api_is_known(model, theirs, elsewhere):
    assert {*typing.get_type_hints(theirs), "stream"} - elsewhere <= {row.name for row in rows(model)}


def say(*content, role="user"):
    return {"messages": [{"role": role, "content": list(content)}]}


IMPOSSIBLE = [
    (CHAT, {"foo": 1}, "foo"),
    (CHAT, {"skip_special_tokens": 1}, "skip_special_tokens"),  # not true
    (CHAT, {"repetition_penalty": True}, "repetition_penalty"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"presence_penalty": -2.5}, "presence_penalty"),
    (COMPLETIONS, {"frequency_penalty": "1"}, "frequency_penalty"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": [1]}, "messages"),
    (MESSAGES, {"messages": []}, "messages"),
    (RESPONSES, {"input": []}, "input"),
    (CHAT, {"model": None}, "model"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
    (CHAT, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1": "2"}}, "logit_bias"),
    (CHAT, {"temperature": 10**400}, "temperature"),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"temperature": True}, "temperature"),
    (CHAT, {"temperature": float("inf")}, "temperature"),
    (CHAT, {"max_tokens": 2**31}, "max_tokens"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"seed": 2**64}, "seed"),
    (CHAT, {"stop": ["a", ""]}, "stop"),
    (CHAT, {"stop": [1]}, "stop"),
    (CHAT, {"stop_token_ids": [1, "2"]}, "stop_token_ids"),
    (CHAT, {"tool_choice": NAMED}, "tool_choice"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "look"}}]}, "tools[0]"),
    (COMPLETIONS, {"prompt": "hi"}, "prompt"),
    (COMPLETIONS, {"prompt": ["hi"]}, "prompt"),
    (COMPLETIONS, {"prompt": [[5]]}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (MESSAGES, {"max_tokens": None}, "max_tokens"),
    (MESSAGES, {"messages": [{"role": "poet", "content": ""}]}, "messages[0].role"),
    (MESSAGES, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (MESSAGES, say(1), "messages[0].content"),
    (MESSAGES, say({"type": "image"}), "messages[0].content[0].type"),
    (MESSAGES, say({"text": "a"}), "messages[0].content[0].type"),
    (MESSAGES, say({"type": "text", "text": 1}), "messages[0].content[0].text"),
    (MESSAGES, say({"type": "text"}), "messages[0].content[0].text"),
    (MESSAGES, say({"type": "text", "text": "a", "citations": [1]}), "messages[0].content[0].citations"),
    (MESSAGES, say({"type": "tool_use"}), "messages[0].content[0].type"),
    (MESSAGES, say({"type": "tool_use", "id": "t", "name": "f"}, role="assistant"), "messages[0].content[0].input"),
    (MESSAGES, {"messages": [*QUESTION, {"role": "assistant", "content": "It"}]}, "messages"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    (MESSAGES, {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    (MESSAGES, {"tool_choice": {"type": "some"}}, "tool_choice.type"),
    (MESSAGES, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (MESSAGES, {"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
    (MESSAGES, {"system": [{"type": "document"}]}, "system[0].type"),
    (RESPONSES, {"input": None}, "input"),
    (RESPONSES, {"input": [{"role": "poet", "content": ""}]}, "input[0].role"),
    (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    (RESPONSES, {"input": [{"type": "function_call_output", "output": "3"}]}, "input[0].call_id"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name"),
    (RESPONSES, {"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    (RESPONSES, {"tool_choice": 5}, "tool_choice"),
]


@pytest.mark.parametrize(("model", "fields", "param"), IMPOSSIBLE)
def test_impossible_requests_are_refused_by_name(model, fields, param):
    error = refusal(model, **fields)
    assert error.param == param and param in error.message


def test_all_faults_are_named_at_once_with_value_near_name_and_way_out():
    error = refusal(CHAT, temprature=1, n=0, functions=[1], top_k="many", logit_bias={"x": 1}, seed=2**70, foo=1)
    assert error.param == "seed"
    for part in ("n is 0", "logit_bias is", '"x"', 'top_k is "many"', "functions is [1]", "use tools", "2 more"):
        assert part in error.message
    assert "did you mean 'temperature'" in refusal(CHAT, temprature=1).message
    assert "text or a" in refusal(CHAT, stop=5).message
    assert "chat completions" in refusal(COMPLETIONS, prompt="hi").message
    said = refusal(MESSAGES, **say({"type": "image"})).message
    assert '"image"' in said and "'tool_result'" in said and "text only" in said


def test_unions_and_missing_parts_are_read_as_the_core_writes_them():
    """Order and null values within a tool reach the chat template as they were sent."""
    tool = {"function": {"parameters": {"b": None, "a": 1}, "name": "look"}, "type": "function"}
    request = read_request(CHAT, {"model": "a", "messages": QUESTION, "tools": [tool], "temperature": 1}).to_request()
    assert json.dumps(request.tools) == json.dumps([tool]) and type(request.temperature) is int
    named = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    request = read_request(
        MESSAGES, {"model": "a", "tools": [OWN_TOOL], "tool_choice": named} | USUAL[MESSAGES]
    ).to_request()
    assert request.forced_function == "look" and not request.parallel_tool_calls
    assert read(MESSAGES, tools=[OWN_TOOL], tool_choice={"type": "any"})["tool_choice"] == "required"
    own = {"type": "function", **FUNCTION}
    assert read(RESPONSES, tools=[own], tool_choice={"type": "function", "name": "look"})["tool_choice"] == NAMED
    assert read(CHAT, top_k=-1)["top_k"] == 0 and read(COMPLETIONS, top_k=-1)["top_k"] == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"temperature": NaN}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"user": "\\ud800"}',
        b'{"\\uD83D": 1}',
        b'{"user": "\xed\xa0\x80"}',
        b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_bodies_that_cannot_be_worked_with_are_refused(body):
    with pytest.raises(APIError) as caught:
        parse_body(body)
    assert caught.value.status == 400


def test_whole_characters_are_read_however_they_are_escaped():
    assert encode({"a": "ü"}) == '{"a":"ü"}'.encode()  # as it was sampled, byte for byte
    assert parse_body('{"a": "\\ud83d\\ude00 \\\\ud83d ü"}'.encode()) == {"a": "\N{GRINNING FACE} \\ud83d ü"}


OBJECTS = {
    "messages": {
        "message": messages_api.UserMessage,
        "text": messages_api.TextBlock,
        "thinking": messages_api.ThinkingBlock,
        "redacted_thinking": messages_api.RedactedThinkingBlock,
        "tool_use": messages_api.ToolUseBlock,
        "tool_result": messages_api.ToolResultBlock,
        "tool": messages_api.MessagesTool,
        "tool_choice": messages_api.ToolChoice,
    },
    "responses": {
        "message": responses_api.MessageItem,
        "reasoning": responses_api.ReasoningItem,
        "function_call": responses_api.FunctionCall,
        "function_call_output": responses_api.FunctionCallOutput,
        "input_text": responses_api.InputText,
        "output_text": responses_api.OutputText,
        "refusal": responses_api.Refusal,
        "summary_text": responses_api.SummaryText,
        "reasoning_text": responses_api.ReasoningText,
        "tool": responses_api.ResponsesTool,
        "tool_choice": responses_api.ResponsesToolChoice,
    },
}


def page_rows():
    """The rows of the pages, as Markdown."""
    tables = {"openai-api.md": [("", CHAT)], "dialects.md": [("", MESSAGES)]}
    tables["dialects.md"] += [(f"{name}.", model) for name, model in OBJECTS["messages"].items()]
    tables["dialects.md"].append(("", RESPONSES))
    tables["dialects.md"] += [(f"{name}.", model) for name, model in OBJECTS["responses"].items()]
    tables["dialects.md"].append(("", COMPLETIONS))
    for page, models in tables.items():
        lines, ignored = [], set()
        for prefix, model in models:
            for name, treatment, note, unused in rows(model):
                if treatment == "ignored":
                    ignored.add(f"{prefix}{name}")
                    continue
                accepted = ", ".join(f"`{json.dumps(value)}`" for value in unused)
                note = note[0].upper() + note[1:].rstrip(".") + "." + (f" Accepted: {accepted}." if unused else "")
                lines.append(f"| `{prefix}{name}` | {treatment} | {note} |")
        yield page, lines, ignored


def test_the_pages_list_every_field_and_its_treatment():
    for page, lines, ignored in page_rows():
        text = (DOCS / page).read_text()
        assert re.findall(r"^\| `[\w.]+` \| (?:taken|refused) \| .* \|$", text, re.MULTILINE) == lines, page
        assert {*re.findall(r"^\| `([\w.]+)` \| ignored \| .* \|$", text, re.MULTILINE)} == ignored, page


@pytest.mark.parametrize(("model", "wrong"), FAULTS)
def test_many_faults_of_a_request_cost_no_more_than_a_few(model, wrong):
    with pytest.raises(ValidationError) as caught:
        model.model_validate({"model": "policy", **USUAL[model], **wrong})
    assert caught.value.error_count() <= 7
