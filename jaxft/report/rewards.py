"""The hardest examples of a run."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from jaxft.report.charts import is_finite
from jaxft.report.pages import number
from jaxft.report.samples import EpisodePlace, questions
from jaxft.runs import RunRecords

MAX_LISTED = 15
MAX_QUESTION = 120
"""Largest number of characters of a question in a table."""


def hardest_examples(run: RunRecords, places: Sequence[EpisodePlace]) -> dict[str, Any] | None:
    """Return the examples with the lowest mean rewards in the last quarter of the epochs; None if no rewards are kept.

    There are `rows` of a table, the `total` of the examples, and the `first` and `last` epoch.
    """
    late = run.episode_rewards[-max(1, len(run.episode_rewards) // 4) :]
    if not late:
        return None
    found: dict[str, list[float]] = defaultdict(list)
    for row in late:
        for example, values in row["rewards"].items():
            found[example] += filter(is_finite, values)
    ranked = sorted((fmean(values), len(values), example) for example, values in found.items() if values)
    kept = ranked[:MAX_LISTED]
    asked = questions(places, (example for _, _, example in kept))
    rows = [(example, asked.get(example, "")[:MAX_QUESTION], number(mean), count) for mean, count, example in kept]
    return {"first": late[0]["epoch"], "last": late[-1]["epoch"], "rows": rows, "total": len(ranked)}
