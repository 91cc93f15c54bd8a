"""Results of `run.py` as they are written to JSON and read again by `report.py`."""

import statistics
from typing import Any, Literal

from pydantic import BaseModel

from roofline import Phase, Rates, limit_seconds


class MeasuredRates(BaseModel):
    """Best rates that the device was seen to reach, per second.

    Attributes:
        copy_bytes: bytes read and written by a rewrite of a large array in place.
        read_bytes: bytes read by a product of a large matrix with a vector.
        matmul_flops: floating-point operations, by the dtype of the inputs; bfloat16 with float32 results.
    """

    copy_bytes: float
    read_bytes: float
    matmul_flops: dict[str, float]

    def best(self, other: "MeasuredRates") -> "MeasuredRates":
        """The better of two measurements, rate by rate: other work on the machine can only slow it down."""
        return MeasuredRates(
            copy_bytes=max(self.copy_bytes, other.copy_bytes),
            read_bytes=max(self.read_bytes, other.read_bytes),
            matmul_flops={name: max(rate, other.matmul_flops[name]) for name, rate in self.matmul_flops.items()},
        )

    def of(self, dtype: str) -> Rates:
        """The limits for computing in a dtype."""
        return Rates(max(self.copy_bytes, self.read_bytes), self.matmul_flops[dtype])

    def __str__(self) -> str:
        flops = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in self.matmul_flops.items())
        return f"copy {self.copy_bytes / 1e9:,.1f} GB/s, read {self.read_bytes / 1e9:,.1f} GB/s, products {flops}"


class LimitShare(BaseModel):
    """The fraction of the device's limit that a measurement reaches.

    Attributes:
        limit_seconds: least time that the device needs for the work.
        phase_seconds: the same by phase.
        share: `limit_seconds` over the median time.
        flops_share: counted operations per second over the measured rate of matrix products ("MFU").
    """

    limit_seconds: float
    phase_seconds: dict[str, float]
    share: float
    flops_share: float


class Line(BaseModel):
    """One measurement: a line of the table.

    Attributes:
        amount: number of `unit`s that a repeat works off.
        seconds: time of each repeat.
        phases: operations and bytes of the work; empty where no limit is known.
        shape: counts that fix the size of the work.
        figures: other numbers that belong to it, units in their names.
        against: share of the limit, filled in once the limits are known.
    """

    name: str
    amount: int
    seconds: list[float]
    unit: Literal["tokens", "episodes", "requests"] = "tokens"
    phases: list[Phase] = []
    shape: dict[str, int] = {}
    figures: dict[str, float] = {}
    against: LimitShare | None = None

    def per_second(self) -> tuple[float, float, float]:
        """Units per second: median, slowest and fastest repeat."""
        median = statistics.median(self.seconds)
        return self.amount / median, self.amount / max(self.seconds), self.amount / min(self.seconds)

    def compared(self, rates: Rates) -> "Line":
        """The same line with its share of the limit at these rates."""
        if not self.phases:
            return self
        median, limit = statistics.median(self.seconds), limit_seconds(self.phases, rates)
        against = LimitShare(
            limit_seconds=limit,
            phase_seconds={phase.name: limit_seconds([phase], rates) for phase in self.phases},
            share=limit / median,
            flops_share=sum(phase.flops for phase in self.phases) / median / rates.flops_per_second,
        )
        return self.model_copy(update={"against": against})


class Check(BaseModel):
    """A claim that a case tests: `value` is `at least`, `at most` or `exactly` the number that is wanted."""

    name: str
    value: float
    relation: Literal["at least", "at most", "exactly"]
    wanted: float

    def is_met(self) -> bool:
        """True if the claim holds."""
        if self.relation == "at least":
            return self.value >= self.wanted
        return self.value <= self.wanted if self.relation == "at most" else self.value == self.wanted


def check_text(check: Check) -> str:
    """A check in one line.

    >>> check_text(Check(name="flops / needed", value=1.09, relation="at most", wanted=1.12))
    '  [reached] flops / needed: 1.09, wanted at most 1.12'
    """
    mark = "reached" if check.is_met() else "MISSED"
    return f"  [{mark}] {check.name}: {check.value:.4g}, wanted {check.relation} {check.wanted:.4g}"


class Measured(BaseModel):
    """Result of a case: measurements, claims tested, and other numbers with units in their names."""

    lines: list[Line] = []
    checks: list[Check] = []
    figures: dict[str, float] = {}


class CaseResult(Measured):
    """Result of a case with its name, model and dtype; or the error that ended it, in a line and with its traceback."""

    case: str
    model: str | None = None
    dtype: str | None = None
    seconds: float = 0.0
    error: str | None = None
    traceback: str | None = None

    def title(self) -> str:
        """The case, its model and dtype in one line."""
        return " ".join(part for part in (self.case, self.model, self.dtype if self.model else None) if part)


class Machine(BaseModel):
    """The machine, the environment variables that change its speed, and its card as `nvidia-smi` describes it."""

    backend: str
    device_kind: str
    devices: int
    cpu_name: str
    cpu_count: int
    memory_bytes: int
    variables: dict[str, str]
    card: str = ""


class Results(BaseModel):
    """All results of one call of `run.py`.

    Attributes:
        rates_at_start, rates_at_end: rates of the device; shared machines drift, so limits use the better of both.
        environment: versions, platform, command line and commit.
        shapes: counts of all cases.
        card_at_end: the same of the card, with its clocks, after the last case.
        left_out: cases that the time limit left out.
        is_complete: False in the file of a call that was cut off.
    """

    machine: Machine
    environment: dict[str, Any]
    shapes: dict[str, Any]
    repeats: int
    rates_at_start: MeasuredRates
    rates_at_end: MeasuredRates | None = None
    cases: list[CaseResult] = []
    card_at_end: str = ""
    left_out: list[str] = []
    is_complete: bool = False

    def rates(self) -> MeasuredRates:
        """The best rates that were seen of the device."""
        return self.rates_at_start if self.rates_at_end is None else self.rates_at_start.best(self.rates_at_end)

    def compared(self) -> "Results":
        """The same results with every line's share of the limits that are known now."""
        rates = self.rates()
        cases = [
            case.model_copy(update={"lines": [line.compared(rates.of(case.dtype or "float32")) for line in case.lines]})
            for case in self.cases
        ]
        return self.model_copy(update={"cases": cases})


def metric_text(name: str, value: float) -> str:
    """Format a number in the unit that its name says, bytes as MiB.

    >>> metric_text("cache_bytes", 3 * 2**20), metric_text("kv_bytes_per_token", 512), metric_text("seconds", 0.5)
    ('3 MiB', '512', '0.5')
    """
    if "bytes" in name and "per_token" not in name:
        mebibytes = value / 2**20
        return f"{mebibytes:,.0f} MiB" if mebibytes >= 100 else f"{mebibytes:.3g} MiB"
    return f"{value:.4g}"
