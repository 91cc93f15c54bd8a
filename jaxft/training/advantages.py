"""Who gets the credit: from rewards of trajectories to advantages of rows, by the estimator that is configured."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxft.core.advantages import (
    estimate_advantages,
    gae,
    normalize_then_sum,
    outcome_rewards,
    reward_to_go,
    soft_overlong_punishment,
    step_advantages,
    weighted_sum,
    whiten,
)
from jaxft.core.packing import pack, plan_padding, unpack
from jaxft.errors import TrajectoryError
from jaxft.harness.data_models import Trajectory
from jaxft.training.batch import Row
from jaxft.training.config import LossConfig


class CollectedRewards(NamedTuple):
    """What the trajectories of a job earned; rows of arrays are trajectories. NaN marks what is not scorable.

    Attributes:
        rewards: one each, the penalty for length taken off.
        group_ids: which trajectories are compared with each other.
        named_rewards: a column per entry of `reward_weights`, when those are normalised one by one.
        step_rewards: a column per turn, NaN behind the last one, when there are shaped rewards.
        metrics: what was counted on the way.
    """

    rewards: np.ndarray
    group_ids: np.ndarray
    named_rewards: np.ndarray | None
    step_rewards: np.ndarray | None
    metrics: dict[str, float]


def with_usable_rewards(
    groups: Sequence[Sequence[Trajectory]], loss: LossConfig, unusable: str = "unscorable"
) -> list[list[Trajectory]]:
    """The groups, with those trajectories not scorable that lack a named reward that is weighted, or a finite one.

    A trajectory with a reward and an empty `named_rewards` was priced by its builder, as its evaluator gave nothing.
    Its reward is its weighted sum, so that it lacks nothing; only where each reward is normalised by itself
    (`normalize_then_sum`) there is no sum that the price could stand for.

    Args:
        unusable: `finetuning.reward_function.unusable`: `zero` gives them 0 for what they lack.

    Raises:
        TrajectoryError: none of them has the name; or one lacks it, and `unusable` is `error`.
    """
    names = list(loss.reward_weights or {})
    known = {name for group in groups for trajectory in group for name in trajectory.named_rewards or {}}
    has_scores = any(t.scorable and t.named_rewards != {} for group in groups for t in group)
    missing = [name for name in names if name not in known]
    if missing and has_scores:
        there = ", ".join(sorted(known)) or "no named rewards"
        raise TrajectoryError(f"reward_weights names {', '.join(missing)}; the evaluator gave {there}")

    def checked(trajectory: Trajectory) -> Trajectory:
        given = trajectory.named_rewards or {}
        lacking = [name for name in names if not math.isfinite(given.get(name, math.nan))]
        if not lacking or not trajectory.scorable or _is_priced(trajectory, loss):
            return trajectory
        if unusable == "error":
            raise TrajectoryError(
                f"example '{trajectory.example_id}', generation {trajectory.generation}: reward_weights names "
                f"{', '.join(lacking)}, for which its evaluator gave no finite number: mend the evaluator, or set "
                "finetuning.reward_function.unusable to unscorable or zero"
            )
        if unusable == "zero":
            return trajectory.model_copy(update={"named_rewards": given | dict.fromkeys(lacking, 0.0)})
        return trajectory.model_copy(update={"scorable": False})

    return [[checked(trajectory) for trajectory in group] for group in groups]


def collect_rewards(
    groups: Sequence[Sequence[Trajectory]], loss: LossConfig, llm: str | None = None
) -> CollectedRewards:
    """The rewards of these groups as arrays, as the configuration wants them.

    Only the answers of the language model `llm` (None: of any) have a length to be paid for.

    Raises:
        TrajectoryError: shaped rewards have no turns to go to.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    group_ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    rewards = np.array([t.reward if t.scorable else np.nan for t in trajectories], np.float64)
    named, metrics, steps = None, {}, _step_table(trajectories)
    if loss.reward_weights is not None:
        table = np.array([_named(trajectory, loss.reward_weights) for trajectory in trajectories])
        weights = list(loss.reward_weights.values())
        if loss.multi_objective_aggregation == "normalize_then_sum":
            named = table
        is_priced = np.array([_is_priced(trajectory, loss) for trajectory in trajectories])
        rewards = np.where(is_priced, rewards, weighted_sum(table, weights))
    if loss.overlong_buffer_tokens is not None and loss.max_completion_tokens is not None:
        lengths = [
            sum(sum(row.completion_mask) for row in trajectory.sequences or () if llm is None or row.llm in (None, llm))
            for trajectory in trajectories
        ]
        penalty = soft_overlong_punishment(np.array(lengths), loss.max_completion_tokens, loss.overlong_buffer_tokens)
        rewards = rewards + penalty
        if steps is not None:  # the whole answer is too long: that comes with its last step
            last = np.maximum((~np.isnan(steps)).sum(axis=1) - 1, 0)
            steps[np.arange(len(steps)), last] += penalty
        metrics["overlong_penalty_mean"] = float(penalty.mean()) if len(penalty) else 0.0
    return CollectedRewards(rewards, group_ids, named, steps, metrics)


