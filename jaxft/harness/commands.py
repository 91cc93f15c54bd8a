"""What the verbs of the command line do: `finetune`, `resume`, `eval`, `export` and `doctor`."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import pkgutil
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxft.errors import ConfigError
from jaxft.harness.config import Config, load_config
from jaxft.harness.config_merge import literal
from jaxft.harness.session import (
    CAME_BACK,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    MASKED,
    MODEL_FOLDER,
    RESUME_COMMAND,
    UNHEALTHY,
    CheckFailed,
    Session,
    open_session,
    resume_command,
)
from jaxft.runs.console import Console
from jaxft.runs.directory import bring_back_earlier_run, holds_run
from jaxft.runs.environment import environment

EVALUATION_FILE = "evaluation.json"


async def finetune(config: Config, arguments: argparse.Namespace) -> None:
    """Trains, exports the model and writes the result."""
    resume_command.set(shlex.join(["jaxft", "resume", str(config.finetuning.output_dir)]))
    async with open_session(config, overwrite=arguments.overwrite, resume=arguments.resume) as session:
        evaluations = config.eval.general.output_dir
        if evaluations is not None:
            session.console.message(
                f"eval.general.output_dir: {evaluations} is for `jaxft eval`; this run writes to "
                f"finetuning.output_dir: {config.finetuning.output_dir}"
            )
        statuses = await session.train()
        model = await session.export_model()
        session.write_result(
            {
                "num_epochs": config.finetuning.num_epochs,
                "jobs_completed": len(statuses),
                "model": None if model is None else str(model.relative_to(session.directory.path)),
            }
        )


async def resume(folder: Path, overrides: Sequence[tuple[str, str]], arguments: argparse.Namespace) -> None:
    """Goes on with the run in a folder, with the configuration it was begun with.

    Raises:
        ConfigError: no run is there, a script made it, or secrets that it did not keep are missing.
    """
    if bring_back_earlier_run(folder):
        Console().message(CAME_BACK.format(folder))
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError([f"{folder}: holds no run to go on with: it has no {CONFIG_FILE}; begin one with finetune"])
    about: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        about = json.loads((folder / ENVIRONMENT_FILE).read_bytes())
    command = about.get(RESUME_COMMAND)
    if command is not None and not command.startswith("jaxft resume "):
        raise ConfigError(
            [f"{folder}: a script made this run, which does more than training: go on with:\n  {command}"]
        )
    given = [path for path, _ in overrides]
    missing = [path for path in about.get(MASKED, []) if path not in given]
    if missing:
        hint = "holds a secret, which a run does not keep: give it, as with --set"
        raise ConfigError([f"{path}: {hint} '{path}=${{KEY}}'" for path in missing])
    where = json.dumps(literal(str(folder.absolute())))
    await finetune(load_config(file, [*overrides, ("finetuning.output_dir", where)]), arguments)


async def dry_run(config: Config, arguments: argparse.Namespace) -> None:
    """Makes every part of a run, samples a token, compiles the largest update, and shows what memory it all needs.

    Writes nothing.

    Raises:
        CheckFailed: the adapter says that it cannot train.
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
            parts = (trainer, trainer.trajectory_builder, adapter)
            show(f"components   {', '.join(type(part).__name__ for part in parts)}")
            if not await adapter.is_healthy():
                raise CheckFailed(UNHEALTHY)
            memory = await adapter.memory()
            for purpose, size in memory.items():
                show(f"memory       {size:10.1f} MiB  {purpose}")
            if memory:
                show(f"memory       {sum(memory.values()):10.1f} MiB  in all")
            if memory:
                show("memory       of each device, of the policy that is trained; that of other models comes on top")
                advice = adapter.memory_advice(memory)
                if advice is not None:
                    raise CheckFailed(advice)
            if holds_run(config.finetuning.output_dir):
                show(f"output_dir   {config.finetuning.output_dir} holds a run: give another one, or --overwrite")
            show("the configuration can be trained; nothing was written")


async def evaluate(config: Config, arguments: argparse.Namespace) -> None:
    """Runs the workflow over the dataset and shows what every evaluator says of it."""
    with tempfile.TemporaryDirectory() as folder:
        output_dir = config.eval.general.output_dir
        path = Path(folder) if output_dir is None else output_dir
        async with open_session(config, overwrite=arguments.overwrite, output_dir=path) as session:
            await _evaluate(session, arguments, is_kept=output_dir is not None)


async def _evaluate(session: Session, arguments: argparse.Namespace, *, is_kept: bool) -> None:
    temperature = arguments.temperature
    output = await session.evaluate(temperature=temperature, num_generations=arguments.num_generations)
    figures: dict[str, Any] = {f"average/{name}": result.average_score for name, result in output.evaluation_results}
    figures |= {
        "average_reward": output.average_reward,
        "episodes": output.num_episodes,
        "failed": output.num_failed,
        "unscorable": output.num_unscorable,
    }
    if output.first_error is not None:
        session.console.message(f"{output.num_failed} episodes failed; the first: {output.first_error}")
    if is_kept:
        session.directory.write_json(EVALUATION_FILE, output.model_dump(mode="json"))
        session.write_result(figures)
        return
    width = max(map(len, figures))
    session.console.message(
        "\n".join(f"{name:<{width}}  {f'{x:.4g}' if isinstance(x, float) else x}" for name, x in figures.items())
    )


