"""The processes of a sweep: each run is one, with its share of the machine and its output in a log file.

A run is in a session of its own, so that Ctrl-C reaches the sweep alone, which stops the runs. Linux kills a run when
the sweep is no more, however that ended.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from jaxft.errors import ConfigError
from jaxft.harness.signals import current_shutdown
from jaxft.hosts.launch import START
from jaxft.report.sweep_state import SweepRun
from jaxft.runs.files import METRICS_FILE

TAIL_BYTES = 8192

HEADING = "=== "
"""Beginning of the line in a log before the output of each process of the run."""

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
"""Packages that let jax use GPUs."""

SHARING = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Variables by which users let several processes share the memory of a GPU, most of which jax takes otherwise."""


class Share(NamedTuple):
    """The part of the machine for one run at a time: its CPUs (empty: those of the sweep) and environment variables."""

    cpus: tuple[int, ...]
    variables: dict[str, str]

    @property
    def num_cpus(self) -> int | None:
        """Number of CPUs that it computes with, on which the last bits of its numbers depend; None with a GPU."""
        return len(self.cpus) or (1 if "NPROC" in self.variables else None)


@dataclass
class Job:
    """A run whose process is running."""

    run: SweepRun
    share: Share
    process: asyncio.subprocess.Process
    started: float
    began_at: float

    @property
    def seconds(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self.started


def divide_machine(jobs: int, gpus: Sequence[str], cpus: Sequence[int]) -> list[Share]:
    """Return one share of the machine for each of `jobs` runs at once; a single run has all of it.

    With GPUs each share has as many as the others, and all CPUs; without, each has CPUs of its own. More jobs than CPUs
    compute with one thread each.

    >>> [share.cpus for share in divide_machine(2, [], [0, 1, 2, 3, 4])]
    [(0, 1), (2, 3)]
    >>> [share.variables for share in divide_machine(2, ["0", "1", "2", "3"], [0])]
    [{'CUDA_VISIBLE_DEVICES': '0,1'}, {'CUDA_VISIBLE_DEVICES': '2,3'}]

    Raises:
        ConfigError: there are more jobs than GPUs, each of which one process takes.
    """
    if jobs == 1:
        return [Share(() if gpus else tuple(cpus), {})]
    if gpus:
        if jobs > len(gpus) and not any(name in os.environ for name in SHARING):
            number = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
            raise ConfigError(
                [f"--jobs {jobs}: there is {number}, and jax takes the memory of each for one process: give --jobs "
                 f"{len(gpus)}, or set {SHARING[1]} to the fraction that one run may take"]
            )  # fmt: skip
        each = max(len(gpus) // jobs, 1)
        parts = [[gpus[(job * each + i) % len(gpus)] for i in range(each)] for job in range(jobs)]
        return [Share((), {"CUDA_VISIBLE_DEVICES": ",".join(part)}) for part in parts]
    each = len(cpus) // jobs
    if each == 0:
        return [Share((), {"NPROC": "1", "OMP_NUM_THREADS": "1"})] * jobs
    return [Share(tuple(cpus[job * each : (job + 1) * each]), {}) for job in range(jobs)]


def visible_gpus() -> list[str]:
    """Return the ids of the GPUs that jax would use in a new process, without starting it; none without its plugin."""
    platforms = os.environ.get("JAX_PLATFORMS") or "cuda"
    if not any(_is_installed(plugin) for plugin in PLUGINS) or not {"cuda", "gpu"} & {*platforms.split(",")}:
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device.strip() for device in chosen.split(",") if device.strip() not in ("", "-1")]
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


async def run_jobs(
    runs: Sequence[SweepRun],
    shares: Sequence[Share],
    show: Callable[[list[Job]], None],
    on_change: Callable[[SweepRun], None],
    *,
    fail_fast: bool = False,
) -> None:
    """Start every run when a share is free, and wait for all of them; `state` of each says how it ended.

    A signal to this process stops the runs, each of which saves itself; those that have not begun stay `waiting`.

    Args:
        runs: the runs, in the order in which they start.
        shares: one for each run at a time.
        show: called with the jobs that run now, whenever they change.
        on_change: called when a run has begun and when it has ended.
        fail_fast: True to stop all runs after the first that fails.
    """
    queue, free = deque(runs), deque(shares)
    jobs: dict[asyncio.Task[int], Job] = {}
    shutdown = current_shutdown()
    with contextlib.ExitStack() as stack:
        signalled = asyncio.Event() if shutdown is None else stack.enter_context(shutdown.listening())
        stopping = asyncio.create_task(signalled.wait())
        is_stopping = False
        try:
            while jobs or (queue and not is_stopping):
                while queue and free and not is_stopping:
                    job = await _start(queue.popleft(), free.popleft())
                    jobs[asyncio.create_task(job.process.wait())] = job
                    on_change(job.run)
                show(list(jobs.values()))
                watched = [*jobs, *(() if is_stopping else (stopping,))]
                ended, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                for task in ended & jobs.keys():
                    job = jobs.pop(task)
                    free.append(job.share)
                    _end(job, task.result(), is_stopping=is_stopping or stopping.done())
                    show(list(jobs.values()))
                    on_change(job.run)
                has_failed = fail_fast and any(run.state == "failed" for run in runs)
                if not is_stopping and (stopping.done() or has_failed):
                    is_stopping = True
                    for job in jobs.values():
                        with contextlib.suppress(ProcessLookupError):
                            job.process.terminate()
        finally:
            stopping.cancel()
            for job in jobs.values():
                with contextlib.suppress(ProcessLookupError):
                    job.process.kill()
            await asyncio.gather(*jobs, return_exceptions=True)


async def _start(run: SweepRun, share: Share) -> Job:
    run.log.parent.mkdir(parents=True, exist_ok=True)
    arguments, run.started_by = run.arguments(), run.shown()
    start = [sys.executable, "-c", START, str(os.getpid()), ",".join(map(str, share.cpus)), *arguments]
    with run.log.open("ab") as log:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        log.write(f"{HEADING}{when} {run.started_by}\n".encode("utf-8", "backslashreplace"))
        log.flush()
        process = await asyncio.create_subprocess_exec(
            *start,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **share.variables},
        )
    run.state, run.exit_code, run.num_cpus = "running", None, share.num_cpus
    return Job(run, share, process, time.perf_counter(), time.time())


