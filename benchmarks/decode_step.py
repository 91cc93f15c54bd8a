"""A step of decoding of a compiled program, and its large copies, read from the optimised HLO; `aot_engine.py` asks.

Attention's kernels follow tables of pages, of which HLO knows nothing: their bytes beside the pages are counted, apart
from all else. Arrays that fit the cache of a GPU between the instruction that writes them and the one that reads them
are near. Each of them is small by itself; that all of them fit together is not checked.
"""

import math
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from hlo import Launch, Loop, Program, read
from hlo_memory import written_bytes
from hlo_text import VIEWS, Array, Computation, Instruction
from jaxft.components.programs import PlannedRun
from jaxft.planning.compiler import Compiled, compile_program
from jaxft.planning.targets import Target

CACHED_BYTES = 16 * 2**20
"""Size of an array that stays in a GPU's cache, of 50 MiB on H100 and H200, until a later instruction reads it."""

COPY_SHARE = 0.01
"""Share of the keys of a layer from which on a copy counts as large."""

REARRANGING = ("copy", "concatenate", "gather", "transpose")
"""Instructions that compute nothing, but write elements in other places."""

REDUCING = ("dot", "convolution", "reduce", "reduce-window", "slice", "dynamic-slice", "custom-call")
"""Instructions whose result says nothing about the place of an operand's elements."""

CONTROL = ("while", "conditional", "call", "async-start")
"""Instructions that run others, each of which reads and writes for itself."""

Value: TypeAlias = tuple[Instruction, int]
"""A result of an instruction: the instruction and the place among its results."""


class StepLaunch(NamedTuple):
    """Launches of one turn that have the same label, opcode and sizes; see `Launch`. Attention's are without pages.

    `far_bytes` leaves out near arrays.
    """

    label: str
    opcode: str
    bytes: int
    far_bytes: int
    is_attention: bool
    times: int


class Step(NamedTuple):
    """One turn of the loop that decodes.

    Attributes:
        trips: how often the loop turns; None where the text does not say it.
        launches: launches of one turn.
    """

    trips: int | None
    launches: list[StepLaunch]

    @property
    def bytes(self) -> int:
        """Bytes of device memory read and written outside of attention's kernels."""
        return sum(each.bytes * each.times for each in self.launches if not each.is_attention)

    @property
    def far_bytes(self) -> int:
        """The same, less arrays that stay in a GPU's cache."""
        return sum(each.far_bytes * each.times for each in self.launches if not each.is_attention)

    @property
    def attention_bytes(self) -> int:
        """Bytes that attention's kernels read and write beside the pages, such as sums of parts of a row."""
        return sum(each.far_bytes * each.times for each in self.launches if each.is_attention)

    @property
    def counts(self) -> dict[str, int]:
        """Number of launches by label."""
        found: Counter[str] = Counter()
        for each in self.launches:
            found[each.label] += each.times
        return dict(found)


class LargeCopy(NamedTuple):
    """A copy, concatenation, gather or transpose of a large array, once a program or, in the loop, once a turn."""

    where: Literal["entry", "loop", "exit"]
    label: str
    opcode: str
    array: str
    bytes: int


class CompiledStep(NamedTuple):
    """A compiled program.

    Attributes:
        compiled: its memory, and the time to compile it.
        program: its launches, as its optimised HLO has them.
        step: one turn of the loop that decodes; None where it was not asked for, or products are in no loop.
        copies: copies of at least `COPY_SHARE` of the keys of a layer; empty where they were not asked for.
    """

    compiled: Compiled
    program: Program
    step: Step | None = None
    copies: tuple[LargeCopy, ...] = ()


