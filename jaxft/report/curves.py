"""Charts and tables of a run over its epochs: reward, losses and all other metrics, validations, and timings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from jaxft.report.charts import WIDE, Band, Line, Value, is_finite, line_chart
from jaxft.report.pages import number
from jaxft.runs import NAMED_REWARD, Row, RunRecords

IMPORTANT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss", ("loss",)),
    ("Entropy, nats per token", ("entropy",)),
    ("KL to the reference", ("kl",)),
    ("KL to the policy before the update", ("approx_kl",)),
    ("Clip fractions", ("clip_high_fraction", "clip_low_fraction", "delta_fraction", "value_clip_fraction")),
    ("Gradient norm, before clipping", ("grad_norm",)),
    ("Completion tokens", ("completion_tokens_mean", "completion_tokens_max")),
    ("Sequences cut by a length limit, fraction", ("truncated_fraction",)),
    ("Sampler and trainer, difference in nats", ("sampler_logprob_diff_max", "sampler_logprob_diff_mean")),
    ("Effective sample size of the importance weights, fraction", ("effective_sample_fraction",)),
    ("Importance weights out of bounds, fraction", ("correction_fraction",)),
    ("Groups without a signal", ("no_signal_groups",)),
    ("Preference accuracy", ("preference_accuracy",)),
    ("Reward margin", ("reward_margin",)),
    ("Tool calls", ("tool_calls", "malformed_tool_calls")),
    ("Tokens sampled per second", ("tokens_per_second",)),
    ("Learning rate", ("learning_rate",)),
)
"""Charts that are always open, each with its metrics; a chart whose metrics never change is left to the others."""

AGES = "staleness/"
"""Beginning of the metrics with the fraction of tokens that were sampled so many versions before."""

ON_DEVICE = "seconds_device_"
"""Beginning of the timings of the device, which go on beside the phases of an epoch."""

NO_PHASES = ("seconds_reward", "seconds_episode_max")
"""Timings that are no part of an epoch's time: summed over episodes, and that of the longest one."""

SINGLE_TIMINGS = {
    "compiles": "Compiled programs, in all",
    "seconds_episode_max": "Seconds of the longest episode",
    "seconds_reward": "Seconds of evaluators, summed over episodes",
}
"""Timings with a chart of their own, with its caption."""

TRAINED = "trained_reward_mean"
"""Mean of the weighted rewards, penalties and step rewards included; absent where it is that of the evaluator."""

ELSEWHERE = (
    *("reward_mean", "reward_min", "reward_max", "group_reward_q25", "group_reward_q75", "reward_mean_chosen"),
    *(TRAINED, "epoch", "curriculum_percentile"),
)
"""Metrics with a chart in a section of their own."""


def reward_chart(run: RunRecords) -> Markup:
    """Return the chart of rewards: mean, quartiles, extremes, validations, and the mean of the chosen groups.

    They are the evaluator's; where the loss weighs others, their mean is a line of its own.
    """
    mean = _line(run.rewards, "reward_mean", "mean")
    trained = _line(run.metrics, TRAINED, "mean as trained", 3)
    optional = (_line(run.rewards, "reward_mean_chosen", "mean of the chosen groups", 2, "dashed"), trained)
    lines = [mean, *(line for line in optional if any(map(is_finite, line.ys)))]
    if run.validations:
        lines.insert(0, _line(run.validations, "avg_reward", "validation", 1, "dots"))
    bands = []
    for name, ends, is_faint in (
        ("middle half of the examples", ("group_reward_q25", "group_reward_q75"), False),
        ("lowest to highest", ("reward_min", "reward_max"), True),
    ):
        lows, highs = ([row.get(end) for row in run.rewards] for end in ends)
        if any(map(is_finite, lows)):
            bands.append(Band(name, mean.xs, lows, highs, is_faint=is_faint))
    words = "The evaluator's rewards; “as trained” is after weights, step rewards and penalties."
    note = words if trained in lines else None
    return line_chart("Reward", lines, bands, x_label="epoch, counted from 0", size=WIDE, note=note)


def _line(rows: Sequence[Row], key: str, name: str | None = None, color: int = 0, style: Any = "line") -> Line:
    return Line(name or key, [row["epoch"] for row in rows], [row.get(key) for row in rows], color, style)


def _lines(rows: Sequence[Row], keys: Sequence[str]) -> list[Line]:
    return [_line(rows, key, color=color) for color, key in enumerate(keys)]


def _named_lines(epochs: Sequence[int], columns: Mapping[str, Sequence[Value]]) -> list[Line]:
    return [Line(name, epochs, values, color) for color, (name, values) in enumerate(columns.items())]


def curves(run: RunRecords) -> dict[str, Any] | None:
    """Return the charts of rewards and metrics; None before the first epoch has ended.

    They are `rewards`, `important`, and `others`; `constant` has rows of names and values.
    """
    timings = {row.get("epoch"): row for row in run.timings}
    rows = [{**timings.get(row.get("epoch"), {}), **row} for row in run.metrics]
    if not rows and not run.validations:
        return None
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
    shown = {*ELSEWHERE, *(f"{NAMED_REWARD}{name}" for name in run.named_rewards)}
    epochs = [row["epoch"] for row in run.metrics]
    important = [line_chart("Rewards by name", _named_lines(epochs, run.named_rewards))]
    for caption, wanted in IMPORTANT:
        present = [name for name in wanted if name in names and _varies(rows, name)]
        if present:
            note = f"{present[0]} alone changes" if len(present) < len(wanted) and len(present) == 1 else None
            important.append(line_chart(caption, _lines(rows, present), note=note))
            shown |= set(present)
    if ages := [name for name in names if name.startswith(AGES)]:
        by_age = _named_lines(epochs, {name.removeprefix(AGES): _column(rows, name) for name in ages})
        important.append(line_chart("Tokens by the number of versions behind, fraction", by_age))
        shown |= set(ages)
    # Of the timings, some have a chart among the important ones; the others stand in their own section.
    shown |= {name for row in run.timings for name in row}
    varying = [name for name in names if name not in shown and _varies(rows, name)]
    constant = [name for name in names if name not in (*shown, *varying)]
    return {
        "rewards": reward_chart(run),
        "important": important,
        "others": [line_chart(name, _lines(rows, [name])) for name in varying],
        "constant": [(name, number(next(row[name] for row in reversed(rows) if name in row))) for name in constant],
    }


