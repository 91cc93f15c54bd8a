"""The configuration of a run: one tree of strict models, read from YAML, with every fault reported at once.

    config = load_config("run.yml", overrides=[("finetuning.seed", "3")])

A path of the tree is relative to the folder of the file it is written in (`finetuning.output_dir`, which is written
to and not read, to the working directory).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, SerializeAsAny, ValidationError
from pydantic_core import ErrorDetails

import jaxft.harness.datasets  # noqa: F401 (registers the dataset loaders that every configuration may choose)
from jaxft.harness import schema
from jaxft.harness.data_models import FinetuneConfig
from jaxft.harness.errors import ConfigError, did_you_mean
from jaxft.harness.fields import REFERENCE_SECTIONS, ConfigModel, fault, kind_of
from jaxft.harness.layers import Faults, expanded, layers_of, override, read_layers
from jaxft.harness.registry import (
    ComponentConfig,
    DatasetConfig,
    EvaluatorConfig,
    LLMConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
    WorkflowConfig,
    registry,
)
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.harness.user_modules import import_installed, import_module, locate_module


def _chosen_by_type(base: type[ComponentConfig]) -> PlainValidator:
    def validate(value: Any, info: Any) -> ComponentConfig:
        if isinstance(value, base):
            return value
        if not isinstance(value, Mapping):
            raise fault(f"must be a mapping with '_type' (holds {kind_of(value)})")
        type_name = value.get("_type")
        if not isinstance(type_name, str):
            raise fault(
                f"needs '_type', which chooses the {base.kind}; registered: {', '.join(registry.names(base)) or 'none'}"
            )
        try:
            config_type = registry.find(base, type_name).config_type
        except ConfigError as error:
            raise fault(str(error)) from None
        fields = {name: field for name, field in value.items() if name != "_type"}
        return config_type.model_validate(fields, context=info.context)

    return PlainValidator(validate)


AnyLLM = Annotated[SerializeAsAny[LLMConfig], _chosen_by_type(LLMConfig)]
AnyWorkflow = Annotated[SerializeAsAny[WorkflowConfig], _chosen_by_type(WorkflowConfig)]
AnyEvaluator = Annotated[SerializeAsAny[EvaluatorConfig], _chosen_by_type(EvaluatorConfig)]
AnyDataset = Annotated[SerializeAsAny[DatasetConfig], _chosen_by_type(DatasetConfig)]
AnyTrajectoryBuilder = Annotated[SerializeAsAny[TrajectoryBuilderConfig], _chosen_by_type(TrajectoryBuilderConfig)]
AnyTrainerAdapter = Annotated[SerializeAsAny[TrainerAdapterConfig], _chosen_by_type(TrainerAdapterConfig)]
AnyTrainer = Annotated[SerializeAsAny[TrainerConfig], _chosen_by_type(TrainerConfig)]


class EvalGeneralConfig(ConfigModel):
    """How the workflow is run over the dataset."""

    max_concurrency: int = Field(default=64, ge=1, description="Episodes that run at once, at most.")
    dataset: AnyDataset = Field(description="The examples.")


class EvalConfig(ConfigModel):
    """The examples, and what judges the workflow on them."""

    general: EvalGeneralConfig
    evaluators: dict[str, AnyEvaluator] = Field(default={}, description="What scores an output, by name.")


class Config(ConfigModel):
    """The whole tree."""

    imports: tuple[Annotated[str, BeforeValidator(locate_module)], ...] = Field(
        default=(),
        description="Modules that register components: next to the file, in the working directory, or installed.",
    )
    llms: dict[str, AnyLLM] = Field(default={}, description="Language models, by name.")
    workflow: AnyWorkflow = Field(description="The agent.")
    eval: EvalConfig
    trajectory_builders: dict[str, AnyTrajectoryBuilder] = Field(default={}, description="By name.")
    trainer_adapters: dict[str, AnyTrainerAdapter] = Field(default={}, description="By name.")
    trainers: dict[str, AnyTrainer] = Field(default={}, description="By name.")
    finetuning: FinetuneConfig = FinetuneConfig()


def load_config(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """The configuration of a YAML file.

    Args:
        path: of the file.
        overrides: `(dotted path, YAML text)` pairs, applied in their order after the file and those it inherits.

    Raises:
        ConfigError: with all faults, each with its path.
    """
    return _config(read_layers(Path(path)), overrides, str(path))


def config_from_mapping(
    mapping: Mapping[str, Any], *, base_dir: str | Path, overrides: Sequence[tuple[str, str]] = ()
) -> Config:
    """The same from a mapping made by a program; its paths are relative to `base_dir`."""
    return _config(layers_of(mapping, Path(base_dir).absolute()), overrides, "the configuration")


def resolved_yaml(config: Config) -> str:
    """The tree as YAML that loads, from any folder, to an equal tree: every field, paths absolute, secrets masked."""
    return dump_yaml(_escaped(config.model_dump(mode="json")))


def help_text() -> str:
    """Every knob of the tree and of the registered components, made from the fields' descriptions."""
    import_installed()
    return schema.describe(Config)


def _config(mapping: dict[str, Any], overrides: Sequence[tuple[str, str]], source: str) -> Config:
    faults = Faults()
    override(mapping, overrides, faults)
    values = expanded(mapping, "", faults)
    import_installed()
    imports_failed = not _import_modules(values.get("imports"), faults)
    try:
        config = Config.model_validate(values, context=_names(values))
    except ValidationError as error:
        for details in error.errors(include_url=False):
            path = ".".join(str(part) for part in details["loc"])
            # A component that a broken module would have registered is no fault of its own.
            if not faults.is_known(path) and not (imports_failed and "registered: " in details["msg"]):
                faults.add(path, _message(details, values))
    if faults:
        raise ConfigError(faults.lines(), source)
    return config


def _import_modules(names: Any, faults: Faults) -> bool:
    """Whether all modules could be imported; an ill-formed list is left to the validation."""
    for index, name in enumerate(names if isinstance(names, list) else []):
        try:
            if isinstance(name, str) and not faults.is_known(f"imports.{index}"):
                import_module(name)
        except ConfigError as error:
            faults.add(f"imports.{index}", str(error))
    return not any(path.startswith("imports") for path in faults)


def _names(values: dict[str, Any]) -> dict[str, list[str]]:
    """The entries of every section that other fields refer to."""
    names = {}
    for section in REFERENCE_SECTIONS:
        entries: Any = values
        for part in section.split("."):
            entries = entries.get(part) if isinstance(entries, dict) else None
        names[section] = list(entries) if isinstance(entries, dict) else []
    return names


def _message(details: ErrorDetails, values: dict[str, Any]) -> str:
    """A fault in words. The value itself is never among them: it may be a secret."""
    *parents, last = details["loc"] or ("",)
    if details["type"] == "extra_forbidden":
        return "no such field" + did_you_mean(str(last), schema.fields_at(Config, parents, values), what="fields here")
    if details["type"] == "missing":
        return "is required, but not there"
    if details["type"] == "fault":
        return details["msg"]
    if details["type"] in ("model_type", "dict_type"):
        return f"must be a mapping (holds {kind_of(details['input'])})"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should be", "must be", 1)
    is_about_kind = details["type"].endswith(("_type", "_parsing"))
    return f"{message} (holds {kind_of(details['input'])})" if is_about_kind else message


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return value.replace("${", "$${") if isinstance(value, str) else value
