"""The agent's tool, and the evaluator of its answers: components of the toolkit, without a word of jaxft."""

from collections.abc import AsyncIterator
from typing import Any

from nat.builder.context import Context
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.evaluator import EvalInputItem, EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.plugins.eval.data_models.evaluator_io import EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator

from jaxft_nat_example.questions import table


class GetFactConfig(FunctionBaseConfig, name="get_fact"):
    """A tool that looks up a fact in the table that the user's question names."""


@register_function(config_type=GetFactConfig)
async def get_fact(config: GetFactConfig, builder: Any) -> AsyncIterator[FunctionInfo]:
    """Yield the tool."""

    async def get(key: str) -> str:
        number = int(Context.get().input_message.split()[0])
        return str(table(number).get(key, "unknown"))

    yield FunctionInfo.from_fn(get, description="Look up a fact.")


class ExactAnswerConfig(EvaluatorBaseConfig, name="exact_answer"):
    """Score 1 for the right answer, else 0."""


class ExactAnswer(BaseEvaluator):
    """Compares the agent's answer with the expected one."""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Return the score of one answer."""
        score = float(str(item.output_obj).strip() == str(item.expected_output_obj))
        return EvalOutputItem(id=item.id, score=score, reasoning=f"expected {item.expected_output_obj}")


@register_evaluator(config_type=ExactAnswerConfig)
async def exact_answer(config: ExactAnswerConfig, builder: Any) -> AsyncIterator[EvaluatorInfo]:
    """Yield the evaluator."""
    evaluator = ExactAnswer()
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Exact answers")
