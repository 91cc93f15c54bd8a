"""Accelerators to plan for: their limits, and their names as in `h200x1`, `v5e-8`.

Their limits are those of `jaxft.models.ceilings`. No program gets all of them, so times computed from them are lower
bounds.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import NamedTuple

from jaxft.models import CHIPS, Chip

CORES = {"v5p": 2}
"""TensorCores of a chip that are one jax device; the makers' names, such as v5p-16, count these."""

CHIPS_PER_HOST = {"v5e": 8, "v6e": 8, "v5p": 4, "a100": 8, "h100": 8, "h200": 8}
"""Largest number of chips in one host, and so in one process of jaxft."""

CHIPS_PER_HOST_OF_SLICES = {"v5e": 4, "v6e": 4, "v5p": 4}
"""The same in slices of TPUs that have several hosts."""

TOPOLOGIES = {
    "v5e": {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "v6e": {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "v5p": {
        **{4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"},
        **{512: "8x8x8", 1024: "8x8x16"},
    },
}
"""Shapes of TPU slices by number of chips; a single chip is compiled for as one of four."""

SIZES_OF_GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

GPU_DEVICE = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
  shared_memory_per_block_optin: {optin} cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""
"""Description of a GPU that XLA compiles for, as its `GpuTargetConfigProto` in text."""

HOPPER = {"shared": 233472, "cores": 132, "fpus": 128, "l2": 52428800, "clock": 1.98, "optin": 232448, "major": 9}
AMPERE = {"shared": 167936, "cores": 108, "fpus": 64, "l2": 41943040, "clock": 1.41, "optin": 166912, "major": 8}


class PlannedDevice(NamedTuple):
    """The attributes of a jax device that decide about kernels."""

    platform: str
    device_kind: str
    compute_capability: str  # of a GPU, such as "9.0"; "" of a TPU


class Target(NamedTuple):
    """A number of equal chips: of a host, of a slice of a TPU pod, or of several hosts with GPUs."""

    name: str
    kind: str
    chips: int

    @property
    def chip(self) -> Chip:
        """One of the chips."""
        return CHIPS[self.kind]

    @property
    def device(self) -> PlannedDevice:
        """One of the devices, to choose kernels for."""
        capability = {"a100": "8.0", "h100": "9.0", "h200": "9.0"}.get(self.kind, "")
        return PlannedDevice(self.chip.platform, self.chip.name, capability)

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        if self.chips <= CHIPS_PER_HOST[self.kind]:
            return 1
        return -(-self.chips // CHIPS_PER_HOST_OF_SLICES.get(self.kind, CHIPS_PER_HOST[self.kind]))

    @property
    def topology(self) -> str:
        """The name by which the compiler knows it, such as `v5e:2x4`; for GPUs `1x1x8`."""
        if self.chip.platform == "gpu":
            return f"1x{self.hosts}x{self.chips // self.hosts}"
        return f"{self.kind}:{TOPOLOGIES[self.kind][self.chips]}"

    @property
    def gpu_description(self) -> str:
        """The description of a GPU to compile for."""
        generation = AMPERE if self.kind == "a100" else HOPPER
        return GPU_DEVICE.format(
            name=self.chip.name, memory=self.chip.memory_bytes, bandwidth=int(self.chip.bytes_per_second), **generation
        )


def _all_targets() -> Iterator[Target]:
    for kind, chip in CHIPS.items():
        for chips in SIZES_OF_GPUS if chip.platform == "gpu" else TOPOLOGIES[kind]:
            count = f"x{chips}" if chip.platform == "gpu" else f"-{chips * CORES.get(kind, 1)}"
            yield Target(kind + count, kind, chips)


TARGETS = {target.name: target for target in _all_targets()}
"""Targets by name."""


def find_target(name: str) -> Target:
    """Return the target of a name such as `h200x1` (GPUs) or `v5e-8` (TPUs; of v5p the number of TensorCores).

    Raises:
        ValueError: there is no such target; the message has the nearest one, and the ranges of all.

    >>> find_target("v5p-16").topology, find_target("h100x8").topology, find_target("v5e-16").hosts
    ('v5p:2x2x2', '1x1x8', 4)
    """
    if name not in TARGETS:
        names = [[each.name for each in TARGETS.values() if each.kind == kind] for kind in CHIPS]
        ranges = ", ".join(f"{same[0]} to {same[-1]}" for same in names)
        near = get_close_matches(name, TARGETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"target is {name!r}; wanted one of {len(TARGETS)}: {ranges}{hint}")
    return TARGETS[name]
