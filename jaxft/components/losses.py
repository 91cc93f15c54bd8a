"""Policy losses by configuration."""

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from jaxft.harness.fields import ConfigModel, PathOrName, fault

if TYPE_CHECKING:
    from jaxft.core.update import LossFn

AdvantageName = Literal["group", "group_mean", "leave_one_out", "batch", "reinforce_pp", "gae"]
CorrectionName = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_geometric_mask"
]

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


class LossConfig(ConfigModel):
    """The policy loss: a published one by name, and what to change of it."""

    name: Literal["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo", "ppo", "reinforce"] = Field(
        default="grpo", description="The row of presets that the other fields of the loss override."
    )
    advantages: AdvantageName | None = Field(
        default=None, description="The baseline: null for group_mean with dr_grpo, gae with ppo, group with all others."
    )
    aggregation: Literal["row_mean", "token_mean", "budget"] | None = Field(
        default=None, description="What the loss is averaged over."
    )
    importance_level: Literal["token", "sequence"] | None = Field(
        default=None, description="One ratio per token or row."
    )
    clip_low: float | None = Field(default=None, gt=0.0, le=1.0, description="The ratio stays above 1 - clip_low.")
    clip_high: float | None = Field(default=None, gt=0.0, description="It stays below 1 + clip_high; cispo's cap.")
    delta: float | None = Field(default=None, gt=1.0, description="Dual clip: bounds the loss of bad rows.")
    beta: float = Field(default=0.0, ge=0.0, description="Weight of the KL to the reference; 0 keeps none.")
    kl: Literal["k2", "k3", "k3_ratio", "k3_unweighted", "k3_trl", "k1_in_reward"] = Field(
        default="k3_ratio", description="Its estimator, in the loss or in the reward."
    )
    reference: ReferenceConfig = Field(default=ReferenceConfig(), description="What the KL is measured from.")
    correction: CorrectionConfig | None = Field(default=None, description="Sampler-to-trainer correction; null: none.")
    entropy_coef: float = Field(default=0.0, ge=0.0, description="Weight of the entropy bonus.")
    gamma: float = Field(default=1.0, gt=0.0, le=1.0, description="Discount per step of shaped rewards, or per token.")
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0, description="Generalised advantage estimation's.")
    value_coef: float = Field(default=0.5, gt=0.0, description="Weight of ppo's value term.")
    value_clip: float | None = Field(default=0.2, gt=0.0, description="How far a value may move at no loss; null: any.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Token budget of a whole trajectory: the constant that dr_grpo divides by."
    )
    mask_truncated: bool = Field(default=False, description="Rows cut by their length budget train nothing.")
    length_penalty_tokens: int | None = Field(
        default=None,
        ge=1,
        description="DAPO's soft penalty: the reward falls by up to 1 over the last so many tokens of the budget.",
    )
    reward_weights: dict[str, float] | None = Field(
        default=None, description="Weights of named rewards; null: the reward as its evaluator gave it."
    )
    several_rewards: Literal["sum", "normalize_then_sum"] = Field(
        default="sum", description="Whether named rewards are added before or after each is normalised in its group."
    )

    @property
    def estimator(self) -> str:
        """The baseline that is really used."""
        return self.advantages or {"dr_grpo": "group_mean", "ppo": "gae"}.get(self.name, "group")

    @model_validator(mode="after")
    def _fits_together(self) -> "LossConfig":
        if (self.name == "ppo") != (self.estimator == "gae"):
            raise fault("ppo goes with advantages 'gae', and 'gae' with ppo: nothing else trains a value head")
        if self.beta and self.kl == "k1_in_reward" and self.estimator not in UNSCALED:
            raise fault(
                f"kl 'k1_in_reward' with advantages {self.estimator!r} would divide beta by the spread of the rewards; "
                f"take one of {', '.join(UNSCALED)}"
            )
        if (self.length_penalty_tokens or 0) > (self.max_completion_tokens or 0):
            raise fault("length_penalty_tokens needs a max_completion_tokens that is at least as large")
        if self.several_rewards == "normalize_then_sum" and (self.reward_weights is None or self.estimator != "group"):
            raise fault("normalize_then_sum needs reward_weights, and advantages 'group'")
        if self.several_rewards == "normalize_then_sum" and self.length_penalty_tokens is not None:
            raise fault("length_penalty_tokens has no reward to be taken off when each is normalised by itself")
        return self


def make_loss(config: LossConfig) -> "LossFn":
    """The loss function of `make_update`.

    Raises:
        ValueError: knobs that exclude each other, or one that the loss cannot do without.
    """
    import jax
    import jax.numpy as jnp

    from jaxft.core.correction import sampler_correction
    from jaxft.core.losses import policy_loss
    from jaxft.core.objectives import grpo_loss, ppo_loss
    from jaxft.core.types import Denominators

    in_loss = config.kl != "k1_in_reward"
    knobs: dict[str, Any] = {
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
        "delta": config.delta,
        "beta": config.beta if in_loss else 0.0,
        "kl": config.kl if in_loss else "k3_ratio",
    }
    choices: dict[str, Any] = {
        "loss": config.name,
        "importance_level": config.importance_level,
        "aggregation": config.aggregation,
        "max_completion_tokens": config.max_completion_tokens,
    }
    # Refused here, the knobs cost a message; refused in the first update, they would cost the policy.
    row = jnp.zeros((1, 2))
    reference = row if knobs["beta"] else None
    jax.eval_shape(lambda x: policy_loss(x, None, x[:, 0], x > 0, ref_logprobs=reference, **choices, **knobs), row)
    correction: dict[str, Any] = {}
    if config.correction is not None:
        name, low, high = config.correction.name, config.correction.low, config.correction.high
        one = jnp.ones(())
        jax.eval_shape(lambda x: sampler_correction(x, x, x > 0, Denominators(one, one), name, low=low, high=high), row)
        correction = {"correction": name, "correction_low": low, "correction_high": high}
    shared = {"entropy_coef": config.entropy_coef, **knobs, **correction}
    if config.name == "ppo":
        if config.aggregation not in (None, "token_mean") or config.importance_level == "sequence":
            raise ValueError("ppo is averaged over tokens, with a ratio per token")
        return partial(ppo_loss, value_coef=config.value_coef, value_clip=config.value_clip, **shared)
    return partial(grpo_loss, **choices, **shared)
