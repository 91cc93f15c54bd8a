"""The three contracts: the trajectory builder, which collects episodes, the trainer adapter, and the trainer's loop.

Names, arguments and defaults are those of the toolkit's guide. A run makes one of each, binds them, initialises the
trainer (which initialises the other two), and calls `Trainer.run`.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from jaxft.errors import ConfigError, TrajectoryError
from jaxft.harness.curriculum import GroupReward, choose_groups_per_task, group_reward, initial_state
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
from jaxft.harness.evaluation_scores import ScoredEpisode
from jaxft.harness.registry import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from jaxft.rollout.recorder import TRAINING, VALIDATION
from jaxft.runs.loggers import Loggers

T = TypeVar("T")

# `run_eval` of a builder written for the toolkit takes no arguments, so that validation cannot pass its stream to it.
_stream: ContextVar[int] = ContextVar("jaxft_stream", default=TRAINING)


@contextmanager
def _validating() -> Iterator[None]:
    """Make validation the stream of every `run_eval` that is called without one."""
    token = _stream.set(VALIDATION)
    try:
        yield
    finally:
        _stream.reset(token)


class TrajectoryBuilder(ABC):
    """Runs the workflow on the examples and turns the episodes into trajectories.

    Attributes:
        trajectory_builder_config: configuration of this builder.
        run_config: the section `finetuning`; None until `initialize`.
        evaluation: workflow and evaluators, which run the episodes; None until `bind_evaluation`.
        examples: the examples of the dataset, in order.
        validation: the validation set of `run_eval`; None without one.
    """

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig) -> None:
        self.trajectory_builder_config = trajectory_builder_config
        self.run_config: FinetuneConfig | None = None
        self.evaluation: Evaluation | None = None
        self.examples: list[EvalInputItem] = []
        self.validation: Validation | None = None

    async def bind_evaluation(self, evaluation: Evaluation, examples: list[EvalInputItem]) -> None:
        """Store the evaluation and the examples; called once, before `initialize`."""
        self.evaluation = evaluation
        self.examples = examples

    async def bind_validation(self, validation: Validation) -> None:
        """Store the validation set; called like `bind_evaluation`, if there is a section `eval.validation`."""
        self.validation = validation

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Store the run's configuration and its reward function."""
        self.run_config = run_config
        self.trajectory_builder_config.reward = run_config.reward_function

    async def run_eval(self, num_generations: int | None = None, stream: int | None = None) -> EvaluationRunOutput:
        """Run the workflow and the evaluators over the examples once; each item of the result has its `trajectory`.

        On the training stream the episodes are sampled as for training, and may be trained. Each call draws other
        random numbers, also after a resume. On the validation stream the validation set is run or, without one, the
        examples, greedily.

        Args:
            num_generations: episodes per example; None: 1, or `eval.validation.num_generations`.
            stream: `TRAINING` or `VALIDATION`; None: `VALIDATION` within `run_validation_evaluation`, else `TRAINING`.

        Raises:
            RuntimeError: no evaluation is bound.
        """
        if self.evaluation is None:
            raise RuntimeError(f"{type(self).__name__} has no evaluation: call bind_evaluation first")
        stream = _stream.get() if stream is None else stream
        if stream == VALIDATION and self.validation is not None:
            return await self.validation.run(num_generations)
        outcomes = await self.evaluation.run(
            self.examples,
            stream=stream,
            num_generations=1 if num_generations is None else num_generations,
            temperature=0.0 if stream == VALIDATION else None,
        )
        output = self.evaluation.summarize(outcomes)
        if stream == TRAINING and output.first_error is not None:
            first = output.first_error.splitlines()[0]
            self.evaluation.log(f"{output.num_failed} of {output.num_episodes} episodes failed; the first: {first}")
        return output

    @abstractmethod
    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Start the episodes of a collection.

        Args:
            run_id: name of the collection.
            meta: options of the trainer; `{"example_ids": [...]}` selects examples, and without it all are run.
        """

    @abstractmethod
    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Wait for the episodes of a collection, and return their trajectories."""

    async def compute_reward(self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None) -> float | None:
        """Return the reward of an episode: its score as a float, or None, which leaves the episode out of training.

        A failed episode has none. For a missing score of another `finetuning.reward_function.unusable` decides. A
        builder may override this.

        Raises:
            TrajectoryError: the score is missing, and `unusable` is `error`.
        """
        if output_item.score is not None:
            return float(output_item.score)
        if output_item.error is not None:
            return None
        config = self.trajectory_builder_config.reward
        if config is not None and config.unusable == "error":
            name = output_item.evaluator or config.name  # a task may have an evaluator of its own
            raise TrajectoryError(
                f"example '{output_item.id}', generation {output_item.generation}: '{name}' gave no finite "
                f"number as the reward ({output_item.reasoning}): mend the evaluator, or set "
                "finetuning.reward_function.unusable to unscorable or zero"
            )
        return 0.0 if config is not None and config.unusable == "zero" else None

    @abstractmethod
    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Record the metrics of a collection."""

    def state(self) -> dict[str, Any]:
        """Return the state, for JSON, on which the next collections depend; saved with every checkpoint."""
        return {}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`, of this builder or an earlier one; a builder with a state overrides both."""
        _check_empty(self, state)


