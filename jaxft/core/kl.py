"""Estimates of the KL divergence to a reference policy, and the two places they may stand: in the loss, in the reward.

`rho = ref_logprobs - logprobs` of a sampled token. What counts in a loss is not an estimate's value but its gradient,
and the two are not the same thing: see `kl_penalty`. Letters: `B` rows, `T` tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxft.core.arrays import check_shapes

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: in float32 a log-ratio of 100 is a NaN gradient, even under a clip."""

KL_IN_LOSS = ("k2", "k3", "k3_ratio", "k3_unweighted", "k3_trl")


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
        ValueError: an unknown kind, `k1`, whose expectation has no gradient, or shapes that differ.

    >>> rho = jnp.log(jnp.array([[2.0]]))
    >>> print(kl_penalty("k2", rho, jnp.zeros((1, 1)), jnp.ones((1, 1))).round(4))  # (log 2)^2 / 2
    [[0.2402]]
    """
    if kind == "k1":
        raise ValueError(
            "kl='k1' in the loss has gradient 0 in expectation: it would hold nothing; "
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
    """`logprobs - ref_logprobs` on trained tokens, detached: what `beta` times of is taken off their rewards.

    Its mean is KL(policy || ref) of the whole sequence, and as a part of the reward it has that gradient: subtract it
    per token from `token_rewards`, or summed over a trajectory from its reward, before any baseline.

    Raises:
        ValueError: shapes that differ.

    >>> lp, ref = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.5]]))
    >>> print(k1_penalty(lp, ref, jnp.array([[True, True]])).round(4))  # log 2, 0
    [[0.6931 0.    ]]
    """
    check_shapes("B T", logprobs=logprobs, ref_logprobs=ref_logprobs, completion_mask=completion_mask)
    return jax.lax.stop_gradient(jnp.where(completion_mask, logprobs - ref_logprobs, 0.0))
