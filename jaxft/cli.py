"""The command line: `jaxft finetune --config-file run.yml`. Importing this module imports no jax."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata

from jaxft.errors import ConfigError, HostsError
from jaxft.files import home_path
from jaxft.harness.commands import dry_run, evaluate, finetune, resume, serve
from jaxft.harness.config import help_text, load_config, load_models
from jaxft.harness.config_merge import read_layers
from jaxft.harness.new_agent import write_agent
from jaxft.harness.process import OptionParser
from jaxft.harness.runtime import (
    exit_code_of,
    log_arguments,
    override_arguments,
    processes_arguments,
    processes_of,
    run_arguments,
    run_script,
    run_sweep,
)
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.harness.sweep import Program, sweep_arguments
from jaxft.hosts.launch import launch
from jaxft.report.command import report, report_arguments
from jaxft.runs.console import Console

DESCRIPTION = "Finetune the language model inside an agent, in the process the agent runs in."
FINETUNE = "Trains as the configuration says; the run directory then holds the model, the metrics and a plot."
RESUME = "Continues a run from its newest good checkpoint; it ends as if it had never stopped."
EVAL = "Runs the agent over the dataset, greedily by default, and shows the average of every evaluator. Trains nothing."
SWEEP = """Trains a grid of configurations, each run in a process of its own, and compares them.

    jaxft sweep --config-file run.yml --seeds 3 --set trainer_adapters.local.loss.name=grpo,dapo --jobs 2

In --set a comma separates alternatives; one inside of quotes, brackets or braces belongs to the value. The same command
goes on with a sweep that was stopped: it skips finished runs, continues interrupted ones and repeats failed ones. With
--resume it also continues runs whose configuration has changed since."""
EXPORT = "Writes the model of a run, or any other model, in Hugging Face's file format and in the dtype given."
CHAT = """Talks to a model in the terminal: streams its answers, and lets it call Python functions.

Without a terminal each line of standard input is a message, and standard output has the answers alone; reasoning, tool
calls and errors go to standard error. /reset begins a new conversation. Nothing is written to the run directory."""
PLAN = """Says what a run needs of accelerators that are not here: memory by purpose, work, communication, least times.

The compilers for GPUs and TPUs compile the run's programs for them, without a device; scripts/make_compilers.sh gets
them. Without compilers, figures follow from shapes and sharding rules, and are marked as estimated."""
SERVE = """Serves a model to OpenAI's and Anthropic's clients, and trains nothing.

It is that of a run, adapters included, or of any other folder; with --config-file all models of a configuration whose
weights are in this process. The model of a run keeps its name and settings; any other folder's is named `policy`. The
address is that of llms.<name>.serve, or http://127.0.0.1:8000. A signal ends the server, running requests first."""
LAUNCH = """Starts a command as several processes of one run on this machine, with a part of its devices each.

Lines of their output begin with the number of the process. The first one that fails ends the others; a signal goes to
all. On several machines each process is started there, with --coordinator, --num-processes and --process-id."""
REPORT = """Writes the report of a run as one HTML file: curves, rewards, episodes, timings, configuration and faults.

The file needs no network. The run may be going on: nothing is locked, and --watch follows it to its end."""
COMPARE = """Compares runs, folded over their seeds: settings that differ, figures with 95 % intervals, and curves.

Writes compare.html, compare.png and compare.json to a folder `compare` beside the runs, or to runs/compare if they lie
in different folders."""
INIT = """Writes a folder with an agent, its reward, data, configuration and test: a start for one's own.

The agent has the name of the folder. Nothing that exists is overwritten."""
DOCTOR = "Shows versions, components and devices, and checks that this machine can hold a run."

NEXT = "jaxft finetune --config-file run.yml"


