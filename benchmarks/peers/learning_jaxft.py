"""jaxft's side of `compare.py learning`: GRPO on the given checkpoint, by the harness, with the agent of arithmetic.py.

    PYTHONPATH=benchmarks:experiments python benchmarks/peers/learning_jaxft.py work.json result.json

Its case `warm_start` makes the checkpoint.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import arithmetic

import jaxft
from protocol import Work, main

STARTED = time.perf_counter()


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


def configuration(work: Work, folder: Path) -> dict[str, Any]:
    """The run: the fields of experiments/arithmetic.yml, on the checkpoint, data and counts of the work."""
    jsonl = {"_type": "jsonl"}
    return {
        "imports": ["arithmetic"],
        "llms": {
            "policy": {
                "_type": "local_policy",
                "path": work["checkpoint"],
                "max_context_tokens": 32,
                "slots": work["prompts"] * work["generations"],
            }
        },
        "workflow": {"_type": "arithmetic", "llm": "policy", "max_tokens": work["new_tokens"]},
        "eval": {
            "general": {"max_concurrency": 512, "dataset": jsonl | {"file_path": work["train"]}},
            "evaluators": {"correctness": {"_type": "exact_match"}},
            "validation": {"dataset": jsonl | {"file_path": work["held_out"]}, "interval": work["evaluate_every"]},
        },
        "trajectory_builders": {
            "rollouts": {"_type": "grpo_trajectory_builder", "num_generations": work["generations"]}
        },
        "trainer_adapters": {
            "local": {
                "_type": "local_trainer_adapter",
                "llm": "policy",
                "loss": {"name": "dapo"},
                "optimizer": {"name": "adamw", "learning_rate": work["learning_rate"]},
                "microbatch_tokens": 2048,
            }
        },
        "trainers": {"loop": {"_type": "grpo_trainer", "examples_per_update": work["prompts"]}},
        "finetuning": {
            "enabled": True,
            "trainer": "loop",
            "trajectory_builder": "rollouts",
            "trainer_adapter": "local",
            "reward_function": {"name": "correctness"},
            "num_epochs": work["steps"],
            "seed": work["seed"],
            "checkpoints": {"every": None},
            "loggers": [{"_type": "learning_stopwatch", "file": str(folder / "times.jsonl")}],
            "output_dir": str(folder / "run"),
        },
    }


def learning(work: Work) -> dict[str, Any]:
    """Train; seconds count from the start of the process, without validations but the first, which compiles."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = jaxft.config_from_mapping(configuration(work, folder), base_dir=Path.cwd())

        async def run() -> None:
            async with jaxft.open_session(config) as session:
                await session.train()

        asyncio.run(run())
        rows = [json.loads(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    curve, seconds, before = [], 0.0, STARTED
    for row in rows:
        is_validation = row["score"] is not None
        if not is_validation or not curve:
            seconds += row["at"] - before
        if is_validation:
            episodes = row["epoch"] * work["prompts"] * work["generations"]
            curve.append({"step": row["epoch"], "episodes": episodes, "seconds": seconds, "score": row["score"]})
        before = row["at"]
    return {"curve": curve, "seconds": seconds}


def warm_start(work: Work) -> dict[str, Any]:
    """Train random weights on the careless answers of arithmetic.py, and write the checkpoint."""
    folder = Path(work["checkpoint"]).parent
    config = jaxft.load_config(Path(arithmetic.__file__).with_suffix(".yml"), [("finetuning.output_dir", str(folder))])

    async def run() -> None:
        async with jaxft.open_session(config) as session:
            await arithmetic.learn_carelessly(session, work["steps"])
            await session.export_model()

    asyncio.run(run())
    return {"seconds": time.perf_counter() - STARTED}


if __name__ == "__main__":
    main("jaxft", ("jaxft", "jax", "numpy"), {"learning": learning, "warm_start": warm_start})
