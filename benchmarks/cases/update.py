"""One GRPO update: gradients over microbatches, clipped to norm 1, and an AdamW step."""

import math
import re
import statistics
import time
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxft
import roofline
from jaxft.core.partition import trainable
from jaxft.core.update import loss_and_gradients
from jaxft.models.ceilings import find_chip, model_flops
from machine import live_device_bytes, measuring_peak, tree_bytes
from records import Check, Line, Measured
from timing import in_turn
from workload import Workload

OPTIMIZER = optax.adamw(1e-5)
MAX_GRAD_NORM = 1.0

LEAST_MFU = {"qwen3-1.7b": 0.51, "qwen3-8b": 0.5}
"""Share of a chip's arithmetic that updates must reach, by preset; 0.45 of others. Six operations count for each weight
and token, those of frozen weights included, and causal attention."""

FLOAT_SHAPE = re.compile(r"\b(?:f16|bf16|f32|f64)\[([\d,]+)\]")


def run(workload: Workload) -> Measured:
    """Tokens per second, prompts included, in rows of one sequence and of two.

    The state must be donated, and the logits never held all at once. On a chip whose limits are known, rows must reach
    a part of its arithmetic (`LEAST_MFU`), packed rows must not be slower, no call may take three times as long as the
    median one, and the peak of memory must be that of the compiled program to 5 %.
    """
    batch, measured = workload.training_batch(), Measured()
    for sequences, rows in ((1, batch), (2, packed(batch))):
        _measure(workload, rows, sequences, measured)
    if jax.default_backend() != "cpu":
        padded, filled = (statistics.median(line.seconds) for line in measured.lines)
        measured.checks.append(Check(name="packed / padded", value=filled / padded, relation="at most", wanted=1.0))
    return measured


def _measure(workload: Workload, batch: jaxft.Batch, sequences: int, measured: Measured) -> None:
    """Add the line and the checks of a batch whose rows have a number of sequences."""
    shapes = workload.shapes
    at_once = microbatch_rows(shapes.rows, shapes.row_tokens, shapes.microbatch_tokens)
    update = grpo_update(workload.model, at_once)
    states = [jaxft.init_train_state(workload.fresh_params(), OPTIMIZER, workload.model)]
    is_donated, called = [], []

    def step(number: int) -> None:
        before, begun = states.pop(), time.perf_counter()
        state, _ = jax.block_until_ready(update(before, batch))
        called.append(time.perf_counter() - begun)
        trained = trainable(workload.model, before.params), before.opt_state
        is_donated.append(all(leaf.is_deleted() for leaf in jax.tree.leaves(trained)))
        states.append(state)

    held_bytes = live_device_bytes()
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
        # A frozen base has neither gradients nor optimizer state, and its limit is not known.
        phases=[]
        if workload.model.lora is not None
        else roofline.update(workload.config, count, tokens, scored_tokens, workload.itemsize),
        shape={
            "rows": shapes.rows,
            "prompt_tokens": shapes.row_prompt_tokens // sequences,
            "row_tokens": shapes.row_tokens,
            "sequences_per_row": sequences,
            "microbatch_rows": at_once,
        },
        figures={"state_bytes": tree_bytes(states[0]), "slowest_over_median": slowest_share(called[1:])} | peak,
    )
    measured.lines.append(line)
    donated = Check(name=f"{name}: training state donated", value=all(is_donated), relation="exactly", wanted=True)
    measured.checks.append(donated)
    chip = find_chip(jax.devices()[0].device_kind)
    if chip is not None and workload.dtype == "bfloat16":
        mfu = model_flops(workload.config, count, tokens) / statistics.median(seconds) / chip.flops_per_second
        share, slowest = LEAST_MFU.get(workload.preset, 0.45), slowest_share(called[1:])
        measured.checks += [
            Check(name=f"{name}: MFU, of the chip's limit", value=mfu, relation="at least", wanted=share),
            Check(name=f"{name}: slowest / median call", value=slowest, relation="at most", wanted=3.0),
        ]
    if sequences == 1:  # a second program would take as long to compile
        _check_program(workload, batch, measured, held_bytes)


def _check_program(workload: Workload, batch: jaxft.Batch, measured: Measured, held_bytes: int) -> None:
    """Compare the compiled gradient with the first line, whose update began with so many bytes of arrays."""
    line, shapes, vocabulary = measured.lines[0], workload.shapes, workload.config.vocab_size
    program = gradient_program(workload, batch)
    memory = program.memory_analysis()
    planned = held_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    line.figures |= {"temporary_bytes": memory.temp_size_in_bytes, "planned_device_bytes": planned}
    fraction = most_logits(program.as_text(), vocabulary) / (shapes.rows * (shapes.row_tokens - 1) * vocabulary)
    measured.checks.append(
        Check(name=f"{line.name}: logits held at once / all logits", value=fraction, relation="at most", wanted=0.9)
    )
    found = line.figures.get("peak_device_bytes", 0.0)
    if found > line.figures.get("peak_device_bytes_before", found):  # else earlier work has needed more
        difference = abs(found / planned - 1)
        measured.checks.append(
            Check(name=f"{line.name}: memory beside plan", value=difference, relation="at most", wanted=0.05)
        )


def slowest_share(seconds: Sequence[float]) -> float:
    """Return the longest time over the median one.

    >>> slowest_share([6.0, 2.0, 2.0])
    3.0
    """
    return max(seconds) / statistics.median(seconds)


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
