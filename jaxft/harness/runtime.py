"""A run from its configuration to its exit code: what the command line and the experiment scripts have in common.

    async def main(config, arguments):
        async with open_session(config, overwrite=arguments.overwrite) as session:
            before = await session.evaluate()
            await session.train()
            session.write_result({"before": before.average_reward})

    if __name__ == "__main__":
        sys.exit(run_script(main, run_arguments(__doc__, "tic_tac_toe.yml")))

Here alone errors become exit codes.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxft.harness.checkpointing import Checkpointing
from jaxft.harness.config import Config, load_config, resolved_yaml, secrets_of, validation_config
from jaxft.harness.data_models import (
    EvalInputItem,
    EvaluationRunOutput,
    FinetuneRunConfig,
    TrainingJobStatus,
    TrainingStatusEnum,
)
from jaxft.harness.errors import CheckFailed, ConfigError, JaxftError, JobFailed, TooManyFailures
from jaxft.harness.interfaces import Trainer, TrainerAdapter
from jaxft.harness.layers import literal
from jaxft.harness.resuming import check_changes, masked_paths, record
from jaxft.harness.shutdown import Shutdown, Stopped, current_shutdown
from jaxft.harness.workflow import ComponentBuilder
from jaxft.policy.faults import PolicyError
from jaxft.runs.console import Console
from jaxft.runs.directory import CheckpointError, RunDirectory, RunDirectoryError
from jaxft.runs.disk import DiskFull, disk_errors
from jaxft.runs.environment import environment, masked_command, secrets_of_environment
from jaxft.runs.redaction import ErrorWithSecrets, hiding, without_secrets

CONFIG_FILE = "config.yml"
ENVIRONMENT_FILE = "environment.json"
RESULT_FILE = "result.json"
RESUME_COMMAND, MASKED = "resume_command", "masked"
"""Keys of `environment.json`: what a user types to go on, and where the configuration holds secrets."""
MODEL_FOLDER = "model"

UNHEALTHY = "the trainer adapter is not healthy: its backend cannot take jobs"

Main = Callable[[Config, argparse.Namespace], Awaitable[None]]
"""What a script does with its configuration and its arguments."""


@dataclass
class Session:
    """An open run.

    Attributes:
        config: the whole tree.
        directory: where the run writes.
        console: where it shows itself.
        builder: gives the components.
        started: when it was opened, by `time.perf_counter`.
        checkpointing: saves the run, and knows whether it is continued.
    """

    config: Config
    directory: RunDirectory
    console: Console
    builder: ComponentBuilder
    started: float
    checkpointing: Checkpointing

    @property
    def is_resumed(self) -> bool:
        """Whether `train` goes on from a checkpoint, so that what stands before it in a script is done already."""
        return self.checkpointing.found is not None

    @property
    def notes(self) -> dict[str, Any]:
        """What a script wants to know again when the run is resumed, for JSON: `train` saves it."""
        return self.checkpointing.notes

    async def train(self) -> list[TrainingJobStatus]:
        """Trains for `finetuning.num_epochs` and returns the last status of each job.

        Raises:
            ConfigError: finetuning is not enabled.
            CheckFailed: the adapter's backend is not healthy.
            JobFailed: a job ended as failed or canceled; the message holds its own.
            RestoreError: the run is continued, and its checkpoint does not fit.
            Stopped: a signal came; the run is saved.
        """
        trainer = await self.trainer()
        try:
            await trainer.initialize(self.config.finetuning)
            trainer.checkpointing = self.checkpointing
            if self.config.finetuning.checkpoints.every is None:
                self.console.message("finetuning.checkpoints.every is null: this run cannot be continued")
            await self.checkpointing.restore(trainer)
            if not await (await self.adapter()).is_healthy():
                raise CheckFailed(UNHEALTHY)
            statuses = await self._run(trainer)
            await self.checkpointing.wait()
        finally:
            await trainer.cleanup()
        for status in statuses:
            if status.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED):
                raise JobFailed(f"job '{status.run_id}' {status.status}: {status.message or 'no reason was given'}")
        return statuses

    async def _run(self, trainer: Trainer) -> list[TrainingJobStatus]:
        """`trainer.run`, which a signal ends at a boundary."""
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
        """Finishes the update that runs, if it can be done in time, and gives up whatever else is going on."""
        trainer.is_stopping = True
        grace = self.config.finetuning.grace_seconds
        if (await self.adapter()).is_busy() and not running.done():
            self.console.message(f"finishing the update, in at most {grace:g} seconds")
            await asyncio.wait({running}, timeout=grace)
        if running.done() and running.exception() is not None:
            return
        running.cancel()
        await asyncio.wait({running})
        step = None
        with contextlib.suppress(TimeoutError):
            step = await asyncio.wait_for(self.checkpointing.save_boundary(trainer), timeout=max(grace, 1.0))
        await self.checkpointing.wait()
        shutdown.end_within(max(grace, 1.0))  # an update that was given up still holds the device
        if step is not None:
            raise Stopped(f"saved as checkpoint {step}")
        if self.checkpointing.has_saved:
            raise Stopped("not saved: the checkpoint before counts")
        shutdown.resume_command = None
        raise Stopped("not saved: this run makes no checkpoints")

    async def trainer(self) -> Trainer:
        """The trainer with its parts, not yet initialised.

        Raises:
            ConfigError: finetuning is not enabled, or a part is not chosen.
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
        """Runs the workflow without training, greedily by default; each call is a new pass of the validation stream.

        Args:
            items: the examples; by default the dataset.
            temperature: replaces that of every language-model call; None: each call keeps its own.
            num_generations: episodes per example.

        Raises:
            TooManyFailures: every episode failed; the message holds the first error.
        """
        evaluation = await self.builder.get_evaluation()
        examples = await self.builder.get_dataset() if items is None else items
        outcomes = await evaluation.validate(examples, temperature=temperature, num_generations=num_generations)
        output = evaluation.summarize(outcomes)
        if outcomes and output.num_failed == output.num_episodes:
            raise TooManyFailures(f"all {output.num_failed} episodes failed; the first: {output.first_error}")
        return output

    async def export_model(self) -> Path | None:
        """The folder the adapter wrote the trained model into; None where weights stay with a remote backend."""
        adapter, folder = await self.adapter(), self.directory.file(MODEL_FOLDER)
        with disk_errors(folder):
            return await adapter.export_model(folder)

    async def adapter(self) -> TrainerAdapter:
        """The adapter that `finetuning.trainer_adapter` names."""
        return await self.builder.get_trainer_adapter(
            _chosen("trainer_adapter", self.config.finetuning.trainer_adapter)
        )

    def write_result(self, figures: Mapping[str, Any]) -> None:
        """Writes and shows `result.json`: the figures, then `seed`, `seconds` since the session began and `versions`
        where the figures do not have them."""
        own = {
            "seed": self.config.finetuning.seed,
            "seconds": round(time.perf_counter() - self.started, 3),
            "versions": environment()["versions"],
        }
        result = {**figures, **{name: value for name, value in own.items() if name not in figures}}
        path = self.directory.write_json(RESULT_FILE, result)
        shown = {name: value for name, value in result.items() if name != "versions"}
        width = max(len(name) for name in shown)
        table = [f"{name:<{width}}  {_shown(value)}" for name, value in shown.items()]
        self.console.message("\n".join([*table, f"written to {path}"]))


