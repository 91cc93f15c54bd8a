"""Seconds of jobs and peak memory of the process. Imports no jax, so every side of a comparison measures with it."""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

CLEAR_PEAK = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


def seconds_of(job: Callable[[], object]) -> float:
    """Seconds of one call of a job, which must return only when all that it computes is there."""
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def in_turn(jobs: Mapping[str, Callable[[int], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each job. Every round runs all jobs, so a machine that drifts drifts for all of them.

    Args:
        jobs: called with the number of the round; see `seconds_of`. Round 0 warms up (and compiles) and is not timed.
        repeats: number of timed rounds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(repeats + 1):
        for name, job in jobs.items():
            taken = seconds_of(partial(job, number))
            if number:
                seconds[name].append(taken)
    return seconds


def resident_bytes() -> int:
    """Memory of this process that is resident now; the peak where the system has no `/proc`."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Most memory of this process that was resident, since `forget_peak` or since it began."""
    return _status_bytes("VmHWM")


def forget_peak() -> None:
    """Start the peak anew from what is resident now. Only Linux can; elsewhere the peak stays that of the process."""
    with contextlib.suppress(OSError):
        CLEAR_PEAK.write_text("5")


def _status_bytes(name: str) -> int:
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
