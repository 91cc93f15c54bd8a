"""From the rewards of trajectories to advantages per token, by the configured estimator."""

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
from jaxft.errors import TrajectoryError
from jaxft.harness.data_models import Trajectory
from jaxft.training.batch import TrainingBatch
from jaxft.training.config import LossConfig


class CollectedRewards(NamedTuple):
    """Rewards of the trajectories of a job, one row of each array per trajectory; NaN where one is not scorable.

    Attributes:
        rewards: one per trajectory, the penalty for length taken off.
        group_ids: the group of each trajectory.
        named_rewards: a column per entry of `reward_weights`, when those are normalised one by one.
        step_rewards: a column per turn, NaN behind the last one, when there are shaped rewards.
        metrics: the mean penalty for length.
    """

    rewards: np.ndarray
    group_ids: np.ndarray
    named_rewards: np.ndarray | None
    step_rewards: np.ndarray | None
    metrics: dict[str, float]


def with_usable_rewards(
    groups: Sequence[Sequence[Trajectory]], loss: LossConfig, unusable: str = "unscorable"
) -> list[list[Trajectory]]:
    """The groups, in which trajectories that lack a finite weighted reward are not scorable.

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
    """The rewards of these groups as arrays, with weights and penalties of the configuration.

    The penalty for length counts the answers of the language model `llm` alone (None: of any).

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


def compute_advantages(
    job: TrainingBatch, credit: CollectedRewards, loss: LossConfig
) -> tuple[TrainingBatch, dict[str, float]]:
    """The job with the tables `advantages`, for ppo `returns`, and for losses that are averaged over trajectories
    `trajectory_tokens`; and the metrics of the KL in the reward.

    It computes in float64, and sums over tokens in the order of the sequences, so that layouts do not change a bit.

    Args:
        job: with `old_logprobs` and `ref_logprobs` for a KL in the reward; with `old_values` and `bootstrap_values` for
            ppo.
        credit: the rewards of the job's trajectories.
        loss: decides the estimator and what else enters a reward.
    """
    trajectories, metrics = job.trajectories[job.places[0]], {}  # of every token
    mask = np.asarray(job.batch.completion_mask)[job.tokens]
    k1 = np.zeros(len(mask))
    if loss.kl_weight and loss.kl == "k1_in_reward":
        scores = (job.batch.old_logprobs, job.batch.ref_logprobs)
        old, ref = (np.asarray(table, np.float64)[job.tokens] for table in scores)
        k1 = np.where(mask, old - ref, 0.0)
        trained = k1[mask]
        metrics = {"kl": float(np.mean(np.expm1(-trained) + trained)), "kl_k1": float(trained.mean())}
    computed: dict[str, np.ndarray] = {}
    if loss.estimator in ("gae", "reinforce_pp"):
        computed = _advantages_per_token(job, credit, mask, k1, loss)
    elif credit.step_rewards is not None:
        computed["advantages"] = _advantages_per_step(job, credit.step_rewards, credit.group_ids, k1, loss)
    else:
        computed["advantages"] = _advantages_per_trajectory(job, credit, k1, loss)[trajectories]
    if loss.averaged_over == "trajectories":
        computed["trajectory_tokens"] = np.bincount(trajectories[mask], minlength=len(credit.rewards))[trajectories]
    tables: dict[str, Any] = {}
    for name, values in computed.items():
        tables[name] = np.zeros(job.turns.shape, np.float32)
        tables[name][job.tokens] = values
    return job._replace(batch=job.batch._replace(**tables)), metrics


def _advantages_per_step(
    job: TrainingBatch, step_rewards: np.ndarray, group_ids: np.ndarray, k1: np.ndarray, loss: LossConfig
) -> np.ndarray:
    turns, trajectories = job.turns[job.tokens], job.trajectories[job.places[0]]
    has_turn, steps = turns >= 0, step_rewards.copy()
    np.subtract.at(steps, (trajectories[has_turn], turns[has_turn]), loss.kl_weight * k1[has_turn])
    per_step = np.asarray(step_advantages(steps, group_ids, loss.estimator, gamma=loss.gamma))
    return np.where(has_turn, per_step[trajectories, turns], 0.0)


def _advantages_per_trajectory(
    job: TrainingBatch, credit: CollectedRewards, k1: np.ndarray, loss: LossConfig
) -> np.ndarray:
    if credit.named_rewards is not None and loss.reward_weights is not None:
        weights = list(loss.reward_weights.values())
        return np.asarray(normalize_then_sum(credit.named_rewards, credit.group_ids, weights))
    divergence = np.zeros(len(credit.rewards))
    np.add.at(divergence, job.trajectories, [span.sum() for span in _split(job, k1)])
    rewards = credit.rewards - loss.kl_weight * divergence
    return np.asarray(estimate_advantages(rewards, credit.group_ids, loss.estimator))


def _advantages_per_token(
    job: TrainingBatch, credit: CollectedRewards, mask: np.ndarray, k1: np.ndarray, loss: LossConfig
) -> dict[str, np.ndarray]:
    """Whitened advantages, and the returns of GAE, of every token; computed in tables of one sequence a row."""

    def rows(values: np.ndarray) -> np.ndarray:
        table = np.zeros((len(job.trajectories), job.packing.lengths.max()), values.dtype)
        table[job.places] = values
        return table

    trained = rows(mask)
    if credit.step_rewards is None:
        rewards = np.asarray(outcome_rewards(credit.rewards[job.trajectories], trained))
    else:
        turns, steps = _split(job, job.turns[job.tokens]), credit.step_rewards[job.trajectories]
        rewards = rows(np.concatenate([_step_rewards(*each) for each in zip(turns, steps, strict=True)]))
    rewards, found = rewards - loss.kl_weight * rows(k1), {}
    if loss.estimator == "reinforce_pp":
        advantages = reward_to_go(rewards, trained, gamma=loss.gamma)
    else:
        values, behind = rows(np.asarray(job.batch.old_values)[job.tokens]), job.bootstrap_values
        advantages, returns = gae(
            rewards, values, trained, gamma=loss.gamma, lam=loss.gae_lambda, bootstrap_values=behind
        )
        found["returns"] = np.asarray(returns)[job.places]
    return {"advantages": np.asarray(whiten(advantages, trained))[job.places], **found}


def _split(job: TrainingBatch, values: np.ndarray) -> list[np.ndarray]:
    """The values of each sequence."""
    return np.split(values, np.cumsum(job.packing.lengths)[:-1])


def _step_rewards(turns: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The reward of each turn on its last token; that of a turn in another row on the turn before it, which helped."""
    own, rewards = np.unique(turns[turns >= 0]), np.zeros(len(turns))
    for turn in np.flatnonzero(~np.isnan(steps)):
        before = own[own <= turn]
        if before.size:
            rewards[np.flatnonzero(turns == before[-1])[-1]] += steps[turn]
    return rewards


def _is_priced(trajectory: Trajectory, loss: LossConfig) -> bool:
    """True if the reward of a trajectory, set by its builder, stands for the weighted sum of its named rewards."""
    return (
        trajectory.scorable
        and trajectory.named_rewards == {}
        and loss.multi_objective_aggregation == "sum_then_normalize"
    )


def _named(trajectory: Trajectory, weights: dict[str, float]) -> list[float]:
    given = (trajectory.named_rewards or {}) if trajectory.scorable else {}
    return [given.get(name, np.nan) for name in weights]


def _step_table(trajectories: Sequence[Trajectory]) -> Any:
    """Shaped rewards `[trajectory, turn]`, None without any; 0 for the turns of a trajectory that gave none."""
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
