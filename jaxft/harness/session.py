"""Session: an open run with its directory and components, which evaluates, trains, exports and writes the result."""

import asyncio
import atexit
import contextlib
import gc
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jaxft.errors import (
    CheckFailed,
    ConfigError,
    DiskFull,
    HostsError,
    JobFailed,
    NoLearningSignal,
    Stopped,
    TooManyFailures,
    one_line,
    without_secrets,
)
from jaxft.files import disk_errors
from jaxft.harness.checkpointing import Checkpointing, changes_of, check_changes, masked_paths, record
from jaxft.harness.component_builder import ComponentBuilder
from jaxft.harness.config import Config, differences_to_defaults, resolved_yaml, secrets_of, validation_config
from jaxft.harness.contracts import Trainer, TrainerAdapter
from jaxft.harness.data_models import (
    EvalInputItem,
    EvaluationRunOutput,
    FinetuneRunConfig,
    TrainingJobStatus,
    TrainingStatusEnum,
)
from jaxft.harness.datasets import FileDatasetConfig
from jaxft.harness.heap import frozen_heap
from jaxft.harness.registry import DatasetConfig
from jaxft.harness.signals import Shutdown, current_shutdown
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.hosts.group import process_group
from jaxft.redaction import hiding, redacted_values, redactor
from jaxft.runs.console import Console, current_console
from jaxft.runs.directory import RunDirectory, bring_back_earlier_run
from jaxft.runs.environment import environment, script, secrets_of_environment
from jaxft.runs.files import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    EPISODE_REWARDS_FILE,
    LOG_FILE,
    PAIRS_FILE,
    RESULT_FILE,
    RESUME_COMMAND,
    RUN_FILES,
    SAMPLES_FILE,
    TOKEN_SCORES_FILE,
    is_run,
)
from jaxft.runs.loggers import LoggedRun, Loggers, Status
from jaxft.runs.metrics import reward_figures
from jaxft.runs.records import read_run

MASKED, DIFFERENCES = "masked", "differences"
"""Keys of `environment.json`: the paths of secrets in the configuration, and its differences to the defaults."""
MODEL_FOLDER = "model"

CAME_BACK = "the earlier run of {} is back: the one that was to overwrite it ended before its first checkpoint"

POLL_SECONDS = 0.05
"""Time between two looks at what the processes of a run are at, while they stop."""

UNHEALTHY = "the trainer adapter is not healthy: its backend cannot take jobs"

config_file: ContextVar[Path | None] = ContextVar("jaxft_config_file", default=None)
"""Configuration file of the running program."""

resume_command: ContextVar[str | None] = ContextVar("jaxft_resume_command", default=None)
"""Command that resumes the run of this program."""


