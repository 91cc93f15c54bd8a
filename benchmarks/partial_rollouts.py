"""Collections whose answers differ much in length, ended as they come and with `partial_rollout_tokens`.

    python benchmarks/partial_rollouts.py      # ten minutes on two cores

An answer's length is log-normal, 32 tokens in the median and at most 512; a collection begins 8 groups of 8. Nothing is
trained, and all sides sample the same answers. The first collections, in which carried groups pile up, do not count.
Printed is what a thousand tokens of ended groups take: steps of decoding, which are the time of an accelerator
whose steps read all weights; seconds, and CPU seconds of the process; and tokens computed again, as prompts are.
The sides run in turn, and times are medians of the rounds; steps and tokens are the same in each.
"""

import argparse
import asyncio
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import jax

import jaxft
from jaxft.components.configs import GRPOTrajectoryBuilderConfig
from jaxft.components.grpo import GRPOTrajectoryBuilder
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.evaluation import Evaluation
from jaxft.models.config import model_preset
from jaxft.models.load import init_model
from jaxft.rollout.client import ChatClient
from jaxft.rollout.policy import Policy
from jaxft.rollout.tokenizer import load_tokenizer
from jaxft.runs.environment import environment
from machine import cpu_name

MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 32, 1.2, 512
SIDES: dict[str, tuple[int, int] | None] = {
    "whole": None,
    "128 tokens, max_staleness 4": (128, 4),
    "64 tokens, max_staleness 8": (64, 8),
    "64 tokens, max_staleness 2": (64, 2),
}


async def measure(
    policy: Policy, carry_over: tuple[int, int] | None, warm_up: int, collections: int
) -> dict[str, float]:
    """Return what a thousand tokens of groups that have ended take."""
    llm, steps, runner = ChatClient(policy), [0], policy.engine._runner
    advance = runner.advance

    def counted(params: Any, rows: Any, num_steps: int, **options: Any) -> Any:
        steps[0] += num_steps
        return advance(params, rows, num_steps, **options)

    async def agent(example: dict[str, Any]) -> str:
        tokens = int(jaxft.episode().random.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))
        messages = [{"role": "user", "content": example["name"]}]
        return (await llm.chat(messages, max_tokens=min(max(1, tokens), MOST_TOKENS), ignore_eos=True)).content

    def taken() -> dict[str, float]:
        spent = {"steps": steps[0], "seconds": time.perf_counter(), "cpu_seconds": time.process_time()}
        return spent | {"prefilled_tokens": runner.counts.prefilled_tokens}

    builder = GRPOTrajectoryBuilder(GRPOTrajectoryBuilderConfig(num_generations=8))
    items = [EvalInputItem(id=str(number), full_dataset_entry={"name": str(number)}) for number in range(8)]
    await builder.bind_evaluation(Evaluation(agent, {}, None, 4096, 0), items)
    builder.carry_over = carry_over
    runner.advance = counted  # type: ignore[method-assign]
    ended, before, oldest = 0, taken(), 0
    for number in range(warm_up + collections):
        if number == warm_up:
            ended, before = 0, taken()
        await builder.start_run(str(number))
        found = await builder.finalize(str(number))
        groups = found.trajectories
        ended += sum(sum(row.completion_mask) for group in groups for each in group for row in each.sequences or ())
        oldest = max(oldest, int(found.metrics.get("carried_collections_max", 0)))
    runner.advance = advance  # type: ignore[method-assign]
    spent = {name: 1000 * (value - before[name]) / ended for name, value in taken().items()}
    return spent | {"tokens": ended, "oldest": oldest}


def main() -> None:
    """Measure the sides in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-50k", help="shape of the model (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=8, help="collections that are not counted (default %(default)s)")
    parser.add_argument("--collections", type=int, default=12, help="(default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    arguments = parser.parse_args()
    model, params = init_model(model_preset(arguments.preset), jax.random.key(0))
    tokenizer = load_tokenizer()
    stop_ids = (tokenizer.eos_token_id,)
    policy = Policy(model, params, tokenizer, stop_ids=stop_ids, slots=128, max_context_tokens=640)
    asyncio.run(policy.warm_up())
    rounds: list[dict[str, dict[str, float]]] = [
        {
            name: asyncio.run(measure(policy, carry_over, arguments.warm_up, arguments.collections))
            for name, carry_over in SIDES.items()
        }
        for _ in range(arguments.repeats)
    ]
    policy.close()
    for name in SIDES:
        medians = {key: statistics.median(each[name][key] for each in rounds) for key in rounds[0][name]}
        print(f"{name:<28}", "  ".join(f"{key} {value:,.4g}" for key, value in medians.items()))
    if arguments.out is not None:
        about = {"cpu": cpu_name(), **environment()}
        arguments.out.write_text(json.dumps({"about": about, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
