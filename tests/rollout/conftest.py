import asyncio

import jax
import numpy as np
import pytest

from jaxft.core.logprobs import token_logprobs
from jaxft.rollout.calls import Call


@pytest.fixture(scope="session")
def serve():
    """Submits requests all at once in an event loop of their own, and returns their completions."""

    def serve(policy, *requests):
        async def main():
            async with asyncio.timeout(60):
                return await asyncio.gather(*(policy.engine.submit(request) for request in requests))

        return asyncio.run(main())

    return serve


@pytest.fixture(scope="session")
def score(policy):
    """Returns the trainer's log-probabilities of up to 64 rows of tokens at temperatures, as rows of 96."""
    jitted = jax.jit(lambda params, *rows: token_logprobs(policy.model, params, rows[0], temperature=rows[1]).logprobs)
    width = policy.engine.max_context_tokens

    def padded(rows, filling, dtype):
        table = np.full((64, width), filling, dtype)
        for line, row in zip(table, rows, strict=False):
            line[: len(row)] = row
        return table

    def score(rows, temperatures):
        tables = padded(rows, 0, np.int32), padded(temperatures, 1, np.float32)
        return np.asarray(asyncio.run(policy.read(lambda params: jitted(params, *tables))))[: len(rows)]

    score([], [])
    return score


@pytest.fixture(scope="session")
def make_call():
    """Makes a call whose log-probabilities tell its tokens from those of all other calls."""

    def make(index, prompt_ids, token_ids, **changes):
        logprobs = tuple(-float(100 * index + token + 1) for token in range(len(token_ids)))
        fields = {
            "index": index,
            "llm": "policy",
            "messages": ({"role": "user", "content": f"question {index}"},),
            "content": f"answer {index}",
            "prompt_text": "",
            "prompt_ids": tuple(prompt_ids),
            "token_ids": tuple(token_ids),
            "sampler_logprobs": logprobs,
            "behavior_logprobs": logprobs,
            "temperature": 1.0,
            "finish_reason": "stop",
            "policy_version": index,
        }
        return Call(**(fields | changes))

    return make
