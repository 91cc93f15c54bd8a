"""The reward plot of a run: training and validation rewards per epoch."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxft.runs.directory import RunDirectory
from jaxft.runs.files import PLOT_FILE

BAND = "middle half of the examples"


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
    epochs = _column(reward_history, "epoch")
    # Not pyplot, which keeps figures in global state and looks for a screen.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.margins(x=0.02, y=0.06)

    if epochs:
        _draw_training(axes, reward_history)
    if validation_history:
        at, rewards = _column(validation_history, "epoch"), _column(validation_history, "avg_reward")
        size = 5 if len(at) <= 30 else 3
        axes.plot(at, rewards, color="tab:orange", linewidth=1, marker="D", markersize=size, label="validation")

    axes.set_title(directory.path.name, parse_math=False)
    axes.set_xlabel("epoch, counted from 0")
    axes.set_ylabel("the evaluator's reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if len(epochs) == 1:
        axes.set_xlim(epochs[0] - 1, epochs[0] + 1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False)

    picture = io.BytesIO()
    canvas.print_png(picture)
    return directory.write_bytes(PLOT_FILE, picture.getvalue())


def _draw_training(axes: Axes, reward_history: Sequence[Mapping[str, float | None]]) -> None:
    """Draw the mean training reward, its moving average and its band."""
    names = ("epoch", "reward_mean", "group_reward_q25", "group_reward_q75")
    epochs, means, lows, highs = (_column(reward_history, name) for name in names)
    if len(epochs) == 1:
        # A band over one epoch has no width, so it is drawn as a bar.
        axes.vlines(epochs, lows, highs, color="tab:blue", alpha=0.4, linewidth=4, label=BAND)
        axes.plot(epochs, means, color="tab:blue", marker="o", linestyle="", label="mean")
        return
    window = moving_average_window(len(epochs))
    marker = "o" if len(epochs) <= 30 else ""
    axes.fill_between(epochs, lows, highs, color="tab:blue", alpha=0.15, linewidth=0, label=BAND)
    axes.plot(epochs, means, color="tab:blue", alpha=0.55, linewidth=1.1, marker=marker, markersize=3.5, label="mean")
    if len(epochs) > window:
        averages = moving_average(means, window)
        axes.plot(epochs, averages, color="navy", linewidth=2, label=f"mean of {window} epochs")


def moving_average_window(epochs: int) -> int:
    """Return the number of epochs that the moving average covers: odd, about a tenth of the run, from 3 to 25.

    >>> [moving_average_window(epochs) for epochs in (2, 20, 100, 500)]
    [3, 3, 11, 25]
    """
    return min(max(epochs // 10, 3), 25) | 1


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
