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
    """Return the facts of a table."""
    draw = random.Random(f"table {number}")
    return {name: draw.choice(VALUES) for name in draw.sample(NAMES, FACTS_PER_TABLE)}


def question(number: int) -> tuple[str, str]:
    """Return the question about a table, and its answer."""
    draw, facts = random.Random(f"question {number}"), table(number)
    operation = draw.choice(list(OPERATIONS))
    # Different facts, so that no lookup of one fact twice gives the right answer to `add` or `sub`.
    pairs = [(a, b) for a in facts for b in facts if facts[a] != facts[b]]
    first, second = draw.choice(pairs) if pairs else (list(facts)[0], list(facts)[1])
    return f"{number} {operation} {first} {second}", str(OPERATIONS[operation](facts[first], facts[second]))
