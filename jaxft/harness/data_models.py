"""Data models of the contracts: jobs, episodes, trajectories, evaluations, and the section `finetuning`.

Names and fields are the toolkit's; fields that jaxft adds are marked. A trajectory without a usable reward has
`scorable=False` and reward 0.0: JSON has no NaN, and None would break readers of the toolkit's `reward: float`.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, field_validator, model_validator

from jaxft.harness.config_types import (
    ConfigModel,
    EvaluatorRef,
    LLMRef,
    OutputPath,
    RewardFunctionConfig,
    Seed,
    TrainerAdapterRef,
    TrainerRef,
    TrajectoryBuilderRef,
    config_error,
)
from jaxft.harness.registry import LoggerConfig, chosen_by_type
from jaxft.harness.steps import IntermediateStep
from jaxft.rollout.recorder import WORKFLOW
from jaxft.rollout.sequences import TokenSequence


class DataModel(BaseModel):
    """Base of the models below; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class TrainingJobRef(DataModel):
    """Name of a submitted job; each epoch's job has its own `run_id`."""

    run_id: str
    backend: str
    metadata: dict[str, Any] | None = None


class TrainingStatusEnum(StrEnum):
    """State of a job."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"


class TrainingJobStatus(DataModel):
    """State of a job; `progress` is in percent."""

    run_id: str
    backend: str
    status: TrainingStatusEnum
    progress: float | None = Field(default=None, ge=0.0, le=100.0)
    message: str | None = None
    metadata: dict[str, Any] | None = None


class EpisodeItemRole(StrEnum):
    """Speaker of an episode item."""

    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    FUNCTION = "function"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    OTHER = "other"


class EpisodeItem(DataModel):
    """One message of an episode; an assistant's message must have `logprobs`."""

    role: EpisodeItemRole
    content: str
    logprobs: Any | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _assistant_has_logprobs(self) -> "EpisodeItem":
        if self.role is EpisodeItemRole.ASSISTANT and self.logprobs is None:
            raise ValueError("an assistant's message needs logprobs")
        return self


class OpenAIMessage(DataModel):
    """One chat message."""

    role: str
    content: str


class DPOItem(DataModel):
    """A preference pair: two responses to one prompt."""

    prompt: list[OpenAIMessage] | str
    chosen_response: str
    rejected_response: str


EpisodeIdentity = tuple[str | None, int | None, int | None]
"""Example id, generation and rollout index of an episode, which no other of the run has."""


class Trajectory(DataModel):
    """An episode and its reward.

    `sequences` are the token ids recorded while sampling the calls that are trained; None when nothing was recorded, as
    for texts of another source. A `reward` of None sets `scorable=False`. A name in `named_rewards` whose value is None
    does not judge the episode. `task` is the entry of `finetuning.per_task` of its row; None without any.
    `rollout_index` is the number of the collection that began the episode: a carried one may end beside another of the
    same example and generation.
    """

    episode: list[EpisodeItem] | list[DPOItem]
    reward: float = Field(allow_inf_nan=False)
    shaped_rewards: list[float] | None = None
    metadata: dict[str, Any] | None = None
    # jaxft's own
    scorable: bool = True
    named_rewards: dict[str, float | None] | None = None
    example_id: str | None = None
    generation: int | None = None
    rollout_index: int | None = None
    task: str | None = None
    sequences: list[TokenSequence] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_reward(cls, given: Any) -> Any:
        if isinstance(given, dict) and "reward" in given and given["reward"] is None:
            return {**given, "reward": 0.0, "scorable": False}
        return given

    @property
    def identity(self) -> EpisodeIdentity:
        """The episode among those of its run."""
        return self.example_id, self.generation, self.rollout_index


class TrajectoryCollection(DataModel):
    """All trajectories of one run, one list per example.

    Attributes:
        metrics: counts of episodes and calls; equal in equal runs.
        timings: durations in seconds.
        failures: reports of the failed episodes, which have no trajectory.
        kept_episodes: `Trajectory.identity` of each episode that the run keeps; the job reports the advantages and
            entropies of their tokens.
    """

    trajectories: list[list[Trajectory]]
    run_id: str
    # jaxft's own
    kept_episodes: list[EpisodeIdentity] = []
    metrics: dict[str, float] = {}
    timings: dict[str, float] = {}
    failures: list[str] = []


class EvalInputItem(DataModel):
    """One example: the agent's input, the expected output and, after an episode, its output and its steps.

    Steps are left out of files: an evaluation would be mostly log-probabilities.
    """

    id: str
    input_obj: Any = None
    expected_output_obj: Any = None
    output_obj: Any = None
    expected_trajectory: list[IntermediateStep] = Field(default=[], exclude=True, repr=False)
    trajectory: list[IntermediateStep] = Field(default=[], exclude=True, repr=False)
    full_dataset_entry: dict[str, Any]


