"""A run as a whole: its state and results, its configuration, and what went wrong."""

import json
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from jaxft.report.charts import is_finite
from jaxft.report.pages import duration, number
from jaxft.report.samples import EpisodePlace, questions, read_episodes
from jaxft.runs import NAMED_REWARD, Row, RunRecords, reward_figures

MAX_ROWS = 30
MAX_LOG_LINES = 200
MAX_LISTED = 15
MAX_QUESTION = 120
"""Largest number of characters of a question in a table."""

OWN_RESULTS = ("seed", "seconds", "versions", "num_epochs", "jobs_completed", "model")
"""Keys of result.json that the head of the page shows under other names, beside those of rewards."""

FAULTS = {
    "failed_episodes": "episodes failed",
    "dropped_episodes": "episodes were dropped",
    "abandoned_episodes": "episodes were abandoned, as they did not end",
    "unscorable_trajectories": "rewards were not usable",
    "nonfinite_updates": "updates were not finite, and not made",
    "refused_updates": "updates were refused, as the sampler's log-probabilities differed",
    "malformed_tool_calls": "tool calls could not be parsed",
    "truncated_prompts": "prompts were too long, and cut",
}
"""Metrics that count faults, and what they count."""


STATES = {
    "running": ("running", "info"),
    "ended": ("ended", "good"),
    "stopped": ("stopped before its end", "warning"),
    "unknown": ("not ended; whether it runs cannot be seen from here", "info"),
}
"""Words for the state of a run, and the kind of badge that they stand in."""


def overview(run: RunRecords) -> dict[str, Any]:
    """Return the head of the page: state, the figures that matter most, and how to repeat or resume the run."""
    environment, finetuning = run.environment, run.config.get("finetuning") or {}
    llms, adapter = run.config.get("llms") or {}, find_component(run.config, "trainer_adapters", "trainer_adapter")
    llm: Row = llms.get(adapter.get("llm")) or next(iter(llms.values()), {})
    versions = environment.get("versions") or {}
    identity = {
        "Model": str(llm.get("path") or llm.get("preset") or ""),
        "Loss": str((adapter.get("loss") or {}).get("name", "")),
        "Seed": finetuning.get("seed"),
        "Devices": ", ".join(environment.get("devices") or ()),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "Commit": (environment.get("git_commit") or "")[:12],
    }
    shown = {*OWN_RESULTS, *reward_figures(run.metrics)}
    result = {name: value for name, value in (run.result or {}).items() if name not in shown}
    numbers = {name: value for name, value in result.items() if is_finite(value)}
    identity |= {name: _value(value) for name, value in result.items() if name not in numbers}
    last_words = [line for line in run.log_tail(40) if line.strip()][-3:]
    return {
        "state": STATES[run.state],
        "last_words": " / ".join(last_words) if run.state == "stopped" else None,
        "tiles": list(_tiles(run, finetuning.get("num_epochs"))),
        "results": [(name.replace("_", " "), number(value), "result") for name, value in numbers.items()],
        "identity": {name: value for name, value in identity.items() if value not in (None, "")},
        "command": " ".join(environment.get("command") or ()),
        "resume_command": None if run.state == "ended" else environment.get("resume_command"),
    }


