import asyncio

import pytest


@pytest.fixture(scope="session")
def serve():
    """Completions of requests that are all submitted at once, in an event loop of their own."""

    def serve(policy, *requests):
        async def main():
            async with asyncio.timeout(60):
                return await asyncio.gather(*(policy.engine.submit(request) for request in requests))

        return asyncio.run(main())

    return serve
