import asyncio
import json
import typing

import jax
import numpy as np
import openai
import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from jaxft.rollout.calls import Completion, Reply
from jaxft.rollout.chat_request import Delta
from jaxft.rollout.client import ChatClient
from jaxft.rollout.frameworks import client_of
from jaxft.rollout.messages import ToolCall
from jaxft.rollout.recorder import Episode, recording
from jaxft.rollout.sequences import token_sequences
from jaxft.serving.fields import KINDS
from jaxft.serving.responses_api import ResponseWriter, parse_responses, response_json
from jaxft.serving.responses_fields import FIELDS, ITEMS, PARTS, TOOL
from jaxft.serving.wire import APIError, encode

pytestmark = pytest.mark.usefixtures("no_sockets")

QUESTION = {"role": "user", "content": "x?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": False}]


def call(**fields):
    return parse_responses({"model": "policy", "input": "x?"} | fields)


def read(*items, **fields):
    """The messages that the core gets."""
    return call(input=list(items), **fields).request.messages


def make_episode(**changes):
    return Episode(**({"run_seed": 0, "stream": 0, "rollout_index": 0, "example_id": "a", "generation": 0} | changes))


def run(asking, episode=None):
    """The result of a coroutine that asks, in an episode or in none."""

    async def main():
        async with asyncio.timeout(60):
            with recording(episode):
                return await asking

    return asyncio.run(main())


@pytest.fixture(scope="module")
def llm(policy):
    return ChatClient(policy, "player")


@pytest.fixture(scope="module")
def client(llm):
    return client_of(llm, "openai")


def ask(client, **options):
    return client.responses.create(**({"model": "player", "input": "x?", "max_output_tokens": 8} | options))


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_field_is_treated_as_the_table_says(field):
    if field.treatment == "taken":
        with pytest.raises(APIError) as caught:
            call(**{field.name: "1" if field.kind in ("integer", "number", "seed") else 1})
        assert caught.value.param == field.name
    elif field.treatment == "refused":
        with pytest.raises(APIError, match="surprise") as caught:
            call(**{field.name: "surprise"})
        assert caught.value.param == field.name and field.note in caught.value.message
        assert all(call(**{field.name: value}) == call() for value in (None, *field.unused))
    else:
        assert call(**{field.name: "surprise"}) == call()


def test_the_table_has_every_field_of_openai_and_no_unknown_kind():
    assert {*typing.get_type_hints(ResponseCreateParamsBase), "stream"} <= {field.name for field in FIELDS}
    tables = [FIELDS, TOOL, *ITEMS.values(), *PARTS.values()]
    assert {field.kind for table in tables for field in table} <= {*KINDS, ""}


def test_taken_fields_reach_the_request():
    options = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 4, "chat_template_kwargs": {"a": 1}}
    request = call(**options, stop="a", max_output_tokens=7, parallel_tool_calls=False, stream=True).request
    assert {name: getattr(request, name) for name in options} == options
    assert (request.stops, request.max_tokens, request.parallel_tool_calls) == (("a",), 7, False)
    assert call(stream=True).stream and not call().stream
    function = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
    request = call(tools=TOOLS, tool_choice={"type": "function", "name": "look_up"}).request
    assert request.tools == [function] and request.forced_function == "look_up"
    assert call(tools=TOOLS, tool_choice="required").request.tool_choice == "required"


