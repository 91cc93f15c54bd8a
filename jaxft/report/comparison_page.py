"""The page of a comparison, `compare.html`: curves with hover, tables of figures and settings, and all runs."""

from collections.abc import Callable, Sequence

from jaxft.report.charts import SMALL, WIDE, Band, Line, line_chart
from jaxft.report.comparison import Comparison
from jaxft.report.comparison_curves import CURVES, REWARD, VALIDATION, X_AXES, group_curves, run_curve
from jaxft.report.comparison_plots import curves_note, drawn_groups, seeds_text
from jaxft.report.comparison_text import figure_rows, figures_title, overview, with_interval
from jaxft.report.markup import Markup, joined, number, tag
from jaxft.report.page import charts, notice, page, section, subheading, table

MAX_NOTICES = 4
"""Largest number of notes at the top of the page; all stand at its end."""

BADGES = {"finished": "good", "failed": "error", "unfinished": "warning"}


def comparison_page(comparison: Comparison, x_axis: str = "epochs") -> str:
    """Return the page as one HTML document that loads nothing."""
    names = [group.name for group in comparison.groups]
    runs = len(comparison.runs)
    title = f"Comparison of {runs} {'run' if runs == 1 else 'runs'}"
    header = tag("header", {}, tag("h1", {}, title), tag("p", {"class": "lead"}, overview(comparison)))
    boxes = [notice(note, kind="warning") for note in comparison.notes[:MAX_NOTICES]]
    columns = range(1, len(names) + 1)
    sections = [
        ("rewards", "Rewards", _reward_charts(comparison, x_axis)),
        ("figures", "Figures", tag("p", {"class": "lead"}, figures_title(comparison)),
         table(["", *names], figure_rows(comparison), numbers=columns)),
        ("better", "Which is better", *_improvements(comparison)),
        ("settings", "Settings that differ", _settings(comparison, names)),
        ("metrics", "Other metrics", _other_charts(comparison, x_axis)),
        ("runs", "Runs", *_runs(comparison)),
    ]  # fmt: skip
    if not comparison.improvements:
        del sections[2]
    nav = [(key, words) for key, words, *_ in sections]
    made = [section(key, words, *content) for key, words, *content in sections]
    return page(title, header, *boxes, *made, nav=nav)


def in_two_sizes(draw: Callable[[tuple[int, int]], Sequence[Markup]]) -> Markup:
    """Return charts twice, of which a page shows those that suit its width, as small text would be unreadable."""
    wide, narrow = charts(*draw(WIDE), is_wide=True), charts(*draw(SMALL), is_wide=True)
    return joined([tag("div", {"class": "only-wide"}, wide), tag("div", {"class": "only-narrow"}, narrow)])


def _reward_charts(comparison: Comparison, x_axis: str) -> Markup:
    def draw(size: tuple[int, int]) -> list[Markup]:
        made = [_chart(comparison, REWARD, x_axis, size, curves_note(comparison))]
        has_validations = any(run.validations for run in comparison.runs)
        return made + [_chart(comparison, VALIDATION, x_axis, size)] * has_validations

    return in_two_sizes(draw)


def _other_charts(comparison: Comparison, x_axis: str) -> Markup:
    runs = [run for group in drawn_groups(comparison) for run in group.runs]
    known = [name for name in CURVES if any(run_curve(run, name).xs for run in runs)]
    return charts(*(_chart(comparison, name, x_axis) for name in known if name not in (REWARD, VALIDATION)))


def _chart(
    comparison: Comparison, metric: str, x_axis: str, size: tuple[int, int] = SMALL, note: str | None = None
) -> Markup:
    lines, singles, bands = [], [], []
    for color, group in enumerate(drawn_groups(comparison)):
        curves = group_curves(group, metric, x_axis)
        if curves.mean is not None:
            name = f"{group.name} ({seeds_text(len(group.finished))})"
            lines.append(Line(name, curves.mean.xs, curves.mean.ys, color))
            if curves.lows is not None and curves.highs is not None:
                bands.append(Band("", curves.mean.xs, curves.lows, curves.highs, color))
        for run, curve in curves.singles:
            if run.status != "finished":
                singles.append(Line("", curve.xs, curve.ys, color, "dashed"))
            elif len(group.finished) > 1:
                singles.append(Line("", curve.xs, curve.ys, color, "faint"))
    return line_chart(CURVES[metric], [*lines, *singles], bands, x_label=X_AXES[x_axis], size=size, note=note)


def _improvements(comparison: Comparison) -> list[Markup]:
    lead = (
        "Probability that a run of the first group ends with a higher reward than a run of the second, over all pairs "
        "of their runs; a tie counts half."
    )
    rows = [[each.group, each.other, with_interval(each.probability, each.interval)]
            for each in comparison.improvements]  # fmt: skip
    return [tag("p", {"class": "lead"}, lead), table(["group", "over", "probability"], rows, numbers=[2])]


def _settings(comparison: Comparison, names: list[str]) -> Markup:
    if not comparison.differences:
        return tag("p", {}, "No setting differs but the seed.")
    rows = [[each.path, *each.values, "may" if each.has_effect else "does not"] for each in comparison.differences]
    return table(["", *names, "changes training"], rows)


def _runs(comparison: Comparison) -> list[Markup]:
    rows = []
    for group in comparison.groups:
        for run in group.runs:
            figures = run.figures(comparison.last_epochs)
            rows.append([
                str(run.records.path),
                group.name,
                "–" if run.seed is None else str(run.seed),
                tag("span", {"class": f"badge {BADGES[run.status]}"}, run.status),
                f"{len(run.rewards)}" + (f" of {run.num_epochs}" if run.num_epochs else ""),
                str(run.resumes),
                number(figures.get("final_reward") if run.status == "finished" else None),
                number(figures.get("best_validation_reward") if run.status == "finished" else None),
                number(figures.get("seconds")),
            ])  # fmt: skip
    headers = ["run", "group", "seed", "", "epochs", "resumes", "final reward", "best validation", "seconds"]
    made = [table(headers, rows, numbers=[2, 4, 5, 6, 7, 8])]
    for title, lines in (
        ("Left out", [f"'{each.path}' {each.reason}" for each in comparison.left_out]),
        ("Notes", list(comparison.notes)),
    ):
        if lines:
            made += [subheading(title), tag("ul", {}, *(tag("li", {}, line) for line in lines))]
    return made
