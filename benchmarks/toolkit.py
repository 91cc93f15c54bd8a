"""Milliseconds that NeMo Agent Toolkit adds to an episode, beside the same agent in jaxft alone.

    pip install -e ".[nat,langchain]" -e examples/nat
    python examples/nat/make_policy.py
    python benchmarks/toolkit.py --out benchmarks/results/toolkit.json

Two agents are compared, each on the same examples, in turn: one that asks the policy once (the toolkit's
`chat_completion` beside `llm.chat`), and one that calls a tool (the toolkit's `tool_calling_agent` beside LangChain's
agent with jaxft's LangChain client). An episode may cost at most 2 ms more in the toolkit. A collection of trajectories
is timed: episodes, rewards, rows. Four minutes on two CPU cores.
"""

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import jax
from langchain.agents import create_agent
from langchain.tools import ToolRuntime, tool
from nat.data_models.config import Config as ToolkitConfig
from nat.data_models.finetuning import FinetuneRunConfig
from nat.runtime.loader import PluginTypes, discover_and_register_plugins
from nat.utils.data_models.schema_validator import validate_schema

import jaxft
from jaxft.harness.contracts import TrajectoryBuilder
from jaxft.nat.run import open_run
from jaxft.runs.environment import environment

MOST_MILLISECONDS = 2.0
"""Time that the toolkit may add to an episode."""


class AsksOnceConfig(jaxft.WorkflowConfig, name="asks_once"):
    """An agent that asks the policy once."""

    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=AsksOnceConfig)
async def asks_once(config: AsksOnceConfig, builder: Any) -> Any:
    """Yield the agent."""
    llm = await builder.get_llm(config.llm)

    async def ask(row: dict[str, Any]) -> str:
        messages = [{"role": "system", "content": "a"}, {"role": "user", "content": row["question"]}]
        return (await llm.chat(messages, max_tokens=1)).content

    yield ask


@tool
def get(key: str, runtime: ToolRuntime[dict[str, int]]) -> str:
    """Look up a fact."""
    return str(runtime.context.get(key, "unknown"))


class ToolAgentConfig(jaxft.WorkflowConfig, name="tool_agent"):
    """LangChain's agent with a tool."""

    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=ToolAgentConfig)
async def tool_agent(config: ToolAgentConfig, builder: Any) -> Any:
    """Yield the agent."""
    from jaxft_nat_example.questions import table

    model = await builder.get_llm(config.llm, wrapper_type="langchain")
    agent: Any = create_agent(model, tools=[get], context_schema=dict[str, int])

    async def answer(row: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": row["question"]}]
        state = await agent.ainvoke({"messages": messages}, context=table(int(row["question"].split()[0])))
        return state["messages"][-1].content

    yield answer


class ExactConfig(jaxft.EvaluatorConfig, name="exact"):
    """Reward 1 for the right answer, else 0."""


@jaxft.register_evaluator(config_type=ExactConfig)
async def exact(config: ExactConfig, builder: Any) -> Any:
    """Yield the evaluator."""
    yield lambda item: float(item.output_obj == item.expected_output_obj)


PARTS = {"trainer": "loop", "trajectory_builder": "rollouts", "trainer_adapter": "local"}


def own_config(policy: dict[str, Any], agent: str, dataset: Path, folder: Path, generations: int) -> jaxft.Config:
    """Return the configuration of a run of jaxft alone."""
    return jaxft.config_from_mapping(
        {
            "llms": {"policy": {"_type": "local_policy", **policy}},
            "workflow": {"_type": agent, "llm": "policy"},
            "eval": {
                "general": {"max_concurrency": 256, "dataset": {"_type": "json", "file_path": str(dataset)}},
                "evaluators": {"reward": {"_type": "exact"}},
            },
            "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": generations}},
            "trainer_adapters": {"local": {"_type": "local_trainer_adapter", "llm": "policy"}},
            "trainers": {"loop": {"_type": "grpo_trainer"}},
            "finetuning": {"enabled": True, **PARTS, "reward_function": {"name": "reward"}, "output_dir": str(folder)},
        },
        base_dir=folder.parent,
    )


def toolkit_config(
    policy: dict[str, Any], workflow: dict[str, Any], dataset: Path, folder: Path, generations: int
) -> ToolkitConfig:
    """Return the configuration of a run of the toolkit."""
    config = {
        "functions": {"get": {"_type": "get_fact"}},
        "llms": {"policy": {"_type": "jaxft_policy", **policy}},
        "workflow": workflow,
        "eval": {
            "general": {"max_concurrency": 256, "dataset": {"_type": "json", "file_path": str(dataset)}},
            "evaluators": {"reward": {"_type": "exact_answer"}},
        },
        "trajectory_builders": {"rollouts": {"_type": "jaxft_trajectory_builder", "num_generations": generations}},
        "trainer_adapters": {"local": {"_type": "jaxft_trainer_adapter", "llm": "policy"}},
        "trainers": {"loop": {"_type": "jaxft_trainer"}},
        "finetuning": {"enabled": True, **PARTS, "reward_function": {"name": "reward"}, "output_dir": str(folder)},
    }
    return validate_schema(config, ToolkitConfig)


