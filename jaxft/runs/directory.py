"""The run directory: one process writes to it at a time, files are replaced in one step, and no path leads outside."""

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from filelock import FileLock, Timeout

from jaxft.errors import RunDirectoryError
from jaxft.files import disk_errors, json_bytes, replace_file, sync_folder, with_non_finite_named
from jaxft.runs.files import HOLDER_FILE, LOCK_FILE, NO_LOGS, RUN_FILES, holds_run, is_locked, run_files, ways_on


def holder_of_lock(path: Path) -> str | None:
    """Return who has locked a run directory, as `process 7 on host 'a'`; None if nobody of this machine has."""
    return _holder(path) if is_locked(path) else None


class RunDirectory:
    """The directory of a run, locked for this process until `close` or the end of the process.

    `create` and `open` make it. All methods may be called from any thread.

    Attributes:
        path: the directory, absolute, symbolic links resolved.
    """

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock
        # That of another process, as a worker writes to, is not locked here, and may not be there.
        self._locked_file = os.stat(path / LOCK_FILE) if lock.is_locked else None
        self._writing = Lock()
        self._earlier: list[str] = []  # files of an earlier run, which the first write removes

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, overwrite: bool = False) -> "RunDirectory":
        """Lock a directory for a new run; create it and its parents if missing.

        The files of an earlier run (`RUN_FILES`) stay until the first write, which removes them.

        Args:
            path: the directory. Other files in it stay unchanged.
            overwrite: replace an earlier run instead of refusing. The remains of a failed start are not a run.

        Raises:
            RunDirectoryError: the directory is not writable, is locked by another process, or holds a run.
        """
        directory = cls._lock_folder(Path(path), make=True)
        with directory._closed_if_refused():
            earlier = directory._replaceable(overwrite)
        directory._earlier = earlier
        return directory

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "RunDirectory":
        """Lock the directory of an earlier run, to continue it.

        Raises:
            RunDirectoryError: the directory holds no run, is not writable, or is locked by another process.
        """
        if not (Path(path) / HOLDER_FILE).is_file():
            raise RunDirectoryError(f"no run to continue in '{path}': create it, or give the directory of a run")
        directory = cls._lock_folder(Path(path), make=False)
        with directory._closed_if_refused():
            return directory

    @contextlib.contextmanager
    def _closed_if_refused(self) -> Iterator[None]:
        """Make the checks of the body, and write who holds the directory."""
        try:
            yield
            with _refused_unless_writable(self.path):
                self.write_json(HOLDER_FILE, {"pid": os.getpid(), "host": socket.gethostname()})
        except BaseException:
            self.close()
            raise

    @classmethod
    def _lock_folder(cls, path: Path, *, make: bool) -> "RunDirectory":
        if (path / LOCK_FILE).is_symlink():
            raise RunDirectoryError(
                f"'{path / LOCK_FILE}' is a symbolic link, through which no run is locked: remove that link"
            )
        # The lock object is not thread-local, as a run may be closed in another thread than it was opened in.
        lock = FileLock(path / LOCK_FILE, timeout=0, thread_local=False)
        with _refused_unless_writable(path):
            if make:
                path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        return cls(path.resolve(), lock)

    def _replaceable(self, overwrite: bool) -> list[str]:
        """Return the names of the files of a run or of a failed start; raise unless they may be replaced."""
        present = run_files(self.path)
        if not holds_run(self.path):
            return present
        shown = ", ".join(present[:3]) + (", ..." if len(present) > 3 else "")
        if not overwrite:
            raise RunDirectoryError(f"run directory '{self.path}' already holds a run ({shown}): {ways_on(self.path)}")
        if not (self.path / HOLDER_FILE).is_file():
            raise RunDirectoryError(
                f"'{self.path}' holds {shown}, but no run made it (it has no {HOLDER_FILE}), so nothing was removed: "
                "choose another directory, or remove them yourself"
            )
        return present

    def _make_room(self) -> None:
        """Remove the earlier run, or the remains of a failed start, before the first write."""
        with self._writing:
            earlier, self._earlier = self._earlier, []
            if self._lock.is_locked:
                with _refused_unless_writable(self.path):
                    self._remove(earlier)

    def file(self, name: str) -> Path:
        """Return the absolute path of a file of this run; missing parent folders are created.

        Args:
            name: path relative to the run directory. Pass names made from user text through `safe_name` first.

        Raises:
            ValueError: the name is absolute, empty, contains `..`, or is invalid on the file system.
            RunDirectoryError: a symbolic link leads out of the directory, or somebody has removed it.
            DiskFull: there is no room for the folders.
        """
        self._check_there()  # first of all, as a new folder would hold a part of the run, which nothing continues
        self._make_room()  # first: a file of an earlier run may be a link that leads out
        path = self._resolve(name)
        try:
            with disk_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise RunDirectoryError(
                f"{name!r} is not the name of a file under '{self.path}': '{error.filename}' is no folder: move it "
                "elsewhere"
            ) from error
        return path

    def _check_there(self) -> None:
        """Raise unless the directory is the one that was locked; the open lock keeps the number of its file taken."""
        if self._locked_file is None or not self._lock.is_locked:
            return
        try:
            is_there = os.path.samestat(os.stat(self.path / LOCK_FILE), self._locked_file)
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        if not is_there:
            raise RunDirectoryError(
                f"run directory '{self.path}', or the {LOCK_FILE} in it, was removed during the run: begin anew, or "
                "resume a copy of it"
            )

    def _resolve(self, name: str) -> Path:
        wrong = f"{name!r} is not the name of a file under '{self.path}'"
        try:
            # Not `Path.resolve`, which treats links to themselves differently in different versions of Python.
            path = Path(os.path.realpath(self.path / name))
            links = [each for each in (path, *path.parents) if each.is_symlink()]
        except ValueError as error:  # NUL, a lone surrogate
            raise ValueError(f"{wrong} ({error}): give a relative name inside it") from error
        if links:
            raise ValueError(f"{wrong}: the symbolic link '{links[0]}' leads to itself: remove that link")
        if Path(name).is_absolute() or path == self.path or ".." in Path(name).parts:
            raise ValueError(f"{wrong}: give a relative name inside it")
        if not path.is_relative_to(self.path):
            raise RunDirectoryError(f"{wrong}: a symbolic link leads from there to '{path}': remove that link")
        return path

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        with self._writing:
            if not self._lock.is_locked:
                raise RunDirectoryError(f"run directory '{self.path}' is closed: another run may own it by now")
            yield

    def write_bytes(self, name: str, content: bytes) -> Path:
        """Replace a file atomically and return its path: after a crash it has the old content or the new.

        Raises:
            DiskFull: there is no room for the file; the old one stays.
        """
        path = self.file(name)
        with self._writable():
            return replace_file(path, content)

    def write_text(self, name: str, text: str) -> Path:
        """Replace a file by text in UTF-8; line ends are not converted."""
        return self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: Any) -> Path:
        """Replace a JSON file atomically, indented by 2, keys in the given order.

        Raises:
            ValueError: JSON cannot hold a value, such as NaN; the old file stays.
        """
        try:
            content = json_bytes(value, indent=2)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"'{name}' cannot be written as JSON ({error}): give finite plain Python values"
            ) from error
        return self.write_bytes(name, content)

    def read_json(self, name: str) -> Any:
        """Read a JSON file of this run.

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
        """Append one line and flush it, so that the file can be followed during the run.

        JSON has no NaN and no infinity. Such a value is written as null, and as text under `non_finite`:
        `{"loss": nan}` becomes `{"loss": null, "non_finite": {"loss": "nan"}}`; inside a list or an inner mapping the
        key is a path, as in `losses.0`.

        Raises:
            ValueError: JSON cannot hold a value, or the row already has a key `non_finite`.
            DiskFull: there is no room for the line; nothing of it is written.
        """
        try:
            line = json_bytes(with_non_finite_named(row))
        except (TypeError, ValueError) as error:
            raise ValueError(f"a row of '{name}' cannot be written as JSON ({error}): give plain values") from error
        path = self.file(name)
        with self._writable(), disk_errors(path):
            _append(path, line)
        return path

    def holds(self, name: str) -> bool:
        """Return True if the run has a file or folder of this name."""
        return os.path.lexists(self.path / name)

    def log_sizes(self) -> dict[str, int]:
        """Sync every log of the run to the disk, and return its size in bytes by name.

        Raises:
            DiskFull: the disk has no room for them.
        """
        sizes, logs = {}, self._logs()
        for path in logs:
            with disk_errors(path), path.open("rb") as stream:
                os.fsync(stream.fileno())
                sizes[path.relative_to(self.path).as_posix()] = os.fstat(stream.fileno()).st_size
        for folder in {path.parent for path in logs}:
            sync_folder(folder)
        return sizes

    def cut_logs(self, sizes: Mapping[str, int]) -> list[str]:
        """Truncate every log to its size in `sizes`, and remove the logs that are not in it.

        Returns:
            A warning for each log that is shorter than its size in `sizes`.
        """
        found = {path.relative_to(self.path).as_posix(): path.stat().st_size for path in self._logs()}
        with self._writable():
            for name, size in found.items():
                path = self.path / name
                if name not in sizes:
                    path.unlink()
                elif size > sizes[name]:
                    with disk_errors(path):
                        os.truncate(path, sizes[name])
        return [
            f"{self.path / name} has {found.get(name, 0)} bytes, but had {size} when the checkpoint was made: lines of "
            "it are lost"
            for name, size in sizes.items()
            if found.get(name, 0) < size
        ]

    def _logs(self) -> list[Path]:
        """Return the files that grow line by line, which a resume truncates to their size at the checkpoint."""
        names = [name for name in RUN_FILES if name not in NO_LOGS and not (self.path / name).is_symlink()]
        places = [self.path / name for name in names]  # files of other origin are not ours
        found = [path for place in places for path in (place, *place.rglob("*")) if path.suffix == ".jsonl"]
        return sorted(path for path in found if path.is_file() and not path.is_symlink())

    def remove(self, names: Iterable[str]) -> None:
        """Remove files and folders of this run; symbolic links are removed, not followed."""
        with self._writable():
            self._remove(names)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock; a second call does nothing, and a later write raises an error."""
        with self._writing:
            self._lock.release()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def _refused_unless_writable(path: Path) -> Iterator[None]:
    """Raise what fails in the body as a `RunDirectoryError`."""
    try:
        with disk_errors(path):
            yield
    except Timeout:
        raise RunDirectoryError(
            f"run directory '{path}' is in use by {_holder(path)}: wait for that run, or choose another directory"
        ) from None
    except (OSError, NotImplementedError, ValueError) as error:  # ValueError: NUL, a lone surrogate
        raise RunDirectoryError(
            f"run directory {str(path)!r} cannot be written ({error}): choose one where files can be made and locked"
        ) from error


def _append(path: Path, line: bytes) -> None:
    """Append a whole line or nothing; unbuffered, as a buffer would write the rest of a failed line when closed."""
    with path.open("ab", buffering=0) as stream:
        length = stream.seek(0, os.SEEK_END)
        try:
            left = memoryview(line)
            while left:
                left = left[stream.write(left) :]
        except BaseException:
            stream.truncate(length)
            raise


def _holder(path: Path) -> str:
    try:
        holder = json.loads((path / HOLDER_FILE).read_bytes())
        return f"process {holder['pid']} on host '{holder['host']}'"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process (which has not written its name yet)"
