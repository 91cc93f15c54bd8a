"""From trajectories to training rows. Rows that are left out are counted, malformed ones are refused."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxft.core import LARGEST_FLOAT32
from jaxft.core.advantages import EQUAL_REWARDS
from jaxft.errors import NothingToTrain, TrajectoryError
from jaxft.harness.data_models import DPOItem, EpisodeItem, Trajectory, TrajectoryCollection
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.sequences import TokenSequence
from jaxft.training.batch import Row


class Sampled(NamedTuple):
    """Numbers recorded with the trained tokens of a job, all in one array each.

    Attributes:
        log_kept_mass: the log of the mass that top-k, top-p and min-p left to sample from.
        versions: of the policy that sampled.
        trajectories: the number of each token's trajectory.
    """

    log_kept_mass: np.ndarray
    versions: np.ndarray
    trajectories: np.ndarray

    def stale_fractions(self, policy_version: int) -> dict[str, float]:
        """Fractions of the trained tokens, and of the trajectories, that another version of the policy sampled."""
        is_stale = self.versions != policy_version
        owners, stale_owners = np.unique(self.trajectories), np.unique(self.trajectories[is_stale])
        return {
            "stale_token_fraction": float(is_stale.mean()),
            "stale_trajectory_fraction": stale_owners.size / owners.size,
        }


class Gathered(NamedTuple):
    """The rows of a job, their groups in the order of the job, and the metrics of gathering them."""

    rows: list[Row]
    groups: list[list[Trajectory]]
    metrics: dict[str, float]
    sampled: Sampled


def gather_rows(collection: TrajectoryCollection, *, llm: str, mask_truncated: bool) -> Gathered:
    """Rows of the scorable trajectories of one language model, by (example, generation).

    Raises:
        NothingToTrain: no row has a token to train.
        TrajectoryError: greedy or malformed rows are among them, or rewards that do not fit float32.
    """
    groups = [sort_trajectories(group) for group in collection.trajectories]
    trajectories = [trajectory for group in groups for trajectory in group]
    refuse_pairs(trajectories)
    check_rewards(trajectories)
    rows, foreign, recorded = [], 0, []
    for index, trajectory in enumerate(trajectories):
        for sequence in (trajectory.sequences or ()) if trajectory.scorable else ():
            if sequence.llm not in (None, llm):
                foreign += 1
                continue
            if sequence.truncated and mask_truncated:
                continue
            check_sequence(trajectory, sequence)
            rows.append(Row(sequence, index))
            recorded.append(_recorded(sequence, index))
    unscorable = sum(not trajectory.scorable for trajectory in trajectories)
    sequences = [s for trajectory in trajectories for s in trajectory.sequences or () if s.llm in (None, llm)]
    truncated = sum(sequence.truncated for sequence in sequences)
    sampled = Sampled(*map(np.concatenate, zip(*recorded, strict=True))) if recorded else Sampled(*np.zeros((3, 0)))
    if sampled.versions.size == 0:
        raise NothingToTrain(
            f"job '{collection.run_id}' has no token to train on: {len(trajectories)} trajectories, {unscorable} "
            f"of them without a usable reward; {len(sequences)} sequences, {truncated} of them truncated, "
            f"{foreign} of other language models{_why_no_sequences(collection)}"
        )
    metrics = {
        "groups": len(groups),
        "no_signal_groups": sum(not has_signal(group) for group in groups),
        "unscorable_trajectories": unscorable,
        "sequences_per_trajectory": len(sequences) / len(trajectories),
        "foreign_sequences": foreign,
        "trained_tokens": sampled.versions.size,
        "truncated_fraction": truncated / len(sequences),
    }
    return Gathered(rows, groups, metrics, sampled)


def sort_trajectories(group: Iterable[Trajectory]) -> list[Trajectory]:
    """A group by generation, so that the order in which episodes happened to end decides nothing."""
    return sorted(group, key=lambda trajectory: trajectory.generation or 0)


def _why_no_sequences(collection: TrajectoryCollection) -> str:
    trajectories = [trajectory for group in collection.trajectories for trajectory in group]
    if trajectories and all(trajectory.sequences is None for trajectory in trajectories):
        return (
            "; their `sequences` are None: the trajectory builder has to give what was sampled, as in "
            "Trajectory(..., sequences=jaxft.token_sequences(outcome.episode.calls))"
        )
    cause = why_no_calls(collection.metrics)
    return "" if cause is None else f"; {cause}"


def _recorded(sequence: TokenSequence, trajectory: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    mask = np.array(sequence.completion_mask)
    log_kept_mass = (np.array(sequence.sampler_logprobs) - np.array(sequence.behavior_logprobs))[mask]
    return log_kept_mass, np.array(sequence.policy_versions)[mask], np.full(log_kept_mass.size, trajectory)


def check_sequence(trajectory: Trajectory, sequence: TokenSequence) -> None:
    """Raise a `TrajectoryError` that names the episode unless a policy gradient can be taken of the sequence."""
    name = check_lists(trajectory, sequence)
    trained = [t for chosen, t in zip(sequence.completion_mask, sequence.temperatures, strict=True) if chosen]
    if 0 in trained:
        raise TrajectoryError(
            f"{name} was sampled greedily; there is nothing to learn from it: sample at a temperature above 0"
        )
    numbers = zip(sequence.completion_mask, sequence.sampler_logprobs, sequence.behavior_logprobs, strict=True)
    if not all(math.isfinite(number) for chosen, *pair in numbers if chosen for number in pair):
        raise TrajectoryError(f"{name}: a recorded log-probability of a trained token is not finite")
    steps = None if trajectory.shaped_rewards is None else len(trajectory.shaped_rewards)
    if steps is not None:
        turns = {t for chosen, t in zip(sequence.completion_mask, sequence.turns or [-1], strict=False) if chosen}
        if not turns <= set(range(steps)):
            raise TrajectoryError(
                f"{name} has {steps} shaped_rewards, and tokens of turns {sorted(turns)}; wanted one for every turn"
            )


def refuse_pairs(trajectories: Sequence[Trajectory]) -> None:
    """Raise a `TrajectoryError` if there are preferences among the episodes."""
    if any(isinstance(item, DPOItem) for trajectory in trajectories for item in trajectory.episode):
        raise TrajectoryError("the trajectories are pairs, which only loss 'dpo' can learn from: set loss.name to dpo")


def check_lists(trajectory: Trajectory, sequence: TokenSequence) -> str:
    """Raise a `TrajectoryError` for a malformed sequence; returns the name of its trajectory for messages."""
    name = f"example '{trajectory.example_id}', generation {trajectory.generation}"
    per_token: dict[str, Any] = {field: values for field, values in sequence if isinstance(values, list)}
    lengths = {field: len(values) for field, values in per_token.items() if values or field != "turns"}
    if len(set(lengths.values())) > 1:
        raise TrajectoryError(f"{name}: the lists of a sequence differ in length: {lengths}")
    if sequence.completion_mask[:1] == [True]:
        raise TrajectoryError(f"{name}: the first token of a sequence has no context and cannot be trained")
    return name


def has_signal(group: list[Trajectory]) -> bool:
    """True if the scorable rewards of a group differ, by the rule of `jaxft.core.advantages`."""
    rewards = [trajectory.reward for trajectory in group if trajectory.scorable]
    scale = max([1.0, *(abs(reward) for reward in rewards)])
    return len(rewards) > 1 and max(rewards) - min(rewards) > EQUAL_REWARDS * scale


NOTHING_SAMPLED = Sampled(*np.zeros((3, 0)))


def gather_pairs(collection: TrajectoryCollection, template: ChatTemplate, llm: str | None = None) -> Gathered:
    """Two rows per pair, the chosen one first; pairs that another language model sampled are left out, and counted.

    Raises:
        NothingToTrain: there are no pairs.
        TrajectoryError: a trajectory that is no pair, answers to different prompts, or one without a trained token.
    """
    rows: list[Row] = []
    foreign = 0
    for trajectory in _trajectories(collection):
        items = [item for item in trajectory.episode if isinstance(item, DPOItem)]
        if not items:
            raise TrajectoryError(f"{_name(trajectory)} is no preference: wanted an episode of DPOItem")
        sequences = trajectory.sequences
        if sequences is None:
            sequences = [row for item in items for row in _tokenised_pair(item, template)]
        if len(sequences) != 2 * len(items):
            raise TrajectoryError(f"{_name(trajectory)} has {len(sequences)} sequences for {len(items)} pairs")
        for chosen, rejected in zip(sequences[0::2], sequences[1::2], strict=True):
            _check_pair(trajectory, chosen, rejected)
            if not (_is_own(chosen, llm) and _is_own(rejected, llm)):
                foreign += 2
                continue
            rows += [Row(chosen, len(rows) // 2), Row(rejected, len(rows) // 2)]
    if not rows:
        raise NothingToTrain(
            f"job '{collection.run_id}' has no pair to train on: {foreign // 2} are of other language models"
        )
    rewards = [trajectory.reward for trajectory in _trajectories(collection)]
    metrics = {
        "pairs_trained": len(rows) // 2,
        "foreign_sequences": foreign,
        "pair_reward_mean": sum(rewards) / len(rewards),
        **_counted(rows),
    }
    return Gathered(rows, [], metrics, NOTHING_SAMPLED)


def gather_examples(
    collection: TrajectoryCollection, template: ChatTemplate, min_reward: float | None, llm: str | None = None
) -> Gathered:
    """The rows of the trajectories that are good enough to be imitated: all of them without `min_reward`.

    Sequences that another language model sampled are left out, and counted.

    Raises:
        NothingToTrain: none is.
        TrajectoryError: a trajectory without tokens and texts, or a malformed row.
    """
    trajectories = _trajectories(collection)
    refuse_pairs(trajectories)
    good = [t for t in trajectories if min_reward is None or (t.scorable and t.reward >= min_reward)]
    rows, foreign = [], 0
    for number, trajectory in enumerate(good):
        sequences = trajectory.sequences
        if sequences is None:
            sequences = [_tokenised_episode(trajectory, template)]
        for sequence in sequences:
            check_lists(trajectory, sequence)
            if _is_own(sequence, llm):
                rows.append(Row(sequence, number))
            else:
                foreign += 1
    counted = _counted(rows)
    if not counted["trained_tokens"]:
        raise NothingToTrain(
            f"job '{collection.run_id}' has no token to train on: {len(good)} of {len(trajectories)} trajectories are "
            f"good enough, {foreign} sequences are of other language models"
        )
    metrics = {"imitated_trajectories": len(good), "foreign_sequences": foreign, **counted}
    return Gathered(rows, [], metrics, NOTHING_SAMPLED)


def _trajectories(collection: TrajectoryCollection) -> list[Trajectory]:
    return [trajectory for group in collection.trajectories for trajectory in group]


def _is_own(sequence: TokenSequence, llm: str | None) -> bool:
    return None in (llm, sequence.llm) or sequence.llm == llm


def _counted(rows: Sequence[Row]) -> dict[str, float]:
    return {"trained_tokens": sum(sum(row.sequence.completion_mask) for row in rows)}


def _check_pair(trajectory: Trajectory, chosen: TokenSequence, rejected: TokenSequence) -> None:
    prompts = []
    for sequence in (chosen, rejected):
        check_lists(trajectory, sequence)
        if not any(sequence.completion_mask):
            raise TrajectoryError(f"{_name(trajectory)}: an answer of the pair has no token to train")
        prompts.append(sequence.tokens[: sequence.completion_mask.index(True)])
    if prompts[0] != prompts[1]:
        raise TrajectoryError(f"{_name(trajectory)}: the answers of the pair are to different prompts")


def _tokenised_pair(item: DPOItem, template: ChatTemplate) -> list[TokenSequence]:
    asked = [("user", item.prompt)] if isinstance(item.prompt, str) else [(m.role, m.content) for m in item.prompt]
    return [
        _tokenised([*asked, ("assistant", answer)], template, only_last=True)
        for answer in (item.chosen_response, item.rejected_response)
    ]


def _tokenised_episode(trajectory: Trajectory, template: ChatTemplate) -> TokenSequence:
    said = [(item.role.value, item.content) for item in trajectory.episode if isinstance(item, EpisodeItem)]
    try:
        return _tokenised(said, template, only_last=False)
    except ValueError as error:
        raise TrajectoryError(f"{_name(trajectory)} cannot be imitated: {error}") from error


def _tokenised(said: Sequence[tuple[str, str]], template: ChatTemplate, *, only_last: bool) -> TokenSequence:
    ids, mask = template.conversation([{"role": role, "content": content} for role, content in said])
    if only_last:
        start = len(mask) - mask[::-1].index(False)
        mask = [place >= start for place in range(len(mask))]
    zeros = [0.0] * len(ids)
    return TokenSequence(
        tokens=list(ids),
        completion_mask=mask,
        sampler_logprobs=zeros,
        behavior_logprobs=zeros,
        temperatures=[1.0] * len(ids),
        policy_versions=[-1] * len(ids),
    )


def _name(trajectory: Trajectory) -> str:
    return f"example '{trajectory.example_id}', generation {trajectory.generation}"


def why_no_calls(metrics: Mapping[str, float]) -> str | None:
    """Why a collection has no calls of a language model to train on; None when it has some, or nobody counted.

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


