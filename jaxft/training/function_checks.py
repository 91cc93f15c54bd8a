"""Checks of losses, estimators and optimizers of one's own, before a run samples anything.

`check_signatures` traces on shapes and touches no device, so that a configuration can be checked without one;
`check_values` computes a loss and advantages on a few numbers.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft.core.types import Denominators
from jaxft.errors import one_line
from jaxft.harness.functions import Function, check_options
from jaxft.harness.supervision import innermost_user_frame
from jaxft.training.config import LOSS_KEYWORDS, LossConfig, reads
from jaxft.training.optimizer_config import OptimizerConfig
from jaxft.training.update import make_optimizer, make_policy_loss, make_schedule

LOSS_TABLES = (
    *("logprobs", "old_logprobs", "advantages", "completion_mask", "ref_logprobs", "policy_weights", "segment_ids"),
    *("trajectory_tokens", "denominators"),
)
ESTIMATOR_TABLES = ("rewards", "group_ids", "named_rewards", "lengths", "step_rewards", "trajectories", "gamma")
TOKEN_TABLES = ("token_rewards", "completion_mask")
"""Further tables of estimators that take a `completion_mask`, and so give an advantage per token."""
OPTIMIZER_SETTINGS = ("learning_rate", "weight_decay", "mask", "b1", "b2")
TAKEN_METRICS = (
    *("loss", "grad_norm", "applied_updates", "nonfinite_updates", "nothing_to_learn", "refused_updates", "entropy"),
    *("updates", "learning_rate", "batch_rows", "policy_version", "trained_tokens", "groups", "episodes"),
)
TAKEN_PREFIXES = ("reward", "sampler_", "correction_", "seconds", "stale", "unscorable")
"""Names of metrics, and their beginnings, that a job or an epoch has of itself."""

ROWS, TOKENS = 2, 4
"""Shape of the tables on which functions are tried."""

Fault = tuple[str, str]
"""A field below `loss` or `optimizer`, and what is wrong with it."""


def check_signatures(loss: LossConfig, optimizer: OptimizerConfig) -> Iterator[Fault]:
    """Yield what is wrong with functions of one's own, as far as shapes and parameters tell."""

    def unread() -> None:
        """Raise a ValueError if the optimizer's function does not take a setting that has been changed."""
        assert optimizer.function is not None
        for name in ("weight_decay", "b1", "b2"):
            is_changed = dict(optimizer)[name] != OptimizerConfig.model_fields[name].default
            if is_changed and not optimizer.function.takes(name):
                raise ValueError(f"{optimizer.function.place} takes no '{name}': leave it out")

    rates, tables = optimizer.schedule_options, (*ESTIMATOR_TABLES, *(TOKEN_TABLES if loss.is_per_token else ()))
    own: Sequence[tuple[str, Any, Mapping[str, Any], Sequence[str], Callable[[], None]]] = (
        ("loss.function", loss.function, loss.options, (*LOSS_TABLES, *LOSS_KEYWORDS), lambda: _check_loss(loss)),
        ("loss.advantages", loss.estimator, {}, tables, lambda: None),
        ("optimizer.schedule", optimizer.schedule, rates, ("learning_rate",), lambda: _check_schedule(optimizer)),
        ("optimizer.function", optimizer.function, optimizer.options, OPTIMIZER_SETTINGS, unread),
    )

    faults = []
    for field, function, options, given, check in own:
        if not isinstance(function, Function):
            continue
        try:
            check_options(function, options, given)
            check()
        except ValueError as error:
            faults.append((field, str(error)))
    yield from faults
    if not faults:
        try:
            _check_optimizer(optimizer)
        except ValueError as error:
            yield "optimizer.function" if optimizer.function is not None else "optimizer", str(error)


def check_values(loss: LossConfig) -> Iterator[Fault]:
    """Yield what is wrong with the values of a loss or an estimator of one's own, on two short rows."""
    own = (("loss.function", loss.function, _check_loss_values), ("loss.advantages", loss.estimator, _check_advantages))
    for field, function, check in own:
        try:
            if isinstance(function, Function):
                check(loss, function)
        except ValueError as error:
            yield field, str(error)


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
    function = config.function
    assert function is not None
    has_reference = config.needs_reference and config.kl != "k1_in_reward"
    has_weights = config.correction is not None and config.correction.name not in ("ratio", "none")
    for name, is_given, way in (
        ("ref_logprobs", has_reference, "set loss.beta above 0"),
        ("policy_weights", has_weights, "set loss.correction"),
    ):
        if name in function.required and not is_given:
            raise ValueError(f"{function.place} takes '{name}', which is None: {way}")
        if is_given and not function.takes(name):
            raise ValueError(f"{function.place} takes no '{name}', but there are some: take it, or do not {way}")
    loss = make_policy_loss(config)
    for is_packed in (False, True):
        value, metrics = _call(function, lambda: jax.eval_shape(loss, **_tables(config, is_packed)))  # noqa: B023
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"{function.place} returned a loss of shape {value.shape}, {value.dtype}; wanted a scalar")
        for name, metric in metrics.items():
            if metric.shape != () or name in TAKEN_METRICS or name.startswith(TAKEN_PREFIXES):
                why = "whose name is taken" if metric.shape == () else f"of shape {metric.shape}; wanted a scalar"
                raise ValueError(f"{function.place} returned the metric '{name}', {why}")


