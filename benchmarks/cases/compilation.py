"""Compilation: seconds cold and from the persistent cache, and the programs that epochs of changing shapes add.

The varied epochs run on a live policy with the batching of the shipped trainer adapter, after a warm-up such as
`--strict-compile` makes.
"""

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

import jaxft
from cases.update import OPTIMIZER, grpo_update, microbatch_rows
from jaxft.rollout.calls import Completion
from jaxft.rollout.requests import Request
from jaxft.training.batch import CollectedRewards, Row
from jaxft.training.config import LossConfig
from jaxft.training.learner import Learner
from jaxft.training.optimizer_config import OptimizerConfig
from records import Check, Measured
from timing import seconds_of
from workload import Workload, make_requests, serve

BACKEND_EVENT = "/jax/core/compile/backend_compile_duration"
"""Event whose seconds are those of the compiler, or of the persistent cache when that has the program."""

CACHE_OPTIONS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def run(workload: Workload) -> Measured:
    """Seconds and number of compilations by program. Epochs after the warm-up must not compile."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, _cache_in(folder):
        for state in ("cold", "cached"):
            for name, program in _programs(workload).items():
                jax.clear_caches()
                with _compilations() as durations:
                    wall = seconds_of(partial(_run, program))
                figures |= {
                    f"{name}, {state}: compile_seconds": sum(durations),
                    f"{name}, {state}: first_call_seconds": wall,
                    f"{name}, {state}: programs": len(durations),
                }
    jax.clear_caches()
    varied = _varied_epochs(workload)
    return Measured(figures=figures | varied.figures, checks=varied.checks)


def _run(program: Callable[[], Any]) -> None:
    jax.block_until_ready(program())


def _programs(workload: Workload) -> dict[str, Callable[[], Any]]:
    """The jitted functions of a run, each ready for its first call, with as little work as possible."""
    shapes = workload.shapes
    prompts = workload.prompts(2, shapes.prompt_tokens)
    batch = workload.training_batch()

    def update() -> Any:
        state = jaxft.init_train_state(workload.fresh_params(), OPTIMIZER)
        rows = microbatch_rows(shapes.rows, shapes.row_tokens, shapes.microbatch_tokens)
        return grpo_update(workload.model, rows)(state, batch)

    def engine() -> None:
        context = shapes.prompt_tokens + shapes.new_tokens
        with workload.policy(slots=shapes.slots, max_context_tokens=context) as policy:
            asyncio.run(policy.engine.warm_up())

    score = jax.jit(lambda params, tokens: jaxft.token_logprobs(workload.model, params, tokens).logprobs)
    return {
        "generate": lambda: jaxft.generate(
            workload.model, workload.params, prompts, jax.random.key(0), max_new_tokens=2
        ),
        "engine": engine,
        "logprobs": lambda: score(workload.params, batch.tokens),
        "update": update,
    }


@contextlib.contextmanager
def _cache_in(folder: str) -> Iterator[None]:
    """Keep compiled programs in this folder alone; the options are as before at the end of the block."""
    options = {"jax_compilation_cache_dir": folder, **CACHE_OPTIONS}
    before = {name: jax.config.values[name] for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # it looks for its folder once
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def _compilations() -> Iterator[list[float]]:
    """Collect the seconds of every compilation of a block."""
    durations: list[float] = []

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        if event == BACKEND_EVENT:
            durations.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield durations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _varied_epochs(workload: Workload) -> Measured:
    """Compilations of the warm-up and of the epochs after it.

    Temperature, top-p, prompt lengths, answer lengths and the number of requests change from epoch to epoch.
    """
    shapes = workload.shapes
    context = shapes.prompt_tokens + shapes.new_tokens
    optimizer = OptimizerConfig(learning_rate=1e-6)
    learner = Learner(workload.model, LossConfig(), optimizer, microbatch_tokens=shapes.microbatch_tokens)
    with workload.policy(slots=shapes.slots, max_context_tokens=context) as policy:
        asyncio.run(policy.engine.warm_up())
        by_engine = policy.compiles.count
        asyncio.run(policy.update(lambda params: (learner.warm_up(params, context), None)))
        compiled = {"warm-up": np.array([by_engine, policy.compiles.count - by_engine])}
        counts = [_varied_epoch(workload, policy, learner, number) for number in range(shapes.varied_epochs)]
        compiled["afterwards"] = np.array(counts).sum(axis=0)
    figures = {
        f"{program}, {when}: compilations": float(count)
        for when, counts in compiled.items()
        for program, count in zip(("engine", "update"), counts, strict=True)
    }
    name = f"compilations in {shapes.varied_epochs} varied epochs after warm-up"
    checks = [
        Check(name=f"{name}, {program}", value=float(count), relation="exactly", wanted=0)
        for program, count in zip(("engine", "update"), compiled["afterwards"], strict=True)
    ]
    return Measured(figures=figures, checks=checks)


def _varied_epoch(workload: Workload, policy: jaxft.Policy, learner: Learner, number: int) -> tuple[int, int]:
    """Compilations of the engine and of the update in one epoch."""
    requests = _varied_requests(workload, random.Random(f"epoch {number}"), number)
    before = policy.compiles.count
    completions = serve(policy, requests)
    between = policy.compiles.count
    rows = [Row(_sequence(*pair), index) for index, pair in enumerate(zip(requests, completions, strict=True))]
    rewards = np.arange(len(rows), dtype=np.float64) % 2
    collected = CollectedRewards(rewards, np.arange(len(rows)) // 2, None, None, {})
    asyncio.run(policy.update(lambda params: learner.learn(rows, collected, params)))
    return between - before, policy.compiles.count - between


def _varied_requests(workload: Workload, rng: random.Random, number: int) -> list[Request]:
    shapes = workload.shapes
    count = 2 * rng.randint(shapes.varied_requests // 4, shapes.varied_requests // 2)
    prompts = [
        workload.prompts(1, rng.randint(shapes.prompt_tokens // 2, shapes.prompt_tokens), (number, index))[0]
        for index in range(count)
    ]
    most = rng.randint(max(1, shapes.new_tokens // 4), shapes.new_tokens)
    answers = [rng.randint(max(1, most // 2), most) for _ in prompts]
    sampling = {"temperature": rng.uniform(0.7, 1.3), "top_p": rng.uniform(0.8, 1.0)}
    return make_requests(prompts, answers, number, **sampling)


def _sequence(request: Request, completion: Completion) -> jaxft.TokenSequence:
    """A completion as a training row."""
    prompt, answer = len(request.prompt_ids), len(completion.token_ids)
    return jaxft.TokenSequence(
        tokens=[*request.prompt_ids, *completion.token_ids],
        completion_mask=[False] * prompt + [True] * answer,
        sampler_logprobs=[0.0] * prompt + completion.sampler_logprobs,
        behavior_logprobs=[0.0] * prompt + completion.behavior_logprobs,
        temperatures=[0.0] * prompt + [request.temperature] * answer,
        policy_versions=[-1] * prompt + [completion.policy_version] * answer,
    )
