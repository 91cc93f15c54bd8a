"""Loss, optimizer, learning-rate schedule and jitted update of a configuration, and the metrics of several updates."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxft.core.correction import sampler_correction
from jaxft.core.divergence import Teacher
from jaxft.core.losses import Metrics, policy_loss
from jaxft.core.objectives import PolicyLoss, dpo_loss, grpo_loss, ppo_loss, score_batch, sft_loss
from jaxft.core.partition import POLICY
from jaxft.core.sharding import compute_platform, constrain, path_text
from jaxft.core.types import Model, Params
from jaxft.core.update import LossFn, Update, make_update
from jaxft.errors import did_you_mean
from jaxft.harness.functions import Function
from jaxft.training.config import LOSS_KEYWORDS, LossConfig
from jaxft.training.optimizer_config import OptimizerConfig, ParameterGroupConfig

COUNTED = ("applied_updates", "nonfinite_updates", "nothing_to_learn", "refused_updates")
"""Metrics summed over the updates of a job; all others are averaged, or maximised if the name ends in `_max`."""

AVERAGED_OVER = {
    "sampler_disagreement_fraction": "sequences",
    "observation_loss": "observations",
    **dict.fromkeys(
        ("preference_accuracy", "reward_margin", "chosen_reward", "rejected_reward", "chosen_nll"), "pairs"
    ),
    **dict.fromkeys(("grad_norm", "batch_rows"), "updates"),
}
"""The count of `TrainingBatch.counts` that weights a metric in the mean over updates; `LossConfig.averaged_over` for
the loss, `tokens` for all other metrics."""


def make_loss(config: LossConfig, max_sampler_diff: float | None = None, teacher: Model | None = None) -> LossFn:
    """Return the loss function, for `make_update`, that a configuration describes.

    Args:
        config: name and options of the loss.
        max_sampler_diff: policy losses count the rows whose recorded log-probabilities differ from the trainer's by
            more than this many nats on average; None for no count.
        teacher: model of the teacher of a distillation over the whole vocabulary; None for other losses.

    Raises:
        ValueError: options exclude each other, or one is missing.
    """
    if config.name == "sft":
        return sft_loss
    if config.name == "dpo":
        return partial(dpo_loss, beta=0.1 if config.beta is None else config.beta, **dict(config.preference))
    loss = make_policy_loss(config)
    correction = None
    if config.correction is not None:
        kind, low, high = config.correction.name, config.correction.low, config.correction.high
        correction = partial(sampler_correction, kind=kind, low=low, high=high)
        # Impossible bounds are refused here, before anything has been sampled.
        jax.eval_shape(lambda x: correction(x, x, x > 0), jax.ShapeDtypeStruct((1, 2), jnp.float32))
    shared: dict[str, Any] = {
        "loss": loss,
        "entropy_coef": config.entropy_coef,
        "observation_coef": config.observation_coef,
        "router_aux_loss_coef": config.router_aux_loss_coef,
        "correction": correction,
        "max_sampler_diff": max_sampler_diff,
    }
    if config.name == "ppo":
        if config.aggregation not in (None, "token_mean") or config.importance_level == "sequence":
            raise ValueError("ppo is averaged over tokens, with a ratio per token")
        return partial(ppo_loss, value_coef=config.value_coef, value_clip=config.value_clip, **shared)
    if teacher is not None and config.distillation is not None:
        form, mixing = config.distillation.form, config.distillation.mixing
        assert form != "sampled_token"  # which is part of the advantages
        shared |= {"teacher": Teacher(teacher, form, mixing)}
    return partial(grpo_loss, **shared)


def make_policy_loss(config: LossConfig) -> PolicyLoss:
    """Return the policy loss that a configuration names, or the function of its own, with all options bound.

    Raises:
        ValueError: options exclude each other, or one is missing.
    """
    keywords: dict[str, Any] = {name: dict(config)[name] for name in LOSS_KEYWORDS}
    has_kl = config.kl_weight > 0 and config.kl != "k1_in_reward"
    keywords |= {"beta": config.kl_weight, "kl": config.kl} if has_kl else {"beta": 0.0, "kl": "k3_ratio"}
    row = jax.ShapeDtypeStruct((1, 2), jnp.float32)
    if config.function is None:
        loss: Any = partial(policy_loss, loss=config.name, cov_kl_coef=config.cov_kl_coef, **keywords)
        # Impossible options are refused here, before anything has been sampled.
        jax.eval_shape(lambda x: loss(x, None, x, x > 0, ref_logprobs=x, selected=x > 0), row)
        return loss
    if not has_kl:
        del keywords["kl"], keywords["beta"]
    given = config.function.select_keywords({name: value for name, value in keywords.items() if value is not None})
    return bind_loss(config.function, {**given, **config.options})


def bind_loss(function: Function, options: Mapping[str, Any]) -> PolicyLoss:
    """Return a function in the form of `policy_loss` that gives another one the keywords it has parameters for.

    That function always gets `old_logprobs`: those of the present policy, where they are the same.
    """

    def loss(
        logprobs: Any, old_logprobs: Any, advantages: Any, completion_mask: Any, **tables: Any
    ) -> tuple[Array, Metrics]:
        given = {"logprobs": logprobs, "advantages": advantages, "completion_mask": completion_mask, **tables}
        given["old_logprobs"] = jax.lax.stop_gradient(logprobs) if old_logprobs is None else old_logprobs
        returned = function.call(**{**options, **function.select_keywords(given)})
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
            raise TypeError(f"returned {type(returned).__name__}; wanted (loss, metrics), metrics a dict")
        value, metrics = returned
        return jnp.asarray(value), jax.tree.map(lambda x: jax.lax.stop_gradient(jnp.asarray(x)), metrics)

    return loss


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return the optax transformation, without clipping: the update clips, after it has checked the gradient norm.

    Raises:
        TypeError: a function does not take its options, or returns no optax transformation.
    """
    groups = (*config.groups, ParameterGroupConfig(pattern="*"))
    made = {str(number): _make_group(config, each) for number, each in enumerate(groups)}
    return optax.partition(made, partial(group_labels, config.groups)) if config.groups else made["0"]


