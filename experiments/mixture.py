"""One policy learns two environments in one run: sums of two numbers, and walks through locked doors.

    python experiments/mixture.py

The agents, rows and evaluators are those of `arithmetic.py` and `doors.py`; a row says which task it is of. Each
epoch has five sums for every house, by the weights of the tasks. A walk has some forty tokens in twenty turns and a
reward of up to 20, a sum three tokens and a reward of about 1: advantages are within the groups of a task, so that
neither drowns the other.

From random weights: a supervised warm start on careless answers to both tasks, then GRPO. At the end greedy answers to
half of the held-out sums are right, from 0.3 after the warm start, and games have all of the best possible return, from
0.3 of it. 23 minutes on two busy CPU cores.
"""

import argparse
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import arithmetic
import doors
from pydantic import Field
from warm_start import warm_start

import jaxft

TASK_KEY = "task_name"


class SumsAndDoorsConfig(jaxft.WorkflowConfig, name="sums_and_doors"):
    """The agents of both tasks."""

    llm: jaxft.LLMRef = Field(description="Entry of llms that answers and plays.")


@jaxft.register_workflow(config_type=SumsAndDoorsConfig)
async def sums_and_doors(config: SumsAndDoorsConfig, builder: Any) -> AsyncIterator[Any]:
    """The agent of the task that a row is of."""
    agents = {
        "sums": await anext(arithmetic.arithmetic(arithmetic.ArithmeticConfig(llm=config.llm), builder)),
        "doors": await anext(doors.doors(doors.DoorsConfig(llm=config.llm), builder)),
    }

    async def run(example: dict[str, Any]) -> Any:
        return await agents[example[TASK_KEY]](example)

    yield run


class SumsAndHousesConfig(jaxft.DatasetConfig, name="sums_and_houses"):
    """The rows of both tasks."""


@jaxft.register_dataset_loader(config_type=SumsAndHousesConfig)
async def sums_and_houses(config: SumsAndHousesConfig, builder: Any) -> AsyncIterator[list[jaxft.EvalInputItem]]:
    """2,000 sums and 4,096 houses."""
    train = jaxft.load_jsonl(arithmetic.HELD_OUT.with_name("arithmetic_train.jsonl"))
    yield mixed({"sums": train, "doors": doors.examples("train", 4096)})


def mixed(parts: dict[str, list[jaxft.EvalInputItem]]) -> list[jaxft.EvalInputItem]:
    """The rows of several tasks, each with a column that names its task."""
    return [
        jaxft.EvalInputItem(
            id=f"{task}/{item.id}",
            input_obj=item.input_obj,
            expected_output_obj=item.expected_output_obj,
            full_dataset_entry={**item.full_dataset_entry, TASK_KEY: task},
        )
        for task, items in parts.items()
        for item in items
    ]


async def main(config: jaxft.Config, arguments: argparse.Namespace) -> None:
    """Warm start, scores by task, training, scores by task."""
    async with jaxft.open_session(config, overwrite=arguments.overwrite, resume=arguments.resume) as session:
        if not session.is_resumed:
            await learn_carelessly(session, arguments.warm_start_steps)
            session.notes["before"] = await scores(session, "before training", arguments.eval_examples)
        before = session.notes["before"]
        await session.train()
        after = await scores(session, "after training", arguments.eval_examples)
        await session.export_model()
        session.write_result(
            {f"{task}_before": score for task, score in before.items()}
            | {f"{task}_after": score for task, score in after.items()}
        )


async def learn_carelessly(session: jaxft.Session, steps: int) -> None:
    """The supervised warm start on careless answers to both tasks; none with 0 steps."""
    draw = random.Random(session.config.finetuning.seed)
    conversations = [doors.careless_conversation(draw) for _ in range(2000)]
    for item in jaxft.load_jsonl(arithmetic.HELD_OUT.with_name("arithmetic_train.jsonl")):
        for _ in range(4):
            answer = str(arithmetic.careless_answer(draw, int(item.expected_output_obj)))
            asked = {"role": "user", "content": item.input_obj}
            conversations.append([asked, {"role": "assistant", "content": answer}])
    if steps:
        llm = await session.builder.get_llm("policy")
        await warm_start(session, llm, conversations, steps=steps, batch_rows=64, learning_rate=2e-3)


async def scores(session: jaxft.Session, when: str, count: int) -> dict[str, float]:
    """Scores of greedy episodes on held-out examples: right sums, and the share of the best possible return."""
    rows = mixed({"sums": jaxft.load_jsonl(arithmetic.HELD_OUT)[:count], "doors": doors.examples("held-out", count)})
    answered = (await session.evaluate(rows)).eval_input.eval_input_items
    opened = sum(item.output_obj for item in answered if item.id.startswith("doors/"))
    right = sum(item.output_obj == item.expected_output_obj for item in answered if item.id.startswith("sums/"))
    found = {"sums": right / count, "doors": opened / count / doors.best_return()}
    shown = ", ".join(f"{task} {score:.3f}" for task, score in found.items())
    session.console.message(f"{when}: {shown}")
    return found


if __name__ == "__main__":
    parser = jaxft.run_arguments(__doc__, Path(__file__).with_suffix(".yml"))
    parser.add_argument(
        "--warm-start-steps", type=int, default=300, help="supervised steps first (default %(default)s)"
    )
    parser.add_argument(
        "--eval-examples", type=int, default=200, help="held-out examples of each task (default %(default)s)"
    )
    sys.exit(jaxft.run_script(main, parser))
