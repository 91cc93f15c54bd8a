"""The update step that a configuration asks for: its loss, optimizer and learning-rate schedule, jitted once."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from jaxft.core.correction import sampler_correction
from jaxft.core.losses import Metrics, policy_loss
from jaxft.core.objectives import dpo_loss, grpo_loss, ppo_loss, score_batch, sft_loss
from jaxft.core.types import Denominators, Model
from jaxft.core.update import LossFn, Update, make_update
from jaxft.training.config import LossConfig, OptimizerConfig


def make_loss(config: LossConfig, max_sampler_diff: float | None = None) -> LossFn:
    """The loss function of `make_update`.

    Args:
        config: which, and how.
        max_sampler_diff: a policy loss counts the rows whose recorded log-probabilities are further than this from the
            trainer's, on average; None: none does.

    Raises:
        ValueError: knobs that exclude each other, or one that the loss cannot do without.
    """
    if config.name == "sft":
        return sft_loss
    if config.name == "dpo":
        return partial(dpo_loss, beta=0.1 if config.beta is None else config.beta, **dict(config.preference))
    in_loss = config.kl != "k1_in_reward"
    knobs: dict[str, Any] = {
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
        "delta": config.delta,
        "beta": config.kl_weight if in_loss else 0.0,
        "kl": config.kl if in_loss else "k3_ratio",
    }
    choices: dict[str, Any] = {
        "loss": config.name,
        "importance_level": config.importance_level,
        "aggregation": config.aggregation,
        "max_completion_tokens": config.max_completion_tokens,
    }
    # Refused here, the knobs cost a message; refused in the first update, they would cost the policy.
    row = jnp.zeros((1, 2))
    reference = row if knobs["beta"] else None
    jax.eval_shape(lambda x: policy_loss(x, None, x[:, 0], x > 0, ref_logprobs=reference, **choices, **knobs), row)
    correction: dict[str, Any] = {}
    if config.correction is not None:
        name, low, high = config.correction.name, config.correction.low, config.correction.high
        one = jnp.ones(())
        jax.eval_shape(lambda x: sampler_correction(x, x, x > 0, Denominators(one, one), name, low=low, high=high), row)
        correction = {"correction": name, "correction_low": low, "correction_high": high}
    shared = {"entropy_coef": config.entropy_coef, "max_sampler_diff": max_sampler_diff, **knobs, **correction}
    if config.name == "ppo":
        if config.aggregation not in (None, "token_mean") or config.importance_level == "sequence":
            raise ValueError("ppo is averaged over tokens, with a ratio per token")
        return partial(ppo_loss, value_coef=config.value_coef, value_clip=config.value_clip, **shared)
    return partial(grpo_loss, **choices, **shared)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optax transformation. Clipping is the update's own: it has to judge the norm before anything else does."""
    learning_rate = make_schedule(config)
    if config.name == "sgd":
        return optax.sgd(learning_rate)
    return optax.adamw(
        learning_rate,
        b1=config.b1,
        b2=config.b2,
        mu_dtype=config.mean_dtype,
        weight_decay=config.weight_decay,
        # Norms and biases stay out: stacked over layers they have two axes, so names decide and not ranks.
        mask=lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key not in ("scale", "bias"), params
        ),
    )


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """The learning rate of each update, counted from 0: a linear rise, then constant or a fall, linear or by cosine."""
    rate, warmup = config.learning_rate, config.warmup_updates
    if config.decay_updates is None:
        after = optax.constant_schedule(rate)
    elif config.schedule == "linear":
        after = optax.linear_schedule(rate, rate * config.end_fraction, config.decay_updates)
    else:
        after = optax.cosine_decay_schedule(rate, config.decay_updates, alpha=config.end_fraction)
    if not warmup:
        return after
    # The first update of all is not wasted on a rate of 0: it gets the first step of the rise.
    return optax.join_schedules([optax.linear_schedule(rate / (warmup + 1), rate, warmup), after], [warmup])


@cache
def update_of(
    model: Model, loss: LossConfig, optimizer: OptimizerConfig, limits: tuple[float, float] | None
) -> tuple[optax.GradientTransformation, Update]:
    """Optimiser and update; the same for equal settings, so that a second learner of a process compiles nothing.

    Args:
        limits: `max_logprob_diff` and `max_disagreeing_fraction` of the adapter, for policy losses.
    """
    made = make_optimizer(optimizer)
    loss_fn = make_loss(loss, None if limits is None else limits[0])
    accept = None if limits is None else partial(_is_own, max_fraction=limits[1])
    return made, make_update(model, loss_fn, made, max_grad_norm=optimizer.max_grad_norm, accept=accept)


scored = jax.jit(score_batch, static_argnums=0)
"""Log-probabilities of a batch, jitted once."""


def _is_own(metrics: Metrics, max_fraction: float) -> Bool[Array, ""]:
    return metrics["sampler_disagreement_fraction"] <= max_fraction
