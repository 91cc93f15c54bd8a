"""From trajectories to training rows: what is left out is counted, what makes no sense is refused."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxft.components.batching import Row, sort_trajectories
from jaxft.components.collecting import check_rewards, why_no_calls
from jaxft.core.advantages import EQUAL_REWARDS
from jaxft.harness.data_models import DPOItem, Trajectory, TrajectoryCollection
from jaxft.harness.errors import NothingToTrain, TrajectoryError
from jaxft.policy.sequences import TokenSequence


class Sampled(NamedTuple):
    """What was recorded of the trained tokens of a job, one after the other.

    Attributes:
        log_kept_mass: the log of the mass that top-k, top-p and min-p left to sample from.
        versions: of the policy that sampled.
        trajectories: the number of each token's trajectory.
    """

    log_kept_mass: np.ndarray
    versions: np.ndarray
    trajectories: np.ndarray

    def stale_shares(self, policy_version: int) -> dict[str, float]:
        """Shares of the trained tokens, and of the trajectories, that another version of the policy sampled."""
        is_stale = self.versions != policy_version
        owners, stale_owners = np.unique(self.trajectories), np.unique(self.trajectories[is_stale])
        return {
            "stale_token_share": float(is_stale.mean()),
            "stale_trajectory_share": stale_owners.size / owners.size,
        }


class Gathered(NamedTuple):
    """The rows of a job, the groups they come from in their final order, and what was counted on the way."""

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
    groups = [sort_trajectories([group]) for group in collection.trajectories]
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
        "truncated_share": truncated / len(sequences),
    }
    return Gathered(rows, groups, metrics, sampled)


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
    """Refuses, with a `TrajectoryError` that names the episode, rows that a policy gradient has no meaning for."""
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
    """Refuses, with a `TrajectoryError`, preferences where episodes are wanted."""
    if any(isinstance(item, DPOItem) for trajectory in trajectories for item in trajectory.episode):
        raise TrajectoryError("the trajectories are pairs, which only loss 'dpo' can learn from: set loss.name to dpo")


def check_lists(trajectory: Trajectory, sequence: TokenSequence) -> str:
    """Refuses a row that no loss can use; gives a name of its trajectory for messages."""
    name = f"example '{trajectory.example_id}', generation {trajectory.generation}"
    per_token: dict[str, Any] = {field: values for field, values in sequence if isinstance(values, list)}
    lengths = {field: len(values) for field, values in per_token.items() if values or field != "turns"}
    if len(set(lengths.values())) > 1:
        raise TrajectoryError(f"{name}: the lists of a sequence differ in length: {lengths}")
    if sequence.completion_mask[:1] == [True]:
        raise TrajectoryError(f"{name}: the first token of a sequence has no context and cannot be trained")
    return name


def has_signal(group: list[Trajectory]) -> bool:
    """Whether the scorable rewards of a group differ, by the rule of `jaxft.core.advantages`."""
    rewards = [trajectory.reward for trajectory in group if trajectory.scorable]
    scale = max([1.0, *(abs(reward) for reward in rewards)])
    return len(rewards) > 1 and max(rewards) - min(rewards) > EQUAL_REWARDS * scale
