"""The three contracts: what builds trajectories, what trains on them, and what runs the loop.

Names, arguments and defaults are those of the toolkit's guide. A run makes one of each, binds them, initialises the
trainer (which initialises the other two), and calls `Trainer.run`.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from jaxft.harness.data_models import (
    CurriculumLearningConfig,
    EvalInputItem,
    EvalOutputItem,
    EvaluationRunOutput,
    FinetuneConfig,
    RewardFunctionConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrajectoryCollection,
)
from jaxft.harness.evaluation import Evaluation
from jaxft.harness.registry import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig


class TrajectoryBuilder(ABC):
    """Runs the workflow on the examples and turns what happened into trajectories.

    Attributes:
        trajectory_builder_config: its own configuration.
        run_config: the section `finetuning`; None until `initialize`.
        evaluation: workflow and evaluators, to run episodes with; None until `bind_evaluation`.
        examples: the dataset, in its order.
    """

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig) -> None:
        self.trajectory_builder_config = trajectory_builder_config
        self.run_config: FinetuneConfig | None = None
        self.evaluation: Evaluation | None = None
        self.examples: list[EvalInputItem] = []

    async def bind_evaluation(self, evaluation: Evaluation, examples: list[EvalInputItem]) -> None:
        """Called once, by whoever makes the builder, before `initialize`."""
        self.evaluation = evaluation
        self.examples = examples

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Stores the run's configuration and which evaluator gives the reward."""
        self.run_config = run_config
        self.trajectory_builder_config.reward = run_config.reward_function

    async def run_eval(self) -> EvaluationRunOutput:
        """One greedy pass over the examples on the validation stream, without training.

        Raises:
            RuntimeError: no evaluation is bound.
        """
        if self.evaluation is None:
            raise RuntimeError(f"{type(self).__name__} has no evaluation: call bind_evaluation first")
        return self.evaluation.summarize(await self.evaluation.validate(self.examples))

    @abstractmethod
    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts the episodes of a collection."""

    @abstractmethod
    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """The trajectories of a collection, when all its episodes have ended."""

    async def compute_reward(self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None) -> float:
        """The score as a float, 0.0 when there is none."""
        return 0.0 if output_item.score is None else float(output_item.score)

    @abstractmethod
    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Records how a collection went."""


class TrainerAdapter(ABC):
    """Stands between trajectories and whatever updates the weights.

    Attributes:
        adapter_config: its own configuration.
        run_config: the section `finetuning`; None until `initialize`.
    """

    def __init__(self, adapter_config: TrainerAdapterConfig) -> None:
        self.adapter_config = adapter_config
        self.run_config: FinetuneConfig | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Stores the run's configuration and which evaluator gives the reward."""
        self.run_config = run_config
        self.adapter_config.reward = run_config.reward_function

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Whether the backend can take jobs."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Starts a job and returns without waiting for it."""

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Where a job stands, also after it has ended."""

    @abstractmethod
    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """The last status of a job. `poll_interval` is in seconds; a backend that can be awaited need not use it."""

    @abstractmethod
    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Records how a job went."""

    async def export_model(self, folder: Path) -> Path | None:
        """Writes the trained model into a folder and returns it; None where weights stay with a remote backend."""
        return None


class Trainer(ABC):
    """The loop: collect, choose, train, log.

    Attributes:
        trainer_config: its own configuration.
        trajectory_builder, trainer_adapter: None until `bind_components`.
        run_config, curriculum_config, reward: from the section `finetuning`; None until `initialize`.
    """

    def __init__(self, trainer_config: TrainerConfig, **kwargs: Any) -> None:
        self.trainer_config = trainer_config
        self.trajectory_builder: TrajectoryBuilder | None = None
        self.trainer_adapter: TrainerAdapter | None = None
        self.run_config: FinetuneConfig | None = None
        self.curriculum_config: CurriculumLearningConfig | None = None
        self.reward: RewardFunctionConfig | None = None
        self._curriculum_state: dict[str, Any] | None = None

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        """Gives the trainer its parts, before `initialize`."""
        self.trajectory_builder = trajectory_builder
        self.trainer_adapter = trainer_adapter

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Stores the run's configuration, then initialises the builder and the adapter.

        Raises:
            RuntimeError: no components are bound.
        """
        if self.trajectory_builder is None or self.trainer_adapter is None:
            raise RuntimeError(f"{type(self).__name__} has no components: call bind_components first")
        self.run_config = run_config
        self.reward = run_config.reward_function
        self.trainer_config.reward = run_config.reward_function
        self.curriculum_config = run_config.curriculum_learning
        self._curriculum_state = {
            "current_percentile": self.curriculum_config.initial_percentile,
            "last_expansion_epoch": -1,
            "total_groups": 0,
            "included_groups": [],
        }
        await self.trajectory_builder.initialize(run_config)
        await self.trainer_adapter.initialize(run_config)

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """One pass: collect and submit. None when there was nothing to submit. Epochs count from 0."""

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """All epochs; the last status of each job."""

    @abstractmethod
    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The figures of one run."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Gives back what the run holds. Called once, also after a failure."""

    @abstractmethod
    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Records how an epoch went."""

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """The rewards of one greedy pass of the builder; the mean, least and greatest are None when none is usable.

        Raises:
            RuntimeError: no components are bound.
        """
        if self.trajectory_builder is None:
            raise RuntimeError(f"{type(self).__name__} has no components: call bind_components first")
        output = await self.trajectory_builder.run_eval()
        name = None if self.reward is None else self.reward.name
        items = [
            item
            for evaluator, result in output.evaluation_results
            if evaluator == name
            for item in result.eval_output_items
        ]
        rewards = [await self.trajectory_builder.compute_reward(item) for item in items if item.score is not None]
        return {
            "epoch": epoch,
            "dataset_type": "validation",
            "avg_reward": sum(rewards) / len(rewards) if rewards else None,
            "min_reward": min(rewards, default=None),
            "max_reward": max(rewards, default=None),
            "num_examples": len(rewards),
            "num_failed": output.num_failed,
            "num_unscorable": output.num_unscorable,
        }

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """The groups that take part in an epoch: all of them, for curriculum learning is not available yet."""
        return trajectory_collection

    def get_curriculum_state(self) -> dict[str, Any]:
        """A copy of the curriculum's state, fit for JSON; empty before `initialize`."""
        return dict(self._curriculum_state or {})
