"""The verbs `finetune` (with `--dry-run`), `resume`, `eval` and `serve` of the command line."""

import argparse
import contextlib
import json
import shlex
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxft.errors import CheckFailed, ConfigError, Stopped, without_secrets
from jaxft.files import free_bytes
from jaxft.harness.addresses import ServeConfig
from jaxft.harness.builder import Builder
from jaxft.harness.config import Config, config_secrets, load_config
from jaxft.harness.config_merge import escape_fields, literal
from jaxft.harness.data_models import EvaluationRunOutput, FinetuneConfig
from jaxft.harness.evaluation_scores import paired_difference
from jaxft.harness.opening import MASKED, open_session
from jaxft.harness.session import UNHEALTHY, resume_command
from jaxft.harness.signals import current_shutdown
from jaxft.redaction import hiding, redactor
from jaxft.runs.console import Console, current_console
from jaxft.runs.directory import RunDirectory
from jaxft.runs.environment import secrets_of_environment
from jaxft.runs.files import CONFIG_FILE, RESUME_COMMAND, holds_run, read_environment, ways_on

EVALUATION_FILE = "evaluation.json"


async def finetune(config: Config, arguments: argparse.Namespace) -> None:
    """Train, export the model and write the result."""
    resume_command.set(shlex.join(["jaxft", "resume", str(config.finetuning.output_dir)]))
    async with open_session(config, overwrite=arguments.overwrite, resume=arguments.resume) as session:
        await session.train_and_export()


async def resume(folder: Path, overrides: Sequence[tuple[str, str]], arguments: argparse.Namespace) -> None:
    """Continue the run in a folder with the configuration recorded there and the overrides given.

    Raises:
        ConfigError: the folder holds no run, a script made it, or a secret that it does not store is missing.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(f"{folder}: holds no run to continue: it has no {CONFIG_FILE}; start one with jaxft finetune")
    about = read_environment(folder)
    command = about.get(RESUME_COMMAND)
    if command is not None and not command.startswith("jaxft resume "):
        raise ConfigError(f"{folder}: a script made this run and does more than training: continue with:\n  {command}")
    check_secrets(folder, overrides)
    where = json.dumps(escape_fields(literal(str(folder.absolute()))))
    await finetune(load_config(file, [*overrides, ("finetuning.output_dir", where)]), arguments)


def check_secrets(folder: Path, overrides: Sequence[tuple[str, str]]) -> None:
    """Raise unless the overrides give each secret of a run's configuration, which the run directory does not store."""
    given = [path for path, _ in overrides]
    missing = [path for path in read_environment(folder).get(MASKED, []) if path not in given]
    if missing:
        hint = "holds a secret, which the run directory does not store: give it again, as in --set"
        raise ConfigError([f"{path}: {hint} '{path}=${{KEY}}'" for path in missing])


async def dry_run(config: Config, arguments: argparse.Namespace) -> None:
    """Make every component of a run, compile the largest update and show its memory and room on disk; write nothing.

    Raises:
        CheckFailed: the adapter is not healthy, or the memory or the room on disk does not suffice.
    """
    with tempfile.TemporaryDirectory() as folder:
        async with open_session(config, output_dir=Path(folder)) as session:
            show = session.console.message
            examples = await session.builder.get_dataset()
            show(f"dataset      {len(examples)} examples, the first '{examples[0].id}'")
            validation = await session.builder.get_validation()
            if validation is not None:
                show(f"validation   {len(validation.examples)} examples, every {validation.interval} epochs")
            trainer = await session.trainer()
            await trainer.initialize(config.finetuning)
            await trainer.cleanup()
            adapter = await session.adapter()
            components = (trainer, trainer.trajectory_builder, adapter)
            show(f"components   {', '.join(type(component).__name__ for component in components)}")
            await session.builder.get_loggers()
            show(f"loggers      {', '.join(str(each.type_name) for each in config.finetuning.loggers) or 'none'}")
            if not await adapter.is_healthy():
                raise CheckFailed(UNHEALTHY)
            for path, value in session.builder.chosen.items():
                show(f"chosen       {path}: {value}")
            advice = [_check_disk(await adapter.disk_bytes(), config, show)]
            memory = await adapter.memory()
            for purpose, size in memory.items():
                show(f"memory       {size:10.1f} MiB  {purpose}")
            if memory:
                show(f"memory       {adapter.peak_memory(memory):10.1f} MiB  in all, at the peak")
                show("memory       per device, for the policy in training and its snapshots; other models add to it")
                advice.append(adapter.memory_advice(memory))
            if faults := [each for each in advice if each is not None]:
                raise CheckFailed("; ".join(faults))
            if holds_run(config.finetuning.output_dir):
                show(
                    f"output_dir   {config.finetuning.output_dir} holds a run: {ways_on(config.finetuning.output_dir)}"
                )
            show("the configuration can be trained; nothing was written")


