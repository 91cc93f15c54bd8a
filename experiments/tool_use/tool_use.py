"""An agent learns to use a tool: it looks up the two facts that a question names, and combines them; reward 1 if right.

    python experiments/tool_use/tool_use.py
    python experiments/tool_use/tool_use.py --agent langchain --set finetuning.output_dir=runs/langchain

The agent is written five times, in the files `*_agent.py`, as one writes it for a model on a server. An episode is
three calls of the policy: two lookups and the answer.

It starts from random weights. A supervised warm start on careless conversations teaches their form; what they look up
and compute is drawn at random (`data.careless_conversation`). From there GRPO sees the right answers only through the
reward. Four to six minutes on two CPU cores. At the end more than 0.9 of 500 greedy answers to held-out questions are
right, from less than 0.3 after the warm start.
"""

import argparse
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # warm_start

from data import TOOL, careless_conversation, examples
from warm_start import warm_start

import jaxft

AGENTS = ("openai", "langchain", "pydantic_ai", "openai_agents", "llama_index")


class ExactAnswerConfig(jaxft.EvaluatorConfig, name="exact_answer"):
    """Reward 1 for the right answer, else 0."""


@jaxft.register_evaluator(config_type=ExactAnswerConfig)
async def exact_answer(config: ExactAnswerConfig, builder: Any) -> AsyncIterator[Any]:
    """The reward of the answer that the workflow returned."""
    yield lambda item: float(item.output_obj == item.expected_output_obj)


async def main(config: jaxft.Config, arguments: argparse.Namespace) -> None:
    """Warm start, evaluation, training, evaluation."""
    async with jaxft.open_session(config, overwrite=arguments.overwrite, resume=arguments.resume) as session:
        if not session.is_resumed:
            await learn_the_form(session, arguments.warm_start_steps)
            session.notes["before"] = await exact_share(session, arguments.eval_questions)
            session.console.message(f"exact answers before training: {session.notes['before']:.3f}")
        before = session.notes["before"]
        await session.train()
        after = await exact_share(session, arguments.eval_questions)
        session.console.message(f"exact answers after training: {after:.3f}")
        await session.export_model()
        session.write_result({"exact_answers_warm_start": before, "exact_answers_after": after})


async def learn_the_form(session: jaxft.Session, steps: int) -> None:
    """The supervised warm start on careless conversations; none with 0 steps."""
    llm = await session.builder.get_llm(session.config.workflow.llm)
    if steps:
        draw = random.Random(session.config.finetuning.seed)
        rows = [item.full_dataset_entry for item in await session.builder.get_dataset()]
        conversations = [careless_conversation(row, draw) for row in rows for _ in range(3)]
        await warm_start(session, llm, conversations, tools=[TOOL], steps=steps, batch_rows=32, learning_rate=5e-3)


async def exact_share(session: jaxft.Session, count: int) -> float:
    """The share of greedy answers to held-out questions that are right."""
    output = await session.evaluate(examples("held_out", count))
    answered = output.eval_input.eval_input_items
    return sum(item.output_obj == item.expected_output_obj for item in answered) / count


if __name__ == "__main__":
    parser = jaxft.run_arguments(__doc__, Path(__file__).with_suffix(".yml"))
    parser.add_argument("--agent", choices=AGENTS, default="openai", help="the agent's framework (default %(default)s)")
    parser.add_argument(
        "--warm-start-steps", type=int, default=2000, help="supervised steps first (default %(default)s)"
    )
    parser.add_argument("--eval-questions", type=int, default=500, help="held-out questions (default %(default)s)")
    os.environ["AGENT"] = parser.parse_args().agent  # tool_use.yml reads it
    sys.exit(jaxft.run_script(main, parser))
