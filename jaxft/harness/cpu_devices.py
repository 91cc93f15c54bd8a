"""A CPU that was divided into several devices, to try a mesh on."""

import os

DIVIDED = "xla_force_host_platform_device_count"
"""The flag of XLA that divides it."""


def order_cpu_devices() -> None:
    """Lets such devices run one program after the other; nothing where there is no flag in `XLA_FLAGS`.

    Several programs at once share the threads of the CPU. Where one waits in a collective for a device whose thread the
    other has, both wait until XLA ends the process.
    """
    if DIVIDED in os.environ.get("XLA_FLAGS", ""):
        import jax

        jax.config.update("jax_cpu_enable_async_dispatch", False)