class TrainerAdapter(ABC):
    """Submits trajectories as jobs to the backend that updates the weights.

    Attributes:
        adapter_config: configuration of this adapter.
        run_config: the section `finetuning`; None until `initialize`.
        joins_processes: True if several processes submit a job together, each the whole of it; otherwise a run of
            several processes is refused.
    """

    joins_processes: ClassVar[bool] = False

    def __init__(self, adapter_config: TrainerAdapterConfig) -> None:
        self.adapter_config = adapter_config
        self.run_config: FinetuneConfig | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Store the run's configuration and its reward function."""
        self.run_config = run_config
        self.adapter_config.reward = run_config.reward_function

    @abstractmethod
    async def is_healthy(self) -> bool:
        """True if the backend can take jobs; it may raise `CheckFailed` with the cause that it cannot."""

    async def warm_up(self) -> None:
        """Compile all programs before the first epoch (`finetuning.strict_compile`); by default do nothing."""
        return None

    def group_rewards(self, trajectories: TrajectoryCollection) -> list[GroupReward]:
        """Return mean and difference of each group's rewards as a job would weigh them, by which a curriculum chooses.

        By default they are the rewards of the trajectories.
        """
        return [group_reward(group) for group in trajectories.trajectories]

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Start a job and return without waiting for it."""

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the status of a job, also after it has ended."""

    @abstractmethod
    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Wait for a job and return its last status; `poll_interval` is in seconds, for backends that are polled."""

    @abstractmethod
    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Record the metrics of a job."""

    async def memory(self) -> dict[str, float]:
        """Return the memory that training needs, in MiB by purpose; empty for a remote backend.

        A local adapter compiles its largest update to find it, which takes as long as the first job.
        """
        return {}

    def peak_memory(self, memory: dict[str, float]) -> float:
        """Return the largest part of `memory` that is needed at the same time, by default all of it."""
        return sum(memory.values())

    def memory_advice(self, memory: dict[str, float]) -> str | None:
        """Return the settings to change if `memory` does not fit the device; None if it fits, or if that is unknown."""
        return None

    async def disk_bytes(self) -> dict[str, int]:
        """Return the bytes on disk of a `checkpoint` and of an `export`; empty for a remote backend.

        `merged` are those of a model with its adapters, where adapters alone are exported.
        """
        return {}

    async def save_state(self, save: Callable[[dict[str, Any], Any], T]) -> T:
        """Call `save(values, arrays)` with the state of the adapter while no job runs, and return its result.

        `values` are for JSON and change with every job; `arrays` is a tree of arrays, empty if a remote backend holds
        the weights.
        """
        return save({}, {})

    async def restore_state(self, values: dict[str, Any], read: Callable[[Any], Any]) -> None:
        """Restore a saved state; `read(like)` returns its arrays, placed like those of the tree `like`."""
        _check_empty(self, values)

    def is_busy(self) -> bool:
        """True if a job runs that a signal should wait for."""
        return False

    def allow_staleness(self, max_staleness: int) -> None:
        """Take episodes of up to `max_staleness` policy versions before, and sample beside jobs.

        It is called once, before `initialize`, if `max_staleness` is above 0. An adapter that implements this has
        `pin_weights` and `release_weights`, too.

        Raises:
            ConfigError: the adapter cannot; by default none can, as its jobs may change the weights in mid-episode.
        """
        raise ConfigError(
            f"max_staleness: is {max_staleness}, but {type(self).__name__} cannot sample beside a job: set it to "
            "0, or give the adapter allow_staleness, pin_weights and release_weights"
        )

    async def pin_weights(self, *, finishes_requests: bool = True) -> None:
        """Sample with the present weights until the next call of this or of `release_weights`, whatever jobs change.

        Args:
            finishes_requests: True to finish running requests with the weights that they began with; False to go on
                with them under the present weights.
        """
        return None

    async def release_weights(self) -> None:
        """Sample with the newest weights again; without a `pin_weights` before, do nothing."""
        return None

    def device_seconds(self) -> dict[str, float]:
        """Return the seconds that the device has spent so far, by purpose, such as `sampling`; empty if unknown."""
        return {}

    async def export_model(self, folder: Path) -> Path | None:
        """Write the trained model into a folder and return it; None if the weights stay with a remote backend."""
        return None


