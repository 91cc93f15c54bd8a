"""Questions about tables of facts: `17 sub b k` wants, of table 17, the fact of b minus that of k.

A fact is a digit from 1 to 6. The tables, and so their facts, are not in the questions: an agent has to look them up.
"""

import random
import string
from collections.abc import Callable

NAMES, VALUES = string.ascii_lowercase, range(1, 7)
FACTS_PER_TABLE = 4
TRAINING, HELD_OUT = range(2000), range(2000, 2200)
"""Numbers of the tables in questions for training, and in those for validation."""

OPERATIONS: dict[str, Callable[[int, int], int]] = {"add": lambda a, b: a + b, "max": max, "sub": lambda a, b: a - b}


def table(number: int) -> dict[str, int]:
    """Return the facts of a table, not all of which are equal."""
    draw = random.Random(f"table {number}")
    names, facts = draw.sample(NAMES, FACTS_PER_TABLE), [draw.choice(VALUES) for _ in range(FACTS_PER_TABLE)]
    if len(set(facts)) == 1:
        facts[0] = 7 - facts[0]
    return dict(zip(names, facts, strict=True))


def question(number: int) -> tuple[str, str]:
    """Return the question about a table, and its answer."""
    draw, facts = random.Random(f"question {number}"), table(number)
    operation = draw.choice(list(OPERATIONS))
    # Different facts, so that no lookup of one fact twice gives the right answer to `add` or `sub`.
    pairs = [(a, b) for a in facts for b in facts if facts[a] != facts[b]]
    first, second = draw.choice(pairs)
    return f"{number} {operation} {first} {second}", str(OPERATIONS[operation](facts[first], facts[second]))
