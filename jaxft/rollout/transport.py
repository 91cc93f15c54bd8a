"""Transports of httpx and httpx2 that call an ASGI app in this process, without a socket.

The app runs in the caller's context, so its current episode is the caller's. An asynchronous transport runs it in a
task of the caller's event loop; a synchronous one in an event loop of its own, in a thread of its own, so that it
blocks any thread, even one that runs an event loop, and still gets its answer. Each chunk of a body arrives as the app
sends it. A time-out of the client, a closed or dropped stream and a cancelled caller cancel the app's task.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, MutableMapping
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
"""An ASGI app: called with scope, receive and send."""


def http_library() -> ModuleType:
    """Return the HTTP library of the installed openai: httpx2 for openai 3.52 and later, httpx for earlier ones."""
    openai = importlib.import_module("openai")  # an extra
    return importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])


def async_transport(http: Any, app: App) -> Any:
    """Return a transport for `http.AsyncClient` that calls the app; `http` is the module httpx or httpx2."""

    class Stream(http.AsyncByteStream):
        def __init__(self, exchange: _Exchange, request: Any) -> None:
            self._exchange, self._request = exchange, request

        async def __aiter__(self) -> AsyncIterator[bytes]:
            while not self._exchange.has_ended:
                with _time_outs(http, self._request):
                    chunk = await self._exchange.chunk()
                yield chunk

        async def aclose(self) -> None:
            await self._exchange.close()

    class Transport(http.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any:
            exchange = _Exchange(app, _scope(request), await request.aread(), _read_timeout(request))
            try:
                with _time_outs(http, request):
                    status, headers = await exchange.start()
            except BaseException:
                await exchange.close()
                raise
            return http.Response(status, headers=headers, stream=Stream(exchange, request), request=request)

    return Transport()


def sync_transport(http: Any, app: App) -> Any:
    """Return a transport for `http.Client` that calls the app; `http` is the module httpx or httpx2."""

    class Stream(http.SyncByteStream):
        def __init__(self, exchange: _Exchange, request: Any) -> None:
            self._exchange, self._request = exchange, request

        def __iter__(self) -> Iterator[bytes]:
            while not self._exchange.has_ended:
                with _time_outs(http, self._request):
                    chunk = _in_own_loop(self._exchange.chunk())
                yield chunk

        def close(self) -> None:
            _in_own_loop(self._exchange.close())

    class Transport(http.BaseTransport):
        def handle_request(self, request: Any) -> Any:
            exchange = _in_own_loop(_begin(app, _scope(request), request.read(), _read_timeout(request)))
            try:
                with _time_outs(http, request):
                    status, headers = _in_own_loop(exchange.start())
            except BaseException:
                _in_own_loop(exchange.close())
                raise
            return http.Response(status, headers=headers, stream=Stream(exchange, request), request=request)

    return Transport()


class _Exchange:
    """A request and the response that the app is sending, in the event loop that made it.

    Attributes:
        has_ended: True once the last chunk was read; then the app is left to end by itself.
    """

    has_ended = False

    def __init__(self, app: App, scope: Message, body: bytes, timeout_seconds: float | None) -> None:
        self._seconds = timeout_seconds
        self._loop = asyncio.get_running_loop()
        # Holds messages and, at the end, the task.
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        self._task = self._loop.create_task(_serve(app, scope, body, self._sent.put_nowait))
        self._task.add_done_callback(self._sent.put_nowait)

    async def start(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        message = await self._next()
        if message["type"] != "http.response.start":
            raise RuntimeError(f"the app began its response with {message['type']}; wanted http.response.start")
        return message["status"], list(message.get("headers", ()))

    async def chunk(self) -> bytes:
        message = await self._next()
        self.has_ended = not message.get("more_body", False)
        return message.get("body", b"")

    async def close(self) -> None:
        if not self.has_ended:
            self._task.cancel()
            await asyncio.wait({self._task})

    def __del__(self) -> None:  # of a stream that was dropped without being closed
        if not self.has_ended and not self._task.done():
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._task.cancel)

    async def _next(self) -> Message:
        async with asyncio.timeout(self._seconds):
            sent = await self._sent.get()
        if isinstance(sent, asyncio.Task):
            sent.result()  # raises the app's error
            raise RuntimeError("the app ended before its response did")
        return sent


async def _serve(app: App, scope: Message, body: bytes, send_to_client: Callable[[Message], None]) -> None:
    """Run the app on one request; a client that goes away cancels this task."""
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.get_running_loop().create_future()  # never done
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        send_to_client(message)

    await app(scope, receive, send)


@contextlib.contextmanager
def _time_outs(http: Any, request: Any) -> Iterator[None]:
    """Raise a `TimeoutError` of the body as the time-out of the HTTP library."""
    try:
        yield
    except TimeoutError:
        seconds = _read_timeout(request)
        raise http.ReadTimeout(f"the app sent nothing for {seconds} seconds", request=request) from None


def _read_timeout(request: Any) -> float | None:
    """Return the client's limit of seconds for each wait."""
    return request.extensions.get("timeout", {}).get("read")


def _scope(request: Any) -> Message:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.partition(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": None,
        "server": (request.url.host, request.url.port),
    }


@functools.cache
def _made_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="jaxft transport", daemon=True).start()
    return loop


_lock = threading.Lock()


async def _begin(app: App, scope: Message, body: bytes, timeout_seconds: float | None) -> _Exchange:
    return _Exchange(app, scope, body, timeout_seconds)


def _in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work in the event loop of all synchronous transports, which has a thread of its own."""
    with _lock:
        loop = _made_loop()
    try:
        return asyncio.run_coroutine_threadsafe(work, loop).result()
    except concurrent.futures.CancelledError:
        raise asyncio.CancelledError("the app cancelled the request") from None
