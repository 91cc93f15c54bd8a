"""`_type: dpo_trainer`: collect pairs first, then train on them, a job per epoch."""

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from jaxft.components.collecting import dropped_episodes, why_no_calls
from jaxft.components.logged_trainer import LoggedTrainer
from jaxft.components.run_log import PAIRS_FILE, mean
from jaxft.harness.data_models import (
    DPOItem,
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.errors import ConfigError, NoLearningSignal, TooManyFailures, UserCodeError, user_code
from jaxft.harness.registry import TrainerConfig, register_trainer
from jaxft.policy.faults import PolicyError
from jaxft.runs.console import Console
from jaxft.runs.directory import RestoreError, RunDirectory


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


class DPOTrainer(LoggedTrainer):
    """Collects on the policy as it is, then trains; all it writes goes to the run directory."""

    trainer_config: DPOTrainerConfig

    def __init__(self, trainer_config: DPOTrainerConfig, *, directory: RunDirectory, console: Console) -> None:
        super().__init__(trainer_config, trainer_config.max_bad_updates, directory, console)
        self._collections: list[dict[str, Any]] = []  # the metrics of each, or its error
        self._collected: list[Trajectory] = []
        self._pairs: list[list[Trajectory]] = []
        self._figures: dict[str, Any] = {}

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
        self.start(num_epochs)
        await self._collect(num_epochs)
        while self._pairs:  # a signal may have come before there were any
            is_last = self.progress.epoch >= num_epochs
            await self._save(await self.validate(num_epochs), is_last=is_last)
            if self.is_stopping:
                break
            if is_last:
                self.check_learned()
                break
            if await self.train_epoch() is None:
                break
        return self.progress.statuses

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef:
        """Submits all pairs that were collected."""
        assert self.trainer_adapter is not None
        # The figures of the collections belong to no epoch; the first one carries them.
        self.log.metrics[run_id] = dict(self._figures) if epoch == 0 else {}
        self.log.timings[run_id] = {}
        return await self.trainer_adapter.submit(TrajectoryCollection(trajectories=self._pairs, run_id=run_id))

    async def _collect(self, num_epochs: int) -> None:
        """All collections, with a checkpoint before each: they may take longer than the training."""
        while len(self._collections) < self.trainer_config.num_runs and not self.is_stopping:
            await self._save(await self.validate(num_epochs), is_last=False)
            if self.is_stopping:
                return
            run_id = f"collection_{len(self._collections):05d}"
            try:
                with user_code():
                    collection = await self._collection(run_id)
            except UserCodeError as failure:
                is_hopeless = isinstance(failure.error, ConfigError | PolicyError)  # the next would fail likewise
                if is_hopeless or not self.trainer_config.continue_on_collection_error:
                    raise failure.error from None
                self.log.console.message(f"{run_id} failed and is left out: {failure.summary}")
                self._collections.append({"error": failure.traceback})
            else:
                self.log.pairs(collection)
                self._collected += [pair for group in collection.trajectories for pair in group]
                self._collections.append({"metrics": collection.metrics})
        if self.is_stopping or self._pairs:
            return
        metrics = [collection["metrics"] for collection in self._collections if "metrics" in collection]
        if not metrics:
            raise TooManyFailures(f"every collection failed; the last:\n{self._collections[-1]['error']}")
        self._pairs = self._unique_pairs(self._collected)
        self._figures = _added(metrics) | {"pairs_trained": len(self._pairs)}
        if not self._pairs:
            cause = why_no_calls(self._figures) or (
                "record at least two candidates of different scores for a decision "
                "(jaxft.episode().record_candidates), or lower min_score_diff"
            )
            raise NoLearningSignal(f"no pairs were found: {cause}")
        if not self.log.state()["rewards"]:  # or they were logged before the run was resumed
            self.log.rewards(0, self._figures)
            episodes = sum(figures.get("episodes", 0) for figures in metrics)
            self.log.console.message(f"{len(self._pairs)} pairs from {episodes:.0f} episodes")

    async def _save(self, score: float | None, *, is_last: bool) -> None:
        await self.save(len(self._collections) + self.progress.epoch, score, is_last=is_last)

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
            self.log.console.message(f"{run_id}: {failed} of {episodes:.0f} episodes failed and are left out; {first}")
        if dropped := dropped_episodes(collection.metrics):
            self.log.console.message(f"{run_id}: {dropped}")
        self.trajectory_builder.log_progress(run_id, collection.metrics)
        return collection

    def _unique_pairs(self, pairs: list[Trajectory]) -> list[list[Trajectory]]:
        """One group per pair: pairs are not compared with each other."""
        if self.trainer_config.deduplicate_pairs:
            unique: dict[str, Trajectory] = {}
            for pair in pairs:
                unique.setdefault(_identity(pair), pair)
            pairs = list(unique.values())
        if self.trainer_config.max_pairs is not None:
            pairs = sorted(pairs, key=lambda pair: -pair.reward)[: self.trainer_config.max_pairs]
        return [[pair] for pair in pairs]

    def state(self) -> dict[str, Any]:
        """Counters and histories; the pairs are in a log of their own."""
        return {**super().state(), "collections": self._collections, "collected_pairs": len(self._collected)}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Goes on between two collections or epochs."""
        super().restore_state(state)
        self._collections = list(state["collections"])
        self._collected = self.log.read_pairs()
        if len(self._collected) != state["collected_pairs"]:
            raise RestoreError(
                f"{PAIRS_FILE} holds {len(self._collected)} pairs, but held {state['collected_pairs']} when the "
                "checkpoint was made: put it back, or start anew with --overwrite"
            )


def _identity(pair: Trajectory) -> str:
    return "".join(item.model_dump_json() for item in pair.episode if isinstance(item, DPOItem))


def _added(collections: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of all collections in one: means of means and quartiles, extremes of extremes, sums of counts."""
    names = {name: None for metrics in collections for name in metrics}
    return {name: _joined(name, [metrics[name] for metrics in collections if name in metrics]) for name in names}


def _joined(name: str, values: list[float]) -> float:
    if name.endswith(("_mean", "_q25", "_q75")):
        return mean(values)
    return min(values) if name.endswith("_min") else max(values) if name.endswith("_max") else sum(values)


@register_trainer(config_type=DPOTrainerConfig)
async def dpo_trainer(config: DPOTrainerConfig, builder: Any) -> AsyncIterator[DPOTrainer]:
    """The trainer of a run; it is closed by `cleanup`."""
    yield DPOTrainer(config, directory=builder.directory, console=builder.console)
