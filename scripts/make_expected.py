"""Makes a reference history from runs of one experiment with different seeds, for `jaxft compare --expected`.

    python scripts/make_expected.py tic_tac_toe runs/tic_tac_toe-* --root .

writes jaxft/report/expected/tic_tac_toe.json. The runs have to be finished, of equal settings and of equal length, and
never resumed. Paths below --root are written relative to it; any other absolute path is refused.
"""

import argparse
import sys
from pathlib import Path

from jaxft.errors import JaxftError, RunDirectoryError
from jaxft.files import json_bytes, replace_file
from jaxft.report.compared_runs import find_runs
from jaxft.report.comparison import no_runs_message
from jaxft.report.references import make_reference

FOLDER = Path(__file__).parents[1] / "jaxft" / "report" / "expected"


def main() -> int:
    """Make the file, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="name of the reference, that of the experiment")
    parser.add_argument("runs", nargs="+", help="run directories, or globs")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout that the runs were made in")
    parser.add_argument("--output", type=Path, metavar="FILE", help="another file than that of the package")
    arguments = parser.parse_args()
    try:
        runs, left_out = find_runs(arguments.runs)
        if left_out or not runs:
            raise RunDirectoryError(no_runs_message(left_out))
        reference = make_reference(arguments.name, runs, arguments.root)
    except JaxftError as error:
        print(f"make_expected.py: error: {error}", file=sys.stderr)
        return error.exit_code
    file = arguments.output or FOLDER / f"{arguments.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json_bytes(reference))
    print(f"written to {file}: seeds {', '.join(str(run.seed) for run in runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
