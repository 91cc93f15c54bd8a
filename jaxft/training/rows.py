"""Training rows of a job, made from its trajectories; everything left out is counted in the metrics.

`gather_rows` serves the policy losses, `gather_pairs` dpo and `gather_examples` sft. Rows that a loss cannot use raise
an error that names the episode.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxft.core import LARGEST_FLOAT32
from jaxft.errors import NothingToTrain, TrajectoryError
from jaxft.harness.data_models import DPOItem, EpisodeItem, Trajectory, TrajectoryCollection
from jaxft.rollout.calls import PENALIZED, recorded_call
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.sequences import TokenSequence, token_sequences
from jaxft.training.batch import RECORDED, CollectedRewards, Row
from jaxft.training.logged import Conversation, Logged, logged_sequences


class TokenRecords(NamedTuple):
    """Sampling records of the trained tokens of a job, one entry per token.

    Attributes:
        is_biased: True where a logit bias changed the distribution that the token was drawn from.
        versions: policy version that sampled the token.
        trajectories: index of the token's trajectory.
        is_penalized: True where penalties changed the probabilities that the token was drawn with.
    """

    is_biased: np.ndarray
    versions: np.ndarray
    trajectories: np.ndarray
    is_penalized: np.ndarray


HOW_TO_REWARD = (
    "give each answer a number by at least one reward (with reward_weights, one that has a weight), or set "
    "finetuning.reward_function.unusable to zero"
)
"""Advice for a job without a usable reward."""

OPTIONAL = ("turns", "supports", "experts", "observations")
"""Lists of a sequence that may be empty."""

NOTHING_SAMPLED = TokenRecords(*np.zeros((4, 0)))


class JobRows(NamedTuple):
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
    sampled: TokenRecords

    def staleness(self, policy_version: int, max_staleness: int = 0) -> dict[str, float]:
        """Return metrics of the versions that sampled the trained tokens; empty for dpo and sft.

        With a `max_staleness` above 0 these are also the mean and the largest number of versions behind, the fraction
        of tokens that are so many behind (`staleness/1`), the fraction of trajectories that are further behind than
        `max_staleness` or of no version of this policy, and the number of groups of several versions.

        Args:
            policy_version: version of the policy before the job.
            max_staleness: largest number of versions that tokens may be behind.
        """
        _, versions, owners, _ = self.sampled
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
        metrics |= {f"staleness/{each}": float((age == each).mean()) for each in range(max_staleness + 1)}
        return metrics | {
            "staleness_mean": float(age.mean()),
            "staleness_max": int(age.max()),
            "too_stale_fraction": owned((age < 0) | (age > max_staleness)),
            "groups_of_several_versions": int((np.unique(pairs[0], return_counts=True)[1] > 1).sum()),
        }


def gather_rows(
    collection: TrajectoryCollection, *, llm: str, mask_truncated: bool, task_masks: Mapping[str, bool] = {}
) -> JobRows:
    """Return the rows of the scorable trajectories for a policy loss, by (example, generation).

    Args:
        collection: groups of trajectories.
        llm: the language model whose sequences are trained; those of others are counted.
        mask_truncated: True to leave out sequences that a length limit cut.
        task_masks: the same for tasks that have it otherwise.

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
            elif not (sequence.truncated and task_masks.get(trajectory.task or "", mask_truncated)):
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
    sampled, allowed_mass = (NOTHING_SAMPLED, {}) if rows[0].sequence.is_logged else _token_records(rows)
    return JobRows(rows, groups, metrics | allowed_mass, sampled)


