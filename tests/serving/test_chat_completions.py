import dataclasses
import json

from jaxft.rollout.calls import Reply
from jaxft.rollout.chat_request import ChatRequest, Delta
from jaxft.serving.chat_completions import ChatCompletionRequest, chat_completion, make_chat_writer
from jaxft.serving.schemas import read_request
from jaxft.serving.wire import encode
from tests.serving import conftest
from tests.serving.conftest import QUESTION, sampled

OTHER = Reply("yes", sampled([9], [-1.0], [((9, -1.0), (8, -2.0))]), (1, 2, 3))
REPLY = dataclasses.replace(conftest.REPLY, content="", others=(OTHER,))


def call(**fields):
    return read_request(ChatCompletionRequest, {"model": "policy", "messages": QUESTION} | fields)


TEXTS = {7: "é", 8: "b", 9: "c"}.__getitem__


def test_a_reply_becomes_openais_json():
    body = json.loads(encode(chat_completion(call(), REPLY, TEXTS)))
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
                "tool_calls": [REPLY.tool_calls[0].as_message()],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        },
        {"index": 1, "message": {"role": "assistant", "content": "yes"}, "logprobs": None, "finish_reason": "stop"},
    ]


def test_token_ids_are_under_the_names_of_vllm_and_of_harnesses_and_beside_logprobs():
    asked = call(logprobs=True, top_logprobs=2, return_token_ids=True)
    body = json.loads(encode(chat_completion(asked, REPLY, TEXTS)))
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
    named = chat_completion(call(logprobs=True, return_tokens_as_token_ids=True), REPLY, TEXTS)
    assert named["choices"][0]["logprobs"]["content"][1]["token"] == "token_id:8"


def test_token_ids_that_a_client_sends_back_are_left_out():
    message = chat_completion(call(return_token_ids=True), REPLY, TEXTS)["choices"][0]["message"]
    request = call(messages=[*QUESTION, json.loads(encode(message))]).to_request()
    assert request == ChatRequest([*QUESTION, REPLY.message])


def test_a_streamed_reply_ends_with_tool_calls_and_counts():
    writer = make_chat_writer(call(stream=True, stream_options={"include_usage": True}, return_token_ids=True), TEXTS)
    pieces = [Delta(1, content="y"), Delta(0, reasoning_content="hm"), Delta(1, token_ids=(9,)), Delta(1, content="es")]
    chunks = [json.loads(event[6:]) for piece in pieces for event in writer.events(piece)]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [(choice["index"], choice["delta"]) for choice in choices] == [
        (1, {"role": "assistant", "content": "y"}),
        (0, {"role": "assistant", "reasoning_content": "hm"}),
        (1, {"content": "es"}),
    ]
    *ends, last, _ = writer.events(REPLY)
    *ends, last = (json.loads(event[6:]) for event in (*ends, last))
    (calls, end, other) = [chunk["choices"][0] for chunk in ends]
    assert calls["delta"]["tool_calls"][0] == {"index": 0, **REPLY.tool_calls[0].as_message()}
    assert (end["finish_reason"], end["token_ids"], other["finish_reason"]) == ("tool_calls", [7, 8], "stop")
    assert end["delta"]["prompt_token_ids"] == [1, 2, 3]
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 6
    assert len({chunk["id"] for chunk in (*chunks, *ends, last)}) == 1
    assert all(chunk["usage"] is None for chunk in (*chunks, *ends))
