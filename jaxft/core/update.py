"""One training update: gradients summed over microbatches, then one optimizer step if they are finite."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, Float

from jaxft.core.checks import as_batch
from jaxft.core.losses import Metrics
from jaxft.core.partition import combine, partition, trainable
from jaxft.core.reductions import count_tokens
from jaxft.core.sharding import commit_like, committed_device, constrain, path_text
from jaxft.core.types import Batch, Denominators, HostStates, Model, Params

LossFn = Callable[[Model, Params, Batch, Denominators], tuple[Float[Array, ""], Metrics]]


class TrainState(NamedTuple):
    """Parameters, optimizer state and number of optimizer steps: the state that an update replaces."""

    params: Params
    opt_state: optax.OptState
    step: Any


class Sums(NamedTuple):
    """Loss, metrics and gradients, summed over the microbatches so far."""

    loss: Float[Array, ""]
    metrics: Metrics
    grads: Params


def init_train_state(params: Params, optimizer: optax.GradientTransformation, model: Model | None = None) -> TrainState:
    """Make the state before the first update; it holds `params` themselves, not a copy.

    An update donates its state: afterwards trained `params` are deleted, and the new ones are in `state.params`. To
    keep the old ones, as a reference policy, copy them first: `jax.tree.map(jnp.copy, params)`.

    Args:
        model: required for a model with adapters, of which only these get optimizer state, and for a model on a mesh,
            so that the optimizer state is sharded like the parameters.

    >>> print(init_train_state({"kernel": jnp.ones(2)}, optax.sgd(0.1)).step)
    0
    """
    moved = params if model is None else trainable(model, params)
    step = jax.device_put(np.zeros((), np.int32))  # not jnp.zeros, which is a program
    if model is not None and model.sharding is not None:
        return model.sharding.place(TrainState(params, optimizer.init(moved), step))
    if (device := committed_device(moved)) is None:
        return TrainState(params, optimizer.init(moved), step)
    # One program in the place of one for each shape of a parameter.
    init = jax.jit(optimizer.init, out_shardings=SingleDeviceSharding(device))
    return TrainState(params, init(moved), jax.device_put(step, device))


def make_update(
    model: Model,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    microbatch_rows: int | None = None,
    max_grad_norm: float | None = None,
    keeps_finite: bool = False,
    accept: Callable[[Metrics], Bool[Array, ""]] | None = None,
    router_bias_update_rate: float = 0.0,
) -> "Update":
    """Return `update(state, batch) -> (state, metrics)`, which donates the given state with its trained parameters.

    Loss and gradients are those of the whole batch however it is split into microbatches, as denominators are counted
    first. Compiled programs depend on the shape of a microbatch, not on the number of them.

    The step is skipped if the loss, the gradient norm or a new parameter is not finite, or with `keeps_finite` a number
    of the state that is given (`nonfinite_updates`), if the
    gradient is exactly zero (`nothing_to_learn`: momentum and weight decay would still move the parameters), or if
    `accept` returns False (`refused_updates`). Then parameters and optimizer state keep their bits, and `step` stays.
    These metrics and `applied_updates` are 0 or 1.

    Args:
        model: the model; static under `jit`.
        loss_fn: `(model, params, batch, denominators) -> (loss, metrics)`, such as `grpo_loss` or `sft_loss`.
        optimizer: any optax transformation.
        microbatch_rows: rows per forward and backward pass; None for all at once. The last microbatch is padded with
            rows that train nothing.
        max_grad_norm: global norm that the gradient is clipped to; None: no clipping.
        keeps_finite: True if finite gradients always leave a finite state finite, as those of AdamW do. Then the step
            is computed once. A state is tested before its first update, and not again while the arrays are the same.
        accept: jittable function from the metrics of the loss to a bool, False to skip the step; None: always True.
        router_bias_update_rate: amount by which each step moves the biases that experts are chosen by towards equal
            load (`move_selection_bias`).

    Raises:
        ValueError: `microbatch_rows` is below 1. The update raises like `loss_and_gradients`.

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

    sharding = model.sharding

    def finish(
        state: TrainState, sums: Sums, is_sound: Bool[Array, ""] | None, expert_tokens: Float[Array, "L E"] | None
    ) -> tuple[TrainState, Metrics]:
        """Return the state after the step; the parameters of both states are the trained ones only.

        `is_sound` is True if the state is finite and stays so, and None to find out.
        """
        loss, metrics, grads = sums
        norm = optax.global_norm(grads)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        # Tested on the gradients, not on their norm, where the squares of very small ones underflow.
        has_signal = jnp.any(jnp.stack([jnp.any(g != 0) for g in jax.tree.leaves(grads)]))
        is_refused = jnp.zeros((), bool) if accept is None else ~accept(metrics)

        def step(state: TrainState, grads: Params) -> TrainState:
            if max_grad_norm is not None:
                scale = jnp.minimum(1.0, max_grad_norm / jnp.where(has_signal & jnp.isfinite(norm), norm, 1.0))
                grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)

        if is_sound is None:
            # The step is computed twice, first to check that it is finite, then to apply it: the old parameters are
            # needed until the check ends, so storing the new ones would take the memory of the parameters once more.
            is_finite &= all_finite(step(state, grads).params)
            is_finite, state, grads = jax.lax.optimization_barrier((is_finite, state, grads))
        else:
            is_finite &= is_sound
        is_applied = is_finite & has_signal & ~is_refused
        proposed = step(state, grads)
        if router_bias_update_rate and expert_tokens is not None:
            biased = move_selection_bias(proposed.params, expert_tokens, router_bias_update_rate)
            proposed = proposed._replace(params=biased)
        state = constrain(sharding, jax.tree.map(lambda new, old: jnp.where(is_applied, new, old), proposed, state))
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

    return Update(model, loss_fn, finish, microbatch_rows, keeps_finite)


