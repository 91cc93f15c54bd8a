"""From trajectories to training rows: what is left out is counted, what makes no sense is refused."""

from typing import Any, NamedTuple

import numpy as np

from jaxft.components.batching import Row, sort_trajectories
from jaxft.core.advantages import EQUAL_REWARDS
from jaxft.harness.data_models import Trajectory, TrajectoryCollection
from jaxft.harness.errors import NothingToTrain, TrajectoryError
from jaxft.policy.recorder import TokenSequence


class Gathered(NamedTuple):
    """The rows of a job, the groups they come from in their final order, and what was counted on the way.

    `log_kept_mass` holds, per trained token, the log of the mass that top-k, top-p and min-p left to sample from.
    """

    rows: list[Row]
    groups: list[list[Trajectory]]
    metrics: dict[str, float]
    log_kept_mass: np.ndarray


def gather_rows(collection: TrajectoryCollection, *, llm: str, policy_version: int, mask_truncated: bool) -> Gathered:
    """Rows of the scorable trajectories of one language model, by (example, generation).

    Raises:
        NothingToTrain: no row has a token to train.
        TrajectoryError: greedy or malformed rows are among them.
    """
    groups = [sort_trajectories([group]) for group in collection.trajectories]
    trajectories = [trajectory for group in groups for trajectory in group]
    rows, foreign, versions, log_mass = [], 0, [], []
    for index, trajectory in enumerate(trajectories):
        for sequence in trajectory.sequences if trajectory.scorable else ():
            if sequence.llm not in (None, llm):
                foreign += 1
                continue
            if sequence.truncated and mask_truncated:
                continue
            check_sequence(trajectory, sequence)
            rows.append(Row(sequence, index))
            mask = np.array(sequence.completion_mask)
            versions.append(np.array(sequence.policy_versions)[mask])
            log_mass.append((np.array(sequence.sampler_logprobs) - np.array(sequence.behavior_logprobs))[mask])
    unscorable = sum(not trajectory.scorable for trajectory in trajectories)
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    truncated = sum(sequence.truncated for sequence in sequences)
    trained_versions = np.concatenate(versions) if versions else np.zeros(0)
    if trained_versions.size == 0:
        raise NothingToTrain(
            f"job '{collection.run_id}' has no token to train on: {len(trajectories)} trajectories, {unscorable} "
            f"of them without a usable reward; {len(sequences)} sequences, {truncated} of them truncated, "
            f"{foreign} of other language models"
        )
    metrics = {
        "groups": len(groups),
        "no_signal_groups": sum(not has_signal(group) for group in groups),
        "unscorable_trajectories": unscorable,
        "sequences_per_trajectory": len(sequences) / len(trajectories),
        "foreign_sequences": foreign,
        "trained_tokens": trained_versions.size,
        "truncated_share": truncated / len(sequences),
        "stale_token_share": float((trained_versions != policy_version).mean()),
    }
    return Gathered(rows, groups, metrics, np.concatenate(log_mass))


def check_sequence(trajectory: Trajectory, sequence: TokenSequence) -> None:
    """Refuses, with a `TrajectoryError` that names the episode, rows that a policy gradient has no meaning for."""
    name = f"example '{trajectory.example_id}', generation {trajectory.generation}"
    per_token: dict[str, Any] = {field: values for field, values in sequence if isinstance(values, list)}
    lengths = {field: len(values) for field, values in per_token.items() if values or field != "turns"}
    if len(set(lengths.values())) > 1:
        raise TrajectoryError(f"{name}: the lists of a sequence differ in length: {lengths}")
    trained = [t for chosen, t in zip(sequence.completion_mask, sequence.temperatures, strict=True) if chosen]
    if 0 in trained:
        raise TrajectoryError(
            f"{name} was sampled greedily; there is nothing to learn from it: sample at a temperature above 0"
        )
    if sequence.completion_mask[:1] == [True]:
        raise TrajectoryError(f"{name}: the first token of a sequence has no context and cannot be trained")
    steps = None if trajectory.shaped_rewards is None else len(trajectory.shaped_rewards)
    if steps is not None:
        turns = {t for chosen, t in zip(sequence.completion_mask, sequence.turns or [-1], strict=False) if chosen}
        if not turns <= set(range(steps)):
            raise TrajectoryError(
                f"{name} has {steps} shaped_rewards, and tokens of turns {sorted(turns)}; wanted one for every turn"
            )


def has_signal(group: list[Trajectory]) -> bool:
    """Whether the scorable rewards of a group differ, by the rule of `jaxft.core.advantages`."""
    rewards = [trajectory.reward for trajectory in group if trajectory.scorable]
    scale = max([1.0, *(abs(reward) for reward in rewards)])
    return len(rewards) > 1 and max(rewards) - min(rewards) > EQUAL_REWARDS * scale
