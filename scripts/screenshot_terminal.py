"""Takes a picture of what a command shows in a terminal.

    pip install playwright pyte
    python scripts/screenshot_terminal.py docs/start_terminal.png -- python examples/ten_lines.py
    python scripts/screenshot_terminal.py docs/sweeps_terminal.png --seconds 200 -- jaxft sweep --config-file run.yml

The command runs in a pseudo-terminal. The picture is of the screen at its end, or after so many seconds; the command
goes on until it ends. The picture is taken by the Chromium on the PATH.
"""

import argparse
import fcntl
import html
import os
import pty
import select
import shlex
import shutil
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte
from playwright.sync_api import sync_playwright
from pyte.screens import Char

COLORS = {
    "default": "#d8dee9", "black": "#4c566a", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b",
    "blue": "#61afef", "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#eceff4",
}  # fmt: skip
"""Colours of text by pyte's names; others are six hexadecimal digits."""

PAGE = """\
<meta charset="utf-8"><style>
body {{ margin: 0; background: white }}
pre {{ display: inline-block; margin: 0; padding: 14px 18px; border-radius: 8px; background: #1f2430; color: #d8dee9;
       font: 14px/1.35 "DejaVu Sans Mono", monospace }}
</style><pre>{text}</pre>"""


def main() -> None:
    """Run the command and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the PNG file to write")
    parser.add_argument("--seconds", type=float, help="when the picture is taken (default: at the end of the command)")
    parser.add_argument("--columns", type=int, default=112, help="width of the terminal (default %(default)s)")
    parser.add_argument("--lines", type=int, default=40, help="greatest height of the terminal (default %(default)s)")
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    parsed = parser.parse_args()
    screen = pyte.Screen(parsed.columns, parsed.lines)
    pyte.Stream(screen).feed(f"$ {shlex.join(parsed.command)}\r\n")
    child = run_in_terminal(parsed.command, screen, parsed.seconds)
    photograph(screen, parsed.picture)
    print(f"{parsed.picture}: {parsed.picture.stat().st_size} bytes; exit status {child()}")


def run_in_terminal(command: list[str], screen: pyte.Screen, seconds: float | None) -> Callable[[], int]:
    """Run a command with a screen as its terminal; return after so many seconds, or at its end.

    Returns:
        A function that waits for the end of the command, reading what it shows, and returns its exit status.
    """
    stream = pyte.ByteStream(screen)
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(screen.columns), "LINES": str(screen.lines)}
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", screen.lines, screen.columns, 0, 0))

    def read(until: float) -> None:
        """Feed the screen until that time or the end of the command."""
        while (left := until - time.monotonic()) > 0:
            if select.select([terminal], [], [], min(left, 60.0))[0]:
                try:
                    shown = os.read(terminal, 65536)
                except OSError:  # how a pseudo-terminal ends on Linux
                    return
                stream.feed(shown)

    read(time.monotonic() + (float("inf") if seconds is None else seconds))

    def end() -> int:
        read(float("inf"))
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    return end


def photograph(screen: pyte.Screen, picture: Path) -> None:
    """Write what is on the screen as a PNG file, without the empty lines at its end."""
    lines = [line_as_html(screen, number) for number in range(screen.lines)]
    while lines and not lines[-1]:
        lines.pop()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1600, "height": 1200})
        page.set_content(PAGE.format(text="\n".join(lines)))
        page.locator("pre").screenshot(path=picture)
        browser.close()


def line_as_html(screen: pyte.Screen, number: int) -> str:
    """Return a line of the screen as HTML."""
    characters = [screen.buffer[number][column] for column in range(screen.columns)]
    while characters and characters[-1].data == " ":
        characters.pop()
    return "".join(character_as_html(each) for each in characters)


def character_as_html(character: Char) -> str:
    """Return a character with its colour and weight as HTML."""
    style = []
    if character.fg != "default":
        name = character.fg.removeprefix("bright")
        style.append(f"color:{COLORS.get(name, '#' + name)}")
    if character.bold:
        style.append("font-weight:bold")
    text = html.escape(character.data)
    return f'<span style="{";".join(style)}">{text}</span>' if style else text


if __name__ == "__main__":
    main()
