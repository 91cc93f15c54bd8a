"""Compiles programs of a run for accelerators that are not here, in processes of the compilers' own environment.

    python -m jaxft.planning.compiler            which compilers this environment has

`scripts/make_compilers.sh` makes that environment. Each program is compiled by a process of its own, as XLA may end
the process that it runs in.
"""

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from pydantic import TypeAdapter

from jaxft.harness.registry import ComponentConfig
from jaxft.models.config import DecoderConfig
from jaxft.models.flash import compute_capability
from jaxft.planning.decode_step import LargeCopy, Step, decode_step, large_copies
from jaxft.planning.hlo import CACHED_BYTES, read
from jaxft.planning.programs import Programs, Run, mesh_of_devices
from jaxft.planning.targets import Target, find_target
from jaxft.rollout.device import first_line, is_out_of_memory
from jaxft.runs.environment import version
from jaxft.shipped.configs import LocalPolicyConfig, LocalTrainerAdapterConfig

ROOT = Path(__file__).parents[2]
MAKE = "scripts/make_compilers.sh"

HLO_FILE = "JAXFT_HLO_FILE"
"""Environment variable: a file for the optimised HLO of the compiled program, to look at."""

COPY_SHARE = 0.01
"""Share of the keys of a layer from which on a copy counts as large."""

TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Variables with which libtpu compiles on a machine that is no TPU's host."""


class Compiled(NamedTuple):
    """Memory, work and communication of a compiled program, per device.

    Attributes:
        arguments, outputs, temporaries, aliased: bytes; outputs that are written over arguments are `aliased`.
        flops: operations of products of matrices, without those of attention kernels.
        bytes: bytes of device memory read and written.
        collectives: kind, text of the arrays, devices of a group, times, and bytes of one.
        kernels: names of the kernels called, and how often.
        seconds: how long it took to compile.
        cpu_seconds: seconds of all cores to trace, lower and compile it, without imports.
        step: one turn of the loop that decodes; None where it was not asked for, or products are in no loop.
        copies: copies of at least `COPY_SHARE` of the keys of a layer; empty where they were not asked for.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    flops: int
    bytes: int
    collectives: list[tuple[str, str, int, int, int]]
    kernels: dict[str, int]
    seconds: float
    cpu_seconds: float = 0.0
    step: Step | None = None
    copies: tuple[LargeCopy, ...] = ()


class CompilerError(Exception):
    """A program that could not be compiled; `is_out_of_memory` if the compiler said that it needs too much memory."""

    def __init__(self, message: str, *, is_out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.is_out_of_memory = is_out_of_memory


def default_interpreter() -> Path:
    """Return the interpreter that `scripts/make_compilers.sh` makes."""
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_folder / "jaxft" / "compilers" / "bin" / "python"


def compile_program(
    interpreter: Path, run: Run, target: Target, remat: str, program: str, pool_bytes: int = 0
) -> Compiled:
    """Compile one program in a process of the interpreter.

    Args:
        interpreter: Python with the compilers.
        run: the run.
        target: the accelerators.
        remat: checkpoint policy.
        program: a name of `Programs.by_name` or `Programs.warm_up`.
        pool_bytes: bytes per device of the keys of one layer, for the figures of a step; 0 leaves these out.

    Raises:
        CompilerError: the program needs too much memory, or the compiler failed.
    """
    request = {
        **_described(run),
        "teacher": None if run.teacher is None else _described(run.teacher),
        "target": target.name,
        "remat": remat,
        "program": program,
        "pool_bytes": pool_bytes,
    }
    done = subprocess.run(
        [str(interpreter), "-m", "jaxft.planning.compiler", "compile"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=_environment(interpreter),
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CompilerError(f"the compiler for {target.name} ended with exit code {done.returncode}: {last[:500]}")
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise CompilerError(answer["error"], is_out_of_memory=answer["is_out_of_memory"])
    return TypeAdapter(Compiled).validate_python(answer)


def _described(run: Run) -> dict[str, Any]:
    """Return what a program follows from, as JSON's types."""
    model = TypeAdapter(DecoderConfig).dump_python(run.model, mode="json")
    return {"policy": plain(run.policy), "adapter": plain(run.adapter), "model": model}


def _described_run(request: Mapping[str, Any], teacher: Run | None = None) -> Run:
    return Run(
        LocalPolicyConfig.model_validate(request["policy"]),
        LocalTrainerAdapterConfig.model_validate(request["adapter"]),
        TypeAdapter(DecoderConfig).validate_python(request["model"]),
        teacher=teacher,
    )


def plain(config: ComponentConfig) -> dict[str, Any]:
    """Return the fields of a configuration as JSON's types, without its type."""
    return {name: value for name, value in config.model_dump(mode="json").items() if name != "_type"}


