"""Importance weights for a sampler whose probabilities differ from the trainer's, and metrics of the difference.

Without staleness the correction is off by default: the sampler is the trainer's own forward function, and the
difference `d = old_logprobs - behavior_logprobs` is rounding. It matters where the weights have changed since the
tokens were sampled, and with another sampler, a lower precision or a filter (top-k, top-p, min-p). Weights are
detached, stand outside the clip, and change no denominator. They cannot correct for tokens that a filter never lets be
sampled. Letters: `B` rows, `T` tokens.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxft.core.checks import check_shapes
from jaxft.core.losses import MAX_LOG_RATIO
from jaxft.core.reductions import aggregate, count_tokens, row_sums, token_mean
from jaxft.core.types import Denominators

Kind = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_geometric_mask", "ratio", "none"
]


class Correction(NamedTuple):
    """Weights of the policy term and, with `ratio`, what its clipped ratio divides by.

    Attributes:
        weights: detached weights.
        out_of_bounds_fraction: fraction of trained tokens whose ratio was out of bounds.
        old_logprobs: log-probabilities that take the place of the loss's own; None to leave these.
    """

    weights: Float[Array, "B T"]
    out_of_bounds_fraction: Float[Array, ""]
    old_logprobs: Float[Array, "B T"] | None = None


def sampler_correction(
    old_logprobs: Float[Array, "B T"],
    behavior_logprobs: Float[Array, "B T"],
    completion_mask: Bool[Array, "B T"],
    denominators: Denominators | None = None,
    *,
    kind: str,
    low: float = 0.5,
    high: float = 2.0,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Correction:
    """Return weights `[B T]` of the policy term: truncated importance sampling (arXiv 1802.01561) and variants.

    With `w = e^d` per token, `e^(sum d)` per row, or `e^(mean d)` per row:

    * `token_truncate`, `sequence_truncate`: `min(w, high)`.
    * `token_mask`, `sequence_mask`: `w` where `low <= w <= high`, else 0.
    * `sequence_geometric_mask`: 1 where `low <= e^(mean d) <= high`, else 0.
    * `ratio`: 1, and the loss takes its own ratio, which it clips, to `behavior_logprobs`: the clip then holds the
      policy near the one that sampled, however many updates lie between, as in PPO (arXiv 1707.06347).
    * `none`: 1.

    The last two have the metrics of `token_mask`.

    Args:
        old_logprobs: log-probabilities under the trainer.
        behavior_logprobs: log-probabilities under the distribution that the tokens were drawn from.
        completion_mask: True where the policy chose the token.
        denominators: counts of the whole batch, when these rows are a microbatch of it.
        kind: one of the names above.
        low: smallest ratio that a mask keeps, at most 1.
        high: largest weight, or largest ratio that a mask keeps, at least 1.
        segment_ids: packed sequence that a token belongs to.

    Raises:
        ValueError: the kind is unknown, the bounds are not `0 < low <= 1 <= high`, or shapes differ.

    >>> old, drawn = jnp.log(jnp.array([[0.9, 0.1]])), jnp.log(jnp.array([[0.3, 0.1]]))  # ratios 3 and 1
    >>> mask = jnp.array([[True, True]])
    >>> for kind in ("token_truncate", "token_mask", "sequence_geometric_mask"):  # geometric mean 1.73
    ...     print(sampler_correction(old, drawn, mask, kind=kind).weights.round(3))
    [[2. 1.]]
    [[0. 1.]]
    [[1. 1.]]
    """
    if kind not in get_args(Kind):
        raise ValueError(f"correction is {kind!r}; wanted one of {', '.join(get_args(Kind))}")
    if not 0 < low <= 1 <= high:
        raise ValueError(f"the bounds of the correction are {low} and {high}; wanted 0 < low <= 1 <= high")
    check_shapes(
        "B T",
        old_logprobs=old_logprobs,
        behavior_logprobs=behavior_logprobs,
        completion_mask=completion_mask,
        segment_ids=segment_ids,
    )
    log_weight = jnp.where(completion_mask, old_logprobs - behavior_logprobs, 0.0)  # [B T]
    if kind.startswith("sequence"):
        log_weight = row_sums(log_weight, segment_ids)
        if kind == "sequence_geometric_mask":
            log_weight = log_weight / jnp.maximum(row_sums(completion_mask.astype(log_weight.dtype), segment_ids), 1)
    # Compared as logarithms, because `exp` of a long row's sum overflows.
    is_high, is_low = log_weight > jnp.log(high), log_weight < jnp.log(low)
    if kind in ("ratio", "none"):
        weights, outside = jnp.ones_like(log_weight), is_high | is_low
    elif kind.endswith("truncate"):
        weights = jnp.exp(jnp.clip(log_weight, -MAX_LOG_RATIO, jnp.log(high)))
        outside = is_high
    else:
        outside = is_high | is_low
        inside = jnp.where(outside, 0.0, log_weight)
        weights = jnp.where(outside, 0.0, 1.0 if kind == "sequence_geometric_mask" else jnp.exp(inside))
    weights = jax.lax.stop_gradient(jnp.broadcast_to(weights, completion_mask.shape))
    denominators = count_tokens(completion_mask, segment_ids) if denominators is None else denominators
    old = jax.lax.stop_gradient(behavior_logprobs) if kind == "ratio" else None
    return Correction(weights, token_mean(outside, completion_mask, denominators), old)


def ratio_moments(
    old_logprobs: Float[Array, "B T"],
    behavior_logprobs: Float[Array, "B T"],
    completion_mask: Bool[Array, "B T"],
    denominators: Denominators,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the means over trained tokens of the ratio `e^d`, without bounds, and of its square.

    The effective sample size of the ratios is the fraction `mean ** 2 / square_mean` of the tokens (Kong 1992).

    >>> old, drawn = jnp.log(jnp.array([[0.9, 0.1]])), jnp.log(jnp.array([[0.3, 0.1]]))  # ratios 3 and 1
    >>> mask = jnp.array([[True, True]])
    >>> mean, square_mean = ratio_moments(old, drawn, mask, count_tokens(mask))
    >>> print(f"{mean:.1f} {square_mean:.1f}")
    2.0 5.0
    """
    difference = jnp.where(completion_mask, old_logprobs - behavior_logprobs, 0.0)
    ratio = jnp.exp(jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return token_mean(ratio, completion_mask, denominators), token_mean(ratio**2, completion_mask, denominators)


def sampler_agreement(
    old_logprobs: Float[Array, "B T"],
    sampler_logprobs: Float[Array, "B T"],
    completion_mask: Bool[Array, "B T"],
    denominators: Denominators,
    *,
    max_mean_diff: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> dict[str, Float[Array, ""]]:
    """Return metrics, in nats, of the difference between the trainer's log-probabilities and the recorded ones.

    With `d = old - sampler`, `sampler_kl` is the mean of `e^d - 1 - d`, `sampler_kl_reverse` of `d e^d - e^d + 1`.
    With `max_mean_diff`, `sampler_disagreement_fraction` is the fraction of rows whose mean `|d|` is larger or not
    finite: another policy sampled them, or they were recorded wrongly.

    Raises:
        ValueError: shapes differ.

    >>> lp, mask = jnp.log(jnp.array([[0.5, 0.5]])), jnp.array([[True, False]])
    >>> metrics = sampler_agreement(lp, lp - 0.1, mask, Denominators(1.0, 1.0))
    >>> print(f"{metrics['sampler_logprob_diff_max']:.3f}")
    0.100
    """
    check_shapes(
        "B T",
        old_logprobs=old_logprobs,
        sampler_logprobs=sampler_logprobs,
        completion_mask=completion_mask,
        segment_ids=segment_ids,
    )
    difference = jnp.where(completion_mask, old_logprobs - sampler_logprobs, 0.0)
    clamped = jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = jnp.exp(clamped)
    metrics = {}
    if max_mean_diff is not None:
        lengths = jnp.maximum(row_sums(completion_mask.astype(difference.dtype), segment_ids), 1)
        is_near = row_sums(jnp.abs(difference), segment_ids) / lengths <= max_mean_diff
        is_far = (~is_near).astype(difference.dtype)
        of_rows = denominators._replace(trajectories=denominators.rows)  # a sequence disagrees, not its trajectory
        metrics["sampler_disagreement_fraction"] = aggregate(
            is_far, completion_mask, of_rows, "seq_mean_token_mean", segment_ids=segment_ids
        )
    return metrics | {
        "sampler_logprob_diff_mean": token_mean(jnp.abs(difference), completion_mask, denominators),
        "sampler_logprob_diff_max": jnp.max(jnp.abs(difference), initial=0.0),
        "sampler_kl": token_mean(jnp.expm1(clamped) - difference, completion_mask, denominators),
        "sampler_kl_reverse": token_mean(difference * weight - weight + 1.0, completion_mask, denominators),
    }
