"""Benchmarks of jaxft: units per second of each case beside the limit of the device.

    python benchmarks/run.py rollout update --model m60 --out results.json
    python benchmarks/run.py --suite cpu --out benchmarks/results/cpu.json     # two models; hours on two cores
    python benchmarks/run.py --suite gpu --out benchmarks/results/gpu.json     # a GPU with 80 GiB: under 8 minutes
    python benchmarks/run.py update kernels score prefill decode --suite gpu --minutes 4      # the same in two parts
    python benchmarks/run.py serve epoch --suite gpu --minutes 4
    python benchmarks/run.py update --suite gpu --model qwen3-1.7b
    python benchmarks/run.py lora --suite gpu --model qwen3-8b

Every case prints units per second (median, slowest, fastest), the limit and the share of it, then each claim that it
tests and whether it holds. The limits are measured in the same process, before and after everything else. `--shrink`
runs any of it in a minute or two at sizes whose numbers mean nothing. Exit code 1 when a case failed, 2 when the
arguments make no sense.
"""

import argparse
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import jax

from cases import compilation, decode, epoch, harness, kernels, logprobs, memory, prefill, rollout, serve, update
from jaxft.harness.process import prepare_process
from jaxft.models.config import PRESETS
from jaxft.runs.environment import environment
from machine import card, measure_rates, this_machine
from records import CaseResult, Check, Line, Measured, Results, metric_text
from shapes import ACCELERATOR, MODELS, REFERENCE, TINY, Shapes
from workload import Workload, make_workload

ON_A_MODEL: dict[str, Callable[[Workload], Measured]] = {
    "prefill": prefill.run,
    "decode": decode.run,
    "rollout": rollout.run,
    "update": update.run,
    "lora": update.run,
    "kernels": kernels.run,
    "score": logprobs.run_scores,
    "logprobs": logprobs.run,
    "serve": serve.run,
    "epoch": epoch.run,
    "memory": memory.run,
    "compile": compilation.run,
}
CASES = (*ON_A_MODEL, "harness")

HEADER = (
    f"{'':<44} {'per second':>10} {'slowest':>10} {'fastest':>10} {'limit':>10} {'share':>6} {'MFU':>6} {'median s':>9}"
)


class Suite(NamedTuple):
    """A list of cases with their models, dtype and shapes, and the minutes after which no further case begins."""

    cases: tuple[str, ...]
    models: tuple[str, ...]
    dtype: str
    shapes: Shapes
    minutes: float | None = None


ON_CPU = ("prefill", "decode", "rollout", "update", "logprobs", "epoch", "memory", "harness", "compile")
ON_GPU = ("update", "kernels", "score", "prefill", "serve", "epoch", "decode")
"""The cases of the suites, in order of worth."""


SUITES = {
    "cpu": Suite(ON_CPU, ("m60", "m2"), "float32", REFERENCE),
    "gpu": Suite(ON_GPU, ("qwen3-0.6b",), "bfloat16", ACCELERATOR, minutes=7.0),
}


