"""Text, picture and page of a run that is held against a reference history."""

import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxft.report.charts import Band, Line, line_chart
from jaxft.report.compared_runs import VERDICT_KIND
from jaxft.report.comparison_page import in_two_sizes
from jaxft.report.comparison_plots import COLORS, drawable
from jaxft.report.comparison_text import aligned, seeds
from jaxft.report.intervals import Interval
from jaxft.report.markup import Markup, number, tag
from jaxft.report.page import code, notice, page, section, subheading, table
from jaxft.report.records import flat
from jaxft.report.references import Reference, Verdict
from jaxft.report.run_groups import shown

BAND_NOTE = (
    "Band: 95 % prediction interval for one more seed, at each epoch. Thin: the seeds of the reference. Thick: the run."
)
MAX_DIFFERENCES = 20


def verdict_text(verdicts: Sequence[Verdict], width: int = 120) -> str:
    """Return the verdicts as text for a terminal: a sentence for each run, then its figures and its differences."""
    parts = [reference_text(verdicts[0].reference)]
    for verdict in verdicts:
        parts.append(f"{verdict.run.records.path} is {verdict.sentence}")
        if verdict.figures:
            parts.append(aligned([FIGURE_HEADERS, *figure_rows(verdict)], width))
        lines = [f"- {words}" for words in qualifications(verdict)]
        if lines:
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def reference_text(reference: Reference) -> str:
    """Return what the reference is, in one line."""
    return (
        f"Reference {reference.experiment}: seeds {seeds(run.seed for run in reference.runs)}, "
        f"{reference.num_epochs} epochs, made by: {reference.command}"
    )


FIGURE_HEADERS = ["", "this run", "seeds of the reference", "expected", ""]


def figure_rows(verdict: Verdict) -> list[list[str]]:
    """Return a row for each final figure: name, value, values of the reference, interval, and the place in it."""
    return [
        [
            each.name,
            number(each.value),
            f"{number(min(each.references))} to {number(max(each.references))}",
            _range(each.interval),
            each.place or "not judged",
        ]
        for each in verdict.figures
    ]


def qualifications(verdict: Verdict) -> list[str]:
    """Return what qualifies a verdict: other settings, the length of the run, its seed, and the machine."""
    reference, run = verdict.reference, verdict.run
    found = [f"{path}: {ours} here, {theirs} in the reference" for path, theirs, ours in verdict.differences]
    if len(found) > MAX_DIFFERENCES:
        found = [*found[:MAX_DIFFERENCES], f"and {len(found) - MAX_DIFFERENCES} more settings"]
    if len(run.rewards) != reference.num_epochs:
        found.append(
            f"{len(run.rewards)} epochs here, {reference.num_epochs} in the reference: the first {len(verdict.places)} "
            "are compared, and figures of result.json are not judged"
        )
    if run.seed in {each.seed for each in reference.runs}:
        found.append(f"seed {run.seed} is one of the reference's: on an equal machine the run repeats it")
    about = run.records.environment
    ours, theirs = about.get("versions"), reference.machine.get("versions")
    if isinstance(ours, dict) and isinstance(theirs, dict):
        other = [f"{name} {ours.get(name)} ({theirs[name]})" for name in theirs if ours.get(name) != theirs[name]]
        if other:
            found.append(f"other versions than the reference's, which are in brackets: {', '.join(other)}")
    if about.get("devices") != reference.machine.get("devices"):
        found.append(f"devices {about.get('devices')} here, {reference.machine.get('devices')} in the reference")
    elif about.get("cpu_count") != reference.machine.get("cpu_count"):
        found.append(f"{about.get('cpu_count')} cores here, {reference.machine.get('cpu_count')} in the reference")
    return found


