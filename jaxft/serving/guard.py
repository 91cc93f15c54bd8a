"""An ASGI app around another one that admits only requests that may reach it, whole and not too many at a time.

It is for an app behind a socket. A request needs a name of this server as its host, no web page of another site as its
origin, and the server's key or the token of a running episode. Its body is read here, within limits of size and time.
"""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxft.harness import Limits
from jaxft.hosts import is_loopback
from jaxft.rollout import episode_of_token
from jaxft.serving.app import episode_token, error_response, request_keys
from jaxft.serving.wire import METRICS, APIError

RETRY_SECONDS = 1
"""Time after which a client that is refused for lack of room may ask again."""

BODIES_AT_ONCE = 16
"""Bodies of the largest size that are held while they come; more bytes than theirs are refused with the status 429."""


class Guard:
    """The app around another one.

    Attributes:
        num_requests: requests that are being answered, or whose body is being read.
        num_answered: requests that were answered so far.
    """

    def __init__(
        self, app: ASGIApp, *, host: str, api_key: str | None, allowed_hosts: Sequence[str], limits: Limits
    ) -> None:
        """Make a guard.

        Args:
            app: the app, which answers what is admitted.
            host: address that the server listens on.
            api_key: key that requests need; None: none, but only a loopback address may do without.
            allowed_hosts: names by which clients may call the server, beside its address; on a loopback address all
                others are refused, elsewhere only if any are given.
            limits: limits of size, time and number.

        Raises:
            ValueError: the address can be reached from elsewhere, and there is no key.
        """
        if api_key is None and not is_loopback(host):
            raise ValueError(f"{host} can be reached from other machines: give the server a key (api_key)")
        self._app = app
        self._key_digest = None if api_key is None else _digest(api_key.encode())
        self._limits = limits
        self._hosts: frozenset[str] | None = frozenset(map(_normal_name, (host, *allowed_hosts)))
        if not is_loopback(host) and not allowed_hosts:
            self._hosts = None  # a key protects what a rebound name would reach
        self.num_requests = 0
        self.num_answered = 0
        self._num_bytes = 0  # of the bodies that are being read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, by the app or by a refusal."""
        if scope["type"] != "http":
            raise RuntimeError(f"a guard admits HTTP only, and got {scope['type']}")
        has_begun = False

        async def respond(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            self._check_source(scope)
            self._check_key(scope)
            if self.num_requests >= self._limits.max_requests and scope["path"] != METRICS:
                raise _busy(f"{self.num_requests} requests are being answered, which is the most")
        except APIError as error:
            await refuse(error, scope, receive, respond)
            return
        self.num_requests += 1
        try:
            receive_body = await self._body(scope, receive)
            if receive_body is not None:  # else the client went away
                await self._app(scope, receive_body, respond)
        except APIError as error:
            await refuse(error, scope, receive, respond)
        except asyncio.CancelledError:  # the server stops, or the episode of the call has ended
            if not has_begun:
                ended = _carried(scope) or unavailable("the episode of this call has ended, or the server is stopping")
                await refuse(ended, scope, receive, respond)
        finally:
            self.num_requests -= 1
            self.num_answered += 1

    def _check_source(self, scope: Scope) -> None:
        """Raise an `APIError` unless the request names this server, and comes from no web page of another site."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        name = _host_name(host)
        if not name or not (self._hosts is None or name in self._hosts or is_loopback(name)):
            told = f"the host {host[:100]!r} is not one of this server: set it as the name in serve.url"
            raise APIError(told, status=421, code="unknown_host")
        origin = headers.get(b"origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            told = f"requests of web pages of {origin[:100]!r} are not answered"
            raise APIError(told, status=403, code="foreign_origin")

    def _check_key(self, scope: Scope) -> None:
        """Raise an `APIError` unless the request has the key of the server, or belongs to an episode."""
        token, _ = episode_token(scope)
        if token is not None:
            if (carried := _carried(scope)) is not None:
                raise carried
            episode = episode_of_token(token)
            if episode is None or episode.is_over:
                raise _refuse_key("the base URL or key is that of no running episode: each episode has its own")
            return
        if self._key_digest is None:
            return
        digests = map(_digest, request_keys(scope))
        # All of them, so that the time says nothing about the key.
        if not any([hmac.compare_digest(digest, self._key_digest) for digest in digests]):
            raise _refuse_key(
                "the key is missing or wrong: send the server's api_key, as in 'Authorization: Bearer KEY', or call "
                "the base_url of a running episode"
            )

    async def _body(self, scope: Scope, receive: Receive) -> Receive | None:
        """Read the body of a request, and return a `receive` that gives it; None if the client went away meanwhile."""
        limit = self._limits.max_body_bytes
        too_large = APIError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(int(length) > limit for length in lengths):
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    body += part
                    self._num_bytes += len(part)
                    if len(body) > limit:
                        raise too_large
                    if self._num_bytes > BODIES_AT_ONCE * limit:
                        raise _busy(f"{self._num_bytes} bytes of bodies are being read, which are the most")
                    if not message.get("more_body", False):
                        return _after(bytes(body), receive)
        except TimeoutError:
            raise APIError(
                f"the body did not come within {self._limits.body_seconds:g} seconds", status=408, code="body_timeout"
            ) from None
        finally:
            self._num_bytes -= len(body)


def unavailable(message: str) -> APIError:
    """Return the refusal of a request that the server cannot answer now."""
    return APIError(message, status=503, kind="service_unavailable_error")


def _busy(message: str) -> APIError:
    return APIError(f"{message}: ask again later", status=429, kind="rate_limit_error", code="rate_limit_exceeded")


def _refuse_key(message: str) -> APIError:
    return APIError(message, status=401, kind="authentication_error", code="invalid_api_key")


def _carried(scope: Scope) -> APIError | None:
    """Return the refusal of a call of an episode that goes on in the next collection; None for any other."""
    token, _ = episode_token(scope)
    episode = None if token is None else episode_of_token(token)
    if episode is None or not episode.is_carried:
        return None
    return _refuse_key("the episode goes on in the next collection, which runs the agent again: end here")


def _digest(key: bytes) -> bytes:
    """Return a hash of a key, so that comparing takes the same time whatever the length of the key."""
    return hashlib.sha256(key).digest()


async def refuse(error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a refusal, and close the connection, on which the rest of a body may still come."""
    headers = {"connection": "close"}
    if error.status == 429:
        headers["retry-after"] = str(RETRY_SECONDS)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    _, without_token = episode_token(scope)
    await error_response(error, without_token["path"], headers)(scope, receive, send)


def _after(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body at first, and then what the server gives."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return first.pop() if first else await receive()

    return receive_body


_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^][/?#@:\s]+)(:[0-9]*)?")


def _host_name(host: str) -> str:
    """Return the name in a `Host` header, without its port and brackets; empty if it is malformed.

    >>> _host_name("127.0.0.1:80"), _host_name("[::1]:80"), _host_name("Localhost."), _host_name("a@b"), _host_name("[")
    ('127.0.0.1', '::1', 'localhost', '', '')
    """
    found = _HOST.fullmatch(host)
    return "" if found is None else _normal_name(found[1].strip("[]"))


def _normal_name(name: str) -> str:
    """Return a name of a host as all its spellings are compared; the dot at the end is DNS's root."""
    return name.lower().removesuffix(".")