async def collect(builder: TrajectoryBuilder, number: int) -> float:
    """Return the seconds of a collection."""
    started = time.perf_counter()
    await builder.start_run(f"round_{number}")
    collection = await builder.finalize(f"round_{number}")
    took = time.perf_counter() - started
    # The policy is not trained yet: now and then an answer does not end, which the toolkit's agent takes for an error.
    assert len(collection.failures) < 0.05 * collection.metrics["episodes"], collection.failures[0]
    return took


async def measure(folder: Path, policy: Path, examples: int, generations: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by agent and side."""
    rows = json.loads((policy.parent / "nat_train.json").read_text())[:examples]
    dataset = folder / "examples.json"
    dataset.write_text(json.dumps([{**row, "id": str(row["id"])} for row in rows]))
    random = {"preset": "qwen3-50k", "max_context_tokens": 64, "slots": 64}
    trained = {"path": str(policy.absolute()), "max_context_tokens": 128, "slots": 64}
    agents: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
        "asks once": (random, "asks_once", {"_type": "chat_completion", "llm_name": "policy", "system_prompt": "a"}),
        "calls a tool": (
            trained,
            "tool_agent",
            {"_type": "tool_calling_agent", "llm_name": "policy", "tool_names": ["get"]},
        ),
    }
    seconds: dict[str, list[float]] = {}
    for name, (model, own, workflow) in agents.items():
        async with AsyncExitStack() as stack:
            config = own_config(model, own, dataset, folder / own, generations)
            session = await stack.enter_async_context(jaxft.open_session(config))
            options = {"max_tokens": 1} if name == "asks once" else {}
            toolkit = toolkit_config({**model, **options}, workflow, dataset, folder / f"nat_{own}", generations)
            finetuning = toolkit.finetuning
            finetuning.run_configuration = FinetuneRunConfig(config_file=toolkit)
            run = await stack.enter_async_context(open_run(finetuning, trainer=toolkit.trainers["loop"]))
            sides = {}
            for side, each in (("jaxft", session), ("toolkit", run.session)):
                sides[side] = await each.builder.get_trajectory_builder("rollouts")
                await sides[side].initialize(each.config.finetuning)
            for number in range(repeats + 1):
                for side, builder in sides.items():
                    took = await collect(builder, number)
                    if number:  # the first compiles
                        seconds.setdefault(f"{name}, {side}", []).append(took)
    return seconds


def main() -> None:
    """Measure both agents on both sides, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=Path("runs/nat_policy"), help="default %(default)s")
    parser.add_argument("--examples", type=int, default=64, help="default %(default)s")
    parser.add_argument("--generations", type=int, default=8, help="episodes per example (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds (default %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="file for all results, with versions")
    arguments = parser.parse_args()
    discover_and_register_plugins(PluginTypes.CONFIG_OBJECT)
    gc.collect()
    gc.freeze()
    episodes = arguments.examples * arguments.generations
    with tempfile.TemporaryDirectory() as folder:
        seconds = asyncio.run(
            measure(Path(folder), arguments.policy, arguments.examples, arguments.generations, arguments.repeats)
        )
    medians = {name: 1e3 * statistics.median(times) / episodes for name, times in seconds.items()}
    print(f"{'ms an episode':<24} {'median':>8} {'slowest':>8} {'fastest':>8}")
    for name, times in seconds.items():
        slowest, fastest = (1e3 * each(times) / episodes for each in (max, min))
        print(f"{name:<24} {medians[name]:>8.3f} {slowest:>8.3f} {fastest:>8.3f}")
    added = {name: medians[f"{name}, toolkit"] - medians[f"{name}, jaxft"] for name in ("asks once", "calls a tool")}
    for name, each in added.items():
        mark = "reached" if each <= MOST_MILLISECONDS else "MISSED"
        print(f"[{mark}] {name}: the toolkit adds {each:.3f} ms an episode, wanted at most {MOST_MILLISECONDS:g}")
    if arguments.out is not None:
        results = {
            "episodes": episodes,
            "seconds": seconds,
            "milliseconds_per_episode": medians,
            "added_milliseconds_per_episode": added,
            "environment": environment([str(device) for device in jax.devices()]),
        }
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
