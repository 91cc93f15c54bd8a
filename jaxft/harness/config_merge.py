"""Merging of configuration layers: a file, the files it inherits by `base:`, the values of `--set`, `${VARIABLES}`.

Maps merge; any other value of a later layer replaces the earlier one. A component (a map with `_type`) of another type
replaces the earlier component with all its fields, and null removes it. Variables are expanded last, in parsed texts,
so that no value can change the structure: `${VAR}` must be set, `${VAR:-default}` need not be, and `$${` stands for
`${`.

Last of all, the fields of the configuration that `finetuning.output_dir` names are replaced by their values, as in
`runs/{trainer_adapters.local.loss.name}/{seed}`. A field is any dotted path; one of the section `finetuning` may be
named alone. `{{` and `}}` stand for braces.
"""

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxft.errors import ConfigError, did_you_mean
from jaxft.files import home_path, read_utf8, safe_name
from jaxft.harness.config_types import ConfigText, kind_in_words, walk
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.runs.environment import is_secret_name, secrets_in_urls

_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[^}:]*)(?::-(?P<default>[^}]*))?\}")
_FIELD = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|[{}]")

OUTPUT_DIR = "finetuning.output_dir"
"""Path of the field that other fields may be part of."""


class ConfigErrors(dict[str, str]):
    """Errors of a configuration by dotted path; only the first of each path is reported."""

    def add(self, path: str, message: str) -> None:
        self.setdefault(path, message)

    def is_known(self, path: str) -> bool:
        """True if the path, or one above it, has an error already."""
        return any(path == known or path.startswith(f"{known}.") for known in self)

    def lines(self) -> list[str]:
        return [f"{path}: {message}" for path, message in self.items()]


