"""The meeting of the processes of a run: they find each other at the coordinator's address, and form a ring.

It comes before that of JAX, which ends a process with a C++ trace if another one is missing. Here each fault is one
sentence, in every process that has come. Strangers may connect, too: the processes read JSON only until all have come.
"""

import contextlib
import ipaddress
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from pydantic import BaseModel, ValidationError

from jaxft.errors import HostsError
from jaxft.hosts.ring import Ring

logger = logging.getLogger(__name__)

AUTHKEY = "JAXFT_AUTHKEY"
"""Environment variable with a secret of the processes of a run; without it, whoever reaches the port may join."""

HEARTBEAT_SECONDS = 10
"""Time after which a host that does not answer at all counts as gone, and a connection must have introduced itself."""

MAX_HANDSHAKES = 256
"""Number of connections that may be introducing themselves; for one more the oldest is closed."""

RING_SECONDS = 30.0
"""Time that processes have to connect to their neighbors once all have come."""

MESSAGES, IDLE = b"messages", b"idle"
"""Introductions of the two connections between neighbors; see `Ring`."""


class _Visitor(BaseModel):
    """The introduction of a process to process 0."""

    process_id: int
    num_processes: int
    port: int  # where it awaits the process before it
    about: dict[str, str]


class _Answer(BaseModel):
    """The answer of process 0: the address of each process and the hexadecimal key of their connections, or a fault."""

    addresses: list[tuple[str, int]] = []
    key: str = ""
    fault: str | None = None


