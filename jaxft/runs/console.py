"""Console output of a run: a live line on a terminal, plain lines elsewhere, and a copy in the run's log file."""

import contextlib
import io
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from jaxft.redaction import EPISODE_KEY, MASK, redacted
from jaxft.runs.files import LOG_FILE

# Characters that reorder or break the text around them, so that it can look like another text.
_DECEPTIVE = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C, 0x2028, 0x2029}
_ROLE_STYLES = {"system": "magenta", "user": "green", "assistant": "cyan", "tool": "yellow"}
_FORMATTER = logging.Formatter("%(levelname)s %(name)s: %(message)s")
_EPOCH_COLUMNS, _VALUE_COLUMNS = 80, 6
_SHOWN_CHARACTERS = 4000
"""Most characters of a message of an episode that are shown; the log file has them all."""
_MAX_UNWRITTEN = 1000
"""Number of entries buffered in memory until the log file is opened."""


class Console:
    """Prints the progress of a run.

    Finished epochs, messages, episodes and log records are permanent lines, flushed at once and the same on a terminal
    as in a file or pipe. The current activity (`status`, `compiling`) is a live line below them on a terminal;
    elsewhere it is printed after a minute without another line. All methods may be called from any thread.

    Attributes:
        mask: masks the secrets of the run, also in threads, whose context does not contain them.
    """

    def __init__(self, stream: io.TextIOBase | None = None, *, seconds_between_signs: float = 60.0) -> None:
        """Print to `stream`, by default standard output.

        If the stream is not a terminal, the status is printed after `seconds_between_signs` without another line.
        """
        self.mask: Callable[[str], str] = redacted
        self._stream = cast(TextIO, sys.stdout if stream is None else stream)
        self._rich = RichConsole(
            file=self._stream, force_terminal=self._stream.isatty(), force_jupyter=False, highlight=False
        )
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._done = self._total_epochs = 0
        self._status: Callable[[], str] = str
        self._compiling: str | None = None
        self._status_began = self._compiling_began = time.perf_counter()
        self._seconds_between_signs = seconds_between_signs
        self._signs: threading.Thread | None = None
        self._is_closed = threading.Event()
        self._has_printed = False
        self._lock = threading.RLock()
        self._file: TextIO | None = None
        self._unwritten: deque[str] = deque(maxlen=_MAX_UNWRITTEN)

    @property
    def columns(self) -> int:
        """Width for tables: that of the terminal, within 80 and 200; 120 elsewhere."""
        return min(max(self._rich.width, 80), 200) if self._rich.is_terminal else 120

    def start(self, total_epochs: int, done: int = 0) -> None:
        """Add a progress bar for `total_epochs` epochs, `done` of them finished, to the live line."""
        self._done, self._total_epochs = done, total_epochs
        self._progress = Progress(
            BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self._rich
        )
        self._task = self._progress.add_task("", total=total_epochs, completed=done)
        self.status("")

    def status(self, text: str | Callable[[], str]) -> None:
        """Show the current activity until the next status.

        Args:
            text: a few words, or a function that returns them and is called several times a second from another thread.
        """
        self._status = text if callable(text) else lambda: text
        self._status_began = time.perf_counter()
        with self._lock:
            if self._rich.is_terminal and not self._rich.is_dumb_terminal:
                if self._live is None:
                    self._live = Live(
                        get_renderable=self._render, console=self._rich, refresh_per_second=4, transient=True
                    )
                    self._live.start()
                self._live.refresh()
            elif self._signs is None:
                self._is_closed.clear()
                self._signs = threading.Thread(target=self._give_signs, name="jaxft-signs", daemon=True)
                self._signs.start()

    def compiling(self, program: str | None) -> None:
        """Show beside the status that a program is being compiled; None ends that."""
        self._compiling, self._compiling_began = program, time.perf_counter()

    def epoch(self, done: int, metrics: Mapping[str, float | None]) -> None:
        """Show a finished epoch in columns: `12/60 epochs  reward 0.81    kl 0.0012   3.1 s`.

        Values that do not fit into 80 characters follow in an indented line.

        Args:
            done: number of finished epochs, this one included.
            metrics: values to show in this order, None as `-`; `seconds` is shown as `3.1 s`.
        """
        self._done = done
        if self._progress is not None:
            self._progress.update(self._task, completed=done)
        lines = [f"{done:>{len(str(self._total_epochs))}}/{self._total_epochs} epochs"]
        for column in map(_column, metrics, metrics.values()):
            if len(f"{lines[-1]}  {column.rstrip()}") > _EPOCH_COLUMNS:
                lines.append("  ")
            lines[-1] += f"  {column}"
        self._print("\n".join(map(str.rstrip, lines)))

    def message(self, text: str) -> None:
        """Show a text of one or more lines."""
        self._print(printable(text))

    def write(self, text: str, style: str = "") -> None:
        """Show a piece of a text without a line break at its end; `style` is rich's, for terminals."""
        text = self._safe(printable(text))
        with self._lock:
            self._has_printed = True
            self._rich.print(Text(text, style=style), end="", soft_wrap=True)

    def episode(self, title: str, messages: Sequence[Mapping[str, str]]) -> None:
        """Show a sample episode: the title, then each message's role and content.

        Args:
            title: one line.
            messages: messages with `role` and `content`. Content is not parsed as markup; control characters are
                escaped. A long one is shown without its middle, which is only in the log file.
        """
        self._print(f"--- {printable(title)}", style="bold")
        for message in messages:
            # Masked before it is cut, as half of a secret is not found.
            role, content = printable(message["role"]), self._safe(printable(message["content"]))
            self._print(f"{role}:", style=_ROLE_STYLES.get(message["role"], "red"))
            self._print(_indented(_shortened(content)), kept=_indented(content))

    def table(self, values: Mapping[str, object]) -> None:
        """Show names and values in two columns, floats with four digits."""
        width = max(map(len, values), default=0)
        self.message("\n".join(f"{name:<{width}}  {_show_value(value)}" for name, value in values.items()))

    def log(self, record: logging.LogRecord) -> None:
        """Show a log record: level, logger and message."""
        self._print(printable(_FORMATTER.format(record)), style="" if record.levelno < logging.WARNING else "yellow")

    def keep(self, path: Path) -> None:
        """Append all lines, including those already shown, to a log file, each with its time.

        The file is for people: if the disk is full, the run continues without it.
        """
        with self._lock, contextlib.suppress(OSError):
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
            # The secrets were not known yet when these lines were shown.
            self._file.writelines(self.mask(redacted(entry)) for entry in self._unwritten)
            self._unwritten.clear()

    def note(self, text: str) -> None:
        """Add a text to the log file only."""
        with self._lock:
            self._keep(self._safe(text))

    def close(self) -> None:
        """End the live line, which shows the cursor again, and close the log file. Lines may still be shown."""
        with self._lock:
            live, signs, file = self._live, self._signs, self._file
            self._live = self._signs = self._file = self._progress = self._compiling = None
            self._status = str
        if live is not None:
            live.stop()
        self._is_closed.set()
        if signs is not None:
            signs.join()
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
        self.mask = redacted

    def _line(self) -> str:
        """Return epochs, status and compilation in one line; empty if there are none."""
        parts = [f"{self._done}/{self._total_epochs} epochs"] if self._progress is not None else []
        compiling = "" if self._compiling is None else f"compiling {self._compiling}"
        for text, began in ((self._status(), self._status_began), (compiling, self._compiling_began)):
            parts += [f"{text} ({time.perf_counter() - began:.0f} s)"] if text else []
        return self._safe(printable("  ".join(parts)))

    def _render(self) -> Group:
        line = Text(self._line(), no_wrap=True, overflow="ellipsis")
        return Group(line) if self._progress is None else Group(self._progress, line)

    def _give_signs(self) -> None:
        # A stream may be closed before its console.
        while not self._is_closed.wait(self._seconds_between_signs) and not self._stream.closed:
            line = self._line()
            if line and not self._has_printed:
                self._print(line)
            self._has_printed = False

    def _print(self, text: str, style: str = "", kept: str | None = None) -> None:
        """Show a text, and add it, or `kept` in its place, to the log file."""
        text = self._safe(text)
        with self._lock:
            self._has_printed = True
            self._rich.print(Text(text, style=style), soft_wrap=True)
            self._keep(text if kept is None else kept)

    def _keep(self, text: str) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        dated = "".join(f"{now} {line}\n" for line in text.split("\n"))
        if self._file is None:
            self._unwritten.append(dated)
            return
        with contextlib.suppress(OSError):
            self._file.write(dated)

    def _safe(self, text: str) -> str:
        """Mask secrets and the keys of episodes in a text, and escape characters that the terminal cannot show."""
        text = EPISODE_KEY.sub(MASK, self.mask(redacted(text)))
        # Characters of a reply that the terminal's encoding lacks must not end the run.
        return text.encode(self._rich.encoding, "backslashreplace").decode(self._rich.encoding)


