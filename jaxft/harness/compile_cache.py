"""What XLA compiled once is found again by the next run: JAX's persistent cache, on where programs begin."""

import os
import sys
from pathlib import Path

CACHE_VARIABLES = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""So that small programs are kept, too: a run compiles many."""


def compile_cache_folder() -> Path:
    """`jaxft/xla` in the user's cache folder: `XDG_CACHE_HOME`, or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxft" / "xla"


def use_compile_cache() -> None:
    """Turns the cache on for this process and those that it starts, and leaves alone what the user has set.

    `JAX_COMPILATION_CACHE_DIR` puts it elsewhere, `JAX_ENABLE_COMPILATION_CACHE=0` turns it off.
    """
    settings = {"JAX_COMPILATION_CACHE_DIR": str(compile_cache_folder()), **CACHE_VARIABLES}
    for name, value in settings.items():
        if name in os.environ:
            continue
        os.environ[name] = value
        if "jax" in sys.modules:  # it read its variables when it was imported
            _tell_jax(name.lower(), value)


def _tell_jax(option: str, value: str) -> None:
    import jax

    jax.config.update(option, value if option.endswith("_dir") else int(value))
