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
"""Losses that are no policy losses, with the fields they read."""

NOT_READ = {"cispo": ("clip_low",), "reinforce": ("clip_low", "clip_high")}
"""Fields of policy losses that some of them do not read; so are those of ppo by all others."""

UNSCALED = ("group_mean", "leave_one_out", "reinforce_pp", "gae")
"""Estimators that leave beta what it is: the others divide by a spread."""


class ReferenceConfig(ConfigModel):
    """The policy that the KL holds to: the starting parameters, another checkpoint, or a slow average."""

    path: PathOrName | None = Field(
        default=None, description="A checkpoint of the same architecture; null: the parameters before the first update."
    )
    update_every: int | None = Field(default=None, ge=1, description="Jobs between its updates; null: it stays.")
    mixing: float = Field(default=1.0, gt=0.0, le=1.0, description="Share of the policy in the new reference.")


class CorrectionConfig(ConfigModel):
    """Weights for a sampler whose probabilities are not the trainer's."""

    name: CorrectionName = Field(description="What is weighted or left out.")
    low: float = Field(default=0.5, gt=0.0, le=1.0, description="Least ratio that a mask keeps.")
    high: float = Field(default=2.0, ge=1.0, description="Largest weight, or largest ratio that a mask keeps.")


class PreferenceConfig(ConfigModel):
    """How dpo compares the two answers of a pair."""

    kind: Literal["sigmoid", "ipo"] = Field(default="sigmoid", description="The loss of a margin.")
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5, description="Share of pairs that may be the wrong way.")
    length_normalized: bool = Field(default=False, description="Mean log-probability of an answer, and not the sum.")
    sft_coef: float = Field(
        default=0.0, ge=0.0, description="Weight of the supervised loss on the chosen answers, which holds them up."
    )


class LossConfig(ConfigModel):
    """The loss: a published one by name, and what to change of it."""

    name: Literal["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo", "ppo", "reinforce", "dpo", "sft"] = Field(
        default="grpo", description="The row of presets that the other fields of the loss override."
    )
    advantages: AdvantageName | None = Field(
        default=None, description="The baseline: null for group_mean with dr_grpo, gae with ppo, group with all others."
    )
    aggregation: Literal["seq_mean_token_mean", "token_mean", "constant"] | None = Field(
        default=None, description="What the loss is averaged over."
    )
    weigh: Literal["trajectory", "sequence"] = Field(
        default="trajectory",
        description="trajectory: a trajectory counts once in the loss, however many sequences it has. sequence: each "
        "sequence counts once. Ratios of importance_level 'sequence' stay those of sequences.",
    )
    importance_level: Literal["token", "sequence"] | None = Field(
        default=None, description="One ratio per token or row."
    )
    clip_low: float | None = Field(default=None, gt=0.0, le=1.0, description="The ratio stays above 1 - clip_low.")
    clip_high: float | None = Field(default=None, gt=0.0, description="It stays below 1 + clip_high; cispo's cap.")
    delta: float | None = Field(default=None, gt=1.0, description="Dual clip: bounds the loss of bad rows.")
    beta: float | None = Field(
        default=None,
        ge=0.0,
        allow_inf_nan=False,
        description="Weight of the KL to the reference, 0 keeps none; null: 0, and 0.1 for dpo.",
    )
    kl: Literal["k2", "k3", "k3_ratio", "k3_unweighted", "k3_trl", "k1_in_reward"] = Field(
        default="k3_ratio", description="Its estimator, in the loss or in the reward."
    )
    reference: ReferenceConfig = Field(default=ReferenceConfig(), description="What the KL is measured from.")
    correction: CorrectionConfig | None = Field(default=None, description="Sampler-to-trainer correction; null: none.")
    entropy_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False, description="Weight of the entropy bonus.")
    gamma: float = Field(default=1.0, gt=0.0, le=1.0, description="Discount per step of shaped rewards, or per token.")
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0, description="Generalised advantage estimation's.")
    bootstrap: Literal["value", "none"] = Field(
        default="value",
        description="Value after the last token of an episode that a length limit cut. value: the value head's output "
        "there. none: 0, as if the episode had ended.",
    )
    value_coef: float = Field(default=0.5, gt=0.0, description="Weight of ppo's value term.")
    value_clip: float | None = Field(default=0.2, gt=0.0, description="How far a value may move at no loss; null: any.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Token budget of a whole trajectory: the constant that dr_grpo divides by."
    )
    mask_truncated: bool = Field(default=False, description="Rows cut by their length budget train nothing.")
    overlong_buffer_tokens: int | None = Field(
        default=None,
        ge=1,
        description="DAPO's soft penalty: the reward falls by up to 1 over the last so many tokens of the budget.",
    )
    reward_weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = Field(
        default=None, min_length=1, description="Weights of named rewards; null: the reward as its evaluator gave it."
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        default="sum_then_normalize",
        description="Whether named rewards are added before or after each is normalised in its group.",
    )

    preference: PreferenceConfig = Field(default=PreferenceConfig(), description="Of dpo.")
    min_reward: float | None = Field(
        default=None, allow_inf_nan=False, description="sft imitates trajectories of at least this reward; null: all."
    )

    @property
    def is_policy_loss(self) -> bool:
        """Whether rewards become advantages; dpo learns from pairs and sft from examples."""
        return self.name not in OTHER_LOSSES

    @property
    def kl_weight(self) -> float:
        """`beta`, where it weights a KL."""
        return (self.beta or 0.0) if self.is_policy_loss else 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's log-probabilities enter."""
        return self.kl_weight > 0 or self.name == "dpo"

    @property
    def estimator(self) -> str:
        """The baseline that is really used."""
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
    """Which optimiser, and how fast."""

    name: Literal["adamw", "sgd"] = Field(default="adamw", description="AdamW (arXiv 1711.05101), or plain SGD.")
    learning_rate: float = Field(
        default=1e-5, gt=0.0, le=LARGEST_FLOAT32, description="Learning rate of every update after the warm-up."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="What the learning rate does after the warm-up: stay, or fall in that shape."
    )
    warmup_updates: int = Field(default=0, ge=0, description="Updates over which the learning rate rises.")
    decay_updates: int | None = Field(
        default=None, ge=1, description="Updates after the warm-up over which it falls; for linear and cosine."
    )
    end_fraction: float = Field(default=0.1, ge=0.0, le=1.0, description="Share of the learning rate that it falls to.")
    b1: float = Field(default=0.9, ge=0.0, lt=1.0, description="AdamW's decay of the mean gradient.")
    b2: float = Field(default=0.999, ge=0.0, lt=1.0, description="AdamW's decay of the mean squared gradient.")
    mean_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Of AdamW's mean gradient; null for that of the parameters. bfloat16 halves it; the mean square "
        "stays as wide as the parameters, or its small changes would be lost.",
    )
    weight_decay: float = Field(
        default=0.0, ge=0.0, le=LARGEST_FLOAT32, description="AdamW's weight decay, which applies to matrices only."
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0.0, description="Gradients are clipped to this global norm.")

    @model_validator(mode="after")
    def _falls_over_some_updates(self) -> "OptimizerConfig":
        if (self.schedule == "constant") != (self.decay_updates is None):
            raise config_error("schedules 'linear' and 'cosine' need decay_updates, and 'constant' has none")
        return self
