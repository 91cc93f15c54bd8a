"""Advantages from rewards: group baselines, discounted returns, GAE, and the penalty on length."""

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from jaxft.core.checks import as_floats, check_shapes, namespace

EQUAL_REWARDS = 1e-6
"""Rewards of a group, or values to whiten, are equal if their range is below this part of `max(1, largest |x|)`."""

Rewards = Num[jax.Array, "B"] | Num[np.ndarray, "B"] | list[float]
NamedRewards = Num[jax.Array, "B R"] | Num[np.ndarray, "B R"] | list[list[float]]
StepRewards = Num[jax.Array, "B S"] | Num[np.ndarray, "B S"] | list[list[float]]
GroupIds = Int[jax.Array, "B"] | Int[np.ndarray, "B"] | list[int]
Advantages = Float[jax.Array, "B"] | Float[np.ndarray, "B"]
StepAdvantages = Float[jax.Array, "B S"] | Float[np.ndarray, "B S"]


class _Groups(NamedTuple):
    xp: ModuleType
    values: Any  # [B] rewards, 0 where unscorable
    centred: Any  # [B] reward minus the mean of its group; 0 where there is no signal
    count: Any  # [B] scorable members of the group
    has_signal: Any  # [B]
    index: Any  # [B] index of the group
    scorable: Any  # [B]


def _groups(rewards: Rewards, group_ids: GroupIds) -> _Groups:
    xp = namespace(rewards)
    (raw,) = as_floats(xp, rewards)
    ids: Any = xp.asarray(group_ids)
    if raw.shape != ids.shape:
        raise ValueError(f"rewards have shape {raw.shape} and group_ids {ids.shape}; wanted one of each per trajectory")
    size = len(raw)
    if xp is np:
        if size and ids.min() < 0:
            raise ValueError(f"group_ids holds {ids.min()}; wanted numbers from 0 upwards, one per group")
        index = np.unique(ids, return_inverse=True)[1]
    else:
        index = jnp.unique(ids, return_inverse=True, size=size)[1] if size else ids
    scorable = xp.isfinite(raw)
    values = xp.where(scorable, raw, 0.0)
    count = xp.maximum(_of_group(xp, scorable.astype(values.dtype), index, "sum"), 1)
    largest = _of_group(xp, xp.where(scorable, raw, -xp.inf), index, "max")
    smallest = -_of_group(xp, xp.where(scorable, -raw, -xp.inf), index, "max")
    scale = xp.maximum(_of_group(xp, xp.abs(values), index, "max"), 1.0)
    has_signal = scorable & (count > 1) & (largest - smallest > EQUAL_REWARDS * scale)
    mean = _of_group(xp, values, index, "sum") / count
    return _Groups(xp, values, xp.where(has_signal, values - mean, 0.0), count, has_signal, index, scorable)


def _of_group(xp: ModuleType, x: Any, index: Any, reduction: Literal["sum", "max"]) -> Any:
    """Reduce `x` over the group of each trajectory, by sum or maximum."""
    size = len(x)
    if xp is jnp:
        reduce = jax.ops.segment_sum if reduction == "sum" else jax.ops.segment_max
        return reduce(x, index, num_segments=size)[index] if size else x
    result = np.full(size, 0.0 if reduction == "sum" else -np.inf)
    (np.add if reduction == "sum" else np.maximum).at(result, index, x)
    return result[index]


def group_advantages(rewards: Rewards, group_ids: GroupIds, *, eps: float = 1e-4) -> Advantages:
    """`(R - mean_g) / (std_g + eps)`, std with ddof 1 (GRPO, arXiv 2402.03300, eq. 3 with the usual eps).

    Raises:
        ValueError: the numbers of rewards and group ids differ, or a group id is negative (checked for NumPy input).

    >>> print(group_advantages([1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7]).round(4))  # (1 - 1/4) / (1/2 + 1e-4)
    [ 1.4997 -0.4999 -0.4999 -0.4999]
    >>> print(group_advantages([3.0, 3.0, 5.0], [0, 0, 1]))  # equal rewards, and a lone member
    [0. 0. 0.]
    """
    groups = _groups(rewards, group_ids)
    return groups.xp.where(groups.has_signal, groups.centred / (_std(groups) + eps), 0.0)


