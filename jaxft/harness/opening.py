"""Opens a run: its directory, its processes, its configuration and its components, before which no file changes."""

import atexit
import ctypes
import gc
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxft.errors import DiskFull, HostsError, one_line, without_secrets
from jaxft.harness.builder import Builder
from jaxft.harness.checkpointing import Checkpointing, check_changes, find_changes, masked_paths, record, saved_config
from jaxft.harness.config import Config, config_secrets, resolved_yaml, validation_config
from jaxft.harness.config_help import differences_to_defaults
from jaxft.harness.session import MODEL_FOLDER, Session, resume_command, run_environment
from jaxft.harness.signals import Shutdown, current_shutdown
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.hosts.group import process_group
from jaxft.redaction import hiding, redactor
from jaxft.runs.console import Console, current_console
from jaxft.runs.directory import RunDirectory
from jaxft.runs.environment import secrets_of_environment
from jaxft.runs.files import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    LOG_FILE,
    PAIRS_FILE,
    RESULT_FILE,
    RESUME_COMMAND,
    RUN_FILES,
    is_run,
)

MASKED, DIFFERENCES = "masked", "differences"
"""Keys of `environment.json`: the paths of secrets in the configuration, and its differences to the defaults."""


@asynccontextmanager
async def open_session(
    config: Config,
    *,
    overwrite: bool = False,
    resume: bool = False,
    console: Console | None = None,
    output_dir: Path | None = None,
) -> AsyncIterator[Session]:
    """Open a run in `finetuning.output_dir`.

    The datasets, the workflow, the evaluators and their models are made first, so that an error in one of them changes
    no file. Then `config.yml` and `environment.json` are written.

    Args:
        config: the whole configuration.
        overwrite: replace an earlier run in the directory, whose files are removed when this one begins to write.
        resume: continue the run in the directory, from its newest checkpoint that verifies.
        console: the console to use; by default that of the program, which prints to standard output.
        output_dir: a directory to use instead; the messages of such a run name no command to resume it.

    Raises:
        RunDirectoryError: the directory is in use, cannot be written, holds a run or, to resume, holds none.
        ConfigError: the resumed run was started with another model, optimizer or seed.
        RestoreError: the resumed run has no checkpoint that verifies.
    """
    shown_on = current_console() if console is None else console
    path = config.finetuning.output_dir if output_dir is None else output_dir
    validated = validation_config(config)
    secrets = config_secrets(config) | secrets_of_environment()
    secrets |= set() if validated is config else config_secrets(validated)
    shutdown = current_shutdown() if output_dir is None else None
    group, shared = process_group(), None
    if group.is_first:
        directory = RunDirectory.open(path) if resume else RunDirectory.create(path, overwrite=overwrite)
    else:
        shared, directory = path.absolute(), _own_directory()
    if resume:
        await _copy_run(directory, shared)
    with hiding(secrets), without_secrets(), directory:
        shown_on.mask = redactor()
        checkpointing = Checkpointing(directory, config.finetuning.checkpoints, shown_on.message, shared)
        with _told_at_the_end(checkpointing, directory, shown_on, shutdown):
            is_continued = resume and (directory.holds(CONFIG_FILE) or is_run(directory.path))
            if is_continued:  # its defaults may have been others
                config.resolve(saved_config(directory.path))
            async with Builder(_config_of_process(config), directory, shown_on) as builder:
                has_loggers = config.finetuning.enabled and output_dir is None
                about = await _prepare(config, builder, checkpointing, shutdown, has_loggers, is_continued=is_continued)
                session = Session(config, directory, shown_on, builder, checkpointing, about)
                with frozen_heap():
                    try:
                        yield session
                    except BaseException as error:
                        group.expect_end()
                        await session.end_loggers(error)
                        raise
                    await session.end_loggers()


async def _prepare(
    config: Config,
    builder: Builder,
    checkpointing: Checkpointing,
    shutdown: Shutdown | None,
    has_loggers: bool,
    *,
    is_continued: bool,
) -> dict[str, Any] | None:
    """Make the components, begin or continue the records of the run, and return the content of `environment.json`.

    `config` is that of all processes, of which the builder has what holds for this one.

    Returns:
        None for a run that is continued, whose file stays.
    """
    command = resume_command.get()
    if is_continued:
        if shutdown is not None:
            shutdown.resume_command = command
        await _go_on(builder, checkpointing)
    examples = await builder.get_dataset()
    digest = await checkpointing.check_dataset(examples)
    now = await _check_alike(config, len(examples), digest, checkpointing.now.isoformat())
    builder.now = checkpointing.now = datetime.fromisoformat(now)
    if has_loggers:
        await builder.get_loggers()  # before models, which take longer to make
    gc.collect()  # what a run before in this process has left on the device; models come next
    await builder.open()
    if is_continued and checkpointing.found is None:
        checkpointing.when_restored()
    about = None if is_continued else _begin(builder, command)
    if shutdown is not None:
        shutdown.resume_command = command
    return about


