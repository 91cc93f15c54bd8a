"""Optimised HLO as text, read into computations, instructions and array types.

`parse` takes the form in which XLA prints a compiled module for CPUs, GPUs and TPUs: names with `%` and without,
operands with types and without, layouts with tiles and memory spaces, instructions over several lines, tables of source
locations before the first computation. A line of another form is an error.
"""

import math
import re
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias


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
        sizes = [self.shape[i] for i in reversed(self.layout)] or list(self.shape)
        if found := re.match(r"\(([\d,]+)\)", self.tiles):
            tile = numbers(found[1])
            sizes = [1] * (len(tile) - len(sizes)) + sizes
            sizes[-len(tile) :] = [-(-n // t) * t for n, t in zip(sizes[-len(tile) :], tile, strict=True)]
        return (math.prod(sizes) * bits(self.dtype) + 7) // 8

    @property
    def device_bytes(self) -> int:
        """Bytes in device memory: 0 elsewhere. Space 1 of a GPU, where no layout has tiles, is device memory."""
        return self.bytes if self.space == 0 or (self.space == 1 and not self.tiles) else 0


Type: TypeAlias = Array | tuple[Any, ...]
"""An array or a tuple of types."""

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


class Instruction(NamedTuple):
    """A line `name = type opcode(inside), attributes`."""

    name: str
    opcode: str
    type: Type
    operands: tuple[str, ...]
    inside: str  # of a constant its value, of a parameter its number
    attributes: str
    is_root: bool

    @property
    def work(self) -> str:
        """Opcode, of `copy-start` and its like that of the work it starts."""
        return self.opcode if self.opcode == "async-start" else self.opcode.removesuffix("-start")

    @property
    def results(self) -> tuple[Array, ...]:
        """Arrays that the work gives; the type of most that start work has operands and a context beside them."""
        if self.opcode == self.work or isinstance(self.type, Array) or self.opcode == "all-reduce-start":
            return leaves(self.type)
        return leaves(self.type[0 if self.opcode == "copy-start" else 1])

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
        """Where jax made it, such as `jit(f)/while/body/dot_general`."""
        return self.find(r'op_name="((?:[^"\\]|\\.)*)"')

    @property
    def place(self) -> int:
        """Element that a get-tuple-element takes."""
        return int(self.find(r"\bindex=(\d+)") or 0)

    def called(self, *names: str) -> list[str]:
        """Names of computations that attributes such as `calls=%f` or `branch_computations={%f, %g}` give."""
        given = [self.find(rf", {name}=(\{{[^}}]*\}}|[\w.%-]+)") for name in names]
        return [name for text in given for name in re.findall(r"[\w.-]+", text)]

    def dimensions(self, name: str) -> tuple[int, ...]:
        """Numbers of an attribute such as `lhs_contracting_dims={1}`."""
        return numbers(self.find(rf", {name}=\{{([\d, ]*)\}}"))

    def find(self, pattern: str, *, is_needed: bool = False) -> str:
        """Return the group of a pattern in the attributes; "", or with `is_needed` a `ValueError`, if it is absent."""
        found = re.search(pattern, self.attributes)
        if found is None and is_needed:
            raise ValueError(f"no {pattern} in {self.name} = {self.opcode}{self.attributes[:300]}")
        return found[1] if found else ""


class Computation:
    """Instructions by name, in the order in which they run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.instructions: dict[str, Instruction] = {}

    @cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    @cached_property
    def parameters(self) -> list[Instruction]:
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda parameter: int(parameter.inside))

    @cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Instructions that use a name, each with the place that it has among their operands."""
        users: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for place, operand in enumerate(instruction.operands):
                users[operand].append((instruction, place))
        return users

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands]

    def operand_arrays(self, instruction: Instruction) -> tuple[Array, ...]:
        return tuple(array for operand in self.operands(instruction) for array in leaves(operand.type))

    def source(self, name: str, past: tuple[str, ...] = VIEWS) -> Instruction:
        """Return the instruction whose value a name has, past views or other opcodes."""
        instruction = self.instructions[name]
        while instruction.opcode in past:
            instruction = self.instructions[instruction.operands[0]]
        return instruction

    def is_repeated(self, collective: Instruction) -> bool:
        """True if another fusion starts this collective: on TPUs all that compute meanwhile name it again."""
        is_start = any(user.target == "AsyncCollectiveStart" for user, _ in self.users[collective.name])
        return "chain_id=" in collective.attributes and not is_start


class Module(NamedTuple):
    """A compiled program; `callers` has, for the condition and the body of a loop, where the loop stands."""

    header: str
    computations: dict[str, Computation]
    entry: Computation
    callers: dict[str, tuple[Computation, Instruction]]

    def fused(self, fusion: Instruction) -> Computation:
        """Return the computation of a fusion."""
        return self.computations[fusion.called("calls")[0]]


STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
OPCODE = re.compile(r" ([a-z][\w-]*)\(")
LOCATIONS = re.compile(r"\s*$|\d+ |(?:FileNames|FunctionNames|FileLocations|StackFrames)$")
ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([\d,]*)(?::([^{}]*))?\})?")


