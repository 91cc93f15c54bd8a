"""Scoring given tokens with the trainer's forward pass, and how far the sampler's own figures are from it."""

import jax
import numpy as np

import jaxft
from jaxft.bench import work
from jaxft.bench.results import CaseResult, Check, Line
from jaxft.bench.setting import Setting, requests_of, serve, training_batch
from jaxft.bench.timing import in_turn

MOST_DIFFERENCE_NATS = {"float32": 1e-5, "bfloat16": 0.01}
"""Mean absolute difference of log-probabilities between sampler and trainer, by the dtype that is computed in."""


def run(setting: Setting) -> CaseResult:
    """Tokens per second, and the mean difference of `generate` and the engine to the trainer."""
    result, shapes = setting.result(), setting.shapes
    tokens = training_batch(setting).tokens
    score = jax.jit(lambda params, tokens: jaxft.token_logprobs(setting.model, params, tokens).logprobs)
    seconds = in_turn({"score": lambda number: score(setting.params, tokens)}, setting.repeats)["score"]
    scored = shapes.row_tokens - 1
    result.lines.append(
        Line(
            name=f"{shapes.rows} rows of {shapes.row_tokens} tokens, all scored",
            amount=shapes.rows * shapes.row_tokens,
            seconds=seconds,
            phases=[work.score(setting.config, shapes.rows, shapes.row_tokens, scored, setting.itemsize)],
            shape={"rows": shapes.rows, "row_tokens": shapes.row_tokens},
        )
    )
    for name, rows, recorded in (("generate", *_generated(setting)), ("engine", *_served(setting))):
        difference = np.abs(np.asarray(score(setting.params, rows)) - recorded)[recorded != 0]
        result.figures[f"most_difference_nats, {name}"] = float(difference.max())
        result.checks.append(
            Check(
                name=f"mean difference of log-probabilities, {name} to trainer, nats",
                value=float(difference.mean()),
                relation="at most",
                wanted=MOST_DIFFERENCE_NATS[setting.job.dtype],
            )
        )
    return result


def _generated(setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Rows from `generate`, and the log-probabilities that it recorded, 0 on prompts."""
    shapes = setting.shapes
    rollout = jaxft.generate(
        setting.model,
        setting.params,
        setting.prompts(shapes.prompts, shapes.prompt_tokens, "agreement"),
        jax.random.key(0),
        num_generations=shapes.generations,
        max_new_tokens=shapes.new_tokens,
    )
    return np.asarray(rollout.tokens), np.asarray(rollout.sampler_logprobs)


def _served(setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """The same from the engine."""
    shapes = setting.shapes
    width = shapes.prompt_tokens + shapes.new_tokens
    prompts = setting.prompts(shapes.prompts, shapes.prompt_tokens, "agreement") * shapes.generations
    with setting.policy(slots=shapes.slots, max_context_tokens=width) as policy:
        completions = serve(policy, requests_of(prompts, [shapes.new_tokens] * len(prompts)))
    tokens, recorded = np.zeros((len(prompts), width), np.int32), np.zeros((len(prompts), width), np.float32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens[row] = prompt + completion.token_ids
        recorded[row, len(prompt) :] = completion.sampler_logprobs
    return tokens, recorded
