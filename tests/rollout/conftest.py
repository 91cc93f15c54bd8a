import asyncio

import jax
import numpy as np
import pytest

from jaxft.core.logprobs import token_logprobs


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
