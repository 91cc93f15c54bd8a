"""The reward plot of a run: training and validation rewards per epoch."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxft.runs.directory import RunDirectory
from jaxft.runs.files import PLOT_FILE


def plot_rewards(
    directory: RunDirectory,
    reward_history: Sequence[Mapping[str, float | None]],
    validation_history: Sequence[Mapping[str, float | None]] = (),
) -> Path:
    """Draw `reward_plot.png` and return its path; it replaces an earlier plot in one step.

    It shows the mean training reward with its moving average, a band between the quartiles of the examples' mean
    rewards, and the validation reward.

    Args:
        directory: the run directory; its name becomes the title.
        reward_history: a row per epoch with `epoch`, which counts from 0, `reward_mean`, `group_reward_q25` and
            `group_reward_q75`. A reward that is missing, None or not finite leaves a gap.
        validation_history: a row per validation with `avg_reward` and the `epoch` that followed it.
    """
    # Not pyplot, which keeps figures in global state and looks for a screen.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.margins(x=0.02, y=0.06)

    names = ("epoch", "reward_mean", "group_reward_q25", "group_reward_q75")
    epochs, means, lows, highs = (_column(reward_history, name) for name in names)
    axes.fill_between(epochs, lows, highs, color="tab:blue", alpha=0.15, label="middle half of the examples")
    axes.plot(epochs, means, color="tab:blue", alpha=0.55, linewidth=1.1, marker=".", label="mean")
    window = min(max(len(epochs) // 10, 3), 25) | 1  # odd, about a tenth of the run
    if len(epochs) > window:
        averages = moving_average(means, window)
        axes.plot(epochs, averages, color="navy", linewidth=2, label=f"mean of {window} epochs")
    if validation_history:
        at, rewards = _column(validation_history, "epoch"), _column(validation_history, "avg_reward")
        axes.plot(at, rewards, color="tab:orange", linewidth=1, marker="D", markersize=4, label="validation")

    axes.set_title(directory.path.name, parse_math=False)
    axes.set_xlabel("epoch, counted from 0")
    axes.set_ylabel("the evaluator's reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False)

    picture = io.BytesIO()
    canvas.print_png(picture)
    return directory.write_bytes(PLOT_FILE, picture.getvalue())


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and the `window // 2` values on each side; ends have fewer, and NaN is left out.

    >>> moving_average([0.0, 1.0, 5.0, float("nan"), 4.0], 3)
    [0.5, 2.0, 3.0, 4.5, 4.0]
    """
    averages = []
    for center in range(len(values)):
        around = values[max(0, center - window // 2) : center + window // 2 + 1]
        known = [value for value in around if not math.isnan(value)]
        averages.append(sum(known) / len(known) if known else math.nan)
    return averages


def _column(history: Sequence[Mapping[str, float | None]], name: str) -> list[float]:
    values = (row.get(name) for row in history)
    return [value if value is not None and math.isfinite(value) else math.nan for value in values]
