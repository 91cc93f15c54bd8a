"""Configuration of the optimizer, its learning-rate schedule and its groups of parameters."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PlainSerializer, model_validator

from jaxft.core import LARGEST_FLOAT32
from jaxft.harness.config_types import ConfigModel, config_error
from jaxft.harness.functions import Function, NamedFunction, NamedOptions, name_or_function
from jaxft.training.config import check_named, named_function

ScheduleName = Literal["constant", "linear", "cosine"]
SETTINGS = ("learning_rate", "weight_decay", "b1", "b2")
"""Fields that an optimizer gets if it has parameters for them."""


def default_rate(*, is_random: bool, has_adapters: bool, imitates: bool) -> float:
    """Return the learning rate of a run that is given none, by the weights that it trains.

    Args:
        is_random: True for random weights in the shape of a preset.
        has_adapters: True if low-rank adapters are trained in the place of the weights.
        imitates: True for the loss `sft`.

    >>> default_rate(is_random=False, has_adapters=True, imitates=False)
    1e-05
    """
    return 3e-3 if is_random else (1e-6, 1e-5, 1e-4)[has_adapters + imitates]


class ParameterGroupConfig(ConfigModel):
    """Parameters whose paths match a pattern, with a learning rate and a weight decay of their own."""

    pattern: str = Field(min_length=1)
    """Pattern of paths, as in layers/*/scale or embed; * stands for any text."""
    rate_factor: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Factor of the learning rate; 0: they stay as they are."""
    weight_decay: float | None = Field(default=None, ge=0.0, le=LARGEST_FLOAT32)
    """Weight decay; null: that of all others."""


class OptimizerConfig(ConfigModel):
    """Optimizer, learning-rate schedule and gradient clipping."""

    name: Literal["adamw", "sgd", "lion", "muon", "schedule_free", "function"] = "adamw"
    """AdamW (arXiv 1711.05101), plain SGD, Lion (2302.06675), Muon with AdamW for embeddings and norms (2502.16982),
    or schedule-free AdamW (2405.15682); function, if there is one."""
    function: NamedFunction | None = None
    """Function as module:name that returns an optax transformation, as optax.contrib:prodigy does. It gets, by its
    parameters, learning_rate (the schedule), weight_decay with its mask, b1 and b2. null: name."""
    options: NamedOptions = Field(default={}, validate_default=True)
    """More keywords of the function, or of the optimizer of that name in optax."""
    learning_rate: float | None = Field(default=None, gt=0.0, le=LARGEST_FLOAT32)
    """Learning rate at the end of the warm-up. null: 1e-6, or 1e-5 for adapters (lora), each ten times as much with
    the loss sft; 3e-3 for the random weights of a preset; none if nothing takes it."""
    schedule: Annotated[ScheduleName | Function, name_or_function(*get_args(ScheduleName)), PlainSerializer(str)] = (
        "constant"
    )
    """Shape of the learning rate after the warm-up; or a function as module:name that returns the whole schedule, as
    optax:exponential_decay does."""
    schedule_options: NamedOptions = Field(default={}, validate_default=True)
    """Keywords of a schedule that is a function; it also gets learning_rate."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates of the linear warm-up."""
    decay_updates: int | None = Field(default=None, ge=1)
    """Updates after the warm-up over which the rate falls; null: constant schedule."""
    end_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
    """Final learning rate as a fraction of the peak."""
    b1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """AdamW's decay rate of the first moment."""
    b2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """AdamW's decay rate of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=LARGEST_FLOAT32)
    """Decoupled weight decay; norms and biases are left out."""
    groups: tuple[ParameterGroupConfig, ...] = ()
    """Parameters with another learning rate or weight decay; the first that matches counts."""
    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Global norm that gradients are clipped to; null: no clipping."""

    @property
    def is_own(self) -> bool:
        """True if something is not of jaxft's own making, and so to be checked."""
        is_usual = self.name in ("adamw", "sgd") and not (self.options or self.groups)
        return not is_usual or isinstance(self.schedule, Function)

    @property
    def takes_rate(self) -> bool:
        """True unless a function, as the optimizer or as the schedule, takes no `learning_rate`."""
        functions = (self.function, self.schedule)
        return all(each.takes("learning_rate") for each in functions if isinstance(each, Function))

    def with_rate(self, rate: float) -> "OptimizerConfig":
        """Return the settings with a learning rate in the place of None, which does not count as a given one."""
        return self.model_construct(self.model_fields_set - {"learning_rate"}, **{**dict(self), "learning_rate": rate})

    @model_validator(mode="before")
    @classmethod
    def _is_named_function(cls, values: Any) -> Any:
        return named_function(values)

    @model_validator(mode="after")
    def _reads_what_is_set(self) -> "OptimizerConfig":
        """Refuse settings that the optimizer or the schedule would leave unread."""
        check_named(self.name, self.function)
        changed = {name for name, field in type(self).model_fields.items() if dict(self)[name] != field.default}
        changed |= {"weight_decay" for each in self.groups if each.weight_decay is not None}
        changed |= {"rate_factor" for each in self.groups if each.rate_factor not in (0.0, 1.0)}
        if self.function is None:
            optimizer, unread = f"optimizer '{self.name}'", set(SETTINGS[1:] if self.name == "sgd" else ())
        else:
            optimizer, unread = self.function.place, {name for name in SETTINGS if not self.function.takes(name)}
            unread |= {"schedule", "warmup_updates", "rate_factor"} if "learning_rate" in unread else set()
        falls = {"decay_updates", "end_fraction"}
        if isinstance(self.schedule, Function):
            schedule = f"schedule {self.schedule.place}, which is the whole one,"
            unscheduled = {"warmup_updates", *falls}
            unscheduled |= set() if self.schedule.takes("learning_rate") else {"learning_rate"}
        else:
            schedule = f"schedule '{self.schedule}'"
            unscheduled = {"schedule_options"} | (falls if self.schedule == "constant" else set())
        for reader, left_out in ((optimizer, unread), (schedule, unscheduled)):
            if strange := sorted(changed & left_out):
                raise config_error(f"{reader} takes no {', '.join(map(repr, strange))}: leave it out")
        for each in self.groups:
            if each.rate_factor == 0 and each.weight_decay:
                raise config_error(f"groups: '{each.pattern}' has a rate_factor of 0, and so no decay: leave it out")
        if self.schedule in ("linear", "cosine") and self.decay_updates is None:
            raise config_error(f"schedule '{self.schedule}' needs decay_updates")
        return self
