"""The toolkit's data and parts in jaxft's classes, and back.

Trajectories and statuses of jobs are converted. A builder or an adapter of the toolkit's kind becomes one of jaxft's:
jaxft's trainer runs with it.
"""

from collections.abc import AsyncIterator
from typing import Any, TypeVar

from nat.data_models import finetuning as toolkit
from pydantic import BaseModel, Field

import jaxft
from jaxft.harness import REGISTRY
from jaxft.nat.live import toolkit_episodes
from jaxft.training import with_recorded_sequences

M = TypeVar("M", bound=BaseModel)

OWN = "jaxft"
"""Key, in the metadata of a trajectory of the toolkit, of the fields that only jaxft's have."""

OWN_FIELDS = ("scorable", "named_rewards", "example_id", "generation", "rollout_index", "task", "sequences")


def to_toolkit_collection(collection: jaxft.TrajectoryCollection) -> toolkit.TrajectoryCollection:
    """Return a collection in the toolkit's classes; nothing is lost on the way back."""
    return toolkit.TrajectoryCollection(
        trajectories=[[_to_toolkit(trajectory) for trajectory in group] for group in collection.trajectories],
        run_id=collection.run_id,
    )


def from_toolkit_collection(collection: toolkit.TrajectoryCollection) -> jaxft.TrajectoryCollection:
    """Return a collection in jaxft's classes.

    Trajectories of a foreign builder get the token ids that the log-probabilities of their messages record.
    """
    return jaxft.TrajectoryCollection(
        trajectories=[[_from_toolkit(trajectory) for trajectory in group] for group in collection.trajectories],
        run_id=collection.run_id,
    )


def _to_toolkit(trajectory: jaxft.Trajectory) -> toolkit.Trajectory:
    own_fields = trajectory.model_dump(mode="json", include=set(OWN_FIELDS))
    answers = _answers(trajectory)
    episode: list[Any] = []
    for item in trajectory.episode:
        if isinstance(item, jaxft.DPOItem):
            episode.append(converted(toolkit.DPOItem, item))
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


def _answers(trajectory: jaxft.Trajectory) -> dict[tuple[float, ...], list[list[int]]]:
    """Return the token ids of the trained answers by their log-probabilities, equal ones in the order of the turns."""
    answers: dict[tuple[float, ...], list[list[int]]] = {}
    for sequence in trajectory.sequences or ():
        for turn in sorted(set(sequence.turns) - {-1}):
            places = [place for place, each in enumerate(sequence.turns) if each == turn]
            logprobs = tuple(sequence.sampler_logprobs[place] for place in places)
            answers.setdefault(logprobs, []).append([sequence.tokens[place] for place in places])
    return answers


def _from_toolkit(trajectory: toolkit.Trajectory) -> jaxft.Trajectory:
    metadata = dict(trajectory.metadata or {})
    own_fields = metadata.pop(OWN, None)
    given = trajectory.model_dump(mode="json", include={"episode", "reward", "shaped_rewards"})
    if own_fields is not None:
        return _with_plain_logprobs(jaxft.Trajectory.model_validate({**given, "metadata": metadata, **own_fields}))
    example_id, generation = metadata.get("id"), metadata.get("generation")
    made = jaxft.Trajectory(
        **given,
        metadata=metadata or None,
        example_id=None if example_id is None else str(example_id),
        generation=generation if isinstance(generation, int) else None,
    )
    return _with_plain_logprobs(with_recorded_sequences(made))


def _with_plain_logprobs(trajectory: jaxft.Trajectory) -> jaxft.Trajectory:
    """Return the trajectory with the numbers only of its log-probabilities; the rest is in its sequences."""
    for item in trajectory.episode:
        if isinstance(item, jaxft.EpisodeItem) and isinstance(item.logprobs, dict):
            item.logprobs = [entry["logprob"] for entry in item.logprobs.get("content") or ()]
    return trajectory


def converted(kind: type[M], value: BaseModel) -> M:
    """Return a value, such as the status of a job, in the class that the other side has for it."""
    return kind.model_validate(value.model_dump(mode="json"))


