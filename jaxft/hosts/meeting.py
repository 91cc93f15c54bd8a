"""The meeting of the processes of a run at the coordinator's address, before that of JAX.

JAX ends a process with a C++ trace if another one is missing. Here each fault is one sentence, in every process that
has come. Each comes with a line of JSON, and process 0 answers all of them once they are there.
"""

import contextlib
import ipaddress
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from jaxft.errors import HostsError

HANDSHAKE_SECONDS = 2.0
"""Time that a connection has to introduce itself; others wait meanwhile."""


def meet(address: str, process_id: int, num_processes: int, about: Mapping[str, str], *, within_seconds: float) -> None:
    """Wait for the other processes.

    Args:
        address: host and port of process 0, as in `10.0.0.1:1234`.
        process_id: number of this process, from 0.
        num_processes: number of processes.
        about: facts that have to be the same in all processes, by name.
        within_seconds: time that the others have to come.

    Raises:
        HostsError: a process is missing, process 0 is, two have the same number, or they differ.
    """
    host, port = parse_address(address)
    if not 0 <= process_id < num_processes:
        raise HostsError(
            f"process_id is {process_id}; wanted a number from 0 to {num_processes - 1}, as num_processes is "
            f"{num_processes}"
        )
    own = {"process_id": process_id, "num_processes": num_processes, "about": dict(about)}
    fault = (
        _receive(interface(host), port, own, within_seconds)
        if process_id == 0
        else _visit(host, port, own, within_seconds)
    )
    if fault is not None:
        raise HostsError(fault)


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`.

    Raises:
        HostsError: it is none.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise HostsError(f"coordinator is {address!r}; wanted host:port, as in 10.0.0.1:1234")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return True if an address or name stands for this machine alone.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def interface(host: str) -> str:
    """Return the host at whose address process 0 listens: that of the coordinator, or all of this machine.

    A machine may know its own name as 127.0.1.1, where the others do not reach it.
    """
    try:
        known = [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        known = []
    return "" if not is_loopback(host) and any(map(is_loopback, known)) else host


def _receive(host: str, port: int, own: Mapping[str, Any], within_seconds: float) -> str | None:
    """Receive the other processes as process 0, tell them of a fault if there is one, and return it."""
    came: dict[int, socket.socket] = {}
    fault, deadline = None, time.monotonic() + within_seconds
    try:
        server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise HostsError(
            f"process 0 cannot listen at {host}:{port} ({error.strerror}): choose another port, and an address of this "
            "machine"
        ) from None
    with contextlib.ExitStack() as connections:
        connections.enter_context(server)
        while fault is None and len(came) < own["num_processes"] - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = connections.enter_context(server.accept()[0])
            except TimeoutError:
                missing = [str(index) for index in range(1, own["num_processes"]) if index not in came]
                named = f"process{'es' if len(missing) > 1 else ''} {', '.join(missing)} of {own['num_processes']}"
                fault = f"{named} did not come to port {port} within {within_seconds:g} s"
                break
            try:
                visitor = _read(connection, HANDSHAKE_SECONDS)
                fault = _why_refused(visitor, own, came)
                came[visitor["process_id"] if fault is None else -1] = connection
            except (OSError, ValueError, KeyError, TypeError):  # a stranger
                connection.close()
        for connection in came.values():
            with contextlib.suppress(OSError):  # of one that has just gone
                _send(connection, {"fault": fault})
    return fault


def _why_refused(visitor: Mapping[str, Any], own: Mapping[str, Any], came: Mapping[int, Any]) -> str | None:
    process_id, count, mine = visitor["process_id"], visitor["num_processes"], own["num_processes"]
    if count != mine:
        return f"process {process_id} has {count} processes, and process 0 has {mine}: give both one number"
    if process_id == 0 or process_id in came:
        return f"two processes are process {process_id}: give each a number of its own"
    for name, fact in own["about"].items():
        other = visitor["about"].get(name, "nothing")
        if other != fact:
            return f"{name} is {other} in process {process_id}, and {fact} in process 0: all processes need the same"
    return None


def _visit(host: str, port: int, own: Mapping[str, Any], within_seconds: float) -> str | None:
    """Go to process 0, where nobody may listen yet, and return the fault of the meeting."""
    place, deadline = f"{host}:{port}", time.monotonic() + within_seconds
    while True:
        try:
            connection = socket.create_connection((host, port), max(0.01, deadline - time.monotonic()))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise HostsError(
                    f"process {own['process_id']}: no process 0 answers at {place} within {within_seconds:g} s: start "
                    "it there, and see that the port is open"
                ) from None
            time.sleep(0.1)
    with connection:
        try:
            _send(connection, own)
            return _read(connection, within_seconds + HANDSHAKE_SECONDS)["fault"]
        except (OSError, ValueError, KeyError, TypeError):
            raise HostsError(f"process 0 at {place} has gone before all had come") from None


def _send(connection: socket.socket, said: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(said).encode() + b"\n")


def _read(connection: socket.socket, seconds: float) -> Any:
    """Return the value of the next line."""
    connection.settimeout(seconds)
    with connection.makefile("rb") as lines:
        return json.loads(lines.readline(2**16))
