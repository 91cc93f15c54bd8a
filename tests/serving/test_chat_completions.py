import dataclasses
import json
import typing

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from jaxft.rollout.calls import Completion, Reply
from jaxft.rollout.chat_request import ChatRequest, Delta
from jaxft.rollout.messages import ToolCall
from jaxft.serving.chat_completions import FIELDS, ChunkWriter, completion, parse_call
from jaxft.serving.fields import KINDS
from jaxft.serving.wire import MAX_DEPTH, MAX_VALUES, APIError, encode, openai_error, parse_body

MESSAGES = [{"role": "user", "content": "?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def call(**fields):
    return parse_call({"model": "policy", "messages": MESSAGES} | fields)


def refused(**fields):
    """The error of a refused request."""
    with pytest.raises(APIError) as caught:
        call(**fields)
    assert caught.value.status == 400
    return openai_error(caught.value)[1]["error"]


def rows(treatment):
    return pytest.mark.parametrize(
        "field", [each for each in FIELDS if each.treatment == treatment], ids=lambda f: f.name
    )


# For each taken field: a value, fields that it needs, and what it changes in the call or its request.
TAKEN = {
    "messages": ([{"role": "user", "content": "!"}], {}, {"messages": [{"role": "user", "content": "!"}]}),
    "model": ("other", {}, {"model": "other"}),
    "tools": ([TOOL], {}, {"tools": [TOOL]}),
    "tool_choice": ("none", {"tools": [TOOL]}, {"tool_choice": "none", "tools": [TOOL]}),
    "parallel_tool_calls": (False, {}, {"parallel_tool_calls": False}),
    "temperature": (0.5, {}, {"temperature": 0.5}),
    "top_p": (0.5, {}, {"top_p": 0.5}),
    "max_completion_tokens": (7, {}, {"max_tokens": 7}),
    "max_tokens": (7, {"max_completion_tokens": 7}, {"max_tokens": 7}),
    "n": (3, {}, {"n": 3}),
    "seed": (2**62, {}, {"seed": 2**62}),
    "stop": (["a", "b"], {}, {"stop": ["a", "b"]}),
    "logit_bias": ({"5": -100}, {}, {"logit_bias": {5: -100}}),
    "logprobs": (True, {}, {"logprobs": True}),
    "top_logprobs": (2, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}),
    "stream": (True, {}, {"stream": True}),
    "stream_options": ({"include_usage": True}, {"stream": True}, {"stream": True, "include_usage": True}),
    "top_k": (-1, {}, {"top_k": 0}),
    "min_p": (0.1, {}, {"min_p": 0.1}),
    "stop_token_ids": ([4], {}, {"stop_token_ids": [4]}),
    "include_stop_str_in_output": (True, {}, {"include_stop": True}),
    "chat_template_kwargs": ({"a": 1}, {}, {"chat_template_kwargs": {"a": 1}}),
    "return_token_ids": (True, {}, {"token_ids": True}),
    "return_tokens_as_token_ids": (True, {}, {"token_ids": True, "tokens_as_ids": True}),
}

# A value of another kind.
WRONG = {
    "text": 1,
    "boolean": "true",
    "number": True,
    "integer": 1.5,
    "seed": 2**64,
    "object": [],
    "text or object": 1,
    "list of objects": [1],
    "list of integers": [1, "2"],
    "text or list of texts": [1],
    "object of numbers": {"1": "2"},
}


def values(call):
    """All that a call asks for, in one dict."""
    return dataclasses.asdict(call.request) | call._asdict() | {"request": None}


@rows("taken")
def test_a_taken_field_has_its_effect_and_no_other(field):
    value, needed, changes = TAKEN[field.name]
    assert values(call(**{field.name: value}, **needed)) == values(call()) | changes
    assert KINDS[field.kind].is_one(value) and not KINDS[field.kind].is_one(WRONG[field.kind])
    error = refused(**{field.name: WRONG[field.kind]})
    assert (error["type"], error["param"]) == ("invalid_request_error", field.name)
    if field.name not in ("messages", "model"):
        assert call(**{field.name: None}) == call()


@rows("refused")
def test_a_refused_field_is_named(field):
    error = refused(**{field.name: "surprise"})
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        field.name,
        "unsupported_parameter",
    )
    assert "surprise" in error["message"] and field.note in error["message"]
    for value in (None, *field.unused):
        assert call(**{field.name: value}) == call()


@rows("ignored")
def test_an_ignored_field_changes_nothing(field):
    assert call(**{field.name: "surprise"}) == call()


