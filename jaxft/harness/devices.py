"""A CPU that was divided into several devices, to try a mesh on."""

import os
import sys
from pathlib import Path

DIVIDED = "xla_force_host_platform_device_count"
"""The flag of XLA that divides it."""

THREADS = "32"
"""Of XLA's pools, unless `NPROC` says otherwise; by default no more than devices."""


def order_cpu_devices() -> None:
    """Lets such devices compute without waiting for each other's threads; nothing without the flag in `XLA_FLAGS`.

    The devices share the threads of the CPU. In a collective each holds one until all have come, and one that still
    computes, or another program, needs more of them: so there are more, and one program runs after the other. Otherwise
    all can wait, until XLA ends the process. To be called before jax has counted its devices.
    """
    if DIVIDED in os.environ.get("XLA_FLAGS", ""):
        os.environ.setdefault("NPROC", THREADS)

        import jax

        jax.config.update("jax_cpu_enable_async_dispatch", False)


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
