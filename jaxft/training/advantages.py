"""Rewards of a job's trajectories, and the advantages of its tokens that they become.

`with_usable_rewards` and `collect_rewards` weigh what evaluators gave, `compute_advantages` gives each token of the
tables its advantage. Letters: `N` sequences, `B` rows of a table, `T` tokens of a row.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxft.core.advantages import (
    EQUAL_REWARDS,
    estimate_advantages,
    gae,
    normalize_then_sum,
    optimal_token_advantages,
    outcome_rewards,
    reward_to_go,
    soft_overlong_punishment,
    step_advantages,
    weighted_sum,
    whiten,
)
from jaxft.core.surrogates import select_tokens, token_covariances
from jaxft.errors import TrajectoryError
from jaxft.harness.curriculum import GroupReward
from jaxft.harness.data_models import Trajectory, TrajectoryCollection
from jaxft.harness.functions import Function
from jaxft.rollout.chat import ChatTemplate
from jaxft.training.batch import CollectedRewards, TrainingBatch
from jaxft.training.config import BY_TASK, DistillationConfig, LossConfig, reads
from jaxft.training.rows import (
    JobRows,
    gather_examples,
    gather_pairs,
    gather_rows,
    trajectory_name,
    with_recorded_sequences,
)


def with_usable_rewards(
    groups: Sequence[Sequence[Trajectory]], loss: LossConfig, unusable: str = "unscorable"
) -> list[list[Trajectory]]:
    """Return the groups with `scorable=False` for trajectories without a usable weighted reward.

    A weighted reward that is missing, None or NaN does not judge the trajectory. If none is left, or one is infinite,
    the trajectory has no usable one. If it has a reward but empty `named_rewards`, its builder set that reward in place
    of the evaluator. It then stands for the weighted sum, except with `normalize_then_sum`, which needs named rewards.

    Args:
        unusable: `finetuning.reward_function.unusable`; `zero` replaces rewards that are not usable by 0.

    Raises:
        TrajectoryError: no trajectory has some name or, with several tasks, any name; or one has no usable reward, and
            `unusable` is `error`.
    """
    names = list(loss.reward_weights or {})
    known = {name for group in groups for trajectory in group for name in trajectory.named_rewards or {}}
    scored = [t for group in groups for t in group if t.scorable and t.named_rewards != {}]
    missing = [name for name in names if name not in known]
    has_tasks = any(t.task is not None for t in scored)  # whose evaluators need not give all names
    if missing and scored and (missing == names or not has_tasks):
        there = ", ".join(sorted(known)) or "no named rewards"
        raise TrajectoryError(f"reward_weights names {', '.join(missing)}; the evaluator gave {there}")

    def checked(trajectory: Trajectory) -> Trajectory:
        rewards = _rewards_of_names(trajectory, names)
        is_none_given = all(map(math.isnan, rewards))
        lacking = [name for name, reward in zip(names, rewards, strict=True) if is_none_given or math.isinf(reward)]
        if not lacking or not trajectory.scorable or _has_own_reward(trajectory, loss):
            return trajectory
        if unusable == "error":
            raise TrajectoryError(
                f"{trajectory_name(trajectory)}: reward_weights names {', '.join(lacking)}, for which its evaluator "
                "gave no finite number: mend it, or set finetuning.reward_function.unusable to unscorable or zero"
            )
        if unusable == "zero":
            zeros = dict.fromkeys(lacking, 0.0)
            return trajectory.model_copy(update={"named_rewards": {**(trajectory.named_rewards or {}), **zeros}})
        return trajectory.model_copy(update={"scorable": False})

    return [[checked(trajectory) for trajectory in group] for group in groups]


def gather(
    collection: TrajectoryCollection, loss: LossConfig, llm: str, template: ChatTemplate, unusable: str
) -> tuple[JobRows, CollectedRewards | None]:
    """Return the rows that a loss trains and, for a policy loss, the rewards of their trajectories.

    Args:
        collection: the trajectories of a job.
        loss: settings of the loss.
        llm: the language model whose sequences are trained.
        template: tokenises the texts of trajectories without sequences.
        unusable: `finetuning.reward_function.unusable`.

    Raises:
        NothingToTrain: no row has a token to train.
        TrajectoryError: a row is greedy or malformed.
    """
    if loss.name == "dpo":
        return gather_pairs(collection, template, llm), None
    if loss.name == "sft":
        return gather_examples(collection, template, loss.min_reward, llm), None
    usable = with_usable_rewards(collection.trajectories, loss, unusable)
    collection = collection.model_copy(update={"trajectories": usable})
    masks = {task: loss.of_task(task).mask_truncated for task in loss.per_task or ()}
    data = gather_rows(collection, llm=llm, mask_truncated=loss.mask_truncated, task_masks=masks)
    rewards = collect_rewards(data.groups, loss, llm)
    return data._replace(metrics=data.metrics | rewards.metrics), rewards


def collect_rewards(
    groups: Sequence[Sequence[Trajectory]], loss: LossConfig, llm: str | None = None
) -> CollectedRewards:
    """Return the rewards of these groups as arrays, with the weights and the length penalty of the configuration.

    The length penalty counts answers of the language model `llm` only; None counts those of all.

    Raises:
        TrajectoryError: a group with shaped rewards has sequences without `turns`.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    group_ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    rewards = np.array([t.reward if t.scorable else np.nan for t in trajectories], np.float64)
    named, metrics = None, {}
    names = tuple(loss.reward_weights or sorted({name for t in trajectories for name in t.named_rewards or {}}))
    table = np.array([_rewards_of_names(each, names) for each in trajectories]).reshape(len(trajectories), len(names))
    if loss.multi_objective_aggregation == "normalize_then_sum" or reads(loss.estimator, "named_rewards"):
        named = table
    if loss.reward_weights is not None:
        weights = list(loss.reward_weights.values())
        has_own_reward = np.array([_has_own_reward(trajectory, loss) for trajectory in trajectories])
        rewards = np.where(has_own_reward, rewards, weighted_sum(table, weights))
    steps = _step_table(groups, rewards)
    tasks = tuple(trajectory.task for trajectory in trajectories)
    penalized = {task: own for task in dict.fromkeys(tasks) if (own := loss.of_task(task)).overlong_buffer_tokens}
    if penalized:
        lengths = np.array([_length(trajectory, llm) for trajectory in trajectories])
        penalty = np.zeros(len(lengths))
        for task, own in penalized.items():
            is_own = np.array([each == task for each in tasks])
            limits = own.max_completion_tokens or 0, own.overlong_buffer_tokens or 0
            penalty[is_own] = soft_overlong_punishment(lengths[is_own], *limits)
        rewards = rewards + penalty
        if steps is not None:  # the last step determines the length, so it takes the penalty
            last = np.maximum((~np.isnan(steps)).sum(axis=1) - 1, 0)
            steps[np.arange(len(steps)), last] += penalty
        metrics["overlong_penalty_mean"] = float(penalty.mean()) if len(penalty) else 0.0
    if steps is not None:
        has_steps = ~np.isnan(steps).all(axis=1)
        rewards[has_steps] = np.nan
        if named is not None:
            named[has_steps] = np.nan
    collected = CollectedRewards(rewards, group_ids, named, steps, metrics, names, tasks)
    if loss.reward_weights is not None or penalized or steps is not None:
        trained = _rewards_to_go(collected, loss)[:, 0]
        if (known := trained[~np.isnan(trained)]).size:
            found = {"mean": known.mean(), "min": known.min(), "max": known.max()}
            metrics |= {f"trained_reward_{name}": float(value) for name, value in found.items()}
    return collected


