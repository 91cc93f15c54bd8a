"""A CPU that was divided into several devices, to try a mesh on."""

import os

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
