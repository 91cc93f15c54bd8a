import asyncio

import pytest

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
