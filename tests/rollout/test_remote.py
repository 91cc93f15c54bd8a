"""Remote models, against a server in this process: what they are sent, what comes back, and what episodes record."""

import asyncio
import gzip
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("openai")

import openai

from jaxft.errors import RemoteModelError
from jaxft.harness.evaluation import Evaluation
from jaxft.redaction import hiding
from jaxft.rollout.current import episode, outside_calls, recording
from jaxft.rollout.messages import ToolCall
from jaxft.rollout.recorder import TRAINING, Episode
from jaxft.rollout.remote import RemoteClient, RemoteReply

KEY = "sk-TEST-SENTINEL"
ASKED = [{"role": "user", "content": "2 + 2?"}]
LOOKUP = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"name": "b"}'}}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
AGAIN = {"Retry-After-Ms": "1"}


def completion(*contents, **message):
    choices = [
        {"index": index, "finish_reason": "stop", "message": {"role": "assistant", "content": content, **message}}
        for index, content in enumerate(contents)
    ]
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": choices, "usage": usage}


def events(*deltas, usage=None):
    """The body of a stream; a delta that is a text is a finish reason."""
    about = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    parts = [
        {"index": 0, "delta": {}, "finish_reason": delta} if isinstance(delta, str) else {"index": 0, "delta": delta}
        for delta in deltas
    ]
    chunks = [about | {"choices": [part]} for part in parts]
    chunks += [] if usage is None else [about | {"choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n" for chunk in chunks) + "data: [DONE]\n\n"


class Server(ThreadingHTTPServer):
    """Answers each request by `answer(request)`: a body, as JSON or text, or (status, body, headers)."""

    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.asked = []
        self.answer = lambda request: completion("4")
        self.closing = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append({"path": self.path, "key": self.headers["Authorization"], **request})
        answer = self.server.answer(request)
        status, body, headers = answer if isinstance(answer, tuple) else (200, answer, {})
        kind = "text/event-stream" if isinstance(body, str) else "application/json"
        body = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def make_client(server):
    def make(**options):
        return RemoteClient("small", "helper", **{"base_url": server.url, "api_key": KEY, **options})

    return make


def make_episode(example_id="a"):
    return Episode(0, TRAINING, 0, example_id, 0, temperature=0.0)


def run(make_client, ask, current=None, **options):
    """`await ask(client)` in an episode, if one is given."""

    async def main():
        client = make_client(**options)
        with recording(current):
            try:
                return await ask(client)
            finally:
                await client.close()

    return asyncio.run(main())


def test_a_call_sends_what_is_given_and_is_recorded_once(server, make_client):
    current = make_episode()

    async def ask(client):
        current.begin_call((1, 2))
        return await client.chat(ASKED, temperature=0.5, max_tokens=9, stop=["\n"])

    reply = run(make_client, ask, current)
    assert reply == RemoteReply("4", "stop", prompt_tokens=7, completion_tokens=3)
    assert reply.message == {"role": "assistant", "content": "4"}
    # The episode is one of a greedy evaluation, which is about the policy only.
    (asked,) = server.asked
    sent = {"model": "small", "messages": ASKED, "temperature": 0.5, "max_tokens": 9, "stop": ["\n"]}
    assert asked == {"path": "/v1/chat/completions", "key": f"Bearer {KEY}", **sent}
    (call,) = current.remote_calls
    assert (call.index, call.calls_before, call.llm, call.messages) == (0, 1, "helper", tuple(ASKED))
    assert (call.content, call.finish_reason, call.prompt_tokens, call.completion_tokens) == ("4", "stop", 7, 3)
    assert current.calls == [] and current.shaped_rewards is None


def test_tools_are_called(server, make_client):
    server.answer = lambda request: completion(None, tool_calls=[LOOKUP], reasoning_content="b?")
    current = make_episode()
    reply = run(make_client, lambda client: client.chat(ASKED, tools=TOOLS, tool_choice="required"), current)
    assert reply.tool_calls == (ToolCall("call_1", "lookup", '{"name": "b"}'),) and reply.reasoning_content == "b?"
    assert reply.message == {"role": "assistant", "content": None, "tool_calls": [LOOKUP]}
    assert (server.asked[0]["tools"], server.asked[0]["tool_choice"]) == (TOOLS, "required")
    assert [call.tool_calls for call in current.remote_calls] == [(LOOKUP,)]


def test_outside_of_an_episode_nothing_is_recorded_or_counted(make_client):
    before = outside_calls()

    async def ask(client):
        return await asyncio.create_task(client.chat(ASKED))

    assert run(make_client, ask).content == "4"
    assert outside_calls() == before


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_in_trouble_is_asked_again(server, make_client, status):
    server.answer = lambda request: (status, {"error": {}}, AGAIN) if len(server.asked) < 3 else completion("4")
    current = make_episode()
    assert run(make_client, lambda client: client.chat(ASKED), current).content == "4"
    assert len(server.asked) == 3 and len(current.remote_calls) == 1

    server.asked.clear()
    with pytest.raises(RemoteModelError, match=rf"llms\.helper: .*{status}"):
        run(make_client, lambda client: client.chat(ASKED), current, max_retries=1)
    assert len(server.asked) == 2 and len(current.remote_calls) == 1


def test_a_server_that_is_late_is_an_error_with_the_way_out(server, make_client):
    def answer(request):
        server.closing.wait()
        return completion("late")

    server.answer = answer
    current = make_episode()
    with pytest.raises(RemoteModelError, match=r"0\.2 s, in 1 attempts; raise llms\.helper\.timeout_seconds"):
        run(make_client, lambda client: client.chat(ASKED), current, max_retries=0, timeout_seconds=0.2)
    assert current.remote_calls == []


def test_a_server_that_is_not_there_is_an_error(make_client):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(RemoteModelError, match=r"llms\.helper: .*base_url.*ConnectError"):
            run(make_client, lambda client: client.chat(ASKED), base_url=url, max_retries=0)


@pytest.mark.parametrize(
    "body", [{"error": {"message": "no such model"}}, {"choices": []}, {"choices": [{"text": "4"}]}, [], b"<html>"]
)
def test_what_is_no_completion_is_quoted(server, make_client, body):
    server.answer = lambda request: (200, body, {})
    current = make_episode()
    with pytest.raises(RemoteModelError) as caught:
        run(make_client, lambda client: client.chat(ASKED), current)
    assert (body if isinstance(body, bytes) else json.dumps(body).encode()).decode() in str(caught.value)
    assert current.remote_calls == []


def test_a_long_page_is_quoted_by_its_first_hundred_characters(server, make_client):
    server.answer = lambda request: (200, b"<html>" + b"x" * 200, {})
    with pytest.raises(RemoteModelError, match=r"'<html>x{94}'; wanted a chat completion"):
        run(make_client, lambda client: client.chat(ASKED))


def test_a_refused_call_is_a_failed_episode_in_one_line_without_the_key(server, make_client, make_items):
    refusal = {"error": {"message": f"the key {KEY}\nmay not use this model"}}
    server.answer = lambda request: (400, refusal, {}) if "b" in request["messages"][0]["content"] else completion("4")

    async def evaluate(client):
        async def agent(example):
            return (await client.chat([{"role": "user", "content": example["name"]}])).content

        evaluation = Evaluation(agent, {"right": lambda item: 1.0}, "right", 4, 0)
        return await evaluation.run(make_items("abc"), stream=TRAINING, rollout_index=0)

    with hiding([KEY]):
        outcomes = run(make_client, evaluate)
    assert [outcome.reward for outcome in outcomes] == [1.0, None, 1.0]
    error = outcomes[1].error
    assert "\n" not in error and "llms.helper" in error and "400" in error and "may not use this model" in error
    assert KEY not in error + outcomes[1].traceback
    assert [len(outcome.episode.remote_calls) for outcome in outcomes] == [1, 0, 1]
    assert len(server.asked) == 3  # a 400 is not repeated


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_an_episode_that_is_out_of_time_lets_go_of_its_call(server, make_client, make_items, is_async):
    def answer(request):
        server.closing.wait()
        return completion("late")

    server.answer = answer

    async def evaluate(client):
        async def agent(example):
            return await client.chat(ASKED)

        def plain(example):
            return client.chat_sync(ASKED)

        workflow = agent if is_async else plain
        evaluation = Evaluation(workflow, {"right": lambda item: 1.0}, "right", 4, 0, timeout_seconds=0.3)
        (outcome,) = await evaluation.run(make_items("a"), stream=TRAINING, rollout_index=0)
        return outcome, evaluation.supervisor.num_abandoned

    outcome, num_abandoned = run(make_client, evaluate)
    assert "TimeoutError" in outcome.error and outcome.episode.remote_calls == []
    assert num_abandoned == 0


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_streams_pass_unrecorded(server, make_client, is_async):
    server.answer = lambda request: events({"role": "assistant", "content": ""}, {"content": "v\u2028ier"}, "stop")

    async def ask(client):
        if is_async:
            async with client.openai_client() as frameworks:
                stream = await frameworks.chat.completions.create(model="small", messages=ASKED, stream=True)
                chunks = [chunk async for chunk in stream]
        else:
            with client.openai_client_sync() as frameworks:
                chunks = list(frameworks.chat.completions.create(model="small", messages=ASKED, stream=True))
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    current = make_episode()
    assert run(make_client, ask, current) == "v\u2028ier"
    assert current.remote_calls == []


def test_compressed_bodies_and_several_answers(server, make_client):
    body = gzip.compress(json.dumps(completion("4", "four")).encode())
    server.answer = lambda request: (200, body, {"Content-Encoding": "gzip"})

    async def ask(client):
        with client.openai_client_sync() as frameworks:
            given = frameworks.chat.completions.create(model="small", messages=ASKED, n=2)
        return [choice.message.content for choice in given.choices]

    current = make_episode()
    assert run(make_client, ask, current) == ["4", "four"]
    assert [(call.index, call.content) for call in current.remote_calls] == [(0, "4"), (0, "four")]


def test_other_requests_pass_unrecorded(server, make_client):
    server.answer = lambda request: {"object": "list", "data": [{"index": 0, "embedding": [0.5]}], "model": "m"}

    async def ask(client):
        async with client.openai_client() as frameworks:
            given = await frameworks.embeddings.create(model="small", input="x", encoding_format="float")
        return given.data[0].embedding

    current = make_episode()
    assert run(make_client, ask, current) == [0.5]
    assert current.remote_calls == []


def test_concurrent_episodes_record_their_own_calls_in_the_order_of_the_requests(server, make_client, make_items):
    server.answer = lambda request: completion(request["messages"][0]["content"].upper())

    async def evaluate(client):
        async def agent(example):
            async def ask(number):
                return await client.chat([{"role": "user", "content": f"{example['name']}{number}"}])

            return [reply.content for reply in await asyncio.gather(*map(ask, range(5)))]

        evaluation = Evaluation(agent, {"right": lambda item: 1.0}, "right", 64, 0)
        return await evaluation.run(make_items("abcdefgh"), stream=TRAINING, rollout_index=0)

    outcomes = run(make_client, evaluate)
    assert len(server.asked) == 40
    for outcome in outcomes:
        expected = [f"{outcome.item.id}{number}".upper() for number in range(5)]
        assert outcome.item.output_obj == expected
        assert [call.index for call in outcome.episode.remote_calls] == [0, 1, 2, 3, 4]
        assert sorted(call.content for call in outcome.episode.remote_calls) == expected


def test_plain_functions_ask_as_coroutines_do(server, make_client, make_items):
    async def evaluate(client):
        def agent(example):
            assert client.chat_sync(ASKED).content == "4"
            # A framework's own event loops, one after the other.
            assert [asyncio.run(client.chat(ASKED)).content for _ in range(2)] == ["4", "4"]
            with client.openai_client_sync() as frameworks:
                return frameworks.chat.completions.create(model="small", messages=ASKED).choices[0].message.content

        evaluation = Evaluation(agent, {"right": lambda item: 1.0}, "right", 4, 0)
        with pytest.raises(RuntimeError, match="await"):
            client.chat_sync(ASKED)
        return await evaluation.run(make_items("ab"), stream=TRAINING, rollout_index=0)

    outcomes = run(make_client, evaluate)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [len(outcome.episode.remote_calls) for outcome in outcomes] == [4, 4]
    with ThreadPoolExecutor() as pool:  # in no episode
        client = make_client()
        assert list(pool.map(lambda _: client.chat_sync(ASKED).content, range(3))) == ["4"] * 3


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_an_episode_that_has_ended_asks_nothing_more(server, make_client, is_async):
    async def ask(client):
        assert episode().end() is False
        if is_async:
            return await client.chat(ASKED)
        with client.openai_client_sync() as frameworks:
            return frameworks.chat.completions.create(model="small", messages=ASKED)

    with pytest.raises(asyncio.CancelledError):
        run(make_client, ask, make_episode())
    assert server.asked == []


def test_without_a_key_there_is_no_client(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(openai.OpenAIError):
        RemoteClient("small")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    client = RemoteClient("small")
    assert (client.api_key, client.base_url) == (KEY, "https://api.openai.com/v1/")
    assert KEY not in repr(client)
