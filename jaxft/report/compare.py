"""The verb `compare`, and the files of a comparison: a page and JSON."""

import argparse
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from jaxft.errors import RunDirectoryError
from jaxft.files import json_bytes, replace_file
from jaxft.harness import run_main
from jaxft.report.charts import NUM_COLORS, SMALL, WIDE, Band, Line, line_chart
from jaxft.report.compared_runs import ComparedRun
from jaxft.report.comparison import Comparison, compare_runs, comparison_json
from jaxft.report.comparison_curves import CURVES, REWARD, VALIDATION, group_curves, run_curve
from jaxft.report.comparison_text import comparison_text, figure_rows, figures_title, overview
from jaxft.report.pages import render_page
from jaxft.report.run_groups import RunGroup
from jaxft.runs import CONFIG_FILE, current_console

FOLDER_NAME = "compare"
COMPARISON_FILE = "compare.json"
PAGE_FILE = "compare.html"


def run(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Compare the runs that the command line names, show the result, write its files, and return the exit code."""

    async def compare() -> None:
        console = current_console()
        if parsed.x is not None:
            warnings.warn("--x has no effect: curves are over epochs", FutureWarning, stacklevel=2)
        comparison = compare_runs(parsed.runs, last_epochs=parsed.last_epochs)
        folder = default_folder(comparison.runs) if parsed.output is None else parsed.output
        console.message(comparison_text(comparison, console.columns) + "\n")
        files = write_comparison(comparison, folder)
        console.message("\n".join(f"written to {file}" for file in files))

    return run_main(compare, title="compare")


def default_folder(runs: Sequence[ComparedRun]) -> Path:
    """Return the folder `compare` beside the runs, or `runs/compare` if they lie in different folders."""
    parents = {run.records.path.absolute().parent for run in runs}
    return (parents.pop() if len(parents) == 1 else Path("runs")) / FOLDER_NAME


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write `compare.json` and `compare.html`, and return their paths.

    Args:
        comparison: the comparison.
        folder: a folder of its own, made if missing, in which an earlier comparison is replaced; `default_folder`
            names one.

    Raises:
        RunDirectoryError: the folder holds a run, or it cannot be written.
        DiskFull: there is no room for the files.
    """
    if (folder / CONFIG_FILE).exists():
        raise RunDirectoryError(f"'{folder}' holds a run: give another folder for the comparison, with --output")
    files = {
        COMPARISON_FILE: json_bytes(comparison_json(comparison), indent=2),
        PAGE_FILE: comparison_page(comparison).encode("utf-8", "backslashreplace"),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [replace_file(folder / name, content) for name, content in files.items()]
    except OSError as error:
        raise RunDirectoryError(
            f"nothing can be written to '{folder}' ({error}): give a place where files can be made, with --output"
        ) from error


def comparison_page(comparison: Comparison) -> str:
    """Return the page as one HTML document that loads nothing."""
    runs = [run for group in drawn_groups(comparison) for run in group.runs]
    known = [name for name in CURVES if any(run_curve(run, name) for run in runs)]
    return render_page(
        "comparison.html",
        comparison=comparison,
        title=f"Comparison of {len(comparison.runs)} {'run' if len(comparison.runs) == 1 else 'runs'}",
        overview=overview(comparison),
        rewards=[_chart(comparison, name, WIDE) for name in (REWARD, VALIDATION) if name in known],
        note=curves_note(comparison),
        figures_title=figures_title(comparison),
        figure_rows=figure_rows(comparison),
        others=[_chart(comparison, name) for name in known if name not in (REWARD, VALIDATION)],
    )


def _chart(comparison: Comparison, metric: str, size: tuple[int, int] = SMALL) -> Markup:
    lines, bands = _drawn(comparison, metric)
    return line_chart(CURVES[metric], lines, bands, x_label="epochs", size=size)


def _drawn(comparison: Comparison, metric: str) -> tuple[list[Line], list[Band]]:
    """Return the curves of a metric, one with a name for each group before those of single runs, and the bands."""
    lines, singles, bands = [], [], []
    for color, group in enumerate(drawn_groups(comparison)):
        curves = group_curves(group, metric)
        name = f"{group.name} ({seeds_text(len(group.finished))})"
        if curves.epochs:
            lines.append(Line(name, curves.epochs, curves.means, color))
            name = ""  # else the first run that did not finish has it
        if curves.lows is not None and curves.highs is not None:
            bands.append(Band("", curves.epochs, curves.lows, curves.highs, color))
        for run, curve in curves.singles:
            if run.status != "finished":
                singles.append(Line(name, list(curve), list(curve.values()), color, "dashed"))
                name = ""
            elif len(group.finished) > 1:
                singles.append(Line("", list(curve), list(curve.values()), color, "faint"))
    return [*lines, *singles], bands


def drawn_groups(comparison: Comparison) -> tuple[RunGroup, ...]:
    """Return the groups that are drawn: all, or as many as there are colours, those with the highest final reward."""
    if len(comparison.groups) <= NUM_COLORS:
        return comparison.groups
    rewards = comparison.figures.get("final_reward", (None,) * len(comparison.groups))
    means = [-math.inf if reward is None else reward.mean for reward in rewards]
    best = sorted(range(len(means)), key=means.__getitem__, reverse=True)[:NUM_COLORS]
    return tuple(comparison.groups[at] for at in sorted(best))


def curves_note(comparison: Comparison) -> str:
    """Return how the curves are drawn, and which groups, in a sentence or two."""
    drawn, count = len(drawn_groups(comparison)), len(comparison.groups)
    note = "Band: 95 % bootstrap interval of the mean over seeds. Thin: single seeds. Dashed: runs that did not finish."
    return note + (f" The {drawn} groups of {count} with the highest final reward are drawn." if drawn < count else "")


def seeds_text(count: int) -> str:
    """Return a number of seeds in words."""
    return "none finished" if count == 0 else "1 seed" if count == 1 else f"{count} seeds"
