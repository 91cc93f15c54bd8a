"""Configuration of the shipped components. Nothing here imports jax."""

from typing import Literal

from pydantic import Field, model_validator

from jaxft.harness.config_types import ConfigModel, LLMRef, PathOrName, config_error
from jaxft.harness.registry import LLMConfig, TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from jaxft.models.config import LoraSpec
from jaxft.training.config import LossConfig, OptimizerConfig


class MeshConfig(ConfigModel):
    """The axes of a device mesh.

    The sizes multiply to the number of devices. One of them may be -1, which stands for all devices that are left.
    """

    data: int = Field(
        default=-1,
        description="Devices on the axis 'data', which splits rows and copies parameters; -1: all that are left.",
    )
    fsdp: int = Field(
        default=1,
        description="Devices on the axis 'fsdp', which splits rows, parameters and optimiser state; parameters are "
        "gathered layer by layer. -1: all that are left.",
    )
    tensor: int = Field(
        default=1,
        description="Devices on the axis 'tensor', which splits attention heads and feed-forward width and copies "
        "rows; -1: all that are left.",
    )
    strict: bool = Field(
        default=False,
        description="true: a parameter whose shape does not divide over its axis is an error. false: every device "
        "holds the whole parameter, and a warning names it.",
    )


class LoraConfig(ConfigModel):
    """Low-rank adapters (arXiv 2106.09685) beside the kernels of a frozen model."""

    rank: int = Field(default=8, ge=1, description="Rank of each adapter.")
    alpha: float = Field(
        default=16.0, gt=0.0, allow_inf_nan=False, description="An adapter's output is multiplied by alpha / rank."
    )
    targets: tuple[str, ...] = Field(
        default=("*_proj",),
        description="Projections that get an adapter, by name or path: q_proj, self_attn/*, mlp/up_proj.",
    )
    use_rslora: bool = Field(
        default=False,
        description="true: an adapter's output is multiplied by alpha / sqrt(rank) instead (arXiv 2312.03732).",
    )
    path: PathOrName | None = Field(
        default=None,
        description="Folder or hub id of adapters in PEFT's format to start from, whose rank, alpha, targets and "
        "use_rslora replace those above; null: new adapters, which change nothing before the first update.",
    )

    @model_validator(mode="after")
    def _has_targets(self) -> "LoraConfig":
        try:
            self.lora()
        except ValueError as error:
            raise config_error(f"{error}") from None
        return self

    def lora(self) -> LoraSpec:
        """Return the settings that the model needs to know."""
        return LoraSpec(self.rank, self.alpha, self.targets, self.use_rslora)


class LocalPolicyConfig(LLMConfig, name="local_policy"):
    """A model in this process: a Hugging Face checkpoint, or random weights in the shape of a preset."""

    sharding_table = "jaxft.shipped.local_policy:sharding_table"

    path: PathOrName | None = Field(
        default=None, description="Folder or hub id of a checkpoint; null: random weights in the shape of preset."
    )
    preset: str | None = Field(
        default=None,
        description="Name of the shape of a model with random weights, such as qwen3-1m, where path is null; null: the "
        "model is the checkpoint of path.",
    )
    tokenizer: PathOrName | None = Field(
        default=None,
        description="Folder or hub id of a tokenizer; null: that of the checkpoint or, without one, jaxft's own, "
        "which has a token per byte.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type of the parameters.")
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Type of matrix products and activations; parameters, gradients and optimizer state keep dtype. "
        "null: that of dtype.",
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="dots",
        description="What the backward pass computes again to save memory. none: nothing. dots: everything but "
        "products with weights. full: whole layers.",
    )
    mesh: MeshConfig | None = Field(
        default=None, description="Mesh of devices that share the model, rows and requests; null: the first device."
    )
    lora: LoraConfig | None = Field(
        default=None, description="Low-rank adapters, which alone are trained; null: all parameters are trained."
    )
    max_context_tokens: int = Field(
        default=512, ge=2, description="Tokens of the longest conversation, answers included."
    )
    slots: int = Field(default=64, ge=1, description="Requests that are decoded at the same time.")
    prefix_cache_rows: int | None = Field(
        default=None,
        ge=8,
        description="Prompts whose keys and values are kept for other generations and next turns. Each takes the "
        "memory of max_context_tokens tokens. null: as many as slots, and at least 8.",
    )
    long_prompts: Literal["fail", "drop", "truncate_left"] = Field(
        default="fail",
        description="What happens to a prompt that leaves no room in max_context_tokens for an answer. fail: the call "
        "raises an error, and an episode that does not catch it has failed. drop: the same, but in training the "
        "episode counts as dropped (dropped_episodes) and not as failed. truncate_left: the prompt loses its first "
        "tokens, so that it leaves room for max_tokens or for half of the context, whichever is less; what remains is "
        "what is trained (truncated_prompts counts such calls).",
    )

    @model_validator(mode="after")
    def _has_a_model(self) -> "LocalPolicyConfig":
        if self.path is None and self.preset is None:
            raise config_error("needs 'path' (a checkpoint) or 'preset' (the shape of a model of random weights)")
        return self


