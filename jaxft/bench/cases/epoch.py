"""A whole epoch of GRPO by the core's functions: rollout, a reward in Python, advantages, update."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxft
from jaxft.bench import work
from jaxft.bench.cases.rollout import uniform_phases
from jaxft.bench.cases.update import OPTIMIZER, even_rows, grpo_update
from jaxft.bench.results import CaseResult, Line
from jaxft.bench.setting import Setting
from jaxft.bench.timing import measuring_peak
from jaxft.core.advantages import group_advantages
from jaxft.core.types import Batch, Rollout
from jaxft.core.update import TrainState, init_train_state

PARTS = ("rollout", "reward", "update")


def run(setting: Setting) -> CaseResult:
    """Sampled tokens per second of the whole, and seconds of its parts."""
    result, shapes = setting.result(), setting.shapes
    rows = shapes.prompts * shapes.generations
    row_tokens = shapes.prompt_tokens + shapes.new_tokens
    update = grpo_update(setting.model, even_rows(rows, row_tokens, shapes.microbatch_tokens))
    state = init_train_state(setting.fresh_params(), OPTIMIZER)
    taken: list[list[float]] = []
    state, _ = _epoch(setting, state, update, 0)  # compiles
    with measuring_peak() as peak:
        for number in range(1, setting.repeats + 1):
            state, seconds = _epoch(setting, state, update, number)
            taken.append(seconds)
    gradient = work.update(setting.config, rows, row_tokens, shapes.new_tokens, setting.itemsize)
    medians = np.median(np.array(taken), axis=0)
    result.lines.append(
        Line(
            name=f"{rows} rows of {shapes.new_tokens} sampled tokens",
            amount=rows * shapes.new_tokens,
            seconds=[sum(seconds) for seconds in taken],
            phases=[*uniform_phases(setting), *gradient],
            shape={"prompts": shapes.prompts, "generations": shapes.generations, "row_tokens": row_tokens},
            figures={f"{part}_seconds": float(median) for part, median in zip(PARTS, medians, strict=True)}
            | peak.figures(),
        )
    )
    return result


def _epoch(setting: Setting, state: TrainState, update: Any, number: int) -> tuple[TrainState, list[float]]:
    """An epoch, and the seconds of each of its parts."""
    shapes = setting.shapes
    prompts = setting.prompts(shapes.prompts, shapes.prompt_tokens, number)
    times = [time.perf_counter()]
    rollout = jax.block_until_ready(
        jaxft.generate(
            setting.model,
            state.params,
            prompts,
            jax.random.key(number),
            num_generations=shapes.generations,
            max_new_tokens=shapes.new_tokens,
        )
    )
    times.append(time.perf_counter())
    rewards = np.array([reward(answer) for answer in _answers(rollout)])
    advantages = group_advantages(rewards, np.repeat(np.arange(shapes.prompts), shapes.generations))
    # A rollout is padded to its longest prompt rounded up; columns that no row uses are cut.
    width = shapes.prompt_tokens + shapes.new_tokens
    batch = Batch(
        tokens=rollout.tokens[:, :width],
        completion_mask=rollout.completion_mask[:, :width],
        advantages=jnp.asarray(advantages, jnp.float32),
        sampler_logprobs=rollout.sampler_logprobs[:, :width],
    )
    times.append(time.perf_counter())
    state, metrics = jax.block_until_ready(update(state, batch))
    times.append(time.perf_counter())
    if not metrics["applied_updates"]:
        raise RuntimeError(f"the update of epoch {number} was not applied: {jax.device_get(metrics)}")
    return state, np.diff(times).tolist()


def reward(answer: list[int]) -> float:
    """The mean id: no two answers are worth the same, so every group has something to learn.

    >>> reward([2, 4])
    3.0
    """
    return sum(answer) / len(answer)


def _answers(rollout: Rollout) -> list[list[int]]:
    tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.completion_mask)
    return [row[chosen].tolist() for row, chosen in zip(tokens, mask, strict=True)]