def _varies(rows: Sequence[Row], name: str) -> bool:
    return len({row[name] for row in rows if is_finite(row.get(name))}) > 1 or len(rows) == 1


def validation(run: RunRecords) -> dict[str, Any] | None:
    """Return charts and tables of curriculum and validation; None for a run that has neither."""
    finetuning = run.config.get("finetuning") or {}
    parts = [finetuning, *(finetuning.get("per_task") or {}).values()]  # each task may have one
    has_curriculum = any((part.get("curriculum_learning") or {}).get("enabled") for part in parts)
    if not run.validations and not has_curriculum:
        return None
    kinds = [*["Curriculum"] * has_curriculum, *["Validation"] * bool(run.validations)]
    # Histories of other versions have nested values, which no cell shows.
    nested = {name for row in run.validations for name, value in row.items() if isinstance(value, dict | list)}
    names = dict.fromkeys(name for row in run.validations for name in row)
    columns = [name for name in names if name not in ("epoch", "first_error", *nested)]
    return {
        "title": " and ".join(kinds).replace(" V", " v"),
        "charts": [*(_curriculum(run) if has_curriculum else ()), *_validation_charts(run)],
        "columns": columns,
        "errors": [(row["epoch"], row["first_error"]) for row in run.validations if row.get("first_error")][:3],
    }


def _curriculum(run: RunRecords) -> Iterator[Markup]:
    epochs = [row["epoch"] for row in run.rewards]
    percents = [100 * value if is_finite(value := row.get("curriculum_percentile")) else None for row in run.rewards]
    yield line_chart("Curriculum, % of the groups", [Line("%", epochs, percents, 3, "steps")], y_range=(0.0, 105.0))
    dropped = _line(run.metrics, "curriculum_dropped_groups", "dropped, rewards alike", 1)
    yield line_chart("Groups", [_line(run.metrics, "curriculum_groups", "trained"), dropped])


def _validation_charts(run: RunRecords) -> Iterator[Markup]:
    if run.validations:
        means = _line(run.validations, "avg_reward", "mean", 1)
        yield line_chart("Validation reward", [means], x_label="epochs before it")
    names = list(dict.fromkeys(name for row in run.validations for name in row))
    largest_k = {name.partition("@")[0]: name for name in names if "@" in name and "/" not in name}
    parts = [name for name in names if name.endswith("/reward")]
    charts = {
        "Validation: pass@k, maj@k and best@k": ["pass@1", *largest_k.values()] if largest_k else [],
        "Validation rewards by name": [name for name in names if name.startswith(NAMED_REWARD)],
        f"Validation reward by {parts[0].partition('=')[0]}" if parts else "": parts,
    }
    for caption, shown in charts.items():
        yield line_chart(caption, _lines(run.validations, shown), x_label="epochs before it")


def timings(run: RunRecords) -> dict[str, Any] | None:
    """Return `charts` of time by phase, memory and compiled programs; None before the first epoch.

    Beside them stand the rows of epochs that compile, `cold`, with their seconds, and the `mean` seconds of the others.
    """
    if not run.timings:
        return None
    rows = run.warm_timings
    epochs = [row["epoch"] for row in rows]
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("seconds_"))
    phases = [name for name in names if name not in NO_PHASES and not name.startswith(ON_DEVICE)]
    layers = {name.removeprefix("seconds_"): _column(rows, name) for name in phases}
    layers["other"] = [max(0.0, (row.get("seconds") or 0.0) - sum(row.get(name) or 0.0 for name in phases))
                       for row in rows]  # fmt: skip
    figures = [line_chart("Seconds by phase", _named_lines(epochs, layers))]
    if on_device := [name for name in names if name.startswith(ON_DEVICE)]:
        spent = {name.removeprefix(ON_DEVICE): _column(rows, name) for name in on_device}
        figures.append(line_chart("Seconds of the device; idle: it waits for agents", _named_lines(epochs, spent)))
    figures += _memory(run.timings)
    figures += [line_chart(words, [_line(run.timings, name, color=4)]) for name, words in SINGLE_TIMINGS.items()]
    cold = [row for row in run.timings if row not in rows]
    means = {"mean": sum(_column(rows, "seconds")) / len(rows), "cold_seconds": sum(_column(cold, "seconds"))}
    return {"charts": figures, "cold": cold, **means}


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [row.get(name) or 0.0 for row in rows]


def _memory(rows: Sequence[Row]) -> Iterator[Markup]:
    names = dict.fromkeys(key for row in rows for key in row if key.endswith("_bytes") and is_finite(row[key]))
    lines: list[Line] = []
    for name in names:
        sizes: list[Value] = [value / 2**30 if is_finite(value := row.get(name)) else None for row in rows]
        words = name.removesuffix("_bytes").replace("_", " ")
        lines.append(Line(words, [row["epoch"] for row in rows], sizes, len(lines)))
    tops = [f"{line.name}: {number(max(filter(is_finite, line.ys)), 3)} GiB" for line in lines]
    yield line_chart("Memory, GiB", lines, note="; ".join(tops))
