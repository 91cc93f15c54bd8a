"""Policy losses by configuration."""

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from jaxft.harness.fields import ConfigModel

if TYPE_CHECKING:
    from jaxft.core.update import LossFn

AdvantageName = Literal["group", "group_mean", "leave_one_out", "batch"]


class LossConfig(ConfigModel):
    """The policy loss: a published one by name, and what to change of it."""

    name: Literal["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo", "reinforce"] = Field(
        default="grpo", description="The row of presets that the other fields of the loss override."
    )
    advantages: AdvantageName | None = Field(
        default=None, description="The baseline: null for group_mean with dr_grpo, group with all others."
    )
    importance_level: Literal["token", "sequence"] | None = Field(
        default=None, description="One ratio per token or row."
    )
    clip_low: float | None = Field(default=None, gt=0.0, le=1.0, description="The ratio stays above 1 - clip_low.")
    clip_high: float | None = Field(default=None, gt=0.0, description="It stays below 1 + clip_high; cispo's cap.")
    delta: float | None = Field(default=None, gt=1.0, description="Dual clip: bounds the loss of bad rows.")
    beta: float = Field(default=0.0, ge=0.0, description="Weight of the KL to the starting parameters; 0 keeps none.")
    kl: Literal["k2", "k3", "k3_ratio", "k3_unweighted", "k3_trl"] = Field(
        default="k3_ratio", description="Its estimator."
    )
    entropy_coef: float = Field(default=0.0, ge=0.0, description="Weight of the entropy bonus.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Token budget of a whole trajectory: the constant that dr_grpo divides by."
    )
    mask_truncated: bool = Field(default=False, description="Rows cut by their length budget train nothing.")


def make_loss(config: LossConfig) -> "LossFn":
    """The loss function of `make_update`.

    Raises:
        ValueError: knobs that exclude each other, or one that the loss cannot do without.
    """
    import jax
    import jax.numpy as jnp

    from jaxft.core.losses import policy_loss
    from jaxft.core.objectives import grpo_loss

    knobs: dict[str, Any] = {
        "loss": config.name,
        "importance_level": config.importance_level,
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
        "delta": config.delta,
        "beta": config.beta,
        "kl": config.kl,
        "max_completion_tokens": config.max_completion_tokens,
    }
    # Refused here, the knobs cost a message; refused in the first update, they would cost the policy.
    row = jnp.zeros((1, 2))
    reference = row if config.beta else None
    jax.eval_shape(lambda x: policy_loss(x, None, x[:, 0], x > 0, ref_logprobs=reference, **knobs), row)
    return partial(grpo_loss, entropy_coef=config.entropy_coef, **knobs)
