"""Crash-safe files: JSON, safe file names, full-disk errors, and manifests to verify folders."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from jaxft.errors import DiskFull, ManifestError, NewerFormatError
from jaxft.redaction import redacted_values

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk: no space left, quota used up, file larger than allowed."""


def home_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that a person gave; `~` at its start is the home folder.

    >>> home_path("runs/~a")
    PosixPath('runs/~a')
    """
    return Path(os.path.expanduser(path))


def read_utf8(path: Path) -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    Raises:
        ValueError: it cannot be read, or is not UTF-8; the message begins with the path, and the line if there is one.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8: convert the file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not a path: {error}") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"{path}:{line}: holds zero bytes, as UTF-16 does: convert the file to UTF-8")
    return text


class disk_errors(contextlib.AbstractContextManager[None]):
    """Report any out-of-space error in the block as one `DiskFull` with path and free bytes; other errors pass.

    Writers outside Python's standard library raise their own exceptions, which quote the operating system's words.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        reason = _reason(error)
        if reason is not None:
            raise DiskFull(self._path, reason, free_bytes(self._path)) from error


def _reason(error: BaseException | None) -> str | None:
    """Return the operating system's words for a full disk; None for any other error, and for a `DiskFull`."""
    while error is not None and not isinstance(error, DiskFull):
        for number in FULL:
            words = os.strerror(number)
            if error.errno == number if isinstance(error, OSError) else words in str(error):
                return words
        error = error.__cause__
    return None


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that a path is on, or will be."""
    place = path
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def json_bytes(value: Any, *, indent: int | None = None) -> bytes:
    """Return a value as JSON in UTF-8, with secrets masked and a final line feed.

    Raises:
        TypeError, ValueError: JSON cannot hold the value, such as NaN and infinities.
    """
    text = json.dumps(redacted_values(value), indent=indent, allow_nan=False, ensure_ascii=False)
    # A lone surrogate has no UTF-8 encoding; it is written in the backslash form of JSON.
    return (text + "\n").encode("utf-8", "backslashreplace")


def with_non_finite_named(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace every NaN and infinity of a row by None, and record them by path under `non_finite`.

    >>> with_non_finite_named({"loss": float("nan"), "losses": [1.0, float("inf")]})
    {'loss': None, 'losses': [1.0, None], 'non_finite': {'loss': 'nan', 'losses.1': 'inf'}}

    Raises:
        ValueError: the row has a key `non_finite` of its own.
    """
    if "non_finite" in row:
        raise ValueError("it has the key 'non_finite', which marks NaN and infinities: rename it")
    found: dict[str, str] = {}
    finite = _without_non_finite(dict(row), "", found)
    return finite | ({"non_finite": found} if found else {})


def _without_non_finite(value: Any, path: str, found: dict[str, str]) -> Any:
    """Replace every NaN and infinity in `value` by None, and record each in `found` under its path."""
    if isinstance(value, float) and not math.isfinite(value):
        found[path] = str(value)
        return None
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        return {key: _without_non_finite(inner, f"{prefix}{key}", found) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(inner, f"{prefix}{i}", found) for i, inner in enumerate(value)]
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; raise ValueError if a key is repeated."""
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"the key '{key}' is there twice")
        fields[key] = value
    return fields


def finite_number(value: Any) -> float:
    """Return the value as a float; raise ValueError if it is not finite."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is not a finite number: JSON has no NaN and no infinity")
    return number


STRICT_JSON = json.JSONDecoder(object_pairs_hook=unique_keys, parse_float=finite_number, parse_constant=finite_number)
"""Reads what JSON allows and no more: Python's own decoder takes NaN, infinity and repeated keys."""


