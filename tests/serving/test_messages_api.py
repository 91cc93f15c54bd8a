import asyncio
import importlib
import json
import typing

import anthropic
import jax
import numpy as np
import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase

from jaxft.rollout.calls import Completion, Reply
from jaxft.rollout.chat_request import Delta
from jaxft.rollout.client import ChatClient
from jaxft.rollout.messages import ToolCall
from jaxft.rollout.recorder import ENDPOINT, Episode, recording
from jaxft.rollout.sequences import token_sequences
from jaxft.rollout.transport import async_transport
from jaxft.serving.app import make_app
from jaxft.serving.fields import KINDS
from jaxft.serving.messages_api import (
    BLOCKS,
    FIELDS,
    MESSAGE,
    TOOL,
    MessageWriter,
    anthropic_error,
    message_json,
    parse_messages,
)
from jaxft.serving.wire import MAX_BODY_BYTES, APIError, encode

pytestmark = pytest.mark.usefixtures("no_sockets")

QUESTION = [{"role": "user", "content": "x?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "look_up", "input_schema": SCHEMA}]
OPENAI_TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]


def call(**fields):
    return parse_messages({"model": "policy", "max_tokens": 9, "messages": QUESTION} | fields)


def read(*messages, **fields):
    """The messages that the core gets."""
    return call(messages=list(messages), **fields).request.messages


def make_episode(**changes):
    return Episode(**({"run_seed": 0, "stream": 0, "rollout_index": 0, "example_id": "a", "generation": 0} | changes))


def run(asking, episode=None):
    """The result of a coroutine that asks, in an episode or in none."""

    async def main():
        async with asyncio.timeout(60):
            with recording(episode):
                return await asking

    return asyncio.run(main())


def client_of(llm):
    http = importlib.import_module(anthropic.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
    http_client = http.AsyncClient(transport=async_transport(http, make_app({llm.name: llm})), timeout=None)
    return anthropic.AsyncAnthropic(base_url=ENDPOINT, api_key="jaxft", max_retries=0, http_client=http_client)


@pytest.fixture(scope="module")
def llm(policy):
    return ChatClient(policy, "player")


@pytest.fixture(scope="module")
def client(llm):
    return client_of(llm)


def ask(client, **options):
    return client.messages.create(**({"model": "player", "messages": QUESTION, "max_tokens": 8} | options))


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_field_is_treated_as_the_table_says(field):
    if field.treatment == "taken":
        assert field.kind in KINDS
        with pytest.raises(APIError) as caught:
            call(**{field.name: 1 if field.kind != "integer" and field.kind != "number" else "1"})
        assert caught.value.param == field.name
    elif field.treatment == "refused":
        with pytest.raises(APIError, match="surprise") as caught:
            call(**{field.name: "surprise"})
        assert caught.value.param == field.name and field.note in caught.value.message
        assert all(call(**{field.name: value}) == call() for value in (None, *field.unused))
    else:
        assert call(**{field.name: "surprise"}) == call()


def test_the_table_has_every_field_of_anthropic():
    headers = {"user_profile_id", "workspace_id"}
    theirs = {*typing.get_type_hints(MessageCreateParamsBase), "stream"} - headers
    assert theirs <= {field.name for field in FIELDS}


def test_taken_fields_reach_the_request():
    options = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "chat_template_kwargs": {"a": 1}, "max_tokens": 7}
    request = call(**options, stop_sequences=["a"], stream=True).request
    assert {name: getattr(request, name) for name in options} == options and request.stops == ("a",)
    assert call(stream=True).stream and not call().stream
    choices = {"auto": "auto", "any": "required", "none": "none"}
    for theirs, ours in choices.items():
        assert call(tools=TOOLS, tool_choice={"type": theirs}).request.tool_choice == ours
    request = call(
        tools=TOOLS, tool_choice={"type": "tool", "name": "look_up", "disable_parallel_tool_use": True}
    ).request
    assert request.forced_function == "look_up" and not request.parallel_tool_calls
    assert request.tools == OPENAI_TOOLS


def test_blocks_become_the_messages_of_the_core():
    text = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "a"}
    user = {"role": "user", "content": "?"}
    assert read(user, system="s") == [{"role": "system", "content": "s"}, user]
    assert read(user, system=[text]) == [{"role": "system", "content": [part]}, user]
    answer = [
        {"type": "thinking", "thinking": "hm", "signature": "xyz"},
        {"type": "redacted_thinking", "data": "xyz"},
        text,
        {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"city": "Oslo"}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [text]},
        {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
        text,
    ]
    assert read(user, {"role": "assistant", "content": answer}, {"role": "user", "content": results})[1:] == [
        {
            "role": "assistant",
            "content": [part],
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "look_up", "arguments": {"city": "Oslo"}}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": [part]},
        {"role": "tool", "tool_call_id": "t2", "content": "error"},
        {"role": "user", "content": [part]},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "poet", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "It"}]}, "messages"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"system": [{"type": "document"}]}, "system[0].type"),
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


