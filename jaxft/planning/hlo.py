"""Work, memory traffic and communication of a compiled program, read from its optimised HLO text.

`read(compiled.as_text())` follows the program from its entry as a device would run it: the body of a loop counts as
often as the loop turns, of a conditional the most expensive branch counts. XLA's own `cost_analysis()` counts the body
of a loop once on TPUs and says nothing on GPUs. The text is all that is needed: no jax, no device.

Counted are:
    flops: products of matrices, a multiplication and an addition being two: `dot`, `convolution` (which the compiler
        for TPUs makes of a dot; window positions on padding or between dilated elements cost nothing), calls of cuBLAS
        and oneDNN, wherever they stand, also in fusions. Elementwise work, reductions and the insides of kernels
        (cuDNN, Pallas) are not counted; `kernels` lists the latter.
    bytes: device memory read and written, by the rules of `hlo_memory`. A kernel counts as if it read all that it is
        given, which one that follows a table of pages does not. No cache is modelled: an operand of two instructions
        is read twice.
    far_bytes: the same, less arrays that fit the cache of a GPU between the instruction that writes them and the one
        that reads them. Each such array is small by itself; that all of them fit together is not checked.

Sizes of arrays are those in memory, with the padding of tiled layouts. A loop turns as often as the compiler noted
(`known_trip_count`) or as follows from a counter that starts, ends and steps by constants; any other loop is in
`unknown_loops` and counts once. All figures are of one device.
"""

import math
import re
from collections import Counter
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from jaxft.planning.hlo_memory import Value, near_values, read_bytes, rearranged, values, written
from jaxft.planning.hlo_text import (
    COLLECTIVES,
    VIEWS,
    Array,
    Computation,
    Instruction,
    Module,
    braced,
    leaves,
    numbers,
    parse,
)

CACHED_BYTES = 16 * 2**20
"""Size of an array that stays in a GPU's cache, of 50 MiB on H100 and H200, until a later instruction reads it."""


class Product(NamedTuple):
    """Products of one signature, such as `f32[8,16]` by `f32[16,4]`: the flops of one, and how many there are."""

    lhs: str
    rhs: str
    result: str
    flops: int
    times: int


class Kernel(NamedTuple):
    """A custom call that is no product: `target` says whose (`tpu_custom_call`), `name` which kernel."""

    target: str
    name: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    times: int


class Copy(NamedTuple):
    """A copy or transpose that is an instruction of its own; on TPUs also a move between memories."""

    source: Array
    result: Array
    changes_layout: bool
    times: int


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


class Loop(NamedTuple):
    """A loop and how often it turns, after the same of the loops around it; None where this is unknown."""

    name: str
    trips: tuple[int | None, ...]  # (10, 4): four turns in each of ten


class Buffer(NamedTuple):
    """An array that an instruction writes to memory: the result of a fusion, not what stays inside it."""

    array: Array
    opcode: str
    op_name: str  # where jax made it, such as `jit(f)/while/body/dot_general`
    times: int


class Launch(NamedTuple):
    """An instruction that does something: on a GPU a kernel, a copy, or a conditional that waits for its predicate.

    Attributes:
        name: name of the instruction.
        label: name of the kernel, or of the instruction without its number.
        opcode: opcode of the instruction.
        loops: names of the loops around it, the outermost first.
        times: how often it runs in all.
        flops: operations of products of matrices, once.
        bytes, far_bytes: device memory read and written, once; see the top of this file.
        written_bytes: bytes that it writes, once.
        kernel_arrays: bytes, and bytes without cached arrays, of each operand and result of a kernel; else empty.
        rearranged: opcode and result of the copies, concatenations, gathers and transposes that it writes.
    """

    name: str
    label: str
    opcode: str
    loops: tuple[str, ...]
    times: int
    flops: int = 0
    bytes: int = 0
    far_bytes: int = 0
    written_bytes: int = 0
    kernel_arrays: tuple[tuple[int, int], ...] = ()
    rearranged: tuple[tuple[str, Array], ...] = ()


