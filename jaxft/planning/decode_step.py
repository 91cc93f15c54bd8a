"""One step of decoding, read from a compiled program: what is launched, moved and copied to sample a token of each row.

A program that decodes is a loop, one turn of which is a step. Attention's kernels follow tables of pages, of which HLO
knows nothing: their bytes beside the pages are counted, apart from all else. Figures are of one device.
"""

from collections import Counter
from typing import Literal, NamedTuple

from jaxft.planning.hlo import Loop, Program


class StepLaunch(NamedTuple):
    """Launches of one turn that have the same label, opcode and sizes; see `Launch`. Attention's are without pages."""

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


def main_loop(program: Program) -> Loop | None:
    """Return the outermost loop with the most operations of products; None if products are in no loop."""
    flops: Counter[Loop] = Counter()
    for launch in program.launches:
        if launch.loops and launch.flops:
            flops[launch.loops[0]] += launch.flops * launch.times
    return max(flops, key=lambda loop: flops[loop], default=None)


def decode_step(program: Program, pool_bytes: int) -> Step | None:
    """Return one turn of the main loop; None if there is none.

    Args:
        program: the program.
        pool_bytes: bytes per device of the keys, or of the values, of one layer; a kernel that takes an array of at
            least half of them is attention's.
    """
    loop = main_loop(program)
    if loop is None:
        return None
    turns: Counter[StepLaunch] = Counter()
    for launch in program.launches:
        if launch.loops[:1] == (loop,):
            accesses = (*launch.reads, *launch.writes) if launch.opcode == "custom-call" and launch.kernels else ()
            pages = [each for each in accesses if 0 < pool_bytes <= 2 * each.bytes]
            beside = launch.bytes - sum(each.bytes for each in pages)
            far = launch.far_bytes - sum(each.bytes for each in pages if not each.is_near)
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
        for opcode, array in launch.rearranged:
            if array.bytes >= least_bytes and sum(each.bytes for each in launch.writes) >= least_bytes:
                found.append(LargeCopy(where, launch.label, opcode, str(array), array.bytes))
    return found
