"""The machine: its name, its best measured rates of traffic and arithmetic, and the memory in use.

Letters: `N` sizes.
"""

import contextlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from records import Machine, MeasuredRates
from timing import forget_peak, peak_resident_bytes, seconds_of

FEWEST_ROUNDS = 5
PROBE_SECONDS = 2.0
"""Time for each rate: on a shared machine long enough to meet a moment at which the others rest."""

VARIABLES = ("XLA_FLAGS", "GLIBC_TUNABLES", "JAX_PLATFORMS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Environment variables that change speed."""

VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}
"""Names of vector instructions by the flag of a processor, the widest first."""

SIZES = {"cpu": (2**28, 2048), "gpu": (2**32, 8192), "tpu": (2**31, 8192)}
"""Bytes of the arrays that are moved, far more than caches hold, and side of the matrices, by backend."""

TINY_SIZES = (2**20, 128)


@partial(jax.jit, donate_argnums=0)
def rewritten(x: Float[Array, "N"]) -> Float[Array, "N"]:
    """Read and write every byte in place: the pages of a new buffer would cost more than the traffic."""
    return x + 1.0


@jax.jit
def matrix_vector(matrix: Float[Array, "N N"], vector: Float[Array, "N"]) -> Float[Array, "N"]:
    """Read every byte of the matrix, as a step of decoding reads the weights."""
    return matrix @ vector


@jax.jit
def product(left: Float[Array, "N N"], right: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """Multiply with `2 N^3` operations; the result is float32."""
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def measure_rates(*, tiny: bool = False) -> MeasuredRates:
    """Measure the device for two seconds per rate. `tiny` sizes are quick, and their rates mean nothing.

    Each rate is the best of several runs, because other work on the machine can only slow a run down.
    """
    array_bytes, side = TINY_SIZES if tiny else SIZES[jax.default_backend()]
    best = partial(_best, at_least_seconds=0.0 if tiny else PROBE_SECONDS)
    numbers, width = array_bytes // 4, int((array_bytes // 4) ** 0.5)

    arrays = [jnp.ones(numbers, jnp.float32)]

    def rewrite() -> Array:
        arrays.append(rewritten(arrays.pop()))
        return arrays[0]

    copy_seconds = best(rewrite)
    del arrays[:]
    matrix, vector = jnp.ones((width, width), jnp.float32), jnp.ones(width, jnp.float32)
    read_seconds = best(lambda: matrix_vector(matrix, vector))
    flops = {}
    for dtype in ("float32", "bfloat16"):
        square = jnp.ones((side, side), dtype)
        flops[dtype] = 2 * side**3 / best(partial(product, square, square))
    return MeasuredRates(
        copy_bytes=2 * 4 * numbers / copy_seconds, read_bytes=4 * width**2 / read_seconds, matmul_flops=flops
    )


def _best(job: Callable[[], Array], at_least_seconds: float) -> float:
    """Seconds of the shortest run after a first one: of `FEWEST_ROUNDS` runs, or of as many as the time allows."""

    def run() -> None:
        jax.block_until_ready(job())

    run()
    until = time.perf_counter() + at_least_seconds
    taken = [seconds_of(run) for _ in range(FEWEST_ROUNDS)]
    while time.perf_counter() < until:
        taken.append(seconds_of(run))
    return min(taken)


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    devices = jax.devices()
    return Machine(
        backend=jax.default_backend(),
        device_kind=devices[0].device_kind,
        devices=len(devices),
        cpu_name=cpu_name(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        card=card(),
    )


def card() -> str:
    """Name, driver, clocks, power and temperature of NVIDIA's cards, a line each; "" where `nvidia-smi` is not."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    done = subprocess.run(["nvidia-smi", query, "--format=csv"], capture_output=True, text=True)
    return (done.stdout or done.stderr).strip()


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the processor, its generation, which the name may hide, and its widest vectors."""
    first_core = info.read_text().partition("\n\n")[0] if info.exists() else ""
    pairs = (line.partition(":")[::2] for line in first_core.splitlines())
    fields = {name.strip(): value.strip() for name, value in pairs}
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    flags = fields.get("flags", "").split()
    widest = next((name for flag, name in VECTORS.items() if flag in flags), "neither AVX-512 nor AVX2")
    return f"{fields['model name']} (family {fields.get('cpu family')}, model {fields.get('model')}, {widest})"


@contextlib.contextmanager
def measuring_peak() -> Iterator[dict[str, float]]:
    """Fill the dict at the end of the block with the most memory that was in use, in bytes.

    `peak_host_bytes` is the resident memory of the process and `host_bytes_before` what earlier work had left of it.
    Where the backend counts memory, `peak_device_bytes` is the most since the start of the process, and
    `peak_device_bytes_before` what earlier work has needed.
    """
    forget_peak()
    peak = {"peak_host_bytes": 0.0, "host_bytes_before": float(peak_resident_bytes())}
    before = jax.local_devices()[0].memory_stats()
    yield peak
    peak["peak_host_bytes"] = float(peak_resident_bytes())
    if before and (stats := jax.local_devices()[0].memory_stats()):
        peak["peak_device_bytes_before"] = float(before["peak_bytes_in_use"])
        peak["peak_device_bytes"] = float(stats["peak_bytes_in_use"])


def live_device_bytes() -> int:
    """Bytes of all arrays that are alive now."""
    return sum(array.nbytes for array in jax.live_arrays())


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays of a pytree, or of those that it describes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