def _end(job: Job, code: int, *, is_stopping: bool) -> None:
    job.run.seconds += job.seconds
    job.run.exit_code = code
    job.run.state = "done" if code == 0 else "interrupted" if is_stopping else "failed"


def ending_of(code: int) -> str:
    """Return an exit code in words, a signal by its name.

    >>> ending_of(2), ending_of(-9)
    ('exit code 2', 'SIGKILL')
    """
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def progress_of(run: SweepRun, since: float = 0.0) -> str:
    """Return how far a run has come, as `epoch 3/20, reward 0.8125`; empty before its first epoch.

    Args:
        run: the run.
        since: time of day; the metrics of an earlier start, which were written before it, do not count.
    """
    row = _last_row(run.directory / METRICS_FILE, since)
    if row is None:
        return ""
    reward = row.get("reward_mean")
    epochs = f"epoch {row['epoch'] + 1}/{run.num_epochs}" if isinstance(row.get("epoch"), int) else ""
    rewards = f"reward {reward:.4g}" if isinstance(reward, float) else ""
    return ", ".join(filter(None, (epochs, rewards)))


def _last_row(file: Path, since: float) -> Mapping[str, Any] | None:
    """Return the last whole line of a log; None if there is none."""
    try:
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_mtime < since:
                return None
            stream.seek(max(0, status.st_size - TAIL_BYTES))
            lines = stream.read().split(b"\n")[:-1]
        row = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError):  # not there yet, or a line that is longer than what was read
        return None
    return row if isinstance(row, dict) else None


def last_lines(file: Path, count: int = 8) -> list[str]:
    """Return the last lines that the last process of a run wrote to its log, without empty ones."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    begins = max((number for number, line in enumerate(lines, start=1) if line.startswith(HEADING)), default=0)
    return lines[begins:][-count:]


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
