"""Small run directories with chosen rewards, for the tests of comparisons."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

NONE: Mapping[str, Any] = MappingProxyType({})

CONFIG: dict[str, Any] = {
    "workflow": {"_type": "game"},
    "eval": {"general": {"dataset": {"_type": "jsonl", "file_path": "data/train.jsonl"}}},
    "trainer_adapters": {
        "local": {"loss": {"name": "dapo", "beta": 0.0}, "optimizer": {"name": "adamw", "learning_rate": 0.001}}
    },
    "trainers": {"loop": {"save_episodes": "all"}},
    "finetuning": {"seed": 0, "num_epochs": 10},
}


def write_run(
    path: Path,
    rewards: list[float | None],
    *,
    seed: int = 0,
    settings: Mapping[str, Any] = NONE,
    result: Mapping[str, Any] | None = NONE,
    validations: Sequence[tuple[int, float]] = (),
    metrics: Mapping[str, Any] = NONE,
    about: Mapping[str, Any] = NONE,
    log: str | None = None,
    num_resumes: int = 0,
) -> Path:
    """Write a run directory and return it.

    Args:
        path: the directory.
        rewards: mean reward of each epoch.
        seed: of the configuration.
        settings: fields of the configuration, by dotted path.
        result: figures of result.json; None for a run without.
        validations: epochs before each validation, and its reward.
        metrics: further columns of the metrics, equal in each epoch.
        about: entries of environment.json.
        log: last line of the log, without its time.
        num_resumes: number of resumes.
    """
    path.mkdir(parents=True)
    config = json.loads(json.dumps(CONFIG))
    for field, value in {"finetuning.seed": seed, "finetuning.output_dir": str(path), **settings}.items():
        *folders, name = field.split(".")
        place = config
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value
    (path / "config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    (path / "environment.json").write_text(json.dumps(dict(about)))
    rows = [
        {"epoch": epoch, "reward_mean": reward, "episodes": 8.0, "trained_tokens": 100, **metrics}
        for epoch, reward in enumerate(rewards)
    ]
    write_rows(path / "training_metrics.jsonl", rows)
    times = [{"epoch": epoch, "seconds": 2.0, "tokens_per_second": 50.0} for epoch in range(len(rewards))]
    write_rows(path / "timings.jsonl", times)
    write_rows(path / "resumes.jsonl", [{"checkpoint": 1}] * num_resumes)
    if validations:
        history = [{"epoch": epoch, "avg_reward": reward, "pass@4": epoch / 20} for epoch, reward in validations]
        (path / "validation_history.json").write_text(json.dumps(history))
    if result is not None:
        (path / "result.json").write_text(json.dumps({"seed": seed, "versions": {}, **result}))
    if log is not None:
        (path / "run.log").write_text(f"2026-01-01 00:00:00 begun\n2026-01-01 00:00:09 {log}\n")
    return path


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write a log of JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
