"""Tables and plots of what `benchmarks/run.py` and `benchmarks/compare.py` wrote, from one file or several.

    python benchmarks/report.py benchmarks/results/cpu_{m2,m60,m2_compile,m60_compile}.json --out docs/performance

The Markdown on standard output has a table per case with units per second, the limit and the share of it, and the
checks; for a comparison it has times and ratios. With `--out` it goes to `report.md` in that folder, with
`decode_throughput.png` (tokens per second against rows, dashed: the limit) and `limit_share.png` (share of the limit,
by case) beside it.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from pydantic import ValidationError

from records import CaseResult, Check, Line, Results, metric_text

LIMIT_COLUMNS = ("", "per second", "slowest to fastest", "limit", "share of it", "MFU", "median s")
COMPARED_COLUMNS = ("", "median s", "min to max", "tokens/s", "peak MiB", "times jaxft's time")


class Series(NamedTuple):
    """A case, and the label of its file, model and dtype in the plots."""

    label: str
    case: CaseResult


def main() -> int:
    """Read the files, print the tables and draw the plots. The exit code is 2 for a file of another kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of report.md and the plots")
    arguments = parser.parse_args()
    measured: dict[str, Results] = {}
    parts = []
    for path in arguments.files:
        try:
            given = json.loads(path.read_text())
            if is_comparison(given):
                parts.append(comparison_text(path.stem, given))
                continue
            measured[path.stem] = Results.model_validate(given)
        except (OSError, ValueError, ValidationError) as error:
            print(f"'{path}' is no result of run.py or compare.py: {str(error).splitlines()[0]}", file=sys.stderr)
            return 2
        parts.append(results_text(path.stem, measured[path.stem]))
    text = "\n\n".join(parts) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "report.md").write_text(text)
        series = [Series(label_of(name, case, len(measured)), case) for name, r in measured.items() for case in r.cases]
        plot_decode(series, arguments.out / "decode_throughput.png")
        plot_shares(series, arguments.out / "limit_share.png")
    return 0


def is_comparison(given: Any) -> bool:
    """True if `compare.py` wrote the file: its cases are a mapping."""
    return isinstance(given, dict) and isinstance(given.get("cases"), dict)


