"""jaxft's side of a comparison, through its public functions, in the environment of the caller.

    python benchmarks/peers/jaxft_side.py work.json result.json

`variant` in the work file chooses between the two ways to serve requests of different lengths: `engine`, which refills
a slot as soon as its request has ended, and `plain`, which decodes a batch until its last row has.
"""

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from protocol import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    Work,
    check_counts,
    count_rows,
    even_share,
    main,
    make_prompts,
    make_training_rows,
    measure,
)

import jaxft
from jaxft.bench.plain import sample_batches
from jaxft.rollout.requests import Request

MICROBATCH_ROWS = 8
"""Rows of a forward and backward pass; `compare.py --microbatch_rows` sets it."""


def make_model(work: Work) -> tuple[jaxft.Model, dict[str, Any]]:
    """The model and random weights, float32."""
    return jaxft.init_model(jaxft.DecoderConfig(**work["shape"], qk_norm=True), jax.random.key(work["seed"]))


def rollout(work: Work) -> dict[str, Any]:
    """`generate` without stop ids."""
    model, params = make_model(work)
    prompts = make_prompts(work)

    def run(repeat: int) -> None:
        sampled = jax.device_get(_generate(model, params, prompts, repeat, work))
        check_counts(sampled.completion_mask.sum(axis=1).tolist(), [work["new_tokens"]] * count_rows(work))

    return measure(work, run) | {"notes": ["returns the log-probability of every token"]}


def _generate(model: jaxft.Model, params: Any, prompts: list[list[int]], repeat: int, work: Work) -> jaxft.Rollout:
    options = {"num_generations": work["generations"], "max_new_tokens": work["new_tokens"]}
    return jaxft.generate(model, params, prompts, jax.random.key(repeat), **options)


def heavy_tailed(work: Work) -> dict[str, Any]:
    """Requests of different lengths, at most `slots` at once."""
    return {"engine": _with_engine, "plain": _in_batches}[work["variant"]](work)


def _with_engine(work: Work) -> dict[str, Any]:
    model, params = make_model(work)
    policy = jaxft.Policy(
        model,
        params,
        jaxft.load_tokenizer(),
        stop_ids=(),
        slots=work["slots"],
        max_context_tokens=work["prompt_tokens"] + max(work["answer_tokens"]),
    )
    prompts = make_prompts(work)

    async def serve(repeat: int) -> None:
        asked = zip(prompts, work["answer_tokens"], strict=True)
        requests = [Request(tuple(prompt), (repeat, n), tokens) for n, (prompt, tokens) in enumerate(asked)]
        completions = await asyncio.gather(*map(policy.engine.submit, requests))
        check_counts([len(completion.token_ids) for completion in completions], work["answer_tokens"])

    asyncio.run(policy.engine.warm_up())
    try:
        measured = measure(work, lambda repeat: asyncio.run(serve(repeat)))
    finally:
        policy.close()
    notes = ["all requests are submitted at once to an engine of that many slots", "returns log-probabilities"]
    return measured | {"notes": notes}


def _in_batches(work: Work) -> dict[str, Any]:
    model, params = make_model(work)
    layout = jax.jit(model.decode_layout)(params)
    prompts, answers = np.array(make_prompts(work), np.int32), np.array(work["answer_tokens"], np.int32)

    def run(repeat: int) -> None:
        sampled = sample_batches(model, layout, prompts, 1, answers, work["slots"], int(answers.max()), repeat)
        check_counts([sampled], [int(answers.sum())])

    notes = ["batches in order; a batch decodes until its last row has ended", "the cache has room for the longest"]
    return measure(work, run) | {"notes": [*notes, "returns log-probabilities"]}


def _make_update(work: Work, model: jaxft.Model, params: Any) -> tuple[Any, Any]:
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    rows = work["microbatch_rows"] or MICROBATCH_ROWS
    update = jaxft.make_update(
        model, jaxft.grpo_loss, optimizer, max_grad_norm=MAX_GRAD_NORM, microbatch_rows=min(rows, count_rows(work))
    )
    return jaxft.init_train_state(params, optimizer), update


def update(work: Work) -> dict[str, Any]:
    """One optimiser step on a given batch."""
    model, params = make_model(work)
    before = jax.tree.map(np.asarray, jax.device_get(params))
    state, step = _make_update(work, model, params)
    tokens, advantages = make_training_rows(work)
    is_completion = np.broadcast_to(np.arange(tokens.shape[1]) >= work["prompt_tokens"], tokens.shape)
    batch = jaxft.Batch(jnp.array(tokens, jnp.int32), jnp.array(is_completion), jnp.array(advantages))
    metrics: dict[str, Any] = {}

    def run(repeat: int) -> None:
        nonlocal state, metrics
        state, metrics = jax.block_until_ready(step(state, batch))

    measured = measure(work, run)
    changed = jax.tree.map(lambda old, new: bool((old != np.asarray(new)).any()), before, state.params)
    if not all(jax.tree.leaves(changed)) or float(metrics["applied_updates"]) != 1.0:
        raise RuntimeError("parameters did not change")
    return measured | {"metrics": sorted(metrics), "notes": [_rows_note(work)]}


def epoch(work: Work) -> dict[str, Any]:
    """Rollout, reward and update, as in `experiments/import_style.py`."""
    model, params = make_model(work)
    state, step = _make_update(work, model, params)
    prompts = make_prompts(work)
    group_ids = np.repeat(np.arange(work["prompts"]), work["generations"])
    metrics: dict[str, Any] = {}

    def run(repeat: int) -> None:
        nonlocal state, metrics
        sampled = _generate(model, state.params, prompts, repeat, work)
        tokens, masks = np.asarray(sampled.tokens), np.asarray(sampled.completion_mask)
        completions = [row[mask].tolist() for row, mask in zip(tokens, masks, strict=True)]
        check_counts([len(row) for row in completions], [work["new_tokens"]] * count_rows(work))
        advantages = jaxft.group_advantages(np.array(even_share(completions)), group_ids).astype(np.float32)
        batch = jaxft.Batch(
            sampled.tokens, sampled.completion_mask, advantages, sampler_logprobs=sampled.sampler_logprobs
        )
        state, metrics = jax.block_until_ready(step(state, batch))

    notes = [_rows_note(work), "the reward reads ids; texts are not decoded", "compares sampler and trainer"]
    return measure(work, run) | {"metrics": sorted(metrics), "notes": notes}


def _rows_note(work: Work) -> str:
    return f"{min(work['microbatch_rows'] or MICROBATCH_ROWS, count_rows(work))} rows at a time"


if __name__ == "__main__":
    cases = {"rollout": rollout, "heavy_tailed": heavy_tailed, "update": update, "epoch": epoch}
    main("jaxft", ("jaxft", "jax", "jaxlib", "optax", "numpy"), cases)
