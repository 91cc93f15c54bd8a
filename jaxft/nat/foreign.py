"""Parts of other makers as parts of jaxft: jaxft's trainer runs with a builder or an adapter of the toolkit's kind."""

from collections.abc import AsyncIterator
from typing import Any

from nat.data_models import finetuning as toolkit
from pydantic import Field

from jaxft.harness.contracts import TrainerAdapter, TrajectoryBuilder
from jaxft.harness.data_models import (
    EvalOutputItem,
    TrainingJobRef,
    TrainingJobStatus,
    TrajectoryCollection,
)
from jaxft.harness.registry import REGISTRY, TrainerAdapterConfig, TrajectoryBuilderConfig
from jaxft.nat.conversion import from_toolkit_collection, from_toolkit_status, to_toolkit_collection
from jaxft.nat.live import toolkit_episodes


class ForeignBuilderConfig(TrajectoryBuilderConfig, name="nat_trajectory_builder"):
    """A trajectory builder of the toolkit's kind; `described` is its configuration, for the record."""

    instance: Any = Field(exclude=True)
    described: Any = None


class ForeignAdapterConfig(TrainerAdapterConfig, name="nat_trainer_adapter"):
    """A trainer adapter of the toolkit's kind; `described` is its configuration, for the record."""

    instance: Any = Field(exclude=True)
    described: Any = None


class ForeignBuilder(TrajectoryBuilder):
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

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Return the trajectories of a collection."""
        collection = from_toolkit_collection(await self._instance.finalize(run_id, meta))
        return collection.model_copy(update={"metrics": {"episodes": sum(map(len, collection.trajectories))}})

    async def compute_reward(self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None) -> float | None:
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


class ForeignAdapter(TrainerAdapter):
    """Submits to an adapter of the toolkit's kind, which has its weights elsewhere."""

    adapter_config: ForeignAdapterConfig

    def __init__(self, adapter_config: ForeignAdapterConfig) -> None:
        super().__init__(adapter_config)
        self._instance = adapter_config.instance

    async def is_healthy(self) -> bool:
        """Return the answer of the toolkit's adapter."""
        return await self._instance.is_healthy()

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Submit the trajectories in the toolkit's classes."""
        ref = await self._instance.submit(to_toolkit_collection(trajectories))
        return TrainingJobRef.model_validate(ref.model_dump())

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the status of a job."""
        return from_toolkit_status(await self._instance.status(_ref(ref)))

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Wait for a job and return its last status."""
        return from_toolkit_status(await self._instance.wait_until_complete(_ref(ref), poll_interval))

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Pass the metrics on."""
        self._instance.log_progress(_ref(ref), metrics, output_dir)


def _ref(ref: TrainingJobRef) -> toolkit.TrainingJobRef:
    return toolkit.TrainingJobRef.model_validate(ref.model_dump())


async def foreign_builder(config: ForeignBuilderConfig, builder: Any) -> AsyncIterator[ForeignBuilder]:
    """Yield the builder."""
    yield ForeignBuilder(config)


async def foreign_adapter(config: ForeignAdapterConfig, builder: Any) -> AsyncIterator[ForeignAdapter]:
    """Yield the adapter."""
    yield ForeignAdapter(config)


REGISTRY.add(TrajectoryBuilderConfig, ForeignBuilderConfig, foreign_builder)
REGISTRY.add(TrainerAdapterConfig, ForeignAdapterConfig, foreign_adapter)