def _token_records(rows: Sequence[Row]) -> tuple[TokenRecords, dict[str, float]]:
    """Return what was recorded of the trained tokens, and the mean mass that their supports had, if there are any."""
    masks = [np.array(row.sequence.completion_mask) for row in rows]

    def joined(values: Callable[[Row], Any]) -> np.ndarray:
        return np.concatenate([np.array(values(row))[mask] for row, mask in zip(rows, masks, strict=True)])

    log_mass = joined(lambda row: np.subtract(row.sequence.sampler_logprobs, row.sequence.behavior_logprobs))
    supports = [row.sequence.supports or [""] * len(row.sequence.tokens) for row in rows]
    has_support, is_penalized = (
        np.concatenate([np.array([*map(holds, of_row)])[mask] for of_row, mask in zip(supports, masks, strict=True)])
        for holds in (bool, lambda text: text.startswith(PENALIZED))
    )
    versions, owners = joined(lambda row: row.sequence.policy_versions), [row.trajectory for row in rows]
    of_tokens = np.repeat(owners, [mask.sum() for mask in masks])
    records = TokenRecords((log_mass != 0) & ~has_support, versions, of_tokens, is_penalized)
    is_known = has_support & ~is_penalized
    return records, {"allowed_mass_mean": float(np.exp(log_mass[is_known]).mean())} if is_known.any() else {}


