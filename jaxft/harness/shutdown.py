"""SIGINT and SIGTERM: the first asks the run to stop where nothing is lost, the second ends the process at once."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar

from jaxft.harness.errors import JaxftError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Stopped(JaxftError):
    """A signal ended a run after it had been saved."""


class Shutdown:
    """What signals of this process mean, while `main` runs as a task of an event loop.

    Attributes:
        signal: the one that came; None before.
        resume_command: how to go on with the run; None when there is none.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.resume_command: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._listener: asyncio.Event | None = None
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handles signals in the running event loop; without anybody listening they cancel the current task."""
        if threading.current_thread() is not threading.main_thread():  # which alone hears of signals
            yield
            return
        loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        token = _shutdown.set(self)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
            _shutdown.reset(token)
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """An event that a signal sets; inside, that is all that a first signal does."""
        self._listener = asyncio.Event()
        if self.signal is not None:
            self._listener.set()
        try:
            yield self._listener
        finally:
            self._listener = None

    def _on_signal(self, number: signal.Signals) -> None:
        if self.signal is not None:
            end_at_once(number)
        self.signal = number
        for each in SIGNALS:  # not by way of the loop, which may be waiting for a thread
            signal.signal(each, end_at_once)
        print(f"jaxft: {number.name}: stopping; a second signal ends at once", file=sys.stderr, flush=True)
        if self._listener is not None:
            self._listener.set()
        elif self._task is not None:
            self._task.cancel()

    def end_within(self, seconds: float) -> None:
        """Ends the process by then, whatever still holds it up; what had to be saved has been."""

        def end() -> None:
            os.write(2, f"jaxft: {self.message}\n".encode())
            os._exit(self.exit_code)

        self._timer = threading.Timer(seconds, end)
        self._timer.daemon = True
        self._timer.start()

    @property
    def exit_code(self) -> int:
        """128 and the signal, as a shell would say it."""
        assert self.signal is not None
        return 128 + self.signal

    @property
    def message(self) -> str:
        """What happened, and how to go on."""
        assert self.signal is not None
        command = "" if self.resume_command is None else f"; go on with:\n  {self.resume_command}"
        return f"{WORDS[self.signal]}{command}"


def end_at_once(number: int, frame: object = None) -> None:
    """What a second signal does."""
    os.write(2, f"jaxft: {signal.Signals(number).name} again: ended at once\n".encode())
    os._exit(128 + number)


_shutdown: ContextVar[Shutdown | None] = ContextVar("jaxft_shutdown", default=None)


def current_shutdown() -> Shutdown | None:
    """That of the program that runs; None where somebody else handles signals."""
    return _shutdown.get()
