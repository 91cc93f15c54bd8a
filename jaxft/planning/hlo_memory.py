"""Device memory that an instruction of optimised HLO reads and writes, and the arrays that it writes in another order.

`jaxft.planning.hlo` says by which rules.
"""

import re
from typing import NamedTuple, TypeAlias

from jaxft.planning.hlo_text import COLLECTIVES, VIEWS, Array, Computation, Instruction, Module, braced, leaves, numbers

SLICES = ("slice", "dynamic-slice", "gather")
IN_PLACE = {"dynamic-update-slice": 1, "scatter": -1}
"""Instructions that write into their first operand, with the place of the operand that has the update."""

LAZY = ("convert", "copy", "transpose")
"""Instructions that a fusion computes for those elements only that it needs."""

REARRANGING = ("copy", "concatenate", "gather", "transpose")
"""Instructions that compute nothing, but write elements in other places."""

REDUCING = ("dot", "convolution", "reduce", "reduce-window", "slice", "dynamic-slice", "custom-call")
"""Instructions whose result says nothing about the place of an operand's elements."""

CONTROL = ("while", "conditional", "call", "async-start")
"""Instructions that run others, each of which reads and writes for itself."""

Value: TypeAlias = tuple[str, int]
"""A result of an instruction: the name and the place among its results."""


class WrittenResult(NamedTuple):
    """A result that an instruction writes, its place among the results, and how many bytes are written."""

    place: int
    array: Array
    bytes: int


def read_bytes(module: Module, at: Computation, instruction: Instruction) -> list[int]:
    """Return the bytes of device memory that an instruction reads of each operand when it runs once."""
    operands = [sum(array.device_bytes for array in leaves(operand.type)) for operand in at.operands(instruction)]
    if instruction.work != "fusion":
        read = [_read_by(instruction, place, whole) for place, whole in enumerate(operands)]
        if instruction.work == "custom-call":  # a kernel may take an array several times, to load several blocks of it
            sources = [at.source(name).name for name in instruction.operands]
            read = [0 if sources[place] in sources[:place] else size for place, size in enumerate(read)]
        return read
    inner, kept = module.fused(instruction), _passed_results(instruction)
    names = [parameter.name for parameter in inner.parameters]
    return [_fused_read(module, inner, name, whole, kept) for name, whole in zip(names, operands, strict=True)]


def written(module: Module, at: Computation, instruction: Instruction) -> list[WrittenResult]:
    """Return the results that an instruction writes; a fusion may pass others on."""
    if instruction.work != "fusion":
        update = _update(at, instruction)
        arrays = enumerate(instruction.results)
        found = [WrittenResult(place, array, min(array.device_bytes, update or array.bytes)) for place, array in arrays]
        if instruction.target.startswith(("__cublas$", "__cudnn$")) and len(found) > 1:
            found[-1] = found[-1]._replace(bytes=0)  # the workspace
        return found
    inner, kept = module.fused(instruction), _passed_results(instruction)
    roots = inner.operands(inner.root) if inner.root.opcode == "tuple" else [inner.root]
    makers = [root for root in roots for _ in leaves(root.type)]  # a reduction may have several results
    found = []
    for place, (maker, array) in enumerate(zip(makers, instruction.results, strict=True)):
        maker, update = inner.source(maker.name), 0
        while more := _update(inner, maker):
            maker, update = inner.source(maker.operands[0]), update + more
        if update and maker.opcode == "parameter":
            found.append(WrittenResult(place, array, min(array.device_bytes, update)))
        elif (() if isinstance(instruction.type, Array) else (place,)) not in kept:
            found.append(WrittenResult(place, array, array.device_bytes))
    return found


def values(at: Computation, name: str) -> list[Value]:
    """Return the results that a name stands for, past tuples, views and the ends of asynchronous work."""
    instruction = at.instructions[name]
    if instruction.opcode == "tuple":
        return [value for operand in instruction.operands for value in values(at, operand)]
    if instruction.opcode in (*VIEWS, "opt-barrier", "add-dependency") or instruction.opcode.endswith("-done"):
        return values(at, instruction.operands[0])
    if instruction.opcode == "get-tuple-element":
        (whole,) = at.operands(instruction)
        if not isinstance(whole.type, Array):
            start = sum(len(leaves(element)) for element in whole.type[: instruction.place])
            return values(at, whole.name)[start : start + len(leaves(instruction.type))]
    return [(name, place) for place in range(len(instruction.results))]


