"""Runs a program from its command line to its exit code, for `jaxft` and for scripts.

    async def main(config, arguments):
        async with open_session(config, overwrite=arguments.overwrite) as session:
            before = await session.evaluate()
            await session.train()
            session.write_result({"before": before.average_reward})

    if __name__ == "__main__":
        sys.exit(run_script(main, run_arguments(__doc__, "tic_tac_toe.yml")))

Errors become exit codes here and nowhere else.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import ParamSpec, TypeVar

from jaxft.errors import ConfigError, HostsError, JaxftError, Stopped
from jaxft.harness.config import Config, load_config
from jaxft.harness.config_merge import literal
from jaxft.harness.data_models import FinetuneRunConfig
from jaxft.harness.process import prepare_process
from jaxft.harness.registry import REGISTRY
from jaxft.harness.session import config_file, resume_command
from jaxft.harness.signals import Shutdown
from jaxft.harness.verbs import OptionParser, installed_verbs, processes_arguments, processes_options
from jaxft.hosts.start import LAUNCHER, ProcessPlace, find_place, join, leave
from jaxft.runs.console import Console, LogHandler, program_console
from jaxft.runs.environment import masked_command, version

P = ParamSpec("P")
T = TypeVar("T")

Main = Callable[[Config, argparse.Namespace], Awaitable[None]]
"""Main function of a script, called with its configuration and its arguments."""

LEAVE_SECONDS = 5.0
"""Time that a process with an error waits for the others, which mostly end with the same."""


def run_script(main: Main, parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, load the configuration, run `main(config, arguments)`, and return the exit code.

    Args:
        main: the program.
        parser: made by `run_arguments`.
        arguments: by default those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = parser.parse_args(given)
    try:
        for verb in installed_verbs().values():
            if verb.takes_over is not None and verb.takes_over(parsed):
                return verb(parsed, given)
    except ConfigError as error:
        return complain(f"error: {error}", error.exit_code)
    return run_parsed(main, parsed, [sys.argv[0], *given])


def run_parsed(main: Main, parsed: argparse.Namespace, command: Sequence[str]) -> int:
    """Load the configuration of parsed arguments, run `main(config, arguments)`, and return the exit code.

    Args:
        main: the program.
        parsed: arguments that a parser of `run_arguments` made.
        command: the whole command line, with the program's name; what resumes the run is made from it.
    """

    async def load_and_run() -> None:
        config = command_line_config(parsed)
        if resume_command.get() is None:
            resume_command.set(command_to_resume(command))
        config_file.set(parsed.config_file)
        await main(config, parsed)

    processes = processes_options(parsed)
    return run_main(load_and_run, title=str(parsed.config_file), log_level=parsed.log_level, processes=processes)


def command_to_resume(arguments: Sequence[str]) -> str:
    """Return the command line that resumes the run of a script.

    >>> command_to_resume(["experiments/arithmetic.py", "--overwrite", "--set", "finetuning.seed=1"])
    'python experiments/arithmetic.py --set finetuning.seed=1 --resume'

    Options that differ between several processes are left out: `Shutdown.processes` has them.

    >>> command_to_resume(["train.py", "--coordinator", "10.0.0.1:1234", "--num-processes=2", "--process-id", "1"])
    'python train.py --resume'
    """
    left_out = OptionParser(add_help=False, allow_abbrev=False)
    processes_arguments(left_out)
    for option in ("--overwrite", "--resume"):
        left_out.add_argument(option, action="store_true")
    _, kept = left_out.parse_known_args(masked_command(arguments))
    return shlex.join(["python", *kept, "--resume"])


def command_line_config(parsed: argparse.Namespace, overrides: Sequence[tuple[str, str]] | None = None) -> Config:
    """Return the configuration of a command line.

    Args:
        parsed: arguments that a parser of `run_arguments` made.
        overrides: paths and values in the place of those of `--set`; None: those.

    Raises:
        ConfigError: the configuration has errors; the message lists all of them with their paths.
    """
    run = FinetuneRunConfig.model_validate({name: vars(parsed)[name] for name in FinetuneRunConfig.model_fields})
    agent = None if run.endpoint is None else {"_type": "http_agent", "url": run.endpoint}
    options = {
        "workflow": agent,
        "eval.general.timeout_seconds": run.endpoint_timeout,
        "eval.general.result_json_path": run.result_json_path,
        "eval.validation.interval": run.validation_interval,
        "eval.validation.config_file": run.validation_config_file,
        "finetuning.strict_compile": parsed.strict_compile or None,
    }
    # As YAML, applied after the file and before --set.
    said = [
        (path, json.dumps(literal(str(value)) if isinstance(value, str | Path) else value))
        for path, value in options.items()
        if value is not None
    ]
    return load_config(
        run.config_file,
        [*said, *(run.override if overrides is None else overrides)],
        dataset=run.dataset,
        validation_dataset=run.validation_dataset,
    )


@contextlib.contextmanager
def _logging_to(console: Console, level: str) -> Iterator[None]:
    """Show log records on a console: those of the user's modules and jaxft from `level` on, others from warning on.

    Handlers that the root logger already has, from a library, continue to get the records that they got before.
    """
    root, handler = logging.getLogger(), LogHandler(console)
    handler.setLevel(level.upper())
    handler.addFilter(is_shown)
    before, earlier = root.level, list(root.handlers)

    def was_taken(record: logging.LogRecord) -> bool:
        logger = logging.getLogger(record.name)
        while logger.level == logging.NOTSET and logger.parent is not None:
            logger = logger.parent
        return logger is not root or record.levelno >= before

    for each in earlier:
        each.addFilter(was_taken)
    root.addHandler(handler)
    root.setLevel(min(before, handler.level))
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        for each in earlier:
            each.removeFilter(was_taken)


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def is_shown(record: logging.LogRecord) -> bool:
    """Return True for a warning, and for a record of a user's module or jaxft."""
    if record.levelno >= logging.WARNING or record.name.partition(".")[0] in {"jaxft", *REGISTRY.packages()}:
        return True
    folders = Path(record.pathname).parts
    is_installed = "site-packages" in folders or "dist-packages" in folders
    return not is_installed and not record.pathname.startswith(_STANDARD_LIBRARY)