def compute_advantages(rows: list[Row], credit: CollectedRewards, loss: LossConfig) -> dict[str, float]:
    """Puts `advantages`, for ppo `returns`, and for losses that are averaged over trajectories `trajectory_tokens` into
    the signals of the rows; what is to be logged of it comes back.

    The KL in the reward and the value function are read from the signals `old_logprobs`, `ref_logprobs` and
    `old_values`, and from the rows' `bootstrap_value`. Everything is computed in float64; a trajectory's rows share its
    advantage.
    """
    if loss.kl_weight and loss.kl == "k1_in_reward":
        k1 = [_k1(row) for row in rows]
        trained = np.concatenate([numbers[row.sequence.completion_mask] for row, numbers in zip(rows, k1, strict=True)])
        metrics = {"kl": float(np.mean(np.expm1(-trained) + trained)), "kl_k1": float(trained.mean())}
    else:
        k1, metrics = [np.zeros(len(row.sequence.tokens)) for row in rows], {}
    if loss.estimator in ("gae", "reinforce_pp"):
        _assign_per_token(rows, credit, k1, loss)
    elif credit.step_rewards is not None:
        _assign_per_step(rows, credit.step_rewards, credit.group_ids, k1, loss)
    else:
        _assign_per_trajectory(rows, credit, k1, loss)
    if loss.averaged_over == "trajectories":
        tokens = np.bincount([row.trajectory for row in rows], [sum(row.sequence.completion_mask) for row in rows])
        for row in rows:
            row.signals["trajectory_tokens"] = tokens[row.trajectory]
    return metrics


def _assign_per_step(
    rows: list[Row], step_rewards: np.ndarray, group_ids: np.ndarray, k1: list[np.ndarray], loss: LossConfig
) -> None:
    steps = step_rewards.copy()
    for row, penalty in zip(rows, k1, strict=True):
        turns = np.array(row.sequence.turns)
        np.subtract.at(steps[row.trajectory], turns[turns >= 0], loss.kl_weight * penalty[turns >= 0])
    table = np.asarray(step_advantages(steps, group_ids, loss.estimator, gamma=loss.gamma))
    for row in rows:
        turns = np.array(row.sequence.turns)
        row.signals["advantages"] = np.where(turns >= 0, table[row.trajectory, turns], 0.0)


def _assign_per_trajectory(rows: list[Row], credit: CollectedRewards, k1: list[np.ndarray], loss: LossConfig) -> None:
    if credit.named_rewards is not None and loss.reward_weights is not None:
        advantages = normalize_then_sum(credit.named_rewards, credit.group_ids, list(loss.reward_weights.values()))
    else:
        divergence = np.zeros(len(credit.rewards))
        np.add.at(divergence, [row.trajectory for row in rows], [penalty.sum() for penalty in k1])
        rewards = credit.rewards - loss.kl_weight * divergence
        advantages = estimate_advantages(rewards, credit.group_ids, loss.estimator)
    for row in rows:
        row.signals["advantages"] = float(np.asarray(advantages)[row.trajectory])


