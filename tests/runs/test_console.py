"""The console: plain lines in a file, a live bar on a (real) pseudo-terminal, and content that cannot steer either."""

import io
import os
import threading

import pytest

from jaxft.runs.console import Console, printable

FIGURES = {"reward": "0.81 [0,1]", "kl": 0.00123456, "tok/s": 5321.4, "seconds": 3.14}
EPISODE = [
    {"role": "user", "content": "[bold]x[/bold]\nsecond \x1b[2Jline"},
    {"role": "assistant", "content": "[/] :smile: \r\x00"},
]


def on_a_terminal(show):
    """What `show(console)` sends to a terminal of 100 columns."""
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios

    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    received = []

    def read():
        while True:
            try:
                data = os.read(controller, 4096)
            except OSError:  # Linux: the terminal was closed
                return
            if not data:
                return
            received.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        show(Console(stream))
    reader.join()
    os.close(controller)
    return b"".join(received).decode()


def test_plain_lines_one_per_epoch():
    stream = io.StringIO()
    console = Console(stream)
    console.start(60)
    console.epoch(12, FIGURES)
    assert stream.getvalue() == "epoch 12/60  reward 0.81 [0,1]  kl 0.001235  tok/s 5321  3.1 s\n"
    console.message("saved\nat [red]runs/x[/red]")
    console.close()
    assert stream.getvalue().endswith("saved\nat [red]runs/x[/red]\n")


def test_episode_is_shown_literally():
    stream = io.StringIO()
    Console(stream).episode("game [1]", EPISODE)
    assert stream.getvalue().splitlines() == [
        "--- game [1]",
        "user:",
        "    [bold]x[/bold]",
        "    second \\x1b[2Jline",
        "assistant:",
        "    [/] :smile: \\r\\x00",
    ]


def test_a_terminal_gets_a_bar_with_the_latest_figures(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    def show(console):
        console.start(60)
        console.epoch(1, {"reward": 0.25})
        console.epoch(12, FIGURES)
        console.message("a [red]message[/red]")
        console.episode("game", EPISODE)
        console.close()
        console.close()

    shown = on_a_terminal(show)
    assert "epoch 12/60" in shown
    assert "epoch 12/60  reward 0.81 [0,1]  kl 0.001235  tok/s 5321  3.1 s" in shown
    assert "━" in shown
    assert "a [red]message[/red]" in shown
    assert "[bold]x[/bold]" in shown
    assert "\x1b[2J" not in shown and "\\x1b[2J" in shown


def test_what_the_stream_cannot_encode_is_escaped():
    raw = io.BytesIO()
    console = Console(io.TextIOWrapper(raw, encoding="ascii"))
    console.message("prize: 🏆")
    assert raw.getvalue().decode("ascii").splitlines() == ["prize: \\U0001f3c6"]


def test_printable_keeps_text_and_escapes_what_steers():
    assert printable("line\n\ttab é 日本 👩‍👧") == "line\n\ttab é 日本 👩‍👧"
    assert printable("\x7f\x9b\u202e\ud800\r") == "\\x7f\\x9b\\u202e\\ud800\\r"
