"""Checks of losses, estimators and optimizers of one's own, before a run samples anything.

`check_signatures` traces on shapes and touches no device, so that a configuration can be checked without one;
`check_values` computes a loss on a few numbers.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft.core.types import Denominators
from jaxft.errors import one_line
from jaxft.harness.functions import Function, check_options
from jaxft.harness.supervision import innermost_user_frame
from jaxft.training.config import LOSS_KEYWORDS, LossConfig
from jaxft.training.optimizer_config import SETTINGS, OptimizerConfig
from jaxft.training.update import make_optimizer, make_policy_loss, make_schedule

TAKEN_METRICS = (
    *("loss", "grad_norm", "applied_updates", "nonfinite_updates", "nothing_to_learn", "refused_updates", "entropy"),
    *("updates", "learning_rate", "batch_rows", "policy_version", "trained_tokens", "groups", "episodes"),
)
TAKEN_PREFIXES = ("reward", "sampler_", "correction_", "seconds", "stale", "unscorable")
"""Names of metrics, and their beginnings, that a job or an epoch has of itself."""

ESTIMATOR_KEYWORDS = ("rewards", "group_ids", "named_rewards", "lengths", "step_rewards", "trajectories", "gamma")
TOKEN_KEYWORDS = ("token_rewards", "completion_mask")
"""Keywords that an estimator of one's own may take; the second, if it has a parameter `completion_mask`."""

ROWS, TOKENS = 2, 4
"""Shape of the tables on which functions are tried."""

Fault = tuple[str, str]
"""A field below `loss` or `optimizer`, and what is wrong with it."""


def check_signatures(loss: LossConfig, optimizer: OptimizerConfig) -> list[Fault]:
    """Return what is wrong with functions of one's own, as far as parameters and, if all have theirs, shapes tell."""
    functions: Sequence[tuple[str, Any, Mapping[str, Any], Sequence[str]]] = (
        ("loss.function", loss.function, loss.options, (*_tables(loss), *LOSS_KEYWORDS)),
        ("loss.advantages", loss.estimator, {}, ESTIMATOR_KEYWORDS + TOKEN_KEYWORDS * loss.is_per_token),
        ("optimizer.schedule", optimizer.schedule, optimizer.schedule_options, ("learning_rate",)),
        ("optimizer.function", optimizer.function, optimizer.options, (*SETTINGS, "mask")),
    )
    own = [each for each in functions if isinstance(each[1], Function)]
    shapes = {"loss.function": partial(_check_loss, loss), "optimizer.schedule": partial(_check_schedule, optimizer)}
    shapes["optimizer" if optimizer.function is None else "optimizer.function"] = partial(_check_optimizer, optimizer)
    return _faults({field: partial(check_options, *given) for field, *given in own}) or _faults(shapes)


def check_values(loss: LossConfig) -> list[Fault]:
    """Return what is wrong with the values of a loss of one's own, on two short rows."""
    return _faults({"loss.function": partial(_check_loss_values, loss)})


def _faults(checks: Mapping[str, Callable[[], None]]) -> list[Fault]:
    found = []
    for field, check in checks.items():
        try:
            check()
        except ValueError as error:
            found.append((field, str(error)))
    return found


def _call(function: Function, call: Callable[[], Any]) -> Any:
    """Return `call()`, which calls a function of one's own.

    Raises:
        ValueError: it raised; the message has the error, the function, and the line.
    """
    try:
        return call()
    except Exception as error:
        frames = list(traceback.walk_tb(error.__traceback__))[::-1]
        frame = innermost_user_frame(frames)
        where = "" if frame is None else f", at {frame}"
        raise ValueError(f"{function.place} raised {one_line(error)}{where}") from error


def _check_loss(config: LossConfig) -> None:
    """Raise a ValueError unless the loss has what it reads, and returns a scalar and scalar metrics."""
    if (function := config.function) is None:
        return
    loss, tables = make_policy_loss(config), _tables(config)
    for name, way in (("ref_logprobs", "set loss.beta above 0"), ("policy_weights", "set loss.correction")):
        is_given = tables[name] is not None
        if name in function.required and not is_given:
            raise ValueError(f"{function.place} takes '{name}', which is None: {way}")
        if is_given and not function.takes(name):
            raise ValueError(f"{function.place} takes no '{name}', but there are some: take it, or do not {way}")
    for is_packed in (False, True):
        value, metrics = _call(function, lambda: jax.eval_shape(loss, **_tables(config, is_packed)))  # noqa: B023
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"{function.place} returned a loss of shape {value.shape}, {value.dtype}; wanted a scalar")
        for name, metric in metrics.items():
            if metric.shape != () or name in TAKEN_METRICS or name.startswith(TAKEN_PREFIXES):
                why = "whose name is taken" if metric.shape == () else f"of shape {metric.shape}; wanted a scalar"
                raise ValueError(f"{function.place} returned the metric '{name}', {why}")


