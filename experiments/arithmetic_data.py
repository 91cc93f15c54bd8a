"""Makes the data of `arithmetic.py`: all sums of two numbers from 0 to 49, split into training and held-out problems.

    python experiments/arithmetic_data.py

Writes `data/arithmetic_train.jsonl` and `data/arithmetic_held_out.jsonl` next to this file, the same bytes every time.
"""

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent / "data"
LARGEST = 49
TRAIN, HELD_OUT = 2000, 500
SEED = 0


def problems() -> list[dict[str, str]]:
    """All problems, in a shuffled order that never changes."""
    rows = [
        {"id": f"{a}+{b}", "question": f"{a}+{b}", "answer": str(a + b)}
        for a in range(LARGEST + 1)
        for b in range(LARGEST + 1)
    ]
    random.Random(SEED).shuffle(rows)
    return rows


def write(folder: Path) -> None:
    """Writes both files."""
    rows = problems()
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:TRAIN]), ("held_out", rows[-HELD_OUT:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"arithmetic_{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
