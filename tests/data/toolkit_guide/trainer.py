"""A trainer: in every epoch it collects, applies the curriculum, submits and waits; one run id names all jobs."""

import json
import logging
import uuid
from pathlib import Path
from typing import Any

from jaxft import (
    FinetuneConfig,
    Trainer,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    register_trainer,
)

logger = logging.getLogger(__name__)


class MyTrainerConfig(TrainerConfig, name="guide_trainer"):
    """Configuration for my trainer."""


class MyTrainer(Trainer):
    def __init__(self, trainer_config: MyTrainerConfig, **kwargs) -> None:
        super().__init__(trainer_config, **kwargs)
        self._job_refs: list[TrainingJobRef] = []
        self._run_id: str | None = None
        self._validation_history: list[dict] = []

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        self._run_id = f"my_run_{uuid.uuid4().hex[:8]}"

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        options = self.run_config.run_configuration
        if options.validation_dataset and epoch % options.validation_interval == 0:
            self._validation_history.append(await self.run_validation_evaluation(epoch, run_id))

        meta = {"epoch": epoch, "run_id": run_id, "trainer_config": self.trainer_config.model_dump()}
        await self.trajectory_builder.start_run(run_id=run_id, meta=meta)
        collection = await self.trajectory_builder.finalize(run_id=run_id, meta=meta)
        if not collection.trajectories:
            logger.warning("No trajectories collected for epoch %d", epoch)
            return None

        filtered = self.apply_curriculum_learning(collection, epoch)
        rewards = [trajectory.reward for group in collection.trajectories for trajectory in group]
        metrics = {
            "avg_reward": sum(rewards) / len(rewards),
            "num_trajectories": len(rewards),
            "filtered_groups": len(filtered.trajectories),
            "curriculum_percentile": (
                self._curriculum_state["current_percentile"] if self.curriculum_config.enabled else 1.0
            ),
        }
        self.trajectory_builder.log_progress(run_id, metrics)
        self.log_progress(epoch, metrics)
        if not filtered.trajectories:
            return None

        ref = await self.trainer_adapter.submit(filtered)
        self._job_refs.append(ref)
        return ref

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        if not self._run_id:
            raise RuntimeError("Trainer not initialized. Did you forget to call initialize(...)?")
        statuses = []
        for epoch in range(num_epochs):
            try:
                ref = await self.run_epoch(epoch, self._run_id)
                if ref:
                    statuses.append(await self.trainer_adapter.wait_until_complete(ref))
                    if statuses[-1].status == TrainingStatusEnum.FAILED:
                        break
                    self.trainer_adapter.log_progress(ref, {"epoch": epoch, "status": statuses[-1].status.value})
            except Exception as error:
                logger.exception("Error during epoch %d", epoch)
                statuses.append(
                    TrainingJobStatus(
                        run_id=self._run_id,
                        backend="my-backend",
                        status=TrainingStatusEnum.FAILED,
                        message=str(error),
                        metadata={"epoch": epoch},
                    )
                )
                break
        return statuses

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return {"run_id": run_id, "total_epochs": len(self._job_refs), "jobs": [r.model_dump() for r in self._job_refs]}

    async def cleanup(self) -> None:
        for tasks in self.trajectory_builder.evaluation_runs.values():
            for task in tasks:
                task.cancel()

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        out_dir = Path(output_dir) if output_dir else self.run_config.output_dir
        out_dir.mkdir(parents=True, exist_ok=True)
        entry = {"epoch": epoch, "run_id": self._run_id, **metrics, "validations": len(self._validation_history)}
        if self.curriculum_config.enabled:
            entry["curriculum_state"] = self.get_curriculum_state()
        with open(out_dir / "guide_trainer.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


@register_trainer(config_type=MyTrainerConfig)
async def my_trainer(config: MyTrainerConfig, builder):
    yield MyTrainer(trainer_config=config)
