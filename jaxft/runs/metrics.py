"""The metrics of a run, one row per epoch; timings are in a separate file, so that the metrics are reproducible."""

from collections.abc import Mapping

from jaxft.runs.directory import METRICS_FILE, TIMINGS_FILE, RunDirectory


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
    directory.commit()
    directory.append_jsonl(TIMINGS_FILE, {"epoch": epoch, **timings})
