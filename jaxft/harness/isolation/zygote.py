"""The zygote: a process that has imported the user's modules, and forks a worker within milliseconds.

It never runs the user's agents, makes no threads and touches no device, so that forking it is safe. It is the parent of
the workers and tells the run how each ended. When the run goes away, it ends all of them, with all that they started.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import pickle
import pkgutil
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import current_process, spawn
from pathlib import Path
from typing import Any, NamedTuple

from jaxft.errors import ConfigError
from jaxft.harness.registry import import_installed, import_module

PR_SET_CHILD_SUBREAPER = 36
"""Number of the option of Linux's `prctl` that makes orphans of a process's descendants its own children."""

MAX_MESSAGE_BYTES = 2**17

MODULES_PER_MESSAGE = 500

MAX_REASON_CHARACTERS = MAX_MESSAGE_BYTES // 16
"""Maximum length of a reason in a report; as JSON, a character has up to 12 bytes."""

BROKEN = 70
"""Exit code of a worker that cannot go on, as after an agent has closed its files; sysexits.h calls it EX_SOFTWARE."""

OUT_OF_MEMORY = 71
"""Exit code of a worker that has no memory left even for a message about that."""

NOT_LEFT_BEHIND = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Words in the command lines of Python's own helpers, which live as long as the process that started them."""

WORK = "jaxft.harness.worker:work"
"""The function that a worker runs. The zygote imports it by name, as its module imports those that start a zygote."""


class Preparation(NamedTuple):
    """The data that a zygote starts from.

    Attributes:
        main: what `multiprocessing` tells a new process of this one: the main module, `sys.path`, the folder.
        imports: modules that register the user's components.
        config: the configuration, pickled.
        log_level: lowest level of the records of `logging` that the run shows.
    """

    main: dict[str, Any]
    imports: tuple[str, ...]
    config: bytes
    log_level: int


def prepare(config: Any) -> bytes:
    """Return the preparation of a zygote for a configuration, pickled."""
    main = spawn.get_preparation_data("jaxft zygote")
    main["authkey"] = bytes(main["authkey"])  # in its own class it refuses to be pickled
    if not Path(main.get("init_main_from_path", "")).is_file():  # Python reads the program from standard input
        main.pop("init_main_from_path", None)
    return pickle.dumps(
        Preparation(main, tuple(config.imports), pickle.dumps(config), logging.getLogger().getEffectiveLevel())
    )


def start(preparation: bytes) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start a zygote; return its process, and the socket for `fork` and its reports."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, os.fdopen(os.memfd_create("preparation"), "w+b") as stdin:  # a pipe would hold up the event loop
        stdin.write(preparation)
        stdin.seek(0)
        command = f"from jaxft.harness.isolation.zygote import main; main({theirs.fileno()}, {os.getpid()})"
        process = subprocess.Popen(
            [sys.executable, "-c", command],
            stdin=stdin,
            pass_fds=(theirs.fileno(),),
            # Agents get no accelerator: the run has it.
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # Ctrl-C is for the run
        )
    return process, ours


def fork(control: socket.socket, files: Sequence[int], memory_bytes: int | None) -> None:
    """Ask a zygote for a worker that gets these files: its connection, its output and its trace."""
    socket.send_fds(control, [json.dumps({"fork": memory_bytes}).encode()], list(files))


def preload(control: socket.socket, modules: Sequence[str]) -> None:
    """Let a zygote import modules, so that its workers need not, each for itself."""
    for start in range(0, len(modules), MODULES_PER_MESSAGE):
        control.send(json.dumps({"import": modules[start : start + MODULES_PER_MESSAGE]}).encode())


