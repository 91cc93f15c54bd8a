"""From a model and a batch to a loss: what `make_update` differentiates.

Each is `(model, params, batch, denominators, **knobs) -> (loss, metrics)`; fix knobs with `functools.partial`.
Metrics add over the parts of a batch, or take the maximum where their name ends in `_max`.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxft.core.checks import as_batch
from jaxft.core.correction import Correction, sampler_agreement, sampler_correction
from jaxft.core.logprobs import token_logprobs
from jaxft.core.losses import Metrics, policy_loss, preference_loss, value_loss
from jaxft.core.reductions import aggregate, row_sums, token_mean
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
    correction: str | None = None,
    correction_low: float = 0.5,
    correction_high: float = 2.0,
    max_sampler_diff: float | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """`policy_loss` of the batch under `params`, with entropy and sampler-to-trainer agreement among the metrics.

    `entropy_coef` times the mean entropy of all trained tokens, in nats, is taken off the loss (arXiv 1602.01783).
    `correction` weights the policy term by how much likelier a token is than when it was sampled
    (`sampler_correction`; needs `batch.behavior_logprobs`). `max_sampler_diff` counts the rows that the policy did not
    sample (`sampler_agreement`; needs `batch.sampler_logprobs`).

    Raises:
        ValueError: the batch lacks what the loss needs or has fields of other shapes than its tokens, or what
            `policy_loss` or `sampler_correction` refuses.

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens, of the same logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> batch = Batch(jnp.array([[0, 1]]), jnp.array([[False, True]]), jnp.array([2.0]))
    >>> loss, metrics = grpo_loss(model, params, batch, Denominators(jnp.ones(()), jnp.ones(())))
    >>> print(loss, f"{metrics['entropy']:.4f}")  # -A, as the ratio is 1; log 2
    -2.0 0.6931
    """
    scored = score_batch(model, params, batch, entropy_gradient=entropy_coef != 0)
    loss_fn = partial(
        policy_loss,
        loss=loss,
        importance_level=importance_level,
        aggregation=aggregation,
        clip_low=clip_low,
        clip_high=clip_high,
        delta=delta,
        beta=beta,
        kl=kl,
        max_completion_tokens=max_completion_tokens,
    )
    correct = _correction(correction, correction_low, correction_high)
    return _policy_terms(loss_fn, scored, batch, denominators, entropy_coef, correct, max_sampler_diff)


def ppo_loss(
    model: Model,
    params: Params,
    batch: Batch,
    denominators: Denominators,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    kl: str = "k3_ratio",
    value_coef: float = 0.5,
    value_clip: float | None = 0.2,
    entropy_coef: float = 0.0,
    correction: str | None = None,
    correction_low: float = 0.5,
    correction_high: float = 2.0,
    max_sampler_diff: float | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """PPO (arXiv 1707.06347, eq. 9): clipped surrogate plus `value_coef` times `value_loss`, over all trained tokens.

    Args:
        params: `{"policy": params, "value_head": init_value_head(hidden_size)}`: one body, two heads.
        batch: with `advantages`, `old_values` and `returns` per token (`gae`).

    Raises:
        ValueError: as `grpo_loss`, or the batch lacks values.

    >>> import jaxft
    >>> def coin(params, tokens, positions):
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model = jaxft.from_function(coin)  # a bridged model's hidden state is its logits
    >>> params = {"policy": {"logits": jnp.zeros(2)}, "value_head": jaxft.init_value_head(2)}
    >>> tokens, mask, one = jnp.array([[0, 1]]), jnp.array([[False, True]]), jnp.ones((1, 2))
    >>> batch = Batch(tokens, mask, one, old_values=0 * one, returns=3 * one)
    >>> loss, _ = ppo_loss(model, params, batch, Denominators(jnp.ones(()), jnp.ones(())))
    >>> print(loss)  # -1 + 0.5 (0.5 3^2)
    1.25
    """
    if batch.old_values is None or batch.returns is None:
        raise ValueError("batch.old_values or batch.returns is None; ppo_loss needs both, see gae")
    scored = score_batch(
        model, params["policy"], batch, value_head=params["value_head"], entropy_gradient=entropy_coef != 0
    )
    loss_fn = partial(policy_loss, loss="ppo", clip_low=clip_low, clip_high=clip_high, delta=delta, beta=beta, kl=kl)
    correct = _correction(correction, correction_low, correction_high)
    value, metrics = _policy_terms(loss_fn, scored, batch, denominators, entropy_coef, correct, max_sampler_diff)
    assert scored.values is not None
    error, figures = value_loss(
        scored.values,
        batch.old_values,
        batch.returns,
        batch.completion_mask,
        value_clip=value_clip,
        denominators=denominators,
    )
    return value + value_coef * error, metrics | figures


def dpo_loss(
    model: Model,
    params: Params,
    batch: Batch,
    denominators: Denominators,
    *,
    beta: float = 0.1,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
    sft_coef: float = 0.0,
) -> tuple[Float[Array, ""], Metrics]:
    """`preference_loss`, mean over pairs; rows `2 i` and `2 i + 1` are the chosen and the rejected answer of pair i.

    A pair counts when both of its rows have a trained token; one that lacks an answer is in no sum and no denominator
    (`denominators.pairs`), but the metric `entropy` is over all trained tokens.

    A preference loss is content when both answers become less likely, the rejected one faster. `sft_coef` times the
    mean negative log-probability per token of the chosen answers holds them up (arXiv 2404.19733, eq. 1).

    Args:
        batch: with `ref_logprobs`, computed once with the reference (`score_in_microbatches`).
        denominators: of the whole batch, by `count_tokens`.
        length_normalized: an answer's log-probability is the mean over its tokens and not their sum.

    Raises:
        ValueError: an odd number of rows, no `ref_logprobs`, packed rows, pairs that were not counted, fields of other
            shapes than the tokens, or what `preference_loss` refuses.

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens, of the same logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> batch = Batch(jnp.array([[0, 1], [0, 0]]), jnp.array([[False, True]] * 2))
    >>> batch = batch._replace(ref_logprobs=score_batch(model, params, batch).logprobs)
    >>> loss, _ = dpo_loss(model, params, batch, jaxft.count_tokens(batch.completion_mask))
    >>> print(f"{loss:.4f}")  # the policy is its reference: log 2
    0.6931
    """
    rows = batch.tokens.shape[0]
    if rows % 2:
        raise ValueError(f"there are {rows} rows; chosen and rejected answers alternate, so wanted an even number")
    if batch.ref_logprobs is None:
        raise ValueError("batch.ref_logprobs is None; score the batch with the reference first")
    if batch.segment_ids is not None:
        raise ValueError("batch.segment_ids is given; pairs are rows of their own, not packed")
    if denominators.pairs is None:
        raise ValueError("denominators.pairs is None; count the whole batch with count_tokens")
    pairs = jnp.maximum(denominators.pairs, 1.0)
    scored, mask = score_batch(model, params, batch), batch.completion_mask
    tokens = jnp.maximum(mask.sum(axis=1), 1)
    lengths = tokens if length_normalized else jnp.ones_like(tokens)

    def of_answers(logprobs: Float[Array, "B T"]) -> tuple[Array, Array]:
        sums = row_sums(jnp.where(mask, logprobs, 0.0))[:, 0] / lengths
        return sums[0::2], sums[1::2]

    (chosen, rejected), (ref_chosen, ref_rejected) = of_answers(scored.logprobs), of_answers(batch.ref_logprobs)
    losses, margins = preference_loss(
        chosen, rejected, ref_chosen, ref_rejected, beta=beta, kind=kind, label_smoothing=label_smoothing
    )
    chosen_mean = chosen * lengths[0::2] / tokens[0::2]
    trained = mask.any(axis=1)
    is_pair = trained[0::2] & trained[1::2]

    def over_pairs(x: Float[Array, "P"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(is_pair, x, 0.0)) / pairs

    metrics = {
        "preference_accuracy": over_pairs((margins > 0).astype(jnp.float32)),
        "reward_margin": over_pairs(beta * margins),
        "chosen_reward": over_pairs(beta * (chosen - ref_chosen)),
        "rejected_reward": over_pairs(beta * (rejected - ref_rejected)),
        "chosen_nll": over_pairs(-chosen_mean),
        "entropy": token_mean(scored.entropy, mask, denominators),
    }
    loss = over_pairs(losses)
    if sft_coef:
        loss = loss - sft_coef * over_pairs(chosen_mean)
    return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


def sft_loss(
    model: Model, params: Params, batch: Batch, denominators: Denominators
) -> tuple[Float[Array, ""], Metrics]:
    """Mean negative log-probability over all trained tokens, in nats: supervised finetuning.

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens, of the same logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> batch = Batch(jnp.array([[0, 1]]), jnp.array([[False, True]]))
    >>> loss, _ = sft_loss(model, params, batch, Denominators(jnp.ones(()), jnp.ones(())))
    >>> print(f"{loss:.4f}")  # log 2
    0.6931
    """
    scored = score_batch(model, params, batch)
    value = aggregate(-scored.logprobs, batch.completion_mask, denominators, "token_mean")
    return value, {"entropy": token_mean(scored.entropy, batch.completion_mask, denominators)}


def _correction(kind: str | None, low: float, high: float) -> Callable[..., Correction] | None:
    return None if kind is None else partial(sampler_correction, kind=kind, low=low, high=high)


def _policy_terms(
    loss_fn: Callable[..., tuple[Array, Metrics]],
    scored: Scored,
    batch: Batch,
    denominators: Denominators,
    entropy_coef: float,
    correct: Callable[..., Correction] | None,
    max_sampler_diff: float | None,
) -> tuple[Float[Array, ""], Metrics]:
    """The policy loss with its entropy bonus, and all that is logged of both."""
    if batch.advantages is None:
        raise ValueError("batch.advantages is None; a policy loss needs one advantage per row or per token")
    mask, weights, figures = batch.completion_mask, None, {}
    old = jax.lax.stop_gradient(scored.logprobs) if batch.old_logprobs is None else batch.old_logprobs
    if correct is not None:
        if batch.behavior_logprobs is None:
            raise ValueError("batch.behavior_logprobs is None; a correction needs them recorded while sampling")
        weights, share = correct(old, batch.behavior_logprobs, mask, denominators, segment_ids=batch.segment_ids)
        figures = {"correction_fraction": share, "correction_weight_mean": token_mean(weights, mask, denominators)}
    value, metrics = loss_fn(
        scored.logprobs,
        batch.old_logprobs,
        batch.advantages,
        mask,
        ref_logprobs=batch.ref_logprobs,
        policy_weights=weights,
        segment_ids=batch.segment_ids,
        trajectory_tokens=batch.trajectory_tokens,
        denominators=denominators,
    )
    entropy = token_mean(scored.entropy, mask, denominators)
    if entropy_coef:
        value = value - entropy_coef * entropy
    metrics |= figures | {"entropy": jax.lax.stop_gradient(entropy)}
    if batch.sampler_logprobs is not None:
        metrics |= sampler_agreement(
            old,
            batch.sampler_logprobs,
            mask,
            denominators,
            max_mean_diff=max_sampler_diff,
            segment_ids=batch.segment_ids,
        )
    return value, metrics


def score_batch(
    model: Model,
    params: Params,
    batch: Batch,
    *,
    value_head: Params | None = None,
    entropy_gradient: bool = False,
) -> Scored:
    """Log-probabilities and entropies of a batch's tokens at the temperatures they were sampled with.

    Raises:
        ValueError: a field of the batch has another shape than its tokens.

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens, of the same logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> print(score_batch(model, params, Batch(jnp.array([[0, 1]]), jnp.array([[False, True]]))).logprobs.round(4))
    [[ 0.     -0.6931]]
    """
    batch = as_batch(batch)
    return token_logprobs(
        model,
        params,
        batch.tokens,
        temperature=1.0 if batch.temperatures is None else batch.temperatures,
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        value_head=value_head,
        entropy_gradient=entropy_gradient,
    )


@partial(jax.jit, static_argnums=(0, 3))
def score_in_microbatches(
    model: Model, params: Params, batch: Batch, microbatch_rows: int, value_head: Params | None = None
) -> Scored:
    """`score_batch` without gradients, `microbatch_rows` rows at a time; the rows must divide.

    Raises:
        ValueError: the number of rows is not a multiple of `microbatch_rows`, or a field of the batch has another shape
            than its tokens.

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens, of the same logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> batch = Batch(jnp.array([[0, 1], [1, 1]]), jnp.array([[False, True]] * 2))
    >>> print(score_in_microbatches(model, params, batch, 1).entropy.round(4))  # log 2
    [[0.     0.6931]
     [0.     0.6931]]
    """
    batch = as_batch(batch)
    rows = batch.tokens.shape[0]
    if rows % microbatch_rows:
        raise ValueError(f"{rows} rows do not divide into microbatches of {microbatch_rows}")
    parts = jax.tree.map(lambda x: x.reshape(rows // microbatch_rows, microbatch_rows, *x.shape[1:]), batch)
    scored = jax.lax.map(lambda part: score_batch(model, params, part, value_head=value_head), parts)
    return jax.tree.map(lambda x: x.reshape(rows, -1), scored)