def test_a_reply_becomes_anthropics_json():
    body = json.loads(encode(message_json(call(), REPLY, str)))
    assert body["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "abcdefgh1", "name": "look_up", "input": {"city": "Oslo"}},
    ]
    assert (body["stop_reason"], body["usage"]) == ("tool_use", {"input_tokens": 3, "output_tokens": 2})
    (_, message) = read(*QUESTION, {"role": "assistant", "content": body["content"]}, QUESTION[0])[:2]
    told = message | {"content": message["content"][0]["text"]}
    told["tool_calls"][0]["function"]["arguments"] = '{"city": "Oslo"}'
    assert told == REPLY.message


def test_a_streamed_reply_has_anthropics_events():
    writer = MessageWriter(call(stream=True), str)
    pieces = [Delta(0, reasoning_content="h"), Delta(0, token_ids=(7,)), Delta(0, reasoning_content="m", content="We")]
    events = [event.decode() for piece in [*pieces, Delta(0, content="ll."), REPLY] for event in writer.events(piece)]
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    data = [json.loads(event.split("\n")[1].removeprefix("data: ")) for event in events]
    assert names == [each["type"] for each in data]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "content_block_start",
        *["content_block_delta"] * 2,
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [each["index"] for each in data if each["type"] == "content_block_start"] == [0, 1, 2]
    assert data[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_message_is_what_llm_chat_gives_and_is_recorded_as_it(llm, client):
    options = {"max_tokens": 8, "temperature": 0.9}
    theirs = {"max_tokens": 8, "extra_body": {"temperature": 0.9}}
    episode, whole, streamed = make_episode(), make_episode(), make_episode()
    system = {"role": "system", "content": "s"}
    reply = run(llm.chat([system, *QUESTION], **options, stop=["\x00never"]), episode)
    asked = {"system": "s", "stop_sequences": ["\x00never"], "messages": QUESTION, **theirs}
    message = run(ask(client, **asked), whole)
    assert whole.calls == episode.calls
    assert "".join(block.text for block in message.content) == reply.content
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(reply.prompt_ids), len(reply.token_ids))
    assert message.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[reply.finish_reason]

    async def stream():
        async with client.messages.stream(model="player", **asked) as events:
            text = "".join([part async for part in events.text_stream])
            return text, await events.get_final_message()

    text, final = run(stream(), streamed)
    assert streamed.calls == episode.calls and text == reply.content
    assert final.to_dict() | {"id": ""} == message.to_dict() | {"id": ""}


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_tools_makes_one_sequence(make_scripted_policy, tokenizer, stream):
    asked = "<|system|>tools: look_up(city)<|end|><|user|>x?<|end|><|assistant|>"
    called = 'Well. <call:look_up>{"city":"Oslo"}</call><|end|>'
    text = asked + called + "<|tool|>3<|end|><|assistant|>3!<|end|>"
    script = (tokenizer.encode(text) + [1] * 256)[:256]
    client, episode = client_of(ChatClient(make_scripted_policy(script), "player")), make_episode()

    async def complete(messages):
        options = {"model": "player", "messages": messages, "tools": TOOLS, "max_tokens": 100}
        if not stream:
            return await client.messages.create(**options)
        async with client.messages.stream(**options) as events:
            return await events.get_final_message()

    async def agent():
        messages = list(QUESTION)
        message = await complete(messages)
        assert message.stop_reason == "tool_use"
        said, used = message.content
        assert (said.text, used.name, used.input) == ("Well.", "look_up", {"city": "Oslo"})
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "3"}
        messages += [message.to_param(), {"role": "user", "content": [result]}]
        return (await complete(messages)).content[0].text

    assert run(agent(), episode) == "3!"
    (sequence,) = token_sequences(episode.calls)
    assert tokenizer.decode(sequence.tokens) == text


