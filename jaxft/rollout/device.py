"""One worker thread that runs all JAX work of a process, and a count of what XLA compiled meanwhile.

`update` donates its state. With every use of the weights on one thread, each donated buffer has one owner and nothing
needs a lock, while the event loop stays free.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

from jaxft.errors import DeviceThreadError

T = TypeVar("T")

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_LOWERED_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # what comes next is the compilation
_CLOSED = "the policy has been closed; its device thread takes no more work"


class DeviceThread:
    """A thread that runs jobs in the order in which they were given; use it from any thread or event loop.

    Whatever happens to the thread, a job that was given ends: with its result, its error, or a `DeviceThreadError`. An
    executor of the standard library lets those wait for ever whose jobs a thread left behind when it ended.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._open: set[Future[Any]] = set()
        self._end: str | None = None  # why there is no more work
        # A daemon that is ended in order at the exit: a policy that nobody closed keeps no process alive.
        self._thread = threading.Thread(target=self._work, name="jaxft-device", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        """Queues a job and returns at once.

        Raises:
            DeviceThreadError: the thread has been closed, or has ended.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._end is not None:
                raise DeviceThreadError(self._end)
            self._open.add(future)
            self._jobs.put((job, future))
        return future

    async def run(self, job: Callable[[], T]) -> T:
        """Waits for a job without blocking the event loop; its exception is raised here."""
        return await asyncio.wrap_future(self.submit(job))

    def close(self) -> None:
        """Finishes what is queued and ends the thread; again does nothing."""
        atexit.unregister(self.close)
        with self._lock:
            if self._end is None:
                self._end = _CLOSED
                self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        try:
            while (given := self._jobs.get()) is not None:
                self._do(*given)
                del given  # or it would live until the next job comes
        except BaseException as error:  # the thread ends, and those who wait must hear of it
            self._give_up(error)

    def _do(self, job: Callable[[], T], future: "Future[T]") -> None:
        if future.set_running_or_notify_cancel():
            try:
                result = job()
            except BaseException as error:  # it belongs to whoever waits
                future.set_exception(presentable(error))
            else:
                future.set_result(result)
        with self._lock:
            self._open.discard(future)

    def _give_up(self, error: BaseException) -> None:
        reason = f"the device thread has ended ({type(error).__name__}: {error}); the policy can do no more work"
        with self._lock:
            self._end = reason
            left, self._open = self._open, set()
        for future in left:
            if not future.done():
                future.set_exception(DeviceThreadError(reason))


def presentable(error: BaseException) -> Exception:
    """The error, or a `DeviceThreadError` for one that would do more in an event loop than tell what went wrong.

    `SystemExit` would end the loop, a cancellation would look like the waiter's own, and a future refuses
    `StopIteration`.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | concurrent.futures.CancelledError):
        return error
    said = DeviceThreadError(f"work on the device thread was ended by {type(error).__name__}: {error}")
    said.__cause__ = error
    return said


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had too little memory."""
    said = ("RESOURCE_EXHAUSTED", "Out of memory")  # the second of what was to be computed from what had no room
    return isinstance(error, jax.errors.JaxRuntimeError) and any(words in str(error) for words in said)


def first_line(error: BaseException) -> str:
    """What an error says before its details, which may be pages of buffers."""
    return str(error).partition("\n")[0]


class CompileCounter:
    """Counts XLA compilations of the whole process from its creation on.

    Attributes:
        show: called with the name of a program when its compilation begins, and with None when it has ended.
    """

    def __init__(self) -> None:
        self.show: Callable[[str | None], None] = lambda program: None
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._is_closed = False
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **details: Any) -> None:
        name = str(details.get("fun_name", "a program"))
        if event == _LOWERED_EVENT:
            self.show(name)
        elif event == _COMPILE_EVENT:
            self.show(None)
            with self._lock:
                self._names.append(name)

    @property
    def count(self) -> int:
        """Programs compiled so far, those among them that the persistent cache held."""
        return len(self._names)

    def names(self, first: int = 0) -> list[str]:
        """What was compiled, from the one with that number on."""
        return self._names[first:]

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
