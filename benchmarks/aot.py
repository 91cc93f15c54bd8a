"""Updates and the engine as compilers for GPUs and TPUs make them, without a device: memory, operations, launches.

    python benchmarks/aot.py                       # all cases: about an hour on two cores
    python benchmarks/aot.py gpu --only updates    # updates on GPUs: about three minutes
    python benchmarks/aot.py tpu --only engine     # the engine on TPUs; the updates in the file stay
    python benchmarks/aot.py --shrink              # one GPU, a minute

The cases of the engine are in `aot_engine.py`. Each case of an update takes the checkpoint policy that `remat: auto`
takes: the first whose compiled update fits the device beside all that a run holds, with 8 slots and pages for 16 whole
requests per device. Figures are the compilers' own; nothing is run. Results go to `benchmarks/results/aot_gpu.json` and
`aot_tpu.json`, or another folder with `--out`. Exit code 1 when a bar is missed. `scripts/make_compilers.sh` makes the
environment of the compilers.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh
from pydantic import BaseModel

from aot_engine import EngineResults, measure_engine
from compiled_run import collectives, kernels, least_seconds
from decode_step import CompiledStep, compile_step
from jaxft.components.configs import LocalPolicyConfig, LocalTrainerAdapterConfig
from jaxft.components.programs import PlannedRun, Programs
from jaxft.core.sharding import AXES
from jaxft.models.ceilings import model_flops
from jaxft.models.config import model_preset
from jaxft.models.layer_stack import Remat, auto_remats
from jaxft.planning import compiler
from jaxft.planning.compiler import CompilerError
from jaxft.planning.flops import kernel_flops
from jaxft.planning.plan import MARGIN, estimate_update, memory_limit
from jaxft.planning.targets import Target, find_target
from jaxft.runs.environment import environment
from jaxft.training.memory import peak
from records import Check, check_text

GIB = 2**30
RESULTS = Path(__file__).parent / "results"
LENGTHS = (1024, 2048, 4096)
TOKENS = 8192
"""Tokens of the microbatch whose rows have each of the `LENGTHS`."""

MOST_FLOPS = {"qwen3-0.6b": 1.12, "qwen3-1.7b": 1.12, "qwen3-8b": 1.05}
"""Operations over those needed, where no products but the logits are computed twice; with other policies 1.4."""


class Case(NamedTuple):
    """An update of full-size rows: fsdp over all chips, and the rows of each device."""

    target: str
    model: str
    rows: int
    width: int
    lora: bool = False
    layers: int | None = None

    @property
    def title(self) -> str:
        """The case in one line."""
        kind = "LoRA" if self.lora else "full"
        return f"{self.model}, {kind}, {self.target}, {self.rows} x {self.width:,} a device"

    @property
    def platform(self) -> str:
        """The platform of the target: gpu or tpu."""
        return find_target(self.target).chip.platform

    def run(self) -> PlannedRun:
        """Return the configuration of the case.

        >>> CASES[0].run().adapter.microbatch_tokens  # 8 devices
        131072
        """
        chips, model = find_target(self.target).chips, model_preset(self.model)
        policy: dict[str, Any] = {
            "preset": self.model,
            "max_context_tokens": self.width,
            "slots": 8 * chips,
            "cache_tokens": 16 * chips * self.width,
            "mesh": {"data": 1, "fsdp": chips} if chips > 1 else None,
            "lora": {"rank": 16} if self.lora else None,
        }
        rate = {"learning_rate": 1e-6}
        adapter = {"llm": "policy", "microbatch_tokens": self.rows * self.width * chips, "optimizer": rate}
        if self.layers is not None:
            model = replace(model, num_layers=self.layers)
        return PlannedRun(
            LocalPolicyConfig.model_validate(policy), LocalTrainerAdapterConfig.model_validate(adapter), model
        )

    def programs(self, remat: Remat) -> Programs:
        """Return the programs of the case, without its devices."""
        mesh = AbstractMesh((1, find_target(self.target).chips, 1), AXES)
        return Programs(self.run().with_remat(remat), mesh, find_target(self.target).device)


CASES = (
    Case("v5e-8", "qwen3-0.6b", 8, 2048),
    Case("v5e-16", "qwen3-1.7b", 4, 2048),
    Case("h200x1", "qwen3-0.6b", 8, 2048),
    Case("h200x1", "qwen3-1.7b", 8, 2048),
    Case("h100x1", "qwen3-8b", 4, 4096, lora=True),
    Case("h100x8", "qwen3-8b", 4, 4096),
)
SHRUNK = (Case("h200x1", "qwen3-0.6b", 2, 1024, layers=2),)


class CaseResult(BaseModel):
    """Figures of a case, per device.

    Attributes:
        remat: checkpoint policy that was taken.
        tried: bytes of temporaries by checkpoint policy, of those that were compiled; None where they do not fit.
        memory: bytes by purpose; `update` are the temporaries.
        limit_bytes: bytes that programs and arrays can have.
        estimated_bytes: temporaries by arithmetic, without a compiler.
        arguments_bytes: arguments of the program: parameters, sums of gradients and the batch.
        flops, model_flops: operations, attention kernels included, and those that a gradient needs.
        moved_bytes: bytes of device memory read and written.
        least_seconds: least time by each limit of the chip.
        collectives: times and bytes in all, by kind.
        kernels: names of the kernels called, and how often.
        compile_seconds: seconds of the compiler, for the policy that was taken.
    """

    title: str
    remat: str
    tried: dict[str, int | None]
    memory: dict[str, int]
    limit_bytes: int
    estimated_bytes: int
    arguments_bytes: int
    flops: int
    model_flops: int
    moved_bytes: int
    least_seconds: dict[str, float]
    collectives: dict[str, tuple[int, int]]
    kernels: dict[str, int]
    compile_seconds: float
    checks: list[Check]


class Results(BaseModel):
    """Results of a call for one platform.

    Attributes:
        compilers: versions of jax and of the compilers.
        environment: versions, platform, command line and commit.
        temporaries_by_length: bytes of temporaries of a microbatch of `TOKENS` tokens, by the tokens of a row.
        engine: results of the engine; None before they were measured.
    """

    compilers: dict[str, str]
    environment: dict[str, Any]
    cases: list[CaseResult] = []
    temporaries_by_length: dict[int, int] = {}
    checks: list[Check] = []
    is_complete: bool = False
    engine: EngineResults | None = None

    def update_checks(self) -> list[Check]:
        """Return the bars of the updates."""
        return [*self.checks, *(check for case in self.cases for check in case.checks)]


Compile = Callable[[Case, Remat], CompiledStep]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the cases of a command line, by default that of the process, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help="gpu, tpu (default: both)")
    parser.add_argument("--only", choices=("engine", "updates"), help="measure these, and keep the rest of the file")
    parser.add_argument("--compiler", type=Path, metavar="PYTHON", help="interpreter with the compilers")
    parser.add_argument("--shrink", action="store_true", help="small cases on one GPU, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="default %(default)s")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.platforms) - {"gpu", "tpu"}:
        parser.error(f"no platform is named {', '.join(sorted(unknown))}; wanted gpu or tpu")
    interpreter = parsed.compiler or compiler.default_interpreter()
    try:
        versions = compiler.versions(interpreter)
    except CompilerError as error:
        print(f"aot.py: {error}", file=sys.stderr)
        return 2

    def compile_run(run: PlannedRun, target: Target, program: str, pool_bytes: int) -> CompiledStep:
        size = f"{run.policy.preset}, {run.model.num_layers} layers, {run.policy.slots} slots"
        print(f"compiling {program} for {target.name}: {size}, remat {run.policy.remat}", file=sys.stderr, flush=True)
        return compile_step(interpreter, run, target, program, pool_bytes)

    def compile_case(case: Case, remat: Remat) -> CompiledStep:
        return compile_run(case.run().with_remat(remat), find_target(case.target), "gradient", 0)

    is_met = True
    for platform in ("gpu",) if parsed.shrink else parsed.platforms or ("gpu", "tpu"):
        out = None if parsed.shrink else parsed.out / f"aot_{platform}.json"
        results, earlier = Results(compilers=versions, environment=environment([])), earlier_results(out)
        if earlier is not None and parsed.only == "engine":
            results = earlier
        elif earlier is not None and parsed.only == "updates":
            results.engine = earlier.engine
        if parsed.only != "engine":
            measure_updates(results, platform, compile_case, out, parsed.shrink)
            is_met = is_met and all(check.is_met() for check in results.update_checks())
        if parsed.only != "updates":
            results.engine = EngineResults(compilers=versions, environment=environment([]))
            measure_engine(results.engine, platform, compile_run, partial(_write, results, out), parsed.shrink)
            is_met = is_met and all(check.is_met() for check in results.engine.all_checks())
    return int(not is_met)


def earlier_results(out: Path | None) -> Results | None:
    """Return the results in a file; None without one."""
    return Results.model_validate_json(out.read_text()) if out is not None and out.exists() else None


def measure_updates(
    results: Results, platform: str, compile_case: Compile, out: Path | None, is_shrunk: bool = False
) -> None:
    """Add the updates of a platform to results, and write and show them as they come."""
    for case in SHRUNK if is_shrunk else CASES:
        if case.platform == platform:
            results.cases.append(measure(case, compile_case))
            print(case_text(results.cases[-1]), flush=True)
            _write(results, out)
    lengths = LENGTHS[:2] if is_shrunk else LENGTHS
    results.temporaries_by_length, check = measure_lengths(platform, lengths, compile_case)
    results.checks.append(check)
    results.is_complete = True
    _write(results, out)
    print(lengths_text(results))


def measure(case: Case, compile_case: Compile) -> CaseResult:
    """Compile a case with the checkpoint policies of `auto` until one fits, and return its figures.

    Raises:
        CompilerError: the compiler failed, or the last policy needs too much memory for the compiler itself.
    """
    target, limit = find_target(case.target), memory_limit(find_target(case.target))
    tried: dict[str, int | None] = {}
    remats = auto_remats(case.platform)
    for remat in remats:
        programs = case.programs(remat)
        held, estimated = programs.held(), estimate_update(programs)
        is_last = remat == remats[-1]
        if not is_last and peak(held | {"update": estimated}) > MARGIN * limit:
            continue
        try:
            compiled, program, *_ = compile_case(case, remat)
        except CompilerError as error:
            if is_last or not error.is_out_of_memory:
                raise
            tried[remat] = None
            continue
        tried[remat] = compiled.temporaries
        memory = held | {"update": compiled.temporaries}
        if peak(memory) <= limit:
            break
    (rows, width), chips = programs.rows_and_width(), target.chips
    needed = model_flops(programs.run.model, rows, width) // chips
    flops = program.flops + kernel_flops(programs.run.model, rows, width, remat) // chips
    in_rules = held["parameters"] + held["gradients"]
    most_flops = MOST_FLOPS[case.model] if remat == "dots" else 1.4
    checks = [
        Check(name="memory / limit", value=peak(memory) / limit, relation="at most", wanted=1.0),
        Check(
            name="arguments beyond parameters, gradients and batch, relative",
            value=abs(compiled.arguments / (in_rules + batch_bytes(rows * width // chips)) - 1),
            relation="at most",
            wanted=0.001,
        ),
        Check(
            name="estimate against compiler, temporaries",
            value=abs(estimated / compiled.temporaries - 1),
            relation="at most",
            wanted=0.25,
        ),
    ]
    if not case.lora and case.layers is None:  # no gradient of a frozen weight is needed
        checks.append(Check(name="flops / needed", value=flops / needed, relation="at most", wanted=most_flops))
    return CaseResult(
        title=case.title,
        remat=remat,
        tried=tried,
        memory=memory,
        limit_bytes=limit,
        estimated_bytes=estimated,
        arguments_bytes=compiled.arguments,
        flops=flops,
        model_flops=needed,
        moved_bytes=program.bytes,
        least_seconds=least_seconds(target, program, flops),
        collectives=collectives(program),
        kernels=kernels(program),
        compile_seconds=compiled.seconds,
        checks=checks,
    )


def batch_bytes(tokens: int) -> int:
    """Bytes of a GRPO batch: four tables of float32, three of int32, and a mask.

    >>> batch_bytes(2)
    58
    """
    return tokens * (4 * 4 + 3 * 4 + 1)


def measure_lengths(platform: str, lengths: Sequence[int], compile_case: Compile) -> tuple[dict[int, int], Check]:
    """Return the temporaries of equally many tokens in rows of each length, and the check that they do not grow."""
    target = "h200x1" if platform == "gpu" else "v5e-1"
    sizes = {
        width: compile_case(Case(target, "qwen3-0.6b", TOKENS // width, width, layers=4), "dots").compiled.temporaries
        for width in lengths
    }
    growth = max(sizes.values()) / statistics.median(sizes.values())
    name = f"temporaries of {TOKENS:,} tokens, longest rows / median"
    return sizes, Check(name=name, value=growth, relation="at most", wanted=1.05)


def case_text(case: CaseResult) -> str:
    """A case as text: memory, operations, least times, collectives, and each bar with its verdict."""
    tried = ", ".join(
        f"{name} {'out of memory' if size is None else f'{size / GIB:.2f}'}" for name, size in case.tried.items()
    )
    memory = ", ".join(f"{name} {size / GIB:.2f}" for name, size in case.memory.items() if size)
    seconds = ", ".join(f"{name} {value * 1e3:,.0f} ms" for name, value in case.least_seconds.items())
    sent = ", ".join(f"{kind} {times} times, {size / 1e6:,.0f} MB" for kind, (times, size) in case.collectives.items())
    rows = [
        f"== {case.title}: remat {case.remat} (compiled in {case.compile_seconds:.0f} s; GiB of temporaries: {tried})",
        f"  GiB: {memory}; in all {peak(case.memory) / GIB:.2f} of {case.limit_bytes / GIB:.2f}",
        f"  {case.flops:.4g} operations, {case.flops / case.model_flops:.3f} of those needed; "
        f"{case.moved_bytes / 1e9:,.0f} GB moved",
        f"  at least: {seconds}",
        f"  collectives: {sent or 'none'}",
        f"  kernels: {', '.join(f'{name} {times}' for name, times in case.kernels.items())}",
    ]
    return "\n".join([*rows, *map(check_text, case.checks)])


def lengths_text(results: Results) -> str:
    """The temporaries by length, and each bar with its verdict."""
    sizes = ", ".join(f"{width:,}: {size / GIB:.3f}" for width, size in results.temporaries_by_length.items())
    return "\n".join([f"== GiB of temporaries by tokens of a row: {sizes}", *map(check_text, results.checks)])


def _write(results: Results, out: Path | None) -> None:
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    begun = out.with_name(out.name + ".part")
    begun.write_text(results.model_dump_json(indent=1) + "\n")
    os.replace(begun, out)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # the devices of this machine are not asked
    sys.exit(main())
