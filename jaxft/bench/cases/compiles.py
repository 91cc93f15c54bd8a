"""Seconds of compiling, cold and from the persistent cache, and how often epochs of changing shapes compile again."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

import jaxft
from jaxft.bench.cases.update import OPTIMIZER, grpo_update, rows_at_once
from jaxft.bench.cases.varied import varied_epochs
from jaxft.bench.results import CaseResult
from jaxft.bench.setting import Setting, training_batch
from jaxft.core.update import init_train_state

BACKEND_EVENT = "/jax/core/compile/backend_compile_duration"
"""Its seconds are those of the compiler, or of the persistent cache when that has the program."""

CACHE_OPTIONS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def run(setting: Setting) -> CaseResult:
    """Seconds and number of compilations by program; compilations after warm-up."""
    result = setting.result()
    with tempfile.TemporaryDirectory() as folder, _cache_in(folder):
        for state in ("cold", "cached"):
            for name, program in programs(setting).items():
                jax.clear_caches()
                with _compilations() as durations:
                    started = time.perf_counter()
                    jax.block_until_ready(program())
                    wall = time.perf_counter() - started
                result.figures |= {
                    f"{name}, {state}: compile_seconds": sum(durations),
                    f"{name}, {state}: first_call_seconds": wall,
                    f"{name}, {state}: programs": len(durations),
                }
    jax.clear_caches()
    result.figures |= (found := varied_epochs(setting)).figures
    result.checks += found.checks
    return result


def programs(setting: Setting) -> dict[str, Callable[[], Any]]:
    """The jitted functions of a run, each ready to be called for the first time; work is as small as it may be."""
    shapes = setting.shapes
    prompts = setting.prompts(2, shapes.prompt_tokens)
    batch = training_batch(setting)

    def update() -> Any:
        state = init_train_state(setting.fresh_params(), OPTIMIZER)
        return grpo_update(setting.model, rows_at_once(setting))(state, batch)

    def engine() -> None:
        with setting.policy(slots=shapes.slots, max_context_tokens=shapes.prompt_tokens + shapes.new_tokens) as policy:
            asyncio.run(policy.engine.warm_up())

    generate = partial(jaxft.generate, setting.model, setting.params, prompts, max_new_tokens=2)
    score = jax.jit(lambda params, tokens: jaxft.token_logprobs(setting.model, params, tokens).logprobs)
    return {
        "generate": lambda: generate(jax.random.key(0)),
        "engine": engine,
        "logprobs": lambda: score(setting.params, batch.tokens),
        "update": update,
    }


@contextlib.contextmanager
def _cache_in(folder: str) -> Iterator[None]:
    """Keeps compiled programs in this folder alone; afterwards everything is as before."""
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
    """Seconds of every compilation of a block."""
    durations: list[float] = []

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        if event == BACKEND_EVENT:
            durations.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield durations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
