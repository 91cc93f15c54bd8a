"""A policy learns to add two numbers: reward 1 for the right answer, and 0.1 for any answer that is a number.

    python experiments/arithmetic.py

It starts from random weights. A supervised warm start on careless answers (right one time in four, otherwise ten or one
too high) leaves a policy whose likeliest answer is mostly wrong. From there GRPO sees the right answers only through
the reward. Two to three minutes on two CPU cores. At the end the greedy policy solves more than 0.8 of 500 held-out
problems, from less than 0.3 after the warm start.

    python experiments/arithmetic.py --set trainer_adapters.local.loss.name=gspo --overwrite
"""

import argparse
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pydantic import Field

import jaxft

HELD_OUT = Path(__file__).parent / "data" / "arithmetic_held_out.jsonl"


class ArithmeticConfig(jaxft.WorkflowConfig, name="arithmetic"):
    """The agent."""

    llm: jaxft.LLMRef = Field(description="Entry of llms that answers.")
    max_tokens: int = Field(
        default=5, ge=1, description="Most tokens of an answer: three digits, the stop token, and one to spare."
    )


@jaxft.register_workflow(config_type=ArithmeticConfig)
async def arithmetic(config: ArithmeticConfig, builder: Any) -> AsyncIterator[Any]:
    """Asks the question and returns the answer."""
    llm = await builder.get_llm(config.llm)

    async def solve(example: dict[str, Any]) -> str:
        reply = await llm.chat([{"role": "user", "content": example["question"]}], max_tokens=config.max_tokens)
        return reply.content if reply.finish_reason == "stop" else ""

    yield solve


class ExactMatchConfig(jaxft.EvaluatorConfig, name="exact_match"):
    """Reward of an answer."""

    exact: float = Field(default=1.0, description="Reward of the expected answer.")
    format: float = Field(default=0.1, description="Reward of an answer that is a number, right or wrong.")


@jaxft.register_evaluator(config_type=ExactMatchConfig)
async def exact_match(config: ExactMatchConfig, builder: Any) -> AsyncIterator[Any]:
    """Two named rewards, `exact` and `format`; their sum is the reward."""

    def score(item: jaxft.EvalInputItem) -> dict[str, float]:
        answer = item.output_obj
        is_number = answer.isascii() and answer.isdigit()
        return {
            "exact": config.exact * (answer == item.expected_output_obj),
            "format": config.format * is_number,
        }

    yield score


def careless_answer(draw: random.Random, answer: int) -> int:
    """The right answer one time in four, otherwise ten or (half as often) one too many."""
    return answer + draw.choices((0, 10, 1), weights=(0.25, 0.5, 0.25))[0]


async def main(config: jaxft.Config, arguments: argparse.Namespace) -> None:
    """Warm start, evaluation, training, evaluation."""
    async with jaxft.open_session(config, overwrite=arguments.overwrite, resume=arguments.resume) as session:
        held_out = jaxft.load_jsonl(HELD_OUT)
        if not session.is_resumed:
            await learn_carelessly(session, arguments.warm_start_steps)
            session.notes["before"] = await exact_match_share(session, held_out)
            session.console.message(f"exact match before training: {session.notes['before']:.3f}")
        before = session.notes["before"]
        await session.train()
        after = await exact_match_share(session, held_out)
        session.console.message(f"exact match after training: {after:.3f}")
        await session.export_model()
        session.write_result({"exact_match_warm_start": before, "exact_match_after": after})


async def learn_carelessly(session: jaxft.Session, steps: int) -> None:
    """The supervised warm start on answers that are often wrong; none with 0 steps."""
    from warm_start import warm_start

    llm = await session.builder.get_llm(session.config.workflow.llm)
    if steps:
        draw = random.Random(session.config.finetuning.seed)
        conversations = [
            [
                {"role": "user", "content": item.input_obj},
                {"role": "assistant", "content": str(careless_answer(draw, int(item.expected_output_obj)))},
            ]
            for item in await session.builder.get_dataset()
            for _ in range(8)
        ]
        await warm_start(session, llm, conversations, steps=steps, batch_rows=256, learning_rate=2e-3)


async def exact_match_share(session: jaxft.Session, items: list[jaxft.EvalInputItem]) -> float:
    """The share of greedy answers that are right."""
    output = await session.evaluate(items)
    answered = output.eval_input.eval_input_items
    return sum(item.output_obj == item.expected_output_obj for item in answered) / len(answered)


if __name__ == "__main__":
    parser = jaxft.run_arguments(__doc__, Path(__file__).with_suffix(".yml"))
    parser.add_argument(
        "--warm-start-steps", type=int, default=300, help="supervised steps first (default %(default)s)"
    )
    sys.exit(jaxft.run_script(main, parser))
