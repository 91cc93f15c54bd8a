"""Optimisers of optax by configuration."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from jaxft.core import LARGEST_FLOAT32
from jaxft.harness.fields import ConfigModel, fault

if TYPE_CHECKING:
    import optax


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
    end_share: float = Field(default=0.1, ge=0.0, le=1.0, description="Share of the learning rate that it falls to.")
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
            raise fault("schedules 'linear' and 'cosine' need decay_updates, and 'constant' has none")
        return self


def make_optimizer(config: OptimizerConfig) -> "optax.GradientTransformation":
    """The optax transformation. Clipping is the update's own: it has to judge the norm before anything else does."""
    import jax
    import optax

    learning_rate = make_schedule(config)
    if config.name == "sgd":
        return optax.sgd(learning_rate)
    return optax.adamw(
        learning_rate,
        b1=config.b1,
        b2=config.b2,
        mu_dtype=config.mean_dtype,
        weight_decay=config.weight_decay,
        # Norms and biases stay out: stacked over layers they have two axes, so names decide and not ranks.
        mask=lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key not in ("scale", "bias"), params
        ),
    )


def make_schedule(config: OptimizerConfig) -> "optax.Schedule":
    """The learning rate of each update, counted from 0: a linear rise, then constant or a fall, linear or by cosine."""
    import optax

    rate, warmup = config.learning_rate, config.warmup_updates
    if config.decay_updates is None:
        after = optax.constant_schedule(rate)
    elif config.schedule == "linear":
        after = optax.linear_schedule(rate, rate * config.end_share, config.decay_updates)
    else:
        after = optax.cosine_decay_schedule(rate, config.decay_updates, alpha=config.end_share)
    if not warmup:
        return after
    # The first update of all is not wasted on a rate of 0: it gets the first step of the rise.
    return optax.join_schedules([optax.linear_schedule(rate / (warmup + 1), rate, warmup), after], [warmup])
