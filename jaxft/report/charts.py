"""Charts of lines with bands, of which `templates/charts.html` makes inline SVG.

A chart is a `<figure>` with a caption, a legend and an SVG that fills the width of its place. Colours are chosen so
that colour-blind people tell them apart. Every column of a chart can be pointed at to read its values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple, TypeGuard

from markupsafe import Markup

from jaxft.report.pages import ENVIRONMENT, number

Value = float | None
"""A number; None, NaN and infinities leave a gap."""

NUM_COLORS = 8
SMALL = (420, 220)
WIDE = (1180, 320)
MAX_COLUMNS = 120
"""Largest number of columns that can be pointed at."""
SHADES = 9

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 34
_TEMPLATE: Any = ENVIRONMENT.get_template("charts.html").module


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        name: its name in the legend and on hover; a line without a name is in neither.
        xs: ascending positions.
        ys: a value for each position.
        color: index of its colour, taken modulo `NUM_COLORS`.
        style: how it is drawn; `dots` are for values that stand alone, `steps` for values that hold until the next.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[Value]
    color: int = 0
    style: Literal["line", "faint", "dashed", "dots", "steps"] = "line"

    @property
    def classes(self) -> str:
        """Classes of the line in a style sheet."""
        return f"{self.style} c{self.color % NUM_COLORS}"


@dataclass(frozen=True)
class Band:
    """An area between two values for each position, such as quartiles or a confidence interval."""

    name: str
    xs: Sequence[float]
    lows: Sequence[Value]
    highs: Sequence[Value]
    color: int = 0
    is_faint: bool = False

    @property
    def classes(self) -> str:
        """Classes of the band in a style sheet, after the one that says how it is drawn."""
        return f"{'faint ' * self.is_faint}c{self.color % NUM_COLORS}"


class _Frame(NamedTuple):
    """The plotting area in SVG units, and the ranges of both axes."""

    width: int
    height: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: int = _LEFT
    top: int = _TOP

    @property
    def right(self) -> int:
        return self.width - _RIGHT

    @property
    def bottom(self) -> int:
        return self.height - _BOTTOM

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)

    def y_ticks(self) -> list[float]:
        return round_ticks(*self.y_range, max(self.height // 48, 2))

    def x_ticks(self) -> list[float]:
        # Epochs are whole numbers, so a short run has no ticks between them.
        low, high = self.x_range
        ticks = round_ticks(low, high, min(max(self.width // 80, 2), max(math.ceil(high - low), 1)))
        return [tick for tick in ticks if tick == int(tick)]


def line_chart(
    caption: str,
    lines: Sequence[Line],
    bands: Sequence[Band] = (),
    *,
    x_label: str = "epoch",
    size: tuple[int, int] = SMALL,
    y_range: tuple[float, float] | None = None,
    note: str | None = None,
) -> Markup:
    """Return a chart of lines over bands; nothing if there is no value.

    Args:
        caption: the name of what is drawn.
        lines: the lines; the first lies on top.
        bands: areas below the lines; the first lies on top.
        x_label: name of the horizontal axis.
        size: width and height in SVG units, which are pixels where the place is as wide as that.
        y_range: the vertical range; by default that of all values.
        note: a sentence below the caption.
    """
    series: list[Line | Band] = [*lines, *bands]
    xs = sorted({x for each in series for x in each.xs})
    columns = [line.ys for line in lines] + [ys for band in bands for ys in (band.lows, band.highs)]
    values = [value for column in columns for value in column if is_finite(value)]
    if not xs or not values:
        return Markup()
    frame = _Frame(*size, _padded(xs[0], xs[-1], 0.0), y_range or _padded(min(values), max(values), 0.06))
    paths = [(_band_path(frame, band), f"area {band.classes}") for band in reversed(bands)]
    paths += [(_line_path(frame, line), line.classes) for line in reversed(lines) if line.style != "dots"]
    dotted = [line for line in reversed(lines) if line.style == "dots"]
    dots = [(x, y, line.classes) for line in dotted for x, y in zip(line.xs, line.ys, strict=True) if is_finite(y)]
    named = [each for each in series if each.name]
    keys = [(each.name, f"{'band ' * isinstance(each, Band)}{each.classes}") for each in named]
    summary = f"{caption}: " + "; ".join(_summary(line) for line in lines if line.name)
    hovered = _columns(frame, xs, _words(xs, named, x_label))
    return _TEMPLATE.plot(caption, note, keys if len(keys) > 1 else (), frame, summary, x_label, paths, dots, hovered)


def bucket(value: float, value_range: tuple[float, float]) -> int:
    """Return the index of a value's shade, from 0 to `SHADES - 1`; values outside the range get the outermost.

    A range may descend.

    >>> [bucket(value, (-1.0, 1.0)) for value in (-5.0, -1.0, 0.0, 0.99, 1.0)]
    [0, 0, 4, 8, 8]
    """
    low, high = value_range
    share = (value - low) / (high - low) if high != low else 0.5
    return min(max(int(share * SHADES), 0), SHADES - 1)


def is_finite(value: object) -> TypeGuard[float]:
    """Return True for a number that can be drawn."""
    return isinstance(value, int | float) and math.isfinite(value)


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers within a range, about `count` of them.

    >>> round_ticks(-0.93, 1.0)
    [-0.5, 0.0, 0.5, 1.0]
    >>> round_ticks(0, 89, 8)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    ticks = [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return [float(f"{tick:.12g}") for tick in ticks]


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    if high - low <= max(abs(low), abs(high)) * 1e-9:
        margin = abs(high) * 0.1 or 1.0
        return low - margin, high + margin
    return low - (high - low) * share, high + (high - low) * share


def _summary(line: Line) -> str:
    finite = [y for y in line.ys if is_finite(y)]
    if not finite:
        return f"{line.name} without values"
    ends = f"from {number(finite[0])} to {number(finite[-1])}"
    return f"{line.name} {ends}, between {number(min(finite))} and {number(max(finite))}"


def _line_path(frame: _Frame, line: Line) -> str:
    path = ""
    for has_values, stretch in groupby(zip(line.xs, line.ys, strict=True), lambda point: is_finite(point[1])):
        if has_values:
            at = [(frame.x(x), frame.y(y)) for x, y in stretch if y is not None]
            path += f"M{at[0][0]:.1f} {at[0][1]:.1f}"
            if line.style == "steps":
                path += "".join(f"H{x:.1f}" + f"V{y:.1f}" * (y != before) for (_, before), (x, y) in pairwise(at))
            else:
                path += "".join(f"L{x:.1f} {y:.1f}" for x, y in at[1:])
            path += "h.01" * (len(at) == 1)  # a line without length shows its round cap
    return path


def _band_path(frame: _Frame, band: Band) -> str:
    path = ""
    points = zip(band.xs, band.lows, band.highs, strict=True)
    for has_values, stretch in groupby(points, lambda point: is_finite(point[1]) and is_finite(point[2])):
        if has_values:
            edge = [(frame.x(x), frame.y(low or 0.0), frame.y(high or 0.0)) for x, low, high in stretch]
            if len(edge) == 1:  # a band over one epoch is drawn as a bar
                (x, low_y, high_y), half = edge[0], 3.0
                edge = [(x - half, low_y, high_y), (x + half, low_y, high_y)]
            upper = [f"{x:.1f} {high:.1f}" for x, _, high in edge]
            lower = [f"{x:.1f} {low:.1f}" for x, low, _ in reversed(edge)]
            path += "M" + "L".join(upper + lower) + "Z"
    return path


def _words(xs: Sequence[float], named: Sequence[Line | Band], x_label: str) -> list[str]:
    """Return the words on hover for each position: the values of all lines and bands that have one there."""
    known = []
    for each in named:
        texts = list(map(number, each.ys if isinstance(each, Line) else each.lows))
        if isinstance(each, Band):
            texts = [f"{low} to {number(high)}" for low, high in zip(texts, each.highs, strict=True)]
        known.append((each.name, dict(zip(each.xs, texts, strict=True))))
    return [
        "\n".join([f"{x_label} {number(x)}", *(f"{name} {texts[x]}" for name, texts in known if x in texts)])
        for x in xs
    ]


def _columns(frame: _Frame, xs: Sequence[float], words: Sequence[str]) -> list[tuple[float, float, str]]:
    """Return left, right and words of columns, one for each position or for as many as there is room for."""
    kept = sorted({*range(0, len(xs), -(-len(xs) // MAX_COLUMNS)), len(xs) - 1})
    middles = [(left + right) / 2 for left, right in pairwise(frame.x(xs[index]) for index in kept)]
    edges = [frame.left, *middles, frame.right]
    return [(left, right, words[index]) for (left, right), index in zip(pairwise(edges), kept, strict=True)]
