"""jaxft's side of `compare.py learning`: GRPO on the given checkpoint, by the harness, with an agent that asks once.

    PYTHONPATH=benchmarks:experiments python benchmarks/peers/learning_jaxft.py work.json result.json

Its case `warm_start` makes the checkpoint.
"""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from warm_start import warm_start

import jaxft
from alphabet import NEW_TOKENS, WARMUP, careless_answer, read_questions, reward
from protocol import Work, main

STARTED = time.perf_counter()


class AlphabetConfig(jaxft.WorkflowConfig, name="alphabet"):
    """The agent."""

    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=AlphabetConfig)
async def alphabet_backwards(config: AlphabetConfig, builder: Any) -> AsyncIterator[Any]:
    """Ask the question; an answer that is cut is judged as it stands, as by TRL."""
    llm = await builder.get_llm(config.llm)

    async def recite(example: dict[str, Any]) -> str:
        reply = await llm.chat([{"role": "user", "content": example["question"]}], max_tokens=NEW_TOKENS)
        return reply.content

    yield recite


class RightLettersConfig(jaxft.EvaluatorConfig, name="right_letters"):
    """The reward of the task."""


@jaxft.register_evaluator(config_type=RightLettersConfig)
async def right_letters(config: RightLettersConfig, builder: Any) -> AsyncIterator[Any]:
    """Yield the evaluator."""
    yield lambda item: reward(item.input_obj, item.output_obj)


class StopwatchConfig(jaxft.LoggerConfig, name="learning_stopwatch"):
    """Writes the time of each epoch and of each validation."""

    file: str


@jaxft.register_logger(config_type=StopwatchConfig)
async def learning_stopwatch(config: StopwatchConfig, builder: Any) -> AsyncIterator[Any]:
    """Yield the logger."""

    class Stopwatch(jaxft.RunLogger):
        def metrics(self, epoch: int, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
            row = {"epoch": epoch, "at": time.perf_counter(), "score": metrics.get("validation/avg_reward")}
            with Path(config.file).open("a") as file:
                file.write(json.dumps(row) + "\n")

    yield Stopwatch()


def configuration(work: Work, folder: Path, policy: dict[str, Any], num_epochs: int) -> dict[str, Any]:
    """The run; `policy` says where the weights come from."""
    jsonl = {"_type": "jsonl", "structure": {"answer_key": None}}
    return {
        "llms": {"policy": policy | {"_type": "local_policy", "max_context_tokens": 64, "slots": 256}},
        "workflow": {"_type": "alphabet", "llm": "policy"},
        "eval": {
            "general": {"max_concurrency": 512, "dataset": jsonl | {"file_path": work["train"]}},
            "evaluators": {"correctness": {"_type": "right_letters"}},
            "validation": {"dataset": jsonl | {"file_path": work["held_out"]}, "interval": work["evaluate_every"]},
        },
        "trajectory_builders": {
            "rollouts": {"_type": "grpo_trajectory_builder", "num_generations": work["generations"]}
        },
        "trainer_adapters": {
            "local": {
                "_type": "local_trainer_adapter",
                "llm": "policy",
                "loss": {"name": "dapo", "skip_zero_advantages": True},
                "optimizer": {"name": "adamw", "learning_rate": work["learning_rate"], "warmup_updates": WARMUP},
                "microbatch_tokens": 2048,
            }
        },
        "trainers": {
            "loop": {
                "_type": "grpo_trainer",
                "examples_per_update": work["prompts"],
                "early_stop": {"target_reward": work["target"]},
            }
        },
        "finetuning": {
            "enabled": True,
            "trainer": "loop",
            "trajectory_builder": "rollouts",
            "trainer_adapter": "local",
            "reward_function": {"name": "correctness"},
            "num_epochs": num_epochs,
            "seed": work["seed"],
            "checkpoints": {"every": None},
            "loggers": [{"_type": "learning_stopwatch", "file": str(folder / "times.jsonl")}],
            "output_dir": str(folder / "run"),
        },
    }


def learning(work: Work) -> dict[str, Any]:
    """Train to the target; seconds count from the start of the process, without the work of the looks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mapping = configuration(work, folder, {"path": work["checkpoint"]}, work["steps"])
        config = jaxft.config_from_mapping(mapping, base_dir=Path.cwd())

        async def run() -> None:
            async with jaxft.open_session(config) as session:
                await session.train()

        asyncio.run(run())
        rows = [json.loads(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    times = [row["at"] - before for row, before in zip(rows, [STARTED, *(row["at"] for row in rows)], strict=False)]
    looks = [index for index, row in enumerate(rows) if row["score"] is not None]
    curve, seconds = [], 0.0
    for index, row in enumerate(rows):
        if index not in looks:
            seconds += times[index]
            continue
        if index == 0 and len(looks) > 1:  # what starts and compiles: the second look does the same work
            seconds += max(0.0, times[0] - times[looks[1]])
        episodes = row["epoch"] * work["prompts"] * work["generations"]
        curve.append({"step": row["epoch"], "episodes": episodes, "seconds": seconds, "score": row["score"]})
    return {"curve": curve, "seconds": seconds}


def imitate_carelessly(work: Work) -> dict[str, Any]:
    """Train random weights on careless answers, and write the checkpoint."""
    folder = Path(work["checkpoint"]).parent.parent
    mapping = configuration(work, folder, {"preset": work["preset"]}, num_epochs=1)
    config = jaxft.config_from_mapping(mapping, base_dir=Path.cwd())
    draw = random.Random(work["seed"])
    conversations = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": careless_answer(draw, asked)}]
        for asked in read_questions(work["train"])
    ]

    async def run() -> None:
        async with jaxft.open_session(config) as session:
            llm = await session.builder.get_llm("policy")
            await warm_start(session, llm, conversations, steps=work["steps"], batch_rows=64, learning_rate=2e-3)
            await session.export_model()

    asyncio.run(run())
    return {"seconds": time.perf_counter() - STARTED}


if __name__ == "__main__":
    main("jaxft", ("jaxft", "jax", "numpy"), {"learning": learning, "warm_start": imitate_carelessly})
