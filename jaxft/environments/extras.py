"""Import of packages that belong to an extra."""

import importlib
from types import ModuleType

from jaxft.errors import ComponentError


def installed(name: str, extra: str = "envs") -> ModuleType:
    """Return a module of a package that an extra of jaxft installs.

    Raises:
        ComponentError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = str(error).partition("\n")[0]
        raise ComponentError(f'{name}: {reason}; install it by: pip install "jaxft[{extra}]"') from error