@contextmanager
def _told_at_the_end(
    checkpointing: Checkpointing, directory: RunDirectory, console: Console, shutdown: Shutdown | None
) -> Iterator[None]:
    """Note the error that ends a run in its log, and close the writer of checkpoints and the log."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, DiskFull):
            error.then = f", then {_next_step(checkpointing, directory)}"
        is_signal = shutdown is not None and shutdown.signal is not None
        console.note(f"ended: {shutdown.message if shutdown and is_signal else one_line(error)}")
        raise
    finally:
        checkpointing.close()
        console.close()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave all objects that exist now out of garbage collections until the end of the block.

    A full collection would walk them in the middle of an epoch and, with a large framework, hold the event loop for
    some 0.2 seconds. A heap of which a part was frozen before stays frozen.
    """
    was_frozen = gc.get_freeze_count() > 0
    freeze_heap()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def freeze_heap() -> None:
    """Leave all present objects out of garbage collections until `frozen_heap` ends; give free memory to the kernel.

    Compiling needs much memory, once. Only glibc gives it back.
    """
    gc.collect()
    gc.freeze()
    with suppress(AttributeError, OSError, TypeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def _own_directory() -> RunDirectory:
    """Return a directory that is removed with this process: of several processes the first one writes the files."""
    path = Path(tempfile.mkdtemp(prefix="jaxft-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return RunDirectory.create(path)


def _config_of_process(config: Config) -> Config:
    """Return the configuration of this process: all but the first have no loggers, and a port of their own."""
    group = process_group()
    if group.is_first:
        return config

    finetuning = config.finetuning.model_copy(update={"loggers": ()})
    llms = {name: llm.with_higher_port(group.process_id) for name, llm in config.llms.items()}
    return config.model_copy(update={"finetuning": finetuning, "llms": llms})


async def _copy_run(directory: RunDirectory, shared: Path | None) -> None:
    """Copy what a resumed run goes on from into the directory of a process that is not the first.

    Args:
        directory: the directory of this process.
        shared: that of the first process; None in the first one.

    Raises:
        HostsError: this process does not find the run.
    """
    group = process_group()
    is_begun, *_ = await group.gather("run directory", directory.holds(CONFIG_FILE))
    if shared is None:
        return
    if is_begun and not (shared / CONFIG_FILE).is_file():
        raise HostsError(
            f"process {group.process_id} does not find the run in '{shared}': all processes need to reach it"
        )
    for name in RUN_FILES:
        if (shared / name).is_file() and name != RESULT_FILE:
            shutil.copyfile(shared / name, directory.file(name))
    if (shared / PAIRS_FILE).is_file():
        shutil.copyfile(shared / PAIRS_FILE, directory.file(PAIRS_FILE))


async def _check_alike(config: Config, num_examples: int, digest: str, now: str) -> str:
    """Return the time of process 0; raise unless all processes have the same configuration and the same examples.

    Raises:
        HostsError: they differ, and the message names the first difference; or there are too few examples.
    """
    group = process_group()
    if not group.is_alone and num_examples < group.num_processes:
        raise HostsError(f"{group.num_processes} processes cannot share {num_examples} examples: start fewer")
    first, *others = await group.gather("configuration and dataset", [resolved_yaml(config), digest, now])
    for index, (configuration, other_digest, _) in enumerate(others, 1):
        of_both = (parse_yaml(each, "the configuration") for each in (first[0], configuration))
        changes = find_changes(*of_both)
        for path, (of_first, own) in changes.items():
            raise HostsError(f"{path} is {own!r} in process {index}, and {of_first!r} in process 0: give all the same")
        if other_digest != first[1]:
            raise HostsError(
                f"eval.general.dataset: process {index} has other examples than process 0: give all the same"
            )
    return first[2]


def _begin(builder: Builder, command: str | None) -> dict[str, Any]:
    """Write `environment.json` and `config.yml`, open `run.log`, and return the content of `environment.json`."""
    config, directory = builder.config, builder.directory
    about = run_environment(builder) | {
        RESUME_COMMAND: command,
        MASKED: masked_paths(config),
        DIFFERENCES: differences_to_defaults(config),
    }
    directory.write_json(ENVIRONMENT_FILE, about)
    directory.write_text(CONFIG_FILE, resolved_yaml(config))
    builder.console.keep(directory.file(LOG_FILE))
    return about


async def _go_on(builder: Builder, checkpointing: Checkpointing) -> None:
    """Check that the configuration is that of the same run, and find its checkpoint.

    No file changes before the checkpoint is restored, so that a failed resume can be repeated with other settings. If
    no checkpoint is found, the caller calls `checkpointing.when_restored`.
    """
    config, directory = builder.config, builder.directory
    changes, resolved = check_changes(directory, config), resolved_yaml(config)
    await checkpointing.find()

    def go_on() -> None:
        builder.console.keep(directory.file(LOG_FILE))
        for path, (old, new) in changes.items():
            checkpointing.log(f"changed: {path}: {old!r} -> {new!r}")
        step = None if checkpointing.found is None else checkpointing.found.step
        for warning in record(directory, step, changes, run_environment(builder, directory.path)):
            checkpointing.log(f"warning: {warning}")
        directory.remove([RESULT_FILE, MODEL_FOLDER])
        directory.remove(entry.name for entry in directory.path.glob(f".{MODEL_FOLDER}.*.unfinished"))
        directory.write_text(CONFIG_FILE, resolved)

    checkpointing.when_restored = go_on


def _next_step(checkpointing: Checkpointing, directory: RunDirectory) -> str:
    """Return the user's next step, for the end of an error message, once the cause of the error is gone."""
    if checkpointing.found is not None or checkpointing.saved_step is not None:
        return "continue the run with --resume"
    return "start the run again" + (", with --overwrite" if is_run(directory.path) else "")
