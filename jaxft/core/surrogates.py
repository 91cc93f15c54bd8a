"""Surrogates: the loss of each token by its ratio and advantage, and the tokens whose gradient their clip takes away.

`select_tokens` chooses the few tokens of a whole batch that `clip_cov` and `kl_cov` treat in another way.

A row of `SURROGATES` is a pair of functions of `SurrogateInputs`; `jaxft.core.losses` composes them with weights, KL
and averages. Letters: `B` rows, `T` tokens.
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: in float32 a log-ratio of 100 is a NaN gradient, even under a clip."""

MAX_WEIGHT = 20.0
"""Largest ratio that weights a token of DPPO: verl's, unless its `clip_ratio_c` is set (arXiv 2602.04879 sec. 5.4)."""

COVARIANCE_BOUNDS = (1.0, 5.0)
"""Covariances, in nats, between which Clip-Cov draws tokens (arXiv 2505.22617; verl's defaults)."""


Bound = float | Float[Array, "B T"]
"""A clip: one for all tokens, or a table with one for each."""


class SurrogateInputs(NamedTuple):
    """Tables and bounds that a surrogate reads; anything may stand where `mask` is False, but in the ratios."""

    ratio: Float[Array, "B #T"]
    log_ratio: Float[Array, "B T"]
    logprobs: Float[Array, "B T"]
    old_logprobs: Float[Array, "B T"]
    advantages: Float[Array, "B #T"]
    mask: Bool[Array, "B T"]
    clip_low: Bound
    clip_high: Bound
    delta: float | None
    selected: Bool[Array, "B T"] | None
    cov_kl_coef: float


def token_covariances(logprobs: Float[np.ndarray, "N"], advantages: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Return `(log pi - mean)(A - mean)` of each trained token of a batch (arXiv 2505.22617).

    Their mean is the covariance by which a step of the policy gradient lowers the entropy.

    >>> token_covariances(np.array([-1.0, -3.0]), np.array([2.0, 0.0])).tolist()
    [1.0, 1.0]
    """
    if not len(logprobs):
        return np.zeros(0)
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def select_tokens(
    covariances: Float[np.ndarray, "N"], *, loss: str, fraction: float, draw: random.Random
) -> Bool[np.ndarray, "N"]:
    """Return True for `fraction` of the tokens, at least one, by their covariance (arXiv 2505.22617).

    `clip_cov` draws among those within `COVARIANCE_BOUNDS`, `kl_cov` takes the largest. None is selected that does not
    qualify: without a spread of advantages all covariances are 0.

    >>> covariances = np.array([0.5, 7.0, 2.0, -1.0])
    >>> options = {"fraction": 0.25, "draw": random.Random(0)}
    >>> [np.flatnonzero(select_tokens(covariances, loss=loss, **options)).tolist() for loss in ("clip_cov", "kl_cov")]
    [[2], [1]]
    """
    count, selected = max(1, int(fraction * len(covariances))), np.zeros(len(covariances), bool)
    if loss == "clip_cov":
        low, high = COVARIANCE_BOUNDS
        candidates = np.flatnonzero((covariances > low) & (covariances < high)).tolist()
        selected[draw.sample(candidates, min(count, len(candidates)))] = True
    else:
        largest = np.argsort(-covariances, kind="stable")[:count]
        selected[largest] = covariances[largest] > 0
    return selected


def clipped_surrogate(
    ratio: Float[Array, "B #T"],
    advantages: Float[Array, "B #T"],
    clip_low: Bound,
    clip_high: Bound,
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


def gated_surrogate(
    ratio: Float[Array, "B #T"],
    advantages: Float[Array, "B #T"],
    temperature_high: float = 1.0,
    temperature_low: float = 1.05,
) -> Float[Array, "B #S"]:
    """`-4 / tau sigmoid(tau (r - 1)) A` per token, a clip without an edge (SAPO, arXiv 2511.20347).

    `tau` is `temperature_high` where `A > 0` and else `temperature_low`, with TRL's and verl's defaults. Tokens that
    should become less likely have the narrower gate.

    >>> print(gated_surrogate(jnp.array([[1.0, 1.0]]), jnp.array([[1.0, -1.05]])))  # 4 / tau / 2
    [[-2.  2.]]
    """
    temperature = jnp.where(advantages > 0, temperature_high, temperature_low)
    return -4.0 / temperature * jax.nn.sigmoid(temperature * (ratio - 1.0)) * advantages


def one_sided_clip(
    log_ratio: Float[Array, "B T"], advantages: Float[Array, "B #T"], clip_low: Bound, clip_high: Bound
) -> Float[Array, "B T"]:
    """Clip log-ratios at `clip_high` where `A > 0` and at `-clip_low` elsewhere (GMPO, arXiv 2507.20673).

    >>> print(one_sided_clip(jnp.array([[0.5, -0.5], [0.5, -0.5]]), jnp.array([[1.0], [-1.0]]), 0.4, 0.4))
    [[ 0.4 -0.5]
     [ 0.5 -0.4]]
    """
    return jnp.where(advantages > 0, jnp.minimum(log_ratio, clip_high), jnp.maximum(log_ratio, -clip_low))


def binary_divergence(
    logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], *, kind: str
) -> Float[Array, "B T"]:
    """Divergence of "this token or another" from before, with the sign of its change (DPPO, arXiv 2602.04879).

    `tv`: `p - q`, the total variation. `kl`: `KL(q || p)` in nats. `p` is the new probability, `q` the old one.

    >>> new, old = jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]]))
    >>> tv, kl = (binary_divergence(new, old, kind=kind)[0, 0] for kind in ("tv", "kl"))
    >>> print(f"{tv:.2f} {kl:.4f}")  # 1/4; 1/4 log 1/2 + 3/4 log 3/2
    0.25 0.1308
    """
    new, old = jnp.exp(logprobs), jnp.exp(old_logprobs)
    if kind == "tv":
        return new - old
    others = jnp.log((1.0 - old + 1e-8) / (1.0 - new + 1e-8))  # verl's epsilon, for tokens that are certain
    return jnp.sign(new - old) * (old * (old_logprobs - logprobs) + (1.0 - old) * others)


def _masked_by_divergence(inputs: SurrogateInputs, kind: str) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Return masks of the tokens that fell, and rose, beyond their bound in the direction of their advantage."""
    new, old = (jax.lax.stop_gradient(jnp.where(inputs.mask, x, 0.0)) for x in (inputs.logprobs, inputs.old_logprobs))
    moved = binary_divergence(new, old, kind=kind)
    return (moved < -inputs.clip_low) & (inputs.advantages < 0), (moved > inputs.clip_high) & (inputs.advantages > 0)


