"""Processes meet, exchange messages around the ring, and hear of each other's end; here each is a thread."""

import contextlib
import os
import pickle
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from jaxft.errors import HostsError
from jaxft.hosts import meeting
from jaxft.hosts.meeting import meet


@pytest.fixture
def port():
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


def wait_for_listener(port):
    """Wait until someone listens at this port, without a connection."""
    while not any(listening == port for listening, _ in listening_addresses()):
        time.sleep(0.01)


def together(port, *calls, seconds=10.0):
    """Let one thread for each call meet, and return the ring, or the fault, of each."""

    def one(call):
        try:
            options = {"within_seconds": seconds, "on_loss": lambda index: None, "about": {}} | call
            return meet(f"127.0.0.1:{port}", **options)
        except HostsError as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def of(count, **options):
    return [{"process_id": index, "num_processes": count} | options for index in range(count)]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_each_gathers_what_all_give_whoever_asks_first(port, count):
    rings = together(port, *of(count))

    def work(ring):
        names = ["a", "b"] if ring.process_id % 2 else ["b", "a"]
        with ThreadPoolExecutor(2) as threads:
            gathered = threads.map(lambda name: ring.all_gather(name, (name, ring.process_id, bytes(300_000))), names)
            found = dict(zip(names, gathered, strict=True))
        ring.close()
        return found

    with ThreadPoolExecutor(count) as pool:
        for found in pool.map(work, rings):
            assert {name: [(each[0], each[1]) for each in values] for name, values in found.items()} == {
                name: [(name, index) for index in range(count)] for name in ("a", "b")
            }


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_loss_of_a_process_is_heard_by_all_others(port, lost):
    heard = []
    calls = [
        call | {"on_loss": partial(lambda mine, gone: heard.append((mine, gone)), call["process_id"])} for call in of(3)
    ]
    rings = together(port, *calls)
    for connection in (rings[lost]._after, rings[lost]._before):  # one that is killed sends nothing any more
        with socket.socket(fileno=os.dup(connection.fileno())) as held:
            held.shutdown(socket.SHUT_RDWR)
    others = [ring for ring in rings if ring.process_id != lost]

    def wait(ring):
        with pytest.raises(HostsError, match=f"process {lost} of 3 has ended"):
            ring.all_gather("never", None)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(wait, others))
    for ring in others:
        for thread in ring._threads:
            thread.join(timeout=10.0)  # each ends once the loss was reported
    assert sorted(each for each in heard if each[0] != lost) == [(ring.process_id, lost) for ring in others]


def test_one_that_ends_as_it_should_is_not_taken_for_lost(port):
    heard = []
    rings = together(port, *[call | {"on_loss": heard.append} for call in of(3)])
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda ring: ring.close(), rings))
    assert heard == []


def test_one_that_ended_before_it_gave_something_is_named(port):
    rings = together(port, *of(3))
    with ThreadPoolExecutor(3) as pool:
        ending = pool.submit(rings[1].close, 1.0)
        for ring in (rings[0], rings[2]):
            with pytest.raises(HostsError, match="process 1 of 3 has ended before it sent 'late'"):
                ring.all_gather("late", None)
            ring.close(0.1)
        ending.result()


def test_one_behind_a_process_that_left_does_not_wait_for_what_cannot_come(port):
    rings = together(port, *of(3))
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(rings[1].close, 0.1)
        leaving.result()
        for connection in (rings[1]._after, rings[1]._before):
            with socket.socket(fileno=os.dup(connection.fileno())) as held:
                held.shutdown(socket.SHUT_RDWR)
        waiting = pool.submit(rings[2].close)  # the message that process 0 ends would come through process 1
        rings[0].close(0.1)
        waiting.result(timeout=10.0)


def test_a_missing_process_is_named(port):
    said = together(port, *of(4)[:2], seconds=0.5)
    assert said == [f"processes 2, 3 of 4 did not come to port {port} within 0.5 s"] * 2


def test_a_missing_coordinator_is_named(port):
    (said,) = together(port, *of(2)[1:], seconds=0.3)
    assert f"no process 0 answers at 127.0.0.1:{port} within 0.3 s" in said


