"""One GRPO update: gradients over microbatches, clipped to norm 1, and an AdamW step."""

import math
import re
from functools import cache, partial
from typing import Any

import jax
import optax

import jaxft
import roofline
from jaxft.core.update import loss_and_gradients
from machine import measuring_peak, tree_bytes
from records import Check, Line, Measured
from timing import in_turn
from workload import Workload

OPTIMIZER = optax.adamw(1e-5)
MAX_GRAD_NORM = 1.0
FLOAT_SHAPE = re.compile(r"\b(?:f16|bf16|f32|f64)\[([\d,]+)\]")


def run(workload: Workload) -> Measured:
    """Tokens per second, prompts included. The state must be donated, and the logits never held all at once."""
    shapes = workload.shapes
    batch, at_once = (
        workload.training_batch(),
        microbatch_rows(shapes.rows, shapes.row_tokens, shapes.microbatch_tokens),
    )
    update = grpo_update(workload.model, at_once)
    states = [jaxft.init_train_state(workload.fresh_params(), OPTIMIZER)]
    is_donated = []

    def step(number: int) -> None:
        before = states.pop()
        state, _ = jax.block_until_ready(update(before, batch))
        is_donated.append(all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.opt_state))))
        states.append(state)

    step(-1)  # what it needs to compile is not what it needs to run
    with measuring_peak() as peak:
        seconds = in_turn({"update": step}, workload.repeats)["update"]
    program = gradient_program(workload, batch)
    temporary_bytes = program.memory_analysis().temp_size_in_bytes
    scored_tokens = shapes.row_tokens - shapes.row_prompt_tokens  # the loss needs the logits of completions alone
    line = Line(
        name=f"{shapes.rows} rows of {shapes.row_tokens} tokens",
        amount=shapes.rows * shapes.row_tokens,
        seconds=seconds,
        phases=roofline.update(workload.config, shapes.rows, shapes.row_tokens, scored_tokens, workload.itemsize),
        shape={
            "rows": shapes.rows,
            "prompt_tokens": shapes.row_prompt_tokens,
            "row_tokens": shapes.row_tokens,
            "microbatch_rows": at_once,
        },
        figures={"temporary_bytes": temporary_bytes, "state_bytes": tree_bytes(states[0])} | peak,
    )
    vocabulary = workload.config.vocab_size
    all_logits = shapes.rows * (shapes.row_tokens - 1) * vocabulary
    fraction = most_logits(program.as_text(), vocabulary) / all_logits
    return Measured(
        lines=[line],
        checks=[
            Check(name="logits held at once / all logits", value=fraction, relation="at most", wanted=0.9),
            Check(name="training state donated", value=all(is_donated), relation="exactly", wanted=True),
        ],
    )


@cache
def grpo_update(model: jaxft.Model, microbatch_rows: int, optimizer: optax.GradientTransformation = OPTIMIZER) -> Any:
    """The update of every case and comparison."""
    return jaxft.make_update(
        model, jaxft.grpo_loss, optimizer, microbatch_rows=microbatch_rows, max_grad_norm=MAX_GRAD_NORM
    )


def gradient_program(workload: Workload, batch: jaxft.Batch) -> Any:
    """The compiled gradient of one microbatch, which needs the most memory of an update."""
    shapes = workload.shapes
    rows = microbatch_rows(shapes.rows, shapes.row_tokens, shapes.microbatch_tokens)
    microbatch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
    gradient = jax.jit(partial(loss_and_gradients, workload.model, jaxft.grpo_loss))
    return gradient.lower(workload.params, microbatch).compile()


def microbatch_rows(rows: int, row_tokens: int, microbatch_tokens: int) -> int:
    """Rows of each microbatch, as even as can be, in the fewest microbatches that the budget of tokens allows.

    >>> microbatch_rows(64, 192, 8192)  # 12,288 tokens: two
    32
    """
    microbatches = -(-rows * row_tokens // microbatch_tokens)
    return -(-rows // microbatches)


def most_logits(program_text: str, vocabulary: int) -> int:
    """Elements of the largest floating-point array of a compiled program with an axis as long as the vocabulary.

    >>> most_logits("%a = f32[4,100]{1,0} add(f32[4,100] %b, f32[4,100] %c), %d = f32[9999]", vocabulary=100)
    400
    """
    sizes = [[int(size) for size in shape.split(",")] for shape in FLOAT_SHAPE.findall(program_text)]
    return max((math.prod(shape) for shape in sizes if vocabulary in shape), default=0)
