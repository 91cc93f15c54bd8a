"""The task of `compare.py learning`: to count down from a number, as `4` is answered by `3 2 1 0`; for both sides.

Most numbers are small and a few are large, so that right answers have from 2 to 50 tokens, 12 in the mean: lengths
differ as those of models that think aloud do.
"""

import json
import random
from pathlib import Path

MOST, NEW_TOKENS = 30, 88
"""The largest number, and the tokens that an answer may have."""
WARMUP = 10
"""Updates over which the learning rate rises, on both sides."""


def question(draw: random.Random) -> int:
    """A number from 1 to 20: one more with a chance of five in six.

    >>> draw = random.Random(0)
    >>> [question(draw) for _ in range(8)]
    [1, 10, 6, 1, 2, 3, 6, 1]
    """
    number = 1
    while number < MOST and draw.random() < 8 / 9:
        number += 1
    return number


def reward(asked: int, said: str) -> float:
    """The share of the numbers that are right before the first mistake; numbers too many count as wanted.

    >>> reward(3, "2 1 0"), reward(3, "2 1 0 0"), reward(3, "2 0"), reward(3, "1 0")
    (1.0, 0.75, 0.3333333333333333, 0.0)
    """
    wanted, numbers = [str(number) for number in reversed(range(asked))], said.split(" ")
    right = 0
    while right < min(len(wanted), len(numbers)) and wanted[right] == numbers[right]:
        right += 1
    return right / max(len(wanted), len(numbers))


def careless_answer(draw: random.Random, asked: int) -> str:
    """Counts down by one with a chance of a third, and else, more often than not, by two.

    >>> careless_answer(random.Random(0), 9)
    '6 4 2 1 0'
    """
    numbers = [asked]
    while numbers[-1] > 0:
        numbers.append(max(0, numbers[-1] - draw.choices((1, 2, 3), weights=(0.1, 0.5, 0.4))[0]))
    return " ".join(map(str, numbers[1:]))


def write_questions(path: Path, seed: str, count: int) -> None:
    """Write a JSONL file of questions."""
    draw = random.Random(seed)
    path.write_text("".join(json.dumps({"question": str(question(draw))}) + "\n" for _ in range(count)))


def read_questions(path: str) -> list[int]:
    """The numbers of such a file."""
    return [int(json.loads(row)["question"]) for row in Path(path).read_text().splitlines()]