def group_rewards(
    groups: Sequence[Sequence[Trajectory]], loss: LossConfig, llm: str | None = None
) -> list[GroupReward]:
    """Return mean and difference of the rewards that the loss compares in each group; 0 without a usable reward.

    These are weighted sums after the length penalty or, with step rewards, rewards to go. The difference is the largest
    of any turn and, with `normalize_then_sum`, of any weighted reward.
    """
    groups = [[with_recorded_sequences(trajectory) for trajectory in group] for group in groups]
    collected = collect_rewards(groups, loss, llm)
    compared = to_go = _rewards_to_go(collected, loss)
    if collected.named_rewards is not None and loss.reward_weights is not None:
        compared = np.hstack([to_go, collected.named_rewards * list(loss.reward_weights.values())])
    measured = []
    for number in range(len(groups)):
        members = collected.group_ids == number
        columns = [column[~np.isnan(column)] for column in (to_go[members, 0], *compared[members].T)]
        known = columns[0].tolist() or [0.0]
        diff = max(float(np.ptp(column)) if column.size else 0.0 for column in columns)
        measured.append(GroupReward(sum(known) / len(known), diff))
    return measured


def _rewards_to_go(collected: CollectedRewards, loss: LossConfig) -> np.ndarray:
    """Return the rewards `[trajectory, turn]` from each turn on; an outcome stands at the first turn. NaN elsewhere."""
    if collected.step_rewards is None:
        return collected.rewards[:, None]
    gamma = 1.0 if loss.is_per_token else loss.gamma  # which is then a discount by the token
    turns = np.arange(collected.step_rewards.shape[1])
    discounts = np.tril(gamma ** np.maximum(np.subtract.outer(turns, turns), 0))
    has_turn = ~np.isnan(collected.step_rewards)
    to_go = np.where(has_turn, np.nan_to_num(collected.step_rewards) @ discounts, np.nan)
    to_go[:, 0] = np.where(has_turn[:, 0], to_go[:, 0], collected.rewards)
    return to_go


