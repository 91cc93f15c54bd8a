"""Merging of configuration layers: a file, the files it inherits by `base:`, the values of `--set`, `${VARIABLES}`.

Maps merge; any other value of a later layer replaces the earlier one. A component (a map with `_type`) of another type
replaces the earlier component with all its fields, and null removes it. Variables are expanded last, in parsed texts,
so that no value can change the structure: `${VAR}` must be set, `${VAR:-default}` need not be, and `$${` stands for
`${`.

A text that then begins with `file://` is replaced by the content of that file, for prompts and keys kept elsewhere:
`file://prompts/system.txt` is relative to the folder of the YAML file (on the command line, to the working directory),
`file:///etc/key` is absolute. The file is UTF-8; a byte order mark and one line break at its end are dropped, and the
rest is taken as it stands: no variables, no YAML, no further `file://`. `$file://` stands for `file://`, `$$file://`
for `$file://`, and so on.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxft.errors import ConfigError
from jaxft.files import home_path
from jaxft.harness.config_types import ConfigText, kind_of
from jaxft.harness.strict_yaml import parse_yaml

_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[^}:]*)(?::-(?P<default>[^}]*))?\}")
_FILE = "file://"


class ConfigErrors(dict[str, str]):
    """Errors of a configuration by dotted path; only the first of each path is reported."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden: dict[str, str] = {}

    def add(self, path: str, message: str) -> None:
        for hidden, text in self._hidden.items():
            if _is_under(path, hidden) or _is_under(hidden, path):
                message = message.replace(f"'{text}'", "the text of the file")
        self.setdefault(path, message)

    def hide(self, path: str, text: str) -> None:
        """Hide a text read from a file, perhaps a secret, in the messages at its path, above and below it."""
        self._hidden[path] = text

    def is_known(self, path: str) -> bool:
        """True if the path, or one above it, has an error already."""
        return any(_is_under(path, known) for known in self)

    def lines(self) -> list[str]:
        return [f"{path}: {message}" for path, message in self.items()]


def _is_under(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}.")


def read_layers(path: Path) -> dict[str, Any]:
    """Read the mapping of a YAML file, merged over the files it inherits.

    Raises:
        ConfigError: a file is missing or is not strict YAML, or files inherit each other in a circle.
    """
    return _read(home_path(path), ())


