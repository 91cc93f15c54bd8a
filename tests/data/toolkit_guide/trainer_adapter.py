"""A trainer adapter: converts trajectories into a server's format, submits them as a job and watches it."""

import asyncio
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from jaxft import (
    EpisodeItem,
    EpisodeItemRole,
    FinetuneConfig,
    TrainerAdapter,
    TrainerAdapterConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
    register_trainer_adapter,
)

from .server import TrainingServer


class MyBackendConfig(BaseModel):
    """Configuration for the training backend."""

    endpoint: str = Field(description="Training API endpoint URL")
    api_key: str = Field(description="API key for authentication")
    timeout: int = Field(default=3600, description="Request timeout in seconds")
    learning_rate: float = Field(default=1e-5, description="Learning rate")
    batch_size: int = Field(default=4, description="Training batch size")


class MyTrainerAdapterConfig(TrainerAdapterConfig, name="guide_trainer_adapter"):
    """Configuration for my trainer adapter."""

    backend: MyBackendConfig = Field(description="Backend configuration")
    validate_trajectories: bool = Field(default=True, description="Whether to validate trajectories before submission")


class MyTrainerAdapter(TrainerAdapter):
    def __init__(self, adapter_config: MyTrainerAdapterConfig):
        super().__init__(adapter_config)
        self.server: TrainingServer | None = None
        self.training_jobs: dict[str, asyncio.Task[None]] = {}

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        self.server = TrainingServer(self.adapter_config.backend.learning_rate)
        if not await self.is_healthy():
            raise ConnectionError("Failed to connect to the training server.")

    async def is_healthy(self) -> bool:
        return self.server is not None

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        groups = [[self._construct(each) for each in group] for group in trajectories.trajectories]
        if not groups:
            raise ValueError("No valid trajectory groups to submit.")
        assert trajectories.run_id not in self.training_jobs, f"Job {trajectories.run_id} already exists."
        self.training_jobs[trajectories.run_id] = asyncio.create_task(self.server.train(groups))
        return TrainingJobRef(run_id=trajectories.run_id, backend="my-backend")

    def _construct(self, trajectory: Trajectory) -> dict[str, Any]:
        if self.adapter_config.validate_trajectories:
            self._validate_episode_order(trajectory.episode)
        answers = [item for item in trajectory.episode if item.role == EpisodeItemRole.ASSISTANT]
        others = [item for item in trajectory.episode if item.role != EpisodeItemRole.ASSISTANT]
        return {
            "messages": [{"role": item.role.value, "content": item.content} for item in others],
            "choices": [{"content": item.content, "logprobs": self._logprobs(item)} for item in answers],
            "reward": trajectory.reward,
        }

    def _logprobs(self, item: EpisodeItem) -> dict[str, Any]:
        return item.logprobs if isinstance(item.logprobs, dict) else {"content": item.logprobs}

    def _validate_episode_order(self, episode: list[EpisodeItem]) -> None:
        if not episode:
            raise ValueError("Trajectory episode is empty.")
        if episode[0].role not in {EpisodeItemRole.USER, EpisodeItemRole.SYSTEM}:
            raise ValueError("The first message in the trajectory must be from 'user' or 'system'.")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        task = self.training_jobs.get(ref.run_id)
        if task is None:
            raise ValueError(f"No training job found with run_id {ref.run_id}.")
        progress, message = None, "Training is in progress."
        status = TrainingStatusEnum.RUNNING
        if task.done():
            self.training_jobs.pop(ref.run_id)
            if task.cancelled():
                status, message = TrainingStatusEnum.CANCELED, "Training was cancelled."
            elif task.exception() is not None:
                status, message = TrainingStatusEnum.FAILED, f"Training failed with error: {task.exception()!r}"
            else:
                status, progress, message = TrainingStatusEnum.COMPLETED, 100.0, "Training completed successfully."
        return TrainingJobStatus(
            run_id=ref.run_id, backend=ref.backend, status=status, progress=progress, message=message
        )

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        task = self.training_jobs.get(ref.run_id)
        if task is None:
            raise ValueError(f"No training job found with run_id {ref.run_id}.")
        await asyncio.wait([task])
        return await self.status(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        out_dir = Path(output_dir) if output_dir else self.run_config.output_dir
        with open(out_dir / "guide_trainer_adapter.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"run_id": ref.run_id, "backend": ref.backend, **metrics}) + "\n")


@register_trainer_adapter(config_type=MyTrainerAdapterConfig)
async def my_trainer_adapter(config: MyTrainerAdapterConfig, builder):
    yield MyTrainerAdapter(adapter_config=config)
