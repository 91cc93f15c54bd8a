"""Prefill: one long prompt in the core, and requests through the engine that share one prompt or have one each."""

import jax
import numpy as np

import roofline
from lockstep import prefilled
from records import Check, Line, Measured
from timing import in_turn
from workload import Workload, make_requests, serve

MOST_SHARED_TIME = 1 / 6
"""Time to the first tokens of requests with one prompt, as a fraction of that with a prompt each."""


def run(workload: Workload) -> Measured:
    """Prompt tokens per second. Requests that share a prompt must prefill it once."""
    one_prompt = _one_prompt(workload)
    shared, distinct = _requests(workload)
    count = workload.shapes.requests_per_prompt
    check = Check(
        name=f"time of {count} requests with one prompt / with a prompt each",
        value=np.median(shared.seconds) / np.median(distinct.seconds),
        relation="at most",
        wanted=MOST_SHARED_TIME,
    )
    return Measured(lines=[one_prompt, shared, distinct], checks=[check])


def _one_prompt(workload: Workload) -> Line:
    tokens = workload.shapes.long_prompt_tokens
    params = workload.decode_params()
    prompts = np.array(workload.prompts(1, tokens), np.int32)

    def prefill(number: int) -> None:
        jax.block_until_ready(prefilled(workload.model, params, prompts, tokens))

    return Line(
        name="one prompt, to its cache",
        amount=tokens,
        seconds=in_turn({"prefill": prefill}, workload.repeats)["prefill"],
        phases=[roofline.prefill(workload.config, [tokens], workload.itemsize)],
        shape={"rows": 1, "prompt_tokens": tokens},
    )


def _requests(workload: Workload) -> list[Line]:
    """Serve both to the first token of every request. Each round has new prompts."""
    count, tokens = workload.shapes.requests_per_prompt, workload.shapes.long_prompt_tokens
    with workload.policy(slots=count, max_context_tokens=tokens + 1) as policy:

        def ask(distinct: int, number: int) -> None:
            prompts = workload.prompts(distinct, tokens, (distinct, number)) * (count // distinct)
            serve(policy, make_requests(prompts, [1] * count, number))

        jobs = {
            "one prompt for all": lambda number: ask(1, number),
            "a prompt each": lambda number: ask(count, number),
        }
        seconds = in_turn(jobs, workload.repeats)
    first_token = roofline.decode(workload.config, tokens, [1] * count, count, workload.itemsize)
    return [
        Line(
            name=f"{count} requests, {name}",
            amount=count * tokens,
            seconds=seconds[name],
            phases=[roofline.prefill(workload.config, [tokens] * distinct, workload.itemsize), first_token],
            shape={"requests": count, "prompts": distinct, "prompt_tokens": tokens},
        )
        for name, distinct in zip(jobs, (1, count), strict=True)
    ]