def move_selection_bias(params: Params, expert_tokens: Float[Array, "L E"], rate: float) -> Params:
    """Return parameters whose mixtures choose an expert of less than the mean load more easily, others less.

    The bias of each expert's choice goes up or down by `rate`, or stays at the mean load: balance without an auxiliary
    loss (arXiv 2408.15664, algorithm 1).

    >>> params = {"layers": {"mlp": {"selection_bias": jnp.zeros((1, 3))}}}
    >>> print(move_selection_bias(params, jnp.array([[1.0, 6.0, 2.0]]), 0.5)["layers"]["mlp"]["selection_bias"])
    [[ 0.5 -0.5  0.5]]
    """
    step = rate * jnp.sign(expert_tokens.mean(axis=1, keepdims=True) - expert_tokens)

    def move(path: Any, leaf: Array) -> Array:
        return leaf + step.astype(leaf.dtype) if path_text(path).endswith("/selection_bias") else leaf

    return jax.tree_util.tree_map_with_path(move, params)


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Return True if all floating-point numbers of a tree are finite."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]))


class Update:
    """The function `update(state, batch) -> (state, metrics)` of `make_update`; do not jit it, its stages are jitted.

    A batch may also be a sequence of microbatches of different shapes, so that short rows are not padded to the
    longest. For a single microbatch, gradients and step are one program. Frozen parameters are not donated: the new
    state has the very same arrays.
    """

    def __init__(
        self, model: Model, loss_fn: LossFn, finish: Callable[..., Any], microbatch_rows: int | None, keeps_finite: bool
    ) -> None:
        self._model, self._rows, self._sharding = model, microbatch_rows, model.sharding
        count = partial(count_tokens, num_experts=model.num_experts)
        self._count = jax.jit(count)
        self._begin = jax.jit(partial(no_sums, model), static_argnums=1)
        self._no_sums = partial(no_sums, model)
        self._add = jax.jit(partial(add_microbatch, model, loss_fn), donate_argnums=1)
        self._finish = jax.jit(finish, donate_argnums=0)
        self._all_finite, self._keeps_finite = jax.jit(all_finite), keeps_finite
        self._made: list[weakref.ref[Any]] = []  # the arrays of the state that was made last
        self._is_sound: Any = None

        def whole(state: TrainState, frozen: Params, part: Batch, is_sound: Any) -> tuple[TrainState, Metrics]:
            params = combine(state.params, frozen)
            counted = count(*part.counted)
            begun = no_sums(model, params, report_dtypes(model, loss_fn, params, part, counted))
            sums = add_microbatch(model, loss_fn, params, begun, part, counted)
            return finish(state, sums, is_sound, counted.expert_tokens)

        self._whole = jax.jit(whole, donate_argnums=0)
        self._reports_of = partial(report_dtypes, model, loss_fn)
        self._reports: dict[Any, Reports] = {}

    def __call__(
        self, state: TrainState, batch: Batch | Sequence[Batch], pause: Callable[[Any], object] = lambda ready: None
    ) -> tuple[TrainState, Metrics]:
        """Return the state after one optimizer step, or the same state if it is skipped, and the metrics.

        Args:
            state: the state, which is donated.
            batch: a batch, or microbatches.
            pause: called after each microbatch is queued, with an array that is ready when it has been computed; other
                work of the device may be queued there.
        """
        parts = self.microbatches(batch)
        states = [part.teacher_hidden for part in parts]
        parts = self._place_parts([part._replace(teacher_hidden=None) for part in parts])
        if len(parts) == 1:
            trained, frozen = self._partition(state)
            is_sound = self._soundness(trained)
            part = parts[0]._replace(teacher_hidden=self._placed_states(states[0]))
            trained, metrics = self._whole(trained, frozen, part, is_sound)
            pause(metrics["loss"])
            self._remember(trained, is_sound)
            return trained._replace(params=combine(trained.params, frozen)), metrics
        counts = [self._count(*part.counted) for part in parts]
        denominators = jax.tree.map(lambda *each: sum(each[1:], each[0]), *counts)
        shaped = parts[0]._replace(teacher_hidden=states[0])
        begun = self._begin(state.params, self._report_dtypes(state.params, shaped, denominators))
        sums = commit_like(state.params, begun)
        for part, hidden in zip(parts, states, strict=True):
            part = part._replace(teacher_hidden=self._placed_states(hidden))
            if hidden is not None:  # no more than two microbatches have theirs at once
                jax.block_until_ready(sums.loss)
            sums = self._add(state.params, sums, part, denominators)
            pause(sums.loss)
        return self.apply(state, sums, denominators.expert_tokens)

    def apply(
        self, state: TrainState, sums: Sums, expert_tokens: Float[Array, "L E"] | None = None
    ) -> tuple[TrainState, Metrics]:
        """Return the state after the optimizer step of accumulated gradients, or the same state if it is skipped.

        Args:
            state: the state, which is donated.
            sums: the sums.
            expert_tokens: see `Denominators`.
        """
        trained, frozen = self._partition(state)
        is_sound = self._soundness(trained)
        trained, metrics = self._finish(trained, sums, is_sound, expert_tokens)
        self._remember(trained, is_sound)
        return trained._replace(params=combine(trained.params, frozen)), metrics

    def _partition(self, state: TrainState) -> tuple[TrainState, Params]:
        """Return the state with its trained parameters only, and the frozen ones."""
        params, frozen = partition(self._model, state.params)
        return state._replace(params=params), frozen

    def _soundness(self, trained: TrainState) -> Any:
        """Return whether a state is finite, which is that of the last one if they are the same arrays."""
        if not self._keeps_finite:
            return None
        is_made = [id(made()) for made in self._made] == [id(leaf) for leaf in jax.tree.leaves(trained)]
        return self._is_sound if is_made else self._all_finite(trained)

    def _remember(self, trained: TrainState, is_sound: Any) -> None:
        """Keep the soundness of a state, which is that of the one that it was made of."""
        if self._keeps_finite:
            self._made, self._is_sound = list(map(weakref.ref, jax.tree.leaves(trained))), is_sound

    def microbatches(self, batch: Batch | Sequence[Batch]) -> list[Batch]:
        """Return the microbatches of a batch, in the order of computation.

        Raises:
            ValueError: the sequence is empty, a field has another shape than the tokens, or the rows do not divide over
                the mesh.
        """
        given = [as_batch(each) for each in ([batch] if isinstance(batch, Batch) else batch)]
        if not given:
            raise ValueError("the sequence of microbatches is empty; wanted at least one batch")
        parts = [part for each in given for part in split_rows(each, self._rows)]
        if self._sharding is not None:
            for part in parts:
                self._sharding.check_rows(part.tokens.shape[0], "rows of a microbatch")
        return parts

    def _place_parts(self, parts: list[Batch]) -> list[Batch]:
        return parts if self._sharding is None else [self._sharding.place_rows(part) for part in parts]

    def _placed_states(self, states: Any) -> Any:
        """Return the hidden states of a microbatch as an array on its devices; None for None."""
        array = np.asarray(states) if isinstance(states, HostStates) else states
        return array if self._sharding is None or array is None else self._sharding.place_rows(array)

    def programs(self, state: TrainState, batch: Batch) -> dict[str, Callable[[], Any]]:
        """Return functions that lower the programs of an update of several microbatches like `batch`, by name.

        `gradient` adds a microbatch to the sums, and `step` makes the optimizer step; both find the sums among their
        arguments. An update of a single microbatch is both as one program. Shapes suffice.
        """
        (part,) = self._place_parts([as_batch(batch)])
        state = state if self._sharding is None else self._sharding.place(state)
        counts = jax.eval_shape(self._count, *part.counted)
        reports = self._report_dtypes(state.params, part, counts)
        sums = jax.eval_shape(lambda params: self._no_sums(params, reports), state.params)
        sums = sums if self._sharding is None else self._sharding.place(sums)
        is_sound = jax.ShapeDtypeStruct((), jnp.bool_) if self._keeps_finite else None
        return {
            "gradient": lambda: self._add.lower(state.params, sums, part, counts),
            "step": lambda: self._finish.lower(self._partition(state)[0], sums, is_sound, counts.expert_tokens),
        }

    def _report_dtypes(self, params: Params, part: Batch, denominators: Denominators) -> "Reports":
        fields = jax.tree.structure(part)
        if fields not in self._reports:
            self._reports[fields] = self._reports_of(params, part, denominators)
        return self._reports[fields]


