"""The plan of a run for accelerators that are not here: memory, work, communication and least times, by `jaxft plan`.

With compilers (`jaxft.planning.compiler`) the memory of programs is the compilers' own. Without, it follows from shapes
and sharding rules, and is marked as estimated. Work, messages and least times follow from them in either case.
"""

import argparse
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxft import Config, DecoderConfig, load_config
from jaxft.components import PlannedRun, Programs, mesh_shape, planned_run, resolve_dtypes
from jaxft.core import ADAPTER
from jaxft.errors import CheckFailed, ConfigError, one_line
from jaxft.harness import run_main
from jaxft.models import MOST_SCORES, Choice, Remat, auto_remats, decode_bytes, model_flops, parameter_shapes
from jaxft.planning import compiler
from jaxft.planning.compiler import Compiled, CompilerError
from jaxft.planning.estimate import UpdateBytes, sampling_bytes, update_bytes
from jaxft.planning.flops import Message, gradient_flops, messages
from jaxft.planning.targets import Target, find_target
from jaxft.runs import Console
from jaxft.training import peak, phases

GIB = 2**30

MARGIN = 1.15
"""An estimate that is this many times too large for a device rules a checkpoint policy out without compiling it."""

COMPILED = {"update": ("gradient", "step"), "sampling temporaries": ("prefill", "decode")}
"""The programs whose temporaries a purpose of memory is the largest of."""

GPU_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables for the part of a GPU's memory that jax takes, by default three quarters; the second is old."""


class Plan(NamedTuple):
    """The needs of a run on each device of a target.

    Attributes:
        target: the accelerators.
        mesh: sizes of the mesh's axes.
        remat: checkpoint policy, the one chosen if the configuration leaves it open.
        kernel: kernel of attention, and the reason for it.
        memory: bytes by purpose, those of `LocalTrainerAdapter.memory`.
        disk: bytes of weights in files, those of `LocalTrainerAdapter.disk_bytes`.
        limit: bytes that programs and arrays can have.
        programs: the compiled programs by name; empty if estimated.
        too_large: programs that the compiler found no memory for.
        rows, width: rows of the largest microbatch over the whole mesh, and tokens of a row.
        is_smallest: True if a microbatch cannot have fewer rows.
        model_flops: operations of a microbatch on each device that count for MFU.
        flops: operations of its gradient on each device, with those that `remat` and attention kernels compute again.
        parameters, trained_parameters: numbers of parameters.
        versions: versions of jax and of the compilers; empty if estimated.
    """

    target: Target
    mesh: dict[str, int]
    remat: Remat
    kernel: Choice
    memory: dict[str, int]
    disk: dict[str, int]
    limit: int
    programs: dict[str, Compiled]
    too_large: tuple[str, ...]
    rows: int
    width: int
    is_smallest: bool
    model_flops: int
    flops: int
    parameters: int
    trained_parameters: int
    versions: dict[str, str]

    @property
    def fits(self) -> bool:
        """True if a device has the memory of every phase."""
        return not self.too_large and peak(self.memory) <= self.limit


def make_plan(
    run: PlannedRun, target: Target, interpreter: Path | None, show: Callable[[str], object] = lambda line: None
) -> Plan:
    """Plan a run for a target.

    Args:
        run: the run.
        target: the accelerators.
        interpreter: Python with the compilers; None to estimate.
        show: called with a line about the program that is compiled now.

    Raises:
        ConfigError: the model or its rows do not divide over the mesh, or the limit of memory is no number.
        CheckFailed: a compiler failed.
    """
    try:
        sizes, limit = mesh_shape(run.policy.mesh, target.chips), memory_limit(target)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        remats = auto_remats(target.chip.platform) if run.policy.remat == "auto" else (run.policy.remat,)
        candidates = [Programs(run.with_remat(remat), mesh, target.device, target.hosts > 1) for remat in remats]
        held, (rows, width) = candidates[0].held(), candidates[0].rows_and_width()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    compile_one = None if interpreter is None else partial(_compile, interpreter, target, show)
    programs, memory, found = _choose_remat(candidates, held, limit, compile_one)
    chips, kernel = math.prod(sizes.values()), programs.kernel()
    return Plan(
        target=target,
        mesh=sizes,
        remat=programs.run.remat,
        kernel=kernel,
        memory=memory,
        disk=programs.disk_bytes(),
        limit=limit,
        programs={name: each for name, each in found.items() if each is not None},
        too_large=tuple(name for name, each in found.items() if each is None),
        rows=rows,
        width=width,
        is_smallest=programs.is_smallest(),
        model_flops=model_flops(run.model, rows, width) // chips,
        flops=microbatch_flops(programs) // chips,
        parameters=programs.parameters(),
        trained_parameters=programs.trained_parameters(),
        versions={} if interpreter is None else compiler.versions(interpreter),
    )


