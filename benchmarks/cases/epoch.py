"""One epoch of GRPO by the core's functions: rollout, a reward in Python, advantages, update."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxft
import roofline
from cases.rollout import generate, uniform_phases
from cases.update import OPTIMIZER, grpo_update, microbatch_rows
from jaxft.core.update import TrainState
from machine import measuring_peak
from records import Line, Measured
from workload import Workload

PHASES = ("rollout", "reward", "update")


def run(workload: Workload) -> Measured:
    """Sampled tokens per second of the epoch, and seconds of each phase."""
    shapes = workload.shapes
    rows = shapes.prompts * shapes.generations
    row_tokens = shapes.prompt_tokens + shapes.new_tokens
    update = grpo_update(workload.model, microbatch_rows(rows, row_tokens, shapes.microbatch_tokens))
    state = jaxft.init_train_state(workload.fresh_params(), OPTIMIZER)
    prompts = [workload.prompts(shapes.prompts, shapes.prompt_tokens, n) for n in range(workload.repeats + 1)]
    taken: list[list[float]] = []
    state, _, _ = run_epoch(workload, state, update, prompts[0], mean_id, 0)  # compiles
    with measuring_peak() as peak:
        for number in range(1, workload.repeats + 1):
            state, _, seconds = run_epoch(workload, state, update, prompts[number], mean_id, number)
            taken.append(seconds)
    medians = np.median(np.array(taken), axis=0)
    gradient = roofline.update(workload.config, rows, row_tokens, shapes.new_tokens, workload.itemsize)
    line = Line(
        name=f"{rows} rows of {shapes.new_tokens} sampled tokens",
        amount=rows * shapes.new_tokens,
        seconds=[sum(seconds) for seconds in taken],
        phases=[*uniform_phases(workload), *gradient],
        shape={"prompts": shapes.prompts, "generations": shapes.generations, "row_tokens": row_tokens},
        figures={f"{phase}_seconds": float(median) for phase, median in zip(PHASES, medians, strict=True)} | peak,
    )
    return Measured(lines=[line])


def run_epoch(
    workload: Workload,
    state: TrainState,
    update: Any,
    prompts: Sequence[Sequence[int]],
    reward: Callable[[list[int]], float],
    number: int,
) -> tuple[TrainState, dict[str, Any], list[float]]:
    """Run one epoch; the new state, the metrics of the update, and the seconds of each of `PHASES`.

    Raises:
        RuntimeError: a row has too few tokens, or the update was not applied.
    """
    shapes = workload.shapes
    times = [time.perf_counter()]
    rollout = generate(workload, state.params, prompts, number)
    times.append(time.perf_counter())
    tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.completion_mask)
    if (mask.sum(axis=1) != shapes.new_tokens).any():
        raise RuntimeError(f"each row has to get {shapes.new_tokens} tokens; they got {mask.sum(axis=1).tolist()}")
    rewards = np.array([reward(row[chosen].tolist()) for row, chosen in zip(tokens, mask, strict=True)])
    advantages = jaxft.group_advantages(rewards, np.repeat(np.arange(shapes.prompts), shapes.generations))
    # A rollout is padded to its longest prompt rounded up; columns that no row uses are cut.
    width = shapes.prompt_tokens + shapes.new_tokens
    batch = jaxft.Batch(
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
    return state, metrics, np.diff(times).tolist()


def mean_id(answer: list[int]) -> float:
    """Reward that differs between any two answers in practice, so that every group has a signal.

    >>> mean_id([2, 4])
    3.0
    """
    return sum(answer) / len(answer)