def parse(text: str) -> Module:
    """Return the module that a text describes.

    Raises:
        ValueError: a line or a type is not HLO as known here, which the message quotes, or there is no entry.
    """
    header, computations, entry, open_one = "", dict[str, Computation](), None, None
    lines = iter(re.sub(r"/\*index=\d+\*/", "", text).splitlines())
    for line in lines:
        if line.startswith("}"):
            open_one = None
        elif open_one is not None:
            if line.strip():
                instruction = _instruction(_whole(line, lines))
                open_one.instructions[instruction.name] = instruction
        elif line.startswith("HloModule"):
            header = line
        elif found := COMPUTATION.match(line):
            open_one = computations[found[2]] = Computation(found[2])
            entry = open_one if found[1] else entry
        elif not LOCATIONS.match(line):
            raise ValueError(f"no line of HLO: {line[:300]!r}")
    if entry is None or open_one is not None:
        raise ValueError(f"no whole ENTRY computation in a text that begins with {text[:100]!r}")
    callers = {
        name: (computation, instruction)
        for computation in computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "while"
        for name in instruction.called("condition", "body")
    }
    return Module(header, computations, entry, callers)


def _whole(line: str, lines: Iterator[str]) -> str:
    """Return an instruction with the lines that continue it: attributes in braces may hold line breaks."""
    bare = STRING.sub("", line)
    while bare.count("{") > bare.count("}") and (more := next(lines, "")):
        line, bare = line + more, bare + STRING.sub("", more)
    return line


def _instruction(line: str) -> Instruction:
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
    operands: list[str] = []
    if opcode[1] not in ("constant", "parameter"):
        bare = re.sub(r"\[[^\]]*\]|\{[^}]*\}", "", inside)  # without shapes and layouts
        operands = re.findall(r"%([\w.-]+)" if "%" in bare else r"([\w.-]+)(?:,|$)", bare)
    return Instruction(head[2], opcode[1], of_type, tuple(operands), inside, line[end:], bool(head[1]))


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
    stack: list[list[Type]] = [[]]  # of tuples that are open, the innermost last
    if re.sub(rf"{ARRAY.pattern}|[(), ]", "", text):
        raise ValueError(f"{text[:100]!r} is no type of HLO")
    for found in re.finditer(rf"[()]|{ARRAY.pattern}", text):
        if found[0] == "(":
            stack.append([])
        elif found[0] == ")":
            inner = tuple(stack.pop())
            stack[-1].append(inner)
        else:
            dtype, shape, layout, rest = found.groups("")
            bits(dtype)
            tiles, space = re.search(r"T((?:\([^()]*\))+)", rest), re.search(r"S\((\d+)\)", rest)
            place = int(space[1]) if space else 0
            stack[-1].append(Array(dtype, numbers(shape), numbers(layout), tiles[1] if tiles else "", place))
    return stack[0][0]


def leaves(of_type: Type) -> tuple[Array, ...]:
    """Return the arrays of a type, of tuples in their order."""
    return (of_type,) if isinstance(of_type, Array) else tuple(leaf for inner in of_type for leaf in leaves(inner))


@cache
def bits(dtype: str) -> int:
    """Return the bits of an element; 4-bit types are packed, a `pred` takes a byte.

    >>> bits("bf16"), bits("f8e4m3fn"), bits("s4"), bits("pred")
    (16, 8, 4, 8)
    """
    if dtype in ("token", "opaque"):
        return 0
    if dtype == "pred":
        return 8
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
