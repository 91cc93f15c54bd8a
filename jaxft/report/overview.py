"""Sections on a run as a whole: its state and results, its configuration, and what went wrong."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxft.report.charts import is_finite
from jaxft.report.markup import Markup, duration, number, tag, visible
from jaxft.report.page import code, details, facts, notice, section, subheading, table, tiles
from jaxft.report.samples import Place, read_episodes
from jaxft.runs.metrics import NAMED_REWARD, reward_figures
from jaxft.runs.records import Row, RunRecords

MAX_ROWS = 30
MAX_LOG_LINES = 200

_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
_WARNING = re.compile(
    r"^(WARNING|ERROR|CRITICAL)\b|^warning:|\b(failed|not finite|nonfinite|error|cannot|lost)\b", re.IGNORECASE
)
_PROGRESS = re.compile(r"^(\d+/\d+ epochs|---| {4})")

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


def header(run: RunRecords, places: Sequence[Place]) -> Markup:
    """Return the head of the page: name, state, the figures that matter most, and how to repeat or resume the run."""
    environment, finetuning = run.environment, run.config.get("finetuning") or {}
    planned = finetuning.get("num_epochs")
    versions = environment.get("versions") or {}
    identity = {
        "Model": _model(run.config),
        "Loss": _loss(run.config),
        "Seed": finetuning.get("seed"),
        "Devices": ", ".join(environment.get("devices") or ()),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "Commit": (environment.get("git_commit") or "")[:12],
    }
    commands = []
    if environment.get("command"):
        commands += [subheading("Command"), code(_command(environment["command"]))]
    if environment.get("resume_command") and run.state != "ended":
        commands += [subheading("To resume"), code(str(environment["resume_command"]))]
    shown = {*OWN_RESULTS, *reward_figures(run.metrics)}
    result = {name: value for name, value in (run.result or {}).items() if name not in shown}
    numbers = {name: value for name, value in result.items() if is_finite(value)}
    identity |= {name: _value(value) for name, value in result.items() if name not in numbers}
    return tag(
        "header",
        {"id": "top"},
        tag("h1", {}, run.name, " ", _state(run, planned)),
        *_why_stopped(run),
        tiles(_tiles(run, planned)),
        tiles((_words(name), number(value), "result") for name, value in numbers.items()) if numbers else None,
        facts({name: value for name, value in identity.items() if value not in (None, "")}),
        details("Command" if run.state == "ended" else "Command, and command to resume", *commands)
        if commands
        else None,
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


def _state(run: RunRecords, planned: object) -> Markup:
    words = {
        "running": ("running", "info"),
        "ended": ("ended", "good"),
        "stopped": ("stopped before its end", "warning"),
        "unknown": ("not ended; whether it runs cannot be seen from here", "info"),
    }
    name, kind = words[run.state]
    return tag("span", {"class": f"badge {kind}"}, name)


def _why_stopped(run: RunRecords) -> Iterator[Markup]:
    if run.state == "stopped":
        last = [line for line in run.log_tail(40) if line.strip()][-3:]
        yield notice("The run is not going on, and has no result. Its last words: " + " / ".join(last), kind="warning")


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
    seconds = sum(row.get("seconds") or 0.0 for row in run.timings)
    total = (run.result or {}).get("seconds")
    if total or seconds:
        warm = [row.get("seconds") or 0.0 for row in run.warm_timings]
        yield "Time", duration(total or seconds), f"{duration(sum(warm) / len(warm))} per epoch" if warm else ""
    speeds = [row["tokens_per_second"] for row in run.timings if is_finite(row.get("tokens_per_second"))]
    if speeds:
        yield "Tokens per second", number(sorted(speeds)[len(speeds) // 2], 3), "sampled, median"
    episodes = sum(row.get("episodes") or 0 for row in run.metrics)
    if episodes:
        yield "Episodes", number(episodes), f"{number(episodes / len(run.metrics), 3)} per epoch"


def _model(config: Row) -> str:
    llms = config.get("llms") or {}
    adapter = _chosen(config, "trainer_adapters", "trainer_adapter")
    llm: Row = llms.get(adapter.get("llm")) or next(iter(llms.values()), {})
    return str(llm.get("path") or llm.get("preset") or "")


def _loss(config: Row) -> str:
    return str((_chosen(config, "trainer_adapters", "trainer_adapter").get("loss") or {}).get("name", ""))


def _chosen(config: Row, kind: str, name: str) -> Row:
    """Return the component of a kind that the section `finetuning` names."""
    return (config.get(kind) or {}).get((config.get("finetuning") or {}).get(name)) or {}


def _command(arguments: Sequence[str]) -> str:
    """Return a command line with an option on each line."""
    text = ""
    for argument in arguments:
        text += (" \\\n    " if argument.startswith("-") and text else " " if text else "") + argument
    return text


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else number(value)


def _setting(value: Any) -> str:
    """Return a value of the configuration nearly as YAML has it."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _default(difference: Row) -> str:
    return _setting(difference["default"]) if "default" in difference else "(no default)"


