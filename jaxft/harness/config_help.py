"""Descriptions of the fields of the config classes, for `--help` and pages, and those that are not at a default."""

import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from jaxft.harness.config import Config
from jaxft.harness.config_types import ConfigModel
from jaxft.harness.registry import KINDS, REGISTRY, ComponentConfig, import_installed
from jaxft.redaction import map_texts, redacted


class FieldHelp(NamedTuple):
    """One field of a configuration, in words.

    Attributes:
        path: its dotted path from the class that was asked for.
        type: its type, such as "float or null".
        default: its default, as in "default 0.2", or "required".
        description: its description; empty if it has none.
    """

    path: str
    type: str
    default: str
    description: str


def help_text() -> str:
    """Describe every field with type, default and description: the sections of the tree, then registered components."""
    import_installed()
    lines = ["Fields of the configuration (set one with --set path=value):", *_lines(Config)]
    for base, kind in KINDS.items():
        for name in REGISTRY.names(base):
            lines += ["", f"{kind.section}  _type: {name}", *_lines(REGISTRY.find(base, name).config_type)]
    return "\n".join(lines)


def _lines(model: type[ConfigModel]) -> Iterator[str]:
    for field in field_help(model):
        yield f"  {field.path} ({field.type}, {field.default})"
        if field.description:
            yield f"      {field.description}"


def field_help(model: type[ConfigModel], prefix: str = "") -> Iterator[FieldHelp]:
    """Yield every field that a person may set, those of sections inside included."""
    for name, field in model.model_fields.items():
        if field.exclude or (name == "reward" and issubclass(model, ComponentConfig)):
            continue  # set by the run, not by a person
        inner = _model(field.annotation)
        section = None if inner is None or issubclass(inner, ComponentConfig) else inner
        # An optional section has a line of its own; of a required one only the fields are listed.
        if section is None or field.default is None:
            yield FieldHelp(
                prefix + name, _words(field.annotation), _default(field), " ".join((field.description or "").split())
            )
        if section is not None:
            yield from field_help(section, f"{prefix}{name}.")


def _model(annotation: Any) -> type[ConfigModel] | None:
    """Return the config class of an annotation: itself, or the one inside `X | None` or `Annotated[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return annotation
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union, typing.Annotated):
        return None
    return next(filter(None, map(_model, typing.get_args(annotation))), None)


def _default(field: FieldInfo) -> str:
    """Return the default as JSON, which is also YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return f"default {json.dumps(to_jsonable_python(value))}"


def _words(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is typing.Annotated:
        return _words(typing.get_args(annotation)[0])
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " or ".join(_words(argument) for argument in typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(argument) for argument in typing.get_args(annotation))
    if typing.get_origin(annotation) in (tuple, list):
        return f"list of {_words(typing.get_args(annotation)[0])}"
    if typing.get_origin(annotation) is dict:
        return f"mapping of {_words(typing.get_args(annotation)[1])}"
    model = _model(annotation)
    if model is not None:
        return KINDS[model].name if issubclass(model, ComponentConfig) else "mapping"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def differences_to_defaults(config: ConfigModel) -> dict[str, dict[str, Any]]:
    """Return the fields that are not at their default, by dotted path: `value` and, unless it is required, `default`.

    Values are plain, secrets masked. A component that was added is one of `_type`, and its fields follow.
    """
    plain = config.model_dump(mode="json")
    return map_texts(dict(_differences(config, plain, "")), redacted)


def _differences(model: BaseModel, plain: Mapping[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(model, ComponentConfig):
        yield f"{path}_type", {"value": plain["_type"]}
    for name, field in type(model).model_fields.items():
        if field.exclude or name not in plain or (name == "reward" and isinstance(model, ComponentConfig)):
            continue  # set by the run, not by a person
        value, place = dict(model)[name], f"{path}{name}"
        if isinstance(value, BaseModel):
            yield from _differences(value, plain[name], f"{place}.")
        elif isinstance(value, dict) and any(isinstance(each, BaseModel) for each in value.values()):
            for key, each in value.items():
                yield from _differences(each, plain[name][key], f"{place}.{key}.")
        elif field.is_required():
            yield place, {"value": plain[name]}
        elif value != (default := field.get_default(call_default_factory=True, validated_data={})):
            yield place, {"value": plain[name], "default": to_jsonable_python(default)}
