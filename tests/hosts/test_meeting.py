"""Processes meet at the coordinator's address, where each fault is one sentence; here each is a thread."""

import contextlib
import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxft.errors import HostsError
from jaxft.hosts import meeting
from jaxft.hosts.meeting import meet


def wait_for_listener(port):
    """Wait until someone listens at this port, without a connection."""
    while not any(listening == port for listening, _ in listening_addresses()):
        time.sleep(0.01)


def listening_addresses():
    """Ports and addresses, as the kernel writes them, where someone listens on this machine."""
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
    return {(int(line[1][-4:], 16), line[1].partition(":")[0]) for line in lines if line[3] == "0A"}


def together(port, *calls, seconds=10.0):
    """Let one thread for each call meet, and return the fault of each."""

    def one(call):
        try:
            return meet(f"127.0.0.1:{port}", **{"within_seconds": seconds, "about": {}} | call)
        except HostsError as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def of(count, **options):
    return [{"process_id": index, "num_processes": count} | options for index in range(count)]


def introduce(port, said):
    """A connection that says something; it stays open."""
    wait_for_listener(port)
    stranger = socket.create_connection(("127.0.0.1", port), 10.0)
    stranger.sendall(said)
    return stranger


def test_all_meet_again_and_again_at_one_port(port):
    assert [together(port, *of(3)) for _ in range(2)] == [[None] * 3] * 2


@pytest.mark.parametrize(
    ("calls", "seconds", "said"),
    [
        (of(4)[:2], 0.5, "processes 2, 3 of 4 did not come to port PORT within 0.5 s"),
        ([*of(3)[:2], of(3)[1]], 10.0, "two processes are process 1: give each a number of its own"),
        ([of(2)[0], of(3)[1]], 10.0, "process 1 has 3 processes, and process 0 has 2: give both one number"),
        ([of(2, about={"jaxft": "1.0"})[0], of(2, about={"jaxft": "1.1"})[1]], 10.0,
         "jaxft is 1.1 in process 1, and 1.0 in process 0: all processes need the same"),
    ],
)  # fmt: skip
def test_what_differs_or_is_missing_is_named_in_all(port, calls, seconds, said):
    assert together(port, *calls, seconds=seconds) == [said.replace("PORT", str(port))] * len(calls)


def test_a_missing_coordinator_is_named(port):
    (said,) = together(port, *of(2)[1:], seconds=0.3)
    assert f"no process 0 answers at 127.0.0.1:{port} within 0.3 s" in said


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (said,) = together(taken.getsockname()[1], of(2)[0])
        assert said.startswith(f"process 0 cannot listen at 127.0.0.1:{taken.getsockname()[1]} (")


@pytest.mark.parametrize(
    "said",
    [
        pickle.dumps(OSError("code")),
        b"{}",
        b"null",
        b"",
        b"x" * 2**17,
    ],
)
def test_an_introduction_that_is_none_is_passed_over(port, said):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(2)[0])
        with contextlib.suppress(ConnectionError):
            stranger = introduce(port, said + b"\n")
            while stranger.recv(2**10):
                pass
        assert together(port, of(2)[1]) == waiting.result() == [None]


def test_a_coordinator_that_goes_is_named(port):
    with socket.create_server(("127.0.0.1", port)) as listening, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(2)[1])
        accepted, _ = listening.accept()
        accepted.close()
        assert waiting.result() == [f"process 0 at 127.0.0.1:{port} has gone before all had come"]


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "0100007F"), ("0.0.0.0", "00000000")])
def test_only_the_coordinators_own_interface_is_listened_at(port, host, address):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, f"{host}:{port}", 0, 2, {}, within_seconds=0.5)
        wait_for_listener(port)
        assert {found for listening, found in listening_addresses() if listening == port} == {address}
        with pytest.raises(HostsError, match="did not come"):
            waiting.result()


def test_a_name_that_means_this_machine_here_is_listened_at_everywhere(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **options: found)
    assert (meeting.interface("node-1"), meeting.interface("localhost")) == ("", "localhost")


@pytest.mark.parametrize("address", ["", "host", "host:", ":1234", "host:port", "host:70000"])
def test_an_address_is_host_and_port(address):
    with pytest.raises(HostsError, match="wanted host:port"):
        meet(address, 0, 2, {}, within_seconds=1.0)


def test_the_number_of_a_process_is_below_their_count():
    with pytest.raises(HostsError, match="process_id is 2; wanted a number from 0 to 1"):
        meet("h:1", 2, 2, {}, within_seconds=1.0)
