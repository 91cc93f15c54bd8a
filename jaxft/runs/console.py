"""The one place that prints: a live progress bar on a terminal, plain lines elsewhere."""

import io
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO, cast

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from jaxft.runs.redaction import redacted

# They reorder or break what stands around them, so a text could show itself as another.
_DECEPTIVE = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C, 0x2028, 0x2029}
_ROLE_STYLES = {"system": "magenta", "user": "green", "assistant": "cyan", "tool": "yellow"}


class Console:
    """Shows a run to the person who started it.

    On a terminal the latest epoch's figures stand under a progress bar that stays at the bottom; anywhere else (a
    file, a pipe, a log collector) every epoch is a line of its own, flushed at once.
    """

    def __init__(self, stream: io.TextIOBase | None = None) -> None:
        """Prints to `stream`, by default standard output."""
        self._stream = cast(TextIO, sys.stdout if stream is None else stream)
        self._rich = RichConsole(file=self._stream, highlight=False)
        self._is_terminal = self._stream.isatty()
        self._live: Live | None = None
        self._total_epochs = 0

    def start(self, total_epochs: int) -> None:
        """Begins a run of so many epochs."""
        self._total_epochs = total_epochs
        if not self._is_terminal:
            return
        self.close()
        self._progress = Progress(
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._rich,
        )
        self._task = self._progress.add_task("", total=total_epochs)
        first = Group(self._progress, Text(f"epoch 0/{total_epochs}"))
        self._live = Live(first, console=self._rich, refresh_per_second=4)
        self._live.start()

    def epoch(self, epoch: int, figures: Mapping[str, float | str]) -> None:
        """Shows a finished epoch: `epoch 12/60  reward 0.81 [0,1]  kl 0.0012  3.1 s`.

        Args:
            epoch: counted from 1.
            figures: shown in this order as name and value; floats with four digits. The one called `seconds` is shown
                as `3.1 s`.
        """
        line = "  ".join([f"epoch {epoch}/{self._total_epochs}", *(_figure(*figure) for figure in figures.items())])
        if self._live is None:
            self._print(line)
            return
        self._progress.update(self._task, completed=epoch)
        self._live.update(Group(self._progress, Text(line)))

    def message(self, text: str) -> None:
        """Shows a text of one or more lines."""
        self._print(printable(text))

    def episode(self, title: str, messages: Sequence[Mapping[str, str]]) -> None:
        """Shows a sample episode: the title, then each message's role and content.

        Args:
            title: one line.
            messages: with `role` and `content`. The content is shown as it is: nothing in it is taken for markup, and
                control characters are escaped.
        """
        self._print(f"--- {printable(title)}", style="bold")
        for message in messages:
            role, content = printable(message["role"]), printable(message["content"])
            self._print(f"{role}:", style=_ROLE_STYLES.get(message["role"], "red"))
            self._print("\n".join(f"    {line}" for line in content.split("\n")))

    def close(self) -> None:
        """Ends the progress bar, leaving its last state. A run has to end with it, or the cursor stays hidden."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str, style: str = "") -> None:
        # A model may say what the terminal's encoding cannot: that must not end the run.
        text = redacted(text)
        text = text.encode(self._rich.encoding, "backslashreplace").decode(self._rich.encoding)
        if self._is_terminal:
            self._rich.print(Text(text, style=style))
        else:
            print(text, file=self._stream, flush=True)


def printable(text: str) -> str:
    r"""`text` with every character that steers a terminal, or hides what is there, in its escaped form.

    Line feeds and tabs stay.

    >>> printable("red: \x1b[31m, bell: \x07")
    'red: \\x1b[31m, bell: \\x07'
    """
    return "".join(c.encode("unicode_escape").decode() if _is_unsafe(c) else c for c in text)


def _is_unsafe(character: str) -> bool:
    code = ord(character)
    is_control = code < 0x20 or 0x7F <= code < 0xA0
    return (is_control and character not in "\n\t") or 0xD800 <= code < 0xE000 or code in _DECEPTIVE


def _figure(name: str, value: float | str) -> str:
    shown = value if isinstance(value, str) else f"{value:.4g}"
    return printable(f"{value:.1f} s" if name == "seconds" and not isinstance(value, str) else f"{name} {shown}")
