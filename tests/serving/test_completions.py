import dataclasses
import json

import openai
import pytest

from jaxft.rollout import framework_client
from jaxft.rollout.calls import Reply
from jaxft.rollout.chat_request import ChatRequest, Delta
from jaxft.rollout.client import ChatClient
from jaxft.rollout.sequences import episode_messages, token_sequences
from jaxft.serving.completions import (
    ChatCompletionRequest,
    TokenCompletionRequest,
    chat_completion,
    make_chat_writer,
    make_text_writer,
    text_completion,
)
from jaxft.serving.schemas import read_request
from jaxft.serving.wire import encode
from tests.serving import conftest
from tests.serving.conftest import QUESTION, make_episode, run, sampled

pytestmark = pytest.mark.usefixtures("no_sockets")


def chat(**fields):
    return read_request(ChatCompletionRequest, {"model": "policy", "messages": QUESTION} | fields)


def text(**fields):
    return read_request(TokenCompletionRequest, {"model": "policy", "prompt": [5, 6]} | fields)


def ask(client, prompt, **options):
    return client.completions.create(**({"model": "player", "prompt": list(prompt), "max_tokens": 8} | options))


REPLY = Reply(
    content="éb",
    completion=sampled([7, 8], [-0.5, float("-inf")], [((7, -0.5), (9, -1.0), (10, -2.0)), ((8, -0.25),)]),
    prompt_ids=(5, 6),
    others=(Reply("c", sampled([9], [-1.0], [((9, -1.0),)], "length"), (5, 6)),),
    stop_reason=8,
)
TEXTS = {7: "é", 8: "b", 9: "c", 10: "c"}.__getitem__
OTHER = Reply("yes", sampled([9], [-1.0], [((9, -1.0), (8, -2.0))]), (1, 2, 3))
CHAT_REPLY = dataclasses.replace(conftest.REPLY, content="", others=(OTHER,))


def test_a_reply_names_the_versions_of_all_its_tokens():
    completion = dataclasses.replace(CHAT_REPLY.completion, policy_versions=[3, 4])
    body = chat_completion(chat(), dataclasses.replace(CHAT_REPLY, completion=completion), TEXTS)
    assert body["system_fingerprint"] == "policy_version_3_4"


def test_a_reply_to_a_chat_becomes_openais_json():
    body = json.loads(encode(chat_completion(chat(), CHAT_REPLY, TEXTS)))
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
                "tool_calls": [CHAT_REPLY.tool_calls[0].as_message()],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        },
        {"index": 1, "message": {"role": "assistant", "content": "yes"}, "logprobs": None, "finish_reason": "stop"},
    ]


def test_token_ids_are_under_the_names_of_vllm_and_of_harnesses_and_beside_logprobs():
    asked = chat(logprobs=True, top_logprobs=2, return_token_ids=True)
    body = json.loads(encode(chat_completion(asked, CHAT_REPLY, TEXTS)))
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
    named = chat_completion(chat(logprobs=True, return_tokens_as_token_ids=True), CHAT_REPLY, TEXTS)
    assert named["choices"][0]["logprobs"]["content"][1]["token"] == "token_id:8"


@pytest.mark.parametrize("field", ["return_token_ids", "return_tokens_as_token_ids"])
def test_usage_has_the_tokens_of_one_answer_as_metrics_of_atif(field):
    counts = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    tokens = {"prompt_token_ids": [1, 2, 3], "completion_token_ids": [7, 8], "logprobs": [-0.5, -0.25]}
    reply = dataclasses.replace(CHAT_REPLY, others=())
    options = {"stream_options": {"include_usage": True}, field: True}
    for asked, wanted in ((chat(**{field: True}), counts | tokens), (chat(), counts)):
        assert json.loads(encode(chat_completion(asked, reply, TEXTS)))["usage"] == wanted
    *_, last, _ = make_chat_writer(chat(stream=True, **options), TEXTS).events(reply)
    assert json.loads(last[6:])["usage"] == counts | tokens
    assert chat_completion(chat(**{field: True}), CHAT_REPLY, TEXTS)["usage"].keys() == counts.keys()  # two answers


def test_token_ids_that_a_client_sends_back_are_left_out():
    message = chat_completion(chat(return_token_ids=True), CHAT_REPLY, TEXTS)["choices"][0]["message"]
    request = chat(messages=[*QUESTION, json.loads(encode(message))]).to_request()
    assert request == ChatRequest([*QUESTION, CHAT_REPLY.message])


def test_a_streamed_chat_ends_with_tool_calls_and_counts():
    writer = make_chat_writer(chat(stream=True, stream_options={"include_usage": True}, return_token_ids=True), TEXTS)
    pieces = [Delta(1, content="y"), Delta(0, reasoning_content="hm"), Delta(1, token_ids=(9,)), Delta(1, content="es")]
    chunks = [json.loads(event[6:]) for piece in pieces for event in writer.events(piece)]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [(choice["index"], choice["delta"]) for choice in choices] == [
        (1, {"role": "assistant", "content": "y"}),
        (0, {"role": "assistant", "reasoning_content": "hm"}),
        (1, {"content": "es"}),
    ]
    *ends, last, _ = writer.events(CHAT_REPLY)
    *ends, last = (json.loads(event[6:]) for event in (*ends, last))
    (calls, end, other) = [chunk["choices"][0] for chunk in ends]
    assert calls["delta"]["tool_calls"][0] == {"index": 0, **CHAT_REPLY.tool_calls[0].as_message()}
    assert (end["finish_reason"], end["token_ids"], other["finish_reason"]) == ("tool_calls", [7, 8], "stop")
    assert end["delta"]["prompt_token_ids"] == [1, 2, 3]
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 6
    assert len({chunk["id"] for chunk in (*chunks, *ends, last)}) == 1
    assert all(chunk["usage"] is None for chunk in (*chunks, *ends))


