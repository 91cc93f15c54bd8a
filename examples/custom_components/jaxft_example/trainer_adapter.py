"""`_type: my_trainer_adapter`: hands trajectories to a training server, and tells in jaxft's words how it goes."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr, field_validator

import jaxft
from jaxft_example.memory_server import MemoryServer, Row

BACKEND = "memory"
STATES = {
    "queued": jaxft.TrainingStatusEnum.PENDING,
    "running": jaxft.TrainingStatusEnum.RUNNING,
    "done": jaxft.TrainingStatusEnum.COMPLETED,
    "error": jaxft.TrainingStatusEnum.FAILED,
}


class BackendConfig(jaxft.ConfigModel):
    """Where the training server is, and how it trains."""

    endpoint: str = Field(description="Address of the server; memory:// makes one here.")
    api_key: SecretStr = Field(description="Key that the server asks for.")
    learning_rate: float = Field(default=0.5, gt=0.0, allow_inf_nan=False, description="Fraction of an error to learn.")
    batch_size: int = Field(default=16, ge=1, description="Trajectories between two reports of progress.")

    @field_validator("endpoint")
    @classmethod
    def _is_known(cls, endpoint: str) -> str:
        if not endpoint.startswith("memory://"):
            raise ValueError("this example talks to no server over a network: write memory://local")
        return endpoint


class MyTrainerAdapterConfig(jaxft.TrainerAdapterConfig, name="my_trainer_adapter"):
    """Which server trains, and which trajectories it is sent."""

    backend: BackendConfig = Field(description="The training server.")
    validate_trajectories: bool = Field(default=True, description="Refuse trajectories without question or answer.")


class MyTrainerAdapter(jaxft.TrainerAdapter):
    """Keeps no weights: what is learned is the server's table."""

    adapter_config: MyTrainerAdapterConfig

    def __init__(self, adapter_config: MyTrainerAdapterConfig, server: MemoryServer) -> None:
        super().__init__(adapter_config)
        self.server = server
        self._history: dict[str, list[dict[str, Any]]] = {}

    async def is_healthy(self) -> bool:
        """Whether the server takes jobs."""
        return self.server.ping()

    async def submit(self, trajectories: jaxft.TrajectoryCollection) -> jaxft.TrainingJobRef:
        """Queues a job of the name of the collection; what has no usable reward stays out of it."""
        run_id = trajectories.run_id
        if run_id in self._history:
            raise ValueError(f"job '{run_id}' has been submitted before")
        rows = list(self._rows(trajectories))
        if not rows:
            raise jaxft.NothingToTrain(f"{run_id}: no trajectory has a usable reward")
        self.server.create_job(run_id, rows)
        self._history[run_id] = []
        return jaxft.TrainingJobRef(run_id=run_id, backend=BACKEND)

    def _rows(self, trajectories: jaxft.TrajectoryCollection) -> Iterator[Row]:
        for trajectory in (each for group in trajectories.trajectories for each in group if each.scorable):
            said = {item.role: item.content for item in trajectory.episode if isinstance(item, jaxft.EpisodeItem)}
            question = said.get(jaxft.EpisodeItemRole.USER)
            answer = said.get(jaxft.EpisodeItemRole.ASSISTANT)
            if self.adapter_config.validate_trajectories and (question is None or answer is None):
                name = f"example '{trajectory.example_id}', generation {trajectory.generation}"
                raise jaxft.TrajectoryError(f"{name} has no {'question' if question is None else 'answer'}")
            yield Row(question or "", answer or "", trajectory.reward)

    async def status(self, ref: jaxft.TrainingJobRef) -> jaxft.TrainingJobStatus:
        """Where a job stands; its metadata holds `metrics` and, as `history`, what `log_progress` was told."""
        if ref.run_id not in self._history:
            raise ValueError(f"no job '{ref.run_id}' was submitted; jobs: {', '.join(self._history) or 'none'}")
        job = self.server.jobs[ref.run_id]
        return jaxft.TrainingJobStatus(
            run_id=ref.run_id,
            backend=BACKEND,
            status=STATES[job.state],
            progress=100.0 * job.progress,
            message=job.error,
            metadata={"metrics": {"loss": job.loss}, "history": self._history[ref.run_id]},
        )

    async def wait_until_complete(
        self, ref: jaxft.TrainingJobRef, poll_interval: float = 10.0
    ) -> jaxft.TrainingJobStatus:
        """The last status. A server that cannot be awaited is asked again after `poll_interval` seconds."""
        await self.status(ref)  # of an unknown job there is nothing to wait for
        await self.server.jobs[ref.run_id].ended.wait()
        return await self.status(ref)

    def log_progress(self, ref: jaxft.TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Keeps figures with the job."""
        self._history[ref.run_id].append(dict(metrics))

    async def export_model(self, folder: Path) -> Path:
        """Writes the table, which is all that was trained."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "table.json").write_text(json.dumps(self.server.table, indent=2))
        return folder


@jaxft.register_trainer_adapter(config_type=MyTrainerAdapterConfig)
async def my_trainer_adapter(config: MyTrainerAdapterConfig, builder: Any) -> AsyncIterator[MyTrainerAdapter]:
    """The adapter and its server, which is closed when the run ends."""
    backend = config.backend
    server = MemoryServer(
        backend.api_key.get_secret_value(), learning_rate=backend.learning_rate, batch_size=backend.batch_size
    )
    yield MyTrainerAdapter(config, server)
    await server.close()
