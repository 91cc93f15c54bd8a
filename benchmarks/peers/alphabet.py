"""The task of `compare.py learning`: the alphabet backwards from a letter, as `e` is answered by `dcba`.

Capital letters follow the small ones. Most questions are letters near the beginning, and a few are far from it, so that
right answers have from 2 to 52 tokens, 14 in the mean: lengths differ as those of models that think aloud do. Both
sides import this.
"""

import json
import random
import string
from itertools import takewhile
from pathlib import Path

LETTERS, NEW_TOKENS = string.ascii_letters, 56
"""The alphabet, and the tokens that an answer may have."""
WARMUP = 10
"""Updates over which the learning rate rises, on both sides."""


def question(draw: random.Random) -> str:
    """A letter from b on: a later one with a chance of twelve in thirteen.

    >>> draw = random.Random(0)
    >>> "".join(question(draw) for _ in range(8))
    'smughqdj'
    """
    place = 1
    while place < len(LETTERS) - 1 and draw.random() < 12 / 13:
        place += 1
    return LETTERS[place]


def reward(asked: str, said: str) -> float:
    """The share of the letters that are right before the first mistake; letters too many count as wanted.

    >>> reward("d", "cba"), reward("d", "cbaa"), reward("d", "ca"), reward("d", "ba")
    (1.0, 0.75, 0.3333333333333333, 0.0)
    """
    wanted = LETTERS[: LETTERS.index(asked)][::-1]
    right = takewhile(lambda pair: pair[0] == pair[1], zip(wanted, said, strict=False))
    return len(list(right)) / max(len(wanted), len(said))


def careless_answer(draw: random.Random, asked: str) -> str:
    """Goes back by one letter with a chance of a tenth, and else by two or three.

    >>> careless_answer(random.Random(0), "j")
    'gdba'
    """
    places = [LETTERS.index(asked)]
    while places[-1] > 0:
        places.append(max(0, places[-1] - draw.choices((1, 2, 3), weights=(0.1, 0.5, 0.4))[0]))
    return "".join(LETTERS[place] for place in places[1:])


def write_questions(path: Path, seed: str, count: int) -> None:
    """Write a JSONL file of questions."""
    draw = random.Random(seed)
    path.write_text("".join(json.dumps({"question": question(draw)}) + "\n" for _ in range(count)))


def read_questions(path: str) -> list[str]:
    """The letters of such a file."""
    return [json.loads(row)["question"] for row in Path(path).read_text().splitlines()]