class LogHandler(logging.Handler):
    """Shows log records on a console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record; a record that cannot be formatted is reported as by the standard library's handlers."""
        try:
            self._console.log(record)
        except Exception:  # of the arguments of a user's log call
            self.handleError(record)


_of_program: ContextVar[Console | None] = ContextVar("jaxft_console", default=None)


@contextlib.contextmanager
def program_console(*, on_stderr: bool = False, is_quiet: bool = False) -> Iterator[Console]:
    """Yield the console of a program, on standard output, error or nowhere, and close it at the end of the block."""
    stream = io.StringIO() if is_quiet else cast(io.TextIOBase, sys.stderr) if on_stderr else None
    console = Console(stream)
    token = _of_program.set(console)
    try:
        yield console
    finally:
        _of_program.reset(token)
        console.close()


def current_console() -> Console:
    """Return the console of the running program; a new one if there is none."""
    return _of_program.get() or Console()


def printable(text: str) -> str:
    r"""Escape every character of a text that steers a terminal or misleads its reader.

    Line feeds and tabs stay.

    >>> printable("red: \x1b[31m, bell: \x07")
    'red: \\x1b[31m, bell: \\x07'
    """
    return "".join(c.encode("unicode_escape").decode() if _is_unsafe(c) else c for c in text)


