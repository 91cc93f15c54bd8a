"""Preparation of a process before it imports jax: the cache of programs, and devices of a divided CPU.

Settings of the user take precedence everywhere.
"""

import os
import sys
from pathlib import Path

DIVIDED = "xla_force_host_platform_device_count"
"""XLA flag that divides a CPU into several devices, to test a mesh."""

THREADS = "32"
"""Size of XLA's thread pools for a divided CPU, unless `NPROC` sets it; the default is no more than the devices."""

CACHE_SETTINGS = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0, "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1}
"""Settings of jax's compilation cache: small programs are cached as well, as a run compiles many."""


def prepare_process(*, computes: bool = True) -> None:
    """Prepare this process; one that does not compute itself, as a sweep, has only the cache, for its children."""
    use_compile_cache()
    if computes:
        order_cpu_devices()


def compile_cache_folder() -> Path:
    """Return the folder `jaxft/xla` in the user's cache folder, `XDG_CACHE_HOME` or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxft" / "xla"


def use_compile_cache() -> None:
    """Turn on jax's compilation cache for this process and its children.

    `JAX_COMPILATION_CACHE_DIR` puts it elsewhere, `JAX_ENABLE_COMPILATION_CACHE=0` turns it off.
    """
    settings: dict[str, str | int] = {"JAX_COMPILATION_CACHE_DIR": str(compile_cache_folder()), **CACHE_SETTINGS}
    for name, value in settings.items():
        if name not in os.environ:
            os.environ[name] = str(value)
            if "jax" in sys.modules:  # jax reads its environment variables when it is imported
                sys.modules["jax"].config.update(name.lower(), value)


def order_cpu_devices() -> None:
    """Keep collectives on a divided CPU from blocking each other; do nothing where `XLA_FLAGS` divides no CPU.

    In a collective every device blocks a CPU thread until all devices have arrived. With too few threads, or two
    programs at once, all may wait until XLA ends the process. So XLA gets more threads, and runs one program after the
    other. Call this before jax counts its devices.
    """
    if DIVIDED in os.environ.get("XLA_FLAGS", ""):
        os.environ.setdefault("NPROC", THREADS)

        import jax  # here, because only this case needs jax this early: no environment variable sets the option

        jax.config.update("jax_cpu_enable_async_dispatch", False)