def _std(groups: _Groups) -> Any:
    """Return the standard deviation of each trajectory's group, ddof 1; 1 where there is no signal."""
    squares = _of_group(groups.xp, groups.centred**2, groups.index, "sum")
    return groups.xp.sqrt(groups.xp.where(groups.has_signal, squares / groups.xp.maximum(groups.count - 1, 1), 1.0))


def group_mean_advantages(rewards: Rewards, group_ids: GroupIds) -> Advantages:
    """`R - mean_g` (Dr. GRPO, arXiv 2503.20783): dividing by the std would favour too easy and too hard prompts.

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
    xp, total = groups.xp, groups.xp.maximum(groups.scorable.sum(), 1)
    squares = xp.where(groups.scorable, (groups.values - groups.values.sum() / total) ** 2, 0.0).sum()
    std = xp.sqrt(squares / xp.maximum(total - 1, 1))
    # No group has signal: every numerator is 0, and so is the result, whatever the spread between groups.
    return xp.where(groups.has_signal, groups.centred / xp.where(groups.has_signal, std + eps, 1.0), 0.0)


def max_rl_advantages(rewards: Rewards, group_ids: GroupIds) -> Advantages:
    """`(R - mean_g) / mean_g`; 0 where `mean_g <= 0` (MaxRL, arXiv 2602.02710, algorithm 1).

    With rewards of 0 and 1 its expected gradient is that of the log-likelihood of success, truncated at order `G - 1`
    for groups of `G`: the rarer the successes, the more each weighs.

    >>> print(max_rl_advantages([1.0, 0.0, 0.0, 0.0, 0.0, -1.0], [7, 7, 7, 7, 8, 8]))  # mean 1/4; mean -1/2
    [ 3. -1. -1. -1.  0.  0.]
    """
    groups = _groups(rewards, group_ids)
    xp, mean = groups.xp, groups.values - groups.centred
    size = _of_group(xp, xp.abs(groups.values), groups.index, "sum") / groups.count
    has_signal = groups.has_signal & (mean > EQUAL_REWARDS * size)  # -0.3, 0.1 and 0.2 have a mean of 2e-17
    return xp.where(has_signal, groups.centred / xp.where(has_signal, mean, 1.0), 0.0)


def pass_at_k_advantages(rewards: Rewards, group_ids: GroupIds, *, eps: float = 1e-6) -> Advantages:
    """`(R_max - R_second) / (std_g + eps)` for the best of a group, 0 for others (arXiv 2503.19595, as in verl).

    The numerator is `max R - max of the others' R`, which leaves one out of the best of `k`, the group's size, so that
    only an answer without which the best would be worse is reinforced. Two best ones have 0.

    >>> print(pass_at_k_advantages([4.0, 1.0, 1.0, 1.0, 1.0], [7, 7, 7, 8, 8], eps=0.0).round(4))  # 3 / sqrt(3)
    [1.7321 0.     0.     0.     0.    ]
    """
    groups = _groups(rewards, group_ids)
    xp, values = groups.xp, groups.xp.where(groups.scorable, groups.values, -groups.xp.inf)
    largest = _of_group(xp, values, groups.index, "max")
    is_best = groups.has_signal & (values == largest)
    is_only = is_best & (_of_group(xp, is_best.astype(groups.values.dtype), groups.index, "sum") == 1)
    second = _of_group(xp, xp.where(is_best, -xp.inf, values), groups.index, "max")
    lead = xp.where(is_only, largest, 0.0) - xp.where(is_only, second, 0.0)
    return xp.where(is_only, lead / (_std(groups) + eps), 0.0)


def exponential_advantages(rewards: Rewards, group_ids: GroupIds, *, temperature: float = 1.0) -> Advantages:
    """`e^(R / temperature)`, divided by its mean over the batch: the weights of reward-weighted regression.

    With the loss `reinforce` a job imitates trajectories by these weights, the better ones more (Peters & Schaal 2007;
    arXiv 1910.00177 with the reward in the place of the advantage). Groups do not matter.

    >>> print(exponential_advantages([0.0, 0.6931472, float("nan")], [0, 1, 2]).round(3))  # 1 and 2, mean 3/2
    [0.667 1.333 0.   ]
    """
    groups = _groups(rewards, group_ids)
    xp, scorable = groups.xp, groups.scorable
    highest = xp.where(scorable, groups.values, -xp.inf).max(initial=-xp.inf)
    weights = xp.where(scorable, xp.exp(xp.where(scorable, groups.values - highest, 0.0) / temperature), 0.0)
    return weights * xp.maximum(scorable.sum(), 1) / xp.maximum(weights.sum(), 1e-30)


@runtime_checkable
class Estimator(Protocol):
    """An advantage estimator: one of those above, or a function of your own in their place.

    A function that a configuration names gets those of these keywords that it has parameters for, as NumPy arrays of
    float64. Letters: `B` trajectories of a job, `S` steps (turns), `N` token sequences, `T` tokens.
    """

    def __call__(
        self,
        rewards: Float[np.ndarray, "B"],
        group_ids: Int[np.ndarray, "B"],
        *,
        named_rewards: Mapping[str, Float[np.ndarray, "B"]],
        lengths: Int[np.ndarray, "B"],
        step_rewards: Float[np.ndarray, "B S"] | None,
        token_rewards: Float[np.ndarray, "N T"],
        completion_mask: Bool[np.ndarray, "N T"],
        trajectories: Int[np.ndarray, "N"],
        gamma: float,
    ) -> Float[np.ndarray, "B"] | Float[np.ndarray, "B S"] | Float[np.ndarray, "N T"]:
        """Return an advantage per trajectory, per step, or per token.

        Args:
            rewards: reward of each trajectory, after the penalty on length and a KL in the reward; NaN for one that is
                not scorable or has step rewards.
            group_ids: number of each trajectory's group.
            named_rewards: rewards by the evaluator's names, or those of `reward_weights`.
            lengths: number of trained tokens of each trajectory.
            step_rewards: rewards of the steps, NaN where there is none, an outcome at step 0; None if no trajectory of
                the job has step rewards. A function without this parameter is applied to each step's reward to go.
            token_rewards: rewards of tokens: an outcome is on its last trained token, that of a step likewise.
            completion_mask: True where the policy chose the token.
            trajectories: trajectory of each sequence.
            gamma: discount of `loss.gamma`.

        Returns:
            `[N T]` from a function with the parameter `completion_mask`; else `[B S]` from one with `step_rewards`,
            where there are any; else `[B]`. Trajectories without a reward get 0, whatever it returns for them.
        """
        ...


ESTIMATORS: Mapping[str, Callable[..., Advantages]] = {
    "group": group_advantages,
    "group_mean": group_mean_advantages,
    "leave_one_out": leave_one_out_advantages,
    "batch": batch_advantages,
    "max_rl": max_rl_advantages,
    "pass_at_k": pass_at_k_advantages,
}
"""The estimators of this file that give an advantage per trajectory."""


def estimate_advantages(rewards: Rewards, group_ids: GroupIds, estimator: str = "group") -> Advantages:
    """Apply one of `ESTIMATORS` by its name.

    Raises:
        ValueError: an unknown name.

    >>> print(estimate_advantages([1.0, 0.0], [0, 0], "group_mean"))
    [ 0.5 -0.5]
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator is {estimator!r}; wanted one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[estimator](rewards, group_ids)


