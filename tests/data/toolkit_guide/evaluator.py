"""The reward: the share of the answer's characters that are lower-case letters."""

from pydantic import Field

from jaxft import BaseEvaluator, EvalInputItem, EvalOutputItem, EvaluatorInfo, register_evaluator
from jaxft import EvaluatorConfig as EvaluatorBaseConfig


class LetterEvaluatorConfig(EvaluatorBaseConfig, name="letters"):
    alphabet: str = Field(default="abcdefghijklmnopqrstuvwxyz", description="The letters that count.")


class LetterEvaluator(BaseEvaluator):
    def __init__(self, alphabet: str, max_concurrency: int = 4):
        super().__init__(max_concurrency, tqdm_desc="Evaluating letters")
        self.alphabet = alphabet

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        answer = item.output_obj
        score = sum(letter in self.alphabet for letter in answer) / len(answer) if answer else 0.0
        reasoning = {"question": item.input_obj, "generated_answer": answer, "num_steps": len(item.trajectory)}
        return EvalOutputItem(id=item.id, score=score, reasoning=reasoning)


@register_evaluator(config_type=LetterEvaluatorConfig)
async def register_letter_evaluator(config: LetterEvaluatorConfig, builder):
    evaluator = LetterEvaluator(config.alphabet, builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Letter Evaluator")
