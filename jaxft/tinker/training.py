"""A model in training: adapters, the gradients since the last step, and the state of AdamW.

Functions and methods that touch arrays belong to the device thread of the policy.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxft import Batch, Denominators, LoraSpec, Model, TrainState, init_train_state, make_update
from jaxft.core import ADAPTER, BASE, Sums, Update, add_microbatch, trainable
from jaxft.models import init_adapter
from jaxft.tinker.data import AdamParams
from jaxft.tinker.losses import Keywords, summed_loss

_ONE: Any = np.float32(1)
ONE = Denominators(_ONE, _ONE)
"""Denominators under which the mean over all tokens is their sum."""

copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
"""Returns copies of all arrays of a tree."""

zeros = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree))
"""Returns a tree of zeros of the same shapes."""


@functools.lru_cache(64)
def make_programs(model: Model, keywords: Keywords) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return jitted functions of a loss; equal arguments share programs.

    `forward` is `(params, batch) -> (loss, metrics)`. `add` is `(params, grads, batch) -> (grads, (loss, metrics))`,
    with the gradients added to those given, which are donated. The metric `logprobs` is a table.
    """
    loss_fn = partial(summed_loss, keywords=keywords)

    def add(params: Any, grads: Any, batch: Batch) -> tuple[Any, tuple[Any, Any]]:
        zero = jnp.zeros((), jnp.float32)
        begun = Sums(zero, {"logprobs": zero, "entropy": zero}, grads)
        sums = add_microbatch(model, loss_fn, params, begun, batch, ONE)
        return sums.grads, (sums.loss, sums.metrics)

    forward = jax.jit(lambda params, batch: loss_fn(model, params, batch, ONE))
    return forward, jax.jit(add, donate_argnums=1)


@functools.lru_cache(16)
def make_step(model: Model, settings: AdamParams) -> tuple[optax.GradientTransformation, Update]:
    """Return AdamW, and the update whose `apply` makes a step of it; equal arguments share programs.

    Rate and epsilon are arrays in the state, so that new values compile nothing; the others as arrays would change last
    bits.
    """
    adamw = optax.inject_hyperparams(optax.adamw, static_args=("b1", "b2", "eps_root", "weight_decay"))
    own = {"b1": settings.beta1, "b2": settings.beta2, "weight_decay": settings.weight_decay}
    optimizer = adamw(learning_rate=settings.learning_rate, eps=settings.eps, **own)
    optimizer = optimizer._replace(init=jax.jit(optimizer.init))  # one program in the place of one for each shape
    loss_fn = partial(summed_loss, keywords=())  # which nothing calls: `add` has taken the gradients
    return optimizer, make_update(model, loss_fn, optimizer, max_grad_norm=settings.grad_clip_norm or None)


