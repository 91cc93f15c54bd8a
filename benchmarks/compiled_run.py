"""Operations, memory traffic, kernels and messages of a run's compiled program, for accelerators that are not here.

    python benchmarks/compiled_run.py --config-file run.yml --target h200x1 --set llms.policy.remat=dots
    python benchmarks/compiled_run.py --config-file run.yml --target v5e-8 --program decode

The program is compiled as by `jaxft plan`, which says whether it fits and which `remat` to take, and its optimised HLO
is read (`hlo.py`): ten seconds for a GPU, a minute or two for a TPU. All figures are those of one chip.
`scripts/make_compilers.sh` gets the compilers. `aot.py` has the same figures of the cases in docs/accelerators.md.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import AbstractMesh

from decode_step import CompiledStep, compile_step
from hlo import Program
from jaxft.components.programs import PlannedRun, Programs, mesh_shape, planned_run
from jaxft.errors import ConfigError
from jaxft.harness.config import load_config
from jaxft.planning import compiler
from jaxft.planning.compiler import CompilerError
from jaxft.planning.flops import kernel_flops
from jaxft.planning.targets import Target, find_target
from jaxft.planning.verb import plan_arguments

PROGRAMS = ("gradient", "step", "prefill", "decode")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the program of a command line, by default that of the process, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plan_arguments(parser)
    parser.add_argument("--program", choices=PROGRAMS, default="gradient", help="default %(default)s")
    parsed = parser.parse_args(arguments)
    try:
        run, target = planned_run(load_config(parsed.config_file, parsed.override)), find_target(parsed.target)
        if run.policy.remat == "auto":
            raise ValueError("remat is auto; wanted the checkpoint policy that jaxft plan shows, such as dots")
        interpreter = parsed.compiler or compiler.default_interpreter()
        compiler.versions(interpreter)
        found = compile_step(interpreter, run, target, parsed.program)
    except (ConfigError, CompilerError, ValueError) as error:
        print(f"compiled_run.py: {error}", file=sys.stderr)
        return 2
    of_kernels = gradient_kernel_flops(run, target) if parsed.program == "gradient" else 0
    for line in lines(parsed.program, found, target, of_kernels):
        print(line)
    return 0


def gradient_kernel_flops(run: PlannedRun, target: Target) -> int:
    """Return the operations of attention's kernels in a gradient on each chip, which HLO does not have."""
    sizes = mesh_shape(run.policy.mesh, target.chips)
    programs = Programs(run, AbstractMesh(tuple(sizes.values()), tuple(sizes)), target.device)
    if programs.kernel().kernel == "xla":
        return 0
    rows, width = programs.rows_and_width()
    return kernel_flops(run.model, rows, width, run.remat) // math.prod(sizes.values())


def lines(name: str, found: CompiledStep, target: Target, of_kernels: int) -> Iterator[str]:
    """Yield the figures of a program as text."""
    program, flops = found.program, found.program.flops + of_kernels
    seconds = least_seconds(target, program, flops)
    limit = max(seconds, key=lambda resource: seconds[resource])
    yield (
        f"{name:<12} {flops:.3e} flops, {program.bytes / 1e9:,.1f} GB moved, "
        f"{sum(launch.times for launch in program.launches):,} launches, compiled in {found.compiled.seconds:.0f} s"
    )
    each = ", ".join(f"{resource} {value * 1e3:,.1f} ms" for resource, value in seconds.items())
    yield f"{'':<12} at least {seconds[limit] * 1e3:,.1f} ms, by {limit}: {each}"
    for kernel, times in kernels(program).items():
        yield f"{'':<12} kernel {kernel}: {times} times"
    for kind, (times, size) in collectives(program).items():
        yield f"{'':<12} {kind}: {times} times, {size / 1e6:,.1f} MB in all"


def kernels(program: Program) -> dict[str, int]:
    """Return the names of the kernels called, and how often."""
    found = Counter[str]()
    for kernel in program.kernels:
        found[kernel.name] += kernel.times
    return dict(found)


def collectives(program: Program) -> dict[str, tuple[int, int]]:
    """Return how often each kind of message between chips is sent, and its bytes in all."""
    found: dict[str, tuple[int, int]] = {}
    for each in program.collectives:
        count, total = found.get(each.kind, (0, 0))
        found[each.kind] = count + each.times, total + each.times * each.bytes
    return found


def least_seconds(target: Target, program: Program, flops: int) -> dict[str, float]:
    """Return the least times of a program by the chip's limits: arithmetic, memory, and links to other chips.

    A ring sends `(n - 1) / n` of an array that is gathered or scattered over n chips, and twice that of a sum. A
    group of more chips than a host has is as slow as the network between hosts. Which chips a smaller group has is not
    known, and it counts as within a host: the lines of `jaxft plan` are more exact there.
    """
    chip, links = target.chip, 0.0
    for each in program.collectives:
        share = (each.group_size - 1) / each.group_size if each.group_size > 1 else 0.0
        is_within = each.group_size <= target.chips // target.hosts
        rate = chip.link_bytes_per_second if is_within else chip.network_bytes_per_second
        links += each.times * each.bytes * share * (2 if each.kind == "all-reduce" else 1) / rate
    seconds = {"arithmetic": flops / chip.flops_per_second, "memory": program.bytes / chip.bytes_per_second}
    return seconds | ({"links": links} if links else {})


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # the devices of this machine are not asked
    sys.exit(main())
