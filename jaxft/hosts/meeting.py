"""The meeting of the processes of a run: they find each other at the coordinator's address, and form a ring.

It comes before that of JAX, which ends a process with a C++ trace if another one is missing. Here each fault is one
sentence, in every process that has come.
"""

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from jaxft.errors import HostsError
from jaxft.hosts.ring import Ring

AUTHKEY = "JAXFT_AUTHKEY"
"""Environment variable with a secret of the processes of a run; without it, whoever reaches the port may join."""

HEARTBEAT_SECONDS = 10
"""Time after which a host that does not answer at all counts as gone."""

RING_SECONDS = 30.0
"""Time that processes have to connect to their neighbors once all have come."""


@dataclass(frozen=True)
class _Visitor:
    """The introduction of a process to process 0."""

    process_id: int
    num_processes: int
    port: int  # where it awaits the process before it
    about: dict[str, str]


def meet(
    address: str,
    process_id: int,
    num_processes: int,
    about: Mapping[str, str],
    *,
    within_seconds: float,
    on_loss: Callable[[int], object],
) -> Ring:
    """Wait for the other processes, and return the ring of all.

    Args:
        address: host and port of process 0, as in `10.0.0.1:1234`.
        process_id: number of this process, from 0.
        num_processes: number of processes.
        about: facts that have to be the same in all processes, by name.
        within_seconds: time that the others have to come.
        on_loss: called once, in a thread, with the number of a process that is lost later.

    Raises:
        HostsError: a process is missing, process 0 is, two have the same number, or they differ.
    """
    host, port = _parsed(address)
    if not 0 <= process_id < num_processes:
        raise HostsError(
            f"process_id is {process_id}; wanted a number from 0 to {num_processes - 1}, as num_processes is "
            f"{num_processes}"
        )
    deadline = time.monotonic() + within_seconds
    with _listening(0) as own:
        visitor = _Visitor(process_id, num_processes, own.getsockname()[1], dict(about))
        if process_id == 0:
            addresses, key = _receive(port, visitor, deadline, within_seconds)
        else:
            addresses, key = _visit(host, port, visitor, deadline, within_seconds)
        # Each proves to the next that it knows the key, so none can wait for its own connections to be accepted first.
        with ThreadPoolExecutor(1) as pool:
            accepting = pool.submit(_from_previous, own, process_id, num_processes, key)
            after = _to_next(addresses[(process_id + 1) % num_processes], process_id, num_processes, key)
            before = accepting.result()
    return Ring(process_id, num_processes, before[0], after[0], on_loss, idle=(before[1], after[1]))


def _to_next(
    address: tuple[str, int], process_id: int, num_processes: int, key: bytes
) -> tuple[Connection, Connection]:
    """Connect to the next process twice: for messages, and for nothing; see `Ring`.

    Raises:
        HostsError: it cannot be reached.
    """
    deadline = time.monotonic() + RING_SECONDS
    try:
        return _without_limit(_connected(address, key, deadline)), _connected(address, key, deadline)
    except OSError as error:
        raise HostsError(
            f"process {process_id} does not reach process {(process_id + 1) % num_processes} at "
            f"{address[0]}:{address[1]} ({error}): it has gone meanwhile, or ports between the machines are closed"
        ) from None


def _from_previous(
    own: socket.socket, process_id: int, num_processes: int, key: bytes
) -> tuple[Connection, Connection]:
    """Accept the two connections of the process before this one.

    Raises:
        HostsError: it does not come.
    """
    deadline = time.monotonic() + RING_SECONDS
    try:
        return _without_limit(_accepted(own, key, deadline)[0]), _accepted(own, key, deadline)[0]
    except TimeoutError:
        raise HostsError(
            f"process {(process_id - 1) % num_processes} does not reach process {process_id} at port "
            f"{own.getsockname()[1]}: it has gone meanwhile, or ports between the machines are closed"
        ) from None


