"""Parser for strict YAML: YAML 1.2 scalars, unique keys, no tags, bounded aliases, and errors with a line number."""

import math
import re
from typing import Any

import yaml

from jaxft.errors import ConfigError

MAX_CHARACTERS = 1_000_000
MAX_VALUES = 10_000
MAX_DEPTH = 100

_NULL, _BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))


class _Loader(yaml.SafeLoader):
    """Composes nodes only; `_value` converts them to values, without PyYAML's constructors."""

    depth = nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise _fault(f"the tag '{event.tag}' is not allowed: quote it if it is text", event.start_mark)
        self.nodes += 1
        if self.nodes > MAX_VALUES:  # stop here: reading the rest takes long
            raise _fault(f"more than {MAX_VALUES:,} keys and values: keep data in a file of its own", event.start_mark)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _fault(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {}


def _resolve(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(tag, re.compile(rf"^(?:{pattern})$"), [*first])


_Loader.add_implicit_resolver(_NULL, re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_resolve(_BOOL, "true|True|TRUE|false|False|FALSE", "tTfF")
_resolve(_INT, "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789")
_resolve(_FLOAT, r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789")
_resolve(_FLOAT, r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.")


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or the loader above would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(_FLOAT, re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), [*"-+0123456789"])
_Dumper.add_implicit_resolver(_INT, re.compile(r"^0o[0-7]+$"), ["0"])


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
        raise ConfigError(
            [
                f"{source}: {len(text):,} characters; at most {MAX_CHARACTERS:,} are read: keep long texts in files of "
                "their own (file://)"
            ]
        )
    try:
        # Inside the try: the reader refuses control characters when it is made.
        node = _Loader(text).get_single_node()
        return None if node is None else _value(node, 0, [0])
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError([f"{source}:{line}: the character {error.character!r} is not allowed"]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(text for text in (error.context, error.problem) if text)
        raise ConfigError([f"{source}:{mark.line + 1 if mark else 1}: {problem}"]) from None


def dump_yaml(value: Any) -> str:
    """Return plain values as YAML text, keys in their order; `parse_yaml` reads the values back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _fault(message: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=message, problem_mark=mark)


def _value(node: yaml.Node, depth: int, count: list[int]) -> Any:
    count[0] += 1
    if count[0] > MAX_VALUES or depth > MAX_DEPTH:
        raise _fault("its aliases expand to too many values: write them out, or use fewer", node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, depth + 1, count) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _value(key_node, depth + 1, count)
        if not isinstance(key, str):
            raise _fault("a key must be text: quote it", key_node.start_mark)
        if key in mapping:
            raise _fault(f"the key '{key}' is there twice", key_node.start_mark)
        mapping[key] = _value(value_node, depth + 1, count)
    return mapping


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if node.tag == _NULL:
        return None
    if node.tag == _BOOL:
        return text.lower() == "true"
    if node.tag == _INT:
        if len(text) > 100:
            raise _fault("a number of more than 100 digits", node.start_mark)
        return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
    if node.tag == _FLOAT:
        number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if math.isinf(number) and "inf" not in text.lower():
            raise _fault("a number too large for a float", node.start_mark)
        return number
    return text
