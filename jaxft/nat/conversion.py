"""Trajectories, references and statuses of jobs in the toolkit's classes and in jaxft's."""

from typing import Any

from nat.data_models import finetuning as toolkit

from jaxft.harness import data_models as own
from jaxft.training.rows import with_recorded_sequences

OWN = "jaxft"
"""Key, in the metadata of a trajectory of the toolkit, of the fields that only jaxft's have."""

OWN_FIELDS = ("scorable", "named_rewards", "example_id", "generation", "sequences")


def to_toolkit_collection(collection: own.TrajectoryCollection) -> toolkit.TrajectoryCollection:
    """Return a collection in the toolkit's classes; nothing is lost on the way back."""
    return toolkit.TrajectoryCollection(
        trajectories=[[_to_toolkit(trajectory) for trajectory in group] for group in collection.trajectories],
        run_id=collection.run_id,
    )


def from_toolkit_collection(collection: toolkit.TrajectoryCollection) -> own.TrajectoryCollection:
    """Return a collection in jaxft's classes.

    Trajectories of a foreign builder get the token ids that the log-probabilities of their messages record.
    """
    return own.TrajectoryCollection(
        trajectories=[[_from_toolkit(trajectory) for trajectory in group] for group in collection.trajectories],
        run_id=collection.run_id,
    )


def _to_toolkit(trajectory: own.Trajectory) -> toolkit.Trajectory:
    own_fields = trajectory.model_dump(mode="json", include=set(OWN_FIELDS))
    answers = _answers(trajectory)
    episode: list[Any] = []
    for item in trajectory.episode:
        if isinstance(item, own.DPOItem):
            episode.append(toolkit.DPOItem.model_validate(item.model_dump()))
            continue
        logprobs = item.logprobs
        if isinstance(logprobs, list):
            found = answers.get(tuple(logprobs))
            token_ids = found.pop(0) if found else [None] * len(logprobs)
            logprobs = {
                "content": [
                    {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                    for token_id, logprob in zip(token_ids, logprobs, strict=True)
                ],
                "refusal": None,
            }
        episode.append(
            toolkit.EpisodeItem(
                role=toolkit.EpisodeItemRole(item.role.value),
                content=item.content,
                logprobs=logprobs,
                metadata=item.metadata,
            )
        )
    return toolkit.Trajectory(
        episode=episode,
        reward=trajectory.reward,
        shaped_rewards=trajectory.shaped_rewards,
        metadata={
            **(trajectory.metadata or {}),
            "id": trajectory.example_id,
            "generation": trajectory.generation,
            OWN: own_fields,
        },
    )


def _answers(trajectory: own.Trajectory) -> dict[tuple[float, ...], list[list[int]]]:
    """Return the token ids of the trained answers by their log-probabilities, equal ones in the order of the turns."""
    answers: dict[tuple[float, ...], list[list[int]]] = {}
    for sequence in trajectory.sequences or ():
        for turn in sorted(set(sequence.turns) - {-1}):
            places = [place for place, each in enumerate(sequence.turns) if each == turn]
            logprobs = tuple(sequence.sampler_logprobs[place] for place in places)
            answers.setdefault(logprobs, []).append([sequence.tokens[place] for place in places])
    return answers


def _from_toolkit(trajectory: toolkit.Trajectory) -> own.Trajectory:
    metadata = dict(trajectory.metadata or {})
    own_fields = metadata.pop(OWN, None)
    given = trajectory.model_dump(mode="json", include={"episode", "reward", "shaped_rewards"})
    if own_fields is not None:
        return _with_plain_logprobs(own.Trajectory.model_validate({**given, "metadata": metadata, **own_fields}))
    example_id, generation = metadata.get("id"), metadata.get("generation")
    made = own.Trajectory(
        **given,
        metadata=metadata or None,
        example_id=None if example_id is None else str(example_id),
        generation=generation if isinstance(generation, int) else None,
    )
    return _with_plain_logprobs(with_recorded_sequences(made))


def _with_plain_logprobs(trajectory: own.Trajectory) -> own.Trajectory:
    """Return the trajectory with the numbers only of its log-probabilities; the rest is in its sequences."""
    for item in trajectory.episode:
        if isinstance(item, own.EpisodeItem) and isinstance(item.logprobs, dict):
            item.logprobs = [entry["logprob"] for entry in item.logprobs.get("content") or ()]
    return trajectory


def to_toolkit_status(status: own.TrainingJobStatus) -> toolkit.TrainingJobStatus:
    """Return the status of a job in the toolkit's class."""
    return toolkit.TrainingJobStatus.model_validate(status.model_dump(mode="json"))


def from_toolkit_status(status: toolkit.TrainingJobStatus) -> own.TrainingJobStatus:
    """Return the status of a job in jaxft's class."""
    return own.TrainingJobStatus.model_validate(status.model_dump(mode="json"))