def _check_loss_values(config: LossConfig) -> None:
    """Raise a ValueError unless loss and gradient are finite, whatever padding holds, and the gradient is not 0."""
    if (function := config.function) is None:
        return
    loss = make_policy_loss(config)
    compute = jax.jit(jax.value_and_grad(lambda logprobs, others: loss(logprobs=logprobs, **others)[0]))
    in_padding = " whose padding holds -inf: apply completion_mask before exp and log"
    for padding, way_out in ((0.0, ""), (-np.inf, in_padding)):
        tables = _tables(config, padding=padding)
        value, gradient = map(np.asarray, compute(tables.pop("logprobs"), tables))
        if not np.isfinite(value) or not np.isfinite(gradient).all():
            what = f"loss of {value}" if not np.isfinite(value) else "gradient that is not finite"
            raise ValueError(f"{function.place} has a {what} on two rows of log-probabilities{way_out}")
        if not gradient.any():
            raise ValueError(f"{function.place} has no gradient in logprobs, so that nothing would be learned")


def _tables(config: LossConfig, is_packed: bool = False, padding: float = -np.inf) -> dict[str, Any]:
    """Return tables to try a loss on: two rows, the second of which trains two tokens, and a number in padding."""
    mask = np.arange(TOKENS) < np.array([[TOKENS], [TOKENS // 2]])
    logprobs = np.where(mask, -np.linspace(0.5, 2.0, ROWS * TOKENS).reshape(ROWS, TOKENS), padding).astype(np.float32)
    old = np.where(mask, logprobs + np.float32(0.05), padding).astype(np.float32)
    has_reference = config.scores_reference and config.kl != "k1_in_reward"
    has_weights = config.correction is not None and config.correction.name not in ("ratio", "none")
    segments = np.zeros((ROWS, TOKENS), np.int32) if is_packed else None
    counts = np.broadcast_to(mask.sum(axis=1, keepdims=True), mask.shape).astype(np.float32)
    by_task = {name: np.where(mask, dict(config)[name], 0.0).astype(np.float32) for name in config.task_tables}
    return by_task | {
        "logprobs": logprobs,
        "old_logprobs": old,
        "advantages": np.where(mask, np.array([[1.0], [-0.5]]), 0.0).astype(np.float32),
        "completion_mask": mask,
        "ref_logprobs": old if has_reference else None,
        "policy_weights": np.ones((ROWS, TOKENS), np.float32) if has_weights else None,
        "segment_ids": segments,
        "trajectory_tokens": counts if config.averaged_over == "trajectories" else None,
        "denominators": Denominators(*(np.array(count, np.float32) for count in (ROWS, mask.sum(), 1, ROWS))),  # type: ignore[arg-type]
    }


def _check_schedule(config: OptimizerConfig) -> None:
    """Raise a ValueError unless the schedule gives a scalar for each update."""
    if isinstance(function := config.schedule, str):
        return
    schedule = _call(function, lambda: make_schedule(config))
    if not callable(schedule):
        raise ValueError(f"{function.place} returned {schedule!r:.50}; wanted an optax schedule")
    rate = _call(function, lambda: jax.eval_shape(lambda step: jnp.asarray(schedule(step)), _shape(jnp.int32)))
    if rate.shape != ():
        raise ValueError(f"{function.place} gives rates of shape {rate.shape}; wanted a scalar")


def _check_optimizer(config: OptimizerConfig) -> None:
    """Raise a ValueError unless the optimizer is an optax transformation that keeps the shapes of parameters."""
    place = f"optimizer '{config.name}'" if config.function is None else config.function.place
    params = {"layers": {"kernel": _shape(jnp.float32, 2, 4, 4), "scale": _shape(jnp.float32, 2, 4)}}
    try:
        made = make_optimizer(config.model_copy(update={"groups": ()}))
        updates, _ = jax.eval_shape(lambda p: made.update(p, made.init(p), p), params)
    except Exception as error:
        raise ValueError(f"{place} cannot be used with these options: {one_line(error)}") from error
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
        raise ValueError(f"{place} returned updates of other shapes than the parameters")


def _shape(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