def _has_own_reward(trajectory: Trajectory, loss: LossConfig) -> bool:
    """True if the builder set the reward of a trajectory, which then stands for the weighted sum of named rewards."""
    return (
        trajectory.scorable
        and trajectory.named_rewards == {}
        and loss.multi_objective_aggregation == "sum_then_normalize"
    )


def _rewards_of_names(trajectory: Trajectory, names: Iterable[str]) -> list[float]:
    """Return the rewards of these names; NaN for those that do not judge the trajectory, or if it is not scorable."""
    given = (trajectory.named_rewards or {}) if trajectory.scorable else {}
    return [math.nan if (reward := given.get(name)) is None else reward for name in names]


def _length(trajectory: Trajectory, llm: str | None) -> int:
    """Return the number of tokens that a language model, or any for None, chose in a trajectory."""
    rows = trajectory.sequences or ()
    return sum(sum(row.completion_mask) for row in rows if llm is None or row.llm in (None, llm))


def _step_table(groups: Sequence[Sequence[Trajectory]], outcomes: np.ndarray) -> np.ndarray | None:
    """Return the rewards `[trajectory, turn]` of the groups that have step rewards; None if no group has any.

    A trajectory without any in such a group has its outcome at its last turn. Rows of other groups are NaN.
    """
    steps: list[list[float]] = []
    for group in groups:
        has_steps = any(trajectory.scorable and trajectory.shaped_rewards for trajectory in group)
        for trajectory in group:
            if not (has_steps and trajectory.scorable):
                steps.append([])
                continue
            sequences = trajectory.sequences or ()
            if any(len(sequence.turns) != len(sequence.tokens) for sequence in sequences):
                raise TrajectoryError(
                    f"{trajectory_name(trajectory)}: with shaped_rewards in a group every sequence has to say which "
                    "turn each token belongs to (turns)"
                )
            last = max((max(sequence.turns, default=-1) for sequence in sequences), default=-1)
            outcome = [*[0.0] * last, float(outcomes[len(steps)])] if last >= 0 else []
            steps.append(trajectory.shaped_rewards or outcome)
    if not any(steps):
        return None
    table = np.full((len(steps), max(map(len, steps))), np.nan)
    for row, of_trajectory in zip(table, steps, strict=True):
        row[: len(of_trajectory)] = of_trajectory
    return table


