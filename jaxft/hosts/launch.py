"""`jaxft launch -n 2 COMMAND`: starts a command as several processes of one run, on this machine.

Each line of their output begins with the number of the process. The first process that fails ends the others, and a
signal to the launcher goes to all.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from jaxft.errors import HostsError
from jaxft.hosts.start import LAUNCHER, QUIET, VARIABLES

GRACE_SECONDS = 30.0
"""Time that processes have to end by themselves after one of them has failed."""

OUTPUT_SECONDS = 2.0
"""Time for the last output of processes that have ended; what they have started may hold it open."""

START = """\
import ctypes, os, signal, sys
parent, cores, program = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: outlasts exec
if os.getppid() != parent:
    sys.exit("the process that started this one has ended")
if cores:
    os.sched_setaffinity(0, map(int, cores.split(",")))
os.execvp(program[0], program)
"""
"""Program that becomes another one, on the cores given, which then does not outlive this process.

No `preexec_fn`, which is unsafe beside threads.
"""

GLOO = b"[Gloo] Rank "
"""Beginning of the lines in which the library of collectives on CPUs says that all are connected."""

DIVIDED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def launch(command: Sequence[str], num_processes: int) -> int:
    """Run a command as so many processes, and return the exit code: 0, or that of the first process that failed.

    Raises:
        HostsError: the command is not found, or the devices of this machine do not divide over the processes.
    """
    if num_processes < 1:
        raise HostsError(f"-n is {num_processes}; wanted at least 1")
    if not command or shutil.which(command[0]) is None:
        raise HostsError(f"{command[0]!r} is no command here" if command else "there is no command to start")
    environments = process_environments(num_processes, os.environ)
    every = sorted(os.sched_getaffinity(0))
    has_gpus = bool(environments[0].get("CUDA_VISIBLE_DEVICES"))
    cores = [every] * num_processes if has_gpus else divide_cores(num_processes, every)
    processes: list[subprocess.Popen[bytes]] = []
    printing: list[threading.Thread] = []

    def pass_on(number: int, frame: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for index, (environment, own) in enumerate(zip(environments, cores, strict=True)):
            # In a group of its own: a terminal's Ctrl-C reaches it through this process alone, and so once.
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-c", START, str(os.getpid()), ",".join(map(str, own)), *command],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    process_group=0,
                )
            )
            printing.append(threading.Thread(target=_print_lines, args=(index, processes[-1].stdout), daemon=True))
            printing[-1].start()
        code = _wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                _kill(process)
        for number, handler in before.items():
            signal.signal(number, handler)
    for thread in printing:
        thread.join(OUTPUT_SECONDS)
    return code


def process_environments(num_processes: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of each process: where the others are, and its part of the machine's devices.

    Raises:
        HostsError: the devices do not divide over the processes.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = dict(environment) | {
        VARIABLES["coordinator"]: f"127.0.0.1:{port}",
        VARIABLES["num_processes"]: str(num_processes),
        "PYTHONUNBUFFERED": "1",
        QUIET: environment.get(QUIET, "4"),
        LAUNCHER: f"jaxft launch -n {num_processes} ",
    }
    found = DIVIDED.search(environment.get("XLA_FLAGS", ""))
    if found is not None:
        each = _share(int(found[1]), num_processes, "CPU devices of XLA_FLAGS")
        shared["XLA_FLAGS"] = DIVIDED.sub(f"--xla_force_host_platform_device_count={each}", environment["XLA_FLAGS"])
    gpus = _gpus(environment)
    size = _share(len(gpus), num_processes, "GPUs", "; JAX_PLATFORMS=cpu tries it without them") if gpus else 0
    return [
        shared
        | {VARIABLES["process_id"]: str(index)}
        | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * size : (index + 1) * size])} if gpus else {})
        for index in range(num_processes)
    ]


def _share(devices: int, num_processes: int, what: str, hint: str = "") -> int:
    if devices % num_processes:
        raise HostsError(f"{devices} {what} do not divide over {num_processes} processes{hint}")
    return devices // num_processes


def _gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process may use, as CUDA names them."""
    if environment.get("JAX_PLATFORMS", "") == "cpu":
        return []
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [name for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [str(index) for index, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]


def divide_cores(num_processes: int, cores: Sequence[int]) -> list[Sequence[int]]:
    """Return the cores of each process: equal parts, or all for each where there are fewer than processes.

    >>> divide_cores(2, [0, 1, 2, 3, 4])
    [[0, 1], [2, 3]]
    """
    each = len(cores) // num_processes
    return [cores[index * each : (index + 1) * each] if each else cores for index in range(num_processes)]


def _print_lines(index: int, output: IO[bytes] | None) -> None:
    assert output is not None
    for line in iter(output.readline, b""):
        if line.startswith(GLOO):
            continue
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more, as behind `head`; the run goes on
            print(f"[{index}] {line.decode(errors='replace').rstrip()}", flush=True)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait for all processes; if one fails, the others get some seconds to end, then a signal, then none."""
    code, deadline, is_told = 0, None, False
    while None in (codes := [process.poll() for process in processes]):
        failed = [each for each in codes if each]
        if failed and deadline is None:
            code, deadline = failed[0], time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            for process in processes:
                if process.poll() is None:
                    _kill(process) if is_told else process.terminate()
            is_told, deadline = True, time.monotonic() + GRACE_SECONDS
        time.sleep(0.1)
    failed = [process.returncode for process in processes if process.returncode != 0]
    code = code or next(iter(failed), 0)
    return 128 - code if code < 0 else code
