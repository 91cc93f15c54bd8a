"""Training rows and rewards of a job, made from its trajectories; everything left out is counted in the metrics.

`gather_rows` serves the policy losses, `gather_pairs` dpo and `gather_examples` sft. Rows that a loss cannot use raise
an error that names the episode.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxft.core import LARGEST_FLOAT32
from jaxft.core.advantages import soft_overlong_punishment, weighted_sum
from jaxft.errors import NothingToTrain, TrajectoryError
from jaxft.harness.curriculum import GroupReward
from jaxft.harness.data_models import DPOItem, EpisodeItem, Trajectory, TrajectoryCollection
from jaxft.rollout.calls import call_of
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.sequences import TokenSequence, token_sequences
from jaxft.training.batch import RECORDED, CollectedRewards, Row
from jaxft.training.config import LossConfig


class Sampled(NamedTuple):
    """Sampling records of the trained tokens of a job, one entry per token.

    Attributes:
        log_kept_mass: log of the probability mass that top-k, top-p and min-p left to sample from.
        versions: policy version that sampled the token.
        trajectories: index of the token's trajectory.
    """

    log_kept_mass: np.ndarray
    versions: np.ndarray
    trajectories: np.ndarray


HOW_TO_REWARD = (
    "give each answer a number by at least one reward (with reward_weights, one that has a weight), or set "
    "finetuning.reward_function.unusable to zero"
)
"""Advice for a job without a usable reward."""

NOTHING_SAMPLED = Sampled(*np.zeros((3, 0)))


class Gathered(NamedTuple):
    """The rows of a job, with their groups and metrics.

    Attributes:
        rows: rows to train; for dpo, chosen and rejected rows alternate.
        groups: trajectories that `Row.trajectory` indexes, in their final order; empty for dpo and sft.
        metrics: counts of what is trained and what was left out.
        sampled: sampling records of the trained tokens; empty for dpo and sft.
    """

    rows: list[Row]
    groups: list[list[Trajectory]]
    metrics: dict[str, float]
    sampled: Sampled

    def staleness(self, policy_version: int, max_staleness: int = 0) -> dict[str, float]:
        """Return metrics of the versions that sampled the trained tokens; empty for dpo and sft.

        With a `max_staleness` above 0 these are also the mean and the largest number of versions behind, the fraction
        of tokens that are so many behind (`staleness/1`), the fraction of trajectories that are further behind than
        `max_staleness` or of no version of this policy, and the number of groups of several versions.

        Args:
            policy_version: version of the policy before the job.
            max_staleness: largest number of versions that tokens may be behind.
        """
        _, versions, owners = self.sampled
        if not versions.size:
            return {}
        age = policy_version - versions

        def owned(chosen: np.ndarray) -> float:
            return np.unique(owners[chosen]).size / np.unique(owners).size

        metrics = {"stale_token_fraction": float((age != 0).mean()), "stale_trajectory_fraction": owned(age != 0)}
        if not max_staleness:
            return metrics
        groups = np.repeat(np.arange(len(self.groups)), [len(group) for group in self.groups])[owners]
        pairs = np.unique(np.stack([groups, versions]), axis=1)
        ages = {f"staleness/{each}": float((age == each).mean()) for each in range(max_staleness + 1)}
        return (
            metrics
            | ages
            | {
                "staleness_mean": float(age.mean()),
                "staleness_max": int(age.max()),
                "too_stale_fraction": owned((age < 0) | (age > max_staleness)),
                "groups_of_several_versions": int((np.unique(pairs[0], return_counts=True)[1] > 1).sum()),
            }
        )


def gather_rows(collection: TrajectoryCollection, *, llm: str, mask_truncated: bool) -> Gathered:
    """Return the rows of the scorable trajectories for a policy loss, by (example, generation).

    Args:
        collection: groups of trajectories.
        llm: the language model whose sequences are trained; those of others are counted.
        mask_truncated: True to leave out sequences that a length limit cut.

    Raises:
        NothingToTrain: no row has a token to train.
        TrajectoryError: a row is greedy or malformed, or a reward does not fit float32.
    """
    groups = [sort_trajectories(map(with_recorded_sequences, group)) for group in collection.trajectories]
    trajectories = [trajectory for group in groups for trajectory in group]
    refuse_pairs(trajectories)
    check_rewards(trajectories)
    rows, foreign = [], 0
    for number, trajectory in enumerate(trajectories):
        for sequence in (trajectory.sequences or ()) if trajectory.scorable else ():
            if sequence.llm not in (None, llm):
                foreign += 1
            elif not (sequence.truncated and mask_truncated):
                check_sampled(trajectory, sequence)
                rows.append(Row(sequence, number))
    unscorable = sum(not trajectory.scorable for trajectory in trajectories)
    sequences = [s for trajectory in trajectories for s in trajectory.sequences or () if s.llm in (None, llm)]
    truncated = sum(sequence.truncated for sequence in sequences)
    trained_tokens = sum(sum(row.sequence.completion_mask) for row in rows)
    if not trained_tokens:
        cause = why_no_calls(collection.metrics)
        if trajectories and all(trajectory.sequences is None for trajectory in trajectories):
            cause = (
                "their `sequences` are None: the trajectory builder has to give what was sampled, as in "
                "Trajectory(..., sequences=jaxft.token_sequences(outcome.episode.calls)), or to pass on the "
                "log-probabilities of the answers, which record their calls"
            )
        elif trajectories and unscorable == len(trajectories) and cause is None:
            cause = HOW_TO_REWARD
        raise NothingToTrain(
            f"job '{collection.run_id}' has no token to train on: {len(trajectories)} trajectories, {unscorable} "
            f"of them without a usable reward; {len(sequences)} sequences, {truncated} of them truncated, "
            f"{foreign} of other language models{'' if cause is None else f'; {cause}'}"
        )
    metrics = {
        "groups": len(groups),
        "unscorable_trajectories": unscorable,
        "sequences_per_trajectory": len(sequences) / len(trajectories),
        "foreign_sequences": foreign,
        "trained_tokens": trained_tokens,
        "truncated_fraction": truncated / len(sequences),
    }
    masks = [np.array(row.sequence.completion_mask) for row in rows]
    kept_mass = [np.array(row.sequence.sampler_logprobs) - row.sequence.behavior_logprobs for row in rows]
    sampled = Sampled(
        np.concatenate([log_mass[mask] for log_mass, mask in zip(kept_mass, masks, strict=True)]),
        np.concatenate([np.array(row.sequence.policy_versions)[mask] for row, mask in zip(rows, masks, strict=True)]),
        np.repeat([row.trajectory for row in rows], [mask.sum() for mask in masks]),
    )
    return Gathered(rows, groups, metrics, sampled)


def with_recorded_sequences(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with the sequences that the log-probabilities of its messages record, if it has none.

    A builder that parses messages, as the toolkit's do, passes on log-probabilities but no token ids.
    """
    if trajectory.sequences is not None:
        return trajectory
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    calls = [call for item in items if (call := call_of(item.logprobs)) is not None]
    return trajectory.model_copy(update={"sequences": token_sequences(calls)}) if calls else trajectory


