"""Losses of a model on a batch, the functions that `make_update` differentiates.

Each is `(model, params, batch, denominators=None, *, ...) -> (loss, metrics)`. `functools.partial` binds the options,
also of nested functions: `partial(grpo_loss, loss=partial(policy_loss, loss="dapo"))`. If `batch` is a microbatch,
`denominators` are the counts of the whole batch; None counts them in `batch`. Losses and metrics of microbatches are
summed, or combined by maximum where a metric's name ends in `_max`.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxft.core.checks import as_batch
from jaxft.core.correction import Correction, ratio_moments, sampler_agreement
from jaxft.core.divergence import Teacher
from jaxft.core.logprobs import token_logprobs
from jaxft.core.losses import Metrics, policy_loss, preference_loss, value_loss
from jaxft.core.partition import POLICY, TEACHER
from jaxft.core.reductions import count_tokens, row_sums, token_mean
from jaxft.core.types import Batch, Denominators, Model, Params, RouterScores, Scored


@runtime_checkable
class PolicyLoss(Protocol):
    """A policy loss: `policy_loss` with its options bound, or a function of your own in its place.

    A function that a configuration names gets those of these keywords that it has parameters for. `jax.jit` compiles
    it; gradients flow into `logprobs` alone. Letters: `B` rows, which may hold several packed sequences, `T` tokens.
    """

    def __call__(
        self,
        logprobs: Float[Array, "B T"],
        old_logprobs: Float[Array, "B T"] | None,
        advantages: Float[Array, "B T"],
        completion_mask: Bool[Array, "B T"],
        *,
        ref_logprobs: Float[Array, "B T"] | None = None,
        policy_weights: Float[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        trajectory_tokens: Float[Array, "B T"] | None = None,
        denominators: Denominators | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """Return the loss, to be minimised, and metrics.

        Args:
            logprobs: log-probabilities of the tokens under the present policy; anything in padding.
            old_logprobs: those before the first update of the job, or under the sampler with correction `ratio`; None
                where they are `logprobs`, in whose place a function of a configuration gets these, without gradient.
            advantages: one per token, 0 in padding.
            completion_mask: True where the policy chose the token: apply it before every `exp` and `log`.
            ref_logprobs: those of the reference; None unless `beta` is above 0.
            policy_weights: factors of `correction` on the policy term; None without one.
            segment_ids: number of the sequence that a token of a packed row belongs to; None in rows of one sequence.
            trajectory_tokens: number of trained tokens of the token's trajectory, for means over trajectories.
            denominators: counts of the whole batch, of which these rows may be a microbatch: divide sums by them, as
                `jaxft.losses.token_mean` and `aggregate` do, so that the microbatches' losses add up.

        Returns:
            The scalar loss, and metrics: scalars by name, of which the means over all trained tokens add up over
            microbatches, or the maximum is taken where the name ends in `_max`.
        """
        ...


EXTRA_TABLES = ("selected", "clip_low", "clip_high", "beta")
"""Fields of a batch that a loss gets only if they are there."""

PPO_LOSS: PolicyLoss = partial(policy_loss, loss="ppo")

CorrectionFn = Callable[..., Correction]
"""`sampler_correction` with its kind and bounds bound."""


def grpo_loss(
    model: Model,
    params: Params,
    batch: Batch,
    denominators: Denominators | None = None,
    *,
    loss: PolicyLoss = policy_loss,
    entropy_coef: float = 0.0,
    observation_coef: float = 0.0,
    router_aux_loss_coef: float = 0.0,
    correction: CorrectionFn | None = None,
    max_sampler_diff: float | None = None,
    teacher: Teacher | None = None,
    teacher_coef: float = 1.0,
) -> tuple[Float[Array, ""], Metrics]:
    """Return the policy loss of a batch under `params`, and its metrics, with entropy and sampler agreement among them.

    Args:
        model: the model.
        params: parameters of the policy; gradients flow into these. With a teacher `{"policy": ..., "teacher": ...}`,
            of which an update leaves the second as it is.
        batch: a batch with `advantages`.
        denominators: counts of the whole batch, when `batch` is a microbatch of it.
        loss: `policy_loss` with its options bound, such as `partial(policy_loss, loss="dapo", clip_high=0.3)`.
        entropy_coef: weight of the entropy bonus, the mean entropy of all trained tokens in nats (arXiv 1602.01783).
        observation_coef: weight of the mean negative log-probability, at temperature 1, of the tokens in the results of
            tools (ECHO, arXiv 2605.24517); needs `batch.observation_mask`.
        router_aux_loss_coef: weight of the auxiliary loss of routers, the metric `router_balance`; needs
            `batch.experts`.
        correction: function that weights the policy term, such as `partial(sampler_correction, kind="token_truncate")`;
            needs `batch.behavior_logprobs`. None: every weight is 1.
        max_sampler_diff: limit above which a sequence counts as sampled by another policy (`sampler_agreement`); needs
            `batch.sampler_logprobs`. None: no count.
        teacher: the policy learns the distributions of this model on the tokens' contexts: on-policy distillation over
            the whole vocabulary (arXiv 2306.13649). With advantages of 0 nothing else is learned. None: no teacher.
        teacher_coef: weight of the divergence from the teacher, a mean over all trained tokens.

    Raises:
        ValueError: the batch lacks a field that the loss reads, a field has another shape than the tokens, or `loss` or
            `correction` raises.

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens, of the same logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> batch = Batch(jnp.array([[0, 1]]), jnp.array([[False, True]]), jnp.array([2.0]))
    >>> objective = partial(grpo_loss, model, loss=partial(policy_loss, loss="dapo"))
    >>> loss, metrics = jax.jit(objective)(params, batch)
    >>> print(loss, f"{metrics['entropy']:.4f}")  # -A, as the ratio is 1; log 2
    -2.0 0.6931
    """
    batch = as_batch(batch)
    policy, teacher_params = (params, None) if teacher is None else (params[POLICY], params[TEACHER])
    entropy_gradient = entropy_coef != 0
    scored = score_batch(
        model, policy, batch, entropy_gradient=entropy_gradient, teacher=teacher, teacher_params=teacher_params
    )
    counted = count_tokens(*batch.counted, num_experts=model.num_experts) if denominators is None else denominators
    options = entropy_coef, observation_coef, router_aux_loss_coef, correction, max_sampler_diff
    value, metrics = _policy_terms(loss, scored, batch, counted, *options)
    if scored.divergence is not None:
        taught = batch.completion_mask
        if batch.teacher_hidden is not None:
            taught &= jnp.any(batch.teacher_hidden != 0, axis=-1)
        distance = token_mean(scored.divergence, taught, counted)
        value, metrics["teacher_divergence"] = value + teacher_coef * distance, jax.lax.stop_gradient(distance)
    return value, metrics


def ppo_loss(
    model: Model,
    params: Params,
    batch: Batch,
    denominators: Denominators | None = None,
    *,
    loss: PolicyLoss = PPO_LOSS,
    value_coef: float = 0.5,
    value_clip: float | None = 0.2,
    entropy_coef: float = 0.0,
    observation_coef: float = 0.0,
    router_aux_loss_coef: float = 0.0,
    correction: CorrectionFn | None = None,
    max_sampler_diff: float | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """PPO (arXiv 1707.06347, eq. 9): clipped surrogate plus `value_coef` times `value_loss`, over all trained tokens.

    Args:
        model: the model.
        params: `{"policy": params, "value_head": init_value_head(hidden_size)}`: one body, two heads.
        batch: a batch with `advantages`, `old_values` and `returns` per token (`gae`).
        denominators: counts of the whole batch, when `batch` is a microbatch of it.
        loss: the surrogate, such as `partial(policy_loss, loss="ppo", clip_high=0.3)`.
        value_coef: weight of the value loss.
        value_clip: maximum change of a value from `old_values` before its error is clipped; None: no clipping.
        entropy_coef: as in `grpo_loss`.
        observation_coef: as in `grpo_loss`.
        router_aux_loss_coef: as in `grpo_loss`.
        correction: as in `grpo_loss`.
        max_sampler_diff: as in `grpo_loss`.

    Raises:
        ValueError: as `grpo_loss`, or the batch lacks `old_values` or `returns`.

    >>> import jaxft
    >>> def coin(params, tokens, positions):
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model = jaxft.from_function(coin)  # a bridged model's hidden state is its logits
    >>> params = {"policy": {"logits": jnp.zeros(2)}, "value_head": jaxft.init_value_head(2)}
    >>> tokens, mask, one = jnp.array([[0, 1]]), jnp.array([[False, True]]), jnp.ones((1, 2))
    >>> loss, _ = ppo_loss(model, params, Batch(tokens, mask, one, old_values=0 * one, returns=3 * one))
    >>> print(loss)  # -1 + 0.5 (0.5 3^2)
    1.25
    """
    batch = as_batch(batch)
    if batch.old_values is None or batch.returns is None:
        raise ValueError("batch.old_values or batch.returns is None; ppo_loss needs both, see gae")
    scored = score_batch(
        model, params["policy"], batch, value_head=params["value_head"], entropy_gradient=entropy_coef != 0
    )
    counted = count_tokens(*batch.counted, num_experts=model.num_experts) if denominators is None else denominators
    options = entropy_coef, observation_coef, router_aux_loss_coef, correction, max_sampler_diff
    value, metrics = _policy_terms(loss, scored, batch, counted, *options)
    assert scored.values is not None
    error, value_metrics = value_loss(
        scored.values,
        batch.old_values,
        batch.returns,
        batch.completion_mask,
        value_clip=value_clip,
        denominators=counted,
    )
    return value + value_coef * error, metrics | value_metrics


def dpo_loss(
    model: Model,
    params: Params,
    batch: Batch,
    denominators: Denominators | None = None,
    *,
    beta: float = 0.1,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
    sft_coef: float = 0.0,
) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean preference loss over pairs; pair i has its chosen answer in row `2 i`, the rejected in `2 i + 1`.

    A pair in which a row has no trained token is in no sum and no denominator (`denominators.pairs`); only the metric
    `entropy` is over all trained tokens.

    A preference loss can fall while both answers become less likely, the rejected one faster. `sft_coef` adds the mean
    negative log-probability per token of the chosen answers, which keeps them likely (arXiv 2404.19733, eq. 1).

    Args:
        model: the model.
        params: parameters of the policy; gradients flow into these.
        batch: a batch with `ref_logprobs`, computed once with the reference (`score_batch`).
        denominators: `count_tokens` of the whole batch, when `batch` is a microbatch of it.
        beta: strength of the pull to the reference, above 0.
        kind: `sigmoid` or `ipo`, see `preference_loss`.
        label_smoothing: fraction of pairs assumed to be labelled the wrong way round, for `sigmoid`.
        length_normalized: True to take the mean log-probability over an answer's tokens instead of the sum.
        sft_coef: weight of the supervised term.

    Raises:
        ValueError: the number of rows is odd, `ref_logprobs` is None, rows are packed, denominators have no pairs, a
            field has another shape than the tokens, or `preference_loss` raises.

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens, of the same logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> batch = Batch(jnp.array([[0, 1], [0, 0]]), jnp.array([[False, True]] * 2))
    >>> scores = jax.jit(partial(score_batch, model))(params, batch)
    >>> loss, _ = jax.jit(partial(dpo_loss, model))(params, batch._replace(ref_logprobs=scores.logprobs))
    >>> print(f"{loss:.4f}")  # the policy is its reference: log 2
    0.6931
    """
    batch = as_batch(batch)
    denominators = count_tokens(*batch.counted) if denominators is None else denominators
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
        **_score_metrics(scored, mask, denominators),
    }
    loss = over_pairs(losses)
    if sft_coef:
        loss = loss - sft_coef * over_pairs(chosen_mean)
    return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


