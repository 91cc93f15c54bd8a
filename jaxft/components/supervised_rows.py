"""From trajectories to the rows of dpo and sft, which learn from answers and not from rewards.

A trajectory that was sampled here brings its token ids along. One that holds only texts (of another builder, of a
person) is tokenised with the policy's chat template.
"""

from collections.abc import Sequence

import numpy as np

from jaxft.components.batching import Row
from jaxft.components.rows import Gathered, Sampled, check_lists, refuse_pairs
from jaxft.harness.data_models import DPOItem, EpisodeItem, Trajectory, TrajectoryCollection
from jaxft.harness.errors import NothingToTrain, TrajectoryError
from jaxft.policy.chat import ChatTemplate
from jaxft.policy.sequences import TokenSequence

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
    figures = {
        "pairs_trained": len(rows) // 2,
        "foreign_sequences": foreign,
        "pair_reward_mean": sum(rewards) / len(rewards),
        **_counted(rows),
    }
    return Gathered(rows, [], figures, NOTHING_SAMPLED)


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
    figures = {"imitated_trajectories": len(good), "foreign_sequences": foreign, **counted}
    return Gathered(rows, [], figures, NOTHING_SAMPLED)


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
