"""One worker thread that runs all JAX work of a process, and a counter of XLA's compilations.

An update donates its state. As a single thread uses the weights, donated buffers need no lock, and the event loop is
never blocked. A long job, such as an update, may `pause`: the thread then samples for a while, from other weights, and
goes on with the job.
"""

import asyncio
import atexit
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, TypeVar

import jax

from jaxft.errors import DeviceThreadError

T = TypeVar("T")

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_LOWERED_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # the compilation follows it
_CLOSED = "the policy has been closed; its device thread accepts no more work"


Kind = Literal["sampling", "training", "other"]
"""Purpose of a job of the device thread."""

KINDS: tuple[Kind, ...] = ("sampling", "training", "other")
IDLE = "idle"

POLL_SECONDS = 1e-3
"""Time between two looks at a computation on other devices."""


class _Queued(NamedTuple):
    job: Callable[[], Any]
    future: "Future[Any]"
    kind: Kind


class DeviceThread:
    """A thread that runs jobs in the order in which they were submitted, from any thread or event loop.

    Every job ends with its result, its error or a `DeviceThreadError`, even if the thread dies; with an executor of the
    standard library its waiters would then wait forever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the attributes below, but the last one
        self._jobs: deque[_Queued] = deque()
        self._open: set[Future[Any]] = set()
        self._end: str | None = None  # the reason why the thread takes no more work
        self._seconds: dict[str, float] = dict.fromkeys((*KINDS, IDLE), 0.0)
        self._phase, self._since = IDLE, time.perf_counter()
        self._paused = 0.0  # when the last pause ended, or the job began
        # A daemon thread, closed at exit: a policy that nobody closed keeps no process alive.
        self._thread = threading.Thread(target=self._work, name="jaxft-device", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, job: Callable[[], T], kind: Kind = "other") -> "Future[T]":
        """Queue a job and return at once.

        Raises:
            DeviceThreadError: the thread has been closed, or has ended.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._end is not None:
                raise DeviceThreadError(self._end)
            self._open.add(future)
            self._jobs.append(_Queued(job, future, kind))
            self._changed.notify()
        return future

    async def run(self, job: Callable[[], T], kind: Kind = "other") -> T:
        """Run a job and return its result or raise its exception, without blocking the event loop."""
        return await asyncio.wrap_future(self.submit(job, kind))

    def pause(self, sampling_share: float) -> None:
        """Run the sampling that is queued; a running job calls it wherever it can wait.

        It takes at most `sampling_share` of the time since the job's last pause, this one included, but always runs one
        piece of sampling if there is one: neither side starves.
        """
        begun = time.perf_counter()
        budget = (begun - self._paused) * sampling_share / max(1.0 - sampling_share, 1e-9)
        while (queued := self._take_sampling()) is not None:
            self._do(queued)
            if time.perf_counter() - begun >= budget:
                break
        self._paused = time.perf_counter()

    def pause_until(self, is_ready: Callable[[], bool]) -> None:
        """Run the sampling that is queued, and wait for more, until `is_ready` returns True."""
        while not is_ready():
            queued = self._take_sampling()
            if queued is None:
                with self._changed:
                    self._changed.wait(POLL_SECONDS)
            else:
                self._do(queued)

    def seconds(self) -> dict[str, float]:
        """Return the seconds that the thread has spent so far, by kind of job, and `idle`."""
        with self._changed:
            seconds = dict(self._seconds)
            seconds[self._phase] += time.perf_counter() - self._since
        return seconds

    def close(self) -> None:
        """Finish queued jobs and end the thread; a second call does nothing."""
        atexit.unregister(self.close)
        with self._changed:
            if self._end is None:
                self._end = _CLOSED
                self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        try:
            while (queued := self._take()) is not None:
                self._paused = time.perf_counter()
                self._do(queued)
                del queued  # or the job would live until the next one comes
        except BaseException as error:  # the thread ends, and its waiters must hear of it
            self._give_up(error)

    def _take(self) -> _Queued | None:
        """Wait for the next job; return None once the thread is closed and no job is left."""
        with self._changed:
            while not self._jobs and self._end is None:
                self._changed.wait()
            return self._jobs.popleft() if self._jobs else None

    def _take_sampling(self) -> _Queued | None:
        with self._changed:
            queued = next((queued for queued in self._jobs if queued.kind == "sampling"), None)
            if queued is not None:
                self._jobs.remove(queued)
        return queued

    def _do(self, queued: _Queued) -> None:
        job, future, kind = queued
        del queued
        before = self._enter(kind)
        if future.set_running_or_notify_cancel():
            try:
                result = job()
            except BaseException as error:  # it belongs to the waiter
                future.set_exception(presentable(error))
            else:
                future.set_result(result)
        with self._changed:
            self._open.discard(future)
        del job, future  # the traceback of an error has this frame, and with it would keep itself and the job's arrays
        self._enter(before)

    def _enter(self, phase: str) -> str:
        """Count time under another kind from now on; return the last one."""
        now = time.perf_counter()
        with self._changed:
            before, self._phase = self._phase, phase
            self._seconds[before] += now - self._since
            self._since = now
        return before

    def _give_up(self, error: BaseException) -> None:
        reason = f"the device thread has ended ({type(error).__name__}: {error}); the policy can do no more work"
        with self._changed:
            self._end = reason
            unfinished, self._open = self._open, set()
        for future in unfinished:
            if not future.done():
                future.set_exception(DeviceThreadError(reason))


def presentable(error: BaseException) -> Exception:
    """Return the error, or a `DeviceThreadError` in place of one that an event loop cannot deliver.

    `SystemExit` would end the loop, a cancellation would look like the waiter's own, and a future refuses
    `StopIteration`.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | concurrent.futures.CancelledError):
        return error
    replacement = DeviceThreadError(f"work on the device thread was ended by {type(error).__name__}: {error}")
    replacement.__cause__ = error
    return replacement


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error means that the device had too little memory."""
    phrases = ("RESOURCE_EXHAUSTED", "Out of memory")  # the second where an input had found no memory
    return isinstance(error, jax.errors.JaxRuntimeError) and any(phrase in str(error) for phrase in phrases)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, which a long list of buffers may follow."""
    return str(error).partition("\n")[0]


class CompileCounter:
    """Counts the XLA compilations of the whole process since the counter was made.

    Attributes:
        show: called with the name of a program when its compilation begins, and with None when it ends.
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
        """Number of programs compiled so far, including those loaded from the persistent cache."""
        return len(self._names)

    def names(self, first: int = 0) -> list[str]:
        """Return the names of the compiled programs from index `first` on."""
        return self._names[first:]

    def close(self) -> None:
        """Stop counting; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            jax.monitoring.unregister_event_duration_listener(self._on_event)


def warm_up_rounds(platform: str) -> int:
    """Return how often a warm-up runs each program: on GPUs twice more, after all have been compiled.

    The second run of a program records its CUDA graph, and making another program drops the graphs of all.
    """
    return 3 if platform == "gpu" else 1
