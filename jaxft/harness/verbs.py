"""Verbs of the command line, and the options that several of them and scripts share.

A package brings its own by an entry point of the group `jaxft.verbs`, whose object is a `Verb`.
"""

import argparse
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxft.files import home_path
from jaxft.hosts.start import VARIABLES
from jaxft.plugins import plugins

LOG_LEVELS = ("debug", "info", "warning", "error")


class OptionParser(argparse.ArgumentParser):
    """A parser that takes each option with hyphens and, as NeMo Agent Toolkit writes them, with underscores.

    >>> parser = OptionParser()
    >>> _ = parser.add_argument("--config-file"), parser.add_argument("--eval_games")
    >>> parser.parse_args(["--config_file=a_b.yml", "--eval-games", "4"])
    Namespace(config_file='a_b.yml', eval_games='4')
    """

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse a command line, by default that of the process."""
        return super().parse_known_args(list(map(self._as_declared, sys.argv[1:] if args is None else args)), namespace)

    def _as_declared(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        words = name.removeprefix("--").replace("-", "_")
        # A verb's options are unknown to the parser above it, and stay as they are for that of the verb.
        spellings = (name, "--" + words.replace("_", "-"), f"--{words}")
        known = (each for each in spellings if each in self._option_string_actions)
        return next(known, name) + equals + value if name.startswith("--") else argument


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        help: one line, in the list of verbs.
        description: shown above the options.
        add_arguments: adds the options to a parser.
        run: called with the parsed arguments and those given, without the verb; returns the exit code. It may be
            written as `module:function`, which is imported when the verb is called.
        reads_configuration: True if the verb also has the options of every run; its help then ends with every field.
        run_help: help of an argument `run`, a run directory in the place of --config-file; None for no such argument.
        takes_over: True for the arguments of a script that ask for this verb in the place of a run; None if scripts
            do not have its options.
    """

    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace, Sequence[str]], int] | str
    reads_configuration: bool = False
    run_help: str | None = None
    takes_over: Callable[[argparse.Namespace], bool] | None = None

    def __call__(self, parsed: argparse.Namespace, given: Sequence[str]) -> int:
        """Run the verb, and return its exit code."""
        run = pkgutil.resolve_name(self.run) if isinstance(self.run, str) else self.run
        return run(parsed, given)


def installed_verbs() -> dict[str, Verb]:
    """Return the verbs that installed packages bring, by name."""
    return plugins("jaxft.verbs")


def whole_number(text: str) -> int:
    """Return an option's value: a whole number, at least 1."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError("wants a whole number, at least 1")


def run_arguments(
    description: str | None,
    config_file: str | Path | None = None,
    parser: argparse.ArgumentParser | None = None,
    run_help: str | None = None,
) -> argparse.ArgumentParser:
    """Make a parser with the options of every run and, for a script, of a sweep; a script may add its own.

    Args:
        description: shown by `--help`; a script's `__doc__`.
        config_file: the default of `--config-file`, which is required without one.
        parser: the parser to add to; by default a new one.
        run_help: help of an argument `run`, which may take the place of `--config-file`; None for no such argument.
    """
    is_script = parser is None
    parser = OptionParser() if parser is None else parser
    parser.allow_abbrev = False  # --seed would be --seeds, which is another thing
    parser.description = description
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    source: Any = parser
    if run_help is not None:
        source = parser.add_mutually_exclusive_group(required=True)
        source.add_argument("run", nargs="?", type=home_path, help=run_help)
    source.add_argument(
        "--config-file",
        type=home_path,
        required=config_file is None and run_help is None,
        default=config_file,
        help="the YAML file of the run" + ("" if config_file is None else f" (default {config_file})"),
    )
    override_arguments(parser)
    log_arguments(parser)
    _data_arguments(parser)
    parser.add_argument(
        "--strict-compile", action="store_true", help="compile every program first; fail if an epoch compiles more"
    )
    processes_arguments(parser)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the run in the output directory, which is removed once datasets and models are open",
    )
    existing.add_argument("--resume", action="store_true", help="continue the run in the output directory")
    if is_script:
        for verb in installed_verbs().values():
            if verb.takes_over is not None:
                verb.add_arguments(parser)
    return parser


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that replace dataset, validation and agent of the configuration."""
    parser.add_argument(
        "--dataset", type=home_path, metavar="FILE", help="file of examples to use instead of eval.general.dataset"
    )
    parser.add_argument(
        "--result-json-path", metavar="PATH", help="JSON path of the result in the workflow's output, as in $.answer"
    )
    parser.add_argument(
        "--validation-dataset", type=home_path, metavar="FILE", help="file of held-out examples to validate on"
    )
    parser.add_argument("--validation-interval", type=int, metavar="N", help="epochs between two validations")
    parser.add_argument(
        "--validation-config-file",
        type=home_path,
        metavar="FILE",
        help="configuration with the workflow and evaluators of validation",
    )
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="address of an agent, which takes the place of the workflow (`_type: http_agent`)",
    )
    parser.add_argument(
        "--endpoint-timeout",
        type=float,
        metavar="SECONDS",
        help="seconds that this agent may take for an episode (default: eval.general.timeout_seconds)",
    )


def override_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--set` and `-o`, which set fields of the configuration."""
    set_option = parser.add_argument(
        "--set", type=_pair, action="append", dest="override", default=[], metavar="PATH=VALUE",
        help="set a field, as in --set finetuning.num_epochs=5 (the value is YAML); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--override", nargs=2, action="append", dest=set_option.dest, metavar=("PATH", "VALUE"),
        help="the same, as in -o finetuning.num_epochs 5",
    )  # fmt: skip


def processes_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--coordinator`, `--num-processes` and `--process-id`."""
    group = parser.add_argument_group("several processes, where no cluster says so (see also `jaxft launch`)")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0, with a free port")
    group.add_argument(
        "--num-processes", metavar="N", help="number of processes of the run; 1 alone ignores the cluster"
    )
    group.add_argument("--process-id", metavar="I", help="number of this process, from 0")


def processes_options(parsed: argparse.Namespace) -> dict[str, str | None]:
    """Return the options of `processes_arguments`, each None if it was not given."""
    return {name: vars(parsed)[name] for name in VARIABLES}


def log_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--log-level`."""
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, default="info",
        help="the lowest level of Python's `logging` that is shown from the agent's modules; records of libraries are "
        "shown from warning on (default %(default)s)",
    )  # fmt: skip


def _pair(text: str) -> tuple[str, str]:
    path, equals, value = text.partition("=")
    if not path or not equals:
        raise argparse.ArgumentTypeError("wants PATH=VALUE")
    return path, value