def with_recorded_sequences(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with the sequences that the log-probabilities of its messages record, if it has none.

    A builder that parses messages, as the toolkit's do, passes on log-probabilities but no token ids.
    """
    if trajectory.sequences is not None:
        return trajectory
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    calls = [call for item in items if (call := recorded_call(item.logprobs)) is not None]
    return trajectory.model_copy(update={"sequences": token_sequences(calls)}) if calls else trajectory


def sort_trajectories(group: Iterable[Trajectory]) -> list[Trajectory]:
    """Return a group sorted by generation, so that nothing depends on the order in which episodes ended."""
    return sorted(group, key=lambda trajectory: trajectory.generation or 0)


def gather_pairs(collection: TrajectoryCollection, template: ChatTemplate, llm: str | None = None) -> JobRows:
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
            raise fault(trajectory, " is no preference (DPOItem), which 'dpo' learns from: set loss.name to sft")
        sequences = trajectory.sequences
        if sequences is None:
            sequences = [row for item in items for row in _tokenise_pair(item, template)]
        if len(sequences) != 2 * len(items):
            raise fault(trajectory, f" has {len(sequences)} sequences for {len(items)} pairs")
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
    metrics: dict[str, float] = {
        "pairs_trained": len(rows) // 2,
        "foreign_sequences": foreign,
        "trained_tokens": sum(sum(row.sequence.completion_mask) for row in rows),
    }
    if any(trajectory.scorable for trajectory in trajectories):
        metrics["pair_reward_mean"] = sum(rewards) / len(rewards)
    return JobRows(rows, [], metrics, NOTHING_SAMPLED)


def gather_examples(
    collection: TrajectoryCollection, template: ChatTemplate, min_reward: float | None, llm: str | None = None
) -> JobRows:
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
    return JobRows(rows, [], metrics, NOTHING_SAMPLED)


# --- Checks; each raises a `TrajectoryError` that names the episode.


def trajectory_name(trajectory: Trajectory) -> str:
    """Return how messages name a trajectory."""
    of = "" if trajectory.rollout_index is None else f" of collection {trajectory.rollout_index}"
    return f"example '{trajectory.example_id}', generation {trajectory.generation}{of}"


def fault(trajectory: Trajectory, text: str) -> TrajectoryError:
    """Return the error of a trajectory; the text follows its name."""
    return TrajectoryError(trajectory_name(trajectory) + text)


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
                raise fault(trajectory, f" has the {which} {reward:g}; wanted one that fits float32")


def refuse_pairs(trajectories: Sequence[Trajectory]) -> None:
    """Raise if a trajectory is a pair, which only dpo can learn from."""
    if any(isinstance(item, DPOItem) for trajectory in trajectories for item in trajectory.episode):
        raise TrajectoryError("the trajectories are pairs, which only loss 'dpo' can learn from: set loss.name to dpo")


def check_lists(trajectory: Trajectory, sequence: TokenSequence) -> None:
    """Raise if the lists of a row differ in length, or its first token is trained."""
    per_token: dict[str, Any] = {field: values for field, values in sequence if isinstance(values, list)}
    lengths = {field: len(values) for field, values in per_token.items() if values or field not in OPTIONAL}
    if len(set(lengths.values())) > 1:
        raise fault(trajectory, f": the lists of a sequence differ in length: {lengths}")
    if True in (*sequence.completion_mask[:1], *sequence.observations[:1]):
        raise fault(trajectory, ": the first token of a sequence has no context and cannot be trained")
    both = (place for place, seen in enumerate(sequence.observations) if seen and sequence.completion_mask[place])
    if (place := next(both, None)) is not None:
        raise fault(trajectory, f": token {place} of a sequence is trained as sampled, and an observation, too")


def check_sampled(trajectory: Trajectory, sequence: TokenSequence) -> None:
    """Raise if a row is greedy, has non-finite log-probabilities, or has turns without a shaped reward."""
    check_lists(trajectory, sequence)
    trained = [t for chosen, t in zip(sequence.completion_mask, sequence.temperatures, strict=True) if chosen]
    if 0 in trained:
        what = " was sampled greedily; there is nothing to learn from it: sample at a temperature above 0"
        raise fault(trajectory, what)
    logprobs = zip(sequence.completion_mask, sequence.sampler_logprobs, sequence.behavior_logprobs, strict=True)
    if not all(math.isfinite(logprob) for chosen, *pair in logprobs if chosen for logprob in pair):
        raise fault(trajectory, ": a recorded log-probability of a trained token is not finite")
    if trajectory.shaped_rewards is not None:
        steps = len(trajectory.shaped_rewards)
        turns = {t for chosen, t in zip(sequence.completion_mask, sequence.turns or [-1], strict=False) if chosen}
        if not turns <= set(range(steps)):
            what = f" has {steps} shaped_rewards, and tokens of turns {sorted(turns)}; wanted one for every turn"
            raise fault(trajectory, what)


def check_pair(trajectory: Trajectory, chosen: TokenSequence, rejected: TokenSequence) -> None:
    """Raise if an answer of a pair has no trained token, or the two answer different prompts."""
    prompts = []
    for sequence in (chosen, rejected):
        check_lists(trajectory, sequence)
        if not any(sequence.completion_mask):
            raise fault(trajectory, ": an answer of the pair has no token to train")
        prompts.append(sequence.tokens[: sequence.completion_mask.index(True)])
    if prompts[0] != prompts[1]:
        raise fault(trajectory, ": the answers of the pair are to different prompts")


def why_no_calls(metrics: Mapping[str, float]) -> str | None:
    """Explain why a collection has no calls of a language model to train on; None if it has some, or has no counts.

    >>> why_no_calls({"calls": 0, "outside_calls": 0})
    'no episode called its language model: the workflow has to ask what builder.get_llm(...) gives it'
    >>> why_no_calls({"episodes": 4, "failed_episodes": 4, "calls": 0})
    'every episode failed or was dropped: 4 failed, 0 were dropped'
    >>> why_no_calls({"calls": 3}), why_no_calls({})
    (None, None)
    """
    if metrics.get("carried_groups") and not metrics.get("episodes"):
        return "all groups go on in the next collection, as an answer of each had its partial_rollout_tokens"
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
        raise fault(trajectory, f" cannot be imitated: {error}") from error


def _tokenise(said: Sequence[tuple[str, str]], template: ChatTemplate, *, only_last: bool) -> TokenSequence:
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in said]
    (row,) = logged_sequences(Logged((Conversation([], messages),), [], None), template, only_last=only_last)
    return row


def job_digests(data: JobRows, rewards: CollectedRewards | None) -> dict[str, list[str]]:
    """Return a digest of each row of a job and of each trajectory's rewards, to compare them between processes."""
    lists = RECORDED | {"policy_versions": np.int64, "turns": np.int64, "observations": np.bool_}
    rows = [
        _digest(
            *(np.array(getattr(row.sequence, name), dtype) for name, dtype in lists.items()),
            np.array([row.trajectory, row.sequence.truncated, row.sequence.episode_truncated]),
            np.array(row.teacher.tokens if row.teacher is not None else (), np.int32),
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
