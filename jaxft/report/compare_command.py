"""The verb `compare` of the command line."""

import argparse
import shutil
import sys
from pathlib import Path

from jaxft.errors import CheckFailed, RunDirectoryError
from jaxft.files import json_bytes
from jaxft.report.compared_runs import find_runs
from jaxft.report.comparison import compare_runs, comparison_json, no_runs_message
from jaxft.report.comparison_files import check_folder, default_folder, write_comparison, write_json, write_verdicts
from jaxft.report.comparison_text import comparison_text
from jaxft.report.expected_page import verdict_json, verdict_text
from jaxft.report.references import judge, load_reference
from jaxft.runs.console import Console, current_console


def compare(arguments: argparse.Namespace) -> None:
    """Compare runs, or hold each of them against a reference; show the result and write its files.

    Args:
        arguments: `runs`, `output`, `json`, `x`, `last_epochs` and `expected` of the command line.

    Raises:
        RunDirectoryError: there is no readable run, or the files cannot be written.
        ConfigError: there is no reference of that name.
        CheckFailed: a run is not as expected.
    """
    console = current_console()
    if arguments.expected is not None:
        _hold_against_reference(arguments, console)
        return
    comparison = compare_runs(arguments.runs, last_epochs=arguments.last_epochs)
    folder = default_folder(comparison.runs) if arguments.output is None else arguments.output
    check_folder(folder)  # before the tables, so that a refusal is not at the end of many lines
    console.message(comparison_text(comparison, _width()) + "\n")
    files = write_comparison(comparison, folder, x_axis=arguments.x)
    if arguments.json is not None:
        files.append(write_json(json_bytes(comparison_json(comparison, arguments.x), indent=2), arguments.json))
    _show_files(console, files)


def _hold_against_reference(arguments: argparse.Namespace, console: Console) -> None:
    reference = load_reference(arguments.expected)
    runs, left_out = find_runs(arguments.runs)
    if not runs:
        raise RunDirectoryError(no_runs_message(left_out))
    verdicts = [judge(run, reference) for run in runs]
    folder = default_folder(runs) if arguments.output is None else arguments.output
    check_folder(folder)
    console.message(verdict_text(verdicts, _width()))
    for each in left_out:
        console.message(f"left out: '{each.path}' {each.reason}")
    console.message("")
    files = write_verdicts(verdicts, folder)
    if arguments.json is not None:
        files.append(write_json(json_bytes(verdict_json(verdicts), indent=2), arguments.json))
    _show_files(console, files)
    unexpected = [verdict for verdict in verdicts if not verdict.is_expected]
    if unexpected:
        raise CheckFailed("; ".join(f"'{verdict.run.records.path}' is {verdict.sentence}" for verdict in unexpected))


def _show_files(console: Console, files: list[Path]) -> None:
    console.message("\n".join(f"written to {file}" for file in files))


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, 80), 200) if sys.stdout.isatty() else 120