def main(control_number: int, run: int) -> None:
    """Be a zygote until the run closes the socket of this number, or ends.

    Args:
        control_number: number of the socket to the run.
        run: process id of the run.
    """
    control = socket.socket(fileno=control_number)
    adopt_orphans()
    preparation: Preparation = pickle.loads(sys.stdin.buffer.read())
    what = "the main script, whose program must be under `if __name__ == '__main__':`"
    try:
        # A script without that, which makes workers here again, gets the error of `multiprocessing`.
        current_process()._inheriting = True  # type: ignore[attr-defined]
        spawn.prepare(preparation.main)
        what = "the modules of the agent"
        import_installed()
        for name in preparation.imports:
            import_module(name)
        what = "the configuration, whose classes must be in modules that can be imported"
        config = pickle.loads(preparation.config)
        del current_process()._inheriting  # type: ignore[attr-defined]
        work = pkgutil.resolve_name(WORK)
        logging.getLogger().setLevel(preparation.log_level)
    except (Exception, SystemExit) as error:
        _send(control, {"failed": f"{what}: {type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS]})
        return
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages of all that was imported
    try:
        _fork_on_demand(control, run, work, config)
    finally:
        signal.set_wakeup_fd(-1)
        kill_descendants(os.getpid())


def _fork_on_demand(control: socket.socket, run: int, work: Any, config: Any) -> None:
    """Fork workers as the run asks for them, and report their ends, until the run has gone."""
    wake_reader, wake_writer = socket.socketpair()
    wake_writer.setblocking(False)
    signal.set_wakeup_fd(wake_writer.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    watched: list[Any] = [control, wake_reader]
    run_end = None
    with contextlib.suppress(OSError):  # the kernel has no such files, or the run has ended, which `control` tells
        # A process that the run has forked may hold the run's end of `control` open.
        run_end = os.pidfd_open(run)
        watched.append(run_end)
    _send(control, {"ready": True})
    workers: set[int] = set()
    kept = set(children(os.getpid()))  # the user's modules may have started them
    while True:
        readable, _, _ = select.select(watched, [], [])
        if run_end in readable:
            return
        if wake_reader in readable:
            wake_reader.recv(4096)
            _report_ended(control, workers, kept)
        if control not in readable:
            continue
        message, files, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 3)
        if not message:
            return
        request = json.loads(message)
        if "import" in request:
            _import_quietly(request["import"])
            kept |= set(children(os.getpid())) - workers
            continue
        flush_output()  # or each worker would print the rest, too
        try:
            pid = os.fork()
        except OSError as error:  # there are too many processes
            _send(control, {"refused": str(error)})
        else:
            if pid == 0:
                for other in (control, wake_reader, wake_writer):
                    other.close()
                if run_end is not None:
                    os.close(run_end)
                _be_worker(work, config, files, request["fork"])
            workers.add(pid)
            _send(control, {"forked": pid})
        for file in files:
            os.close(file)


def _import_quietly(modules: Sequence[str]) -> None:
    """Import modules that a worker could import; what cannot be imported here is left to the workers."""
    for name in modules:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _send(control: socket.socket, report: dict[str, Any]) -> None:
    try:
        control.send(json.dumps(report).encode())
    except OSError:  # the run has gone, which the main loop will see
        return


def _report_ended(control: socket.socket, workers: set[int], kept: set[int]) -> None:
    """Report the exit codes of workers that have ended, negative ones for signals, and end what they left behind."""
    has_ended = False
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        if pid in workers:
            workers.discard(pid)
            has_ended = True
            _send(control, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})
    if has_ended:
        for orphan in set(children(os.getpid())) - workers - kept:
            kill_worker(orphan)


def _be_worker(work: Any, config: Any, files: Sequence[int], memory_bytes: int | None) -> None:
    """Be a worker, and end the process."""
    code = BROKEN
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        adopt_orphans()
        connection, output, trace = files
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory_bytes is not None:
            limit = data_bytes() + memory_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        work(socket.socket(fileno=connection), trace, config, memory_bytes)
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
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


def data_bytes() -> int:
    """Return the bytes of private writable memory of this process, which `RLIMIT_DATA` limits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(["/proc/self/status: has no VmData, by which memory is limited: set worker_memory_mb to null"])


def children(pid: int) -> list[int]:
    """Return the children of a process that are running."""
    found = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    except OSError:  # it has ended meanwhile
        return []
    return [child for child in found if _is_running(child)]


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def started_by(pid: int) -> set[int]:
    """Return the running descendants of a process, without Python's own helpers, but with what these have started."""
    # A process that a helper forks has the helper's command line.
    return {
        child
        for child, parent in _descendants(pid).items()
        if not _is_helper(command_of(child)) or _is_helper(command_of(parent))
    }


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _is_helper(command: str) -> bool:
    return any(word in command for word in NOT_LEFT_BEHIND)


def kill_descendants(pid: int) -> None:
    """End all descendants of a process; each is stopped first, so that it starts no others meanwhile."""
    known: set[int] = set()
    for _ in range(100):  # a process that forks without end is killed with its descendants before that
        new = set(_descendants(pid)) - known
        if not new:
            break
        for each in new:
            _signal(each, signal.SIGSTOP)
        known |= new
    for each in known:
        _signal(each, signal.SIGKILL)


def _descendants(pid: int) -> dict[int, int]:
    """Return the running descendants of a process, each with its parent."""
    found: dict[int, int] = {}
    level = [pid]
    while level:
        new = {child: each for each in level for child in children(each) if child not in found}
        found |= new
        level = list(new)
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except OSError:  # it has ended, or belongs to another user
        return


def kill_worker(pid: int) -> None:
    """End a worker with all processes that it started."""
    _signal(pid, signal.SIGSTOP)
    kill_descendants(pid)
    _signal(pid, signal.SIGKILL)
