"""How much better than its group a trajectory did: rewards in, one advantage per trajectory out.

A group is all trajectories of one prompt; groups may be ragged and in any order (`group_ids`). NumPy input is computed
in float64 on the host, JAX input under `jit` in its own precision. A reward that is NaN or infinite is *unscorable*: it
counts for nobody's baseline and gets advantage 0 (its tokens should be masked by the caller). A lone member, or a group
of equal rewards, has no signal: exactly 0, not rounding noise divided by `eps`. Letter: `B` trajectories.
"""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

EQUAL_REWARDS = 1e-6
"""Rewards of a group whose spread is below this share of the larger of 1 and the largest |reward| count as equal."""

Rewards = Float[jax.Array, "B"] | Float[np.ndarray, "B"] | list[float]
GroupIds = Int[jax.Array, "B"] | Int[np.ndarray, "B"] | list[int]
Advantages = Float[jax.Array, "B"] | Float[np.ndarray, "B"]


class _Groups(NamedTuple):
    xp: ModuleType
    centred: Any  # [B] reward minus the mean of its group; 0 where there is no signal
    count: Any  # [B] scorable members of the group
    has_signal: Any  # [B]
    same: Any  # [B B] scorable members of the same group
    scorable: Any  # [B]


def _groups(rewards: Rewards, group_ids: GroupIds) -> _Groups:
    xp: ModuleType = jnp if isinstance(rewards, jax.Array) else np
    raw: Any = rewards if isinstance(rewards, jax.Array) else np.asarray(rewards, np.float64)
    ids: Any = xp.asarray(group_ids)
    if raw.shape != ids.shape:
        raise ValueError(f"rewards have shape {raw.shape} and group_ids {ids.shape}; wanted one of each per trajectory")
    scorable = xp.isfinite(raw)
    values = xp.where(scorable, raw, 0.0)
    same = (ids[:, None] == ids[None, :]) & scorable[None, :]
    count = xp.maximum(same.sum(1), 1)
    largest = xp.where(same, values[None, :], -xp.inf).max(1, initial=-xp.inf)
    smallest = xp.where(same, values[None, :], xp.inf).min(1, initial=xp.inf)
    scale = xp.where(same, xp.abs(values)[None, :], 0.0).max(1, initial=1.0)
    has_signal = scorable & (count > 1) & (largest - smallest > EQUAL_REWARDS * scale)
    mean = xp.where(same, values[None, :], 0.0).sum(1) / count
    return _Groups(xp, xp.where(has_signal, values - mean, 0.0), count, has_signal, same, scorable)


def group_advantages(rewards: Rewards, group_ids: GroupIds, *, eps: float = 1e-4) -> Advantages:
    """`(R - mean_g) / (std_g + eps)`, std with ddof 1 (GRPO, arXiv 2402.03300, eq. 3 with the usual eps).

    >>> print(group_advantages([1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7]).round(4))  # (1 - 1/4) / (1/2 + 1e-4)
    [ 1.4997 -0.4999 -0.4999 -0.4999]
    >>> print(group_advantages([3.0, 3.0, 5.0], [0, 0, 1]))  # equal rewards, and a lone member
    [0. 0. 0.]
    """
    groups = _groups(rewards, group_ids)
    xp = groups.xp
    squares = xp.where(groups.same, (groups.centred**2)[None, :], 0.0).sum(1)
    std = xp.sqrt(xp.where(groups.has_signal, squares / xp.maximum(groups.count - 1, 1), 1.0))
    return xp.where(groups.has_signal, groups.centred / (std + eps), 0.0)


def group_mean_advantages(rewards: Rewards, group_ids: GroupIds) -> Advantages:
    """`R - mean_g` (Dr. GRPO, arXiv 2503.20783): dividing by the spread would favour too easy and too hard prompts.

    >>> print(group_mean_advantages([1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7]))
    [ 0.75 -0.25 -0.25 -0.25]
    """
    return _groups(rewards, group_ids).centred


def leave_one_out_advantages(rewards: Rewards, group_ids: GroupIds) -> Advantages:
    """`R - mean of the others in the group`, that is `G / (G - 1) (R - mean_g)` (RLOO, arXiv 2402.14740).

    >>> print(leave_one_out_advantages([1.0, 0.0, 0.0], [7, 7, 7]))
    [ 1.  -0.5 -0.5]
    """
    groups = _groups(rewards, group_ids)
    return groups.centred * groups.count / groups.xp.maximum(groups.count - 1, 1)


def batch_advantages(rewards: Rewards, group_ids: GroupIds, *, eps: float = 1e-4) -> Advantages:
    """`(R - mean_g) / (std_batch + eps)`, std (ddof 1) of all scorable rewards of the batch (arXiv 2508.08221).

    >>> print(batch_advantages([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], eps=0.0))  # std of the batch: 1/2
    [ 1. -1.  0.  0.]
    """
    groups = _groups(rewards, group_ids)
    xp = groups.xp
    values = xp.where(groups.scorable, xp.asarray(rewards), 0.0)
    total = xp.maximum(groups.scorable.sum(), 1)
    squares = xp.where(groups.scorable, (values - values.sum() / total) ** 2, 0.0).sum()
    std = xp.sqrt(squares / xp.maximum(total - 1, 1))
    # No group has signal: every numerator is 0, and so is the result, whatever the spread between groups.
    return xp.where(groups.has_signal, groups.centred / xp.where(groups.has_signal, std + eps, 1.0), 0.0)
