"""Configuration of the loss and of the optimizer."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxft.core import LARGEST_FLOAT32
from jaxft.harness.config_types import ConfigModel, PathOrName, config_error

AdvantageName = Literal["group", "group_mean", "leave_one_out", "batch", "reinforce_pp", "gae"]
CorrectionName = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_geometric_mask"
]

OTHER_LOSSES = {"dpo": ("beta", "reference", "preference"), "sft": ("min_reward",)}
"""Losses that are no policy losses, and the fields that each reads."""

NOT_READ = {"cispo": ("clip_low",), "reinforce": ("clip_low", "clip_high")}
"""Fields of policy losses that some of them do not read. Fields of ppo are read by ppo alone."""

UNSCALED = ("group_mean", "leave_one_out", "reinforce_pp", "gae")
"""Estimators that do not divide by the spread of the rewards, which would divide beta, too."""


class ReferenceConfig(ConfigModel):
    """The policy that the KL is measured from: the starting parameters, another checkpoint, or a moving average."""

    path: PathOrName | None = Field(
        default=None, description="Checkpoint to load; null takes the parameters before the first update."
    )
    update_every: int | None = Field(
        default=None, ge=1, description="Jobs between updates of the reference; null never updates it."
    )
    mixing: float = Field(default=1.0, gt=0.0, le=1.0, description="Fraction of the policy in an updated reference.")


class CorrectionConfig(ConfigModel):
    """Importance weights for a sampler whose probabilities are not the trainer's."""

    name: CorrectionName = Field(description="Truncate or mask the ratio, per token or per sequence.")
    low: float = Field(default=0.5, gt=0.0, le=1.0, description="Smallest ratio that a mask keeps.")
    high: float = Field(
        default=2.0, ge=1.0, description="Largest weight after truncation, or largest ratio that a mask keeps."
    )


class PreferenceConfig(ConfigModel):
    """How dpo compares the two answers of a pair."""

    kind: Literal["sigmoid", "ipo"] = Field(
        default="sigmoid", description="Loss of a pair's margin: sigmoid (DPO) or squared distance to a target (IPO)."
    )
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5, description="Fraction of pairs that may be swapped.")
    length_normalized: bool = Field(
        default=False, description="Compare mean log-probabilities of the answers; false compares their sums."
    )
    sft_coef: float = Field(
        default=0.0, ge=0.0, description="Weight of a supervised loss on the chosen answers; keeps them likely."
    )


