"""A policy that is told why its answers are wrong teaches itself: reward 1 for the code of a key, and words for others.

    python experiments/feedback.py                      # one run: a minute on a CPU core
    python experiments/feedback.py --compare --jobs 2   # five seeds of each condition: quarter of an hour on two

Each of 64 keys of two letters has a code, a digit that the policy cannot know. The warm start has random digits as
answers to keys, and where the evaluator's words stand behind a key, as in `bq (it is 7)`, the digit that they name: a
model that can use feedback and has not had any about these codes. From there the policy with the words teaches the
policy without, or the reward does, or both do. The table has the episodes until half of an epoch's answers are right,
and the share of codes that the greedy policy knows at the end.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import jaxft
from jaxft.report.intervals import mean_interval

DISTILLATION, REFERENCE = (f"trainer_adapters.local.loss.{field}" for field in ("distillation", "reference"))
CONDITIONS: dict[str, dict[str, Any]] = {
    "reward": {DISTILLATION: None},
    "words": {},
    "both": {f"{DISTILLATION}.reward_coef": 1.0},
    "words_ema": {f"{REFERENCE}.update_every": 1, f"{REFERENCE}.mixing": 0.05},
    "words_live": {f"{DISTILLATION}.teacher": "self"},
}
"""Settings of each condition; the teacher is the warm start, a moving average of the policy, or the policy."""
KEYS, WANTED, SEEDS = 64, 0.5, 5


class CodesConfig(jaxft.DatasetConfig, name="codes"):
    """Keys and their codes, always the same."""


@jaxft.register_dataset_loader(config_type=CodesConfig)
async def codes(config: CodesConfig, builder: Any) -> AsyncIterator[list[jaxft.EvalInputItem]]:
    """The keys."""
    draw = random.Random(0)
    keys = draw.sample([a + b for a in ascii_lowercase for b in ascii_lowercase], KEYS)
    rows = [{"question": key, "answer": str(draw.randrange(10))} for key in keys]
    yield [
        jaxft.EvalInputItem(id=row["question"], expected_output_obj=row["answer"], full_dataset_entry=row)
        for row in rows
    ]


class GuessConfig(jaxft.WorkflowConfig, name="guess"):
    """The agent."""

    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=GuessConfig)
async def guess(config: GuessConfig, builder: Any) -> AsyncIterator[Any]:
    """Answers with a digit."""
    llm = await builder.get_llm(config.llm)

    async def answer(row: dict[str, Any]) -> str:
        return (await llm.chat([{"role": "user", "content": row["question"]}], max_tokens=2)).content

    yield answer


class ToldConfig(jaxft.EvaluatorConfig, name="told"):
    """Reward 1 of the code, and words about other answers."""


@jaxft.register_evaluator(config_type=ToldConfig)
async def told(config: ToldConfig, builder: Any) -> AsyncIterator[Any]:
    """The reward, with the reason if it is 0."""

    def score(item: jaxft.EvalInputItem) -> jaxft.EvalOutputItem:
        is_right = item.output_obj == item.expected_output_obj
        words = None if is_right else f"it is {item.expected_output_obj}"
        return jaxft.EvalOutputItem(id=item.id, score=float(is_right), reasoning=words)

    yield score


async def main(config: jaxft.Config, arguments: argparse.Namespace) -> None:
    """Warm start, training, evaluation."""
    from warm_start import warm_start

    async with jaxft.open_session(config, overwrite=arguments.overwrite, resume=arguments.resume) as session:
        draw = random.Random(session.config.finetuning.seed)
        conversations = []
        for _ in range(4000):
            key, digit = "".join(draw.choices(ascii_lowercase, k=2)), str(draw.randrange(10))
            asked = draw.choice([key, f"{key} (it is {digit})"])
            conversations.append([{"role": "user", "content": asked}, {"role": "assistant", "content": digit}])
        llm, steps = await session.builder.get_llm(session.config.workflow.llm), arguments.warm_start_steps
        await warm_start(session, llm, conversations, steps=steps, batch_rows=64, learning_rate=5e-3)
        await session.train()
        output = await session.evaluate(await session.builder.get_dataset())
        session.write_result({"known_codes": output.average_reward})


def compare(arguments: list[str]) -> int:
    """Runs all seeds of each condition, prints the table, and returns the exit code of the runs."""
    folder = Path("runs", "compare_feedback")
    folder.mkdir(parents=True, exist_ok=True)
    runs = [{**each, "finetuning.output_dir": f"{folder}/{name}/{{seed}}"} for name, each in CONDITIONS.items()]
    (folder / "conditions.yml").write_text(json.dumps(runs, indent=2) + "\n")
    sweep = ["--list", str(folder / "conditions.yml"), "--sweep-dir", str(folder), "--seeds", str(SEEDS)]
    code = subprocess.run([sys.executable, __file__, *sweep, *arguments]).returncode
    for name in CONDITIONS:
        done = [file.parent for file in sorted(folder.glob(f"{name}/*/result.json"))]
        metrics = [list(map(json.loads, (run / "training_metrics.jsonl").read_text().splitlines())) for run in done]
        never = sum(all(row["reward_mean"] < WANTED for row in rows) for rows in metrics)
        print(f"{name}: {SEEDS - len(done)} of {SEEDS} runs failed, {never} never had half right")
        show("episodes until half are right", [episodes_until(rows) for rows in metrics])
        show("known codes", [json.loads((run / "result.json").read_text())["known_codes"] for run in done])
    return code


def episodes_until(rows: list[dict[str, float]]) -> float:
    """The episodes until the mean reward of an epoch is WANTED; those of the whole run if it never is."""
    ends = [number for number, row in enumerate(rows, 1) if row["reward_mean"] >= WANTED]
    return sum(row["episodes"] for row in rows[: min(ends, default=len(rows))])


def show(what: str, values: list[float]) -> None:
    """Print mean, bootstrap interval and each seed's value."""
    interval = mean_interval(values)
    if interval is not None:
        each = ", ".join(f"{value:.4g}" for value in values)
        print(f"  {what}: {statistics.mean(values):.4g} ({interval.low:.4g} to {interval.high:.4g}); by seed {each}")


if __name__ == "__main__":
    if "--compare" in sys.argv:
        sys.exit(compare([argument for argument in sys.argv[1:] if argument != "--compare"]))
    parser = jaxft.run_arguments(__doc__, Path(__file__).with_suffix(".yml"))
    parser.add_argument("--warm-start-steps", type=int, default=300, help="supervised steps (default %(default)s)")
    sys.exit(jaxft.run_script(main, parser))
