"""The plan of a run for accelerators that are not here: memory, work, communication and least times, by `jaxft plan`.

With compilers (`jaxft.planning.compiler`) the figures are the compilers' own. Without, they follow from shapes and
sharding rules, and are marked as estimated.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from jax.sharding import AbstractMesh

from jaxft.core.sharding import AXES
from jaxft.errors import CheckFailed, ConfigError
from jaxft.harness.config import Config
from jaxft.models.decoder import AUTO_REMATS, Remat
from jaxft.planning import compiler
from jaxft.planning.compiler import Compiled, CompilerError
from jaxft.planning.estimate import sampling_bytes, update_bytes
from jaxft.planning.flops import kernel_flops, model_flops
from jaxft.planning.programs import Programs, Run, mesh_shape
from jaxft.planning.targets import Target, find_target
from jaxft.shipped.configs import LocalPolicyConfig, LocalTrainerAdapterConfig
from jaxft.shipped.local_policy import dtypes_of, shape_of
from jaxft.training.memory import peak, phases

GIB = 2**30

MARGIN = 1.15
"""An estimate that is this many times too large for a device rules a checkpoint policy out without compiling it."""

GPU_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Environment variable: the part of a GPU's memory that jax takes, by default three quarters."""


class Plan(NamedTuple):
    """What a run needs of each device of a target.

    Attributes:
        target: the accelerators.
        mesh: sizes of the mesh's axes.
        remat: checkpoint policy, the one chosen if the configuration leaves it open.
        memory: bytes by purpose, those of `LocalTrainerAdapter.memory`.
        limit: bytes that programs and arrays can have.
        programs: figures of the programs by name; empty if estimated.
        rows, width: rows of the largest microbatch over the whole mesh, and tokens of a row.
        model_flops: operations of a microbatch on each device that count for MFU.
        kernel_flops: operations of attention kernels, by program, which `programs` do not have.
        parameters, trained_parameters: numbers of parameters.
        versions: versions of jax and of the compilers; empty if estimated.
    """

    target: Target
    mesh: tuple[int, int, int]
    remat: Remat
    memory: dict[str, int]
    limit: int
    programs: dict[str, Compiled]
    rows: int
    width: int
    model_flops: int
    kernel_flops: dict[str, int]
    parameters: int
    trained_parameters: int
    versions: dict[str, str]

    @property
    def fits(self) -> bool:
        """True if a device has the memory of every phase."""
        return peak(self.memory) <= self.limit


def run_of(config: Config) -> Run:
    """Return what decides the programs of a configuration's training.

    Raises:
        ConfigError: nothing is trained in this process, or the shape of the model is not known.
    """
    name = config.finetuning.trainer_adapter
    adapter = config.trainer_adapters.get(name or "")
    if not isinstance(adapter, LocalTrainerAdapterConfig):
        raise ConfigError([f"finetuning.trainer_adapter: is {name!r}; only a local_trainer_adapter can be planned"])
    policy = config.llms[adapter.llm]
    if not isinstance(policy, LocalPolicyConfig):
        raise ConfigError([f"llms.{adapter.llm}: only a local_policy can be planned"])
    try:
        return Run(policy, adapter, shape_of(policy))
    except (ValueError, OSError) as error:
        raise ConfigError([f"llms.{adapter.llm}: {error}"]) from error


