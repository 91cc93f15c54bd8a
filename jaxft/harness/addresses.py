"""Limits of a server, the addresses that it listens on, and those by which it is reached."""

import ipaddress
from typing import NamedTuple


class Limits(NamedTuple):
    """Limits of a server.

    Attributes:
        max_requests: requests that are answered at the same time; further ones get the status 429.
        head_seconds: time for the first line and the headers of a request.
        body_seconds: time for its body.
        write_seconds: time that a client may leave bytes of a response unread.
        drain_seconds: time that requests have to end when the server stops.
        max_body_bytes: size of a body.
    """

    max_requests: int = 256
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 60.0
    drain_seconds: float = 30.0
    max_body_bytes: int = 2**24


def is_loopback(host: str) -> bool:
    """Return True if an address or name stands for this machine alone.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable_url(url: str, host: str) -> str:
    """Return the address under which this machine reaches a server that listens on `host`, such as on `0.0.0.0`.

    >>> reachable_url("http://0.0.0.0:80", "0.0.0.0"), reachable_url("http://10.0.0.2:80", "10.0.0.2")
    ('http://127.0.0.1:80', 'http://10.0.0.2:80')
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return url
    if not address.is_unspecified:
        return url
    return url.replace("[::]", "[::1]") if address.version == 6 else url.replace("0.0.0.0", "127.0.0.1")
