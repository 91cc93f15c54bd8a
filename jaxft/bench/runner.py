"""Runs the jobs of a command line one after the other, and keeps what is found as it comes."""

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import jax

from jaxft.bench.arguments import Job
from jaxft.bench.cases import compiles, decode, epoch, host, logprobs, memory, prefill, rollout, update
from jaxft.bench.limits import measure_rates, this_machine
from jaxft.bench.results import CaseResult, Results
from jaxft.bench.setting import Setting, make_setting
from jaxft.bench.table import case_table, closing_text, rates_text
from jaxft.runs.environment import environment

ON_A_MODEL: dict[str, Callable[[Setting], CaseResult]] = {
    "prefill": prefill.run,
    "decode": decode.run,
    "rollout": rollout.run,
    "update": update.run,
    "logprobs": logprobs.run,
    "epoch": epoch.run,
    "compile": compiles.run,
    "memory": memory.run,
}


def run_jobs(jobs: Sequence[Job], arguments: argparse.Namespace) -> int:
    """Runs the jobs, prints their tables and writes them all; the exit code, 1 when a case failed.

    The file is written anew after every case, so that what was measured outlives a call that is cut off.
    """
    rates = measure_rates(tiny=arguments.shrink)
    print(rates_text("limits", rates), flush=True)
    results = Results(
        machine=this_machine(),
        environment=environment([str(device) for device in jax.devices()]),
        shapes=asdict(jobs[0].shapes),
        repeats=arguments.repeats,
        rates_at_start=rates,
    )
    for job in jobs:
        results.cases.append(run_job(job, arguments.repeats))
        print("\n" + case_table(results.compared().cases[-1]), flush=True)
        _write(results, arguments.out)
    results.rates_at_end = measure_rates(tiny=arguments.shrink)
    results.is_complete = True
    print("\n\nAgainst the better of the limits at the start and at the end:\n\n" + closing_text(results.compared()))
    _write(results, arguments.out)
    return int(any(case.error is not None for case in results.cases))


def run_job(job: Job, repeats: int) -> CaseResult:
    """What a job found; an error is a result too, for the others shall go on."""
    started = time.perf_counter()
    try:
        result = host.run(job, repeats) if job.model is None else ON_A_MODEL[job.case](make_setting(job, repeats))
    except Exception as error:
        said, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        result = CaseResult(case=job.case, model=job.model, dtype=job.dtype, error=said, traceback=trace)
        print(trace, file=sys.stderr, flush=True)
    gc.collect()  # arrays of the case before would count as memory of the next
    return result.model_copy(update={"seconds": time.perf_counter() - started})


def _write(results: Results, out: Path | None) -> None:
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    begun = out.with_name(out.name + ".part")
    begun.write_text(results.compared().model_dump_json(indent=1, exclude_none=True) + "\n")
    os.replace(begun, out)
