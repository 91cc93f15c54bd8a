"""An agent whose tools sleep, for `overlap.py`: a system prompt, then short answers and what tools say to them."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

import jaxft

TURNS, ANSWER_TOKENS, RESULT_CHARACTERS = 8, 4, 40
SYSTEM = "You have a tool. Ask it for a number, read what it says, and ask again, with as many even digits as you can."
P99_OVER_MEDIAN = 15.0  # 3 s, if the median is 0.2 s
SIGMA = math.log(P99_OVER_MEDIAN) / 2.326


class WaitingAgentConfig(jaxft.WorkflowConfig, name="waiting_agent"):
    """The agent."""

    llm: jaxft.LLMRef = Field(description="Entry of llms that is asked.")
    median_seconds: float = Field(default=0.2, ge=0.0, description="Median of the time that a tool takes; 0: no time.")


@jaxft.register_workflow(config_type=WaitingAgentConfig)
async def waiting_agent(config: WaitingAgentConfig, builder: Any) -> AsyncIterator[Any]:
    """The fraction of even token ids in all answers."""
    llm = await builder.get_llm(config.llm)

    async def work(example: dict[str, Any]) -> float:
        draw, tokens = jaxft.episode().random, []
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"task {example['number']}"}]
        for _ in range(TURNS):
            reply = await llm.chat(messages, max_tokens=ANSWER_TOKENS)
            messages.append({"role": "assistant", "content": reply.content})
            tokens += reply.token_ids
            if config.median_seconds:
                await asyncio.sleep(draw.lognormvariate(math.log(config.median_seconds), SIGMA))
            result = "".join(draw.choices("0123456789", k=RESULT_CHARACTERS))
            messages.append({"role": "user", "content": result})
        return sum(token % 2 == 0 for token in tokens) / len(tokens)

    yield work


class WaitingRewardConfig(jaxft.EvaluatorConfig, name="waiting_reward"):
    """The output as the reward."""


@jaxft.register_evaluator(config_type=WaitingRewardConfig)
async def waiting_reward(config: WaitingRewardConfig, builder: Any) -> AsyncIterator[Any]:
    """The agent's own score."""
    yield lambda item: item.output_obj


class WaitingExamplesConfig(jaxft.DatasetConfig, name="waiting_examples"):
    """Numbers."""

    count: int = Field(default=32, ge=1, description="Number of examples.")


@jaxft.register_dataset_loader(config_type=WaitingExamplesConfig)
async def waiting_examples(config: WaitingExamplesConfig, builder: Any) -> AsyncIterator[list[jaxft.EvalInputItem]]:
    """The examples."""
    yield [jaxft.EvalInputItem(id=str(i), full_dataset_entry={"number": i}) for i in range(config.count)]
