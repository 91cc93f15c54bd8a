"""The picture of a comparison, `compare.png`: training and validation rewards of each group with the bootstrap band."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxft.report.comparison import Comparison
from jaxft.report.comparison_curves import CURVES, REWARD, VALIDATION, X_AXES, GroupCurves, group_curves
from jaxft.report.run_groups import RunGroup
from jaxft.runs.console import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#2563b8", "#d1590a", "#00805f", "#a64d8c", "#8a6d00", "#2f8fbf", "#7a4b2a", "#6b7280")
"""Colours of the groups: `--c0` to `--c7` of assets/page.css, in its light form."""


def drawn_groups(comparison: Comparison) -> tuple[RunGroup, ...]:
    """Return the groups that are drawn: all, or as many as there are colours, those with the highest final reward."""
    if len(comparison.groups) <= len(COLORS):
        return comparison.groups
    rewards = comparison.figures.get("final_reward", (None,) * len(comparison.groups))

    def rank(group: RunGroup) -> float:
        reward = rewards[comparison.groups.index(group)]
        return float("-inf") if reward is None else reward.mean

    best = sorted(comparison.groups, key=rank, reverse=True)[: len(COLORS)]
    return tuple(group for group in comparison.groups if group in best)


def comparison_png(comparison: Comparison, x_axis: str = "epochs") -> bytes:
    """Return the picture: a panel of training rewards and, if there were validations, one of their rewards."""
    groups = drawn_groups(comparison)
    panels = {name: [group_curves(group, name, x_axis) for group in groups] for name in (REWARD, VALIDATION)}
    panels = {name: curves for name, curves in panels.items() if name == REWARD or any(each.singles for each in curves)}
    # Not pyplot, which keeps figures in global state and looks for a screen.
    figure = Figure(figsize=(8, 1.0 + 3.8 * len(panels)), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    every_axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (name, curves) in zip(every_axes, panels.items(), strict=True):
        draw_curves(axes, curves)
        axes.set(xlabel=X_AXES[x_axis], ylabel=CURVES[name])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    every_axes[0].set_title(curves_note(comparison), fontsize=8, color="#5c636d", loc="left", wrap=True)
    handles, labels = every_axes[0].get_legend_handles_labels()
    if handles:
        # Names of groups are a user's: a dollar sign begins no formula.
        columns = 1 if max(map(len, labels)) > 45 else 2
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)
    picture = io.BytesIO()
    canvas.print_png(picture)
    return picture.getvalue()


def curves_note(comparison: Comparison) -> str:
    """Return how the curves are drawn, and which groups, in a sentence or two."""
    drawn, count = len(drawn_groups(comparison)), len(comparison.groups)
    note = "Band: 95 % bootstrap interval of the mean over seeds. Thin: single seeds. Dashed: runs that did not finish."
    return note + (f" The {drawn} groups of {count} with the highest final reward are drawn." if drawn < count else "")


def draw_curves(axes: "Axes", every_curves: Sequence[GroupCurves]) -> None:
    """Draw the curves of some groups, a colour for each."""
    for color, curves in zip(COLORS, every_curves, strict=False):
        # The space: matplotlib leaves labels out that begin with an underscore.
        label = f" {drawable(curves.group.name)} ({seeds_text(len(curves.group.finished))})"
        is_alone = len(curves.group.finished) == 1
        for run, curve in curves.singles:
            if run.status != "finished":
                axes.plot(curve.xs, curve.ys, color=color, linewidth=0.9, linestyle="--", alpha=0.6)
            elif not is_alone:
                axes.plot(curve.xs, curve.ys, color=color, linewidth=0.7, alpha=0.4)
        if curves.mean is None:
            axes.plot([], [], color=color, linewidth=0.9, linestyle="--", label=label)
            continue
        if curves.lows is not None and curves.highs is not None:
            axes.fill_between(curves.mean.xs, curves.lows, curves.highs, color=color, alpha=0.18, linewidth=0)
        marker = "o" if len(curves.mean.xs) <= 30 else ""
        axes.plot(curves.mean.xs, curves.mean.ys, color=color, linewidth=2, marker=marker, markersize=3.5, label=label)
    axes.margins(x=0.02, y=0.06)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def drawable(name: str) -> str:
    """Return a name on one line, without characters that no font has."""
    return printable(" ".join(name.split()))


def seeds_text(count: int) -> str:
    """Return a number of seeds in words."""
    return "none finished" if count == 0 else "1 seed" if count == 1 else f"{count} seeds"
