"""Faults on order: processes killed at a named point or at any moment, damaged files, a disk that is full.

    python tests/faults/injection.py update:2 -m jaxft.cli finetune --config-file tests/faults/grpo.yml

runs the command and kills it, with SIGKILL, when the point `update` is reached for the third time; `1/update:2` does so
in process 1 of several. What the points are is `KILL_POINTS`; more are one line each. Nothing in the package knows of
them: functions are wrapped from outside.
"""

import contextlib
import functools
import importlib
import os
import random
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class KillPoint(NamedTuple):
    """A function, and whether the process dies before or after its body."""

    module: str
    name: str
    is_after: bool = False


KILL_POINTS = {
    "during a save": KillPoint("jaxft.runs.checkpoint", "Checkpoints.save", is_after=True),
    "update": KillPoint("jaxft.core.update", "Update.__call__"),
    "between arrays and manifest": KillPoint("jaxft.runs.checkpoint", "write_manifest"),
    "rollout": KillPoint("jaxft.rollout.model_runner", "ModelRunner.advance"),
    "before a save": KillPoint("jaxft.runs.checkpoint", "Checkpoints.save"),
    "after the update": KillPoint("jaxft.training.learner", "Learner.learn", is_after=True),
    "half of the logs": KillPoint("jaxft.runs.directory", "RunDirectory.append_jsonl", is_after=True),
    "after the manifest": KillPoint("jaxft.runs.checkpoint", "write_manifest", is_after=True),
    "evaluators": KillPoint("jaxft.harness.evaluation", "run_evaluators"),
    "while old steps go": KillPoint("shutil", "rmtree", is_after=True),
    "during the export": KillPoint("jaxft.models.hf", "write_manifest"),
}


def owner_of(point: KillPoint) -> tuple[Any, str]:
    """The module or class that holds the point's function, and its name there."""
    owner: Any = importlib.import_module(point.module)
    *parents, name = point.name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def call_at(point: KillPoint, count: int, action: Callable[[], Any]) -> None:
    """Wraps the point's function so that `action` is called when it is reached for the `count`-th time, from 0."""
    owner, name = owner_of(point)
    function, reached = getattr(owner, name), [0]

    @functools.wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        is_now, reached[0] = reached[0] == count, reached[0] + 1
        if is_now and not point.is_after:
            action()
        result = function(*arguments, **options)
        if is_now and point.is_after:
            action()
        return result

    setattr(owner, name, wrapped)


def kill_at(point: str, count: int = 0) -> None:
    """Makes this process die at a point of `KILL_POINTS`."""
    call_at(KILL_POINTS[point], count, lambda: os.kill(os.getpid(), signal.SIGKILL))


def start(arguments: Sequence[str], *, at: str | None = None, log: Path | None = None, **options: Any) -> Any:
    """A process that runs `python ARGUMENTS`, to die at a point such as `update:2` when one is given."""
    injected = [] if at is None else [str(Path(__file__)), at]
    output: Any = subprocess.DEVNULL if log is None else log.open("ab")
    with contextlib.nullcontext() if log is None else output:
        return subprocess.Popen(
            [sys.executable, *injected, *arguments], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, **options
        )


def run(arguments: Sequence[str], *, at: str | None = None, log: Path | None = None, **options: Any) -> int:
    """The exit code of that process; -9 when it was killed."""
    return start(arguments, at=at, log=log, **options).wait()


def kill_after(process: "subprocess.Popen[bytes]", seconds: float, number: int = signal.SIGKILL) -> int:
    """Sends a signal after a time, unless the process has ended; its exit code."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if process.poll() is None:
        process.send_signal(number)
    return process.wait()


def flip_bit(file: Path, draw: random.Random) -> int:
    """Flips one bit of a file, somewhere; which one."""
    content = bytearray(file.read_bytes())
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return bit


def damages(draw: random.Random) -> dict[str, Callable[[Path], Any]]:
    """Ways to spoil a file, by name."""
    return {
        "flipped bit": lambda file: flip_bit(file, draw),
        "truncated": lambda file: os.truncate(file, draw.randrange(file.stat().st_size)),
        "emptied": lambda file: os.truncate(file, 0),
        "deleted": lambda file: file.unlink(),
    }


@contextlib.contextmanager
def limited_file_size(size_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond this within the block; writing more is an error, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Any:
    """A tmpfs of this size at a folder; yields whether it could be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    is_mounted = mount is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True)


if __name__ == "__main__":
    where, _, number = sys.argv[1].partition(":")
    process, _, where = where.rpartition("/")
    if process in ("", os.environ.get("JAXFT_PROCESS_ID")):
        kill_at(where, int(number or 0))
    sys.argv = sys.argv[2:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
