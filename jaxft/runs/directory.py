"""The directory of one run: one writer at a time, whole files or none, and no way out of it."""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from filelock import FileLock, Timeout

from jaxft.runs.redaction import redacted_values

# What a run writes, and so what `overwrite` removes. The two lock files stay: they belong to whoever holds the lock.
RUN_FILES = (
    "config.yml",
    "environment.json",
    "result.json",
    "training_metrics.jsonl",
    "timings.jsonl",
    "reward_history.json",
    "validation_history.json",
    "curriculum_state.json",
    "reward_plot.png",
    "tensorboard",
    "trajectories",
    "checkpoints",
    "model",
    "extra",  # for files that components name themselves
)
LOCK_FILE = "LOCK"
HOLDER_FILE = "LOCK.holder"  # pid and host of the last holder; also the mark that a run made this directory

MAX_NAME_CHARACTERS = 100
_SUFFIX = re.compile(r"-[0-9a-f]{12}$")


def holds_run(path: Path) -> bool:
    """Whether a run has written here, so that another one would be refused."""
    return bool(_run_files(path))


def _run_files(path: Path) -> list[str]:
    return [name for name in RUN_FILES if os.path.lexists(path / name)]


class RunDirectoryError(ValueError):
    """A run directory cannot be used; the message names it, the reason and the way out."""