def replace_file(path: Path, content: bytes) -> Path:
    """Replace a file atomically and return its path: after a crash it has the old content or the new.

    Raises:
        DiskFull: there is no room for the file; the old one stays.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_errors(path):
        temporary.unlink(missing_ok=True)  # left by a killed process, or a link to somewhere else
        try:
            with temporary.open("xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return path


MAX_NAME_CHARACTERS = 100
_PLAIN = re.compile(r"[a-z0-9_](?:[a-z0-9._-]*[a-z0-9_-])?")
_SUFFIX = re.compile(r"-[0-9a-f]{12}$")


def safe_name(text: str) -> str:
    """Return a file name for any text: ASCII letters, digits, `_`, `-` and `.`, at most `MAX_NAME_CHARACTERS` long.

    A text that already is such a name, in lower case, is returned unchanged unless it ends like a suffix of jaxft. All
    others get a suffix from their sha256, so that two texts never give one file, even if the file system ignores case
    or drops a final dot.

    >>> safe_name("game-7")
    'game-7'
    >>> safe_name("games/7")
    'games_7-19063539c513'
    """
    if len(text) <= MAX_NAME_CHARACTERS and _PLAIN.fullmatch(text) and not _SUFFIX.search(text):
        return text
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".-")
    suffix = "-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return name[: MAX_NAME_CHARACTERS - len(suffix)] + suffix


MANIFEST = "manifest.json"
FORMAT_VERSION = 1
"""Version of manifests; all versions are rendered alike, so that a newer one is distinguished from a damaged one."""
OWN_KEYS = ("format_version", "files", "sha256")


def write_manifest(folder: Path, extra: Mapping[str, Any] = {}) -> Path:
    """Sync all regular files under a folder to the disk, write their manifest in one step, and return its path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
    ...     size = Path(folder, "weights").write_bytes(b"abc")
    ...     print(write_manifest(Path(folder), {"step": 7}).read_text())
    {
      "format_version": 1,
      "step": 7,
      "files": {
        "weights": {
          "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
          "size": 3
        }
      },
      "sha256": "..."
    }

    Args:
        folder: a folder whose files do not change any more.
        extra: further entries of the manifest, for JSON.

    Raises:
        ManifestError: the folder holds a symbolic link or another irregular file.
        DiskFull: there is no room for the manifest.
        ValueError: `extra` has a key of the manifest itself, or a NaN or infinity.
    """
    taken = [key for key in OWN_KEYS if key in extra]
    if taken:
        raise ValueError(f"extra has the keys {taken}, which the manifest uses itself: rename them")
    (folder / f".{MANIFEST}.tmp").unlink(missing_ok=True)  # of a write that was cut off; it would be listed
    # As JSON returns it: keys become strings, tuples lists.
    extra = json.loads(json.dumps(dict(extra), allow_nan=False))
    values = {"format_version": FORMAT_VERSION, **extra, "files": _sync_files(folder)}
    path = replace_file(folder / MANIFEST, _render_manifest(values))
    sync_folder(folder)
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder, but none of the files it lists.

    Raises:
        ManifestError: there is no manifest, or it is damaged.
        NewerFormatError: its version is newer than this program knows.
    """
    file = folder / MANIFEST
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ManifestError(f"{folder} has no {MANIFEST}") from None
    except OSError as error:
        raise ManifestError(f"{file} cannot be read: {error}") from error
    try:
        values = json.loads(content)
        # All bytes, not only the sum: a flipped bit may leave the parsed values unchanged.
        is_whole = isinstance(values, dict) and content == _render_manifest(values)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{file} is damaged: it is not valid JSON ({error})") from error
    if not is_whole:
        raise ManifestError(f"{file} is damaged, or no manifest of jaxft: it does not agree with its own sha256")
    version = values.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{file} is of format_version {version}, newer than this program knows ({FORMAT_VERSION}): update jaxft"
        )
    files = values.get("files")
    if version != FORMAT_VERSION or not isinstance(files, dict):
        raise ManifestError(f"{file} is no manifest of jaxft: format_version is {version!r}; wanted {FORMAT_VERSION}")
    for name, listed in files.items():
        _check_listed(file, name, listed)
    return values


