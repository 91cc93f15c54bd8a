"""`_type: llm_judge`: an evaluator that asks a language model what an answer is worth."""

import re
from collections.abc import AsyncIterator
from typing import Any, Protocol, runtime_checkable

from jaxft.errors import ComponentError
from jaxft.harness.data_models import EvalInputItem, EvalOutputItem
from jaxft.shipped.configs import LLMJudgeConfig

_SCORE = re.compile(r"(?:score\s*[:=]\s*)?(-?(?:\d+(?:\.\d*)?|\.\d+))", re.IGNORECASE)


@runtime_checkable
class Chats(Protocol):
    """A language model that can be the judge: the client of a policy, of a remote model, or one of your own."""

    async def chat(self, messages: list[dict[str, str]], **options: Any) -> Any: ...


async def llm_judge(config: LLMJudgeConfig, builder: Any) -> AsyncIterator[Any]:
    """Yield the function that scores an episode.

    Raises:
        ComponentError: the language model has no method `chat`.
    """
    llm = await builder.get_llm(config.llm)
    if not isinstance(llm, Chats):
        raise ComponentError(f"llms.{config.llm} is a {type(llm).__name__} without chat(), which llm_judge needs")
    options: dict[str, Any] = {} if config.temperature is None else {"temperature": config.temperature}

    async def score(item: EvalInputItem) -> EvalOutputItem:
        """Return the judge's score and, as the reasoning, its whole reply; None as the score if it holds none."""
        prompt = config.prompt.format(
            question=item.input_obj, answer=item.output_obj, expected=item.expected_output_obj
        )
        reply = await llm.chat([{"role": "user", "content": prompt}], **options)
        return EvalOutputItem(id=item.id, score=parse_score(reply.content), reasoning=reply.content)

    yield score


def parse_score(reply: str) -> float | None:
    """Return the number from 0 to 1 that the last line of a reply consists of; None if it is anything else.

    >>> parse_score("0.7"), parse_score("It is right.\\n**Score: 1.0**"), parse_score("8/10"), parse_score("")
    (0.7, 1.0, None, None)
    """
    *_, last = reply.strip().splitlines() or [""]
    found = _SCORE.fullmatch(last.lstrip(" *`\t").rstrip(" *`.\t"))
    if found is None or not 0.0 <= float(found[1]) <= 1.0:
        return None
    return float(found[1])