def sort_trajectories(group: Iterable[Trajectory]) -> list[Trajectory]:
    """Return a group sorted by generation, so that nothing depends on the order in which episodes ended."""
    return sorted(group, key=lambda trajectory: trajectory.generation or 0)


def gather_pairs(collection: TrajectoryCollection, template: ChatTemplate, llm: str | None = None) -> Gathered:
    """Return two rows per pair for dpo, the chosen one first.

    Args:
        collection: trajectories whose episodes are lists of `DPOItem`.
        template: tokenises the texts of trajectories without sequences.
        llm: the language model whose pairs are trained, while those of others are counted; None trains all.

    Raises:
        NothingToTrain: there are no pairs.
        TrajectoryError: a trajectory is no pair, answers different prompts, or has an answer without a trained token.
    """
    trajectories = [trajectory for group in collection.trajectories for trajectory in group]
    rows: list[Row] = []
    foreign = 0
    for trajectory in trajectories:
        items = [item for item in trajectory.episode if isinstance(item, DPOItem)]
        if not items:
            raise TrajectoryError(f"{name_of(trajectory)} is no preference: wanted an episode of DPOItem")
        sequences = trajectory.sequences
        if sequences is None:
            sequences = [row for item in items for row in _tokenise_pair(item, template)]
        if len(sequences) != 2 * len(items):
            raise TrajectoryError(f"{name_of(trajectory)} has {len(sequences)} sequences for {len(items)} pairs")
        for chosen, rejected in zip(sequences[0::2], sequences[1::2], strict=True):
            check_pair(trajectory, chosen, rejected)
            if not (_is_own(chosen, llm) and _is_own(rejected, llm)):
                foreign += 2
                continue
            rows += [Row(chosen, len(rows) // 2), Row(rejected, len(rows) // 2)]
    if not rows:
        raise NothingToTrain(
            f"job '{collection.run_id}' has no pair to train on: {foreign // 2} are of other language models"
        )
    rewards = [trajectory.reward for trajectory in trajectories]
    metrics = {
        "pairs_trained": len(rows) // 2,
        "foreign_sequences": foreign,
        "pair_reward_mean": sum(rewards) / len(rewards),
        "trained_tokens": sum(sum(row.sequence.completion_mask) for row in rows),
    }
    return Gathered(rows, [], metrics, NOTHING_SAMPLED)


def gather_examples(
    collection: TrajectoryCollection, template: ChatTemplate, min_reward: float | None, llm: str | None = None
) -> Gathered:
    """Return the rows of the trajectories that sft imitates.

    Args:
        collection: trajectories.
        template: tokenises the messages of trajectories without sequences.
        min_reward: minimum reward of a trajectory that is imitated; None imitates all.
        llm: the language model whose sequences are trained, while those of others are counted; None trains all.

    Raises:
        NothingToTrain: no row has a token to train.
        TrajectoryError: a trajectory has neither tokens nor messages, or a malformed row.
    """
    trajectories = [with_recorded_sequences(trajectory) for group in collection.trajectories for trajectory in group]
    refuse_pairs(trajectories)
    good = [t for t in trajectories if min_reward is None or (t.scorable and t.reward >= min_reward)]
    rows, foreign = [], 0
    for number, trajectory in enumerate(good):
        sequences = trajectory.sequences
        if sequences is None:
            sequences = [_tokenise_episode(trajectory, template)]
        for sequence in sequences:
            check_lists(trajectory, sequence)
            if _is_own(sequence, llm):
                rows.append(Row(sequence, number))
            else:
                foreign += 1
    trained_tokens = sum(sum(row.sequence.completion_mask) for row in rows)
    if not trained_tokens:
        raise NothingToTrain(
            f"job '{collection.run_id}' has no token to train on: {len(good)} of {len(trajectories)} trajectories are "
            f"good enough, {foreign} sequences are of other language models"
        )
    metrics: dict[str, float] = {
        "imitated_trajectories": len(good),
        "foreign_sequences": foreign,
        "trained_tokens": trained_tokens,
    }
    return Gathered(rows, [], metrics, NOTHING_SAMPLED)


# --- Rewards.


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
        TrajectoryError: no trajectory has some name; or one has no usable reward, and `unusable` is `error`.
    """
    names = list(loss.reward_weights or {})
    known = {name for group in groups for trajectory in group for name in trajectory.named_rewards or {}}
    has_scores = any(t.scorable and t.named_rewards != {} for group in groups for t in group)
    missing = [name for name in names if name not in known]
    if missing and has_scores:
        there = ", ".join(sorted(known)) or "no named rewards"
        raise TrajectoryError(f"reward_weights names {', '.join(missing)}; the evaluator gave {there}")

    def checked(trajectory: Trajectory) -> Trajectory:
        rewards = _named(trajectory, names)
        is_none_given = all(map(math.isnan, rewards))
        lacking = [name for name, reward in zip(names, rewards, strict=True) if is_none_given or math.isinf(reward)]
        if not lacking or not trajectory.scorable or _is_priced(trajectory, loss):
            return trajectory
        if unusable == "error":
            raise TrajectoryError(
                f"{name_of(trajectory)}: reward_weights names {', '.join(lacking)}, for which its evaluator gave no "
                "finite number: mend the evaluator, or set finetuning.reward_function.unusable to unscorable or zero"
            )
        if unusable == "zero":
            zeros = dict.fromkeys(lacking, 0.0)
            return trajectory.model_copy(update={"named_rewards": {**(trajectory.named_rewards or {}), **zeros}})
        return trajectory.model_copy(update={"scorable": False})

    return [[checked(trajectory) for trajectory in group] for group in groups]


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
    if loss.reward_weights is not None:
        table = np.array([_named(trajectory, loss.reward_weights) for trajectory in trajectories])
        weights = list(loss.reward_weights.values())
        if loss.multi_objective_aggregation == "normalize_then_sum":
            named = table
        is_priced = np.array([_is_priced(trajectory, loss) for trajectory in trajectories])
        rewards = np.where(is_priced, rewards, weighted_sum(table, weights))
    steps = _step_table(groups, rewards)
    if loss.overlong_buffer_tokens is not None and loss.max_completion_tokens is not None:
        lengths = [
            sum(sum(row.completion_mask) for row in trajectory.sequences or () if llm is None or row.llm in (None, llm))
            for trajectory in trajectories
        ]
        penalty = soft_overlong_punishment(np.array(lengths), loss.max_completion_tokens, loss.overlong_buffer_tokens)
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
    collected = CollectedRewards(rewards, group_ids, named, steps, metrics)
    if loss.reward_weights is not None or loss.overlong_buffer_tokens is not None or steps is not None:
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
    gamma = 1.0 if loss.estimator in ("gae", "reinforce_pp") else loss.gamma  # they discount by the token
    turns = np.arange(collected.step_rewards.shape[1])
    discounts = np.tril(gamma ** np.maximum(np.subtract.outer(turns, turns), 0))
    has_turn = ~np.isnan(collected.step_rewards)
    to_go = np.where(has_turn, np.nan_to_num(collected.step_rewards) @ discounts, np.nan)
    to_go[:, 0] = np.where(has_turn[:, 0], to_go[:, 0], collected.rewards)
    return to_go


def _is_priced(trajectory: Trajectory, loss: LossConfig) -> bool:
    """True if the builder set the reward of a trajectory, which then stands for the weighted sum of named rewards."""
    return (
        trajectory.scorable
        and trajectory.named_rewards == {}
        and loss.multi_objective_aggregation == "sum_then_normalize"
    )


def _named(trajectory: Trajectory, names: Iterable[str]) -> list[float]:
    """Return the rewards of these names; NaN for those that do not judge the trajectory, or if it is not scorable."""
    given = (trajectory.named_rewards or {}) if trajectory.scorable else {}
    return [math.nan if (reward := given.get(name)) is None else reward for name in names]


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
                    f"{name_of(trajectory)}: with shaped_rewards in a group every sequence has to say which turn each "
                    "token belongs to (turns)"
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


# --- Checks; each raises a `TrajectoryError` that names the episode.


def name_of(trajectory: Trajectory) -> str:
    """Return how messages name a trajectory."""
    return f"example '{trajectory.example_id}', generation {trajectory.generation}"


def check_rewards(trajectories: Iterable[Trajectory]) -> None:
    """Raise if a scorable trajectory has a reward beyond float32, whose squares and sums would overflow.

    Named rewards that are not finite pass: they may make the trajectory unscorable.
    """
    for trajectory in (trajectory for trajectory in trajectories if trajectory.scorable):
        steps = {f"shaped_rewards[{step}]": reward for step, reward in enumerate(trajectory.shaped_rewards or ())}
        given = (trajectory.named_rewards or {}).items()
        named = {f"named_rewards['{name}']": reward or 0.0 for name, reward in given if math.isfinite(reward or 0.0)}
        for which, reward in {"reward": trajectory.reward, **steps, **named}.items():
            if abs(reward) > LARGEST_FLOAT32:
                raise TrajectoryError(f"{name_of(trajectory)} has the {which} {reward:g}; wanted one that fits float32")


def refuse_pairs(trajectories: Sequence[Trajectory]) -> None:
    """Raise if a trajectory is a pair, which only dpo can learn from."""
    if any(isinstance(item, DPOItem) for trajectory in trajectories for item in trajectory.episode):
        raise TrajectoryError("the trajectories are pairs, which only loss 'dpo' can learn from: set loss.name to dpo")


def check_lists(trajectory: Trajectory, sequence: TokenSequence) -> None:
    """Raise if the lists of a row differ in length, or its first token is trained."""
    per_token: dict[str, Any] = {field: values for field, values in sequence if isinstance(values, list)}
    lengths = {field: len(values) for field, values in per_token.items() if values or field != "turns"}
    if len(set(lengths.values())) > 1:
        raise TrajectoryError(f"{name_of(trajectory)}: the lists of a sequence differ in length: {lengths}")
    if sequence.completion_mask[:1] == [True]:
        raise TrajectoryError(
            f"{name_of(trajectory)}: the first token of a sequence has no context and cannot be trained"
        )


def check_sampled(trajectory: Trajectory, sequence: TokenSequence) -> None:
    """Raise if a row is greedy, has non-finite log-probabilities, or has turns without a shaped reward."""
    check_lists(trajectory, sequence)
    trained = [t for chosen, t in zip(sequence.completion_mask, sequence.temperatures, strict=True) if chosen]
    if 0 in trained:
        raise TrajectoryError(
            f"{name_of(trajectory)} was sampled greedily; there is nothing to learn from it: sample at a temperature "
            "above 0"
        )
    logprobs = zip(sequence.completion_mask, sequence.sampler_logprobs, sequence.behavior_logprobs, strict=True)
    if not all(math.isfinite(logprob) for chosen, *pair in logprobs if chosen for logprob in pair):
        raise TrajectoryError(f"{name_of(trajectory)}: a recorded log-probability of a trained token is not finite")
    if trajectory.shaped_rewards is not None:
        steps = len(trajectory.shaped_rewards)
        turns = {t for chosen, t in zip(sequence.completion_mask, sequence.turns or [-1], strict=False) if chosen}
        if not turns <= set(range(steps)):
            raise TrajectoryError(
                f"{name_of(trajectory)} has {steps} shaped_rewards, and tokens of turns {sorted(turns)}; wanted one "
                "for every turn"
            )


def check_pair(trajectory: Trajectory, chosen: TokenSequence, rejected: TokenSequence) -> None:
    """Raise if an answer of a pair has no trained token, or the two answer different prompts."""
    prompts = []
    for sequence in (chosen, rejected):
        check_lists(trajectory, sequence)
        if not any(sequence.completion_mask):
            raise TrajectoryError(f"{name_of(trajectory)}: an answer of the pair has no token to train")
        prompts.append(sequence.tokens[: sequence.completion_mask.index(True)])
    if prompts[0] != prompts[1]:
        raise TrajectoryError(f"{name_of(trajectory)}: the answers of the pair are to different prompts")


def why_no_calls(metrics: Mapping[str, float]) -> str | None:
    """Explain why a collection has no calls of a language model to train on; None if it has some, or has no counts.

    >>> why_no_calls({"calls": 0, "outside_calls": 0})
    'no episode called its language model: the workflow has to ask what builder.get_llm(...) gives it'
    >>> why_no_calls({"episodes": 4, "failed_episodes": 4, "calls": 0})
    'every episode failed or was dropped: 4 failed, 0 were dropped'
    >>> why_no_calls({"calls": 3}), why_no_calls({})
    (None, None)
    """
    episodes, failed, dropped = (metrics.get(name, 0) for name in ("episodes", "failed_episodes", "dropped_episodes"))
    if episodes and dropped == episodes:
        return (
            "every episode was dropped: its prompt was longer than max_context_tokens; raise it, or set long_prompts: "
            "truncate_left"
        )
    if episodes and failed + dropped == episodes:
        return f"every episode failed or was dropped: {failed:.0f} failed, {dropped:.0f} were dropped"
    if metrics.get("calls", 1):
        return None
    outside = metrics.get("outside_calls", 0)
    if outside:
        return (
            f"all {outside:.0f} calls of language models were made outside of any episode, as by threads that the "
            "agent started: hand such a thread jaxft.in_episode(function) in the place of function"
        )
    return "no episode called its language model: the workflow has to ask what builder.get_llm(...) gives it"


# --- Texts.


def _is_own(sequence: TokenSequence, llm: str | None) -> bool:
    return None in (llm, sequence.llm) or sequence.llm == llm


def _tokenise_pair(item: DPOItem, template: ChatTemplate) -> list[TokenSequence]:
    """Return the chosen and the rejected conversation as rows, in which only the answer is trained."""
    asked = [("user", item.prompt)] if isinstance(item.prompt, str) else [(m.role, m.content) for m in item.prompt]
    return [
        _tokenise([*asked, ("assistant", answer)], template, only_last=True)
        for answer in (item.chosen_response, item.rejected_response)
    ]


def _tokenise_episode(trajectory: Trajectory, template: ChatTemplate) -> TokenSequence:
    """Return the messages of an episode as a row, in which all of the assistant's answers are trained."""
    said = [(item.role.value, item.content) for item in trajectory.episode if isinstance(item, EpisodeItem)]
    try:
        return _tokenise(said, template, only_last=False)
    except ValueError as error:
        raise TrajectoryError(f"{name_of(trajectory)} cannot be imitated: {error}") from error


def _tokenise(said: Sequence[tuple[str, str]], template: ChatTemplate, *, only_last: bool) -> TokenSequence:
    ids, mask = template.conversation([{"role": role, "content": content} for role, content in said])
    if only_last:
        start = len(mask) - mask[::-1].index(False)
        mask = [position >= start for position in range(len(mask))]
    zeros = [0.0] * len(ids)
    return TokenSequence(
        tokens=list(ids),
        completion_mask=mask,
        sampler_logprobs=zeros,
        behavior_logprobs=zeros,
        temperatures=[1.0] * len(ids),
        policy_versions=[-1] * len(ids),
    )


def digests_of(data: Gathered, rewards: CollectedRewards | None) -> dict[str, list[str]]:
    """Return a digest of each row of a job and of each trajectory's rewards, to compare them between processes."""
    rows = [
        _digest(
            *(
                np.array(getattr(row.sequence, name), dtype)
                for name, dtype in (*RECORDED.items(), ("policy_versions", np.int64), ("turns", np.int64))
            ),
            np.array([row.trajectory, row.sequence.truncated, row.sequence.episode_truncated]),
        )
        for row in data.rows
    ]
    if rewards is None:
        return {"row": rows}
    tables = (rewards.rewards, rewards.group_ids, rewards.named_rewards, rewards.step_rewards)
    columns = [table for table in tables if table is not None]
    of_rewards = [_digest(*(np.asarray(column[index]) for column in columns)) for index in range(len(rewards.rewards))]
    return {"row": rows, "trajectory's reward": of_rewards}


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]
