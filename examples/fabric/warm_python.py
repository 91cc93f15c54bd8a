"""A Python that has imported an adapter already: an episode forks it instead of importing for seconds.

NeMo Fabric starts an adapter as `$ADAPTER_PYTHON -m MODULE`. Here ADAPTER_PYTHON is a script that hands its arguments,
environment, folder and standard streams to a server, and waits; the server forks, and the child is the adapter. It is
for Linux. A child has the modules, and the search path, that the server had; functions of `atexit` do not run in it.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

CLIENT = """#!{python} -IS
import json, os, socket, sys
if sys.argv[1] != "-m":  # Fabric asks for the folder of its adapters
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
sys.exit((server.recv(1) or b"\\1")[0])  # no exit code: the adapter was killed
"""


@contextmanager
def warm_python(modules: Sequence[str]) -> Iterator[None]:
    """Set ADAPTER_PYTHON to a Python that has imported these modules, until the block ends."""
    before = os.environ.get("ADAPTER_PYTHON")
    with tempfile.TemporaryDirectory() as folder:
        address, client = f"{folder}/server", Path(folder, "python")
        client.write_text(CLIENT.format(python=sys.executable, address=address))
        client.chmod(0o700)
        server = subprocess.Popen(
            [sys.executable, __file__, address, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, whose end ends the server
        )
        try:
            if server.stdout.readline() != b"ready\n":
                raise RuntimeError(f"importing {', '.join(modules)} failed; the reason is above")
            os.environ["ADAPTER_PYTHON"] = str(client)
            yield
        finally:
            os.environ.pop("ADAPTER_PYTHON", None)
            if before is not None:
                os.environ["ADAPTER_PYTHON"] = before
            server.communicate()  # the end of its standard input ends it


def serve(address: str, modules: Sequence[str]) -> None:
    """Import the modules, then fork an adapter for each client, until standard input ends."""
    output = os.dup(1)
    os.dup2(2, 1)  # some modules greet
    for module in modules:
        import_module(module)
    sys.stdout.flush()  # what stands in its buffer, each child would write
    gc.freeze()  # so that a collection in a child copies no pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(1024)
    if len(os.listdir("/proc/self/task")) != 1:
        raise SystemExit(f"{', '.join(modules)} started threads when they were imported, and cannot be forked")
    os.write(output, b"ready\n")
    os.close(output)
    while select.select([listener, sys.stdin], [], [])[0] == [listener]:
        connection = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            adapter(connection)
        connection.close()


def adapter(connection: socket.socket) -> None:
    """Be the process that the client stands for, and end with it."""
    code = 1
    try:
        size, streams, _, _ = socket.recv_fds(connection, 8, 3)
        arguments, environment, folder = json.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        for stream, number in zip(streams, range(3), strict=True):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        threading.Thread(target=lambda: connection.recv(1) or os._exit(1), daemon=True).start()
        sys.argv = arguments[1:]
        warnings.simplefilter("ignore", RuntimeWarning)  # of runpy: the module was imported before
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            connection.sendall(bytes([code & 0xFF]))
        os._exit(code & 0xFF)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