def compute_advantages(
    job: TrainingBatch, credit: CollectedRewards, loss: LossConfig
) -> tuple[TrainingBatch, dict[str, float]]:
    """Add `advantages` to a job's batch; return it with metrics of groups without any, KL in the reward and teacher.

    Ppo also gets `returns`, and losses averaged over trajectories get `trajectory_tokens`. Arithmetic is float64, and
    sums over tokens follow the order of the sequences, so that packed and padded jobs give equal bits.

    Args:
        job: the job, with `old_logprobs` and `ref_logprobs` for a KL in the reward, and with `old_values` and
            `bootstrap_values` for ppo.
        credit: rewards of the job's trajectories.
        loss: sets the estimator, the discounts and the KL in the reward.
    """
    trajectories, metrics = job.trajectories[job.places[0]], {}  # of every token
    mask = job.per_token(job.batch.completion_mask)
    losses = {task: dict(loss.of_task(task)) for task in dict.fromkeys(credit.tasks or (None,))}
    of_trajectory = [losses[task] for task in credit.tasks or (None,) * len(credit.rewards)]
    options = {name: np.array([own[name] for own in of_trajectory], np.float64) for name in ("weight", *BY_TASK[:3])}
    k1 = np.zeros(len(mask))
    if loss.kl_weight and loss.kl == "k1_in_reward":
        scores = (job.batch.old_logprobs, job.batch.ref_logprobs)
        old, ref = (job.per_token(table, dtype=np.float64) for table in scores)
        k1 = np.where(mask, old - ref, 0.0)
        trained = k1[mask]
        metrics = {"kl": float(np.mean(np.expm1(-trained) + trained)), "kl_k1": float(trained.mean())}
        k1 *= options["beta"][trajectories]
    computed: dict[str, np.ndarray] = {}
    if loss.is_per_token:
        computed = _advantages_per_token(job, credit, mask, k1, loss)
    elif credit.step_rewards is not None and reads(loss.estimator, "step_rewards"):
        computed["advantages"] = _own_step_advantages(job, credit, k1, loss)
    else:
        computed["advantages"] = _advantages_per_trajectory(job, credit, k1, loss)[trajectories]
        if credit.step_rewards is not None:  # one of the two is 0, as its rewards are NaN
            computed["advantages"] += _advantages_per_step(job, credit, k1, loss)
    if loss.distillation is not None:
        computed["advantages"], of_teacher = _add_distillation(job, computed["advantages"], mask, loss.distillation)
        metrics |= of_teacher
    computed["advantages"] = computed["advantages"] * options["weight"][trajectories]
    computed |= {name: options[name][trajectories] for name in loss.task_tables}
    if loss.averaged_over == "trajectories":
        computed["trajectory_tokens"] = np.bincount(trajectories[mask], minlength=len(credit.rewards))[trajectories]
    if loss.distillation is None or loss.distillation.is_sampled:  # in the loss, a teacher teaches every group
        telling = credit.group_ids[trajectories[mask & (computed["advantages"] != 0)]]
        metrics["no_signal_groups"] = np.unique(credit.group_ids).size - np.unique(telling).size
    if loss.estimator == "max_rl":
        returns = _rewards_to_go(credit, loss)[:, 0]
        known = ~np.isnan(returns), np.nan_to_num(returns), np.abs(np.nan_to_num(returns))
        counts, sums, sizes = (np.bincount(credit.group_ids, each) for each in known)
        metrics["nonpositive_mean_groups"] = int(np.sum((counts > 1) & (sums <= EQUAL_REWARDS * sizes)))
    with np.errstate(over="ignore"):  # an update with an infinite advantage is not finite, and counted
        tables: dict[str, Any] = {name: job.table(values.astype(np.float32)) for name, values in computed.items()}
    return job._replace(batch=job.batch._replace(**tables)), metrics


def _within_tasks(tasks: Sequence[str | None], estimate: Callable[..., Any], *tables: Any) -> np.ndarray:
    """Return `estimate` of the rows of each task by themselves, so that no spread or mean is of several tasks.

    Args:
        tasks: the task of each row; empty if all are of one.
        estimate: function of the rows of a task.
        tables: its arguments, `[rows ...]`.
    """
    found, of_rows = np.zeros(tables[0].shape), np.array(tasks or [None] * len(tables[0]), object)
    for task in dict.fromkeys(of_rows):
        found[of_rows == task] = estimate(*(table[of_rows == task] for table in tables))
    return found


def with_selected(job: TrainingBatch, loss: LossConfig, seed: str) -> tuple[TrainingBatch, dict[str, float]]:
    """Select the tokens that `clip_cov` and `kl_cov` treat in another way, once for all updates of a job.

    Covariances are those under `old_logprobs`, or under the sampler where the first update is the only one.

    Args:
        job: the job, with advantages.
        loss: sets the kind and the fraction.
        seed: decides what `clip_cov` draws.
    """
    batch, mask = job.batch, job.per_token(job.batch.completion_mask)
    scores = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
    logprobs, advantages = (job.per_token(x, dtype=np.float64)[mask] for x in (scores, batch.advantages))
    covariances = token_covariances(logprobs, advantages)
    chosen = select_tokens(covariances, loss=loss.name, fraction=loss.cov_fraction, draw=random.Random(seed))
    selected: Any = np.zeros(job.turns.shape, bool)
    selected[tuple(index[mask] for index in job.tokens)] = chosen
    metrics = {"selected_tokens": int(chosen.sum()), "covariance_mean": float(covariances.mean())}
    return job._replace(batch=batch._replace(selected=selected)), metrics


