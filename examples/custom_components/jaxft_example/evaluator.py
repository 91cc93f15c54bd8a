"""`_type: letter_share`: a reward that even an untrained policy earns a little of."""

from collections.abc import AsyncIterator
from typing import Any

import jaxft


class LetterShareConfig(jaxft.EvaluatorConfig, name="letter_share"):
    """What an answer is worth."""


@jaxft.register_evaluator(config_type=LetterShareConfig)
async def letter_share(config: LetterShareConfig, builder: Any) -> AsyncIterator[Any]:
    """The share of the expected answer's letters that are in the answer, case aside."""

    def score(item: jaxft.EvalInputItem) -> float:
        wanted = set(item.expected_output_obj.lower())
        return len(wanted & set(item.output_obj.lower())) / len(wanted)

    yield score
