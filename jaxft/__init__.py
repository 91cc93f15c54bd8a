"""jaxft finetunes the language model inside an agent, in the process the agent runs in.

The public names stand in `__init__.pyi`, the namespaces among them: `jaxft.losses`, `jaxft.advantages`,
`jaxft.packing`, `jaxft.sampling` and `jaxft.episodes`. Each name is imported when it is first used (PEP 562), so
`import jaxft` alone loads neither jax nor transformers.
"""

import pkgutil
import warnings

import lazy_loader

__version__ = "0.9.0"
_import, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

MOVED: dict[str, str] = {}
"""Names that the next version no longer has, each with the place of what it stands for, as `module:name`."""


def __getattr__(name: str) -> object:
    if name not in MOVED:
        return _import(name)
    place = MOVED[name]
    told = f"jaxft.{name} goes with the next version; write {place.replace(':', '.')}"
    warnings.warn(told, FutureWarning, stacklevel=2)
    return pkgutil.resolve_name(place)