class EvalInput(DataModel):
    """A list of examples."""

    eval_input_items: list[EvalInputItem]


class EvalOutputItem(DataModel):
    """One evaluator's score of one episode; None when the episode failed or the score is not a finite number.

    An evaluator may give any `id`; that of the example takes its place. The run sets `evaluator`, the name of its own.
    """

    id: Any
    score: float | None = Field(allow_inf_nan=False)
    reasoning: Any = None
    error: str | None = None
    # jaxft's own
    generation: int = 0
    named_scores: dict[str, float | None] | None = None
    evaluator: str | None = Field(default=None, exclude=True, repr=False)


class EvalOutput(DataModel):
    """One evaluator's scores, and the average of those that are not None; None if there is none."""

    average_score: float | None
    eval_output_items: list[EvalOutputItem]


class EvaluationRunOutput(DataModel):
    """Results of an evaluation, in the order of (example, generation).

    Attributes:
        eval_input: one item per episode, with its output.
        evaluation_results: pairs of an evaluator's name and its scores.
        average_reward: mean over episodes with a usable reward; None if there is none, or no reward function.
        num_episodes: number of all episodes.
        num_failed: number of episodes in which the workflow or an evaluator raised.
        num_unscorable: number of episodes without an error whose reward was None, NaN or infinite.
        first_error: the first failure: example, error and traceback.
        rewards: reward of each episode; None for one without a usable reward. Empty without a reward function.
        scores: scores by name, as `evaluation_scores` returns them: pass@k, named rewards, breakdowns.
    """

    workflow_interrupted: bool = False
    eval_input: EvalInput
    evaluation_results: list[tuple[str, EvalOutput]]
    # jaxft's own
    average_reward: float | None = None
    num_episodes: int = 0
    num_failed: int = 0
    num_unscorable: int = 0
    first_error: str | None = None
    rewards: list[float | None] = []
    scores: dict[str, float] = {}


class CurriculumLearningConfig(ConfigModel):
    """Curriculum: selection of the groups that an epoch trains: those whose rewards differ, the easy ones first."""

    enabled: bool = False
    """Train selected groups only; false: train all groups."""
    initial_percentile: float = Field(default=0.3, gt=0.0, le=1.0)
    """Fraction of the groups that the first epochs train."""
    increment_percentile: float = Field(default=0.2, gt=0.0, le=1.0)
    """Fraction added by each expansion."""
    expansion_interval: int = Field(default=5, ge=1)
    """Epochs between two expansions."""
    min_reward_diff: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    """Minimum difference of the largest and smallest reward of a group, as the loss weighs them; groups below it are
    dropped."""
    sort_ascending: bool = False
    """Hard groups (low mean reward) first; false: easy first."""
    random_subsample: float | None = Field(default=None, gt=0.0, le=1.0)
    """Largest fraction of the groups, after min_reward_diff, that an epoch trains, drawn at random; null: no limit."""


class TaskConfig(ConfigModel):
    """A task of a run: rows of the dataset with an evaluator, a weight and a curriculum of their own."""

    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Share of the task in an epoch, beside other weights."""
    evaluator: EvaluatorRef | None = None
    """The evaluator whose score is the reward of its rows, and that scores no others; null: that of reward_function."""
    curriculum_learning: CurriculumLearningConfig | None = None
    """Curriculum in the place of that of the run; null: that of the run."""


class CheckpointConfig(ConfigModel):
    """Frequency of checkpoints, and number of checkpoints to keep beside the one of the best validation reward."""

    every: int | None = Field(default=1, ge=1)
    """Epochs between two checkpoints; one is also taken before the first epoch and after the last. null: no
    checkpoints, and the run cannot be resumed."""
    max_to_keep: int = Field(default=2, ge=1)
    """Number of the newest checkpoints to keep."""


class FinetuneRunConfig(DataModel):
    """Options of the command line of a run, which no file of the configuration holds."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    config_file: Path
    override: tuple[tuple[str, str], ...] = ()
    dataset: Path | None = None
    result_json_path: str | None = None
    validation_dataset: Path | None = None
    validation_interval: int | None = None
    validation_config_file: Path | None = None
    endpoint: str | None = None
    endpoint_timeout: float | None = None


class TensorBoardLoggerConfig(LoggerConfig, name="tensorboard", factory="jaxft.runs.tensorboard:tensorboard_logger"):
    """Metrics and timings in files that TensorBoard shows, in the folder `tensorboard` of the run directory."""


