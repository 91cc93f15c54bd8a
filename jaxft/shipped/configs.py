"""Configuration of the shipped components: what a person types, and nothing that imports jax."""

from typing import Literal

from pydantic import Field, model_validator

from jaxft.harness.config_types import ConfigModel, LLMRef, PathOrName, config_error
from jaxft.harness.registry import LLMConfig, TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from jaxft.models.config import LoraSpec
from jaxft.training.config import LossConfig, OptimizerConfig


class MeshConfig(ConfigModel):
    """Devices as a mesh. The sizes multiply to the number of devices; one of them may be -1: what is left."""

    data: int = Field(default=-1, description="Parts of the rows; each has all parameters, but for fsdp and tensor.")
    fsdp: int = Field(
        default=1, description="Parts of the rows, and of parameters and optimiser state, gathered layer by layer."
    )
    tensor: int = Field(default=1, description="Parts of the heads and of the feed-forward's width; for all rows.")
    strict: bool = Field(
        default=False,
        description="Whether a parameter that does not divide is an error; else every device holds the whole of it, "
        "and a warning names it.",
    )


class LoraConfig(ConfigModel):
    """Low-rank adapters (arXiv 2106.09685) beside the kernels of a model that itself stays as it is."""

    rank: int = Field(default=8, ge=1, description="Of each adapter.")
    alpha: float = Field(default=16.0, gt=0.0, allow_inf_nan=False, description="Adapters count alpha / rank times.")
    targets: tuple[str, ...] = Field(
        default=("*_proj",), description="Projections that have one, by name or path: q_proj, self_attn/*, mlp/up_proj."
    )
    use_rslora: bool = Field(default=False, description="alpha / sqrt(rank) instead (arXiv 2312.03732).")
    path: PathOrName | None = Field(
        default=None,
        description="A folder of adapters in PEFT's format to go on from; its rank, alpha and targets count.",
    )

    @model_validator(mode="after")
    def _has_targets(self) -> "LoraConfig":
        try:
            self.lora()
        except ValueError as error:
            raise config_error(f"{error}") from None
        return self

    def lora(self) -> LoraSpec:
        """What the model has to know of them."""
        return LoraSpec(self.rank, self.alpha, self.targets, self.use_rslora)


class LocalPolicyConfig(LLMConfig, name="local_policy"):
    """A Hugging Face checkpoint, or a model of random weights by the name of its shape."""

    sharding_table = "jaxft.shipped.local_policy:sharding_table"

    path: PathOrName | None = Field(
        default=None, description="Folder or hub id of a checkpoint; null for random weights."
    )
    preset: str | None = Field(default=None, description="Shape of a model of random weights, such as qwen3-1m.")
    tokenizer: PathOrName | None = Field(
        default=None, description="Folder or hub id of a tokenizer; null for the checkpoint's, or the embedded one."
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Of the parameters.")
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Of matrix products and activations, with parameters, gradients and optimiser state left in dtype; "
        "null for dtype.",
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="dots",
        description="What the backward pass computes again to save memory: nothing, all but products with weights, or "
        "whole layers.",
    )
    mesh: MeshConfig | None = Field(
        default=None, description="Devices that share model, rows and requests; null for the first device alone."
    )
    lora: LoraConfig | None = Field(
        default=None, description="Adapters, which alone are trained; null: all parameters are."
    )
    max_context_tokens: int = Field(default=512, ge=2, description="Tokens of a conversation, answers included.")
    slots: int = Field(default=64, ge=1, description="Requests that are decoded together.")
    prefix_cache_rows: int | None = Field(
        default=None,
        ge=8,
        description="Prompts whose keys and values are kept for their other generations and next turns, each with room "
        "for max_context_tokens; null for as many as slots.",
    )
    long_prompts: Literal["fail", "drop", "truncate_left"] = Field(
        default="fail",
        description="The treatment of a prompt that leaves no room in max_context_tokens for an answer. fail: the call "
        "raises an error, and an agent that does not catch it has failed. drop: likewise, but a training episode that "
        "ends so counts as dropped (dropped_episodes) and not as failed. truncate_left: the first tokens are left out, "
        "and what is left, which is trained as it was fed, leaves room for max_tokens, or for half of the context "
        "where that is less (truncated_prompts counts the calls whose prompt lacks its beginning).",
    )

    @model_validator(mode="after")
    def _has_a_model(self) -> "LocalPolicyConfig":
        if self.path is None and self.preset is None:
            raise config_error("needs 'path' (a checkpoint) or 'preset' (the shape of a model of random weights)")
        return self


