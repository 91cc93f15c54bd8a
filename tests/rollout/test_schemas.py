"""Answers of generated JSON schemas, judged by the package jsonschema."""

import asyncio
import json

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from jaxft.models.bridge import from_function
from jaxft.rollout.chat_request import ChatRequest
from jaxft.rollout.client import ChatClient

CONTEXT = 512
NAMES = st.sampled_from(["a", "b", "name", "größe", "x y", 'quo"te'])
SCALARS = st.one_of(st.integers(-99, 99), st.booleans(), st.none(), st.text('abé" \\', max_size=4))


@st.composite
def bounded(draw, kind, low, high):
    """A schema of a type with a lower and an upper bound, or one of the two, or none."""
    one, other = sorted(draw(st.tuples(st.integers(-20, 20), st.integers(-20, 20))))
    if kind in ("string", "array"):
        one, other = abs(one) % 4, abs(one) % 4 + draw(st.integers(0, 3))
    bounds = {low: one, high: other}
    return {"type": kind} | {name: bounds[name] for name in draw(st.sets(st.sampled_from([low, high])))}


STRINGS = st.one_of(
    bounded("string", "minLength", "maxLength"),
    st.builds(
        lambda pattern: {"type": "string", "pattern": pattern},
        st.sampled_from(["^[a-z]{2}-[0-9]{3}$", "^(yes|no)$", "^x+y?$", "^[^a]{1,3}$"]),
    ),
    st.builds(lambda name: {"type": "string", "format": name}, st.sampled_from(["date", "uuid", "ipv4"])),
)
NUMBERS = st.one_of(
    bounded("integer", "minimum", "maximum"),
    bounded("number", "minimum", "maximum"),
    st.builds(lambda k: {"type": "integer", "multipleOf": k, "minimum": 0, "maximum": 100}, st.integers(2, 9)),
)
LEAVES = st.one_of(
    STRINGS,
    NUMBERS,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}]),
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, SCALARS),
    st.builds(
        lambda kinds: {"type": sorted(kinds)}, st.sets(st.sampled_from(["string", "null", "integer"]), min_size=1)
    ),
)


@st.composite
def objects(draw, inner):
    properties = draw(st.dictionaries(NAMES, inner, min_size=1, max_size=3))
    required = draw(st.sets(st.sampled_from(sorted(properties))))
    open_ended = draw(st.sampled_from([{"additionalProperties": False}, {}]))
    return {"type": "object", "properties": properties, "required": sorted(required), **open_ended}


@st.composite
def arrays(draw, inner):
    return draw(bounded("array", "minItems", "maxItems")) | {"items": draw(inner)}


INNER = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner), arrays(inner), st.builds(lambda each: {"anyOf": each}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=8,
)
LIST = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
SCHEMAS = st.builds(
    lambda schema, leaf: {**schema, "$defs": {"leaf": leaf, "node": LIST | {"required": ["next"]}}},
    st.one_of(objects(INNER), arrays(INNER), INNER),
    st.one_of(STRINGS, NUMBERS),
)


def generated(count, number):
    """So many schemas, which depend on the number only."""
    found = []

    @seed(number)
    @settings(
        max_examples=count, database=None, phases=[Phase.generate], deadline=None, suppress_health_check=HealthCheck
    )
    @given(SCHEMAS)
    def collect(schema):
        found.append(schema)

    collect()
    return found


@pytest.fixture(scope="module")
def client(make_policy, tokenizer):
    """A client of a model that likes to end what it has begun: of constant logits, high for what closes JSON."""
    logits = np.zeros(262, np.float32)
    likes = {'"': 4.0, "}": 6.0, "]": 6.0, tokenizer.eos_token: 8.0, " ": -3.0, "\n": -3.0, "\t": -3.0, "\r": -3.0}
    for text, value in likes.items():
        logits[tokenizer.encode(text, add_special_tokens=False)] = value

    def network(params, tokens, positions):
        return jnp.broadcast_to(params["logits"], (*tokens.shape, 262))

    params = {"logits": jax.device_put(logits)}
    return ChatClient(make_policy(model=from_function(network), params=params, slots=32, max_context_tokens=CONTEXT))


def answers(client, schemas):
    question = [{"role": "user", "content": "?"}]

    def request(number, schema):
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        return ChatRequest(messages=question, seed=number, response_format=form)

    async def ask():
        return await asyncio.gather(*(client.answer(request(*each)) for each in enumerate(schemas)))

    return asyncio.run(ask())


def judged(client, count, number):
    """The number of answers that ended by themselves, all of which satisfy their schemas."""
    schemas = generated(count, number)
    assert len(schemas) == count
    ended = [
        (schema, reply.content)
        for schema, reply in zip(schemas, answers(client, schemas), strict=True)
        if reply.finish_reason == "stop"
    ]
    for schema, content in ended:
        jsonschema.Draft202012Validator(schema).validate(json.loads(content))
    return len(ended)


def test_a_few_generated_schemas(client):
    assert judged(client, 24, 1) >= 19


@pytest.mark.long
def test_five_hundred_generated_schemas(client):
    assert judged(client, 500, 2) >= 400
