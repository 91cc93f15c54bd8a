"""The metrics of a run, one row per epoch; timings are in a separate file, so that the metrics are reproducible."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxft.runs.directory import RunDirectory
from jaxft.runs.files import METRICS_FILE, TIMINGS_FILE

REWARD = "reward_mean"
NAMED_REWARD = "reward/"
"""Beginning of the metrics of named rewards."""


def log_metrics(
    directory: RunDirectory,
    epoch: int,
    metrics: Mapping[str, float | int | str],
    timings: Mapping[str, float | int | str],
) -> None:
    """Append the rows of an epoch to `training_metrics.jsonl` and `timings.jsonl`.

    Equal runs write equal metrics, byte for byte; measured times are in the timings only.

    Args:
        directory: the run directory.
        epoch: number of the epoch, from 0: the first key of both rows.
        metrics: values that are equal in equal runs. NaN and infinities are written as in `RunDirectory.append_jsonl`.
        timings: seconds, rates and other values that depend on the clock.

    Raises:
        ValueError: a name occurs twice, or is `epoch`; nothing was written.
        DiskFull: there is no room for a row.
    """
    doubled = sorted((metrics.keys() & timings.keys()) | ({"epoch"} & (metrics.keys() | timings.keys())))
    if doubled:
        raise ValueError(f"epoch {epoch} has more than one metric called {', '.join(doubled)}: rename all but one")
    directory.append_jsonl(METRICS_FILE, {"epoch": epoch, **metrics})
    directory.append_jsonl(TIMINGS_FILE, {"epoch": epoch, **timings})


def reward_figures(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the first, the last and the best mean reward of some epochs, and those of each named reward.

    A named reward that is the whole reward is left out.

    >>> reward_figures([{"reward_mean": 0.5}, {"reward_mean": None, "loss": 1.0}, {"reward_mean": 0.25}])
    {'reward_first': 0.5, 'reward_last': 0.25, 'reward_best': 0.5}
    """
    figures: dict[str, float] = {}
    whole: list[float] = []
    for name in [REWARD, *sorted({name for row in metrics for name in row if name.startswith(NAMED_REWARD)})]:
        values = [value for row in metrics if (value := row.get(name)) is not None and math.isfinite(value)]
        if name == REWARD:
            whole = values
        if values and (name == REWARD or values != whole):
            stem = "reward" if name == REWARD else name
            figures |= {f"{stem}_first": values[0], f"{stem}_last": values[-1], f"{stem}_best": max(values)}
    return figures
