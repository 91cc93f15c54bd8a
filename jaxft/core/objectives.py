"""From a model and a batch to a loss: what `make_update` differentiates.

Each is `(model, params, batch, denominators, **knobs) -> (loss, metrics)`; fix knobs with `functools.partial`.
Metrics add over the parts of a batch, or take the maximum where their name ends in `_max`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxft.core.logprobs import token_logprobs
from jaxft.core.losses import MAX_LOG_RATIO, Metrics, aggregate, k3, policy_loss, token_mean
from jaxft.core.types import Batch, Denominators, Model, Params, Scored


def grpo_loss(
    model: Model,
    params: Params,
    batch: Batch,
    denominators: Denominators,
    *,
    loss: str = "grpo",
    importance_level: str | None = None,
    aggregation: str | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    kl: str = "k3_ratio",
    max_completion_tokens: int | None = None,
    entropy_coef: float = 0.0,
) -> tuple[Float[Array, ""], Metrics]:
    """`policy_loss` of the batch under `params`, with entropy and sampler-to-trainer agreement among the metrics.

    `entropy_coef` times the mean entropy of all trained tokens, in nats, is taken off the loss (arXiv 1602.01783).

    Raises:
        ValueError: the batch has no advantages, or what `policy_loss` refuses.
    """
    if batch.advantages is None:
        raise ValueError("batch.advantages is None; a policy loss needs one advantage per row or per token")
    scored = score(model, params, batch, entropy_gradient=entropy_coef != 0)
    value, metrics = policy_loss(
        scored.logprobs,
        batch.old_logprobs,
        batch.advantages,
        batch.completion_mask,
        loss=loss,
        importance_level=importance_level,
        aggregation=aggregation,
        clip_low=clip_low,
        clip_high=clip_high,
        delta=delta,
        beta=beta,
        kl=kl,
        ref_logprobs=batch.ref_logprobs,
        max_completion_tokens=max_completion_tokens,
        denominators=denominators,
    )
    mask = batch.completion_mask
    entropy = token_mean(scored.entropy, mask, denominators)
    if entropy_coef:
        value = value - entropy_coef * entropy
    metrics["entropy"] = jax.lax.stop_gradient(entropy)
    if batch.sampler_logprobs is not None:
        old = scored.logprobs if batch.old_logprobs is None else batch.old_logprobs
        metrics |= sampler_agreement(jax.lax.stop_gradient(old), batch.sampler_logprobs, mask, denominators)
    return value, metrics


def sft_loss(
    model: Model, params: Params, batch: Batch, denominators: Denominators
) -> tuple[Float[Array, ""], Metrics]:
    """Mean negative log-probability over all trained tokens, in nats: supervised finetuning."""
    scored = score(model, params, batch)
    value = aggregate(-scored.logprobs, batch.completion_mask, denominators, "token_mean")
    return value, {"entropy": token_mean(scored.entropy, batch.completion_mask, denominators)}


def score(model: Model, params: Params, batch: Batch, *, entropy_gradient: bool = False) -> Scored:
    """Log-probabilities and entropies of a batch's tokens at the temperatures they were sampled with."""
    return token_logprobs(
        model,
        params,
        batch.tokens,
        temperature=1.0 if batch.temperatures is None else batch.temperatures,
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        entropy_gradient=entropy_gradient,
    )


def sampler_agreement(
    old_logprobs: Float[Array, "B T"],
    sampler_logprobs: Float[Array, "B T"],
    completion_mask: Bool[Array, "B T"],
    denominators: Denominators,
) -> Metrics:
    """How far the trainer's log-probabilities are from those recorded while sampling (`d = old - sampler`), in nats."""
    difference = jnp.where(completion_mask, old_logprobs - sampler_logprobs, 0.0)
    weight = jnp.exp(jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return {
        "sampler_logprob_diff_mean": token_mean(jnp.abs(difference), completion_mask, denominators),
        "sampler_logprob_diff_max": jnp.max(jnp.abs(difference), initial=0.0),
        "sampler_kl": token_mean(k3(difference), completion_mask, denominators),
        "sampler_kl_reverse": token_mean(difference * weight - weight + 1.0, completion_mask, denominators),
    }


@partial(jax.jit, static_argnums=(0, 3))
def score_in_microbatches(model: Model, params: Params, batch: Batch, microbatch_rows: int) -> Scored:
    """`score` without gradients, `microbatch_rows` rows at a time; the rows must divide.

    Raises:
        ValueError: the number of rows is not a multiple of `microbatch_rows`.
    """
    rows = batch.tokens.shape[0]
    if rows % microbatch_rows:
        raise ValueError(f"{rows} rows do not divide into microbatches of {microbatch_rows}")
    parts = jax.tree.map(lambda x: x.reshape(rows // microbatch_rows, microbatch_rows, *x.shape[1:]), batch)
    scored = jax.lax.map(lambda part: score(model, params, part), parts)
    return jax.tree.map(lambda x: x.reshape(rows, -1), scored)
