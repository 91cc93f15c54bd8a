"""Handling of SIGINT and SIGTERM: the first signal stops and saves the run, the second ends the process at once.

A program that talks with its user may take SIGINT (Ctrl-C) for itself: see `interruptible` and `released`.

A thread receives the signals (`signal.set_wakeup_fd`), because an agent or a tokenizer may block the main thread, which
would then run no handler. Code that holds Python's global lock keeps that thread from running, too. So each handler is
good for one signal: for the next one of the kind, the system itself ends the process.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


JOINT_SECONDS = 30.0
"""Time that one of several processes has to close after a signal that came while no run was listening to it.

It may wait in a program on the devices of all processes, for one that has ended; then nothing else ends it.
"""

SA_RESETHAND = 0x80000000
"""Flag of a handler that is good for one signal, after which the system's own is back."""

SA_FLAGS_OFFSET = 8 + 128
"""Bytes before the flags in a `struct sigaction` of glibc and musl on 64-bit machines: the handler and a mask."""


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
        self._deciding = threading.Lock()  # which signal is the first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._listener: asyncio.Event | None = None
        self._interrupt: Callable[[], object] | None = None
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
        global _writer
        self._handles_signals = True
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        _writer = writer
        hearing = threading.Thread(target=self._hear, args=(reader,), name="signals", daemon=True)
        hearing.start()
        fd_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, _pass_on) for number in SIGNALS}
        for number in SIGNALS:
            _handle_once(number)
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
            signal.set_wakeup_fd(fd_before)
            _writer = None
            writer.shutdown(socket.SHUT_RDWR)  # closing alone would not end the thread while a forked process lives
            writer.close()
            hearing.join()
            reader.close()

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

    @contextlib.contextmanager
    def interruptible(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Call `interrupt` in the event loop for every SIGINT inside the block, which has no further effect."""
        before, self._interrupt = self._interrupt, interrupt
        try:
            yield
        finally:
            self._interrupt = before

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Let SIGINT raise `KeyboardInterrupt` inside the block, in which the main thread waits for a line of text.

        Raises:
            CancelledError: SIGTERM ends the program.
        """
        if self._loop is None:
            yield
            return
        # Without the descriptor, the thread that listens does not hear of the signals.
        fd_before = signal.set_wakeup_fd(-1)
        handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _raise_terminated}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        except _Terminated:
            self._on_signal(signal.SIGTERM)
            raise asyncio.CancelledError from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
                _handle_once(number)
            signal.set_wakeup_fd(fd_before)

    def _hear(self, reader: socket.socket) -> None:
        """Receive signals in a thread, one byte per signal."""
        while received := reader.recv(64):
            for number in received:
                if number in SIGNALS:
                    self._on_signal(signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        interrupt = self._interrupt
        if number == signal.SIGINT and interrupt is not None:
            assert self._loop is not None
            _handle_once(number)
            with contextlib.suppress(RuntimeError):  # the loop has been closed just now
                self._loop.call_soon_threadsafe(interrupt)
            return
        with self._deciding:
            was_told, self._is_told = self._is_told, False
            if self.signal is not None and not was_told:  # both came before this thread could run
                _tell(f"{number.name} again: ended at once")
                os._exit(128 + number)
            for each in SIGNALS:
                _LIBC.signal(each, None)  # the system ends the process
            if was_told:  # as all processes of a terminal get its Ctrl-C
                return
            self.signal = number
        if self.tell is not None:
            self.tell(number)
            if self._listener is None:
                self.end_within(JOINT_SECONDS)
        _tell(f"{number.name}: stopping; a second signal ends at once")
        assert self._loop is not None
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


_LIBC = ctypes.CDLL(None)

_actions: dict[int, Any] = {}
"""The `struct sigaction` of Python's handler with the flag `SA_RESETHAND`, by signal."""


def _handle_once(number: signal.Signals) -> None:
    """Install Python's handler for one signal of a kind; for the one after it the system ends the process.

    The main thread calls this after `signal.signal`; later any thread may, to install it once more.
    """
    if threading.current_thread() is threading.main_thread():
        action = ctypes.create_string_buffer(512)  # more than any system's structure
        _LIBC.sigaction(number, None, action)
        ctypes.c_uint32.from_buffer(action, SA_FLAGS_OFFSET).value |= SA_RESETHAND
        _actions[number] = action
    _LIBC.sigaction(number, _actions[number], None)


_writer: socket.socket | None = None
"""Socket that the interpreter writes signal numbers to while a `Shutdown` is installed."""


def _pass_on(number: int, frame: object) -> None:
    """Send a signal to the thread if the interpreter did not.

    The interpreter writes to another descriptor after an agent or a library has called `loop.add_signal_handler`.
    """
    if _writer is None:
        return
    current = signal.set_wakeup_fd(_writer.fileno(), warn_on_full_buffer=False)
    if current != _writer.fileno():
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        with contextlib.suppress(BlockingIOError):  # full of signals already
            _writer.send(bytes([number]))


class _Terminated(BaseException):
    """SIGTERM came while the main thread waited for a line of text."""


def _raise_terminated(number: int, frame: object) -> None:
    raise _Terminated


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
        if signal.getsignal(number) is _pass_on:
            signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_signals)

_shutdown: ContextVar[Shutdown | None] = ContextVar("jaxft_shutdown", default=None)


def current_shutdown() -> Shutdown | None:
    """Return the `Shutdown` of the running program; None if signals are handled otherwise."""
    return _shutdown.get()
