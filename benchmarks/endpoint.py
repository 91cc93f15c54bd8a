"""Milliseconds that the endpoint in process adds to a call, beside `llm.chat`.

    python benchmarks/endpoint.py --out benchmarks/results/endpoint.json

The same questions are asked all at once, in turn: by `llm.chat`; by the HTTP library alone, which is what transport and
app cost; by openai's client, which adds the building and checking of its objects; and as streams, beside `llm.stream`.
With tools, a question is the second turn of an agent that has called one; openai's client walks through every field of
its messages. The model is tiny, so that little else is measured. A call by openai's client may cost at most 1 ms more
than `llm.chat` with 200 calls at once. About a minute on two CPU cores.

Objects that the libraries made are frozen first (`gc.freeze`): walking them takes Python's collector 0.16 s, which
would hit one round or another. With `--no_freeze` they are not.
"""

import argparse
import asyncio
import gc
import json
import statistics
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxft.models.config import model_preset
from jaxft.models.load import init_model
from jaxft.rollout.chat import load_tokenizer
from jaxft.rollout.chat_request import ChatRequest
from jaxft.rollout.client import ChatClient
from jaxft.rollout.policy import Policy
from jaxft.runs.environment import environment
from jaxft.serving.frameworks import client_of
from timing import in_turn

ANSWER_TOKENS = 8
MOST_MILLISECONDS = 1.0
"""Time that a call by openai's client may add."""


def main() -> None:
    """Measure all ways to call, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="calls at once (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds (default %(default)s)")
    parser.add_argument("--no_freeze", action="store_true", help="leave all objects to the garbage collector")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="file for all results, with versions")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer()
    model, params = init_model(model_preset("qwen3-50k"), jax.random.key(0))
    policy = Policy(model, params, tokenizer, stop_ids=(tokenizer.eos_token_id,), slots=64, max_context_tokens=128)
    ways = make_ways(ChatClient(policy))

    def job(way: Callable[[int], Awaitable[None]]) -> Callable[[int], None]:
        async def ask_all() -> None:
            await asyncio.gather(*map(way, range(arguments.calls)))

        return lambda number: asyncio.run(ask_all())

    jobs = {name: job(way) for name, (way, _) in ways.items()}
    in_turn(jobs, 1)
    if not arguments.no_freeze:
        gc.collect()
        gc.freeze()
    seconds = in_turn(jobs, arguments.repeats)
    policy.close()
    medians = {name: 1e3 * statistics.median(times) / arguments.calls for name, times in seconds.items()}
    added = {name: medians[name] - medians[beside] for name, (_, beside) in ways.items()}
    print(f"{'ms a call':<24} {'median':>8} {'slowest':>8} {'fastest':>8} {'added':>8}   beside")
    for name, times in seconds.items():
        slowest, fastest = (1e3 * each(times) / arguments.calls for each in (max, min))
        print(f"{name:<24} {medians[name]:>8.3f} {slowest:>8.3f} {fastest:>8.3f} {added[name]:>8.3f}   {ways[name][1]}")
    mark = "reached" if added["openai"] <= MOST_MILLISECONDS else "MISSED"
    print(f"[{mark}] openai's client adds {added['openai']:.3f} ms a call, wanted at most {MOST_MILLISECONDS:g}")
    if arguments.out is not None:
        results = {
            "calls_at_once": arguments.calls,
            "is_frozen": not arguments.no_freeze,
            "seconds": seconds,
            "milliseconds_per_call": medians,
            "added_milliseconds_per_call": added,
            "environment": environment([str(device) for device in jax.devices()]),
        }
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def question(number: int, *, has_tools: bool) -> dict[str, Any]:
    """Messages and tools of a question."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"what is {number}?"}]
    if not has_tools:
        return {"messages": messages}
    function = {"name": "look_up", "arguments": '{"city": "Oslo"}'}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "3"},
    ]
    return {"messages": messages, "tools": [TOOL]}


def make_ways(llm: ChatClient) -> dict[str, tuple[Callable[[int], Awaitable[None]], str]]:
    """Functions that ask a question by its number, each with the name of the one that it is compared with."""
    client = client_of(llm, "openai")
    url = f"{client.base_url}chat/completions"
    body = {"model": llm.name, "max_tokens": ANSWER_TOKENS}

    async def chat(number: int, *, has_tools: bool = False) -> None:
        await llm.chat(**question(number, has_tools=has_tools), max_tokens=ANSWER_TOKENS)

    async def http(number: int, *, has_tools: bool = False) -> None:
        response = await client._client.post(url, json={**body, **question(number, has_tools=has_tools)})
        response.raise_for_status()

    async def openai(number: int, *, has_tools: bool = False) -> None:
        await client.chat.completions.create(**question(number, has_tools=has_tools), **body)

    async def stream(number: int) -> None:
        async for _ in llm.stream(ChatRequest(**question(number, has_tools=False), max_tokens=ANSWER_TOKENS)):
            pass

    async def openai_stream(number: int) -> None:
        async for _ in await client.chat.completions.create(**question(number, has_tools=False), **body, stream=True):
            pass

    return {
        "llm.chat": (chat, "llm.chat"),
        "http": (http, "llm.chat"),
        "openai": (openai, "llm.chat"),
        "llm.chat, tools": (partial(chat, has_tools=True), "llm.chat, tools"),
        "http, tools": (partial(http, has_tools=True), "llm.chat, tools"),
        "openai, tools": (partial(openai, has_tools=True), "llm.chat, tools"),
        "llm.stream": (stream, "llm.stream"),
        "openai, stream": (openai_stream, "llm.stream"),
    }


if __name__ == "__main__":
    main()
