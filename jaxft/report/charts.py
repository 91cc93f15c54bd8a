"""Charts as inline SVG: lines with bands, stacked areas, bars and heat maps.

A chart is a `<figure>` with a caption, a legend and an SVG that fills the width of its place. Colours are classes of
`assets/page.css`, which has them for light and for dark, chosen so that colour-blind people tell them apart. Every
column of a chart can be pointed at: its values stand in a `<title>`, which `assets/page.js` shows as a tooltip.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeGuard

from jaxft.report.markup import Markup, joined, number, tag

Value = float | None
"""A number; None, NaN and infinities leave a gap."""

NUM_COLORS = 8
SMALL = (420, 220)
WIDE = (1180, 320)
MAX_POINTS = 400
"""Largest number of points that a line is drawn with; a longer line keeps the extremes of each stretch."""
MAX_COLUMNS = 120
"""Largest number of columns that can be pointed at."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 34


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


@dataclass(frozen=True)
class Band:
    """An area between two values for each position, such as quartiles or a confidence interval."""

    name: str
    xs: Sequence[float]
    lows: Sequence[Value]
    highs: Sequence[Value]
    color: int = 0
    is_faint: bool = False


class _Frame(NamedTuple):
    """The plotting area in SVG units, and the ranges of both axes."""

    width: int
    height: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)


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
    xs = sorted({x for line in lines for x in line.xs} | {x for band in bands for x in band.xs})
    columns = [line.ys for line in lines] + [ys for band in bands for ys in (band.lows, band.highs)]
    values = [value for column in columns for value in column if is_finite(value)]
    if not xs or not values:
        return Markup()
    frame = _Frame(*size, _padded(xs[0], xs[-1], 0.0), y_range or _padded(min(values), max(values), 0.06))
    drawn = [_band(frame, band) for band in reversed(bands)] + [_line(frame, line) for line in reversed(lines)]
    named, named_bands = [line for line in lines if line.name], [band for band in bands if band.name]
    summary = f"{caption}: " + "; ".join(map(_summary, named))
    svg = _svg(
        frame, summary, _axes(frame, x_label), *drawn, _columns(frame, xs, _texts(xs, named, named_bands, x_label))
    )
    keys = [(line.name, f"key {line.style} c{line.color % NUM_COLORS}") for line in named]
    keys += [(band.name, f"key band{' faint' * band.is_faint} c{band.color % NUM_COLORS}") for band in named_bands]
    return _figure(caption, legend(keys) if len(keys) > 1 else Markup(), svg, note)


