"""The config builder: collects the configuration of a run without a file, component by component.

    builder = ConfigBuilder()
    await builder.add_llm("policy", LocalPolicyConfig(...))
    ...
    async with open_session(builder.complete_config(FinetuneConfig(...))) as session: ...

The names of its methods are those of the toolkit's workflow builder, and so is what is awaited, although the components
are made by the session.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxft.errors import ConfigError, did_you_mean
from jaxft.harness.config import Config, EvalConfig, EvalGeneralConfig, config_from_mapping
from jaxft.harness.data_models import FinetuneConfig
from jaxft.harness.evaluators import SECTION
from jaxft.harness.registry import (
    KINDS,
    ComponentConfig,
    DatasetConfig,
    EvaluatorConfig,
    LLMConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
    WorkflowConfig,
)

C = TypeVar("C", bound=ComponentConfig)


class ConfigBuilder:
    """Collects the configuration of a run.

    Attributes:
        config: the configuration as far as it is known; `complete_config` checks it.
    """

    def __init__(self) -> None:
        nothing = EvalConfig.model_construct(general=EvalGeneralConfig.model_construct())
        self.config = Config.model_construct(eval=nothing)

    async def add_llm(self, name: str, config: LLMConfig) -> None:
        """Add the language model `llms.<name>`."""
        self._add("llms", name, config, LLMConfig)

    async def set_workflow(self, config: WorkflowConfig) -> None:
        """Set the workflow."""
        self._check_changeable("workflow", "workflow")
        self.config = self.config.model_copy(update={"workflow": _check_kind(config, WorkflowConfig)})

    async def set_dataset(self, config: DatasetConfig) -> None:
        """Set the dataset, `eval.general.dataset`."""
        self._check_changeable("eval.general.dataset", "eval.general.dataset")
        self._set_eval(
            general=self.config.eval.general.model_copy(update={"dataset": _check_kind(config, DatasetConfig)})
        )

    async def add_evaluator(self, name: str, config: EvaluatorConfig) -> None:
        """Add the evaluator `eval.evaluators.<name>`."""
        self._check_changeable(f"{SECTION}.{name}", "evaluation")
        self._add(SECTION, name, config, EvaluatorConfig)

    async def add_trajectory_builder(self, name: str, config: TrajectoryBuilderConfig) -> None:
        """Add the builder `trajectory_builders.<name>`."""
        self._add("trajectory_builders", name, config, TrajectoryBuilderConfig)

    async def add_trainer_adapter(self, name: str, config: TrainerAdapterConfig) -> None:
        """Add the adapter `trainer_adapters.<name>`."""
        self._add("trainer_adapters", name, config, TrainerAdapterConfig)

    async def add_trainer(self, name: str, config: TrainerConfig) -> None:
        """Add the trainer `trainers.<name>`."""
        self._add("trainers", name, config, TrainerConfig)

    def complete_config(self, finetuning: FinetuneConfig, overrides: Sequence[tuple[str, str]] = ()) -> Config:
        """Return the whole configuration, for `open_session`, checked like one from a file.

        Args:
            finetuning: the section `finetuning`.
            overrides: `(dotted path, YAML text)` pairs for other fields, as `("eval.general.max_concurrency", "8")`.

        Raises:
            ConfigError: lists all faults, such as a part that is missing, each with its path.
        """
        section = {**dict(self.config.eval), "general": dict(self.config.eval.general)}
        sections = {**dict(self.config), "eval": section, "finetuning": finetuning.model_dump()}
        return config_from_mapping(sections, base_dir=Path.cwd(), overrides=overrides)

    def get_llm_config(self, name: str) -> LLMConfig:
        """Return the configuration of `llms.<name>`."""
        return self._find_config("llms", name)

    def get_workflow_config(self) -> WorkflowConfig:
        """Return the configuration of the workflow."""
        return _find_field(dict(self.config), "workflow", "workflow", "set_workflow")

    def get_dataset_config(self) -> DatasetConfig:
        """Return the configuration of the dataset."""
        return _find_field(dict(self.config.eval.general), "dataset", "eval.general.dataset", "set_dataset")

    def get_evaluator_config(self, name: str) -> EvaluatorConfig:
        """Return the configuration of `eval.evaluators.<name>`."""
        return self._find_config(SECTION, name)

    async def get_trajectory_builder_config(self, name: str) -> TrajectoryBuilderConfig:
        """Return the configuration of `trajectory_builders.<name>`."""
        return self._find_config("trajectory_builders", name)

    async def get_trainer_adapter_config(self, name: str) -> TrainerAdapterConfig:
        """Return the configuration of `trainer_adapters.<name>`."""
        return self._find_config("trainer_adapters", name)

    async def get_trainer_config(self, name: str) -> TrainerConfig:
        """Return the configuration of `trainers.<name>`."""
        return self._find_config("trainers", name)

    def get_max_concurrency(self) -> int:
        """Return `eval.general.max_concurrency`, for a `BaseEvaluator`."""
        return self.config.eval.general.max_concurrency

    def _check_changeable(self, path: str, component: str) -> None:
        """Raise an error if the component that the configuration at a path makes is there already."""

    def _configs(self, section: str) -> Mapping[str, Any]:
        return self.config.eval.evaluators if section == SECTION else dict(self.config)[section]

    def _find_config(self, section: str, name: str) -> Any:
        configs = self._configs(section)
        if name not in configs:
            raise ConfigError([f"'{name}' is not in '{section}'{did_you_mean(name, configs, what='there')}"])
        return configs[name]

    def _add(self, section: str, name: str, config: ComponentConfig, base: type[ComponentConfig]) -> None:
        configs = self._configs(section)
        if name in configs:
            raise ConfigError([f"'{name}' is in '{section}' already: give one of them another name"])
        added = {**configs, name: _check_kind(config, base)}
        if section == SECTION:
            self._set_eval(evaluators=added)
        else:
            self.config = self.config.model_copy(update={section: added})

    def _set_eval(self, **fields: Any) -> None:
        self.config = self.config.model_copy(update={"eval": self.config.eval.model_copy(update=fields)})


def _find_field(fields: Mapping[str, Any], name: str, path: str, setter: str) -> Any:
    if name not in fields:
        raise ConfigError([f"{path}: is not set yet: call {setter} first"])
    return fields[name]


def _check_kind(config: C, base: type[ComponentConfig]) -> C:
    if not isinstance(config, base):
        raise TypeError(f"the configuration is a {type(config).__name__}; wanted is one of a {KINDS[base].name}")
    return config
