"""Policy losses of the GRPO family: ratio, surrogate, KL, aggregation, each a small pure function.

`policy_loss` composes them; a published algorithm is a row of `PRESETS`. Everything is to be minimised. Masks come
before every `exp` and `log`, so padding may hold anything. Letters: `B` rows, `T` tokens.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxft.core.types import Denominators

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: in float32 a log-ratio of 100 is a NaN gradient, even under a clip."""

Surrogate = Literal["clip", "cap", "score"]
Aggregation = Literal["row_mean", "token_mean", "budget"]
Metrics = dict[str, Float[Array, ""]]


class Preset(NamedTuple):
    """One published algorithm: what `policy_loss` takes for each knob that is left at None."""

    surrogate: Surrogate
    aggregation: Aggregation
    clip_low: float
    clip_high: float
    importance_level: Literal["token", "sequence"] = "token"


PRESETS: Mapping[str, Preset] = {
    "grpo": Preset("clip", "row_mean", 0.2, 0.2),  # arXiv 2402.03300
    "dapo": Preset("clip", "token_mean", 0.2, 0.28),  # arXiv 2503.14476
    "bnpo": Preset("clip", "token_mean", 0.2, 0.28),  # dapo under TRL's other name for it
    "dr_grpo": Preset("clip", "budget", 0.2, 0.2),  # arXiv 2503.20783
    "gspo": Preset("clip", "row_mean", 3e-4, 4e-4, "sequence"),  # arXiv 2507.18071
    "cispo": Preset("cap", "token_mean", 0.0, 5.0),  # arXiv 2506.13585; clip_high is the cap itself
    "reinforce": Preset("score", "token_mean", 0.0, 0.0),
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
    clip_low: float | None = None,
    clip_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    kl: str = "k3_ratio",
    ref_logprobs: Float[Array, "B T"] | None = None,
    max_completion_tokens: int | None = None,
    denominators: Denominators | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of a batch and its metrics; `loss` names a row of `PRESETS`, the other knobs override that row.

    Averaged over: the rows' token means (grpo, gspo), all trained tokens (dapo, cispo, reinforce), or rows times
    `max_completion_tokens` (dr_grpo); rows without a trained token are in no denominator.

    Args:
        logprobs: of the tokens under the present policy; gradients flow into these.
        old_logprobs: under the policy at the start of the batch's first update; None when this is that update.
        advantages: one per row, or one per token.
        completion_mask: True where the policy chose the token.
        importance_level: `sequence` takes one ratio per row, `exp(mean of the log-ratio)` (GSPO; per-token advantages
            get its GSPO-token form, arXiv 2507.18071 eq. 13).
        clip_low, clip_high: the ratio is clipped to `[1 - clip_low, 1 + clip_high]`; for cispo `clip_high` is the cap.
        delta: dual clip, an upper bound `-delta A` on the loss where `A < 0` (arXiv 1912.09729).
        beta: weight of the KL to the reference, added per token and averaged like the policy term.
        kl: its estimator, see `kl_penalty`.
        max_completion_tokens: the budget of one trajectory; the constant that dr_grpo divides by.
        denominators: of the whole batch, when these rows are a part of it.

    Returns:
        The scalar loss, and scalars that are means over all trained tokens, or maxima where the name ends in `_max`.

    Raises:
        ValueError: an unknown name, shapes that disagree, a knob the loss cannot take, or a missing input; says which.

    >>> lp = jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.5]]))
    >>> old = jnp.log(jnp.array([[0.4, 0.5], [0.5, 0.5]]))  # ratios 1.25, 1 / 1, 1
    >>> mask = jnp.array([[True, True], [True, False]])
    >>> loss, metrics = policy_loss(lp, old, jnp.array([1.0, -1.0]), mask)
    >>> print(f"{loss:.2f}")  # rows: -(1.2 + 1) / 2 and +1, so (-1.1 + 1) / 2
    -0.05
    >>> print(f"{metrics['clip_high_share']:.4f}")  # one of three trained tokens
    0.3333
    """
    if loss not in PRESETS:
        raise ValueError(f"loss is {loss!r}; wanted one of {', '.join(PRESETS)}")
    preset = PRESETS[loss]
    importance_level = importance_level or preset.importance_level
    aggregation = aggregation or preset.aggregation
    clip_low = preset.clip_low if clip_low is None else clip_low
    clip_high = preset.clip_high if clip_high is None else clip_high
    _check_knobs(preset.surrogate, loss, importance_level, delta, clip_high, beta, ref_logprobs, old_logprobs)
    _check_shapes(logprobs, old_logprobs, advantages, completion_mask, ref_logprobs)

    mask = completion_mask
    per_token_advantages = advantages if advantages.ndim == 2 else advantages[:, None]
    old_logprobs = jax.lax.stop_gradient(logprobs) if old_logprobs is None else old_logprobs
    log_ratio = jnp.where(mask, logprobs - old_logprobs, 0.0)  # [B T]
    importance = (
        log_ratio if importance_level == "token" else _sequence_log_ratio(log_ratio, mask, advantages.ndim == 2)
    )
    ratio = jnp.exp(jnp.clip(importance, -MAX_LOG_RATIO, MAX_LOG_RATIO))  # [B T] or [B 1]

    if preset.surrogate == "clip":
        policy_term = clipped_surrogate(ratio, per_token_advantages, clip_low, clip_high, delta)
    elif preset.surrogate == "cap":
        weight = jax.lax.stop_gradient(jnp.minimum(ratio, clip_high))
        policy_term = -weight * per_token_advantages * jnp.where(mask, logprobs, 0.0)
    else:
        policy_term = -per_token_advantages * jnp.where(mask, logprobs, 0.0)

    denominators = count_trained(mask) if denominators is None else denominators
    total = jnp.broadcast_to(policy_term, mask.shape)
    metrics = {}
    if beta:
        assert ref_logprobs is not None
        divergence = kl_penalty(kl, jnp.where(mask, ref_logprobs - logprobs, 0.0), log_ratio, ratio)
        total = total + beta * divergence
        metrics["kl"] = token_mean(k3(jnp.where(mask, ref_logprobs - logprobs, 0.0)), mask, denominators)
    value = aggregate(total, mask, denominators, aggregation, max_completion_tokens)

    outside_low, outside_high = _clip_bites(preset.surrogate, ratio, per_token_advantages, clip_low, clip_high)
    metrics |= {
        "policy_loss": aggregate(policy_term, mask, denominators, aggregation, max_completion_tokens),
        "clip_low_share": token_mean(outside_low, mask, denominators),
        "clip_high_share": token_mean(outside_high, mask, denominators),
        "log_ratio_clamped_share": token_mean(jnp.abs(importance) > MAX_LOG_RATIO, mask, denominators),
        "log_ratio_abs_max": jnp.max(jnp.abs(log_ratio), initial=0.0),
        "approx_kl": token_mean(k3(-log_ratio), mask, denominators),
    }
    return value, jax.tree.map(jax.lax.stop_gradient, metrics)


def clipped_surrogate(
    ratio: Float[Array, "B #T"],
    advantages: Float[Array, "B #T"],
    clip_low: float,
    clip_high: float,
    delta: float | None = None,
) -> Float[Array, "B #S"]:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` per token (PPO, arXiv 1707.06347 eq. 7); optional dual clip.

    >>> print(clipped_surrogate(jnp.array([[1.5, 0.5]]), jnp.array([[1.0, 1.0]]), 0.2, 0.2))
    [[-1.2 -0.5]]
    """
    loss = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages)
    if delta is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -delta * advantages), loss)
    return loss