def split_rows(batch: Batch, rows: int | None) -> list[Batch]:
    """Split a batch into microbatches of `rows` rows; the last is padded with rows that train nothing.

    >>> parts = split_rows(Batch(np.array([[1], [2], [3]]), np.ones((3, 1), bool)), 2)
    >>> [(part.tokens.tolist(), part.completion_mask.tolist()) for part in parts]
    [([[1], [2]], [[True], [True]]), ([[3], [0]], [[True], [False]])]
    """
    height = batch.tokens.shape[0]
    if rows is None or rows >= height:
        return [batch]
    missing = -height % rows

    def cut(x: Any) -> list[Any]:
        if isinstance(x, jax.ShapeDtypeStruct):
            return [jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)] * (-(-height // rows))
        # On the host, so that no program is compiled per number of rows. The mask of a zero row is False everywhere.
        padded = np.pad(np.asarray(x), ((0, missing),) + ((0, 0),) * (x.ndim - 1))
        return [padded[first : first + rows] for first in range(0, height, rows)]

    leaves, structure = jax.tree.flatten(batch)
    return [jax.tree.unflatten(structure, part) for part in zip(*map(cut, leaves), strict=True)]


Reports = tuple[tuple[str, Any], ...]
"""Pairs of a name and a dtype, for `loss` and for each metric."""


def report_dtypes(model: Model, loss_fn: LossFn, params: Params, part: Batch, denominators: Denominators) -> Reports:
    """Return the dtypes of loss and metrics of `loss_fn` for a batch of this shape."""
    loss, metrics = jax.eval_shape(partial(loss_fn, model), params, part, denominators)
    return (("loss", loss.dtype), *((name, x.dtype) for name, x in sorted(metrics.items())))


def no_sums(model: Model, params: Params, reports: Reports) -> Sums:
    """Make zero sums, to add the first microbatch to; gradients are summed in float32 or wider."""
    (_, loss_dtype), *metrics = reports
    zeros = Sums(
        jnp.zeros((), loss_dtype),
        {name: jnp.full((), -jnp.inf if name.endswith("_max") else 0, dtype) for name, dtype in metrics},
        jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), trainable(model, params)
        ),
    )
    return constrain(model.sharding, zeros)


