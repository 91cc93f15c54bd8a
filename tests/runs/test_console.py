"""The console: plain lines in a file, a live bar on a (real) pseudo-terminal, and content that cannot steer either."""

import io
import logging
import os
import threading
from types import SimpleNamespace

import pytest

from jaxft.redaction import hiding, redactor
from jaxft.rollout.recorder import Episode
from jaxft.runs.console import Console, printable

FIGURES = {"reward": 0.81, "kl": 0.00123456, "tok/s": 5321.4, "seconds": 3.14}
FIGURES_LINE = "12/60 epochs  reward 0.81    kl 0.0012  tok/s 5321     3.1 s"
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


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def test_what_goes_on_is_the_live_line_of_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    console = Console(stream)
    console.status("making llms.policy")
    console.start(12, done=2)
    console.status(lambda: "37 of 64 episodes, 1,234 tokens/s")
    console.compiling("jit(decode)")
    console.epoch(3, {"reward": 0.25})
    console.epoch(4, {"reward": 0.5})
    console.log(logging.LogRecord("agent", logging.INFO, "agent.py", 1, "asked [red]%s[/red]", ("why",), None))
    console.status("training")
    console.compiling(None)
    console.close()
    shown = stream.getvalue()
    assert "making llms.policy (" in shown and "2/12 epochs  37 of 64 episodes, 1,234 tokens/s (" in shown
    assert "INFO" in shown and "agent: asked [red]why[/red]" in shown
    assert "compiling jit(decode) (" in shown and "4/12 epochs  training (" in shown
    for line in (" 3/12 epochs  reward 0.25\n", " 4/12 epochs  reward 0.5\n"):
        assert shown.count(line) == 1  # live lines are drawn again and again, those that stay once


def test_elsewhere_what_goes_on_is_a_line_when_there_was_none_for_long(tmp_path):
    stream, has_shown = io.StringIO(), threading.Event()
    console = Console(stream, seconds_between_signs=0.01)

    def progress():
        has_shown.set()
        return "37 of 64 episodes"

    console.start(12)
    console.status(progress)
    while "episodes" not in stream.getvalue():
        assert has_shown.wait(60)
    console.close()
    assert "0/12 epochs  37 of 64 episodes (" in stream.getvalue()  # a slow start shows the epochs alone first


def test_a_line_puts_the_next_sign_off():
    stream, ends = io.StringIO(), iter([False, False, True])
    console = Console(stream)
    console.status("training")
    console.message("asked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "_is_closed", SimpleNamespace(wait=lambda seconds: next(ends)))
        console._give_signs()
    console.close()
    assert [line.split(" (")[0] for line in stream.getvalue().splitlines()] == ["asked", "training"]


def test_all_that_is_shown_is_kept_with_its_time(tmp_path):
    stream, file = io.StringIO(), tmp_path / "run.log"
    console = Console(stream)
    console.message("before the file: sk-3141592653")
    with hiding(["sk-3141592653"]):
        console.mask = redactor()
    console.keep(file)
    console.message(f"{Episode(0, 0, 0, 'a', 0).base_url}/chat")
    console.episode("game", EPISODE)
    console.log(logging.LogRecord("agent", logging.INFO, "agent.py", 1, "asked\x1b[2J %s", ("why",), None))
    console.close()
    console.message("after the file")
    lines = file.read_text().splitlines()
    shown = stream.getvalue().splitlines()
    assert lines.pop(0).endswith(" before the file: ***") and shown.pop(0) == "before the file: sk-3141592653"
    assert shown[0].endswith("/e/***/v1/chat")
    assert lines[-1].endswith(" INFO agent: asked\\x1b[2J why")
    assert [line[len("2026-01-31 23:59:59 ") :] for line in lines] == shown[:-1]


def test_plain_lines_one_per_epoch():
    stream = io.StringIO()
    console = Console(stream)
    console.start(60)
    console.epoch(12, FIGURES)
    assert stream.getvalue() == f"{FIGURES_LINE}\n"
    console.message("saved\nat [red]runs/x[/red]")
    console.close()
    assert stream.getvalue().endswith("saved\nat [red]runs/x[/red]\n")


def test_epochs_are_columns_within_80_characters():
    stream = io.StringIO()
    console = Console(stream)
    console.start(1000)
    names = ("reward", "entropy", "kl", "tok/s", "seconds")
    rows = [
        (-0.0535249, 5.56231, 1.23456e-05, 62.09, 118.31),
        (None, None, None, 590.6, 5.9),
        (0.7972, 0.000123456, -9.87654e-08, 123456.0, 99.94),
        (1234.5678, 23.456, 0.0, 1088.7, 0.04),
        (float("nan"), float("inf"), -12.3456, 99999.0, 9999.0),
    ]
    for done, row in enumerate(rows, 998):
        console.epoch(done, dict(zip(names, row, strict=True)))
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(rows) and all(len(line) <= 80 for line in lines)
    for name in names[:-1]:
        assert len({line.index(f"  {name} ") for line in lines}) == 1
    for line, (reward, _, _, tokens, seconds) in zip(lines, rows, strict=True):
        words = line.split()
        assert words[3] == "-" if reward is None else float(words[3]) == pytest.approx(reward, rel=0.01, nan_ok=True)
        assert float(words[words.index("tok/s") + 1]) == pytest.approx(tokens, abs=0.5)
        assert words[-1] == "s" and float(words[-2]) == pytest.approx(seconds, abs=0.5)
    console.epoch(1000, dict(zip(names, rows[0], strict=True)) | {"clip": 0.25, "sampler diff": 0.5})
    assert [line.split()[0] for line in stream.getvalue().splitlines()[len(rows) :]] == ["1000/1000", "clip"]


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


def test_a_long_message_is_shown_without_its_middle_which_the_log_file_has(tmp_path):
    stream, secret = io.StringIO(), "s3cret-value"
    console = Console(stream)
    console.mask = lambda text: text.replace(secret, "***")
    console.keep(tmp_path / "run.log")
    content = "a" * 1995 + secret + "b" * 5000
    console.episode("game", [{"role": "user", "content": content}])
    console.close()
    shown, log = stream.getvalue(), (tmp_path / "run.log").read_text()
    masked = content.replace(secret, "***")
    assert masked in log and "left out" not in log
    assert masked[:2000] in shown and masked[-2000:] in shown and f"[{len(masked) - 4000} characters" in shown
    assert len(shown) < 4300 and "s3c" not in shown + log


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
    assert " 1/60 epochs  reward 0.25" in shown
    assert FIGURES_LINE in shown
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