def k3(log_ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """`e^x - 1 - x`, never negative: the low-variance KL estimate for `x = log q - log p`, tokens drawn from p.

    (J. Schulman, "Approximating KL divergence", 2020.) Above the clamp it is constant: `e^20 - 1 - x` would fall with x
    and its gradient push away from the reference.

    >>> print(f"{k3(jnp.log(2.0)):.4f}")  # 2 - 1 - log 2
    0.3069
    """
    x = jnp.minimum(log_ratio, MAX_LOG_RATIO)
    return jnp.expm1(x) - x


def kl_penalty(
    kind: str, rho: Float[Array, "B T"], log_ratio: Float[Array, "B T"], importance_ratio: Float[Array, "B #T"]
) -> Float[Array, "B T"]:
    """A term per token that pulls the policy to the reference; `rho = ref_logprobs - logprobs`, 0 where masked.

    * `k3_ratio` (default): `exp(logprobs - old) k3`, differentiated through both: the gradient of KL(policy || ref).
    * `k2`: `rho^2 / 2`, weighted by the detached ratio: the same gradient.
    * `k3`: weighted by the detached ratio: the gradient of KL(ref || policy), the other direction.
    * `k3_unweighted`: weight 1, as GRPO is often written; biased after a batch's first update.
    * `k3_trl`: `k3_ratio` with the loss's own ratio, a row's at sequence level: TRL's number.

    Raises:
        ValueError: an unknown kind, or `k1`, whose expectation has no gradient.
    """
    if kind == "k1":
        raise ValueError(
            "kl='k1' in the loss has gradient 0 in expectation: it would hold nothing; "
            "use 'k3_ratio', or k1 in the reward"
        )
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if kind == "k3_ratio":
        return ratio * k3(rho)
    if kind == "k2":
        return jax.lax.stop_gradient(ratio) * 0.5 * rho**2
    if kind == "k3":
        return jax.lax.stop_gradient(ratio) * k3(rho)
    if kind == "k3_unweighted":
        return k3(rho)
    if kind == "k3_trl":
        return importance_ratio * k3(rho)
    raise ValueError(f"kl is {kind!r}; wanted one of k2, k3, k3_ratio, k3_unweighted, k3_trl")


def count_trained(completion_mask: Bool[Array, "B T"]) -> Denominators:
    """Rows with a trained token, and trained tokens, of these rows.

    >>> print(*count_trained(jnp.array([[True, True], [False, False]])))
    1.0 2.0
    """
    mask = completion_mask
    return Denominators(jnp.sum(mask.any(axis=1)).astype(jnp.float32), jnp.sum(mask).astype(jnp.float32))


def aggregate(
    per_token: Float[Array, "B #T"],
    completion_mask: Bool[Array, "B T"],
    denominators: Denominators,
    aggregation: str,
    max_completion_tokens: int | None = None,
) -> Float[Array, ""]:
    """One number from a loss per token; 0 when nothing is trained. Parts of a batch add up to the whole.

    `row_mean`: mean over rows of the row's mean over trained tokens; `token_mean`: mean over all trained tokens;
    `budget`: sum over `rows x max_completion_tokens`.

    Raises:
        ValueError: `budget` without `max_completion_tokens`, or an unknown name.

    >>> x, mask = jnp.array([[4.0, 2.0], [6.0, 9.0]]), jnp.array([[True, True], [True, False]])
    >>> print(*[aggregate(x, mask, count_trained(mask), name) for name in ("row_mean", "token_mean")])
    4.5 4.0
    """
    masked = jnp.where(completion_mask, per_token, 0.0)
    if aggregation == "row_mean":
        lengths = jnp.maximum(completion_mask.sum(axis=1), 1)
        return jnp.sum(masked.sum(axis=1) / lengths) / jnp.maximum(denominators.rows, 1.0)
    if aggregation == "token_mean":
        return token_mean(per_token, completion_mask, denominators)
    if aggregation == "budget":
        if max_completion_tokens is None:
            raise ValueError(
                "max_completion_tokens is None; this loss divides by it: give the token budget of one trajectory"
            )
        return masked.sum() / (jnp.maximum(denominators.rows, 1.0) * max_completion_tokens)
    raise ValueError(f"aggregation is {aggregation!r}; wanted row_mean, token_mean or budget")


def token_mean(
    x: Float[Array, "B #T"] | Bool[Array, "B #T"], completion_mask: Bool[Array, "B T"], denominators: Denominators
) -> Float[Array, ""]:
    """Sum over these rows' trained tokens, divided by the trained tokens of the whole batch; 0 when there is none."""
    return jnp.sum(jnp.where(completion_mask, x, 0.0)) / jnp.maximum(denominators.tokens, 1.0)


def _sequence_log_ratio(
    log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"], has_token_advantages: bool
) -> Float[Array, "B #T"]:
    mean = log_ratio.sum(axis=1, keepdims=True) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)  # [B 1]
    if not has_token_advantages:
        return mean
    # The value of the row's ratio, the gradient of the token's: a turn's credit stays with that turn.
    return jax.lax.stop_gradient(mean) + log_ratio - jax.lax.stop_gradient(log_ratio)


