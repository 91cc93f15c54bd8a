"""`_type: my_trainer`: the loop. Collect, choose, submit, wait, log."""

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

import jaxft


class MyTrainerConfig(jaxft.TrainerConfig, name="my_trainer"):
    """The number of failures that the loop tolerates."""

    max_failed_fraction: float = Field(default=0.5, ge=0.0, le=1.0, description="The run ends when more episodes fail.")


class MyTrainer(jaxft.Trainer):
    """One collection and at most one job per epoch; all files go to the run directory."""

    trainer_config: MyTrainerConfig
    trajectory_builder: jaxft.TrajectoryBuilder
    trainer_adapter: jaxft.TrainerAdapter

    def __init__(self, trainer_config: MyTrainerConfig, directory: Any, console: Any) -> None:
        super().__init__(trainer_config)
        self._directory, self._console = directory, console
        self._figures: dict[str, dict[str, Any]] = {}
        self._validations: list[dict[str, Any]] = []

    async def run(self, num_epochs: int) -> list[jaxft.TrainingJobStatus]:
        """The last status of every job; ends at the first that failed, which jaxft then reports."""
        self._console.start(num_epochs)
        statuses: list[jaxft.TrainingJobStatus] = []
        for epoch in range(num_epochs):
            await self._validate(epoch, num_epochs)
            run_id = f"epoch_{epoch:05d}"
            ref = await self.run_epoch(epoch, run_id)
            if ref is not None:
                statuses.append(await self.trainer_adapter.wait_until_complete(ref))
                self._figures[run_id] |= (statuses[-1].metadata or {}).get("metrics", {})
            self.log_progress(epoch, await self.get_metrics(run_id))
            if ref is not None and statuses[-1].status is not jaxft.TrainingStatusEnum.COMPLETED:
                return statuses
        await self._validate(num_epochs, num_epochs)
        if not statuses:
            raise jaxft.NoLearningSignal(f"nothing could be learned in {num_epochs} epochs")
        return statuses

    async def run_epoch(self, epoch: int, run_id: str) -> jaxft.TrainingJobRef | None:
        """Collects, chooses and submits; None when there is nothing to learn from."""
        await self.trajectory_builder.start_run(run_id)
        collection = await self.trajectory_builder.finalize(run_id)
        trajectories = [trajectory for group in collection.trajectories for trajectory in group]
        failed = len(collection.failures)
        if failed:
            told = f"{run_id}: {failed} episodes failed; the first: {collection.failures[0]}"
            if failed > self.trainer_config.max_failed_fraction * (failed + len(trajectories)):
                raise jaxft.TooManyFailures(told)
            self._console.message(told.splitlines()[0])
        rewards = [trajectory.reward for trajectory in trajectories if trajectory.scorable]
        chosen = self.apply_curriculum_learning(collection, epoch)
        self._figures[run_id] = {
            **collection.metrics,
            **({"reward_mean": sum(rewards) / len(rewards)} if rewards else {}),
            "chosen_groups": len(chosen.trajectories),
        }
        self.trajectory_builder.log_progress(run_id, self._figures[run_id])
        try:
            ref = await self.trainer_adapter.submit(chosen)
        except jaxft.NothingToTrain as error:
            self._console.message(f"{error}; nothing was trained")
            return None
        self.trainer_adapter.log_progress(ref, self._figures[run_id])
        return ref

    async def _validate(self, epoch: int, num_epochs: int) -> None:
        row = await self.validate_if_due(epoch, num_epochs)
        if row is not None:
            self._validations.append(row)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The figures of an epoch."""
        return dict(self._figures[run_id])

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """A row of the metrics file, and the progress line."""
        self._directory.append_jsonl("training_metrics.jsonl", {"epoch": epoch, **metrics})
        self._console.epoch(epoch + 1, metrics)

    async def cleanup(self) -> None:
        """Writes what is known at the end, also of a run that failed."""
        self._directory.write_json("curriculum_state.json", self.get_curriculum_state())
        if self._validations:
            self._directory.write_json("validation_history.json", self._validations)


@jaxft.register_trainer(config_type=MyTrainerConfig)
async def my_trainer(config: MyTrainerConfig, builder: Any) -> AsyncIterator[MyTrainer]:
    """The trainer; it writes where the run writes."""
    yield MyTrainer(config, builder.directory, builder.console)
