"""A disk that takes no more, said in the same words wherever it is met."""

import contextlib
import errno
import os
import shutil
from pathlib import Path
from types import TracebackType

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space is left, a quota is used up, a file is larger than it may be."""


class DiskFull(RuntimeError):
    """A file could not be written for want of space; names it, what is free, and the way out.

    Attributes:
        then: what to do when there is space; the end of the message, known to whoever knows the run.
    """

    exit_code = 1

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"'{path}' cannot be written: {reason}; {_free_bytes(path)} bytes are free on its file system: free space, "
            "or raise the quota or file-size limit (ulimit -f)"
        )
        self.then = ""

    def __str__(self) -> str:
        return super().__str__() + self.then


class disk_errors(contextlib.AbstractContextManager[None]):
    """Turns what says that the disk is full into a `DiskFull` that names a path; other errors pass.

    Writers that are not Python's own raise exceptions of their own, with the words of the operating system in them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        reason = _reason(error)
        if reason is not None:
            raise DiskFull(self._path, reason) from error


def _reason(error: BaseException | None) -> str | None:
    """What the disk said; None when it said nothing, or when that has been made a `DiskFull` already."""
    while error is not None and not isinstance(error, DiskFull):
        for number in FULL:
            words = os.strerror(number)
            if error.errno == number if isinstance(error, OSError) else words in str(error):
                return words
        error = error.__cause__
    return None


def _free_bytes(path: Path) -> int:
    place = path
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free
