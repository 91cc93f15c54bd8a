"""Files of comparisons: a picture, a page and JSON, in a folder of their own.

Files that jaxft did not write are never replaced: the JSON file of an earlier comparison marks the folder as its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxft.errors import RunDirectoryError
from jaxft.files import json_bytes, replace_file
from jaxft.report.compared_runs import COMPARISON_FILE, ComparedRun, is_ours
from jaxft.report.comparison import Comparison, comparison_json
from jaxft.report.comparison_page import comparison_page
from jaxft.report.comparison_plots import comparison_png
from jaxft.runs.files import CONFIG_FILE

FOLDER_NAME = "compare"


def default_folder(runs: Sequence[ComparedRun]) -> Path:
    """Return the folder `compare` beside the runs, or `runs/compare` if they lie in different folders."""
    parents = {run.records.path.absolute().parent for run in runs}
    return (parents.pop() if len(parents) == 1 else Path("runs")) / FOLDER_NAME


def write_comparison(comparison: Comparison, folder: Path, *, x_axis: str = "epochs") -> list[Path]:
    """Write `compare.json`, `compare.png` and `compare.html`, and return their paths.

    Args:
        comparison: the comparison.
        folder: a folder of its own, made if missing, in which an earlier comparison is replaced; `default_folder`
            names one.
        x_axis: what the curves are drawn over, a key of `comparison_curves.X_AXES`.

    Raises:
        RunDirectoryError: the folder holds a run, or files of these names that jaxft did not write, or it cannot be
            written.
        DiskFull: there is no room for the files.
    """
    check_folder(folder)
    return _write(folder, {
        COMPARISON_FILE: json_bytes(comparison_json(comparison, x_axis), indent=2),
        "compare.png": comparison_png(comparison, x_axis),
        "compare.html": comparison_page(comparison, x_axis).encode("utf-8", "backslashreplace"),
    })  # fmt: skip


def write_json(content: bytes, file: Path) -> Path:
    """Write JSON to a file of the user's choice, and return its path; only an earlier one of jaxft is replaced.

    Raises:
        RunDirectoryError: the file is of other origin, or cannot be written.
        DiskFull: there is no room for it.
    """
    if file.exists() and not is_ours(file):
        raise RunDirectoryError(f"'{file}' is no comparison of jaxft, and is not replaced: give another --json")
    return _write(file.parent, {file.name: content}, option="--json")[0]


def check_folder(folder: Path) -> None:
    """Raise unless comparisons may be written to a folder.

    Raises:
        RunDirectoryError: it holds a run, or files of a comparison's names that jaxft did not write.
    """
    if (folder / CONFIG_FILE).exists():
        raise RunDirectoryError(f"'{folder}' holds a run: give another folder for the comparison, with --output")
    present = [name for name in (COMPARISON_FILE, "compare.png", "compare.html") if (folder / name).exists()]
    if present and not is_ours(folder / COMPARISON_FILE):
        raise RunDirectoryError(
            f"'{folder}' holds {', '.join(present)}, but no {COMPARISON_FILE} of jaxft: nothing was replaced; give "
            "another folder, with --output"
        )


def _write(folder: Path, files: Mapping[str, bytes], option: str = "--output") -> list[Path]:
    """Write files in their order; the first marks the folder as ours, so that a write that was cut off is repeated."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [replace_file(folder / name, content) for name, content in files.items()]
    except OSError as error:
        raise RunDirectoryError(
            f"nothing can be written to '{folder}' ({error}): give a place where files can be made, with {option}"
        ) from error
