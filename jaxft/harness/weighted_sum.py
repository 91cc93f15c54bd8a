"""`_type: weighted_sum`: several evaluators' scores as one reward.

    evaluators:
      win: {_type: game_outcome}
      format: {_type: well_formed}
      total: {_type: weighted_sum, weights: {win: 1.0, format: 0.1}}

They are asked once; the sum is made of what they gave.
"""

import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, field_validator

from jaxft.harness.errors import did_you_mean
from jaxft.harness.fields import check_reference, fault
from jaxft.harness.judging import Score, usable
from jaxft.harness.registry import EvaluatorConfig, register_evaluator

SECTION = "eval.evaluators"


class WeightedSumConfig(EvaluatorConfig, name="weighted_sum"):
    """Named rewards, `{name: weight * score}`; not usable when one of the scores is not."""

    weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        min_length=1, description="Weights of the scores of other entries of eval.evaluators, by name."
    )

    # `values`: before pydantic makes 1.0 of true. `info` is its ValidationInfo.
    @field_validator("weights", mode="before")
    @classmethod
    def _true_is_no_weight(cls, values: Any) -> Any:
        for name, weight in values.items() if isinstance(values, Mapping) else ():
            if isinstance(weight, bool):
                raise fault(f"the weight of '{name}' must be a number (holds a bool)")
        return values

    @field_validator("weights")
    @classmethod
    def _are_evaluators(cls, weights: dict[str, float], info: Any) -> dict[str, float]:
        for name in weights:
            check_reference(SECTION, name, info)
        return weights

    @field_validator("timeout_seconds")
    @classmethod
    def _takes_no_time(cls, seconds: float | None) -> float | None:
        if seconds is not None:
            raise fault("a weighted sum only adds up: limit the evaluators that it is made of")
        return seconds


@dataclass(frozen=True)
class WeightedSum:
    """Weights of the scores of other evaluators, by name."""

    weights: Mapping[str, float]

    def __call__(self, scores: Mapping[str, Score]) -> dict[str, float]:
        """The weighted scores; that of a dict is its sum, that of what is not usable is NaN.

        >>> WeightedSum({"win": 2.0, "style": 0.5})({"win": 1.0, "style": {"short": 1.0, "kind": 3.0}, "other": None})
        {'win': 2.0, 'style': 2.0}
        """
        numbers = {name: usable(scores[name]) for name in self.weights}
        return {name: math.nan if number is None else self.weights[name] * number for name, number in numbers.items()}


def weighted_sum_faults(evaluators: Mapping[str, object]) -> list[tuple[str, str]]:
    """Sums of what is not there, and of sums: the name of the sum, and what is wrong with its weights.

    Args:
        evaluators: all of them, or all of their configurations.
    """
    sums = {name: each for name, each in evaluators.items() if isinstance(each, WeightedSum | WeightedSumConfig)}
    faults = []
    for own, weighted in sums.items():
        for name in weighted.weights:
            if name not in evaluators:
                hint = did_you_mean(name, [known for known in evaluators if known not in sums], what="there")
                faults.append((own, f"'{name}' is not in '{SECTION}'{hint}"))
            elif name in sums:
                what = "this weighted sum itself" if name == own else "a weighted sum, too"
                faults.append((own, f"'{name}' is {what}: name the evaluators that it is made of"))
    return faults


@register_evaluator(config_type=WeightedSumConfig)
async def weighted_sum(config: WeightedSumConfig, builder: Any) -> AsyncIterator[WeightedSum]:
    """The weights; the evaluation applies them."""
    yield WeightedSum(config.weights)
