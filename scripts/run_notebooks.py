"""Executes the notebooks of docs/tutorials/ and stores them with their outputs.

    python scripts/run_notebooks.py [NOTEBOOK ...]

Do so after a change of a notebook, and commit what comes out. Standard error is left out, as it holds warnings and
paths of the machine. `tests/test_notebooks.py` executes them again. About two minutes on two cores.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"


def executed(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with new outputs.

    Raises:
        CellExecutionError: a cell raised an exception.
    """
    notebook = nbformat.read(path, as_version=4)
    os.environ.pop("MPLBACKEND", None)  # pictures are shown in the notebook
    resources = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=600, record_timing=False, coalesce_streams=True, resources=resources).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+/", "", output.text)
    return notebook


if __name__ == "__main__":
    for each in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(TUTORIALS.glob("*.ipynb")):
        nbformat.write(executed(each), each)
        print(each)
