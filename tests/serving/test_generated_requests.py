"""Requests that hypothesis makes up: each is answered or refused in the format of its dialect, none with a 500."""

import asyncio
import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.rollout.current import recording
from jaxft.serving.app import DIALECTS

pytestmark = [
    pytest.mark.usefixtures("no_sockets"),
    # It takes the random numbers of other threads for those of a strategy.
    pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning"),
]

texts = st.text(st.characters(categories=["L", "N", "P", "Cs", "Cc", "So"]), max_size=8) | st.sampled_from(
    ["<|end|>", "<call:f>{", "auto", "required", "none", "function", "text", "user", "", "f"]
)
numbers = st.integers(-3, 3) | st.integers() | st.floats() | st.sampled_from([10**400, 2**31, 2**63, 0.5, 1e308])
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "stream": True}
MORE = SAMPLING | {
    "n": 2,
    "seed": 7,
    "stop": ["a", "\n"],
    "min_p": 0.1,
    "stop_token_ids": [4],
    "return_token_ids": True,
}
MORE |= {"stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"5": -1.5, "7": 3}}
FUNCTION = {"name": "f", "description": "It.", "parameters": {"type": "object", "properties": {"x": {}}}}
PART = {"type": "text", "text": "b"}
USED = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
RICH = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": [PART]},
            {"role": "user", "content": "a", "name": "n"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [USED],
                "refusal": None,
                "prompt_token_ids": [1],
                "parsed": {"a": 1},
            },
            {"role": "tool", "tool_call_id": "t1", "content": "3"},
        ],
        "max_tokens": 3,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        **MORE,
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"a": 1},
    },
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 3, **MORE, "logprobs": 2},
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    PART,
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [PART]}, PART]},
        ],
        "max_tokens": 3,
        "system": [PART],
        "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
        "tool_choice": {"type": "tool", "name": "f"},
        "stop_sequences": ["a"],
        **SAMPLING,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "function_call", "call_id": "t1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "t1", "output": "3"},
        ],
        "max_output_tokens": 3,
        "instructions": "s",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "seed": 7,
        "stop": "a",
        **SAMPLING,
    },
}
"""For each path, a request that the policy can answer, with many fields."""


def places(value):
    """All lists and objects within a value, each with the index or name of one of its members."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield value, key
        yield from places(member)


@st.composite
def bodies(draw, path):
    """Draws bodies of requests to a path: some fields of the rich one, some values replaced, some bytes damaged."""
    (model,) = (dialect.request for dialect in DIALECTS if dialect.path == path)
    chosen = {name: copy.deepcopy(value) for name, value in RICH[path].items()}
    needed = ("messages", "prompt", "input", "max_tokens")
    body = {name: value for name, value in chosen.items() if name in needed or draw(st.booleans())}
    body["model"] = "player"
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        holder, key = draw(st.sampled_from(list(places(body))))
        if draw(st.integers(0, 3)) or isinstance(holder, list):
            holder[key] = draw(anything)
        else:
            del holder[key]
    if not draw(st.integers(0, 3)):
        names = [field.alias or name for name, field in model.model_fields.items()]
        body[draw(st.sampled_from(names) | texts)] = draw(anything)
    written = json.dumps(body).encode()
    if draw(st.integers(0, 15)):
        return written
    start = draw(st.integers(0, len(written)))
    return draw(st.binary(max_size=40) | st.just(written[:start] + draw(st.binary(max_size=6)) + written[start + 3 :]))


@pytest.fixture(scope="module")
def post(client):
    """Sends a body to a path, and returns status and text of the response."""

    async def main(path, body):
        with recording(None):
            async with asyncio.timeout(60):
                response = await client._client.post(f"http://jaxft.invalid{path}", content=body)
                return response.status_code, response.text

    return lambda path, body: asyncio.run(main(path, body))


def check(path, status, text):
    assert "Traceback" not in text and "/jaxft/" not in text
    if status == 200:
        lines = text.split("\n") if text.startswith(("data: ", "event: ")) else [f"data: {text}"]
        for line in lines:
            assert line != "event: error"
            if line.startswith("data: ") and line != "data: [DONE]":
                assert json.loads(line.removeprefix("data: ")).get("error") is None, line
        return
    assert status in (400, 404), text
    error = json.loads(text)["error"]
    names = {"message", "type"} if path == "/v1/messages" else {"message", "type", "param", "code"}
    assert set(error) == names and error["message"] and "\n" not in error["type"]


def run(post, path, num_requests):
    """The statuses of generated requests, all of which had a proper answer."""
    statuses = []

    @settings(max_examples=num_requests, deadline=None)
    @given(bodies(path))
    def run_all(body):
        status, text = post(path, body)
        statuses.append(status)
        check(path, status, text)

    run_all()
    return statuses


@pytest.mark.parametrize("path", RICH)
def test_generated_requests_are_answered_or_refused(post, path):
    assert {200, 400} <= set(run(post, path, 100 if path == "/v1/chat/completions" else 60))


@pytest.mark.long
@pytest.mark.parametrize("path", RICH)
def test_two_thousand_generated_requests_are_answered_or_refused(post, path):
    statuses = run(post, path, 2000)
    assert len(statuses) >= 2000 and min(map(statuses.count, (200, 400, 404))) >= 5
