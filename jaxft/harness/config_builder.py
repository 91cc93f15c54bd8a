"""The config builder: collects the configuration of a run without a file, component by component.

    builder = ConfigBuilder()
    await builder.add_llm("policy", LocalPolicyConfig(...))
    ...
    async with open_session(builder.complete_config(FinetuneConfig(...))) as session: ...

The names of its methods are those of the toolkit's workflow builder, and so is what is awaited, although the components
are made by the session.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxft.errors import ConfigError, did_you_mean
from jaxft.harness.config import Config, EvalConfig, EvalGeneralConfig, config_from_mapping
from jaxft.harness.data_models import FinetuneConfig
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
        self._put(LLMConfig, config, name)

    async def set_workflow(self, config: WorkflowConfig) -> None:
        """Set the workflow."""
        self._put(WorkflowConfig, config)

    async def set_dataset(self, config: DatasetConfig) -> None:
        """Set the dataset, `eval.general.dataset`."""
        self._put(DatasetConfig, config)

    async def add_evaluator(self, name: str, config: EvaluatorConfig) -> None:
        """Add the evaluator `eval.evaluators.<name>`."""
        self._put(EvaluatorConfig, config, name)

    async def add_trajectory_builder(self, name: str, config: TrajectoryBuilderConfig) -> None:
        """Add the builder `trajectory_builders.<name>`."""
        self._put(TrajectoryBuilderConfig, config, name)

    async def add_trainer_adapter(self, name: str, config: TrainerAdapterConfig) -> None:
        """Add the adapter `trainer_adapters.<name>`."""
        self._put(TrainerAdapterConfig, config, name)

    async def add_trainer(self, name: str, config: TrainerConfig) -> None:
        """Add the trainer `trainers.<name>`."""
        self._put(TrainerConfig, config, name)

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
        return self._find_config(LLMConfig, name)

    def get_workflow_config(self) -> WorkflowConfig:
        """Return the configuration of the workflow."""
        return self._find_config(WorkflowConfig)

    def get_dataset_config(self) -> DatasetConfig:
        """Return the configuration of the dataset."""
        return self._find_config(DatasetConfig)

    def get_evaluator_config(self, name: str) -> EvaluatorConfig:
        """Return the configuration of `eval.evaluators.<name>`."""
        return self._find_config(EvaluatorConfig, name)

    async def get_trajectory_builder_config(self, name: str) -> TrajectoryBuilderConfig:
        """Return the configuration of `trajectory_builders.<name>`."""
        return self._find_config(TrajectoryBuilderConfig, name)

    async def get_trainer_adapter_config(self, name: str) -> TrainerAdapterConfig:
        """Return the configuration of `trainer_adapters.<name>`."""
        return self._find_config(TrainerAdapterConfig, name)

    async def get_trainer_config(self, name: str) -> TrainerConfig:
        """Return the configuration of `trainers.<name>`."""
        return self._find_config(TrainerConfig, name)

    def get_max_concurrency(self) -> int:
        """Return `eval.general.max_concurrency`, for a `BaseEvaluator`."""
        return self.config.eval.general.max_concurrency

    def _configs(self, base: type[ComponentConfig]) -> dict[str, Any]:
        """Return the fields of the section that has the components of a kind."""
        fields = dict(self.config)
        for part in KINDS[base].path()[:-1]:
            fields = dict(fields[part])
        return fields

    def _find_config(self, base: type[ComponentConfig], name: str = "") -> Any:
        """Return the configuration of a component; only a workflow and a dataset have no name."""
        configs, (*section, last) = self._configs(base), KINDS[base].path(name)
        if last in configs:
            return configs[last]
        if not name:
            raise ConfigError(f"{KINDS[base].section}: is not set yet: call set_{last} first")
        raise ConfigError(f"'{name}' is not in '{'.'.join(section)}'{did_you_mean(name, configs, what='there')}")

    def _put(self, base: type[ComponentConfig], config: ComponentConfig, name: str = "") -> None:
        """Put in the configuration of a component, in the place of an earlier one if it has no name."""
        path = KINDS[base].path(name)
        if name and name in self._configs(base):
            raise ConfigError(f"'{name}' is in '{'.'.join(path[:-1])}' already: give one of them another name")
        if not isinstance(config, base):
            raise TypeError(f"the configuration is a {type(config).__name__}; wanted is one of a {KINDS[base].name}")
        self.config = _with_value(self.config, path, config)


def _with_value(node: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy of a configuration, or of a mapping in it, with a value at a path."""
    name, *rest = path
    changed = {name: _with_value(dict(node)[name], rest, value) if rest else value}
    return node | changed if isinstance(node, dict) else node.model_copy(update=changed)