async def _always(name: str) -> bool:
    return True


class Trainer(ABC):
    """The training loop: collect trajectories, select groups, train, log.

    Attributes:
        trainer_config: configuration of this trainer.
        trajectory_builder, trainer_adapter: None until `bind_components`.
        run_config, curriculum_config, reward: from the section `finetuning`; None until `initialize`.
        loggers: the loggers of the run, set by the session. `run` calls their `begin` before its first epoch, then
            `metrics` and `samples`.
        save_checkpoint: function `(trainer, step, score=..., is_last=..., is_written=...)` that saves the run; None: no
            saving.
        begins: function `(name)`, set by the session, that returns True if all processes of the run begin what they may
            leave out, such as a validation; False once the run stops.
        is_stopping: set by a signal; `run` then returns after the present epoch.
        is_collecting: True while `run` waits for episodes, which a signal cuts off where several processes share them.
        is_ending_epoch: True from the job of an epoch on until the next `checkpoint`; a signal waits for that as it
            does for an update.
        needs_no_training: set by `run` if the run succeeded without training, as with a policy that reaches the target
            from the start; otherwise a run that trained nothing has failed.
        failure: set by `run` to an error that it returns as a FAILED status; the session raises the error, so that the
            run has its message and exit code.
    """

    def __init__(self, trainer_config: TrainerConfig, **kwargs: Any) -> None:
        self.trainer_config = trainer_config
        self.trajectory_builder: TrajectoryBuilder = None  # type: ignore[assignment]  # until bind_components
        self.trainer_adapter: TrainerAdapter = None  # type: ignore[assignment]
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # until initialize
        self.curriculum_config: CurriculumLearningConfig | None = None
        self.reward: RewardFunctionConfig | None = None
        self.loggers = Loggers()
        self.save_checkpoint: Callable[..., Awaitable[None]] | None = None
        self.begins: Callable[[str], Awaitable[bool]] = _always
        self.is_stopping = self.is_collecting = self.is_ending_epoch = False
        self.needs_no_training = False
        self.failure: BaseException | None = None
        self._curriculum_state: dict[str, Any] | None = None

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        """Store the builder and the adapter; called before `initialize`."""
        self.trajectory_builder = trajectory_builder
        self.trainer_adapter = trainer_adapter

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Store the run's configuration, and initialise the builder and the adapter.

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
        """Collect trajectories and submit them as a job; None if there was nothing to submit. Epochs count from 0."""

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Run all epochs, and return the last status of each job."""

    @abstractmethod
    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """Return the metrics of one run."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Release the resources of the run; called once, also after a failure."""

    @abstractmethod
    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Record the metrics of an epoch."""

    async def checkpoint(
        self, step: int, *, score: float | None = None, is_last: bool = False, is_written: bool = True
    ) -> None:
        """Save the run if a checkpoint is due; called by `run` between epochs, with no job open and the logs written.

        Args:
            step: a growing number, such as that of the finished epochs, which names the checkpoint.
            score: the validation reward of the present policy, the best of which is kept.
            is_last: True at the end of the run.
            is_written: False before a validation of the present policy, which is followed by another call: the run is
                then saved only if a signal stops it meanwhile.
        """
        if self.save_checkpoint is not None:
            await self.save_checkpoint(self, step, score=score, is_last=is_last, is_written=is_written)
        self.is_ending_epoch = False

    def state(self) -> dict[str, Any]:
        """Return the state, for JSON, on which the next epochs depend; saved with every checkpoint."""
        return {}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`; called after `initialize` and before `run`."""
        _check_empty(self, state)

    async def validate_if_due(self, epoch: int, num_epochs: int) -> dict[str, Any] | None:
        """Run `run_validation_evaluation` if `eval.validation` has one due after so many epochs; else return None."""
        validation = None if self.trajectory_builder is None else self.trajectory_builder.validation
        if validation is None or not validation.is_due(epoch, num_epochs):
            return None
        return await self.run_validation_evaluation(epoch, f"validation_{epoch:05d}")

    def collection_state(self) -> dict[str, Any]:
        """Return the state, for JSON, on which the next collection to be trained depends; saved with every checkpoint.

        `builder` is the state of the builder, and `num_rollouts` the number of collections so far. A trainer that
        collects ahead returns what they were before the collections that no job has trained yet, which a resumed run
        repeats.
        """
        evaluation = self.trajectory_builder.evaluation
        return {
            "builder": self.trajectory_builder.state(),
            "num_rollouts": 0 if evaluation is None else evaluation.num_rollouts,
        }

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Run `run_eval` of the builder, on the validation stream; return mean, minimum and maximum reward, and scores.

        Rewards are those of `compute_reward`; without a usable one all three are None. `num_failed` episodes failed
        and have none; `first_error` is the first error. The scores are those of `evaluation_scores`, by their names.

        Raises:
            RuntimeError: no components are bound.
        """
        if self.trajectory_builder is None:
            raise RuntimeError(f"{type(self).__name__} has no components: call bind_components first")
        with _validating():
            output = await self.trajectory_builder.run_eval()
        validation, evaluation = self.trajectory_builder.validation, self.trajectory_builder.evaluation
        name = None if self.reward is None else self.reward.name
        if validation is not None:  # the validation's configuration may name another reward
            evaluation = validation.evaluation
        results, inputs = dict(output.evaluation_results), output.eval_input.eval_input_items
        names = [name if evaluation is None else evaluation.reward_of(item) for item in inputs]
        items = [results[each].eval_output_items[place] for place, each in enumerate(names) if each in results]
        priced: list[float | None] = [
            None if item.error is not None else await self.trajectory_builder.compute_reward(item) for item in items
        ]
        rewards = [reward for reward in priced if reward is not None]
        replaced = sum(item.score is None and reward is not None for item, reward in zip(items, priced, strict=True))
        scored = zip(inputs, priced, (item.named_scores for item in items), strict=False)
        return {
            "epoch": epoch,
            "dataset_type": "validation",
            "avg_reward": sum(rewards) / len(rewards) if rewards else None,
            "min_reward": min(rewards, default=None),
            "max_reward": max(rewards, default=None),
            "num_examples": len(rewards),
            "num_failed": output.num_failed,
            "num_unscorable": output.num_unscorable - replaced,
            "first_error": output.first_error,
            **({} if evaluation is None else evaluation.scores([ScoredEpisode(*each) for each in scored])),
        }

    @property
    def has_curriculum(self) -> bool:
        """True if groups of the run, or of one of its tasks, are selected; False before `initialize`."""
        of_tasks = () if self.run_config is None else self.run_config.per_task.values()
        configs = (self.curriculum_config, *(task.curriculum_learning for task in of_tasks))
        return any(config is not None and config.enabled for config in configs)

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """Select the groups that an epoch trains by `finetuning.curriculum_learning`; return all if it is not enabled.

        The groups of each task of `finetuning.per_task` are selected by themselves.

        Raises:
            RuntimeError: called before `initialize`.
        """
        if self.run_config is None or self.curriculum_config is None or self._curriculum_state is None:
            raise RuntimeError(f"{type(self).__name__} is not initialised: call initialize first")
        if not self.has_curriculum:
            return trajectory_collection
        own = {name: task.curriculum_learning for name, task in self.run_config.per_task.items()}
        groups, self._curriculum_state = choose_groups_per_task(
            trajectory_collection.trajectories,
            {None: self.curriculum_config} | {name: config for name, config in own.items() if config is not None},
            self._curriculum_state,
            epoch=epoch,
            seed=self.run_config.seed,
            rewards=self.trainer_adapter.group_rewards(trajectory_collection),
        )
        return trajectory_collection.model_copy(update={"trajectories": groups})

    def get_curriculum_state(self) -> dict[str, Any]:
        """Return a copy of the curriculum's state (`jaxft.harness.curriculum.State`), for JSON, and its `config`.

        It is empty before `initialize`.
        """
        if self._curriculum_state is None or self.curriculum_config is None:
            return {}
        state = copy.deepcopy(self._curriculum_state) | {"config": self.curriculum_config.model_dump()}
        return {name: sorted(value) if isinstance(value, set) else value for name, value in state.items()}

    def restore_curriculum_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `get_curriculum_state`, of this trainer or an earlier one."""
        self._curriculum_state = copy.deepcopy(state) if state else None


def _check_empty(part: object, state: dict[str, Any]) -> None:
    if state:
        raise NotImplementedError(
            f"{type(part).__name__} saves a state, but does not restore it: override restore_state"
        )
