"""The server over real sockets, and the guard in front of the app."""

import asyncio
import concurrent.futures
import contextlib
import json
import socket
import threading
import time

import openai
import pytest

import jaxft.serving.server as server_module
from jaxft.harness.addresses import Limits
from jaxft.rollout.client import ChatClient
from jaxft.rollout.current import recording
from jaxft.serving.app import make_app
from jaxft.serving.guard import BODIES_AT_ONCE
from jaxft.serving.server import Server
from tests.serving.conftest import QUESTION, make_episode

BODY = {"model": "player", "messages": QUESTION, "max_tokens": 4}
ENDLESS = {**BODY, "max_tokens": 90, "logit_bias": {"1": -100}}  # without the end token
KEY = "a-key-of-the-server"


@contextlib.contextmanager
def serving(llm, **options):
    """A server at a free port, closed at the end; then no request, connection or thread is left."""
    before = threading.active_count()
    server = Server(make_app({"player": llm}) if isinstance(llm, ChatClient) else llm, **options)
    try:
        yield server
    finally:
        asyncio.run(server.close())
    assert server.guard.num_requests == 0
    assert threading.active_count() <= before  # threads of other tests may have ended


def send(server, *lines, body=b"", head_end=b"\r\n\r\n"):
    """Send bytes by a new connection, and return it."""
    _, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection(("127.0.0.1", int(port)), timeout=60)
    connection.sendall("\r\n".join(lines).encode() + head_end + body)
    return connection


def wait_until(is_true):
    """Wait for other threads until a function returns a true value."""
    while not is_true():
        time.sleep(0.001)


def read(connection):
    """Everything until the server closes the connection."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def begin(server, body=BODY, path="/v1/chat/completions", **headers):
    """The connection of a request with these headers; they may announce more than the body."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": server.url.removeprefix("http://"), "Content_Length": len(content), "Connection": "close"}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in (fields | headers).items() if value is not None]
    return send(server, f"POST {path} HTTP/1.1", *lines, body=content)


def request(server, body=BODY, path="/v1/chat/completions", **headers):
    """Status and JSON of the answer to a request with these headers."""
    head, _, content = read(begin(server, body, path, **headers)).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content), head.decode().lower()


def test_a_client_is_answered_at_the_address(llm):
    with serving(llm) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
        with client:
            assert client.chat.completions.create(**BODY).usage.completion_tokens <= 4
            assert [chunk for chunk in client.chat.completions.create(**BODY, stream=True)]
            assert [model.id for model in client.models.list()] == ["player"]
    with pytest.raises(OSError):
        send(server, "GET /health HTTP/1.1")


@pytest.mark.parametrize(
    "key", [None, "", "a", KEY[:-1], KEY + "x", KEY.upper(), "é" * 30, "jaxft-episode-", "x" * 9000]
)
def test_a_missing_or_wrong_key_is_refused(llm, key):
    with serving(llm, api_key=KEY) as server:
        status, answer, head = request(server, Authorization=key and f"Bearer {key}")
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert "www-authenticate: bearer" in head and KEY not in str(answer)


def test_the_key_admits(llm):
    with serving(llm, api_key=KEY) as server:
        for headers in ({"Authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer {KEY}"}, {"x-api-key": KEY}):
            assert request(server, **headers)[0] == 200


def test_the_base_url_of_an_episode_records_its_calls_and_ends_with_it(llm):
    with serving(llm, api_key=KEY) as server:
        episode = make_episode(server_url=server.url)
        path = episode.base_url.removeprefix(server.url) + "/chat/completions"
        assert request(server, path=path)[0] == 200
        assert request(server, Authorization=f"bearer  {episode.api_key}")[0] == 200
        assert request(server, path=f"{path}/")[0] == 404  # no redirect to a path without the token

        async def ask():
            with recording(make_episode(server_url=server.url)) as other:
                await llm.chat(QUESTION, max_tokens=4)
                await llm.chat(QUESTION, max_tokens=4)
            return other

        other = asyncio.run(ask())
        assert [call.token_ids for call in episode.calls] == [call.token_ids for call in other.calls]
        assert [call.sampler_logprobs for call in episode.calls] == [call.sampler_logprobs for call in other.calls]
        episode.end()
        assert request(server, path=path)[0] == 401
        assert (
            request(server, path="/e/jaxft-episode-guessed/v1/chat/completions", Authorization=f"Bearer {KEY}")[0]
            == 401
        )
        assert len(episode.calls) == 2