def weighted_sum(rewards: NamedRewards, weights: list[float] | tuple[float, ...]) -> Rewards:
    """Return the weighted sum of each trajectory's rewards, without those that are NaN, as in TRL.

    NaN stands for a reward that does not judge the trajectory. The sum is NaN (unscorable) if all are NaN, or one is
    infinite.

    >>> nan = float("nan")
    >>> print(weighted_sum([[1.0, 0.5], [1.0, nan], [nan, nan]], [1.0, 2.0]))
    [ 2.  1. nan]
    """
    xp, table, factors = _reward_table(rewards, weights)
    is_given = ~xp.isnan(table)
    return xp.where(is_given.any(axis=1), (xp.where(is_given, table, 0.0) * factors).sum(axis=1), xp.nan)


def normalize_then_sum(
    rewards: NamedRewards, group_ids: GroupIds, weights: list[float] | tuple[float, ...], *, eps: float = 1e-4
) -> Advantages:
    """`sum_k w_k (R_k - mean_g R_k) / (std_g R_k + eps)`: each reward counts by its weight, whatever its scale.

    A reward that is NaN is in no mean and adds 0, as in TRL; with an infinite one a trajectory is unscorable in all
    columns. This is GDPO (arXiv 2601.05242) without its last step, the whitening of the sum.

    >>> print(normalize_then_sum([[1.0, 0.0], [0.0, 100.0]], [0, 0], [1.0, 1.0], eps=0.0))
    [0. 0.]
    """
    _, table, factors = _reward_table(rewards, weights)
    parts = [group_advantages(table[:, k], group_ids, eps=eps) * factors[k] for k in range(table.shape[1])]
    return sum(parts[1:], start=parts[0])


