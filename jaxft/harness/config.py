"""The configuration of a run: one tree of strict models, read from YAML, with every fault reported at once.

    config = load_config("run.yml", overrides=[("finetuning.seed", "3")])

A path is relative to the folder of the file it is written in; an output directory, to the working directory.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from jsonpath_ng.exceptions import JSONPathError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    SecretBytes,
    SecretStr,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

import jaxft.harness.arrow_datasets
import jaxft.harness.atif  # noqa: F401
from jaxft.errors import ConfigError, did_you_mean
from jaxft.harness.config_merge import (
    OUTPUT_DIR,
    ConfigErrors,
    escape_fields,
    expanded,
    literal,
    merge_with_base,
    override,
    read_layers,
    with_fields_expanded,
)
from jaxft.harness.config_types import (
    ConfigModel,
    InputPath,
    OutputPath,
    config_error,
    entries,
    kind_in_words,
    parse_json_path,
    raise_faults,
    walk,
)
from jaxft.harness.data_models import FinetuneConfig
from jaxft.harness.datasets import dataset_for_file
from jaxft.harness.evaluators import weighted_sum_faults
from jaxft.harness.registry import (
    REGISTRY,
    EvaluatorConfig,
    LLMConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
    chosen_by_type,
    import_installed,
    import_module,
    locate_module,
)
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.harness.tasks import AnyDataset, AnyWorkflow
from jaxft.redaction import map_texts, redacted
from jaxft.runs.environment import is_secret_name, secrets_in_urls
from jaxft.runs.files import CONFIG_FILE

Model = TypeVar("Model", bound=BaseModel)

AnyLLM = Annotated[SerializeAsAny[LLMConfig], chosen_by_type(LLMConfig)]
AnyEvaluator = Annotated[SerializeAsAny[EvaluatorConfig], chosen_by_type(EvaluatorConfig)]
AnyTrajectoryBuilder = Annotated[SerializeAsAny[TrajectoryBuilderConfig], chosen_by_type(TrajectoryBuilderConfig)]
AnyTrainerAdapter = Annotated[SerializeAsAny[TrainerAdapterConfig], chosen_by_type(TrainerAdapterConfig)]
AnyTrainer = Annotated[SerializeAsAny[TrainerConfig], chosen_by_type(TrainerConfig)]


def _json_path(text: str) -> str:
    try:
        parse_json_path(text)
    except JSONPathError as error:
        raise config_error(f"is no JSON path: {' '.join(str(error).split())}") from None
    return text


JSONPath = Annotated[str, AfterValidator(_json_path)]
"""A JSON path into a value, such as `$.choices[0].text`."""


class EvalGeneralConfig(ConfigModel):
    """The dataset, and how the workflow runs over it."""

    max_concurrency: int = Field(default=64, ge=1)
    """Maximum number of episodes that run at once."""
    timeout_seconds: float | None = Field(default=3600.0, gt=0.0, allow_inf_nan=False)
    """Seconds that the workflow may take for an episode, which fails after that. Waiting for the policy counts, and
    so does compiling for its first replies (minutes for a large model); null: no limit."""
    isolation: Literal["none", "process"] = "none"
    """Where the workflow runs. none: in the run's own process. process: in workers, processes of one episode or
    evaluation at a time, so that an agent that hangs, leaks or crashes costs its episode only."""
    judge_isolation: Literal["none", "process"] = "none"
    """The same for evaluators: their timeout_seconds then ends whatever they do."""
    worker_memory_mb: int | None = Field(default=4096, ge=16)
    """MiB that a worker may take beside what importing the agent took; each process that it starts may take as much.
    null: no limit."""
    dataset: AnyDataset
    """The examples to run the workflow on."""
    result_json_path: JSONPath | None = None
    """JSON path of the result inside the workflow's output, as in $.answer, for the evaluators; null: the whole
    output."""
    pass_threshold: float = Field(default=1.0, allow_inf_nan=False)
    """The least reward of an episode that passes, for pass@k and maj@k of evaluations and validations."""
    breakdown_by: str | None = Field(default=None, min_length=1)
    """Column of the dataset, such as difficulty, for each of whose values evaluations and validations have scores;
    null: none, or with finetuning.per_task the column of the tasks."""
    output_dir: OutputPath | None = None
    """Directory that `jaxft eval` writes to, relative to the working directory; null: it writes no file. Training
    ignores it and writes to finetuning.output_dir."""


class ValidationConfig(ConfigModel):
    """Validation of the policy on held-out examples while it is trained."""

    dataset: AnyDataset | None = None
    """The held-out examples; null: the dataset of config_file."""
    config_file: InputPath | None = None
    """Another configuration file, whose workflow and evaluators are used; null: those of this file. Its llms give
    way to this file's llms of the same names, so that the policy in training is validated."""
    interval: int = Field(default=5, ge=1)
    """Epochs between two validations; one also runs before the first epoch and after the last."""
    temperature: float | None = Field(default=0.0, ge=0.0)
    """Temperature of every model call (0: greedy); null: each call keeps its own."""
    num_generations: int = Field(default=1, ge=1)
    """Number of episodes per example."""

    @model_validator(mode="after")
    def _has_examples(self) -> "ValidationConfig":
        if self.dataset is None and self.config_file is None:
            raise config_error("needs a 'dataset', or a 'config_file' with one")
        return self


