"""Processes of a run, each of which is a thread here, on a coordination service of their own."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from jax._src.lib import _jax

from jaxft.hosts import store as store_module
from jaxft.hosts.store import Store


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def connected(port, count, heard):
    """The stores of so many processes; losses go to a list, as (who heard of it, who was lost)."""
    address, seconds = f"127.0.0.1:{port}", {"heartbeat_timeout": 60, "shutdown_timeout": 5}
    service = _jax.get_distributed_runtime_service(address, count, recoverable=True, **seconds)
    clients = [_jax.get_distributed_runtime_client(address, index, **seconds) for index in range(count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda client: client.connect(), clients))
        stores = [
            Store(index, count, ("127.0.0.1", port), lambda lost, index=index: heard.append((index, lost)))
            for index in range(count)
        ]
        for store, client in zip(stores, clients, strict=True):
            store.connect(client)
        yield stores
        closing = [pool.submit(store.close, 5.0) for store in stores[1:]]
        for each in closing:
            with contextlib.suppress(RuntimeError):  # of one that a test has disconnected
                each.result()
        for client in clients[1:]:
            with contextlib.suppress(RuntimeError):
                client.shutdown()
        stores[0].close(5.0)
    clients[0].shutdown()
    service.shutdown()


@pytest.fixture
def lost():
    """Losses that were heard of."""
    return []


@pytest.fixture
def stores(port, lost, monkeypatch):
    """Three processes."""
    monkeypatch.setattr(store_module, "_when_aborted", lambda action: None)  # an abort is that of the tests' process
    monkeypatch.setattr(store_module, "POLL_SECONDS", 0.05)
    with connected(port, 3, lost) as stores:
        yield stores