@asynccontextmanager
async def open_session(
    config: Config,
    *,
    overwrite: bool = False,
    resume: bool = False,
    console: Console | None = None,
    output_dir: Path | None = None,
) -> AsyncIterator[Session]:
    """A run in `finetuning.output_dir`, which gets `config.yml` and `environment.json` at once.

    Args:
        config: the whole tree.
        overwrite: whether the directory may hold an earlier run; it is then removed.
        resume: go on with the run that the directory holds, from its newest good checkpoint.
        console: by default one that prints to standard output.
        output_dir: the directory, when it is another one.

    Raises:
        RunDirectoryError: the directory is in use, cannot be written, holds a run or, to resume, holds none.
        ConfigError: the run was begun with another model, optimiser or seed.
        RestoreError: no checkpoint of it is good.
    """
    started = time.perf_counter()
    shown_on = Console() if console is None else console
    path = config.finetuning.output_dir if output_dir is None else output_dir
    secrets = secrets_of(config) | secrets_of(validation_config(config)) | secrets_of_environment()
    command, shutdown = resume_command.get(), current_shutdown()
    if shutdown is not None and output_dir is None:
        shutdown.resume_command = command
    directory = (
        RunDirectory.open(path, begun_by=CONFIG_FILE) if resume else RunDirectory.create(path, overwrite=overwrite)
    )
    with hiding(secrets), without_secrets(), directory:
        checkpointing = Checkpointing(directory, config.finetuning.checkpoints, shown_on.message)
        try:
            if resume and directory.holds(CONFIG_FILE):
                await _go_on(directory, config, checkpointing)
            else:  # also for a run that was killed before it wrote down its configuration
                about = environment() | {RESUME_COMMAND: command, MASKED: masked_paths(config)}
                directory.write_json(ENVIRONMENT_FILE, about)
                directory.write_text(CONFIG_FILE, resolved_yaml(config))
            async with ComponentBuilder(config, directory, shown_on) as builder:
                yield Session(config, directory, shown_on, builder, started, checkpointing)
        finally:
            checkpointing.close()
            shown_on.close()


