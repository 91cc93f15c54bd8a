"""The clients of openai and anthropic, each in its own dialect: what all of them share."""

import json

import anthropic
import jax
import numpy as np
import openai
import pytest

from jaxft.rollout.client import ChatClient
from jaxft.rollout.sequences import token_sequences
from tests.serving.conftest import QUESTION, SCHEMA, make_client, make_episode, run

pytestmark = pytest.mark.usefixtures("no_sockets")

SYSTEM = {"role": "system", "content": "s"}
FUNCTION = {"name": "look_up", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


async def chat(client, messages, stream, **options):
    """The answer's text, its calls, all that is sent back with their results, the counts of tokens, the ending."""
    options = {"model": "player", "messages": messages, "tools": [TOOL]} | options
    if stream:
        async with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as events:
            try:
                reply = await events.get_final_completion()
            except openai.LengthFinishReasonError as error:
                reply = error.completion
    else:
        reply = await client.chat.completions.create(**options)
    message = reply.choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls or ()]
    usage = (reply.usage.prompt_tokens, reply.usage.completion_tokens)
    return message.content, calls, [message, *results], usage, reply.choices[0].finish_reason


async def messages(client, messages, stream, **options):
    options = {"model": "player", "messages": messages, "max_tokens": 100} | options
    options["tools"] = [{"name": "look_up", "input_schema": SCHEMA}]
    if messages[0]["role"] == "system":
        options |= {"system": messages[0]["content"], "messages": messages[1:]}
    options["extra_body"] = {"temperature": options.pop("temperature", 1.0)}
    if stream:
        async with client.messages.stream(**options) as events:
            reply = await events.get_final_message()
    else:
        reply = await client.messages.create(**options)
    text = "".join(block.text for block in reply.content if block.type == "text")
    calls = [block for block in reply.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "3"} for call in calls]
    usage = (reply.usage.input_tokens, reply.usage.output_tokens)
    ending = {"max_tokens": "length", "end_turn": "stop", "tool_use": "tool_calls"}[reply.stop_reason]
    history = [reply.to_param(), {"role": "user", "content": results}]
    return text, [(call.name, call.input) for call in calls], history, usage, ending


