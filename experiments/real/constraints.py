"""Questions with two instructions that a program checks, as in IFEval (Zhou et al. 2023, arXiv:2311.07911)."""

import random
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from pydantic import Field

import jaxft

TOPICS = (
    "a river", "the moon", "a violin", "bread", "a lighthouse", "the winter", "a horse", "coffee", "a bridge", "glass",
    "a market", "the sea", "a garden", "chess", "a train", "honey", "a forest", "the wind", "a library", "salt",
    "a clock", "the desert", "a kite", "wool", "a harbour", "rain", "a mountain", "paper", "a bakery", "the night",
)  # fmt: skip
FORMS = ("What is {}?", "Describe {}.", "Tell me about {}.", "Why do people like {}?")

Check = Callable[[str], bool]
LIMITS = {"Use at most five words.": 5, "Use at most ten words.": 10, "Use exactly three words.": 3}
LENGTH: dict[str, Check] = {
    "Use at most five words.": lambda text: len(text.split()) <= 5,
    "Use at most ten words.": lambda text: len(text.split()) <= 10,
    "Use exactly three words.": lambda text: len(text.split()) == 3,
}
FORM: dict[str, Check] = {
    "Use capital letters only.": lambda text: text.upper() == text,
    "Use small letters only.": lambda text: text.lower() == text,
    "End with an exclamation mark.": lambda text: text.endswith("!"),
    "Put the whole answer in double quotes.": lambda text: len(text) > 2 and text[0] == text[-1] == '"',
}
WORDS: dict[str, Check] = {
    "Use the word 'old'.": lambda text: "old" in words(text),
    "Use the word 'people'.": lambda text: "people" in words(text),
    "Begin with the word 'Well'.": lambda text: words(text)[:1] == ["well"],
    "Do not use the word 'the'.": lambda text: "the" not in words(text),
}
CHECKS = LENGTH | FORM | WORDS


def words(text: str) -> list[str]:
    """The words of a text in small letters, without punctuation."""
    return "".join(character if character.isalpha() else " " for character in text.lower()).split()


class ConstrainedQuestionsConfig(jaxft.DatasetConfig, name="constrained_questions"):
    """Questions with two instructions of different kinds."""

    split: Literal["train", "held_out"] = Field(default="train", description="Which topics are asked about.")
    count: int = Field(default=1000, ge=1, description="Number of questions.")


@jaxft.register_dataset_loader(config_type=ConstrainedQuestionsConfig)
async def constrained_questions(
    config: ConstrainedQuestionsConfig, builder: Any
) -> AsyncIterator[list[jaxft.EvalInputItem]]:
    """The questions as examples: every fifth topic is asked about in held-out questions only."""
    draw = random.Random(config.split)
    topics = [topic for index, topic in enumerate(TOPICS) if (index % 5 == 0) == (config.split == "held_out")]
    items = []
    for index in range(config.count):
        chosen = [draw.choice(list(kind)) for kind in draw.sample((LENGTH, FORM, WORDS), 2)]
        question = " ".join([draw.choice(FORMS).format(draw.choice(topics)), *chosen])
        row = {"question": question, "instructions": chosen}
        items.append(jaxft.EvalInputItem(id=f"{config.split}-{index}", input_obj=question, full_dataset_entry=row))
    yield items


class InstructionsFollowedConfig(jaxft.EvaluatorConfig, name="instructions_followed"):
    """Rewards of an answer: `followed`, the share of the instructions that it follows, and `nearly`."""


@jaxft.register_evaluator(config_type=InstructionsFollowedConfig)
async def instructions_followed(config: InstructionsFollowedConfig, builder: Any) -> AsyncIterator[Any]:
    """Two named rewards. For a text that is too long `nearly` is half of the wanted number of words by its own."""

    def score(item: jaxft.EvalInputItem) -> dict[str, float]:
        answer, instructions = item.output_obj.strip(), item.full_dataset_entry["instructions"]
        is_followed = {each: bool(words(answer)) and CHECKS[each](answer) for each in instructions}
        number = max(len(answer.split()), 1)
        over = [LIMITS[each] / number for each in instructions if each in LIMITS and number > LIMITS[each]]
        return {
            "followed": sum(is_followed.values()) / len(instructions),
            "nearly": 0.5 * sum(over) / len(instructions),
        }

    yield score