def test_two_with_one_number_are_refused(port):
    said = together(port, *of(3)[:2], of(3)[1])
    assert said == ["two processes are process 1: give each a number of its own"] * 3


def introduce(port, index, count):
    """A process that says who it is, and dies."""
    visitor = meeting._Visitor(process_id=index, num_processes=count, port=1, about={})
    said = visitor.model_dump_json().encode()
    meeting._connected(("127.0.0.1", port), b"jaxft", said, time.monotonic() + 10.0).close()


def test_one_that_died_while_it_waited_may_come_again(port):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(3)[0])
        introduce(port, 1, 3)
        second, third = together(port, *of(3)[1:])
        (first,) = waiting.result()
    assert [ring.process_id for ring in (first, second, third)] == [0, 1, 2]


def test_one_that_cannot_be_reached_is_named(port, monkeypatch):
    monkeypatch.setattr(meeting, "RING_SECONDS", 0.3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(2)[0])
        introduce(port, 1, 2)
        (said,) = waiting.result()
    assert said.startswith("process 0 does not reach process 1 at 127.0.0.1:1 (")


def strangers(port):
    """Connections that stop in the middle of a message: of the handshake, of its answer, of the introduction."""
    for said in (b"", struct.pack("!i", 200), struct.pack("!i", 16) + b"x"):
        stranger = socket.create_connection(("127.0.0.1", port), 10.0)
        stranger.sendall(said)
        yield stranger
    with socket.create_connection(("127.0.0.1", port), 10.0) as knowing:
        connection = meeting._known(knowing, b"jaxft", challenges_first=False)
        knowing.sendall(struct.pack("!i", 2000) + b"{")
    yield connection


def test_strangers_that_are_slow_keep_nobody(port, monkeypatch):
    monkeypatch.setattr(meeting, "HEARTBEAT_SECONDS", 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(2)[0])
        wait_for_listener(port)
        slow, began = list(strangers(port)), time.monotonic()
        (second,) = together(port, of(2)[1])
        assert waiting.result()[0].num_processes == second.num_processes == 2
        assert time.monotonic() - began < 1.5  # none of them was waited for
    for each in slow:
        each.close()


def drip(stranger):
    """Send a byte now and then until the other end closes the connection."""
    stranger.settimeout(0.1)
    stranger.sendall(struct.pack("!i", 200))
    with contextlib.suppress(ConnectionError):
        while True:
            with contextlib.suppress(TimeoutError):
                if not stranger.recv(100):
                    return
            stranger.sendall(b"x")


def test_a_handshake_has_one_deadline_and_the_oldest_gives_way(port, monkeypatch):
    monkeypatch.setattr(meeting, "HEARTBEAT_SECONDS", 2)
    monkeypatch.setattr(meeting, "MAX_HANDSHAKES", 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(2)[0], seconds=2.5)
        wait_for_listener(port)
        began = time.monotonic()
        first, *_, last = [socket.create_connection(("127.0.0.1", port), 10.0) for _ in range(3)]
        drip(first)
        assert time.monotonic() - began < 0.5
        drip(last)
        assert 1.8 < time.monotonic() - began < 2.4
        assert waiting.result() == [f"process 1 of 2 did not come to port {port} within 2.5 s"]


@pytest.mark.parametrize("said", [pickle.dumps(OSError("code")), b"{}", b'{"process_id": "one"}', b"null"])
def test_an_introduction_that_is_none_is_passed_over(port, said):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(2)[0])
        stranger = meeting._connected(("127.0.0.1", port), b"jaxft", said, time.monotonic() + 10.0)
        with pytest.raises(EOFError):
            stranger.recv_bytes()
        (second,) = together(port, of(2)[1])
        assert waiting.result()[0].num_processes == second.num_processes == 2


def test_an_answer_that_is_none_is_no_pickle(port):
    with socket.create_server(("127.0.0.1", port)) as listening, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(2)[1])
        accepted, _ = listening.accept()
        with accepted:
            connection = meeting._known(accepted, b"jaxft", challenges_first=True)
            connection.recv_bytes()
            connection.send_bytes(pickle.dumps(HostsError("code")))
        assert waiting.result() == [f"process 0 at 127.0.0.1:{port} has gone before all had come"]


