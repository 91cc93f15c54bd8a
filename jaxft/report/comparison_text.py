"""Text of a comparison for a terminal: tables of settings and figures, notes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from jaxft.report.comparison import Comparison, MeanEstimate
from jaxft.report.intervals import RESAMPLES, Interval
from jaxft.report.pages import number, shortened

MAX_CELL = 44
"""Longest cell of a table; a longer one is cut."""

MAX_LINES = 20
"""Largest number of notes, and of paths that were left out, that are shown; all stand in compare.json."""

DESCRIPTIONS = {
    "final_reward": "final reward",
    "best_validation_reward": "best validation reward",
    "best_validation_epoch": "  after epochs",
    "epochs": "epochs",
    "seconds": "seconds",
    "tokens_per_second": "tokens per second, median",
}
"""Words for figures; those of `result.json` keep their names."""


def comparison_text(comparison: Comparison, width: int = 120) -> str:
    """Return the tables of a comparison as aligned lines, most of them no longer than `width` characters."""
    names = [group.name for group in comparison.groups]
    parts = [overview(comparison)]
    if comparison.left_out:
        left_out = [f"'{each.path}' {each.reason}" for each in comparison.left_out]
        parts.append(f"Left out: {len(left_out)}\n" + _list_lines(left_out))
    if comparison.differences:
        rows = [[each.path + " *" * (not each.has_effect), *each.values] for each in comparison.differences]
        text = "Settings that differ\n" + aligned([["", *names], *rows], width)
        unsaid = any(not each.has_effect for each in comparison.differences)
        parts.append(text + "\n* has no effect on what is trained, or is no setting" * unsaid)
    elif len(comparison.runs) > 1:
        parts.append("No setting differs but the seed.")
    parts.append(f"{figures_title(comparison)}\n" + aligned([["", *names], *figure_rows(comparison)], width))
    if comparison.notes:
        parts.append("Notes\n" + _list_lines(comparison.notes))
    return "\n\n".join(parts)


def overview(comparison: Comparison) -> str:
    """Return how many runs and groups there are, and how the runs ended, in one line."""
    counts = Counter(run.status for run in comparison.runs)
    resumed = sum(run.resumes > 0 for run in comparison.runs)
    ended = [f"{counts[status]} {status}" for status in ("finished", "failed", "unfinished") if counts[status]]
    ended += [f"{resumed} resumed"] if resumed else []
    runs, groups = len(comparison.runs), len(comparison.groups)
    return f"{runs} run{'s' * (runs != 1)} in {groups} group{'s' * (groups != 1)}: {', '.join(ended)}"


def figures_title(comparison: Comparison) -> str:
    """Return the title of the table of figures, which says how they are made."""
    return (
        f"Figures: mean over seeds [95 % bootstrap interval, {RESAMPLES:,} resamples]; "
        f"final reward: mean of the last {comparison.last_epochs} epochs"
    )


def figure_rows(comparison: Comparison) -> list[list[str]]:
    """Return a row for each figure, with its name and a cell per group."""
    rows = [["finished runs", *(f"{len(group.finished)} of {len(group.runs)}" for group in comparison.groups)]]
    rows.append(["seeds", *(seeds(run.seed for run in group.finished) for group in comparison.groups)])
    rows += [[DESCRIPTIONS.get(name, name), *map(cell, each)] for name, each in comparison.figures.items()]
    return rows


def cell(estimate: MeanEstimate | None) -> str:
    """Return the mean with its interval; a dash where no run has the figure."""
    return "–" if estimate is None else with_interval(estimate.mean, estimate.interval)


def with_interval(value: float, interval: Interval | None) -> str:
    """Return a number with its interval in brackets, if it has one that is wider than the number.

    >>> with_interval(0.5, Interval(0.25, 0.75)), with_interval(0.5, None)
    ('0.5 [0.25, 0.75]', '0.5')
    """
    if interval is None or interval.low == interval.high == value:
        return number(value)
    return f"{number(value)} [{number(interval.low)}, {number(interval.high)}]"


def seeds(values: Iterable[int | None]) -> str:
    """Return seeds in words, consecutive ones as a range.

    >>> seeds([0, 1, 2, 5]), seeds([]), seeds([None])
    ('0-2, 5', '–', 'none')
    """
    known = list(values)
    ordered = enumerate(sorted(value for value in known if value is not None))
    # In a range, all values are ahead of their places by the same number.
    ranges = [[value for _, value in each] for _, each in groupby(ordered, lambda pair: pair[1] - pair[0])]
    words = [str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in ranges]
    return ", ".join(words + ["none"] * (None in known)) or "–"


def aligned(rows: Sequence[Sequence[str]], width: int) -> str:
    """Return rows as aligned columns; those that do not fit the width follow below, beside the first column again."""
    cut = [[shortened(cell.replace("\n", " "), MAX_CELL) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cut) for column in range(len(cut[0]))]
    blocks, columns = [], [0]
    for column in range(1, len(widths)):
        taken = sum(widths[each] + 2 for each in columns)
        if len(columns) > 1 and taken + widths[column] > width:
            blocks.append(columns)
            columns = [0]
        columns.append(column)
    blocks.append(columns)
    return "\n\n".join(
        "\n".join("  ".join(row[each].ljust(widths[each]) for each in block).rstrip() for row in cut)
        for block in blocks
    )


def _list_lines(lines: Sequence[str]) -> str:
    more = [f"... and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return "\n".join([f"- {line}" for line in lines[:MAX_LINES]] + more)
