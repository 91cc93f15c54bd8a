"""One worker thread that runs all JAX work of a process, and a count of what XLA compiled meanwhile.

`update` donates its state. With every use of the weights on one thread, each donated buffer has one owner and nothing
needs a lock, while the event loop stays free.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

T = TypeVar("T")

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class DeviceThread:
    """A thread that runs jobs in the order in which they were given; use it from any thread or event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxft-device")

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        """Queues a job and returns at once.

        Raises:
            RuntimeError: the thread has been closed.
        """
        try:
            return self._executor.submit(job)
        except RuntimeError as error:
            raise RuntimeError("the policy has been closed; its device thread takes no more work") from error

    async def run(self, job: Callable[[], T]) -> T:
        """Waits for a job without blocking the event loop; its exception is raised here."""
        return await asyncio.wrap_future(self.submit(job))

    def close(self) -> None:
        """Finishes what is queued and ends the thread."""
        self._executor.shutdown(wait=True)


class CompileCounter:
    """Counts XLA compilations of the whole process from its creation on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._is_closed = False
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **details: Any) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self._count += 1

    @property
    def count(self) -> int:
        """Programs compiled so far."""
        return self._count

    def close(self) -> None:
        """Stops counting; again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            jax.monitoring.unregister_event_duration_listener(self._on_event)


@contextlib.contextmanager
def counting_compiles() -> Iterator[CompileCounter]:
    """A `CompileCounter` for the length of a block."""
    counter = CompileCounter()
    try:
        yield counter
    finally:
        counter.close()