def test_items_become_the_messages_of_the_core():
    part = {"type": "text", "text": "a"}
    said = [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]
    function = {"name": "f", "arguments": '{"x": 1}'}
    used = {"type": "function_call", "call_id": "t1", **function, "id": "fc_1", "status": "completed"}
    result = {"type": "function_call_output", "call_id": "t1", "output": "3"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    tool_call = {"id": "t1", "type": "function", "function": function}
    assert call(instructions="s").request.messages == [{"role": "system", "content": "s"}, QUESTION]
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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"input": None}, "input"),
        ({"input": [{"role": "poet", "content": ""}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "3"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
    ],
)
def test_impossible_requests_are_refused_by_name(fields, param):
    with pytest.raises(APIError) as caught:
        call(**fields)
    assert caught.value.param == param and caught.value.status == 400


REPLY = Reply(
    content="Well.",
    completion=Completion([7, 8], [-0.5, -0.25], [], [3, 3], "stop"),
    prompt_ids=(1, 2, 3),
    tool_calls=(ToolCall("abcdefgh1", "look_up", '{"city": "Oslo"}'),),
    reasoning_content="hm",
)


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


def test_a_response_is_what_llm_chat_gives_and_is_recorded_as_it(llm, client):
    episode, whole, streamed = make_episode(), make_episode(), make_episode()
    reply = run(llm.chat([{"role": "system", "content": "s"}, QUESTION], max_tokens=8, temperature=0.9), episode)
    asked = {"instructions": "s", "input": [QUESTION], "temperature": 0.9}
    response = run(ask(client, **asked), whole)
    assert whole.calls == episode.calls and response.output_text == reply.content
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(reply.prompt_ids), len(reply.token_ids))
    assert response.status == {"length": "incomplete", "stop": "completed"}[reply.finish_reason]

    async def stream():
        events = [event async for event in await ask(client, stream=True, **asked)]
        return "".join(event.delta for event in events if event.type == "response.output_text.delta"), events[-1]

    text, last = run(stream(), streamed)
    assert streamed.calls == episode.calls and text == reply.content == last.response.output_text
    assert last.type == f"response.{response.status}" and last.response.usage == response.usage


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_tools_makes_one_sequence(make_scripted_policy, tokenizer, stream):
    asked = "<|system|>tools: look_up(city)<|end|><|user|>x?<|end|><|assistant|>"
    called = 'Well. <call:look_up>{"city":"Oslo"}</call><|end|>'
    text = asked + called + "<|tool|>3<|end|><|assistant|>3!<|end|>"
    script = (tokenizer.encode(text) + [1] * 256)[:256]
    client, episode = client_of(ChatClient(make_scripted_policy(script), "player"), "openai"), make_episode()

    async def complete(items):
        if not stream:
            return await client.responses.create(model="player", input=items, tools=TOOLS)
        async with client.responses.stream(model="player", input=items, tools=TOOLS) as events:
            return await events.get_final_response()

    async def agent():
        items = [QUESTION]
        response = await complete(items)
        _, used = response.output
        assert (response.output_text, used.name, json.loads(used.arguments)) == ("Well.", "look_up", {"city": "Oslo"})
        items += [*response.output, {"type": "function_call_output", "call_id": used.call_id, "output": "3"}]
        return (await complete(items)).output_text

    assert run(agent(), episode) == "3!"
    (sequence,) = token_sequences(episode.calls)
    assert tokenizer.decode(sequence.tokens) == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "kind", "param", "said"),
    [
        ({"model": "plaxer"}, openai.NotFoundError, "model", "player"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "-1"),
        ({"max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens", "max_output_tokens is 0"),
        ({"input": []}, openai.BadRequestError, "input", "input"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id", "whole input"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools[0].type", "function"),
        ({"input": "x" * 200}, openai.BadRequestError, "input", "96"),
    ],
)
def test_refusals_are_openais(client, options, kind, param, said, stream):
    with pytest.raises(kind, match=said) as caught:
        run(ask(client, stream=stream, **options))
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


def test_an_error_between_events_is_raised_by_the_client():
    writer = ResponseWriter(call(stream=True), str)
    list(writer.events(Delta(0, content="a")))
    data = json.loads(writer.error(APIError("it broke", status=500, kind="server_error")).split(b"data: ")[1])
    assert data["type"] == "error" and data["message"] == data["error"]["message"] == "it broke"
    assert data["sequence_number"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_policy_is_openais(make_policy, stream):
    broken = make_policy()

    async def main():
        await broken.update(
            lambda params: (jax.tree.map(lambda leaf: jax.device_put(np.full_like(leaf, np.nan)), params), None)
        )
        with pytest.raises(openai.InternalServerError, match="NonFiniteError"):
            await ask(client_of(ChatClient(broken, "player"), "openai"), stream=stream)

    run(main())
