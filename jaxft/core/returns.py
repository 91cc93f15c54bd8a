"""Advantages of single tokens: rewards to go, generalised advantage estimation, whitening.

Time runs over the *trained* tokens of a row only: what stands between two of them (a tool's answer, the next question)
carries nothing, costs no discount and gets 0. NumPy input, integers too, is computed in float64 on the host, JAX input
in float32 or its own wider precision. Letters: `B` rows, `T` tokens.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Num

from jaxft.core.arrays import as_floats, check_shapes, namespace

PerRow = Num[jax.Array, "B"] | Num[np.ndarray, "B"]
GivenPerToken = Num[jax.Array, "B T"] | Num[np.ndarray, "B T"]
PerToken = Float[jax.Array, "B T"] | Float[np.ndarray, "B T"]
Mask = Bool[jax.Array, "B T"] | Bool[np.ndarray, "B T"]

EQUAL_VALUES = 1e-6
"""A spread below this share of the larger of 1 and the largest |value| is rounding: whitened to 0."""


class Estimate(NamedTuple):
    """Advantages before whitening, and the returns that a value function is to learn; 0 on untrained tokens."""

    advantages: PerToken
    returns: PerToken


def outcome_rewards(rewards: PerRow, completion_mask: Mask) -> PerToken:
    """Each row's outcome as the reward of its last trained token.

    Raises:
        ValueError: not one reward per row of the mask.

    >>> print(outcome_rewards(np.array([5.0]), np.array([[False, True, True, False]])))
    [[0. 0. 5. 0.]]
    """
    check_shapes("B T", completion_mask=completion_mask)
    if np.shape(rewards) != np.shape(completion_mask)[:1]:
        raise ValueError(f"rewards have shape {np.shape(rewards)}; wanted {np.shape(completion_mask)[:1]}, one per row")
    xp = namespace(rewards, completion_mask)
    (rewards,) = as_floats(xp, rewards)
    later = xp.flip(xp.cumsum(xp.flip(completion_mask, 1), axis=1), 1)  # trained tokens from here on
    return xp.where(completion_mask & (later == 1), rewards[:, None], 0.0)


def reward_to_go(token_rewards: GivenPerToken, completion_mask: Mask, *, gamma: float = 1.0) -> PerToken:
    """`G_t = r_t + gamma G_{t+1}`: what a token earned from itself on (REINFORCE++, arXiv 2501.03262).

    A reward on an untrained token belongs to the last trained token before it.

    Raises:
        ValueError: shapes that differ.

    >>> print(reward_to_go(np.array([[1.0, 0.0, 4.0]]), np.array([[True, False, True]]), gamma=0.5))
    [[3. 0. 4.]]
    """
    check_shapes("B T", token_rewards=token_rewards, completion_mask=completion_mask)
    xp = namespace(token_rewards, completion_mask)
    (token_rewards,) = as_floats(xp, token_rewards)

    def step(later: Any, now: Any) -> tuple[Any, Any]:
        to_go, pending = later
        reward, mask = now
        pending = pending + reward
        to_go = xp.where(mask, pending + gamma * to_go, to_go)
        return (to_go, xp.where(mask, 0.0, pending)), xp.where(mask, to_go, 0.0)

    zeros = xp.zeros(len(token_rewards), token_rewards.dtype)
    return _backwards(xp, step, (zeros, zeros), (token_rewards, completion_mask))


def gae(
    token_rewards: GivenPerToken,
    values: GivenPerToken,
    completion_mask: Mask,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_values: PerRow | None = None,
) -> Estimate:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) and its returns `A + V`.

    `delta_t = r_t + gamma V_{t+1} - V_t` and `A_t = delta_t + gamma lam A_{t+1}`; both are 0 behind the last trained
    token, save for what `bootstrap_values` says.

    Args:
        values: `values[b, t]` is the value of the context that token t was chosen in, `tokens[b, :t]`.
        bootstrap_values: the value of all tokens of a row, for one that a length limit cut: it stands behind the last
            trained token. 0 for one that ended by itself. None: 0 for all of them.

    Raises:
        ValueError: shapes that differ.

    >>> rewards, values = np.array([[0.0, 1.0]]), np.array([[0.5, 0.25]])
    >>> advantages, returns = gae(rewards, values, np.ones((1, 2), bool), lam=1.0)
    >>> print(advantages, returns)  # deltas -0.25 and 0.75
    [[0.5  0.75]] [[1. 1.]]
    >>> gae(rewards, values, np.ones((1, 2), bool), lam=1.0, bootstrap_values=np.array([2.0])).returns
    array([[3., 3.]])
    """
    check_shapes("B T", token_rewards=token_rewards, values=values, completion_mask=completion_mask)
    xp = namespace(token_rewards, values, completion_mask)
    token_rewards, values = as_floats(xp, token_rewards, values)
    zeros = after = xp.zeros(len(token_rewards), token_rewards.dtype)
    if bootstrap_values is not None:
        if np.shape(bootstrap_values) != after.shape:
            raise ValueError(
                f"bootstrap_values have shape {np.shape(bootstrap_values)}; wanted one per row, {after.shape}"
            )
        after = xp.asarray(bootstrap_values, token_rewards.dtype)

    def step(later: Any, now: Any) -> tuple[Any, Any]:
        value_after, advantage_after, pending = later
        reward, value, mask = now
        pending = pending + reward
        advantage = pending + gamma * value_after - value + gamma * lam * advantage_after
        carried = (
            xp.where(mask, value, value_after),
            xp.where(mask, advantage, advantage_after),
            xp.where(mask, 0.0, pending),
        )
        return carried, xp.where(mask, advantage, 0.0)

    advantages = _backwards(xp, step, (after, zeros, zeros), (token_rewards, values, completion_mask))
    return Estimate(advantages, xp.where(completion_mask, advantages + values, 0.0))


