"""One GRPO update: gradients over microbatches, clipped to norm 1, and an AdamW step."""

from functools import cache, partial
from typing import Any

import jax
import optax

from jaxft.bench import work
from jaxft.bench.results import CaseResult, Check, Line
from jaxft.bench.setting import Setting, training_batch
from jaxft.bench.structure import most_logits
from jaxft.bench.timing import in_turn, measuring_peak
from jaxft.core.objectives import grpo_loss
from jaxft.core.types import Batch, Model
from jaxft.core.update import TrainState, init_train_state, loss_and_gradients, make_update

OPTIMIZER = optax.adamw(1e-5)


def run(setting: Setting) -> CaseResult:
    """Tokens per second, prompts included; memory of the program, and whether it holds logits of a whole batch."""
    result, shapes = setting.result(), setting.shapes
    batch, at_once = training_batch(setting), rows_at_once(setting)
    update = grpo_update(setting.model, at_once)
    states = [init_train_state(setting.fresh_params(), OPTIMIZER)]
    is_donated = []

    def step(number: int) -> object:
        before = states.pop()
        state, metrics = update(before, batch)
        is_donated.append(all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.opt_state))))
        states.append(state)
        return state, metrics

    step(-1)  # what it needs to compile is not what it needs to run
    with measuring_peak() as peak:
        seconds = in_turn({"update": step}, setting.repeats)["update"]
    shape = {"rows": shapes.rows, "prompt_tokens": shapes.row_prompt_tokens, "row_tokens": shapes.row_tokens}
    program = gradient_program(setting, batch)
    temporary_bytes = program.memory_analysis().temp_size_in_bytes
    result.lines.append(
        Line(
            name=f"{shapes.rows} rows of {shapes.row_tokens} tokens",
            amount=shapes.rows * shapes.row_tokens,
            seconds=seconds,
            phases=update_phases(setting),
            shape=shape | {"microbatch_rows": at_once},
            figures={"temporary_bytes": temporary_bytes, "state_bytes": tree_bytes(states[0])} | peak.figures(),
        )
    )
    vocabulary = setting.config.vocab_size
    all_logits = shapes.rows * (shapes.row_tokens - 1) * vocabulary
    share = most_logits(program.as_text(), vocabulary) / all_logits
    result.checks += [
        Check(name="logits held at once / all logits", value=share, relation="at most", wanted=0.9),
        Check(name="training state donated", value=all(is_donated), relation="exactly", wanted=True),
    ]
    return result


@cache
def grpo_update(model: Model, microbatch_rows: int) -> Any:
    """The update of every case that has one."""
    return make_update(model, grpo_loss, OPTIMIZER, microbatch_rows=microbatch_rows, max_grad_norm=1.0)


def gradient_program(setting: Setting, batch: Batch) -> Any:
    """The compiled gradient of one microbatch, where an update needs its memory."""
    part = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows_at_once(setting), *x.shape[1:]), x.dtype), batch)
    gradient = jax.jit(partial(loss_and_gradients, setting.model, grpo_loss))
    return gradient.lower(setting.params, part).compile()


def rows_at_once(setting: Setting) -> int:
    """Rows of a microbatch: as few and as even ones as the budget of tokens allows."""
    shapes = setting.shapes
    return even_rows(shapes.rows, shapes.row_tokens, shapes.microbatch_tokens)


def even_rows(rows: int, row_tokens: int, microbatch_tokens: int) -> int:
    """Rows of each microbatch, when there are no more of these than the budget of tokens asks for.

    >>> even_rows(64, 192, 8192)  # 12,288 tokens: two
    32
    """
    parts = -(-rows * row_tokens // microbatch_tokens)
    return -(-rows // parts)


def update_phases(setting: Setting) -> list[work.Phase]:
    """The work of an update; the loss needs the logits of completions alone."""
    shapes = setting.shapes
    scored = shapes.row_tokens - shapes.row_prompt_tokens
    return work.update(setting.config, shapes.rows, shapes.row_tokens, scored, setting.itemsize)


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree, or of those that it describes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def state_shapes(setting: Setting) -> TrainState:
    """The training state as shapes and dtypes."""
    return jax.eval_shape(lambda params: init_train_state(params, OPTIMIZER), setting.params)