Index: TypeAlias = tuple[int, ...]
"""Place of an array in nested tuples; empty where there is no tuple."""


class Program(NamedTuple):
    """Figures of a compiled program, on one device."""

    launches: tuple[Launch, ...]  # in the order in which they run
    products: tuple[Product, ...]  # most flops first
    kernels: tuple[Kernel, ...]
    loops: tuple[Loop, ...]
    copies: tuple[Copy, ...]  # most bytes first
    collectives: tuple[Collective, ...]  # most bytes first
    buffers: tuple[Buffer, ...]  # largest first
    arguments: tuple[Array, ...]
    aliases: dict[Index, tuple[int, Index]]  # of an output: number of the argument whose memory it takes, index in it
    donors: tuple[tuple[int, Index], ...]  # donated arguments whose memory XLA may use for anything

    @property
    def bytes(self) -> int:
        """Bytes of device memory read and written."""
        return sum(launch.bytes * launch.times for launch in self.launches)

    @property
    def flops(self) -> int:
        """Floating-point operations of all products of matrices."""
        return sum(product.flops * product.times for product in self.products)

    @property
    def unknown_loops(self) -> tuple[str, ...]:
        """Loops that were counted once, as the text does not say how often they turn."""
        return tuple(loop.name for loop in self.loops if loop.trips[-1] is None)