def _reward_table(rewards: NamedRewards, weights: list[float] | tuple[float, ...]) -> tuple[ModuleType, Any, Any]:
    """Return the module, the table of rewards and the weights as arrays; rows with an infinite reward are NaN."""
    xp = namespace(rewards)
    (table,) = as_floats(xp, rewards)
    if table.ndim != 2 or table.shape[1] != len(weights) or not weights:
        raise ValueError(
            f"rewards have shape {table.shape} and there are {len(weights)} weights; wanted one per column"
        )
    table = xp.where(xp.isinf(table).any(axis=1, keepdims=True), xp.nan, table)
    return xp, table, xp.asarray(weights, table.dtype)


def step_advantages(
    step_rewards: StepRewards,
    group_ids: GroupIds,
    estimator: str | Callable[[Any, GroupIds], Any] = "group",
    *,
    gamma: float = 1.0,
) -> StepAdvantages:
    """Return an advantage per step (an assistant's turn): discounted reward to go, compared within the group.

    `R_k = sum_{j >= k} gamma^(j - k) s_j`; baseline and std of step `k` are taken over the trajectories of the group
    that have a step `k`.

    Args:
        step_rewards: `[B S]`; NaN after a trajectory's last step. A NaN before it makes the trajectory unscorable.
        group_ids: group of each trajectory.
        estimator: name of one of `ESTIMATORS`, or a function of rewards `[B]` and groups.
        gamma: discount per step.

    Returns:
        `[B S]`; 0 where there is no step.

    >>> nan = float("nan")
    >>> print(step_advantages([[1.0, 2.0], [1.0, 0.0], [6.0, nan]], [0, 0, 0], "group_mean", gamma=0.5))
    [[-1.  1.]
     [-2. -1.]
     [ 3.  0.]]
    """
    xp = namespace(step_rewards)
    (rewards,) = as_floats(xp, step_rewards)
    if rewards.ndim != 2:
        raise ValueError(f"step_rewards have shape {rewards.shape}; wanted one row per trajectory, one column per step")
    has_step = xp.flip(xp.cumsum(xp.flip(~xp.isnan(rewards), 1), axis=1), 1) > 0  # a step here or later
    scorable = xp.where(has_step, xp.isfinite(rewards), True).all(axis=1, keepdims=True)
    estimate = partial(estimate_advantages, estimator=estimator) if isinstance(estimator, str) else estimator
    to_go = xp.zeros(len(rewards), rewards.dtype)
    columns = []
    for k in reversed(range(rewards.shape[1])):
        to_go = xp.where(has_step[:, k], rewards[:, k], 0.0) + gamma * to_go
        known = xp.where(has_step[:, k] & scorable[:, 0], to_go, xp.nan)
        columns.append(estimate(known, group_ids))
    return xp.stack(columns[::-1], axis=1) if columns else rewards


