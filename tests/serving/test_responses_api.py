import json
from dataclasses import replace

import pytest

from jaxft.rollout.chat_request import Delta
from jaxft.rollout.messages import canonical_messages
from jaxft.serving.responses_api import ResponsesRequest, ResponseWriter, response_json
from jaxft.serving.schemas import read_request
from jaxft.serving.wire import APIError, encode
from tests.serving.conftest import REPLY, THINKS_AGAIN

QUESTION = {"role": "user", "content": "x?"}


def call(**fields):
    return read_request(ResponsesRequest, {"model": "policy", "input": "x?"} | fields)


def read(*items, **fields):
    """The messages that the core gets."""
    return call(input=list(items), **fields).to_request().messages


def test_items_become_the_messages_of_the_core():
    part = {"type": "text", "text": "a"}
    said = [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]
    function = {"name": "f", "arguments": '{"x": 1}'}
    used = {"type": "function_call", "call_id": "t1", **function, "id": "fc_1", "status": "completed"}
    result = {"type": "function_call_output", "call_id": "t1", "output": "3"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    tool_call = {"id": "t1", "type": "function", "function": function}
    assert call(instructions="s").to_request().messages == [{"role": "system", "content": "s"}, QUESTION]
    assert read({**QUESTION, "content": [{"type": "input_text", "text": "a"}]}) == [{"role": "user", "content": [part]}]
    items = [QUESTION, thought, {"type": "message", "role": "assistant", "content": said}, used, used, result, used]
    assert read(*items) == [
        QUESTION,
        {"role": "assistant", "content": [part], "reasoning_content": "hm", "tool_calls": [tool_call] * 2},
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
    ]
    answer = {"role": "assistant", "content": "a"}
    assert read(answer, answer) == [answer, answer]
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert read(used, summary, answer)[1] == answer | {"reasoning_content": "hm"}


def test_a_reply_sent_back_is_the_message_of_the_core():
    body = json.loads(encode(response_json(call(), REPLY, str)))
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
    (_, message) = read(QUESTION, *body["output"])
    assert message == REPLY.message | {"content": [{"type": "text", "text": "Well."}]}
    assert body["usage"]["total_tokens"] == 5


def test_a_streamed_reply_has_openais_events():
    writer = ResponseWriter(call(stream=True), str)
    pieces = [Delta(0, reasoning_content="h"), Delta(0, token_ids=(7,)), Delta(0, reasoning_content="m", content="We")]
    events = [event.decode() for piece in [*pieces, Delta(0, content="ll."), REPLY] for event in writer.events(piece)]
    data = [json.loads(event.split("\n")[1].removeprefix("data: ")) for event in events]
    assert [event.split("\n")[0] for event in events] == [f"event: {each['type']}" for each in data]
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.delta", "{}.done"]
    text += ["content_part.done", "output_item.done"]
    arguments = [f"function_call_arguments.{end}" for end in ("delta", "done")]
    assert [each["type"].removeprefix("response.") for each in data] == [
        "created",
        "in_progress",
        *(name.format("reasoning_text") for name in text),
        *(name.format("output_text") for name in text),
        *["output_item.added", *arguments, "output_item.done"],
        "completed",
    ]
    items = [each["item"] for each in data if each["type"] == "response.output_item.done"]
    assert items == data[-1]["response"]["output"]
    without_ids = [{**item, "id": ""} for item in response_json(call(), REPLY, str)["output"]]
    assert [{**item, "id": ""} for item in items] == without_ids


@pytest.mark.parametrize("calls", [(), REPLY.tool_calls])
def test_a_streamed_answer_that_thinks_again_is_sent_back_as_the_whole_one(calls):
    writer, (*deltas, reply) = ResponseWriter(call(stream=True), str), THINKS_AGAIN
    reply = replace(reply, tool_calls=calls)
    *_, end = [event.decode() for piece in [*deltas, reply] for event in writer.events(piece)]
    output = json.loads(end.split("data: ")[1])["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"] * 2 + ["function_call"] * len(calls)
    assert read(QUESTION, *output, QUESTION) == [QUESTION, reply.message, QUESTION]


def test_an_error_between_events_is_raised_by_the_client():
    writer = ResponseWriter(call(stream=True), str)
    list(writer.events(Delta(0, content="a")))
    data = json.loads(writer.error(APIError("it broke", status=500, kind="server_error")).split(b"data: ")[1])
    assert data["type"] == "error" and data["message"] == data["error"]["message"] == "it broke"
    assert data["sequence_number"] == 5


def test_a_request_of_codex_is_read_or_refused_with_a_way_out():
    """In the form that it has in public recordings, with functions alone."""
    tool = {"type": "function", "name": "exec_command", "description": "run", "strict": False, "parameters": {}}
    sent = {
        "instructions": "i",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": each} for each in "pr"],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
            {"type": "function_call", "name": "exec_command", "arguments": "{}", "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "o"},
        ],
        "tools": [tool],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"session_id": "s"},
    }
    messages = call(**sent).to_request().messages
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]  # stock templates take one
    assert canonical_messages(messages)[0]["content"] == "i\np\nr"
    for name, value, advice in (
        ("reasoning", {"effort": "medium", "summary": "auto"}, "enable_thinking"),
        ("text", {"verbosity": "low"}, r"text\.verbosity"),
        ("tools", [tool, {"type": "web_search"}], r"tools\[1\]\.type"),
        ("tools", [{"type": "custom", "name": "apply_patch"}], "wanted 'function'"),
        ("previous_response_id", "r", "send the whole input"),
    ):
        with pytest.raises(APIError, match=advice):
            call(**sent | {name: value})
