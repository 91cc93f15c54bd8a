"""jaxft's side of a comparison: the functions that the cases of `run.py` time, on the inputs of all sides.

    PYTHONPATH=benchmarks python benchmarks/peers/jaxft_side.py work.json result.json

`variant` in the work file chooses how requests of different lengths are served: `engine` refills a slot as soon as its
request has ended, `lockstep` decodes a batch until its last row has.
"""

import asyncio
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

import jaxft
from cases import epoch as epoch_case
from cases import rollout as rollout_case
from cases.update import grpo_update
from lockstep import sample_batches
from protocol import (
    LEARNING_RATE,
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
from shapes import REFERENCE
from workload import Workload, make_batch, make_requests, serve

MICROBATCH_ROWS = 8
"""Rows of a forward and backward pass; `compare.py --microbatch-rows` sets it."""

OPTIMIZER = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def make_workload(work: Work) -> Workload:
    """The model with random weights, float32, and the counts of the work."""
    config = jaxft.DecoderConfig(**work["shape"], qk_norm="heads")
    model, params = jaxft.init_model(config, jax.random.key(work["seed"]))
    counts = {name: work[name] for name in ("prompts", "generations", "prompt_tokens", "new_tokens", "slots")}
    return Workload(config, model, params, replace(REFERENCE, **counts), "float32", work["repeats"])


def rollout(work: Work) -> dict[str, Any]:
    """Sample with `generate` without stop ids."""
    workload, prompts = make_workload(work), make_prompts(work)

    def run(repeat: int) -> None:
        sampled = jax.device_get(rollout_case.generate(workload, workload.params, prompts, repeat))
        check_counts(sampled.completion_mask.sum(axis=1).tolist(), [work["new_tokens"]] * count_rows(work))

    return measure(work, run) | {"notes": ["returns the log-probability of every token"]}


def heavy_tailed(work: Work) -> dict[str, Any]:
    """Serve requests of different lengths, at most `slots` at once."""
    return {"engine": _with_engine, "lockstep": _in_lockstep}[work["variant"]](work)


def _with_engine(work: Work) -> dict[str, Any]:
    prompts, answers = make_prompts(work), work["answer_tokens"]
    context = work["prompt_tokens"] + max(answers)
    with make_workload(work).policy(slots=work["slots"], max_context_tokens=context) as policy:
        asyncio.run(policy.engine.warm_up())
        measured = measure(work, lambda repeat: serve(policy, make_requests(prompts, answers, repeat)))
    notes = ["all requests are submitted at once to an engine of that many slots", "returns log-probabilities"]
    return measured | {"notes": notes}


def _in_lockstep(work: Work) -> dict[str, Any]:
    workload = make_workload(work)
    params = workload.decode_params()
    prompts, answers = np.array(make_prompts(work), np.int32), np.array(work["answer_tokens"], np.int32)

    def run(repeat: int) -> None:
        sampled = sample_batches(workload.model, params, prompts, 1, answers, work["slots"], int(answers.max()), repeat)
        check_counts([sampled], [int(answers.sum())])

    notes = ["batches in order; a batch decodes until its last row has ended", "the cache has room for the longest"]
    return measure(work, run) | {"notes": [*notes, "returns log-probabilities"]}


def update(work: Work) -> dict[str, Any]:
    """Make one optimiser step on a given batch."""
    workload = make_workload(work)
    before = jax.tree.map(np.asarray, jax.device_get(workload.params))
    state, step = jaxft.init_train_state(workload.params, OPTIMIZER), _make_step(work, workload)
    tokens, advantages = make_training_rows(work)
    batch = make_batch(tokens, work["prompt_tokens"], advantages)
    metrics: dict[str, Any] = {}

    def run(repeat: int) -> None:
        nonlocal state, metrics
        state, metrics = jax.block_until_ready(step(state, batch))

    measured = measure(work, run)
    changed = jax.tree.map(lambda old, new: bool((old != np.asarray(new)).any()), before, state.params)
    if not all(jax.tree.leaves(changed)) or float(metrics["applied_updates"]) != 1.0:
        raise RuntimeError("parameters did not change")
    return measured | {"metrics": sorted(metrics), "notes": [f"{_microbatch_rows(work)} rows at a time"]}


def epoch(work: Work) -> dict[str, Any]:
    """Run rollout, reward and update, as in `experiments/import_style.py`."""
    workload, prompts = make_workload(work), make_prompts(work)
    state, step = jaxft.init_train_state(workload.params, OPTIMIZER), _make_step(work, workload)
    metrics: dict[str, Any] = {}

    def reward(answer: list[int]) -> float:
        return even_share([answer])[0]

    def run(repeat: int) -> None:
        nonlocal state, metrics
        state, metrics, _ = epoch_case.run_epoch(workload, state, step, prompts, reward, repeat)

    measured = measure(work, run)
    notes = ["the reward reads ids; texts are not decoded", "compares sampler and trainer"]
    return measured | {"metrics": sorted(metrics), "notes": [f"{_microbatch_rows(work)} rows at a time", *notes]}


def _make_step(work: Work, workload: Workload) -> Any:
    return grpo_update(workload.model, _microbatch_rows(work), OPTIMIZER)


def _microbatch_rows(work: Work) -> int:
    return min(work["microbatch_rows"] or MICROBATCH_ROWS, count_rows(work))


if __name__ == "__main__":
    cases = {"rollout": rollout, "heavy_tailed": heavy_tailed, "update": update, "epoch": epoch}
    main("jaxft", ("jaxft", "jax", "jaxlib", "optax", "numpy"), cases)