def _choose_remat(
    candidates: Sequence[Programs],
    held: dict[str, int],
    limit: int,
    compile_one: Callable[[Programs, str], Compiled | None] | None,
) -> tuple[Programs, dict[str, int], dict[str, Compiled | None]]:
    """Return the first candidate that fits, or the last, with its memory and its programs as `compile_one` makes them.

    Without `compile_one`, memory is estimated and there are no programs.
    """
    found: dict[str, Compiled | None] = {}
    for programs in candidates:
        estimated = {"update": estimate_update(programs)}
        is_last = programs is candidates[-1]
        if not is_last and peak(held | estimated) > limit * (1.0 if compile_one is None else MARGIN):
            continue
        if compile_one is None:
            break
        gradient, beyond = compile_one(programs, "gradient"), fused_update(programs).uncompiled
        found["gradient"] = gradient
        if gradient is not None and peak(held | {"update": gradient.temporaries + beyond}) <= limit:
            break
    if compile_one is not None and found["gradient"] is not None:
        found |= {name: compile_one(programs, name) for name in ("step", "prefill", "decode")}
    memory = held | estimated | {"sampling temporaries": estimate_sampling(programs)}
    for purpose, names in COMPILED.items():
        compiled = [each for name in names if (each := found.get(name)) is not None]
        if len(compiled) == len(names):
            memory[purpose] = max(each.temporaries for each in compiled) + (beyond if purpose == "update" else 0)
    return programs, memory, found


def _compile(
    interpreter: Path, target: Target, show: Callable[[str], object], programs: Programs, name: str
) -> Compiled | None:
    """Compile a program; return None if the compiler found no memory for it."""
    policy = f", remat {programs.run.remat}" if name == "gradient" else ""
    show(f"compiling {name} for {target.name}{policy}")
    try:
        return compiler.compile_program(interpreter, programs.run, target, name)
    except CompilerError as error:
        if error.is_out_of_memory:
            return None
        raise CheckFailed(str(error)) from error


def fused_update(programs: Programs) -> UpdateBytes:
    """Return the estimated temporaries of an update whose attention is that of a fused kernel."""
    run, (rows, width) = programs.run, programs.rows_and_width()
    loss = run.adapter.loss
    return update_bytes(
        run.model,
        rows=rows,
        tokens=width,
        remat=run.remat,
        platform=programs.device.platform,
        sharding=programs.sharding,
        lora=run.lora,
        compute_dtype=programs.compute_dtype,
        param_dtype=programs.dtype,
        kernel=programs.kernel().kernel,
        is_packed=programs.is_packed(),
        is_scored_alone=not loss.entropy_coef and (loss.distillation is None or loss.distillation.is_sampled),
    )