def run_main(
    main: Callable[[], Awaitable[None]],
    *,
    title: str | None = None,
    log_level: str = "info",
    on_stderr: bool = False,
    computes: bool = True,
    processes: Mapping[str, str | None] | None = None,
) -> int:
    """Run an asynchronous main and return 0, or show its error on standard error and return the error's exit code.

    A `JaxftError` has an `exit_code`: 1 for a failed job, a full disk or a lost policy, 2 for bad configuration or
    input, or a run directory in use, 3 for no learning signal or too many failures. SIGINT and SIGTERM give 130 and
    143, after everything open is closed. Any other error is raised with its traceback.

    Args:
        main: the program.
        title: shown at once, with the version of jaxft; None shows nothing.
        log_level: one of `LOG_LEVELS`.
        on_stderr: True to show messages and log records on standard error, as standard output has the program's result.
        computes: False for a program that leaves all computing to other processes, so that it needs no jax.
        processes: options that say which of several processes of one run this is, as `processes_options` returns
            them; only the first shows messages. None for a program that is always one process.
    """
    try:
        place = None if processes is None else find_place(processes)
    except HostsError as error:
        return complain(f"error: {error}", error.exit_code)
    shutdown = Shutdown()
    if processes is not None:
        shutdown.launcher = os.environ.get(LAUNCHER, "")
        shutdown.processes = "".join(f" --{name} {shlex.quote(value)}" for name, value in processes.items() if value)
    is_quiet = place is not None and place.process_id > 0
    try:
        with program_console(on_stderr=on_stderr, is_quiet=is_quiet) as console, _logging_to(console, log_level):
            if title is not None:
                console.message(f"jaxft {version('jaxft') or '(not installed)'}: {title}")
            run_until_signalled(main, shutdown, computes=computes, place=place)
    except Stopped as error:
        return complain(f"{error}\njaxft: {shutdown.message}", shutdown.exit_code)
    except KeyboardInterrupt:
        return complain("interrupted", 128 + signal.SIGINT)
    except asyncio.CancelledError:
        if shutdown.signal is None:
            raise
        return complain(shutdown.message, shutdown.exit_code)
    except JaxftError as error:
        return complain(f"error: {error}", error.exit_code)
    return 0


