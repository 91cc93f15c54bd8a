"""An agent that asks once, which most recipes beside this file train, and the reward of a bare number."""

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

import jaxft


class AskConfig(jaxft.WorkflowConfig, name="ask"):
    """An agent that asks the row's question once."""

    llm: jaxft.LLMRef = Field(description="Entry of llms that answers.")
    system: str | None = Field(default=None, description="System message; null: that of the chat template.")
    temperature: float = Field(default=1.0, ge=0.0, description="Divisor of the logits.")
    max_tokens: int = Field(default=16, ge=1, description="Most tokens of an answer, its stop token included.")
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="Variables of the chat template, such as enable_thinking."
    )


@jaxft.register_workflow(config_type=AskConfig)
async def ask(config: AskConfig, builder: Any) -> AsyncIterator[Any]:
    """Asks the question and returns the answer."""
    llm = await builder.get_llm(config.llm)
    system = [] if config.system is None else [{"role": "system", "content": config.system}]

    async def answer(row: dict[str, Any]) -> str:
        reply = await llm.chat(
            [*system, {"role": "user", "content": row["question"]}],
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            chat_template_kwargs=config.chat_template_kwargs,
        )
        return reply.content

    yield answer


class BareNumberConfig(jaxft.EvaluatorConfig, name="bare_number"):
    """Rewards of an answer that should be a number alone: `exact` for the right one, and `form`, which costs."""


@jaxft.register_evaluator(config_type=BareNumberConfig)
async def bare_number(config: BareNumberConfig, builder: Any) -> AsyncIterator[Any]:
    """Two named rewards: 1 for the expected number; -0.2 to -1 for what is none, the more the longer it is."""

    def score(item: jaxft.EvalInputItem) -> dict[str, float]:
        answer = item.output_obj.strip()
        characters = min(len(answer), 50) or 50
        return {
            "exact": float(answer == item.expected_output_obj),
            "form": 0.0 if answer.isdecimal() else -0.2 - 0.8 * characters / 50,
        }

    yield score
