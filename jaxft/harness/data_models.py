"""What crosses the contracts: jobs, episodes, trajectories, rewards, evaluations. Names and fields are the toolkit's.

What jaxft adds stands in fields of its own, marked so. A trajectory without a usable reward has `scorable=False` and
reward 0.0: NaN has no word in JSON, and None would break readers that know the toolkit's `reward: float`.
"""

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jaxft.harness.config_types import (
    ConfigModel,
    EvaluatorRef,
    LLMRef,
    OutputPath,
    Seed,
    TrainerAdapterRef,
    TrainerRef,
    TrajectoryBuilderRef,
    config_error,
)
from jaxft.rollout.recorder import WORKFLOW
from jaxft.rollout.sequences import TokenSequence


class DataModel(BaseModel):
    """The base of the models below: fields are known, and JSON never gets a NaN."""

    model_config = ConfigDict(extra="forbid")


class TrainingJobRef(DataModel):
    """Names a submitted job; a job of each epoch has a `run_id` of its own."""

    run_id: str
    backend: str
    metadata: dict[str, Any] | None = None


class TrainingStatusEnum(StrEnum):
    """Where a job stands."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"


class TrainingJobStatus(DataModel):
    """Where a job stands; `progress` is in percent."""

    run_id: str
    backend: str
    status: TrainingStatusEnum
    progress: float | None = Field(default=None, ge=0.0, le=100.0)
    message: str | None = None
    metadata: dict[str, Any] | None = None


class EpisodeItemRole(StrEnum):
    """Who speaks."""

    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    FUNCTION = "function"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    OTHER = "other"


class EpisodeItem(DataModel):
    """One message of an episode. An assistant's must carry log-probabilities."""

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
    """A chat message."""

    role: str
    content: str


class DPOItem(DataModel):
    """A preference: two responses to one prompt."""

    prompt: list[OpenAIMessage] | str
    chosen_response: str
    rejected_response: str


class Trajectory(DataModel):
    """An episode and its reward.

    `sequences` are the token ids that were recorded while sampling, of the calls that training is aimed at; None when
    nothing was recorded, as for texts of another origin. A `reward` of None makes the trajectory not scorable.
    """

    episode: list[EpisodeItem] | list[DPOItem]
    reward: float = Field(allow_inf_nan=False)
    shaped_rewards: list[float] | None = None
    metadata: dict[str, Any] | None = None
    # jaxft's own
    scorable: bool = True
    named_rewards: dict[str, float] | None = None
    example_id: str | None = None
    generation: int | None = None
    sequences: list[TokenSequence] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_reward(cls, given: Any) -> Any:
        if isinstance(given, dict) and "reward" in given and given["reward"] is None:
            return {**given, "reward": 0.0, "scorable": False}
        return given


class TrajectoryCollection(DataModel):
    """All trajectories of one run, a list per example.

    Attributes:
        metrics: what was counted while collecting; equal for equal runs.
        timings: what the clock said, in seconds.
        failures: a report per episode that failed and so is not among the trajectories.
    """

    trajectories: list[list[Trajectory]]
    run_id: str
    # jaxft's own
    metrics: dict[str, float] = {}
    timings: dict[str, float] = {}
    failures: list[str] = []


class EvalInputItem(DataModel):
    """One example: what the agent gets, what is wanted of it and, afterwards, what it gave."""

    id: str
    input_obj: Any = None
    expected_output_obj: Any = None
    output_obj: Any = None
    full_dataset_entry: dict[str, Any]


class EvalInput(DataModel):
    """Examples."""

    eval_input_items: list[EvalInputItem]


class EvalOutputItem(DataModel):
    """One evaluator's verdict on one episode. `score` is None when it failed or gave nothing usable."""

    id: str
    score: float | None = Field(allow_inf_nan=False)
    reasoning: Any = None
    error: str | None = None
    # jaxft's own
    generation: int = 0
    named_scores: dict[str, float] | None = None


class EvalOutput(DataModel):
    """One evaluator's verdicts; the average is over the usable ones, None when there is none."""

    average_score: float | None
    eval_output_items: list[EvalOutputItem]


class EvaluationRunOutput(DataModel):
    """What an evaluation found, in the order of (example, generation).

    Attributes:
        eval_input: an item per episode, with its output.
        evaluation_results: verdicts by evaluator.
        average_reward: over episodes with a usable reward; None when there is none, or no reward function.
        num_episodes: all of them.
        num_failed: in which the workflow or an evaluator raised.
        num_unscorable: that ended well but whose reward was None, NaN or infinite.
        first_error: message of the first failure, with its example and its traceback.
    """

    workflow_interrupted: bool = False
    eval_input: EvalInput
    evaluation_results: list[tuple[str, EvalOutput]]
    # jaxft's own
    average_reward: float | None
    num_episodes: int
    num_failed: int
    num_unscorable: int
    first_error: str | None = None