class LocalTrainerAdapterConfig(TrainerAdapterConfig, name="local_trainer_adapter"):
    """Trains a local_policy in this process."""

    llm: LLMRef = Field(description="Policy to train: an entry of llms of type local_policy.")
    loss: LossConfig = Field(default=LossConfig(), description="Loss, its baseline, and its penalties.")
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(), description="Optimizer, learning-rate schedule and gradient clipping."
    )
    microbatch_tokens: int = Field(
        default=8192, ge=1, description="Largest number of tokens in one forward and backward pass, padding included."
    )
    packing: bool | None = Field(
        default=None,
        description="true: several short sequences share a row. false: each sequence has a row, and rows of similar "
        "length share a microbatch. null: false where the backend has fused attention, which takes a row as one "
        "sequence; true elsewhere.",
    )
    num_minibatches: int = Field(
        default=1, ge=1, description="Optimizer steps in one pass over the trajectories of a job."
    )
    num_iterations: int = Field(default=1, ge=1, description="Passes over the trajectories of a job.")
    max_stale_fraction: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="Largest fraction of a job's trajectories that another version of the policy may have sampled; a "
        "job with more is refused.",
    )
    max_logprob_diff: float = Field(
        default=0.1,
        gt=0.0,
        description="Nats. A sequence disagrees with the policy when its recorded log-probabilities differ by more "
        "than this on average.",
    )
    max_disagreeing_fraction: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="Largest fraction of the sequences of an update that may disagree (max_logprob_diff); an update "
        "with more is refused.",
    )

    @model_validator(mode="after")
    def _reinforce_updates_once(self) -> "LocalTrainerAdapterConfig":
        if self.loss.name == "reinforce" and self.num_minibatches * self.num_iterations > 1:
            raise config_error("loss 'reinforce' has no ratio: it allows num_minibatches 1 and num_iterations 1 only")
        return self


class GRPOTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="grpo_trajectory_builder"):
    """Groups of episodes, one group per example."""

    num_generations: int = Field(
        default=8, ge=1, description="Episodes of each example: the group whose rewards are compared."
    )


class EarlyStopConfig(ConfigModel):
    """When a run ends before its last epoch, by its mean reward.

    That is the validation reward if there is validation, and the training reward otherwise.
    """

    target_reward: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Mean reward at which the run ends: that of validation if there is validation, else that of "
        "training. null: no reward ends it.",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="Number of mean rewards in a row without a gain after which the run ends; null: it goes on.",
    )
    min_gain: float = Field(
        default=0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="A mean reward is a gain when it is above the best one so far by more than this.",
    )


class LoggedTrainerConfig(TrainerConfig):
    """Settings that both shipped trainers have."""

    max_failed_fraction: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="Largest fraction of a collection's episodes that may fail; with more, the collection fails.",
    )
    max_bad_updates: int = Field(
        default=3, ge=1, description="Number of non-finite updates in a row after which the run ends with an error."
    )


class GRPOTrainerConfig(LoggedTrainerConfig, name="grpo_trainer"):
    """One collection and one training job per epoch."""

    examples_per_update: int | None = Field(
        default=None,
        ge=1,
        description="Examples of one epoch. Each pass over the dataset has an order of its own. null: all examples.",
    )
    early_stop: EarlyStopConfig = Field(default=EarlyStopConfig(), description="When the run ends before num_epochs.")
    show_episodes_every: int = Field(
        default=10, ge=0, description="Epochs between two sample episodes on the console; 0: none is shown."
    )
    save_episodes: Literal["shown", "all"] = Field(
        default="shown",
        description="Episodes that trajectories/samples.jsonl keeps. shown: those on the console. all: every episode "
        "of every epoch, failed ones included.",
    )


class DPOTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="dpo_trajectory_builder"):
    """Pairs of the candidates that the workflow gave to `jaxft.episode().record_candidates`."""

    num_generations: int = Field(default=1, ge=1, description="Episodes of each example.")
    exhaustive_pairs: bool = Field(
        default=True,
        description="true: every two candidates of a decision make a pair. false: only the best and the worst do.",
    )
    min_score_diff: float = Field(
        default=0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="Least difference between the scores of a pair; equal scores never make a pair.",
    )
    max_pairs_per_turn: int | None = Field(
        default=None,
        ge=1,
        description="Largest number of pairs of one decision, those with the largest difference; null: all.",
    )
    reward_from_score_diff: bool = Field(
        default=True,
        description="Reward of a pair. true: the difference of its scores. false: the score of the chosen answer.",
    )
    require_multiple_candidates: bool = Field(
        default=True,
        description="true: only candidates of one decision are compared. false: so are those of other decisions of "
        "the same example that had the same prompt.",
    )


class DPOTrainerConfig(LoggedTrainerConfig, name="dpo_trainer"):
    """Some collections of episodes, then `finetuning.num_epochs` training jobs on all their pairs."""

    num_runs: int = Field(default=1, ge=1, description="Collections of episodes before training.")
    deduplicate_pairs: bool = Field(
        default=True, description="true: a pair that was collected twice is trained once. false: it is trained twice."
    )
    max_pairs: int | None = Field(
        default=None, ge=1, description="Largest number of pairs to train, those with the largest reward; null: all."
    )
    continue_on_collection_error: bool = Field(
        default=False, description="true: a collection that fails is left out. false: it ends the run."
    )
