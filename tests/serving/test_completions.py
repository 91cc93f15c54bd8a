import json

import openai
import pytest

from jaxft.rollout import client_of
from jaxft.rollout.calls import Reply
from jaxft.rollout.chat_request import Delta
from jaxft.rollout.client import ChatClient
from jaxft.rollout.sequences import episode_messages, token_sequences
from jaxft.serving.completions import TokenCompletionRequest, make_text_writer, text_completion
from jaxft.serving.schemas import read_request
from jaxft.serving.wire import encode
from tests.serving.conftest import QUESTION, make_episode, run, sampled

pytestmark = pytest.mark.usefixtures("no_sockets")


def call(**fields):
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


def test_a_reply_becomes_openais_json_with_token_ids():
    body = json.loads(encode(text_completion(call(logprobs=3), REPLY, TEXTS)))
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
    named = text_completion(call(logprobs=0, return_tokens_as_token_ids=True), REPLY, TEXTS)
    assert named["choices"][0]["logprobs"]["tokens"] == ["token_id:7", "token_id:8"]
    assert "token_ids" not in text_completion(call(return_token_ids=False), REPLY, TEXTS)["choices"][0]


def test_a_streamed_reply_ends_with_token_ids_and_counts():
    writer = make_text_writer(call(stream=True, stream_options={"include_usage": True}), TEXTS)
    pieces = [Delta(0, content="é"), Delta(1, content="c"), Delta(0, token_ids=(8,)), Delta(0, content="b"), REPLY]
    *events, end = [event for piece in pieces for event in writer.events(piece)]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [(each["index"], each["text"]) for each in choices] == [(0, "é"), (1, "c"), (0, "b"), (0, ""), (1, "")]
    assert [each.get("token_ids") for each in choices] == [None, None, None, [7, 8], [9]]
    assert end == b"data: [DONE]\n\n" and chunks[-1]["usage"]["total_tokens"] == 5


def test_token_ids_are_sampled_and_recorded_as_the_chat_of_the_same_ids(llm, client, tokenizer):
    options = {"max_tokens": 8, "temperature": 0.9, "seed": 7, "n": 2}
    chat, whole, streamed = make_episode(), make_episode(), make_episode()
    reply = run(llm.chat(QUESTION, **options), chat)
    completion = run(ask(client, reply.prompt_ids, logprobs=2, **options), whole)
    for choice, answer, call in zip(completion.choices, reply.choices, whole.calls, strict=True):
        assert tuple(choice.token_ids) == answer.token_ids == call.token_ids
        assert tuple(choice.prompt_token_ids) == reply.prompt_ids == call.prompt_ids
        assert tuple(choice.logprobs.token_logprobs) == answer.logprobs and choice.text == call.content
    assert token_sequences(whole.calls) == token_sequences(chat.calls)
    (told,) = whole.calls[0].messages
    assert told == {"role": "user", "content": tokenizer.decode(reply.prompt_ids)}

    async def stream():
        return [chunk async for chunk in await ask(client, reply.prompt_ids, stream=True, **options)]

    chunks = run(stream(), streamed)
    assert token_sequences(streamed.calls) == token_sequences(whole.calls)
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
        return await ask(client_of(ChatClient(policy, "player", long_prompts), "openai"), [5] * 200)

    dropped, truncated = make_episode(), make_episode()
    with pytest.raises(openai.BadRequestError):
        run(complete("drop"), dropped)
    run(complete("truncate_left"), truncated)
    assert dropped.is_dropped and not dropped.calls
    (call,) = truncated.calls
    assert len(call.prompt_ids) + 8 == 96 and call.prompt.truncated_tokens == 200 - len(call.prompt_ids)
