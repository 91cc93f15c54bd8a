"""A small agent for runs that are killed: two turns, a reward from the tokens alone, and randomness of its own.

Each turn is asked with the options of the configuration, such as filters. With an opponent, that one is asked the same,
and its points are taken off.
"""

import asyncio
import random
from typing import Any

import jaxft


class KilledAgentConfig(jaxft.WorkflowConfig, name="killed_agent"):
    llm: jaxft.LLMRef
    opponent: jaxft.LLMRef | None = None
    candidates: int = 1
    options: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    tool_seconds: float = 0.0


@jaxft.register_workflow(config_type=KilledAgentConfig)
async def killed_agent(config: KilledAgentConfig, builder: Any) -> Any:
    llm = await builder.get_llm(config.llm)
    opponent = None if config.opponent is None else await builder.get_llm(config.opponent)

    async def answer(example: dict) -> float:
        episode, messages, points = jaxft.episode(), [], []
        for options in config.options:
            question = f"{example['question']} {episode.random.randrange(10)}"
            messages.append({"role": "user", "content": question})
            count = config.candidates if episode.is_training else 1
            replies = await asyncio.gather(*[llm.chat(messages, max_tokens=6, **options) for _ in range(count)])
            scores = [sum(token % 2 == 0 for token in reply.token_ids) / len(reply.token_ids) for reply in replies]
            if count > 1:
                episode.record_candidates(replies, scores)
            messages.append({"role": "assistant", "content": replies[0].content})
            await asyncio.sleep(config.tool_seconds * random.random())  # at the mercy of the clock, as tools are
            points.append(scores[0])
            if opponent is not None:
                said = await opponent.chat([{"role": "user", "content": question}], max_tokens=6)
                points[-1] -= sum(token % 2 == 0 for token in said.token_ids) / len(said.token_ids)
                messages.append({"role": "user", "content": said.content})
        return sum(points) / 2

    yield answer


class PointsConfig(jaxft.EvaluatorConfig, name="killed_points"):
    pass


@jaxft.register_evaluator(config_type=PointsConfig)
async def killed_points(config: PointsConfig, builder: Any) -> Any:
    yield lambda item: item.output_obj