def _add_distillation(
    job: TrainingBatch, advantages: np.ndarray, mask: np.ndarray, distillation: DistillationConfig
) -> tuple[np.ndarray, dict[str, float]]:
    """Weigh the advantages of all tokens, and add what the teacher thinks of them; return metrics of that.

    The expectation of `log q - log p` times the gradient of `log p`, over tokens that `p` draws, is the negative
    gradient of `KL(p || q)` of the next token (the single-step part of the gradient in arXiv 2306.08543).
    """
    coef = distillation.reward_coef
    weighed = coef * advantages if coef else np.zeros(len(mask))  # also where an advantage is NaN
    if job.teacher_logprobs is None:
        return weighed, {}
    gap = (job.per_token(table, dtype=np.float64) for table in (job.teacher_logprobs, job.batch.sampler_logprobs))
    gain = np.where(mask, np.subtract(*gap), 0.0)
    return weighed + gain, {"teacher_divergence": float(-gain[mask].mean())}


def _own_advantages(
    job: TrainingBatch, credit: CollectedRewards, loss: LossConfig, shape: tuple[int, ...], **rewards: np.ndarray | None
) -> np.ndarray:
    """Return the advantages of an estimator of one's own.

    Raises:
        ValueError: they have another shape than `shape`.
    """
    assert isinstance(loss.estimator, Function)
    mask = job.per_token(job.batch.completion_mask)
    columns = {} if credit.named_rewards is None else dict(zip(credit.names, credit.named_rewards.T, strict=True))
    lengths = np.bincount(job.trajectories[job.places[0][mask]], minlength=len(credit.rewards))
    given: dict[str, Any] = {"step_rewards": None, **rewards, "group_ids": credit.group_ids, "named_rewards": columns}
    given |= {"lengths": lengths, "trajectories": job.trajectories, "gamma": loss.gamma}
    found = np.asarray(loss.estimator.call(**loss.estimator.select_keywords(given)), np.float64)
    if found.shape != shape:
        raise ValueError(f"{loss.estimator.place} returned advantages of shape {found.shape}; wanted {shape}")
    return found


def _own_step_advantages(job: TrainingBatch, credit: CollectedRewards, k1: np.ndarray, loss: LossConfig) -> np.ndarray:
    """Return the advantages of all tokens by an estimator that reads step rewards; an outcome stands at step 0."""
    assert credit.step_rewards is not None
    trajectories, steps = job.trajectories[job.places[0]], credit.step_rewards.copy()
    has_steps = ~np.isnan(steps).all(axis=1)
    steps[~has_steps, 0] = credit.rewards[~has_steps]
    turns = np.where(has_steps[trajectories], job.per_token(job.turns, shared=-1), 0)
    has_turn = turns >= 0
    np.subtract.at(steps, (trajectories[has_turn], turns[has_turn]), k1[has_turn])
    found = _own_advantages(job, credit, loss, steps.shape, rewards=credit.rewards, step_rewards=steps)
    found = np.where(np.isnan(steps), 0.0, found)
    return np.where(has_turn, found[trajectories, turns], 0.0)


def _advantages_per_step(job: TrainingBatch, credit: CollectedRewards, k1: np.ndarray, loss: LossConfig) -> np.ndarray:
    assert credit.step_rewards is not None
    step_rewards = credit.step_rewards
    turns, trajectories = job.per_token(job.turns, shared=-1), job.trajectories[job.places[0]]
    has_turn, steps = (turns >= 0) & ~np.isnan(step_rewards).all(axis=1)[trajectories], step_rewards.copy()
    np.subtract.at(steps, (trajectories[has_turn], turns[has_turn]), k1[has_turn])
    advantages = np.zeros(len(turns))
    estimator: Any = loss.estimator
    is_own = isinstance(estimator, Function)  # which sees all tasks at once
    if is_own:
        estimator = lambda rewards, _: _own_advantages(job, credit, loss, rewards.shape, rewards=rewards)  # noqa: E731
    estimate = partial(step_advantages, estimator=estimator, gamma=loss.gamma)
    per_step = _within_tasks(() if is_own else credit.tasks, estimate, steps, credit.group_ids)
    advantages[has_turn] = per_step[trajectories[has_turn], turns[has_turn]]
    return advantages


