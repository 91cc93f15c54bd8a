"""Requests that the engine serves all at once: of one size, and of mixed sizes; and its first calls after the warm-up.

The first are those of a public figure for vLLM 0.19 (`vllm bench serve` with Qwen3-0.6B on one H100: 500 requests of
512 tokens in and 128 out, 94.9 requests/s), the second those of nano-vllm's `bench.py`, which counts sampled tokens
alone. Seconds go from the first request to the last answer. The engine is called without a server.
"""

import asyncio
import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import jax

import roofline
from cases.update import slowest_share
from jaxft.core.cache import PAGE_TOKENS, pages_for
from jaxft.models.ceilings import kv_bytes
from jaxft.rollout import model_runner
from records import Check, Line, Measured
from shapes import mixed_requests
from timing import in_turn
from workload import Workload, make_requests, serve

LEAST_REQUESTS = 95.0
"""Requests of 512 + 128 tokens per second with Qwen3-0.6B on an H100."""

MOST_FIRST_CALL = 3.0
"""Time of the slowest call of a program after the warm-up, over that of the median one."""

NOTICED_SECONDS = 0.02
"""Time of a call from which on it counts as slow: shorter ones vary with the host."""

KEPT_BYTES = 6 * 2**30
"""Memory that is left beside the pages, for temporaries and the decoding weights."""


def run(workload: Workload) -> Measured:
    """Requests per second and sampled tokens per second. Nothing may compile after the warm-up."""
    shapes, measured = workload.shapes, Measured()
    count, prompt, new = shapes.served_requests, shapes.served_prompt_tokens, shapes.served_new_tokens
    alike = _served(workload, workload.prompts(count, prompt, "served"), [new] * count, "requests", measured)
    if workload.preset == "qwen3-0.6b" and jax.default_backend() == "gpu":
        value = count / statistics.median(alike.seconds)
        measured.checks.append(
            Check(name="requests per second", value=value, relation="at least", wanted=LEAST_REQUESTS)
        )
    prompts, answers = mixed_requests(shapes.mixed_requests, *shapes.mixed_tokens)
    vocabulary = workload.config.vocab_size
    prompts = [[token % vocabulary for token in each] for each in prompts]
    _served(workload, prompts, answers, "tokens", measured)
    return measured


def _served(workload: Workload, prompts: list[list[int]], answers: list[int], unit: Any, measured: Measured) -> Line:
    """Add and return the line of requests that are asked all at once, with as many slots as there is memory for."""
    totals = [len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
    slots, cache_tokens = room(workload, totals)
    with workload.policy(slots=slots, max_context_tokens=max(totals), cache_tokens=cache_tokens) as policy:
        asyncio.run(policy.engine.warm_up())
        compiled = policy.compiles.count

        def ask(number: int) -> None:
            serve(policy, make_requests(prompts, answers, number, temperature=0.6 if unit == "tokens" else 1.0))

        with timed_calls() as calls:
            ask(workload.repeats + 1)
        noticed = {name: each for name, each in calls.items() if len(each) >= 3 and max(each) >= NOTICED_SECONDS}
        shares = {program: slowest_share(each) for program, each in noticed.items()}
        seconds = in_turn({unit: ask}, workload.repeats)[unit]
        compiled = policy.compiles.count - compiled
    name = f"{len(prompts)} requests, {sum(map(len, prompts)):,} + {sum(answers):,} tokens"
    # The answers of one size are the shortest; of mixed ones, the limit is that of their mean.
    phases = [
        roofline.prefill(workload.config, [len(prompt) for prompt in prompts], workload.itemsize),
        roofline.decode(workload.config, sum(map(len, prompts)) // len(prompts), answers, slots, workload.itemsize),
    ]
    line = Line(
        name=name,
        amount=len(prompts) if unit == "requests" else sum(answers),
        unit=unit,
        seconds=seconds,
        phases=phases,
        shape={"requests": len(prompts), "slots": slots, "cache_tokens": cache_tokens},
        figures={"sampled_tokens_per_second": sum(answers) / statistics.median(seconds)}
        | {f"slowest / median call, {program}": share for program, share in shares.items()},
    )
    measured.lines.append(line)
    measured.checks.append(
        Check(name=f"{name}: compilations after the warm-up", value=compiled, relation="exactly", wanted=0)
    )
    if jax.default_backend() != "cpu":
        slowest = max(shares.values(), default=1.0)
        measured.checks.append(
            Check(name=f"{name}: slowest / median call", value=slowest, relation="at most", wanted=MOST_FIRST_CALL)
        )
    return line


def room(workload: Workload, totals: Sequence[int]) -> tuple[int, int]:
    """Return slots and tokens of the cache for requests of so many tokens each: all of them, or what memory allows."""
    pages = sum(map(pages_for, totals))
    limits = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in limits:
        return len(totals), pages * PAGE_TOKENS
    free = limits["bytes_limit"] - limits["bytes_in_use"] - KEPT_BYTES - roofline.parameter_count(workload.config) * 8
    fitting = int(free // (PAGE_TOKENS * kv_bytes(workload.config, workload.itemsize)))
    share = min(1.0, fitting / pages)
    return max(1, int(share * len(totals))), int(min(pages, fitting)) * PAGE_TOKENS


@contextlib.contextmanager
def timed_calls() -> Iterator[dict[str, list[float]]]:
    """Collect the seconds of each call of the engine's programs, which then run one after the other."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)

    def timed(name: str, program: Any) -> Any:
        def call(model: Any, *given: Any) -> Any:
            shapes = [each for each in given if isinstance(each, int)]
            kind = given[-1].tokens.shape if name == "prefill" else shapes[:2]
            started = time.perf_counter()
            result = jax.block_until_ready(program(model, *given))
            seconds[" ".join([name, *map(str, kind)])].append(time.perf_counter() - started)
            return result

        return call

    with contextlib.ExitStack() as patches:
        for name in ("prefill", "admit", "advance"):
            patches.enter_context(patch.object(model_runner, name, timed(name, getattr(model_runner, name))))
        yield seconds
