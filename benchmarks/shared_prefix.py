"""Updates whose prompts are computed once, beside the plain ones: operations, memory, time in turn, and the gradients.

    python benchmarks/shared_prefix.py --out benchmarks/results/shared_prefix.json    # half an hour on two cores
    python benchmarks/shared_prefix.py --shapes 1536,512,8                            # one shape

A shape is the tokens of a prompt, the tokens of an answer, and the answers to it, a power of two. Both forms are one
microbatch. Expect a third of the operations and of the temporaries at 1536,512,8, and a third of the time. A
shape is marked `plain` where the trainer's planner does not share its prompts.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxft
from jaxft.core.update import loss_and_gradients
from jaxft.models.config import model_preset
from jaxft.models.decoder import decoder
from jaxft.rollout.sequences import TokenSequence
from jaxft.training.batch import BatchPlanner, Row, TrainingBatch, make_batch, padded_width
from machine import this_machine
from shapes import MODELS
from timing import in_turn

SHAPES = "1536,512,8", "1024,1024,8", "256,768,8", "512,128,16", "1536,512,2"
OPTIMIZER = optax.sgd(1e-3)


def make_rows(prompt: int, answer: int, count: int, vocabulary: int) -> list[Row]:
    """Answers to one prompt, of random tokens."""
    draw = np.random.default_rng(0)
    asked, rows, numbers = draw.integers(1, vocabulary, prompt).tolist(), [], [-5.0] * (prompt + answer)
    recorded: Any = {"sampler_logprobs": numbers, "behavior_logprobs": numbers, "temperatures": [1.0] * len(numbers)}
    for number in range(count):
        tokens = asked + draw.integers(1, vocabulary, answer).tolist()
        mask = [False] * prompt + [True] * answer
        row = TokenSequence(tokens=tokens, completion_mask=mask, policy_versions=[0] * len(tokens), **recorded)
        rows.append(Row(row, number))
    return rows


def with_advantages(job: TrainingBatch, count: int) -> jaxft.Batch:
    """The only microbatch, with an advantage of each sequence."""
    advantages: Any = job.table(np.linspace(-1, 1, count, dtype=np.float32)[job.places[0]])
    (batch,) = job._replace(batch=job.batch._replace(advantages=advantages)).microbatches()
    return batch


def compare(preset: str, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Compile, check and time both forms of a shape, and return what is written of it."""
    config = model_preset(preset)
    model, rows = decoder(config), make_rows(*shape, config.vocab_size)
    at_once = shape[-1] * padded_width(sum(shape[:2]))
    planners = {"plain": BatchPlanner(at_once), "shared": BatchPlanner(at_once, packed=True, shared_tokens=at_once)}
    batches = {name: with_advantages(make_batch(rows, each), shape[-1]) for name, each in planners.items()}
    params = jax.jit(model.init)(jax.random.key(0))
    gradient = jax.jit(partial(loss_and_gradients, model, jaxft.grpo_loss))
    programs: Any = {name: gradient.lower(params, batch).compile() for name, batch in batches.items()}
    found = [
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(programs[name](params, batch)[-1]))])
        for name, batch in batches.items()
    ]
    update = jaxft.make_update(model, jaxft.grpo_loss, OPTIMIZER)

    def step(batch: jaxft.Batch, number: int) -> None:
        copies = jax.tree.map(lambda x: x.copy(), params)
        jax.block_until_ready(update(jaxft.init_train_state(copies, OPTIMIZER), batch))

    seconds = in_turn({name: partial(step, batch) for name, batch in batches.items()}, rounds)
    flops = [program.cost_analysis()["flops"] for program in programs.values()]
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in programs.values()]
    medians = [*map(statistics.median, seconds.values())]
    ratios = {
        "operations": flops[1] / flops[0],
        "temporaries": temporaries[1] / temporaries[0],
        "times_as_fast": medians[0] / medians[1],
        "gradient_difference": float(np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0])),
    }
    is_shared = batches["shared"].branches is not None
    return {"shape": shape, "is_shared": is_shared, "seconds": seconds, **ratios}


def main() -> None:
    """Compare the forms of every shape and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="m2", help="default %(default)s")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="P,A,N", help="default: five")
    parser.add_argument("--rounds", type=int, default=3, help="timed updates of each form (default %(default)s)")
    parser.add_argument("--out", type=Path, help="file for all results, with versions and the machine")
    parsed = parser.parse_args()
    results = []
    for text in parsed.shapes:
        prompt, answer, count = (int(part) for part in text.split(","))
        result = compare(MODELS[parsed.model], (prompt, answer, count), parsed.rounds)
        results.append(result)
        print(
            f"{text:<14} {'shared' if result['is_shared'] else 'plain':<7} operations {result['operations']:.2f}, "
            f"temporaries {result['temporaries']:.2f}, {result['times_as_fast']:.2f} times as fast, "
            f"gradients differ by {result['gradient_difference']:.1e}",
            flush=True,
        )
    if parsed.out:
        written = {"model": parsed.model, "machine": this_machine().model_dump(), "results": results}
        parsed.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
