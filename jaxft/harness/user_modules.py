"""Importing the modules that register components: installed packages by entry point, a run's own by `imports:`."""

import functools
import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

from jaxft.harness.errors import ConfigError, UserCodeError, user_code
from jaxft.harness.fields import ConfigText

ENTRY_POINTS = "jaxft.components"


@functools.cache
def import_installed() -> None:
    """Imports what installed packages offer in the entry-point group `jaxft.components`, once per process.

    Raises:
        ConfigError: one of them cannot be imported.
    """
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            with user_code():
                entry.load()
        except UserCodeError as failure:
            raise ConfigError(
                [f"entry point '{entry.name}' ({entry.value}) cannot be imported:{_why(failure)}"]
            ) from failure.error


def locate_module(name: Any) -> Any:
    """Where an entry of `imports:` is: the path of a module that stands next to the YAML file, or in the working
    directory; else the name as it is, for an installed module or one inside a package. What is no text stays."""
    if not isinstance(name, str):
        return name
    folders = [name.folder] if isinstance(name, ConfigText) else []
    for folder in (*folders, Path.cwd()):
        for path in (folder / f"{name}.py", folder / name):
            if path.is_file() or (path / "__init__.py").is_file():
                return str(path)
    return str(name)


def import_module(name: str) -> None:
    """Imports an entry of `imports:`; the folders it was looked for in stay on `sys.path`, for its own imports.

    Raises:
        ConfigError: there is no such module, it raised (the message ends with the traceback's last frames), or another
            module has its name already.
    """
    location = locate_module(name)
    path = Path(location)
    is_path = location != path.name
    folders = [name.folder] if isinstance(name, ConfigText) else []
    for folder in (Path.cwd(), *folders, *([path.parent] if is_path else [])):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        with user_code():
            module = importlib.import_module(path.stem if is_path else location)
    except UserCodeError as failure:
        raise ConfigError([f"the module '{name}' cannot be imported:{_why(failure)}"]) from failure.error
    file = path / "__init__.py" if path.is_dir() else path
    if is_path and Path(module.__file__ or "").resolve() != file.resolve():
        raise ConfigError([f"the module '{name}' is {module.__file__}, not {file}: rename one of them"])


def _why(failure: UserCodeError) -> str:
    """The end of the traceback; of a file that is no Python, where it is not: no code of it has run."""
    error = failure.error
    if isinstance(error, SyntaxError):
        return f" {error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    return f"\n{failure.tail}"
