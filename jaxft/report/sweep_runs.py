"""The runs of a sweep: all configurations are checked, then each run is a process, and at the end they are compared.

The run directories say what a sweep has done: a run with a `result.json` is done, one with a checkpoint is continued,
any other begins. So the sweep may be killed at any moment, and the same command goes on with it.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jaxft import Config, FinetuneConfig, harness
from jaxft.errors import ComponentError, ConfigError, JaxftError, RunDirectoryError, RunsFailed, Stopped
from jaxft.files import MANIFEST, home_path
from jaxft.hosts import START
from jaxft.redaction import hiding
from jaxft.report.compare import write_comparison
from jaxft.report.compared_runs import read_compared
from jaxft.report.comparison import compare_runs
from jaxft.report.comparison_text import comparison_text
from jaxft.report.pages import number
from jaxft.report.sweep import SEED, GridRun, make_grid, read_list, sweep_arguments, yaml_text
from jaxft.runs import (
    CONFIG_FILE,
    METRICS_FILE,
    Console,
    current_console,
    holder_of_lock,
    holds_run,
    masked_command,
    secrets_of_environment,
    version,
)

HEADING = "=== "
"""Beginning of the line in a log before the output of each process of the run."""

STATES = {"finished": "interrupted", "unfinished": "interrupted", "failed": "failed", None: "waiting"}
"""States of runs that are to do, by what their directories say; None: there is no run."""


Checked = tuple[Path, int, list[str]]
"""Directory and epochs of a valid configuration, and its differences to the run in that directory, as texts."""

Share = tuple[str, dict[str, str]]
"""The part of the machine for one run at a time: numbers of CPUs, and environment variables."""


@dataclass
class SweepRun:
    """A run of a sweep, with its command line as it is started and as a person types it."""

    name: str
    directory: Path
    log: Path
    num_epochs: int
    command: list[str]
    shown: str
    state: str
    exit_code: int = 0
    began_at: float = 0.0

    def progress(self) -> str:
        """Return how far this process has come, as `epoch 3/20, reward 0.8125`; empty before its first epoch."""
        file = self.directory / METRICS_FILE
        with contextlib.suppress(OSError, ValueError):
            lines = file.read_bytes().split(b"\n")[:-1] if file.stat().st_mtime >= self.began_at else []
            if lines and isinstance(row := json.loads(lines[-1]), dict) and "epoch" in row:
                return f"epoch {row['epoch'] + 1}/{self.num_epochs}, reward {number(row.get('reward_mean'))}"
        return ""

    def last_lines(self, count: int = 8) -> list[str]:
        """Return the last lines that the last process of the run wrote to its log, without empty ones."""
        text = self.log.read_text("utf-8", "replace")
        return [line for line in text.rpartition(f"\n{HEADING}")[2].split("\n")[1:] if line.strip()][-count:]


def run(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Make the runs of a sweep, and return the exit code: 1 if one of them failed.

    Args:
        parsed: the parsed arguments of `jaxft sweep`, or of a script that is asked for several runs.
        given: the arguments as they were given; those that are not of the sweep are passed on.
    """
    show = Console().message
    show(f"jaxft {version('jaxft') or '(not installed)'}: sweep {parsed.config_file}")
    try:
        folder, runs = prepare(parsed, given)
    except KeyboardInterrupt:
        return harness.complain("interrupted; nothing was started", 128 + signal.SIGINT)
    except JaxftError as error:
        return harness.complain(f"error: {error}", error.exit_code)
    shares = divide_machine(min(parsed.jobs or 1, len(runs)))
    if parsed.dry_run:
        for each in runs:
            show(f"{each.name}: {each.state}, in {each.directory}\n  {each.shown}")
        todo = sum(each.state != "done" for each in runs)
        show(f"{len(runs)} runs, {todo} to do, {len(shares)} at once; nothing was started or written")
        return 0
    words = ["jaxft", "sweep"] if "verb" in parsed else ["python", *_script_words()]
    command = shlex.join(masked_command([*words, *(word for word in given if word != "--overwrite")]))
    return harness.run_main(lambda: execute(folder, runs, shares, command), log_level=parsed.log_level, computes=False)


