"""The meeting of the processes of a run at the coordinator's address, before that of JAX.

JAX ends a process with a C++ trace if another one is missing. Here each fault is one sentence, in every process that
has come. Strangers may connect, too: what comes is one line of JSON, signed.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

from jaxft.errors import HostsError
from jaxft.hosts.store import AUTHKEY, Store, sealed, unsealed

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
"""Time that a connection has to introduce itself."""


def meet(
    address: str,
    process_id: int,
    num_processes: int,
    about: Mapping[str, str],
    *,
    within_seconds: float,
    on_loss: Callable[[int], object],
) -> Store:
    """Wait for the other processes, and return the store of all, which is to be connected.

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
    own = {"process_id": process_id, "num_processes": num_processes, "about": dict(about)}
    if process_id == 0 and not is_loopback(host) and AUTHKEY not in os.environ:
        logger.warning("%s is not set: whoever reaches port %d can speak for a process of this run", AUTHKEY, port)
    if process_id == 0:
        run = asyncio.run(_receive(interface(host), port, own, within_seconds))
    else:
        run = asyncio.run(_visit(host, port, own, within_seconds))
    return Store(process_id, num_processes, (host, port), run, on_loss)


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


async def _receive(host: str, port: int, own: Mapping[str, Any], within_seconds: float) -> str:
    """Receive the other processes as process 0, and return the word of this run."""
    came: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
    fault: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()  # None once all have come

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                visitor = unsealed((await reader.readline()).decode().strip(), "introduction")
                process_id = int(visitor["process_id"])
                await asyncio.sleep(0.1)  # the end of a connection is read after what came before
            for gone in [known for known, (before, _) in came.items() if before.at_eof()]:  # it may come again
                del came[gone]
            why_not = _why_refused(process_id, visitor, own, came)
        except HostsError:  # it has another secret, as it sees from the answer's signature
            return await _answer(writer, {"fault": "another secret"})
        except (Exception, asyncio.CancelledError):  # whatever a stranger says, also nothing until the meeting is over
            return writer.transport.abort()
        came[process_id if why_not is None else -1] = reader, writer
        if not fault.done() and (why_not is not None or len(came) == own["num_processes"] - 1):
            fault.set_result(why_not)

    try:
        server = await asyncio.start_server(greet, host, port, limit=2**16, backlog=1024)
    except OSError as error:
        raise HostsError(
            f"process 0 cannot listen at {host}:{port} ({error.strerror}): choose another port, and an address of this "
            "machine"
        ) from None
    try:
        said = await asyncio.wait_for(fault, within_seconds)
    except TimeoutError:
        missing = [str(index) for index in range(1, own["num_processes"]) if index not in came]
        named = f"process{'es' if len(missing) > 1 else ''} {', '.join(missing)} of {own['num_processes']}"
        said = f"{named} did not come to port {port} within {within_seconds:g} s"
    server.close()
    run = secrets.token_hex(16)
    for _, writer in came.values():
        await _answer(writer, {"fault": said, "run": run})
    if said is not None:
        raise HostsError(said)
    return run


def _why_refused(
    process_id: int, visitor: Mapping[str, Any], own: Mapping[str, Any], came: Mapping[int, Any]
) -> str | None:
    count, mine = visitor["num_processes"], own["num_processes"]
    if count != mine:
        return f"process {process_id} has {count} processes, and process 0 has {mine}: give both one number"
    if process_id == 0 or process_id in came:
        return f"two processes are process {process_id}: give each a number of its own"
    for name, fact in own["about"].items():
        other = visitor["about"].get(name, "nothing")
        if other != fact:
            return f"{name} is {other} in process {process_id}, and {fact} in process 0: all processes need the same"
    return None


async def _answer(writer: asyncio.StreamWriter, answer: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # of one that has just gone
        writer.write(f"{sealed(answer, 'answer')}\n".encode())
        await writer.drain()
    writer.close()


async def _visit(host: str, port: int, own: Mapping[str, Any], within_seconds: float) -> str:
    """Go to process 0, where nobody may listen yet, and return the word of this run."""
    place = f"{host}:{port}"
    try:
        async with asyncio.timeout(within_seconds):
            while True:
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(host, port)
                    break
                await asyncio.sleep(0.1)
        writer.write(f"{sealed(own, 'introduction')}\n".encode())
        async with asyncio.timeout(within_seconds + HANDSHAKE_SECONDS):
            line = await reader.readline()
        writer.close()
        if not line:
            raise ConnectionError
        answer = unsealed(line.decode().strip(), "answer")
    except TimeoutError:
        raise HostsError(
            f"process {own['process_id']}: no process 0 answers at {place} within {within_seconds:g} s: start it "
            "there, and see that the port is open"
        ) from None
    except OSError:
        raise HostsError(f"process 0 at {place} has gone before all had come") from None
    except (HostsError, ValueError):
        raise HostsError(f"process 0 at {place} has another {AUTHKEY}: give all processes the same") from None
    if answer["fault"] is not None:
        raise HostsError(answer["fault"])
    return str(answer["run"])