def test_the_stop_sequence_that_ended_an_answer_is_told(make_scripted_policy, tokenizer):
    text = "<|user|>x?<|end|><|assistant|>one, two, three\n\n!<|end|>"
    client = client_of(ChatClient(make_scripted_policy((tokenizer.encode(text) + [1] * 256)[:256]), "player"))

    async def streamed(options):
        async with client.messages.stream(model="player", messages=QUESTION, **options) as events:
            return await events.get_final_message()

    for stops, said, reason, stop in (
        (["three", ", t"], "one", "stop_sequence", ", t"),
        (["four"], "one, two, three\n\n!", "end_turn", None),
        (["\n\n"], "one, two, three", "stop_sequence", "\n\n"),
        (["<|end|>"], "one, two, three\n\n!", "end_turn", None),
    ):
        options = {"stop_sequences": stops, "max_tokens": 50}
        for message in (run(ask(client, **options)), run(streamed(options))):
            assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (said, reason, stop)
    message = run(ask(client, max_tokens=3))
    assert (message.content[0].text, message.stop_reason) == ("one", "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "kind", "type_", "said"),
    [
        ({"model": "plaxer"}, anthropic.NotFoundError, "not_found_error", "player"),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError, "invalid_request_error", "-1"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "invalid_request_error", "stop_sequences"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "messages"),
        ({"extra_body": {"foo": 1}}, anthropic.BadRequestError, "invalid_request_error", "foo"),
        ({"thinking": {"type": "disabled"}}, anthropic.BadRequestError, "invalid_request_error", "enable_thinking"),
        ({"system": "x" * 200}, anthropic.BadRequestError, "invalid_request_error", "96"),
        ({"system": "x" * MAX_BODY_BYTES}, anthropic.RequestTooLargeError, "request_too_large", str(MAX_BODY_BYTES)),
    ],
)
def test_refusals_are_anthropics(client, options, kind, type_, said, stream):
    with pytest.raises(kind, match=said) as caught:
        run(ask(client, stream=stream, **options))
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == type_


def test_a_thread_records_by_its_key(client):
    episode, expected = make_episode(), make_episode()
    run(ask(client), expected)
    run(ask(client.with_options(api_key=episode.api_key)))
    run(ask(client.with_options(base_url=episode.base_url.removesuffix("/v1")), messages=QUESTION), None)
    assert episode.calls[:1] == expected.calls and len(episode.calls) == 2
    with pytest.raises(anthropic.NotFoundError, match="without /v1"):
        run(ask(client.with_options(base_url=episode.base_url)))
    key = episode.api_key
    del episode
    with pytest.raises(anthropic.AuthenticationError, match=r"jaxft\.episode"):
        run(ask(client.with_options(api_key=key)))


def test_other_paths_of_anthropic_have_a_way_out(client):
    with pytest.raises(anthropic.NotFoundError, match="input_tokens"):
        run(client.messages.count_tokens(model="player", messages=QUESTION))


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_policy_is_anthropics(make_policy, stream):
    broken = make_policy()

    async def main():
        await broken.update(
            lambda params: (jax.tree.map(lambda leaf: jax.device_put(np.full_like(leaf, np.nan)), params), None)
        )
        with pytest.raises(anthropic.InternalServerError, match="NonFiniteError") as caught:
            await ask(client_of(ChatClient(broken, "player")), stream=stream)
        assert caught.value.body["error"]["type"] == "api_error"

    run(main())


@pytest.mark.parametrize(("status", "type_"), [(403, "permission_error"), (429, "rate_limit_error")])
def test_refusals_of_a_server_are_anthropics(status, type_):
    told, body = anthropic_error(APIError("no", status=status))
    assert (told, body["error"]["type"]) == (status, type_)


def test_tables_of_objects_have_known_kinds():
    tables = [FIELDS, MESSAGE, TOOL, *BLOCKS.values()]
    assert {field.kind for table in tables for field in table} <= {*KINDS, ""}