def listening_addresses():
    """Local addresses, in hexadecimal, that a socket of this machine listens at."""
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
    return {(int(line[1].rpartition(":")[2], 16), line[1].rpartition(":")[0]) for line in lines if line[3] == "0A"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_run_on_one_machine_listens_on_loopback_only_without_a_warning(port, host, caplog, monkeypatch):
    monkeypatch.delenv(meeting.AUTHKEY, raising=False)
    before = listening_addresses()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, f"{host}:{port}", 0, 2, {}, within_seconds=0.5, on_loss=print)
        wait_for_listener(port)
        assert {address for _, address in listening_addresses() - before} == {"0100007F"}
        with pytest.raises(HostsError, match="did not come"):
            waiting.result()
    assert caplog.messages == []


@pytest.mark.parametrize(("secret", "count"), [(None, 1), ("a secret", 0)])
def test_a_run_on_several_machines_without_a_secret_is_warned_of_once(port, secret, count, caplog, monkeypatch):
    monkeypatch.delenv(meeting.AUTHKEY, raising=False)
    if secret is not None:
        monkeypatch.setenv(meeting.AUTHKEY, secret)
    with ThreadPoolExecutor(2) as pool:
        meeting_of = partial(meet, f"127.0.0.1:{port}", num_processes=2, about={}, within_seconds=10.0, on_loss=print)
        monkeypatch.setattr(meeting, "is_loopback", lambda host: False)
        rings = list(pool.map(lambda index: meeting_of(process_id=index), range(2)))
        list(pool.map(lambda ring: ring.close(), rings))
    assert [meeting.AUTHKEY in each for each in caplog.messages] == [True] * count


def test_one_that_does_not_read_for_a_while_is_not_lost(port, monkeypatch):
    monkeypatch.setattr(meeting, "HEARTBEAT_SECONDS", 2)
    heard = []
    rings = together(port, *[call | {"on_loss": heard.append} for call in of(2)])
    with ThreadPoolExecutor(2) as pool:
        with rings[1]._changed:  # its reader waits, as behind an agent that holds the global lock
            much, more = (pool.submit(rings[0].all_gather, name, bytes(30_000_000)) for name in ("much", "more"))
            time.sleep(3.0)  # the second message fills what the kernel holds
        assert len(rings[1].all_gather("much", None)[0]) == len(much.result()[0])
        assert len(rings[1].all_gather("more", None)[0]) == len(more.result()[0])
    assert heard == []


def test_other_counts_are_refused(port):
    said = together(port, of(2)[0], of(3)[1])
    assert said == ["process 1 has 3 processes, and process 0 has 2: give both one number"] * 2


def test_a_difference_is_named(port):
    said = together(port, of(2, about={"jaxft": "1.0"})[0], of(2, about={"jaxft": "1.1"})[1])
    assert said == ["jaxft is 1.1 in process 1, and 1.0 in process 0: all processes need the same"] * 2


def test_a_process_with_another_key_is_refused_and_the_others_wait(port, monkeypatch):
    came = threading.Event()
    authkey = meeting._authkey

    def of_thread():
        return b"another" if threading.current_thread().name == "stranger" else authkey()

    def be_a_stranger():
        with pytest.raises(HostsError, match=f"another {meeting.AUTHKEY}"):
            meet(f"127.0.0.1:{port}", 1, 2, {}, within_seconds=5.0, on_loss=lambda index: None)
        came.set()

    monkeypatch.setattr(meeting, "_authkey", of_thread)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, port, of(2)[0])
        threading.Thread(target=be_a_stranger, name="stranger").start()
        assert came.wait(timeout=10.0)
        (second,) = together(port, of(2)[1])
        (first,) = waiting.result()
    assert (first.process_id, second.process_id) == (0, 1)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1234", "host:port", "host:70000"])
def test_an_address_is_host_and_port(address):
    with pytest.raises(HostsError, match="wanted host:port"):
        meet(address, 0, 2, {}, within_seconds=1.0, on_loss=lambda index: None)


def test_the_number_of_a_process_is_below_their_count():
    with pytest.raises(HostsError, match="process_id is 2; wanted a number from 0 to 1"):
        meet("h:1", 2, 2, {}, within_seconds=1.0, on_loss=lambda index: None)
