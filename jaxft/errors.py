"""Every error that jaxft raises for its users, under one root with an exit code."""

import asyncio
import contextlib
import difflib
import traceback
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from jaxft.redaction import redacted


class JaxftError(Exception):
    """Base of all errors for users; a command that ends with one shows its message and exits with its `exit_code`.

    The codes are 1 for a failure, 2 for bad configuration or input, and 3 for nothing to learn from.
    """

    exit_code: ClassVar[int] = 1


class ConfigError(JaxftError, ValueError):
    """The configuration is invalid; the message lists every error.

    Attributes:
        faults: one line per error, which begins with the dotted path or with file:line.
    """

    exit_code = 2

    def __init__(self, faults: str | Sequence[str], source: str | None = None) -> None:
        self.faults = (faults,) if isinstance(faults, str) else tuple(faults)
        if source is None:
            super().__init__("\n".join(self.faults))
        else:
            count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
            super().__init__("\n  ".join([f"{source} has {count}:", *self.faults]))


class DatasetError(JaxftError, ValueError):
    """A dataset is invalid; the message begins with file:line where there is one."""

    exit_code = 2


class ModelFileError(JaxftError, ValueError):
    """The files of a model are missing, damaged or not supported; the message names the file and the way out."""

    exit_code = 2


class ManifestError(JaxftError, ValueError):
    """A folder differs from its manifest, or has no readable one; the message names every bad file."""

    exit_code = 2


class NewerFormatError(ManifestError):
    """A folder was written by a newer version of jaxft; it is not damaged."""


class RunDirectoryError(JaxftError, ValueError):
    """A run directory cannot be used; the message names it, the reason and the way out."""

    exit_code = 2


class HostsError(JaxftError, RuntimeError):
    """The processes of a run do not find each other, or are not to run the same; the message names the process."""

    exit_code = 2


class ProcessEndedError(HostsError):
    """Another process of the run has ended, and said why; this one needed something of it."""

    exit_code = 1


class CheckpointError(JaxftError, RuntimeError):
    """A checkpoint could not be written; the message names the folder and the reason."""


class RestoreError(CheckpointError):
    """A checkpoint is damaged or does not fit this run; the message names each fault and the way out."""

    exit_code = 2


class DiskFull(JaxftError, RuntimeError):
    """A file could not be written for lack of space; the message names it, the free bytes and the way out.

    Attributes:
        then: the next step once there is space, which the open run adds to the message.
    """

    def __init__(self, path: Path, reason: str, free_bytes: int) -> None:
        super().__init__(
            f"'{path}' cannot be written: {reason}; {free_bytes} bytes are free on its file system: free space, "
            "or raise the quota or file-size limit (ulimit -f)"
        )
        self.then = ""

    def __str__(self) -> str:
        return super().__str__() + self.then


class ComponentError(JaxftError, RuntimeError):
    """A component could not be made, or broke its contract; the message begins with the component's path."""

    exit_code = 2


class CheckFailed(JaxftError, RuntimeError):
    """A check of the machine or of a component failed, as in `jaxft doctor` and `--dry-run`."""


class JobFailed(JaxftError, RuntimeError):
    """A training job ended as failed or canceled."""


class RunsFailed(JaxftError, RuntimeError):
    """Runs of a sweep failed; the message has the last lines of each, and the command that repeats it."""


class Stopped(JaxftError):
    """A signal ended the run; the message says whether it was saved."""


class TrajectoryError(JaxftError, ValueError):
    """Trajectories cannot be trained on; the message names the episode."""

    exit_code = 2


class NothingToTrain(TrajectoryError):
    """No token of a collection can be trained; later collections may have some."""

    exit_code = 3


class NoLearningSignal(JaxftError, RuntimeError):
    """No collected trajectory gave the policy a learning signal."""

    exit_code = 3


class TooManyFailures(JaxftError, RuntimeError):
    """More episodes failed than the configuration allows, or all of them."""

    exit_code = 3


