"""The verb `compare` of the command line."""

import argparse
import shutil
import sys
from collections.abc import Sequence

from jaxft.files import json_bytes
from jaxft.harness import exit_code_of
from jaxft.report.comparison import compare_runs, comparison_json
from jaxft.report.comparison_files import check_folder, default_folder, write_comparison, write_json
from jaxft.report.comparison_text import comparison_text
from jaxft.runs.console import current_console


def compare(arguments: argparse.Namespace) -> None:
    """Compare runs, show the result and write its files.

    Args:
        arguments: `runs`, `output`, `json`, `x` and `last_epochs` of the command line.

    Raises:
        RunDirectoryError: there is no readable run, or the files cannot be written.
    """
    console = current_console()
    comparison = compare_runs(arguments.runs, last_epochs=arguments.last_epochs)
    folder = default_folder(comparison.runs) if arguments.output is None else arguments.output
    check_folder(folder)  # before the tables, so that a refusal is not at the end of many lines
    console.message(comparison_text(comparison, _width()) + "\n")
    files = write_comparison(comparison, folder, x_axis=arguments.x)
    if arguments.json is not None:
        files.append(write_json(json_bytes(comparison_json(comparison, arguments.x), indent=2), arguments.json))
    console.message("\n".join(f"written to {file}" for file in files))


def run(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Compare runs, and return the exit code."""

    async def main() -> None:
        compare(parsed)

    return exit_code_of(main, title="compare")


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, 80), 200) if sys.stdout.isatty() else 120
