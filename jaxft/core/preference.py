"""Losses on pairs of answers to one prompt, one of them preferred (DPO and IPO).

Letters: `P` pairs.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from jaxft.core.arrays import check_shapes


class PreferenceLoss(NamedTuple):
    """Loss of each pair, and by how much the policy prefers the chosen answer more than the reference does."""

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
    """The loss of each pair, from the summed log-probabilities of its answers, in nats.

    With the margin `h = (chosen - ref_chosen) - (rejected - ref_rejected)`:

    * `sigmoid`: `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)` (DPO, arXiv 2305.18290 eq. 7; with
      `e = label_smoothing` the conservative form of labels that are wrong that often).
    * `ipo`: `(h - 1 / (2 beta))^2` (arXiv 2310.12036 eq. 17).

    Raises:
        ValueError: an unknown kind, `beta` not above 0, `label_smoothing` outside [0, 0.5) or given with ipo, or shapes
            that differ.

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