def read(text: str, cached_bytes: int = 0) -> Program:
    """Return the figures of the optimised HLO that `compiled.as_text()` gives.

    Args:
        text: the HLO.
        cached_bytes: size up to which arrays count as cached, for `far_bytes`; 0 for a device without such a cache.

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
    module = parse(text)
    tally = _empty()
    _run(module, module.entry, 1, (), tally, cached_bytes)
    signatures: Counter[Product] = Counter()
    for product in tally.products:
        signatures[product._replace(times=0)] += product.times
    products = [product._replace(times=times) for product, times in signatures.items()]
    index = r"\{([\d, ]*)\}"
    aliases = re.findall(rf"{index}: \((\d+), {index}", braced(module.header, "input_output_alias"))
    donors = re.findall(rf"\((\d+), {index}\)", braced(module.header, "buffer_donor"))
    return Program(
        launches=tuple(tally.launches),
        products=tuple(sorted(products, key=lambda product: -product.flops * product.times)),
        kernels=tuple(tally.kernels),
        loops=tuple(tally.loops),
        copies=tuple(sorted(tally.copies, key=lambda copy: -copy.result.bytes * copy.times)),
        collectives=tuple(sorted(tally.collectives, key=lambda collective: -collective.bytes * collective.times)),
        buffers=tuple(sorted(tally.buffers, key=lambda buffer: -buffer.array.bytes)),
        arguments=tuple(leaf for parameter in module.entry.parameters for leaf in leaves(parameter.type)),
        aliases={numbers(output): (int(number), numbers(at)) for output, number, at in aliases},
        donors=tuple((int(number), numbers(at)) for number, at in donors),
    )


class _Tally(NamedTuple):
    """Lists to which a walk through the program appends what it meets."""

    launches: list[Launch]
    products: list[Product]
    kernels: list[Kernel]
    loops: list[Loop]
    copies: list[Copy]
    collectives: list[Collective]
    buffers: list[Buffer]

    def add(self, other: "_Tally") -> None:
        lists: zip[tuple[Any, Any]] = zip(self, other, strict=True)
        for mine, more in lists:
            mine.extend(more)

    @property
    def cost(self) -> tuple[int, int]:
        flops = sum(product.flops * product.times for product in self.products)
        return flops, sum(launch.bytes * launch.times for launch in self.launches)


def _empty() -> _Tally:
    return _Tally([], [], [], [], [], [], [])


Around: TypeAlias = tuple[tuple[str, int | None], ...]
"""Names of the loops around a computation and how often each turns, the outermost first."""


def _run(module: Module, at: Computation, times: int, around: Around, tally: _Tally, cached_bytes: int) -> None:
    """Count a computation that runs `times` times, inside the loops of `around`."""
    cached = near_values(at, cached_bytes) if cached_bytes else set()
    loops = tuple(name for name, _ in around)
    for instruction in at.instructions.values():
        if instruction.opcode == "while":
            trips = _trips(module, at, instruction)
            turns, inside = 1 if trips is None else trips, (*around, (instruction.name, trips))
            tally.loops.append(Loop(instruction.name, tuple(trips for _, trips in inside)))
            if trips is None:
                tally.launches.append(_control(instruction, loops, times))
            for name, count in (("condition", turns + 1), ("body", turns)):
                # Where the number of turns is known, the condition is no part of a turn.
                where = around if name == "condition" and trips is not None else inside
                (inner,) = instruction.called(name)
                _run(module, module.computations[inner], times * count, where, tally, cached_bytes)
        elif instruction.opcode == "conditional":
            branches: list[_Tally] = []
            for name in instruction.called("branch_computations", "true_computation", "false_computation"):
                branches.append(_empty())
                _run(module, module.computations[name], times, around, branches[-1], cached_bytes)
            tally.launches.append(_control(instruction, loops, times))
            tally.add(max(branches, key=lambda branch: branch.cost))
        elif instruction.work in ("call", "async-start"):
            for name in instruction.called("to_apply", "calls"):
                _run(module, module.computations[name], times, around, tally, cached_bytes)
        elif instruction.does_something:
            _work(module, at, instruction, times, loops, cached, tally)


def _work(
    module: Module,
    at: Computation,
    instruction: Instruction,
    times: int,
    loops: tuple[str, ...],
    cached: set[Value],
    tally: _Tally,
) -> None:
    """Count an instruction that does something itself."""
    results = written(module, at, instruction)
    tally.buffers.extend(Buffer(each.array, instruction.opcode, instruction.op_name, times) for each in results)
    if instruction.opcode == "constant":
        return
    kernels, products = len(tally.kernels), len(tally.products)
    _count(module, at, instruction, times, tally)
    tally.copies.extend(_copies(module, at, instruction, times))
    is_kernel = instruction.opcode == "custom-call" and len(tally.kernels) > kernels
    reads = read_bytes(module, at, instruction)
    is_cached = [cached.issuperset(values(at, operand)) for operand in instruction.operands]
    far = sum(0 if is_known else count for count, is_known in zip(reads, is_cached, strict=True))
    is_near = [*is_cached, *((instruction.name, place) in cached for place in range(len(instruction.results)))]
    arrays = [*at.operand_arrays(instruction), *instruction.results]
    launch = Launch(
        name=instruction.name,
        label=tally.kernels[-1].name if is_kernel else _stem(instruction.name),
        opcode=instruction.opcode,
        loops=loops,
        times=times,
        flops=sum(product.flops for product in tally.products[products:]),
        bytes=sum(reads) + sum(each.bytes for each in results),
        far_bytes=far + sum(each.bytes for each in results if (instruction.name, each.place) not in cached),
        written_bytes=sum(each.bytes for each in results),
        kernel_arrays=tuple(
            (array.device_bytes, 0 if is_known else array.device_bytes)
            for array, is_known in zip(arrays, is_near, strict=True)
        )
        if is_kernel
        else (),
        rearranged=tuple(rearranged(module, at, instruction)),
    )
    tally.launches.append(launch)


def _control(instruction: Instruction, loops: tuple[str, ...], times: int) -> Launch:
    return Launch(instruction.name, instruction.opcode, instruction.opcode, loops, times)


def _stem(name: str) -> str:
    """Return a name without its number.

    >>> _stem("loop_add_fusion.4"), _stem("copy.209.remat2"), _stem("fusion")
    ('loop_add_fusion', 'copy', 'fusion')
    """
    return re.sub(r"(\.(\d+|remat\d*|clone|sunk))+$", "", name)


def _count(
    module: Module, at: Computation, instruction: Instruction, times: int, tally: _Tally, is_fused: bool = False
) -> None:
    """Count products, kernels and collectives: the instruction itself or, of a fusion, those inside."""
    operands, results = at.operand_arrays(instruction), instruction.results
    flops = _flops(instruction, operands)
    if flops is not None:
        tally.products.append(Product(str(operands[0]), str(operands[1]), str(results[0]), flops, times))
    elif instruction.work == "custom-call" and instruction.does_something:
        path = instruction.op_name.removesuffix("/pallas_call").rpartition("/")[2]
        name = re.findall(r"[\w.=-]+", path)[-1:] or [instruction.name]  # `f` of `transpose(jvp(f))`
        tally.kernels.append(Kernel(instruction.target, name[0], operands, results, times))
    elif instruction.work in COLLECTIVES and not at.is_repeated(instruction):
        kind = "reduce-scatter" if is_fused and _is_cut(at, instruction) else instruction.work
        arrays = results if kind == "all-gather" else operands
        tally.collectives.append(Collective(kind, arrays, _group_size(module, instruction), times))
    elif instruction.work == "fusion":
        inner = module.fused(instruction)
        for each in inner.instructions.values():
            _count(module, inner, each, times, tally, is_fused=True)


# How often a loop turns.


def _trips(module: Module, at: Computation, loop: Instruction) -> int | None:
    """Return how often a loop turns; None if neither the compiler nor constants say it."""
    if known := re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', loop.attributes):
        return int(known[1])
    condition, body = (module.computations[loop.called(name)[0]] for name in ("condition", "body"))
    test, initial = condition.root, at.source(loop.operands[0], COPIES)
    if test.opcode != "compare" or "direction=LT" not in test.attributes or initial.opcode != "tuple":
        return None
    counter = condition.source(test.operands[0], COPIES)
    step = body.source(body.root.operands[counter.place], COPIES)
    if counter.opcode != "get-tuple-element" or step.opcode != "add":
        return None
    terms = [body.source(name, COPIES) for name in step.operands]
    steps = [_constant(module, body, term.name) for term in terms if not _is_element(body, term, counter.place)]
    start = _constant(module, at, initial.operands[counter.place])
    end = _constant(module, condition, test.operands[1])
    if start is None or end is None or len(steps) != 1 or not steps[0]:
        return None
    return max(0, -((start - end) // steps[0]))


COPIES = (*VIEWS, "copy", "convert", "copy-start", "copy-done")


def _is_element(body: Computation, instruction: Instruction, place: int) -> bool:
    """Return True if an instruction takes the element at `place` of the tuple that a loop carries."""
    is_taken = instruction.opcode == "get-tuple-element" and instruction.place == place
    return is_taken and instruction.operands == (body.parameters[0].name,)


def _constant(module: Module, at: Computation, name: str) -> int | None:
    """Return the integer that a name always has, also where loops carry it unchanged; None if it may vary."""
    instruction = at.source(name, COPIES)
    if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.inside):
        return int(instruction.inside)
    if instruction.opcode != "get-tuple-element":
        return None
    source, place = at.source(instruction.operands[0], COPIES), instruction.place
    if source.opcode == "tuple":
        return _constant(module, at, source.operands[place])
    if source.opcode == "while":
        outer, loop = at, source
    elif source.opcode == "parameter" and at.name in module.callers:
        outer, loop = module.callers[at.name]
    else:
        return None
    body, initial = module.computations[loop.called("body")[0]], outer.source(loop.operands[0], COPIES)
    is_kept = _is_element(body, body.source(body.root.operands[place], COPIES), place)
    return _constant(module, outer, initial.operands[place]) if is_kept and initial.opcode == "tuple" else None


# Products of matrices.


def _flops(instruction: Instruction, operands: tuple[Array, ...]) -> int | None:
    """Return the operations of one product of matrices; None for anything else."""
    target = instruction.target if instruction.work == "custom-call" else ""
    if instruction.work == "convolution":
        return _convolution_flops(instruction, operands)
    if instruction.work == "dot":
        contracted = instruction.dimensions("lhs_contracting_dims")
        inner = math.prod(operands[0].shape[i] for i in contracted)
    elif target.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
        found = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.attributes)
        if found is None:
            raise ValueError(f"no contracted dimensions in {instruction.name} = {target}{instruction.attributes[:300]}")
        inner = math.prod(operands[0].shape[i] for i in numbers(found[1]))
    elif target == "__onednn$matmul":
        # Operands may be transposed: whatever of the first is no row of the result is contracted.
        inner = math.prod(operands[0].shape) // math.prod(instruction.results[0].shape[:-1])
    else:
        return None
    return 2 * math.prod(instruction.results[0].shape) * inner


def _convolution_flops(instruction: Instruction, operands: tuple[Array, ...]) -> int:
    """Return the operations of a convolution: batch x features x kernel's input features x valid positions."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        raise ValueError(f"no dim_labels in {instruction.name} = convolution{instruction.attributes[:300]}")
    inputs, kernel, outputs = (
        dict(zip(names, array.shape, strict=True))
        for names, array in zip(labels.groups(), (*operands, *instruction.results), strict=True)
    )
    spatial = sorted(label for label in inputs if label.isdigit())
    window = dict(re.findall(r"(\w+)=([\dx_-]+)", braced(instruction.attributes, "window")))

    def setting(name: str, default: int) -> list[int]:
        """Return a number for each spatial dimension; of padding, `2_1x0_0`, the one before the elements."""
        return [int(n.split("_")[0]) for n in window[name].split("x")] if name in window else [default] * len(spatial)

    settings = setting("stride", 1), setting("lhs_dilate", 1), setting("rhs_dilate", 1), setting("pad", 0)
    flops = 2 * outputs["b"] * outputs["f"] * kernel["i"]
    for label, *rest in zip(spatial, *settings, strict=True):
        flops *= _valid_positions(inputs[label], kernel[label], outputs[label], *rest)
    return flops


