"""The common part of all sides: the work, the same inputs from the same seed, and the result.

A side is a program, `PYTHONPATH=benchmarks python benchmarks/peers/SIDE.py work.json result.json`, in an environment of
its own. The first file holds the work (`compare.py` writes it), the second gets seconds, tokens and memory. This module
runs in every environment, so it needs only numpy.
"""

import importlib.metadata
import json
import platform
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from timing import peak_resident_bytes, seconds_of

LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-6, 0.01, 1.0
"""AdamW of every side, with betas 0.9 and 0.999 and epsilon 1e-8."""

Work = dict[str, Any]


def count_rows(work: Work) -> int:
    """Rows of a rollout or an update: every generation of every prompt."""
    return work["prompts"] * work["generations"]


def make_prompts(work: Work) -> list[list[int]]:
    """The prompts as token ids: one per request of `heavy_tailed`, else `prompts` of them."""
    count = len(work["answer_tokens"]) if work["case"] == "heavy_tailed" else work["prompts"]
    return _ids(work, (count, work["prompt_tokens"])).tolist()


def make_training_rows(work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and completions `[B T]`, each prompt once per generation, and normal group advantages `[B]`."""
    prompts = np.repeat(_ids(work, (work["prompts"], work["prompt_tokens"])), work["generations"], axis=0)
    completions = _ids(work, (count_rows(work), work["new_tokens"]), stream=1)
    rewards = np.random.default_rng((work["seed"], 2)).normal(size=(work["prompts"], work["generations"]))
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / rewards.std(axis=1, keepdims=True)
    return np.concatenate([prompts, completions], axis=1), advantages.reshape(-1).astype(np.float32)


def _ids(work: Work, shape: tuple[int, int], stream: int = 0) -> np.ndarray:
    # 0 and 1 are left out: what pads or ends a text is 0 or 1 in many vocabularies.
    return np.random.default_rng((work["seed"], stream)).integers(2, work["shape"]["vocab_size"], shape)


def even_share(completions: list[list[int]]) -> list[float]:
    """The reward of `epoch`: the share of even ids in each completion."""
    return [sum(token % 2 == 0 for token in row) / len(row) for row in completions]


def batches_of_slots(work: Work) -> list[range]:
    """The requests of `heavy_tailed` in order, as many at a time as there are slots."""
    count = len(work["answer_tokens"])
    return [range(start, min(start + work["slots"], count)) for start in range(0, count, work["slots"])]


def check_counts(sampled: list[int], wanted: list[int]) -> None:
    """Raise unless every row has the number of tokens that the work asks for.

    Raises:
        RuntimeError: a row has another number; the message names the first.
    """
    for row, (have, want) in enumerate(zip(sampled, wanted, strict=True)):
        if have != want:
            raise RuntimeError(f"row {row} has {have} tokens; the work asks for {want}")


def measure(work: Work, run: Callable[[int], None]) -> dict[str, Any]:
    """Time `run(repeat)` once as a warm-up (it compiles) and then `repeats` times; it returns when all is computed."""
    before = peak_resident_bytes()
    seconds = [seconds_of(partial(run, repeat)) for repeat in range(work["repeats"] + 1)]
    return {"peak_bytes_before": before, "warm_up_seconds": seconds[0], "seconds": seconds[1:]}


def main(side: str, packages: tuple[str, ...], cases: dict[str, Callable[[Work], dict[str, Any]]]) -> None:
    """Run the case of the work file and write the result. On failure the last line of stderr is the error."""
    work_path, result_path = sys.argv[1:]
    work = json.loads(Path(work_path).read_text())
    try:
        measured = cases[work["case"]](work)
    except Exception as error:
        traceback.print_exc()
        sys.exit(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    versions = {package: importlib.metadata.version(package) for package in packages}
    result = {
        "side": side,
        "versions": {"python": platform.python_version(), **versions},
        "tokens": _count_tokens(work),
        "metrics": [],
        "notes": [],
        **measured,
        "peak_bytes": peak_resident_bytes(),
    }
    Path(result_path).write_text(json.dumps(result, indent=2) + "\n")


def _count_tokens(work: Work) -> int:
    if work["case"] == "heavy_tailed":
        return sum(work["answer_tokens"])
    width = work["prompt_tokens"] + work["new_tokens"] if work["case"] == "update" else work["new_tokens"]
    return count_rows(work) * width
