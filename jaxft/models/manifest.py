"""Manifests: sha256 and size of every file of a folder, so that what was lost or changed is named before it is used.

A manifest is written last, and is there whole or not at all: a folder that has one was finished. It finds accidents;
who wants to deceive can write a new one.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
"""Of manifests. Every version is rendered alike, so that a newer one is told from a damaged one."""
OWN_KEYS = ("format_version", "files", "sha256")


class ManifestError(ValueError):
    """A folder is not what its manifest says, or has none that can be read; names every bad file."""


class NewerFormatError(ManifestError):
    """A folder was finished by a newer program, and is no worse for it."""


def write_manifest(folder: Path, extra: Mapping[str, Any] = {}) -> Path:
    """Writes the manifest of all regular files under a folder, in one step, once they are on the disk.

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
        folder: its files must not change any more.
        extra: more to say about the folder, for JSON.

    Raises:
        ManifestError: the folder holds a symbolic link, or something else that is no file.
        ValueError: `extra` has a key of the manifest itself, or a number that JSON has no word for.
    """
    taken = [key for key in OWN_KEYS if key in extra]
    if taken:
        raise ValueError(f"extra has the keys {taken}, which the manifest uses itself: rename them")
    temporary = folder / f".{MANIFEST}.tmp"
    temporary.unlink(missing_ok=True)  # of a write that was cut off: it would be listed
    # As it will be read: keys become strings, tuples lists.
    extra = json.loads(json.dumps(dict(extra), allow_nan=False))
    values = {"format_version": FORMAT_VERSION, **extra, "files": _synced(folder)}
    try:
        with temporary.open("wb") as stream:
            stream.write(_rendered(values))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, folder / MANIFEST)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    return folder / MANIFEST


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, whose files are not looked at.

    Raises:
        ManifestError: there is none, it is damaged, or of a version that this program does not know.
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
        # Not the sum alone: a flipped bit may leave what is parsed as it was.
        is_whole = isinstance(values, dict) and content == _rendered(values)
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
    """Reads every file of a folder and returns its manifest if all are as it says.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
    ...     size = Path(folder, "weights").write_bytes(b"abc")
    ...     path = write_manifest(Path(folder))
    ...     size = Path(folder, "weights").write_bytes(b"abd")
    ...     verify_manifest(Path(folder))
    Traceback (most recent call last):
    jaxft.models.manifest.ManifestError: ... is not what its manifest.json says: weights: other content (sha256)

    Args:
        folder: a finished one.
        only_listed: for a folder that others may add to. Files that are not listed are passed over, and symbolic links
            are followed, of which the hub's cache is made. By default both are faults.

    Raises:
        ManifestError: the manifest is bad, or a file is; names every bad file and what is wrong with it.
    """
    manifest = read_manifest(folder)
    listed = manifest["files"]
    try:
        names = sorted(listed if only_listed else {*listed, *_names(folder)})
    except OSError as error:
        raise ManifestError(f"{folder} cannot be listed: {error}") from error

    def fault(name: str) -> str | None:
        return _fault(folder / name, listed.get(name), follow_links=only_listed)

    with ThreadPoolExecutor() as threads:  # sums are made outside of the interpreter's lock
        bad = [
            f"{name}: {what}" for name, what in zip(names, threads.map(fault, names), strict=True) if what is not None
        ]
    if bad:
        raise ManifestError(f"{folder} is not what its {MANIFEST} says: {'; '.join(bad)}")
    return manifest


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on the disk: what was renamed into it stays so after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names(folder: Path) -> Iterator[str]:
    """Relative paths of all but folders and the manifest; a symbolic link is a name like that of a file."""

    def stop(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, onerror=stop):
        for name in [*files, *(inner for inner in folders if Path(root, inner).is_symlink())]:
            path = Path(root, name).relative_to(folder).as_posix()
            if path != MANIFEST or Path(root, name).is_symlink():
                yield path


def _synced(folder: Path) -> dict[str, dict[str, Any]]:
    """Sum and size of every file under a folder, when all of them are on the disk."""
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


def _rendered(values: dict[str, Any]) -> bytes:
    """The bytes of a manifest, with the sum over everything else in it."""
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