def compile_step(interpreter: Path, run: PlannedRun, target: Target, program: str, pool_bytes: int = 0) -> CompiledStep:
    """Compile one program as `compile_program` does.

    Args:
        interpreter: Python with the compilers.
        run: the run, with a checkpoint policy of its own.
        target: the accelerators.
        program: a name of `Programs.by_name` or `Programs.warm_up`.
        pool_bytes: bytes per device of the keys of one layer, for the figures of a step; 0 leaves these out.

    Raises:
        CompilerError: the program needs too much memory, or the compiler failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.hlo"
        compiled, read_program = compile_program(interpreter, run, target, program, file), read(file.read_text())
    if not pool_bytes:
        return CompiledStep(compiled, read_program)
    copies = large_copies(read_program, math.ceil(COPY_SHARE * pool_bytes))
    cached_bytes = CACHED_BYTES if target.chip.platform == "gpu" else 0
    return CompiledStep(compiled, read_program, decode_step(read_program, pool_bytes, cached_bytes), tuple(copies))


def main_loop(program: Program) -> Loop | None:
    """Return the outermost loop with the most operations of products; None if products are in no loop."""
    flops: Counter[Loop] = Counter()
    for launch in program.launches:
        if launch.loops and launch.flops:
            flops[launch.loops[0]] += launch.flops * launch.times
    return max(flops, key=lambda loop: flops[loop], default=None)


def decode_step(program: Program, pool_bytes: int, cached_bytes: int = 0) -> Step | None:
    """Return one turn of the main loop; None if there is none.

    Args:
        program: the program.
        pool_bytes: bytes per device of the keys, or of the values, of one layer; a kernel that takes an array of at
            least half of them is attention's.
        cached_bytes: size up to which arrays are near; 0 for a device without such a cache.
    """
    loop = main_loop(program)
    if loop is None:
        return None
    turns: Counter[StepLaunch] = Counter()
    for launch in program.launches:
        if launch.loops[:1] == (loop,):
            found = accesses(launch, cached_bytes)
            is_kernel = launch.opcode == "custom-call" and bool(launch.kernels)
            pages = [each for each in found if is_kernel and 0 < pool_bytes <= 2 * each.bytes]
            beside = launch.bytes - sum(each.bytes for each in pages)
            far = sum(each.bytes for each in found if each not in pages and not each.is_near)
            kind = StepLaunch(launch.label, launch.opcode, beside, far, bool(pages), 0)
            turns[kind] += launch.times // (loop.trips or 1)
    return Step(loop.trips, [kind._replace(times=times) for kind, times in turns.items()])


def large_copies(program: Program, least_bytes: int) -> list[LargeCopy]:
    """Return the copies, concatenations, gathers and transposes that write arrays of at least so many bytes.

    Updates in place are none, nor are rearrangements inside a fusion of which only a product or a sum is written.
    """
    loop, found, is_past = main_loop(program), [], False
    for launch in program.launches:
        is_inside = loop is not None and launch.loops[:1] == (loop,)
        is_past = is_past or is_inside
        where: Literal["entry", "loop", "exit"] = "loop" if is_inside else "exit" if is_past else "entry"
        for opcode, array in () if launch.instruction is None else rearranged(launch.instruction):
            if array.bytes >= least_bytes and sum(launch.writes) >= least_bytes:
                found.append(LargeCopy(where, launch.label, opcode, str(array), array.bytes))
    return found


class Access(NamedTuple):
    """Bytes of device memory of an operand or a result, and whether the array stays in the cache."""

    bytes: int
    is_near: bool


def accesses(launch: Launch, cached_bytes: int) -> list[Access]:
    """Return what a launch reads and writes."""
    instruction = launch.instruction
    if instruction is None:
        return []
    near = near_values(instruction.at, cached_bytes)
    read = zip(launch.reads, instruction.operands, strict=True)
    places = written_bytes(instruction)
    return [
        *(Access(size, near.issuperset(values(operand)) and cached_bytes > 0) for size, operand in read),
        *(Access(size, (instruction, place) in near) for place, size in places.items()),
    ]


def values(instruction: Instruction) -> list[Value]:
    """Return the results that an instruction stands for, past tuples, views and the ends of asynchronous work."""
    if instruction.opcode == "tuple":
        return [value for operand in instruction.operands for value in values(operand)]
    if instruction.opcode in (*VIEWS, "opt-barrier", "add-dependency") or instruction.opcode.endswith("-done"):
        return values(instruction.operands[0])
    if instruction.opcode == "get-tuple-element":
        (whole,) = instruction.operands
        start = sum(index[0] < instruction.place for index in whole.type)
        return values(whole)[start : start + len(instruction.type)]
    return [(instruction, place) for place in range(len(instruction.results))]


@cache
def near_values(at: Computation, most_bytes: int) -> frozenset[Value]:
    """Return the results of at most so many bytes that an instruction of a computation writes and a later one reads."""
    working = [each for each in at.instructions.values() if each.does_something]
    read = {value for each in working for operand in each.operands for value in values(operand)}
    makers = {each for each in working if each.opcode not in CONTROL}
    return frozenset((each, i) for each, i in read if each in makers and each.results[i].device_bytes <= most_bytes)


def rearranged(instruction: Instruction) -> list[tuple[str, Array]]:
    """Return opcode and result of each copy, concatenation, gather or transpose that an instruction writes to memory.

    A fusion writes what its results are computed from element by element. A transpose inside a product moves nothing,
    nor does a copy between the memories of a TPU change an order.
    """
    if instruction.work != "fusion":
        is_move = instruction.work == "copy" and instruction.operand_arrays[0].space != instruction.results[0].space
        return [(instruction.work, instruction.results[0])] if instruction.work in REARRANGING and not is_move else []
    (inner,), found = instruction.called("calls"), list[tuple[str, Array]]()
    needed = {inner.root}  # to compute the results' elements
    for step in reversed(inner.instructions.values()):
        if step in needed and step.opcode in (*REARRANGING, "fusion"):
            found += rearranged(step)
        elif step in needed and step.opcode not in REDUCING:
            needed.update(step.operands)
    return found