def group_labels(groups: tuple[ParameterGroupConfig, ...], params: Params) -> Params:
    """Return the tree of the numbers, as text, of the groups that parameters belong to; the last is that of the others.

    Raises:
        ValueError: no parameter belongs to a group.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [path_text(path).removeprefix(f"{POLICY}/") for path, _ in leaves]  # beside a value head or a teacher
    numbers = [
        next((i for i, each in enumerate(groups) if fnmatchcase(path, each.pattern)), len(groups)) for path in paths
    ]
    for number, each in enumerate(groups):
        if number not in numbers:
            near = did_you_mean(each.pattern, paths, what="there are")
            raise ValueError(f"optimizer.groups: no parameter is left for the pattern '{each.pattern}'{near}")
    return jax.tree.unflatten(jax.tree.structure(params), map(str, numbers))


def _make_group(config: OptimizerConfig, group: ParameterGroupConfig) -> optax.GradientTransformation:
    """Return the transformation of a group of parameters."""
    if group.rate_factor == 0:
        return optax.set_to_zero()
    rate, defaults = make_schedule(config), OptimizerConfig()
    settings = {
        "learning_rate": rate if group.rate_factor == 1 else lambda step: group.rate_factor * rate(step),
        "weight_decay": config.weight_decay if group.weight_decay is None else group.weight_decay,
        "mask": decayed,
        # Left out at their defaults, which are AdamW's: others have others.
        **({"b1": config.b1} if config.b1 != defaults.b1 else {}),
        **({"b2": config.b2} if config.b2 != defaults.b2 else {}),
    }
    function = config.function or Function(OPTIMIZERS[config.name], config.name, "")
    made = function.call(**function.select_keywords(settings), **config.options)
    if not isinstance(made, optax.GradientTransformation):
        raise TypeError(f"returned {made!r:.50}; wanted an optax transformation")
    return made


UNDECAYED = ("scale", "bias", "selection_bias")
"""Names of the parameters without weight decay."""


def decayed(params: Params) -> Params:
    """Return the tree of booleans that are True for parameters with weight decay: all but norms and biases.

    Stacked over layers, norms and biases have two axes, so that names decide and not ranks.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in UNDECAYED, params)