class LocalTrainerAdapterConfig(TrainerAdapterConfig, name="local_trainer_adapter"):
    """Updates the policy in place."""

    llm: LLMRef = Field(description="The policy to train: an entry of llms of type local_policy.")
    loss: LossConfig = Field(default=LossConfig(), description="What is minimised.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="How.")
    microbatch_tokens: int = Field(default=8192, ge=1, description="Tokens of one forward and backward pass, at most.")
    packing: bool | None = Field(
        default=None,
        description="Whether several short sequences share a row; null: unless the backend has fused attention, which "
        "takes a row as one sequence. Rows that are not packed are put together by length.",
    )
    num_minibatches: int = Field(default=1, ge=1, description="Optimiser steps of one pass over a job's trajectories.")
    num_iterations: int = Field(default=1, ge=1, description="Passes over a job's trajectories.")
    max_stale_fraction: float = Field(
        default=0.1, ge=0.0, le=1.0, description="Trajectories that another version of the policy may have sampled."
    )
    max_logprob_diff: float = Field(
        default=0.1, gt=0.0, description="Nats, on average over a sequence: further from the policy's, it is foreign."
    )
    max_disagreeing_fraction: float = Field(
        default=0.1, ge=0.0, le=1.0, description="Sequences that may be foreign; with more the update is refused."
    )

    @model_validator(mode="after")
    def _reinforce_updates_once(self) -> "LocalTrainerAdapterConfig":
        if self.loss.name == "reinforce" and self.num_minibatches * self.num_iterations > 1:
            raise config_error("loss 'reinforce' has no ratio: it allows num_minibatches 1 and num_iterations 1 only")
        return self


class GRPOTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="grpo_trajectory_builder"):
    """Groups of episodes, one group per example."""

    num_generations: int = Field(default=8, ge=1, description="Episodes of each example, compared with each other.")


class EarlyStopConfig(ConfigModel):
    """What ends a run before its last epoch: of the validation reward when there is validation, else of the training
    reward."""

    target_reward: float | None = Field(
        default=None, allow_inf_nan=False, description="The run ends when the mean reward reaches it."
    )
    patience: int | None = Field(
        default=None, ge=1, description="The run ends after so many rewards in a row without a gain."
    )
    min_gain: float = Field(default=0.0, ge=0.0, allow_inf_nan=False, description="What counts as a gain is more.")


class GRPOTrainerConfig(TrainerConfig, name="grpo_trainer"):
    """One collection and one job per epoch."""

    examples_per_update: int | None = Field(
        default=None, ge=1, description="Examples of one epoch, drawn in an order of their own each pass; null: all."
    )
    early_stop: EarlyStopConfig = Field(default=EarlyStopConfig(), description="What ends the run before its time.")
    show_episodes_every: int = Field(
        default=10, ge=0, description="Epochs between sample episodes shown; 0 shows none."
    )
    save_episodes: Literal["shown", "all"] = Field(
        default="shown",
        description="Which episodes trajectories/samples.jsonl keeps: those that are shown, or all of every epoch, "
        "failed ones included.",
    )
    max_failed_fraction: float = Field(
        default=0.5, gt=0.0, le=1.0, description="The run stops when more of an epoch's episodes than this fail."
    )
    max_bad_updates: int = Field(
        default=3, ge=1, description="The run stops after so many non-finite updates in a row."
    )


class DPOTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="dpo_trajectory_builder"):
    """Pairs of candidates, of what the workflow gave to `jaxft.episode().record_candidates`."""

    num_generations: int = Field(default=1, ge=1, description="Episodes of each example.")
    exhaustive_pairs: bool = Field(
        default=True, description="All pairs of a decision's candidates; false: the best with the worst only."
    )
    min_score_diff: float = Field(
        default=0.0, ge=0.0, allow_inf_nan=False, description="Candidates whose scores differ by less are no pair."
    )
    max_pairs_per_turn: int | None = Field(
        default=None, ge=1, description="Pairs of one decision, those that differ most; null: all."
    )
    reward_from_score_diff: bool = Field(
        default=True, description="A pair's reward is the difference of its scores; false: the better score."
    )
    require_multiple_candidates: bool = Field(
        default=True,
        description="A decision with one candidate makes no pair; false: it is compared with the other decisions of "
        "its example that had the same prompt.",
    )


class DPOTrainerConfig(TrainerConfig, name="dpo_trainer"):
    """Some collections, then `finetuning.num_epochs` jobs on all their pairs."""

    num_runs: int = Field(default=1, ge=1, description="Collections of episodes before training.")
    deduplicate_pairs: bool = Field(default=True, description="A pair that was collected twice is trained once.")
    max_pairs: int | None = Field(
        default=None, ge=1, description="Pairs trained, those of the largest reward; null: all."
    )
    continue_on_collection_error: bool = Field(
        default=False, description="A collection that fails is left out; false: it ends the run."
    )
    max_failed_fraction: float = Field(
        default=0.5, gt=0.0, le=1.0, description="A collection fails when more of its episodes than this do."
    )
    max_bad_updates: int = Field(
        default=3, ge=1, description="The run stops after so many non-finite updates in a row."
    )
