"""A policy learns in other people's environments: tasks of reasoning-gym, one of verifiers, a class in TRL's form.

    pip install "jaxft[envs]"
    python experiments/environments/environments.py                             # basic_arithmetic
    python experiments/environments/environments.py --example spell_backward
    python experiments/environments/environments.py --example counter
    python experiments/environments/environments.py --example reverse_text      # wants the package of that environment

Each example is a configuration beside this file; docs/environments.md explains it. The policy starts from random
weights: a supervised warm start on careless conversations (careless.py) teaches the form, and GRPO the rest.
On two CPU cores the first two take less than ten minutes of CPU time each; the mean score of greedy answers to held-out
questions rises from 0.15 to 0.7 and from 0.34 to 0.75. The others take one and four minutes; in three epochs their
rewards rise from 0.36 to 0.51 and from 0.72 to 0.81.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # warm_start

from careless import WARM_STARTS
from pydantic import Field
from warm_start import warm_start

import jaxft

FOLDER = Path(__file__).parent


class AnswerQuestionConfig(jaxft.WorkflowConfig, name="answer_question"):
    """The agent of the tasks of reasoning-gym."""

    llm: jaxft.LLMRef = Field(description="Entry of llms that answers.")
    max_tokens: int = Field(default=8, ge=1, description="Most tokens of an answer, its stop token included.")


@jaxft.register_workflow(config_type=AnswerQuestionConfig)
async def answer_question(config: AnswerQuestionConfig, builder: Any) -> AsyncIterator[Any]:
    """Asks the question and returns the answer."""
    llm = await builder.get_llm(config.llm)

    async def answer(row: dict[str, Any]) -> str:
        reply = await llm.chat([{"role": "user", "content": row["question"]}], max_tokens=config.max_tokens)
        return reply.content

    yield answer


async def main(config: jaxft.Config, arguments: argparse.Namespace) -> None:
    """Warm start and training, which validates before its first epoch and after its last."""
    async with jaxft.open_session(config, overwrite=arguments.overwrite, resume=arguments.resume) as session:
        if not session.is_resumed:
            await learn_the_form(session, arguments)
        await session.train()
        await session.export_model()
        history = json.loads(session.directory.file("validation_history.json").read_text())
        session.write_result({"reward_warm_start": history[0]["avg_reward"], "reward_after": history[-1]["avg_reward"]})


async def learn_the_form(session: jaxft.Session, arguments: argparse.Namespace) -> None:
    """The supervised warm start on careless conversations; none with 0 steps."""
    llm = await session.builder.get_llm(session.config.workflow.llm)
    example, draw = WARM_STARTS[arguments.example], random.Random(session.config.finetuning.seed)
    steps = example.steps if arguments.warm_start_steps is None else arguments.warm_start_steps
    rows = [item.full_dataset_entry for item in await session.builder.get_dataset()]
    if steps:
        await warm_start(
            session,
            llm,
            [example.conversation(draw, row) for row in rows for _ in range(8)],
            tools=example.tools,
            steps=steps,
            batch_rows=example.rows,
            learning_rate=example.learning_rate,
        )


def add_example(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the argument that chooses the example, and by it the configuration."""
    parser.add_argument("--example", choices=WARM_STARTS, default="basic_arithmetic", help="(default %(default)s)")
    return parser


if __name__ == "__main__":
    example = add_example(argparse.ArgumentParser(add_help=False)).parse_known_args()[0].example
    parser = add_example(jaxft.run_arguments(__doc__, FOLDER / f"{example}.yml"))
    parser.add_argument("--warm-start-steps", type=int, help="supervised steps first (default: the example's)")
    os.environ["WORDS"] = str(FOLDER / "words")  # reverse_text.yml reads it
    sys.exit(jaxft.run_script(main, parser))