def dropped_episodes(metrics: Mapping[str, float]) -> str | None:
    """A sentence on the episodes of a collection that were dropped; None when none was.

    >>> dropped_episodes({"dropped_episodes": 2})
    '2 episodes were dropped: a prompt left no room for an answer'
    """
    dropped = metrics.get("dropped_episodes", 0)
    return f"{dropped:.0f} episodes were dropped: a prompt left no room for an answer" if dropped else None


def check_rewards(trajectories: Iterable[Trajectory]) -> None:
    """Raise for rewards whose squares, sums or differences would overflow; named ones that are not finite may pass.

    The trainer calls it before it adds rewards up, and `gather_rows` for the jobs of any trainer.

    Raises:
        TrajectoryError: names the episode and the reward.
    """
    for trajectory in (trajectory for trajectory in trajectories if trajectory.scorable):
        steps = {f"shaped_rewards[{step}]": reward for step, reward in enumerate(trajectory.shaped_rewards or ())}
        given = (trajectory.named_rewards or {}).items()
        named = {f"named_rewards['{name}']": reward for name, reward in given if math.isfinite(reward)}
        for which, reward in {"reward": trajectory.reward, **steps, **named}.items():
            if abs(reward) > LARGEST_FLOAT32:
                name = f"example '{trajectory.example_id}', generation {trajectory.generation}"
                raise TrajectoryError(f"{name} has the {which} {reward:g}; wanted one that fits float32")