def test_the_end_of_an_episode_ends_its_running_call(llm):
    async def begin_and_end(server, episode):
        with recording(episode):
            path = episode.base_url.removeprefix(server.url) + "/chat/completions"
            asking = asyncio.create_task(asyncio.to_thread(request, server, ENDLESS, path))
            while not episode._waiting:
                await asyncio.sleep(0)
            episode.end()
            return await asking

    with serving(llm) as server:
        episode = make_episode(server_url=server.url)
        status, answer, _ = asyncio.run(begin_and_end(server, episode))
        assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
        assert episode.calls == []
        carried = make_episode(server_url=server.url, answers={}, answer_tokens=2)
        for _ in range(2):  # the call that stops the episode, and a later one
            path = carried.base_url.removeprefix(server.url) + "/chat/completions"
            status, answer, _ = request(server, ENDLESS, path)
            assert status == 401 and "goes on in the next collection" in answer["error"]["message"]
        assert carried.is_carried and carried.calls == []


def test_names_of_this_machine_and_allowed_ones_are_served_and_no_others(llm):
    with serving(llm, allowed_hosts=["trainer.example"]) as server:
        for host in ("localhost", "LOCALHOST.:80", "127.0.0.1:1", "[::1]:80", "Trainer.Example"):
            assert request(server, Host=host)[0] == 200
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "a@127.0.0.1", "::1"):
            status, answer, _ = request(server, Host=host)
            assert status == 400 or (status, answer["error"]["code"]) == (421, "unknown_host")


def test_web_pages_of_other_sites_are_refused(llm):
    with serving(llm) as server:
        for origin in ("https://evil.example", "http://[", "null", ""):
            status, answer, _ = request(server, Origin=origin)
            assert (status, answer["error"]["code"]) == (403, "foreign_origin")
        assert request(server, Origin=server.url)[0] == 200


def test_an_address_that_others_reach_or_that_is_in_use_is_an_error(llm):
    with pytest.raises(ValueError, match=r"0\.0\.0\.0 .*api_key"):
        Server(make_app({"player": llm}), host="0.0.0.0")
    with serving(llm) as server, pytest.raises(OSError, match="in use"):
        Server(make_app({"player": llm}), port=int(server.url.rpartition(":")[2]))


def test_bodies_are_refused_beyond_a_number_of_bytes_that_are_read_at_once(llm):
    with serving(llm, limits=Limits(max_body_bytes=1000)) as server:
        reading = [begin(server, b" " * 999, Content_Length=1000) for _ in range(BODIES_AT_ONCE)]
        wait_until(lambda: server.guard._num_bytes == 999 * BODIES_AT_ONCE)
        status, answer, head = request(server, b" " * 999, "/v1/messages")
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert "retry-after: 1" in head
        for connection in reading:
            connection.close()
        wait_until(lambda: not server.guard.num_requests)
        assert request(server)[0] == 200


def test_a_connection_whose_bytes_are_no_http_is_closed(llm):
    with serving(llm) as server:
        host = server.url.removeprefix("http://")
        chunked = {"Content_Length": None, "Transfer_Encoding": "chunked"}
        for connection in (
            send(server, "GET /health HTTP/1.1", f"Host: {host}", "Host: other"),
            begin(server, b"no length\r\n", "/v1/messages", **chunked),
        ):
            with contextlib.suppress(ConnectionResetError):
                assert read(connection) == b""
        assert request(server)[0] == 200


def idle(server, count):
    return [send(server, "GET /v1/models HTTP/1.1", head_end=b"\r\n") for _ in range(count)]


def test_many_clients_may_come_at_once(llm):
    with serving(llm, api_key=KEY) as server:
        server.max_connections = 16
        waiting = idle(server, 12)
        for connection in waiting:
            connection.sendall(f"Host: localhost\r\nConnection: close\r\nx-api-key: {KEY}\r\n\r\n".encode())
        assert [read(connection)[:12] for connection in waiting] == [b"HTTP/1.1 200"] * 12


def test_streams_that_clients_leave_are_not_written_to(caplog):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scope["state"][server_module.CONNECTION].transport.abort()  # as when the client is found to be gone
        for _ in range(20):  # events of one step of the engine
            await send({"type": "http.response.body", "body": b"event", "more_body": True})

    with serving(app) as server:
        assert read(send(server, "GET / HTTP/1.1", "Host: localhost")).endswith(b"\r\n\r\n")  # and no event
        wait_until(lambda: not server.num_connections)
    assert [each.getMessage() for each in caplog.records if each.name == "asyncio"] == []


def test_connections_are_limited(llm):
    with serving(llm) as server:
        server.max_connections = 1
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as known:
            known.models.list()
            status, answer, _ = request(server, path="/v1/messages")
            assert (status, answer["error"]["type"]) == (503, "api_error")
            with contextlib.ExitStack() as stack:
                for connection in idle(server, 5):
                    stack.enter_context(connection)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""  # closed, as there are more than twice as many


def test_large_bodies_are_refused(llm):
    with serving(llm, limits=Limits(max_body_bytes=1000)) as server:
        assert read(begin(server, b"", Content_Length=2000)).startswith(b"HTTP/1.1 413 ")
        chunks = b"200\r\n" + b" " * 512 + b"\r\n"
        chunked = begin(server, chunks * 2, Content_Length=None, Transfer_Encoding="chunked")
        assert read(chunked).startswith(b"HTTP/1.1 413 ")
        with contextlib.suppress(ConnectionResetError):
            assert read(send(server, "GET /health HTTP/1.1", f"X: {'x' * 70000}")) == b""


