import asyncio
import contextvars
import gc
import importlib
import importlib.util
import threading

import pytest

from jaxft.rollout.transport import async_transport, sync_transport

pytestmark = pytest.mark.usefixtures("no_sockets")

HTTP_LIBRARIES = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name) is not None]

URL = "http://app.invalid/a/b?c=d"
caller = contextvars.ContextVar("caller", default="nobody")


@pytest.fixture(params=HTTP_LIBRARIES)
def http(request):
    """Each HTTP library that is installed: openai's own is one of them."""
    return importlib.import_module(request.param)


async def respond(send, body, *, status=200, more_body=False):
    await send({"type": "http.response.start", "status": status, "headers": [(b"x-by", b"app")]})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


async def echo(scope, receive, send):
    """Answers with what it got."""
    message = await receive()
    assert not message["more_body"]
    headers = dict(scope["headers"])
    got = f"{scope['method']} {scope['path']} {scope['query_string'].decode()} {headers[b'x-of'].decode()} "
    await respond(send, got.encode() + message["body"], status=201)


class Endless:
    """An app that sends one number after the other until its task is cancelled."""

    def __init__(self, *, begins=True):
        self.begins = begins
        self.running = 0
        self.idle = threading.Event()

    async def __call__(self, scope, receive, send):
        self.running += 1
        try:
            if not self.begins:
                await asyncio.sleep(60)
            await respond(send, b"0", more_body=True)
            for number in range(1, 10**9):
                await asyncio.sleep(0)
                await send({"type": "http.response.body", "body": str(number).encode(), "more_body": True})
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()


def asynchronously(http, app, use, **options):
    async def main():
        async with http.AsyncClient(transport=async_transport(http, app), **options) as client:
            return await use(client)

    return asyncio.run(main())


def test_the_app_gets_the_request_and_the_client_the_response(http):
    async def use(client):
        return await client.post(URL, content=b"body", headers={"X-Of": "mine"})

    responses = [asynchronously(http, echo, use)]
    with http.Client(transport=sync_transport(http, echo)) as client:
        responses.append(client.post(URL, content=b"body", headers={"X-Of": "mine"}))
    for response in responses:
        assert (response.status_code, response.text) == (201, "POST /a/b c=d mine body")
        assert response.headers["x-by"] == "app"


def test_chunks_arrive_one_by_one(http):
    """Each waits for the client to have the one before it."""
    async_turn, sync_turn = asyncio.Semaphore(0), threading.Semaphore(0)

    def app(wait):
        async def app(scope, receive, send):
            await respond(send, b"0", more_body=True)
            for number in (b"1", b"2"):
                await wait()
                await send({"type": "http.response.body", "body": number, "more_body": True})
            await send({"type": "http.response.body"})

        return app

    async def use(client):
        got = []
        async with client.stream("GET", URL) as response:
            async for chunk in response.aiter_bytes():
                got.append(chunk)
                async_turn.release()
        return got

    assert asynchronously(http, app(async_turn.acquire), use) == [b"0", b"1", b"2"]

    got = []
    client = http.Client(transport=sync_transport(http, app(lambda: asyncio.to_thread(sync_turn.acquire))))
    with client.stream("GET", URL) as response:
        for chunk in response.iter_bytes():
            got.append(chunk)
            sync_turn.release()
    assert got == [b"0", b"1", b"2"]


def test_an_early_close_cancels_the_app(http):
    app = Endless()

    async def use(client):
        async with client.stream("GET", URL) as response:
            async for _ in response.aiter_bytes():
                break
        return app.running

    assert asynchronously(http, app, use) == 0

    app = Endless()
    with http.Client(transport=sync_transport(http, app)) as client:
        with client.stream("GET", URL) as response:
            next(response.iter_bytes())
        assert app.idle.wait(10)


def test_a_stream_that_is_dropped_cancels_the_app(http):
    app = Endless()

    async def use(client):
        response = await client.send(client.build_request("GET", URL), stream=True)
        assert app.running == 1
        del response
        gc.collect()
        await asyncio.sleep(0.01)
        return app.running

    assert asynchronously(http, app, use) == 0

    app = Endless()
    client = http.Client(transport=sync_transport(http, app))
    response = client.send(client.build_request("GET", URL), stream=True)
    del response
    gc.collect()
    assert app.idle.wait(10)


@pytest.mark.parametrize("begins", [False, True])
def test_a_time_out_cancels_the_app(http, begins):
    async def silent(scope, receive, send):
        if begins:
            await respond(send, b"0", more_body=True)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(1)
            is_idle.set()

    async def use(client):
        with pytest.raises(http.ReadTimeout, match=r"0\.05"):
            await client.get(URL)

    ended, is_idle = [], threading.Event()
    asynchronously(http, silent, use, timeout=0.05)
    assert ended == [1]
    is_idle.clear()
    with pytest.raises(http.ReadTimeout, match=r"0\.05"):
        http.Client(transport=sync_transport(http, silent), timeout=0.05).get(URL)
    assert is_idle.wait(10) and ended == [1, 1]


def test_a_cancelled_caller_cancels_the_app(http):
    app = Endless(begins=False)

    async def use(client):
        asking = asyncio.create_task(client.get(URL))
        while not app.running:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        return app.running

    assert asynchronously(http, app, use) == 0


def test_the_app_runs_in_the_context_of_its_caller(http):
    async def name(scope, receive, send):
        await respond(send, caller.get().encode())

    async def ask(client, who):
        caller.set(who)
        return (await client.get(URL)).text

    async def use(client):
        return await asyncio.gather(*(ask(client, who) for who in "abc"))

    assert asynchronously(http, name, use) == ["a", "b", "c"]

    def work(who):
        caller.set(who)
        got.append(client.get(URL).text)

    got = []
    with http.Client(transport=sync_transport(http, name)) as client:
        threads = [threading.Thread(target=work, args=(who,)) for who in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == ["a", "b", "c"]
        assert client.get(URL).text == "nobody"


def test_a_synchronous_client_may_block_a_running_event_loop(http):
    async def main():
        with http.Client(transport=sync_transport(http, echo)) as client:
            return client.get(URL, headers={"x-of": "loop"}).text

    assert asyncio.run(main()) == "GET /a/b c=d loop "


def test_an_error_of_the_app_reaches_the_caller(http):
    async def broken(scope, receive, send):
        raise LookupError("app")

    async def halved(scope, receive, send):
        await respond(send, b"0", more_body=True)

    async def cancelled(scope, receive, send):
        raise asyncio.CancelledError

    async def use(client):
        await client.get(URL)

    for app, error in ((broken, LookupError), (halved, RuntimeError), (cancelled, asyncio.CancelledError)):
        with pytest.raises(error):
            asynchronously(http, app, use)
        with http.Client(transport=sync_transport(http, app)) as client, pytest.raises(error):
            client.get(URL)