@dataclass(frozen=True)
class Job:
    """A case on a model; the harness has no model."""

    case: str
    model: str | None
    dtype: str
    shapes: Shapes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs of a command line, by default that of the process, and return the exit code."""
    parsed = make_parser().parse_args(arguments)
    try:
        jobs = list_jobs(parsed.cases, parsed.suite, parsed.model, parsed.dtype, shrink=parsed.shrink)
    except ValueError as error:
        print(f"run.py: error: {error}", file=sys.stderr)
        return 2
    prepare_process()
    minutes = parsed.minutes or (SUITES[parsed.suite].minutes if parsed.suite else None)
    return run_jobs(jobs, parsed.repeats, parsed.out, shrink=parsed.shrink, minutes=minutes)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*MODELS, *PRESETS)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"cases to run: {', '.join(CASES)}")
    parser.add_argument("--suite", choices=tuple(SUITES), help="all cases with models and shapes; CASE selects some")
    parser.add_argument(
        "--model", choices=names, metavar="NAME", help=f"{', '.join(names)} (default m60, or those of the suite)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of products; parameters are float32 (default: the suite's, else float32)",
    )
    parser.add_argument("--repeats", type=_count, default=3, help="timed runs of each job (default %(default)s)")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="begin no case after so many (default: 7 of --suite gpu, else none)"
    )
    parser.add_argument("--shrink", action="store_true", help="a tiny model and small counts, to see that it runs")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="file for all results, with versions and shapes")
    return parser


def _count(text: str) -> int:
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError("wants a whole number, at least 1")


def list_jobs(
    cases: Sequence[str], suite: str | None = None, model: str | None = None, dtype: str | None = None, *, shrink: bool
) -> list[Job]:
    """The jobs that a command line names, case by case and each model in turn.

    Raises:
        ValueError: neither cases nor a suite is given, or a case is unknown.

    >>> [(job.case, job.model) for job in list_jobs(["update", "harness"], suite="cpu", shrink=False)]
    [('update', 'm60'), ('update', 'm2'), ('harness', None)]
    >>> [(job.case, job.model) for job in list_jobs(["decode"], suite="gpu", shrink=True)]
    [('decode', 'tiny')]
    """
    for case in cases:
        if case not in CASES:
            raise ValueError(f"no case is named {case!r}; wanted some of {', '.join(CASES)}")
    if not cases and suite is None:
        raise ValueError(f"nothing to measure: name cases ({', '.join(CASES)}) or a --suite ({', '.join(SUITES)})")
    chosen = Suite(tuple(cases), ("m60",), "float32", REFERENCE) if suite is None else SUITES[suite]
    models = ("tiny",) if shrink else chosen.models if model is None else (model,)
    shapes = TINY if shrink else chosen.shapes
    jobs = []
    for case in cases or chosen.cases:
        for name in (None,) if case == "harness" else models:
            jobs.append(Job(case, name, dtype or chosen.dtype, shapes))
    return list(dict.fromkeys(jobs))


def run_jobs(jobs: Sequence[Job], repeats: int, out: Path | None, *, shrink: bool, minutes: float | None = None) -> int:
    """Run the jobs one after the other and print their tables; the exit code is 1 when a case failed.

    The file is written anew after every case, so that results outlive a call that is cut off. No case begins after so
    many minutes; those left out are named.
    """
    started = time.perf_counter()
    rates = measure_rates(tiny=shrink)
    print(f"limits: {rates}", flush=True)
    results = Results(
        machine=this_machine(),
        environment=environment([str(device) for device in jax.devices()]),
        shapes=asdict(jobs[0].shapes),
        repeats=repeats,
        rates_at_start=rates,
    )
    for job in jobs:
        if minutes is not None and time.perf_counter() - started > 60 * minutes:
            results.left_out.append(job.case)
            continue
        results.cases.append(run_job(job, repeats))
        print("\n" + case_table(results.compared().cases[-1]), flush=True)
        _write(results, out)
    results.rates_at_end, results.card_at_end = measure_rates(tiny=shrink), card()
    results.is_complete = not results.left_out
    print("\n\nAgainst the better of the limits at the start and at the end:\n\n" + closing_text(results.compared()))
    _write(results, out)
    return int(any(case.error is not None for case in results.cases))


def run_job(job: Job, repeats: int) -> CaseResult:
    """Run one case. An error becomes its result, so that the other cases go on."""
    started = time.perf_counter()
    result = CaseResult(case=job.case)
    if job.model is not None:
        result.model, result.dtype = job.model, job.dtype
    try:
        if job.model is None:
            measured = harness.run(job.shapes, repeats)
        else:
            preset = MODELS.get(job.model, job.model)
            has_adapters = job.case == "lora"
            workload = make_workload(preset, job.dtype, job.shapes, repeats, has_adapters=has_adapters)
            measured = ON_A_MODEL[job.case](workload)
        result.lines, result.checks, result.figures = measured.lines, measured.checks, measured.figures
    except Exception as error:
        result.error, result.traceback = f"{type(error).__name__}: {error}", traceback.format_exc()
        print(result.traceback, file=sys.stderr, flush=True)
    gc.collect()  # arrays of this case would count as memory of the next
    result.seconds = time.perf_counter() - started
    return result


def _write(results: Results, out: Path | None) -> None:
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    begun = out.with_name(out.name + ".part")
    begun.write_text(results.compared().model_dump_json(indent=1, exclude_none=True) + "\n")
    os.replace(begun, out)


def case_table(case: CaseResult) -> str:
    """The measurements, metrics and checks of a case as text, or its error."""
    rows = [f"== {case.title()} ({case.seconds:.0f} s)"]
    if case.error is not None:
        return "\n".join([*rows, f"  FAILED: {case.error}"])
    if case.lines:
        rows += [HEADER, *map(_line_text, case.lines)]
    for line in case.lines:
        rows += [f"  {line.name}: {name} = {metric_text(name, value)}" for name, value in line.figures.items()]
    rows += [f"  {name} = {metric_text(name, value)}" for name, value in case.figures.items()]
    return "\n".join([*rows, *map(check_text, case.checks)])


def _line_text(line: Line) -> str:
    median, slowest, fastest = line.per_second()
    text = f"{line.name:<44} {median:>10,.0f} {slowest:>10,.0f} {fastest:>10,.0f}"
    if line.against is None:
        return f"{text} {'':>10} {'':>6} {'':>6} {statistics.median(line.seconds):>9.3g}"
    limit = line.amount / line.against.limit_seconds
    shares = f"{line.against.share:>6.1%} {line.against.flops_share:>6.1%}"
    return f"{text} {limit:>10,.0f} {shares} {statistics.median(line.seconds):>9.3g}"


def check_text(check: Check) -> str:
    """A check in one line.

    >>> check_text(Check(name="speed-up", value=2.0, relation="at least", wanted=1.8))
    '  [reached] speed-up: 2, wanted at least 1.8'
    """
    mark = "reached" if check.is_met() else "MISSED"
    return f"  [{mark}] {check.name}: {check.value:.3g}, wanted {check.relation} {check.wanted:.3g}"


def closing_text(results: Results) -> str:
    """All tables once more at the final limits, and the counts of failed cases and missed checks."""
    texts = [f"limits at the start: {results.rates_at_start}"]
    if results.rates_at_end is not None:
        texts.append(f"limits at the end: {results.rates_at_end}")
    texts += [case_table(case) for case in results.cases]
    missed = sum(not check.is_met() for case in results.cases for check in case.checks)
    failed = sum(case.error is not None for case in results.cases)
    checks = sum(len(case.checks) for case in results.cases)
    if results.left_out:
        texts.append(f"left out, as the time was over: {', '.join(results.left_out)}")
    texts.append(f"{len(results.cases)} cases, {failed} failed; {checks} checks, {missed} missed")
    return "\n\n".join(texts)


if __name__ == "__main__":
    sys.exit(main())