class EvalConfig(ConfigModel):
    """The section `eval`: dataset, validation and evaluators."""

    general: EvalGeneralConfig
    validation: ValidationConfig | None = None
    """Validation while training; null: no validation."""
    evaluators: dict[str, AnyEvaluator] = Field(default={})
    """Functions that score an episode, by name."""

    @field_validator("evaluators")
    @classmethod
    def _sums_add_up_scores(cls, evaluators: dict[str, AnyEvaluator]) -> dict[str, AnyEvaluator]:
        raise_faults((f"{name}.weights", message) for name, message in weighted_sum_faults(evaluators))
        return evaluators


class ModelsConfig(ConfigModel):
    """The sections of a configuration that language models need."""

    imports: tuple[Annotated[str, BeforeValidator(locate_module)], ...] = ()
    """Python modules to import, which register components: next to this file, in the working directory, or
    installed."""
    llms: dict[str, AnyLLM] = Field(default={})
    """Language models, by name."""


class Config(ModelsConfig):
    """The whole configuration of a run."""

    workflow: AnyWorkflow
    """The agent: a function from an example to an output."""
    eval: EvalConfig
    trajectory_builders: dict[str, AnyTrajectoryBuilder] = Field(default={})
    """Trajectory builders, by name."""
    trainer_adapters: dict[str, AnyTrainerAdapter] = Field(default={})
    """Trainer adapters, by name."""
    trainers: dict[str, AnyTrainer] = Field(default={})
    """Trainers, by name."""
    finetuning: FinetuneConfig = FinetuneConfig()

    @model_validator(mode="after")
    def _components_fit_together(self) -> "Config":
        builder = self.trajectory_builders.get(self.finetuning.trajectory_builder or "")
        is_judged = self.finetuning.reward_function is not None or not self.finetuning.enabled
        if builder is not None and builder.needs_reward and not is_judged:
            # Its `unusable` is for all tasks.
            more = "; it is needed beside evaluators of per_task: name one of them" if self.finetuning.per_task else ""
            raise_faults([("finetuning", f"enabled, but without reward_function{more}")])
        self.resolve({})
        both = (self.llms, self.trainer_adapters)
        raise_faults(fault for each in both for name, part in each.items() for fault in part.faults(name, self))
        return self

    def resolve(self, recorded: Mapping[str, Any]) -> None:
        """Give fields of adapters whose defaults depend on others their values, first those of a `recorded` run.

        Raises:
            ConfigError: such a value of the run is none.
        """
        for name, adapter in self.trainer_adapters.items():
            before = entries(entries(recorded, "trainer_adapters"), name)
            try:
                self.trainer_adapters[name] = adapter.resolved(self, before)
            except ValidationError as error:
                place = f"{CONFIG_FILE}: trainer_adapters.{name}"
                raise ConfigError([f"{place}.{path}: {_message(each)}" for path, each in _faults(error)]) from None


