"""The command line: `jaxft finetune --config-file run.yml`. Importing this module imports no jax."""

import argparse
import contextlib
import os
import pkgutil
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from jaxft.errors import ConfigError, HostsError
from jaxft.files import home_path
from jaxft.harness.commands import dry_run, finetune, resume
from jaxft.harness.config_help import help_text
from jaxft.harness.new_agent import write_agent
from jaxft.harness.runtime import complain, run_main, run_parsed
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.harness.verbs import (
    OptionParser,
    Verb,
    installed_verbs,
    log_arguments,
    override_arguments,
    processes_arguments,
    processes_options,
    run_arguments,
    whole_number,
)
from jaxft.hosts.launch import launch
from jaxft.runs.console import Console

Given = Sequence[str]
Parser = argparse.ArgumentParser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the verb that the command line names, and return the exit code.

    Args:
        arguments: the command line; by default that of the process.
    """
    verbs = {**VERBS, **installed_verbs()}
    parser = make_parser(verbs)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions, and has the extra
        pkgutil.resolve_name("argcomplete:autocomplete")(parser)
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = parser.parse_args(given)
    given.remove(parsed.verb)
    return verbs[parsed.verb](parsed, given)


class _VerbParser(OptionParser):
    """The parser of one verb; if the verb reads a configuration, its help ends with every field of it."""

    reads_configuration = False

    def format_help(self) -> str:
        return f"{super().format_help()}\n{help_text()}\n" if self.reads_configuration else super().format_help()


def make_parser(verbs: dict[str, Verb] | None = None) -> Parser:
    """Return the parser of the whole command line; `verbs` are by default all that are installed."""
    parser = argparse.ArgumentParser(
        prog="jaxft", description="Finetune the language model inside an agent, in the process the agent runs in."
    )
    parser.add_argument("--version", action="version", version=f"jaxft {_version()}")
    added = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_VerbParser)
    for name, verb in ({**VERBS, **installed_verbs()} if verbs is None else verbs).items():
        one = added.add_parser(name, help=verb.help)
        one.reads_configuration = verb.reads_configuration
        if verb.reads_configuration:
            run_arguments(verb.description, parser=one, run_help=verb.run_help)
        one.description, one.formatter_class = verb.description, argparse.RawDescriptionHelpFormatter
        verb.add_arguments(one)
    return parser


def _finetune_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="make every component, compile the largest update and show its memory; write nothing",
    )


def _finetune(parsed: argparse.Namespace, given: Given) -> int:
    return run_parsed(dry_run if parsed.dry_run else finetune, parsed, [sys.argv[0], "finetune", *given])


def _resume_arguments(parser: Parser) -> None:
    parser.add_argument("folder", type=home_path, help="the run directory")
    override_arguments(parser)
    log_arguments(parser)
    processes_arguments(parser)
    parser.set_defaults(resume=True, overwrite=False)


def _resume(parsed: argparse.Namespace, given: Given) -> int:
    return run_main(
        lambda: resume(parsed.folder, parsed.override, parsed),
        title=f"resume {parsed.folder}",
        log_level=parsed.log_level,
        processes=processes_options(parsed),
    )


def _eval_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        help="of every model call; 'own': each call keeps its own (default: 0, greedy)",
    )
    parser.add_argument(
        "--num-generations", type=whole_number, default=1, help="episodes per example (default %(default)s)"
    )
    parser.add_argument(
        "--against",
        metavar="MODEL",
        help="compare with this model: a run directory, a model's folder or its hub id; 'base': the one of the "
        "configuration, which a run begins with",
    )


def _init_arguments(parser: Parser) -> None:
    parser.add_argument("folder", type=home_path, help="the folder to make; its name becomes that of the agent")
    parser.add_argument(
        "--from", dest="logs", type=home_path, metavar="FILE", help="a file of logged rows to train on, and no agent"
    )


def _init(parsed: argparse.Namespace, given: Given) -> int:
    async def run() -> None:
        if parsed.logs is not None:
            write_logged_run = pkgutil.resolve_name("jaxft.components.logged_runs:write_logged_run")
            files = write_logged_run(parsed.logs, parsed.folder).name
        else:
            files = ", ".join(path.name for path in write_agent(parsed.folder))
        there = shlex.quote(str(parsed.folder))
        Console().message(f"wrote {files} to {parsed.folder}\nnext: cd {there} && jaxft finetune --config-file run.yml")

    return run_main(run, title="init")


def _serve_arguments(parser: Parser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("source", nargs="?", type=home_path, help="a run directory, or a model: folder or GGUF file")
    source.add_argument("--config-file", type=home_path, help="the YAML file of a run, of which only llms are read")
    parser.add_argument("--port", type=_port, help="port to listen on; 0: a free one, which is shown")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="serve a run's or folder's LoRA adapters by this name beside their base, the source; may be repeated",
    )
    parser.add_argument(
        "--tinker", action="store_true", help="serve training and sampling to scripts for Tinker instead"
    )
    parser.add_argument(
        "--model-name", metavar="NAME", help="with --tinker, the name that scripts ask for the model by"
    )
    override_arguments(parser)
    log_arguments(parser)


def _launch_arguments(parser: Parser) -> None:
    parser.add_argument("-n", type=whole_number, required=True, help="number of processes")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, as in jaxft eval --config-file run.yml")


def _launch(parsed: argparse.Namespace, given: Given) -> int:
    try:
        return launch(parsed.command, parsed.n)
    except HostsError as error:
        return complain(f"error: {error}", error.exit_code)


def _export_arguments(parser: Parser) -> None:
    parser.add_argument(
        "source", type=home_path, help="a run directory, or a model: folder, GGUF file or id on the hub"
    )
    parser.add_argument("folder", type=home_path, help="the folder to write; empty or not there yet")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights (default float32)")
    parser.add_argument("--merge", action="store_true", help="merge LoRA adapters into their base and write it whole")
    parser.add_argument(
        "--atif", action="store_true", help="write the kept episodes of a run instead, a file of ATIF for each"
    )


def _chat_arguments(parser: Parser) -> None:
    parser.add_argument(
        "source", type=home_path, help="a run directory, or a model: folder, GGUF file or id on the hub"
    )
    parser.add_argument(
        "--temperature",
        type=_number,
        default=1.0,
        help="divisor of the logits, 0 for greedy (default: 1, that of `llm.chat` in training)",
    )
    parser.add_argument(
        "--max-tokens", type=whole_number, help="of an answer (default: as many as the context has room for)"
    )
    parser.add_argument(
        "--context-tokens", type=whole_number, help="of the conversation (default: as in the run, or 4096)"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--seed", type=_seed, help="of all random numbers (default: another one each time)")
    parser.add_argument(
        "--tools", type=home_path, metavar="FILE", help="a file of Python functions that the model may call"
    )
    parser.add_argument(
        "--template-kwargs",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the chat template, as in enable_thinking=false (the value is YAML); may be repeated",
    )


def _doctor_arguments(parser: Parser) -> None:
    parser.add_argument("--config-file", type=home_path, help="a configuration to check as well")
    parser.add_argument(
        "--sharding", action="store_true", help="show how the parameters are split over the devices of a mesh"
    )
    override_arguments(parser)


VERBS = {
    "finetune": Verb(
        help="train as a configuration says",
        description="Trains as the configuration says; the run directory then holds the model, the metrics and a plot.",
        add_arguments=_finetune_arguments,
        run=_finetune,
        reads_configuration=True,
    ),
    "init": Verb(
        help="write a folder with an agent to start from",
        description="""Writes a folder with an agent, its reward, data, configuration and test: a start for one's own.

