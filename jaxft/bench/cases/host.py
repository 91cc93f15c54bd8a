"""What the harness itself costs per episode: no language model, no reward of any length, nothing but the bookkeeping.

Wanted: at most 1 ms per trivial episode at concurrency 64. An episode is started, runs in a task of its own, is judged,
and becomes a trajectory of its group; the collection is figured and put through the curriculum. Kinds of episodes:

* `trivial`: the workflow returns at once.
* `recorded`: two calls of 32 prompt and 16 sampled tokens are recorded, which become one training row.
* `group`: trivial, judged by a group evaluator.
* `time-outs`: trivial, with time-outs on workflow and evaluator.
* `validated rows`: what the adapter does on the host with recorded episodes before a job is queued.

Kinds are measured in turn.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from jaxft.bench.arguments import Job
from jaxft.bench.results import CaseResult, Check, Line
from jaxft.harness.curriculum import choose_groups, initial_state
from jaxft.harness.data_models import CurriculumLearningConfig, EvalInputItem, TrajectoryCollection
from jaxft.harness.evaluation import Evaluation
from jaxft.harness.evaluators import BoundEvaluator
from jaxft.rollout.recorder import Call, episode
from jaxft.shipped.configs import GRPOTrajectoryBuilderConfig
from jaxft.shipped.grpo import GRPOTrajectoryBuilder
from jaxft.training.advantages import collect_rewards
from jaxft.training.config import LossConfig
from jaxft.training.rows import gather_rows

GENERATIONS = 8
MOST_MILLISECONDS = 1.0
"""Per trivial episode."""
PROMPT, ANSWER = tuple(range(32)), tuple(range(100, 116))


def run(job: Job, repeats: int) -> CaseResult:
    """Milliseconds per episode of each kind."""
    episodes = job.shapes.episodes // GENERATIONS * GENERATIONS
    found = asyncio.run(measure(episodes, job.shapes.concurrency, repeats))
    result = CaseResult(case=job.case)
    for name, times in found.items():
        shape = {"episodes": episodes, "concurrency": job.shapes.concurrency}
        figures = {"milliseconds_per_episode": 1e3 * statistics.median(times) / episodes}
        line = Line(name=name, amount=episodes, unit="episodes", seconds=times, shape=shape, figures=figures)
        result.lines.append(line)
    trivial_milliseconds = result.lines[0].figures["milliseconds_per_episode"]
    name = "milliseconds per trivial episode"
    result.checks.append(Check(name=name, value=trivial_milliseconds, relation="at most", wanted=MOST_MILLISECONDS))
    return result


async def trivial(example: dict[str, Any]) -> float:
    """An agent that does nothing."""
    return float(episode().generation)


async def recorded(example: dict[str, Any]) -> float:
    """An agent of two turns, whose answers are there already."""
    current = episode()
    prompt = PROMPT
    for number in range(2):
        index, _ = current.begin_call(prompt)
        logprobs = (-1.0,) * len(ANSWER)
        messages = tuple({"role": "user", "content": f"turn {turn}"} for turn in range(number + 1))
        call = Call(index, "policy", messages, "said", "", prompt, ANSWER, logprobs, logprobs, 1.0, "stop", 0)
        current.record(call)
        prompt = (*call.context_ids, *PROMPT)
    return float(current.generation)


def reward(item: EvalInputItem) -> float:
    """Different within every group."""
    return item.output_obj


def ranking(items: list[EvalInputItem]) -> list[float]:
    """A group evaluator."""
    return [item.output_obj for item in items]


def collector(
    workflow: Callable[[dict[str, Any]], Awaitable[Any]],
    run_evaluators: BoundEvaluator,
    concurrency: int,
    timeout: float | None = None,
) -> Callable[[list[EvalInputItem]], Awaitable[TrajectoryCollection]]:
    """A function that collects the examples' episodes once and puts them through the curriculum."""
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


async def measure(episodes: int, concurrency: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of all episodes of each kind, repeat by repeat."""
    items = [EvalInputItem(id=f"{n}", full_dataset_entry={"n": n}) for n in range(episodes // GENERATIONS)]
    kinds = {
        "trivial": collector(trivial, BoundEvaluator(reward), concurrency),
        "recorded": collector(recorded, BoundEvaluator(reward), concurrency),
        "group": collector(trivial, BoundEvaluator(ranking, is_group=True), concurrency),
        "time-outs": collector(trivial, BoundEvaluator(reward, timeout_seconds=60.0), concurrency, timeout=60.0),
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
