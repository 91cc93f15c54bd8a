"""A server of an app: uvicorn in a thread with an event loop of its own, which no agent can block.

uvicorn limits neither the time for the head of a request nor that for which a client leaves a response unread, and
accepts any number of connections; a protocol class of it limits them here. All other limits are
those of the `Guard` around the app.
"""

import asyncio
import resource
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxft import LanguageModel
from jaxft.harness import Limits
from jaxft.serving.guard import Guard, refuse, unavailable
from jaxft.serving.metrics import Metrics

MAX_HEAD_BYTES = 2**16
"""Largest size of the first line and the headers of a request."""

CONNECTIONS_PER_REQUEST = 4
"""Connections that may be open for each request that may be answered at the same time; requests of further ones get a
503, and those beyond twice as many are closed."""

MIN_CONNECTIONS = 1024

CONNECTION = "jaxft.connection"
"""Key of the connection in the state of a request's scope."""

SHARE_OF_FILES = 4
"""Connections take at most this part of the files that the process may open, as the run itself needs some."""

KEEP_ALIVE_SECONDS = 30
"""Time that a connection may be idle. Clients give theirs up earlier, mostly after 5 seconds, so that none sends a
request into a connection that is being closed."""


class Server:
    """Serves an app at an address until it is closed.

    Attributes:
        guard: the app with its limits, and counts of requests.
        limits: limits of requests and connections.
        metrics: counts and times of requests, and the load of the engines.
        url: address, such as `http://127.0.0.1:8000`; it is open from the moment on that the server is made.
        max_connections: connections that are served at the same time; those beyond twice as many are closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        llms: Mapping[str, LanguageModel] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        allowed_hosts: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> None:
        """Open the address and begin to serve.

        Args:
            app: the app.
            llms: its language models by their names, whose engines the metrics describe; None: none.
            host: address or name to listen on.
            port: its port; 0 takes a free one.
            api_key: key that requests need; None: none.
            allowed_hosts: further names by which clients may call the server; see `Guard`.
            limits: limits of requests; None: the defaults.

        Raises:
            ValueError: the address can be reached from elsewhere, and there is no key.
            OSError: the address is in use, or is none of this machine.
        """
        self.limits = limits = Limits() if limits is None else limits
        self.metrics = Metrics({} if llms is None else llms)
        self.guard = Guard(
            self.metrics.beside(app), host=host, api_key=api_key, allowed_hosts=allowed_hosts, limits=limits
        )
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listening = socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=is_dual)
        name = host if ":" not in host else f"[{host}]"
        self.url = f"http://{name}:{listening.getsockname()[1]}"
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(CONNECTIONS_PER_REQUEST * limits.max_requests, MIN_CONNECTIONS)
        self.max_connections = most if most_files < 0 else min(most, most_files // SHARE_OF_FILES)

        class Protocol(LimitedProtocol):
            owner = self

        config = uvicorn.Config(
            self.metrics.of_requests(self._admit),
            interface="asgi3",
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(round(limits.drain_seconds), 1),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, args=(listening,), name="jaxft server", daemon=True)
        self._thread.start()

    def _serve(self, listening: socket.socket) -> None:
        with listening:
            asyncio.run(self._server.serve([listening]))

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request unless too many connections are open."""
        connection = scope["state"][CONNECTION]

        async def send_unless_gone(message: Message) -> None:
            # A step gives many events at once, and asyncio warns of each that is written after the client has left.
            if not connection.transport.is_closing():
                await send(message)

        if self.num_connections > self.max_connections:
            await refuse(unavailable(f"{self.num_connections} connections are open"), scope, receive, send_unless_gone)
        else:
            await self.guard(scope, receive, send_unless_gone)

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self._server.server_state.connections)

    async def close(self) -> None:
        """Accept no more connections, and wait for the running requests, at most `drain_seconds`."""
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join)


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol, which closes a connection whose client sends a head, or reads, too slowly.

    Attributes:
        owner: the server of the connection; a class of its own for each server says which.
    """

    owner: ClassVar[Server]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # asyncio does it for sockets made with TCP's protocol number alone, which `create_server` does not give.
        # Without it a body waits behind its head for 40 ms, until the client has acknowledged the head.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(0)  # so that the time for writing begins with the first unread byte
        self.app_state = {**self.app_state, CONNECTION: self}
        if self.owner.num_connections > 2 * self.owner.max_connections:
            transport.abort()
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()
        # uvicorn stops reading when a further request comes, and would not hear that the client goes away.
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= MAX_HEAD_BYTES:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Close a connection whose bytes are no HTTP."""
        self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # a part of the next head came with this request
            self._time_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop("head")
        self._stop("write")
        super().connection_lost(error)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("write", self.owner.limits.write_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("write")

    def _time_head(self) -> None:
        """Time the head of the next request until it has come."""
        if self.conn.their_state is not h11.IDLE:
            self._stop("head")
        elif "head" not in self._timers:
            self._start("head", self.owner.limits.head_seconds)

    def _start(self, name: str, seconds: float) -> None:
        """Close the connection after a time, unless the timer is stopped."""
        self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()
