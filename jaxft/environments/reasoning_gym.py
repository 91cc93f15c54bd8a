"""Tasks of reasoning-gym: a dataset of generated questions, and the evaluator that scores answers as the task does."""

import functools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from jaxft import ConfigError, EvalInputItem
from jaxft.environments import ReasoningGymDatasetConfig, ReasoningGymScoreConfig, installed
from jaxft.errors import did_you_mean

OPTIONS = "task_options"
"""Field of a row with the options of its task, which some tasks need to score an answer."""


async def dataset(config: ReasoningGymDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the questions of a task."""
    items = questions(config.task, config.options, config.seed, config.size)
    if config.without is not None:
        known = questions(config.task, config.options, config.without.seed, config.without.size)
        left_out = {item.input_obj for item in known}
        items = [item for item in items if item.input_obj not in left_out]
    yield items


async def score(config: ReasoningGymScoreConfig, builder: Any) -> AsyncIterator[Callable[[EvalInputItem], float]]:
    """Yield the evaluator, which gives the task's own score of an answer, from 0 to 1."""

    def score_answer(item: EvalInputItem) -> float:
        row = item.full_dataset_entry
        task = make_task(row["metadata"]["source_dataset"], 1, 0, json.dumps(row[OPTIONS]))
        return float(task.score_answer(answer=item.output_obj, entry=row))

    yield score_answer


def questions(task: str, options: dict[str, Any], seed: int, size: int) -> list[EvalInputItem]:
    """Return `size` questions of a task; those that were there already are left out, so that each is asked once.

    Raises:
        ConfigError: there is no such task, or it refuses its options.
    """
    items: dict[str, EvalInputItem] = {}
    for entry in make_task(task, size, seed, json.dumps(options)):
        items.setdefault(
            entry["question"],
            EvalInputItem(
                id=f"{task}-{seed}-{len(items)}",
                input_obj=entry["question"],
                expected_output_obj=entry["answer"],
                full_dataset_entry={**entry, OPTIONS: options},
            ),
        )
    return list(items.values())


@functools.cache
def make_task(task: str, size: int, seed: int, options: str) -> Any:
    """Return the reasoning-gym dataset of a task; `options` are JSON."""
    reasoning_gym = installed("reasoning_gym")
    known = reasoning_gym.factory.DATASETS
    if task not in known:
        raise ConfigError(f"reasoning_gym: there is no task '{task}'{did_you_mean(task, known, what='there')}")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **json.loads(options))
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning_gym: task '{task}' refuses its options {options}: {error}") from error
