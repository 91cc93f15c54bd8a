"""Rollouts: answers of one length, heavy-tailed lengths beside the lockstep baseline, and four times the requests."""

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

import jaxft
import roofline
from jaxft.core.types import Params
from lockstep import sample_batches
from machine import live_device_bytes, measuring_peak
from records import Check, Line, Measured
from shapes import even_lengths, heavy_tailed_lengths
from timing import in_turn
from workload import Workload, make_requests, serve

LEAST_SPEEDUP = 1.8
"""Tokens per second of the engine over those of the lockstep baseline with as many rows."""

LEAST_AT_FOUR_TIMES = 0.9
"""Tokens per second with four times the requests over those with the requests once."""

SORTS = ("sort", "top_k", "approx_top_k")


def run(workload: Workload) -> Measured:
    """Sampled tokens per second of all kinds of rollout. Sampling must not sort the vocabulary."""
    uniform = _uniform(workload)
    sorts = sum(width >= workload.config.vocab_size for width in _sorts(workload))
    no_sorts = Check(name="sorts over the vocabulary", value=sorts, relation="exactly", wanted=0)
    heavy_tailed, speedup = _heavy_tailed(workload)
    grown, at_four_times = _grown(workload)
    return Measured(lines=[*uniform, *heavy_tailed, *grown], checks=[no_sorts, speedup, at_four_times])


def generate(workload: Workload, params: Params, prompts: Sequence[Sequence[int]], number: int) -> jaxft.Rollout:
    """Sample the generations of each prompt with the core. No stop id, so every row has all its new tokens."""
    shapes = workload.shapes
    return jax.block_until_ready(
        jaxft.generate(
            workload.model,
            params,
            prompts,
            jax.random.key(number),
            num_generations=shapes.generations,
            max_new_tokens=shapes.new_tokens,
        )
    )


def uniform_phases(workload: Workload) -> list[roofline.Phase]:
    """The work of a rollout of one length: every prompt is prefilled once, and all new tokens are sampled."""
    shapes, itemsize = workload.shapes, workload.itemsize
    rows = shapes.prompts * shapes.generations
    return [
        roofline.prefill(workload.config, [shapes.prompt_tokens] * shapes.prompts, itemsize),
        roofline.decode(workload.config, shapes.prompt_tokens, [shapes.new_tokens] * rows, rows, itemsize),
    ]


def _uniform(workload: Workload) -> list[Line]:
    """Serve new prompts in every round; the engine gets all requests at once."""
    shapes = workload.shapes
    rows = shapes.prompts * shapes.generations
    with workload.policy(slots=rows, max_context_tokens=shapes.prompt_tokens + shapes.new_tokens) as policy:

        def with_generate(number: int) -> None:
            generate(workload, workload.params, workload.prompts(shapes.prompts, shapes.prompt_tokens, number), number)

        def with_engine(number: int) -> None:
            prompts = _for_each_generation(workload.prompts(shapes.prompts, shapes.prompt_tokens, number), workload)
            serve(policy, make_requests(prompts, [shapes.new_tokens] * rows, number))

        jobs = {"uniform, generate": with_generate, "uniform, engine": with_engine}
        seconds = in_turn(jobs, workload.repeats)
    phases = uniform_phases(workload)
    shape = {"prompts": shapes.prompts, "generations": shapes.generations}
    shape |= {"prompt_tokens": shapes.prompt_tokens, "new_tokens": shapes.new_tokens}
    return [
        Line(name=name, amount=rows * shapes.new_tokens, seconds=taken, phases=phases, shape=shape)
        for name, taken in seconds.items()
    ]


def _heavy_tailed(workload: Workload) -> tuple[list[Line], Check]:
    """The engine beside the lockstep baseline on the same requests: log-normal lengths, generations share a prompt."""
    shapes, rows = workload.shapes, workload.shapes.slots
    lengths = np.array(heavy_tailed_lengths(shapes.requests, shapes.median_tokens, shapes.most_tokens))
    distinct = shapes.requests // shapes.generations
    params = workload.decode_params()

    def answers(number: int) -> np.ndarray:  # to warm up, one long answer reaches every program
        return lengths if number else np.where(np.arange(len(lengths)) == 0, shapes.most_tokens, 1)

    def lockstep(number: int) -> None:
        prompts = np.array(workload.prompts(distinct, shapes.prompt_tokens, number), np.int32)
        counts = shapes.generations, answers(number), rows, shapes.most_tokens
        sample_batches(workload.model, params, prompts, *counts, seed=number)

    with workload.policy(slots=rows, max_context_tokens=shapes.prompt_tokens + shapes.most_tokens) as policy:
        asyncio.run(policy.engine.warm_up())

        def engine(number: int) -> None:
            prompts = _for_each_generation(workload.prompts(distinct, shapes.prompt_tokens, number), workload)
            serve(policy, make_requests(prompts, answers(number).tolist(), number))

        jobs = {"heavy-tailed, engine": engine, "heavy-tailed, lockstep": lockstep}
        seconds = in_turn(jobs, workload.repeats)
    phases = [
        roofline.prefill(workload.config, [shapes.prompt_tokens] * distinct, workload.itemsize),
        roofline.decode(workload.config, shapes.prompt_tokens, lengths.tolist(), rows, workload.itemsize),
    ]
    shape = {"requests": shapes.requests, "prompts": distinct, "slots": rows, "prompt_tokens": shapes.prompt_tokens}
    shape |= {"median_tokens": int(np.median(lengths)), "longest_tokens": int(lengths.max())}
    lines = [
        Line(name=name, amount=int(lengths.sum()), seconds=taken, phases=phases, shape=shape)
        for name, taken in seconds.items()
    ]
    name = "heavy-tailed: tokens/s of the engine / of lockstep"
    return lines, Check(name=name, value=_speed_ratio(*lines), relation="at least", wanted=LEAST_SPEEDUP)


