"""The sweep: many runs by one command, each a process of its own, and their comparison at the end.

    jaxft sweep --config-file run.yml --seeds 3 --set trainer_adapters.local.loss.name=grpo,dapo --jobs 2
    python experiments/arithmetic.py --seeds 3 --jobs 2

All configurations are checked before a run starts. The same command goes on with a sweep that was stopped: it skips
runs that are done, continues those that were interrupted, and repeats those that failed. The sweep imports no jax.
"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxft.errors import ConfigError, JaxftError, RunDirectoryError, RunsFailed, Stopped
from jaxft.files import home_path
from jaxft.harness.config_merge import (
    OUTPUT_DIR,
    ConfigErrors,
    escape_fields,
    expanded,
    has_fields,
    literal,
    override,
    read_layers,
    with_fields_expanded,
)
from jaxft.harness.data_models import FinetuneConfig
from jaxft.harness.runtime import complain, config_of, exit_code_of
from jaxft.harness.signals import current_shutdown
from jaxft.harness.verbs import OptionParser, Verb
from jaxft.report.sweep_check import CheckedRun, Load, check_runs, listed
from jaxft.report.sweep_grid import SEED, Grid, GridRun, make_grid, parse_seeds, read_list, yaml_text
from jaxft.report.sweep_jobs import Job, divide_machine, ending_of, last_lines, progress_of, run_jobs, visible_gpus
from jaxft.report.sweep_state import LOG_FOLDER, Sweep, SweepRun, read_state
from jaxft.runs.console import Console, current_console
from jaxft.runs.directory import holder_of_lock
from jaxft.runs.environment import masked_command, version
from jaxft.runs.files import CONFIG_FILE, holds_run

MAKING_SEVERAL = ("seeds", "list", "jobs")
"""Options of which a script needs one to make several runs."""

OTHERS = {"sweep_dir": "--sweep-dir", "fail_fast": "--fail-fast", "dry_run": "--dry-run"}
"""Other options of several runs, by their names in the parsed arguments."""


class Program(NamedTuple):
    """The program of the runs of a sweep.

    Attributes:
        command: its command line up to the options, as in `/usr/bin/python -m jaxft.cli finetune`.
        shown: the same as a person types it, as in `jaxft finetune`.
        sweep: the beginning of the sweep's own command line, as in `jaxft sweep`.
    """

    command: tuple[str, ...]
    shown: tuple[str, ...]
    sweep: tuple[str, ...]


# -P: unlike the command `jaxft`, `python -m` would let modules in the working directory hide installed ones.
JAXFT = Program((sys.executable, "-P", "-m", "jaxft.cli", "finetune"), ("jaxft", "finetune"), ("jaxft", "sweep"))


def run_sweep(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Make the runs of a sweep, each in a process of its own, and return the exit code: 1 if one of them failed.

    Args:
        parsed: the parsed arguments of `jaxft sweep`, or of a script that is asked for several runs.
        given: the arguments as they were given; those that are not of the sweep are passed on.
    """
    jobs = parsed.jobs or 1
    Console().message(f"jaxft {version('jaxft') or '(not installed)'}: sweep {parsed.config_file}")
    try:
        program = JAXFT if "verb" in parsed else _this_script()
        sweep = prepare(parsed, program, given, lambda settings: config_of(parsed, settings))
        shares = shares_of(sweep, jobs)
    except KeyboardInterrupt:
        return complain("interrupted; nothing was started", 128 + signal.SIGINT)
    except JaxftError as error:
        return complain(f"error: {error}", error.exit_code)
    if parsed.dry_run:
        list_runs(sweep, len(shares), Console().message)
        return 0
    return exit_code_of(
        lambda: execute(sweep, jobs, fail_fast=parsed.fail_fast), log_level=parsed.log_level, computes=False
    )


def _this_script() -> Program:
    """Return the script of this process, with the options of its interpreter."""
    before = len(sys.orig_argv) - len(sys.argv) + 1  # all but the script's own arguments
    shown = ("python", *sys.orig_argv[1:before])
    return Program((sys.executable, *sys.orig_argv[1:before]), shown, shown)


def sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a sweep."""
    group = parser.add_argument_group(
        "several runs",
        "Make one run for each combination of seeds and of values that are separated by commas in --set.",
    )
    group.add_argument(
        "--seeds", type=_seeds, metavar="N", help="this many seeds from finetuning.seed on; or a list, as in 0,5,7"
    )
    group.add_argument("--jobs", type=_jobs, metavar="N", help="runs at once, which divide the machine (default 1)")
    group.add_argument("--list", type=home_path, metavar="FILE", help="YAML: a list with overrides for each run")
    group.add_argument(
        "--sweep-dir",
        type=home_path,
        metavar="FOLDER",
        help="folder of the runs, their record and comparison (default: finetuning.output_dir with _sweep at its end)",
    )
    group.add_argument("--fail-fast", action="store_true", help="stop all runs when one has failed")
    group.add_argument("--dry-run", action="store_true", help="check all configurations and list the runs; run none")


def is_sweep(parsed: argparse.Namespace) -> bool:
    """Return True if the arguments of a script ask for several runs.

    Raises:
        ConfigError: there are options for several runs, but nothing that makes several.
    """
    options = vars(parsed)
    if any(options.get(name) is not None for name in MAKING_SEVERAL):
        return True
    given = [option for name, option in OTHERS.items() if options.get(name)]
    # `jaxft finetune` has no --seeds, and a --dry-run of another kind.
    if given and "seeds" in options:
        raise ConfigError([f"{given[0]}: is for several runs: give --seeds, --list or --jobs as well"])
    return False


def prepare(parsed: argparse.Namespace, program: Program, arguments: Sequence[str], load: Load) -> Sweep:
    """Return the sweep that a command line asks for, every configuration checked; nothing is written.

    Args:
        parsed: the parsed arguments.
        program: the program of the runs.
        arguments: the arguments as they were given.
        load: loads the configuration of the command line, with the overrides of a run in the place of its own.

    Raises:
        ConfigError: lists every fault of every run.
        RunDirectoryError: a directory is in use, or holds something else.
    """
    template, first_seed = _base(parsed)
    entries = [] if parsed.list is None else read_list(parsed.list)
    grid = make_grid(parsed.override, entries, parsed.seeds, first_seed)
    folder = _folder(template, parsed.sweep_dir)
    has_own_names = has_fields(template)
    planned = [
        GridRun(run.name, _with_directory(grid, run, None if has_own_names else folder / run.name)) for run in grid.runs
    ]
    checked = check_runs(planned, load)
    state = read_state(folder)
    passed_on = _passed_on(arguments)
    sweep = Sweep(
        folder=folder,
        config_file=parsed.config_file.name,
        program=" ".join(program.shown),
        command=shlex.join(masked_command([*program.sweep, *(each for each in arguments if each != "--overwrite")])),
        runs=[],
    )
    if state and (state.get("config_file"), state.get("program")) != (sweep.config_file, sweep.program):
        raise RunDirectoryError(
            f"'{folder}' holds a sweep of {state.get('program')} with {state.get('config_file')}: give another "
            "--sweep-dir"
        )
    for run, whole, found in zip(grid.runs, planned, checked, strict=True):
        options = [part for path, text in whole.overrides for part in ("--set", f"{path}={text}")]
        sweep.runs.append(
            SweepRun(
                name=run.name,
                directory=Path(found.output_dir),
                log=folder / LOG_FOLDER / f"{run.name}.log",
                overrides=run.overrides,
                command=(*program.command, *passed_on, *options),
                shown_program=(program.shown, len(program.command)),
                num_epochs=found.num_epochs,
            )
        )
    entries_before = state.get("runs", {})
    sweep.others = {name: entry for name, entry in entries_before.items() if name not in {r.name for r in sweep.runs}}
    _take_up(sweep, entries_before, checked, may_change=parsed.resume, overwrite=parsed.overwrite)
    return sweep


def _base(parsed: argparse.Namespace) -> tuple[str, int]:
    """Return output directory and seed of the configuration, as they are written, without importing its modules."""
    values, faults = read_layers(parsed.config_file), ConfigErrors()
    override(values, [pair for pair in parsed.override if pair[0] in (SEED, OUTPUT_DIR, "finetuning")], faults)
    section = values.get("finetuning")
    section = expanded(section, "finetuning", faults) if isinstance(section, dict) else {}
    output_dir = section.get("output_dir") or str(FinetuneConfig.model_fields["output_dir"].default)
    seed = section.get("seed", 0)
    is_number = isinstance(seed, int) or (isinstance(seed, str) and seed.isdecimal())
    template = str(home_path(str(output_dir)))
    return template, int(seed) if is_number else 0  # the check of the runs refuses any other seed


def _folder(template: str, given: Path | None) -> Path:
    """Return the folder of a sweep: `x_sweep` for the output directory `x`, else the part before its first field."""
    if given is not None:
        return given
    if not has_fields(template):
        path = Path(with_fields_expanded(template, {}))
        return path.with_name(f"{path.name}_sweep") if path.name else Path("sweep")
    parts = Path(template).parts
    before = parts[: next(number for number, part in enumerate(parts) if has_fields(part))]
    return Path(with_fields_expanded(str(Path(*before)), {}))


def _with_directory(grid: Grid, run: GridRun, directory: Path | None) -> Any:
    """Return all settings of a run, with its directory unless that has a name of its own."""
    overrides = (*grid.shared, *run.overrides)
    if directory is None or any(path == OUTPUT_DIR for path, _ in run.overrides):
        return overrides
    text = yaml_text(escape_fields(literal(str(directory))))
    return (*(pair for pair in overrides if pair[0] != OUTPUT_DIR), (OUTPUT_DIR, text))


def _passed_on(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the options of the sweep, and those that each run gets its own of."""
    parser = OptionParser(add_help=False, allow_abbrev=False)
    sweep_arguments(parser)
    parser.add_argument("--set", action="append")
    parser.add_argument("-o", "--override", nargs=2, action="append")
    for flag in ("--resume", "--overwrite"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_known_args(list(arguments))[1]


def _take_up(
    sweep: Sweep, entries: dict[str, Any], checked: Sequence[CheckedRun], *, may_change: bool, overwrite: bool
) -> None:
    """Give each run the state in which an earlier command has left it.

    Raises:
        RunDirectoryError: lists directories that are in use, that other programs made, or whose runs had another
            configuration.
    """
    faults: dict[str, list[str]] = {}
    for run, found in zip(sweep.runs, checked, strict=True):
        holder = holder_of_lock(run.directory)
        entry = entries.get(run.name, {})
        is_known = entry.get("directory") == str(run.directory)
        fault = None
        if holder is not None:
            fault = f"is in use by {holder}: wait for that run, or give another --sweep-dir"
        elif overwrite:
            run.begins_anew = True
        elif holds_run(run.directory) and not is_known:
            fault = "holds a run that is not of this sweep: give another --sweep-dir, or --overwrite"
        elif is_known and (run.directory / CONFIG_FILE).is_file():
            run.take_up(entry)
            if found.changes and run.state == "failed":
                run.begins_anew = True
            elif found.changes and may_change:
                run.state = "interrupted"
            elif found.changes:
                fault = (
                    f"was made with another configuration ({listed(found.changes)}): give --resume to continue it with "
                    "this one, --overwrite to begin anew, or another --sweep-dir"
                )
        if fault is not None:
            faults.setdefault(fault, []).append(f"'{run.directory}'")
    if faults:
        lines = [f"{listed(paths)}: {fault}" for fault, paths in faults.items()]
        raise RunDirectoryError("\n  ".join([f"the sweep in '{sweep.folder}' cannot go on:", *lines]))


def list_runs(sweep: Sweep, jobs: int, show: Any) -> None:
    """Show the runs of a sweep with their states and command lines."""
    for run in sweep.runs:
        show(f"{run.name}: {run.state}, in {run.directory}\n  {run.shown()}")
    todo = sum(run.state != "done" for run in sweep.runs)
    show(f"{len(sweep.runs)} runs, {todo} to do, {jobs} at once; nothing was started or written")


def shares_of(sweep: Sweep, jobs: int) -> list[Any]:
    """Return a share of the machine for each run at once; at most as many as there are runs."""
    return divide_machine(min(jobs, len(sweep.runs)), visible_gpus(), sorted(os.sched_getaffinity(0)))


async def execute(sweep: Sweep, jobs: int, *, fail_fast: bool) -> None:
    """Run what is left of a sweep, and compare its runs.

    Raises:
        RunsFailed: some runs failed; the message has the last lines of each, and the command to repeat it.
        Stopped: a signal ended the sweep.
    """
    console, total = current_console(), len(sweep.runs)
    shares = shares_of(sweep, jobs)
    with sweep.locked():
        todo = [run for run in sweep.runs if run.state != "done"]
        done = f", {total - len(todo)} of them done" if len(todo) < total else ""
        console.message(f"{_counted(total)} in {sweep.folder}{done}, {len(shares)} at once")
        if jobs > total:
            console.message(f"--jobs {jobs}: there are no more than {_counted(total)}")
        sweep.write()
        shutdown = current_shutdown()
        if shutdown is not None:
            shutdown.resume_command = sweep.command
        before = {run.name: run.num_cpus for run in todo}

        def changed(run: SweepRun) -> None:
            sweep.write()
            _show_change(run, sweep, before[run.name], console)

        def show(running: list[Job]) -> None:
            console.status(lambda: _live(sweep, running))

        await run_jobs(todo, shares, show, changed, fail_fast=fail_fast)
        sweep.write()
        console.status("")
        if shutdown is not None and shutdown.signal is not None:
            raise Stopped(_summary(sweep))
        _compare(sweep, console)
        console.message(_summary(sweep))
        failed = [run for run in sweep.runs if run.state == "failed"]
        if failed:
            raise RunsFailed("\n".join([f"{_counted(len(failed))} of {total} failed", *map(_failure, failed)]))


def _compare(sweep: Sweep, console: Console) -> None:
    """Show and write the comparison of all runs that have begun."""
    # matplotlib and numpy take a second to import, for which a sweep that only lists its runs should not wait.
    from jaxft.report.compare import write_comparison
    from jaxft.report.comparison import compare_runs
    from jaxft.report.comparison_text import comparison_text

    made = [run.directory for run in sweep.runs if (run.directory / CONFIG_FILE).is_file()]
    if not made:
        return
    try:
        comparison = compare_runs(made)
        console.message(f"\n{comparison_text(comparison, console.columns)}\n")
        written = write_comparison(comparison, sweep.folder)
    except JaxftError as error:  # the runs themselves are all right
        console.message(f"the runs could not be compared: {error}")
        return
    console.message(f"written to {', '.join(map(str, written))}")


def _show_change(run: SweepRun, sweep: Sweep, num_cpus_before: int | None, console: Console) -> None:
    number = 1 + [each.name for each in sweep.runs].index(run.name)
    title = f"[{number}/{len(sweep.runs)}] {run.name}:"
    progress = progress_of(run)
    if run.state == "running":
        resumed = "--resume" in run.arguments()
        console.message(f"{title} {'continues from its checkpoint' if resumed else 'begins'}")
        if resumed and num_cpus_before not in (None, run.num_cpus):
            console.message(
                f"{title} had {num_cpus_before} CPUs and now has {run.num_cpus}: its numbers agree with those of an "
                "uninterrupted run up to rounding"
            )
        return
    ending = f" ({ending_of(run.exit_code)})" if run.state == "failed" and run.exit_code is not None else ""
    about = ", ".join(filter(None, (progress, f"{run.seconds:.0f} s")))
    console.message(f"{title} {run.state}{ending}, {about}" + (f"; {run.log}" if run.state == "failed" else ""))


def _live(sweep: Sweep, running: list[Job]) -> str:
    lines = [
        f"{job.run.name}: {progress_of(job.run, job.began_at) or 'preparing'} ({job.seconds:.0f} s)" for job in running
    ]
    return "\n".join([*lines, _summary(sweep)])


def _summary(sweep: Sweep) -> str:
    """Return how many runs are in which state.

    The states are in the order of a run's life.
    """
    states = [run.state for run in sweep.runs]
    order = ("done", "failed", "interrupted", "running", "waiting")
    counts = [f"{states.count(state)} {state}" for state in order if state in states]
    return f"{_counted(len(states))}: {', '.join(counts)}"


def _failure(run: SweepRun) -> str:
    ending = "" if run.exit_code is None else f" ({ending_of(run.exit_code)})"
    lines = "".join(f"\n    {line}" for line in last_lines(run.log))
    return f"{run.name}{ending}; the end of {run.log}:{lines}\n  repeat it with:\n    {run.shown()}"


def _counted(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _seeds(text: str) -> Any:
    try:
        return parse_seeds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _jobs(text: str) -> int:
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= 10_000:
        return int(text)
    raise argparse.ArgumentTypeError("wants a whole number of runs at once, at least 1")


SWEEP = Verb(
    help="train a grid of configurations, and compare the runs",
    description="""Trains a grid of configurations, each run in a process of its own, and compares them.

    jaxft sweep --config-file run.yml --seeds 3 --set trainer_adapters.local.loss.name=grpo,dapo --jobs 2

In --set a comma separates alternatives; one inside of quotes, brackets or braces belongs to the value. The same command
goes on with a sweep that was stopped: it skips finished runs, continues interrupted ones and repeats failed ones. With
--resume it also continues runs whose configuration has changed since.""",
    add_arguments=sweep_arguments,
    run=run_sweep,
    reads_configuration=True,
    takes_over=is_sweep,
)