class RequestError(JaxftError, ValueError):
    """A request can never be served: too long for the context, or with impossible messages or sampling parameters.

    Attributes:
        param: name of the parameter that is impossible; None if no single one is.
    """

    exit_code = 2

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(RequestError):
    """A prompt leaves no room for an answer in the context."""

    @classmethod
    def of(cls, size: str, max_context_tokens: int) -> "PromptTooLongError":
        """The error for a prompt of this size, such as "600 tokens"."""
        return cls(
            f"the prompt has {size}, but max_context_tokens is {max_context_tokens} with the answer included; shorten "
            "the conversation, raise llms.<name>.max_context_tokens, or set llms.<name>.long_prompts"
        )


class RemoteModelError(JaxftError, RuntimeError):
    """A remote model gave no usable reply; the message names it and the reason."""


class WorkerError(JaxftError, RuntimeError):
    """A process of an agent or an evaluator ended, or broke one of its limits; the message says which and where."""


class NonFiniteError(JaxftError, FloatingPointError):
    """A sampled token has a non-finite log-probability, as of broken parameters."""


class PolicyError(JaxftError, RuntimeError):
    """The policy can do no further work."""


class PolicyLostError(PolicyError):
    """An update failed after it took the parameters; they must be restored from a checkpoint."""


class ToolsUnsupportedError(RequestError, PolicyError):
    """The chat template of a model takes no tools; this ends a run, as no request with tools can ever be answered."""


class DeviceMemoryError(PolicyError):
    """The device has too little memory for the configuration; the message names the settings to lower."""


class DeviceThreadError(PolicyError):
    """The device thread accepts no more work, or ended during it."""


class ErrorWithSecrets(JaxftError, RuntimeError):
    """Replaces an error whose message or traceback contained a secret; its message is that traceback, redacted."""


class UserCodeError(JaxftError):
    """An exception from the user's code: a workflow, an evaluator, a factory or a module.

    Attributes:
        error: the exception.
        summary: its type and message in one line.
        traceback: the whole traceback, as text.
        tail: the last three frames of the traceback, as text.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.summary = one_line(error)
        self.traceback, self.tail = _text(error), _text(error, limit=-3)
        super().__init__(self.summary)

    @property
    def where(self) -> str:
        """The end of the traceback; of a syntax error its position, as no code has run."""
        if isinstance(self.error, SyntaxError):
            return f" {self.error.filename}:{self.error.lineno}: {type(self.error).__name__}: {self.error.msg}"
        return f"\n{self.tail}"

    @classmethod
    def of_another_process(cls, error: BaseException, summary: str, traceback: str, tail: str) -> "UserCodeError":
        """Return the error for an exception in another process, whose traceback is known as text only."""
        self = cls(error)
        self.summary, self.traceback, self.tail = redacted(summary), redacted(traceback), redacted(tail)
        self.args = (self.summary,)
        return self


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Raise every exception of the body, `sys.exit()` included, as a `UserCodeError`; cancellation and Ctrl-C pass."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, UserCodeError):
        raise
    except BaseException as error:
        raise UserCodeError(error) from error


@contextlib.contextmanager
def without_secrets() -> Iterator[None]:
    """Raise an exception of the body as `ErrorWithSecrets` if a secret is in its text or traceback; others pass."""
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        if redacted(text) == text:
            raise
        message = redacted(text)
    else:
        return
    raise ErrorWithSecrets(message)


def one_line(error: BaseException) -> str:
    """Return type and message of an exception, secrets masked, on one line.

    >>> one_line(ValueError("a\\nb"))
    'ValueError: a b'
    """
    try:
        message = " ".join(redacted(str(error)).split())
    except Exception as failure:  # the __str__ of a user's class has a fault
        message = f"its text cannot be shown, as that raises {type(failure).__name__}"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def did_you_mean(name: str, known: Collection[str], *, what: str) -> str:
    """Return the end of a message about an unknown name: the closest known name, or all of them under the word `what`.

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
