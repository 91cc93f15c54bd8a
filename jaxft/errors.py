"""Every error that jaxft raises for its users, under one root with an exit code."""

import asyncio
import contextlib
import difflib
import traceback
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from jaxft.redaction import redacted


class JaxftError(Exception):
    """Something that a run says in one clear message; a command that ends by it exits with `exit_code`."""

    exit_code: ClassVar[int] = 1


class ConfigError(JaxftError, ValueError):
    """A configuration that cannot be used, with all its faults.

    Attributes:
        faults: one line each, beginning with the dotted path or with file:line.
    """

    exit_code = 2

    def __init__(self, faults: Sequence[str], source: str | None = None) -> None:
        self.faults = tuple(faults)
        if source is None:
            super().__init__("\n".join(self.faults))
        else:
            count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
            super().__init__("\n  ".join([f"{source} has {count}:", *self.faults]))


class DatasetError(JaxftError, ValueError):
    """A dataset that cannot be used; the message begins with file:line where there is one."""

    exit_code = 2


class ComponentError(JaxftError, RuntimeError):
    """A component could not be made from its configuration, or broke its contract; the message begins with its name."""

    exit_code = 2


class CheckFailed(JaxftError, RuntimeError):
    """Something that a run needs does not work."""


class JobFailed(JaxftError, RuntimeError):
    """A training job ended as failed or canceled."""


class TrajectoryError(JaxftError, ValueError):
    """Trajectories that cannot be trained on; the message names the episode."""

    exit_code = 2


class NothingToTrain(TrajectoryError):
    """Not one token of a collection can be trained; other collections may still teach something."""

    exit_code = 3


class NoLearningSignal(JaxftError, RuntimeError):
    """Nothing in the collected trajectories could teach the policy anything."""

    exit_code = 3


class TooManyFailures(JaxftError, RuntimeError):
    """So many episodes failed that what is left says nothing."""

    exit_code = 3


class UserCodeError(JaxftError):
    """What code of the user's (a workflow, an evaluator, a factory, a module) raised.

    Attributes:
        error: the exception.
        summary: its type and message in one line.
        traceback: the whole traceback, as text.
        tail: its last three frames.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.summary = one_line(error)
        self.traceback, self.tail = _text(error), _text(error, limit=-3)
        super().__init__(self.summary)


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Turns whatever the body raises into a `UserCodeError` that keeps the traceback; `sys.exit()`, too, but not
    cancellation and Ctrl-C."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, UserCodeError):
        raise
    except BaseException as error:
        raise UserCodeError(error) from error


def one_line(error: BaseException) -> str:
    """Type and message of an exception.

    >>> one_line(ValueError("a\\nb"))
    'ValueError: a b'
    """
    try:
        message = " ".join(redacted(str(error)).split())
    except Exception as failure:  # a class of the user's, whose text has a fault
        message = f"its text cannot be shown, as that raises {type(failure).__name__}"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def did_you_mean(name: str, known: Collection[str], *, what: str) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them.

    >>> did_you_mean("num_epoch", ["seed", "num_epochs"], what="fields")
    "; did you mean 'num_epochs'?"
    >>> did_you_mean("x", ["seed", "num_epochs"], what="fields")
    '; fields: num_epochs, seed'
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; {what}: {', '.join(sorted(known)) or 'none'}"


def _text(error: BaseException, limit: int | None = None) -> str:
    # The first frame is `user_code` itself.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return redacted("".join(traceback.format_exception(type(error), error, frames, limit=limit))).rstrip()


class PolicyError(RuntimeError):
    """The policy cannot go on."""

    exit_code = 1


class PolicyLostError(PolicyError):
    """The parameters were given up to an update that failed; they have to be restored from a checkpoint."""


class DeviceMemoryError(PolicyError):
    """The device has too little memory for what the configuration asks; the message names what to lower."""


class DeviceThreadError(PolicyError):
    """The thread that does the work on the device takes no more of it, or was stopped in the middle of it."""
