"""The registry of components: config classes with a name, and the factories that make instances from them.

    class MyConfig(EvaluatorConfig, name="my_evaluator"):
        threshold: float = Field(default=0.5, description="...")

    @register_evaluator(config_type=MyConfig)
    async def my_evaluator(config, builder):
        async def score(item): ...
        yield score                # made once per run; what stands after the yield runs when the run ends

In a configuration `_type: my_evaluator` chooses it.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, PlainValidator, model_serializer

from jaxft.errors import ComponentError, ConfigError, UserCodeError, did_you_mean, user_code
from jaxft.harness.addresses import ServeConfig
from jaxft.harness.config_types import ConfigModel, ConfigText, RewardFunctionConfig, config_error, kind_in_words
from jaxft.plugins import plugins


class ComponentConfig(ConfigModel):
    """Base of the kinds of component configs in `KINDS`.

    A subclass has the keywords `name`, its `_type`; `factory`, the `module:function` of its factory, unless that is
    registered by a decorator; and `install`, the extra of jaxft that this module needs.

    Attributes:
        type_name: the `_type` that chooses this class; None for a class without a name.
    """

    type_name: ClassVar[str | None] = None

    def __init_subclass__(
        cls, *, name: str | None = None, factory: str | None = None, install: str | None = None, **options: Any
    ) -> None:
        super().__init_subclass__(**options)
        cls.type_name = name
        if factory is not None:
            REGISTRY.add(cls, factory, extra=install)

    @model_serializer(mode="wrap")
    def _with_type(self, serialize: Any) -> dict[str, Any]:
        return {"_type": self.type_name, **serialize(self)}


class CheckedConfig(ComponentConfig):
    """A component that is checked beside the others of a configuration."""

    def faults(self, name: str, config: Any) -> list[tuple[str, str]]:
        """Return path and message of each fault of this component beside the others of a configuration.

        Args:
            name: its name in the configuration.
            config: the whole `Config`, each field of which is valid.
        """
        return []


class LLMConfig(CheckedConfig):
    """A language model.

    Attributes:
        module: module with a function of the configuration of a model in this process; None for a model elsewhere.
            `sharding_table` returns a table of the parameters' sharding, or None without a mesh. It raises ValueError
            for an impossible mesh.
    """

    module: ClassVar[str | None] = None

    @property
    def served_at(self) -> ServeConfig | None:
        """The address at which the run serves its language models; None if this one asks for none."""
        return None

    def with_higher_port(self, difference: int) -> "LLMConfig":
        """Return this language model for another process of the machine, whose port, if one is chosen, is higher."""
        return self


class WorkflowConfig(ComponentConfig):
    """An agent: `async def f(example: dict) -> Any`."""


class EvaluatorConfig(ComponentConfig):
    """A function from an `EvalInputItem` to a number, named numbers, an `EvalOutputItem` or None; sync or async.

    An `EvaluatorInfo` or a `BaseEvaluator`, as the toolkit has them, is one, too.
    """

    timeout_seconds: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Seconds that it may take to score an episode, which fails after that. With a limit, a sync evaluator runs in a
    thread of its own and so may be called several times at once; null: no limit."""


class GroupEvaluatorConfig(EvaluatorConfig):
    """A function from the episodes of one example, a `list[EvalInputItem]`, to a list with a score for each.

    The list holds the episodes that did not fail, in the order of generation: at least one, in validation often one.
    """


class DatasetConfig(ComponentConfig):
    """A list of `EvalInputItem`."""


class RewardedConfig(ComponentConfig):
    """A component that is told the reward function of the run."""

    model_config = ConfigDict(frozen=False)
    reward: RewardFunctionConfig | None = None  # set from finetuning.reward_function


class TrajectoryBuilderConfig(RewardedConfig):
    """A `TrajectoryBuilder`.

    Attributes:
        needs_reward: False for one whose trajectories need no `finetuning.reward_function`.
    """

    needs_reward: ClassVar[bool] = True


class TrainerAdapterConfig(CheckedConfig, RewardedConfig):  # whose settings are not frozen
    """A `TrainerAdapter`."""

    def resolved(self, config: Any, recorded: Mapping[str, Any]) -> "TrainerAdapterConfig":
        """Return this adapter with values for the fields whose defaults depend on other components.

        Args:
            config: the whole `Config`, each field of which is valid.
            recorded: the fields of the adapter in the run that is continued, whose values go before; empty if none is.
        """
        return self