def _tiles(run: RunRecords, planned: Any) -> Iterator[tuple[str, str, str]]:
    rewards = [(row["epoch"], row["reward_mean"]) for row in run.rewards if is_finite(row.get("reward_mean"))]
    if rewards:
        first, last, best = rewards[0][1], rewards[-1][1], max(rewards, key=lambda pair: pair[1])
        yield "Reward, last epoch", number(last, 3), f"{number(first, 3)} in the first"
        yield "Best reward", number(best[1], 3), f"in epoch {best[0]}"
    figures = reward_figures(run.metrics)
    for name in run.named_rewards:
        first, last = figures.get(f"{NAMED_REWARD}{name}_first"), figures.get(f"{NAMED_REWARD}{name}_last")
        if last is not None:
            yield f"{name}, last epoch", number(last, 3), f"{number(first, 3)} in the first"
    validations = [row for row in run.validations if is_finite(row.get("avg_reward"))]
    if validations:
        best_row = max(validations, key=lambda row: row["avg_reward"])
        words = f"best {number(best_row['avg_reward'], 3)} after {best_row['epoch']}"
        yield "Validation reward", number(validations[-1]["avg_reward"], 3), words
    yield "Epochs", number(len(run.metrics)), f"of {number(planned)}" if planned else ""
    total = (run.result or {}).get("seconds") or sum(row.get("seconds") or 0.0 for row in run.timings)
    if total:
        warm = [row.get("seconds") or 0.0 for row in run.warm_timings]
        yield "Time", duration(total), f"{duration(sum(warm) / len(warm))} per epoch" if warm else ""
    speeds = [row["tokens_per_second"] for row in run.timings if is_finite(row.get("tokens_per_second"))]
    if speeds:
        yield "Tokens per second", number(sorted(speeds)[len(speeds) // 2], 3), "sampled, median"
    episodes = sum(row.get("episodes") or 0 for row in run.metrics)
    if episodes:
        yield "Episodes", number(episodes), f"{number(episodes / len(run.metrics), 3)} per epoch"


def find_component(config: Row, kind: str, name: str) -> Row:
    """Return the component of a kind that the section `finetuning` names."""
    return (config.get(kind) or {}).get((config.get("finetuning") or {}).get(name)) or {}


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else number(value)


def faults(run: RunRecords, places: Sequence[EpisodePlace]) -> dict[str, Any]:
    """Return failed episodes, updates that were not made, and the end of the log."""
    failed = [place for place in places if place.is_failure]
    reports = [(row.get("epoch"), str(row.get("failure", ""))) for row in read_episodes(failed[:MAX_ROWS])]
    return {
        "counted": list(_count_episodes(run)),
        "bad_batches": sorted(path.name for path in run.path.glob("bad_batches/*.npz")),
        "num_failed": len(failed),
        "failures": [(epoch, report.split("\n", 1)[0][:300], report[:20_000]) for epoch, report in reports],
        "log": run.log_tail(MAX_LOG_LINES),
    }


def _count_episodes(run: RunRecords) -> Iterator[tuple[str, str, str]]:
    for name, words in FAULTS.items():
        found = [(row["epoch"], row[name]) for row in run.metrics if is_finite(row.get(name)) and row[name] > 0]
        if found:
            where = _list_epochs([str(epoch) for epoch, _ in found])
            where = f"{len(found)} epochs: {where}" if len(found) > 1 else where
            yield words, number(sum(count for _, count in found)), where
    bad: dict[str, list[str]] = {}
    for row in (*run.metrics, *run.timings):
        for name, value in (row.get("non_finite") or {}).items():
            bad.setdefault(name, []).append(f"{row['epoch']} ({value})")
    for name, epochs in bad.items():
        yield f"{name} was not finite", number(len(epochs)), _list_epochs(epochs)


def _list_epochs(epochs: Sequence[str]) -> str:
    return ", ".join(epochs[:12]) + (" …" if len(epochs) > 12 else "")


def hardest_examples(run: RunRecords, places: Sequence[EpisodePlace]) -> dict[str, Any] | None:
    """Return the examples with the lowest mean rewards in the last quarter of the epochs; None if no rewards are kept.

    There are `rows` of a table, the `total` of the examples, and the `first` and `last` epoch.
    """
    late = run.episode_rewards[-max(1, len(run.episode_rewards) // 4) :]
    if not late:
        return None
    found: dict[str, list[float]] = {}
    for row in late:
        for example, values in row["rewards"].items():
            found.setdefault(example, []).extend(filter(is_finite, values))
    ranked = sorted((fmean(values), len(values), example) for example, values in found.items() if values)
    kept = ranked[:MAX_LISTED]
    asked = questions(places, (example for _, _, example in kept))
    rows = [(example, asked.get(example, "")[:MAX_QUESTION], number(mean), count) for mean, count, example in kept]
    return {"first": late[0]["epoch"], "last": late[-1]["epoch"], "rows": rows, "total": len(ranked)}
