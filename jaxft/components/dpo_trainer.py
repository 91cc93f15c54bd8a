"""`_type: dpo_trainer`: collect pairs first, then train on them, a job per epoch."""

import time
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from jaxft.components.run_log import RunLog, mean
from jaxft.harness.data_models import (
    DPOItem,
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.errors import ConfigError, JobFailed, NoLearningSignal, TooManyFailures, UserCodeError, user_code
from jaxft.harness.interfaces import Trainer
from jaxft.harness.registry import TrainerConfig, register_trainer
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory


class DPOTrainerConfig(TrainerConfig, name="dpo_trainer"):
    """Some collections, then `finetuning.num_epochs` jobs on all their pairs."""

    num_runs: int = Field(default=1, ge=1, description="Collections of episodes before training.")
    deduplicate_pairs: bool = Field(default=True, description="A pair that was collected twice is trained once.")
    max_pairs: int | None = Field(
        default=None, ge=1, description="Pairs trained, those of the largest reward; null: all."
    )
    continue_on_collection_error: bool = Field(
        default=False, description="A collection that fails is left out; false: it ends the run."
    )
    max_failed_share: float = Field(
        default=0.5, gt=0.0, le=1.0, description="A collection fails when more of its episodes than this do."
    )
    max_bad_updates: int = Field(
        default=3, ge=1, description="The run stops after so many non-finite updates in a row."
    )


class DPOTrainer(Trainer):
    """Collects on the policy as it is, then trains; all it writes goes to the run directory."""

    trainer_config: DPOTrainerConfig

    def __init__(self, trainer_config: DPOTrainerConfig, *, directory: RunDirectory, console: Console) -> None:
        super().__init__(trainer_config)
        self._log = RunLog(directory, console)
        self._pairs: list[list[Trajectory]] = []
        self._collected: dict[str, Any] = {}

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """As every trainer's.

        Raises:
            ConfigError: curriculum learning is enabled, which chooses among the collections of epochs.
        """
        if run_config.curriculum_learning.enabled:
            raise ConfigError(
                ["finetuning.curriculum_learning.enabled: dpo_trainer collects before its epochs: set it to false"]
            )
        await super().initialize(run_config)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Collections, then epochs; the last status of each job. Stops at the first job that fails.

        Raises:
            TooManyFailures: too many episodes of a collection failed, or every collection did.
            NoLearningSignal: no decision had two candidates of different scores, or no epoch made an update.
            JobFailed: `max_bad_updates` updates in a row were not finite.
        """
        assert self.trainer_adapter is not None
        self._log.start(num_epochs)
        await self._validate(0, num_epochs)
        await self._collect()
        statuses: list[TrainingJobStatus] = []
        bad_updates = learned_epochs = 0
        for epoch in range(num_epochs):
            started = time.perf_counter()
            run_id = f"epoch_{epoch:05d}"
            ref = await self.run_epoch(epoch, run_id)
            statuses.append(await self.trainer_adapter.wait_until_complete(ref))
            metadata = statuses[-1].metadata or {}
            self._log.metrics[run_id] |= metadata.get("metrics", {})
            self._log.timings[run_id] |= {**metadata.get("timings", {}), "seconds": time.perf_counter() - started}
            self.trainer_adapter.log_progress(ref, self._log.metrics[run_id])
            figures = await self.get_metrics(run_id)
            self.log_progress(epoch, figures)
            if statuses[-1].status is not TrainingStatusEnum.COMPLETED:
                return statuses
            is_bad = figures.get("nonfinite_updates", 0) > 0
            bad_updates = figures.get("nonfinite_updates_in_a_row", bad_updates + 1 if is_bad else 0)
            if bad_updates >= self.trainer_config.max_bad_updates:
                raise JobFailed(
                    f"loss or gradient were not finite in {bad_updates:.0f} updates in a row, the last in {run_id}"
                )
            learned_epochs += figures.get("applied_updates", 1) > 0
            await self._validate(epoch + 1, num_epochs)
        if not learned_epochs:
            raise NoLearningSignal(f"nothing could be learned in {num_epochs} epochs; the last: {statuses[-1].message}")
        return statuses

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef:
        """Submits all pairs that were collected."""
        assert self.trainer_adapter is not None
        # The figures of the collections belong to no epoch; the first one carries them.
        self._log.metrics[run_id] = dict(self._collected) if epoch == 0 else {}
        self._log.timings[run_id] = {}
        return await self.trainer_adapter.submit(TrajectoryCollection(trajectories=self._pairs, run_id=run_id))

    async def _collect(self) -> None:
        collections = []
        error: UserCodeError | None = None
        for number in range(self.trainer_config.num_runs):
            run_id = f"collection_{number:05d}"
            try:
                with user_code():
                    collections.append(await self._collection(run_id))
            except UserCodeError as failure:
                is_hopeless = isinstance(failure.error, ConfigError)  # the next collection would fail likewise
                if is_hopeless or not self.trainer_config.continue_on_collection_error:
                    raise failure.error from None
                self._log.console.message(f"{run_id} failed and is left out: {failure.summary}")
                error = failure
        if not collections:
            assert error is not None
            raise TooManyFailures(f"every collection failed; the last:\n{error.traceback}")
        found = [group for collection in collections for group in collection.trajectories]
        self._pairs = self._unique_pairs(found)
        pairs = sum(map(len, self._pairs))
        self._collected = _added(collections) | {"pairs_trained": pairs}
        self._log.rewards(0, self._collected)
        if not pairs:
            raise NoLearningSignal(
                "no pairs were found: record at least two candidates of different scores for a decision "
                "(jaxft.episode().record_candidates), or lower min_score_diff"
            )
        episodes = sum(collection.metrics.get("episodes", 0) for collection in collections)
        self._log.console.message(f"{pairs} pairs from {episodes:.0f} episodes")

    async def _collection(self, run_id: str) -> TrajectoryCollection:
        assert self.trajectory_builder is not None
        await self.trajectory_builder.start_run(run_id)
        collection = await self.trajectory_builder.finalize(run_id)
        failed = len(collection.failures)
        episodes = collection.metrics.get("episodes", failed + sum(map(len, collection.trajectories)))
        if failed > self.trainer_config.max_failed_share * episodes:
            raise TooManyFailures(f"{failed} of {episodes:.0f} episodes failed; the last: {collection.failures[-1]}")
        if failed:
            first = collection.failures[0].splitlines()[0]
            self._log.console.message(f"{run_id}: {failed} of {episodes:.0f} episodes failed and are left out; {first}")
        self.trajectory_builder.log_progress(run_id, collection.metrics)
        return collection

    def _unique_pairs(self, groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
        """One group per pair: pairs are not compared with each other."""
        pairs = [pair for group in groups for pair in group]
        if self.trainer_config.deduplicate_pairs:
            unique: dict[str, Trajectory] = {}
            for pair in pairs:
                unique.setdefault(_identity(pair), pair)
            pairs = list(unique.values())
        if self.trainer_config.max_pairs is not None:
            pairs = sorted(pairs, key=lambda pair: -pair.reward)[: self.trainer_config.max_pairs]
        return [[pair] for pair in pairs]

    async def _validate(self, epoch: int, num_epochs: int) -> None:
        row = await self.validate_if_due(epoch, num_epochs)
        if row is not None:
            self._log.validation(row)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The figures of one epoch: those that another run would repeat, then those of the clock.

        Raises:
            ValueError: no such epoch has been run.
        """
        return self._log.figures(run_id)

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Writes one step of the logs and the progress line."""
        self._log.epoch(epoch, f"epoch_{epoch:05d}", metrics)

    async def cleanup(self) -> None:
        """Closes the logs."""
        self._log.close()


def _identity(pair: Trajectory) -> str:
    return "".join(item.model_dump_json() for item in pair.episode if isinstance(item, DPOItem))


def _added(collections: list[TrajectoryCollection]) -> dict[str, float]:
    """The metrics of all collections in one: means of the means, extremes of the extremes, sums of the counts."""
    names = {name: None for collection in collections for name in collection.metrics}
    return {name: _joined(name, [c.metrics[name] for c in collections if name in c.metrics]) for name in names}


def _joined(name: str, values: list[float]) -> float:
    if name.endswith("_mean"):
        return mean(values)
    return min(values) if name.endswith("_min") else max(values) if name.endswith("_max") else sum(values)


@register_trainer(config_type=DPOTrainerConfig)
async def dpo_trainer(config: DPOTrainerConfig, builder: Any) -> AsyncIterator[DPOTrainer]:
    """The trainer of a run; it is closed by `cleanup`."""
    yield DPOTrainer(config, directory=builder.directory, console=builder.console)