def load_config(
    path: str | Path,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    dataset: Path | None = None,
    validation_dataset: Path | None = None,
) -> Config:
    """Load the configuration in a YAML file.

    Args:
        path: the YAML file.
        overrides: `(dotted path, YAML text)` pairs, applied in order after the file and the files it inherits.
        dataset: a file of examples that replaces `eval.general.dataset`; its suffix tells the format, and `id_key` and
            `structure` of the configuration stay.
        validation_dataset: the same for `eval.validation.dataset`, with the fields of the dataset if it has none.

    Raises:
        ConfigError: lists all faults, each with its path.
    """
    mapping, faults = read_layers(Path(path)), ConfigErrors()
    files = {"eval.general.dataset": dataset, "eval.validation.dataset": validation_dataset}
    datasets = [(field, _dataset(file, mapping, field, faults)) for field, file in files.items() if file is not None]
    return _config(mapping, [*datasets, *overrides], str(path), faults)


def load_models(mapping: dict[str, Any], overrides: Sequence[tuple[str, str]], source: str) -> Config:
    """Return a configuration of nothing but the language models whose parameters are in this process, to serve them.

    Other models and sections are not read, so that nothing is asked for that they alone need, such as a judge's key.

    Args:
        mapping: result of `read_layers`, or one whose texts have no variables.
        overrides: as for `load_config`.
        source: its name in messages.

    Raises:
        ConfigError: lists all faults, each with its path.
    """
    faults = ConfigErrors()
    override(mapping, overrides, faults)
    import_installed()
    types = {name: REGISTRY.find(LLMConfig, name).config_type for name in REGISTRY.names(LLMConfig)}
    elsewhere = [name for name, kind in types.items() if issubclass(kind, LLMConfig) and kind.module is None]
    llms = entries(mapping, "llms").items()
    served = {name: llm for name, llm in llms if not (isinstance(llm, dict) and llm.get("_type") in elsewhere)}
    values = expanded({"imports": mapping.get("imports", []), "llms": served}, "", faults)
    models = _validate_model(ModelsConfig, values, faults)
    config = Config.model_construct(llms={} if models is None else models.llms)
    for name, llm in config.llms.items():
        for path, message in llm.faults(name, config):
            faults.add(path, message)
    if faults:
        raise ConfigError(faults.lines(), source)
    return config


def _dataset(path: Path, mapping: dict[str, Any], field: str, faults: ConfigErrors) -> str:
    """Return the YAML of a dataset in a file, which keeps the names of fields of the dataset in its place."""
    before = entries(mapping, field) or entries(mapping, "eval.general.dataset")
    try:
        named = {name: literal(value) for name, value in dataset_for_file(path).items()}
    except ValueError as error:
        faults.add(field, str(error))
        return "{}"
    return json.dumps(named | {name: before[name] for name in ("id_key", "structure") if name in before})


def config_from_mapping(
    mapping: Mapping[str, Any], *, base_dir: str | Path, overrides: Sequence[tuple[str, str]] = ()
) -> Config:
    """Make a configuration from a mapping, like `load_config` from a file; paths are relative to `base_dir`."""
    return _config(merge_with_base(mapping, Path(base_dir).absolute()), overrides, "the configuration", ConfigErrors())


def validation_config(config: Config) -> Config:
    """Return the configuration of validation: that of `eval.validation.config_file`, or `config` itself without one.

    Raises:
        ConfigError: that file has faults, or no evaluator for the reward.
    """
    section, reward = config.eval.validation, config.finetuning.reward_function
    if section is None or section.config_file is None:
        return config
    path = section.config_file
    other = _config(read_layers(path), (), str(path), ConfigErrors(), is_validation=True)
    default = None if other.finetuning.reward_function is not None or reward is None else reward.name
    tasks = {} if other.finetuning.per_task else config.finetuning.per_task
    for name in filter(None, (default, *(task.evaluator for task in tasks.values()))):
        if name not in other.eval.evaluators:
            hint = did_you_mean(name, other.eval.evaluators, what="there")
            raise ConfigError(f"eval.evaluators: has no '{name}', which gives the reward{hint}", str(path))
    return other