def _check_disk(sizes: Mapping[str, int], config: Config, show: Callable[[str], None]) -> str | None:
    """Show the room on disk that a run needs, by the adapter's `disk_bytes`; return advice if it is not free."""
    if not sizes:
        return None
    section, folder = config.finetuning.checkpoints, config.finetuning.output_dir
    num_made = 0 if section.every is None else -(-config.finetuning.num_epochs // section.every) + 1
    checkpoint, exported = sizes["checkpoint"], sizes["export"]

    num_kept = min(num_made, section.max_to_keep + (config.eval.validation is not None))
    # An old checkpoint goes once the new one is there.
    needed = max(min(num_made, num_kept + 1) * checkpoint, num_kept * checkpoint + exported) / 2**20
    # The checkpoints of a run that is there go, as those of this one come.
    earlier = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file())
    free = (free_bytes(folder) + earlier) / 2**20
    show(f"disk         {checkpoint / 2**20:10.1f} MiB  a checkpoint, of which {num_kept} are kept")
    show(f"disk         {exported / 2**20:10.1f} MiB  the exported {'adapters' if 'merged' in sizes else 'model'}")
    if "merged" in sizes:
        show(f"disk         {sizes['merged'] / 2**20:10.1f} MiB  the model of `jaxft export --merge`")
    show(f"disk         {needed:10.1f} MiB  in all, at the peak; {free:.1f} MiB are free for {folder}")
    if needed <= free:
        return None
    return (
        f"finetuning.output_dir: {folder} has {free:.1f} MiB free and up to {needed:.1f} MiB are needed: free space, "
        f"lower finetuning.checkpoints.max_to_keep (now {section.max_to_keep}), or give another folder"
    )


async def evaluate(config: Config, arguments: argparse.Namespace, against: Config | None = None) -> None:
    """Run the workflow over the dataset and show the average of every evaluator.

    Args:
        config: the whole configuration.
        arguments: those of `jaxft eval`.
        against: a configuration that differs in its models only, which is run first, on the same examples and seeds;
            the difference of the rewards is shown, too. None for no comparison.

    Raises:
        ConfigError: two configurations are to be compared, and have no reward function.
    """
    if against is not None and config.finetuning.reward_function is None:
        raise ConfigError("finetuning.reward_function: is null, but --against compares rewards: name an evaluator")
    options = {"temperature": arguments.temperature, "num_generations": arguments.num_generations}
    other = None
    with tempfile.TemporaryDirectory() as folder:
        if against is not None:
            async with open_session(against, output_dir=Path(folder) / "against") as session:
                other = await session.evaluate(**options)
        output_dir = config.eval.general.output_dir
        path = Path(folder) / "run" if output_dir is None else output_dir
        async with open_session(config, overwrite=arguments.overwrite, output_dir=path) as session:
            output = await session.evaluate(**options)
            values = _averages(output)
            if output.first_error is not None:
                session.console.message(f"{output.num_failed} episodes failed; the first: {output.first_error}")
            if other is not None:
                values |= {f"against/{name}": value for name, value in _averages(other).items()}
                values |= _show_difference(output, other, arguments.against, session.console)
            if output_dir is None:
                session.console.table(values)
            else:
                session.directory.write_json(EVALUATION_FILE, output.model_dump(mode="json"))
                session.write_result(values)


def _averages(output: EvaluationRunOutput) -> dict[str, Any]:
    averages = {f"average/{name}": result.average_score for name, result in output.evaluation_results}
    return {
        **averages,
        **output.scores,
        "average_reward": output.average_reward,
        "episodes": output.num_episodes,
        "failed": output.num_failed,
        "unscorable": output.num_unscorable,
    }


def _show_difference(
    output: EvaluationRunOutput, other: EvaluationRunOutput, name: str, console: Console
) -> dict[str, Any]:
    """Show whether an evaluation has higher rewards than another one, and return the difference by name."""
    examples = [item.id for item in output.eval_input.eval_input_items]
    found = paired_difference(examples, output.rewards, other.rewards)
    if found is None:
        console.message(f"no episode has a reward with both models: nothing is compared with {name}")
        return {}
    is_known = found.low is not None and found.high is not None and found.low * found.high > 0
    verdict = "not shown to differ from" if not is_known else "better than" if found.mean > 0 else "worse than"
    interval = "" if found.low is None else f", 95 % interval [{found.low:.4g}, {found.high:.4g}]"
    console.message(
        f"the model is {verdict} {name}: reward {found.mean:+.4g}{interval}, over {found.num_examples} examples, "
        f"{found.num_higher} higher and {found.num_lower} lower"
    )
    return {"difference" if name == "mean" else f"difference_{name}": value for name, value in found._asdict().items()}


async def serve(config: Config, port: int | None, make_app: Callable[[Any], Any] | None = None) -> None:
    """Serve the language models of a configuration until a signal comes, then let running requests end.

    Args:
        config: result of `load_models`.
        port: takes the place of `llms.<name>.serve.port`; None: that, or 8000.
        make_app: makes the app of the models by their names; None for the one of OpenAI's and Anthropic's clients.

    Raises:
        Stopped: a signal came.
    """
    shutdown = current_shutdown()
    assert shutdown is not None
    async with open_models(config) as builder:
        builder.make_app = make_app
        await builder.get_server_url(ServeConfig(), port)
        builder.console.message("SIGINT or SIGTERM ends the server")
        with shutdown.listening() as signalled:
            await signalled.wait()
        builder.console.message("finishing the running requests")
    raise Stopped("the server has ended")


@contextlib.asynccontextmanager
async def open_models(config: Config, *, seed: int = 0) -> AsyncIterator[Builder]:
    """Yield a builder of language models without a run, whose directory is a temporary one.

    Args:
        config: result of `load_models`.
        seed: seed of sampling.
    """
    console, own = current_console(), config.model_copy(update={"finetuning": FinetuneConfig(seed=seed)})
    with (
        tempfile.TemporaryDirectory() as folder,
        hiding(config_secrets(config) | secrets_of_environment()),
        without_secrets(),
        RunDirectory.create(Path(folder)) as directory,
    ):
        console.mask = redactor()
        async with Builder(own, directory, console) as builder:
            yield builder
