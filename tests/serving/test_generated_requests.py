"""Requests that hypothesis makes up: each is answered or refused in OpenAI's format, and none is an error of ours."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.rollout.client import ChatClient
from jaxft.rollout.recorder import recording
from jaxft.serving.frameworks import client_of
from jaxft.serving.protocol import FIELDS

pytestmark = [
    pytest.mark.usefixtures("no_sockets"),
    # It takes the random numbers of other threads for those of a strategy.
    pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning"),
]

texts = st.text(st.characters(categories=["L", "N", "P", "Cs", "Cc", "So"]), max_size=8) | st.sampled_from(
    ["<|end|>", "<call:f>{", "auto", "required", "none", "function", "text", "user"]
)
numbers = st.integers(-3, 3) | st.integers() | st.floats() | st.sampled_from([10**400, 2**31, 2**63, 0.5, 1e308])
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g"]) | texts},
    optional={"description": texts | anything, "parameters": st.just({"properties": {"x": {}}}) | anything},
)
tools = st.fixed_dictionaries({"type": st.just("function"), "function": functions | anything})
calls = st.fixed_dictionaries(
    {"id": texts, "type": st.just("function")},
    optional={"function": st.fixed_dictionaries({"name": texts, "arguments": st.just('{"x": 1}') | texts | anything})},
)
parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": texts})
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]) | texts,
        "content": texts | st.none() | st.lists(parts, max_size=2) | anything,
    },
    optional={
        "name": texts | anything,
        "tool_calls": st.lists(calls | anything, max_size=2) | anything,
        "tool_call_id": texts | anything,
        "refusal": anything,
        "function_call": anything,
        "prompt_token_ids": anything,
    },
)
POSSIBLE = {
    "messages": st.lists(messages, min_size=1, max_size=4),
    "model": st.sampled_from(["player", "other"]),
    "tools": st.lists(tools, max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "top_k": st.integers(-1, 300),
    "max_tokens": st.integers(0, 9),
    "n": st.integers(0, 3),
    "seed": st.integers(-(2**63), 2**63),
    "stop": texts | st.lists(texts, max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str) | texts, numbers, max_size=3),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 21),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans() | anything, "x": anything}),
    "stop_token_ids": st.lists(st.integers(-1, 300), max_size=9),
    "chat_template_kwargs": st.dictionaries(texts, anything, max_size=2),
    "return_token_ids": st.booleans(),
}


USUAL = {"model": "player", "messages": [{"role": "user", "content": "x?"}], "max_tokens": 3}


def mostly(likely, other):
    """Draws from `likely`, and one time in eight from `other`."""
    return st.sampled_from([likely] * 7 + [other]).flatmap(lambda chosen: chosen)


names = st.lists(mostly(st.sampled_from([*POSSIBLE]), st.sampled_from([field.name for field in FIELDS])), min_size=1)
objects = names.flatmap(
    lambda names: st.fixed_dictionaries({name: mostly(POSSIBLE.get(name, anything), anything) for name in names})
).map(lambda chosen: USUAL | chosen)
written = objects.map(lambda value: json.dumps(value).encode())
damaged = st.builds(
    lambda body, start, length, middle: body[: start % len(body)] + middle + body[start % len(body) + length :],
    written,
    st.integers(0, 10**4),
    st.integers(0, 6),
    st.binary(max_size=6),
)
bodies = mostly(written, damaged | anything.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))


@pytest.fixture(scope="module")
def post(policy):
    """Sends a body, and returns status and text of the response."""
    client = client_of(ChatClient(policy, "player"), "openai")

    async def main(body):
        with recording(None):
            async with asyncio.timeout(60):
                response = await client._client.post("http://jaxft.invalid/v1/chat/completions", content=body)
                return response.status_code, response.text

    return lambda body: asyncio.run(main(body))


def check(status, text):
    assert "Traceback" not in text and "/jaxft/" not in text
    if status == 200:
        for line in text.split("\n") if text.startswith("data: ") else [f"data: {text}"]:
            if line and line != "data: [DONE]":
                assert "error" not in json.loads(line.removeprefix("data: ")), line
        return
    assert status in (400, 404), text
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and "\n" not in error["type"]


def run(post, num_requests):
    """The statuses of generated requests, all of which had a proper answer."""
    statuses = []

    @settings(max_examples=num_requests, deadline=None)
    @given(bodies)
    def run_all(body):
        status, text = post(body)
        statuses.append(status)
        check(status, text)

    run_all()
    return statuses


def test_generated_requests_are_answered_or_refused(post):
    assert {200, 400} <= set(run(post, 300))


@pytest.mark.slow
def test_two_thousand_generated_requests_are_answered_or_refused(post):
    statuses = run(post, 2000)
    assert len(statuses) >= 2000 and min(map(statuses.count, (200, 400, 404))) >= 5
