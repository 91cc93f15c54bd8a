"""Supervised steps before reinforcement learning, for models that start from random weights.

The policy learns to imitate given conversations, by the same update step as everywhere, with `sft_loss`.
"""

import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

import jaxft

PRINT_EVERY = 50


async def warm_start(
    session: jaxft.Session,
    llm: jaxft.ChatClient,
    conversations: Sequence[Sequence[dict[str, Any]]],
    *,
    tools: Sequence[dict[str, Any]] = (),
    steps: int,
    batch_rows: int,
    learning_rate: float,
) -> None:
    """Trains the policy, or the base of one with adapters, for `steps` updates on batches drawn from `conversations`.

    The learning rate falls linearly to a tenth of its start. Draws and order depend on the run's seed alone. `tools`
    are those that the conversations call.
    """
    policy = llm.policy
    rows = [policy.template.conversation(messages, tools) for messages in conversations]
    width = max(len(ids) for ids, _ in rows)
    tokens, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for row, (ids, trained) in enumerate(rows):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, trained

    optimizer = optax.adam(optax.linear_schedule(learning_rate, learning_rate / 10, steps), b2=0.95)
    has_adapters = policy.model.lora is not None
    model = jaxft.base_model(policy.model) if has_adapters else policy.model
    update = jaxft.make_update(model, jaxft.sft_loss, optimizer, max_grad_norm=1.0)
    draw = random.Random(session.config.finetuning.seed)

    def begin(params: dict) -> tuple[optax.OptState, jax.Array]:
        return jaxft.init_train_state(params["base"] if has_adapters else params, optimizer, model)[1:]

    opt_state, step = await policy.read(begin)

    def train(params: dict, count: int) -> tuple[dict, tuple[optax.OptState, jax.Array, float]]:
        state = jaxft.TrainState(params["base"] if has_adapters else params, opt_state, step)
        for _ in range(count):
            chosen = draw.sample(range(len(rows)), batch_rows)
            state, metrics = update(state, jaxft.Batch(tokens[chosen], mask[chosen]))
        trained = {**params, "base": state.params} if has_adapters else state.params
        return trained, (state.opt_state, state.step, float(metrics["loss"]))

    session.console.message(f"warm start  {steps} steps of {batch_rows} conversations; compiling")
    done = 0
    for end in sorted({1, *range(PRINT_EVERY, steps, PRINT_EVERY), steps}):
        opt_state, step, loss = await policy.update(lambda params, count=end - done: train(params, count))
        done = end
        session.console.message(f"warm start  step {done}/{steps}  loss {loss:.3f}")
