"""Filling the cache: one long prompt, and a group of requests that share it against as many prompts of their own."""

import jax
import numpy as np

from jaxft.bench import work
from jaxft.bench.plain import prefilled
from jaxft.bench.results import CaseResult, Check, Line
from jaxft.bench.setting import Setting, requests_of, serve
from jaxft.bench.timing import in_turn

MOST_OF_REPEATED = 1 / 6
"""A group's time to the first tokens, as a share of that of different prompts."""


def run(setting: Setting) -> CaseResult:
    """Tokens of prompts per second; the ratio of a group to different prompts."""
    result = setting.result()
    result.lines.append(_one_prompt(setting))
    result.lines += _groups(setting)
    shared, repeated = (np.median(line.seconds) for line in result.lines[1:])
    result.checks.append(
        Check(
            name=f"time of a group of {setting.shapes.group} / time of as many prompts",
            value=shared / repeated,
            relation="at most",
            wanted=MOST_OF_REPEATED,
        )
    )
    return result


def _one_prompt(setting: Setting) -> Line:
    tokens = setting.shapes.long_prompt_tokens
    params = jax.jit(setting.model.decode_layout)(setting.params)
    prompts = np.array(setting.prompts(1, tokens), np.int32)
    jobs = {"prompt": lambda number: prefilled(setting.model, params, prompts, tokens)}
    return Line(
        name="one prompt, to its cache",
        amount=tokens,
        seconds=in_turn(jobs, setting.repeats)["prompt"],
        phases=[work.prefill(setting.config, [tokens], setting.itemsize)],
        shape={"rows": 1, "prompt_tokens": tokens},
    )


def _groups(setting: Setting) -> list[Line]:
    """Both through the engine, to the first token of every request; no prompt is seen twice."""
    size, tokens = setting.shapes.group, setting.shapes.long_prompt_tokens
    with setting.policy(slots=size, max_context_tokens=tokens + 1) as policy:

        def ask(distinct: int, number: int) -> object:
            prompts = setting.prompts(distinct, tokens, (distinct, number)) * (size // distinct)
            return len(serve(policy, requests_of(prompts, [1] * size, number)))

        jobs = {
            "one prompt for all": lambda number: ask(1, number),
            "a prompt each": lambda number: ask(size, number),
        }
        seconds = in_turn(jobs, setting.repeats)
    first_token = work.decode(setting.config, tokens, [1] * size, size, setting.itemsize)
    return [
        Line(
            name=f"{size} requests, {name}",
            amount=size * tokens,
            seconds=seconds[name],
            phases=[work.prefill(setting.config, [tokens] * distinct, setting.itemsize), first_token],
            shape={"requests": size, "prompts": distinct, "prompt_tokens": tokens},
        )
        for name, distinct in zip(jobs, (1, size), strict=True)
    ]
