"""Values that the processes of a run share, and the end of each, by the coordination service of JAX in process 0.

A value is JSON under a key of the service. The heartbeats of the service come from a thread without Python:
a process that is busy is not taken for lost, one that is killed or stopped is.
"""

import contextlib
import ctypes
import itertools
import json
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jaxft.errors import HostsError, ProcessEndedError

HEARTBEAT_SECONDS = 7
"""Time after which a process without a heartbeat counts as lost."""

POLL_SECONDS = 0.5
"""Time between two looks at what other processes have to say, and the longest that one waits for a value."""

FAILED_SECONDS = 5.0
"""Time that a process has to end by itself after another one has ended with an error."""

ABORT_SECONDS = 1.0
"""Time that an abort waits for the end of process 0, which may be its reason."""

NEWS = "news"
"""Folder of what processes say by themselves: `signal` that one got, and `end`, which is `FAILED` after an error."""

ENDED, FAILED = "ended", "failed"


class Store:
    """The values that one process shares with the others, with threads that hear of their signals, ends and losses.

    Attributes:
        process_id: number of this process, from 0.
        num_processes: number of processes.
        on_stop: called in a thread with the number of a signal that another process got; see `stop`.
    """

    def __init__(
        self, process_id: int, num_processes: int, address: tuple[str, int], on_loss: Callable[[int], object]
    ) -> None:
        """Connect nothing yet.

        Args:
            process_id: number of this process.
            num_processes: number of processes.
            address: host and port of process 0.
            on_loss: called once, in a thread, with the number of a process that has gone without `close`, or has ended
                with an error some seconds ago.
        """
        self.process_id, self.num_processes = process_id, num_processes
        self.on_stop: Callable[[int], object] = lambda number: None
        self._client: Any = None  # of JAX's coordination service
        self._address, self._on_loss = address, on_loss
        self._numbers = defaultdict[str, Iterator[int]](itertools.count)  # of the next exchange, by name
        self._own_news: dict[str, Any] = {}
        self._news: dict[int, dict[str, Any]] = {}
        self._heard = time.monotonic()
        self._hearing, self._losing = threading.Lock(), threading.Lock()
        self._lost: int | None = None
        self._is_closing = self._ends_with_error = False
        self._leaving = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._watch, self._listen)]

    def connect(self, client: Any) -> None:
        """Use a client of JAX's coordination service, and start the threads."""
        self._client = client
        if self.process_id > 0:
            _when_aborted(self._on_abort)
        for thread in self._threads:
            thread.start()

    def share(self, name: str, value: Any) -> list[Any]:
        """Return the value that each process gives under this name, in the order of the processes.

        Blocks until all have given theirs. A name can be used again after that, as each process gives its values in the
        same order. The values are as JSON has them, this process's own included.

        Raises:
            ProcessEndedError: a process has gone, or has ended before it gave its value.
            TypeError, ValueError: JSON does not have the value.
        """
        place = f"{name} {next(self._numbers[name])}"
        content = json.dumps(value)
        try:
            self._client.key_value_set(f"{place}/values/{self.process_id}", content)
            if self._client.key_value_increment(f"{place}/given", 1) == self.num_processes:
                self._client.key_value_set(f"{place}/complete", "")
            while not self._has(f"{place}/complete"):
                gone = self._ended() if self._lost is None else {self._lost}
                if missing := gone - self._read(place).keys():
                    raise ProcessEndedError(self._ended_before(min(missing), name))
            values = self._read(place)
            if self._client.key_value_increment(f"{place}/read", 1) == self.num_processes:
                self._client.key_value_delete(f"{place}/")
        except RuntimeError as error:  # HostsError is one, too
            raise error if isinstance(error, HostsError) else ProcessEndedError(self._ended_before(0, name)) from error
        return [values[process_id] for process_id in range(self.num_processes)]

    def stop(self, number: int) -> None:
        """Tell the other processes that a signal stops the run; can be called from any thread."""
        self._tell(signal=int(number))

    def expect_end(self) -> None:
        """Say here that this process ends by itself with an error, which it still has to show.

        Another one that has failed is no loss then, however long it takes; one that has gone is, some seconds later.
        """
        self._is_closing = self._ends_with_error = True

    def close(self, within_seconds: float | None = None, *, has_failed: bool = False) -> None:
        """Say that this process ends, so that nobody takes it for lost; process 0 waits for all others.

        Args:
            within_seconds: the longest that process 0 waits; None: without a limit.
            has_failed: True if it ends with an error. The others mostly do, too; one that has not ended
                `FAILED_SECONDS` later waits in vain for something of this one, and hears of a loss.
        """
        self._is_closing = True
        self._ends_with_error |= has_failed
        self._tell(end=FAILED if has_failed else ENDED)
        deadline = time.monotonic() + (float("inf") if within_seconds is None else within_seconds)
        is_first = self.process_id == 0
        while is_first and self._lost is None and len(self._ended()) < self.num_processes:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS / 5)
        self._leaving.set()
        for thread in self._threads:  # one that came back from C++ after the end of the interpreter would abort
            thread.join(HEARTBEAT_SECONDS)
        while is_first and len(self._ended()) == self.num_processes and len(self._live()) > 1:
            time.sleep(POLL_SECONDS / 5)  # the service ends last

    def _live(self) -> set[int]:
        """Return the processes that live and are connected, once each of them has asked for it."""
        return {*self._client.get_live_nodes(list(range(self.num_processes)))}

    def _watch(self) -> None:
        """See again and again which processes live."""
        while not self._leaving.wait(POLL_SECONDS):
            with contextlib.suppress(RuntimeError):  # if the service has gone, `_listen` notices, too
                missing = {*range(self.num_processes)} - self._live()
                self._hear()
                for process_id in missing - self._ended():
                    self._lose(process_id)

    def _listen(self) -> None:
        """Hear again and again of the ends of other processes, and of their signals."""
        while not self._leaving.wait(POLL_SECONDS):
            try:
                self._hear()
            except RuntimeError:
                if self.process_id > 0 and not self._leaving.is_set():
                    self._lose(0)
                return

    def _hear(self) -> None:
        with self._hearing:
            before, self._news = self._news, self._read(NEWS)
            self._heard = time.monotonic()
        for process_id, said in self._news.items():
            if process_id != self.process_id:
                new = said.items() - before.get(process_id, {}).items()
                if ("end", FAILED) in new:
                    _later(partial(self._lose_failed, process_id))
                if "signal" in dict(new):
                    self.on_stop(said["signal"])

    def _ended(self) -> set[int]:
        return {process_id for process_id, said in self._news.items() if "end" in said}

    def _lose_failed(self, process_id: int) -> None:
        if not self._is_closing:
            self._on_loss(process_id)

    def _lose(self, process_id: int) -> None:
        """Report a process that has gone, once; some seconds later if this one ends with an error that it shows."""
        if not self._losing.acquire(blocking=False):
            return
        self._lost = process_id
        if self._ends_with_error:
            _later(lambda: self._on_loss(process_id))
        else:
            self._on_loss(process_id)

    def _on_abort(self) -> None:
        """Report process 0 if JAX aborts this process because of it; any other abort goes on."""
        deadline = time.monotonic() + ABORT_SECONDS
        while not (is_silent := self._is_silent()) and time.monotonic() < deadline:
            time.sleep(ABORT_SECONDS / 20)  # of a process that dies the connections end before its port does
        if is_silent:
            self._lose(0)
        time.sleep(FAILED_SECONDS if self._losing.locked() else 0.0)

    def _is_silent(self) -> bool:
        """Return True if process 0 has gone, is stopped, or its host has vanished."""
        try:
            socket.create_connection(self._address, timeout=1.0).close()
        except OSError:
            return True
        return time.monotonic() - self._heard > HEARTBEAT_SECONDS / 2

    def _tell(self, **news: Any) -> None:
        self._own_news |= news
        place = f"{NEWS}/values/{self.process_id}"
        with contextlib.suppress(RuntimeError):  # if the service has gone, nobody hears of it any more
            self._client.key_value_set(place, json.dumps(self._own_news), allow_overwrite=True)

    def _has(self, key: str) -> bool:
        """Wait a moment for a key of the service, and return True if it is there."""
        try:
            self._client.blocking_key_value_get(key, int(POLL_SECONDS * 1000))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return False
        return True

    def _read(self, folder: str) -> dict[int, Any]:
        """Return the values of a folder, by process."""
        found = self._client.key_value_dir_get(f"{folder}/values/")
        return {int(key.rpartition("/")[2]): json.loads(text) for key, text in found}

    def _ended_before(self, process_id: int, name: str) -> str:
        return f"process {process_id} of {self.num_processes} has ended before it sent '{name}'"


def _later(action: Callable[[], object]) -> None:
    """Do something in `FAILED_SECONDS`, if this process has not ended by then."""
    timer = threading.Timer(FAILED_SECONDS, action)
    timer.daemon = True
    timer.start()


_abort_handler: Any = None
"""The handler of SIGABRT, which must live as long as the process."""


def _when_aborted(action: Callable[[], object]) -> None:
    """Do something before a library ends this process by an abort, as JAX does as soon as process 0 has gone."""
    global _abort_handler
    _abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: action() and None)
    ctypes.CDLL(None).signal(signal.SIGABRT, _abort_handler)