def _clip_bites(
    surrogate: Surrogate,
    ratio: Float[Array, "B #T"],
    advantages: Float[Array, "B #T"],
    clip_low: float,
    clip_high: float,
) -> tuple[Bool[Array, "B #S"], Bool[Array, "B #S"]]:
    """Where the clip changed the gradient, below and above."""
    if surrogate == "clip":
        return (ratio < 1.0 - clip_low) & (advantages < 0), (ratio > 1.0 + clip_high) & (advantages > 0)
    return jnp.zeros_like(ratio, bool), (ratio > clip_high if surrogate == "cap" else jnp.zeros_like(ratio, bool))


def _check_knobs(
    surrogate: Surrogate,
    loss: str,
    importance_level: str,
    delta: float | None,
    clip_high: float,
    beta: float,
    ref_logprobs: Array | None,
    old_logprobs: Array | None,
) -> None:
    if importance_level not in ("token", "sequence"):
        raise ValueError(f"importance_level is {importance_level!r}; wanted token or sequence")
    if delta is not None and surrogate != "clip":
        raise ValueError(f"delta is {delta}, but {loss!r} has no clipped surrogate to bound; leave delta None")
    if delta is not None and delta <= 1.0 + clip_high:
        raise ValueError(f"delta is {delta}; wanted more than 1 + clip_high = {1.0 + clip_high}")
    if beta and ref_logprobs is None:
        raise ValueError(
            f"beta is {beta}, but ref_logprobs is None; give the reference's log-probabilities or set beta to 0"
        )
    if surrogate == "score" and old_logprobs is not None:
        raise ValueError("'reinforce' has no ratio and so allows one update per rollout; pass old_logprobs=None")


def _check_shapes(
    logprobs: Array, old_logprobs: Array | None, advantages: Array, completion_mask: Array, ref_logprobs: Array | None
) -> None:
    shape = logprobs.shape
    for name, x in {
        "old_logprobs": old_logprobs,
        "completion_mask": completion_mask,
        "ref_logprobs": ref_logprobs,
    }.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; wanted that of logprobs, {shape}")
    if advantages.shape not in (shape, shape[:1]):
        raise ValueError(f"advantages have shape {advantages.shape}; wanted {shape[:1]} or {shape}")
