"""Draws docs/overlap.png: the training reward of arithmetic.py by staleness, with and without a ratio to the sampler.

    python experiments/arithmetic.py --set trainers.loop.max_staleness=1 --set finetuning.output_dir=runs/one
    python experiments/arithmetic.py --set trainers.loop.max_staleness=4 --set finetuning.output_dir=runs/four
    python experiments/arithmetic.py --set trainers.loop.max_staleness=4 --set finetuning.output_dir=runs/none \\
        --set trainer_adapters.local.loss.correction.name=none
    python scripts/draw_overlap.py runs/one runs/four runs/none docs/overlap.png

`max_staleness: 0` is the mean of the five seeds of the reference that the package has.
"""

import json
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure

REFERENCE = Path(__file__).parents[1] / "jaxft" / "report" / "expected" / "arithmetic.json"
NAMES = ("max_staleness 1", "max_staleness 4", "max_staleness 4, correction none")


def main() -> None:
    """Draw the picture."""
    *runs, picture = map(Path, sys.argv[1:])
    seeds = [run["reward_mean"] for run in json.loads(REFERENCE.read_text())["runs"]]
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    columns = list(zip(*seeds, strict=True))
    epochs = range(len(columns))
    axes.fill_between(epochs, [min(each) for each in columns], [max(each) for each in columns], alpha=0.2, color="gray")
    axes.plot(epochs, [statistics.fmean(each) for each in columns], color="gray", label="max_staleness 0, five seeds")
    for name, run in zip(NAMES, runs, strict=True):
        rows = [json.loads(line) for line in (run / "training_metrics.jsonl").read_text().splitlines()]
        axes.plot([row["epoch"] for row in rows], [row["reward_mean"] for row in rows], label=name)
    axes.set(xlabel="epoch", ylabel="mean training reward", title="Sums of two numbers, on earlier samples")
    axes.legend(loc="center right")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
