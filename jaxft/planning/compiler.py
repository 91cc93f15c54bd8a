"""Compiles programs of a run for accelerators that are not here, in processes of the compilers' own environment.

    python -m jaxft.planning.compiler            which compilers this environment has

`scripts/make_compilers.sh` makes that environment. Each program is compiled by a process of its own, as XLA may end
the process that it runs in.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
from jax._src.cudnn import fused_attention_stablehlo  # there is no public way to its limits
from jax.experimental import topologies
from jax.sharding import AbstractMesh

from jaxft.components import PlannedRun, Programs, mesh_of_devices, run_from_json
from jaxft.models import compute_capability
from jaxft.planning.targets import Target, find_target
from jaxft.rollout import first_line, is_out_of_memory
from jaxft.runs import version

ROOT = Path(__file__).parents[2]
MAKE = "scripts/make_compilers.sh"

TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Variables with which libtpu compiles on a machine that is no TPU's host."""


class Compiled(NamedTuple):
    """Memory of a compiled program per device, and the time to compile it.

    The compilers' `cost_analysis()` is left out: for GPUs it says nothing, and for TPUs it counts a scan's body once.

    Attributes:
        arguments, outputs, temporaries, aliased: bytes; outputs that are written over arguments are `aliased`.
        seconds: how long it took to compile.
        cpu_seconds: seconds of all cores to trace, lower and compile it, without imports.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    seconds: float
    cpu_seconds: float = 0.0


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
    interpreter: Path, run: PlannedRun, target: Target, program: str, hlo_file: Path | None = None
) -> Compiled:
    """Compile one program in a process of the interpreter.

    Args:
        interpreter: Python with the compilers.
        run: the run, with a checkpoint policy of its own.
        target: the accelerators.
        program: a name of `Programs.by_name` or `Programs.warm_up`.
        hlo_file: file for the optimised HLO of the compiled program; None for none.

    Raises:
        CompilerError: the program needs too much memory, or the compiler failed.
    """
    file = None if hlo_file is None else str(hlo_file)
    request = {"run": run.to_json(), "target": target.name, "program": program, "hlo_file": file}
    code, line, error = _ask(interpreter, "compile", request=json.dumps(request))
    if code or not line:
        raise CompilerError(f"the compiler for {target.name} ended with exit code {code}: {error[:500]}")
    answer = json.loads(line)
    if "error" in answer:
        raise CompilerError(answer["error"], is_out_of_memory=answer["is_out_of_memory"])
    return Compiled(**answer)


def _ask(interpreter: Path, *arguments: str, request: str = "{}") -> tuple[int, str, str]:
    """Return the exit code of a process of this file, and the last lines of its output and of its errors."""
    command = [str(interpreter), "-m", "jaxft.planning.compiler", *arguments]
    environment = compiler_environment(interpreter)
    done = subprocess.run(command, input=request, capture_output=True, text=True, env=environment)
    said, errors = done.stdout.strip().splitlines(), done.stderr.strip().splitlines()
    return done.returncode, ["", *said][-1], ["it said nothing", *errors][-1]


@cache
def versions(interpreter: Path) -> dict[str, str]:
    """Return the versions of jax and of the compilers that an interpreter has.

    Raises:
        CompilerError: there is no such interpreter, or it has no compilers.
    """
    try:
        code, line, error = _ask(interpreter)
    except OSError as refused:
        raise CompilerError(f"{interpreter} cannot be run ({refused.strerror}): make compilers with {MAKE}") from None
    if code:
        raise CompilerError(f"{interpreter} has no compilers ({error[:200]}): make them with {MAKE}")
    found: dict[str, str] = json.loads(line)
    return found


def compiler_environment(interpreter: Path) -> dict[str, str]:
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
    if target.chip.platform == "tpu":
        description = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
    else:
        description = topologies.get_topology_desc(
            "", platform="cuda", target_config=target.gpu_description, topology=target.topology
        )
    return list(description.devices)[: target.chips]


@contextmanager
def apply_cudnn_limits(target: Target) -> Iterator[None]:
    """Let JAX check arguments of cuDNN's attention by the limits of a target's GPUs.

    It asks the GPU of its own process, and where there is none takes the limits of Ampere: heads of up to 128.
    """

    def is_at_least(wanted: str) -> bool:
        return compute_capability(target.device) >= tuple(map(int, wanted.split(".")))

    with patch.object(fused_attention_stablehlo, "check_compute_capability", is_at_least):
        yield


def compiling_pallas_for(device: Any) -> AbstractContextManager[None]:
    """Let Pallas lower Triton kernels for a GPU that is not here; since 0.11 it asks jax for the device."""
    if device.platform != "gpu" or jax.__version_info__ < (0, 11):
        return nullcontext()
    described = jax.sharding.AbstractDevice(device.device_kind, device.core_count, device.platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=described))


def lower(request: Mapping[str, Any]) -> Any:
    """Return the lowered program of a request of `compile_program`."""
    run, target = run_from_json(request["run"]), find_target(request["target"])
    devices = topology_devices(target)
    programs = Programs(run, mesh_of_devices(run, devices), target.device)
    with apply_cudnn_limits(target), compiling_pallas_for(devices[0]):
        return (programs.warm_up() | programs.by_name())[request["program"]]()


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
        spent, memory = (time.perf_counter() - started, cpu_seconds() - used), compiled.memory_analysis()
        answer = Compiled(
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.alias_size_in_bytes,
            *spent,
        )._asdict()
        if request["hlo_file"] is not None:
            Path(request["hlo_file"]).write_text(compiled.as_text())
    except Exception as error:  # for the process that asked, whatever it is
        said = f"{type(error).__name__}: {first_line(error)[:500]}"
        where = f"{request['program']} for {request['target']}"
        answer = {"error": f"{where}: {said}", "is_out_of_memory": is_out_of_memory(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
