"""Seconds and bytes of what runs: in turn, a warm-up first, and the peak of just that."""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import jax

CLEAR_PEAK = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


def seconds_of(job: Callable[[], object]) -> float:
    """How long a job takes until its arrays are there."""
    started = time.perf_counter()
    jax.block_until_ready(job())
    return time.perf_counter() - started


def in_turn(jobs: Mapping[str, Callable[[int], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each job, all jobs in every round: a machine that drifts drifts for all of them.

    Args:
        jobs: told the number of the round. Round 0 warms up and is not timed.
        repeats: number of rounds after that.
    """
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(repeats + 1):
        for name, job in jobs.items():
            taken = seconds_of(partial(job, number))
            if number:
                seconds[name].append(taken)
    return seconds


class Peak:
    """The most memory that was in use in a `measuring_peak` block, known at its end.

    Attributes:
        host_bytes: resident memory of the process.
        before_bytes: of that, what was resident when the block began: what ran before leaves memory behind.
        device_bytes: of the device since the process began, where the backend counts it; else None.
    """

    host_bytes: int = 0
    before_bytes: int = 0
    device_bytes: int | None = None

    def figures(self) -> dict[str, float]:
        """Both by name, for a report."""
        found = {"peak_host_bytes": float(self.host_bytes), "host_bytes_before": float(self.before_bytes)}
        return found if self.device_bytes is None else found | {"peak_device_bytes": float(self.device_bytes)}


@contextlib.contextmanager
def measuring_peak() -> Iterator[Peak]:
    """Measures the peak of a block. Linux forgets the peak of earlier work; elsewhere it is that of the process."""
    with contextlib.suppress(OSError):
        CLEAR_PEAK.write_text("5")
    peak = Peak()
    peak.before_bytes = _peak_resident_bytes()
    yield peak
    peak.host_bytes = _peak_resident_bytes()
    stats = jax.local_devices()[0].memory_stats()
    peak.device_bytes = stats["peak_bytes_in_use"] if stats else None


def _peak_resident_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def live_device_bytes() -> int:
    """Bytes of all arrays that are alive now."""
    return sum(array.nbytes for array in jax.live_arrays())
