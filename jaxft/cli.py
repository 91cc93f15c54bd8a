"""The command line: `jaxft finetune --config_file run.yml`. Nothing here, nor what it imports, imports jax."""

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

from jaxft.harness.config import help_text
from jaxft.harness.runtime import finetune, run_arguments, run_script

DESCRIPTION = "Finetune the language model inside an agent, in the process the agent runs in."
FINETUNE = "Trains as the configuration says, and leaves a run directory with the model, the metrics and a plot."


class _VerbParser(argparse.ArgumentParser):
    """The parser of a verb; its help ends with every knob of the configuration."""

    def format_help(self) -> str:
        return f"{super().format_help()}\n{help_text()}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the verb that the command line names; the exit code.

    Args:
        arguments: by default those of the process.
    """
    parser = argparse.ArgumentParser(prog="jaxft", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"jaxft {_version()}")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=_VerbParser)
    run_arguments(FINETUNE, parser=verbs.add_parser("finetune", help="train as a configuration says"))
    return run_script(finetune, parser, arguments)


def _version() -> str:
    try:
        return metadata.version("jaxft")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