def test_slow_heads_and_bodies_are_ended(llm):
    with serving(llm, limits=Limits(head_seconds=0.3, body_seconds=0.3)) as server:
        assert read(send(server, "", head_end=b"")) == b""  # nothing at all
        assert read(send(server, "POST /v1/chat/completions HTTP/1.1", "Host: ", head_end=b"")) == b""
        assert read(begin(server, b"{", Content_Length=50)).startswith(b"HTTP/1.1 408 ")


def test_a_second_head_on_one_connection_is_timed_too(llm):
    with serving(llm, limits=Limits(head_seconds=0.3)) as server:
        host = server.url.removeprefix("http://")
        connection = send(server, "GET /health HTTP/1.1", f"Host: {host}", body=b"GET /health")
        assert read(connection).count(b"HTTP/1.1 200 ") == 1


def test_a_client_that_does_not_read_is_cut_off(llm):
    with serving(llm, limits=Limits(write_seconds=0.3)) as server:
        host = server.url.removeprefix("http://")
        # Long answers, which soon fill what the system keeps for a reader.
        connection = send(server, *["GET /metrics HTTP/1.1", f"Host: {host}"])
        pipelined = b"".join([b"GET /metrics HTTP/1.1\r\nHost: " + host.encode() + b"\r\n\r\n"] * 100)
        with pytest.raises(ConnectionError):  # not the socket's own time-out
            for _ in range(10_000):
                connection.sendall(pipelined)
        connection.close()


def test_too_many_requests_are_told_to_come_again(llm):
    with serving(llm, limits=Limits(max_requests=1)) as server:
        running = begin(server, {**ENDLESS, "stream": True})
        wait_until(lambda: server.guard.num_requests)
        status, answer, told = request(server)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "retry-after: 1" in told
        running.close()
        wait_until(lambda: not server.guard.num_requests)
        assert request(server)[0] == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(llm, is_stream):
    with serving(llm) as server:
        for _ in range(10):
            connection = begin(server, {**ENDLESS, "n": 4, "stream": is_stream})
            wait_until(lambda: server.guard.num_requests)
            connection.close()
            wait_until(lambda: not server.guard.num_requests)
        assert request(server)[0] == 200
        assert not llm.policy.engine._scheduler.running


def test_a_client_that_goes_away_after_a_further_request_frees_its_slot(llm):
    with serving(llm) as server:
        connection = begin(server, {**ENDLESS, "n": 64})
        wait_until(lambda: llm.policy.engine._scheduler.running)
        (protocol,) = server._server.server_state.connections
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        wait_until(lambda: protocol.conn.trailing_data[0])
        connection.close()
        wait_until(lambda: not server.guard.num_requests)
        assert server.guard.num_answered == 1 and protocol.cycle.disconnected


def test_a_body_that_comes_while_the_server_ends_gets_an_answer(llm):
    with serving(llm, limits=Limits(drain_seconds=1.0)) as server:
        sent = begin(server, b"{", "/v1/messages", Content_Length=9)
        wait_until(lambda: server.guard.num_requests)
    assert read(sent).startswith(b"HTTP/1.1 503 ")


def test_running_requests_end_before_the_server_does(llm):
    with serving(llm) as server, concurrent.futures.ThreadPoolExecutor(1) as threads:
        asking = threads.submit(request, server, {**ENDLESS, "max_tokens": 60})
        wait_until(lambda: server.guard.num_requests)
        asyncio.run(server.close())
        status, answer, _ = asking.result()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 60)


def test_a_request_that_takes_too_long_to_drain_gets_an_answer(llm):
    with serving(llm, limits=Limits(drain_seconds=0.01)) as server, concurrent.futures.ThreadPoolExecutor(1) as threads:
        asking = threads.submit(request, server, {**ENDLESS, "n": 128})
        wait_until(lambda: server.guard.num_requests)
        asyncio.run(server.close())
        assert asking.result()[0] == 503


def test_nothing_is_left_of_two_hundred_disconnects(llm):
    with serving(llm) as server:
        host = server.url.removeprefix("http://")
        content = json.dumps({**BODY, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        whole = head + content
        for cut in range(200):
            connection = send(server, head_end=whole[: len(whole) * (cut % 50 + 1) // 50])
            connection.close()
        # Connections are accepted in turn: when the last one is answered, even refused, all others were accepted.
        read(send(server, "GET /v1/models HTTP/1.1", f"Host: {host}", "Connection: close"))
        wait_until(lambda: not (server.guard.num_requests or server.num_connections))
        assert request(server)[0] == 200
    assert not llm.policy.engine._scheduler.running
