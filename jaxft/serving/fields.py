"""Tables of the fields of requests: they check a request, and they are its JSON schema.

A table says of every field how it is treated, and a field that is in no table is refused. So no field is without effect
unless the table says why that does no harm.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxft.core import LARGEST_FLOAT32
from jaxft.core.sampling import COLDEST, SMALLEST_FRACTION
from jaxft.rollout.chat_request import MAX_CHOICES
from jaxft.rollout.decode_batch import MAX_BIASED_IDS
from jaxft.rollout.messages import TOOL_NAME
from jaxft.rollout.requests import MAX_TOP_LOGPROBS
from jaxft.serving.wire import APIError

MAX_INTEGER = 2**31 - 1
"""Largest integer of a field; arrays on the device hold no larger one."""

Schema = Mapping[str, Any]
"""A JSON schema."""


class Field(NamedTuple):
    """A field of a request, or of an object in it.

    Attributes:
        name: its name.
        api: whose API has it.
        treatment: `taken`: it has an effect; `refused`: an error unless the value is null or in `unused`; `ignored`: it
            has no effect, and that does no harm.
        note: its effect, what to do in the place of a refused one, or why ignoring it does no harm.
        kind: the kind of JSON that a taken field wants (a key of `KINDS`).
        unused: values of a refused field that ask for nothing.
        required: True if a request without the field is refused.
        schema: JSON schema of a taken field where it says more than its kind and `COMMON`.
    """

    name: str
    api: Literal["OpenAI", "vLLM", "Anthropic"]
    treatment: Literal["taken", "refused", "ignored"]
    note: str
    kind: str = ""
    unused: tuple[Any, ...] = ()
    required: bool = False
    schema: Schema | None = None


class Kind(NamedTuple):
    """A kind of JSON: the test of a value, and the schema of the values that pass it."""

    is_one: Callable[[Any], bool]
    schema: Schema


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


def _is_integer(value: Any, largest: int = MAX_INTEGER) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= largest


def _is_list_of(is_one: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list) and all(map(is_one, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number", "minimum": -1e300, "maximum": 1e300}
_INTEGER: Schema = {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
_OBJECT: Schema = {"type": "object"}


def list_of(items: Schema, **more: Any) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": items, **more}


def any_of(*schemas: Schema) -> dict[str, Any]:
    """Return the schema of a value that has one of these schemas."""
    return {"anyOf": list(schemas)}


KINDS: dict[str, Kind] = {
    "text": Kind(_is_text, _TEXT),
    "boolean": Kind(lambda value: isinstance(value, bool), {"type": "boolean"}),
    "number": Kind(_is_number, _NUMBER),
    "integer": Kind(_is_integer, _INTEGER),
    "seed": Kind(
        lambda value: _is_integer(value, 2**63 - 1), {"type": "integer", "minimum": 1 - 2**63, "maximum": 2**63 - 1}
    ),
    "object": Kind(_is_object, _OBJECT),
    "text or object": Kind(lambda value: _is_text(value) or _is_object(value), any_of(_TEXT, _OBJECT)),
    "list of objects": Kind(lambda value: _is_list_of(_is_object, value), list_of(_OBJECT)),
    "text or list of objects": Kind(
        lambda value: _is_text(value) or _is_list_of(_is_object, value), any_of(_TEXT, list_of(_OBJECT))
    ),
    "list of integers": Kind(lambda value: _is_list_of(_is_integer, value), list_of(_INTEGER)),
    "list of texts": Kind(lambda value: _is_list_of(_is_text, value), list_of(_TEXT)),
    "text or list of texts": Kind(
        lambda value: _is_text(value) or _is_list_of(_is_text, value), any_of(_TEXT, list_of(_TEXT))
    ),
    "object of numbers": Kind(
        lambda value: _is_object(value) and all(map(_is_number, value.values())),
        {"type": "object", "additionalProperties": _NUMBER},
    ),
}
"""Kinds of JSON, by the words that messages name them with."""

_COUNT: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER}
_STOPS = list_of({"type": "string", "minLength": 1})
NAME: Schema = {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"}
AT_LEAST_0: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}

COMMON: dict[str, Schema] = {
    "temperature": any_of({"const": 0}, {"type": "number", "minimum": COLDEST, "maximum": LARGEST_FLOAT32}),
    "top_p": {"type": "number", "minimum": SMALLEST_FRACTION, "maximum": 1},
    "min_p": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "top_k": {"type": "integer", "minimum": -1, "maximum": MAX_INTEGER},
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "stop": any_of({"type": "string", "minLength": 1}, _STOPS),
    "stop_sequences": _STOPS,
    "stop_token_ids": list_of(AT_LEAST_0),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -LARGEST_FLOAT32, "maximum": LARGEST_FLOAT32},
        "maxProperties": MAX_BIASED_IDS,
    },
}
"""Schemas of fields that have one range of values in all dialects, by their names; the core checks them."""


def object_schema(fields: Sequence[Field]) -> dict[str, Any]:
    """Return the JSON schema of an object that has these fields.

    >>> schema = object_schema([Field("n", "OpenAI", "taken", "How many.", "integer", required=True)])
    >>> schema["properties"]["n"]["description"], schema["required"], schema["additionalProperties"]
    ('How many.', ['n'], False)
    """
    return {
        "type": "object",
        "properties": {field.name: _field_schema(field) for field in fields},
        "required": [field.name for field in fields if field.required],
        "additionalProperties": False,
    }


def _field_schema(field: Field) -> dict[str, Any]:
    description = {"description": field.note} if field.note else {}
    if field.treatment == "ignored":
        return description
    if field.treatment == "refused":
        return {"enum": [*field.unused, None], **description}
    schema = field.schema or COMMON.get(field.name) or KINDS[field.kind].schema
    return {**(schema if field.required else any_of(schema, {"type": "null"})), **description}


class Table(NamedTuple):
    """The fields that an object may have, by their names, and the names of those that it must have."""

    fields: Mapping[str, Field]
    required: tuple[str, ...]


def make_table(fields: Sequence[Field]) -> Table:
    """Return fields in the form that objects are read by."""
    return Table({field.name: field for field in fields}, tuple(field.name for field in fields if field.required))


def read_fields(table: Table, value: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return the fields of an object that are given and not null.

    Args:
        table: the fields of the object.
        value: the object.
        place: path to the object within the request, such as `messages[0]`; empty for the request itself.

    Raises:
        APIError: a field is missing, unknown, refused or of another kind.

    >>> table = make_table([Field("n", "OpenAI", "taken", "", "integer"), Field("echo", "vLLM", "refused", "write it")])
    >>> read_fields(table, {"n": 2, "echo": None})
    {'n': 2}
    >>> read_fields(table, {"echo": True}, "choices[0]")
    Traceback (most recent call last):
    jaxft.serving.wire.APIError: choices[0].echo is true: write it
    """
    given = {}
    for name, each in value.items():
        field = table.fields.get(name)
        if field is None:
            unknown = path(place, name)
            raise APIError(f"{unknown} is no known parameter: leave it out", param=unknown, code="unknown_parameter")
        if each is not None:
            _check_field(field, place, each)
            given[name] = each
    for name in table.required:
        if name not in given:
            missing = path(place, name)
            raise APIError(f"{missing} is missing", param=missing)
    return given


