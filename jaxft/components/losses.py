"""Losses by configuration."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxft.harness.fields import ConfigModel, PathOrName, fault

if TYPE_CHECKING:
    from jaxft.core.update import LossFn

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
    aggregation: Literal["row_mean", "token_mean", "budget"] | None = Field(
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
    length_penalty_tokens: int | None = Field(
        default=None,
        ge=1,
        description="DAPO's soft penalty: the reward falls by up to 1 over the last so many tokens of the budget.",
    )
    reward_weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = Field(
        default=None, min_length=1, description="Weights of named rewards; null: the reward as its evaluator gave it."
    )
    several_rewards: Literal["sum", "normalize_then_sum"] = Field(
        default="sum", description="Whether named rewards are added before or after each is normalised in its group."
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
        if (self.aggregation or self.name) not in ("row_mean", "budget", "grpo", "gspo", "dr_grpo"):
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
            raise fault(f"{self.name} has no {', '.join(strange)}: take them out{hint}")
        if self.name == "dpo" and self.beta == 0:
            raise fault("dpo needs a beta above 0")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "LossConfig":
        if (self.name == "ppo") != (self.estimator == "gae"):
            raise fault("ppo goes with advantages 'gae', and 'gae' with ppo: nothing else trains a value head")
        if self.kl_weight and self.kl == "k1_in_reward" and self.estimator not in UNSCALED:
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


POLICY_FIELDS = tuple(name for name in LossConfig.model_fields if name not in ("preference", "min_reward"))
"""The fields that policy losses read."""


def make_loss(config: LossConfig, max_sampler_diff: float | None = None) -> "LossFn":
    """The loss function of `make_update`.

    Args:
        config: which, and how.
        max_sampler_diff: a policy loss counts the rows whose recorded log-probabilities are further than this from the
            trainer's, on average; None: none does.

    Raises:
        ValueError: knobs that exclude each other, or one that the loss cannot do without.
    """
    import jax
    import jax.numpy as jnp

    from jaxft.core.correction import sampler_correction
    from jaxft.core.losses import policy_loss
    from jaxft.core.objectives import dpo_loss, grpo_loss, ppo_loss, sft_loss
    from jaxft.core.types import Denominators

    if config.name == "sft":
        return sft_loss
    if config.name == "dpo":
        return partial(dpo_loss, beta=0.1 if config.beta is None else config.beta, **dict(config.preference))
    in_loss = config.kl != "k1_in_reward"
    knobs: dict[str, Any] = {
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
        "delta": config.delta,
        "beta": config.kl_weight if in_loss else 0.0,
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
    shared = {"entropy_coef": config.entropy_coef, "max_sampler_diff": max_sampler_diff, **knobs, **correction}
    if config.name == "ppo":
        if config.aggregation not in (None, "token_mean") or config.importance_level == "sequence":
            raise ValueError("ppo is averaged over tokens, with a ratio per token")
        return partial(ppo_loss, value_coef=config.value_coef, value_clip=config.value_clip, **shared)
    return partial(grpo_loss, **choices, **shared)