def _check_loss_values(config: LossConfig, function: Function) -> None:
    """Raise a ValueError unless loss and gradient are finite, whatever padding holds, and the gradient is not 0."""
    loss, tables = make_policy_loss(config), _tables(config, is_packed=False)
    compute = jax.jit(jax.value_and_grad(lambda logprobs, others: loss(logprobs=logprobs, **others)[0]))
    value, gradient = map(np.asarray, compute(tables.pop("logprobs"), tables))
    if not np.isfinite(value) or not np.isfinite(gradient).all():
        what = f"loss {value}" if not np.isfinite(value) else "gradient that is not finite"
        raise ValueError(
            f"{function.place} has a {what} on rows whose padding holds -inf: apply completion_mask before exp and log"
        )
    if not gradient.any():
        raise ValueError(f"{function.place} has no gradient in logprobs, so that nothing would be learned")


def _check_advantages(config: LossConfig, function: Function) -> None:
    """Raise a ValueError unless an estimator gives finite advantages of the shape that it should."""
    job_rewards = np.array([1.0, 0.0, 0.5, np.nan])
    mask = np.arange(3) < np.array([[3], [2], [3], [1]])
    steps = np.stack([job_rewards, np.zeros(4)], axis=1) if reads(function, "step_rewards") else None
    tables = {
        "rewards": job_rewards,
        "group_ids": np.array([0, 0, 1, 1]),
        "named_rewards": _AnyName(job_rewards),
        "lengths": mask.sum(axis=1),
        "step_rewards": steps,
        "trajectories": np.arange(4),
        "gamma": config.gamma,
        **({"token_rewards": np.where(mask, 1.0, 0.0), "completion_mask": mask} if config.is_per_token else {}),
    }
    found = np.asarray(_call(function, lambda: function.call(**function.select_keywords(tables))))
    wanted = mask.shape if config.is_per_token else (4,) if steps is None else steps.shape
    if found.shape != wanted:
        raise ValueError(f"{function.place} returned advantages of shape {found.shape}; wanted {wanted}")
    judged = found[mask] if config.is_per_token else found[~np.isnan(job_rewards)]
    if not np.isfinite(judged).all():
        raise ValueError(f"{function.place} returned {judged[~np.isfinite(judged)][0]} for a trajectory with a reward")


class _AnyName(dict[str, np.ndarray]):
    """Named rewards in which every name has the same values, as the names of a run are not known yet."""

    def __init__(self, values: np.ndarray) -> None:
        super().__init__(reward=values)
        self._values = values

    def __missing__(self, name: str) -> np.ndarray:
        return self._values


def _tables(config: LossConfig, is_packed: bool) -> dict[str, Any]:
    """Return tables to try a loss on: two rows, the second of which trains two tokens, and -inf in padding."""
    mask = np.arange(TOKENS) < np.array([[TOKENS], [TOKENS // 2]])
    logprobs = np.where(mask, -np.linspace(0.5, 2.0, ROWS * TOKENS).reshape(ROWS, TOKENS), -np.inf).astype(np.float32)
    old = np.where(mask, logprobs + np.float32(0.05), -np.inf).astype(np.float32)
    has_reference = config.needs_reference and config.kl != "k1_in_reward"
    has_weights = config.correction is not None and config.correction.name not in ("ratio", "none")
    segments = np.zeros((ROWS, TOKENS), np.int32) if is_packed else None
    counts = np.broadcast_to(mask.sum(axis=1, keepdims=True), mask.shape).astype(np.float32)
    return {
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
    function = config.schedule
    assert isinstance(function, Function)
    schedule = _call(function, lambda: make_schedule(config))
    if not callable(schedule):
        raise ValueError(f"{function.place} returned {schedule!r:.50}; wanted an optax schedule")
    rate = _call(function, lambda: jax.eval_shape(lambda step: jnp.asarray(schedule(step)), _shape(jnp.int32)))
    if rate.shape != ():
        raise ValueError(f"{function.place} gives rates of shape {rate.shape}; wanted a scalar")


def _check_optimizer(config: OptimizerConfig) -> None:
    """Raise a ValueError unless the optimizer is an optax transformation that keeps the shapes of parameters."""
    place = f"optimizer '{config.name}'" if config.function is None else config.function.place
    try:
        made = make_optimizer(config.model_copy(update={"groups": ()}))
    except Exception as error:
        raise ValueError(f"{place} cannot be made with these options: {one_line(error)}") from error
    params = {"layers": {"kernel": _shape(jnp.float32, 2, 4, 4), "scale": _shape(jnp.float32, 2, 4)}}
    try:
        updates, _ = jax.eval_shape(lambda p: made.update(p, made.init(p), p), params)
    except Exception as error:
        raise ValueError(f"{place} raised {one_line(error)} on parameters of two layers") from error
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
        raise ValueError(f"{place} returned updates of other shapes than the parameters")


def _shape(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