def label_of(name: str, case: CaseResult, files: int) -> str:
    """The model and dtype, with the file's name when there are several."""
    own = f"{case.model}, {case.dtype}" if case.model else "harness"
    return own if files == 1 else f"{name}: {own}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text and the others are numbers.

    >>> print(markdown(("", "s"), [("a", "1")]))
    |  | s |
    |---|---:|
    | a | 1 |
    """
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    head, rule, *body = lines
    return "\n".join([_row(head), "|" + "|".join(rule) + "|", *map(_row, body)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def results_text(name: str, results: Results) -> str:
    """All tables of a file of `run.py`."""
    machine, rates, versions = results.machine, results.rates(), results.environment["versions"]
    about = [
        f"{machine.device_kind} ({machine.backend}), {machine.cpu_name}, {machine.cpu_count} CPU cores; "
        f"medians of {results.repeats} repeats.",
        f"Limits: {rates}.",
        ", ".join(f"{package} {version}" for package, version in versions.items() if version is not None) + ".",
    ]
    about += [f"{variable}: `{value}`." for variable, value in machine.variables.items()]
    if not results.is_complete:
        about.append("The call was cut off: cases are missing.")
    return "\n\n".join([f"## {name}", "\n".join(about), *map(case_text, results.cases)])


def case_text(case: CaseResult) -> str:
    """The table of a case, its metrics and its checks."""
    parts = [f"### {case.title()}"]
    if case.error is not None:
        return "\n\n".join([*parts, f"Failed: {case.error}"])
    if case.lines:
        parts.append(markdown(LIMIT_COLUMNS, map(line_cells, case.lines)))
    metrics = [(f"{line.name}: {name}", value) for line in case.lines for name, value in line.figures.items()]
    metrics += case.figures.items()
    if metrics:
        rows = [(name, metric_text(name.rpartition(": ")[2], value)) for name, value in metrics]
        parts.append(markdown(("metric", "value"), rows))
    if case.checks:
        parts.append(markdown(("check", "found", "wanted", "reached"), map(check_cells, case.checks)))
    return "\n\n".join(parts)


def check_cells(check: Check) -> list[str]:
    """Cells of a check."""
    wanted = f"{check.relation} {check.wanted:.3g}"
    return [check.name, f"{check.value:.3g}", wanted, "yes" if check.is_met() else "no"]


def line_cells(line: Line) -> list[str]:
    """Cells of a measurement."""
    median, slowest, fastest = line.per_second()
    cells = [line.name, f"{median:,.0f}", f"{slowest:,.0f} to {fastest:,.0f}"]
    if line.against is None:
        return [*cells, "", "", "", f"{line.amount / median:.3g}"]
    against = line.against
    limit, shares = line.amount / against.limit_seconds, (f"{against.share:.0%}", f"{against.flops_share:.0%}")
    return [*cells, f"{limit:,.0f}", *shares, f"{line.amount / median:.3g}"]


def comparison_text(name: str, given: dict[str, Any]) -> str:
    """All tables of a file of `compare.py`: a side's time over jaxft's."""
    parts = [f"## {name}: {given['model']}, {given['rounds']} rounds in turn on {given['processor']}"]
    variables = [f"`{variable}={value}`" for variable, value in given.get("environment_variables", {}).items()]
    if variables:
        parts.append(f"Set for every side: {', '.join(variables)}.")
    for case, found in given["cases"].items():
        rows = [side_cells(side, summary) for side, summary in found["sides"].items()]
        parts += [f"### {case}", markdown(COMPARED_COLUMNS, rows)]
    return "\n\n".join(parts)


def side_cells(side: str, summary: dict[str, Any]) -> list[str]:
    """Cells of a side, or the reason why it could not run."""
    if "error" in summary:
        return [f"{side}: cannot run: {summary['error']}", *[""] * (len(COMPARED_COLUMNS) - 1)]
    ratio = summary["ratio"]
    return [
        side,
        f"{summary['median_seconds']:.3f}",
        f"{summary['min_seconds']:.3f} to {summary['max_seconds']:.3f}",
        f"{summary['tokens_per_second']:,.0f}",
        f"{summary['peak_bytes'] / 2**20:,.0f}",
        "" if ratio is None else f"{ratio:.2f}",
    ]


def plot_decode(series: Sequence[Series], path: Path) -> None:
    """Tokens per second of steady decoding against the number of rows, each model with its limit."""
    chosen = [each for each in series if each.case.case == "decode" and each.case.lines]
    if not chosen:
        return
    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for number, (label, case) in enumerate(chosen):
        rows = [line.shape["rows"] for line in case.lines]
        medians, slowest, fastest = zip(*(line.per_second() for line in case.lines), strict=True)
        below = [median - low for median, low in zip(medians, slowest, strict=True)]
        above = [high - median for median, high in zip(medians, fastest, strict=True)]
        color = f"C{number}"
        axes.errorbar(rows, medians, yerr=[below, above], color=color, marker="o", markersize=4, capsize=3, label=label)
        limits = [line.amount / line.against.limit_seconds for line in case.lines if line.against is not None]
        if len(limits) == len(rows):
            axes.plot(rows, limits, color=color, linestyle="--", linewidth=1, label=f"{label}: limit")
    ticks = sorted({line.shape["rows"] for _, case in chosen for line in case.lines})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("rows decoded at once")
    axes.set_ylabel("sampled tokens per second")
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    save(figure, path)


def plot_shares(series: Sequence[Series], path: Path) -> None:
    """Share of the limit that each measurement reaches, as bars with a colour per model."""
    bars: dict[str, dict[str, float]] = {}
    for label, case in series:
        for line in case.lines:
            if line.against is not None:
                bars.setdefault(f"{case.case}: {line.name}", {})[label] = 100 * line.against.share
    if not bars:
        return
    labels = list(dict.fromkeys(label for shares in bars.values() for label in shares))
    thickness = 0.8 / len(labels)
    figure = Figure(figsize=(8, 1.2 + 0.22 * len(bars) * (1 + 0.5 * len(labels))), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for number, label in enumerate(labels):
        places = [place + (number - (len(labels) - 1) / 2) * thickness for place in range(len(bars))]
        lengths = [shares.get(label, 0.0) for shares in bars.values()]
        drawn = axes.barh(places, lengths, height=thickness, color=f"C{number}", label=label)
        texts = [
            f"{length:.2g} %" if label in shares else "" for length, shares in zip(lengths, bars.values(), strict=True)
        ]
        axes.bar_label(drawn, labels=texts, padding=2, fontsize=7)
    axes.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, max(1.15 * max(max(shares.values()) for shares in bars.values()), 10.0))
    axes.set_xlabel("% of the device's limit")
    axes.grid(alpha=0.25, axis="x")
    axes.spines[["top", "right"]].set_visible(False)
    if len(labels) > 1:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    else:
        axes.set_title(labels[0], fontsize=10)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Writes a picture without a screen."""
    FigureCanvasAgg(figure).print_png(str(path))


if __name__ == "__main__":
    sys.exit(main())
