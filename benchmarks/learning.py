"""Reward against seconds and against episodes: jaxft, TRL's GRPOTrainer and Tunix's GRPOLearner on one task.

    bash benchmarks/peers/make_environments.sh     # once
    python benchmarks/compare.py learning --out results.json

The task is to say the alphabet backwards from a letter (peers/alphabet.py); the reward is the share of letters that are
right before the first mistake. All sides start from one checkpoint of five million parameters that skips letters, with
one tokenizer and chat template, 32 questions of 8 answers a step, dapo without KL, AdamW with a constant rate after ten
steps of warm-up. jaxft leaves out answers of advantage 0 (`skip_zero_advantages`), for which the others have no option.
Each rate of `--learning-rates` is tried on all sides with two seeds of their own, and a side goes on with the one that
reaches the target on most of them, after the fewest episodes. Then all run every seed, in turn, each run in a fresh
process. The target is a mean reward of greedy answers to 500 held-out questions, looked at every other step; a run ends
when it has it.

Seconds count from the start of a process, imports left out; looks at the held-out questions are not counted. jaxft's
first look compiles programs, so what it takes longer than the second is counted; of Tunix's it is not. Runs share a
cache of compiled programs, as those of jaxft's commands do, which is empty at first. The first rate says what
compilation costs.
Intervals are bootstrapped over seeds (95 %).
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from jaxft.harness.process import CACHE_SETTINGS
from jaxft.report.intervals import mean_interval
from jaxft.runs.environment import environment
from machine import cpu_name
from peers.alphabet import NEW_TOKENS, write_questions

HERE = Path(__file__).parent
EXPERIMENTS = HERE.parent / "experiments"
SIDES = {"jaxft": None, "trl": "torch", "tunix": "tunix"}
"""Environment of each side; None is this one."""
MEASURES = ("episodes", "seconds")


def run_side(side: str, work: dict[str, Any]) -> dict[str, Any]:
    """Run a side in a fresh process and return its result."""
    directory = Path(os.environ.get("JAXFT_PEERS", HERE / "peers" / ".environments"))
    environment_name = SIDES[side]
    python = sys.executable if environment_name is None else str(directory / environment_name / "bin" / "python")
    folders = [HERE, HERE.parent, EXPERIMENTS] if environment_name is None else [HERE]
    with tempfile.TemporaryDirectory() as folder:
        work_path, result_path = Path(folder, "work.json"), Path(folder, "result.json")
        work_path.write_text(json.dumps(work))
        command = [python, str(HERE / "peers" / f"learning_{side}.py"), str(work_path), str(result_path)]
        variables = os.environ | {name: str(value) for name, value in CACHE_SETTINGS.items()}
        variables |= {"PYTHONPATH": os.pathsep.join(map(str, folders)), "JAX_COMPILATION_CACHE_DIR": work["cache"]}
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{side} ended with {ended.returncode}\n{ended.stderr[-3000:]}")
        return json.loads(result_path.read_text())


def reached(result: dict[str, Any], target: float) -> dict[str, float | None]:
    """Episodes and seconds at the first look that has the target; None if none has."""
    for row in result["curve"]:
        if row["score"] >= target:
            return {"episodes": row["episodes"], "seconds": row["seconds"]}
    return dict.fromkeys(MEASURES)


def tried_rates(
    sides: Sequence[str], work: dict[str, Any], rates: Sequence[float], seeds: Sequence[int], target: float
) -> dict[str, dict[float, list[Any]]]:
    """Run every rate on every side with every seed, print what each reaches, and return the curves."""
    tried: dict[str, dict[float, list[Any]]] = {side: {rate: [] for rate in rates} for side in sides}
    for rate, seed, side in product(rates, seeds, sides):
        result = run_side(side, work | {"learning_rate": rate, "seed": seed})
        tried[side][rate].append(result["curve"])
        last = result["curve"][-1]["score"]
        print(
            f"{side:<6} rate {rate:g}, seed {seed}: {shown(reached(result, target))}; at the end {last:.3f}", flush=True
        )
    return tried


def best_rate(tried: dict[float, list[Any]], target: float) -> float:
    """The rate that has the target on most seeds, after the fewest episodes; of equal ones the lowest.

    If none ever has it, the one whose runs end highest.
    """

    def rank(rate: float) -> tuple[float, float, float]:
        episodes = [reached({"curve": curve}, target)["episodes"] for curve in tried[rate]]
        there = [count for count in episodes if count is not None]
        return -len(there), sum(there), rate if there else -sum(curve[-1]["score"] for curve in tried[rate])

    return min(tried, key=rank)


def shown(at: dict[str, float | None]) -> str:
    """What `reached` found, as text."""
    if at["episodes"] is None:
        return "never there"
    return f"there after {at['episodes']:g} episodes, {at['seconds']:.1f} s"


def summary(results: list[dict[str, Any]], target: float) -> dict[str, Any]:
    """Medians and means over seeds of episodes and seconds to the target, with intervals of the means, and all values.

    A seed that is never there counts as the last for the median; mean and interval are None then.
    """
    found = [reached(result, target) for result in results]
    summarised: dict[str, Any] = {"curves": [result["curve"] for result in results]}
    for name in MEASURES:
        values = [each[name] for each in found]
        there = [value for value in values if value is not None]
        mean, interval = None, None
        if len(there) == len(values):
            mean, interval = statistics.mean(there), mean_interval(there)
        median = statistics.median_high([math.inf if value is None else value for value in values])
        summarised[name] = {
            "median": None if math.isinf(median) else median, "mean": mean, "interval": interval, "values": values
        }  # fmt: skip
    return summarised


def ratios_of(summaries: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The medians of each peer over those of jaxft, where both have them."""
    medians = {side: {name: one[name]["median"] for name in MEASURES} for side, one in summaries.items()}
    own = medians.pop("jaxft", dict.fromkeys(MEASURES))
    there = {side: of_peer for side, of_peer in medians.items() if None not in (*own.values(), *of_peer.values())}
    return {side: {name: of_peer[name] / own[name] for name in MEASURES} for side, of_peer in there.items()}


