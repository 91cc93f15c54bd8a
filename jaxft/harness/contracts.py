"""The three contracts: what builds trajectories, what trains on them, and what runs the loop.

Names, arguments and defaults are those of the toolkit's guide. A run makes one of each, binds them, initialises the
trainer (which initialises the other two), and calls `Trainer.run`.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from jaxft.errors import TrajectoryError
from jaxft.harness.curriculum import checked_state, choose_groups, initial_state
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
from jaxft.harness.evaluation import Evaluation, Validation
from jaxft.harness.registry import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig

T = TypeVar("T")


class TrajectoryBuilder(ABC):
    """Runs the workflow on the examples and turns what happened into trajectories.

    Attributes:
        trajectory_builder_config: its own configuration.
        run_config: the section `finetuning`; None until `initialize`.
        evaluation: workflow and evaluators, to run episodes with; None until `bind_evaluation`.
        examples: the dataset, in its order.
        validation: the same for `run_eval`, when there is a dataset of its own for that.
    """

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig) -> None:
        self.trajectory_builder_config = trajectory_builder_config
        self.run_config: FinetuneConfig | None = None
        self.evaluation: Evaluation | None = None
        self.examples: list[EvalInputItem] = []
        self.validation: Validation | None = None

    async def bind_evaluation(self, evaluation: Evaluation, examples: list[EvalInputItem]) -> None:
        """Called once, by whoever makes the builder, before `initialize`."""
        self.evaluation = evaluation
        self.examples = examples

    async def bind_validation(self, validation: Validation) -> None:
        """Called like `bind_evaluation`, when the configuration has a section `eval.validation`."""
        self.validation = validation

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Stores the run's configuration and which evaluator gives the reward."""
        self.run_config = run_config
        self.trajectory_builder_config.reward = run_config.reward_function

    async def run_eval(self) -> EvaluationRunOutput:
        """One pass on the validation stream, without training: over the validation examples as their section says, or,
        without one, greedily over the examples.

        Raises:
            RuntimeError: no evaluation is bound.
        """
        if self.validation is not None:
            return await self.validation.run()
        if self.evaluation is None:
            raise RuntimeError(f"{type(self).__name__} has no evaluation: call bind_evaluation first")
        return self.evaluation.summarize(await self.evaluation.validate(self.examples))

    @abstractmethod
    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts the episodes of a collection.

        Args:
            run_id: names it.
            meta: what the trainer wishes; `{"example_ids": [...]}` are the examples to work on, all without it.
        """

    @abstractmethod
    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """The trajectories of a collection, when all its episodes have ended."""

    async def compute_reward(self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None) -> float | None:
        """The reward of an episode: its score as a float, or None, with which it trains nothing.

        For a score that is missing, `finetuning.reward_function.unusable` says what is given. A builder that overrides
        this gives what it likes.

        Raises:
            TrajectoryError: the score is missing, and `unusable` is `error`.
        """
        if output_item.score is not None:
            return float(output_item.score)
        config = self.trajectory_builder_config.reward
        if config is not None and config.unusable == "error":
            raise TrajectoryError(
                f"example '{output_item.id}', generation {output_item.generation}: '{config.name}' gave no finite "
                f"number as the reward ({output_item.reasoning}): mend the evaluator, or set "
                "finetuning.reward_function.unusable to unscorable or zero"
            )
        return 0.0 if config is not None and config.unusable == "zero" else None

    @abstractmethod
    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Records how a collection went."""

    def state(self) -> dict[str, Any]:
        """What decides the next collections beside the configuration, for JSON; saved with every checkpoint."""
        return {}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave, of this builder or of one before it; whoever has a state overrides both."""
        _check_empty(self, state)


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

    async def warm_up(self) -> None:
        """Compiles before the first epoch what the run will need (`finetuning.strict_compile`); nothing by default."""
        return None

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

    async def memory(self) -> dict[str, float]:
        """What training needs, in MiB by purpose, found without training; empty where a remote backend knows it.

        A local adapter compiles its largest update for it, so it takes as long as the first job.
        """
        return {}

    def memory_advice(self, memory: dict[str, float]) -> str | None:
        """What to change where `memory` is more than there is; None where it fits, or nobody knows."""
        return None

    async def save_state(self, save: Callable[[dict[str, Any], Any], T]) -> T:
        """The result of `save(values, arrays)`, called while no job runs: all that decides the next jobs.

        `values` are for JSON and change with every job; `arrays` is a tree of arrays, none where a remote backend holds
        the weights.
        """
        return save({}, {})

    async def restore_state(self, values: dict[str, Any], read: Callable[[Any], Any]) -> None:
        """Goes on from what was saved; `read(like)` gives the arrays, placed like those of a tree of their layout."""
        _check_empty(self, values)

    def is_busy(self) -> bool:
        """Whether a job runs that a signal had better wait for."""
        return False

    async def export_model(self, folder: Path) -> Path | None:
        """Writes the trained model into a folder and returns it; None where weights stay with a remote backend."""
        return None


class Trainer(ABC):
    """The loop: collect, choose, train, log.

    Attributes:
        trainer_config: its own configuration.
        trajectory_builder, trainer_adapter: None until `bind_components`.
        run_config, curriculum_config, reward: from the section `finetuning`; None until `initialize`.
        save_checkpoint: `(trainer, step, score=..., is_last=...)`, which saves the run; None where nobody wants that.
        is_stopping: set by a signal: `run` returns at its next boundary.
        needs_no_training: set by `run` where all is well although nothing was trained, as with a policy that reaches
            the target as it is; otherwise a run that trained nothing has failed.
    """

    def __init__(self, trainer_config: TrainerConfig, **kwargs: Any) -> None:
        self.trainer_config = trainer_config
        self.trajectory_builder: TrajectoryBuilder | None = None
        self.trainer_adapter: TrainerAdapter | None = None
        self.run_config: FinetuneConfig | None = None
        self.curriculum_config: CurriculumLearningConfig | None = None
        self.reward: RewardFunctionConfig | None = None
        self.save_checkpoint: Callable[..., Awaitable[None]] | None = None
        self.is_stopping = False
        self.needs_no_training = False
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
        self._curriculum_state = initial_state(self.curriculum_config)
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

    async def checkpoint(self, step: int, *, score: float | None = None, is_last: bool = False) -> None:
        """Saves the run, if that is due; called by `run` between epochs, when no job is open and the logs are written.

        Args:
            step: how much has been done, such as the number of finished epochs; it grows, and names the checkpoint.
            score: the validation reward of the policy as it is; the best one is kept.
            is_last: whether nothing comes after.
        """
        if self.save_checkpoint is not None:
            await self.save_checkpoint(self, step, score=score, is_last=is_last)

    def state(self) -> dict[str, Any]:
        """What decides the next epochs beside the configuration, for JSON; saved with every checkpoint."""
        return {}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave; called after `initialize` and before `run`."""
        _check_empty(self, state)

    async def validate_if_due(self, epoch: int, num_epochs: int) -> dict[str, Any] | None:
        """`run_validation_evaluation` when `eval.validation` wants one after so many epochs; else None."""
        validation = None if self.trajectory_builder is None else self.trajectory_builder.validation
        if validation is None or not validation.is_due(epoch, num_epochs):
            return None
        return await self.run_validation_evaluation(epoch, f"validation_{epoch:05d}")

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """The rewards (`compute_reward`) of one `run_eval` of the builder; mean, least and greatest are None when none
        is usable.

        `num_failed` episodes are in none of the figures, and `first_error` says why the first of them failed.

        Raises:
            RuntimeError: no components are bound.
        """
        if self.trajectory_builder is None:
            raise RuntimeError(f"{type(self).__name__} has no components: call bind_components first")
        output = await self.trajectory_builder.run_eval()
        validation = self.trajectory_builder.validation
        name = None if self.reward is None else self.reward.name
        if validation is not None:  # a configuration of its own may have a reward of its own
            name = validation.evaluation.reward_name
        items = [
            item
            for evaluator, result in output.evaluation_results
            if evaluator == name
            for item in result.eval_output_items
        ]
        given = [(item, await self.trajectory_builder.compute_reward(item)) for item in items if item.error is None]
        rewards = [reward for _, reward in given if reward is not None]
        priced = sum(item.score is None and reward is not None for item, reward in given)
        return {
            "epoch": epoch,
            "dataset_type": "validation",
            "avg_reward": sum(rewards) / len(rewards) if rewards else None,
            "min_reward": min(rewards, default=None),
            "max_reward": max(rewards, default=None),
            "num_examples": len(rewards),
            "num_failed": output.num_failed,
            "num_unscorable": output.num_unscorable - priced,
            "first_error": output.first_error,
        }

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """The groups that an epoch trains, as `finetuning.curriculum_learning` chooses: all when it is not enabled.

        Raises:
            RuntimeError: called before `initialize`.
        """
        if self.run_config is None or self.curriculum_config is None or self._curriculum_state is None:
            raise RuntimeError(f"{type(self).__name__} is not initialised: call initialize first")
        if not self.curriculum_config.enabled:
            return trajectory_collection
        groups, self._curriculum_state = choose_groups(
            trajectory_collection.trajectories,
            self.curriculum_config,
            self._curriculum_state,
            epoch=epoch,
            seed=self.run_config.seed,
        )
        return trajectory_collection.model_copy(update={"trajectories": groups})

    def get_curriculum_state(self) -> dict[str, Any]:
        """A copy of the curriculum's state (`jaxft.harness.curriculum.State`), for JSON; empty before `initialize`."""
        return copy.deepcopy(self._curriculum_state or {})

    def restore_curriculum_state(self, state: dict[str, Any]) -> None:
        """Goes on from a state that `get_curriculum_state` gave, of this trainer or of one before it.

        Raises:
            ValueError: it is none.
        """
        self._curriculum_state = copy.deepcopy(checked_state(state)) if state else None


def _check_empty(part: object, state: dict[str, Any]) -> None:
    if state:
        raise NotImplementedError(f"{type(part).__name__} saves a state, but cannot restore it: override restore_state")
