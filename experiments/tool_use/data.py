"""Questions about tables of facts, and the careless conversations that the warm start imitates.

A row holds four facts, a letter with a digit from 1 to 6, and asks to combine two of them: `sub b k` wants the fact of
b minus that of k. Of the six facts that a letter may have, two occur in held-out rows only, and four in training rows
only, so that no fact of a held-out question was ever seen in training.
"""

import random
import string
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from pydantic import Field

import jaxft

NAMES, VALUES = string.ascii_lowercase, range(1, 7)
HELD_OUT_VALUES = 2
FACTS_PER_ROW = 4
OPERATIONS: dict[str, Callable[[int, int], int]] = {"add": lambda a, b: a + b, "max": max, "sub": lambda a, b: a - b}

Split = Literal["train", "held_out"]

TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Look up a fact.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
"""The tool of all five agents, in OpenAI's format."""


class FactQuestionsConfig(jaxft.DatasetConfig, name="fact_questions"):
    """Rows of a split."""

    split: Split = Field(default="train", description="Rows with the facts for training, or with the held-out ones.")
    count: int = Field(default=4000, ge=1, description="Number of rows.")


@jaxft.register_dataset_loader(config_type=FactQuestionsConfig)
async def fact_questions(config: FactQuestionsConfig, builder: Any) -> AsyncIterator[list[jaxft.EvalInputItem]]:
    """The rows as examples."""
    yield examples(config.split, config.count)


def examples(split: Split, count: int) -> list[jaxft.EvalInputItem]:
    """The first `count` rows of a split, the same every time."""
    facts, draw = facts_of(split), random.Random(split)
    rows: dict[str, jaxft.EvalInputItem] = {}
    while len(rows) < count:
        table = {name: draw.choice(facts[name]) for name in draw.sample(NAMES, FACTS_PER_ROW)}
        operation, (first, second) = draw.choice(list(OPERATIONS)), draw.sample(list(table), 2)
        a, b = table[first], table[second]
        if a != b:  # so that no lookup of one fact twice gives the right answer to `add` or `sub`
            question, answer = f"{operation} {first} {second}", str(OPERATIONS[operation](a, b))
            row = {"question": question, "answer": answer, "facts": table}
            example_id = f"{question}: {a}, {b}"
            rows[example_id] = jaxft.EvalInputItem(
                id=example_id, input_obj=question, expected_output_obj=answer, full_dataset_entry=row
            )
    return list(rows.values())


def facts_of(split: Split) -> dict[str, list[int]]:
    """The values that each name may have in the rows of a split."""
    draw = random.Random(0)
    held_out = {name: draw.sample(VALUES, HELD_OUT_VALUES) for name in NAMES}
    return {name: [value for value in VALUES if (value in held_out[name]) == (split == "held_out")] for name in NAMES}


def careless_conversation(row: dict[str, Any], draw: random.Random) -> list[dict[str, Any]]:
    """A conversation of the right form, whose lookups and operation are drawn at random.

    Each lookup is of the first name two times in three, else of the second one. The operation is the question's two
    times in three, else another one. So the most likely conversation looks up one fact twice.
    """
    operation, first, second = row["question"].split()
    names = [draw.choice((first, first, second)) for _ in range(2)]
    if draw.random() < 1 / 3:
        operation = draw.choice([name for name in OPERATIONS if name != operation])
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    for index, name in enumerate(names):
        call = {"id": f"call_{index}", "type": "function", "function": {"name": "get", "arguments": {"key": name}}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "content": str(row["facts"][name]), "tool_call_id": call["id"]})
    values = [row["facts"][name] for name in names]
    return [*messages, {"role": "assistant", "content": str(OPERATIONS[operation](*values))}]
