"""Cost of the harness per episode on the host, without a language model.

A trivial episode may take at most 1 ms at concurrency 64. An episode is started, runs in a task of its own, is
evaluated and becomes a trajectory of its group; the collection goes through the curriculum. Kinds of episodes, measured
in turn:

* `trivial`: the workflow returns at once.
* `recorded`: two calls of 32 prompt and 16 sampled tokens are recorded and become one training row.
* `group`: trivial, with a group evaluator.
* `time-outs`: trivial, with time-outs on workflow and evaluator.
* `validated rows`: the adapter's work on the host with recorded episodes before a job is queued.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from jaxft import CurriculumLearningConfig, EvalInputItem, Evaluation, TrajectoryCollection, episode
from jaxft.components.configs import GRPOTrajectoryBuilderConfig
from jaxft.components.grpo import GRPOTrajectoryBuilder
from jaxft.harness.curriculum import choose_groups, initial_state
from jaxft.harness.evaluators import BoundEvaluator
from jaxft.rollout.calls import Call, Completion, Prompt, Reply
from jaxft.training.advantages import collect_rewards
from jaxft.training.config import LossConfig
from jaxft.training.rows import gather_rows
from records import Check, Line, Measured
from shapes import Shapes

GENERATIONS = 8
MOST_MILLISECONDS = 1.0
"""Time of a trivial episode."""
PROMPT, ANSWER = tuple(range(32)), tuple(range(100, 116))


def run(shapes: Shapes, repeats: int) -> Measured:
    """Episodes per second and milliseconds per episode of each kind."""
    episodes = shapes.episodes // GENERATIONS * GENERATIONS
    lines = [
        Line(
            name=name,
            amount=episodes,
            unit="episodes",
            seconds=times,
            shape={"episodes": episodes, "concurrency": shapes.concurrency},
            figures={"milliseconds_per_episode": 1e3 * statistics.median(times) / episodes},
        )
        for name, times in asyncio.run(_measure(episodes, shapes.concurrency, repeats)).items()
    ]
    check = Check(
        name="milliseconds per trivial episode",
        value=lines[0].figures["milliseconds_per_episode"],
        relation="at most",
        wanted=MOST_MILLISECONDS,
    )
    return Measured(lines=lines, checks=[check])


async def trivial(example: dict[str, Any]) -> float:
    """Agent that returns at once."""
    return float(episode().generation)


async def recorded(example: dict[str, Any]) -> float:
    """Agent of two turns that records given answers."""
    current = episode()
    prompt = PROMPT
    for number in range(2):
        index, _ = current.begin_call(prompt)
        logprobs = [-1.0] * len(ANSWER)
        completion = Completion(list(ANSWER), logprobs, logprobs, [0] * len(ANSWER), "stop")
        messages = tuple({"role": "user", "content": f"turn {turn}"} for turn in range(number + 1))
        call = Call(index, "policy", messages, Prompt("", prompt), Reply("said", completion, prompt, index))
        current.record(call)
        prompt = (*call.context_ids, *PROMPT)
    return float(current.generation)


def reward(item: EvalInputItem) -> float:
    """Reward that differs within every group."""
    return item.output_obj


def ranking(items: list[EvalInputItem]) -> list[float]:
    """Group evaluator."""
    return [item.output_obj for item in items]


def _collector(
    workflow: Callable[[dict[str, Any]], Awaitable[Any]],
    run_evaluators: BoundEvaluator,
    concurrency: int,
    timeout: float | None = None,
) -> Callable[[list[EvalInputItem]], Awaitable[TrajectoryCollection]]:
    """Make a function that collects the episodes of examples once and puts them through the curriculum."""
    curriculum = CurriculumLearningConfig(enabled=True)

    async def collect(items: list[EvalInputItem]) -> TrajectoryCollection:
        builder = GRPOTrajectoryBuilder(GRPOTrajectoryBuilderConfig(num_generations=GENERATIONS))
        evaluation = Evaluation(workflow, {"reward": run_evaluators}, "reward", concurrency, 0, timeout_seconds=timeout)
        await builder.bind_evaluation(evaluation, items)
        await builder.start_run("run")
        collection = await builder.finalize("run")
        choose_groups(collection.trajectories, curriculum, initial_state(curriculum), epoch=0, seed=0)
        return collection

    return collect


async def _measure(episodes: int, concurrency: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of all episodes of each kind, one number per repeat."""
    items = [EvalInputItem(id=f"{n}", full_dataset_entry={"n": n}) for n in range(episodes // GENERATIONS)]
    kinds = {
        "trivial": _collector(trivial, BoundEvaluator(reward), concurrency),
        "recorded": _collector(recorded, BoundEvaluator(reward), concurrency),
        "group": _collector(trivial, BoundEvaluator(ranking, is_group=True), concurrency),
        "time-outs": _collector(trivial, BoundEvaluator(reward, timeout_seconds=60.0), concurrency, timeout=60.0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*kinds, "validated rows")}
    for repeat in range(repeats + 1):
        for name, collect in kinds.items():
            started = time.perf_counter()
            collection = await collect(items)
            ended = time.perf_counter()
            if repeat:  # the first round warms up
                seconds[name].append(ended - started)
            if name == "recorded":
                started = time.perf_counter()
                gathered = gather_rows(collection, llm="policy", mask_truncated=False)
                collect_rewards(gathered.groups, LossConfig(), "policy")
                if repeat:
                    seconds["validated rows"].append(time.perf_counter() - started)
    return seconds
