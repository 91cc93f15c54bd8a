"""Session: an open run with its directory and components, which evaluates, trains, exports and writes the result."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jaxft.errors import (
    CheckFailed,
    ConfigError,
    HostsError,
    JobFailed,
    NoLearningSignal,
    Stopped,
    TooManyFailures,
    one_line,
)
from jaxft.files import disk_errors
from jaxft.harness.builder import Builder
from jaxft.harness.checkpointing import Checkpointing
from jaxft.harness.config import Config
from jaxft.harness.contracts import Trainer, TrainerAdapter
from jaxft.harness.data_models import (
    EvalInputItem,
    EvaluationRunOutput,
    FinetuneRunConfig,
    TrainingJobStatus,
    TrainingStatusEnum,
)
from jaxft.harness.datasets import FileDatasetConfig
from jaxft.harness.registry import DatasetConfig
from jaxft.harness.signals import Shutdown, current_shutdown
from jaxft.hosts.group import process_group
from jaxft.redaction import redacted_values
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.runs.environment import environment, script
from jaxft.runs.files import CONFIG_FILE, ENVIRONMENT_FILE, RESULT_FILE
from jaxft.runs.loggers import LoggedRun, Loggers, Status
from jaxft.runs.metrics import reward_figures
from jaxft.runs.records import read_run

MODEL_FOLDER = "model"

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
    builder: Builder
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
            raise ConfigError(f"{type(adapter).__name__} takes jobs of one process only: start one process")
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

        def dataset_file(dataset: DatasetConfig | None) -> Path | None:
            if dataset is None:
                return None
            return dataset.file_path if isinstance(dataset, FileDatasetConfig) else Path(str(dataset.type_name))

        general, validation = self.config.eval.general, self.config.eval.validation
        return FinetuneRunConfig(
            config_file=self.directory.file(CONFIG_FILE),
            dataset=dataset_file(general.dataset),
            result_json_path=general.result_json_path,
            validation_dataset=None if validation is None else dataset_file(validation.dataset or general.dataset),
            validation_interval=None if validation is None else validation.interval,
            validation_config_file=None if validation is None else validation.config_file,
        )

    def _logged_run(self) -> LoggedRun:
        """Return the run as its loggers are told of it, with the secrets masked."""
        about = run_environment(self.builder, self.directory.path) if self.about is None else self.about
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
        """Let a running update and its epoch end within the grace time, cancel all else, save the run, raise `Stopped`.

        Several processes stop before the same update, and save the same state.
        """
        grace = self.config.finetuning.grace_seconds
        if not process_group().is_alone:
            await self._end_together(trainer, running)
        else:
            trainer.is_stopping = True
            if ((await self.adapter()).is_busy() or trainer.is_ending_epoch) and not running.done():
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

    async def _save_boundary(self, trainer: Trainer, step: int, **about: Any) -> None:
        """Capture the state between two epochs in all processes; see `Checkpointing.boundary`."""
        async with process_group().agree(f"checkpoint {step}", is_last=True):
            await self.checkpointing.boundary(trainer, step, **about)

    async def _save_stopped(self, trainer: Trainer) -> int | None:
        """Save the latest state between two epochs, and return its step; None if that is not possible any more."""
        await process_group().stop()
        return await self.checkpointing.save_boundary(trainer)

    async def trainer(self) -> Trainer:
        """Make the trainer with its builder and adapter, not yet initialised.

        Raises:
            ConfigError: finetuning is not enabled.
        """
        finetuning = self.config.finetuning
        if not finetuning.enabled:
            raise ConfigError("finetuning.enabled: is false: set it to true to train")
        trainer = await self.builder.get_trainer(finetuning.trainer or "")
        trajectory_builder = await self.builder.get_trajectory_builder(finetuning.trajectory_builder or "")
        await trainer.bind_components(trajectory_builder, await self.adapter())
        return trainer

    async def evaluate(
        self, items: Sequence[EvalInputItem] | None = None, *, temperature: float | None = 0.0, num_generations: int = 1
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

    async def train_and_export(self) -> list[TrainingJobStatus]:
        """Train, export the model, write the result of both, and return the last status of each job; see `train`."""
        statuses = await self.train()
        model = await self.export_model()
        counts = {"num_epochs": self.config.finetuning.num_epochs, "jobs_completed": len(statuses)}
        self.write_result(counts | {"model": None if model is None else str(model.relative_to(self.directory.path))})
        return statuses

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
        return await self.builder.get_trainer_adapter(self.config.finetuning.trainer_adapter or "")

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
        self.console.table({name: value for name, value in result.items() if name != "versions"})
        self.console.message(f"written to {path}")


def run_environment(builder: Builder, *others: Path) -> dict[str, Any]:
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
