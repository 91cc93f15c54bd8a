"""What was found, as text: a line per thing that was timed, checks below."""

import statistics

from jaxft.bench.results import CaseResult, Check, Line, MeasuredRates, Results

HEADER = (
    f"{'':<44} {'per second':>10} {'slowest':>10} {'fastest':>10} {'limit':>10} {'share':>6} {'MFU':>6} {'median s':>9}"
)


def case_table(case: CaseResult) -> str:
    """The lines, figures and checks of a case; its error if it has one."""
    rows = [f"== {title(case)} ({case.seconds:.0f} s)"]
    if case.error is not None:
        return "\n".join([*rows, f"  FAILED: {case.error}"])
    if case.lines:
        rows += [HEADER, *map(_line, case.lines)]
    for line in case.lines:
        rows += [f"  {line.name}: {name} = {figure_text(name, value)}" for name, value in line.figures.items()]
    rows += [f"  {name} = {figure_text(name, value)}" for name, value in case.figures.items()]
    return "\n".join([*rows, *map(check_text, case.checks)])


def title(case: CaseResult) -> str:
    """The case, its model and dtype."""
    return " ".join(part for part in (case.case, case.model, case.dtype if case.model else None) if part)


def _line(line: Line) -> str:
    median, slowest, fastest = line.per_second()
    text = f"{line.name:<44} {median:>10,.0f} {slowest:>10,.0f} {fastest:>10,.0f}"
    if line.against is None:
        return f"{text} {'':>10} {'':>6} {'':>6} {statistics.median(line.seconds):>9.3g}"
    limit = line.amount / line.against.limit_seconds
    shares = f"{line.against.share:>6.1%} {line.against.flops_share:>6.1%}"
    return f"{text} {limit:>10,.0f} {shares} {statistics.median(line.seconds):>9.3g}"


def check_text(check: Check) -> str:
    """Whether something holds that should.

    >>> check_text(Check(name="speed-up", value=2.0, relation="at least", wanted=1.8))
    '  [reached] speed-up: 2, wanted at least 1.8'
    """
    mark = "reached" if check.is_met() else "MISSED"
    return f"  [{mark}] {check.name}: {check.value:.3g}, wanted {check.relation} {check.wanted:.3g}"


def figure_text(name: str, value: float) -> str:
    """A number in the unit that its name says, bytes as MiB.

    >>> figure_text("cache_bytes", 3 * 2**20), figure_text("kv_bytes_per_token", 512), figure_text("seconds", 0.5)
    ('3 MiB', '512', '0.5')
    """
    if "bytes" in name and "per_token" not in name:
        mebibytes = value / 2**20
        return f"{mebibytes:,.0f} MiB" if mebibytes >= 100 else f"{mebibytes:.3g} MiB"
    return f"{value:.4g}"


def rates_text(when: str, rates: MeasuredRates) -> str:
    """The limits of the device in a line."""
    flops = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in rates.matmul_flops.items())
    return f"{when}: copy {rates.copy_bytes / 1e9:,.1f} GB/s, read {rates.read_bytes / 1e9:,.1f} GB/s, products {flops}"


def closing_text(results: Results) -> str:
    """All tables once more against the better of both measurements of the device, and what was missed."""
    parts = [rates_text("limits at the start", results.rates_at_start)]
    if results.rates_at_end is not None:
        parts.append(rates_text("limits at the end", results.rates_at_end))
    parts += [case_table(case) for case in results.cases]
    missed = sum(not check.is_met() for case in results.cases for check in case.checks)
    failed = sum(case.error is not None for case in results.cases)
    checks = sum(len(case.checks) for case in results.cases)
    parts.append(f"{len(results.cases)} cases, {failed} failed; {checks} checks, {missed} missed")
    return "\n\n".join(parts)