async def _go_on(directory: RunDirectory, config: Config, checkpointing: Checkpointing) -> None:
    """Checks that this is the same run, and finds its checkpoint.

    Until that has been restored nothing is changed: a run that cannot go on so may go on otherwise.
    """
    changes, resolved = check_changes(directory, config, CONFIG_FILE), resolved_yaml(config)
    await checkpointing.find()

    def go_on() -> None:
        for path, (old, new) in changes.items():
            checkpointing.say(f"changed: {path}: {old!r} -> {new!r}")
        step = None if checkpointing.found is None else checkpointing.found.step
        for warning in record(directory, step, changes):
            checkpointing.say(f"warning: {warning}")
        directory.remove([RESULT_FILE, MODEL_FOLDER])
        directory.remove(entry.name for entry in directory.path.glob(f".{MODEL_FOLDER}.*.unfinished"))
        directory.write_text(CONFIG_FILE, resolved)

    if checkpointing.found is None:
        go_on()
    else:
        checkpointing.when_restored = go_on


def run_arguments(
    description: str | None,
    config_file: str | Path | None = None,
    parser: argparse.ArgumentParser | None = None,
) -> argparse.ArgumentParser:
    """A parser with the options of every run; a script may add its own.

    Args:
        description: shown by `--help`; a script's `__doc__`.
        config_file: the default of `--config_file`, which is required without one.
        parser: the parser to add to; by default a new one.
    """
    parser = argparse.ArgumentParser() if parser is None else parser
    parser.description = description
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--config_file",
        type=Path,
        required=config_file is None,
        default=config_file,
        help="the YAML file of the run" + ("" if config_file is None else f" (default {config_file})"),
    )
    override_arguments(parser)
    parser.add_argument("--dataset", type=Path, metavar="FILE", help="examples, instead of eval.general.dataset")
    parser.add_argument(
        "--result_json_path", metavar="PATH", help="where in the workflow's output the result is, as in $.answer"
    )
    parser.add_argument(
        "--validation_dataset", type=Path, metavar="FILE", help="held-out examples to validate on while training"
    )
    parser.add_argument("--validation_interval", type=int, metavar="N", help="epochs between two validations")
    parser.add_argument(
        "--validation_config_file", type=Path, metavar="FILE", help="whose workflow and evaluators validate"
    )
    for name in ("--endpoint", "--endpoint_timeout"):
        parser.add_argument(name, type=_endpoint, help=argparse.SUPPRESS)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--overwrite", action="store_true", help="remove the run that the output directory holds instead of refusing"
    )
    existing.add_argument("--resume", action="store_true", help="go on with the run that the output directory holds")
    return parser


