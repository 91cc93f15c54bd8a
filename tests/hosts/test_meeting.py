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
from jaxft.hosts.store import AUTHKEY, sealed


def wait_for_listener(port):
    """Wait until someone listens at this port, without a connection."""
    while not any(listening == port for listening, _ in listening_addresses()):
        time.sleep(0.01)


def listening_addresses():
    """Ports and addresses, as the kernel writes them, where someone listens on this machine."""
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
    return {(int(line[1][-4:], 16), line[1].partition(":")[0]) for line in lines if line[3] == "0A"}


def together(port, *calls, seconds=10.0):
    """Let one thread for each call meet, and return the word of the run, or the fault, of each."""

    def one(call):
        try:
            return meet(f"127.0.0.1:{port}", **{"within_seconds": seconds, "about": {}, "on_loss": print} | call)._run
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


def test_all_learn_one_word_that_is_new_each_time(port):
    runs = [together(port, *of(3)) for _ in range(2)]
    assert [len({*words}) for words in runs] == [1, 1] and runs[0] != runs[1]


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


def test_one_that_died_while_it_waited_may_come_again(port):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(3)[0])
        introduce(port, f"{sealed(of(3, about={})[1], 'introduction')}\n".encode()).close()
        second, third = together(port, *of(3)[1:])
        assert {*waiting.result()} == {second} == {third}


def test_strangers_that_are_slow_keep_nobody(port):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(2)[0])
        slow = [introduce(port, said) for said in (b"", b"x" * 200, sealed({}, "introduction")[:9].encode())]
        (second,) = together(port, of(2)[1], seconds=5.0)  # less than each of them has
        assert waiting.result() == [second] and len(second) == 32
    for each in slow:
        each.close()


def test_a_handshake_has_a_deadline(port, monkeypatch):
    monkeypatch.setattr(meeting, "HANDSHAKE_SECONDS", 0.5)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(2)[0], seconds=3.0)
        with introduce(port, b"x") as stranger, contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
        assert waiting.result() == [f"process 1 of 2 did not come to port {port} within 3 s"]


@pytest.mark.parametrize(
    "said",
    [
        pickle.dumps(OSError("code")),
        b"{}",
        sealed("null", "introduction").encode(),
        sealed({"process_id": "one"}, "introduction").encode(),
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
        second = together(port, of(2)[1])
        assert waiting.result() == second


OTHER = f"has another {AUTHKEY}: give all processes the same"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (pickle.dumps(HostsError("code")) + b"\n", OTHER),
        (b"null\n", OTHER),
        (b'{"fault": null, "run": "1"}\n', OTHER),
        (b"", "has gone before all had come"),
    ],
)
def test_an_answer_that_is_none_of_process_0_is_refused(port, answer, said):
    with socket.create_server(("127.0.0.1", port)) as listening, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(2)[1])
        accepted, _ = listening.accept()
        with accepted:
            accepted.recv(2**10)
            accepted.sendall(answer)
        assert waiting.result() == [f"process 0 at 127.0.0.1:{port} {said}"]


def test_a_process_with_another_secret_is_told_so_and_the_others_wait(port, monkeypatch):
    monkeypatch.setenv(AUTHKEY, "another")
    introduction = f"{sealed(of(2, about={})[1], 'introduction')}\n".encode()
    monkeypatch.setenv(AUTHKEY, "secret")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(2)[0])
        with introduce(port, introduction) as stranger:
            assert b"another secret" in stranger.recv(2**10)
        second = together(port, of(2)[1])
        assert waiting.result() == second


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "0100007F"), ("0.0.0.0", "00000000")])
def test_only_the_coordinators_own_interface_is_listened_at(port, host, address, caplog, monkeypatch):
    monkeypatch.delenv(AUTHKEY, raising=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, f"{host}:{port}", 0, 2, {}, within_seconds=0.5, on_loss=print)
        wait_for_listener(port)
        assert {found for listening, found in listening_addresses() if listening == port} == {address}
        with pytest.raises(HostsError, match="did not come"):
            waiting.result()
    # Whoever reaches other addresses than those of this machine is warned of.
    assert [AUTHKEY in message for message in caplog.messages] == ([] if host == "127.0.0.1" else [True])


def test_a_name_that_means_this_machine_here_is_listened_at_everywhere(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **options: found)
    assert (meeting.interface("node-1"), meeting.interface("localhost")) == ("", "localhost")


@pytest.mark.parametrize("address", ["", "host", "host:", ":1234", "host:port", "host:70000"])
def test_an_address_is_host_and_port(address):
    with pytest.raises(HostsError, match="wanted host:port"):
        meet(address, 0, 2, {}, within_seconds=1.0, on_loss=print)


def test_the_number_of_a_process_is_below_their_count():
    with pytest.raises(HostsError, match="process_id is 2; wanted a number from 0 to 1"):
        meet("h:1", 2, 2, {}, within_seconds=1.0, on_loss=print)