def estimate_update(programs: Programs) -> int:
    """Return the estimated bytes of temporaries of an update."""
    run, (rows, width), fused = programs.run, programs.rows_and_width(), fused_update(programs)
    if programs.kernel().kernel != "xla":
        return fused.peak
    scores = min(rows * width**2 * run.model.num_heads // programs.sharding.devices, MOST_SCORES)
    return fused.peak + 3 * 4 * scores  # with their weights and their gradient, in float32


def microbatch_flops(programs: Programs) -> int:
    """Return the operations of the gradient of the largest microbatch, over the whole mesh."""
    run, (rows, width), distillation = programs.run, programs.rows_and_width(), programs.run.adapter.loss.distillation
    flops = gradient_flops(
        *(run.model, rows, width, run.remat),
        lora=run.lora,
        is_fused=fused_update(programs).is_fused,
        platform=programs.device.platform,
    )
    if run.teacher is None or distillation is None or distillation.is_sampled or distillation.templates:
        return flops  # a teacher of sampled tokens, or with rows of its own, computes before the gradient
    return flops + model_flops(run.teacher.model, rows, width) // 3


def estimate_sampling(programs: Programs) -> int:
    """Return the estimated bytes of temporaries of the sampler's programs."""
    policy = programs.run.policy
    temporaries = sampling_bytes(
        programs.run.model,
        slots=policy.slots,
        length=policy.max_context_tokens,
        platform=programs.device.platform,
        sharding=programs.sharding,
        compute_dtype=programs.compute_dtype,
    )
    return max(temporaries.values())


def memory_limit(target: Target) -> int:
    """Return the bytes of one chip for programs and arrays.

    Raises:
        ValueError: the environment variable for it is no number from 0 to 1.
    """
    if target.chip.platform != "gpu":
        return target.chip.memory_bytes
    given = next((os.environ[name] for name in GPU_FRACTIONS if name in os.environ), "0.75")
    try:
        fraction = float(given)
    except ValueError:
        fraction = -1.0
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"{' or '.join(GPU_FRACTIONS)} is {given!r}; wanted a number above 0 and up to 1")
    return int(target.chip.memory_bytes * fraction)


