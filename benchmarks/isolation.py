"""Milliseconds that an episode takes more when its agent, and its evaluator, run in workers.

    python benchmarks/isolation.py --out benchmarks/results/isolation.json

The same episodes are run by turns: in process, with the agent in workers, and with agent and evaluator in workers.
Each asks the policy once, for four tokens. The policy is tiny and the agent does nothing else, so that little but the
workers is measured. A minute on two CPU cores; an agent in a worker should add no more than 2 ms to an episode.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jaxft
from jaxft.harness.worker_processes import descendants
from jaxft.runs.console import Console
from jaxft.runs.environment import environment

WAYS = {
    "in process": {},
    "agent in workers": {"isolation": "process"},
    "agent and evaluator in workers": {"isolation": "process", "judge_isolation": "process"},
}
MOST_MILLISECONDS = 2.0
"""Time that an agent in a worker may add to an episode."""


class ShortConfig(jaxft.WorkflowConfig, name="short_agent"):
    """An agent that asks once."""


@jaxft.register_workflow(config_type=ShortConfig)
async def short_agent(config: ShortConfig, builder: Any) -> AsyncIterator[Any]:
    """The agent."""
    llm = await builder.get_llm("policy")

    async def answer(example: dict[str, Any]) -> str:
        return (await llm.chat([{"role": "user", "content": example["question"]}], max_tokens=4)).content

    yield answer


class LengthConfig(jaxft.EvaluatorConfig, name="length_of_answer"):
    """The number of characters of an answer."""


@jaxft.register_evaluator(config_type=LengthConfig)
async def length_of_answer(config: LengthConfig, builder: Any) -> AsyncIterator[Any]:
    """The evaluator."""
    yield lambda item: len(item.output_obj)


class NumbersConfig(jaxft.DatasetConfig, name="numbers_to_ask"):
    """Questions that differ."""

    count: int = 200


@jaxft.register_dataset_loader(config_type=NumbersConfig)
async def numbers_to_ask(config: NumbersConfig, builder: Any) -> AsyncIterator[list[jaxft.EvalInputItem]]:
    """The questions."""
    yield [jaxft.EvalInputItem(id=str(n), full_dataset_entry={"question": f"{n}?"}) for n in range(config.count)]


def config_of(folder: Path, episodes: int, workers: int, general: dict[str, Any]) -> jaxft.Config:
    """Return the configuration of a way."""
    policy = {"_type": "local_policy", "preset": "qwen3-50k", "slots": workers, "max_context_tokens": 32}
    mapping = {
        "llms": {"policy": policy},
        "workflow": {"_type": "short_agent"},
        "eval": {
            "general": {
                "max_concurrency": workers,
                "dataset": {"_type": "numbers_to_ask", "count": episodes},
                **general,
            },
            "evaluators": {"length": {"_type": "length_of_answer"}},
        },
        "finetuning": {"output_dir": str(folder)},
    }
    return jaxft.config_from_mapping(mapping, base_dir=folder.parent)


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the episodes in each way by turns; return seconds of each round, of the start, and memory of a worker."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    start_seconds = {}
    async with contextlib.AsyncExitStack() as stack:
        ready = {}
        for number, (name, general) in enumerate(WAYS.items()):
            config = config_of(folder / str(number), arguments.episodes, arguments.workers, general)
            session = await stack.enter_async_context(jaxft.open_session(config, console=Console(io.StringIO())))
            items = await session.builder.get_dataset()
            began = time.perf_counter()
            evaluation = await session.builder.get_evaluation()
            await evaluation.validate(items)
            start_seconds[name] = time.perf_counter() - began
            ready[name] = evaluation, items
        for _ in range(arguments.repeats):
            for name, (evaluation, items) in ready.items():
                began = time.perf_counter()
                outcomes = await evaluation.validate(items)
                seconds[name].append(time.perf_counter() - began)
                assert all(outcome.error is None for outcome in outcomes)
        started = descendants(os.getpid())
        leaders = [pid for pid in started if os.getsid(pid) == pid]  # workers, and the forkserver
        guardians = [pid for pid in started if pid not in leaders]  # and a helper of multiprocessing
        private_mb = sum(statistics.median(map(private_megabytes, each)) for each in (leaders, guardians))
    return {"seconds": seconds, "first_round_seconds": start_seconds, "private_mb_of_a_worker": private_mb}


def private_megabytes(pid: int) -> float:
    """Return the memory of a process that it shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def main() -> None:
    """Measure all ways, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200, help="episodes of a round (default %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="episodes at once (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds (default %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="file for all results, with versions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(arguments, Path(folder)))
    times = {name: [1e3 * each / arguments.episodes for each in rounds] for name, rounds in results["seconds"].items()}
    medians = {name: statistics.median(each) for name, each in times.items()}
    print(f"{'ms an episode':<32} {'median':>8} {'slowest':>8} {'fastest':>8} {'added':>8} {'first round, s':>15}")
    for name, each in times.items():
        added, first = medians[name] - medians["in process"], results["first_round_seconds"][name]
        print(f"{name:<32} {medians[name]:>8.2f} {max(each):>8.2f} {min(each):>8.2f} {added:>8.2f} {first:>15.2f}")
    print(f"a worker has {results['private_mb_of_a_worker']:.0f} MB of its own")
    added = medians["agent in workers"] - medians["in process"]
    mark = "reached" if added <= MOST_MILLISECONDS else "MISSED"
    print(f"[{mark}] a worker adds {added:.2f} ms to an episode, wanted at most {MOST_MILLISECONDS:g}")
    if arguments.out is not None:
        numbers = {"episodes": arguments.episodes, "workers": arguments.workers}
        results = {**numbers, **results, "milliseconds_per_episode": medians, "environment": environment(["cpu"])}
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
