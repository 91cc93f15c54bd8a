"""One GRPO update: gradients over microbatches, clipped to norm 1, and an AdamW step."""

import math
import re
import statistics
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxft
import roofline
from jaxft.core.update import loss_and_gradients
from jaxft.planning.flops import model_flops
from jaxft.planning.targets import CHIPS
from machine import live_device_bytes, measuring_peak, tree_bytes
from records import Check, Line, Measured
from timing import in_turn
from workload import Workload

OPTIMIZER = optax.adamw(1e-5)
MAX_GRAD_NORM = 1.0
FLOAT_SHAPE = re.compile(r"\b(?:f16|bf16|f32|f64)\[([\d,]+)\]")


def run(workload: Workload) -> Measured:
    """Tokens per second, prompts included, in rows of one sequence and of two.

    The state must be donated, and the logits never held all at once. On a chip whose limits are known, rows must reach
    45 % of its arithmetic, and the peak of memory must be that of the compiled program to 5 %.
    """
    batch, measured = workload.training_batch(), Measured()
    for sequences, rows in ((1, batch), (2, packed(batch))):
        _measure(workload, rows, sequences, measured)
    return measured


def _measure(workload: Workload, batch: jaxft.Batch, sequences: int, measured: Measured) -> None:
    """Add the line and the checks of a batch whose rows have a number of sequences."""
    shapes = workload.shapes
    at_once = microbatch_rows(shapes.rows, shapes.row_tokens, shapes.microbatch_tokens)
    update = grpo_update(workload.model, at_once)
    program = gradient_program(workload, batch)
    memory = program.memory_analysis()
    states = [jaxft.init_train_state(workload.fresh_params(), OPTIMIZER)]
    planned_bytes = live_device_bytes() + memory.temp_size_in_bytes + memory.output_size_in_bytes
    is_donated = []

    def step(number: int) -> None:
        before = states.pop()
        state, _ = jax.block_until_ready(update(before, batch))
        is_donated.append(all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.opt_state))))
        states.append(state)

    step(-1)  # what it needs to compile is not what it needs to run
    with measuring_peak() as peak:
        seconds = in_turn({"update": step}, workload.repeats)["update"]
    tokens = shapes.row_tokens // sequences
    scored_tokens = tokens - shapes.row_prompt_tokens // sequences  # the loss needs the logits of completions alone
    count = shapes.rows * sequences
    name = f"{shapes.rows} rows of {shapes.row_tokens} tokens" + (", packed" if sequences > 1 else "")
    line = Line(
        name=name,
        amount=shapes.rows * shapes.row_tokens,
        seconds=seconds,
        phases=roofline.update(workload.config, count, tokens, scored_tokens, workload.itemsize),
        shape={
            "rows": shapes.rows,
            "prompt_tokens": shapes.row_prompt_tokens // sequences,
            "row_tokens": shapes.row_tokens,
            "sequences_per_row": sequences,
            "microbatch_rows": at_once,
        },
        figures={
            "temporary_bytes": memory.temp_size_in_bytes,
            "state_bytes": tree_bytes(states[0]),
            "planned_device_bytes": planned_bytes,
        }
        | peak,
    )
    measured.lines.append(line)
    vocabulary = workload.config.vocab_size
    all_logits = shapes.rows * (shapes.row_tokens - 1) * vocabulary
    fraction = most_logits(program.as_text(), vocabulary) / all_logits
    checks = [
        Check(name=f"{name}: logits held at once / all logits", value=fraction, relation="at most", wanted=0.9),
        Check(name=f"{name}: training state donated", value=all(is_donated), relation="exactly", wanted=True),
    ]
    chip = next((chip for chip in CHIPS.values() if chip.name == jax.devices()[0].device_kind), None)
    if chip is not None and workload.dtype == "bfloat16":
        needed = model_flops(workload.config, count, tokens)
        mfu = needed / statistics.median(seconds) / chip.flops_per_second
        checks.append(Check(name=f"{name}: MFU, of the chip's limit", value=mfu, relation="at least", wanted=0.45))
    found = peak.get("peak_device_bytes", 0.0)
    if found > peak.get("peak_device_bytes_before", found):  # else earlier work has needed more
        difference = abs(found / planned_bytes - 1)
        checks.append(Check(name=f"{name}: memory beside plan", value=difference, relation="at most", wanted=0.05))
    measured.checks.extend(checks)


def packed(batch: jaxft.Batch) -> jaxft.Batch:
    """The same rows, each as two sequences of half its tokens, with prompts of half the length.

    >>> rows = jaxft.Batch(tokens=jnp.ones((1, 4), int), completion_mask=jnp.array([[False, False, True, True]]))
    >>> halves = jax.jit(packed)(rows)
    >>> print(halves.positions, halves.segment_ids, halves.completion_mask)
    [[0 1 0 1]] [[1 1 2 2]] [[False  True False  True]]
    """
    rows, width = batch.tokens.shape
    half = width // 2
    places = jnp.broadcast_to(jnp.arange(width), (rows, width))
    segment_ids = 1 + (places >= half).astype(jnp.int32)
    positions = jnp.where(places < half, places, places - half)
    prompt_tokens = (~batch.completion_mask).sum(axis=1, keepdims=True) // 2
    advantages = batch.advantages
    if advantages is not None and advantages.ndim == 1:
        advantages = jnp.broadcast_to(advantages[:, None], (rows, width))
    return batch._replace(
        completion_mask=positions >= prompt_tokens,
        positions=positions,
        segment_ids=segment_ids,
        advantages=advantages,
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