def loss_and_gradients(
    model: Model, loss_fn: LossFn, params: Params, batch: Batch, denominators: Denominators | None = None
) -> Sums:
    """Return loss, metrics and gradients of a batch, or of a microbatch, given the whole batch's `denominators`.

    Raises:
        ValueError: a field of the batch has another shape than its tokens, or `loss_fn` raises.

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens, of the same logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> batch = Batch(jnp.array([[0, 1], [0, 1]]), jnp.array([[False, True]] * 2))
    >>> loss, _, grads = loss_and_gradients(model, jaxft.sft_loss, params, batch)
    >>> print(f"{loss:.4f}", grads["logits"])  # log 2; probabilities less 1 at the chosen one
    0.6931 [ 0.5 -0.5]
    """
    loss, moved = _loss_of_trained(model, loss_fn, params, batch, denominators)
    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(moved)
    return Sums(value, metrics, grads)


def _loss_of_trained(
    model: Model, loss_fn: LossFn, params: Params, batch: Batch, denominators: Denominators | None
) -> tuple[Callable[[Params], tuple[Float[Array, ""], Metrics]], Params]:
    """Return the loss as a function of the trained parameters, and these."""
    batch = as_batch(batch)
    counted = denominators
    if counted is None:
        counted = count_tokens(*batch.counted, num_experts=model.num_experts)
    moved, frozen = partition(model, params)
    return lambda moved: loss_fn(model, combine(moved, frozen), batch, counted), moved


def add_microbatch(
    model: Model, loss_fn: LossFn, params: Params, sums: Sums, part: Batch, denominators: Denominators
) -> Sums:
    """Add a microbatch to the sums; metrics whose name ends in `_max` are combined by maximum.

    Gradients in the dtype of their sums are added in place, each as soon as it is known: those of a microbatch never
    exist beside the sums. Narrower ones, as of bfloat16 parameters, do.
    """
    loss, moved = _loss_of_trained(model, loss_fn, params, part, denominators)
    pull_back: Any  # whose type jax does not declare
    value, pull_back, metrics = jax.vjp(loss, moved, has_aux=True)
    joined = {
        name: jnp.maximum(sums.metrics[name], x) if name.endswith("_max") else sums.metrics[name] + x
        for name, x in metrics.items()
    }
    refs = jax.tree.map(lambda total, p: jax.new_ref(total) if total.dtype == p.dtype else total, sums.grads, moved)
    (found,) = pull_back.with_refs(refs)(jnp.ones((), value.dtype))  # gradients where there is no ref
    grads = jax.tree.map(lambda total, ref, g: total + g if ref is total else jax.freeze(ref), sums.grads, refs, found)
    return constrain(model.sharding, Sums(sums.loss + value, joined, grads))