class ForeignBuilderConfig(jaxft.TrajectoryBuilderConfig, name="nat_trajectory_builder"):
    """A trajectory builder of the toolkit's kind; `described` is its configuration, for the record."""

    instance: Any = Field(exclude=True)
    described: Any = None


class ForeignAdapterConfig(jaxft.TrainerAdapterConfig, name="nat_trainer_adapter"):
    """A trainer adapter of the toolkit's kind; `described` is its configuration, for the record."""

    instance: Any = Field(exclude=True)
    described: Any = None


class ForeignBuilder(jaxft.TrajectoryBuilder):
    """Collects through a builder of the toolkit's kind, whose episodes the toolkit itself runs."""

    trajectory_builder_config: ForeignBuilderConfig

    def __init__(self, trajectory_builder_config: ForeignBuilderConfig) -> None:
        super().__init__(trajectory_builder_config)
        self._instance = trajectory_builder_config.instance
        self._collections = 0

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Start a collection, whose number the random numbers of its episodes depend on."""
        toolkit_episodes.begin_collection(self._collections)
        self._collections += 1
        await self._instance.start_run(run_id, meta)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> jaxft.TrajectoryCollection:
        """Return the trajectories of a collection."""
        collection = from_toolkit_collection(await self._instance.finalize(run_id, meta))
        return collection.model_copy(update={"metrics": {"episodes": sum(map(len, collection.trajectories))}})

    async def compute_reward(
        self, output_item: jaxft.EvalOutputItem, meta: dict[str, Any] | None = None
    ) -> float | None:
        """Return the reward that the toolkit's builder gives."""
        return float(await self._instance.compute_reward(output_item, meta))

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Pass the metrics on."""
        self._instance.log_progress(run_id, metrics, output_dir)

    def state(self) -> dict[str, Any]:
        """Return the number of collections."""
        return {"collections": self._collections}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore the number of collections."""
        self._collections = state["collections"]


class ForeignAdapter(jaxft.TrainerAdapter):
    """Submits to an adapter of the toolkit's kind, which has its weights elsewhere."""

    adapter_config: ForeignAdapterConfig

    def __init__(self, adapter_config: ForeignAdapterConfig) -> None:
        super().__init__(adapter_config)
        self._instance = adapter_config.instance

    async def is_healthy(self) -> bool:
        """Return the answer of the toolkit's adapter."""
        return await self._instance.is_healthy()

    async def submit(self, trajectories: jaxft.TrajectoryCollection) -> jaxft.TrainingJobRef:
        """Submit the trajectories in the toolkit's classes."""
        return converted(jaxft.TrainingJobRef, await self._instance.submit(to_toolkit_collection(trajectories)))

    async def status(self, ref: jaxft.TrainingJobRef) -> jaxft.TrainingJobStatus:
        """Return the status of a job."""
        return converted(jaxft.TrainingJobStatus, await self._instance.status(converted(toolkit.TrainingJobRef, ref)))

    async def wait_until_complete(
        self, ref: jaxft.TrainingJobRef, poll_interval: float = 10.0
    ) -> jaxft.TrainingJobStatus:
        """Wait for a job and return its last status."""
        given = converted(toolkit.TrainingJobRef, ref)
        return converted(jaxft.TrainingJobStatus, await self._instance.wait_until_complete(given, poll_interval))

    def log_progress(self, ref: jaxft.TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Pass the metrics on."""
        self._instance.log_progress(converted(toolkit.TrainingJobRef, ref), metrics, output_dir)


async def foreign_builder(config: ForeignBuilderConfig, builder: Any) -> AsyncIterator[ForeignBuilder]:
    """Yield the builder."""
    yield ForeignBuilder(config)


async def foreign_adapter(config: ForeignAdapterConfig, builder: Any) -> AsyncIterator[ForeignAdapter]:
    """Yield the adapter."""
    yield ForeignAdapter(config)


REGISTRY.add(ForeignBuilderConfig, foreign_builder)
REGISTRY.add(ForeignAdapterConfig, foreign_adapter)
