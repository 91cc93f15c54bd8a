"""Handling of SIGINT and SIGTERM: the first signal stops and saves the run, the second ends the process at once.

The first signal gives both back to the system, which ends the process at the next one. Python runs a handler in the
main thread between two of its instructions, also while an agent blocks the event loop; not within a call of a library.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


JOINT_SECONDS = 30.0
"""Time that one of several processes has to close after a signal that came while no run was listening to it.

It may wait in a program on the devices of all processes, for one that has ended; then nothing else ends it.
"""


class Shutdown:
    """Handles the signals of this process while a program runs in an event loop.

    Attributes:
        signal: the first signal received; None before.
        resume_command: the command that resumes the run; None without a run.
        launcher, processes: what stands before that command, and behind it, for one of several processes.
        tell: called with the first signal, to tell the other processes of the run; None for a single one.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.resume_command: str | None = None
        self.launcher = self.processes = ""
        self.tell: Callable[[signal.Signals], object] | None = None
        self._is_told = False  # another process got the signal
        self._deciding = threading.RLock()  # which signal is the first; a handler may interrupt another one
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._listener: asyncio.Event | None = None
        self._timer: threading.Timer | None = None
        self._handles_signals = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals in the running event loop; outside `listening` they cancel the current task.

        In another thread than the main one, which alone may set handlers, no signal is handled, and `stop` does what
        the first one would.
        """
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self.signal is not None:  # told while this process was starting
            self._loop.call_soon(self._stop)
        if threading.current_thread() is not threading.main_thread():
            token = _shutdown.set(self)
            try:
                yield
            finally:
                _shutdown.reset(token)
            return
        global _installed
        self._handles_signals, outer, _installed = True, _installed, self
        before = {number: signal.signal(number, _handle) for number in SIGNALS}
        token = _shutdown.set(self)
        if self.signal is not None and self.tell is not None:
            self.end_within(JOINT_SECONDS)
        try:
            yield
        finally:
            if self._timer is not None and self.tell is None:
                self._timer.cancel()
            _shutdown.reset(token)
            for number in SIGNALS:
                signal.signal(number, before[number])
            _installed = outer

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """Yield an event that the first signal sets inside the block, without further effect."""
        self._listener = asyncio.Event()
        if self.signal is not None:
            self._listener.set()
        try:
            yield self._listener
        finally:
            self._listener = None

    def _on_signal(self, number: signal.Signals) -> None:
        assert self._loop is not None
        with self._deciding:
            was_told, self._is_told = self._is_told, False
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            if was_told:  # as all processes of a terminal get its Ctrl-C
                return
            self.signal = number
        if self.tell is not None:
            threading.Thread(target=self.tell, args=(number,), daemon=True).start()
            if self._listener is None:
                self.end_within(JOINT_SECONDS)
        _tell(f"{number.name}: stopping; a second signal ends at once")
        with contextlib.suppress(RuntimeError):  # the loop has been closed just now
            self._loop.call_soon_threadsafe(self._stop)

    def hear(self, number: int) -> None:
        """Stop as by this signal, which another process of the run got; its own first signal changes nothing then."""
        with self._deciding:
            if self.signal is not None:
                return
            self.signal, self._is_told = signal.Signals(number), True
        if self._listener is None:
            self.end_within(JOINT_SECONDS)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed just now
                self._loop.call_soon_threadsafe(self._stop)

    def stop(self) -> None:
        """Stop and save the run as the first Ctrl-C does; a second call gives up saving. For any other thread."""
        if self._loop is None or (self.signal is not None and self._task is None):
            return
        is_second, self.signal = self.signal is not None, signal.SIGINT
        with contextlib.suppress(RuntimeError):  # the loop has been closed just now
            self._loop.call_soon_threadsafe(self._give_up if is_second else self._stop)

    def _give_up(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _stop(self) -> None:
        if self._listener is not None:
            self._listener.set()
        elif self._task is not None:
            self._task.cancel()

    def end_within(self, seconds: float) -> None:
        """End the process after so many seconds, even if a thread still runs; the run is saved by then.

        A process whose signals are not handled here is somebody else's, such as a notebook's, and goes on.
        """
        if not self._handles_signals:
            return

        def end() -> None:
            os.write(2, f"jaxft: {self.message}\n".encode())
            os._exit(self.exit_code)

        self._timer = threading.Timer(seconds, end)
        self._timer.daemon = True
        self._timer.start()

    @property
    def exit_code(self) -> int:
        """Exit code: 128 plus the signal number, as in a shell."""
        assert self.signal is not None
        return 128 + self.signal

    @property
    def message(self) -> str:
        """Message with the signal's name and the command to resume."""
        assert self.signal is not None
        return f"{WORDS[self.signal]}{self.resume_hint}"

    @property
    def resume_hint(self) -> str:
        """The command that continues the run, as the end of a message; empty without a run."""
        command = f"{self.launcher}{self.resume_command}{self.processes}"
        return "" if self.resume_command is None else f"; continue with:\n  {command}"


_installed: Shutdown | None = None
"""The one that handles the signals of this process."""


def _handle(number: int, frame: object) -> None:
    if _installed is not None:
        _installed._on_signal(signal.Signals(number))


def _tell(sentence: str) -> None:
    """Print in a new thread, as standard error may be a pipe that nobody reads."""

    def tell() -> None:
        print(f"jaxft: {sentence}", file=sys.stderr, flush=True)

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    telling.join(timeout=0.5)


def _forget_signals() -> None:
    """Reset the handlers in a forked process, as an agent's process pool ends its workers by SIGTERM."""
    for number in SIGNALS:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_signals)

_shutdown: ContextVar[Shutdown | None] = ContextVar("jaxft_shutdown", default=None)


def current_shutdown() -> Shutdown | None:
    """Return the `Shutdown` of the running program; None if signals are handled otherwise."""
    return _shutdown.get()
