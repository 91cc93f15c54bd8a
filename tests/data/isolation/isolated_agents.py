"""Agents that workers import: one that asks in many ways, and misbehaves in as many if its example says so."""

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import stat
import subprocess
import sys
import time
import types
from typing import Any

import jaxft

FILTERED = {"max_tokens": 5, "top_p": 0.9}
CONSTRAINED = {"max_tokens": 5, "response_format": {"type": "json_object"}}
"""Options of the two turns; the tokens of both have supports."""


class AgentConfig(jaxft.WorkflowConfig, name="isolated_agent"):
    llm: jaxft.LLMRef
    how: str = "chat"


@jaxft.register_workflow(config_type=AgentConfig)
async def isolated_agent(config: AgentConfig, builder: Any) -> Any:
    """Two turns, each asked for in the way that `how` says; between them the example's misbehaviour, if it has one."""
    llm = await builder.get_llm(config.llm)
    client = await builder.get_llm(config.llm, wrapper_type="openai")
    sync_client = await builder.get_llm(config.llm, wrapper_type="openai_sync")

    async def by_chat(messages: list, options: dict) -> str:
        reply = await llm.chat(messages, **options)
        assert await llm.count_tokens(jaxft.ChatRequest(messages)) == len(reply.prompt_ids)
        return reply.content

    async def by_client(messages: list, options: dict) -> str:
        completion = await client.chat.completions.create(model=config.llm, messages=messages, **options)
        return completion.choices[0].message.content

    async def by_stream(messages: list, options: dict) -> str:
        chunks = await client.chat.completions.create(model=config.llm, messages=messages, stream=True, **options)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def by_key(messages: list, options: dict) -> str:
        """In a thread that inherits no context."""
        keyed = sync_client.with_options(api_key=jaxft.episode().api_key)
        return await asyncio.get_running_loop().run_in_executor(None, ask, messages, options, keyed)

    async def by_blocking(messages: list, options: dict) -> str:
        return ask(messages, options)

    def ask(messages: list, options: dict, client: Any = sync_client) -> str:
        completion = client.chat.completions.create(model=config.llm, messages=messages, **options)
        return completion.choices[0].message.content

    ways = {"chat": by_chat, "client": by_client, "stream": by_stream, "key": by_key, "blocking": by_blocking}

    async def play(example: dict) -> float:
        way = ways[example.get("how", config.how)]
        messages = [{"role": "user", "content": example["question"]}]
        if "returns" in example:
            replies = [await llm.chat(messages, max_tokens=5, seed=seed, logit_bias={7: -9.0}) for seed in (1, 2)]
            jaxft.episode().record_candidates(replies, [0.0, 1.0])
            return {1, 2} if example["returns"] == "a set" else example["returns"]
        with jaxft.named_function("first"):
            said = await way(messages, FILTERED)
        jaxft.episode().reward_step(0.25 * len(said.encode()))
        if "fault" in example:
            await FAULTS[example["fault"]]()
        number = str(jaxft.episode().random.randrange(10))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": number}]
        with jaxft.named_function("second"):
            return float(len(said.encode()) + len(await way(messages, CONSTRAINED)))

    def play_sync(example: dict) -> float:
        messages = [{"role": "user", "content": example["question"]}]
        with jaxft.named_function("first"):
            said = llm.chat_sync(messages, **FILTERED).content
        jaxft.episode().reward_step(0.25 * len(said.encode()))
        number = str(jaxft.episode().random.randrange(10))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": number}]
        with jaxft.named_function("second"):
            return float(len(said.encode()) + len(llm.chat_sync(messages, **CONSTRAINED).content))

    if config.how != "sync":
        ways[config.how]  # raises an error in the factory
    yield play_sync if config.how == "sync" else play


async def busy_loop() -> None:
    while True:
        pass


async def sleep_in_c() -> None:
    time.sleep(1000)


async def swallowed_cancellation() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)


async def leak() -> None:
    held = []
    for _ in range(1024):
        held.append(b"x" * 2**20)


async def segfault() -> None:
    print("the last words before a crash")
    ctypes.string_at(0)


async def exit_at_once() -> None:
    os._exit(3)


async def children_left_behind() -> None:
    for _ in range(19):
        subprocess.Popen(["sleep", "1000"])
    subprocess.run(["sh", "-c", "sleep 1000 &"], check=True)  # an orphan


async def filled_output() -> None:
    while True:
        print("x" * 1000)