def resolved_yaml(config: Config) -> str:
    """Return the configuration as YAML that loads from any folder: paths are absolute, secrets masked."""
    values = map_texts(config.model_dump(mode="json"), lambda text: literal(redacted(text)))
    values["finetuning"]["output_dir"] = escape_fields(values["finetuning"]["output_dir"])
    return dump_yaml(values)


def config_secrets(config: BaseModel) -> set[str]:
    """Return all secrets of the configuration in clear: secret types, texts under names like `api_key`, and in URLs."""
    found: set[str] = set()
    for path, value in walk(config):
        if isinstance(value, SecretStr | SecretBytes):
            secret = value.get_secret_value()
            found.add(secret if isinstance(secret, str) else secret.decode(errors="replace"))
        elif isinstance(value, str):
            found |= secrets_in_urls(value) | ({value} if is_secret_name(path) else set())
    return found


def _config(
    mapping: dict[str, Any],
    overrides: Sequence[tuple[str, str]],
    source: str,
    faults: ConfigErrors,
    *,
    is_validation: bool = False,
) -> Config:
    override(mapping, overrides, faults)
    values = expanded(mapping, "", faults)
    import_installed()
    config = _validate_model(Config, values, faults)
    if config is not None and not is_validation:  # a run never writes to the directory of that configuration
        config = _with_output_dir(config, faults)
    if faults or config is None:
        raise ConfigError(faults.lines(), source)
    if config.eval.validation is not None and not is_validation:
        validation_config(config)
    return config


def _validate_model(model: type[Model], values: dict[str, Any], faults: ConfigErrors) -> Model | None:
    """Return the values as a model after its modules are imported; None if there are faults, which are added."""
    imports_failed = not _import_modules(values.get("imports"), faults)
    try:
        return model.model_validate(values, context=values)
    except ValidationError as error:
        for path, details in _faults(error):
            # A component that is unknown because its module could not be imported is not reported again.
            if not faults.is_known(path) and not (imports_failed and "registered: " in details["msg"]):
                faults.add(path, _message(details))
        return None


def _faults(error: ValidationError) -> list[tuple[str, ErrorDetails]]:
    return [(".".join(map(str, each["loc"])), each) for each in error.errors(include_url=False)]


def _with_output_dir(config: Config, faults: ConfigErrors) -> Config:
    """Return the configuration with the fields in `finetuning.output_dir` expanded."""
    finetuning = config.finetuning
    try:
        path = Path(with_fields_expanded(str(finetuning.output_dir), config.model_dump(mode="json")))
    except ValueError as error:
        faults.add(OUTPUT_DIR, str(error))
        return config
    return config.model_copy(update={"finetuning": finetuning.model_copy(update={"output_dir": path})})


def _import_modules(names: Any, faults: ConfigErrors) -> bool:
    """Import the modules, and return True if all could be; the validation refuses an ill-formed list."""
    for index, name in enumerate(names if isinstance(names, list) else []):
        try:
            if isinstance(name, str) and not faults.is_known(f"imports.{index}"):
                import_module(name)
        except ConfigError as error:
            faults.add(f"imports.{index}", str(error))
    return not any(path.startswith("imports") for path in faults)


def _message(details: ErrorDetails) -> str:
    """Return the message of a validation error, without the value, which may be a secret."""
    if details["type"] == "missing":
        return "is required, but not there"
    if details["type"] in ("fault", "value_error"):  # the words of a validator
        return details["msg"].removeprefix("Value error, ")
    if details["type"] in ("model_type", "dict_type"):
        return f"must be a mapping (holds {kind_in_words(details['input'])})"
    message = details["msg"].removeprefix("Input ").replace("should be", "must be", 1)
    is_about_kind = details["type"].endswith(("_type", "_parsing"))
    return f"{message} (holds {kind_in_words(details['input'])})" if is_about_kind else message
