"""Log-probability and entropy of tokens from a table of logits, and the temperature that divides them.

Letters: `N` tokens, `V` vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxft.core.divergence import MIN_LOGPROB

SUM_BLOCK = 512
"""Block size of sums over the vocabulary on CPUs, which add one by one: 150,000 terms would lose three digits."""

Statistics = tuple[Float[Array, "N"], Float[Array, "N"], Float[Array, "N"], Float[Array, "N"]]
"""Log-probability, entropy, largest logit, and log-sum-exp relative to it, of each token."""


def scaling_temperature(temperature: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the divisor of the logits: the temperature, or 1 for greedy rows (temperature 0), scored unscaled.

    Temperatures that are negative or not finite also give 1: dividing by them would make every gradient NaN.

    >>> print(scaling_temperature(jnp.array([0.5, 0.0, jnp.nan])))
    [0.5 1.  1. ]
    """
    return jnp.where((temperature > 0) & (temperature < jnp.inf), temperature, 1.0)


def logprobs_by(
    statistics: Statistics, logits: Float[Array, "N V"], tokens: Int[Array, "N"], temperature: Float[Array, "N"]
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Return each token's log-probability and its distribution's entropy, in nats, by `softmax(logits / temperature)`.

    The statistics are given, so that a gradient does not compute them again. Arithmetic is float32 or wider, also for
    bfloat16 logits, whose own precision is off by up to 0.02 nats. A temperature that is negative or not finite gives
    NaN, and no gradient. No gradient flows into temperatures.

    >>> given = jnp.log(jnp.array([[1.0, 3.0]])), jnp.array([1]), jnp.array([1.0])
    >>> lp, entropy = logprobs_by(softmax_statistics(*given), *given)
    >>> print(f"{lp[0]:.4f} {entropy[0]:.4f}")  # log(3/4); -(1/4 log 1/4 + 3/4 log 3/4)
    -0.2877 0.5623
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    statistics = jax.lax.stop_gradient(statistics)
    logprobs, entropy = _softmax_scores(logits, tokens, scaling_temperature(temperature), statistics)
    is_temperature = (temperature >= 0) & (temperature < jnp.inf)
    return jnp.where(is_temperature, logprobs, jnp.nan), jnp.where(is_temperature, entropy, jnp.nan)


@jax.custom_jvp
def _softmax_scores(
    logits: Float[Array, "N V"], tokens: Int[Array, "N"], temperature: Float[Array, "N"], statistics: Statistics
) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Return log-probability and entropy of each token, which are among the statistics."""
    return statistics[:2]


@_softmax_scores.defjvp
def _softmax_scores_jvp(primals: Any, tangents: Any) -> Any:
    """`T d log p_y = dz_y - sum(p dz)` and `T dH = -sum(p (log p + H) dz)`; the temperature is a constant."""
    (logits, tokens, temperature, (chosen, entropy, shift, log_mass)), (d_logits, *_) = primals, tangents
    logprobs = (logits - shift[:, None]) / temperature[:, None] - log_mass[:, None]  # [N V]
    probs = jnp.exp(logprobs)
    # A comparison instead of a gather, whose transpose is a scatter into a table of zeros.
    is_chosen = (jnp.arange(logits.shape[-1]) == tokens[:, None]).astype(probs.dtype)
    d_chosen = jnp.sum((is_chosen - probs) * d_logits, axis=-1)
    d_entropy = -jnp.sum(probs * (jnp.maximum(logprobs, MIN_LOGPROB) + entropy[:, None]) * d_logits, axis=-1)
    return (chosen, entropy), (d_chosen / temperature, d_entropy / temperature)


def softmax_statistics(
    logits: Float[Array, "N V"], tokens: Int[Array, "N"], temperature: Float[Array, "N"]
) -> Statistics:
    """Return the statistics of `softmax(logits / temperature)`, without a gradient."""
    logits = jax.lax.stop_gradient(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    temperature = scaling_temperature(temperature)
    shift = logits.max(axis=-1)
    mass, moment = _exp_sums((logits - shift[:, None]) / temperature[:, None])
    log_mass = jnp.log(mass)
    chosen = (jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - shift) / temperature - log_mass
    # Neither term is negative. logsumexp(z) - sum(p z) is the same number, but loses digits where logits are large.
    return chosen, log_mass - moment / mass, shift, log_mass


def _exp_sums(x: Float[Array, "N V"]) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Return `sum(e^x)` and `sum(x e^x)` over the last axis, in one pass without an intermediate of `x`'s size."""
    # Other platforms add in trees; on TPUs the blocks of vocabularies that are not divisible would be copied.
    return jax.lax.platform_dependent(x, cpu=_exp_sums_in_blocks, default=_sum_terms)


def _sum_terms(x: Float[Array, "N *K"]) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    weights, moments = _exp_terms(x)
    return weights.sum(axis=-1), moments.sum(axis=-1)


def _exp_terms(x: Float[Array, "N *K"]) -> tuple[Array, Array]:
    weights = jnp.exp(x)
    return weights, weights * jnp.maximum(x, MIN_LOGPROB)


def _exp_sums_in_blocks(x: Float[Array, "N V"]) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    def add(a: Any, b: Any) -> Any:
        return a[0] + b[0], a[1] + b[1]

    blocks = x.shape[-1] // SUM_BLOCK
    split, zero = blocks * SUM_BLOCK, jnp.zeros((), x.dtype)
    # Masses and moments, [N blocks] each.
    of_blocks = jax.lax.reduce(_exp_terms(x[:, :split].reshape(len(x), blocks, SUM_BLOCK)), (zero, zero), add, (2,))
    mass, moment = (of_block.sum(axis=-1) for of_block in of_blocks)
    mass_of_rest, moment_of_rest = _sum_terms(x[:, split:])
    return mass + mass_of_rest, moment + moment_of_rest
