"""Messages between the processes of a run, which travel around a ring of connections.

A process sends to the next one only, and passes on what comes from the one before it, so that each link carries every
message once, however many processes there are. A message has a name: which process asks first for which one does not
matter, unlike with the collectives of devices, which all processes must begin in one order.
"""

import contextlib
import os
import pickle
import queue
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from jaxft.errors import ProcessEndedError

GONE, BYE, STOP = "gone", "bye", "stop"
"""Names of the messages that a process was lost, that one ends, and that a signal stops the run."""

FAILED = b"failed"
"""Content of the `BYE` of a process that ends with an error."""

FAILED_SECONDS = 5.0
"""Time that a process has to end by itself after another one has ended with an error."""


class _Message(NamedTuple):
    origin: int  # the process that sent it first, or that was lost
    name: str
    content: bytes = b""


_Given = defaultdict[int, deque[bytes]]
"""Values that processes have given under a name and that were not read yet, by process, in their order."""


class Ring:
    """The connections of one process, with a thread that reads and a thread that writes.

    Beside each there may be an idle one, through which nothing is sent: its other end is answered for by the kernel,
    however busy the process is, so that it breaks only when the host has vanished, and takes the connection with it.

    Attributes:
        process_id: number of this process, from 0.
        num_processes: number of processes.
        on_stop: called in a thread with the number of a signal that another process got; see `stop`.
    """

    def __init__(
        self,
        process_id: int,
        num_processes: int,
        before: Connection,
        after: Connection,
        on_loss: Callable[[int], object],
        idle: tuple[Connection, Connection] | None = None,
    ) -> None:
        """Start the threads.

        Args:
            process_id: number of this process.
            num_processes: number of processes.
            before: connection from the process before this one.
            after: connection to the process after it.
            on_loss: called once, in a thread, with the number of a process that has gone without `close`, or has ended
                with an error some seconds ago.
            idle: the idle connections beside `before` and `after`.
        """
        self.process_id, self.num_processes = process_id, num_processes
        self.on_stop: Callable[[int], object] = lambda number: None
        self._before, self._after, self._on_loss = before, after, on_loss
        self._changed = threading.Condition()  # guards the six below
        self._contents: defaultdict[str, _Given] = defaultdict(lambda: defaultdict(deque))
        self._ended: set[int] = set()
        self._lost: int | None = None
        self._is_closing = self._ends_with_error = False
        self._is_cut = False  # the process before this one has ended, and nothing comes through it any more
        self._to_send: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"jaxft ring {target.__name__}", daemon=True)
            for target in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()
        if idle is not None:
            watched = dict(zip(idle, (before, after), strict=True))
            threading.Thread(target=_watch, args=(watched,), name="jaxft ring watch", daemon=True).start()

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Return the value that each process gives under this name, in the order of the processes.

        Blocks until all have given theirs. A name can be used again after that, as each process gives its values in the
        same order. The values are copies, this process's own included.

        Raises:
            ProcessEndedError: a process has gone, or has ended before it gave its value.
            TypeError, AttributeError, PicklingError: the value cannot be pickled.
        """
        content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        self._to_send.put(_Message(self.process_id, name, content))
        with self._changed:
            found = self._contents[name]
            found[self.process_id].append(content)
            self._changed.wait_for(
                lambda: (
                    len(found) == self.num_processes or self._lost is not None or self._is_cut or self._ended - {*found}
                )
            )
            if len(found) < self.num_processes:
                before = (self.process_id - 1) % self.num_processes
                missing = self._lost if self._lost is not None else next(iter(self._ended - {*found}), before)
                raise ProcessEndedError(f"process {missing} of {self.num_processes} has ended before it sent '{name}'")
            contents = [found[index].popleft() for index in range(self.num_processes)]
            for index in range(self.num_processes):
                if not found[index]:
                    del found[index]
            if not found:
                del self._contents[name]
        return [pickle.loads(each) for each in contents]

    def stop(self, number: int) -> None:
        """Tell the other processes that a signal stops the run; can be called from any thread."""
        self._to_send.put(_Message(self.process_id, STOP, bytes([number])))

    def expect_end(self) -> None:
        """Say here that this process ends by itself with an error, which it still has to show.

        Another one that has failed is no loss then, however long it takes; one that has gone is, some seconds later.
        """
        with self._changed:
            self._is_closing = self._ends_with_error = True

    def close(self, within_seconds: float | None = None, *, has_failed: bool = False) -> None:
        """Say that this process ends, so that nobody takes it for lost, and wait for the others, at most so long.

        Args:
            within_seconds: time to wait; None: without a limit.
            has_failed: True if it ends with an error. The others mostly do, too; one that has not ended
                `FAILED_SECONDS` later waits in vain for something of this one, and hears of a loss.
        """
        with self._changed:
            self._is_closing = True
            self._ends_with_error = self._ends_with_error or has_failed
        self._to_send.put(_Message(self.process_id, BYE, FAILED if has_failed else b""))
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._ended) == self.num_processes - 1 or self._lost is not None or self._is_cut,
                within_seconds,
            )
        self._to_send.put(None)
        self._threads[1].join(timeout=1.0)

    def _read(self) -> None:
        while True:
            try:
                message: _Message = pickle.loads(self._before.recv_bytes())
            except (EOFError, OSError):
                with self._changed:
                    self._is_cut = (self.process_id - 1) % self.num_processes in self._ended
                    self._changed.notify_all()
                if not self._is_cut:
                    self._lose(_Message((self.process_id - 1) % self.num_processes, GONE))
                return
            if (
                message.origin - self.process_id
            ) % self.num_processes != 1:  # the next process sent it: it has been everywhere
                self._to_send.put(message)
            if message.name == GONE:
                self._lose(message)
                return
            with self._changed:
                if message.name == BYE:
                    self._ended.add(message.origin)
                    if message.content == FAILED:
                        self._lose_later(message.origin)
                elif message.name != STOP:
                    self._contents[message.name][message.origin].append(message.content)
                self._changed.notify_all()
            if message.name == STOP:
                self.on_stop(message.content[0])

    def _write(self) -> None:
        while (message := self._to_send.get()) is not None:
            try:
                self._after.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
            except OSError:
                with self._changed:
                    is_expected = (self.process_id + 1) % self.num_processes in self._ended
                if not is_expected:
                    self._lose(_Message((self.process_id + 1) % self.num_processes, GONE))
                return

    def _lose_later(self, origin: int) -> None:
        """Report a process that ended with an error, unless this one ends soon, too."""

        def lose() -> None:
            if not self._is_closing:
                self._on_loss(origin)

        _later(lose)

    def _lose(self, message: _Message) -> None:
        """Tell the processes behind this one which was lost, and whoever waits here."""
        with self._changed:
            if self._lost is not None:
                return
            self._lost = message.origin
            has_time = self._ends_with_error
            self._changed.notify_all()
        if message.origin == (self.process_id - 1) % self.num_processes:  # noticed here first
            self._to_send.put(message)
        self._to_send.put(None)
        if threading.current_thread() is not self._threads[1]:
            self._threads[1].join(timeout=1.0)  # the others hear of it even if this process ends at once
        if has_time:
            _later(lambda: self._on_loss(message.origin))
        else:
            self._on_loss(message.origin)


def _watch(watched: dict[Connection, Connection]) -> None:
    """Break each connection whose idle one, its key, is broken."""
    while watched:
        broken = wait(list(watched))
        for idle in [each for each in watched if each in broken]:
            connection = watched.pop(idle)
            try:
                idle.recv_bytes()
            except EOFError:  # the process has ended, and what it sent before that is still read
                continue
            except OSError:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
                    same.shutdown(socket.SHUT_RDWR)


def _later(action: Callable[[], object]) -> None:
    """Do something in `FAILED_SECONDS`, if this process has not ended by then."""
    timer = threading.Timer(FAILED_SECONDS, action)
    timer.daemon = True
    timer.start()
