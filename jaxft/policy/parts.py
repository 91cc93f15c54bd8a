"""Which slots are decoded together: a few long requests apart from the many short ones, a last few without the empty.

A program decodes all slots, or a part of a fixed number of rows; each reads as many blocks of the cache as the longest
of its rows needs. So long rows make only themselves slow. It is for devices on which a row's bits are the same in both
kinds of program, which a `Workspace` tries before it uses any part.
"""

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import jax

PART_ROWS = {"cpu": 8}
"""Rows of a part, by backend; parts are not used on the others."""

FIXED_COST, ROW_COST = 10_000, 400
"""What a step costs, and each row of it, in places of a row's cache that are read meanwhile. Measured on two CPU cores
with models of 2 and 58 million parameters (7,500 and 12,100 places a step, 280 and 500 a row)."""


class Group(NamedTuple):
    """Slots that one program decodes, with so many blocks of the cache; as a part of its own, or among all slots."""

    slots: tuple[int, ...]
    near: int
    is_part: bool


def part_rows(slots: int) -> int | None:
    """Rows of a part where parts can be of use: with two of them or more in the slots.

    >>> part_rows(15) is None
    True
    """
    rows = PART_ROWS.get(jax.default_backend())
    return rows if rows is not None and slots >= 2 * rows else None


def divide(
    near: Mapping[int, int], places: Mapping[int, int], all_rows: int, rows: int | None, allowed: Container[int]
) -> list[Group]:
    """The cheapest way to decode slots that need different numbers of blocks.

    Args:
        near: blocks that each slot needs.
        places: of the cache, in so many blocks.
        all_rows: of the program that decodes all slots.
        rows: of a part; None: no parts.
        allowed: numbers of blocks with which there may be parts.

    >>> places = {2: 128, 5: 1024}
    >>> divide({0: 2, 1: 5}, places, all_rows=64, rows=8, allowed=places)
    [Group(slots=(1, 0), near=5, is_part=True)]
    >>> divide({slot: 5 if slot == 7 else 2 for slot in range(64)}, places, all_rows=64, rows=8, allowed=places)[0]
    Group(slots=(7, 0, 1, 2, 3, 4, 5, 6), near=5, is_part=True)
    """
    longest_first = sorted(near, key=lambda slot: -near[slot])

    def group(start: int, end: int | None, is_part: bool) -> Group:
        return Group(tuple(longest_first[start:end]), near[longest_first[start]], is_part)

    ways: list[list[Group]] = [[group(0, None, is_part=False)]]
    if rows is None:
        return ways[0]
    parts: list[Group] = []
    for start in range(0, len(longest_first), rows):
        parts.append(group(start, start + rows, is_part=True))
        if parts[-1].near not in allowed:
            break
        rest = start + rows
        ways.append([*parts, group(rest, None, is_part=False)] if rest < len(longest_first) else [*parts])

    def cost(groups: Sequence[Group]) -> int:
        each = ((rows if group.is_part else all_rows, places[group.near]) for group in groups)
        return sum(FIXED_COST + count * (ROW_COST + reach) for count, reach in each)

    return min(ways, key=cost)
