"""Seconds that a save blocks the training of tic-tac-toe, beside the seconds of the epoch.

    python benchmarks/checkpoints.py --out benchmarks/results/checkpoints.json

A save should block less than 5 % of an epoch. A checkpoint is taken before every epoch (1.1 M parameters, their
optimiser state and the reference) and written while the epoch runs. About three minutes on two CPU cores, most of it
compilation.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxft.runs.environment import environment

ROOT = Path(__file__).parents[1]
COMPILING = 3
"""First epochs, which compile and are left out."""


def main() -> None:
    """Run the experiment and read its timings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="epochs to train (default %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="file for all results, with versions")
    parser.add_argument("options", nargs="*", help="more options of the experiment, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "experiments" / "tic_tac_toe.py"), "--eval-games", "8"]
        command += ["--warm-start-steps", "50", "-o", "finetuning.output_dir", str(run)]
        command += ["-o", "finetuning.num_epochs", str(arguments.epochs), *arguments.options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()][COMPILING:]
        step = max(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdecimal())
        files = (run / "checkpoints" / str(step)).rglob("*")
        size = sum(path.stat().st_size for path in files if path.is_file())
    blocked = [row["seconds_checkpoint"] for row in rows]
    shares = [row["seconds_checkpoint"] / (row["seconds_checkpoint"] + row["seconds"]) for row in rows]
    median = statistics.median(row["seconds"] for row in rows)
    print(f"a checkpoint has {size / 1e6:.1f} MB; {len(rows)} epochs of {median:.2f} s (median)")
    print(f"blocked {1e3 * statistics.median(blocked):.0f} ms (median; {1e3 * max(blocked):.0f} ms at most)")
    total = sum(blocked) / sum(row["seconds_checkpoint"] + row["seconds"] for row in rows)
    print(f"share of the epoch {statistics.median(shares):.2%} (median; {max(shares):.2%} at most), of all {total:.2%}")
    if arguments.out is not None:
        results = {
            "checkpoint_bytes": size,
            "epoch_seconds": [row["seconds"] for row in rows],
            "blocked_seconds": blocked,
            "median_share": statistics.median(shares),
            "largest_share": max(shares),
            "share_of_all": total,
            "environment": environment(),
        }
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
