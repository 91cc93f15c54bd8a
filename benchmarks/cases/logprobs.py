"""Scoring of given tokens with the trainer's forward pass, and the sampler's distance from it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np

import jaxft
import roofline
from cases.rollout import generate
from records import Check, Line, Measured
from timing import in_turn
from workload import Workload, make_requests, serve

MOST_DIFFERENCE_NATS = {"float32": 1e-5, "bfloat16": 0.01}
"""Mean absolute difference of log-probabilities between sampler and trainer, by the dtype of products."""


@cache
def scorer(model: jaxft.Model) -> Callable[[Any, Any], Any]:
    """The function `(params, tokens) -> logprobs`."""
    return jax.jit(lambda params, tokens: jaxft.token_logprobs(model, params, tokens).logprobs)


def run_scores(workload: Workload) -> Measured:
    """Tokens per second."""
    shapes, score, tokens = workload.shapes, scorer(workload.model), workload.training_batch().tokens
    jobs = {"score": lambda number: jax.block_until_ready(score(workload.params, tokens))}
    scored_tokens = shapes.row_tokens - 1
    line = Line(
        name=f"{shapes.rows} rows of {shapes.row_tokens} tokens, all scored",
        amount=shapes.rows * shapes.row_tokens,
        seconds=in_turn(jobs, workload.repeats)["score"],
        phases=[roofline.score(workload.config, shapes.rows, shapes.row_tokens, scored_tokens, workload.itemsize)],
        shape={"rows": shapes.rows, "row_tokens": shapes.row_tokens},
    )
    return Measured(lines=[line])


def run(workload: Workload) -> Measured:
    """Tokens per second. `generate` and the engine must agree with the trainer."""
    measured, score = run_scores(workload), scorer(workload.model)
    for name, rows, recorded in (("generate", *_generated(workload)), ("engine", *_served(workload))):
        difference = np.abs(np.asarray(score(workload.params, rows)) - recorded)[recorded != 0]
        measured.figures[f"most_difference_nats, {name}"] = float(difference.max())
        measured.checks.append(
            Check(
                name=f"mean difference of log-probabilities, {name} to trainer, nats",
                value=float(difference.mean()),
                relation="at most",
                wanted=MOST_DIFFERENCE_NATS[workload.dtype],
            )
        )
    return measured


def _generated(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Rows from `generate`, and the log-probabilities that it recorded, 0 on prompts."""
    rollout = generate(workload, workload.params, _prompts(workload), 0)
    return np.asarray(rollout.tokens), np.asarray(rollout.sampler_logprobs)


def _served(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """The same from the engine."""
    shapes = workload.shapes
    width = shapes.prompt_tokens + shapes.new_tokens
    prompts = _prompts(workload) * shapes.generations
    with workload.policy(slots=shapes.slots, max_context_tokens=width) as policy:
        completions = serve(policy, make_requests(prompts, [shapes.new_tokens] * len(prompts)))
    tokens, recorded = np.zeros((len(prompts), width), np.int32), np.zeros((len(prompts), width), np.float32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens[row] = prompt + completion.token_ids
        recorded[row, len(prompt) :] = completion.sampler_logprobs
    return tokens, recorded


def _prompts(workload: Workload) -> list[list[int]]:
    return workload.prompts(workload.shapes.prompts, workload.shapes.prompt_tokens, "agreement")