def stacked_chart(
    caption: str,
    xs: Sequence[float],
    layers: Mapping[str, Sequence[Value]],
    *,
    x_label: str = "epoch",
    unit: str = "",
    size: tuple[int, int] = SMALL,
    note: str | None = None,
) -> Markup:
    """Return a chart of bars per position, each a stack of the layers' values; the first layer lies at the bottom.

    With more positions than `MAX_COLUMNS`, a bar is the mean of neighbours.
    """
    if not xs or not layers:
        return Markup()
    stretch = -(-len(xs) // MAX_COLUMNS)
    starts = range(0, len(xs), stretch)
    bars = {name: [_mean(ys[at : at + stretch]) for at in starts] for name, ys in layers.items()}
    totals = [sum(column) for column in zip(*bars.values(), strict=True)]
    frame = _Frame(*size, (xs[0] - 0.5, xs[-1] + 0.5), (0.0, max(totals) * 1.05 or 1.0))
    drawn, bases = [], [0.0] * len(totals)
    for color, ys in enumerate(bars.values()):
        for index, y in enumerate(ys):
            if y > 0:
                start = xs[starts[index]] - 0.5
                left, right = frame.x(start), frame.x(min(start + stretch, xs[-1] + 0.5))
                top, bottom = frame.y(bases[index] + y), frame.y(bases[index])
                drawn.append(_rect(left, top, right - left, bottom - top, f"bar c{color % NUM_COLORS}"))
            bases[index] += y
    texts = []
    for index, at in enumerate(starts):
        head = f"{x_label} {number(xs[at])}" + (f" to {number(xs[min(at + stretch, len(xs)) - 1])}" * (stretch > 1))
        rows = [f"{name} {number(ys[index], 3)}{unit}" for name, ys in bars.items() if ys[index]]
        texts.append("\n".join([head, *rows, f"total {number(totals[index], 3)}{unit}"]))
    middles = [xs[at] + (min(stretch, len(xs) - at) - 1) / 2 for at in starts]
    svg = _svg(frame, f"{caption}, stacked", _axes(frame, x_label), *drawn, _columns(frame, middles, texts))
    if stretch > 1:
        note = " ".join(filter(None, (note, f"Each bar is the mean of {stretch} epochs.")))
    return _figure(caption, legend((name, f"key area c{i % NUM_COLORS}") for i, name in enumerate(layers)), svg, note)


def bar_chart(
    caption: str, values: Mapping[str, Value], *, unit: str = "", whole: float | None = None, note: str | None = None
) -> Markup:
    """Return horizontal bars with their names and numbers, as rows of a table; `whole` is the length of a full bar."""
    whole = whole or max((abs(value) for value in values.values() if is_finite(value)), default=0.0) or 1.0
    rows = []
    for name, value in values.items():
        width = abs(value) / whole * 100 if is_finite(value) else 0.0
        bar = tag("rect", {"class": "bar c0", "width": f"{width:.2f}", "height": 10})
        picture = {"class": "meter", "viewBox": "0 0 100 10", "preserveAspectRatio": "none", "aria-hidden": "true"}
        cells = (tag("td", {}, tag("svg", picture, bar)), tag("td", {"class": "number"}, number(value) + unit))
        rows.append(tag("tr", {}, tag("th", {"scope": "row"}, name), *cells))
    return _figure(caption, Markup(), tag("table", {"class": "bars"}, tag("tbody", {}, *rows)), note)


def heat_map(
    caption: str,
    row_names: Sequence[str],
    column_names: Sequence[str],
    cells: Sequence[Sequence[Value]],
    texts: Sequence[Sequence[str]],
    *,
    value_range: tuple[float, float],
    kind: Literal["sequential", "diverging"] = "sequential",
    x_label: str = "epoch",
    label_width: int = 110,
    size: tuple[int, int] = WIDE,
    note: str | None = None,
) -> Markup:
    """Return a grid of coloured cells, the first row on top; nothing if there is no cell.

    Args:
        caption: the name of what is drawn.
        row_names: a name per row.
        column_names: a name per column; as many as fit are written below.
        cells: a value per row and column; None leaves the cell empty.
        texts: words for each cell on hover.
        value_range: values of the first and the last colour.
        kind: colours from pale to strong, or from one hue through a neutral to another.
        x_label: name of the horizontal axis.
        label_width: room for the names of rows, in SVG units.
        size: width and height in SVG units.
        note: a sentence below the caption.
    """
    width, height = size
    if not row_names or not column_names:
        return Markup()
    step_x = (width - label_width - _RIGHT) / len(column_names)
    step_y = (height - _TOP - _BOTTOM) / len(row_names)
    gap = 0.0 if step_x < 4 or step_y < 4 else 1.0
    drawn: list[Markup] = []
    for row, (values, words) in enumerate(zip(cells, texts, strict=True)):
        y = _TOP + row * step_y
        drawn.append(_text(label_width - 6, y + step_y / 2 + 4, shortened(row_names[row], label_width // 7), "end"))
        for column, value in enumerate(values):
            if is_finite(value):
                shade = f"cell {kind[0]}{bucket(value, value_range)}"
                rect = _rect(label_width + column * step_x, y, step_x - gap, step_y - gap, shade, words[column])
                drawn.append(rect)
    every = max(1, math.ceil(len(column_names) * 44 / (width - label_width)))
    for column in range(0, len(column_names), every):
        drawn.append(_text(label_width + (column + 0.5) * step_x, height - 18, column_names[column], "middle"))
    drawn.append(_text((label_width + width) / 2, height - 3, x_label, "middle", "axis-name"))
    svg = tag("svg", _svg_attributes(width, height, caption), *drawn)
    return _figure(caption, scale(value_range, kind), svg, note)


SHADES = 9


def bucket(value: float, value_range: tuple[float, float]) -> int:
    """Return the index of a value's shade, from 0 to `SHADES - 1`; values outside the range get the outermost.

    A range may descend.

    >>> [bucket(value, (-1.0, 1.0)) for value in (-5.0, -1.0, 0.0, 0.99, 1.0)]
    [0, 0, 4, 8, 8]
    """
    low, high = value_range
    share = (value - low) / (high - low) if high != low else 0.5
    return min(max(int(share * SHADES), 0), SHADES - 1)


def scale(value_range: tuple[float, float], kind: Literal["sequential", "diverging"]) -> Markup:
    """Return the key of shaded values: the lowest value, all shades, and the highest value."""
    rects = [_rect(shade * 16, 0, 16, 10, f"cell {kind[0]}{shade}") for shade in range(SHADES)]
    svg = tag("svg", {"viewBox": f"0 0 {16 * SHADES} 10", "class": "scale", "aria-hidden": "true"}, *rects)
    low, high = (tag("span", {}, number(value, 3)) for value in value_range)
    return tag("p", {"class": "legend"}, low, svg, high)


def legend(keys: Iterable[tuple[str, str]]) -> Markup:
    """Return the legend of a chart, from pairs of a name and the classes of its key."""
    return tag("ul", {"class": "legend"}, *(tag("li", {}, tag("i", {"class": key}), name) for name, key in keys))


def shortened(words: str, length: int) -> str:
    """Return a text of at most `length` characters, its middle left out if it is longer.

    >>> shortened("addition-of-three-numbers", 12)
    'additi…mbers'
    """
    if len(words) <= length:
        return words
    kept = max(length - 1, 2)
    return f"{words[: kept - kept // 2]}…{words[len(words) - kept // 2 :]}"


def is_finite(value: object) -> TypeGuard[float]:
    """Return True for a number that can be drawn."""
    return isinstance(value, int | float) and math.isfinite(value)


def thinned(ys: Sequence[Value], count: int) -> list[int]:
    """Return the indices of at most `count` values: the lowest and the highest of each stretch, the first and the last.

    >>> thinned([0, 5, 1, 1, -3, 2, 2, 2], 6)
    [0, 1, 4, 7]
    """
    if len(ys) <= count:
        return list(range(len(ys)))
    kept = {0, len(ys) - 1}
    stretches = max((count - 2) // 2, 1)
    for stretch in range(stretches):
        inner = range(len(ys) * stretch // stretches, len(ys) * (stretch + 1) // stretches)
        finite = [(y, index) for index in inner if is_finite(y := ys[index])]
        # A stretch without any value keeps its gap.
        kept |= {min(finite)[1], max(finite)[1]} if finite else {inner[0]}
    return sorted(kept)


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


def _mean(values: Sequence[Value]) -> float:
    finite = [value for value in values if is_finite(value)]
    return sum(finite) / len(finite) if finite else 0.0


def _summary(line: Line) -> str:
    finite = [y for y in line.ys if is_finite(y)]
    if not finite:
        return f"{line.name} without values"
    ends = f"from {number(finite[0])} to {number(finite[-1])}"
    return f"{line.name} {ends}, between {number(min(finite))} and {number(max(finite))}"


def _figure(caption: str, key: Markup, body: Markup, note: str | None) -> Markup:
    explained = None if note is None else tag("p", {"class": "note"}, note)
    return tag("figure", {"class": "chart"}, tag("figcaption", {}, caption), explained, key, body)


def _svg_attributes(width: int, height: int, summary: str) -> dict[str, object]:
    return {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": summary}


def _svg(frame: _Frame, summary: str, *children: Markup) -> Markup:
    return tag("svg", _svg_attributes(frame.width, frame.height, summary), *children)


def _axes(frame: _Frame, x_label: str) -> Markup:
    drawn: list[Markup] = []
    for value in round_ticks(*frame.y_range, max(frame.height // 48, 2)):
        y = frame.y(value)
        drawn.append(_path(f"M{_LEFT} {y:.1f}H{frame.width - _RIGHT}", "grid zero" if value == 0 else "grid"))
        drawn.append(_text(_LEFT - 6, y + 4, number(value), "end"))
    low, high = frame.x_range
    # Epochs are whole numbers, so a short run has no ticks between them.
    for value in round_ticks(low, high, min(max(frame.width // 80, 2), max(math.ceil(high - low), 1))):
        if value == int(value):
            drawn.append(_text(frame.x(value), frame.height - _BOTTOM + 15, number(value), "middle"))
    drawn.append(_text((_LEFT + frame.width) / 2, frame.height - 4, x_label, "middle", "axis-name"))
    return joined(drawn)


def _line(frame: _Frame, line: Line) -> Markup:
    classes = f"{line.style} c{line.color % NUM_COLORS}"
    kept = thinned(line.ys, MAX_POINTS)
    points = [(line.xs[index], line.ys[index]) for index in kept]
    if line.style == "dots":
        at = [(frame.x(x), frame.y(y)) for x, y in points if is_finite(y)]
        return joined(tag("circle", {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": 3.5, "class": classes}) for x, y in at)
    parts, is_open, last_y = [], False, 0.0
    for place, (value, y_value) in enumerate(points):
        if not is_finite(y_value):
            is_open = False
            continue
        x, y = frame.x(value), frame.y(y_value)
        if not is_open:
            is_alone = place + 1 == len(points) or not is_finite(points[place + 1][1])
            parts.append(f"M{x:.1f} {y:.1f}" + "h.01" * is_alone)  # a line without length shows its round cap
        elif line.style == "steps":
            parts.append(f"H{x:.1f}" + (f"V{y:.1f}" if y != last_y else ""))
        else:
            parts.append(f"L{x:.1f} {y:.1f}")
        is_open, last_y = True, y
    return _path("".join(parts), classes)


def _band(frame: _Frame, band: Band) -> Markup:
    stretches: list[list[tuple[float, float, float]]] = [[]]
    for x, low, high in zip(band.xs, band.lows, band.highs, strict=True):
        if is_finite(low) and is_finite(high):
            stretches[-1].append((frame.x(x), frame.y(low), frame.y(high)))
        elif stretches[-1]:
            stretches.append([])
    parts = []
    for whole in filter(None, stretches):
        step = -(-len(whole) // MAX_POINTS)
        groups = [whole[at : at + step] for at in range(0, len(whole), step)]
        edge = [(group[0][0], max(low for _, low, _ in group), min(high for _, _, high in group)) for group in groups]
        if len(edge) == 1:  # a band over one epoch is drawn as a bar
            (x, low_y, high_y), half = edge[0], 3.0
            edge = [(x - half, low_y, high_y), (x + half, low_y, high_y)]
        upper = [f"{x:.1f} {high:.1f}" for x, _, high in edge]
        lower = [f"{x:.1f} {low:.1f}" for x, low, _ in reversed(edge)]
        parts.append("M" + "L".join(upper + lower) + "Z")
    return _path("".join(parts), f"area{' faint' * band.is_faint} c{band.color % NUM_COLORS}")


def _texts(xs: Sequence[float], lines: Sequence[Line], bands: Sequence[Band], x_label: str) -> list[str]:
    """Return the words on hover for each position: the values of all lines and bands that have one there."""
    known = [(line.name, dict(zip(line.xs, map(number, line.ys), strict=True))) for line in lines]
    for band in bands:
        edges = zip(map(number, band.lows), map(number, band.highs), strict=True)
        known.append((band.name, dict(zip(band.xs, (f"{low} to {high}" for low, high in edges), strict=True))))
    return [
        "\n".join([f"{x_label} {number(x)}", *(f"{name} {values[x]}" for name, values in known if x in values)])
        for x in xs
    ]


def _columns(frame: _Frame, xs: Sequence[float], texts: Sequence[str]) -> Markup:
    """Return invisible columns, one for each position or for as many as there is room for, with their words."""
    stride = -(-len(xs) // MAX_COLUMNS)
    kept = sorted({*range(0, len(xs), stride), len(xs) - 1})
    places = [frame.x(xs[index]) for index in kept]
    edges = [
        _LEFT,
        *((left + right) / 2 for left, right in pairwise(places)),
        frame.width - _RIGHT,
    ]
    top, height = _TOP, frame.height - _TOP - _BOTTOM
    columns = []
    for place, index in enumerate(kept):
        area = _rect(edges[place], top, edges[place + 1] - edges[place], height)
        columns.append(tag("g", {}, tag("title", {}, texts[index]), area))
    return tag("g", {"class": "columns"}, *columns)


def _path(data: str, classes: str) -> Markup:
    return tag("path", {"d": data, "class": classes})


def _rect(
    x: float, y: float, width: float, height: float, classes: str | None = None, words: str | None = None
) -> Markup:
    size = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{max(width, 0.1):.1f}", "height": f"{max(height, 0.0):.1f}"}
    rect = tag("rect", {**size, "class": classes})
    return rect if words is None else tag("g", {}, tag("title", {}, words), rect)


def _text(x: float, y: float, words: str, anchor: str, classes: str | None = None) -> Markup:
    return tag("text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "class": classes}, words)