class _VerbParser(OptionParser):
    """The parser of one verb; if the verb reads a configuration, its help ends with every field of it."""

    reads_configuration = False

    def format_help(self) -> str:
        return f"{super().format_help()}\n{help_text()}\n" if self.reads_configuration else super().format_help()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the verb that the command line names, and return the exit code.

    Args:
        arguments: the command line; by default that of the process.
    """
    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions, and has the extra
        import argcomplete

        argcomplete.autocomplete(parser)
    parsed = parser.parse_args(arguments)
    if parsed.verb == "finetune":
        return run_script(dry_run if parsed.dry_run else finetune, parser, arguments)
    if parsed.verb == "eval":
        return run_script(evaluate, parser, arguments)
    if parsed.verb == "launch":
        try:
            return launch(parsed.command, parsed.n)
        except HostsError as error:
            print(f"jaxft: error: {error}", file=sys.stderr)
            return error.exit_code
    if parsed.verb == "sweep":
        # -P: unlike the command `jaxft`, `python -m` would let modules in the working directory hide installed ones.
        program = Program(
            (sys.executable, "-P", "-m", "jaxft.cli", "finetune"), ("jaxft", "finetune"), ("jaxft", "sweep")
        )
        given = list(sys.argv[1:] if arguments is None else arguments)
        given.remove("sweep")
        return run_sweep(program, parsed, given)

    async def run() -> None:
        if parsed.verb in ("chat", "serve"):
            from jaxft.shipped.chat_command import chat  # imports jax, which --help does without
            from jaxft.shipped.model_source import models_of

            if parsed.verb == "chat":
                await chat(parsed)
                return
            source = parsed.source or parsed.config_file
            models = read_layers(source) if parsed.source is None else models_of(source)
            await serve(load_models(models, parsed.override, str(source)), parsed.port)
            return
        if parsed.verb == "init":
            files = ", ".join(path.name for path in write_agent(parsed.folder))
            Console().message(f"wrote {files} to {parsed.folder}\nnext: cd {shlex.quote(str(parsed.folder))} && {NEXT}")
            return
        if parsed.verb == "resume":
            await resume(parsed.folder, parsed.override, parsed)
            return
        if parsed.verb == "compare":
            from jaxft.report.compare_command import compare  # imports matplotlib

            compare(parsed)
            return
        if parsed.verb == "plan":
            from jaxft.planning.plan import plan  # imports jax as well

            run_config = load_config(parsed.config_file, parsed.override)
            plan(run_config, parsed.target, parsed.compiler, Console().message)
            return
        if parsed.verb == "report":
            await report(parsed, Console().message)
            return
        if parsed.verb == "export":
            from jaxft.harness.export import export  # imports jax as well

            export(parsed.source, parsed.folder, parsed.dtype, merge=parsed.merge)
        else:
            config = None if parsed.config_file is None else load_config(parsed.config_file, parsed.override)
            from jaxft.harness.doctor import doctor  # imports jax as well

            doctor(config, sharding=parsed.sharding)

    if parsed.verb == "resume":
        processes = processes_of(parsed)
        return exit_code_of(run, title=f"resume {parsed.folder}", log_level=parsed.log_level, processes=processes)
    if parsed.verb == "serve":
        return exit_code_of(run, title=f"serve {parsed.source or parsed.config_file}", log_level=parsed.log_level)
    if parsed.verb == "chat":
        # Standard output is for the answers.
        title = f"chat {parsed.source}" if sys.stdin.isatty() else None
        return exit_code_of(run, title=title, log_level="warning", on_stderr=True)
    return exit_code_of(run, title=parsed.verb)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="jaxft", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"jaxft {_version()}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_VerbParser)

    training = verbs.add_parser("finetune", help="train as a configuration says")
    training.reads_configuration = True
    run_arguments(FINETUNE, parser=training).add_argument(
        "--dry-run",
        action="store_true",
        help="make every component, compile the largest update and show its memory; write nothing",
    )

    beginning = verbs.add_parser("init", help="write a folder with an agent to start from")
    beginning.description, beginning.formatter_class = INIT, argparse.RawDescriptionHelpFormatter
    beginning.add_argument("folder", type=home_path, help="the folder to make; its name becomes that of the agent")

    continuing = verbs.add_parser("resume", help="continue a run", description=RESUME)
    continuing.add_argument("folder", type=home_path, help="the run directory")
    override_arguments(continuing)
    log_arguments(continuing)
    processes_arguments(continuing)
    continuing.set_defaults(resume=True, overwrite=False)

    sweeping = verbs.add_parser("sweep", help="train a grid of configurations, and compare the runs")
    sweep_arguments(run_arguments(SWEEP, parser=sweeping))

    evaluating = verbs.add_parser("eval", help="run the agent over a dataset and score it")
    evaluating.reads_configuration = True
    run_arguments(EVAL, parser=evaluating)
    evaluating.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        help="of every model call; 'own': each call keeps its own (default: 0, greedy)",
    )
    evaluating.add_argument(
        "--num-generations", type=_count, default=1, help="episodes per example (default %(default)s)"
    )

    serving = verbs.add_parser("serve", help="serve language models at an address")
    serving.description, serving.formatter_class = SERVE, argparse.RawDescriptionHelpFormatter
    served = serving.add_mutually_exclusive_group(required=True)
    served.add_argument("source", nargs="?", type=home_path, help="a run directory, or the folder of a model")
    served.add_argument("--config-file", type=home_path, help="the YAML file of a run, of which only llms are read")
    serving.add_argument("--port", type=_port, help="port to listen on; 0: a free one, which is shown")
    override_arguments(serving)
    log_arguments(serving)

    launching = verbs.add_parser("launch", help="start a command as several processes of one run, on this machine")
    launching.description, launching.formatter_class = LAUNCH, argparse.RawDescriptionHelpFormatter
    launching.add_argument("-n", type=_count, required=True, help="number of processes")
    launching.add_argument(
        "command", nargs=argparse.REMAINDER, help="the command, as in jaxft eval --config-file run.yml"
    )

    writing = verbs.add_parser("export", help="write a model in Hugging Face's file format", description=EXPORT)
    writing.add_argument("source", type=home_path, help="a run directory, the folder of a model, or its id on the hub")
    writing.add_argument("folder", type=home_path, help="the folder to write; empty or not there yet")
    writing.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (default %(default)s)"
    )
    writing.add_argument("--merge", action="store_true", help="merge LoRA adapters into their base and write it whole")

    _chat_arguments(verbs.add_parser("chat", help="talk to a model in the terminal"))

    _compare_arguments(verbs.add_parser("compare", help="compare runs"))

    planning = verbs.add_parser("plan", help="say what a run needs of accelerators that are not here")
    planning.description, planning.formatter_class = PLAN, argparse.RawDescriptionHelpFormatter
    planning.add_argument("--config-file", type=home_path, required=True, help="the YAML file of the run")
    planning.add_argument(
        "--target", required=True, help="accelerators: h200x1, h100x8, v5e-8, v6e-8, v5p-16 and others"
    )
    planning.add_argument(
        "--compiler",
        type=home_path,
        metavar="PATH",
        help="Python of the environment with the compilers (default: that of scripts/make_compilers.sh)",
    )
    override_arguments(planning)

    report_arguments(verbs.add_parser("report", help="write a page about a run"), REPORT)

    checking = verbs.add_parser("doctor", help="show what this machine has, and check it", description=DOCTOR)
    checking.add_argument("--config-file", type=home_path, help="a configuration to check as well")
    checking.add_argument(
        "--sharding", action="store_true", help="show how the parameters are split over the devices of a mesh"
    )
    override_arguments(checking)
    return parser


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = COMPARE, argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or quoted globs as in 'runs/sweep/*'")
    parser.add_argument("--output", type=home_path, metavar="DIR", help="folder of the files (default: as above)")
    parser.add_argument("--json", type=home_path, metavar="FILE", help="a file that gets the JSON as well")
    parser.add_argument(
        "--x", choices=("epochs", "episodes", "seconds", "tokens"), default="epochs",
        help="what curves are drawn over (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--last-epochs",
        type=_count,
        metavar="K",
        help="the final reward is the mean of the last K epochs (default: a tenth of the shortest run, 3 to 25)",
    )


def _chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = CHAT, argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", type=home_path, help="a run directory, the folder of a model, or its id on the hub")
    parser.add_argument(
        "--temperature",
        type=_number,
        default=1.0,
        help="divisor of the logits, 0 for greedy (default: 1, that of `llm.chat` in training)",
    )
    parser.add_argument("--max-tokens", type=_count, help="of an answer (default: as many as the context has room for)")
    parser.add_argument("--context-tokens", type=_count, help="of the conversation (default: as in the run, or 4096)")
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


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0.0 <= value < float("inf"):
            return value
    raise argparse.ArgumentTypeError("wants a number that is not below 0")


def _seed(text: str) -> int:
    if text.isdecimal() and int(text) < 2**32:
        return int(text)
    raise argparse.ArgumentTypeError("wants a whole number from 0 to 4294967295")


def _port(text: str) -> int:
    if text.isdecimal() and int(text) < 2**16:
        return int(text)
    raise argparse.ArgumentTypeError("wants a whole number from 0 to 65535")


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


def _count(text: str) -> int:
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError("wants a whole number, at least 1")


def _version() -> str:
    try:
        return metadata.version("jaxft")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
