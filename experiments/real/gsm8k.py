"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168), word problems whose answer is a number: the reward."""

import re
from collections.abc import AsyncIterator
from typing import Any

import jaxft

BOXED = re.compile(r"\\boxed\{\s*\$?(-?[\d,]*\.?\d+)[^{}]*\}")


class BoxedNumberConfig(jaxft.EvaluatorConfig, name="boxed_number"):
    """Reward 1 if the last number in a box is that behind `####` of the dataset's answer, else 0."""


@jaxft.register_evaluator(config_type=BoxedNumberConfig)
async def boxed_number(config: BoxedNumberConfig, builder: Any) -> AsyncIterator[Any]:
    """The reward."""

    def score(item: jaxft.EvalInputItem) -> float:
        found = BOXED.findall(item.output_obj)
        expected = item.expected_output_obj.rpartition("####")[2]
        return float(bool(found) and number(found[-1]) == number(expected))

    yield score


def number(text: str) -> float:
    """The value of a number that may have commas between its digits.

    >>> number(" 1,250.0")
    1250.0
    """
    return float(text.replace(",", ""))
