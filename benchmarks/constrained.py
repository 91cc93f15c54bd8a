"""Cost of constrained answers: seconds per decoding step with 8 of 64 rows constrained, and with none.

    python benchmarks/constrained.py [--model qwen3-2m] [--vocabulary 150000] [--steps 32] [--out result.json]

Both run in turn in one process, on the same engine, and the other rows sample the same tokens. On two CPU cores with
qwen3-2m it takes two minutes. Expect a ratio below 1.1; on a machine that others use, that of the CPU time is the
steadier one.
"""

import argparse
import asyncio
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import jaxft
from jaxft.models.config import model_preset
from jaxft.models.load import init_model
from jaxft.rollout.calls import Completion
from jaxft.rollout.device import DeviceThread
from jaxft.rollout.engine import Engine
from jaxft.rollout.grammar import Compiler, Constraint, json_grammar
from jaxft.rollout.requests import Request
from jaxft.rollout.tokenizer import BYTE_OF_CHARACTER
from timing import in_turn

ROWS, CONSTRAINED = 64, 8
PROMPT_TOKENS = 16
SCHEMA = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "minItems": 500,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 8},
                    "kind": {"enum": ["a", "b", "c"]},
                    "value": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                },
                "required": ["name", "kind", "value"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["items"],
    "additionalProperties": False,
}
"""A schema that no answer of the benchmark ends."""


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of so many tokens: all bytes, and pieces of words as they begin and continue a word."""
    draw = np.random.default_rng(0)
    pieces = list(BYTE_OF_CHARACTER)
    known = set(pieces)
    while len(pieces) < size - 1:
        letters = "".join(draw.choice(list("etaoinshrdlucmfwypvbgkqjxz"), draw.integers(2, 9)))
        piece = ("\u0120" if draw.random() < 0.5 else "") + letters
        if piece not in known:
            known.add(piece)
            pieces.append(piece)
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def make_requests(steps: int, vocabulary: int, begin: Callable[[], Constraint] | None) -> list[Request]:
    """Return one request for each row, of which the first ones are constrained if `begin` is given."""
    draw = np.random.default_rng(1)
    return [
        Request(
            tuple(draw.integers(256, vocabulary - 1, PROMPT_TOKENS).tolist()),
            (0, 0, 0, 0, 0, row),
            steps,
            begin_constraint=begin if row < CONSTRAINED else None,
        )
        for row in range(ROWS)
    ]


def measure(model_name: str, vocabulary: int, steps: int, repeats: int) -> dict[str, Any]:
    """Return the record of both sides, after a check that the other rows have the same tokens."""
    model, params = init_model(model_preset(model_name, vocab_size=vocabulary), jax.random.key(0))
    decode_params = jax.jit(model.decode_layout)(params)
    device = DeviceThread()
    engine = Engine(
        model, device, lambda: (decode_params, 0), seed=0, slots=ROWS, max_context_tokens=256, shapes=params
    )
    matcher = Compiler(make_tokenizer(vocabulary), [vocabulary - 1]).compile(json_grammar(SCHEMA))
    completions: dict[str, list[Completion]] = {}
    cpu: dict[str, list[float]] = {"free": [], "constrained": []}

    def job(name: str, begin: Callable[[], Constraint] | None) -> Callable[[int], object]:
        requests = make_requests(steps, vocabulary, begin)

        async def serve() -> None:
            completions[name] = await asyncio.gather(*(engine.submit(request) for request in requests))

        def run(number: int) -> None:
            started = time.process_time()
            asyncio.run(serve())
            if number:
                cpu[name].append(1000 * (time.process_time() - started) / steps)

        return run

    jobs = {"free": job("free", None), "constrained": job("constrained", lambda: Constraint(matcher.deep_copy(), None))}
    seconds = in_turn(jobs, repeats)
    device.close()
    assert completions["free"][CONSTRAINED:] == completions["constrained"][CONSTRAINED:]
    steps_ms = {name: [1000 * each / steps for each in taken] for name, taken in seconds.items()}
    ratios = [b / a for a, b in zip(*steps_ms.values(), strict=True)]
    return {
        "model": model_name,
        "vocabulary": vocabulary,
        "rows": ROWS,
        "constrained_rows": CONSTRAINED,
        "milliseconds_per_step": steps_ms,
        "median": {name: statistics.median(each) for name, each in steps_ms.items()},
        "cpu_milliseconds_per_step": cpu,
        "cpu_ratio": statistics.median(b / a for a, b in zip(*cpu.values(), strict=True)),
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "versions": {"jaxft": jaxft.__version__, "jax": jax.__version__, "python": platform.python_version()},
        "device": str(jax.devices()[0]),
    }


def main() -> None:
    """Measure, print a table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-2m")
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    record = measure(given.model, given.vocabulary, given.steps, given.repeats)
    for name, milliseconds in record["median"].items():
        print(f"{name:12} {milliseconds:8.2f} ms a step")
    print(f"ratio of CPU time {record['cpu_ratio']:.3f}")
    print(f"ratio        {record['ratio']:8.3f} ({record['spread'][0]:.3f} to {record['spread'][1]:.3f})")
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