class TrainerConfig(RewardedConfig):
    """A `Trainer`."""


class LoggerConfig(ComponentConfig):
    """A `RunLogger`."""


class Kind(NamedTuple):
    """One kind of component: its name in messages, and its path in a configuration."""

    name: str
    section: str

    def path(self, name: str = "") -> list[str]:
        """Return the parts of the path of the component with this name; a workflow and a dataset have none."""
        return [name if part == "<name>" else part for part in self.section.split(".")]


KINDS: dict[type[ComponentConfig], Kind] = {
    LLMConfig: Kind("llm", "llms.<name>"),
    WorkflowConfig: Kind("workflow", "workflow"),
    EvaluatorConfig: Kind("evaluator", "eval.evaluators.<name>"),
    DatasetConfig: Kind("dataset loader", "eval.general.dataset"),
    TrajectoryBuilderConfig: Kind("trajectory builder", "trajectory_builders.<name>"),
    TrainerAdapterConfig: Kind("trainer adapter", "trainer_adapters.<name>"),
    TrainerConfig: Kind("trainer", "trainers.<name>"),
    LoggerConfig: Kind("logger", "finetuning.loggers.<n>"),
}
"""The kinds of components, by the base class of their configurations."""

Factory = Callable[[Any, Any], AsyncIterator[Any]]
"""An async generator function `(config, builder)` that yields the instance once."""

F = TypeVar("F", bound=Factory)


class Component(NamedTuple):
    """A registered factory, its config class and its position in the source.

    Attributes:
        config_type: the class of its configuration.
        factory: the function, or its `module:function`, imported when the component is first made.
        place: function, file and line, for messages.
        extra: extra of jaxft with the packages that the module of the factory imports; None if it needs none.
    """

    config_type: type[ComponentConfig]
    factory: Factory | str
    place: str
    extra: str | None = None

    def load(self, what: str) -> Factory:
        """Return the factory of `what`; import its module if it was registered by name.

        Raises:
            ComponentError: the packages of `extra` are not installed.
        """
        if not isinstance(self.factory, str):
            return self.factory
        try:
            return pkgutil.resolve_name(self.factory)
        except ImportError as error:
            if self.extra is None:
                raise
            raise ComponentError(f'{what}: needs a package ({error}): pip install "jaxft[{self.extra}]"') from None

    @property
    def package(self) -> str:
        """The top-level package of the factory."""
        module = self.factory if isinstance(self.factory, str) else self.factory.__module__
        return module.partition(".")[0]


class Registry:
    """Components by kind and name."""

    def __init__(self) -> None:
        self._components: dict[tuple[type[ComponentConfig], str], Component] = {}

    def add(self, config_type: type[ComponentConfig], factory: Factory | str, *, extra: str | None = None) -> None:
        """Register a factory, or its `module:function`, for a config class.

        The same function may be registered again (if its module is reloaded, or imported by another name) and then
        replaces the earlier one. `extra` is the extra of jaxft that its module needs.

        Raises:
            TypeError: the class has no name or is of no kind, or the factory is not an async generator function.
            ConfigError: another factory has the name.
        """
        base = next((base for base in KINDS if issubclass(config_type, base)), None)
        if base is None:
            raise TypeError(
                f"{config_type.__name__} is of no kind: derive it from {', '.join(each.__name__ for each in KINDS)}"
            )
        if config_type.type_name is None:
            raise TypeError(
                f"{config_type.__name__} has no name: write class {config_type.__name__}({base.__name__}, name='...')"
            )
        place = factory if isinstance(factory, str) else _source_place(factory)
        new = Component(config_type, factory, place, extra)
        name = config_type.type_name
        old = self._components.setdefault((base, name), new)
        if old.place != new.place:
            raise ConfigError(f"two {KINDS[base].name}s are named '{name}': {old.place} and {new.place}: rename one")
        self._components[base, name] = new

    def find(self, base: type[ComponentConfig], name: str) -> Component:
        """Return the component of that kind and name.

        Raises:
            ConfigError: there is none; the message lists the registered names.
        """
        if (base, name) not in self._components:
            names = self.names(base)
            listed = f"; registered: {', '.join(names) or 'none'}"
            near = did_you_mean(name, names, what="registered")
            raise ConfigError(f"no {KINDS[base].name} is named '{name}'{near}{'' if near == listed else listed}")
        return self._components[base, name]

    def packages(self) -> set[str]:
        """Return the top-level packages that registered components."""
        return {component.package for component in self._components.values()}

    def names(self, base: type[ComponentConfig]) -> list[str]:
        """Return the registered names of a kind, sorted."""
        return sorted(name for kind, name in self._components if kind is base)