def read_layers(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read the mapping of a YAML file, merged over the files it inherits; those in `chain` inherit it.

    Raises:
        ConfigError: a file is missing or is not strict YAML, or files inherit each other in a circle.
    """
    path = home_path(path)
    try:
        text, resolved = read_utf8(path), path.resolve()
    except ValueError as error:
        raise ConfigError(f"{error}{f' (base of {chain[-1]})' if chain else ''}") from None
    if resolved in chain:
        circle = " -> ".join(str(file) for file in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(f"{path}: inherits itself: {circle}")
    mapping = parse_yaml(text, str(path))
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path}:1: wants a mapping of sections, holds {kind_in_words(mapping)}")
    return merge_with_base(mapping, resolved.parent, str(path), (*chain, resolved))


def merge_with_base(
    mapping: Mapping[str, Any], folder: Path, source: str = "the configuration", chain: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Merge a mapping over the files it inherits, like `read_layers`; its paths and `base` are relative to `folder`."""
    own = with_folder(mapping, folder)
    if "base" not in own:
        return own
    base = own.pop("base")
    if not isinstance(base, str):
        raise ConfigError(f"{source}: base: wants the path of a YAML file, holds {kind_in_words(base)}")
    faults = ConfigErrors()
    base = _with_variables(base, "base", faults)
    if faults:
        raise ConfigError(faults.lines(), source)
    return merge(read_layers(folder / home_path(base), chain), own)


def with_folder(value: Any, folder: Path) -> Any:
    """Return the value with every text as a `ConfigText` of this folder."""
    if isinstance(value, str):
        return ConfigText(value, folder)
    if isinstance(value, Mapping):
        return {str(key): with_folder(inner, folder) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_folder(inner, folder) for inner in value]
    return value


def merge(below: Any, above: Any) -> Any:
    """Merge two maps key by key; any other value of `above`, and a component of another type, replaces that of `below`.

    >>> merge({"a": {"x": 1, "y": [1, 2]}}, {"a": {"y": [3]}, "b": 2})
    {'a': {'x': 1, 'y': [3]}, 'b': 2}
    >>> merge({"a": {"_type": "one", "x": 1}, "b": {"_type": "two"}}, {"a": {"_type": "two"}, "b": None})
    {'a': {'_type': 'two'}}
    """
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if "_type" in below and above.get("_type", below["_type"]) != below["_type"]:
        return above
    both = {key: merge(value, above[key]) if key in above else value for key, value in below.items()}
    removed = {key for key, value in below.items() if _is_component(value) and both[key] is None}
    new = {key: value for key, value in above.items() if key not in below}
    return {key: value for key, value in both.items() if key not in removed} | new


def _is_component(value: Any) -> bool:
    return isinstance(value, dict) and "_type" in value


def override(mapping: dict[str, Any], overrides: Sequence[tuple[str, str]], faults: ConfigErrors) -> None:
    """Set each `(dotted path, YAML text)` in the mapping; file paths in a text are relative to the working directory.

    Missing maps are created; a number in a path is the index of a list item. Null removes a component.
    """
    for path, text in overrides:
        try:
            value = with_folder(parse_yaml(text, f"--set {path}"), Path.cwd())
        except ConfigError:
            # The message of the parser could repeat the value, which may be a secret.
            faults.add(path, "the value given on the command line is not YAML: quote it")
            continue
        try:
            changed = _put(mapping, path.split("."), 0, value)
        except ValueError as error:
            faults.add(path, f"cannot be set: {error}")
        else:
            mapping.clear()
            mapping.update(changed)


def _put(node: Any, path: Sequence[str], depth: int, value: Any) -> Any:
    """Return a copy of what stands at `path[:depth]`, with a value at the whole path.

    Raises:
        ValueError: something on the path is neither a map nor a list with such an item.
    """
    if depth == len(path):
        return value
    part, above = path[depth], ".".join(path[:depth])
    if node is None or isinstance(node, dict):
        put = {**(node or {}), part: _put((node or {}).get(part), path, depth + 1, value)}
        if put[part] is None and _is_component((node or {}).get(part)):
            del put[part]
        return put
    if not isinstance(node, list):
        raise ValueError(f"'{above}' holds {kind_in_words(node)}, which has no '{part}'")
    if not part.isdecimal() or int(part) >= len(node):
        raise ValueError(f"'{above}' is a list of {len(node)}, which has no item '{part}'")
    put = _put(node[int(part)], path, depth + 1, value)
    return [put if index == int(part) else item for index, item in enumerate(node)]


def expanded(value: Any, path: str, faults: ConfigErrors) -> Any:
    """Expand variables in a value; a text that cannot be expanded is recorded as an error and stays."""
    if isinstance(value, dict):
        return {key: expanded(inner, f"{path}.{key}" if path else key, faults) for key, inner in value.items()}
    if isinstance(value, list):
        return [expanded(inner, f"{path}.{index}", faults) for index, inner in enumerate(value)]
    if not isinstance(value, ConfigText):
        return value
    text = _with_variables(value, path, faults)
    if text.startswith("file://"):
        warnings.warn(f"{path}: 'file://' reads no file any more, and is a text", FutureWarning, stacklevel=2)
    return ConfigText(text, value.folder)


def literal(text: str) -> str:
    """Escape a text for a configuration, so that it is read back unchanged.

    >>> literal("${HOME}")
    '$${HOME}'
    """
    return text.replace("${", "$${")


def _with_variables(text: str, path: str, faults: ConfigErrors) -> str:
    def replacement(found: re.Match[str]) -> str:
        name, default = found["name"], found["default"]
        if found[0] == "$${":
            return "${"
        if name not in os.environ and default is None:
            faults.add(path, f"the environment variable '{name}' is not set: set it, or write ${{{name}:-default}}")
        return os.environ.get(name, default or "")

    return _VARIABLE.sub(replacement, text)


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
    values = {path: value for path, value in walk(config) if path}
    section = OUTPUT_DIR.partition(".")[0]
    values = {path.removeprefix(f"{section}."): value for path, value in values.items()} | values

    def replacement(found: re.Match[str]) -> str:
        name = found["name"]
        if found[0] in ("{{", "}}"):
            return found[0][0]
        if name is None:
            raise ValueError(f"holds a '{found[0]}' alone: write {{{{ and }}}} for braces, {{seed}} for a field")
        if name in (OUTPUT_DIR, OUTPUT_DIR.partition(".")[2]):
            raise ValueError(f"'{{{name}}}' stands for the directory itself: name another field")
        if name not in values:
            near = did_you_mean(name, values, what="fields")
            # Without a near name it would list all of them.
            near = near if near.endswith("?") else "; a field is a dotted path of the configuration, or 'seed'"
            raise ValueError(f"'{{{name}}}' is no field{near} ({{{{ and }}}} stand for braces)")
        value = values[name]
        if isinstance(value, Mapping | list):
            raise ValueError(f"'{{{name}}}' is {kind_in_words(value)}: name one value in it")
        text = value if isinstance(value, str) else json.dumps(value)
        is_masked = bool(text) and not text.strip("*")
        if is_masked or is_secret_name(name.rpartition(".")[2]) or secrets_in_urls(text):
            raise ValueError(f"'{{{name}}}' is a secret, which no file name may hold: name another field")
        return safe_name(text)

    return _FIELD.sub(replacement, output_dir)
