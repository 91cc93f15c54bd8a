"""Work, memory traffic and communication of a compiled program, read from its optimised HLO text.

`read(compiled.as_text())` follows the program from its entry as a device would run it: the body of a loop counts as
often as the loop turns, of a conditional the most expensive branch counts. XLA's own `cost_analysis()` counts the body
of a loop once on TPUs and says nothing on GPUs. The text is all that is needed: no jax, no device.

Counted are:
    flops: products of matrices, a multiplication and an addition being two: `dot`, `convolution` (which the compiler
        for TPUs makes of a dot; window positions on padding or between dilated elements cost nothing), calls of cuBLAS
        and oneDNN, wherever they stand, also in fusions. Elementwise work, reductions and the insides of kernels
        (cuDNN, Pallas) are not counted; `kernels` lists the latter.
    bytes: device memory read and written. An instruction reads its operands and writes its results; a fusion is one
        instruction. A slice or gather reads only the size of its result, also inside a fusion and past conversions
        there, and an update in place (`dynamic-update-slice`, `scatter`) writes only the size of the update. A kernel
        reads an array once, however often it is given, and as a whole, also where it follows a table of pages.
        Workspaces of cuBLAS and cuDNN and the memory inside a TPU cost nothing. No cache is modelled: an operand of two
        instructions is read twice.

Sizes of arrays are those in memory, with the padding of tiled layouts. A loop turns as often as the compiler noted
(`known_trip_count`), as follows from a counter that starts, ends and steps by constants, or as a named scope says
(`at_most_19`); any other loop counts once.
All figures are of one device.
"""

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from hlo_memory import read_bytes, written_bytes
from hlo_text import COLLECTIVES, VIEWS, Array, Computation, Instruction, braced, numbers, parse


class Loop(NamedTuple):
    """A loop and how often it turns each time that it is met; None where the text does not say it."""

    name: str
    trips: int | None


class Collective(NamedTuple):
    """A collective with its results, if it is an all-gather, or else its operands."""

    kind: str
    arrays: tuple[Array, ...]
    group_size: int  # devices that exchange with each other; of a collective-permute: pairs
    times: int

    @property
    def bytes(self) -> int:
        """Bytes of the arrays on one device."""
        return sum(array.bytes for array in self.arrays)


class Kernel(NamedTuple):
    """A custom call that is no product: `target` says whose (`tpu_custom_call`), `name` which kernel."""

    target: str
    name: str
    times: int


