"""The metrics of a run in the toolkit's files and under its names, made from those of jaxft's run directory."""

import json
import shutil
from pathlib import Path
from typing import Any

from jaxft.runs.directory import (
    CURRICULUM_FILE,
    METRICS_FILE,
    PLOT_FILE,
    REWARD_HISTORY_FILE,
    VALIDATION_HISTORY_FILE,
    RunDirectory,
)

NAMES = {
    "avg_reward": "reward_mean",
    "min_reward": "reward_min",
    "max_reward": "reward_max",
    "num_groups": "groups",
    "filtered_groups": "curriculum_groups",
    "filtered_avg_reward": "reward_mean_chosen",
    "curriculum_percentile": "curriculum_percentile",
}
"""The toolkit's names of metrics, and jaxft's."""


def write_toolkit_files(directory: RunDirectory, folder: Path) -> None:
    """Write the files that the toolkit's own trainers leave in `finetuning.output_dir`, as far as the run has come.

    Rows have no timestamps, and hold jaxft's metrics, too.

    Args:
        directory: jaxft's run directory.
        folder: `finetuning.output_dir`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics = directory.path / METRICS_FILE
    if metrics.is_file():
        rows = [_row(json.loads(line)) for line in metrics.read_text("utf-8").splitlines()]
        (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        names = ("epoch", "avg_reward", "min_reward", "max_reward", "num_trajectories")
        history = [{name: row[name] for name in names} for row in rows]
        (folder / REWARD_HISTORY_FILE).write_text(json.dumps(history, indent=2), "utf-8")
    for name in (VALIDATION_HISTORY_FILE, CURRICULUM_FILE, PLOT_FILE):
        if (directory.path / name).is_file():
            shutil.copyfile(directory.path / name, folder / name)


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of metrics with the toolkit's names, then jaxft's; a metric without a value is None."""
    left_out = row.get("failed_episodes", 0) - row.get("penalized_episodes", 0) + row.get("dropped_episodes", 0)
    named = {name: row.get(own) for name, own in NAMES.items()} | {
        "num_trajectories": row.get("episodes", 0) - left_out
    }
    if "curriculum_percentile" not in row:
        named |= {"filtered_groups": named["num_groups"], "filtered_avg_reward": named["avg_reward"]}
        named["curriculum_percentile"] = 1.0
    return {"epoch": row["epoch"], "run_id": f"epoch_{row['epoch']:05d}", **named, **row}
