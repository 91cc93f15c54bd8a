"""The processes of workers: how the standard library's forkserver makes them, and how they end with all they started.

The forkserver imports this module first: then it imports the user's modules, once for all workers. It never runs
agents, makes no threads and touches no device, so that forking it is safe. Each of its children is a guardian, which
forks one worker and becomes the parent of whatever the worker leaves behind. When the worker ends, or the run goes
away, the guardian kills all that is left.
"""

import contextlib
import ctypes
import json
import os
import pkgutil
import resource
import signal
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from gc import freeze
from multiprocessing import Pipe, current_process, forkserver, get_context, parent_process, spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from jaxft.harness.registry import import_installed, import_module

PR_SET_CHILD_SUBREAPER = 36
"""Number of the option of Linux's `prctl` that makes orphans of a process's descendants its own children."""

PRELOAD = "JAXFT_PRELOAD"
"""Environment variable that tells a forkserver, once, what it imports before it forks workers."""

OUT_OF_MEMORY = 71
"""Exit code of a worker that has no memory left."""

SIGNALLED = 128
"""Exit code of the guardian of a worker that a signal ended, less the signal's number, as shells have it."""

TRACE_SECONDS = 1
"""Time that a worker has to write where it is before it is killed."""

_lock = threading.Lock()
"""Held while processes are started and their exit codes read, for which multiprocessing has no lock."""


class WorkerProcess(NamedTuple):
    """The process of a worker's guardian, which has the worker's exit code, and the run's ends of what they share.

    Attributes:
        process: the guardian.
        connection: the connection to the worker.
        output: what the worker prints.
    """

    process: Any
    connection: socket.socket
    output: Connection

    def kill(self) -> None:
        """Let the guardian kill the worker, and what it started; this may take a moment."""
        with contextlib.suppress(ValueError):  # it is closed
            self.process.terminate()

    def exit_code(self, seconds: float | None) -> int | None:
        """Return the exit code; None if the process runs for longer than `seconds`."""
        wait([self.process.sentinel], seconds)
        with _lock:
            return self.process.exitcode


def start_worker(imports: Sequence[str], *arguments: Any) -> WorkerProcess:
    """Start a worker, the first of which takes seconds.

    Args:
        imports: modules that register the user's components.
        arguments: further arguments of `jaxft.harness.worker.work`.
    """
    preparation = {name: value for name, value in spawn.get_preparation_data("").items() if name != "authkey"}
    connection, its_connection = socket.socketpair()
    output, its_output = Pipe(duplex=False)
    context = get_context("forkserver")
    arguments = (its_connection, its_output, imports, *arguments)
    process = context.Process(target=_guard_worker, args=arguments, daemon=True)
    with _lock, its_connection, its_output:
        os.environ[PRELOAD] = json.dumps([os.getpid(), preparation, imports])
        try:
            context.set_forkserver_preload([__name__])
            forkserver.ensure_running()
        finally:
            del os.environ[PRELOAD]
        process.start()
    return WorkerProcess(process, connection, output)


def _preload(preparation: dict[str, Any], imports: Sequence[str]) -> None:
    """Prepare this process, a forkserver, for its workers; these report what cannot be imported here."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # agents get no accelerator: the run has it
    os.setsid()  # Ctrl-C is for the run
    # Or a main script whose program is not guarded would run it here.
    vars(current_process())["_inheriting"] = True
    steps: list[Any] = [(spawn.prepare, preparation), (import_installed,), *((import_module, name) for name in imports)]
    for function, *arguments in [*steps, (__import__, "jaxft.harness.worker"), (__import__, "openai")]:
        with contextlib.suppress(Exception, SystemExit):
            function(*arguments)
    freeze()  # a collection in a worker would copy the pages of all that was imported


def _guard_worker(connection: socket.socket, output: Connection, *arguments: Any) -> None:
    """Fork a worker, wait for its end, and end this process with its exit code after all that it started."""
    worker = 0

    def kill(*_: object) -> None:
        kill_descendants()

    def ask(*_: object) -> None:
        """Kill the worker, after it has written where it is."""
        if worker:
            os.kill(worker, signal.SIGUSR1)
        signal.alarm(TRACE_SECONDS)

    def outlive_run() -> None:
        run: Any = parent_process()
        wait([run.sentinel])
        os.kill(os.getpid(), signal.SIGALRM)

    adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGALRM, kill)
    worker = os.fork()
    if worker == 0:
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        _be_worker(connection, output, *arguments)
    connection.close()
    threading.Thread(target=outlive_run, daemon=True).start()
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    ended, worker = worker, 0  # before its id is given away, which `ask` may be about to use
    code = os.waitstatus_to_exitcode(os.waitpid(ended, 0)[1])
    kill_descendants()
    os._exit(code if code >= 0 else SIGNALLED - code)


def _be_worker(connection: socket.socket, output: Connection, *arguments: Any) -> None:
    """Be a worker, and end the process."""
    code = 1
    try:
        adopt_orphans()
        os.setsid()  # a signal to all of its process group is for what it started
        process: Any = current_process()
        process._config["daemon"] = False  # or agents could start no processes by multiprocessing
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        pkgutil.resolve_name("jaxft.harness.worker:work")(connection, *arguments)
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def adopt_orphans() -> None:
    """Make processes whose parents end, descendants of this one, its children, so that none of them gets lost."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def limit_memory(more_bytes: int) -> None:
    """Let this process take so much private writable memory more than it has."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(status["VmData"].split()[0]) * 1024 + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def descendants(pid: int) -> dict[int, str]:
    """Return the names of the running descendants of a process, by process id."""
    found: dict[int, str] = {}
    left = [pid]
    while left:
        each = left.pop()
        with contextlib.suppress(OSError):  # it has ended
            if each != pid:
                name, _, status = Path(f"/proc/{each}/stat").read_text().rpartition(")")
                if status.split()[0] not in ("Z", "X"):
                    found[each] = name.partition("(")[2]
            for thread in os.listdir(f"/proc/{each}/task"):
                with open(f"/proc/{each}/task/{thread}/children") as children:
                    left += map(int, children.read().split())
    return found


def kill_descendants() -> None:
    """Kill the descendants of this process until there are none, as orphans are found when their parents have ended."""
    for _ in range(200):
        found = descendants(os.getpid())
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that they start no others meanwhile
            for pid in found:
                with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                    os.kill(pid, number)
        if not found:
            return
        time.sleep(0.005)


if PRELOAD in os.environ:
    _run, *_steps = json.loads(os.environ.pop(PRELOAD))
    if _run == os.getppid():
        _preload(*_steps)