class Launch(NamedTuple):
    """An instruction that does something: on a GPU a kernel, a copy, or a conditional that waits for its predicate.

    Attributes:
        label: name of the kernel, or of the instruction without its number.
        opcode: opcode of the instruction.
        loops: the loops around it, the outermost first.
        times: how often it runs in all.
        flops: operations of products of matrices, once.
        reads, writes: bytes of device memory of operands and of results, once.
        arrays: the results; of a fusion not what stays inside it.
        kernels, collectives: those that it is, or that a fusion has inside.
        op_name: path of jax's operation, with the scopes around it; of a fusion without one, that of its last step.
        instruction: the instruction; None of a loop or a conditional.
    """

    label: str
    opcode: str
    loops: tuple[Loop, ...]
    times: int
    flops: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    arrays: tuple[Array, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    collectives: tuple[Collective, ...] = ()
    op_name: str = ""
    instruction: Instruction | None = None

    @property
    def bytes(self) -> int:
        """Bytes of device memory read and written, once."""
        return sum((*self.reads, *self.writes))


class Program(NamedTuple):
    """Figures of a compiled program, on one device: what it runs, in order, and the arrays that it is given."""

    launches: tuple[Launch, ...]
    arguments: tuple[Array, ...]

    @property
    def bytes(self) -> int:
        """Bytes of device memory read and written."""
        return sum(launch.bytes * launch.times for launch in self.launches)

    @property
    def flops(self) -> int:
        """Floating-point operations of all products of matrices."""
        return sum(launch.flops * launch.times for launch in self.launches)

    @property
    def kernels(self) -> list[Kernel]:
        """Kernels, in the order in which they run."""
        return [kernel for launch in self.launches for kernel in launch.kernels]

    @property
    def collectives(self) -> list[Collective]:
        """Collectives, in the order in which they run."""
        return [collective for launch in self.launches for collective in launch.collectives]

    @property
    def arrays(self) -> list[Array]:
        """Arrays that are written to memory, the largest first."""
        return sorted((array for launch in self.launches for array in launch.arrays), key=lambda array: -array.bytes)


def read(text: str) -> Program:
    """Return the figures of the optimised HLO that `compiled.as_text()` gives.

    Raises:
        ValueError: a line or a type is not HLO as known here; the message quotes it.

    >>> program = read('''HloModule f
    ... ENTRY main {
    ...   a = f32[8,16]{1,0} parameter(0)
    ...   b = f32[16,4]{1,0} parameter(1)
    ...   ROOT c = f32[8,4]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }''')
    >>> program.flops, program.bytes  # 2 x 8 x 16 x 4; 4 (8 x 16 + 16 x 4 + 8 x 4)
    (1024, 896)
    """
    entry = parse(text)
    arguments = tuple(array for parameter in entry.parameters for array in parameter.type.values())
    return Program(tuple(_launches(entry, 1, ())), arguments)


def _launches(at: Computation, times: int, loops: tuple[Loop, ...]) -> Iterator[Launch]:
    """Yield what a computation that runs `times` times, inside these loops, launches."""
    for instruction in at.instructions.values():
        if instruction.opcode == "while":
            loop = Loop(instruction.name, _trips(instruction))
            is_known, turns = loop.trips is not None, 1 if loop.trips is None else loop.trips
            if not is_known:
                yield Launch("while", "while", loops, times)
            # Where the number of turns is known, the condition is no part of a turn.
            parts = ("condition", turns + 1, loops if is_known else (*loops, loop)), ("body", turns, (*loops, loop))
            for name, count, around in parts:
                yield from _launches(instruction.called(name)[0], times * count, around)
        elif instruction.opcode == "conditional":
            called = instruction.called("branch_computations", "true_computation", "false_computation")
            branches = [Program(tuple(_launches(each, times, loops)), ()) for each in called]
            yield Launch("conditional", "conditional", loops, times)
            yield from max(branches, key=lambda branch: (branch.flops, branch.bytes)).launches
        elif instruction.work in ("call", "async-start"):
            for inner in instruction.called("to_apply", "calls"):
                yield from _launches(inner, times, loops)
        elif instruction.does_something:
            yield _launch(instruction, times, loops)


def _launch(instruction: Instruction, times: int, loops: tuple[Loop, ...]) -> Launch:
    """Return the figures of an instruction that does something itself."""
    flops, kernels, collectives = 0, list[Kernel](), list[Collective]()
    for step in _steps(instruction):
        if (product := _flops(step)) is not None:
            flops += product
        elif step.work == "custom-call" and step.does_something:
            path = step.op_name.removesuffix("/pallas_call").rpartition("/")[2]
            name = re.findall(r"[\w.=-]+", path)[-1:] or [step.name]  # `f` of `transpose(jvp(f))`
            kernels.append(Kernel(step.target, name[0], times))
        elif step.work in COLLECTIVES and not step.is_repeated:
            kind = "reduce-scatter" if step is not instruction and _is_cut(step) else step.work
            arrays = step.results if kind == "all-gather" else step.operand_arrays
            collectives.append(Collective(kind, arrays, _group_size(step), times))
    is_kernel, results = instruction.opcode == "custom-call" and bool(kernels), written_bytes(instruction)
    return Launch(
        # `copy` of `copy.209.remat2`
        label=kernels[-1].name if is_kernel else re.sub(r"(\.(\d+|remat\d*|clone|sunk))+$", "", instruction.name),
        opcode=instruction.opcode,
        loops=loops,
        times=times,
        flops=flops,
        reads=tuple(read_bytes(instruction)),
        writes=tuple(results.values()),
        arrays=tuple(instruction.results[place] for place in results),
        kernels=tuple(kernels),
        collectives=tuple(collectives),
        op_name=next((step.op_name for step in (instruction, *reversed(_steps(instruction))) if step.op_name), ""),
        instruction=instruction,
    )


def _steps(instruction: Instruction) -> list[Instruction]:
    """Return an instruction, or those inside a fusion."""
    if instruction.work != "fusion":
        return [instruction]
    (inner,) = instruction.called("calls")
    return [step for each in inner.instructions.values() for step in _steps(each)]


# How often a loop turns.

COPIES = (*VIEWS, "copy", "convert", "copy-start", "copy-done")


def _trips(loop: Instruction) -> int | None:
    """Return how often a loop turns, at most; None if neither the compiler nor a name nor constants say it."""
    if known := loop.find(r'"known_trip_count":\s*\{"n":\s*"(\d+)"'):
        return int(known)
    if most := loop.find(r'op_name="[^"]*\bat_most_(\d+)\)*/while"'):
        return int(most)
    condition, body = loop.called("condition", "body")
    test, initial = condition.root, loop.operands[0].source(COPIES)
    if test.opcode != "compare" or "direction=LT" not in test.attributes or initial.opcode != "tuple":
        return None
    counter = test.operands[0].source(COPIES)
    step = body.root.operands[counter.place].source(COPIES)
    if counter.opcode != "get-tuple-element" or step.opcode != "add":
        return None
    terms = [operand.source(COPIES) for operand in step.operands]
    steps = [_constant(term) for term in terms if not _is_carried(term, counter.place)]
    start, end = _constant(initial.operands[counter.place]), _constant(test.operands[1])
    if start is None or end is None or len(steps) != 1 or not steps[0]:
        return None
    return max(0, -((start - end) // steps[0]))


def _is_carried(instruction: Instruction, place: int) -> bool:
    """Return True if an instruction of a loop's body takes the element at `place` of the tuple that is carried."""
    is_element = instruction.opcode == "get-tuple-element" and instruction.place == place
    return is_element and instruction.operands == (instruction.at.parameters[0],)


def _constant(instruction: Instruction) -> int | None:
    """Return the integer that a value always is, also where loops carry it unchanged; None if it may vary."""
    instruction = instruction.source(COPIES)
    if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.inside):
        return int(instruction.inside)
    if instruction.opcode != "get-tuple-element":
        return None
    source, place = instruction.operands[0].source(COPIES), instruction.place
    if source.opcode != "tuple":
        loop = source if source.opcode == "while" else source.at.loop if source.opcode == "parameter" else None
        if loop is None or not _is_carried(loop.called("body")[0].root.operands[place].source(COPIES), place):
            return None
        source = loop.operands[0].source(COPIES)
    return _constant(source.operands[place]) if source.opcode == "tuple" else None


# Products of matrices.


def _flops(instruction: Instruction) -> int | None:
    """Return the operations of one product of matrices; None for anything else."""
    target = instruction.target if instruction.work == "custom-call" else ""
    operands = instruction.operand_arrays
    if instruction.work == "convolution":
        return _convolution_flops(instruction)
    if instruction.work == "dot" or target.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
        found = instruction.find(r'lhs_contracting_dim\w+"?[=:]\s*[\[{]([^\]}]*)', is_needed=True)
        inner = math.prod(operands[0].shape[i] for i in numbers(found))
    elif target == "__onednn$matmul":
        # Operands may be transposed: whatever of the first is no row of the result is contracted.
        inner = math.prod(operands[0].shape) // math.prod(instruction.results[0].shape[:-1])
    else:
        return None
    return 2 * math.prod(instruction.results[0].shape) * inner


WINDOW = {"stride": "1", "lhs_dilate": "1", "rhs_dilate": "1", "pad": "0"}
"""Settings of a convolution's window along a dimension, with the values that texts leave out."""


def _convolution_flops(instruction: Instruction) -> int:
    """Return the operations of a convolution: batch x features x kernel's input features x valid positions."""
    labels = re.split("_|->", instruction.find(r"dim_labels=([\w>-]+)", is_needed=True))
    shapes = [array.shape for array in (*instruction.operand_arrays, *instruction.results)]
    inputs, kernel, outputs = (dict(zip(*each, strict=True)) for each in zip(labels, shapes, strict=True))
    window = dict(re.findall(r"(\w+)=([\dx_-]+)", braced(instruction.attributes, "window")))
    flops = 2 * outputs["b"] * outputs["f"] * kernel["i"]
    for place, label in enumerate(sorted(label for label in inputs if label.isdigit())):
        given = [window[name].split("x")[place] if name in window else usual for name, usual in WINDOW.items()]
        settings = (int(each.split("_")[0]) for each in given)  # of padding, `2_1`, the one before the elements
        flops *= _valid_positions(inputs[label], kernel[label], outputs[label], *settings)
    return flops


@cache
def _valid_positions(inputs: int, kernel: int, outputs: int, stride: int, dilation: int, spread: int, pad: int) -> int:
    """Return how many pairs of output and kernel elements meet an element of the input, along one dimension."""
    places = range(0, inputs * dilation, dilation)
    return sum(o * stride + k * spread - pad in places for o in range(outputs) for k in range(kernel))


# Collectives.


def _group_size(collective: Instruction) -> int:
    """Return how many devices exchange; groups read `{{0,1},{2,3}}`, `[2,4]<=[8]` or `mesh['a'=2,'b'=4] {'b'}`."""
    attributes = collective.attributes
    if collective.work == "collective-permute":
        return len(re.findall(r"\{\d+,\d+\}", braced(attributes, "source_target_pairs")))
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(numbers(listed[1]))
    if tiled := re.search(r"replica_groups=\[([\d,]+)\]<=", attributes):
        return numbers(tiled[1])[-1]
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])  # `'a':(2)4` is a part of axis a, of size 4
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if "replica_groups=" in attributes and "replica_groups={}" not in attributes:
        raise ValueError(f"these groups cannot be read: {collective.name} = {collective.opcode}{attributes[:300]}")
    devices = re.findall(r"(?:num_partitions|replica_count)=(\d+)", collective.at.header)
    return math.prod(map(int, devices))  # all of them


def _is_cut(collective: Instruction) -> bool:
    """Return True if only slices of an all-reduce are used, which on TPUs is the form of a reduce-scatter."""
    users = [user for user, _ in collective.users]
    if () not in collective.type:
        users = [user for element in users for user, _ in element.users]
    return collective.work == "all-reduce" and bool(users) and all(user.opcode == "dynamic-slice" for user in users)