@dataclass
class Session:
    """An open run.

    Attributes:
        config: the whole configuration.
        directory: the run directory.
        console: the console of the run.
        builder: makes the components.
        checkpointing: saves and restores the run.
        loggers: the loggers of the run, from `train` on.
        result: the last values that `write_result` has written.
        about: the content of `environment.json`; None for a resumed run, which adds a line to `resumes.jsonl` instead.
    """

    config: Config
    directory: RunDirectory
    console: Console
    builder: ComponentBuilder
    checkpointing: Checkpointing
    about: dict[str, Any] | None
    loggers: Loggers = field(default_factory=Loggers)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def is_resumed(self) -> bool:
        """True if `train` continues from a checkpoint; a script then skips its steps before `train`."""
        return self.checkpointing.found is not None

    @property
    def notes(self) -> dict[str, Any]:
        """JSON values that `train` saves, and that a resumed run restores for its script."""
        return self.checkpointing.notes

    async def train(self) -> list[TrainingJobStatus]:
        """Train for `finetuning.num_epochs` and return the last status of each job.

        Raises:
            ConfigError: finetuning is not enabled.
            CheckFailed: the adapter's backend is not healthy.
            JobFailed: a job failed or was canceled; the message includes that of the job. If it could not be submitted,
                the adapter's own error is raised.
            NoLearningSignal: no job made an update, and the trainer did not set `needs_no_training`.
            RestoreError: the run is resumed, and its checkpoint does not fit.
            Stopped: a signal ended the run; the message says whether it was saved.
        """
        trainer, group = await self.trainer(), process_group()
        if not (group.is_alone or (adapter := await self.adapter()).joins_processes):
            raise ConfigError([f"{type(adapter).__name__} takes jobs of one process only: start one process"])
        group.on_stopping, trainer.begins = partial(setattr, trainer, "is_stopping", True), group.allows
        try:
            options = {"run_configuration": self._run_configuration()}
            await trainer.initialize(self.config.finetuning.model_copy(update=options))
            trainer.save_checkpoint = self._save_boundary
            trainer.loggers = self.loggers = await self.builder.get_loggers()
            if self.config.finetuning.checkpoints.every is None:
                self.console.message("finetuning.checkpoints.every is null: this run cannot be continued")
            self.console.status("preparing")
            await self.checkpointing.restore(trainer)
            if not await (await self.adapter()).is_healthy():
                raise CheckFailed(UNHEALTHY)
            if self.config.finetuning.strict_compile:
                await (await self.adapter()).warm_up()
            self._note_environment()
            self.loggers.run = self._logged_run()
            statuses = await self._run(trainer)
            await self.checkpointing.wait()
        finally:
            await trainer.cleanup()
        if trainer.failure is not None:
            raise trainer.failure
        for status in statuses:
            if status.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED):
                raise JobFailed(f"job '{status.run_id}' {status.status}: {status.message or 'no reason was given'}")
        found = self.checkpointing.found
        # A backend whose checkpoints record no policy version is assumed to have trained before.
        has_trained_before = found is not None and found.state["adapter"].get("policy_version", 1) > 0
        if not (has_trained_before or trainer.needs_no_training or any(map(_has_trained, statuses))):
            last = (
                f"the last of {len(statuses)} jobs said: {statuses[-1].message}" if statuses else "no job was submitted"
            )
            raise NoLearningSignal(f"{type(trainer).__name__} trained nothing: {last}")
        return statuses

    def _run_configuration(self) -> FinetuneRunConfig:
        """Return what the configuration says of dataset and validation; a dataset without a file has its `_type`."""

        def file_of(dataset: DatasetConfig | None) -> Path | None:
            if dataset is None:
                return None
            return dataset.file_path if isinstance(dataset, FileDatasetConfig) else Path(str(dataset.type_name))

        general, validation = self.config.eval.general, self.config.eval.validation
        return FinetuneRunConfig(
            config_file=self.directory.file(CONFIG_FILE),
            dataset=file_of(general.dataset),
            result_json_path=general.result_json_path,
            validation_dataset=None if validation is None else file_of(validation.dataset or general.dataset),
            validation_interval=None if validation is None else validation.interval,
            validation_config_file=None if validation is None else validation.config_file,
        )

    def _logged_run(self) -> LoggedRun:
        """Return the run as its loggers are told of it, with the secrets masked."""
        about = _environment(self.builder, self.directory.path) if self.about is None else self.about
        return LoggedRun(
            name=self.directory.path.name,
            directory=self.directory.path,
            config=redacted_values(self.config.model_dump(mode="json")),
            environment=redacted_values(about),
            is_resumed=self.about is None,
        )

    async def end_loggers(self, error: BaseException | None = None) -> None:
        """Tell the loggers status and result, and wait for them, within their limits.

        Args:
            error: the error that ends the run; None for a run that completed.
        """
        shutdown = current_shutdown()
        is_stopped = isinstance(error, Stopped | asyncio.CancelledError)
        status: Status = "completed" if error is None else "stopped" if is_stopped else "failed"
        result = self.result if error is None else {**self.result, "error": one_line(error)}
        # A process with a signal ends `grace_seconds` after the run was saved, and has more to close.
        limit = None if shutdown is None or shutdown.signal is None else self.config.finetuning.grace_seconds / 2
        await asyncio.to_thread(self.loggers.end, status, result, within_seconds=limit)

    def _note_environment(self) -> None:
        """Write devices, and what was chosen for them, to `environment.json`, as soon as they are known."""
        found = {"devices": list(self.builder.devices), "chosen": dict(self.builder.chosen)}
        if self.about is not None and any(self.about[name] != value for name, value in found.items()):
            self.about |= found
            self.directory.write_json(ENVIRONMENT_FILE, self.about)

    async def _run(self, trainer: Trainer) -> list[TrainingJobStatus]:
        """Run the trainer until it ends or a signal stops it."""
        shutdown, num_epochs = current_shutdown(), self.config.finetuning.num_epochs
        if shutdown is None:
            return await trainer.run(num_epochs)
        with shutdown.listening() as signalled:
            running = asyncio.create_task(trainer.run(num_epochs), name="trainer")
            listening = asyncio.create_task(signalled.wait())
            try:
                await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
                if signalled.is_set():
                    await self._stop(trainer, running, shutdown)
                return await running
            finally:
                for task in (running, listening):
                    task.cancel()
                await asyncio.wait({running, listening})

    async def _stop(self, trainer: Trainer, running: "asyncio.Task[Any]", shutdown: Shutdown) -> None:
        """Wait for a running update within the grace time, cancel everything else, save the run and raise `Stopped`.

        Several processes stop before the same update, and save the same state.
        """
        grace = self.config.finetuning.grace_seconds
        if not process_group().is_alone:
            await self._end_together(trainer, running)
        else:
            trainer.is_stopping = True
            if (await self.adapter()).is_busy() and not running.done():
                self.console.message(f"finishing the update, in at most {grace:g} seconds")
                await asyncio.wait({running}, timeout=grace)
        if running.done() and running.exception() is not None:
            return
        running.cancel()
        await asyncio.wait({running})
        step = None
        with contextlib.suppress(TimeoutError, HostsError):
            step = await asyncio.wait_for(self._save_stopped(trainer), timeout=max(grace, 1.0))
        with contextlib.suppress(HostsError):
            await self.checkpointing.wait()
        shutdown.end_within(max(grace, 1.0))  # an update past its grace time still occupies the device
        saved = self.checkpointing.saved_step
        if saved is not None:
            raise Stopped(
                f"saved as checkpoint {step}" if saved == step else "not saved: the previous checkpoint is the latest"
            )
        shutdown.resume_command = None
        makes_none = self.config.finetuning.checkpoints.every is None
        raise Stopped(f"not saved: {'this run makes no checkpoints' if makes_none else 'no checkpoint was finished'}")

    async def _end_together(self, trainer: Trainer, running: "asyncio.Task[Any]") -> None:
        """Wait until the run may be cancelled: when it waits for episodes, or has decided with the others to stop.

        What the processes compute together is finished within the grace time. An update is followed by the logs of its
        epoch and by what the next checkpoint holds, and then the run ends by itself.
        """
        grace, group = self.config.finetuning.grace_seconds, process_group()
        group.wants_stop = True
        if group.is_busy:
            self.console.message(f"finishing the update, in at most {grace:g} seconds")
        deadline = time.monotonic() + grace
        while not running.done() and not group.is_over and time.monotonic() < deadline:
            if not group.is_busy and trainer.is_collecting:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _save_boundary(self, trainer: Trainer, step: int, *, score: float | None = None, is_last: bool) -> None:
        """Capture the state between two epochs in all processes; see `Checkpointing.boundary`."""
        async with process_group().agree(f"checkpoint {step}", is_last=True):
            await self.checkpointing.boundary(trainer, step, score=score, is_last=is_last)

    async def _save_stopped(self, trainer: Trainer) -> int | None:
        """Save the latest state between two epochs, and return its step; None if that is not possible any more."""
        await process_group().stop()
        return await self.checkpointing.save_boundary(trainer)

    async def trainer(self) -> Trainer:
        """Make the trainer with its builder and adapter, not yet initialised.

        Raises:
            ConfigError: finetuning is not enabled, or does not name all three components.
        """
        finetuning = self.config.finetuning
        if not finetuning.enabled:
            raise ConfigError(["finetuning.enabled: is false: set it to true to train"])
        trainer = await self.builder.get_trainer(_chosen("trainer", finetuning.trainer))
        trajectory_builder = await self.builder.get_trajectory_builder(
            _chosen("trajectory_builder", finetuning.trajectory_builder)
        )
        await trainer.bind_components(trajectory_builder, await self.adapter())
        return trainer

    async def evaluate(
        self,
        items: Sequence[EvalInputItem] | None = None,
        *,
        temperature: float | None = 0.0,
        num_generations: int = 1,
    ) -> EvaluationRunOutput:
        """Run the workflow without training, greedily by default. Each call uses new random numbers.

        Args:
            items: the examples; by default the dataset.
            temperature: temperature of every model call; None: each call keeps its own.
            num_generations: episodes per example.

        Raises:
            TooManyFailures: every episode failed; the message holds the first error.
        """
        evaluation = await self.builder.get_evaluation()
        examples = await self.builder.get_dataset() if items is None else items
        outcomes = await evaluation.validate(examples, temperature=temperature, num_generations=num_generations)
        self._note_environment()
        self.console.status("")
        output = evaluation.summarize(outcomes)
        if outcomes and output.num_failed == output.num_episodes:
            raise TooManyFailures(f"all {output.num_failed} episodes failed; the first: {output.first_error}")
        return output

    async def export_model(self) -> Path | None:
        """Export the trained model and return its folder; None if the weights stay with a remote backend."""
        adapter, folder = await self.adapter(), self.directory.file(MODEL_FOLDER)
        self.console.status("exporting the model")
        with disk_errors(folder):
            exported = await adapter.export_model(folder)
        if exported is not None:
            self.loggers.artifact("model", exported)
        return exported

    async def adapter(self) -> TrainerAdapter:
        """Return the adapter that `finetuning.trainer_adapter` names."""
        return await self.builder.get_trainer_adapter(
            _chosen("trainer_adapter", self.config.finetuning.trainer_adapter)
        )

    def write_result(self, values: Mapping[str, Any]) -> None:
        """Write and show `result.json`: the values, and rewards, `seed`, `seconds` and `versions` that they lack.

        The rewards are the first, last and best of the epochs. `seconds` counts this session and the earlier ones, each
        up to the checkpoint that the next one resumed.
        """
        own = reward_figures(read_run(self.directory.path).metrics) | {
            "seed": self.config.finetuning.seed,
            "seconds": round(self.checkpointing.seconds, 3),
            "versions": environment()["versions"],
        }
        result = {**values, **{name: value for name, value in own.items() if name not in values}}
        path, self.result = self.directory.write_json(RESULT_FILE, result), result
        self.directory.commit()
        self.console.table({name: value for name, value in result.items() if name != "versions"})
        self.console.message(f"written to {path}")


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
        overwrite: replace an earlier run in the directory. It is set aside, and removed once this run has its first
            checkpoint; if this run ends without one, the earlier run is restored.
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
    secrets = secrets_of(config) | secrets_of(validation_config(config)) | secrets_of_environment()
    command = resume_command.get()
    shutdown = current_shutdown() if output_dir is None else None
    group, shared = process_group(), None
    if group.is_first:
        directory = RunDirectory.open(path) if resume else RunDirectory.create(path, overwrite=overwrite)
    else:
        shared, directory = path.absolute(), _own_directory()
    if resume:
        await _copy_run(directory, shared)
    if directory.came_back:
        shown_on.message(CAME_BACK.format(path))
        directory.came_back = False
    try:
        with hiding(secrets), without_secrets(), directory:
            shown_on.mask = redactor()
            checkpointing = Checkpointing(directory, config.finetuning.checkpoints, shown_on.message, shared)
            try:
                async with ComponentBuilder(_config_of_process(config), directory, shown_on) as builder:
                    is_continued = resume and (directory.holds(CONFIG_FILE) or is_run(directory.path))
                    if is_continued:
                        if shutdown is not None:
                            shutdown.resume_command = command
                        await _go_on(builder, checkpointing)
                    examples = await builder.get_dataset()
                    digest = await checkpointing.check_dataset(examples)
                    now = await _check_alike(config, len(examples), digest, checkpointing.now.isoformat())
                    builder.now = checkpointing.now = datetime.fromisoformat(now)
                    if config.finetuning.enabled and output_dir is None:
                        await builder.get_loggers()  # before models, which take longer to make
                    gc.collect()  # what a run before in this process has left on the device; models come next
                    await builder.open()
                    if is_continued and checkpointing.found is None:
                        checkpointing.when_restored()
                    about = None if is_continued else _begin(builder, command)
                    if shutdown is not None:
                        shutdown.resume_command = command
                    session = Session(config, directory, shown_on, builder, checkpointing, about)
                    with frozen_heap():
                        try:
                            yield session
                        except BaseException as error:
                            group.expect_end()
                            await session.end_loggers(error)
                            raise
                        await session.end_loggers()
            except BaseException as error:
                if isinstance(error, DiskFull):
                    error.then = f", then {_next_step(checkpointing, directory)}"
                is_signal = shutdown is not None and shutdown.signal is not None
                shown_on.note(f"ended: {shutdown.message if shutdown and is_signal else one_line(error)}")
                raise
            finally:
                checkpointing.close()
                shown_on.close()
    finally:
        if directory.came_back:
            shown_on.message(CAME_BACK.format(path))
            if shutdown is not None:
                shutdown.resume_command = None