def _is_unsafe(character: str) -> bool:
    code = ord(character)
    is_control = code < 0x20 or 0x7F <= code < 0xA0
    return (is_control and character not in "\n\t") or 0xD800 <= code < 0xE000 or code in _DECEPTIVE


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _shortened(text: str) -> str:
    """Return a text without its middle if it has more than `_SHOWN_CHARACTERS`."""
    half = _SHOWN_CHARACTERS // 2
    if len(text) <= 2 * half:
        return text
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out; {LOG_FILE} has them]\n{text[-half:]}"


def _column(name: str, value: float | None) -> str:
    """Return a metric in a width that does not depend on its value: four significant digits, or those that fit.

    >>> [_column("kl", 0.00123456), _column("kl", None), _column("seconds", 3.14), _column("seconds", 118.3)]
    ['kl 0.0012', 'kl -     ', ' 3.1 s', ' 118 s']
    """
    if name == "seconds" and value is not None:
        return f"{value:4.{0 if value >= 100 else 1}f} s"
    texts = ["-"] if value is None else [f"{value:.{digits}g}" for digits in (4, 3, 2, 1)] + [f"{value:.0f}"]
    text = next((text for text in texts if len(text) <= _VALUE_COLUMNS and "e+" not in text), texts[0])
    return printable(f"{name} {text:<{_VALUE_COLUMNS}}")


def _show_value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
