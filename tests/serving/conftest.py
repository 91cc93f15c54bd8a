"""HTTP libraries that are installed, and a check that nothing uses a socket."""

import importlib
import importlib.util
import socket

import pytest

HTTP_LIBRARIES = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name) is not None]


@pytest.fixture(params=HTTP_LIBRARIES)
def http(request):
    """Each HTTP library that is installed: openai's own is one of them."""
    return importlib.import_module(request.param)


@pytest.fixture
def no_sockets(monkeypatch):
    """Fails a test that connects or binds a socket; an event loop's own pair of sockets does neither."""

    def refuse(*arguments):
        raise AssertionError(f"a socket was used: {arguments[1:]}")

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)
