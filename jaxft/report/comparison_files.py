"""Files of a comparison: `compare.png`, `compare.html` and `compare.json`, written to a folder of their own."""

from pathlib import Path

from jaxft.errors import RunDirectoryError
from jaxft.files import json_bytes, replace_file
from jaxft.report.compared_runs import COMPARISON_FILE, is_comparison
from jaxft.report.comparison import Comparison, comparison_json
from jaxft.runs.directory import CONFIG_FILE

PICTURE_FILE = "compare.png"
PAGE_FILE = "compare.html"
FOLDER_NAME = "compare"


def default_folder(comparison: Comparison) -> Path:
    """Return the folder `compare` beside the runs, or in `runs` if they lie in different folders."""
    parents = {run.records.path.absolute().parent for run in comparison.runs}
    return (parents.pop() if len(parents) == 1 else Path("runs")) / FOLDER_NAME


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write a comparison to a folder, and return the paths of its files; an earlier comparison there is replaced.

    Raises:
        RunDirectoryError: the folder holds a run, or files of these names that jaxft did not write, or it cannot be
            written.
        DiskFull: there is no room for the files.
    """
    _check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [replace_file(folder / COMPARISON_FILE, json_bytes(comparison_json(comparison), indent=2))]
    except OSError as error:
        raise RunDirectoryError(
            f"the comparison cannot be written to '{folder}' ({error}): give a folder where files can be made, with "
            "--output"
        ) from error


def _check_folder(folder: Path) -> None:
    if (folder / CONFIG_FILE).exists():
        raise RunDirectoryError(f"'{folder}' holds a run: give another folder for the comparison, with --output")
    present = [name for name in (COMPARISON_FILE, PICTURE_FILE, PAGE_FILE) if (folder / name).exists()]
    if present and not is_comparison(folder / COMPARISON_FILE):
        raise RunDirectoryError(
            f"'{folder}' holds {', '.join(present)}, and no {COMPARISON_FILE} of a comparison: nothing was replaced; "
            "give another folder, with --output"
        )