def main(command_line: Sequence[str]) -> None:
    """Make the checkpoint, choose the rates, run the seeds, print a table and write it."""
    parser = argparse.ArgumentParser(
        "compare.py learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="default: all")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[6e-4, 1.2e-3, 2.4e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="default: 0 to 4")
    parser.add_argument("--tuning-seeds", type=int, nargs="+", default=[100, 101], help="default: 100 and 101")
    parser.add_argument("--steps", type=int, default=60, help="at most (default %(default)s)")
    parser.add_argument("--evaluate-every", type=int, default=2, help="steps between looks (default %(default)s)")
    parser.add_argument("--target", type=float, default=0.7, help="held-out reward (default %(default)s)")
    parser.add_argument("--preset", default="qwen3-5m", help="shape of the policy (default %(default)s)")
    parser.add_argument("--warm-start-steps", type=int, default=200, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    arguments = parser.parse_args(command_line)
    with tempfile.TemporaryDirectory() as folder:
        work = {
            "case": "learning",
            "preset": arguments.preset,
            "checkpoint": str(Path(folder, "run", "model")),
            "train": str(Path(folder, "train.jsonl")),
            "held_out": str(Path(folder, "held_out.jsonl")),
            "cache": str(Path(folder, "xla")),
            "prompts": 32,
            "generations": 8,
            "new_tokens": NEW_TOKENS,
            "steps": arguments.steps,
            "target": arguments.target,
            "evaluate_every": arguments.evaluate_every,
            "seed": arguments.tuning_seeds[0],
            "learning_rate": arguments.learning_rates[0],
            "threads": len(os.sched_getaffinity(0)),
        }
        write_questions(Path(work["train"]), "train", 8192)
        write_questions(Path(work["held_out"]), "held out", 500)
        run_side("jaxft", work | {"case": "warm_start", "steps": arguments.warm_start_steps})
        tried = tried_rates(arguments.sides, work, arguments.learning_rates, arguments.tuning_seeds, arguments.target)
        rates = {side: best_rate(tried[side], arguments.target) for side in arguments.sides}
        results: dict[str, list[dict[str, Any]]] = {side: [] for side in arguments.sides}
        for seed in arguments.seeds:
            for side, found in results.items():
                found.append(run_side(side, work | {"learning_rate": rates[side], "seed": seed}))
                print(f"{side:<6} seed {seed}: {shown(reached(found[-1], arguments.target))}", flush=True)
    summaries = {side: summary(found, arguments.target) | {"rate": rates[side]} for side, found in results.items()}
    for side, one in summaries.items():
        medians = ", ".join(f"{one[name]['median']} {name}" for name in MEASURES)
        means = ", ".join(f"{one[name]['mean']} {one[name]['interval']}" for name in MEASURES)
        print(f"{side:<6} rate {one['rate']:g}: to {arguments.target}: medians {medians}; means {means}")
    ratios = ratios_of(summaries)
    for side, of_side in ratios.items():
        print(
            f"{side} over jaxft, medians: " + ", ".join(f"{ratio:.2f} x the {name}" for name, ratio in of_side.items())
        )
    if arguments.out is not None:
        about = {"cpu": cpu_name(), "load": os.getloadavg()[0], "environment": environment()}
        versions = {side: found[0]["versions"] for side, found in results.items()}
        options = {name: value for name, value in vars(arguments).items() if name != "out"}
        written = {"about": about, "versions": versions, "options": options, "tried": tried, "sides": summaries}
        arguments.out.write_text(json.dumps(written | {"ratios": ratios}, indent=1, allow_nan=False) + "\n")