def run_until_signalled(
    main: Callable[[], Awaitable[T]], shutdown: Shutdown, *, computes: bool = True, place: ProcessPlace | None = None
) -> T:
    """Run an asynchronous main, which SIGINT and SIGTERM stop, and return its result; options as in `run_main`.

    Raises:
        CancelledError: a signal came while no run listened to it.
    """

    async def until_signalled() -> T:
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        with shutdown.installed():
            return await main()

    prepare_process(computes=computes)
    if place is None:
        return asyncio.run(until_signalled())

    def end(index: int) -> None:
        if shutdown.signal is not None:
            os.write(2, f"jaxft: {shutdown.message}\n".encode())
            os._exit(shutdown.exit_code)
        os.write(2, f"jaxft: process {index} of {place.num_processes} has gone{shutdown.resume_hint}\n".encode())
        os._exit(1)

    store = join(place, {"jaxft": version("jaxft") or "", "jax": version("jax") or ""}, end)
    store.on_stop, shutdown.tell = shutdown.hear, store.stop
    try:
        result = asyncio.run(until_signalled())
    except BaseException as error:
        is_stopped = isinstance(error, Stopped | asyncio.CancelledError)
        leave(store, within_seconds=LEAVE_SECONDS, has_failed=not is_stopped)
        raise
    leave(store)
    return result


def run_to_result(main: Callable[[], Awaitable[T]]) -> T:
    """Run an asynchronous main for a script or a notebook, and return its result.

    Where an event loop runs already, as in a notebook, the main runs in a thread of its own, and Ctrl-C (or the
    notebook's button for it) reaches it from here: once to stop and save, twice to give up saving, a third time to wait
    no longer for a function of the user's that blocks the run; its thread then ends by itself.

    Raises:
        Stopped: a signal or Ctrl-C ended the run; the message says whether it was saved, and how to continue.
        JaxftError: the error of the run.
    """
    shutdown = Shutdown()

    def run() -> T:
        with program_console() as console, _logging_to(console, "info"):
            try:
                return run_until_signalled(main, shutdown)
            except (Stopped, asyncio.CancelledError) as error:
                if shutdown.signal is None:
                    raise
                saved = f"{error}; " if isinstance(error, Stopped) else ""
                raise Stopped(f"{saved}{shutdown.message}") from None

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with _stopped_by_interrupts(shutdown) as interrupted_at:
        running = DaemonThreads().submit(run)
        # Signal handlers run between bytecodes of this thread, and the system may wake another one for a signal.
        while not wait([running], timeout=0.1).done:
            if len(interrupted_at) > 2 and shutdown.signal is not None:
                raise Stopped(f"a function, such as a reward, blocks the run, which ends after it; {shutdown.message}")
        return running.result()


@contextlib.contextmanager
def _stopped_by_interrupts(shutdown: Shutdown) -> Iterator[list[float]]:
    """Let SIGINT stop a run in another thread, and yield when it came; asyncio's handler would only cancel a task."""
    interrupted_at: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupted_at
        return

    def interrupt(number: int, frame: object) -> None:
        interrupted_at.append(time.monotonic())
        shutdown.stop()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted_at
    finally:
        signal.signal(signal.SIGINT, before)


class DaemonThreads(ThreadPoolExecutor):
    """Executor with daemon threads, for `asyncio.to_thread`: a hanging call does not keep the process alive."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Run a call in a new thread."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # raised by the caller that waits
                future.set_exception(error)

        threading.Thread(target=work, name="to_thread", daemon=True).start()
        return future


def complain(message: str, code: int) -> int:
    """Show a message on standard error, and return the exit code."""
    print(f"jaxft: {message}", file=sys.stderr)
    return code
