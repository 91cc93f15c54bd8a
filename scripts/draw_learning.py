"""Draws docs/performance/learning.png: the held-out reward of jaxft and of TRL over seconds and over episodes.

    python benchmarks/compare.py learning --out benchmarks/results/learning.json
    python scripts/draw_learning.py benchmarks/results/learning.json docs/performance/learning.png

A thin line is a run, which ends at the target; the bar on the target is the mean over seeds with its interval.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

NAMES = {"jaxft": "jaxft", "trl": "TRL"}


def main() -> None:
    """Draw the picture."""
    found, picture = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    target = found["options"]["target"]
    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    panels = zip(figure.subplots(1, 2, sharey=True), ("seconds", "episodes"), strict=True)
    for axes, measure in panels:
        for number, (side, of_side) in enumerate(found["sides"].items()):
            color = f"C{number}"
            for curve in of_side["curves"]:
                axes.plot(
                    [row[measure] for row in curve], [row["score"] for row in curve], color=color, alpha=0.5, lw=1
                )
            mean, interval = of_side[measure]["mean"], of_side[measure]["interval"]
            if mean is not None:
                spread = [[mean - interval[0]], [interval[1] - mean]]
                label = f"{NAMES[side]}, rate {of_side['rate']:g}: {mean:,.3g} {measure}"
                if measure == "episodes":
                    label = f"{NAMES[side]}: {mean:,.0f} episodes"
                axes.errorbar([mean], [target], xerr=spread, color=color, fmt="o", capsize=4, label=label, zorder=3)
        axes.axhline(target, color="gray", lw=0.8, ls=":")
        axes.set(xlabel=measure, xlim=(0, None))
        axes.legend(loc="upper left")
    figure.axes[0].set_ylabel("held-out reward")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