def sft_loss(
    model: Model, params: Params, batch: Batch, denominators: Denominators | None = None
) -> tuple[Float[Array, ""], Metrics]:
    """Mean negative log-probability over all trained tokens, in nats: supervised finetuning.

    >>> import jaxft
    >>> def coin(params, tokens, positions):  # two tokens, of the same logits everywhere
    ...     return jnp.broadcast_to(params["logits"], (*tokens.shape, 2))
    >>> model, params = jaxft.from_function(coin), {"logits": jnp.zeros(2)}
    >>> batch = Batch(jnp.array([[0, 1]]), jnp.array([[False, True]]))
    >>> loss, _ = sft_loss(model, params, batch)
    >>> print(f"{loss:.4f}")  # log 2
    0.6931
    """
    batch = as_batch(batch)
    denominators = count_tokens(*batch.counted) if denominators is None else denominators
    scored, mask = score_batch(model, params, batch), batch.completion_mask
    return token_mean(-scored.logprobs, mask, denominators), _score_metrics(scored, mask, denominators)


def _score_metrics(scored: Scored, mask: Bool[Array, "B T"], denominators: Denominators) -> Metrics:
    """Return mean entropy, metrics of routers and, where it is counted, the share of tokens whose head overflowed."""
    tables = {"entropy": scored.entropy, "head_overflow_fraction": scored.overflows}
    means = {name: token_mean(x, mask, denominators) for name, x in tables.items() if x is not None}
    return means if scored.routers is None else means | router_metrics(scored.routers, denominators)