@cache
def _valid_positions(inputs: int, kernel: int, outputs: int, stride: int, dilation: int, spread: int, pad: int) -> int:
    """Return how many pairs of output and kernel elements meet an element of the input, along one dimension."""
    places = range(0, inputs * dilation, dilation)
    return sum(o * stride + k * spread - pad in places for o in range(outputs) for k in range(kernel))


# Collectives.


def _group_size(module: Module, collective: Instruction) -> int:
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
    return math.prod(map(int, re.findall(r"(?:num_partitions|replica_count)=(\d+)", module.header)))  # all devices


def _is_cut(at: Computation, collective: Instruction) -> bool:
    """Return True if only slices of an all-reduce are used, which on TPUs is the form of a reduce-scatter."""
    users = [user for user, _ in at.users[collective.name]]
    if not isinstance(collective.type, Array):
        users = [user for element in users for user, _ in at.users[element.name]]
    return collective.work == "all-reduce" and bool(users) and all(user.opcode == "dynamic-slice" for user in users)


# Copies.


def _copies(module: Module, at: Computation, instruction: Instruction, times: int) -> list[Copy]:
    """Return the copy that an instruction is, or a fusion that does nothing else."""
    inner, steps = at, [instruction]
    if instruction.work == "fusion":
        inner = module.fused(instruction)
        steps = [step for step in inner.instructions.values() if step.opcode not in ("parameter", *VIEWS)]
    if not steps or any(step.work not in ("copy", "transpose") for step in steps):
        return []
    changes = any(_changes_layout(inner.operand_arrays(step)[0], step) for step in steps)
    return [Copy(at.operand_arrays(instruction)[0], instruction.results[0], changes, times)]


def _changes_layout(source: Array, step: Instruction) -> bool:
    """Return True if elements change their order in memory; a transpose that renames dimensions moves none."""
    result = step.results[0]
    order = step.dimensions("dimensions") or range(len(result.shape))
    return tuple(order[i] for i in result.layout) != source.layout or result.tiles != source.tiles
