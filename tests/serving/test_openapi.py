"""The schema that the app publishes: its structure, and that it says what the tables of fields say."""

import asyncio
import json

import pytest

from jaxft.rollout.client import ChatClient
from jaxft.rollout.frameworks import client_of
from jaxft.rollout.recorder import Episode, recording
from jaxft.serving import chat_completions, completions, messages_api, responses_fields
from jaxft.serving.app import DIALECTS
from jaxft.serving.fields import COMMON, KINDS
from jaxft.serving.openapi import OF_EVERY_ROUTE

TABLES = {
    "/v1/chat/completions": chat_completions.FIELDS,
    "/v1/completions": completions.FIELDS,
    "/v1/messages": messages_api.FIELDS,
    "/v1/responses": responses_fields.FIELDS,
}
TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
KEYWORDS = {
    "additionalProperties",
    "anyOf",
    "const",
    "description",
    "enum",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "exclusiveMaximum",
    "minItems",
    "minLength",
    "minimum",
    "pattern",
    "properties",
    "propertyNames",
    "required",
    "type",
}


@pytest.fixture(scope="module")
def client(policy):
    return client_of(ChatClient(policy, "player"), "openai")


def get(client, path):
    async def main():
        with recording(None):
            response = await client._client.get(f"http://jaxft.invalid{path}")
            return response.status_code, response.json()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def schema(client):
    status, schema = get(client, "/openapi.json")
    assert status == 200
    return schema


def check_schema(schema, place):
    """Fails at a keyword that JSON schema does not have, or one with a value of another type."""
    assert isinstance(schema, dict) and set(schema) <= KEYWORDS, place
    types = schema.get("type", [])
    assert {types} <= TYPES if isinstance(types, str) else set(types) <= TYPES, place
    for name, each in schema.get("properties", {}).items():
        check_schema(each, f"{place}.{name}")
    for name in ("items", "propertyNames", "additionalProperties"):
        if name in schema and not isinstance(schema[name], bool):
            check_schema(schema[name], f"{place}.{name}")
    for index, each in enumerate(schema.get("anyOf", ())):
        check_schema(each, f"{place}.anyOf[{index}]")
    assert set(schema.get("required", ())) <= set(schema.get("properties", {})), place


def test_the_schema_has_the_structure_of_openapi(schema):
    assert schema["openapi"].startswith("3.1.") and {"title", "version"} <= set(schema["info"])
    assert schema["servers"] == [{"url": "/"}]
    assert set(schema["paths"]) == {*TABLES, "/v1/models", "/v1/models/{model}", "/health", "/openapi.json"}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert method in ("get", "post")
            assert {"200", *map(str, OF_EVERY_ROUTE)} <= set(operation["responses"])
            for status, response in operation["responses"].items():
                assert response["description"]
                for media in response["content"].values():
                    check_schema(media["schema"], f"{path} {status}")
            for parameter in operation.get("parameters", ()):
                assert f"{{{parameter['name']}}}" in path and parameter["required"]


@pytest.mark.parametrize("path", TABLES)
def test_a_request_has_the_fields_of_its_table(schema, path):
    operation = schema["paths"][path]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    check_schema(body, path)
    assert set(body["properties"]) == {field.name for field in TABLES[path]} and body["additionalProperties"] is False
    assert body["required"] == [field.name for field in TABLES[path] if field.required]
    assert body["properties"]["model"]["enum"] == ["player"]
    for field in TABLES[path]:
        own = body["properties"][field.name]
        if field.treatment == "refused":
            assert own["enum"] == [*field.unused, None]
        elif field.treatment == "taken" and not field.required:
            wanted = field.schema or COMMON.get(field.name) or KINDS[field.kind].schema
            assert own["anyOf"] == [json.loads(json.dumps(wanted)), {"type": "null"}]
    assert {"400", "404"} <= set(operation["responses"])
    error = operation["responses"]["429"]["content"]["application/json"]["schema"]
    assert ("type" in error["properties"]) == (path == "/v1/messages")


def test_every_dialect_is_in_the_schema():
    assert {dialect.path for dialect in DIALECTS} == set(TABLES)


def test_a_reply_has_the_fields_that_the_schema_requires(client, schema):
    """Each dialect's own tests look at their values."""
    requests = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x?"}]},
        "/v1/completions": {"prompt": [5, 6]},
        "/v1/messages": {"messages": [{"role": "user", "content": "x?"}]},
        "/v1/responses": {"input": "x?"},
    }

    async def post(path):
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        with recording(None):
            body = {"model": "player", limit: 4, **requests[path]}
            return (await client._client.post(f"http://jaxft.invalid{path}", json=body)).json()

    for path in TABLES:
        reply = asyncio.run(post(path))
        wanted = schema["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert set(wanted["required"]) <= set(reply), path


def test_the_schema_of_an_episode_has_its_address(policy):
    episode = Episode(run_seed=0, stream=0, rollout_index=0, example_id="a", generation=0)
    _, schema = get(client_of(ChatClient(policy, "player"), "openai"), f"/e/{episode.api_key}/openapi.json")
    assert schema["servers"] == [{"url": f"/e/{episode.api_key}"}]