def override_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--set` and `-o`, which set fields of the configuration."""
    set_option = parser.add_argument(
        "--set", type=_pair, action="append", dest="override", default=[], metavar="PATH=VALUE",
        help="set a field, as in --set finetuning.num_epochs=5 (the value is YAML); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--override", nargs=2, action="append", dest=set_option.dest, metavar=("PATH", "VALUE"),
        help="the same, as in -o finetuning.num_epochs 5",
    )  # fmt: skip


def run_script(main: Main, parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, loads the configuration, runs `main(config, parsed arguments)`; the exit code.

    Args:
        main: what to do.
        parser: made by `run_arguments`.
        arguments: by default those of the process.
    """
    parsed = parser.parse_args(arguments)
    run = FinetuneRunConfig(
        config_file=parsed.config_file,
        override=tuple((path, value) for path, value in parsed.override),
        overwrite=parsed.overwrite,
        resume=parsed.resume,
        dataset=parsed.dataset,
        result_json_path=parsed.result_json_path,
        validation_dataset=parsed.validation_dataset,
        validation_interval=parsed.validation_interval,
        validation_config_file=parsed.validation_config_file,
    )

    async def load_and_run() -> None:
        config = config_of(run)
        if resume_command.get() is None:
            resume_command.set(command_to_resume(sys.argv if arguments is None else [sys.argv[0], *arguments]))
        await main(config, parsed)

    return exit_code_of(load_and_run)


resume_command: ContextVar[str | None] = ContextVar("jaxft_resume_command", default=None)
"""What a user types to go on with the run of this program."""


def command_to_resume(arguments: Sequence[str]) -> str:
    """The command line of a script, so that it goes on with its run.

    >>> command_to_resume(["experiments/arithmetic.py", "--overwrite", "--set", "finetuning.seed=1"])
    'python experiments/arithmetic.py --set finetuning.seed=1 --resume'
    """
    kept = [argument for argument in masked_command(arguments) if argument not in ("--overwrite", "--resume")]
    return shlex.join(["python", *kept, "--resume"])


def config_of(run: FinetuneRunConfig) -> Config:
    """The configuration that a command line asks for.

    Raises:
        ConfigError: with all faults, each with its path.
    """
    options = {
        "eval.general.result_json_path": run.result_json_path,
        "eval.validation.interval": run.validation_interval,
        "eval.validation.config_file": run.validation_config_file,
    }
    # As YAML, and after the file but before what --set says.
    said = [
        (path, json.dumps(value if isinstance(value, int) else literal(str(value))))
        for path, value in options.items()
        if value is not None
    ]
    return load_config(
        run.config_file, [*said, *run.override], dataset=run.dataset, validation_dataset=run.validation_dataset
    )


def exit_code_of(main: Callable[[], Awaitable[None]]) -> int:
    """Runs an asynchronous main to its end and says how it went: 0, or a message on standard error and its code.

    1 a failed job, a full disk or a policy that cannot go on, 2 bad configuration or input, or a run directory that is
    taken, 3 no learning signal or too many failures, 130 and 143 when SIGINT and SIGTERM ended it (everything open is
    closed first). Errors that nobody foresaw pass through with their traceback.
    """
    shutdown = Shutdown()

    async def until_signalled() -> None:
        with shutdown.installed():
            await main()

    try:
        asyncio.run(until_signalled())
    except Stopped as error:
        return _complain(f"{error}\njaxft: {shutdown.message}", shutdown.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", 128 + signal.SIGINT)
    except asyncio.CancelledError:
        if shutdown.signal is None:
            raise
        return _complain(shutdown.message, shutdown.exit_code)
    except ErrorWithSecrets as error:
        return _complain(f"error: {error}", JaxftError.exit_code)
    except RunDirectoryError as error:
        return _complain(f"error: {error}", ConfigError.exit_code)
    except (CheckpointError, DiskFull, PolicyError) as error:
        return _complain(f"error: {error}", error.exit_code)
    except JaxftError as error:
        return _complain(f"error: {error}", error.exit_code)
    return 0


def _complain(message: str, code: int) -> int:
    print(f"jaxft: {message}", file=sys.stderr)
    return code


def _chosen(field: str, name: str | None) -> str:
    if name is None:
        raise ConfigError([f"finetuning.{field}: nothing is chosen: name an entry of {field}s"])
    return name


def _pair(text: str) -> tuple[str, str]:
    path, equals, value = text.partition("=")
    if not path or not equals:
        raise argparse.ArgumentTypeError("wants PATH=VALUE")
    return path, value


def _endpoint(text: str) -> str:
    raise argparse.ArgumentTypeError(
        "an agent behind an endpoint cannot be trained: episodes must run where their tokens are recorded, in this "
        "process; make the agent the `workflow` of the configuration"
    )


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
