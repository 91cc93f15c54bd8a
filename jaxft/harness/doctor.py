"""The verb `doctor`: what this machine has, and whether a run can compute and write here."""

import argparse
import importlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from packaging.requirements import Requirement

from jaxft import models
from jaxft.errors import CheckFailed, ConfigError, RunDirectoryError
from jaxft.harness.config import Config, load_config
from jaxft.harness.registry import ENTRY_POINTS, KINDS, REGISTRY, import_installed
from jaxft.harness.runtime import run_main
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.runs.environment import environment, version

DEVELOPMENT = frozenset({"test", "dev", "docs"})
"""Extras for work on jaxft itself, which nobody else misses."""


def run(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Check this machine as the command line asks for, and return the exit code."""

    async def main() -> None:
        config = None if parsed.config_file is None else load_config(parsed.config_file, parsed.override)
        doctor(config, sharding=parsed.sharding)

    return run_main(main, title="doctor")


def doctor(config: Config | None, *, sharding: bool = False) -> None:
    """Show versions, extras, components and devices, and check that a run can compute and write here.

    With `sharding`, also show how parameters are split over a mesh.

    Raises:
        CheckFailed: a required package has another version, a device computes wrongly, or no run can be written here.
        ConfigError: an installed package of components cannot be imported.
    """
    show = Console().message
    about = environment()
    show("\n".join(f"{name:<14} {version}" for name, version in about["versions"].items()))
    _show_extras(show)
    import_installed()
    entries = [entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    show(f"{'packages':<14} {', '.join(sorted(entries))}")
    for base, kind in KINDS.items():
        show(f"{kind.name:<14} {', '.join(REGISTRY.names(base)) or 'none'}")
    _show_devices(show)
    show(f"{'compile cache':<14} {jax.config.values['jax_compilation_cache_dir']}")
    _check_writable(show, Path.cwd() / "runs" if config is None else config.finetuning.output_dir)
    if config is not None:
        show(f"{'configuration':<14} no faults")
    if sharding:
        _show_sharding(show, config)
    show("all checks passed")


def _show_extras(show: Callable[[str], None]) -> None:
    """Show which extras are installed and which are not; raise if a package that every run needs does not fit."""
    try:
        extras = importlib.metadata.metadata("jaxft").get_all("Provides-Extra", [])
    except importlib.metadata.PackageNotFoundError:
        raise CheckFailed("jaxft is not installed, so nothing registers its components: pip install -e . it") from None
    unfit = [need for need in _requirements("jaxft") if _unfit(need)]
    if unfit:
        held = [f"{need.name} {version(need.name) or 'is missing'}, where jaxft needs {_plain(need)}" for need in unfit]
        command = " ".join(f'"{_plain(need)}"' for need in unfit)
        raise CheckFailed(f"{'; '.join(held)}: pip install {command}")
    found = {extra: not any(map(_unfit, _requirements("jaxft", extra))) for extra in sorted(set(extras) - DEVELOPMENT)}
    show(f"{'extras':<14} {', '.join(extra for extra, is_met in found.items() if is_met) or 'none'}")
    if missing := [extra for extra, is_met in found.items() if not is_met]:
        show(f'{"not installed":<14} {", ".join(missing)}: each by pip install "jaxft[NAME]"')


@cache  # parsing one package takes some milliseconds, and extras name packages again and again
def _requirements(package: str, extra: str = "") -> list[Requirement]:
    """Return what an installed package always requires, or what one of its extras requires beyond that."""
    needs = [Requirement(text) for text in importlib.metadata.requires(package) or ()]
    always = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    if not extra:
        return always
    return [need for need in needs if need not in always and need.marker and need.marker.evaluate({"extra": extra})]


def _unfit(need: Requirement) -> list[Requirement]:
    """Return the requirement, or those of its extras, that no installed package meets; none of them if all are met."""
    found = version(need.name)
    if found is None or not need.specifier.contains(found, prereleases=True):
        return [need]
    nested = [inner for extra in need.extras for inner in _requirements(need.name, extra)]
    return [unfit for inner in nested for unfit in _unfit(inner)]


def _plain(need: Requirement) -> str:
    """Return a requirement without the condition under which it holds."""
    return f"{need.name}{need.specifier}"


def _show_devices(show: Callable[[str], None]) -> None:
    try:
        devices = jax.devices()
        found = float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((64, 64))))
    except RuntimeError as error:
        raise CheckFailed(f"jax finds no device that works: {error}") from error
    if found != 64.0**3:
        raise CheckFailed(f"{devices[0]} multiplies wrongly: {found} instead of {64.0**3}")
    for device in devices:
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = f", {limit / 2**30:.1f} GiB for jax" if limit else ""
        show(f"{'device':<14} {device.device_kind} ({device.platform} {device.id}{memory})")
    show(f"{'cores':<14} {len(os.sched_getaffinity(0))}")


def _show_sharding(show: Callable[[str], None], config: Config | None) -> None:
    """Show the sharding rules of all model families, and the resulting table of each configured model."""
    show(f"\n{models.rules_table()}\n")
    for name, llm in ({} if config is None else config.llms).items():
        try:
            table = None if llm.module is None else importlib.import_module(llm.module).sharding_table(llm)
        except ValueError as error:
            raise ConfigError(f"llms.{name}.mesh: {error}") from error
        if table is not None:
            show(f"llms.{name}\n{table}\n")


def _check_writable(show: Callable[[str], None], folder: Path) -> None:
    """Raise unless files can be locked and replaced next to where the run directory will be; show the room there."""
    parent = _existing(folder)
    try:
        with tempfile.TemporaryDirectory(dir=parent) as name, RunDirectory.create(name) as directory:
            directory.write_json("result.json", {})
    except (OSError, RunDirectoryError) as error:
        raise CheckFailed(f"{parent} cannot hold a run: {error}") from error
    show(f"{'writable':<14} {folder} ({shutil.disk_usage(parent).free / 2**30:.1f} GiB free)")


def _existing(folder: Path) -> Path:
    """Return the folder, or else the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
