"""Optimised HLO as text, read into computations, instructions and array types.

`parse` takes the form in which XLA prints a compiled module for CPUs, GPUs and TPUs: names with `%` and without,
operands with types and without, layouts with tiles and memory spaces, instructions over several lines, tables of source
locations before the first computation. A line of another form is an error.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import zip_longest
from typing import NamedTuple, TypeAlias


class Array(NamedTuple):
    """An array's type: `bf16[8,128]{1,0:T(8,128)(2,1)S(1)}` has layout (1, 0), tiles `(8,128)(2,1)` and space 1."""

    dtype: str
    shape: tuple[int, ...]
    layout: tuple[int, ...] = ()  # dimensions, first the one whose elements lie side by side
    tiles: str = ""
    space: int = 0  # 0 is device memory; on a TPU 1 is vector memory, inside the chip

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def bytes(self) -> int:
        """Bytes in memory, in which the most minor dimensions are padded to multiples of the first tile.

        >>> Array("bf16", (3, 100)).bytes, Array("bf16", (3, 100), (1, 0), "(8,128)(2,1)").bytes
        (600, 2048)
        """
        sizes, tile = [self.shape[i] for i in self.layout] or self.shape[::-1], numbers(self.tiles.partition(")")[0])
        padded = (-(-n // t) * t for n, t in zip_longest(sizes, reversed(tile), fillvalue=1))
        return (math.prod(padded) * bits(self.dtype) + 7) // 8

    @property
    def device_bytes(self) -> int:
        """Bytes in device memory: 0 elsewhere. Space 1 of a GPU, where no layout has tiles, is device memory."""
        return self.bytes if self.space == 0 or (self.space == 1 and not self.tiles) else 0


Type: TypeAlias = Mapping[tuple[int, ...], Array]
"""The arrays of a type, in order, by their index: `(1, 0)` is the first element of the tuple that is the second one."""

FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier",
    "domain", "partition-id", "replica-id",
)  # fmt: skip
"""Opcodes that move and compute nothing when the program runs."""

BOOKKEEPING = (
    "ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked", "Sharding",
    "AsyncCollectiveStart", "AsyncCollectiveDone",
)  # fmt: skip
"""Targets of custom calls that name a buffer or promise something, and compute nothing."""

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip

VIEWS = ("bitcast", "reshape")
"""Opcodes that, inside a fusion, give another shape to the same elements."""


@dataclass(eq=False)
class Instruction:
    """A line `name = type opcode(inside), attributes`; operands and users are instructions of the same computation."""

    name: str
    opcode: str
    type: Type
    operands: tuple["Instruction", ...]
    inside: str  # of a constant its value, of a parameter its number
    attributes: str
    at: "Computation"
    users: list[tuple["Instruction", int]] = field(default_factory=list)  # each with the place among its operands

    @property
    def work(self) -> str:
        """Opcode, of `copy-start` and its like that of the work it starts."""
        return self.opcode if self.opcode == "async-start" else self.opcode.removesuffix("-start")

    @property
    def results(self) -> tuple[Array, ...]:
        """Arrays that the work gives; the type of most that start work has operands and a context beside them."""
        if self.opcode == self.work or () in self.type or self.opcode == "all-reduce-start":
            return tuple(self.type.values())
        place = 0 if self.opcode == "copy-start" else 1
        return tuple(array for index, array in self.type.items() if index[0] == place)

    @property
    def is_repeated(self) -> bool:
        """True if another fusion starts this collective: on TPUs all that compute meanwhile name it again."""
        is_start = any(user.target == "AsyncCollectiveStart" for user, _ in self.users)
        return self.work in COLLECTIVES and "chain_id=" in self.attributes and not is_start

    @property
    def operand_arrays(self) -> tuple[Array, ...]:
        """Arrays of all operands."""
        return tuple(array for operand in self.operands for array in operand.type.values())

    @property
    def does_something(self) -> bool:
        """True if the instruction computes or moves data; asynchronous work counts where it starts."""
        is_named = self.opcode in FREE or self.target in BOOKKEEPING
        return not is_named and not self.opcode.endswith(("-done", "-update"))

    @property
    def target(self) -> str:
        """Target of a custom call, "" for others."""
        return self.find(r'custom_call_target="([^"]*)"')

    @property
    def op_name(self) -> str:
        """Path of jax's operation and the scopes around it, "" where the compiler gives none."""
        return self.find(r'op_name="((?:[^"\\]|\\.)*)"')

    @property
    def place(self) -> int:
        """Element that a get-tuple-element takes."""
        return int(self.find(r"\bindex=(\d+)") or 0)

    def called(self, *names: str) -> list["Computation"]:
        """Computations that attributes such as `calls=%f` or `branch_computations={%f, %g}` give."""
        given = [self.find(rf", {name}=(\{{[^}}]*\}}|[\w.%-]+)") for name in names]
        return [self.at.computations[name] for text in given for name in re.findall(r"[\w.-]+", text)]

    def source(self, past: tuple[str, ...] = VIEWS) -> "Instruction":
        """Return the instruction whose value this one has, past views or other opcodes."""
        return self.operands[0].source(past) if self.opcode in past else self

    def find(self, pattern: str, *, is_needed: bool = False) -> str:
        """Return the group of a pattern in the attributes; "", or with `is_needed` a `ValueError`, if it is absent."""
        found = re.search(pattern, self.attributes)
        if found is None and is_needed:
            raise ValueError(f"no {pattern} in {self.name} = {self.opcode}{self.attributes[:300]}")
        return found[1] if found else ""


@dataclass(eq=False)
class Computation:
    """Instructions by name, in the order in which they run.

    Attributes:
        header: first line of the module.
        computations: all computations of the module by name.
        instructions: the instructions.
        loop: the loop whose condition or body this is.
        root: the instruction whose results are those of the computation.
    """

    header: str
    computations: dict[str, "Computation"]
    instructions: dict[str, Instruction] = field(default_factory=dict)
    loop: Instruction | None = None
    root: Instruction = field(init=False)

    @cached_property
    def parameters(self) -> list[Instruction]:
        """Parameters, by their numbers."""
        found = [each for each in self.instructions.values() if each.opcode == "parameter"]
        return sorted(found, key=lambda parameter: int(parameter.inside))


STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
OPCODE = re.compile(r" ([a-z][\w-]*)\(")
LOCATIONS = re.compile(r"\s*$|\d+ |(?:FileNames|FunctionNames|FileLocations|StackFrames)$")
TILES, SPACE = r"[^{}]*?T((?:\([^()]*\))+)", r"[^{}]*?S\((\d+)\)"
ARRAY = re.compile(rf"(\w+)\[([\d,<=]*)\](?:\{{([\d,]*)(?::(?:{TILES})?(?:{SPACE})?[^{{}}]*)?\}})?")


def parse(text: str) -> Computation:
    """Return the entry computation of the module that a text describes.

    Raises:
        ValueError: a line or a type is not HLO as known here, which the message quotes, or there is no entry.
    """
    header, computations, entry, open_one = "", dict[str, Computation](), None, None
    lines = iter(re.sub(r"/\*index=\d+\*/", "", text).splitlines())
    for line in lines:
        if line.startswith("}"):
            open_one = None
        elif open_one is not None and line.strip():
            _add_instruction(open_one, _whole(line, lines))
        elif line.startswith("HloModule"):
            header = line
        elif found := COMPUTATION.match(line):
            open_one = computations[found[2]] = Computation(header, computations)
            entry = open_one if found[1] else entry
        elif not LOCATIONS.match(line):
            raise ValueError(f"no line of HLO: {line[:300]!r}")
    if entry is None or open_one is not None:
        raise ValueError(f"no whole ENTRY computation in a text that begins with {text[:100]!r}")
    for computation in computations.values():
        for instruction in computation.instructions.values():
            for inner in instruction.called("condition", "body") if instruction.opcode == "while" else ():
                inner.loop = instruction
    return entry


def _whole(line: str, lines: Iterator[str]) -> str:
    """Return an instruction with the lines that continue it: attributes in braces may hold line breaks."""
    bare = STRING.sub("", line)
    while bare.count("{") > bare.count("}") and (more := next(lines, "")):
        line, bare = line + more, bare + STRING.sub("", more)
    return line


def _add_instruction(at: Computation, line: str) -> None:
    """Add the instruction of a line to a computation, after its operands, as they are in the text."""
    try:
        head = INSTRUCTION.match(line)
        start = head.end() if head else 0
        opcode = OPCODE.search(line, closing(line, start) if line.startswith("(", start) else start)
        if head is None or opcode is None:
            raise ValueError("this is no instruction of HLO")
        of_type = _type(line[start : opcode.start()])
        end = closing(line, opcode.end() - 1)
    except ValueError as error:
        raise ValueError(f"{error}: {line[:300]!r}") from None
    inside = line[opcode.end() : end - 1].strip()
    names: list[str] = []
    if opcode[1] not in ("constant", "parameter"):
        bare = re.sub(r"\[[^\]]*\]|\{[^}]*\}", "", inside)  # without shapes and layouts
        names = re.findall(r"%([\w.-]+)" if "%" in bare else r"([\w.-]+)(?:,|$)", bare)
    operands = tuple(at.instructions[name] for name in names)
    added = at.instructions[head[2]] = Instruction(head[2], opcode[1], of_type, operands, inside, line[end:], at)
    for place, operand in enumerate(operands):
        operand.users.append((added, place))
    if head[1]:
        at.root = added


def closing(text: str, start: int) -> int:
    """Return the place after the bracket that closes the parenthesis or brace at `start`."""
    depth = 0
    for found in re.compile(r"[()]" if text[start] == "(" else r"[{}]").finditer(text, start):
        depth += 1 if found[0] in "({" else -1
        if depth == 0:
            return found.end()
    raise ValueError("brackets are not closed")


@cache
def _type(text: str) -> Type:
    index, arrays = list[int](), dict[tuple[int, ...], Array]()
    if re.sub(rf"{ARRAY.pattern}|[(), ]", "", text):
        raise ValueError(f"{text[:100]!r} is no type of HLO")
    for found in re.finditer(rf"[(),]|{ARRAY.pattern}", text):
        if found[0] == "(":
            index.append(0)
        elif found[0] == ")":
            index.pop()
        elif found[0] == ",":
            index[-1] += 1
        else:
            dtype, shape, layout, tiles, space = found.groups("")
            bits(dtype)
            arrays[tuple(index)] = Array(dtype, numbers(shape), numbers(layout), tiles, int(space or 0))
    return arrays


OTHER_BITS = {"token": 0, "opaque": 0, "pred": 8}


@cache
def bits(dtype: str) -> int:
    """Return the bits of an element; 4-bit types are packed, a `pred` takes a byte.

    >>> bits("bf16"), bits("f8e4m3fn"), bits("s4"), bits("pred")
    (16, 8, 4, 8)
    """
    if dtype in OTHER_BITS:
        return OTHER_BITS[dtype]
    found = re.fullmatch(r"(?:[suc]|b?f)(\d+)(?:e\d+m\d+\w*)?", dtype)
    if found is None:
        raise ValueError(f"{dtype!r} is no dtype of HLO")
    return int(found[1])


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a text such as `1,0`."""
    return tuple(int(number) for number in re.findall(r"\d+", text))


def braced(text: str, name: str) -> str:
    """Return `{...}` of an attribute `name={...}`, with the braces inside it; "" where there is none."""
    found = re.search(rf"\b{name}=(?=\{{)", text)
    return text[found.end() : closing(text, found.end())] if found else ""