def configuration_section(run: RunRecords) -> Markup:
    """Return the section with the configuration: first what differs from the defaults, then all of it."""
    differences = run.environment.get("differences")
    chosen = run.environment.get("chosen") or {}
    content: list[Markup | None] = []
    if differences:
        rows = [(path, _setting(each.get("value")), _default(each)) for path, each in differences.items()]
        content.append(table(("setting", "value", "default"), rows))
    elif differences is None:
        content.append(
            tag("p", {"class": "empty"}, "The run has not noted what differs from the defaults, as older runs do.")
        )
    else:
        content.append(tag("p", {"class": "empty"}, "Every setting has its default."))
    if chosen:
        content += [
            subheading("Chosen for the devices, where the configuration says auto"),
            table(("setting", "value"), [(path, _setting(value)) for path, value in chosen.items()]),
        ]
    content.append(
        details("The whole configuration", code(run.config_text), is_open=differences is None and not run.metrics)
    )
    return section("configuration", "Configuration", *content)


def faults_section(run: RunRecords, places: Sequence[Place]) -> Markup:
    """Return the section with failed episodes, updates that were not made, warnings, and resumes."""
    content = [*_counted(run), *_failures(places), *_warnings(run), *_resumes(run)]
    if not content:
        content = [tag("p", {"class": "empty"}, "Nothing failed, nothing was refused, and the run was never resumed.")]
    tail = run.log_tail(MAX_LOG_LINES)
    log = details(f"The last {len(tail)} lines of run.log", code("\n".join(tail))) if tail else None
    return section("faults", "Faults and resumes", *content, log)


def _counted(run: RunRecords) -> Iterator[Markup]:
    rows = []
    for name, words in FAULTS.items():
        found = [(row["epoch"], row[name]) for row in run.metrics if is_finite(row.get(name)) and row[name] > 0]
        if found:
            epochs = ", ".join(str(epoch) for epoch, _ in found[:12]) + (" …" if len(found) > 12 else "")
            rows.append(
                (
                    words,
                    number(sum(count for _, count in found)),
                    f"{len(found)} epochs: {epochs}" if len(found) > 1 else epochs,
                )
            )
    bad: dict[str, list[str]] = {}
    for row in (*run.metrics, *run.timings):
        for name, value in (row.get("non_finite") or {}).items():
            bad.setdefault(name, []).append(f"{row['epoch']} ({value})")
    rows += [
        (f"{name} was not finite", number(len(where)), ", ".join(where[:12]) + (" …" if len(where) > 12 else ""))
        for name, where in bad.items()
    ]
    if rows:
        yield table(("fault", "number", "in epochs"), rows, numbers=(1,))
    batches = sorted(path.name for path in run.path.glob("bad_batches/*.npz"))
    if batches:
        yield notice(
            f"Batches of updates that were not finite are kept in bad_batches: {', '.join(batches)}", kind="warning"
        )


def _failures(places: Sequence[Place]) -> Iterator[Markup]:
    failed = [place for place in places if place.is_failure]
    if failed:
        kept = failed[:MAX_ROWS]
        yield subheading(
            f"Failed episodes: {len(kept)} of {len(failed)} reports"
            if len(failed) > len(kept)
            else f"Failed episodes ({len(failed)})"
        )
        for row in read_episodes(kept):
            report = str(row.get("failure", ""))
            first = report.split("\n", 1)[0]
            yield details(tag("span", {}, f"Epoch {row.get('epoch')}: ", visible(first[:300])), code(report[:20_000]))


def _warnings(run: RunRecords) -> Iterator[Markup]:
    found = []
    for line in run.log_lines():
        words = _STAMP.sub("", line)
        if not _PROGRESS.match(words) and _WARNING.search(words):
            found.append(line)
    if found:
        kept = found[-MAX_ROWS:]
        name = f"Warnings in run.log ({len(found)})" + (f", the last {len(kept)}" if len(kept) < len(found) else "")
        yield subheading(name)
        yield code("\n".join(line[:1000] for line in kept))


def _resumes(run: RunRecords) -> Iterator[Markup]:
    if not run.resumes:
        return
    yield subheading(f"Resumes ({len(run.resumes)})")
    rows = []
    for row in run.resumes:
        step = row.get("checkpoint")
        changes = "; ".join(f"{path}: {_change(values)}" for path, values in (row.get("changes") or {}).items())
        devices = ", ".join(row.get("devices") or ())
        rows.append(("the beginning" if step is None else f"checkpoint {step}", changes or "none", devices or "–"))
    yield table(("resumed from", "changes of the configuration", "devices"), rows)


def _change(values: Any) -> str:
    if isinstance(values, list) and len(values) == 2:
        return " → ".join(map(_setting, values))
    return _setting(values)