def test_a_reply_becomes_openais_json_with_token_ids():
    body = json.loads(encode(text_completion(text(logprobs=3), REPLY, TEXTS)))
    first, second = body["choices"]
    assert (first["text"], first["token_ids"], first["prompt_token_ids"]) == ("éb", [7, 8], [5, 6])
    assert first["logprobs"] == {
        "tokens": ["é", "b"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"é": -0.5, "c": -1.0}, {"b": -0.25}],
        "text_offset": [0, 1],
    }
    assert (first["finish_reason"], first["stop_reason"], second["finish_reason"]) == ("stop", 8, "length")
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    named = text_completion(text(logprobs=0, return_tokens_as_token_ids=True), REPLY, TEXTS)
    assert named["choices"][0]["logprobs"]["tokens"] == ["token_id:7", "token_id:8"]
    assert "token_ids" not in text_completion(text(return_token_ids=False), REPLY, TEXTS)["choices"][0]


def test_a_streamed_reply_ends_with_token_ids_and_counts():
    writer = make_text_writer(text(stream=True, stream_options={"include_usage": True}), TEXTS)
    pieces = [Delta(0, content="é"), Delta(1, content="c"), Delta(0, token_ids=(8,)), Delta(0, content="b"), REPLY]
    *events, end = [event for piece in pieces for event in writer.events(piece)]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [(each["index"], each["text"]) for each in choices] == [(0, "é"), (1, "c"), (0, "b"), (0, ""), (1, "")]
    assert [each.get("token_ids") for each in choices] == [None, None, None, [7, 8], [9]]
    assert end == b"data: [DONE]\n\n" and chunks[-1]["usage"]["total_tokens"] == 5


def rows_of(episode):
    """The rows that are trained, without the calls that began them."""
    return [sequence.model_dump() for sequence in token_sequences(episode.calls)]


def test_token_ids_are_sampled_and_recorded_as_the_chat_of_the_same_ids(llm, client, tokenizer):
    options = {"max_tokens": 8, "temperature": 0.9, "seed": 7, "n": 2}
    chat, whole, streamed = make_episode(), make_episode(), make_episode()
    reply = run(llm.chat(QUESTION, **options), chat)
    completion = run(ask(client, reply.prompt_ids, logprobs=2, **options), whole)
    for choice, answer, call in zip(completion.choices, reply.choices, whole.calls, strict=True):
        assert tuple(choice.token_ids) == answer.token_ids == call.token_ids
        assert tuple(choice.prompt_token_ids) == reply.prompt_ids == call.prompt_ids
        assert tuple(choice.logprobs.token_logprobs) == answer.logprobs and choice.text == call.content
    assert rows_of(whole) == rows_of(chat)
    (told,) = whole.calls[0].messages
    assert told == {"role": "user", "content": tokenizer.decode(reply.prompt_ids)}

    async def stream():
        return [chunk async for chunk in await ask(client, reply.prompt_ids, stream=True, **options)]

    chunks = run(stream(), streamed)
    assert rows_of(streamed) == rows_of(whole)
    assert [(call.prompt, call.content) for call in streamed.calls] == [
        (call.prompt, call.content) for call in whole.calls
    ]
    for index, call in enumerate(whole.calls):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.text for choice in choices) == call.content
        assert tuple(choices[-1].token_ids) == call.token_ids


def test_a_prompt_that_begins_with_an_earlier_call_extends_its_row(llm, client, tokenizer):
    episode = make_episode()

    async def agent():
        reply = await llm.chat(QUESTION, max_tokens=4)
        prompt = [*reply.prompt_ids, *reply.token_ids, *tokenizer.encode("<|user|>y<|end|><|assistant|>")]
        choice = (await ask(client, prompt, max_tokens=4)).choices[0]
        await ask(client, [*prompt, *choice.token_ids, *tokenizer.encode("z")], max_tokens=4)
        await llm.chat([*QUESTION, reply.message, {"role": "user", "content": "w"}], max_tokens=4)

    run(agent(), episode)
    first, second, third, fourth = episode.calls
    rows = sorted(token_sequences(episode.calls), key=lambda row: len(row.tokens))
    assert [row.tokens for row in rows] == [list(fourth.context_ids), list(third.context_ids)]
    assert third.prompt_ids[: len(second.context_ids)] == second.context_ids
    assert sum(sum(row.completion_mask) for row in rows) == sum(len(call.token_ids) for call in episode.calls)
    assert fourth.prompt_ids[: len(first.context_ids)] == first.context_ids
    assert not any(call.prompt.is_retokenized for call in episode.calls)
    assert len(episode_messages(episode.calls)) > 4


def test_an_episode_with_too_long_token_ids_may_be_dropped_or_truncated(policy):
    async def complete(long_prompts):
        return await ask(framework_client(ChatClient(policy, "player", long_prompts), "openai"), [5] * 200)

    dropped, truncated = make_episode(), make_episode()
    with pytest.raises(openai.BadRequestError):
        run(complete("drop"), dropped)
    run(complete("truncate_left"), truncated)
    assert dropped.is_dropped and not dropped.calls
    (call,) = truncated.calls
    assert len(call.prompt_ids) + 8 == 96 and call.prompt.truncated_tokens == 200 - len(call.prompt_ids)