@cache
def versions(interpreter: Path) -> dict[str, str]:
    """Return the versions of jax and of the compilers that an interpreter has.

    Raises:
        CompilerError: there is no such interpreter, or it has no compilers.
    """
    try:
        done = subprocess.run(
            [str(interpreter), "-m", "jaxft.planning.compiler"],
            capture_output=True,
            text=True,
            env=_environment(interpreter),
        )
    except OSError as error:
        raise CompilerError(f"{interpreter} cannot be run ({error.strerror}): make the compilers with {MAKE}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CompilerError(f"{interpreter} has no compilers ({last[:200]}): make them with {MAKE}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment(interpreter: Path) -> dict[str, str]:
    """Return the environment of a process with compilers; jaxft is that of this process."""
    packages = list(interpreter.parent.parent.glob("lib/python3*/site-packages/nvidia/*"))
    libraries = [str(package / "lib") for package in packages]
    programs = [str(package / "bin") for package in packages]
    keep = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return {
        **keep,
        **TPU_ENVIRONMENT,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
        "PATH": ":".join([*programs, os.environ.get("PATH", "")]),
    }


# What follows runs in the compilers' environment.


def topology_devices(target: Target) -> list[Any]:
    """Return devices of a target to compile for.

    Raises:
        RuntimeError: this environment has no compiler for them.
    """
    from jax.experimental import topologies  # slow to import, and needed in the compilers' environment only

    if target.chip.platform == "tpu":
        description = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
    else:
        description = topologies.get_topology_desc(
            "", platform="cuda", target_config=target.gpu_description, topology=target.topology
        )
    return list(description.devices)[: target.chips]


@contextmanager
def cudnn_limits_of(target: Target) -> Iterator[None]:
    """Let JAX check arguments of cuDNN's attention by the limits of a target's GPUs.

    It asks the GPU of its own process, and where there is none takes the limits of Ampere: heads of up to 128.
    """
    from jax._src.cudnn import fused_attention_stablehlo  # there is no public way, and no other code of jaxft needs it

    def is_at_least(wanted: str) -> bool:
        return compute_capability(target.device) >= tuple(map(int, wanted.split(".")))

    with patch.object(fused_attention_stablehlo, "check_compute_capability", is_at_least):
        yield


def lower(request: Mapping[str, Any]) -> Any:
    """Return the lowered program of a request of `compile_program`."""
    taught_by = request["teacher"]
    run = _described_run(request, None if taught_by is None else _described_run(taught_by))
    target = find_target(request["target"])
    mesh = mesh_of_devices(run, topology_devices(target))
    programs = Programs(run, mesh, target, request["remat"])
    with cudnn_limits_of(target):
        return (programs.warm_up() | programs.by_name())[request["program"]]()


def summarize(compiled: Any, seconds: float, cpu_seconds: float, target: Target, pool_bytes: int) -> Compiled:
    """Return memory, work and communication of a compiled program, which took so long to compile."""
    cached_bytes = CACHED_BYTES if target.chip.platform == "gpu" else 0
    memory, program = compiled.memory_analysis(), read(compiled.as_text(), cached_bytes)
    kernels: dict[str, int] = {}
    for kernel in program.kernels:
        kernels[kernel.name] = kernels.get(kernel.name, 0) + kernel.times
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        flops=program.flops,
        bytes=program.bytes,
        collectives=[
            (each.kind, ", ".join(map(str, each.arrays)), each.group_size, each.times, each.bytes)
            for each in program.collectives
        ],
        kernels=kernels,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        step=decode_step(program, pool_bytes) if pool_bytes else None,
        copies=tuple(large_copies(program, math.ceil(COPY_SHARE * pool_bytes))) if pool_bytes else (),
    )


def cpu_seconds() -> float:
    """Return the seconds of all cores that this process and the programs that it ran have used so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    """Answer one request on standard input, or print the versions of the compilers."""
    if sys.argv[1:] != ["compile"]:
        packages = ("jax", "libtpu", "jax-cuda13-plugin", "nvidia-cudnn-cu13")
        print(json.dumps({package: found for package in packages if (found := version(package)) is not None}))
        return
    request = json.load(sys.stdin)
    try:
        used = cpu_seconds()
        lowered, started = lower(request), time.perf_counter()
        compiled = lowered.compile()
        seconds, target = time.perf_counter() - started, find_target(request["target"])
        summary = summarize(compiled, seconds, cpu_seconds() - used, target, request["pool_bytes"])
        values = TypeAdapter(Compiled).dump_python(summary, mode="json")
        answer = dict(zip(Compiled._fields, values, strict=True))
        if file := os.environ.get(HLO_FILE):
            Path(file).write_text(compiled.as_text())
    except Exception as error:  # for the process that asked, whatever it is
        said = f"{type(error).__name__}: {first_line(error)[:500]}"
        where = f"{request['program']} for {request['target']}"
        answer = {"error": f"{where}: {said}", "is_out_of_memory": is_out_of_memory(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
