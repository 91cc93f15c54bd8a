"""Memory of a run, in MiB per device by purpose: the peak over its phases, and the memory that a device has."""

import os
import resource
from collections.abc import Mapping

import jax

from jaxft.core.sharding import Sharding, devices_of

PHASES = {
    "update": ("gradients", "update"),
    "rollout": ("sampling weights", "sampling temporaries"),
}
"""Purposes whose memory only one phase of a run has; that of all other purposes is held throughout."""

SAMPLER = "sampler's "
"""Beginning of the purposes of devices that sample alone, which are a phase of their own."""


def peak(memory: Mapping[str, float]) -> float:
    """Return the largest memory of a phase: what is held throughout, and what the phase has beside it.

    >>> peak({"parameters": 4.0, "gradients": 4.0, "update": 1.0, "sampling weights": 2.0, "sampling": 8.0})
    17.0
    """
    return max(sum(sizes.values()) for sizes in phases(memory).values())


def phases(memory: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the memory that each phase has, by purpose.

    >>> phases({"parameters": 4.0, "update": 1.0, "sampling weights": 2.0})["rollout"]
    {'parameters': 4.0, 'sampling weights': 2.0}
    """
    own = {purpose: size for purpose, size in memory.items() if purpose.startswith(SAMPLER)}
    found = {
        phase: {
            purpose: size
            for purpose, size in memory.items()
            if purpose not in own and not any(purpose in only for other, only in PHASES.items() if other != phase)
        }
        for phase in PHASES
    }
    return found | ({"sampler": own} if own else {})


def device_mebibytes(sharding: Sharding | None) -> float | None:
    """Return the memory of one of the devices that compute: an accelerator's, or a share of the machine's for a CPU.

    None where the device does not say.
    """
    device = _own_devices(sharding)[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return None if limit is None else limit / 2**20


def peak_bytes(sharding: Sharding | None) -> dict[str, int]:
    """Return the largest memory since the process began: `host_peak_bytes`, and `device_peak_bytes` of a device.

    The device is the fullest one. Devices that do not say, as CPUs, are left out.
    """
    found = {"host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in _own_devices(sharding)]
    known = [size for size in peaks if size is not None]
    return found | ({"device_peak_bytes": max(known)} if known else {})


def _own_devices(sharding: Sharding | None) -> list[jax.Device]:
    """Return the devices that compute and are of this process; others do not say what they have."""
    return [device for device in devices_of(sharding) if device.process_index == jax.process_index()]
