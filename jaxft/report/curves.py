"""Sections with the curves of a run: reward, losses and all other metrics, the distribution of rewards, and timings."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean

from jaxft.report.charts import (
    MAX_POINTS,
    WIDE,
    Band,
    Line,
    Value,
    bar_chart,
    heat_map,
    is_finite,
    line_chart,
    shortened,
    stacked_chart,
)
from jaxft.report.markup import Markup, byte_count, duration, joined, number, tag
from jaxft.report.page import charts, details, notice, section, subheading, table
from jaxft.report.samples import Place, questions
from jaxft.runs.metrics import NAMED_REWARD
from jaxft.runs.records import Row, RunRecords

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

IN_REWARD_CHART = (
    "reward_mean",
    "reward_min",
    "reward_max",
    "group_reward_q25",
    "group_reward_q75",
    "reward_mean_chosen",
)
TRAINED = "trained_reward_mean"
"""Mean of the weighted rewards, penalties and step rewards included; absent where it is that of the evaluator."""
ELSEWHERE = (*IN_REWARD_CHART, TRAINED, "epoch", "curriculum_percentile")
"""Metrics with a chart in a section of their own."""

NARROW = (400, 260)
MAX_BARS = 60
"""Largest number of columns of a heat map; with more epochs, neighbours share a column."""
MAX_EXAMPLES = 30
MAX_LISTED = 15
MAX_QUESTION = 120
"""Largest number of characters of a question in a table."""
MAX_VALUES = 12
"""Largest number of different rewards that have a row each in the distribution; more are put into as many ranges."""


def reward_chart(run: RunRecords, size: tuple[int, int]) -> Markup:
    """Return the chart of rewards: mean, quartiles, extremes, validations, and the mean of the chosen groups.

    They are the evaluator's; where the loss weighs others, their mean is a line of its own.
    """
    epochs = [row["epoch"] for row in run.rewards]
    column = {name: [row.get(name) for row in run.rewards] for name in IN_REWARD_CHART}
    lines = [Line("mean", epochs, column["reward_mean"])]
    if run.validations:
        at = [row["epoch"] for row in run.validations]
        lines.insert(0, Line("validation", at, [row.get("avg_reward") for row in run.validations], 1, "dots"))
    if any(is_finite(value) for value in column["reward_mean_chosen"]):
        lines.append(Line("mean of the chosen groups", epochs, column["reward_mean_chosen"], 2, "dashed"))
    trained, note = [row.get(TRAINED) for row in run.metrics], None
    if any(map(is_finite, trained)):
        note = "The evaluator's rewards; “as trained” is after weights, step rewards and penalties."
        lines.append(Line("mean as trained", [row["epoch"] for row in run.metrics], trained, 3))
    bands = [
        Band("middle half of the examples", epochs, column["group_reward_q25"], column["group_reward_q75"]),
        Band("lowest to highest", epochs, column["reward_min"], column["reward_max"], is_faint=True),
    ]
    bands = [band for band in bands if any(map(is_finite, band.lows))]
    return line_chart("Reward", lines, bands, x_label="epoch, counted from 0", size=size, note=note)


def curves_section(run: RunRecords) -> Markup:
    """Return the section of curves: rewards, the important metrics, and all others folded away."""
    rows = _merged(run)
    if not rows and not run.validations:
        return section("curves", "Curves", tag("p", {"class": "empty"}, "No epoch has ended yet."))
    names = dict.fromkeys(name for row in rows for name, value in row.items() if _is_metric(name, value))
    shown = {*ELSEWHERE, *(f"{NAMED_REWARD}{name}" for name in run.named_rewards)}
    epochs = [row["epoch"] for row in run.metrics]
    by_name = [Line(name, epochs, values, color) for color, (name, values) in enumerate(run.named_rewards.items())]
    figures = [line_chart("Rewards by name", by_name)]
    for caption, wanted in IMPORTANT:
        present = [name for name in wanted if name in names and _varies(rows, name)]
        if present:
            note = f"{present[0]} alone changes" if len(present) < len(wanted) and len(present) == 1 else None
            figures.append(_chart(rows, present, caption, note))
            shown |= set(present)
    if ages := [name for name in names if name.startswith(AGES)]:
        layers = {name.removeprefix(AGES): [row.get(name) or 0.0 for row in rows] for name in ages}
        figures.append(stacked_chart("Tokens by the number of versions behind, fraction", epochs, layers))
        shown |= set(ages)
    # Of the timings, these have a chart among the important ones; the others stand in their own section.
    timing_names = {name for row in run.timings for name in row}
    rest = [name for name in names if name not in shown and name not in timing_names]
    varying = [name for name in rest if _varies(rows, name)]
    constant = [name for name in rest if name not in varying]
    long = f"Lines of more than {MAX_POINTS} epochs are drawn with the lowest and the highest value of each stretch."
    wide, narrow = reward_chart(run, WIDE), reward_chart(run, NARROW)
    return section(
        "curves",
        "Curves",
        tag("div", {"class": "only-wide"}, wide),
        tag("div", {"class": "only-narrow"}, narrow),
        charts(*figures),
        details(f"All other metrics ({len(varying)})", charts(*(_chart(rows, [name]) for name in varying)))
        if varying
        else None,
        details(
            f"Metrics that did not change ({len(constant)})",
            table(("metric", "value"), [(name, number(_last(rows, name))) for name in constant], numbers=(1,)),
        )
        if constant
        else None,
        lead=long if len(rows) > MAX_POINTS else None,
    )


def _merged(run: RunRecords) -> list[Row]:
    """Return the metrics of each epoch with its timings."""
    timings = {row.get("epoch"): row for row in run.timings}
    return [{**timings.get(row.get("epoch"), {}), **row} for row in run.metrics]


def _is_metric(name: str, value: object) -> bool:
    return isinstance(value, int | float) and name not in ("epoch",)


def _varies(rows: Sequence[Row], name: str) -> bool:
    return len({row[name] for row in rows if is_finite(row.get(name))}) > 1 or len(rows) == 1


def _last(rows: Sequence[Row], name: str) -> Value:
    return next((row[name] for row in reversed(rows) if name in row), None)


def _chart(rows: Sequence[Row], names: Sequence[str], caption: str | None = None, note: str | None = None) -> Markup:
    epochs = [row["epoch"] for row in rows]
    lines = [Line(name, epochs, [row.get(name) for row in rows], color) for color, name in enumerate(names)]
    return line_chart(caption or names[0], lines, note=note)


def rewards_section(run: RunRecords, places: Sequence[Place]) -> Markup:
    """Return the section with the distribution of rewards over epochs, and the rewards of each example."""
    by_epoch = _rewards_by_epoch(run, places)
    if not by_epoch:
        words = (
            "This run keeps no rewards of single episodes, as older runs do; the band of the reward chart shows their "
            "quartiles."
            if run.metrics
            else "No epoch has ended yet."
        )
        return section("rewards", "Rewards", tag("p", {"class": "empty"}, words))
    columns = _columns(sorted(by_epoch))
    return section(
        "rewards",
        "Rewards",
        tag("div", {"class": "scroll plain"}, _distribution(by_epoch, columns)),
        tag("div", {"class": "scroll plain"}, _by_example(by_epoch, columns, places)),
        lead=f"Neighbouring epochs share a column, as there are more than {MAX_BARS}."
        if len(by_epoch) > MAX_BARS
        else None,
    )


Rewards = dict[str, list[Value]]


def _rewards_by_epoch(run: RunRecords, places: Sequence[Place]) -> dict[int, Rewards]:
    """Return the rewards of each example by epoch; of a run without their file, those of episodes if it keeps all."""
    if run.episode_rewards:
        return {row["epoch"]: row["rewards"] for row in run.episode_rewards}
    trainer = run.config.get("trainers", {}).get(run.config.get("finetuning", {}).get("trainer"), {})
    if trainer.get("save_episodes") != "all":
        return {}
    found: dict[int, Rewards] = defaultdict(lambda: defaultdict(list))
    for place in places:
        if place.epoch is not None and place.reward is not None:
            found[place.epoch][str(place.example_id)].append(place.reward)
    return found


def _columns(epochs: Sequence[int]) -> list[list[int]]:
    """Return the epochs of each column."""
    stretch = -(-len(epochs) // MAX_BARS)
    return [list(epochs[at : at + stretch]) for at in range(0, len(epochs), stretch)]


def _name(epochs: Sequence[int]) -> str:
    return f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}"


def _distribution(by_epoch: dict[int, Rewards], columns: Sequence[Sequence[int]]) -> Markup:
    """Return the share of each reward, or range of rewards, over the epochs."""
    rewards = [
        [value for epoch in epochs for values in by_epoch[epoch].values() for value in values] for epochs in columns
    ]
    finite = sorted({value for column in rewards for value in column if is_finite(value)})
    if not finite:
        return tag("p", {"class": "empty"}, "No episode has a usable reward.")
    if len(finite) <= MAX_VALUES:
        names = [number(value) for value in finite]
        row_of = {value: row for row, value in enumerate(finite)}
    else:
        low, width = finite[0], (finite[-1] - finite[0]) / MAX_VALUES
        names = [f"{number(low + row * width, 3)} to {number(low + (row + 1) * width, 3)}" for row in range(MAX_VALUES)]
        row_of = {value: min(int((value - low) / width), MAX_VALUES - 1) for value in finite}
    has_none = any(value is None for column in rewards for value in column)
    counts = [[0] * len(columns) for _ in range(len(names) + has_none)]
    for place, column in enumerate(rewards):
        for value in column:
            counts[row_of[value] if is_finite(value) else -1][place] += 1
    # From the highest reward down; below them the episodes whose reward is not usable.
    names, counts = [*names[::-1], *["none"] * has_none], [*counts[: len(names)][::-1], *counts[len(names) :]]
    totals = [max(len(column), 1) for column in rewards]
    cells = [[count / total or None for count, total in zip(row, totals, strict=True)] for row in counts]
    words = [
        [
            f"{_name(epochs)}\nreward {name}: {count:,} of {total:,} episodes, {count / total:.0%}"
            for count, total, epochs in zip(row, totals, columns, strict=True)
        ]
        for name, row in zip(names, counts, strict=True)
    ]
    return heat_map(
        "Share of the episodes by reward",
        names,
        [str(epochs[0]) for epochs in columns],
        cells,
        words,
        value_range=(0.0, max(share for row in cells for share in row if share is not None)),
        size=(WIDE[0], 24 * len(names) + 44),
    )


def _by_example(by_epoch: dict[int, Rewards], columns: Sequence[Sequence[int]], places: Sequence[Place]) -> Markup:
    """Return the mean reward of each example over the epochs, the hardest examples on top."""
    means: dict[str, list[Value]] = {}
    examples = dict.fromkeys(example for rewards in by_epoch.values() for example in rewards)
    for example in examples:
        of_columns = ([v for epoch in epochs for v in by_epoch[epoch].get(example, ())] for epochs in columns)
        means[example] = [_mean(values) for values in of_columns]
    # Hard is what still fails: the last quarter of the epochs in which the example was seen.
    late = {example: [value for value in row if value is not None] for example, row in means.items()}
    late = {example: row[-max(1, len(row) // 4) :] for example, row in late.items() if row}
    hardest = sorted(late, key=lambda example: fmean(late[example]))
    kept = hardest[:MAX_EXAMPLES]
    finite = [value for row in means.values() for value in row if value is not None]
    if not finite:
        return joined(())
    seen = [sum(value is not None for value in means[example]) for example in hardest]
    if len(columns) > 1 and sum(seen) < 2 * len(seen):
        return _hardest_of_late_epochs(by_epoch, places)
    asked = questions(places, kept)
    labels = [f"{shortened(example, 14)} {asked.get(example, '')[:28]}".strip() for example in kept]
    words = [
        [
            "\n".join(filter(None, [example, asked.get(example), f"{_name(epochs)}: mean reward {number(value)}"]))
            for value, epochs in zip(means[example], columns, strict=True)
        ]
        for example in kept
    ]
    left = len(hardest) - len(kept)
    return heat_map(
        "Mean reward by example, the hardest first",
        labels,
        [str(epochs[0]) for epochs in columns],
        [means[example] for example in kept],
        words,
        value_range=(min(finite), max(finite)),
        label_width=max(110, 7 * max(map(len, labels)) + 7),
        size=(WIDE[0], 20 * len(kept) + 44),
        note=f"{len(kept)} of {len(hardest)} examples; the {left:,} easier ones are left out." if left else None,
    )


def _hardest_of_late_epochs(by_epoch: dict[int, Rewards], places: Sequence[Place]) -> Markup:
    """Return a table for a run that sees few examples twice, so that an example has no course over the epochs."""
    epochs = sorted(by_epoch)
    late = epochs[-max(1, len(epochs) // 4) :]
    rewards: dict[str, list[float]] = defaultdict(list)
    for epoch in late:
        for example, values in by_epoch[epoch].items():
            rewards[example] += filter(is_finite, values)
    ranked = sorted(((fmean(values), len(values), example) for example, values in rewards.items() if values))
    kept = ranked[:MAX_LISTED]
    asked = questions(places, (example for _, _, example in kept))
    rows = [(example, asked.get(example, "")[:MAX_QUESTION], number(mean), count) for mean, count, example in kept]
    name = f"Hardest examples of epochs {late[0]} to {late[-1]}"
    words = f"{len(kept)} of the {len(ranked):,} examples of these epochs; few examples are seen in two epochs."
    return tag(
        "div",
        {},
        subheading(name),
        tag("p", {"class": "note"}, words),
        table(("example", "question", "mean reward", "episodes"), rows, numbers=(2, 3)),
    )


def _mean(values: Sequence[Value]) -> Value:
    finite = [value for value in values if is_finite(value)]
    return fmean(finite) if finite else None


def validation_section(run: RunRecords, places: Sequence[Place]) -> Markup | None:
    """Return the section on curriculum and validation; None for a run that has neither."""
    curriculum = (run.config.get("finetuning") or {}).get("curriculum_learning") or {}
    has_curriculum = bool(curriculum.get("enabled"))
    if not run.validations and not has_curriculum:
        return None
    figures = [*(_curriculum(run) if has_curriculum else ()), *(_validation(run) if run.validations else ())]
    return section(
        "validation",
        " and ".join(["Curriculum"] * has_curriculum + ["Validation"] * bool(run.validations)).replace(" V", " v"),
        charts(*figures),
        *_least_trained(run, places),
        *_all_validations(run),
    )


def _curriculum(run: RunRecords) -> Iterator[Markup]:
    epochs = [row["epoch"] for row in run.rewards]
    percents = [100 * value if is_finite(value := row.get("curriculum_percentile")) else None for row in run.rewards]
    at = [row["epoch"] for row in run.metrics]
    groups = [row.get("curriculum_groups") for row in run.metrics]
    dropped = [row.get("curriculum_dropped_groups") for row in run.metrics]
    yield line_chart("Curriculum, % of the groups", [Line("%", epochs, percents, 3, "steps")], y_range=(0.0, 105.0))
    yield line_chart("Groups", [Line("trained", at, groups), Line("dropped, rewards alike", at, dropped, 1)])


def _validation(run: RunRecords) -> Iterator[Markup]:
    at = [row["epoch"] for row in run.validations]
    means = [row.get("avg_reward") for row in run.validations]
    yield line_chart("Validation reward", [Line("mean", at, means, 1)], x_label="epochs before it")


def _least_trained(run: RunRecords, places: Sequence[Place]) -> Iterator[Markup]:
    examples = run.curriculum.get("examples") or {}
    if examples:
        ordered = sorted(examples.items(), key=lambda item: item[1].get("epochs_included", 0))[:MAX_EXAMPLES]
        asked = questions(places, (name for name, _ in ordered))
        keys = ("epochs_included", "reward_mean", "reward_diff")
        rows = [
            (name, asked.get(name, "")[:MAX_QUESTION], *(number(state.get(key)) for key in keys))
            for name, state in ordered
        ]
        more = f" of {len(examples):,}" if len(examples) > MAX_EXAMPLES else ""
        headers = ("example", "question", "epochs trained", "mean reward, as trained", "difference")
        yield details(f"Examples trained least ({len(rows)}{more})", table(headers, rows, numbers=(2, 3, 4)))


def _all_validations(run: RunRecords) -> Iterator[Markup]:
    rows = run.validations
    if not rows:
        return
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if name not in ("epoch", "first_error")]
    names = [name for name in names if not any(isinstance(row.get(name), dict | list) for row in rows)]
    body = [(number(row["epoch"]), *(number(row.get(name)) for name in names)) for row in rows]
    whole = table(("epochs before it", *names), body, numbers=range(len(names) + 1))
    yield details(f"All validations ({len(rows)})", whole)
    for row in [row for row in rows if row.get("first_error")][:3]:
        yield notice(f"Validation after {row['epoch']} epochs: {row['first_error']}", kind="error")


def timings_section(run: RunRecords) -> Markup:
    """Return the section on time by phase, memory, and compiled programs."""
    if not run.timings:
        return section("timings", "Time and memory", tag("p", {"class": "empty"}, "No epoch has ended yet."))
    rows = run.warm_timings
    epochs = [row["epoch"] for row in rows]
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("seconds_"))
    phases = [name for name in names if name not in NO_PHASES and not name.startswith(ON_DEVICE)]
    layers = {name.removeprefix("seconds_"): [row.get(name) or 0.0 for row in rows] for name in phases}
    rest = [max(0.0, (row.get("seconds") or 0.0) - sum(row.get(name) or 0.0 for name in phases)) for row in rows]
    layers["other"] = rest
    totals = {name: sum(values) for name, values in layers.items()}
    whole = sum(totals.values()) or 1.0
    shares = {f"{name}, {duration(total)}": 100 * total / whole for name, total in totals.items()}
    figures = [
        stacked_chart("Seconds by phase", epochs, layers, unit=" s"),
        bar_chart(
            "Share of the time", {name: round(share, 1) for name, share in shares.items()}, unit=" %", whole=100.0
        ),
    ]
    if on_device := [name for name in names if name.startswith(ON_DEVICE)]:
        spent = {name.removeprefix(ON_DEVICE): [row.get(name) or 0.0 for row in rows] for name in on_device}
        figures.append(stacked_chart("Seconds of the device; idle: it waits for agents", epochs, spent, unit=" s"))
    cold = {row["epoch"]: row.get("seconds") or 0.0 for row in run.timings if row not in rows}
    epochs = [row["epoch"] for row in run.timings]
    figures += _memory(run.timings, epochs)
    for name, caption in (
        ("compiles", "Compiled programs, in all"),
        ("seconds_episode_max", "Seconds of the longest episode"),
        ("seconds_reward", "Seconds of evaluators, summed over episodes"),
    ):
        figures.append(line_chart(caption, [Line(name, epochs, [row.get(name) for row in run.timings], 4)]))
    note = None
    if cold:
        mean = duration(sum(row.get("seconds") or 0.0 for row in rows) / len(rows))
        note = (
            f"An epoch takes {mean} on average. The phases are without epoch{'s' * (len(cold) > 1)} "
            f"{', '.join(map(str, cold))}, in which a process begins and compiles: {duration(sum(cold.values()))}."
        )
    return section("timings", "Time and memory", charts(*figures), lead=note)


def _memory(rows: Sequence[Row], epochs: Sequence[int]) -> Iterator[Markup]:
    names = dict.fromkeys(key for row in rows for key in row if key.endswith("_bytes") and is_finite(row[key]))
    if not names:
        return
    lines = []
    for color, name in enumerate(names):
        values = [row.get(name) for row in rows]
        gibibytes = [value / 2**30 if is_finite(value) else None for value in values]
        lines.append(Line(name.removesuffix("_bytes").replace("_", " "), epochs, gibibytes, color))
    tops = [f"{line.name}: {byte_count(max(filter(is_finite, line.ys)) * 2**30)}" for line in lines]
    yield line_chart("Memory, GiB", lines, note="; ".join(tops))
