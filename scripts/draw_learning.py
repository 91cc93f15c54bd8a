"""Draws docs/performance/learning.png: the held-out reward of jaxft and its peers over seconds and over episodes.

    python benchmarks/compare.py learning --out benchmarks/results/learning.json
    python scripts/draw_learning.py benchmarks/results/learning.json docs/performance/learning.png

Sides of several results, one file after the other, come into one picture, the last argument. A line is a run, which
ends at the first look that has the target, a dot. The bar is the mean over seeds with its interval, where all of them
got there.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

NAMES = {"jaxft": "jaxft", "trl": "TRL", "tunix": "Tunix"}


def main() -> None:
    """Draw the picture."""
    *paths, picture = map(Path, sys.argv[1:])
    found = [json.loads(path.read_text()) for path in paths]
    (target,) = {each["options"]["target"] for each in found}
    sides = {side: of_side for each in found for side, of_side in each["sides"].items()}
    if len(sides) < sum(len(each["sides"]) for each in found):
        sys.exit("a side is in several of the results: draw each side from one")
    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    panels = zip(figure.subplots(1, 2, sharey=True), ("seconds", "episodes"), strict=True)
    for axes, measure in panels:
        for number, (side, of_side) in enumerate(sides.items()):
            color, about = f"C{number}", of_side[measure]
            there = [value for value in about["values"] if value is not None]
            median = "never" if about["median"] is None else f"{about['median']:,.0f}"
            label = f"{NAMES[side]}: median {median}, {len(there)} of {len(about['values'])} seeds"
            for curve, value in zip(of_side["curves"], about["values"], strict=True):
                axes.plot(
                    [row[measure] for row in curve], [row["score"] for row in curve], color=color, alpha=0.5, lw=1
                )
                if value is not None:
                    axes.plot(value, curve[-1]["score"], "o", color=color, label=label)
                    label = None
            if about["mean"] is not None:
                mean, (low, high) = about["mean"], about["interval"]
                axes.errorbar(
                    [mean], [target], xerr=[[mean - low], [high - mean]], color=color, fmt="|", capsize=4, lw=2
                )
        axes.axhline(target, color="gray", lw=0.8, ls=":")
        axes.set(xlabel=measure, xlim=(0, None))
        axes.legend(loc="lower right")
    figure.axes[0].set_ylabel("held-out reward")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