PerRow = Num[jax.Array, "B"] | Num[np.ndarray, "B"]
GivenPerToken = Num[jax.Array, "B T"] | Num[np.ndarray, "B T"]
PerToken = Float[jax.Array, "B T"] | Float[np.ndarray, "B T"]
Mask = Bool[jax.Array, "B T"] | Bool[np.ndarray, "B T"]


class Estimate(NamedTuple):
    """Advantages before whitening, and returns, the targets of a value function; 0 on untrained tokens."""

    advantages: PerToken
    returns: PerToken


def outcome_rewards(rewards: PerRow, completion_mask: Mask) -> PerToken:
    """Put each row's reward on its last trained token, `[B T]`; 0 elsewhere.

    Raises:
        ValueError: there is not one reward per row of the mask.

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
    """`G_t = r_t + gamma G_{t+1}`: the discounted sum of rewards from token t on (REINFORCE++, arXiv 2501.03262).

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


def optimal_token_advantages(
    returns: Float[np.ndarray, "B T"],
    logprobs: Float[np.ndarray, "B T"],
    sum_pi_squared: Float[np.ndarray, "B T"],
    completion_mask: Bool[np.ndarray, "B T"],
    group_ids: Int[np.ndarray, "B"],
    *,
    eps: float = 1e-8,
) -> Float[np.ndarray, "B T"]:
    """`G_t - sum_g(G_t W_t) / (sum_g W_t + eps)`: the baseline of each token of least variance (arXiv 2602.07078).

    `W_t` is the sum up to token t of `1 - 2 pi + sum(pi^2)`, the squared gradient of a token's log-probability by its
    logits. The t-th trained tokens of a group's rows are compared. Where a single row is left, its baseline is 0, as in
    verl. A lone row, or a group whose returns are all equal, has advantage exactly 0.

    Args:
        returns: reward from each token on (`reward_to_go`).
        logprobs: log-probability of each token.
        sum_pi_squared: sum of the squared probabilities of all tokens of the vocabulary, in each token's place.
        completion_mask: True on trained tokens.
        group_ids: group of each row.

    Raises:
        ValueError: shapes that differ.

    >>> mask, half = np.array([[True, False], [True, True]]), np.full((2, 2), 0.5)  # of two tokens: W is 0.5, then 1
    >>> returns = np.array([[1.0, 0.0], [3.0, 4.0]])
    >>> optimal_token_advantages(returns, np.log(half), half, mask, np.array([7, 7])).round(4)  # 2; none
    array([[-1.,  0.],
           [ 1.,  4.]])
    """
    scores = {"logprobs": logprobs, "sum_pi_squared": sum_pi_squared}
    check_shapes("B T", returns=returns, completion_mask=completion_mask, **scores)
    rows = np.nonzero(completion_mask)[0]
    nth = rows, (np.cumsum(completion_mask, axis=1) - 1)[completion_mask]  # place among the trained tokens of the row
    to_go, energy, is_there = np.zeros((3, *returns.shape))
    to_go[nth], is_there[nth] = returns[completion_mask], 1.0
    # The energy is at least (1 - pi)^2; rounding may make this difference of numbers near 1 negative.
    energy[nth] = np.maximum(1.0 - 2.0 * np.exp(logprobs) + sum_pi_squared, np.expm1(logprobs) ** 2)[completion_mask]
    weights, found = np.cumsum(energy, axis=1) * is_there, np.zeros(returns.shape)
    for group in np.unique(group_ids[rows]):
        members = np.flatnonzero((group_ids == group) & completion_mask.any(axis=1))
        own = to_go[members][is_there[members] > 0]
        if len(members) == 1 or np.ptp(own) <= EQUAL_REWARDS * max(np.abs(own).max(), 1.0):
            continue
        shared = is_there[members].sum(axis=0) > 1
        baselines = (to_go[members] * weights[members]).sum(axis=0) / (weights[members].sum(axis=0) + eps)
        found[members] = to_go[members] - np.where(shared, baselines, 0.0)
    advantages = np.zeros(returns.shape)
    advantages[completion_mask] = found[nth]
    return advantages


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

    `delta_t = r_t + gamma V_{t+1} - V_t` and `A_t = delta_t + gamma lam A_{t+1}`; after the last trained token `A` is
    0 and `V` is `bootstrap_values`.

    Args:
        values: `values[b, t]` is the value of `tokens[b, :t]`, the context in which token t was chosen.
        bootstrap_values: value after the last trained token of each row: the value of the whole row if a length limit
            cut it, 0 if it ended by itself. None stands for 0 in all rows.

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
    """`(x - mean) / sqrt(var + 1e-8)` over all trained tokens, ddof 1; 0 if they are all equal, or there is only one.

    One non-finite value on a trained token makes every result NaN: zeros would look like nothing to learn.

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
    has_signal = (count > 1) & (spread > EQUAL_REWARDS * xp.maximum(xp.abs(values).max(initial=0.0), 1.0))
    whitened = xp.where(has_signal, centred / xp.sqrt(variance + 1e-8), 0.0)
    return xp.where(mask & ~is_finite, xp.nan, whitened)


def _backwards(xp: ModuleType, step: Callable[[Any, Any], tuple[Any, Any]], start: Any, arrays: tuple[Any, ...]) -> Any:
    """Scan `step(carried, column) -> (carried, result)` from the last column of `[B T]` arrays to the first."""
    if xp is jnp:
        columns = jax.tree.map(jnp.transpose, arrays)
        return jax.lax.scan(step, start, columns, reverse=True)[1].T
    result = np.zeros(arrays[0].shape, arrays[0].dtype)
    for t in reversed(range(result.shape[1])):
        start, result[:, t] = step(start, tuple(x[:, t] for x in arrays))
    return result


Lengths = Num[jax.Array, "B"] | Num[np.ndarray, "B"]


def soft_overlong_punishment(
    completion_tokens: Lengths, max_completion_tokens: int, penalty_tokens: int
) -> Float[jax.Array, "B"] | Float[np.ndarray, "B"]:
    """DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13): 0, then falling to -1 over the overlong buffer.

    Args:
        completion_tokens: number of trained tokens of each trajectory.
        max_completion_tokens: number of tokens at which the penalty reaches -1.
        penalty_tokens: length of the overlong buffer: the tokens before that over which the penalty falls.

    Raises:
        ValueError: `penalty_tokens` is not between 1 and `max_completion_tokens`.

    >>> print(soft_overlong_punishment(np.array([60, 80, 90, 100, 120]), 100, 20))
    [ 0.   0.  -0.5 -1.  -1. ]
    """
    if not 1 <= penalty_tokens <= max_completion_tokens:
        raise ValueError(
            f"penalty_tokens is {penalty_tokens}; wanted 1 to max_completion_tokens, {max_completion_tokens}"
        )
    xp = namespace(completion_tokens)
    (lengths,) = as_floats(xp, completion_tokens)  # differences of unsigned integers wrap around
    over = lengths - (max_completion_tokens - penalty_tokens)
    return 0.0 - xp.clip(over / penalty_tokens, 0.0, 1.0)