def path(place: str, name: str) -> str:
    """Return the path to a field of an object; a very long name is cut."""
    return f"{place}.{name[:100]}" if place else name[:100]


def _check_field(field: Field, place: str, value: Any) -> None:
    """Raise an `APIError` unless a field may have this value, which is not null."""
    if field.treatment == "taken" and not KINDS[field.kind].is_one(value):
        name = path(place, field.name)
        raise APIError(f"{name} is {short(value)}; wanted {field.kind}", param=name, code="invalid_type")
    # True equals 1, but is another value.
    is_unused = any(value == unused and isinstance(value, bool) == isinstance(unused, bool) for unused in field.unused)
    if field.treatment == "refused" and not is_unused:
        name = path(place, field.name)
        raise APIError(f"{name} is {short(value)}: {field.note}", param=name, code="unsupported_parameter")


def read_one_of(tables: Mapping[str, Table], value: Mapping[str, Any], place: str, instead: str = "") -> dict[str, Any]:
    """Return the fields of an object whose `type` says which table it follows.

    Args:
        tables: tables of fields, by the types of objects.
        value: the object.
        place: path to the object within the request.
        instead: the way out for an object of another type.

    Raises:
        APIError: the type is unknown, or the object does not follow its table.
    """
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in tables:
        wanted = f"{path(place, 'type')} is {short(kind)}; wanted {', '.join(tables)}"
        raise APIError(wanted + (f": {instead}" if instead else ""), param=path(place, "type"))
    return read_fields(tables[kind], value, place)


def short(value: Any) -> str:
    """Return a value as JSON for a message, cut after 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def read_stream_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's `stream_options` of a request.

    Raises:
        APIError: they are given without `stream`, unknown or of another kind.
    """
    options = given.get("stream_options", {})
    if options and not given.get("stream", False):
        raise APIError("stream_options is given; it needs stream to be true", param="stream_options")
    return read_fields(make_table(STREAM_OPTIONS), options, "stream_options") if options else {}


STREAM_OPTIONS = (
    Field("include_usage", "OpenAI", "taken", "The last chunk has the counts of tokens.", "boolean"),
    Field("include_obfuscation", "OpenAI", "ignored", "Pads events against those who listen to a network."),
)


def read_logit_bias(given: Mapping[str, Any]) -> dict[int, float]:
    """Return OpenAI's `logit_bias` of a request, whose keys are token ids as text.

    Raises:
        APIError: a key is no token id.
    """
    return {_token_id(key): value for key, value in given.items()}


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise APIError(f"logit_bias has the key {short(key)}; wanted a token id", param="logit_bias")
    return int(key)
