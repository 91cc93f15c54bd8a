"""Device memory that an instruction of optimised HLO reads and writes.

`hlo.py` says by which rules.
"""

import re

from hlo_text import VIEWS, Instruction, braced, numbers

SLICES = ("slice", "dynamic-slice", "gather")
IN_PLACE = {"dynamic-update-slice": 1, "scatter": -1}
"""Instructions that write into their first operand, with the place of the operand that has the update."""

LAZY = ("convert", "copy", "transpose", "multiply")
"""Instructions that a fusion computes for those elements only that it needs."""


def read_bytes(instruction: Instruction) -> list[int]:
    """Return the bytes of device memory that an instruction reads of each operand when it runs once."""
    operands = [sum(array.device_bytes for array in operand.type.values()) for operand in instruction.operands]
    if instruction.work == "fusion":
        (inner,), passed = instruction.called("calls"), _passed_results(instruction)
        return [_fused_read(each, whole, passed) for each, whole in zip(inner.parameters, operands, strict=True)]
    # A kernel may take an array several times, to load several blocks of it.
    sources = [operand.source() for operand in instruction.operands if instruction.work == "custom-call"]
    again = {place for place, source in enumerate(sources) if source in sources[:place]}
    return [0 if place in again else _read_by(instruction, place, whole) for place, whole in enumerate(operands)]


def written_bytes(instruction: Instruction) -> dict[int, int]:
    """Return the bytes of each result that an instruction writes, by its place; a fusion may pass others on."""
    results = instruction.results
    if instruction.work != "fusion":
        update = _update(instruction)
        found = {place: min(array.device_bytes, update or array.bytes) for place, array in enumerate(results)}
        if instruction.target.startswith(("__cublas$", "__cudnn$")) and len(found) > 1:
            found[len(found) - 1] = 0  # the workspace
        return found
    (inner,), passed = instruction.called("calls"), _passed_results(instruction)
    roots = inner.root.operands if inner.root.opcode == "tuple" else [inner.root]
    makers = [root for root in roots for _ in root.type]  # a reduction may have several results
    found = {}
    for place, (maker, array) in enumerate(zip(makers, results, strict=True)):
        maker, update = maker.source(), 0
        while more := _update(maker):
            maker, update = maker.operands[0].source(), update + more
        if update and maker.opcode == "parameter":
            found[place] = min(array.device_bytes, update)
        elif (() if () in instruction.type else (place,)) not in passed:
            found[place] = array.device_bytes
    return found


def _update(instruction: Instruction) -> int:
    """Return the bytes that an instruction writes into its first operand; 0 for one that does not update in place."""
    if instruction.work not in IN_PLACE:
        return 0
    return instruction.operands[IN_PLACE[instruction.work]].results[0].bytes


def _passed_results(fusion: Instruction) -> set[tuple[int, ...]]:
    """Return the indices of results that are operands, as on TPUs the arrays of a collective still under way."""
    aliases = braced(fusion.attributes, "output_to_operand_aliasing")
    return {numbers(index) for index in re.findall(r"\{([\d, ]*)\}: \(", aliases)}


def _read_by(instruction: Instruction, place: int, whole: int) -> int:
    """Return how many of the `whole` bytes of the operand at a place an instruction reads."""
    if place == 0 and instruction.work in SLICES:
        return min(whole, instruction.results[0].bytes)
    return 0 if place == 0 and instruction.work in IN_PLACE else whole


def _fused_read(given: Instruction, whole: int, passed: set[tuple[int, ...]]) -> int:
    """Return how many of the `whole` bytes of an array its users in a fusion read."""
    if given is given.at.root:
        return 0 if () in passed else whole
    read = 0
    for user, place in given.users:
        inner = user.called("calls")[0] if user.opcode == "fusion" else None
        if user.opcode in VIEWS or (inner is not None and inner.root.source() is inner.parameters[place]):
            read += _fused_read(user, whole, passed)
        elif inner is not None:
            read += _fused_read(inner.parameters[place], whole, set())
        elif user.opcode in LAZY and user is not user.at.root:
            converted = user.results[0].bytes
            read += _fused_read(user, converted, passed) * whole // max(converted, 1)
        elif user.opcode == "tuple":
            read += 0 if (place,) in passed else whole
        elif user.does_something and not user.is_repeated:
            read += _read_by(user, place, whole)
    return min(read, whole)