class RunDirectory:
    """A directory that this process alone writes to, until `close` or the end of the process.

    Made by `create` or `open`. All methods may be called from any thread.

    Attributes:
        path: the directory, absolute, symbolic links resolved.
    """

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock
        self._writing = Lock()

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, overwrite: bool = False) -> "RunDirectory":
        """A directory for a new run; parents are made.

        Args:
            path: where. It may exist and hold files of other origin: they stay as they are.
            overwrite: remove the files of an earlier run (those in `RUN_FILES`) instead of refusing.

        Raises:
            RunDirectoryError: not writable, held by another process, or it holds a run already.
        """
        directory = cls._locked(Path(path), make=True)
        try:
            directory._make_room(overwrite)
            directory._write_holder()
        except BaseException:
            directory.close()
            raise
        return directory

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "RunDirectory":
        """The directory of an earlier run, to continue it.

        Raises:
            RunDirectoryError: no run is there, not writable, or held by another process.
        """
        if not (Path(path) / HOLDER_FILE).is_file():
            raise RunDirectoryError(f"no run to continue in '{path}': create it, or give the directory of a run")
        directory = cls._locked(Path(path), make=False)
        try:
            directory._write_holder()
        except BaseException:
            directory.close()
            raise
        return directory

    @classmethod
    def _locked(cls, path: Path, *, make: bool) -> "RunDirectory":
        # One lock object for all threads: a run may be closed by another thread than the one that made it.
        lock = FileLock(path / LOCK_FILE, timeout=0, thread_local=False)
        try:
            if make:
                path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise RunDirectoryError(
                f"run directory '{path}' is in use by {_holder(path)}: wait for that run, or choose another directory"
            ) from None
        except (OSError, NotImplementedError) as error:
            raise RunDirectoryError(
                f"run directory '{path}' cannot be written ({error}): choose one where files can be made and locked"
            ) from error
        return cls(path.resolve(), lock)

    def _make_room(self, overwrite: bool) -> None:
        present = _run_files(self.path)
        if not present:
            return
        shown = ", ".join(present[:3]) + (", ..." if len(present) > 3 else "")
        if not overwrite:
            raise RunDirectoryError(
                f"run directory '{self.path}' already holds a run ({shown}): give another output_dir, or --overwrite"
            )
        if not (self.path / HOLDER_FILE).is_file():
            raise RunDirectoryError(
                f"'{self.path}' holds {shown}, but no run made it (it has no {HOLDER_FILE}), so nothing was removed: "
                "choose another directory, or remove them yourself"
            )
        try:
            for name in present:
                entry = self.path / name
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        except OSError as error:
            raise RunDirectoryError(
                f"run directory '{self.path}' cannot be cleared ({error}): choose another directory"
            ) from error

    def _write_holder(self) -> None:
        try:
            self.write_json(HOLDER_FILE, {"pid": os.getpid(), "host": socket.gethostname()})
        except OSError as error:
            raise RunDirectoryError(
                f"run directory '{self.path}' cannot be written ({error}): choose one where files can be made"
            ) from error

    def file(self, name: str) -> Path:
        """The absolute path of a file of this run; its parent folders exist afterwards.

        Args:
            name: relative to the run directory. Names made from foreign text go through `safe_name` first.

        Raises:
            ValueError: an absolute or empty name, or one that leads out of the directory, be it by `..` or by a
                symbolic link.
        """
        path = self._resolve(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _resolve(self, name: str) -> Path:
        path = (self.path / name).resolve()
        if Path(name).is_absolute() or path == self.path or not path.is_relative_to(self.path):
            raise ValueError(f"'{name}' is not the name of a file under '{self.path}': give a relative name inside it")
        return path

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        with self._writing:
            if not self._lock.is_locked:
                raise RunDirectoryError(f"run directory '{self.path}' is closed: another run may own it by now")
            yield

    def write_bytes(self, name: str, content: bytes) -> Path:
        """Replaces a file in one step and returns its path: a reader, or a crash, sees the old content or the new."""
        path = self.file(name)
        temporary = path.with_name(f".{path.name}.tmp")
        with self._writable():
            try:
                with temporary.open("wb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        return path

    def write_text(self, name: str, text: str) -> Path:
        """`write_bytes` of text in UTF-8, its line ends as they are."""
        return self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: Any) -> Path:
        """Replaces a JSON file in one step, indented by 2, keys in the order given.

        Raises:
            ValueError: a value JSON has no word for, NaN and infinities among them; the old file stays.
        """
        try:
            text = json.dumps(redacted_values(value), indent=2, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"'{name}' cannot be written as JSON ({error}): give finite plain Python values"
            ) from error
        return self.write_bytes(name, _encoded(text))

    def read_json(self, name: str) -> Any:
        """The content of a JSON file of this run.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file is not JSON; the message names it.
        """
        path = self._resolve(name)
        try:
            return json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"'{path}' is not JSON ({error}): restore it, or remove it") from error

    def append_jsonl(self, name: str, row: Mapping[str, Any]) -> Path:
        """Appends one line, flushed, so that the file can be followed while the run goes on.

        JSON has no NaN and no infinity. Such a figure is written as null, and what it was is kept under `non_finite`:
        `{"loss": nan}` becomes `{"loss": null, "non_finite": {"loss": "nan"}}`; inside a list or an inner mapping the
        key is a path, as in `losses.0`.

        Raises:
            ValueError: a value JSON has no word for, or a row with a key `non_finite` of its own.
        """
        found: dict[str, str] = {}
        finite = redacted_values(_without_non_finite(dict(row), "", found))
        if "non_finite" in row:
            raise ValueError(f"a row of '{name}' has the key 'non_finite', which marks NaN and infinities: rename it")
        try:
            line = json.dumps(finite | ({"non_finite": found} if found else {}), allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a row of '{name}' cannot be written as JSON ({error}): give plain values") from error
        path = self.file(name)
        with self._writable(), path.open("ab") as stream:
            stream.write(_encoded(line))
        return path

    def close(self) -> None:
        """Gives the lock back; a second call does nothing. Writing afterwards is an error."""
        with self._writing:
            self._lock.release()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def safe_name(text: str) -> str:
    """A file name for any text: ASCII letters, digits, `_`, `-` and `.`, at most `MAX_NAME_CHARACTERS` long.

    A text that is such a name already is kept. Any other gets a suffix made from the sha256 of the text, so that two
    texts never share a name; so does one that looks as if it had been given a suffix.

    >>> safe_name("game-7")
    'game-7'
    >>> safe_name("games/7")
    'games_7-19063539c513'
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text)
    if name == text and 0 < len(text) <= MAX_NAME_CHARACTERS and text[0] not in ".-" and not _SUFFIX.search(text):
        return text
    suffix = "-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return name.lstrip(".-")[: MAX_NAME_CHARACTERS - len(suffix)] + suffix


def _encoded(json_text: str) -> bytes:
    # A lone surrogate has no UTF-8; its backslash form is what JSON itself would write.
    return (json_text + "\n").encode("utf-8", "backslashreplace")


def _holder(path: Path) -> str:
    try:
        holder = json.loads((path / HOLDER_FILE).read_bytes())
        return f"process {holder['pid']} on host '{holder['host']}'"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process (which has not said its name yet)"


def _without_non_finite(value: Any, path: str, found: dict[str, str]) -> Any:
    """`value` with None for every NaN and infinity, each recorded in `found` under its path."""
    if isinstance(value, float) and not math.isfinite(value):
        found[path] = str(value)
        return None
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        return {key: _without_non_finite(inner, f"{prefix}{key}", found) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(inner, f"{prefix}{i}", found) for i, inner in enumerate(value)]
    return value
