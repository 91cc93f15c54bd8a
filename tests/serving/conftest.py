"""Clients of openai and anthropic that ask a policy in process, and what all dialects are asked and answer."""

import asyncio
import importlib
from dataclasses import replace

import anthropic
import pytest

from jaxft.rollout import framework_client
from jaxft.rollout.calls import Completion, Reply
from jaxft.rollout.chat_request import Delta
from jaxft.rollout.client import ChatClient
from jaxft.rollout.current import recording
from jaxft.rollout.messages import ToolCall
from jaxft.rollout.recorder import ENDPOINT, Episode
from jaxft.rollout.transport import async_transport
from jaxft.serving.app import make_app

QUESTION = [{"role": "user", "content": "x?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def sampled(token_ids, logprobs, top_logprobs=(), finish_reason="stop"):
    return Completion(token_ids, logprobs, logprobs, [3] * len(token_ids), finish_reason, list(top_logprobs))


REPLY = Reply(
    content="Well.",
    completion=sampled([7, 8], [-0.5, -0.25], [((7, -0.5), (9, float("-inf"))), ((8, -0.25), (7, -3.0))]),
    prompt_ids=(1, 2, 3),
    tool_calls=(ToolCall("abcdefgh1", "look_up", '{"city": "Oslo"}'),),
    reasoning_content="hm",
)


THINKS_AGAIN = (
    Delta(0, reasoning_content="a"),
    Delta(0, content="foo"),
    Delta(0, reasoning_content="\n\nb"),
    Delta(0, content=" \n\nbar"),
    replace(REPLY, content="foo \n\nbar", reasoning_content="a\n\nb"),
)
"""Pieces of a streamed answer that thinks twice, and its reply."""


def make_episode(**changes):
    return Episode(**({"run_seed": 0, "stream": 0, "rollout_index": 0, "example_id": "a", "generation": 0} | changes))


def run(asking, episode=None):
    """The result of a coroutine that asks, in an episode or in none."""

    async def main():
        async with asyncio.timeout(60):
            with recording(episode):
                return await asking

    return asyncio.run(main())


def make_client(llm, library):
    """A client of a library, without a socket: `anthropic`, or a wrapper type of `framework_client`."""
    if library != "anthropic":
        return framework_client(llm, library)
    http = importlib.import_module(anthropic.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
    http_client = http.AsyncClient(transport=async_transport(http, make_app({llm.name: llm})), timeout=None)
    return anthropic.AsyncAnthropic(base_url=ENDPOINT, api_key="jaxft", max_retries=0, http_client=http_client)


@pytest.fixture(scope="module")
def llm(policy):
    return ChatClient(policy, "player")


@pytest.fixture(scope="module")
def client(llm):
    return framework_client(llm, "openai")


@pytest.fixture(scope="module")
def sync_client(llm):
    return framework_client(llm, "openai_sync")


@pytest.fixture(scope="module")
def anthropic_client(llm):
    return make_client(llm, "anthropic")
