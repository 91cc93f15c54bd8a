"""The schema that the app publishes: its structure, and that requests and replies follow it."""

import asyncio
import json

import pytest

from jaxft.rollout.current import recording
from jaxft.serving.openapi import DIALECTS, OF_EVERY_ROUTE, REPLIES
from tests.serving.conftest import make_episode

TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
KEYWORDS = {
    *("additionalProperties", "anyOf", "const", "default", "description", "discriminator", "enum", "items", "oneOf"),
    *(
        "exclusiveMaximum",
        "exclusiveMinimum",
        "maximum",
        "minimum",
        "maxItems",
        "minItems",
        "minLength",
        "maxProperties",
    ),
    *("pattern", "properties", "required", "title", "type", "$ref"),
}
REQUESTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x?"}], "max_tokens": 4},
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "x?"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x?"}]},
    "/v1/responses": {"input": "x?", "max_output_tokens": 4},
}


def send(client, method, path, **options):
    async def main():
        with recording(None):
            return await client._client.request(method, f"http://jaxft.invalid{path}", **options)

    response = asyncio.run(main())
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def schema(client):
    return send(client, "GET", "/openapi.json")


def check_schema(schema, place, known):
    """Fails at a keyword that JSON schema does not have, one with a value of another type, or an unknown reference."""
    assert isinstance(schema, dict) and set(schema) <= KEYWORDS, place
    types = schema.get("type", [])
    assert {types} <= TYPES if isinstance(types, str) else set(types) <= TYPES, place
    assert schema.get("$ref", "#/components/schemas/Usage").removeprefix("#/components/schemas/") in known, place
    for name, each in schema.get("properties", {}).items():
        check_schema(each, f"{place}.{name}", known)
    for name in ("items", "additionalProperties"):
        if name in schema and not isinstance(schema[name], bool):
            check_schema(schema[name], f"{place}.{name}", known)
    for index, each in enumerate([*schema.get("anyOf", ()), *schema.get("oneOf", ())]):
        check_schema(each, f"{place}[{index}]", known)
    assert set(schema.get("required", ())) <= set(schema.get("properties", {})), place


def test_the_schema_has_the_structure_of_openapi(schema):
    known = schema["components"]["schemas"]
    assert schema["openapi"].startswith("3.1.") and {"title", "version"} <= set(schema["info"])
    assert schema["servers"] == [{"url": "/"}]
    assert set(schema["paths"]) == {*REQUESTS, "/v1/models", "/v1/models/{model}", "/health", "/openapi.json"}
    for name, each in known.items():
        check_schema(each, name, known)
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert method in ("get", "post")
            assert {"200", *map(str, OF_EVERY_ROUTE)} <= set(operation["responses"])
            for status, response in operation["responses"].items():
                assert response["description"]
                for media in response["content"].values():
                    check_schema(media["schema"], f"{path} {status}", known)
            for parameter in operation.get("parameters", ()):
                assert f"{{{parameter['name']}}}" in path and parameter["required"]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.path)
def test_a_request_has_the_fields_of_its_model(schema, dialect):
    operation = schema["paths"][dialect.path]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    body = schema["components"]["schemas"][reference.rpartition("/")[2]]
    fields = {field.alias or name: field for name, field in dialect.request.model_fields.items()}
    assert set(body["properties"]) == set(fields) and body["additionalProperties"] is False
    assert body["required"] == [name for name, field in fields.items() if field.is_required()]
    properties = body["properties"]
    assert properties["model"]["enum"] == ["player"]
    assert properties["temperature"]["anyOf"][0] | {"maximum": 1} == {"type": "number", "minimum": 0, "maximum": 1}
    if "length_penalty" in properties:
        assert properties["length_penalty"]["enum"] == [1, None]
        assert properties["top_k"]["anyOf"] == [
            {"type": "integer", "minimum": -1, "maximum": 2**31 - 1},
            {"type": "null"},
        ]
    assert {"400", "404"} <= set(operation["responses"])
    error = operation["responses"]["429"]["content"]["application/json"]["schema"]["$ref"]
    assert ("Anthropic" in error) == (dialect.path == "/v1/messages")


@pytest.mark.parametrize("path", REQUESTS)
def test_a_reply_is_one_of_the_model_that_the_schema_has(client, path):
    reply = send(client, "POST", path, json={"model": "player", **REQUESTS[path]})
    REPLIES[path].model_validate_json(json.dumps(reply), strict=True)


def test_the_other_replies_are_those_of_their_models(client, schema):
    for path, model in REPLIES.items():
        if path not in REQUESTS:
            model.model_validate(send(client, "GET", path.replace("{model}", "player")))


def test_the_schema_of_an_episode_has_its_address(client):
    episode = make_episode()
    schema = send(client, "GET", f"/e/{episode.api_key}/openapi.json")
    assert schema["servers"] == [{"url": f"/e/{episode.api_key}"}]
