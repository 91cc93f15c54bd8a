"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168), word problems whose answer is a number: an agent and its reward."""

import re
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

import jaxft

BOXED = re.compile(r"\\boxed\{\s*\$?(-?[\d,]*\.?\d+)[^{}]*\}")
INSTRUCTION = "Think step by step, and put the final number into \\boxed{}."


class SolveConfig(jaxft.WorkflowConfig, name="solve_word_problem"):
    """The agent."""

    llm: jaxft.LLMRef = Field(description="Entry of llms that answers.")
    max_tokens: int = Field(default=512, ge=1, description="Most tokens of an answer.")
    chat_template_kwargs: dict[str, Any] = Field(default={}, description="Variables of the chat template.")


@jaxft.register_workflow(config_type=SolveConfig)
async def solve_word_problem(config: SolveConfig, builder: Any) -> AsyncIterator[Any]:
    """Asks once and returns the answer's text."""
    llm = await builder.get_llm(config.llm)

    async def solve(row: dict[str, Any]) -> str:
        reply = await llm.chat(
            [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}],
            max_tokens=config.max_tokens,
            chat_template_kwargs=config.chat_template_kwargs,
        )
        return reply.content

    yield solve


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