class RewardFunctionConfig(ConfigModel):
    """The evaluator whose score is the reward."""

    name: EvaluatorRef = Field(description="An entry of eval.evaluators.")
    unusable: Literal["unscorable", "zero", "error"] = Field(
        default="unscorable",
        description="The treatment of an episode whose reward is None, NaN or infinite: 'unscorable' trains nothing of "
        "it and leaves it out of every baseline, 'zero' gives it the reward 0, 'error' ends the run.",
    )


class CurriculumLearningConfig(ConfigModel):
    """Which groups of an epoch are trained: those that tell something, the easy ones first."""

    enabled: bool = Field(default=False, description="Whether groups are chosen at all.")
    initial_percentile: float = Field(default=0.3, gt=0.0, le=1.0, description="Share of the groups at the start.")
    increment_percentile: float = Field(default=0.2, gt=0.0, le=1.0, description="Share added by each expansion.")
    expansion_interval: int = Field(default=5, ge=1, description="Epochs between expansions.")
    min_reward_diff: float = Field(
        default=0.1, ge=0.0, allow_inf_nan=False, description="Groups whose rewards differ by less are dropped."
    )
    sort_ascending: bool = Field(default=False, description="Hard examples (low mean reward) first, not easy ones.")
    random_subsample: float | None = Field(
        default=None, gt=0.0, le=1.0, description="Draw at most this share of the groups that tell something."
    )


class CheckpointConfig(ConfigModel):
    """When a run is saved, and what is kept."""

    every: int | None = Field(
        default=1,
        ge=1,
        description="Epochs between checkpoints; there is one before the first and after the last. "
        "null: none, and the run cannot be continued.",
    )
    max_to_keep: int = Field(default=2, ge=1, description="The newest so many checkpoints are kept.")
    keep_best: bool = Field(default=True, description="That of the best validation reward is kept, too.")
    when_unwritable: Literal["stop", "go_on"] = Field(
        default="stop",
        description="A checkpoint that cannot be written ends the run (stop), or is left out with a warning (go_on): "
        "the run then goes on without it and tries again when the next one is due.",
    )


class FinetuneRunConfig(ConfigModel):
    """What the command line of a run said."""

    config_file: Path
    override: tuple[tuple[str, str], ...] = ()
    overwrite: bool = False
    resume: bool = False
    dataset: Path | None = None
    result_json_path: str | None = None
    validation_dataset: Path | None = None
    validation_interval: int | None = None
    validation_config_file: Path | None = None
    strict_compile: bool = False


class FinetuneConfig(ConfigModel):
    """The section `finetuning`: which parts make up the run, and how long and where it goes."""

    enabled: bool = Field(default=False, description="Whether `jaxft finetune` may train.")
    trainer: TrainerRef | None = Field(default=None, description="An entry of trainers.")
    trajectory_builder: TrajectoryBuilderRef | None = Field(
        default=None, description="An entry of trajectory_builders."
    )
    trainer_adapter: TrainerAdapterRef | None = Field(default=None, description="An entry of trainer_adapters.")
    reward_function: RewardFunctionConfig | None = Field(default=None, description="Where rewards come from.")
    num_epochs: int = Field(default=1, ge=1, description="Passes over the dataset, each with its update(s).")
    seed: Seed = Field(default=0, description="The one seed of the run: sampling, order of data, weights.")
    output_dir: OutputPath = Field(
        default=Path("runs/finetuning"), description="The run directory, relative to the working directory."
    )
    target_functions: tuple[str, ...] = Field(
        default=(WORKFLOW,),
        description="Functions (jaxft.function) whose calls are trained; <workflow> stands for all calls.",
    )
    target_model: LLMRef | None = Field(
        default=None, description="An entry of llms: only its calls are trained; null: those of any."
    )
    curriculum_learning: CurriculumLearningConfig = Field(
        default=CurriculumLearningConfig(), description="Which examples take part in an epoch."
    )
    checkpoints: CheckpointConfig = Field(default=CheckpointConfig(), description="How the run is saved.")
    strict_compile: bool = Field(
        default=False,
        description="Everything is compiled before the first epoch, and a later one that compiles anything fails.",
    )
    grace_seconds: float = Field(
        default=30.0, ge=0.0, allow_inf_nan=False, description="How long an update may go on after SIGINT or SIGTERM."
    )

    @field_validator("target_functions")
    @classmethod
    def _names_something(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names or not all(names):
            raise config_error(f"must name at least one function, and no empty one; '{WORKFLOW}' is the whole workflow")
        return names

    @model_validator(mode="after")
    def _enabled_needs_its_parts(self) -> "FinetuneConfig":
        parts = ("trainer", "trajectory_builder", "trainer_adapter", "reward_function")
        missing = [name for name in parts if dict(self)[name] is None]
        if self.enabled and missing:
            raise config_error(f"enabled, but nothing is chosen for {', '.join(missing)}")
        return self
