"""jaxft and its peers at the same work: seconds, tokens per second, memory, and how many times as long a peer takes.

    bash benchmarks/peers/make_environments.sh                                   # once; about five minutes
    python benchmarks/compare.py rollout update --model m60 --out results.json   # about twenty minutes on two cores

Cases: `rollout` (8 prompts, 8 generations each, 64 and 128 tokens, nothing stops early), `heavy_tailed` (256 requests,
answers of 64 tokens in the median and 1,024 at most, 64 slots), `update` (GRPO loss, clip, AdamW on the rows of a
rollout) and `epoch` (rollout, reward, update). Random weights, float32, as many threads on every side. `compare.py
learning` has options of its own (learning.py): reward against seconds and episodes, in jaxft, TRL and Tunix.

In every round the sides run in turn, each in a fresh process; a side warms up (and compiles) once per process, untimed.
Nothing else may run meanwhile: torch, whose threads wait for each other, becomes ten times slower beside one busy
neighbour. The load average before the first process is printed and kept. A side that cannot run is named with the last
line of its error, and the comparison goes on. The ratio is a side's median over jaxft's: 2.00x is twice jaxft's time.
Notes below the table say what the sides do differently.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from jaxft.models.config import model_preset
from jaxft.runs.environment import environment
from machine import cpu_name
from shapes import MODELS, REFERENCE, TINY, heavy_tailed_lengths

PEERS = Path(__file__).parent / "peers"
CASES = ("rollout", "heavy_tailed", "update", "epoch")


class Side(NamedTuple):
    """A program under `peers/`, its environment (None: this one) and the cases that it can do."""

    program: str
    environment: str | None
    cases: tuple[str, ...]
    variant: str | None = None


SIDES = {
    "jaxft": Side("jaxft_side.py", None, CASES, "engine"),
    "jaxft-lockstep": Side("jaxft_side.py", None, ("heavy_tailed",), "lockstep"),
    "huggingface": Side("huggingface_side.py", "torch", ("rollout", "heavy_tailed"), "static"),
    "huggingface-continuous": Side("huggingface_side.py", "torch", ("heavy_tailed",), "continuous"),
    "trl": Side("trl_side.py", "torch", ("update", "epoch")),
    "tunix": Side("tunix_side.py", "tunix", ("rollout", "heavy_tailed", "update")),
}


def make_work(case: str, model: str, repeats: int, threads: int) -> dict[str, Any]:
    """The work file of every side, without the side's own `variant` and `microbatch_rows`."""
    config = model_preset(MODELS[model])
    names = ("family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
    shape = {name: dataclasses.asdict(config)[name] for name in (*names, "head_dim", "tie_word_embeddings")}
    shapes = TINY if model == "tiny" else REFERENCE
    lengths = heavy_tailed_lengths(shapes.requests, shapes.median_tokens, shapes.most_tokens)
    return {
        "case": case,
        "shape": shape,
        "prompts": shapes.prompts,
        "generations": shapes.generations,
        "prompt_tokens": shapes.prompt_tokens,
        "new_tokens": shapes.new_tokens,
        "slots": shapes.slots,
        "seed": 0,
        "answer_tokens": lengths if case == "heavy_tailed" else None,
        "repeats": repeats,
        "threads": threads,
    }


class CannotRunError(Exception):
    """A side has no result; the message says why."""


def run_side(side: Side, work: dict[str, Any], variables: dict[str, str], timeout_seconds: float) -> dict[str, Any]:
    """Run one side in a fresh process and return its result.

    Raises:
        CannotRunError: its environment is missing, it failed, or it took too long.
    """
    directory = Path(os.environ.get("JAXFT_PEERS", PEERS / ".environments"))
    python = Path(sys.executable) if side.environment is None else directory / side.environment / "bin" / "python"
    if not python.exists():
        raise CannotRunError(f"no environment {python.parents[1]}; make_environments.sh makes it")
    with tempfile.TemporaryDirectory() as folder:
        work_path, result_path = Path(folder, "work.json"), Path(folder, "result.json")
        work_path.write_text(json.dumps(work))
        command = [str(python), str(PEERS / side.program), str(work_path), str(result_path)]
        # Every side imports `timing`, and jaxft's the cases. Nothing else of the caller's path may reach a peer; jaxft
        # itself need not be installed.
        folders = [PEERS.parent, PEERS.parents[1]] if side.environment is None else [PEERS.parent]
        path = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
        try:
            ended = subprocess.run(
                command, env=os.environ | path | variables, capture_output=True, text=True, timeout=timeout_seconds
            )
        except subprocess.TimeoutExpired:
            raise CannotRunError(f"not done after {timeout_seconds:g} s") from None
        if ended.returncode != 0 or not result_path.exists():
            lines = [line for line in ended.stderr.splitlines() if line.strip()]
            raise CannotRunError(lines[-1] if lines else f"exit code {ended.returncode}")
        return json.loads(result_path.read_text())


def compare(work: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the sides in turn, round by round; summaries by the name of the side."""
    able = [name for name in arguments.sides if work["case"] in SIDES[name].cases]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in able}
    errors: dict[str, str] = {}
    for number in range(arguments.rounds):
        for name, results in rounds.items():
            if name in errors:
                continue
            print(f"  round {number + 1} of {arguments.rounds}: {name}", file=sys.stderr, flush=True)
            own = {"variant": SIDES[name].variant, "microbatch_rows": arguments.microbatch_rows.get(name)}
            try:
                results.append(run_side(SIDES[name], work | own, arguments.environment, arguments.timeout_seconds))
            except CannotRunError as error:
                errors[name] = str(error)
    summaries = {name: summary(results) for name, results in rounds.items() if name not in errors}
    for one in summaries.values():
        one["ratio"] = one["median_seconds"] / summaries["jaxft"]["median_seconds"] if "jaxft" in summaries else None
    return summaries | {name: {"error": error, "rounds": rounds[name]} for name, error in errors.items()}


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the rounds of a side; a round counts with the median of its repeats."""
    medians = [statistics.median(result["seconds"]) for result in results]
    seconds = statistics.median(medians)
    return {
        "median_seconds": seconds,
        "min_seconds": min(medians),
        "max_seconds": max(medians),
        "tokens_per_second": results[0]["tokens"] / seconds,
        "peak_bytes": max(result["peak_bytes"] for result in results),
        "versions": results[0]["versions"],
        "metrics": results[0]["metrics"],
        "notes": results[0]["notes"],
        "rounds": results,
    }


def print_table(work: dict[str, Any], model: str, summaries: dict[str, Any]) -> None:
    """Print one line per side, and below it the notes on what each does differently."""
    answers = work["answer_tokens"]
    about = f"{work['prompts']} x {work['generations']} rows of {work['prompt_tokens']} + {work['new_tokens']} tokens"
    if answers is not None:
        about = f"{len(answers)} answers of {statistics.mean(answers):.1f} tokens in the mean, "
        about += f"{statistics.median(answers):g} in the median, {max(answers)} at most, {work['slots']} slots"
    print(f"\n{work['case']} {model}: {about}")
    print(f"{'':<22} {'median s':>9} {'min':>8} {'max':>8} {'tokens/s':>10} {'peak MiB':>9} {'ratio':>7}")
    for name, one in summaries.items():
        if "error" in one:
            print(f"{name:<22} cannot run: {one['error']}")
            continue
        ratio = "-" if one["ratio"] is None else f"{one['ratio']:.2f}x"
        print(
            f"{name:<22} {one['median_seconds']:>9.3f} {one['min_seconds']:>8.3f} {one['max_seconds']:>8.3f} "
            f"{one['tokens_per_second']:>10,.0f} {one['peak_bytes'] / 2**20:>9,.0f} {ratio:>7}"
        )
    for name, one in summaries.items():
        for note in one.get("notes", []):
            print(f"  {name}: {note}")
        if one.get("metrics"):
            print(f"  {name} computes {', '.join(one['metrics'])}")


def assignment(text: str) -> tuple[str, str]:
    """`NAME=VALUE` as a pair."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument(
        "--model", choices=MODELS, default="m2", metavar="NAME", help="m2, m60 or tiny (default %(default)s)"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="sides to run (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="processes per side (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="timed runs in a process (default %(default)s)")
    parser.add_argument(
        "--timeout-seconds", type=float, default=1800, help="most time of a process (default %(default)s)"
    )
    parser.add_argument(
        "--environment",
        type=assignment,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="environment variables of every side",
    )
    parser.add_argument(
        "--microbatch-rows",
        type=assignment,
        nargs="+",
        default=[],
        metavar="SIDE=ROWS",
        help="rows of a side's microbatch (default: 8)",
    )
    parser.add_argument("--out", type=Path, help="file for all results, with versions and metrics")
    arguments = parser.parse_args()
    arguments.environment = dict(arguments.environment)
    arguments.microbatch_rows = {name: int(rows) for name, rows in arguments.microbatch_rows}
    if arguments.rounds < 1 or arguments.repeats < 1:
        parser.error(f"--rounds is {arguments.rounds} and --repeats {arguments.repeats}; wanted at least 1 of each")
    return arguments


def main() -> None:
    """Print a table per case, and write one file for all if asked."""
    arguments = parse_arguments()
    threads = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    load_average, found = os.getloadavg()[0], {}
    for case in dict.fromkeys(arguments.cases):
        work = make_work(case, arguments.model, arguments.repeats, threads)
        summaries = compare(work, arguments)
        print_table(work, arguments.model, summaries)
        found[case] = {"work": work, "sides": summaries}
    set_for_all = " ".join(f"{name}={value}" for name, value in arguments.environment.items()) or "nothing"
    print(f"\n{cpu_name()}, {threads} threads, load average {load_average:.1f} before the first process")
    print(f"set in every side's environment: {set_for_all}")
    if arguments.out is not None:
        about = {"model": arguments.model, "rounds": arguments.rounds, "environment_variables": arguments.environment}
        machine = {
            "processor": cpu_name(),
            "threads": threads,
            "load_average": load_average,
            "environment": environment(),
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(about | machine | {"cases": found}, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["learning"]:
        import learning  # a case that trains, with options of its own

        learning.main(sys.argv[2:])
    else:
        main()