def _grown(workload: Workload) -> tuple[list[Line], Check]:
    """Requests that fill the slots several times, and four times as many, with the peak memory of both."""
    shapes, rows, lines = workload.shapes, workload.shapes.slots, []
    counts = (shapes.growth_requests, 4 * shapes.growth_requests)
    answers = {count: even_lengths(count, shapes.growth_tokens) for count in counts}
    with workload.policy(slots=rows, max_context_tokens=shapes.prompt_tokens + 2 * shapes.growth_tokens) as policy:

        def ask(count: int, number: int) -> None:
            prompts = workload.prompts(count, shapes.prompt_tokens, (count, number))
            serve(policy, make_requests(prompts, answers[count], number))

        jobs = {str(count): lambda number, count=count: ask(count, number) for count in counts}
        seconds = in_turn(jobs, workload.repeats)
        for count in counts:
            with measuring_peak() as peak:
                ask(count, workload.repeats + 1)
            phases = [
                roofline.prefill(workload.config, [shapes.prompt_tokens] * count, workload.itemsize),
                roofline.decode(workload.config, shapes.prompt_tokens, answers[count], rows, workload.itemsize),
            ]
            lines.append(
                Line(
                    name=f"{count} requests of {shapes.growth_tokens} tokens on average",
                    amount=sum(answers[count]),
                    seconds=seconds[str(count)],
                    phases=phases,
                    shape={"requests": count, "slots": rows, "prompt_tokens": shapes.prompt_tokens},
                    figures=peak | {"live_device_bytes": float(live_device_bytes())},
                )
            )
    name, value = "tokens/s of four times the requests / of the requests once", _speed_ratio(*reversed(lines))
    return lines, Check(name=name, value=value, relation="at least", wanted=LEAST_AT_FOUR_TIMES)


def _for_each_generation(prompts: list[list[int]], workload: Workload) -> list[list[int]]:
    return [prompt for prompt in prompts for _ in range(workload.shapes.generations)]


def _speed_ratio(line: Line, other: Line) -> float:
    first, second = (each.amount / statistics.median(each.seconds) for each in (line, other))
    return first / second


def _sorts(workload: Workload) -> list[int]:
    """Widths of all sorts of a rollout that filters by top-k, top-p and min-p, for which sorting is the common way."""
    prompts = workload.prompts(1, workload.shapes.prompt_tokens)

    def sample(params: dict, key: jax.Array) -> jaxft.Rollout:
        return jaxft.generate(workload.model, params, prompts, key, max_new_tokens=2, top_k=50, top_p=0.9, min_p=0.01)

    return sorted_widths(jax.make_jaxpr(sample)(workload.params, jax.random.key(0)).jaxpr)


def sorted_widths(jaxpr: core.Jaxpr) -> list[int]:
    """Number of elements that each sort of a traced function orders, those of called functions included.

    >>> sorted_widths(jax.make_jaxpr(jax.jit(lambda x: jax.lax.top_k(x, 2)))(jax.numpy.ones((3, 7))).jaxpr)
    [7]
    """
    widths = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in SORTS:
            axis = equation.params["dimension"] if equation.primitive.name == "sort" else -1
            operand: Any = equation.invars[0].aval
            widths.append(operand.shape[axis])
        for inner in _jaxprs_in(list(equation.params.values())):
            widths += sorted_widths(inner)
    return widths


def _jaxprs_in(values: Any) -> Iterator[core.Jaxpr]:
    if isinstance(values, list | tuple):
        for value in values:
            yield from _jaxprs_in(value)
    elif isinstance(values, core.ClosedJaxpr):
        yield values.jaxpr
    elif isinstance(values, core.Jaxpr):
        yield values
