"""Milliseconds that the endpoint adds to a call, in process and over a loopback address.

    python benchmarks/endpoint.py --out benchmarks/results/endpoint.json

The same questions are asked all at once, in turn: by `llm.chat`; by the HTTP library alone, which is what transport and
app cost; by openai's client, which adds the building and checking of its objects; and as streams, beside `llm.stream`.
With tools, a question is the second turn of an agent that has called one; openai's client walks through every field of
its messages. The model is tiny, so that little else is measured. A call by openai's client may cost at most 1 ms more
than `llm.chat` with 200 calls at once, and a call over loopback at most 3 ms more than in process; there the clients
are another process, and each round opens a connection for each call. About two minutes on two CPU cores.

Objects that the libraries made are frozen first (`gc.freeze`): walking them takes Python's collector 0.16 s, which
would hit one round or another. With `--no-freeze` they are not.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import openai

from jaxft.harness.addresses import Limits
from jaxft.models.config import model_preset
from jaxft.models.load import init_model
from jaxft.rollout.chat_request import ChatRequest
from jaxft.rollout.client import ChatClient
from jaxft.rollout.frameworks import framework_client
from jaxft.rollout.policy import Policy
from jaxft.rollout.tokenizer import load_tokenizer
from jaxft.runs.environment import environment
from jaxft.serving.app import make_app
from jaxft.serving.server import Server
from timing import in_turn

ANSWER_TOKENS = 8
KEY = "the key of the server"
MOST_MILLISECONDS = {"openai": 1.0, "http, loopback": 3.0, "openai, loopback": 3.0, "openai, stream, loopback": 3.0}
"""Time that a call may add."""


def main() -> None:
    """Measure all ways to call, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="calls at once (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds (default %(default)s)")
    parser.add_argument("--no-freeze", action="store_true", help="leave all objects to the garbage collector")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="file for all results, with versions")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer()
    model, params = init_model(model_preset("qwen3-50k"), jax.random.key(0))
    policy = Policy(model, params, tokenizer, stop_ids=(tokenizer.eos_token_id,), slots=64, max_context_tokens=128)
    llm = ChatClient(policy)
    server = Server(make_app({llm.name: llm}), api_key=KEY, limits=Limits(max_requests=2 * arguments.calls))
    ways = make_ways(llm)
    caller = Caller(f"{server.url}/v1", arguments.calls)
    jobs = {name: partial(ask_all, way, arguments.calls) for name, (way, _) in ways.items()}
    jobs |= {f"{name}, loopback": partial(caller.ask_all, name) for name in CLIENT_WAYS}
    beside = {name: other for name, (_, other) in ways.items()} | {f"{name}, loopback": name for name in CLIENT_WAYS}
    in_turn(jobs, 1)
    if not arguments.no_freeze:
        gc.collect()
        gc.freeze()
    seconds = in_turn(jobs, arguments.repeats)
    caller.close()
    asyncio.run(server.close())
    policy.close()
    medians = {name: 1e3 * statistics.median(times) / arguments.calls for name, times in seconds.items()}
    added = {name: medians[name] - medians[other] for name, other in beside.items()}
    print(f"{'ms a call':<24} {'median':>8} {'slowest':>8} {'fastest':>8} {'added':>8}   beside")
    for name, times in seconds.items():
        slowest, fastest = (1e3 * each(times) / arguments.calls for each in (max, min))
        print(f"{name:<24} {medians[name]:>8.3f} {slowest:>8.3f} {fastest:>8.3f} {added[name]:>8.3f}   {beside[name]}")
    for name, most in MOST_MILLISECONDS.items():
        mark = "reached" if added[name] <= most else "MISSED"
        print(f"[{mark}] {name} adds {added[name]:.3f} ms a call to {beside[name]}, wanted at most {most:g}")
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


BODY = {"model": "policy", "max_tokens": ANSWER_TOKENS}


async def by_http(client: Any, number: int, *, has_tools: bool = False) -> None:
    """Ask by the HTTP library of openai's client alone."""
    asked = {**BODY, **question(number, has_tools=has_tools)}
    headers = {"Authorization": f"Bearer {KEY}"}
    response = await client._client.post(f"{client.base_url}chat/completions", json=asked, headers=headers)
    response.raise_for_status()


async def by_openai(client: Any, number: int, *, has_tools: bool = False) -> None:
    """Ask by openai's client."""
    await client.chat.completions.create(**BODY, **question(number, has_tools=has_tools))


async def by_openai_stream(client: Any, number: int) -> None:
    """Ask by openai's client for a stream, and read it."""
    async for _ in await client.chat.completions.create(**BODY, **question(number, has_tools=False), stream=True):
        pass


CLIENT_WAYS = {"http": by_http, "openai": by_openai, "openai, stream": by_openai_stream}
"""Functions that ask a client a question by its number, in process and over loopback."""


def ask_all(way: Callable[[int], Awaitable[None]], calls: int, round_number: int = 0) -> None:
    """Ask all questions at once."""

    async def main() -> None:
        await asyncio.gather(*map(way, range(calls)))

    asyncio.run(main())


class Caller:
    """Another process, which asks all questions over loopback when it is told to."""

    def __init__(self, base_url: str, calls: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=call_on_demand, args=(theirs, base_url, calls), daemon=True)
        self._process.start()

    def ask_all(self, name: str, round_number: int = 0) -> None:
        """Let it ask in one of `CLIENT_WAYS`, and wait for its end."""
        self._pipe.send(name)
        self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def call_on_demand(pipe: Any, base_url: str, calls: int) -> None:
    """Ask all questions in the way whose name comes, until None comes."""

    async def main(way: Callable[..., Awaitable[None]]) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
            await asyncio.gather(*(way(client, number) for number in range(calls)))

    while (name := pipe.recv()) is not None:
        asyncio.run(main(CLIENT_WAYS[name]))
        pipe.send(name)


def make_ways(llm: ChatClient) -> dict[str, tuple[Callable[[int], Awaitable[None]], str]]:
    """Functions that ask a question by its number, each with the name of the one that it is compared with."""
    client = framework_client(llm, "openai")

    async def chat(number: int, *, has_tools: bool = False) -> None:
        await llm.chat(**question(number, has_tools=has_tools), max_tokens=ANSWER_TOKENS)

    async def stream(number: int) -> None:
        async for _ in llm.stream(ChatRequest(**question(number, has_tools=False), max_tokens=ANSWER_TOKENS)):
            pass

    return {
        "llm.chat": (chat, "llm.chat"),
        "http": (partial(by_http, client), "llm.chat"),
        "openai": (partial(by_openai, client), "llm.chat"),
        "llm.chat, tools": (partial(chat, has_tools=True), "llm.chat, tools"),
        "http, tools": (partial(by_http, client, has_tools=True), "llm.chat, tools"),
        "openai, tools": (partial(by_openai, client, has_tools=True), "llm.chat, tools"),
        "llm.stream": (stream, "llm.stream"),
        "openai, stream": (partial(by_openai_stream, client), "llm.stream"),
    }


if __name__ == "__main__":
    main()
