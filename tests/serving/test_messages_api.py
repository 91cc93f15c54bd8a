import json

import anthropic
import pytest

from jaxft.rollout.chat_request import Delta
from jaxft.rollout.client import ChatClient
from jaxft.serving.messages_api import MessagesRequest, MessageWriter, anthropic_error, message_json
from jaxft.serving.schemas import read_request
from jaxft.serving.wire import APIError, encode
from tests.serving.conftest import QUESTION, REPLY, THINKS_AGAIN, make_client, make_episode, run

pytestmark = pytest.mark.usefixtures("no_sockets")


def call(**fields):
    return read_request(MessagesRequest, {"model": "policy", "max_tokens": 9, "messages": QUESTION} | fields)


def read(*messages, **fields):
    """The messages that the core gets."""
    return call(messages=list(messages), **fields).to_request().messages


def ask(client, **options):
    return client.messages.create(**({"model": "player", "messages": QUESTION, "max_tokens": 8} | options))


def test_blocks_become_the_messages_of_the_core():
    text = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "a"}
    user = {"role": "user", "content": "?"}
    assert read(user, system="s") == [{"role": "system", "content": "s"}, user]
    assert read(user, system=[text]) == [{"role": "system", "content": [part]}, user]
    for paid in ("cch=71fea;", "cch=0a1b2;"):  # Claude Code's differs in every request, and turns must stay equal
        billed = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; {paid}"}
        assert read(user, system=[billed, text]) == [{"role": "system", "content": [part]}, user]
        assert read(user, system=[billed]) == [user]
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


def test_a_streamed_answer_that_thinks_again_is_sent_back_as_the_whole_one():
    writer, blocks = MessageWriter(call(stream=True), str), []
    events = [event.decode() for piece in THINKS_AGAIN for event in writer.events(piece)]
    for each in [json.loads(event.split("data: ")[1]) for event in events]:
        if each["type"] == "content_block_start":
            blocks.append(each["content_block"])
        elif each["type"] == "content_block_delta" and (text := each["delta"].get(kind := blocks[-1]["type"])):
            blocks[-1][kind] += text
    assert [block["type"] for block in blocks] == ["thinking", "text"] * 2 + ["tool_use"]
    (_, message) = read(*QUESTION, {"role": "assistant", "content": blocks}, QUESTION[0])[:2]
    ((part,), reply) = message["content"], THINKS_AGAIN[-1]
    assert (part["text"], message["reasoning_content"]) == (reply.content, reply.reasoning_content)


def test_the_stop_sequence_that_ended_an_answer_is_told(make_scripted_policy, tokenizer):
    text = "<|user|>x?<|end|><|assistant|>one, two, three\n\n!<|end|>"
    script = (tokenizer.encode(text) + [1] * 256)[:256]
    client = make_client(ChatClient(make_scripted_policy(script), "player"), "anthropic")

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


def test_a_thread_records_by_its_key(anthropic_client):
    episode, expected = make_episode(), make_episode()
    run(ask(anthropic_client), expected)
    run(ask(anthropic_client.with_options(api_key=episode.api_key)))
    run(ask(anthropic_client.with_options(base_url=episode.base_url.removesuffix("/v1")), messages=QUESTION), None)
    assert episode.calls[:1] == expected.calls and len(episode.calls) == 2
    with pytest.raises(anthropic.NotFoundError, match="POST /v1/v1/messages: served are"):
        run(ask(anthropic_client.with_options(base_url=episode.base_url)))
    key = episode.api_key
    del episode
    with pytest.raises(anthropic.AuthenticationError, match=r"jaxft\.episode"):
        run(ask(anthropic_client.with_options(api_key=key)))


def count(client, **options):
    return run(client.messages.count_tokens(**({"model": "player", "messages": QUESTION} | options)), make_episode())


def test_tokens_are_counted_as_an_answer_counts_them(anthropic_client, policy):
    options = {"system": "Be brief.", "tools": [{"name": "look_up", "input_schema": {"type": "object"}}]}
    for more in ({}, options, options | {"tool_choice": {"type": "any"}}):
        assert count(anthropic_client, **more).input_tokens == run(ask(anthropic_client, **more)).usage.input_tokens
    most = policy.engine.max_context_tokens
    assert count(anthropic_client, messages=[{"role": "user", "content": "x" * most}]).input_tokens > most


def test_a_count_is_refused_in_anthropics_form(anthropic_client):
    with pytest.raises(anthropic.NotFoundError, match="plaxer"):
        count(anthropic_client, model="plaxer")
    with pytest.raises(anthropic.BadRequestError, match="stream is true: a count comes whole") as caught:
        count(anthropic_client, extra_body={"stream": True})
    assert caught.value.body["type"] == "error"


def test_other_paths_of_anthropic_are_refused(anthropic_client):
    with pytest.raises(anthropic.NotFoundError, match="GET /v1/messages/batches: served are"):
        run(anthropic_client.messages.batches.list())


def test_a_refusal_of_a_server_is_anthropics():
    status, body = anthropic_error(APIError("no", status=403))
    assert (status, body["error"]["type"]) == (403, "permission_error")


def test_a_request_of_claude_code_is_read_or_refused_with_a_way_out():
    """In the form that it has in public recordings: marks of the cache everywhere, thinking kept, tools of its own."""
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "a", **mark}
    used = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}, **mark}
    thought = {"type": "thinking", "thinking": "hm", "signature": "unsigned"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "b", "is_error": False, **mark}
    sent = {
        "system": [text, text],
        "messages": [
            {"role": "user", "content": [text, text]},
            {"role": "assistant", "content": [thought, used]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "Bash", "description": "run", "input_schema": {"type": "object"}}],
        "metadata": {"user_id": "session_1"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"keep": "all", "type": "clear_thinking_20251015"}]},
        "stream": True,
    }
    messages = call(**sent).to_request().messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["reasoning_content"] == "hm" and messages[3]["content"] == "b"
    for name, value, advice in (
        ("thinking", {"type": "enabled", "budget_tokens": 1024}, "enable_thinking"),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}, "clear_tool_uses_20250919"),
        ("output_config", {"effort": "medium"}, r"output_config\.effort"),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}], "give a function"),
    ):
        with pytest.raises(APIError, match=advice):
            call(**sent | {name: value})