The agent has the name of the folder. Nothing that exists is overwritten. With --from the folder has a configuration
that trains on logged conversations or preferences, in the form that the first row shows.""",
        add_arguments=_init_arguments,
        run=_init,
    ),
    "resume": Verb(
        help="continue a run",
        description="Continues a run from its newest good checkpoint; it ends as if it had never stopped.",
        add_arguments=_resume_arguments,
        run=_resume,
    ),
    "eval": Verb(
        help="run the agent over a dataset and score it",
        description="""Runs the agent over the dataset, greedily by default, and shows the average of every evaluator.

Of a run directory it takes the configuration, the trained model and, unless a dataset is given, that of its validation.
With --against both models have the same examples and seeds, and the difference of their rewards has an interval.
Trains nothing.""",
        add_arguments=_eval_arguments,
        run="jaxft.components.model_source:run_eval",
        reads_configuration=True,
        run_help="a run directory, whose configuration and trained model are evaluated",
    ),
    "serve": Verb(
        help="serve language models at an address",
        description="""Serves a model to OpenAI's and Anthropic's clients, and trains nothing.

It is that of a run, adapters included, or of any other folder; with --config-file all models of a configuration whose
weights are in this process. The model of a run keeps its name and settings; any other folder's is named `policy`. The
address is that of llms.<name>.serve, or http://127.0.0.1:8000. A signal ends the server, running requests first.""",
        add_arguments=_serve_arguments,
        run="jaxft.components.model_source:run_serve",
    ),
    "launch": Verb(
        help="start a command as several processes of one run, on this machine",
        description="""Starts a command as several processes of one run on this machine, each with some of its devices.

Lines of their output begin with the number of the process. The first one that fails ends the others; a signal goes to
all. On several machines each process is started there, with --coordinator, --num-processes and --process-id.""",
        add_arguments=_launch_arguments,
        run=_launch,
    ),
    "export": Verb(
        help="write a model in Hugging Face's file format, or episodes in ATIF",
        description="""Writes the model of a run, or any other, in Hugging Face's file format and in the dtype given.

With --atif it writes the episodes that the run keeps, in the Agent Trajectory Interchange Format.""",
        add_arguments=_export_arguments,
        run="jaxft.harness.export:run",
    ),
    "chat": Verb(
        help="talk to a model in the terminal",
        description="""Talks to a model in the terminal: streams its answers, and lets it call Python functions.

Without a terminal each line of standard input is a message, and standard output has the answers alone; reasoning, tool
calls and errors go to standard error. /reset begins a new conversation. Nothing is written to the run directory.""",
        add_arguments=_chat_arguments,
        run="jaxft.components.chat_command:run_chat",
    ),
    "doctor": Verb(
        help="show what this machine has, and check it",
        description="Shows versions, components and devices, and checks that this machine can hold a run.",
        add_arguments=_doctor_arguments,
        run="jaxft.harness.doctor:run",
    ),
}
"""The verbs of the inner house; those whose modules import jax are imported when they are called."""


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0.0 <= value < float("inf"):
            return value
    raise argparse.ArgumentTypeError("wants a number that is not below 0")


def _below(limit: int, what: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if text.isdecimal() and int(text) < limit:
            return int(text)
        raise argparse.ArgumentTypeError(f"wants a whole number from 0 to {what}")

    return parse


_seed = _below(2**32, "4294967295")
_port = _below(2**16, "65535")


def _variable(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if name and equals:
        with contextlib.suppress(ConfigError):
            return name, parse_yaml(value, name)
    raise argparse.ArgumentTypeError("wants NAME=VALUE, with a value in YAML")


def _temperature(text: str) -> float | None:
    try:
        return None if text == "own" else _number(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or 'own'") from None


def _version() -> str:
    try:
        return metadata.version("jaxft")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