def _source_place(factory: Factory) -> str:
    if not inspect.isasyncgenfunction(factory):
        raise TypeError(f"{factory} is no factory: write it as `async def factory(config, builder)` with one `yield`")
    code = factory.__code__
    return f"{factory.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


REGISTRY = Registry()
"""All components of this process."""


def chosen_by_type(base: type[ComponentConfig]) -> PlainValidator:
    """Return the validator of a field with a component of this kind, whose class its `_type` chooses."""

    def validate(value: Any, info: Any) -> ComponentConfig:
        if isinstance(value, base):
            return value
        if not isinstance(value, Mapping):
            raise config_error(f"must be a mapping with '_type' (holds {kind_in_words(value)})")
        type_name = value.get("_type")
        if not isinstance(type_name, str):
            names = ", ".join(REGISTRY.names(base)) or "none"
            raise config_error(f"needs '_type', which chooses the {KINDS[base].name}; registered: {names}")
        try:
            config_type = REGISTRY.find(base, type_name).config_type
        except ConfigError as error:
            raise config_error(str(error)) from None
        fields = {name: field for name, field in value.items() if name != "_type"}
        return config_type.model_validate(fields, context=info.context)

    return PlainValidator(validate)


def _decorator(base: type[ComponentConfig]) -> Callable[..., Callable[[F], F]]:
    def register(*, config_type: type[ComponentConfig]) -> Callable[[F], F]:
        def decorate(factory: F) -> F:
            if not issubclass(config_type, base):
                raise TypeError(f"config_type is {config_type.__name__}, which is no {base.__name__}")
            REGISTRY.add(config_type, factory)
            return factory

        return decorate

    return register


register_llm = _decorator(LLMConfig)
register_workflow = _decorator(WorkflowConfig)
register_evaluator = _decorator(EvaluatorConfig)
register_dataset_loader = _decorator(DatasetConfig)
register_trajectory_builder = _decorator(TrajectoryBuilderConfig)
register_trainer_adapter = _decorator(TrainerAdapterConfig)
register_trainer = _decorator(TrainerConfig)
register_logger = _decorator(LoggerConfig)


ENTRY_POINTS = "jaxft.components"


def import_installed() -> None:
    """Import the entry points of the group `jaxft.components` of all installed packages, once per process.

    Raises:
        ConfigError: one of them cannot be imported.
    """
    plugins(ENTRY_POINTS)


def locate_module(name: Any) -> Any:
    """Return the path of an entry of `imports:`, found next to the YAML file or in the working directory.

    If neither has it, return the name itself, for an installed module. A value that is not a text stays unchanged.
    """
    if not isinstance(name, str):
        return name
    folders = [name.folder] if isinstance(name, ConfigText) else []
    for folder in (*folders, Path.cwd()):
        for path in (folder / f"{name}.py", folder / name):
            if path.is_file() or (path / "__init__.py").is_file():
                return str(path)
    return str(name)


def import_module(name: str) -> None:
    """Import an entry of `imports:`; the folders of the search stay on `sys.path`, for the module's own imports.

    Raises:
        ConfigError: there is no such module, it raised (the message ends with the traceback's last frames), or another
            module has its name already.
    """
    location = locate_module(name)
    path = Path(location)
    is_path = location != path.name
    folders = [name.folder] if isinstance(name, ConfigText) else []
    for folder in (Path.cwd(), *folders, *([path.parent] if is_path else [])):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        with user_code():
            module = importlib.import_module(path.stem if is_path else location)
    except UserCodeError as failure:
        raise ConfigError(f"the module '{name}' cannot be imported:{failure.where}") from failure.error
    file = path / "__init__.py" if path.is_dir() else path
    if is_path and Path(module.__file__ or "").resolve() != file.resolve():
        raise ConfigError(f"the module '{name}' is {module.__file__}, not {file}: rename one of them")
