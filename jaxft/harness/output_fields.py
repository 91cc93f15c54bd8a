"""Fields of the configuration in `finetuning.output_dir`, as in `runs/{trainer_adapters.local.loss.name}/{seed}`.

A field is any dotted path of the configuration; a field of the section `finetuning` may be named alone, as `{seed}`.
`{{` and `}}` stand for braces. Fields are expanded last: after variables, `--set` and the defaults.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxft.errors import did_you_mean
from jaxft.files import safe_name
from jaxft.harness.config_types import kind_of
from jaxft.runs.environment import is_secret_name, secrets_in_urls

SECTION = "finetuning"
OUTPUT_DIR = f"{SECTION}.output_dir"

_FIELD = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|[{}]")


def has_fields(text: str) -> bool:
    """Return True if a path has a field, or a brace that is no part of one.

    >>> has_fields("runs/{seed}"), has_fields("runs/{{seed}}")
    (True, False)
    """
    return any(found[0] not in ("{{", "}}") for found in _FIELD.finditer(text))


def escape_fields(text: str) -> str:
    """Double the braces of a path, so that it is read back unchanged.

    >>> escape_fields("runs/{x}")
    'runs/{{x}}'
    """
    return text.replace("{", "{{").replace("}", "}}")


def with_fields_expanded(output_dir: str, config: Mapping[str, Any]) -> str:
    """Return an output directory with the values of its fields, each made safe for a file name.

    >>> with_fields_expanded("runs/{seed}/{llms.policy.path}", {"llms": {"policy": {"path": "a/b"}}, "seed": 3})
    'runs/3/a_b-c14cddc033f6'

    Args:
        output_dir: the directory as it is written.
        config: the whole configuration as JSON has it, every field with its value.

    Raises:
        ValueError: there is no such field, it holds no single value or a secret, or a brace stands alone; the message
            begins with the fault.
    """

    def replacement(found: re.Match[str]) -> str:
        if found[0] in ("{{", "}}"):
            return found[0][0]
        if found["name"] is None:
            raise ValueError(f"holds a '{found[0]}' alone: write {{{{ and }}}} for braces, {{seed}} for a field")
        return _text_of(found["name"], config)

    return _FIELD.sub(replacement, output_dir)


def _text_of(name: str, config: Mapping[str, Any]) -> str:
    if name in (OUTPUT_DIR, OUTPUT_DIR.removeprefix(f"{SECTION}.")):
        raise ValueError(f"'{{{name}}}' stands for the directory itself: name another field")
    value = _at(config, name.split("."))
    value = _at(config, [SECTION, *name.split(".")]) if value is _MISSING else value
    if value is _MISSING:
        paths = _paths(config, "")
        near = did_you_mean(name, [*paths, *(path.removeprefix(f"{SECTION}.") for path in paths)], what="fields")
        # Without a near name it would list all of them.
        near = near if near.endswith("?") else "; a field is a dotted path of the configuration, or 'seed'"
        raise ValueError(f"'{{{name}}}' is no field{near} ({{{{ and }}}} stand for braces)")
    if isinstance(value, Mapping | list):
        raise ValueError(f"'{{{name}}}' is {kind_of(value)}: name one value in it")
    text = value if isinstance(value, str) else json.dumps(value)
    is_masked = bool(text) and not text.strip("*")
    if is_masked or is_secret_name(name.rpartition(".")[2]) or secrets_in_urls(text):
        raise ValueError(f"'{{{name}}}' is a secret, which no file name may hold: name another field")
    return safe_name(text)


_MISSING = object()


def _at(value: Any, parts: Sequence[str]) -> Any:
    """Return the value at a path of a configuration, or `_MISSING`."""
    for part in parts:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return _MISSING
    return value


def _paths(value: Any, path: str) -> list[str]:
    """Return the dotted paths of all single values in a configuration."""
    if not isinstance(value, Mapping):
        return [path]
    return [found for name, inner in value.items() for found in _paths(inner, f"{path}.{name}" if path else name)]
