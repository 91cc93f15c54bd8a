"""Draws docs/algorithms_arithmetic.png from the tables of docs/experiments.md: each seed's score, mean and interval.

python scripts/draw_algorithms.py
"""

import re
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from jaxft.report.intervals import mean_interval

DOCS = Path(__file__).parents[1] / "docs"
SECTION = "## Nine algorithms"
TABLES = {"learning rate 1e-3": "configuration of `loss`", "learning rate 3e-4": "| algorithm | after |"}
"""Words in the head of each table, by the label of its points."""


def main() -> None:
    """Draw the picture."""
    section = (DOCS / "experiments.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    found = {label: scores_of(section, head) for label, head in TABLES.items()}
    every = dict.fromkeys(name for by_name in found.values() for name in by_name)
    best = {name: max(fmean(by_name[name]) for by_name in found.values() if name in by_name) for name in every}
    names = sorted(best, key=lambda name: best[name])
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, (label, by_name) in enumerate(found.items()):
        for name, scores in by_name.items():
            height, color = names.index(name) + 0.15 - 0.3 * number, f"C{number}"
            axes.plot(scores, [height] * len(scores), "o", color=color, alpha=0.4, ms=4)
            interval, mean = mean_interval(scores), fmean(scores)
            assert interval is not None
            axes.errorbar(
                [mean],
                [height],
                xerr=[[mean - interval.low], [interval.high - mean]],
                fmt="|",
                ms=10,
                color=color,
                capsize=3,
                label=label if name == next(iter(by_name)) else None,
            )
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="exact match after 20 epochs, five seeds", xlim=(0, 1))
    figure.legend(loc="outside upper center", ncols=len(found))
    figure.savefig(DOCS / "algorithms_arithmetic.png")


def scores_of(section: str, head: str) -> dict[str, list[float]]:
    """Return the scores by seed of each algorithm in the table whose head has these words."""
    table = section[section.index(head) :].partition("\n\n")[0]
    scores = {}
    for line in table.splitlines()[2:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        by_seed = next(cell for cell in cells if re.fullmatch(r"(0\.\d+(, )?){5}", cell))
        scores[name] = [float(score) for score in by_seed.split(", ")]
    return scores


if __name__ == "__main__":
    main()