def _assign_per_token(rows: list[Row], credit: CollectedRewards, k1: list[np.ndarray], loss: LossConfig) -> None:
    lengths = [len(row.sequence.tokens) for row in rows]
    packing = plan_padding(lengths, max(lengths))
    mask = pack(packing, [row.sequence.completion_mask for row in rows], np.bool_)
    if credit.step_rewards is None:
        rewards = np.asarray(outcome_rewards(credit.rewards[[row.trajectory for row in rows]], mask))
    else:
        rewards = pack(packing, [_step_rewards(row, credit.step_rewards) for row in rows], np.float64)
    rewards = rewards - loss.kl_weight * pack(packing, k1, np.float64)
    if loss.estimator == "gae":
        values = pack(packing, [row.signals["old_values"] for row in rows], np.float64)
        after = np.array([row.bootstrap_value for row in rows])
        advantages, returns = gae(rewards, values, mask, gamma=loss.gamma, lam=loss.gae_lambda, bootstrap_values=after)
        for row, numbers in zip(rows, unpack(packing, returns), strict=True):
            row.signals["returns"] = numbers
    else:
        advantages = reward_to_go(rewards, mask, gamma=loss.gamma)
    for row, numbers in zip(rows, unpack(packing, whiten(advantages, mask)), strict=True):
        row.signals["advantages"] = numbers


def _step_rewards(row: Row, table: np.ndarray) -> np.ndarray:
    """The reward of each turn on its last token; that of a turn in another row on the turn before it, which helped."""
    turns = np.array(row.sequence.turns)
    own, steps, rewards = np.unique(turns[turns >= 0]), table[row.trajectory], np.zeros(len(turns))
    for turn in np.flatnonzero(~np.isnan(steps)):
        before = own[own <= turn]
        if before.size:
            rewards[np.flatnonzero(turns == before[-1])[-1]] += steps[turn]
    return rewards


def _k1(row: Row) -> np.ndarray:
    mask = np.array(row.sequence.completion_mask)
    difference = np.asarray(row.signals["old_logprobs"], np.float64) - row.signals["ref_logprobs"]
    return np.where(mask, difference, 0.0)


def _is_priced(trajectory: Trajectory, loss: LossConfig) -> bool:
    """Whether the reward of a trajectory, which its builder set, stands for the sum of its named rewards."""
    return (
        trajectory.scorable
        and trajectory.named_rewards == {}
        and loss.multi_objective_aggregation == "sum_then_normalize"
    )


def _named(trajectory: Trajectory, weights: dict[str, float]) -> list[float]:
    given = (trajectory.named_rewards or {}) if trajectory.scorable else {}
    return [given.get(name, np.nan) for name in weights]


def _step_table(trajectories: Sequence[Trajectory]) -> Any:
    """Shaped rewards, a row per trajectory; one that gave none, where others did, has 0 for each of its turns."""
    if not any(trajectory.shaped_rewards for trajectory in trajectories):
        return None
    for trajectory in trajectories:
        if trajectory.scorable and any(len(s.turns) != len(s.tokens) for s in trajectory.sequences or ()):
            raise TrajectoryError(
                f"example '{trajectory.example_id}', generation {trajectory.generation}: with shaped_rewards in a job "
                "every sequence has to say which turn each token belongs to (turns)"
            )
    rewards = [
        trajectory.shaped_rewards
        or [0.0] * (1 + max((max(s.turns, default=-1) for s in trajectory.sequences or ()), default=-1))
        for trajectory in trajectories
    ]
    table = np.full((len(trajectories), max(map(len, rewards))), np.nan)
    for line, trajectory, steps in zip(table, trajectories, rewards, strict=True):
        if trajectory.scorable:
            line[: len(steps)] = steps
    return table
