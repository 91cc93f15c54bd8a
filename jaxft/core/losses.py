"""Policy losses of the GRPO family: ratio, surrogate, KL and aggregation, each a small pure function.

`policy_loss` composes them; a published algorithm is a row of `PRESETS`. All losses are to be minimised. Masks are
applied before every `exp` and `log`, so padding may hold any values. Letters: `B` rows, `T` tokens.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxft.core.checks import as_array, check_mask, check_shapes
from jaxft.core.reductions import aggregate, count_tokens, row_sums, token_mean
from jaxft.core.surrogates import MAX_LOG_RATIO, SURROGATES, Bound, SurrogateInputs, one_sided_clip
from jaxft.core.types import Denominators

Aggregation = Literal["seq_mean_token_mean", "token_mean", "constant"]
Metrics = dict[str, Float[Array, ""]]


class Preset(NamedTuple):
    """A published algorithm: its row of `SURROGATES`, and the defaults of `policy_loss` for options that are None."""

    surrogate: str
    aggregation: Aggregation
    clip_low: float
    clip_high: float
    importance_level: Literal["token", "sequence"] = "token"


PRESETS: Mapping[str, Preset] = {
    "grpo": Preset("clip", "seq_mean_token_mean", 0.2, 0.2),  # arXiv 2402.03300
    "dapo": Preset("clip", "token_mean", 0.2, 0.28),  # arXiv 2503.14476
    "bnpo": Preset("clip", "token_mean", 0.2, 0.28),  # dapo under TRL's other name for it
    "dr_grpo": Preset("clip", "constant", 0.2, 0.2),  # arXiv 2503.20783
    "gspo": Preset("clip", "seq_mean_token_mean", 3e-4, 4e-4, "sequence"),  # arXiv 2507.18071
    "cispo": Preset("cap", "token_mean", 0.0, 5.0),  # arXiv 2506.13585; clip_high is the cap itself
    "ppo": Preset("clip", "token_mean", 0.2, 0.2),  # arXiv 1707.06347; its value term is `value_loss`
    "reinforce": Preset("reinforce", "token_mean", 0.0, 0.0),  # no ratio: one update per rollout
    "dppo_tv": Preset("mask_tv", "token_mean", 0.2, 0.2),  # arXiv 2602.04879; clips of probabilities
    "dppo_kl": Preset("mask_kl", "token_mean", 0.05, 0.05),  # the same; clips of a divergence in nats
    "sapo": Preset("gate", "seq_mean_token_mean", 0.0, 0.0),  # arXiv 2511.20347
    "clip_cov": Preset("clip_selected", "token_mean", 0.2, 0.2),  # arXiv 2505.22617
    "kl_cov": Preset("hold_selected", "token_mean", 0.0, 0.0),  # the same
    "gmpo": Preset("geometric", "seq_mean_token_mean", 0.4, 0.4, "sequence"),  # arXiv 2507.20673; clips of log-ratios
}


def policy_loss(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"] | None,
    advantages: Float[Array, "B"] | Float[Array, "B T"],
    completion_mask: Bool[Array, "B T"],
    *,
    loss: str = "grpo",
    importance_level: str | None = None,
    aggregation: str | None = None,
    clip_low: Bound | None = None,
    clip_high: Bound | None = None,
    delta: float | None = None,
    beta: Bound = 0.0,
    kl: str = "k3_ratio",
    ref_logprobs: Float[Array, "B T"] | None = None,
    max_completion_tokens: int | None = None,
    policy_weights: Float[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    trajectory_tokens: Float[Array, "B T"] | None = None,
    selected: Bool[Array, "B T"] | None = None,
    cov_kl_coef: float = 0.1,
    denominators: Denominators | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Return the policy loss of a batch and its metrics.

    The loss is averaged over the trajectories' token means (grpo, gspo, sapo, gmpo), over all trained tokens (dapo,
    cispo, ppo, reinforce, dppo, clip_cov, kl_cov), or over trajectories times `max_completion_tokens` (dr_grpo);
    trajectories without a trained token are in no denominator.

    Args:
        logprobs: log-probabilities under the present policy; gradients flow into these.
        old_logprobs: log-probabilities under the policy before the batch's first update; None in that update.
        advantages: one per row, or one per token.
        completion_mask: True where the policy chose the token.
        loss: name of a row of `PRESETS`; options that are not None override that row.
        importance_level: `sequence` takes one ratio per row, `s = exp(mean of the log-ratio)` (GSPO), always in its
            GSPO-token form, `stop_gradient(s) e^(lp - stop_gradient(lp))` (arXiv 2507.18071 eq. 14). Value and gradient
            are those of `s` itself where a row has one advantage and one weight; where they vary along the row, a
            token keeps its own advantage and weight, packed or padded.
        clip_low, clip_high: the ratio is clipped to `[1 - clip_low, 1 + clip_high]`; for cispo to
            `[clip_low, clip_high]`, for dppo both bound the change of a token's distribution, for gmpo its log-ratio.
            One for all tokens, or a table `[B T]`, as for `beta`.
        delta: dual clip, an upper bound `-delta A` on the loss where `A < 0` (arXiv 1912.09729).
        beta: weight of the KL to the reference, added per token and averaged like the policy term.
        kl: estimator of the KL, see `kl_penalty`. `k3_trl` is multiplied by `s` itself at sequence level.
        max_completion_tokens: token budget of one trajectory, the constant that dr_grpo divides by.
        policy_weights: detached factors of the policy term, outside the clip (`sampler_correction`), of trained tokens.
        segment_ids: packed sequence that a token belongs to; `advantages` are then per token.
        trajectory_tokens: number of trained tokens of the token's whole trajectory, so that a trajectory of several
            rows counts once. Ratios stay those of rows. None: every row is a trajectory.
        selected: tokens of large covariance (`select_tokens`), which clip_cov and kl_cov need: the first leaves them
            out of the sum, the second adds a penalty.
        cov_kl_coef: weight of that penalty, `|log r|`.
        denominators: counts of the whole batch, when these rows are a microbatch of it.

    Returns:
        The scalar loss, and metrics: means over all trained tokens, or maxima where the name ends in `_max`.

    Raises:
        ValueError: a name is unknown, shapes differ, an option does not suit the loss, or an input is missing.

    >>> lp = jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.5]]))
    >>> old = jnp.log(jnp.array([[0.4, 0.5], [0.5, 0.5]]))  # ratios 1.25, 1 / 1, 1
    >>> mask = jnp.array([[True, True], [True, False]])
    >>> loss, metrics = jax.jit(policy_loss)(lp, old, jnp.array([1.0, -1.0]), mask)
    >>> print(f"{loss:.2f}")  # rows: -(1.2 + 1) / 2 and +1, so (-1.1 + 1) / 2
    -0.05
    >>> print(f"{metrics['clip_high_fraction']:.4f}")  # one of three trained tokens
    0.3333
    """
    if loss not in PRESETS:
        raise ValueError(f"loss is {loss!r}; wanted one of {', '.join(PRESETS)}")
    preset = PRESETS[loss]
    importance_level = importance_level or preset.importance_level
    aggregation = aggregation or preset.aggregation
    clip_low = preset.clip_low if clip_low is None else clip_low
    clip_high = preset.clip_high if clip_high is None else clip_high
    given = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "completion_mask": completion_mask,
        "ref_logprobs": ref_logprobs,
        "policy_weights": policy_weights,
        "segment_ids": segment_ids,
        "trajectory_tokens": trajectory_tokens,
        "selected": selected,
    }
    advantages, tables = as_array("advantages", advantages), {name: as_array(name, x) for name, x in given.items()}
    logprobs, old_logprobs, completion_mask, *others = tables.values()
    ref_logprobs, policy_weights, segment_ids, trajectory_tokens, selected = others
    _check_knobs(preset.surrogate, loss, importance_level, delta, clip_high, beta, kl, old_logprobs is not None)
    _check_inputs(tables, advantages, beta)

    mask = completion_mask
    per_token_advantages = advantages if advantages.ndim == 2 else advantages[:, None]
    denominators = count_tokens(mask, segment_ids, trajectory_tokens) if denominators is None else denominators
    old_logprobs = jax.lax.stop_gradient(logprobs) if old_logprobs is None else old_logprobs
    log_ratio = jnp.where(mask, logprobs - old_logprobs, 0.0)  # [B T]
    importance = log_ratio
    if preset.surrogate == "geometric":
        importance = one_sided_clip(log_ratio, per_token_advantages, clip_low, clip_high)
    of_whole_row = importance
    if importance_level == "sequence":
        of_whole_row = _row_mean(importance, mask, segment_ids)  # [B 1], or [B T] with segments
        # The value is the row's log-ratio, the gradient the token's. `own` is exactly 0 because it is computed first:
        # summed from the left, a large token log-ratio would round the row's away.
        own = importance - jax.lax.stop_gradient(importance)
        importance = jax.lax.stop_gradient(of_whole_row) + own  # [B T]
    ratio = jnp.exp(jnp.clip(importance, -MAX_LOG_RATIO, MAX_LOG_RATIO))  # [B T]

    shared = ratio, log_ratio, logprobs, old_logprobs, per_token_advantages, mask
    inputs = SurrogateInputs(*shared, clip_low, clip_high, delta, selected, cov_kl_coef)
    surrogate = SURROGATES[preset.surrogate]
    policy_term = surrogate.loss(inputs)
    if policy_weights is not None:
        policy_term = jax.lax.stop_gradient(jnp.where(mask, policy_weights, 0.0)) * policy_term

    def reduced(per_token: Float[Array, "B T"]) -> Float[Array, ""]:
        return aggregate(
            per_token, mask, denominators, aggregation, max_completion_tokens, segment_ids, trajectory_tokens
        )

    value = reduced(policy_term)
    metrics = {"policy_loss": value}
    if jnp.ndim(beta) or beta:
        assert ref_logprobs is not None
        rho = jnp.where(mask, ref_logprobs - logprobs, 0.0)
        undetached_ratio = jnp.exp(jnp.clip(of_whole_row, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        penalty = kl_penalty(kl, rho, log_ratio, undetached_ratio)
        value = value + (reduced(beta * penalty) if jnp.ndim(beta) else beta * reduced(penalty))
        metrics["kl"] = token_mean(k3(rho), mask, denominators)
        metrics["kl_clamped_fraction"] = token_mean(jnp.abs(rho) > MAX_LOG_RATIO, mask, denominators)
    outside_low, outside_high = surrogate.clipped(inputs)
    metrics |= {
        "clip_low_fraction": token_mean(outside_low, mask, denominators),
        "clip_high_fraction": token_mean(outside_high, mask, denominators),
        "log_ratio_clamped_fraction": token_mean(jnp.abs(importance) > MAX_LOG_RATIO, mask, denominators),
        "log_ratio_abs_max": jnp.max(jnp.abs(log_ratio), initial=0.0),
        "approx_kl": token_mean(jnp.expm1(jnp.clip(-log_ratio, max=MAX_LOG_RATIO)) + log_ratio, mask, denominators),
    }
    if delta is not None:
        metrics["delta_fraction"] = token_mean((ratio > delta) & (per_token_advantages < 0), mask, denominators)
    return value, jax.tree.map(jax.lax.stop_gradient, metrics)


def value_loss(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    completion_mask: Bool[Array, "B T"],
    *,
    value_clip: float | None = 0.2,
    denominators: Denominators | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """`0.5 max((V - Ret)^2, (clip(V, V_old - value_clip, V_old + value_clip) - Ret)^2)`, mean over all trained tokens.

    PPO's clipped value loss (arXiv 1707.06347 in the form of its reference implementation); unclipped when `value_clip`
    is None. `value_clip_fraction` counts where the clip took the gradient away.

    Raises:
        ValueError: shapes that differ.

    >>> one = jnp.ones((1, 1))
    >>> loss, metrics = jax.jit(value_loss)(2.0 * one, 0.0 * one, 3.0 * one, one > 0)  # clipped to 0.2: (0.2 - 3)^2 / 2
    >>> print(f"{loss:.2f} {metrics['value_clip_fraction']}")
    3.92 1.0
    """
    check_shapes("B T", values=values, old_values=old_values, returns=returns, completion_mask=completion_mask)
    mask = completion_mask
    denominators = count_tokens(mask) if denominators is None else denominators
    worse = error = jnp.where(mask, values - returns, 0.0) ** 2
    metrics = {}
    if value_clip is not None:
        held = jnp.where(mask, old_values + jnp.clip(values - old_values, -value_clip, value_clip) - returns, 0.0) ** 2
        worse = jnp.maximum(error, held)
        # Within the clip both errors are equal up to rounding, which must not be counted.
        is_outside = jnp.abs(values - old_values) > value_clip
        metrics["value_clip_fraction"] = token_mean(is_outside & (held > error), mask, denominators)
    value = 0.5 * token_mean(worse, mask, denominators)
    return value, jax.tree.map(jax.lax.stop_gradient, metrics | {"value_loss": value})


def _row_mean(
    log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"] | None
) -> Float[Array, "B #T"]:
    count = jnp.maximum(row_sums(mask.astype(log_ratio.dtype), segment_ids), 1)
    return row_sums(log_ratio, segment_ids) / count


def _check_knobs(
    surrogate: str,
    loss: str,
    importance_level: str,
    delta: float | None,
    clip_high: Bound,
    beta: Bound,
    kl: str,
    has_old: bool,
) -> None:
    if importance_level not in ("token", "sequence"):
        raise ValueError(f"importance_level is {importance_level!r}; wanted token or sequence")
    if delta is not None and surrogate != "clip":
        raise ValueError(f"delta is {delta}, but {loss!r} has no clipped surrogate to bound; leave delta None")
    if delta is not None and not jnp.ndim(clip_high) and delta <= 1.0 + clip_high:
        raise ValueError(f"delta is {delta}; wanted more than 1 + clip_high = {1.0 + clip_high}")
    if not jnp.ndim(beta) and beta < 0:
        raise ValueError(f"beta is {beta}; wanted at least 0")
    zero = jnp.zeros((1, 1))
    kl_penalty(kl, zero, zero, zero)  # raises for an unknown kind, even if beta is 0
    if surrogate == "reinforce" and importance_level == "sequence":
        raise ValueError("importance_level is 'sequence', but 'reinforce' has no ratio; leave it None")
    if surrogate == "reinforce" and has_old:
        raise ValueError("'reinforce' has no ratio and so allows one update per rollout; pass old_logprobs=None")


def _check_inputs(tables: Mapping[str, Any], advantages: Array, beta: Bound) -> None:
    if (jnp.ndim(beta) or beta) and tables["ref_logprobs"] is None:
        raise ValueError(
            f"beta is {beta}, but ref_logprobs is None; give the reference's log-probabilities or set beta to 0"
        )
    check_shapes("B T", **tables)
    for name in ("completion_mask", "selected"):
        if tables[name] is not None:
            check_mask(name, tables[name])
    shape, is_packed = tables["logprobs"].shape, tables["segment_ids"] is not None
    if advantages.shape != shape and (is_packed or advantages.shape != shape[:1]):
        wanted = shape if is_packed else f"{shape[:1]} or {shape}"
        raise ValueError(f"advantages have shape {advantages.shape}; wanted {wanted}")


KL_IN_LOSS = ("k2", "k3", "k3_ratio", "k3_unweighted", "k3_trl")


def k3(log_ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """`e^x - 1 - x`, never negative: low-variance estimate of KL(p || q), with `x = log q - log p` and tokens from p.

    Source: J. Schulman, "Approximating KL divergence", 2020. Above the clamp of x the estimate is constant:
    `e^20 - 1 - x` would fall with x, and its gradient push away from the reference.

    >>> print(f"{k3(jnp.log(2.0)):.4f}")  # 2 - 1 - log 2
    0.3069
    """
    x = jnp.minimum(log_ratio, MAX_LOG_RATIO)
    return jnp.expm1(x) - x


def kl_penalty(
    kind: str, rho: Float[Array, "B T"], log_ratio: Float[Array, "B T"], importance_ratio: Float[Array, "B #T"]
) -> Float[Array, "B T"]:
    """Return the KL estimate of each token, with `rho = ref_logprobs - logprobs`; 0 where masked.

    * `k3_ratio` (default): `exp(logprobs - old) k3`, differentiated through both: the gradient of KL(policy || ref).
    * `k2`: `rho^2 / 2`, weighted by the detached ratio: the same gradient.
    * `k3`: weighted by the detached ratio: the gradient of KL(ref || policy), the other direction.
    * `k3_unweighted`: weight 1, as GRPO is often written; biased after a batch's first update.
    * `k3_trl`: `k3_ratio` with the ratio of the loss, which is a row's at sequence level, as in TRL.

    Raises:
        ValueError: the kind is unknown or `k1`, whose gradient is 0 in expectation; or shapes differ.

    >>> rho = jnp.log(jnp.array([[2.0]]))
    >>> print(kl_penalty("k2", rho, jnp.zeros((1, 1)), jnp.ones((1, 1))).round(4))  # (log 2)^2 / 2
    [[0.2402]]
    """
    if kind == "k1":
        raise ValueError(
            "kl='k1' in the loss has gradient 0 in expectation, so it has no effect; "
            "use 'k3_ratio', or k1 in the reward"
        )
    if kind not in KL_IN_LOSS:
        raise ValueError(f"kl is {kind!r}; wanted one of {', '.join(KL_IN_LOSS)}")
    check_shapes("B T", rho=rho, log_ratio=log_ratio)
    if importance_ratio.shape not in (rho.shape, (len(rho), 1)):
        raise ValueError(f"importance_ratio has shape {importance_ratio.shape}; wanted {rho.shape} or {(len(rho), 1)}")
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if kind == "k3_ratio":
        return ratio * k3(rho)
    if kind == "k2":
        return jax.lax.stop_gradient(ratio) * 0.5 * rho**2
    if kind == "k3":
        return jax.lax.stop_gradient(ratio) * k3(rho)
    if kind == "k3_unweighted":
        return k3(rho)
    return importance_ratio * k3(rho)


def k1_penalty(
    logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"], completion_mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """`logprobs - ref_logprobs` on trained tokens, detached: the k1 estimate, to be subtracted from rewards.

    The expected sum over a sequence is KL(policy || ref), and in the reward it has that gradient. Subtract `beta` times
    this per token from `token_rewards`, or its sum over a trajectory from that reward, before any baseline.

    Raises:
        ValueError: shapes differ.

    >>> lp, ref = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.5]]))
    >>> print(k1_penalty(lp, ref, jnp.array([[True, True]])).round(4))  # log 2, 0
    [[0.6931 0.    ]]
    """
    check_shapes("B T", logprobs=logprobs, ref_logprobs=ref_logprobs, completion_mask=completion_mask)
    return jax.lax.stop_gradient(jnp.where(completion_mask, logprobs - ref_logprobs, 0.0))


class PreferenceLoss(NamedTuple):
    """Loss of each pair, and its margin: how much more than the reference the policy prefers the chosen answer."""

    losses: Float[Array, "P"]
    margins: Float[Array, "P"]


def preference_loss(
    chosen_logprobs: Float[Array, "P"],
    rejected_logprobs: Float[Array, "P"],
    ref_chosen_logprobs: Float[Array, "P"],
    ref_rejected_logprobs: Float[Array, "P"],
    *,
    beta: float = 0.1,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """Return the preference loss of each pair, from the summed log-probabilities of its answers, in nats.

    With the margin `h = (chosen - ref_chosen) - (rejected - ref_rejected)`:

    * `sigmoid`: `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)` (DPO, arXiv 2305.18290 eq. 7, and conservative
      DPO with `e = label_smoothing`, the fraction of wrong labels).
    * `ipo`: `(h - 1 / (2 beta))^2` (arXiv 2310.12036 eq. 17).

    Raises:
        ValueError: the kind is unknown, `beta` is not above 0, `label_smoothing` is outside [0, 0.5) or given with ipo,
            or shapes differ.

    >>> import jax.numpy as jnp
    >>> one = jnp.array([1.0])
    >>> print(preference_loss(one, one, one, one).losses.round(4))  # no preference yet: log 2
    [0.6931]
    >>> print(preference_loss(5 * one, one, one, one, kind="ipo", beta=0.25).losses)  # (4 - 2)^2
    [4.]
    """
    if beta <= 0:
        raise ValueError(f"beta is {beta}; a preference loss needs it above 0")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; wanted at least 0 and below 0.5")
    check_shapes(
        "P",
        chosen_logprobs=chosen_logprobs,
        rejected_logprobs=rejected_logprobs,
        ref_chosen_logprobs=ref_chosen_logprobs,
        ref_rejected_logprobs=ref_rejected_logprobs,
    )
    margins = (chosen_logprobs - ref_chosen_logprobs) - (rejected_logprobs - ref_rejected_logprobs)
    if kind == "sigmoid":
        agree, disagree = jax.nn.log_sigmoid(beta * margins), jax.nn.log_sigmoid(-beta * margins)
        return PreferenceLoss(-(1 - label_smoothing) * agree - label_smoothing * disagree, margins)
    if kind == "ipo":
        if label_smoothing:
            raise ValueError("label_smoothing is for kind='sigmoid'; ipo has none")
        return PreferenceLoss((margins - 1 / (2 * beta)) ** 2, margins)
    raise ValueError(f"kind is {kind!r}; wanted sigmoid or ipo")