def whiten(x: GivenPerToken, completion_mask: Mask) -> PerToken:
    """`(x - mean) / sqrt(var + 1e-8)` over all trained tokens, ddof 1; 0 where they are all equal, or only one.

    A number on a trained token that is not finite makes all of them NaN: as zeros it would look like nothing to learn.

    Raises:
        ValueError: shapes that differ.

    >>> print(whiten(np.array([[1.0, 3.0, 9.0]]), np.array([[True, True, False]])).round(4))  # mean 2, variance 2
    [[-0.7071  0.7071  0.    ]]
    """
    check_shapes("B T", x=x, completion_mask=completion_mask)
    xp, mask = namespace(x, completion_mask), completion_mask
    (x,) = as_floats(xp, x)
    is_finite = xp.where(mask, xp.isfinite(x), True).all()
    values = xp.where(mask & is_finite, x, 0.0)
    count = mask.sum()
    centred = xp.where(mask, values - values.sum() / xp.maximum(count, 1), 0.0)
    variance = (centred**2).sum() / xp.maximum(count - 1, 1)
    spread = xp.where(mask, values, -xp.inf).max(initial=-xp.inf) - xp.where(mask, values, xp.inf).min(initial=xp.inf)
    has_signal = (count > 1) & (spread > EQUAL_VALUES * xp.maximum(xp.abs(values).max(initial=0.0), 1.0))
    whitened = xp.where(has_signal, centred / xp.sqrt(variance + 1e-8), 0.0)
    return xp.where(mask & ~is_finite, xp.nan, whitened)


def _backwards(xp: ModuleType, step: Callable[[Any, Any], tuple[Any, Any]], start: Any, arrays: tuple[Any, ...]) -> Any:
    """`step(carried, column) -> (carried, result)` from the last column of `[B T]` arrays to the first; `[B T]`."""
    if xp is jnp:
        columns = jax.tree.map(jnp.transpose, arrays)
        return jax.lax.scan(step, start, columns, reverse=True)[1].T
    result = np.zeros(arrays[0].shape, arrays[0].dtype)
    for t in reversed(range(result.shape[1])):
        start, result[:, t] = step(start, tuple(x[:, t] for x in arrays))
    return result
