"""Rollouts of answers that differ in length, where slots are refilled: what the engine is there for."""

import asyncio
import statistics

import jax
import numpy as np

from jaxft.bench import work
from jaxft.bench.plain import sample_batches
from jaxft.bench.results import Check, Line
from jaxft.bench.setting import Setting, requests_of, serve
from jaxft.bench.shapes import even_lengths, heavy_tailed_lengths
from jaxft.bench.timing import in_turn, live_device_bytes, measuring_peak

LEAST_SPEEDUP = 1.8
"""Of the engine over the plain loop at as many rows."""

LEAST_AT_FOUR_TIMES = 0.9
"""Tokens per second with four times the requests, as a share of those with the requests once."""


def heavy_tailed(setting: Setting) -> tuple[list[Line], Check]:
    """The engine against the plain loop on the same requests: groups that share a prompt, log-normal lengths."""
    shapes, rows = setting.shapes, setting.shapes.slots
    lengths = np.array(heavy_tailed_lengths(shapes.requests, shapes.median_tokens, shapes.most_tokens))
    distinct = shapes.requests // shapes.generations
    params = jax.jit(setting.model.decode_layout)(setting.params)

    def answers(number: int) -> np.ndarray:  # to warm up, one long answer reaches every program
        return lengths if number else np.where(np.arange(len(lengths)) == 0, shapes.most_tokens, 1)

    def plain(number: int) -> int:
        prompts = np.array(setting.prompts(distinct, shapes.prompt_tokens, number), np.int32)
        counts = shapes.generations, answers(number), rows, shapes.most_tokens
        return sample_batches(setting.model, params, prompts, *counts, seed=number)

    with setting.policy(slots=rows, max_context_tokens=shapes.prompt_tokens + shapes.most_tokens) as policy:
        asyncio.run(policy.engine.warm_up())

        def engine(number: int) -> int:
            prompts = setting.prompts(distinct, shapes.prompt_tokens, number)
            repeated = [prompt for prompt in prompts for _ in range(shapes.generations)]
            return len(serve(policy, requests_of(repeated, answers(number).tolist(), number)))

        jobs = {"heavy-tailed, engine": engine, "heavy-tailed, plain loop": plain}
        seconds = in_turn(jobs, setting.repeats)
    phases = [
        work.prefill(setting.config, [shapes.prompt_tokens] * distinct, setting.itemsize),
        work.decode(setting.config, shapes.prompt_tokens, lengths.tolist(), rows, setting.itemsize),
    ]
    shape = {"requests": shapes.requests, "prompts": distinct, "slots": rows, "prompt_tokens": shapes.prompt_tokens}
    shape |= {"median_tokens": int(np.median(lengths)), "longest_tokens": int(lengths.max())}
    lines = [
        Line(name=name, amount=int(lengths.sum()), seconds=taken, phases=phases, shape=shape)
        for name, taken in seconds.items()
    ]
    name = "heavy-tailed: tokens/s of the engine / of the plain loop"
    return lines, Check(name=name, value=_ratio(*lines), relation="at least", wanted=LEAST_SPEEDUP)


def grown(setting: Setting) -> tuple[list[Line], Check]:
    """Requests enough to fill the slots several times, and four times as many, with the peak memory of both."""
    shapes, rows, lines = setting.shapes, setting.shapes.slots, []
    with setting.policy(slots=rows, max_context_tokens=shapes.prompt_tokens + 2 * shapes.growth_tokens) as policy:
        jobs, counts = {}, (shapes.growth_requests, 4 * shapes.growth_requests)
        answers = {count: even_lengths(count, shapes.growth_tokens) for count in counts}

        def ask(count: int, number: int) -> int:
            prompts = setting.prompts(count, shapes.prompt_tokens, (count, number))
            return len(serve(policy, requests_of(prompts, answers[count], number)))

        for count in counts:
            jobs[count] = lambda number, count=count: ask(count, number)
        seconds = in_turn({str(count): job for count, job in jobs.items()}, setting.repeats)
        for count in counts:
            with measuring_peak() as peak:
                ask(count, setting.repeats + 1)
            figures = peak.figures() | {"live_device_bytes": float(live_device_bytes())}
            phases = [
                work.prefill(setting.config, [shapes.prompt_tokens] * count, setting.itemsize),
                work.decode(setting.config, shapes.prompt_tokens, answers[count], rows, setting.itemsize),
            ]
            lines.append(
                Line(
                    name=f"{count} requests of {shapes.growth_tokens} tokens on average",
                    amount=sum(answers[count]),
                    seconds=seconds[str(count)],
                    phases=phases,
                    shape={"requests": count, "slots": rows, "prompt_tokens": shapes.prompt_tokens},
                    figures=figures,
                )
            )
    name = "tokens/s of four times the requests / of the requests once"
    return lines, Check(name=name, value=_ratio(*reversed(lines)), relation="at least", wanted=LEAST_AT_FOUR_TIMES)


def _ratio(line: Line, other: Line) -> float:
    first, second = (each.amount / statistics.median(each.seconds) for each in (line, other))
    return first / second