def verdict_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return verdicts as plain values for JSON; an interval without ends is null."""
    return {
        "kind": VERDICT_KIND,
        "format_version": 1,
        "experiment": verdicts[0].reference.experiment,
        "verdicts": [
            {
                "path": str(verdict.run.records.path),
                "is_expected": verdict.is_expected,
                "sentence": verdict.sentence,
                "band": [_ends(interval) for interval in verdict.band],
                "places": list(verdict.places),
                "figures": [
                    {
                        "name": each.name,
                        "value": each.value if math.isfinite(each.value) else None,
                        "references": list(each.references),
                        "interval": None if each.interval is None else _ends(each.interval),
                        "place": each.place,
                    }
                    for each in verdict.figures
                ],
                "differences": [list(each) for each in verdict.differences],
                "qualifications": qualifications(verdict),
            }
            for verdict in verdicts
        ],
    }


def verdict_png(verdicts: Sequence[Verdict]) -> bytes:
    """Return a picture with a panel per run: its training reward, the band, and the seeds of the reference."""
    figure = Figure(figsize=(8, 0.3 + 4.0 * len(verdicts)), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for axes, verdict in zip(figure.subplots(len(verdicts), squeeze=False)[:, 0], verdicts, strict=True):
        reference, rewards = verdict.reference, verdict.run.rewards
        bounded = [(at, *interval) for at, interval in enumerate(verdict.band) if math.isfinite(interval.low)]
        if bounded:
            epochs, lows, highs = zip(*bounded, strict=True)
            label = f"95 % prediction interval, {len(reference.runs)} seeds"
            axes.fill_between(epochs, lows, highs, color=COLORS[7], alpha=0.22, linewidth=0, label=label)
        for each in reference.runs:
            axes.plot(each.rewards, color=COLORS[7], linewidth=0.7, alpha=0.6)
        axes.plot(rewards, color=COLORS[0], linewidth=2, label=f" {drawable(verdict.run.name)}")
        outside = [at for at, place in enumerate(verdict.places) if place in ("below", "above")]
        if outside:
            axes.plot(outside, [rewards[at] for at in outside], "o", color=COLORS[1], markersize=4, label="outside")
        words = "as expected" if verdict.is_expected else "not as expected"
        axes.set_title(
            f"{drawable(verdict.run.name)} against {reference.experiment}: {words}", parse_math=False, fontsize=11
        )
        axes.set(xlabel="epoch, counted from 0", ylabel="training reward")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.margins(x=0.02, y=0.06)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        for text in axes.legend(frameon=False, loc="lower right").get_texts():
            text.set_parse_math(False)
    picture = io.BytesIO()
    canvas.print_png(picture)
    return picture.getvalue()


def verdict_page(verdicts: Sequence[Verdict]) -> str:
    """Return the page as one HTML document that loads nothing."""
    reference = verdicts[0].reference
    title = f"Runs against the reference {reference.experiment}"
    header = tag("header", {}, tag("h1", {}, title),
                 tag("p", {"class": "lead"}, reference_text(reference)))  # fmt: skip
    names = [str(verdict.run.records.path) for verdict in verdicts]
    sections = [section(f"run{at}", names[at], *_verdict_parts(verdict)) for at, verdict in enumerate(verdicts)]
    made_on = [f"{path}: {shown(value)}" for path, value in flat(reference.machine).items()]
    facts = tag("ul", {}, *(tag("li", {}, line) for line in made_on))
    about = section("reference", "The reference", code(reference.command), facts)
    nav = [(f"run{at}", verdict.run.name) for at, verdict in enumerate(verdicts)] + [("reference", "The reference")]
    return page(title, header, *sections, about, nav=nav)


def _verdict_parts(verdict: Verdict) -> list[Markup]:
    sentence = verdict.sentence[0].upper() + verdict.sentence[1:] + "."
    parts = [notice(sentence, kind="info" if verdict.is_expected else "error")]
    parts.append(in_two_sizes(lambda size: [_chart(verdict, size)]))
    if verdict.figures:
        parts += [subheading("Final figures"), table(FIGURE_HEADERS, figure_rows(verdict), numbers=[1, 2, 3])]
    lines = qualifications(verdict)
    if lines:
        parts += [subheading("What qualifies the verdict"), tag("ul", {}, *(tag("li", {}, line) for line in lines))]
    return parts


def _chart(verdict: Verdict, size: tuple[int, int]) -> Markup:
    rewards, epochs = verdict.run.rewards, range(len(verdict.band))
    lines = [Line(verdict.run.name, range(len(rewards)), rewards, 0)]
    outside = [at for at, place in enumerate(verdict.places) if place in ("below", "above")]
    if outside:
        lines.insert(0, Line("outside", outside, [rewards[at] for at in outside], 1, "dots"))
    lines += [Line("", range(len(each.rewards)), each.rewards, 7, "faint") for each in verdict.reference.runs]
    lows, highs = [interval.low for interval in verdict.band], [interval.high for interval in verdict.band]
    band = Band("expected", epochs, lows, highs, 7)
    return line_chart("training reward", lines, [band], size=size, note=BAND_NOTE)


def _range(interval: Interval | None) -> str:
    return "–" if interval is None else f"{number(interval.low)} to {number(interval.high)}"


def _ends(interval: Interval) -> list[float | None]:
    return [end if math.isfinite(end) else None for end in interval]