def run(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Show the plan that the command line asks for, and return the exit code."""

    async def main() -> None:
        config = load_config(parsed.config_file, parsed.override)
        plan(config, parsed.target, parsed.compiler, Console().message)

    return run_main(main, title="plan")


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
        raise ConfigError(str(error)) from error
    run = planned_run(config)
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
    try:
        made = make_plan(run, target, interpreter, show)
    except CheckFailed as error:
        if target.hosts == 1:
            raise
        show(f"the compiler fails for so many chips, and figures are estimated: {one_line(error)}")
        made = make_plan(run, target, None, show)
    for line in lines(made, run):
        show(line)
    if not made.fits:
        raise CheckFailed(f"does not fit: {'; '.join(advice(made, run))}")


def lines(made: Plan, run: PlannedRun) -> Iterator[str]:
    """Yield the text of a plan."""
    chip, is_estimated = made.target.chip, not made.versions
    mark = "estimated" if is_estimated else "compiled with " + ", ".join(f"{k} {v}" for k, v in made.versions.items())
    axes = ", ".join(f"{name} {size}" for name, size in made.mesh.items())
    chips = math.prod(made.mesh.values())
    yield f"{'target':<12} {made.target.name}: {made.target.chips} x {chip.name}; mesh {axes} ({mark})"
    if chips < made.target.chips:
        yield f"{'':<12} llms.{run.adapter.llm}.mesh uses {chips} of the {made.target.chips} chips"
    if made.target.hosts > 1:
        yield f"{'':<12} {made.target.hosts} hosts, with a process on each"
    dtype, compute_dtype = resolve_dtypes(run.policy, chip.platform)
    yield (
        f"{'model':<12} {made.parameters / 1e6:,.1f} M parameters in {dtype}, {made.trained_parameters / 1e6:,.1f} M "
        f"trained; products in {compute_dtype or dtype}"
    )
    if made.kernel.kernel == "xla":
        yield f"{'attention':<12} reference implementation: {made.kernel.reason}"
    else:
        yield f"{'attention':<12} {made.kernel.kernel} kernel"
    yield f"{'remat':<12} {made.remat}" + (" (auto)" if run.policy.remat == "auto" else "")
    yield f"{'microbatch':<12} {made.rows} rows of {made.width:,} tokens, on {chips} chip{'s' * (chips > 1)}"
    for purpose, size in ((purpose, size) for purpose, size in made.memory.items() if size):
        is_guess = any(name not in made.programs for name in COMPILED.get(purpose, ()))
        yield f"{'memory':<12} {size / GIB:8.3f} GiB  {purpose}{' (estimated)' if is_guess else ''}"
    for phase, sizes in phases(made.memory).items():
        used, has = sum(sizes.values()) / GIB, made.limit / GIB
        yield f"{'memory':<12} {used:8.3f} GiB  in all in the {phase}, {used / has:.0%} of {has:.2f}"
    for name, size in made.disk.items():
        yield f"{'disk':<12} {size / GIB:8.3f} GiB  {name}"
    for name in made.too_large:
        yield f"{name:<12} the compiler found too little memory for it"
    for name, program in made.programs.items():
        yield (
            f"{name:<12} arguments {program.arguments / GIB:.3f} GiB, temporaries {program.temporaries / GIB:.3f}, "
            f"compiled in {program.seconds:.0f} s"
        )
    if made.programs:
        yield f"{'':<12} python benchmarks/compiled_run.py says what they move, call and send"
    yield from _least_times(made, run)
    if made.fits:
        yield f"fits: {peak(made.memory) / made.limit:.0%} of {made.limit / GIB:.2f} GiB of a chip, at the peak"


def _least_times(made: Plan, run: PlannedRun) -> Iterator[str]:
    """Yield work and messages of a microbatch and of a sampled token, and what they take at least, by arithmetic."""
    chip, sent = made.target.chip, _messages(made, run)
    for each in sent:
        when = "update" if each.is_per_update else "microbatch"
        place = f"{each.axis}{' between hosts' if each.crosses_hosts else ''}"
        yield (
            f"{'messages':<12} {each.size / 1e6:,.1f} MB a chip for each {when} along {place}: {each.what}, at least "
            f"{each.least_seconds(chip) * 1e3:,.1f} ms (estimated)"
        )
    links = sum(each.least_seconds(chip) for each in sent if not each.is_per_update)
    seconds = {"arithmetic": made.flops / chip.flops_per_second} | ({"links": links} if links else {})
    times = " and ".join(f"{value * 1e3:,.1f} ms of {resource}" for resource, value in seconds.items())
    mfu = made.model_flops / max(seconds.values()) / chip.flops_per_second
    most = f"; at most {mfu:.0%} MFU" if run.lora is None else ""  # which counts more than a frozen weight needs
    yield (
        f"{'microbatch':<12} {made.flops:.3e} flops a chip, {made.flops / made.model_flops:.2f} times the model's; at "
        f"least {times}{most}"
    )
    dtype, compute_dtype = resolve_dtypes(run.policy, chip.platform)
    itemsize = jnp.dtype(compute_dtype or dtype).itemsize
    is_narrow = run.policy.sampling_dtype is not None or dtype == "int8"
    asked = _asked_experts(run.model, run.policy.slots, made.mesh.get("expert", 1))
    kinds = {"in_eight_bits": is_narrow, "narrow_head": run.policy.quantize_head}
    size = decode_bytes(asked, 1, 0, itemsize, **kinds) // made.mesh["tensor"]
    empty, full = (moved / chip.bytes_per_second * 1e3 for moved in (size, size + made.memory["sampling"]))
    yield (
        f"{'sampling':<12} at least {empty:,.1f} ms for a token of each of {run.policy.slots} requests, by memory; "
        f"{full:,.1f} where every page is read"
    )


def _messages(made: Plan, run: PlannedRun) -> list[Message]:
    """Return what a chip receives of others, by the sharding rules."""
    dtype, compute_dtype = resolve_dtypes(run.policy, made.target.chip.platform)
    shapes = parameter_shapes(run.model, run.lora)
    return messages(
        run.model,
        made.mesh,
        parameters=made.parameters,
        trained=made.trained_parameters,
        of_experts=(_expert_parameters(shapes), _expert_parameters(shapes.get(ADAPTER, shapes))),
        tokens=made.rows * made.width * made.mesh["tensor"] // math.prod(made.mesh.values()),
        compute_bytes=jnp.dtype(compute_dtype or dtype).itemsize,
        chips_per_host=made.target.chips // made.target.hosts,
    )


def _expert_parameters(shapes: Any) -> int:
    """Return the number of parameters that belong to one expert of a mixture."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return sum(leaf.size for path, leaf in leaves if any(str(key) == "['experts']" for key in path))


def _asked_experts(model: DecoderConfig, requests: int, shards: int) -> DecoderConfig:
    """Return the model with as many experts for a token as requests ask for on a chip, if they choose evenly."""
    if not model.num_experts:
        return model
    share = 1 - (1 - model.num_experts_per_tok / model.num_experts) ** requests
    return replace(model, num_experts_per_tok=max(1, round(share * model.num_experts / shards)))


def advice(made: Plan, run: PlannedRun) -> list[str]:
    """Return the changes that make the largest phase smaller, those that cost least first, with the worth of each."""
    llm, policy = f"llms.{run.adapter.llm}", run.policy
    totals = {phase: sum(sizes.values()) for phase, sizes in phases(made.memory).items()}
    worst = max(totals, key=lambda phase: totals[phase])
    over, is_update = (peak(made.memory) - made.limit) / GIB, worst == "update"
    found = [f"{over:.2f} GiB are missing in the {worst}; the changes that cost least come first"]
    if over <= 0:
        found = [f"the compiler found too little memory for {', '.join(made.too_large)}"]
    if made.target.chip.platform == "gpu" and made.limit < int(0.95 * made.target.chip.memory_bytes):
        found.append(f"set the environment variable {GPU_FRACTIONS[0]}=0.95, which gives jax nearly the whole GPU")
    if is_update and not made.is_smallest:
        worth, tokens = made.memory["update"] / 2 / GIB, made.rows * made.width // 2
        found.append(f"lower trainer_adapters.<name>.microbatch_tokens to {tokens}, worth up to {worth:.2f} GiB")
    if is_update and made.remat != "least":
        found.append(f"set {llm}.remat to least, which costs up to a third of an update's time")
    if made.memory["sampling"] > 0.1 * made.limit or not is_update:
        worth = made.memory["sampling"] / 2 / GIB
        now = policy.cache_tokens or policy.slots * policy.max_context_tokens
        found.append(f"halve {llm}.cache_tokens (now {now}), worth {worth:.2f} GiB; more requests then wait for pages")
    if made.is_smallest or not is_update:
        found.append(f"lower {llm}.max_context_tokens (now {policy.max_context_tokens})")
    if not is_update and made.mesh["fsdp"] > 1:
        axis, size = ("expert" if run.model.num_experts else "tensor"), made.memory["sampling weights"]
        found.append(
            f"double {llm}.mesh.{axis}, worth up to {size / 2 / GIB:.2f} GiB of weights that fsdp does not divide"
        )
    if made.target.chips > math.prod(made.mesh.values()) // made.mesh["data"]:
        found.append(f"divide the parameters over more chips ({llm}.mesh.fsdp, now {made.mesh['fsdp']})")
    if policy.lora is None:
        dtype, _ = resolve_dtypes(policy, made.target.chip.platform)
        worth = (made.memory["parameters"] + made.memory["optimizer"]) / 2 / GIB
        if dtype == "float32":
            found.append(f"set {llm}.dtype to bfloat16, worth about {worth:.2f} GiB, which rounds small updates away")
        worth = (made.memory["optimizer"] + (made.memory["gradients"] if is_update else 0)) / GIB
        found.append(f"train adapters ({llm}.lora), worth about {worth:.2f} GiB")
    return [*found, "take more or larger chips"]