class LossConfig(ConfigModel):
    """The loss: the name of a published one, and the fields that change it."""

    name: Literal["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo", "ppo", "reinforce", "dpo", "sft"] = Field(
        default="grpo", description="Published loss whose settings the other fields override."
    )
    advantages: AdvantageName | None = Field(
        default=None, description="Advantage estimator; null: group_mean for dr_grpo, gae for ppo, else group."
    )
    aggregation: Literal["seq_mean_token_mean", "token_mean", "constant"] | None = Field(
        default=None, description="Average of the loss over tokens and trajectories; null takes the preset's."
    )
    weigh: Literal["trajectory", "sequence"] = Field(
        default="trajectory",
        description="What counts once in the loss, however long it is or however many parts it has.",
    )
    importance_level: Literal["token", "sequence"] | None = Field(
        default=None, description="Importance ratio per token or per sequence; null takes the preset's."
    )
    clip_low: float | None = Field(
        default=None, gt=0.0, le=1.0, description="Clip ratios below 1 - clip_low; null takes the preset's."
    )
    clip_high: float | None = Field(
        default=None,
        gt=0.0,
        description="Clip ratios above 1 + clip_high (cispo: above clip_high); null takes the preset's.",
    )
    delta: float | None = Field(
        default=None, gt=1.0, description="Dual clip: largest ratio for negative advantages; null for no bound."
    )
    beta: float | None = Field(
        default=None,
        ge=0.0,
        allow_inf_nan=False,
        description="Weight of the KL to the reference; null is 0, or 0.1 for dpo.",
    )
    kl: Literal["k2", "k3", "k3_ratio", "k3_unweighted", "k3_trl", "k1_in_reward"] = Field(
        default="k3_ratio", description="KL estimator, added to the loss, or for k1_in_reward taken off the reward."
    )
    reference: ReferenceConfig = Field(default=ReferenceConfig(), description="Policy that the KL is measured from.")
    correction: CorrectionConfig | None = Field(
        default=None, description="Sampler-to-trainer correction; null for none."
    )
    entropy_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False, description="Weight of the entropy bonus.")
    gamma: float = Field(
        default=1.0, gt=0.0, le=1.0, description="Discount per turn, or per token for gae and reinforce_pp."
    )
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0, description="Lambda of generalised advantage estimation.")
    bootstrap: Literal["value", "none"] = Field(
        default="value", description="Value behind an episode that a length limit cut: the value head's, or 0."
    )
    value_coef: float = Field(default=0.5, gt=0.0, description="Weight of ppo's value loss.")
    value_clip: float | None = Field(
        default=0.2, gt=0.0, description="Largest unclipped change of a value in ppo's value loss; null for no clip."
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Token budget of a trajectory; dr_grpo divides by it; null for none."
    )
    mask_truncated: bool = Field(
        default=False, description="Leave out sequences that were cut off by their token limit."
    )
    overlong_buffer_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Last tokens of max_completion_tokens, over which the reward falls by 1; null for no penalty.",
    )
    reward_weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = Field(
        default=None, min_length=1, description="Weights of named rewards; null takes the evaluator's reward as it is."
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        default="sum_then_normalize", description="Order of adding named rewards up and normalising them in the group."
    )

    preference: PreferenceConfig = Field(
        default=PreferenceConfig(), description="How dpo compares the two answers of a pair."
    )
    min_reward: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Least reward of the trajectories that sft imitates; null imitates all.",
    )

    @property
    def is_policy_loss(self) -> bool:
        """True if the loss learns from rewards; dpo learns from pairs and sft from examples."""
        return self.name not in OTHER_LOSSES

    @property
    def kl_weight(self) -> float:
        """`beta` of a policy loss, 0 for the other losses."""
        return (self.beta or 0.0) if self.is_policy_loss else 0.0

    @property
    def needs_reference(self) -> bool:
        """True if the loss or the rewards read the reference's log-probabilities."""
        return self.kl_weight > 0 or self.name == "dpo"

    @property
    def estimator(self) -> str:
        """The advantage estimator, the loss's own one where `advantages` is None."""
        return self.advantages or {"dr_grpo": "group_mean", "ppo": "gae"}.get(self.name, "group")

    @property
    def averaged_over(self) -> Literal["tokens", "pairs", "sequences", "trajectories"]:
        """The unit that the loss is averaged over."""
        if self.name == "dpo":
            return "pairs"
        if (self.aggregation or self.name) not in ("seq_mean_token_mean", "constant", "grpo", "gspo", "dr_grpo"):
            return "tokens"
        return "trajectories" if self.weigh == "trajectory" else "sequences"

    @model_validator(mode="after")
    def _has_what_it_reads(self) -> "LossConfig":
        own = set(OTHER_LOSSES.get(self.name, POLICY_FIELDS)) - set(NOT_READ.get(self.name, ()))
        if self.is_policy_loss and self.name != "ppo":
            own -= {"gae_lambda", "bootstrap", "value_coef", "value_clip"}
        if not self.needs_reference:
            own -= {"reference"}
        if self.averaged_over == "tokens":
            own -= {"weigh"}
        changed = [name for name, field in type(self).model_fields.items() if dict(self)[name] != field.default]
        strange = sorted(set(changed) - {"name", *own})
        if strange:
            hint = " (a reference is for a beta above 0)" if "reference" in strange else ""
            raise config_error(f"{self.name} has no {', '.join(strange)}: take them out{hint}")
        if self.name == "dpo" and self.beta == 0:
            raise config_error("dpo needs a beta above 0")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "LossConfig":
        if (self.name == "ppo") != (self.estimator == "gae"):
            raise config_error("ppo goes with advantages 'gae', and 'gae' with ppo: nothing else trains a value head")
        if self.kl_weight and self.kl == "k1_in_reward" and self.estimator not in UNSCALED:
            raise config_error(
                f"kl 'k1_in_reward' with advantages {self.estimator!r} would divide beta by the spread of the rewards; "
                f"take one of {', '.join(UNSCALED)}"
            )
        if (self.overlong_buffer_tokens or 0) > (self.max_completion_tokens or 0):
            raise config_error("overlong_buffer_tokens needs a max_completion_tokens that is at least as large")
        if self.multi_objective_aggregation == "normalize_then_sum" and (
            self.reward_weights is None or self.estimator != "group"
        ):
            raise config_error("normalize_then_sum needs reward_weights, and advantages 'group'")
        if self.multi_objective_aggregation == "normalize_then_sum" and self.overlong_buffer_tokens is not None:
            raise config_error("overlong_buffer_tokens has no reward to be taken off when each is normalised by itself")
        return self


POLICY_FIELDS = tuple(name for name in LossConfig.model_fields if name not in ("preference", "min_reward"))
"""The fields that policy losses read."""


class OptimizerConfig(ConfigModel):
    """Optimizer, learning-rate schedule and gradient clipping."""

    name: Literal["adamw", "sgd"] = Field(
        default="adamw", description="Optimizer: AdamW (arXiv 1711.05101) or plain SGD."
    )
    learning_rate: float = Field(
        default=1e-5, gt=0.0, le=LARGEST_FLOAT32, description="Learning rate of every update after the warm-up."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning rate after the warm-up: constant, or a linear or cosine decay."
    )
    warmup_updates: int = Field(
        default=0, ge=0, description="Updates over which the learning rate rises linearly to learning_rate."
    )
    decay_updates: int | None = Field(
        default=None,
        ge=1,
        description="Updates after the warm-up over which the learning rate decays; null for a constant one.",
    )
    end_fraction: float = Field(
        default=0.1, ge=0.0, le=1.0, description="Fraction of learning_rate at the end of the decay."
    )
    b1: float = Field(default=0.9, ge=0.0, lt=1.0, description="AdamW's decay per update of the mean gradient.")
    b2: float = Field(
        default=0.999, ge=0.0, lt=1.0, description="AdamW's decay per update of the mean squared gradient."
    )
    mean_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Type of AdamW's mean gradient; null takes the parameters' type. The mean square always has that.",
    )
    weight_decay: float = Field(
        default=0.0, ge=0.0, le=LARGEST_FLOAT32, description="AdamW's weight decay; applies to matrices only."
    )
    max_grad_norm: float | None = Field(
        default=1.0, gt=0.0, description="Clip gradients to this global norm; null for no clip."
    )

    @model_validator(mode="after")
    def _falls_over_some_updates(self) -> "OptimizerConfig":
        if (self.schedule == "constant") != (self.decay_updates is None):
            raise config_error("schedules 'linear' and 'cosine' need decay_updates, and 'constant' has none")
        return self
