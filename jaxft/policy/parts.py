"""Which slots are decoded together: a few long requests apart from the many short ones, a last few without the empty.

A program decodes all slots, or a part of a fixed number of rows; each reads as many blocks of the cache as the longest
of its rows needs. So long rows make only themselves slow. It is for devices on which a row's bits are the same in both
kinds of program, which `Workspace.warm_up` tries before any part is used.
"""

from collections.abc import Mapping, Sequence
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


def divide(near: Mapping[int, int], places: Mapping[int, int], all_rows: int, rows: int | None) -> list[Group]:
    """The cheapest way to decode slots that need different numbers of blocks.

    Args:
        near: blocks that each slot needs.
        places: of the cache, in so many blocks.
        all_rows: of the program that decodes all slots.
        rows: of a part; None: no parts.

    >>> places = {2: 128, 5: 1024}
    >>> divide({0: 2, 1: 5}, places, all_rows=64, rows=8)
    [Group(slots=(1, 0), near=5, is_part=True)]
    >>> divide({slot: 5 if slot == 7 else 2 for slot in range(64)}, places, all_rows=64, rows=8)[0]
    Group(slots=(7, 0, 1, 2, 3, 4, 5, 6), near=5, is_part=True)
    """
    longest_first = sorted(near, key=lambda slot: -near[slot])
    ways = [[Group(tuple(longest_first), near[longest_first[0]], is_part=False)]]
    parts: list[Group] = []
    for start in range(0, len(longest_first) if rows is not None else 0, rows or 1):
        rest = tuple(longest_first[start + (rows or 1) :])
        parts.append(Group(tuple(longest_first[start : start + (rows or 1)]), near[longest_first[start]], is_part=True))
        ways.append([*parts, Group(rest, near[rest[0]], is_part=False)] if rest else list(parts))

    def cost(groups: Sequence[Group]) -> int:
        each = (((rows or 0) if group.is_part else all_rows, places[group.near]) for group in groups)
        return sum(FIXED_COST + count * (ROW_COST + reach) for count, reach in each)

    return min(ways, key=cost)