_Arrivals = queue.SimpleQueue[tuple[Connection, str, bytes]]
"""Connections that know the key, each with the host that it comes from and its introduction."""


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
    host, port = parse_address(address)
    if not 0 <= process_id < num_processes:
        raise HostsError(
            f"process_id is {process_id}; wanted a number from 0 to {num_processes - 1}, as num_processes is "
            f"{num_processes}"
        )
    place = host if is_loopback(host) else ""
    if process_id == 0 and not place and AUTHKEY not in os.environ:
        logger.warning("%s is not set: whoever reaches port %d during the start can join, and run code", AUTHKEY, port)
    deadline = time.monotonic() + within_seconds
    with _listening(place, 0) as own:
        visitor = _Visitor(
            process_id=process_id, num_processes=num_processes, port=own.getsockname()[1], about=dict(about)
        )
        if process_id == 0:
            answer = _receive(place, port, visitor, deadline, within_seconds)
        else:
            answer = _visit(host, port, visitor, deadline, within_seconds)
        if answer.fault is not None:
            raise HostsError(answer.fault)
        key = bytes.fromhex(answer.key)
        with _arrivals(own, key) as arrived:
            next_host, next_port = answer.addresses[(process_id + 1) % num_processes]
            after = _to_next((next_host or host, next_port), process_id, num_processes, key)
            before = _from_previous(arrived, visitor)
    for each in (before, after):
        _lift_limit(each[MESSAGES])
    return Ring(process_id, num_processes, before[MESSAGES], after[MESSAGES], on_loss, idle=(before[IDLE], after[IDLE]))


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches the host.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.1"), is_loopback("node-1")
    (True, True, False, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _to_next(address: tuple[str, int], process_id: int, num_processes: int, key: bytes) -> dict[bytes, Connection]:
    """Connect to the next process twice, and return the connections by their introductions.

    Raises:
        HostsError: it cannot be reached.
    """
    deadline = time.monotonic() + RING_SECONDS
    try:
        return {said: _connected(address, key, said, deadline) for said in (MESSAGES, IDLE)}
    except OSError as error:
        raise HostsError(
            f"process {process_id} does not reach process {(process_id + 1) % num_processes} at "
            f"{address[0]}:{address[1]} ({error}): it has gone meanwhile, or ports between the machines are closed"
        ) from None


def _from_previous(arrived: _Arrivals, own: _Visitor) -> dict[bytes, Connection]:
    """Return the two connections of the process before this one by their introductions.

    Raises:
        HostsError: it does not come.
    """
    deadline, found = time.monotonic() + RING_SECONDS, dict[bytes, Connection]()
    while not found.keys() >= {MESSAGES, IDLE}:
        try:
            connection, _, said = arrived.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            raise HostsError(
                f"process {(own.process_id - 1) % own.num_processes} does not reach process {own.process_id} at port "
                f"{own.port}: it has gone meanwhile, or ports between the machines are closed"
            ) from None
        found[said] = connection
    return found


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`.

    Raises:
        HostsError: it is none.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise HostsError(f"coordinator is {address!r}; wanted host:port, as in 10.0.0.1:1234")
    return host.strip("[]"), int(port)


def _receive(place: str, port: int, own: _Visitor, deadline: float, within_seconds: float) -> _Answer:
    """Receive the other processes as process 0, and return the answer that each of them got."""
    came = {0: ("", own.port)}  # that of the coordinator, which all know
    waiting: dict[int, Connection] = {}
    fault = None
    try:
        listening = _listening(place, port)
    except OSError as error:
        raise HostsError(f"process 0 cannot listen at port {port} ({error.strerror}): choose another port") from None
    with listening, _arrivals(listening, _authkey()) as arrived:
        while fault is None and len(came) < own.num_processes:
            try:
                connection, host, introduction = arrived.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                missing = [process_id for process_id in range(own.num_processes) if process_id not in came]
                fault = (
                    f"{_named(missing)} of {own.num_processes} did not come to port {port} within {within_seconds:g} s"
                )
                break
            gone = [process_id for process_id, each in waiting.items() if each.poll()]  # at its end: nobody says more
            for process_id in gone:
                waiting.pop(process_id).close()
                del came[process_id]
            try:
                visitor = _Visitor.model_validate_json(introduction)
            except ValidationError:
                connection.close()
                continue
            fault = _why_refused(visitor, own, came)
            came[visitor.process_id] = host, visitor.port
            waiting[visitor.process_id if fault is None else -1] = connection
    answer = _Answer(addresses=[came[each] for each in sorted(came)], key=secrets.token_hex(32), fault=fault)
    for connection in waiting.values():
        with contextlib.suppress(OSError):  # of one that has just gone: its neighbors say so
            connection.send_bytes(answer.model_dump_json().encode())
        connection.close()
    return answer


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


def _visit(host: str, port: int, own: _Visitor, deadline: float, within_seconds: float) -> _Answer:
    """Go to process 0 and return its answer."""
    try:
        connection = _connected((host, port), _authkey(), own.model_dump_json().encode(), deadline)
    except AuthenticationError:
        raise HostsError(f"process 0 at {host}:{port} has another {AUTHKEY}: give all processes the same") from None
    except OSError as error:
        raise HostsError(
            f"process {own.process_id}: no process 0 answers at {host}:{port} within {within_seconds:g} s ({error}): "
            "start it there, and see that the port is open"
        ) from None
    try:
        return _Answer.model_validate_json(connection.recv_bytes())
    except (EOFError, OSError, ValidationError):
        raise HostsError(f"process 0 at {host}:{port} has gone before all had come") from None
    finally:
        connection.close()


def _named(indices: list[int]) -> str:
    """Return these processes as text, as in `processes 1, 4`.

    >>> _named([1]), _named([1, 4])
    ('process 1', 'processes 1, 4')
    """
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def _authkey() -> bytes:
    return os.environ.get(AUTHKEY, "jaxft").encode()


def _listening(place: str, port: int) -> socket.socket:
    """Listen at an address of this machine; the empty one stands for all."""
    has_both = not place and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both or ":" in place else socket.AF_INET
    return socket.create_server((place, port), family=family, dualstack_ipv6=has_both, backlog=1024)


def _connected(address: tuple[str, int], key: bytes, introduction: bytes, deadline: float) -> Connection:
    """Connect to an address, where nobody may listen yet, and introduce this process.

    Raises:
        OSError: nobody did until the deadline.
        AuthenticationError: whoever listens has another key.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection(address, timeout=max(left, 0.1)) as connected:
                connection = _known(connected, key, challenges_first=False)
                connection.send_bytes(introduction)
                return connection
        except (OSError, EOFError) as error:
            if left <= 0:
                raise OSError(str(error) or "the connection was closed") from error
        time.sleep(0.1)


@contextlib.contextmanager
def _arrivals(listening: socket.socket, key: bytes) -> Iterator[_Arrivals]:
    """Accept connections during the block, and yield the queue of those that know the key.

    Each has a thread and `HEARTBEAT_SECONDS`, so that a stranger who says nothing, or a byte now and then, keeps nobody
    waiting.
    """
    arrived: _Arrivals = queue.SimpleQueue()

    def introduce(accepted: socket.socket, host: str) -> None:
        with accepted, contextlib.suppress(Exception):  # whatever a stranger says
            connection = _known(accepted, key, challenges_first=True)
            arrived.put((connection, host.removeprefix("::ffff:"), connection.recv_bytes(2**16)))

    def accept() -> None:
        begun: deque[tuple[float, socket.socket]] = deque()
        listening.settimeout(0.1)
        while not is_over.is_set():
            with contextlib.suppress(OSError):  # none came, or it has gone
                accepted, address = listening.accept()
                begun.append((time.monotonic() + HEARTBEAT_SECONDS, accepted))
                threading.Thread(target=introduce, args=(accepted, address[0]), daemon=True).start()
            while begun and (len(begun) > MAX_HANDSHAKES or begun[0][0] < time.monotonic()):
                with contextlib.suppress(OSError):  # one that has introduced itself is closed here
                    begun.popleft()[1].shutdown(socket.SHUT_RDWR)

    is_over = threading.Event()
    accepting = threading.Thread(target=accept, name="jaxft meeting", daemon=True)
    accepting.start()
    try:
        yield arrived
    finally:
        is_over.set()
        accepting.join()


def _lift_limit(connection: Connection) -> None:
    """Let the other end take its time to read: a process whose interpreter is busy is not a host that has vanished."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def _known(connected: socket.socket, key: bytes, *, challenges_first: bool) -> Connection:
    """Return a copy of a connection whose other end knows the key; it breaks soon after the other host has vanished."""
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
    # Whoever listens there may be a stranger that says nothing.
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
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return connection