class TrainedModel:
    """Adapters in training.

    Attributes:
        id: id of the model.
        model, lora: the base with adapters, and their rank, scale and targets.
        user_metadata: what the client noted about it.
        state: parameters and optimizer; None after a step that failed.
        grads: sum of the gradients since the last step; None after a call that failed to add some.
        lock: taken by each call in its turn.
        next_number: least number of the requests to come.
    """

    def __init__(self, model_id: str, model: Model, state: TrainState, user_metadata: Mapping[str, Any]) -> None:
        assert isinstance(model.lora, LoraSpec)
        self.id, self.model, self.lora, self.user_metadata = model_id, model, model.lora, user_metadata
        self.lock, self.next_number = asyncio.Lock(), 1
        self.use(state)

    def use(self, state: TrainState) -> None:
        """Go on from another state, without the gradients so far."""
        self.state: TrainState | None = state
        self.grads: Any = zeros(trainable(self.model, state.params))

    def take(self, number: int) -> None:
        """Count a request; a ValueError if its number is below that of an earlier one, whose result is not kept."""
        if number < self.next_number:
            raise ValueError(f"seq_id is {number}: request {self.next_number} of {self.id} comes next")
        self.next_number = number + 1

    @property
    def usable_state(self) -> TrainState:
        """The state; a ValueError if it was lost."""
        if self.state is None:
            raise ValueError(f"the weights of {self.id} were lost when a step failed: load a saved state")
        return self.state

    def add(self, keywords: Keywords, batch: Batch, _: Any, *, forward_only: bool) -> tuple[np.ndarray, np.ndarray]:
        """Add the gradients of a table of data; return loss and entropy, and the table of log-probabilities."""
        forward, add = make_programs(self.model, keywords)
        params = self.usable_state.params
        if forward_only:
            computed = forward(params, batch)
        else:
            grads, self.grads = self._usable_grads(), None
            self.grads, computed = add(params, grads, batch)
        loss, metrics = jax.device_get(computed)
        return np.array([loss, metrics["entropy"]], np.float64), metrics["logprobs"]

    def step(self, given: AdamParams) -> dict[str, float]:
        """Make a step with the gradients since the last one, where all are zero none; return the finite metrics."""
        state = self.usable_state
        try:
            grads = self._usable_grads()
        finally:
            self.grads = zeros(trainable(self.model, state.params))
        traced = {"learning_rate": np.float32(given.learning_rate), "eps": np.float32(given.eps)}
        _, update = make_step(self.model, given.model_copy(update=dict.fromkeys(traced, 0.0)))
        opt_state: Any = state.opt_state
        opt_state = opt_state._replace(hyperparams={**opt_state.hyperparams, **traced})
        self.state = None
        self.state, metrics = update.apply(
            state._replace(opt_state=opt_state), Sums(jnp.zeros((), jnp.float32), {}, grads)
        )
        found = {name: float(value) for name, value in jax.device_get(metrics).items() if name != "loss"}
        return {name: value for name, value in found.items() if np.isfinite(value)}  # a client reads no NaN in JSON

    def _usable_grads(self) -> Any:
        if self.grads is None:
            raise ValueError("gradients were lost, as an earlier call failed: no step is made with the others")
        return self.grads

    def adapter(self) -> Any:
        """Return a copy of the adapters."""
        return copied(self.usable_state.params[ADAPTER])

    def arrays(self, *, optimizer: bool) -> dict[str, np.ndarray]:
        """Return the adapters and, if asked for, the state of the optimizer, by names."""
        state = self.usable_state
        kept: dict[str, Any] = {ADAPTER: state.params[ADAPTER]}
        kept |= {"step": state.step, "opt_state": state.opt_state} if optimizer else {}
        return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(kept))}


def fresh_state(model: Model, base: Any, adapter: Any) -> TrainState:
    """Return the state before the first step."""
    optimizer, _ = make_step(model, AdamParams(learning_rate=0.0, eps=0.0))
    params = {BASE: base, ADAPTER: jax.device_put(adapter, jax.tree.leaves(base)[0].sharding)}
    return init_train_state(params, optimizer, model)


def restored_state(model: Model, base: Any, arrays: Mapping[str, np.ndarray], *, optimizer: bool) -> TrainState:
    """Return a saved state, or a fresh one with its adapters; a ValueError if the arrays are of another model."""
    fresh = fresh_state(model, base, restored_adapter(model, arrays))
    if not optimizer:
        return fresh
    return fresh._replace(**_restored({"step": fresh.step, "opt_state": fresh.opt_state}, arrays))


def restored_adapter(model: Model, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return the adapters of a saved state."""
    return _restored({ADAPTER: jax.eval_shape(lambda: init_adapter(model, jax.random.key(0)))}, arrays)[ADAPTER]


def _restored(like: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    def find(path: Any, leaf: Any) -> Any:
        found = arrays.get(_name(path))
        if found is None or (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
            wanted = f"{_name(path)} of {leaf.dtype}{list(leaf.shape)}"
            raise ValueError(f"the saved state has no {wanted}: it is of another model, or was saved for samplers")
        return jax.device_put(found, leaf.sharding)

    return jax.tree_util.tree_map_with_path(find, like)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