class _OwnDirectory(RunDirectory):
    """The directory of a process that is not the first, for small files; episodes, which grow, it does not keep."""

    def append_jsonl(self, name: str, row: Mapping[str, Any]) -> Path:
        """Append one line to a log, unless it is one of episodes."""
        is_dropped = name in (SAMPLES_FILE, EPISODE_REWARDS_FILE, TOKEN_SCORES_FILE)
        return self.file(name) if is_dropped else super().append_jsonl(name, row)


def _own_directory() -> RunDirectory:
    """Return a directory that is removed with this process: of several processes the first one writes the files."""
    path = Path(tempfile.mkdtemp(prefix="jaxft-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return _OwnDirectory.create(path)


def _config_of_process(config: Config) -> Config:
    """Return the configuration of this process: all but the first have no loggers, and a port of their own."""
    group = process_group()
    if group.is_first:
        return config

    finetuning = config.finetuning.model_copy(update={"loggers": []})
    llms = {name: llm.with_higher_port(group.process_id) for name, llm in config.llms.items()}
    return config.model_copy(update={"finetuning": finetuning, "llms": llms})


async def bring_back(folder: Path) -> None:
    """Bring back the earlier run of a folder, if one was set aside there, before any process reads it."""
    group = process_group()
    if group.is_first and bring_back_earlier_run(folder):
        current_console().message(CAME_BACK.format(folder))
    await group.gather("earlier run", None)


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
        changes = changes_of(*of_both)
        for path, (of_first, own) in changes.items():
            raise HostsError(f"{path} is {own!r} in process {index}, and {of_first!r} in process 0: give all the same")
        if other_digest != first[1]:
            raise HostsError(
                f"eval.general.dataset: process {index} has other examples than process 0: give all the same"
            )
    return first[2]


def _begin(builder: ComponentBuilder, command: str | None) -> dict[str, Any]:
    """Write `environment.json` and `config.yml`, open `run.log`, and return the content of `environment.json`."""
    config, directory = builder.config, builder.directory
    about = _environment(builder) | {
        RESUME_COMMAND: command,
        MASKED: masked_paths(config),
        DIFFERENCES: differences_to_defaults(config),
    }
    directory.write_json(ENVIRONMENT_FILE, about)
    directory.write_text(CONFIG_FILE, resolved_yaml(config))
    builder.console.keep(directory.file(LOG_FILE))
    return about


async def _go_on(builder: ComponentBuilder, checkpointing: Checkpointing) -> None:
    """Check that the configuration is that of the same run, and find its checkpoint.

    No file changes before the checkpoint is restored, so that a failed resume can be repeated with other settings. If
    no checkpoint is found, the caller calls `checkpointing.when_restored`.
    """
    config, directory = builder.config, builder.directory
    changes, resolved = check_changes(directory, config, CONFIG_FILE), resolved_yaml(config)
    await checkpointing.find()

    def go_on() -> None:
        builder.console.keep(directory.file(LOG_FILE))
        for path, (old, new) in changes.items():
            checkpointing.log(f"changed: {path}: {old!r} -> {new!r}")
        step = None if checkpointing.found is None else checkpointing.found.step
        for warning in record(directory, step, changes, _environment(builder, directory.path)):
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


def _environment(builder: ComponentBuilder, *others: Path) -> dict[str, Any]:
    """Return the `environment` of this process, with the commit of the first source that is in a repository.

    The sources are the configuration file, the modules it imports, the script, and then `others`.
    """
    modules = [Path(module) for module in builder.config.imports if Path(module).is_absolute()]
    sources = [source for source in (config_file.get(), *modules, script(), *others) if source is not None]
    now = None if builder.now is None else builder.now.isoformat(timespec="seconds")
    return environment(builder.devices, sources) | {"chosen": dict(builder.chosen), "now": now}


def _has_trained(status: TrainingJobStatus) -> bool:
    """Return True if a job made an update, or if its backend does not count updates."""
    return ((status.metadata or {}).get("metrics") or {}).get("applied_updates", 1) > 0


def _chosen(field: str, name: str | None) -> str:
    if name is None:
        raise ConfigError([f"finetuning.{field}: is null: name an entry of {field}s"])
    return name