def near_values(at: Computation, most_bytes: int) -> set[Value]:
    """Return the results of at most so many bytes that an instruction of a computation writes and a later one reads."""
    working = [each for each in at.instructions.values() if each.does_something and each.opcode != "constant"]
    read = {value for each in working for operand in each.operands for value in values(at, operand)}
    small = {
        (each.name, place)
        for each in working
        for place, array in enumerate(each.results)
        if array.device_bytes <= most_bytes and each.opcode not in CONTROL
    }
    return read & small


def rearranged(module: Module, at: Computation, instruction: Instruction) -> list[tuple[str, Array]]:
    """Return opcode and result of each copy, concatenation, gather or transpose that an instruction writes to memory.

    A fusion writes what its results are computed from element by element. A transpose inside a product moves nothing,
    nor does a copy between the memories of a TPU change an order.
    """
    if instruction.work != "fusion":
        is_move = instruction.work == "copy" and _is_move(at, instruction)
        if instruction.work not in REARRANGING or is_move:
            return []
        return [(instruction.work, instruction.results[0])]
    inner = module.fused(instruction)
    found, seen, names = [], set(), [inner.root.name]
    while names:
        step = inner.instructions[names.pop()]
        if step.name in seen:
            continue
        seen.add(step.name)
        if step.opcode in REARRANGING or step.opcode == "fusion":
            found += rearranged(module, inner, step)
        elif step.opcode not in REDUCING:
            names.extend(step.operands)
    return found


def _is_move(at: Computation, copy: Instruction) -> bool:
    return at.operand_arrays(copy)[0].space != copy.results[0].space


def _update(at: Computation, instruction: Instruction) -> int:
    """Return the bytes that an instruction writes into its first operand; 0 for one that does not update in place."""
    if instruction.work not in IN_PLACE:
        return 0
    return at.instructions[instruction.operands[IN_PLACE[instruction.work]]].results[0].bytes


def _passed_results(fusion: Instruction) -> set[tuple[int, ...]]:
    """Return the indices of results that are operands, as on TPUs the arrays of a collective still under way."""
    aliases = braced(fusion.attributes, "output_to_operand_aliasing")
    return {numbers(index) for index in re.findall(r"\{([\d, ]*)\}: \(", aliases)}


def _read_by(instruction: Instruction, place: int, whole: int) -> int:
    """Return how many of the `whole` bytes of the operand at a place an instruction reads."""
    if place == 0 and instruction.work in SLICES:
        return min(whole, instruction.results[0].bytes)
    return 0 if place == 0 and instruction.work in IN_PLACE else whole


def _fused_read(module: Module, at: Computation, name: str, whole: int, kept: set[tuple[int, ...]]) -> int:
    """Return how many of the `whole` bytes of a fusion's operand its computation reads."""
    if name == at.root.name:
        return 0 if () in kept else whole
    read = 0
    for user, place in at.users[name]:
        if user.opcode in VIEWS:
            read += _fused_read(module, at, user.name, whole, kept)
        elif user.opcode in LAZY and not user.is_root:
            converted = user.results[0].bytes
            read += _fused_read(module, at, user.name, converted, kept) * whole // max(converted, 1)
        elif user.opcode == "fusion":
            inner = module.fused(user)
            if inner.source(inner.root.name) is inner.parameters[place]:
                read += _fused_read(module, at, user.name, whole, kept)
            else:
                read += _fused_read(module, inner, inner.parameters[place].name, whole, set())
        elif user.opcode == "tuple":
            read += 0 if (place,) in kept else whole
        elif user.does_something and not (user.work in COLLECTIVES and at.is_repeated(user)):
            read += _read_by(user, place, whole)
    return min(read, whole)