def router_metrics(found: RouterScores, denominators: Denominators) -> Metrics:
    """Return metrics of the routers, means over the layers and the tokens of `denominators.routed`.

    `router_entropy` is in nats, `rerouted_fraction` the share of the layers in which replay changes the experts, and
    `expert_imbalance` the load of a layer's fullest expert as a multiple of the mean. `router_balance` is the auxiliary
    loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6) as transformers has it, without its coefficient:
    the number of experts of a token if all have the same load. The load is that of the replayed experts of the whole
    batch, which `denominators` has, so that the gradient of a microbatch's share is that of the whole loss.
    """
    if denominators.routed is None or denominators.expert_tokens is None:
        raise ValueError("denominators.routed is None; count batch.experts of the whole batch with count_tokens")
    load, (layers, experts) = denominators.expert_tokens, denominators.expert_tokens.shape
    routed = layers * jnp.maximum(denominators.routed, 1.0)
    fullest = (load.max(axis=1) / jnp.maximum(load.mean(axis=1), 1.0 / experts)).mean()
    balance = experts * (load.sum(axis=0) / routed * found.mass.sum(axis=0) / routed).sum()
    return {
        "router_entropy": found.entropy.sum() / routed,
        "rerouted_fraction": found.rerouted.sum() / routed,
        "expert_imbalance": fullest * found.mass.sum() / routed,  # times the microbatch's share of the tokens
        "router_balance": balance,
    }