def _muon(
    learning_rate: optax.Schedule,
    weight_decay: float,
    mask: Callable[[Params], Params],
    b1: float = 0.9,
    b2: float = 0.999,
    **options: Any,
) -> optax.GradientTransformation:
    """Return Muon for the matrices of the layers, stacked or not, and AdamW for embeddings, heads, norms and biases."""

    def axes(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        is_matrix = leaf.ndim >= 2 and path[-1].key not in UNDECAYED and "layers" in path_text(path)
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if is_matrix else None

    return optax.contrib.muon(
        learning_rate,
        weight_decay=weight_decay,
        adam_weight_decay=weight_decay,
        adam_b1=b1,
        adam_b2=b2,
        weight_decay_mask=mask,
        muon_weight_dimension_numbers=partial(jax.tree_util.tree_map_with_path, axes),
        **options,
    )


def _schedule_free(
    learning_rate: optax.Schedule, b1: float = 0.9, **settings: Any
) -> optax.GradientTransformationExtraArgs:
    """Return schedule-free AdamW; the parameters are the points at which it takes gradients."""
    return optax.contrib.schedule_free(optax.adamw(learning_rate, b1=0.0, **settings), learning_rate, b1=b1)


OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": optax.adamw,
    "sgd": optax.sgd,
    "lion": optax.lion,
    "muon": _muon,
    "schedule_free": _schedule_free,
}
"""Functions that make the optimizers of `OptimizerConfig.name`."""


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Return the schedule, updates counted from 0: linear warm-up, then constant, or linear or cosine decay.

    It is NaN for an optimizer that takes no learning rate.

    Raises:
        ValueError: there is no learning rate; in a whole configuration there is one.
    """
    rate, warmup = config.learning_rate, config.warmup_updates
    if isinstance(config.schedule, Function):
        return config.schedule.call(
            **config.schedule.select_keywords({"learning_rate": rate}), **config.schedule_options
        )
    if rate is None and config.takes_rate:
        raise ValueError("learning_rate: is null, and no configuration says which model is trained: give a number")
    if rate is None:
        return optax.constant_schedule(jnp.nan)
    if config.decay_updates is None:
        after = optax.constant_schedule(rate)
    elif config.schedule == "linear":
        after = optax.linear_schedule(rate, rate * config.end_fraction, config.decay_updates)
    else:
        after = optax.cosine_decay_schedule(rate, config.decay_updates, alpha=config.end_fraction)
    if not warmup:
        return after
    # Starts above 0, so that the first update is not wasted.
    return optax.join_schedules([optax.linear_schedule(rate / (warmup + 1), rate, warmup), after], [warmup])


@partial(jax.jit, static_argnums=0)
def rate_at(config: OptimizerConfig, step: Int[Array, ""]) -> Float[Array, ""]:
    """Return the learning rate of an update; NaN if the optimizer takes none."""
    return jnp.asarray(make_schedule(config)(step), jnp.float32)


@cache
def cached_update(
    model: Model,
    loss: LossConfig,
    optimizer: OptimizerConfig,
    limits: tuple[float, float] | None,
    teacher: Model | None = None,
) -> tuple[optax.GradientTransformation, Update]:
    """Return optimizer and update: the same objects for equal settings, so that a second learner compiles nothing.

    Args:
        model: the model of the policy.
        loss: settings of the loss without `reward_weights`, which no update reads and which cannot be hashed.
        optimizer: settings of the optimizer.
        limits: `max_sampler_diff` and `max_disagreeing_fraction` of the learner for policy losses, else None.
        teacher: model of the teacher of a distillation over the whole vocabulary; None for other losses.
    """
    plain = make_optimizer(optimizer)
    # One program instead of one per array.
    made = plain._replace(init=jax.jit(lambda params: constrain(model.sharding, plain.init(params))))
    loss_fn = make_loss(loss, None if limits is None else limits[0], teacher)
    accept = None if limits is None else partial(_is_own, max_fraction=limits[1])
    keeps_finite = has_bounded_steps(optimizer) and compute_platform(model.sharding) != "cpu"
    update = make_update(
        model,
        loss_fn,
        made,
        max_grad_norm=optimizer.max_grad_norm,
        keeps_finite=keeps_finite,
        accept=accept,
        router_bias_update_rate=loss.router_bias_update_rate,
    )
    return made, update


def has_bounded_steps(config: OptimizerConfig) -> bool:
    """True if no step of clipped gradients can leave float32: at most the rate times the norm, by AdamW's 1e-8.

    >>> has_bounded_steps(OptimizerConfig(learning_rate=1e-6)), has_bounded_steps(OptimizerConfig(learning_rate=1e38))
    (True, False)
    """
    if config.is_own or config.learning_rate is None or config.max_grad_norm is None:
        return False
    return max(config.learning_rate, config.weight_decay) <= 1 and config.max_grad_norm <= 1e6


scored = jax.jit(score_batch, static_argnums=0, static_argnames="with_sum_pi_squared")
"""`score_batch`, jitted; shared by all learners."""


def _is_own(metrics: Metrics, max_fraction: float) -> Bool[Array, ""]:
    return metrics["sampler_disagreement_fraction"] <= max_fraction


def with_sample_size(metrics: dict[str, Any]) -> dict[str, Any]:
    """Replace the means of the correction's ratio and of its square by `effective_sample_fraction`, if there are any.

    That is the effective sample size of the importance weights as a fraction of the trained tokens (Kong 1992): 1 if
    the sampler is the policy.

    >>> with_sample_size({"loss": 1.0, "sampler_ratio_mean": 1.0, "sampler_ratio_square_mean": 2.0})
    {'loss': 1.0, 'effective_sample_fraction': 0.5}
    """
    left = dict(metrics)
    mean, square = left.pop("sampler_ratio_mean", None), left.pop("sampler_ratio_square_mean", None)
    if mean is None or square is None:
        return left
    return left | {"effective_sample_fraction": float(mean) ** 2 / float(square) if square else 0.0}


def merge_metrics(
    history: list[dict[str, Any]], counts: list[dict[str, int]], averaged_over: dict[str, str]
) -> dict[str, float]:
    """Merge the metrics of a job's updates; each mean is weighted by the number of items that it averages.

    Args:
        history: metrics of each update.
        counts: `TrainingBatch.counts` of each update.
        averaged_over: name of the count that weights a metric, by metric; `tokens` for metrics that it lacks.

    >>> first = {"kl": 1.0, "kl_max": 2.0, "applied_updates": 1.0}
    >>> second = {"kl": 4.0, "kl_max": 1.0, "applied_updates": 1.0}
    >>> merge_metrics([first, second], [{"tokens": 2}, {"tokens": 1}], {})
    {'kl': 2.0, 'kl_max': 2.0, 'applied_updates': 2.0}
    """
    merged = {}
    for name in history[0]:
        values = [float(metrics[name]) for metrics in history]
        if name in COUNTED:
            merged[name] = sum(values)
        elif name.endswith("_max"):
            merged[name] = max(values)
        else:
            weights = [count[averaged_over.get(name, "tokens")] for count in counts]
            # numpy's average would warn of a non-finite update.
            total = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
            merged[name] = total / max(sum(weights), 1)
    return merged
