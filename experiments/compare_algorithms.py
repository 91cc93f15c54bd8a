"""Trains arithmetic.py or doors.py with every loss and every credit, five seeds each, and compares what is learned.

    python experiments/compare_algorithms.py                # sums of two numbers
    python experiments/compare_algorithms.py --task doors   # a game of 20 turns with rewards in between
    python experiments/compare_algorithms.py --algorithms gspo ppo --seeds 2 --jobs 2
    python experiments/compare_algorithms.py --algorithms dapo dppo_tv max_rl gmpo+pass_at_k

A name is one of `ALGORITHMS`, a loss, advantages (of dapo), or LOSS+ADVANTAGES.
Other options are those of the task's script, as `--jobs` here.

All runs of a seed start from the same warm start. The table has the mean of the held-out score over the seeds, its
bootstrap interval (95 %) and each seed's own score. Writes result.json, compare.html and compare.json to
runs/compare_TASK. The same command goes on where it was stopped; --overwrite begins anew. Hours on two CPU cores.

A collection is trained in four updates, as with one every ratio is 1, and losses that differ in the ratio are the same.
REINFORCE has no ratio: rloo and reinforce_pp take a quarter of the episodes for each of four times the epochs.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, get_args

from jaxft.losses import PRESETS
from jaxft.report.intervals import mean_interval
from jaxft.training.config import AdvantageName

HERE = Path(__file__).parent

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "dapo": {"name": "dapo"},
    "dr_grpo": {"name": "dr_grpo"},
    "gspo": {"name": "gspo"},
    "cispo": {"name": "cispo"},
    "rloo": {"name": "reinforce", "advantages": "leave_one_out"},
    "batch": {"name": "dapo", "advantages": "batch"},
    "reinforce_pp": {"name": "reinforce", "advantages": "reinforce_pp"},
    "ppo": {"name": "ppo"},
}
"""Fields of `loss` that the algorithms of the default set."""


class Task(NamedTuple):
    """Names of the scores in result.json, tokens of a whole episode (`dr_grpo` divides by them), size of the run."""

    before: str
    after: str
    budget: int
    examples: int
    epochs: int


TASKS = {
    "arithmetic": Task("exact_match_warm_start", "exact_match_after", budget=5, examples=128, epochs=20),
    "doors": Task("before", "after", budget=40, examples=16, epochs=20),
}
UPDATES = 4
"""Updates of each collection."""


def loss_of(name: str) -> dict[str, Any]:
    """Return the fields of `loss` that an algorithm sets."""
    loss, _, advantages = name.partition("+")
    if loss not in PRESETS:
        loss, advantages = "dapo", name
    if name not in ALGORITHMS and advantages not in ("", *get_args(AdvantageName)):
        raise SystemExit(f"{name!r}: {advantages!r} is neither a loss nor an estimator of advantages")
    return ALGORITHMS.get(name) or {"name": loss} | ({"advantages": advantages} if advantages else {})


def runs_of(task: str, folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of each algorithm on a task; in a game with rewards for turns, two also have their sum."""
    runs = {}
    budget, examples, epochs = TASKS[task].budget, TASKS[task].examples, TASKS[task].epochs
    for name in dict.fromkeys([*ALGORITHMS, *(name for name in names if not name.endswith("_outcome"))]):
        loss = loss_of(name)
        if loss["name"] == "dr_grpo":
            loss = loss | {"max_completion_tokens": budget}
        split = UPDATES if loss["name"] == "reinforce" else 1
        runs[name] = {f"trainer_adapters.local.loss.{field}": value for field, value in loss.items()} | {
            "trainer_adapters.local.num_minibatches": UPDATES // split,
            "trainers.loop.examples_per_update": examples // split,
            "finetuning.num_epochs": epochs * split,
        }
    if task == "doors":
        del runs["reinforce_pp"]  # it takes the outcome only
        runs["ppo"]["trainer_adapters.local.loss.bootstrap"] = "none"  # an answer that is cut has lost the game
        outcome = {"workflow.credit": "outcome", "trainer_adapters.local.loss.gamma": 1.0}
        runs |= {f"{name}_outcome": runs[name] | outcome for name in ("dapo", "ppo")}
    return {name: run | {"finetuning.output_dir": f"{folder}/{name}/{{seed}}"} for name, run in runs.items()}


def main() -> int:
    """Trains with the chosen algorithms, prints a table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="arithmetic", help="default %(default)s")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help="default: all of ALGORITHMS")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each algorithm (default %(default)s)")
    parser.add_argument("--output-dir", type=Path, help="default runs/compare_TASK")
    arguments, others = parser.parse_known_args()
    folder = arguments.output_dir or Path("runs", f"compare_{arguments.task}")
    runs = runs_of(arguments.task, folder, arguments.algorithms or [])
    names = arguments.algorithms or list(runs)
    unknown = [name for name in names if name not in runs]
    if unknown:
        parser.error(f"--task {arguments.task} has no {unknown[0]!r}; wanted some of {', '.join(runs)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "algorithms.yml").write_text(json.dumps([runs[name] for name in names], indent=2) + "\n")
    sweep = [sys.executable, str(HERE / f"{arguments.task}.py"), "--list", str(folder / "algorithms.yml")]
    sweep += ["--sweep-dir", str(folder), "--seeds", str(arguments.seeds)]
    code = subprocess.run([*sweep, "--set", f"finetuning.seed={arguments.seed}", *others]).returncode
    results = {
        name: {file.parent.name: json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}/*/result.json"))}
        for name in names
    }
    (folder / "result.json").write_text(json.dumps(results, indent=2) + "\n")
    print_table(results, TASKS[arguments.task])
    return code


def print_table(results: dict[str, dict[str, dict[str, float]]], task: Task) -> None:
    """Print scores, intervals and seconds; `results` has the result.json of each algorithm and seed."""
    print(f"\n{'algorithm':<13} {'warm start':>10} {'after':>7}  {'95 % interval':<14} {'seconds':>7}  after, by seed")
    for name, by_seed in results.items():
        if not by_seed:
            continue
        before, after, seconds = (
            [run[key] for run in by_seed.values()] for key in (task.before, task.after, "seconds")
        )
        interval = mean_interval(after)
        shown = "" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"
        means = f"{statistics.mean(before):>10.3f} {statistics.mean(after):>7.3f}"
        scores = ", ".join(f"{score:.3f}" for score in after)
        print(f"{name:<13} {means}  {shown:<14} {statistics.median(seconds):>7.0f}  {scores}")


if __name__ == "__main__":
    sys.exit(main())