def export(source: Path, folder: Path, dtype: str, *, merge: bool = False) -> None:
    """Loads a model (a run directory's, or any folder in Hugging Face's file format) and writes it in another dtype;
    with `merge` the whole model that adapters make of their base.

    Raises:
        ConfigError: no model is there, it is not complete, the folder is not empty, or it cannot be written.
    """
    import jax
    import jax.numpy as jnp

    from jaxft.models.hf import save_model
    from jaxft.models.load import load_merged, load_model
    from jaxft.models.peft import CONFIG as ADAPTER_CONFIG
    from jaxft.rollout.chat import load_tokenizer

    model_folder = source / MODEL_FOLDER if (source / MODEL_FOLDER).is_dir() else source
    is_adapter = (model_folder / ADAPTER_CONFIG).is_file()
    if is_adapter and not merge:
        raise ConfigError([f"{source}: holds adapters, which are ready to use: copy {model_folder}, or give --merge"])
    if merge and not is_adapter:
        raise ConfigError([f"{source}: holds no adapters to merge: leave out --merge"])
    if not is_adapter and not (model_folder / "config.json").is_file():
        raise ConfigError([f"{source}: holds no model: give a run directory with one, or the folder of a model"])
    if folder.exists() and not (folder.is_dir() and os.access(folder, os.R_OK) and not any(folder.iterdir())):
        raise ConfigError([f"{folder}: is not an empty folder: choose another one"])
    try:
        load = load_merged if merge else load_model
        model, params = load(model_folder, dtype=jnp.dtype(dtype))
        tokenizer = load_tokenizer(model_folder)
    except (ValueError, OSError) as error:
        raise ConfigError([f"{model_folder}: {error}"]) from error
    try:
        save_model(folder, model, params, tokenizer=tokenizer)
    except OSError as error:
        raise ConfigError([f"{folder}: the model cannot be written: {error}"]) from error
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    Console().message(f"{count:,} parameters in {dtype} written to {folder}")


def doctor(config: Config | None, *, sharding: bool = False) -> None:
    """Shows what this machine has, and tries what a run needs of it; with `sharding` how parameters are cut as well.

    Raises:
        CheckFailed: something does not work.
        ConfigError: an installed package of components cannot be imported.
    """
    from jaxft.harness.registry import ENTRY_POINTS, KINDS, import_installed, registry

    show = Console().message
    about = environment()
    show("\n".join(f"{name:<14} {version}" for name, version in about["versions"].items()))
    import_installed()
    entries = [entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    show(f"{'packages':<14} {', '.join(sorted(entries))}")
    for kind in KINDS:
        show(f"{kind.component_kind:<14} {', '.join(registry.names(kind)) or 'none'}")
    _show_devices(show)
    folder = Path.cwd() if config is None else config.finetuning.output_dir
    _check_writable(folder)
    show(f"{'writable':<14} {folder}")
    if config is not None:
        show(f"{'configuration':<14} no faults")
    if sharding:
        _show_sharding(show, config)
    show("all checks passed")


def _show_devices(show: Any) -> None:
    import jax
    import jax.numpy as jnp

    try:
        devices = jax.devices()
        found = float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((64, 64))))
    except RuntimeError as error:
        raise CheckFailed(f"jax finds no device that works: {error}") from error
    if found != 64.0**3:
        raise CheckFailed(f"{devices[0]} multiplies wrongly: {found} in the place of {64.0**3}")
    for device in devices:
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = f", {limit / 2**30:.1f} GiB for jax" if limit else ""
        show(f"{'device':<14} {device.device_kind} ({device.platform} {device.id}{memory})")
    show(f"{'cores':<14} {os.cpu_count()}")


def _show_sharding(show: Any, config: Config | None) -> None:
    """The rules of all families, and what becomes of them with the models of a configuration."""
    from jaxft.models.decoder import rules_table

    show(f"\n{rules_table()}\n")
    for name, llm in ({} if config is None else config.llms).items():
        try:
            table = None if llm.sharding_table is None else pkgutil.resolve_name(llm.sharding_table)(llm)
        except ValueError as error:
            raise ConfigError([f"llms.{name}.mesh: {error}"]) from error
        if table is not None:
            show(f"llms.{name}\n{table}\n")


def _check_writable(folder: Path) -> None:
    """A run directory locks and replaces files; both are tried next to where it will be."""
    from jaxft.runs.directory import RunDirectory, RunDirectoryError

    parent = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryDirectory(dir=parent) as name, RunDirectory.create(name) as directory:
            directory.write_json("result.json", {})
    except (OSError, RunDirectoryError) as error:
        raise CheckFailed(f"{parent} cannot hold a run: {error}") from error
