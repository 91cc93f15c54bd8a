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
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxft.harness.config import Config, load_config, resolved_yaml
from jaxft.harness.data_models import (
    EvalInputItem,
    EvaluationRunOutput,
    FinetuneRunConfig,
    TrainingJobStatus,
    TrainingStatusEnum,
)
from jaxft.harness.errors import ConfigError, JaxftError, JobFailed, TooManyFailures
from jaxft.harness.interfaces import TrainerAdapter
from jaxft.harness.workflow import ComponentBuilder
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory, RunDirectoryError
from jaxft.runs.environment import environment

CONFIG_FILE = "config.yml"
ENVIRONMENT_FILE = "environment.json"
RESULT_FILE = "result.json"
MODEL_FOLDER = "model"

INTERRUPTED, TERMINATED = 130, 143

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
    """

    config: Config
    directory: RunDirectory
    console: Console
    builder: ComponentBuilder
    started: float

    async def train(self) -> list[TrainingJobStatus]:
        """Trains for `finetuning.num_epochs` and returns the last status of each job.

        Raises:
            ConfigError: finetuning is not enabled.
            JobFailed: a job ended as failed or canceled; the message holds its own.
        """
        finetuning = self.config.finetuning
        if not finetuning.enabled:
            raise ConfigError(["finetuning.enabled: is false: set it to true to train"])
        trainer = await self.builder.get_trainer(_chosen("trainer", finetuning.trainer))
        trajectory_builder = await self.builder.get_trajectory_builder(
            _chosen("trajectory_builder", finetuning.trajectory_builder)
        )
        adapter = await self._adapter()
        await trainer.bind_components(trajectory_builder, adapter)
        try:
            await trainer.initialize(finetuning)
            statuses = await trainer.run(finetuning.num_epochs)
        finally:
            await trainer.cleanup()
        for status in statuses:
            if status.status in (TrainingStatusEnum.FAILED, TrainingStatusEnum.CANCELED):
                raise JobFailed(f"job '{status.run_id}' {status.status}: {status.message or 'no reason was given'}")
        return statuses

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
        adapter = await self._adapter()
        return await adapter.export_model(self.directory.file(MODEL_FOLDER))

    async def _adapter(self) -> TrainerAdapter:
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
    config: Config, *, overwrite: bool = False, console: Console | None = None
) -> AsyncIterator[Session]:
    """A run in `finetuning.output_dir`, which gets `config.yml` and `environment.json` at once.

    Args:
        config: the whole tree.
        overwrite: whether the directory may hold an earlier run; it is then removed.
        console: by default one that prints to standard output.

    Raises:
        RunDirectoryError: the directory is in use, holds a run, or cannot be written.
    """
    started = time.perf_counter()
    shown_on = Console() if console is None else console
    with RunDirectory.create(config.finetuning.output_dir, overwrite=overwrite) as directory:
        directory.write_text(CONFIG_FILE, resolved_yaml(config))
        directory.write_json(ENVIRONMENT_FILE, environment())
        try:
            async with ComponentBuilder(config, directory, shown_on) as builder:
                yield Session(config, directory, shown_on, builder, started)
        finally:
            shown_on.close()


async def finetune(config: Config, arguments: argparse.Namespace) -> None:
    """Trains, exports the model and writes the result: what `jaxft finetune` does."""
    async with open_session(config, overwrite=arguments.overwrite) as session:
        statuses = await session.train()
        model = await session.export_model()
        session.write_result(
            {
                "epochs": config.finetuning.num_epochs,
                "jobs_completed": len(statuses),
                "model": None if model is None else str(model.relative_to(session.directory.path)),
            }
        )


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
    set_option = parser.add_argument(
        "--set", type=_pair, action="append", dest="override", default=[], metavar="PATH=VALUE",
        help="set a field, as in --set finetuning.num_epochs=5 (the value is YAML); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--override", nargs=2, action="append", dest=set_option.dest, metavar=("PATH", "VALUE"),
        help="the same, as in -o finetuning.num_epochs 5",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true", help="remove the run that the output directory holds instead of refusing"
    )
    return parser


def run_script(main: Main, parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, loads the configuration, runs `main(config, parsed arguments)`; the exit code.

    Args:
        main: what to do.
        parser: made by `run_arguments`.
        arguments: by default those of the process.
    """
    parsed = parser.parse_args(arguments)
    overrides = tuple((path, value) for path, value in parsed.override)
    run = FinetuneRunConfig(config_file=parsed.config_file, override=overrides, overwrite=parsed.overwrite)

    async def load_and_run() -> None:
        await main(load_config(run.config_file, run.override), parsed)

    return exit_code_of(load_and_run)


def exit_code_of(main: Callable[[], Awaitable[None]]) -> int:
    """Runs an asynchronous main to its end and says how it went: 0, or a message on standard error and its code.

    1 a failed job, 2 bad configuration or input, or a run directory that is taken, 3 no learning signal or too many
    failures, 130 and 143 when SIGINT and SIGTERM ended it (everything open is closed first). Errors that nobody
    foresaw pass through with their traceback.
    """
    signals: list[int] = []

    async def until_terminated() -> None:
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            signals.append(signal.SIGTERM)
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        await main()

    try:
        asyncio.run(until_terminated())
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except asyncio.CancelledError:
        if not signals:
            raise
        return _complain("terminated", TERMINATED)
    except RunDirectoryError as error:
        return _complain(f"error: {error}", ConfigError.exit_code)
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


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