def _script_words() -> list[str]:
    """Return the script of this process, with the options of its interpreter."""
    return sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]


def prepare(parsed: argparse.Namespace, given: Sequence[str]) -> tuple[Path, list[SweepRun]]:
    """Return the folder and the runs of a sweep, every configuration checked; nothing is written.

    Raises:
        ConfigError: lists every fault of every run.
        RunDirectoryError: lists directories that are in use, or whose runs had another configuration.
    """
    template, first_seed = _output_dir_and_seed(parsed)
    entries = [] if parsed.list is None else read_list(parsed.list)
    shared, grid = make_grid(parsed.override, entries, parsed.seeds, first_seed)
    folder = _folder(template) if parsed.sweep_dir is None else parsed.sweep_dir
    planned = []
    for name, overrides in grid:
        whole = dict((*shared, *overrides))
        if not harness.has_fields(template) and harness.OUTPUT_DIR not in dict(overrides):
            whole[harness.OUTPUT_DIR] = yaml_text(harness.escape_fields(harness.literal(str(folder / name))))
        planned.append(GridRun(name, tuple(whole.items())))
    # Loading a configuration imports the user's modules, which may import jax or take a device. The sweep must not: it
    # waits for hours while its runs use the devices. Ctrl-C is for this process.
    fork, ignore_sigint = multiprocessing.get_context("fork"), (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(1, fork, initializer=signal.signal, initargs=ignore_sigint) as pool:
        with warnings.catch_warnings(action="ignore"):  # a script may have imported jax, which warns of forks
            checking = pool.submit(check_runs, planned, parsed)
        try:
            faults, checked = checking.result()
        except BrokenExecutor as error:
            raise ComponentError("the process that checks the configurations has ended: see above") from error
    if faults:
        raise ConfigError(faults, "the sweep")
    words, shown = _script_words(), ["python", *_script_words()]
    if "verb" in parsed:
        # -P: unlike the command `jaxft`, `python -m` would let modules in the working directory hide installed ones.
        words, shown = ["-P", "-m", "jaxft.cli", "finetune"], ["jaxft", "finetune"]
    passed_on = _passed_on(given)
    runs: list[SweepRun] = []
    refused: dict[str, list[str]] = {}
    for (name, settings), (directory, num_epochs, changes) in zip(planned, checked, strict=True):
        state, flags, fault = _run_state(directory, changes, parsed)
        if fault:
            refused.setdefault(fault, []).append(f"'{directory}'")
        options = [*passed_on, *(part for path, text in settings for part in ("--set", f"{path}={text}")), *flags]
        typed = shlex.join(masked_command([*shown, *options]))
        log, command = folder / "logs" / f"{name}.log", [sys.executable, *words, *options]
        runs.append(SweepRun(name, directory, log, num_epochs, command, typed, state))
    if refused:
        lines = "".join(f"\n  {listed(paths)}: {fault}" for fault, paths in refused.items())
        raise RunDirectoryError(f"the sweep in '{folder}' cannot go on:{lines}")
    return folder, runs


def _output_dir_and_seed(parsed: argparse.Namespace) -> tuple[str, int]:
    """Return two settings of the configuration as they are written, without importing its modules."""
    values, faults = harness.read_layers(parsed.config_file), harness.ConfigErrors()
    named = (SEED, harness.OUTPUT_DIR, "finetuning")
    harness.override(values, [pair for pair in parsed.override if pair[0] in named], faults)
    section = values.get("finetuning")
    section = harness.expanded(section, "finetuning", faults) if isinstance(section, dict) else {}
    output_dir = section.get("output_dir") or FinetuneConfig.model_fields["output_dir"].default
    seed = str(section.get("seed", 0))  # the check of the runs refuses any other seed
    return str(home_path(str(output_dir))), int(seed) if seed.isdecimal() else 0


def _folder(template: str) -> Path:
    """Return the folder of a sweep: `x_sweep` for the output directory `x`, else the part before its first field."""
    parts = Path(template).parts
    before = parts[: next((at for at, part in enumerate(parts) if harness.has_fields(part)), len(parts))]
    path = Path(harness.with_fields_expanded(str(Path(*before)), {}))
    return path if len(before) < len(parts) else path.with_name(f"{path.name}_sweep") if path.name else Path("sweep")


def _passed_on(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the options of the sweep, and those that each run gets its own of."""
    parser = harness.OptionParser(add_help=False, allow_abbrev=False)
    sweep_arguments(parser)
    parser.add_argument("--set", action="append")
    parser.add_argument("-o", "--override", nargs=2, action="append")
    for flag in ("--resume", "--overwrite"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_known_args(list(arguments))[1]


def check_runs(runs: Sequence[GridRun], parsed: argparse.Namespace) -> tuple[list[str], list[Checked]]:
    """Load the configuration of every run, and return all faults, with the runs that have them, or else the runs."""
    names: dict[str, list[str]] = {}
    checked = []
    for name, settings in runs:
        try:
            config = harness.command_line_config(parsed, settings)
        except JaxftError as error:
            for fault in error.faults if isinstance(error, ConfigError) else (str(error),):
                names.setdefault(fault, []).append(name)
            continue
        checked.append((config.finetuning.output_dir, config.finetuning.num_epochs, _changes(config)))
    faults = [fault if len(having) == len(runs) else f"{fault} ({listed(having)})" for fault, having in names.items()]
    shared = [path for path, count in Counter(str(directory) for directory, *_ in checked).items() if count > 1]
    several = [f"{harness.OUTPUT_DIR}: several runs have the directory '{path}'" for path in shared]
    return [*faults, *(f"{fault}: add fields of what differs" for fault in several)], checked


def _changes(config: Config) -> list[str]:
    folder = config.finetuning.output_dir
    try:
        with hiding(harness.config_secrets(config) | secrets_of_environment()):
            changes = harness.changed_settings(folder, config) if (folder / CONFIG_FILE).is_file() else {}
    except ValueError as error:
        return [str(error)]
    return [f"{path} {_show_value(old)} -> {_show_value(new)}" for path, (old, new) in changes.items()]


def _show_value(value: object) -> str:
    return "not set" if value is None else repr(value)[:60]


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e"])
    ('a; b', 'a; b; c; and 2 more')
    """
    return "; ".join([*names[:3], *[f"and {len(names) - 3} more"] * (len(names) > 3)])


def _run_state(
    directory: Path, changes: Sequence[str], parsed: argparse.Namespace
) -> tuple[str, list[str], str | None]:  # fmt: skip
    """Return the state of a run by its directory, the options that it needs for that, and why it cannot run, if so."""
    if (holder := holder_of_lock(directory)) is not None:
        return "waiting", [], f"is in use by {holder}: wait for that run, or give another --sweep-dir"
    is_there = (directory / CONFIG_FILE).is_file() and not parsed.overwrite
    status = read_compared(directory).status if is_there else None
    if status == "finished" and not changes:
        return "done", [], None
    fault = None
    if changes and status not in (None, "failed") and not parsed.resume:
        fault = (
            f"was made with another configuration ({listed(changes)}): give --resume to continue it with this one, "
            "--overwrite to begin anew, or another --sweep-dir"
        )
    goes_on = is_there and not (changes and status == "failed") and any(directory.glob(f"checkpoints/*/{MANIFEST}"))
    return STATES[status], ["--resume"] if goes_on else ["--overwrite"] * holds_run(directory), fault


def divide_machine(jobs: int) -> list[Share]:
    """Return a share for each of `jobs` runs at once: equal parts of the CPUs, and of `CUDA_VISIBLE_DEVICES` if set."""
    cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")

    def part(whole: list[str], at: int) -> str:
        size = max(len(whole) // jobs, 1)  # of fewer than there are runs, several have the same one
        return ",".join(whole[at * size % len(whole) :][:size])

    return [(part(cpus, at), {"CUDA_VISIBLE_DEVICES": part(gpus, at)} if gpus[0] else {}) for at in range(jobs)]


async def execute(folder: Path, runs: Sequence[SweepRun], shares: Sequence[Share], command: str) -> None:
    """Run what is left of a sweep, and compare its runs.

    Args:
        folder: the folder of the sweep.
        runs: all its runs.
        shares: one for each run at a time.
        command: the command line that goes on with the sweep.

    Raises:
        RunsFailed: some runs failed; the message has the last lines of each, and the command to repeat it.
        Stopped: a signal ended the sweep.
    """
    console, shutdown = current_console(), harness.current_shutdown()
    assert shutdown is not None  # the program installs it
    shutdown.resume_command = command
    console.message(f"{summary(runs)}; in {folder}, {len(shares)} at once")
    console.status(lambda: "\n".join([*(_live(each) for each in runs if each.state == "running"), summary(runs)]))
    free: asyncio.Queue[Share] = asyncio.Queue()
    for share in shares:
        free.put_nowait(share)
    with shutdown.listening() as stop:

        async def work(each: SweepRun) -> None:
            share = await free.get()
            if not stop.is_set():
                await _run_process(each, share, stop, f"[{runs.index(each) + 1}/{len(runs)}] {each.name}:")
            free.put_nowait(share)

        async with asyncio.TaskGroup() as group:
            for each in [each for each in runs if each.state != "done"]:
                group.create_task(work(each))
    console.status("")
    if shutdown.signal is not None:
        raise Stopped(summary(runs))
    if made := [each.directory for each in runs if (each.directory / CONFIG_FILE).is_file()]:
        try:
            comparison = compare_runs(made)
            console.message(f"\n{comparison_text(comparison, console.columns)}\n")
            console.message(f"written to {', '.join(map(str, write_comparison(comparison, folder)))}")
        except JaxftError as error:  # the runs themselves are all right
            console.message(f"the runs could not be compared: {error}")
    console.message(summary(runs))
    if failed := [each for each in runs if each.state == "failed"]:
        raise RunsFailed("\n".join([f"{len(failed)} of {len(runs)} runs failed", *map(_failure, failed)]))


async def _run_process(each: SweepRun, share: Share, stop: asyncio.Event, title: str) -> None:
    """Run one process to its end, which `stop` asks for; Ctrl-C does not reach it, as it has a session of its own."""
    each.log.parent.mkdir(parents=True, exist_ok=True)
    with each.log.open("ab") as log:
        heading = f"\n{HEADING}{time.strftime('%Y-%m-%d %H:%M:%S')} {each.shown}\n"
        log.write(heading.encode("utf-8", "backslashreplace"))
        log.flush()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", START, str(os.getpid()), share[0], *each.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **share[1]},
        )
    each.state, each.began_at = "running", time.time()
    show = current_console().message
    show(f"{title} {'continues from its checkpoint' if each.command[-1] == '--resume' else 'begins'}")
    ended, stopped = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            process.terminate()
            await asyncio.wait((ended,))
    finally:
        stopped.cancel()
        if process.returncode is None:
            process.kill()
    each.exit_code = await ended
    each.state = "done" if each.exit_code == 0 else "interrupted" if stop.is_set() else "failed"
    words = [f"{each.state}{_ending(each)}", each.progress(), f"{time.time() - each.began_at:.0f} s"]
    show(f"{title} {', '.join(filter(None, words))}" + (f"; {each.log}" if each.state == "failed" else ""))


def _ending(each: SweepRun) -> str:
    if each.state != "failed":
        return ""
    return f" (exit code {each.exit_code})" if each.exit_code >= 0 else f" ({signal.Signals(-each.exit_code).name})"


def _live(each: SweepRun) -> str:
    return f"{each.name}: {each.progress() or 'preparing'} ({time.time() - each.began_at:.0f} s)"


def summary(runs: Sequence[SweepRun]) -> str:
    """Return how many runs are in which state, in the order of a run's life backwards."""
    states = [each.state for each in runs]
    order = ("done", "failed", "interrupted", "running", "waiting")
    counts = ", ".join(f"{states.count(state)} {state}" for state in order if state in states)
    return f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}: {counts}"


def _failure(each: SweepRun) -> str:
    lines = "".join(f"\n    {line}" for line in each.last_lines())
    return f"{each.name}{_ending(each)}; the end of {each.log}:{lines}\n  repeat it with:\n    {each.shown}"
