"""The distribution of a run's rewards over its epochs, and its hardest examples."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from markupsafe import Markup

from jaxft.report.charts import Value, heat_map, is_finite
from jaxft.report.pages import number
from jaxft.report.samples import EpisodePlace, questions
from jaxft.runs import RunRecords

Rewards = dict[str, list[Value]]

MAX_COLUMNS = 60
"""Largest number of columns of the distribution; with more epochs, neighbours share a column."""
MAX_LISTED = 15
MAX_QUESTION = 120
"""Largest number of characters of a question in a table."""
MAX_VALUES = 12
"""Largest number of different rewards that have a row each in the distribution; more are put into as many ranges."""


def rewards(run: RunRecords, places: Sequence[EpisodePlace]) -> dict[str, Any] | None:
    """Return the chart of single episodes' rewards and the table `hardest`; None if the run keeps no such rewards."""
    by_epoch: dict[int, Rewards] = {row["epoch"]: row["rewards"] for row in run.episode_rewards}
    if not by_epoch:
        return None
    epochs = sorted(by_epoch)
    stretch = -(-len(epochs) // MAX_COLUMNS)
    columns = [epochs[at : at + stretch] for at in range(0, len(epochs), stretch)]
    lead = f"Neighbouring epochs share a column, as there are more than {MAX_COLUMNS}."
    return {
        "lead": lead if stretch > 1 else None,
        "distribution": _distribution(by_epoch, columns),
        "hardest": _hardest_of_late_epochs(by_epoch, places),
    }


def _name(epochs: Sequence[int]) -> str:
    return f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}"


def _distribution(by_epoch: dict[int, Rewards], columns: Sequence[Sequence[int]]) -> Markup | None:
    """Return the share of each reward, or range of rewards, over the epochs; None if no reward is usable."""
    rewards = [
        [value for epoch in epochs for values in by_epoch[epoch].values() for value in values] for epochs in columns
    ]
    finite = sorted({value for column in rewards for value in column if is_finite(value)})
    if not finite:
        return None
    if len(finite) <= MAX_VALUES:
        names = [number(value) for value in finite]
        row_of = {value: row for row, value in enumerate(finite)}
    else:
        low, width = finite[0], (finite[-1] - finite[0]) / MAX_VALUES
        names = [f"{number(low + row * width, 3)} to {number(low + (row + 1) * width, 3)}" for row in range(MAX_VALUES)]
        row_of = {value: min(int((value - low) / width), MAX_VALUES - 1) for value in finite}
    tallies = [Counter(row_of[value] if is_finite(value) else -1 for value in column) for column in rewards]
    # From the highest reward down; below them the episodes whose reward is not usable.
    rows = [*range(len(names))[::-1], *[-1] * any(-1 in tally for tally in tallies)]
    names.append("none")
    cells = [[tally[row] / max(tally.total(), 1) or None for tally in tallies] for row in rows]
    words = [
        [
            f"{_name(epochs)}\nreward {names[row]}: {tally[row]:,} of {tally.total():,} episodes, {share or 0:.0%}"
            for tally, epochs, share in zip(tallies, columns, shares, strict=True)
        ]
        for row, shares in zip(rows, cells, strict=True)
    ]
    return heat_map(
        "Share of the episodes by reward",
        [names[row] for row in rows],
        [str(epochs[0]) for epochs in columns],
        cells,
        words,
        value_range=(0.0, max(share for row in cells for share in row if share is not None)),
    )


def _hardest_of_late_epochs(by_epoch: dict[int, Rewards], places: Sequence[EpisodePlace]) -> dict[str, Any]:
    """Return a table of the examples with the lowest mean rewards in the last quarter of the epochs."""
    late = sorted(by_epoch)[-max(1, len(by_epoch) // 4) :]
    found: dict[str, list[float]] = defaultdict(list)
    for epoch in late:
        for example, values in by_epoch[epoch].items():
            found[example] += filter(is_finite, values)
    ranked = sorted((fmean(values), len(values), example) for example, values in found.items() if values)
    kept = ranked[:MAX_LISTED]
    asked = questions(places, (example for _, _, example in kept))
    rows = [(example, asked.get(example, "")[:MAX_QUESTION], number(mean), count) for mean, count, example in kept]
    return {"first": late[0], "last": late[-1], "rows": rows, "total": len(ranked)}