def verify_manifest(folder: Path, *, only_listed: bool = False) -> dict[str, Any]:
    """Read every file of a folder, and return its manifest if all of them agree with it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
    ...     size = Path(folder, "weights").write_bytes(b"abc")
    ...     path = write_manifest(Path(folder))
    ...     size = Path(folder, "weights").write_bytes(b"abd")
    ...     verify_manifest(Path(folder))
    Traceback (most recent call last):
    jaxft.errors.ManifestError: ... is not what its manifest.json says: weights: other content (sha256)

    Args:
        folder: a folder with a manifest.
        only_listed: True to ignore files that are not listed, for a folder that others may add to, and to follow
            symbolic links, which a hub's cache consists of. By default both are errors.

    Raises:
        ManifestError: the manifest or a file is bad; the message names every bad file and its error.
    """
    manifest = read_manifest(folder)
    listed = manifest["files"]
    try:
        names = sorted(listed if only_listed else {*listed, *_names(folder)})
    except OSError as error:
        raise ManifestError(f"{folder} cannot be listed: {error}") from error

    def fault(name: str) -> str | None:
        return _fault(folder / name, listed.get(name), follow_links=only_listed)

    with ThreadPoolExecutor() as threads:  # hashing releases the interpreter's lock
        bad = [
            f"{name}: {what}" for name, what in zip(names, threads.map(fault, names), strict=True) if what is not None
        ]
    if bad:
        raise ManifestError(f"{folder} is not what its {MANIFEST} says: {'; '.join(bad)}")
    return manifest


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to the disk, so that a rename in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names(folder: Path) -> Iterator[str]:
    """Return relative paths of all files and symbolic links under a folder, except its manifest."""

    def stop(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, onerror=stop):
        for name in [*files, *(inner for inner in folders if Path(root, inner).is_symlink())]:
            path = Path(root, name).relative_to(folder).as_posix()
            if path != MANIFEST or Path(root, name).is_symlink():
                yield path


def _sync_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Sync every file under a folder to the disk, and return sha256 and size of each by name."""
    files, odd = {}, []
    for name in sorted(_names(folder)):
        mode = (folder / name).lstat().st_mode
        if stat.S_ISREG(mode):
            files[name] = _digest(folder / name, is_synced=True)
        else:
            odd.append(f"{name}: {_kind(mode)}")
    if odd:
        raise ManifestError(f"{folder} holds what no manifest can list: {'; '.join(odd)}")
    for root, _, _ in os.walk(folder):
        sync_folder(Path(root))
    return files


def _kind(mode: int) -> str:
    return "symbolic link" if stat.S_ISLNK(mode) else "no regular file"


def _digest(file: Path, *, is_synced: bool = False) -> dict[str, Any]:
    with file.open("rb") as stream:
        if is_synced:
            os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"sha256": digest, "size": stream.tell()}


def _render_manifest(values: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest, with the sha256 of all its other entries."""
    body = {key: value for key, value in values.items() if key != "sha256"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    body["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    return (json.dumps(body, indent=2) + "\n").encode()


def _check_listed(file: Path, name: str, listed: Any) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or name in (".", MANIFEST):
        raise ManifestError(f"{file} lists {name!r}, which is no file inside of {file.parent}")
    if not isinstance(listed, dict) or type(listed.get("size")) is not int or type(listed.get("sha256")) is not str:
        raise ManifestError(f"{file} says {listed!r:.80} of {name}; wanted an object of sha256 and size")


def _fault(file: Path, listed: dict[str, Any] | None, *, follow_links: bool) -> str | None:
    try:
        status = file.stat(follow_symlinks=follow_links)
        if not stat.S_ISREG(status.st_mode):
            return _kind(status.st_mode)
        if listed is None:
            return "unexpected file"
        if status.st_size != listed["size"]:
            return f"size {status.st_size} instead of {listed['size']}"
        return None if _digest(file)["sha256"] == listed["sha256"] else "other content (sha256)"
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except (OSError, ValueError) as error:  # a name that the file system refuses is a ValueError
        return f"cannot be read ({error})"
