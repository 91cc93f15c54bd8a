"""Epochs with and without overlap: agents whose tools take their time, and agents that never wait.

    python benchmarks/overlap.py --out benchmarks/results/overlap.json      # about ten minutes on two cores

An agent has eight turns. After each a tool takes a log-normal time, 0.2 s in the median and 3 s at the 99th percentile;
or none at all. A job makes so many passes over the episodes that training takes about as long as the waiting does: five
on two cores with AVX-512, three on slower ones.
Both sides run in turn, each in a fresh process, on the same episodes: `max_staleness: 0`, in which a collection and its
job take turns, and 1, in which the next collection is sampled beside the job. Epochs that compile are left out. Printed
are medians over all epochs of all rounds, with the lowest and the highest round, their ratio, and what the device did.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxft.runs.environment import environment
from machine import cpu_name

AGENT = Path(__file__).parent / "waiting_agent.py"
WARM_UP_EPOCHS = 3
DEVICE = ("sampling", "training", "other", "idle")


def config_of(arguments: argparse.Namespace, median_seconds: float, staleness: int, folder: Path) -> dict[str, Any]:
    """Return the configuration of a run."""
    return {
        "imports": [str(AGENT)],
        "llms": {
            "policy": {"_type": "local_policy", "preset": arguments.preset, "max_context_tokens": 768, "slots": 64}
        },
        "workflow": {"_type": "waiting_agent", "llm": "policy", "median_seconds": median_seconds},
        "eval": {
            "general": {
                "max_concurrency": 512,
                "dataset": {"_type": "waiting_examples", "count": arguments.examples},
            },
            "evaluators": {"even": {"_type": "waiting_reward"}},
        },
        "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": 8}},
        "trainer_adapters": {
            "local": {
                "_type": "local_trainer_adapter",
                "llm": "policy",
                "loss": {"name": "dapo", "beta": 0.05},
                "optimizer": {"learning_rate": 1e-4},
                "microbatch_tokens": arguments.microbatch_tokens,
                "num_iterations": arguments.num_iterations,
            }
        },
        "trainers": {"loop": {"_type": "grpo_trainer", "max_staleness": staleness, "show_episodes_every": 0}},
        "finetuning": {
            "enabled": True,
            "trainer": "loop",
            "trajectory_builder": "rollouts",
            "trainer_adapter": "local",
            "reward_function": {"name": "even"},
            "num_epochs": WARM_UP_EPOCHS + arguments.epochs,
            "checkpoints": {"every": None},
            "output_dir": str(folder),
        },
    }


def epochs_of(arguments: argparse.Namespace, median_seconds: float, staleness: int) -> list[dict[str, float]]:
    """Run a process, and return the timings of its epochs without those that compile, and without the last.

    With overlap the last epoch has no collection beside it.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"  # YAML reads JSON
        file.write_text(json.dumps(config_of(arguments, median_seconds, staleness, Path(folder) / "run")))
        command = [sys.executable, "-m", "jaxft.cli", "finetune", "--config-file", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"a run ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        rows = (Path(folder) / "run" / "timings.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows[WARM_UP_EPOCHS:-1]]


def compare(arguments: argparse.Namespace, name: str, median_seconds: float) -> dict[str, Any]:
    """Run both sides in turn, print them, and return their times."""
    rounds: dict[int, list[list[dict[str, float]]]] = {0: [], 1: []}
    for _ in range(arguments.repeats):
        for staleness, found in rounds.items():
            found.append(epochs_of(arguments, median_seconds, staleness))
    result: dict[str, Any] = {"case": name}
    for staleness, found in rounds.items():
        medians = [statistics.median(row["seconds"] for row in rows) for rows in found]
        every = [row for rows in found for row in rows]
        side = {
            "seconds": statistics.median(row["seconds"] for row in every),
            "seconds_of_rounds": medians,
            **{each: statistics.median(row[f"seconds_device_{each}"] for row in every) for each in DEVICE},
        }
        result[f"max_staleness_{staleness}"] = side
        spent = "  ".join(f"{each} {side[each]:.2f}" for each in DEVICE)
        span = f"{min(medians):.2f} to {max(medians):.2f}"
        print(f"{name:<14} max_staleness {staleness}: {side['seconds']:6.2f} s an epoch ({span}); {spent}", flush=True)
    ratios = [b / a for a, b in zip(*(result[f"max_staleness_{s}"]["seconds_of_rounds"] for s in (0, 1)), strict=True)]
    result |= {"ratio": statistics.median(ratios), "ratios": ratios}
    print(f"{name:<14} ratio {result['ratio']:.3f} (rounds: {', '.join(f'{each:.3f}' for each in ratios)})", flush=True)
    return result


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yield the name of each case, and the median of its tools' seconds."""
    for name, seconds in (("waiting", 0.2), ("never waiting", 0.0)):
        if name in arguments.cases:
            yield name, seconds


def main() -> int:
    """Compare the cases, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=("waiting", "never waiting"), help="waiting, 'never waiting'")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="timed epochs of a run (default %(default)s)")
    parser.add_argument("--examples", type=int, default=4, help="groups of 8 episodes (default %(default)s)")
    parser.add_argument("--preset", default="qwen3-1m", help="shape of the model (default %(default)s)")
    parser.add_argument("--microbatch-tokens", type=int, default=1024, help="(default %(default)s)")
    parser.add_argument("--num-iterations", type=int, default=5, help="passes of a job (default %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    arguments = parser.parse_args()
    os.environ |= {"JAX_ENABLE_COMPILATION_CACHE": "1"}
    results = [compare(arguments, *case) for case in cases(arguments)]
    if arguments.out is not None:
        options = {name: value for name, value in vars(arguments).items() if name != "out"}
        about = {"cpu": cpu_name(), "load": os.getloadavg()[0], **environment()}
        arguments.out.write_text(json.dumps({"about": about, "options": options, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
