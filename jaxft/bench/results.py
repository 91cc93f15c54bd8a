"""What the benchmarks found, as it is written to JSON and read again."""

import statistics
from typing import Any, Literal

from pydantic import BaseModel

from jaxft.bench.work import Phase, Rates, limit_seconds


class MeasuredRates(BaseModel):
    """What the device was seen to do in a second, at best.

    Attributes:
        copy_bytes: bytes read and written, of a large array in place.
        read_bytes: bytes read, of a large matrix times a vector.
        matmul_flops: by the dtype of the inputs; bfloat16 with float32 results.
    """

    copy_bytes: float
    read_bytes: float
    matmul_flops: dict[str, float]

    def best(self, other: "MeasuredRates") -> "MeasuredRates":
        """The better of two measurements, figure by figure: other work on the machine can only take away."""
        return MeasuredRates(
            copy_bytes=max(self.copy_bytes, other.copy_bytes),
            read_bytes=max(self.read_bytes, other.read_bytes),
            matmul_flops={name: max(rate, other.matmul_flops[name]) for name, rate in self.matmul_flops.items()},
        )

    def of(self, dtype: str) -> Rates:
        """The limits for computing in a dtype."""
        return Rates(max(self.copy_bytes, self.read_bytes), self.matmul_flops[dtype])


class Against(BaseModel):
    """A line against the limit.

    Attributes:
        limit_seconds: the least that the device could need.
        phase_seconds: the same by phase.
        share: of the limit that the median reaches.
        flops_share: of the measured rate of matrix products that the counted operations used: "MFU".
    """

    limit_seconds: float
    phase_seconds: dict[str, float]
    share: float
    flops_share: float


class Line(BaseModel):
    """One thing that was timed.

    Attributes:
        amount: how many `unit`s a repeat worked off.
        seconds: of each repeat.
        phases: the work, when there is a limit to it.
        shape: whatever fixes the size of the work.
        figures: other numbers that belong to it, units in their names.
        against: filled in once the limits are known.
    """

    name: str
    amount: int
    seconds: list[float]
    unit: Literal["tokens", "episodes"] = "tokens"
    phases: list[Phase] = []
    shape: dict[str, int] = {}
    figures: dict[str, float] = {}
    against: Against | None = None

    def per_second(self) -> tuple[float, float, float]:
        """Units in a second: at the median, at worst and at best."""
        median = statistics.median(self.seconds)
        return self.amount / median, self.amount / max(self.seconds), self.amount / min(self.seconds)

    def compared(self, rates: Rates) -> "Line":
        """The line with what it is against these limits."""
        if not self.phases:
            return self
        median, limit = statistics.median(self.seconds), limit_seconds(self.phases, rates)
        against = Against(
            limit_seconds=limit,
            phase_seconds={phase.name: limit_seconds([phase], rates) for phase in self.phases},
            share=limit / median,
            flops_share=sum(phase.flops for phase in self.phases) / median / rates.flops_per_second,
        )
        return self.model_copy(update={"against": against})


class Check(BaseModel):
    """Something that should hold: `value` is to be `at least`, `at most` or `exactly` what is wanted."""

    name: str
    value: float
    relation: Literal["at least", "at most", "exactly"]
    wanted: float

    def is_met(self) -> bool:
        """Whether it holds."""
        if self.relation == "at least":
            return self.value >= self.wanted
        return self.value <= self.wanted if self.relation == "at most" else self.value == self.wanted


class CaseResult(BaseModel):
    """What a case found, or the error that ended it, in a line and with its traceback."""

    case: str
    model: str | None = None
    dtype: str | None = None
    lines: list[Line] = []
    checks: list[Check] = []
    figures: dict[str, float] = {}
    seconds: float = 0.0
    error: str | None = None
    traceback: str | None = None


class Machine(BaseModel):
    """Where it ran."""

    backend: str
    device_kind: str
    devices: int
    cpu_name: str
    cpu_count: int
    memory_bytes: int
    variables: dict[str, str]


class Results(BaseModel):
    """Everything that one call measured.

    Attributes:
        rates_at_start, rates_at_end: shared machines drift; limits are made of the better of both.
        environment: versions, platform, command line and commit.
        shapes: counts of all cases.
        is_complete: False in the file of a call that was cut off.
    """

    machine: Machine
    environment: dict[str, Any]
    shapes: dict[str, Any]
    repeats: int
    rates_at_start: MeasuredRates
    rates_at_end: MeasuredRates | None = None
    cases: list[CaseResult] = []
    is_complete: bool = False

    def rates(self) -> MeasuredRates:
        """The best that was seen of the device."""
        return self.rates_at_start if self.rates_at_end is None else self.rates_at_start.best(self.rates_at_end)

    def compared(self) -> "Results":
        """The results with every line held against the limits that are known now."""
        rates = self.rates()
        cases = [
            case.model_copy(update={"lines": [line.compared(rates.of(case.dtype or "float32")) for line in case.lines]})
            for case in self.cases
        ]
        return self.model_copy(update={"cases": cases})
