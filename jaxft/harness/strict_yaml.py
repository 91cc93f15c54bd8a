"""Strict YAML: the scalars of YAML 1.2, unique keys that are texts, plain values, and errors with a line number."""

import re
from typing import Any

import yaml

from jaxft.errors import ConfigError

MAX_CHARACTERS = 300_000
"""Size of the longest text that is read: of a larger one the parser would read for minutes."""

MAX_VALUES = 100_000
"""Number of values that aliases may expand to."""

_PREFIX = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Makes plain values of nodes, whose kinds the scalars of YAML 1.2 tell."""

    def fetch_tag(self) -> None:
        raise _fault("a tag is not allowed: quote a text that begins with '!'", self.get_mark())

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise _fault("a key must be text: quote it", key.start_mark)
            if name in names:
                raise _fault(f"the key '{name}' is there twice", key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value, {"0x": 16, "0o": 8}.get(node.value[:2], 10))


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or the loader above would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
_Loader.add_constructor(f"{_PREFIX}int", _integer)
for _name, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", "[-+]?[0-9]{1,100}|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+."]),
):
    _Loader.add_implicit_resolver(f"{_PREFIX}{_name}", re.compile(rf"^(?:{_pattern})$"), _first)
    if _name in ("int", "float"):
        _Dumper.add_implicit_resolver(f"{_PREFIX}{_name}", re.compile(rf"^(?:{_pattern})$"), _first)


def parse_yaml(text: str, source: str) -> Any:
    """Parse a YAML text to None, bool, int, float, str, list or dict with text keys; aliases become copies.

    Args:
        text: one document.
        source: name of the text in messages, before the line number.

    Raises:
        ConfigError: the text is not YAML, has more than one document, or breaks a rule of this module.

    >>> parse_yaml("{a: 1e-5, b: [on, 0o17, ~]}", "example")
    {'a': 1e-05, 'b': ['on', 15, None]}
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{source}: {len(text):,} characters; at most {MAX_CHARACTERS:,} are read")
    try:
        return _copy_value(yaml.load(text, _Loader), [MAX_VALUES])
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{source}:{line}: the character {error.character!r} is not allowed") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(text for text in (error.context, error.problem) if text)
        raise ConfigError(f"{source}:{mark.line + 1 if mark else 1}: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{source}:1: nested too deeply, or its aliases expand to too many values") from None


def dump_yaml(value: Any) -> str:
    """Return plain values as YAML text, keys in their order; `parse_yaml` reads the values back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _fault(message: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=message, problem_mark=mark)


def _copy_value(value: Any, left: list[int]) -> Any:
    """Return a copy without shared parts; `left` holds the number of values that it may still have."""
    left[0] -= 1
    if left[0] < 0:
        raise RecursionError
    if isinstance(value, dict):
        return {name: _copy_value(inner, left) for name, inner in value.items()}
    return [_copy_value(inner, left) for inner in value] if isinstance(value, list) else value