def layers_of(mapping: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Merge a mapping over the files it inherits, like `read_layers`; its paths and `base` are relative to `folder`."""
    return _with_base(located(mapping, folder), folder, "the configuration", ())


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    try:
        # `resolve` raises for a link that leads to itself, on some Pythons.
        resolved = Path(os.path.realpath(path))
    except ValueError as error:
        raise ConfigError([f"{str(path)!r}: is not a path: {error}"]) from None
    if resolved in chain:
        circle = " -> ".join(str(file) for file in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError([f"{path}: inherits itself: {circle}"])
    try:
        text = resolved.read_bytes().decode("utf-8-sig")
    except OSError as error:
        inherited = f" (base of {chain[-1]})" if chain else ""
        raise ConfigError([f"{path}: cannot be read{inherited}: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{path}:{line}: not UTF-8"]) from None
    mapping = parse_yaml(text, str(path))
    if not isinstance(mapping, dict):
        raise ConfigError([f"{path}:1: wants a mapping of sections, holds {kind_of(mapping)}"])
    return _with_base(located(mapping, resolved.parent), resolved.parent, str(path), (*chain, resolved))


def _with_base(mapping: dict[str, Any], folder: Path, source: str, chain: tuple[Path, ...]) -> dict[str, Any]:
    if "base" not in mapping:
        return mapping
    base = mapping.pop("base")
    if not isinstance(base, str):
        raise ConfigError([f"{source}: base: wants the path of a YAML file, holds {kind_of(base)}"])
    faults = ConfigErrors()
    base = _with_variables(base, "base", faults)
    if faults:
        raise ConfigError(faults.lines(), source)
    return merged(_read(folder / home_path(base), chain), mapping)


def located(value: Any, folder: Path) -> Any:
    """Return the value with every text as a `ConfigText` of this folder."""
    if isinstance(value, str):
        return ConfigText(value, folder)
    if isinstance(value, Mapping):
        return {str(key): located(inner, folder) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [located(inner, folder) for inner in value]
    return value


def merged(below: Any, above: Any) -> Any:
    """Merge two maps key by key; any other value of `above`, and a component of another type, replaces that of `below`.

    >>> merged({"a": {"x": 1, "y": [1, 2]}}, {"a": {"y": [3]}, "b": 2})
    {'a': {'x': 1, 'y': [3]}, 'b': 2}
    >>> merged({"a": {"_type": "one", "x": 1}, "b": {"_type": "two"}}, {"a": {"_type": "two"}, "b": None})
    {'a': {'_type': 'two'}}
    """
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if "_type" in below and above.get("_type", below["_type"]) != below["_type"]:
        return above
    both = {key: merged(value, above[key]) if key in above else value for key, value in below.items()}
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
            value = located(parse_yaml(text, f"--set {path}"), Path.cwd())
        except ConfigError:
            # The message of the parser could repeat the value, which may be a secret.
            faults.add(path, "the value given on the command line is not YAML: quote it")
            continue
        *parents, last = path.split(".")
        node: Any = mapping
        for depth, part in enumerate(parents):
            node = _step(node, part, ".".join(parents[:depth]), path, faults)
        if isinstance(node, dict) and value is None and _is_component(node.get(last)):
            del node[last]
        elif isinstance(node, dict):
            node[last] = value
        elif _has_item(node, last, ".".join(parents), path, faults):
            node[int(last)] = value


def _step(node: Any, part: str, so_far: str, path: str, faults: ConfigErrors) -> Any:
    """Return the item `part` of a container; None after an error."""
    if isinstance(node, dict):
        if node.get(part) is None:
            node[part] = {}
        return node[part]
    return node[int(part)] if _has_item(node, part, so_far, path, faults) else None


def _has_item(node: Any, part: str, so_far: str, path: str, faults: ConfigErrors) -> bool:
    if not isinstance(node, list):
        faults.add(path, f"cannot be set: '{so_far}' holds {kind_of(node)}, which has no '{part}'")
    elif not part.isdecimal() or int(part) >= len(node):
        faults.add(path, f"cannot be set: '{so_far}' is a list of {len(node)}, which has no item '{part}'")
    else:
        return True
    return False


def expanded(value: Any, path: str, faults: ConfigErrors) -> Any:
    """Expand variables and files in a value; a text that cannot be expanded is recorded as an error and stays."""
    if isinstance(value, dict):
        return {key: expanded(inner, f"{path}.{key}" if path else key, faults) for key, inner in value.items()}
    if isinstance(value, list):
        return [expanded(inner, f"{path}.{index}", faults) for index, inner in enumerate(value)]
    if not isinstance(value, ConfigText):
        return value
    text = _with_variables(value, path, faults)
    if text.startswith(_FILE) and not faults.is_known(path):
        return _text_of_file(value.folder, text.removeprefix(_FILE), path, faults)
    return ConfigText(text[1:] if _is_escaped_file(text) else text, value.folder)


def literal(text: str) -> str:
    """Escape a text for a configuration, so that it is read back unchanged.

    >>> literal("${HOME}"), literal("file://x"), literal("$file://x"), literal("see file://x")
    ('$${HOME}', '$file://x', '$$file://x', 'see file://x')
    """
    escaped = text.replace("${", "$${")
    return "$" + escaped if text.startswith(_FILE) or _is_escaped_file(text) else escaped


def _is_escaped_file(text: str) -> bool:
    return text.startswith("$") and text.lstrip("$").startswith(_FILE)


def _text_of_file(folder: Path, name: str, path: str, faults: ConfigErrors) -> str:
    """Return the content of a file as plain text, which has no folder and is not expanded again."""
    file = folder / home_path(name)
    try:
        text = file.read_bytes().decode("utf-8-sig")
        if "\0" in text:
            raise ValueError("holds zero bytes, as UTF-16 does: convert the file to UTF-8")
    except UnicodeDecodeError:
        faults.add(path, f"{file}: not UTF-8: convert the file")
    except (OSError, ValueError) as error:
        faults.add(path, f"{file}: cannot be read: {error.strerror if isinstance(error, OSError) else error}")
    else:
        text = re.sub(r"\r?\n\Z", "", text)
        faults.hide(path, text)
        return text
    return f"{_FILE}{name}"


def _with_variables(text: str, path: str, faults: ConfigErrors) -> str:
    return _VARIABLE.sub(lambda found: _variable(found, path, faults), text)


def _variable(found: re.Match[str], path: str, faults: ConfigErrors) -> str:
    if found[0] == "$${":
        return "${"
    name, default = found["name"], found["default"]
    if name in os.environ:
        return os.environ[name]
    if default is None:
        faults.add(path, f"the environment variable '{name}' is not set: set it, or write ${{{name}:-default}}")
    return default or ""