def _weighted_logprobs(inputs: SurrogateInputs, weight: Float[Array, "B #T"]) -> Float[Array, "B T"]:
    weight = jax.lax.stop_gradient(weight)
    return -weight * inputs.advantages * jnp.where(inputs.mask, inputs.logprobs, 0.0)


def _clipped(inputs: SurrogateInputs) -> Float[Array, "B #T"]:
    return clipped_surrogate(inputs.ratio, inputs.advantages, inputs.clip_low, inputs.clip_high, inputs.delta)


def _selected(inputs: SurrogateInputs) -> Bool[Array, "B T"]:
    if inputs.selected is None:
        raise ValueError("selected is None; clip_cov and kl_cov need it: True for the tokens of select_tokens")
    return inputs.selected


def _held_near(inputs: SurrogateInputs) -> Float[Array, "B T"]:
    penalty = inputs.cov_kl_coef * jnp.abs(inputs.log_ratio)
    return -inputs.ratio * inputs.advantages + jnp.where(_selected(inputs), penalty, 0.0)


def _divergence_masked(inputs: SurrogateInputs, kind: str) -> Float[Array, "B T"]:
    low, high = _masked_by_divergence(inputs, kind)
    return _weighted_logprobs(inputs, jnp.where(low | high, 0.0, jnp.minimum(inputs.ratio, MAX_WEIGHT)))


def _outside_clip(inputs: SurrogateInputs) -> tuple[Bool[Array, "B #T"], Bool[Array, "B #T"]]:
    ratio, advantages = inputs.ratio, inputs.advantages
    return (ratio < 1.0 - inputs.clip_low) & (advantages < 0), (ratio > 1.0 + inputs.clip_high) & (advantages > 0)


def _outside_log_clip(inputs: SurrogateInputs) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    log_ratio, advantages = inputs.log_ratio, inputs.advantages
    return (log_ratio < -inputs.clip_low) & (advantages < 0), (log_ratio > inputs.clip_high) & (advantages > 0)


def _outside_nothing(inputs: SurrogateInputs) -> tuple[Bool[Array, "B #T"], Bool[Array, "B #T"]]:
    return jnp.zeros_like(inputs.ratio, bool), jnp.zeros_like(inputs.ratio, bool)


class Surrogate(NamedTuple):
    """The loss of each token, and the masks of tokens that its lower and its upper clip took the gradient from."""

    loss: Callable[[SurrogateInputs], Float[Array, "B #T"]]
    clipped: Callable[[SurrogateInputs], tuple[Bool[Array, "B #T"], Bool[Array, "B #T"]]]


SURROGATES: Mapping[str, Surrogate] = {
    "clip": Surrogate(_clipped, _outside_clip),
    "clip_selected": Surrogate(lambda inputs: jnp.where(_selected(inputs), 0.0, _clipped(inputs)), _outside_clip),
    "hold_selected": Surrogate(_held_near, _outside_nothing),
    "cap": Surrogate(
        lambda inputs: _weighted_logprobs(inputs, jnp.clip(inputs.ratio, inputs.clip_low, inputs.clip_high)),
        lambda inputs: (inputs.ratio < inputs.clip_low, inputs.ratio > inputs.clip_high),
    ),
    "reinforce": Surrogate(
        lambda inputs: -inputs.advantages * jnp.where(inputs.mask, inputs.logprobs, 0.0), _outside_nothing
    ),
    "mask_tv": Surrogate(partial(_divergence_masked, kind="tv"), partial(_masked_by_divergence, kind="tv")),
    "mask_kl": Surrogate(partial(_divergence_masked, kind="kl"), partial(_masked_by_divergence, kind="kl")),
    "gate": Surrogate(lambda inputs: gated_surrogate(inputs.ratio, inputs.advantages), _outside_nothing),
    "geometric": Surrogate(lambda inputs: -inputs.ratio * inputs.advantages, _outside_log_clip),
}
"""The surrogates by name. `geometric` takes the mean of log-ratios that `one_sided_clip` has clipped."""