async def closed_descriptors() -> None:
    os.closerange(3, 1000)


async def garbled_line() -> None:
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, b"no message\n")
    await asyncio.Event().wait()


async def large_key() -> None:
    {}[2**20000]


async def never_answers() -> None:
    await asyncio.Event().wait()


async def killed() -> None:
    os.kill(os.getpid(), 9)


async def system_exit() -> None:
    raise SystemExit(4)


async def fork_asks() -> None:
    """A process that cannot use the agent's clients."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: None)
    child.start()
    child.join()
    raise ValueError(f"its child ended with {child.exitcode}")


async def local_result() -> None:
    class Local(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("an error that no pickle holds")

    raise Local(1, 2)


async def small_leak() -> None:
    """Nothing is left for the message about it."""
    held: list = []
    while True:
        held.append([held])


async def forkserver_child() -> None:
    """Python's own server has forked it."""
    multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(1000,)).start()


async def daemon() -> None:
    """A process that has left its parents and their session, ignores SIGTERM, and goes on writing."""
    script = "trap '' TERM; while true; do echo x; sleep 0.1; done"
    subprocess.run(["sh", "-c", f'setsid sh -c "{script}" &'], check=True)


class Unreadable(Exception):
    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


async def unreadable_error() -> None:
    raise Unreadable("an error that no process reads")


async def foreign_error() -> None:
    """Its class is one of a module that only this process has."""
    module = types.ModuleType("foreign_module")
    sys.modules[module.__name__] = module
    module.Foreign = type("Foreign", (Exception,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    raise module.Foreign("an error of another module")


async def hangs_with_child() -> None:
    """It holds Python's global lock, so no other thread can end it."""
    subprocess.Popen(["sleep", "1000"])
    ctypes.PyDLL(None).sleep(1000)


async def tells_secret() -> None:
    raise ValueError("the key sk-of-the-run is refused")


async def log() -> None:
    logger = logging.getLogger("isolated_agents")
    logger.warning("a warning of %s", "the agent", extra={"function": lambda: None})
    print("printed by the agent, which was asked", jaxft.episode().input_obj)
    for name, path in (("isolated_agents", __file__), ("httpx2", logging.__file__)):  # a library says its requests
        record = logging.LogRecord(name, logging.INFO, path, 1, "asks %s", (jaxft.episode().base_url,), None)
        logging.getLogger(name).handle(record)
    child = os.fork()
    if child == 0:
        logger.warning("a warning of a child")
        os._exit(0)
    os.waitpid(child, 0)


FAULTS = {each.__name__: each for each in (
    busy_loop, sleep_in_c, swallowed_cancellation, leak, segfault, exit_at_once, children_left_behind, filled_output,
    closed_descriptors, garbled_line, large_key, never_answers, killed, system_exit, fork_asks, local_result,
    small_leak, forkserver_child, daemon, unreadable_error, foreign_error, hangs_with_child,
    tells_secret, log,
)}  # fmt: skip


class SizeConfig(jaxft.EvaluatorConfig, name="isolated_size"):
    fault: str | None = None


@jaxft.register_evaluator(config_type=SizeConfig)
async def size(config: SizeConfig, builder: Any) -> Any:
    async def score(item: Any) -> float:
        fault = item.full_dataset_entry.get("judge_fault", config.fault)
        if fault is not None and item.full_dataset_entry["question"] == "bb?":
            await FAULTS[fault]()
        return (item.output_obj + len(item.trajectory)) % 4

    yield score


class RankConfig(jaxft.GroupEvaluatorConfig, name="isolated_rank"):
    pass


@jaxft.register_evaluator(config_type=RankConfig)
async def rank(config: RankConfig, builder: Any) -> Any:
    yield lambda items: [float(sum(other.output_obj < item.output_obj for other in items)) for item in items]


class ListConfig(jaxft.DatasetConfig, name="isolated_examples"):
    faults: tuple[str, ...] = ()


@jaxft.register_dataset_loader(config_type=ListConfig)
async def examples(config: ListConfig, builder: Any) -> Any:
    rows = [{"question": text} for text in ("a?", "bb?")]
    rows += [{"question": "x?", "fault": fault} for fault in config.faults]
    yield [
        jaxft.EvalInputItem(id=row.get("fault", row["question"]), full_dataset_entry=row, input_obj=row.get("question"))
        for row in rows
    ]
