"""The files of a run directory, and what a folder with some of them holds."""

import json
import os
import socket
from pathlib import Path
from typing import Any

from jaxft.files import MANIFEST

CONFIG_FILE = "config.yml"
ENVIRONMENT_FILE = "environment.json"
RESUME_COMMAND = "resume_command"
"""Key of `ENVIRONMENT_FILE` with the command that resumes the run."""
RESULT_FILE = "result.json"
METRICS_FILE = "training_metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"
REWARD_HISTORY_FILE = "reward_history.json"
VALIDATION_HISTORY_FILE = "validation_history.json"
CURRICULUM_FILE = "curriculum_state.json"
SAMPLES_FILE = "trajectories/samples.jsonl"
EPISODE_REWARDS_FILE = "trajectories/rewards.jsonl"
"""Log with the rewards of every episode, one line per epoch."""
TOKEN_SCORES_FILE = "trajectories/token_scores.jsonl"
"""Log with the advantages and entropies of the tokens of the episodes in `SAMPLES_FILE` that were trained."""
PAIRS_FILE = "trajectories/pairs.jsonl"
RESUMES_FILE = "resumes.jsonl"
"""Log with one line per resume of the run."""
PLOT_FILE = "reward_plot.png"
LOG_FILE = "run.log"
"""Log of the console output and of `logging`."""
NO_LOGS = (RESUMES_FILE, "checkpoints", "model", "tensorboard", "wandb", "loggers")
"""Logs whose size a checkpoint does not record, so that a resume never truncates them."""

# All files of a run: `overwrite` removes them. The two lock files stay: they belong to whoever holds the lock.
RUN_FILES = (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    RESUMES_FILE,
    LOG_FILE,
    RESULT_FILE,
    "evaluation.json",
    METRICS_FILE,
    TIMINGS_FILE,
    REWARD_HISTORY_FILE,
    VALIDATION_HISTORY_FILE,
    CURRICULUM_FILE,
    PLOT_FILE,
    "report.html",
    "tensorboard",
    "wandb",
    "loggers",  # for files of loggers that do not come with jaxft
    "trajectories",
    "bad_batches",
    "checkpoints",
    "model",
    "extra",  # for files that components name themselves
)
LOCK_FILE = "LOCK"
HOLDER_FILE = "LOCK.holder"  # pid and host of the last holder; also marks a directory that a run made


def holds_run(path: Path) -> bool:
    """Return True if a folder holds files because of which a new run is refused."""
    return bool(run_files(path)) and (is_run(path) or not (path / HOLDER_FILE).is_file())


def is_locked(path: Path) -> bool | None:
    """Return True if a process holds the lock of a run directory; None if that cannot be seen, as on another host.

    The lock is not tried, as a run that starts at that moment would find it taken.
    """
    try:
        holder = json.loads((path / HOLDER_FILE).read_bytes())
        host = holder["host"]
        lock = (path / LOCK_FILE).stat()
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host != socket.gethostname():
        return None
    # Linux lists every lock with device and inode of its file.
    inode = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
    return any(inode in line.split() for line in Path("/proc/locks").read_text().splitlines())


def read_environment(path: Path) -> dict[str, Any]:
    """Return the content of a run's `ENVIRONMENT_FILE`; nothing if it cannot be read."""
    try:
        about = json.loads((path / ENVIRONMENT_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def ways_on(path: Path) -> str:
    """Return what to do about a folder that holds a run; one that was cut off is best resumed by its own command."""
    command = None if (path / RESULT_FILE).exists() else read_environment(path).get(RESUME_COMMAND)
    return ("" if command is None else f"continue it with `{command}`, ") + "give another output_dir, or --overwrite"


def is_run(path: Path) -> bool:
    """Return True if a folder has results of training: a finished checkpoint, a row of metrics, a result or a model.

    A failed start leaves none of these, so it may be repeated without `overwrite`.
    """
    metrics = path / METRICS_FILE
    return (
        (metrics.is_file() and metrics.stat().st_size > 0)
        or any(os.path.lexists(path / name) for name in (RESULT_FILE, "model"))
        or any(path.glob(f"checkpoints/*/{MANIFEST}"))
    )


def run_files(path: Path) -> list[str]:
    return [name for name in RUN_FILES if os.path.lexists(path / name)]