def _observation_loss(scored: Scored, batch: Batch, denominators: Denominators) -> Float[Array, ""]:
    if batch.observation_mask is None or denominators.observations is None:
        which = "batch.observation_mask" if batch.observation_mask is None else "denominators.observations"
        raise ValueError(f"{which} is None; observation_coef needs a mask of the results of tools, and their count")
    counted = denominators._replace(tokens=denominators.observations)
    return token_mean(-scored.logprobs, batch.observation_mask, counted)


def _policy_terms(
    loss_fn: PolicyLoss,
    scored: Scored,
    batch: Batch,
    denominators: Denominators,
    entropy_coef: float,
    observation_coef: float,
    router_aux_loss_coef: float,
    correction: CorrectionFn | None,
    max_sampler_diff: float | None,
) -> tuple[Float[Array, ""], Metrics]:
    """Return the policy loss with its entropy bonus, and the metrics of both."""
    if batch.advantages is None:
        raise ValueError("batch.advantages is None; a policy loss needs one advantage per row or per token")
    mask, weights, corrected = batch.completion_mask, None, {}
    old_logprobs = batch.old_logprobs
    old = jax.lax.stop_gradient(scored.logprobs) if batch.old_logprobs is None else batch.old_logprobs
    if correction is not None:
        if batch.behavior_logprobs is None:
            raise ValueError("batch.behavior_logprobs is None; a correction needs them recorded while sampling")
        found = correction(old, batch.behavior_logprobs, mask, denominators, segment_ids=batch.segment_ids)
        weights, fraction = found.weights, found.out_of_bounds_fraction
        if found.old_logprobs is not None:
            old_logprobs = found.old_logprobs
        mean, square_mean = ratio_moments(old, batch.behavior_logprobs, mask, denominators)
        corrected = {
            "correction_fraction": fraction,
            "correction_weight_mean": token_mean(weights, mask, denominators),
            "sampler_ratio_mean": mean,
            "sampler_ratio_square_mean": square_mean,
        }
    value, metrics = loss_fn(
        scored.logprobs,
        old_logprobs,
        batch.advantages,
        mask,
        ref_logprobs=batch.ref_logprobs,
        policy_weights=weights,
        segment_ids=batch.segment_ids,
        trajectory_tokens=batch.trajectory_tokens,
        denominators=denominators,
        **{name: table for name in EXTRA_TABLES if (table := batch._asdict()[name]) is not None},
    )
    of_scores = _score_metrics(scored, mask, denominators)
    if entropy_coef:
        value = value - entropy_coef * of_scores["entropy"]
    if observation_coef:
        of_scores["observation_loss"] = _observation_loss(scored, batch, denominators)
        value = value + observation_coef * of_scores["observation_loss"]
    if router_aux_loss_coef:
        if scored.routers is None:
            raise ValueError("batch.experts is None; router_aux_loss_coef needs the experts of every token")
        value = value + router_aux_loss_coef * of_scores["router_balance"]
    metrics |= corrected | jax.tree.map(jax.lax.stop_gradient, of_scores)
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
    teacher: Teacher | None = None,
    teacher_params: Params | None = None,
    with_sum_pi_squared: bool = False,
) -> Scored:
    """Return log-probabilities and entropies of a batch's trained tokens, at the temperatures they were sampled with.

    Tokens of `observation_mask` are scored, too, at temperature 1. Scores of all others are 0.

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
    mask, temperature = batch.completion_mask, 1.0 if batch.temperatures is None else batch.temperatures
    if batch.observation_mask is not None:
        mask, temperature = mask | batch.observation_mask, jnp.where(batch.observation_mask, 1.0, temperature)
    return token_logprobs(
        model,
        params,
        batch.tokens,
        temperature=temperature,
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        value_head=value_head,
        entropy_gradient=entropy_gradient,
        teacher=teacher,
        teacher_params=teacher_params,
        teacher_hidden=batch.teacher_hidden,
        supports=batch.supports,
        completion_mask=mask,
        with_sum_pi_squared=with_sum_pi_squared,
        branches=batch.branches,
        targets=batch.targets,
        experts=batch.experts,
    )
