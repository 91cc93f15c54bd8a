"""`_type: my_workflow`: an agent that names capitals. It drafts, looks the draft up, and answers."""

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

import jaxft

GAZETTEER = {"Athens", "Berlin", "Lima", "Lisbon", "Oslo", "Paris", "Rome", "Tokyo"}


class MyWorkflowConfig(jaxft.WorkflowConfig, name="my_workflow"):
    """The agent."""

    llm: jaxft.LLMRef = Field(description="Who answers.")
    max_tokens: int = Field(default=6, ge=1, description="Of a draft, and of an answer.")


@jaxft.register_workflow(config_type=MyWorkflowConfig)
async def my_workflow(config: MyWorkflowConfig, builder: Any) -> AsyncIterator[Any]:
    """One question, one look-up where the draft is no known city, one answer."""
    llm = await builder.get_llm(config.llm)

    async def answer(example: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": example["question"]}]
        draft = await llm.chat(messages, max_tokens=config.max_tokens)
        if draft.content in GAZETTEER:
            return draft.content
        messages += [{"role": "assistant", "content": draft.content}, {"role": "tool", "content": "no city"}]
        reply = await llm.chat(messages, max_tokens=config.max_tokens)
        return reply.content

    yield answer
