"""Conversations of the right form and mostly the wrong content, which the warm starts of `environments.py` imitate."""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from counter_environment import CounterEnvironment

from jaxft.environments.factory import environment_kind

Conversation = list[dict[str, Any]]


def add_carelessly(draw: random.Random, row: dict[str, Any]) -> Conversation:
    """The right number two times in five, otherwise ten too many."""
    answer = int(row["answer"]) + draw.choices((0, 10), weights=(0.4, 0.6))[0]
    return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": str(answer)}]


def spell_carelessly(draw: random.Random, row: dict[str, Any]) -> Conversation:
    """The word backward two times in five, otherwise as it stands."""
    answer = row["answer"] if draw.random() < 0.4 else row["answer"][::-1]
    return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]


def reverse_carelessly(draw: random.Random, row: dict[str, Any]) -> Conversation:
    """The text backward one time in three, otherwise its letters in any order, in tags."""
    task = row["task"]
    text = task["prompt"][::-1] if draw.random() < 1 / 3 else shuffled(draw, task["prompt"])
    return [
        {"role": "system", "content": task["system_prompt"]},
        {"role": "user", "content": task["prompt"]},
        {"role": "assistant", "content": f"<reversed_text>{text}</reversed_text>"},
    ]


def count_carelessly(draw: random.Random, row: dict[str, Any]) -> Conversation:
    """One step, of the right size one time in three, otherwise of any."""
    step = row["target"] if draw.random() < 1 / 3 else draw.randint(1, 9)
    call = {"id": "call_0", "type": "function", "function": {"name": "increment", "arguments": {"step": step}}}
    return [
        {"role": "user", "content": f"{row['prompt']}{row['target']}."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": str(step), "tool_call_id": call["id"]},
        {"role": "assistant", "content": "done"},
    ]


def shuffled(draw: random.Random, text: str) -> str:
    """The letters of a text in any order."""
    return "".join(draw.sample(text, len(text)))


class WarmStart(NamedTuple):
    """The maker of careless conversations, how the policy imitates them, and the tools that they call."""

    conversation: Callable[[random.Random, dict[str, Any]], Conversation]
    steps: int
    rows: int
    learning_rate: float
    tools: Sequence[dict[str, Any]] = ()


WARM_STARTS = {
    "basic_arithmetic": WarmStart(add_carelessly, 300, 128, 2e-3),
    "spell_backward": WarmStart(spell_carelessly, 250, 128, 2e-3),
    "reverse_text": WarmStart(reverse_carelessly, 800, 32, 5e-3),
    "counter": WarmStart(count_carelessly, 1000, 32, 5e-3, environment_kind(CounterEnvironment).tools),
}
"""Warm starts by example."""