def _advantages_per_trajectory(
    job: TrainingBatch, credit: CollectedRewards, k1: np.ndarray, loss: LossConfig
) -> np.ndarray:
    if loss.multi_objective_aggregation == "normalize_then_sum":
        assert credit.named_rewards is not None and loss.reward_weights is not None
        weights = list(loss.reward_weights.values())
        return np.asarray(normalize_then_sum(credit.named_rewards, credit.group_ids, weights))
    divergence = np.zeros(len(credit.rewards))
    np.add.at(divergence, job.trajectories, [span.sum() for span in _split(job, k1)])
    rewards = credit.rewards - divergence
    if isinstance(loss.estimator, str):
        estimate = partial(estimate_advantages, estimator=loss.estimator)
        return _within_tasks(credit.tasks, estimate, rewards, credit.group_ids)
    found = _own_advantages(job, credit, loss, rewards.shape, rewards=rewards)
    return np.where(np.isnan(rewards), 0.0, found)


def _advantages_per_token(
    job: TrainingBatch, credit: CollectedRewards, mask: np.ndarray, k1: np.ndarray, loss: LossConfig
) -> dict[str, np.ndarray]:
    """Return the advantage of every token, which `reinforce_pp` and `gae` whiten, and for `gae` its return."""

    def rows(values: np.ndarray) -> np.ndarray:
        table = np.zeros((len(job.trajectories), job.packing.lengths.max()), values.dtype)
        table[job.places] = values
        return table

    trained = rows(mask)
    rewards = np.asarray(outcome_rewards(np.nan_to_num(credit.rewards)[job.trajectories], trained))
    if credit.step_rewards is not None:
        turns, steps = _split(job, job.per_token(job.turns, shared=-1)), credit.step_rewards[job.trajectories]
        rewards += rows(np.concatenate([_step_rewards(*each) for each in zip(turns, steps, strict=True)]))
    rewards, found = rewards - rows(k1), {}
    if isinstance(loss.estimator, Function):
        tables = {"token_rewards": rewards, "completion_mask": trained, "rewards": credit.rewards}
        found["advantages"] = _own_advantages(job, credit, loss, trained.shape, **tables)[job.places]
        return found
    if loss.estimator == "optimal_token":
        of_policy = job.batch.old_logprobs, job.sum_pi_squared
        logprobs, squares = (rows(job.per_token(table, dtype=np.float64)) for table in of_policy)
        to_go: Any = reward_to_go(rewards, trained, gamma=loss.gamma)
        # A discount makes returns of equal rewards differ by length, and those of one trajectory by row: no signal.
        owners, size = job.trajectories[job.places[0]][mask], len(credit.rewards)
        penalties = np.where(np.bincount(owners, minlength=size) > 0, np.bincount(owners, k1[mask], size), np.nan)
        compared = (_rewards_to_go(credit, loss) - penalties[:, None]).T
        differs = [estimate_advantages(column, credit.group_ids, "group_mean") != 0 for column in compared]
        has_signal = np.isin(credit.group_ids, credit.group_ids[np.any(differs, axis=0)])[job.trajectories]
        groups, to_go = credit.group_ids[job.trajectories], np.where(has_signal[:, None], to_go, 0.0)
        return {"advantages": optimal_token_advantages(to_go, logprobs, squares, trained, groups)[job.places]}
    if loss.estimator == "reinforce_pp":
        advantages = reward_to_go(rewards, trained, gamma=loss.gamma)
    else:
        values, behind = rows(job.per_token(job.batch.old_values)), job.bootstrap_values
        advantages, returns = gae(
            rewards, values, trained, gamma=loss.gamma, lam=loss.gae_lambda, bootstrap_values=behind
        )
        found["returns"] = np.asarray(returns)[job.places]
    tasks = [credit.tasks[each] for each in job.trajectories] if credit.tasks else ()
    return {"advantages": _within_tasks(tasks, whiten, np.asarray(advantages), trained)[job.places], **found}


def _split(job: TrainingBatch, values: np.ndarray) -> list[np.ndarray]:
    """Split values of all tokens into one array per sequence."""
    return np.split(values, np.cumsum(job.packing.lengths)[:-1])


def _step_rewards(turns: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Put each turn's reward on its last token; a turn of another row rewards the latest earlier turn of this one."""
    own, rewards = np.unique(turns[turns >= 0]), np.zeros(len(turns))
    for turn in np.flatnonzero(~np.isnan(steps)):
        before = own[own <= turn]
        if before.size:
            rewards[np.flatnonzero(turns == before[-1])[-1]] += steps[turn]
    return rewards