def make_plan(
    run: Run, target: Target, interpreter: Path | None, show: Callable[[str], object] = lambda line: None
) -> Plan:
    """Plan a run for a target.

    Args:
        run: the run.
        target: the accelerators.
        interpreter: Python with the compilers; None to estimate.
        show: called with a line about the program that is compiled now.

    Raises:
        ConfigError: the model or its rows do not divide over the mesh.
        CheckFailed: a compiler failed.
    """
    try:
        sizes = mesh_shape(run.policy.mesh, target.chips)
        policies = [Programs(run, AbstractMesh(sizes, AXES), target.chip.platform, remat) for remat in remats(run)]
        rows, width = policies[0].rows_and_width()
        held = policies[0].held()
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    limit = memory_limit(target)
    estimated: dict[str, int] = {}
    compiled: dict[str, Compiled] = {}

    def compile_one(programs: Programs, remat: Remat, name: str) -> Compiled:
        assert interpreter is not None
        show(f"compiling {name} for {target.name}" + (f" with remat {remat}" if name == "gradient" else ""))
        return compiler.compile_program(interpreter, run, target, remat, name)

    # The first checkpoint policy that fits, or else the last.
    for remat, programs in zip(remats(run), policies, strict=True):
        estimated = {"update": estimate_update(programs, target, remat)}
        is_last = remat == remats(run)[-1]
        if not is_last and peak(held | estimated) > limit * (1.0 if interpreter is None else MARGIN):
            continue
        if interpreter is None:
            break
        try:
            compiled["gradient"] = compile_one(programs, remat, "gradient")
        except CompilerError as error:
            if not error.is_out_of_memory:
                raise CheckFailed(str(error)) from error
            compiled.pop("gradient", None)
            continue
        if peak(held | {"update": compiled["gradient"].temporaries}) <= limit:
            break
    memory = held | estimated | {"sampling temporaries": estimate_sampling(programs, target)}
    if interpreter is not None:
        for name in ("step", "prefill", "decode"):
            try:
                compiled[name] = compile_one(programs, remat, name)
            except CompilerError as error:
                if not error.is_out_of_memory:
                    raise CheckFailed(str(error)) from error
        if {"gradient", "step"} <= set(compiled):
            memory["update"] = max(compiled[name].temporaries for name in ("gradient", "step"))
        if {"prefill", "decode"} <= set(compiled):
            memory["sampling temporaries"] = max(compiled[name].temporaries for name in ("prefill", "decode"))
    config, chips = run.model, sizes[0] * sizes[1] * sizes[2]
    return Plan(
        target=target,
        mesh=sizes,
        remat=remat,
        memory=memory,
        limit=limit,
        programs=compiled,
        rows=rows,
        width=width,
        model_flops=model_flops(config, rows, width) // chips,
        kernel_flops={"gradient": kernel_flops(config, rows, width, remat) // chips},
        parameters=programs.parameters(),
        trained_parameters=programs.trained_parameters(),
        versions={} if interpreter is None else compiler.versions(interpreter),
    )


def estimate_update(programs: Programs, target: Target, remat: Remat) -> int:
    """Return the estimated bytes of temporaries of an update."""
    run, (rows, width) = programs.run, programs.rows_and_width()
    dtype, compute_dtype = dtypes_of(run.policy, target.chip.platform)
    return update_bytes(
        run.model,
        rows=rows,
        tokens=width,
        remat=remat,
        platform=target.chip.platform,
        sharding=programs.sharding,
        lora=run.lora,
        compute_dtype=compute_dtype or dtype,
        param_dtype=dtype,
        is_packed=programs.is_packed(),
    )


def estimate_sampling(programs: Programs, target: Target) -> int:
    """Return the estimated bytes of temporaries of the sampler's programs."""
    policy = programs.run.policy
    dtype, compute_dtype = dtypes_of(policy, target.chip.platform)
    return max(
        sampling_bytes(
            programs.run.model,
            slots=policy.slots,
            length=policy.max_context_tokens,
            platform=target.chip.platform,
            sharding=programs.sharding,
            compute_dtype=compute_dtype or dtype,
        )
    )


def remats(run: Run) -> tuple[Remat, ...]:
    """Return the checkpoint policies to try, the fastest first."""
    return AUTO_REMATS if run.policy.remat == "auto" else (run.policy.remat,)


def memory_limit(target: Target) -> int:
    """Return the bytes of one chip for programs and arrays."""
    fraction = float(os.environ.get(GPU_FRACTION, "0.75")) if target.chip.platform == "gpu" else 1.0
    return int(target.chip.memory_bytes * fraction)


def plan(config: Config, target_name: str, interpreter: Path | None, show: Callable[[str], object]) -> None:
    """Show the plan of a configuration for a target.

    Args:
        config: the configuration.
        target_name: a name of `find_target`.
        interpreter: Python with the compilers; None for the default one, or estimates if there is none.
        show: shows a line.

    Raises:
        ConfigError: the target is unknown, or the configuration cannot be planned.
        CheckFailed: the run does not fit, or a compiler failed or is not there.
    """
    try:
        target = find_target(target_name)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    run = run_of(config)
    is_given = interpreter is not None
    interpreter = interpreter or compiler.default_interpreter()
    if not is_given and not interpreter.exists():
        show(f"no compilers are at {interpreter}: figures are estimated; {compiler.MAKE} gets them")
        interpreter = None
    try:
        if interpreter is not None:
            compiler.versions(interpreter)
    except CompilerError as error:
        raise CheckFailed(str(error)) from error
    made = make_plan(run, target, interpreter, show)
    for line in lines(made, run):
        show(line)
    if not made.fits:
        raise CheckFailed(f"the run does not fit; {'; '.join(advice(made, run))}")


def lines(plan: Plan, run: Run) -> Iterator[str]:
    """Yield the text of a plan."""
    chip, is_estimated = plan.target.chip, not plan.programs
    mark = "estimated" if is_estimated else "compiled with " + ", ".join(f"{k} {v}" for k, v in plan.versions.items())
    axes = ", ".join(f"{name} {size}" for name, size in zip(AXES, plan.mesh, strict=True))
    chips = plan.mesh[0] * plan.mesh[1] * plan.mesh[2]
    yield f"{'target':<12} {plan.target.name}: {plan.target.chips} x {chip.name}; mesh {axes} ({mark})"
    if chips < plan.target.chips:
        yield f"{'':<12} without llms.{run.adapter.llm}.mesh, {chips} of {plan.target.chips} chips is used"
    if plan.target.hosts > 1:
        yield f"{'':<12} {plan.target.hosts} hosts: jaxft runs in one process, on the chips of one host"
    dtype, compute_dtype = dtypes_of(run.policy, chip.platform)
    yield (
        f"{'model':<12} {plan.parameters / 1e6:,.1f} M parameters in {dtype}, {plan.trained_parameters / 1e6:,.1f} M "
        f"trained; products in {compute_dtype or dtype}"
    )
    yield f"{'remat':<12} {plan.remat}" + (" (auto)" if run.policy.remat == "auto" else "")
    yield f"{'microbatch':<12} {plan.rows} rows of {plan.width:,} tokens on {chips} chips"
    for purpose, size in plan.memory.items():
        temporary = purpose in ("update", "sampling temporaries")
        yield f"{'memory':<12} {size / GIB:8.3f} GiB  {purpose}{' (estimated)' if temporary and is_estimated else ''}"
    for phase, parts in phases(plan.memory).items():
        used, has = sum(parts) / GIB, plan.limit / GIB
        yield f"{'memory':<12} {used:8.3f} GiB  in all in the {phase}, {used / has:.0%} of {has:.2f}"
    for name, program in plan.programs.items():
        yield from _program_lines(plan, name, program)
    if is_estimated:
        yield f"{'gradient':<12} {plan.model_flops:.3e} flops a chip that count for MFU"


def _program_lines(plan: Plan, name: str, program: Compiled) -> Iterator[str]:
    flops = program.flops + plan.kernel_flops.get(name, 0)
    seconds = least_seconds(plan.target, program, flops)
    limit = max(seconds, key=lambda what: seconds[what])
    yield (
        f"{name:<12} arguments {program.arguments / GIB:.3f} GiB, temporaries {program.temporaries / GIB:.3f}, "
        f"{flops:.3e} flops, {program.bytes / 1e9:,.1f} GB moved, compiled in {program.seconds:.0f} s"
    )
    each = ", ".join(f"{what} {value * 1e3:,.1f} ms" for what, value in seconds.items())
    yield f"{'':<12} at least {seconds[limit] * 1e3:,.1f} ms on a chip, by {limit}: {each}"
    if name == "gradient":
        ratio, mfu = flops / plan.model_flops, plan.model_flops / seconds[limit] / plan.target.chip.flops_per_second
        yield f"{'':<12} {ratio:.2f} times the model's flops; at most {mfu:.0%} MFU"
    for kernel, times in program.kernels.items():
        yield f"{'':<12} kernel {kernel}: {times} times"
    for kind, (times, size) in collectives(program).items():
        yield f"{'':<12} {kind}: {times} times, {size / 1e6:,.1f} MB in all"


def collectives(program: Compiled) -> dict[str, tuple[int, int]]:
    """Return how often each kind of message between chips is sent, and its bytes in all."""
    found: dict[str, tuple[int, int]] = {}
    for kind, _, _, times, size in program.collectives:
        count, total = found.get(kind, (0, 0))
        found[kind] = count + times, total + times * size
    return found


def least_seconds(target: Target, program: Compiled, flops: int) -> dict[str, float]:
    """Return the least times of a program by the chip's limits: arithmetic, memory, and links to other chips.

    A ring sends `(n - 1) / n` of an array that is gathered or scattered over n chips, and twice that of a sum.
    """
    chip, sent = target.chip, 0.0
    for kind, _, group, times, size in program.collectives:
        share = (group - 1) / group if group > 1 else 0.0
        sent += times * size * share * (2 if kind == "all-reduce" else 1)
    seconds = {"arithmetic": flops / chip.flops_per_second, "memory": program.bytes / chip.bytes_per_second}
    return seconds | ({"links": sent / chip.link_bytes_per_second} if sent else {})


def advice(plan: Plan, run: Run) -> list[str]:
    """Return the changes that make a run smaller, those that cost least first, with what each is worth."""
    llm, adapter = f"llms.{run.adapter.llm}", f"trainer_adapters.{'<name>'}"
    over = (peak(plan.memory) - plan.limit) / GIB
    sums = {phase: sum(parts) for phase, parts in phases(plan.memory).items()}
    worst = max(sums, key=lambda phase: sums[phase])
    found = [f"{over:.2f} GiB are missing in the {worst}; the changes that cost least come first"]
    if plan.target.chip.platform == "gpu" and peak(plan.memory) <= 0.95 * plan.target.chip.memory_bytes:
        found.append(f"set the environment variable {GPU_FRACTION}=0.95, which gives jax the whole GPU")
    shards = plan.mesh[0] * plan.mesh[1]
    if worst == "update" and plan.rows > shards:
        half, tokens = plan.memory["update"] / 2 / GIB, run.adapter.microbatch_tokens // 2
        found.append(f"lower {adapter}.microbatch_tokens to {tokens}, worth up to {half:.2f} GiB")
    if run.policy.remat not in ("auto", "full"):
        found.append(f"set {llm}.remat to auto or full, which costs up to a third of an update's time")
    if worst == "rollout" or plan.memory["sampling"] > GIB:
        half = plan.memory["sampling"] / 2 / GIB
        found.append(f"halve {llm}.slots (now {run.policy.slots}) and prefix_cache_rows, worth {half:.2f} GiB")
    if plan.target.chips > plan.mesh[1] * plan.mesh[2]:
        found.append(f"divide the parameters over more chips ({llm}.mesh.fsdp, now {plan.mesh[1]})")
    if run.policy.lora is None:
        saved = plan.memory["optimizer"] + plan.memory["gradients"]
        found.append(f"train adapters ({llm}.lora), worth about {saved / GIB:.2f} GiB")
    found.append("take more or larger chips")
    return found
