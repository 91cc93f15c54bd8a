"""Requests that hypothesis makes up: each is answered or refused in the format of its dialect, none with a 500."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.rollout.recorder import recording
from jaxft.serving.openapi import DIALECTS

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


blocks = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts | anything}),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": texts, "signature": texts}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "id": texts, "name": texts, "input": st.just({}) | anything}),
    st.fixed_dictionaries(
        {"type": st.just("tool_result"), "tool_use_id": texts}, optional={"content": texts | anything}
    ),
)
said = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | texts, "content": texts | st.lists(blocks, max_size=3)}
)
own_tools = st.fixed_dictionaries({"name": st.sampled_from(["f"]) | texts, "input_schema": st.just({}) | anything})
item_parts = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text", "refusal"]), "text": texts})
items = st.one_of(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant"]) | texts,
            "content": texts | st.lists(item_parts, max_size=2) | anything,
        }
    ),
    st.fixed_dictionaries({"type": st.just("function_call"), "call_id": texts, "name": texts, "arguments": texts}),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": texts, "output": texts | anything}),
    st.fixed_dictionaries({"type": st.just("reasoning"), "summary": st.lists(anything, max_size=2)}),
)
SAMPLING = ("temperature", "top_p", "top_k", "stream", "model")


def sampling(*more):
    return {name: POSSIBLE[name] for name in (*SAMPLING, *more)}


REQUESTS = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "x?"}], "max_tokens": 3},
        POSSIBLE,
    ),
    "/v1/completions": (
        {"prompt": [5, 6], "max_tokens": 3},
        {
            **sampling("min_p", "max_tokens", "n", "seed", "stop", "logit_bias", "stop_token_ids", "return_token_ids"),
            "prompt": st.lists(st.integers(-1, 300), max_size=9),
            "logprobs": st.integers(-1, 21),
            "stream_options": POSSIBLE["stream_options"],
        },
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "x?"}], "max_tokens": 3},
        {
            **sampling("max_tokens", "chat_template_kwargs"),
            "messages": st.lists(said, min_size=1, max_size=4),
            "system": texts | st.lists(blocks, max_size=2),
            "tools": st.lists(own_tools, max_size=2),
            "tool_choice": st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}]),
            "stop_sequences": st.lists(texts, max_size=3),
        },
    ),
    "/v1/responses": (
        {"input": "x?", "max_output_tokens": 3},
        {
            **sampling("seed", "stop", "chat_template_kwargs"),
            "input": texts | st.lists(items, min_size=1, max_size=4),
            "instructions": texts,
            "max_output_tokens": POSSIBLE["max_tokens"],
            "tools": st.lists(functions.map(lambda tool: {"type": "function", **tool}), max_size=2),
            "tool_choice": st.sampled_from(["none", "required", {"type": "function", "name": "f"}]),
        },
    ),
}
"""For each path: a usual request, and likely values of fields."""


def mostly(likely, other):
    """Draws from `likely`, and one time in eight from `other`."""
    return st.sampled_from([likely] * 7 + [other]).flatmap(lambda chosen: chosen)


def bodies(path):
    """Draws bodies of requests to a path, some of them damaged."""
    usual, possible = REQUESTS[path]
    (model,) = (dialect.request for dialect in DIALECTS if dialect.path == path)
    fields = [field.alias or name for name, field in model.model_fields.items()]
    names = st.lists(mostly(st.sampled_from([*possible]), st.sampled_from(fields)), min_size=1)
    objects = names.flatmap(
        lambda names: st.fixed_dictionaries({name: mostly(possible.get(name, anything), anything) for name in names})
    ).map(lambda chosen: {"model": "player"} | usual | chosen)
    written = objects.map(lambda value: json.dumps(value).encode())
    damaged = st.builds(
        lambda body, start, length, middle: body[: start % len(body)] + middle + body[start % len(body) + length :],
        written,
        st.integers(0, 10**4),
        st.integers(0, 6),
        st.binary(max_size=6),
    )
    return mostly(written, damaged | anything.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))


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


@pytest.mark.parametrize("path", REQUESTS)
def test_generated_requests_are_answered_or_refused(post, path):
    assert {200, 400} <= set(run(post, path, 100 if path == "/v1/chat/completions" else 60))


@pytest.mark.long
@pytest.mark.parametrize("path", REQUESTS)
def test_two_thousand_generated_requests_are_answered_or_refused(post, path):
    statuses = run(post, path, 2000)
    assert len(statuses) >= 2000 and min(map(statuses.count, (200, 400, 404))) >= 5
