"""The command line of the benchmarks, and which jobs it asks for. Nothing here imports jax."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxft.bench.shapes import ACCELERATOR, REFERENCE, TINY, Shapes
from jaxft.models.config import PRESETS

DESCRIPTION = """Measures what each part of jaxft does per second, and what share of the device's limit that is.

  jaxft bench rollout update --model m60      two cases at the reference shapes
  jaxft bench --suite cpu --out cpu.json      everything, on the models m2 and m60
  jaxft bench --suite gpu --out gpu.json      Qwen3-0.6B and 1.7B with random weights in bfloat16, sized for one GPU
"""

CASES = ("prefill", "decode", "rollout", "update", "logprobs", "epoch", "memory", "harness", "compile")
ALIASES = {"m2": "qwen3-2m", "m60": "qwen3-58m"}
"""Short names of the two reference shapes."""

TINY_MODEL = "qwen3-50k"


class Suite(NamedTuple):
    """A list of cases with the models and shapes that belong to them."""

    cases: tuple[str, ...]
    models: tuple[str, ...]
    dtype: str
    shapes: Shapes


SUITES = {
    "cpu": Suite(CASES, ("m60", "m2"), "float32", REFERENCE),
    "gpu": Suite(CASES, ("qwen3-0.6b", "qwen3-1.7b"), "bfloat16", ACCELERATOR),
}


@dataclass(frozen=True)
class Job:
    """A case on a model; the harness has none."""

    case: str
    model: str | None
    dtype: str
    shapes: Shapes


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options of the benchmarks to a parser, and returns it."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--suite", choices=tuple(SUITES), help="a list of cases with models and shapes; CASE selects")
    parser.add_argument("--model", choices=(*ALIASES, *PRESETS), metavar="NAME", help=_MODEL_HELP)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of products; parameters are float32 (default: the suite's)"
    )
    parser.add_argument("--repeats", type=_count, default=3, help="timed runs of everything (default %(default)s)")
    parser.add_argument(
        "--shrink", action="store_true", help="a tiny model and small counts: shows that all of it runs"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write everything that was found, as JSON")
    return parser


_MODEL_HELP = f"{', '.join((*ALIASES, *PRESETS))} (default m60, or those of the suite)"


def jobs_of(
    cases: Sequence[str], suite: str | None = None, model: str | None = None, dtype: str | None = None, *, shrink: bool
) -> list[Job]:
    """The jobs that a command line names, case by case and each model in turn.

    Raises:
        ValueError: neither cases nor a suite, or a case that there is not.

    >>> [(job.case, job.model) for job in jobs_of(["update", "harness"], suite="cpu", shrink=False)]
    [('update', 'm60'), ('update', 'm2'), ('harness', None)]
    >>> [(job.case, job.model) for job in jobs_of(["decode"], suite="gpu", shrink=True)]
    [('decode', 'qwen3-50k')]
    """
    for case in cases:
        if case not in CASES:
            raise ValueError(f"no case is named {case!r}; wanted some of {', '.join(CASES)}")
    if not cases and suite is None:
        raise ValueError(f"nothing to measure: name cases ({', '.join(CASES)}) or a --suite ({', '.join(SUITES)})")
    chosen = Suite(tuple(cases), ("m60",), "float32", REFERENCE) if suite is None else SUITES[suite]
    models = (TINY_MODEL,) if shrink else chosen.models if model is None else (model,)
    shapes = TINY if shrink else chosen.shapes
    jobs = []
    for case in chosen.cases:
        if cases and case not in cases:
            continue
        for name in (None,) if case == "harness" else models:
            jobs.append(Job(case, name, dtype or chosen.dtype, shapes))
    return list(dict.fromkeys(jobs))


def _count(text: str) -> int:
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError("wants a whole number, at least 1")
