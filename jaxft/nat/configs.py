"""Configurations of the toolkit's components that jaxft registers: their fields are those of jaxft's own components.

Nothing here imports jax, as every `nat` command imports the plugin. Paths are relative to the working directory, as
everywhere in the toolkit.
"""

from collections.abc import Iterable
from typing import Any

from nat.data_models.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from nat.data_models.llm import LLMBaseConfig
from pydantic import BaseModel, Field, create_model, model_validator

from jaxft import (
    DPOTrainerConfig,
    FinetuneConfig,
    GRPOTrainerConfig,
    GRPOTrajectoryBuilderConfig,
    LocalPolicyConfig,
    LocalTrainerAdapterConfig,
)
from jaxft.errors import did_you_mean
from jaxft.harness import ComponentConfig


class _PolicyOptions(LLMBaseConfig):
    """Settings of a policy in the toolkit, beside those of `local_policy`."""

    model_name: str = Field(
        default="policy",
        min_length=1,
        description="Name of the model in traces and in finetuning.target_model; each policy has its own.",
    )
    temperature: float = Field(default=1.0, ge=0.0, description="Temperature of calls that give none.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus of calls that give none; 1: no limit.")
    top_k: int = Field(default=0, ge=0, description="Number of most likely tokens to sample from; 0: all.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Maximum tokens of an answer; null: as many as the context has room for."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the chat template, such as enable_thinking."
    )


class _TrainerOptions(TrainerConfig):
    """Settings of a run in the toolkit, beside those of jaxft's trainers."""

    resume: bool = Field(default=False, description="Continue the run in finetuning.output_dir.")
    overwrite: bool = Field(default=False, description="Replace the run in finetuning.output_dir.")


FINETUNING = ("checkpoints", "loggers")
"""Fields of jaxft's section `finetuning` that stand in the toolkit's trainer."""


def _with_fields(base: type[BaseModel], own: type[BaseModel], names: Iterable[str]) -> Any:
    """Return a subclass with fields of one of jaxft's classes."""
    fields: dict[str, Any] = {name: (own.model_fields[name].annotation, own.model_fields[name]) for name in names}
    return create_model(base.__name__, __base__=base, **fields)


OWN: dict[type[BaseModel], type[ComponentConfig]] = {}
"""The configuration class of jaxft's own component for each of the toolkit's."""


def own_config(config: BaseModel, own: type[ComponentConfig]) -> ComponentConfig:
    """Return the configuration of jaxft's own component with the fields that the toolkit's component was given."""
    given = {name: value for name, value in dict(config).items() if name in config.model_fields_set}
    return own.model_validate({name: given[name] for name in own.model_fields if name in given and name != "reward"})


def _toolkit_config(class_name: str, name: str, base: type[BaseModel], own: type[ComponentConfig]) -> Any:
    """Return the toolkit's configuration class of a component, whose checks are those of jaxft's own class."""

    def check_names(made: type[BaseModel], values: Any) -> Any:
        # The toolkit would ignore a misspelt field; with pydantic's own error it would not say which.
        known = {"_type", *made.model_fields}
        unknown = [str(field) for field in values if field not in known] if isinstance(values, dict) else []
        if unknown:
            raise ValueError(f"{name} has no field '{unknown[0]}'{did_you_mean(unknown[0], fields, what='fields')}")
        return values

    def check(config: BaseModel) -> BaseModel:
        own_config(config, own)
        return config

    fields = [field for field in own.model_fields if field != "reward"]
    before: Any = model_validator(mode="before")
    made = create_model(
        class_name,
        __base__=_with_fields(base, own, fields),
        __module__=__name__,
        __doc__=own.__doc__,
        __validators__={"check_names": before(classmethod(check_names)), "check": model_validator(mode="after")(check)},
        __cls_kwargs__={"name": name},
    )
    OWN[made] = own
    return made


_Policy = _with_fields(_PolicyOptions, FinetuneConfig, ["seed"])
_Trainer = _with_fields(_TrainerOptions, FinetuneConfig, FINETUNING)
PolicyConfig = _toolkit_config("PolicyConfig", "jaxft_policy", _Policy, LocalPolicyConfig)
AdapterConfig = _toolkit_config(
    "AdapterConfig", "jaxft_trainer_adapter", TrainerAdapterConfig, LocalTrainerAdapterConfig
)
BuilderConfig = _toolkit_config(
    "BuilderConfig", "jaxft_trajectory_builder", TrajectoryBuilderConfig, GRPOTrajectoryBuilderConfig
)
GRPOConfig = _toolkit_config("GRPOConfig", "jaxft_trainer", _Trainer, GRPOTrainerConfig)
DPOConfig = _toolkit_config("DPOConfig", "jaxft_dpo_trainer", _Trainer, DPOTrainerConfig)
