"""The processes of workers: how the standard library's forkserver makes them, and how they end with all they started.

The forkserver imports this module first: then it imports the user's modules, once for all workers, and becomes the
parent of whatever a worker leaves behind. It never runs agents, makes no threads and touches no device, so that forking
it is safe. When the run goes away, it ends all workers.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import pkgutil
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from multiprocessing import current_process, forkserver, get_context, spawn
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from jaxft.harness.registry import import_installed, import_module

PR_SET_CHILD_SUBREAPER = 36
"""Number of the option of Linux's `prctl` that makes orphans of a process's descendants its own children."""

PRELOAD = "JAXFT_PRELOAD"
"""Environment variable that tells a forkserver, once, what it imports before it forks workers."""

BROKEN = 70
"""Exit code of a worker that cannot go on, as after an agent has closed its files; sysexits.h calls it EX_SOFTWARE."""

OUT_OF_MEMORY = 71
"""Exit code of a worker that has no memory left even for a message about that."""

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Words in the command lines of Python's own helpers, which live as long as the process that started them."""

_server: Any = forkserver._forkserver
_lock = threading.Lock()
_workers: set[int | None] = set()
"""Process ids of the workers of this run; no orphans are looked for while one is started."""


def start_worker(imports: Sequence[str], arguments: tuple[Any, ...], files: Sequence[Any]) -> tuple[BaseProcess, int]:
    """Start a worker, the first of which takes seconds; return it and the process id of the forkserver.

    Args:
        imports: modules that register the user's components.
        arguments: arguments of `jaxft.harness.worker.work`.
        files: its ends of its connection, and of the pipes for its output and its traces.
    """
    main = vars(sys.modules["__main__"])
    if "__file__" in main and not Path(main["__file__"]).is_file():  # Python reads the program from standard input
        del main["__file__"]
    context = get_context("forkserver")
    process = context.Process(target=_be_worker, args=(arguments, *files), daemon=True)
    preparation = {name: value for name, value in spawn.get_preparation_data("").items() if name != "authkey"}
    with _lock:
        os.environ[PRELOAD] = json.dumps([os.getpid(), preparation, imports])
        try:
            context.set_forkserver_preload([__name__])
            forkserver.ensure_running()
        finally:
            del os.environ[PRELOAD]
        process.start()
        _workers.add(process.pid)
    return process, _server._forkserver_pid


def kill_left_behind(worker: int | None, server: int) -> None:
    """Kill what a worker that has ended left to the forkserver: children of another session that are no workers."""
    with _lock:
        _workers.discard(worker)
        kill_all(
            lambda: [pid for pid in set(children(server)) - _workers if _process_session(pid) not in (server, None)]
        )


def kill_worker(pid: int) -> None:
    """Kill a worker with all processes that it started."""
    kill_all(lambda: [pid, *descendants(pid)] if is_running(pid) else [])


def _process_session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended
        return None


def _preload(run: int, preparation: dict[str, Any], imports: Sequence[str]) -> None:
    """Prepare this process, a forkserver, for its workers; these report what cannot be imported here."""
    if os.getppid() != run:
        return
    os.environ["JAX_PLATFORMS"] = "cpu"  # agents get no accelerator: the run has it
    os.setsid()  # Ctrl-C is for the run
    adopt_orphans()
    warnings.filterwarnings("ignore", "forkserver: waitpid")  # about orphans
    atexit.register(kill_all, partial(descendants, os.getpid()))
    _quietly(_import_main, preparation)
    _quietly(import_installed)
    for name in imports:
        _quietly(import_module, name)
    for name in ("jaxft.harness.worker", "openai"):
        _quietly(__import__, name)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages of all that was imported


def _quietly(function: Callable[..., Any], *arguments: Any) -> None:
    with contextlib.suppress(Exception, SystemExit):
        function(*arguments)


def _import_main(preparation: dict[str, Any]) -> None:
    """Import the main script; one whose program is not guarded, and makes workers, gets the error of Python."""
    process: Any = current_process()
    process._inheriting = True
    try:
        spawn.prepare(preparation)
    finally:
        del process._inheriting


def _be_worker(arguments: tuple[Any, ...], connection: socket.socket, output: Connection, trace: Connection) -> None:
    """Be a worker, and end the process."""
    code = BROKEN
    try:
        atexit.unregister(kill_all)
        os.setsid()
        adopt_orphans()
        process: Any = current_process()
        process._config["daemon"] = False  # or agents could start no processes by multiprocessing
        os.close(_server._forkserver_alive_fd)  # or a worker that hangs would keep the forkserver alive after the run
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        output.close()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pkgutil.resolve_name("jaxft.harness.worker:work")(connection, trace.fileno(), *arguments)
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            flush_output()
        finally:
            os._exit(code)


def flush_output() -> None:
    """Write what is buffered of standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the agent may have replaced or closed it
            stream.flush()


def adopt_orphans() -> None:
    """Make processes whose parents end, descendants of this one, its children, so that none of them gets lost."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def limit_memory(more_bytes: int) -> None:
    """Let this process take so much private writable memory more than it has."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(status["VmData"].split()[0]) * 1024 + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def children(pid: int) -> list[int]:
    """Return the children of a process that are running."""
    found = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return [child for child in found if is_running(child)]


def descendants(pid: int) -> dict[int, int]:
    """Return the running descendants of a process, each with its parent."""
    found: dict[int, int] = {}
    level = [pid]
    while level:
        new = {child: each for each in level for child in children(each) if child not in found}
        found |= new
        level = list(new)
    return found


def started_by(pid: int) -> set[int]:
    """Return the running descendants of a process, without Python's own helpers, but with what these have forked."""
    return {
        child
        for child, parent in descendants(pid).items()
        # A process that a helper forks has the helper's command line.
        if process_command(child) == process_command(parent)
        or not any(word in process_command(child) for word in HELPERS)
    }


def is_running(pid: int) -> bool:
    """Return True if there is a process of this id that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def process_command(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def kill_all(find: Callable[[], Collection[int]]) -> None:
    """Kill the processes that `find` returns until there are none, as their own children are found when they end."""
    for _ in range(200):
        found = find()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that they start no others meanwhile
            for pid in found:
                with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                    os.kill(pid, number)
        if not found:
            return
        time.sleep(0.005)


if PRELOAD in os.environ:
    _preload(*json.loads(os.environ.pop(PRELOAD)))