class WandbLoggerConfig(
    LoggerConfig, name="wandb", factory="jaxft.runs.weights_and_biases:wandb_logger", install="wandb"
):
    """Metrics, tables of sample episodes, configuration and artifacts in a run of Weights & Biases.

    All else is decided by the environment variables of W&B, such as WANDB_MODE, WANDB_ENTITY and WANDB_TAGS.
    """

    project: str | None = Field(default=None, min_length=1)
    """Project of the run; null: WANDB_PROJECT, or the default of W&B."""


def _check_name(value: Any) -> Any:
    return {"_type": value} if isinstance(value, str) else value


AnyLogger = Annotated[SerializeAsAny[LoggerConfig], chosen_by_type(LoggerConfig), BeforeValidator(_check_name)]
"""A logger; a name alone stands for a logger of that `_type` with its defaults."""


class FinetuneConfig(ConfigModel):
    """The section `finetuning`: the components of the run, its length, its seed and its directory."""

    enabled: bool = False
    """Allow `jaxft finetune` to train."""
    trainer: TrainerRef | None = None
    """An entry of trainers; null only if not enabled."""
    trajectory_builder: TrajectoryBuilderRef | None = None
    """An entry of trajectory_builders; null only if not enabled."""
    trainer_adapter: TrainerAdapterRef | None = None
    """An entry of trainer_adapters; null only if not enabled."""
    reward_function: RewardFunctionConfig | None = None
    """The evaluator whose score is the reward, except of tasks with one of their own; null only if not enabled."""
    num_epochs: int = Field(default=1, ge=1)
    """Number of epochs, each a collection of trajectories with its updates."""
    seed: Seed = 0
    """Seed of sampling, data order and new weights."""
    output_dir: OutputPath = Path("runs/finetuning")
    """Run directory, relative to the working directory. {seed} and other fields are replaced by their values, as in
    runs/{trainer_adapters.local.loss.name}/{seed}; {{ and }} stand for braces."""
    target_functions: tuple[str, ...] = (WORKFLOW,)
    """Functions (jaxft.named_function) whose model calls are trained, by name; <workflow>: all calls."""
    target_model: LLMRef | None = None
    """The language model whose calls are trained: an entry of llms; null: all models."""
    curriculum_learning: CurriculumLearningConfig = CurriculumLearningConfig()
    """Selection of the groups that an epoch trains."""
    task_key: str = Field(default="task_name", min_length=1)
    """Column of the dataset with the task of a row, which per_task and mixtures read."""
    per_task: dict[str, TaskConfig] = Field(default={})
    """Tasks, by the text in the column task_key, each with a weight (its share of an epoch), an evaluator and a
    curriculum_learning of its own; {}: one task."""
    checkpoints: CheckpointConfig = CheckpointConfig()
    """Schedule and number of the checkpoints."""
    loggers: tuple[AnyLogger, ...] = (TensorBoardLoggerConfig(),)
    """Loggers that get metrics, samples and artifacts of the run, as in [tensorboard, wandb] or, with settings,
    [{_type: wandb, project: agents}]; []: none. The run's own files are written in any case."""
    strict_compile: bool = False
    """Compile every program before the first epoch, and fail if a later epoch compiles another."""
    grace_seconds: float = Field(default=30.0, ge=0.0, allow_inf_nan=False)
    """Seconds that a running update may still take after SIGINT or SIGTERM."""

    # For trainers that read dataset and validation there, as the toolkit's do.
    run_configuration: FinetuneRunConfig | None = Field(default=None, exclude=True, repr=False)
    """Options of the command line, set by the run."""

    @field_validator("run_configuration")
    @classmethod
    def _is_set_by_the_run(cls, given: FinetuneRunConfig | None, info: Any) -> FinetuneRunConfig | None:
        if given is not None and info.context is not None:
            raise config_error("is set by the run: give its options on the command line, or set eval.validation")
        return given

    @field_validator("loggers")
    @classmethod
    def _are_different(cls, loggers: tuple[LoggerConfig, ...]) -> tuple[LoggerConfig, ...]:
        for index, logger in enumerate(loggers):
            if logger in loggers[:index]:
                raise config_error(f"'{logger.type_name}' is there twice with the same settings: remove one")
        return loggers

    @field_validator("target_functions")
    @classmethod
    def _names_something(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names or not all(names):
            raise config_error(f"must name at least one function, and no empty one; '{WORKFLOW}' is the whole workflow")
        return names

    @model_validator(mode="after")
    def _enabled_needs_its_parts(self) -> "FinetuneConfig":
        parts = ("trainer", "trajectory_builder", "trainer_adapter")
        missing = [name for name in parts if dict(self)[name] is None]
        if self.enabled and missing:
            raise config_error(f"enabled, but without {', '.join(missing)}")
        return self
