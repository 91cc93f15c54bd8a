"""One pure update step: gradients over microbatches, one judgement of their norm, one optimiser step or none."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxft.core.arrays import check_batch_shapes
from jaxft.core.losses import Metrics
from jaxft.core.reductions import count_trained
from jaxft.core.types import Batch, Denominators, Model, Params

LossFn = Callable[[Model, Params, Batch, Denominators], tuple[Float[Array, ""], Metrics]]


class TrainState(NamedTuple):
    """What an update replaces: parameters, optimiser state, and the number of optimiser steps taken."""

    params: Params
    opt_state: optax.OptState
    step: Any


def init_train_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update. `make_update` donates it: keep a copy of `params` that must outlive it.

    >>> print(init_train_state({"kernel": jnp.ones(2)}, optax.sgd(0.1)).step)
    0
    """
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def make_update(
    model: Model,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    microbatch_rows: int | None = None,
    max_grad_norm: float | None = None,
    accept: Callable[[Metrics], Bool[Array, ""]] | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The jitted `update(state, batch) -> (state, metrics)`; the state that goes in is donated.

    Loss and gradients are those of the whole batch whatever `microbatch_rows` is: denominators are counted first, and a
    batch whose rows do not divide is filled up with rows that train nothing.

    The optimiser runs unless the loss or the gradient norm is not finite, or the gradient is exactly zero (nothing to
    learn: momentum and weight decay would still move the parameters). Then parameters and optimiser state keep their
    bits, `step` stays, and the metrics say so: `nonfinite_updates`, `nothing_to_learn`, `applied_updates`, 0 or 1 each;
    so does an update whose metrics `accept` turns down: `refused_updates`.

    Args:
        model: the contract's tuple; static.
        loss_fn: `(model, params, batch, denominators) -> (loss, metrics)`, such as `grpo_loss` or `sft_loss`.
        optimizer: any optax transformation.
        microbatch_rows: rows per forward and backward pass; None for all at once.
        max_grad_norm: clips the gradient to this global norm.
        accept: whether to make an update, given the metrics of the loss; part of the jitted function. None: always.

    Raises:
        ValueError: `microbatch_rows` below 1; from the update what `loss_and_gradients` refuses.

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens, of the same logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> update = make_update(model, jaxft.sft_loss, optax.sgd(1.0))
    >>> batch = Batch(jnp.array([[0, 1]]), jnp.array([[False, True]]))
    >>> state, metrics = update(init_train_state(params, optax.sgd(1.0)), batch)
    >>> print(state.params["logits"], state.step)  # one step along (-1/2, 1/2)
    [-0.5  0.5] 1
    """
    if microbatch_rows is not None and microbatch_rows < 1:
        raise ValueError(f"microbatch_rows is {microbatch_rows}; wanted at least 1, or None for one pass")

    @partial(jax.jit, donate_argnums=0)
    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss, metrics, grads = loss_and_gradients(model, loss_fn, state.params, batch, microbatch_rows)
        norm = optax.global_norm(grads)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        # Asked of the gradients and not of their norm: squares of very small ones underflow.
        has_signal = jnp.any(jnp.stack([jnp.any(g != 0) for g in jax.tree.leaves(grads)]))
        is_refused = jnp.zeros((), bool) if accept is None else ~accept(metrics)
        is_applied = is_finite & has_signal & ~is_refused

        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, max_grad_norm / jnp.where(is_applied, norm, 1.0))
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        proposed = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
        state = jax.tree.map(lambda new, old: jnp.where(is_applied, new, old), proposed, state)
        metrics |= {
            "loss": loss,
            "grad_norm": norm,
            "applied_updates": is_applied.astype(jnp.float32),
            "nonfinite_updates": (~is_finite).astype(jnp.float32),
            "nothing_to_learn": (is_finite & ~has_signal).astype(jnp.float32),
        }
        if accept is not None:
            metrics["refused_updates"] = is_refused.astype(jnp.float32)
        return state, metrics

    return update


def loss_and_gradients(
    model: Model, loss_fn: LossFn, params: Params, batch: Batch, microbatch_rows: int | None = None
) -> tuple[Float[Array, ""], Metrics, Params]:
    """Loss, metrics and gradients of a whole batch, computed `microbatch_rows` rows at a time.

    Raises:
        ValueError: a field of the batch has another shape than its tokens, or what `loss_fn` refuses.

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens, of the same logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> batch = Batch(jnp.array([[0, 1], [0, 1]]), jnp.array([[False, True]] * 2))
    >>> loss, _, grads = loss_and_gradients(model, jaxft.sft_loss, params, batch, microbatch_rows=1)
    >>> print(f"{loss:.4f}", grads["logits"])  # log 2; probabilities less 1 at the chosen one
    0.6931 [ 0.5 -0.5]
    """
    check_batch_shapes(batch)
    denominators = count_trained(batch.completion_mask, batch.segment_ids)
    differentiate = jax.value_and_grad(loss_fn, argnums=1, has_aux=True)
    rows = batch.tokens.shape[0]
    if microbatch_rows is None or microbatch_rows >= rows:
        (loss, metrics), grads = differentiate(model, params, batch, denominators)
        return loss, metrics, grads

    parts = -(-rows // microbatch_rows)
    padding = parts * microbatch_rows - rows

    def split(x: Array) -> Array:
        # Zeros: the mask of a filling row is False everywhere.
        padded = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
        return padded.reshape(parts, microbatch_rows, *x.shape[1:])

    def accumulate(grads: Params, part: Batch) -> tuple[Params, tuple[Array, Metrics]]:
        (loss, metrics), part_grads = differentiate(model, params, part, denominators)
        return jax.tree.map(jnp.add, grads, part_grads), (loss, metrics)

    grads, (losses, metrics) = jax.lax.scan(
        accumulate, jax.tree.map(jnp.zeros_like, params), jax.tree.map(split, batch)
    )
    joined = {name: x.max() if name.endswith("_max") else x.sum() for name, x in metrics.items()}
    return losses.sum(), joined, grads
