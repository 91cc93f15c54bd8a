"""What this device can do at best: bytes moved and operations made in a second, measured.

Each figure is the best of several runs, for other work on the machine can only take away. Letters: `N` sizes.
"""

import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxft.bench.results import Machine, MeasuredRates
from jaxft.bench.timing import seconds_of

FEWEST_ROUNDS = 5
PROBE_SECONDS = 2.0
"""Of each figure: on a shared machine long enough to meet a moment at which the others rest."""

RUN_BY = ("XLA_FLAGS", "GLIBC_TUNABLES", "JAX_PLATFORMS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables of the environment that change how fast things are."""

SIZES = {"cpu": (2**28, 2048), "gpu": (2**32, 8192), "tpu": (2**31, 8192)}
"""By backend: bytes of the arrays that are moved, far more than caches hold, and side of the matrices."""

TINY_SIZES = (2**20, 128)


@partial(jax.jit, donate_argnums=0)
def rewritten(x: Float[Array, "N"]) -> Float[Array, "N"]:
    """Reads and writes every byte, in place: the pages of a new buffer would cost more than the traffic."""
    return x + 1.0


@jax.jit
def matrix_vector(matrix: Float[Array, "N N"], vector: Float[Array, "N"]) -> Float[Array, "N"]:
    """Reads every byte of the matrix, as a step of decoding reads the weights."""
    return matrix @ vector


@jax.jit
def product(left: Float[Array, "N N"], right: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """`2 N^3` operations; the result is float32."""
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def measure_rates(*, tiny: bool = False) -> MeasuredRates:
    """Measures the device, two seconds for each figure. `tiny` sizes are quick, and say nothing of it."""
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
    """The shortest of at least `FEWEST_ROUNDS` runs after a first, and of as many as the seconds allow."""
    job()
    until = time.perf_counter() + at_least_seconds
    taken = [seconds_of(job) for _ in range(FEWEST_ROUNDS)]
    while time.perf_counter() < until:
        taken.append(seconds_of(job))
    return min(taken)


def this_machine() -> Machine:
    """The machine that this runs on."""
    devices = jax.devices()
    return Machine(
        backend=jax.default_backend(),
        device_kind=devices[0].device_kind,
        devices=len(devices),
        cpu_name=_cpu_name(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        variables={name: os.environ[name] for name in RUN_BY if name in os.environ},
    )


def _cpu_name() -> str:
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