def _parsed(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise HostsError(f"coordinator is {address!r}; wanted host:port, as in 10.0.0.1:1234")
    return host.strip("[]"), int(port)


def _receive(port: int, own: _Visitor, deadline: float, within_seconds: float) -> tuple[list[tuple[str, int]], bytes]:
    """Receive the other processes as process 0; return the address of each, and the key of their connections."""
    came = {0: ("", own.port)}  # whoever comes knows the host
    waiting: dict[int, Connection] = {}
    fault = None
    try:
        listening = _listening(port)
    except OSError as error:
        raise HostsError(f"process 0 cannot listen at port {port} ({error.strerror}): choose another port") from None
    with listening:
        while fault is None and len(came) < own.num_processes:
            try:
                connection, host = _accepted(listening, _authkey(), deadline)
                visitor = _introduced(connection)
            except TimeoutError:
                missing = [process_id for process_id in range(own.num_processes) if process_id not in came]
                fault = (
                    f"{_named(missing)} of {own.num_processes} did not come to port {port} within {within_seconds:g} s"
                )
                break
            gone = [process_id for process_id, each in waiting.items() if each.poll()]  # at its end: nobody says more
            for process_id in gone:
                waiting.pop(process_id).close()
                del came[process_id]
            if visitor is None:
                continue
            fault = _why_refused(visitor, own, came)
            came[visitor.process_id] = host, visitor.port
            waiting[visitor.process_id if fault is None else -1] = connection
    addresses, key = [came[process_id] for process_id in sorted(came)], secrets.token_bytes(32)
    for connection in waiting.values():
        with contextlib.suppress(OSError):  # of one that has just gone: its neighbors say so
            connection.send(HostsError(fault) if fault is not None else (addresses, key))
        connection.close()
    if fault is not None:
        raise HostsError(fault)
    return addresses, key


def _introduced(connection: Connection) -> _Visitor | None:
    """Return the introduction of a process that has connected; None if it says nothing, or has gone."""
    with contextlib.suppress(EOFError, OSError):
        if connection.poll(HEARTBEAT_SECONDS):
            visitor: _Visitor = connection.recv()
            return visitor
    connection.close()
    return None


def _why_refused(visitor: _Visitor, own: _Visitor, came: Mapping[int, Any]) -> str | None:
    process_id = visitor.process_id
    if visitor.num_processes != own.num_processes:
        return (
            f"process {process_id} has {visitor.num_processes} processes, and process 0 has {own.num_processes}: "
            "give both one number"
        )
    if process_id in came:
        return f"two processes are process {process_id}: give each a number of its own"
    for name in own.about.keys() | visitor.about.keys():
        mine, other = own.about.get(name, "nothing"), visitor.about.get(name, "nothing")
        if mine != other:
            return f"{name} is {other} in process {process_id}, and {mine} in process 0: all processes need the same"
    return None


def _visit(
    host: str, port: int, own: _Visitor, deadline: float, within_seconds: float
) -> tuple[list[tuple[str, int]], bytes]:
    """Go to process 0; return the address of each process, and the key of their connections."""
    try:
        connection = _connected((host, port), _authkey(), deadline)
    except AuthenticationError:
        raise HostsError(f"process 0 at {host}:{port} has another {AUTHKEY}: give all processes the same") from None
    except OSError as error:
        raise HostsError(
            f"process {own.process_id}: no process 0 answers at {host}:{port} within {within_seconds:g} s ({error}): "
            "start it there, and see that the port is open"
        ) from None
    try:
        connection.send(own)
        answer = connection.recv()
    except (EOFError, OSError):
        raise HostsError(f"process 0 at {host}:{port} has gone before all had come") from None
    finally:
        connection.close()
    if isinstance(answer, HostsError):
        raise answer
    addresses, key = answer
    return [(host, addresses[0][1]), *addresses[1:]], key


def _named(indices: list[int]) -> str:
    """Return these processes as text, as in `processes 1, 4`.

    >>> _named([1]), _named([1, 4])
    ('process 1', 'processes 1, 4')
    """
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def _authkey() -> bytes:
    return os.environ.get(AUTHKEY, "jaxft").encode()


def _listening(port: int) -> socket.socket:
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=has_both, backlog=1024)


def _connected(address: tuple[str, int], key: bytes, deadline: float) -> Connection:
    """Connect to an address, where nobody may listen yet.

    Raises:
        OSError: nobody did until the deadline.
        AuthenticationError: whoever listens has another key.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            return _known(socket.create_connection(address, timeout=max(left, 0.1)), key, challenges_first=False)
        except (OSError, EOFError) as error:
            if left <= 0:
                raise OSError(str(error) or "the connection was closed") from error
        time.sleep(0.1)


def _accepted(listening: socket.socket, key: bytes, deadline: float) -> tuple[Connection, str]:
    """Return the next connection that knows the key, and the host that it comes from.

    Raises:
        TimeoutError: none came until the deadline.
    """
    while True:
        listening.settimeout(max(deadline - time.monotonic(), 0.001))
        accepted, address = listening.accept()
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            return _known(accepted, key, challenges_first=True), address[0].removeprefix("::ffff:")


def _without_limit(connection: Connection) -> Connection:
    """Let the other end take its time to read: a process whose interpreter is busy is not a host that has vanished."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
    return connection


def _known(connected: socket.socket, key: bytes, *, challenges_first: bool) -> Connection:
    """Return a connection whose other end knows the key; it breaks soon after the other host has vanished."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, HEARTBEAT_SECONDS // 2),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, HEARTBEAT_SECONDS // 2),
        (socket.TCP_USER_TIMEOUT, HEARTBEAT_SECONDS * 1000),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    # A stranger that connects and says nothing must not keep the others waiting.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HEARTBEAT_SECONDS, 0))
    connection = Connection(os.dup(connected.fileno()))
    try:
        for step in (
            (deliver_challenge, answer_challenge) if challenges_first else (answer_challenge, deliver_challenge)
        ):
            step(connection, key)
    except BaseException:
        connection.close()
        raise
    finally:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        connected.close()
    return connection