def test_the_table_has_every_field_of_openai_and_no_unknown_kind():
    theirs = {*typing.get_type_hints(CompletionCreateParamsBase), "stream"}
    assert theirs <= {field.name for field in FIELDS if field.api == "OpenAI"}
    assert {field.kind for field in FIELDS} <= {*KINDS, ""} and len({field.name for field in FIELDS}) == len(FIELDS)
    assert set(TAKEN) == {field.name for field in FIELDS if field.treatment == "taken"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"repetition_penalty": True}, "repetition_penalty"),  # not 1
        ({"messages": None}, "messages"),
        ({"model": None}, "model"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"temperature": 10**400}, "temperature"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"stop": ["a", ""]}, "stop"),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "look"}}]}, "tools[0]"),
    ],
)
def test_impossible_requests_are_refused_by_name(fields, param):
    assert refused(**fields)["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"user": "\\ud800"}',
        b'{"\\uD83D": 1}',
        b'{"user": "\xed\xa0\x80"}',
        b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"metadata": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
        b'{"metadata": [' + b"[]," * MAX_VALUES + b"[]]}",
    ],
)
def test_bodies_that_cannot_be_worked_with_are_refused(body):
    with pytest.raises(APIError) as caught:
        parse_body(body)
    assert caught.value.status == 400


def test_whole_characters_are_read_however_they_are_escaped():
    assert encode({"a": "ü"}) == '{"a":"ü"}'.encode()  # as it was sampled, byte for byte
    assert parse_body('{"a": "\\ud83d\\ude00 \\\\ud83d ü"}'.encode()) == {"a": "\N{GRINNING FACE} \\ud83d ü"}


def sampled(token_ids, logprobs, top_logprobs=()):
    return Completion(token_ids, logprobs, logprobs, [3] * len(token_ids), "stop", list(top_logprobs))


REPLY = Reply(
    content="",
    completion=sampled([7, 8], [-0.5, -0.25], [((7, -0.5), (9, float("-inf"))), ((8, -0.25), (7, -3.0))]),
    prompt_ids=(1, 2, 3),
    tool_calls=(ToolCall("abcdefgh1", "look", '{"x": 1}'),),
    reasoning_content="hm",
    others=(Reply("yes", sampled([9], [-1.0], [((9, -1.0), (8, -2.0))]), (1, 2, 3)),),
)
TEXTS = {7: "é", 8: "b", 9: "c"}.__getitem__


def test_a_reply_becomes_openais_json():
    body = json.loads(encode(completion(call(), REPLY, TEXTS)))
    assert (body["object"], body["model"], body["system_fingerprint"]) == (
        "chat.completion",
        "policy",
        "policy_version_3",
    )
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "abcdefgh1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
                ],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        },
        {"index": 1, "message": {"role": "assistant", "content": "yes"}, "logprobs": None, "finish_reason": "stop"},
    ]


def test_token_ids_are_under_the_names_of_vllm_and_of_harnesses_and_beside_logprobs():
    asked = call(logprobs=True, top_logprobs=2, return_token_ids=True)
    body = json.loads(encode(completion(asked, REPLY, TEXTS)))
    choice = body["choices"][0]
    assert (body["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [7, 8])
    message = choice["message"]
    assert (message["prompt_token_ids"], message["generation_token_ids"]) == ([1, 2, 3], [7, 8])
    assert message["generation_log_probs"] == [-0.5, -0.25]
    first, second = choice["logprobs"]["content"]
    assert first == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "token_id": 7,
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169], "token_id": 7},
            {"token": "c", "logprob": -9999.0, "bytes": [99], "token_id": 9},
        ],
        "prompt_token_ids": [1, 2, 3],
    }
    assert second["token_id"] == 8 and "prompt_token_ids" not in second
    named = completion(call(logprobs=True, return_tokens_as_token_ids=True), REPLY, TEXTS)
    assert named["choices"][0]["logprobs"]["content"][1]["token"] == "token_id:8"


def test_token_ids_that_a_client_sends_back_are_left_out():
    message = completion(call(return_token_ids=True), REPLY, TEXTS)["choices"][0]["message"]
    request = call(messages=[*MESSAGES, json.loads(encode(message))]).request
    assert request == ChatRequest([*MESSAGES, REPLY.message])


def test_a_streamed_reply_ends_with_tool_calls_and_counts():
    writer = ChunkWriter(call(stream=True, stream_options={"include_usage": True}, return_token_ids=True), TEXTS)
    pieces = [Delta(1, content="y"), Delta(0, reasoning_content="hm"), Delta(1, token_ids=(9,)), Delta(1, content="es")]
    chunks = [chunk for piece in pieces for chunk in writer.delta(piece)]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [(choice["index"], choice["delta"]) for choice in choices] == [
        (1, {"role": "assistant", "content": "y"}),
        (0, {"role": "assistant", "reasoning_content": "hm"}),
        (1, {"content": "es"}),
    ]
    *ends, last = writer.reply(REPLY)
    (calls, end, other) = [chunk["choices"][0] for chunk in ends]
    assert calls["delta"]["tool_calls"][0] == {"index": 0, **REPLY.tool_calls[0].as_message()}
    assert (end["finish_reason"], end["token_ids"], other["finish_reason"]) == ("tool_calls", (7, 8), "stop")
    assert end["delta"]["prompt_token_ids"] == (1, 2, 3)
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 6
    assert len({chunk["id"] for chunk in (*chunks, *ends, last)}) == 1
    assert all(chunk["usage"] is None for chunk in (*chunks, *ends))
