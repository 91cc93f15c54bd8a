"""Entry points by which installed packages add to jaxft, its own outbuildings among them.

jaxft.components   modules that register components when they are imported
jaxft.verbs        verbs of the command line (`jaxft.harness.verbs.Verb`)
jaxft.endpoint     `app`, the web application of language models, and `server`, which listens with one
"""

import functools
from importlib import metadata
from typing import Any

from jaxft.errors import ConfigError, UserCodeError, user_code


def plugin(group: str, name: str) -> Any:
    """Return the object of an entry point.

    Raises:
        ImportError: no installed package brings it, or a package that it needs is not installed.
    """
    for entry in metadata.entry_points(group=group, name=name):
        return entry.load()
    raise ImportError(f"no installed package has the entry point '{name}' of {group}")


@functools.cache
def plugins(group: str) -> dict[str, Any]:
    """Return the objects of all entry points of a group by name, in the order of names; imported once per process.

    Raises:
        ConfigError: one of them cannot be imported.
    """
    found = {}
    for entry in sorted(metadata.entry_points(group=group), key=lambda entry: entry.name):
        try:
            with user_code():
                found[entry.name] = entry.load()
        except UserCodeError as failure:
            raise ConfigError(
                f"entry point '{entry.name}' ({entry.value}) cannot be imported:{failure.where}"
            ) from failure.error
    return found
