"""Validation: the examples that training never sees, and how they are judged while it goes on."""

from dataclasses import dataclass

from jaxft.harness.data_models import EvalInputItem, EvaluationRunOutput
from jaxft.harness.evaluation import Evaluation


@dataclass(frozen=True)
class Validation:
    """A validation set, ready to run.

    Attributes:
        evaluation: the workflow and what judges it; its calls draw from the validation stream.
        examples: the held-out ones.
        interval: epochs between two passes.
        temperature: of all calls; None: each keeps its own.
        num_generations: episodes per example.
    """

    evaluation: Evaluation
    examples: list[EvalInputItem]
    interval: int = 5
    temperature: float | None = 0.0
    num_generations: int = 1

    def is_due(self, epoch: int, num_epochs: int) -> bool:
        """Whether there is a pass after so many epochs: before the first, every `interval`, and after the last.

        >>> async def nothing(example): ...
        >>> validation = Validation(Evaluation(nothing, {}, None, 1, 0), [], interval=3)
        >>> [epoch for epoch in range(8) if validation.is_due(epoch, 7)]
        [0, 3, 6, 7]
        """
        return epoch % self.interval == 0 or epoch == num_epochs

    async def run(self) -> EvaluationRunOutput:
        """One pass."""
        outcomes = await self.evaluation.validate(
            self.examples, temperature=self.temperature, num_generations=self.num_generations
        )
        return self.evaluation.summarize(outcomes)