async def responses(client, messages, stream, **options):
    options = {"model": "player", "input": messages, "tools": [{"type": "function", **FUNCTION}]} | options
    if "max_tokens" in options:
        options["max_output_tokens"] = options.pop("max_tokens")
    if stream:
        reply = [event async for event in await client.responses.create(**options, stream=True)][-1].response
    else:
        reply = await client.responses.create(**options)
    calls = [item for item in reply.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
    usage = (reply.usage.input_tokens, reply.usage.output_tokens)
    ending = "length" if reply.status == "incomplete" else "tool_calls" if calls else "stop"
    names = [(call.name, json.loads(call.arguments)) for call in calls]
    return reply.output_text, names, [*reply.output, *results], usage, ending


DIALECTS = {chat: "openai", messages: "anthropic", responses: "openai"}
WAYS = [(ask, stream) for ask in DIALECTS for stream in (False, True)]
each_way = pytest.mark.parametrize(
    ("ask", "stream"), WAYS, ids=[f"{ask.__name__}-{'stream' if stream else 'whole'}" for ask, stream in WAYS]
)


@each_way
def test_an_answer_is_what_llm_chat_gives_and_is_recorded_as_it(llm, ask, stream):
    episode, theirs = make_episode(), make_episode()
    options = {"max_tokens": 8, "temperature": 0.9}
    reply = run(llm.chat([SYSTEM, *QUESTION], tools=[TOOL], **options), episode)
    client = make_client(llm, DIALECTS[ask])
    text, _, _, usage, ending = run(ask(client, [SYSTEM, *QUESTION], stream, **options), theirs)
    assert theirs.calls == episode.calls and (text, ending) == (reply.content, reply.finish_reason)
    assert usage == (len(reply.prompt_ids), len(reply.token_ids))


@each_way
def test_an_agent_with_tools_makes_one_sequence(make_scripted_policy, tokenizer, ask, stream):
    """The loop of each API's own guide: the answer goes back into the history as it is."""
    asked = "<|system|>tools: look_up(city)<|end|><|user|>x?<|end|><|assistant|>"
    called = 'Well. <call:look_up>{"city":"Oslo"}</call><|end|>'
    text = asked + called + "<|tool|>3<|end|><|assistant|>3!<|end|>"
    script = (tokenizer.encode(text) + [1] * 256)[:256]
    client, episode = make_client(ChatClient(make_scripted_policy(script), "player"), DIALECTS[ask]), make_episode()

    async def agent():
        said, calls, answer, _, ending = await ask(client, QUESTION, stream)
        assert (said, calls, ending) == ("Well.", [("look_up", {"city": "Oslo"})], "tool_calls")
        return (await ask(client, [*QUESTION, *answer], stream))[0]

    assert run(agent(), episode) == "3!"
    (sequence,) = token_sequences(episode.calls)
    assert tokenizer.decode(sequence.tokens) == text


@each_way
def test_an_error_that_is_no_ones_fault_is_a_500_of_one_line(make_policy, ask, stream):
    broken = make_policy()

    async def main():
        await broken.update(
            lambda params: (jax.tree.map(lambda leaf: jax.device_put(np.full_like(leaf, np.nan)), params), None)
        )
        await ask(make_client(ChatClient(broken, "player"), DIALECTS[ask]), QUESTION, stream)

    errors = (openai.InternalServerError, anthropic.InternalServerError)
    with pytest.raises(errors, match="NonFiniteError") as caught:
        run(main())
    assert caught.value.status_code == 500
    body = caught.value.body
    error = body["error"] if ask is messages else body
    assert "\n" not in error["message"] and error["type"] == ("api_error" if ask is messages else "server_error")


LONG = "x" * 200
UNIQUE = {"type": "json_schema", "json_schema": {"type": "json_schema", "name": "a", "schema": {"uniqueItems": True}}}
REFUSALS = [
    ("chat.completions", {"model": "plaxer"}, "model", "model_not_found", "player"),
    ("chat.completions", {"extra_body": {"verbosity": "low"}}, "verbosity", "unsupported_parameter", "low"),
    ("chat.completions", {"presence_penalty": 2.5}, "presence_penalty", None, "2.5"),
    ("completions", {"frequency_penalty": -3}, "frequency_penalty", None, "-3"),
    ("completions", {"extra_body": {"repetition_penalty": 0}}, "repetition_penalty", None, "0"),
    ("chat.completions", {"temperature": -1}, "temperature", None, "-1"),
    ("chat.completions", {"response_format": {"type": "xml"}}, "response_format", None, "xml"),
    ("chat.completions", {"response_format": UNIQUE}, "response_format", None, "uniqueItems"),
    ("responses", {"text": {"format": UNIQUE["json_schema"]}}, "text", None, "uniqueItems"),
    ("messages", {"output_config": {"format": UNIQUE["json_schema"]}}, "invalid_request_error", None, "uniqueItems"),
    ("chat.completions", {"messages": []}, "messages", None, "messages"),
    ("chat.completions", {"messages": [{"role": "poet", "content": ""}]}, None, None, "poet"),
    (
        "chat.completions",
        {"messages": [{"role": "user", "content": LONG}]},
        "messages",
        "context_length_exceeded",
        "96",
    ),
    ("chat.completions", {"extra_body": {"foo": 1}}, "foo", "unknown_parameter", "foo"),
    ("chat.completions", {"logit_bias": {"4000": 1}}, None, None, "4000"),
    ("responses", {"max_output_tokens": 0}, "max_output_tokens", None, "max_output_tokens is 0"),
    ("responses", {"input": []}, "input", None, "input"),
    ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type", None, "function"),
    ("responses", {"input": LONG}, "input", "context_length_exceeded", "96"),
    ("completions", {"prompt": [4000]}, None, None, "4000"),
    ("completions", {"prompt": [5] * 200}, "prompt", "context_length_exceeded", "96"),
    ("messages", {"model": "plaxer"}, "not_found_error", None, "player"),
    ("messages", {"extra_body": {"temperature": -1}}, "invalid_request_error", None, "-1"),
    ("messages", {"stop_sequences": [""]}, "invalid_request_error", None, "stop_sequences"),
    ("messages", {"thinking": {"type": "disabled"}}, "invalid_request_error", None, "enable_thinking"),
    ("messages", {"system": LONG}, "invalid_request_error", None, "96"),
]
USUAL = {
    "chat.completions": {"messages": QUESTION},
    "responses": {"input": "x?"},
    "completions": {"prompt": [5]},
    "messages": {"messages": QUESTION, "max_tokens": 8},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("api", "options", "param", "code", "said"), REFUSALS)
def test_refusals_have_the_form_of_their_api(client, anthropic_client, api, options, param, code, said, stream):
    """Of openai's errors param and code, of anthropic's the type."""
    asked = anthropic_client if api == "messages" else client
    for name in api.split("."):
        asked = getattr(asked, name)
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match=said) as caught:
        run(asked.create(**{"model": "player", **USUAL[api], "stream": stream} | options))
    error = caught.value
    wanted = 404 if options.get("model") else 400
    assert error.status_code == wanted
    if api == "messages":
        assert (error.body["type"], error.body["error"]["type"]) == ("error", param)
    else:
        assert error.type == "invalid_request_error"
        assert error.param == param or param is None
        assert error.code == code or code is None
