"""Components by name: config classes that name themselves, the factories that make instances of them, one registry.

    class MyConfig(EvaluatorConfig, name="my_evaluator"):
        threshold: float = Field(default=0.5, description="...")

    @register_evaluator(config_type=MyConfig)
    async def my_evaluator(config, builder):
        async def score(item): ...
        yield score                # made once per run; what stands after the yield runs when the run ends

In a configuration `_type: my_evaluator` chooses it.
"""

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, model_serializer

from jaxft.harness.data_models import RewardFunctionConfig
from jaxft.harness.errors import ConfigError, did_you_mean
from jaxft.harness.fields import ConfigModel


class ComponentConfig(ConfigModel):
    """The base of the seven kinds of config below.

    Attributes:
        component_kind: what it configures, in words.
        type_name: what `_type` says to choose it; None for a class that was not given a name.
    """

    component_kind: ClassVar[str] = "component"
    type_name: ClassVar[str | None] = None

    def __init_subclass__(cls, *, name: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.type_name = name

    @model_serializer(mode="wrap")
    def _with_type(self, serialize: Any) -> dict[str, Any]:
        return {"_type": self.type_name, **serialize(self)}


class LLMConfig(ComponentConfig):
    """A language model."""

    component_kind = "llm"

    def sharding_table(self) -> str | None:
        """Which of its parameters lie where on a mesh of devices, as text; None for those that this process has not.

        Raises:
            ValueError: they cannot lie so.
        """
        return None


class WorkflowConfig(ComponentConfig):
    """An agent: `async def f(example: dict) -> Any`."""

    component_kind = "workflow"


class EvaluatorConfig(ComponentConfig):
    """A function from an `EvalInputItem` to a number, named numbers, an `EvalOutputItem` or None; sync or async."""

    component_kind = "evaluator"
    timeout_seconds: float | None = Field(
        default=None,
        gt=0.0,
        allow_inf_nan=False,
        description="Episodes fail that take it longer to judge. A sync evaluator is then called in a thread of its "
        "own, and so must allow for calls at the same time. null: it may take for ever.",
    )


class GroupEvaluatorConfig(EvaluatorConfig):
    """A function from the episodes of one example, a `list[EvalInputItem]`, to a list with a score for each.

    The list holds, in the order of generation, those that did not fail: at least one, and in validation often just one.
    """


class DatasetConfig(ComponentConfig):
    """A list of `EvalInputItem`."""

    component_kind = "dataset loader"


class TrajectoryBuilderConfig(ComponentConfig):
    """A `TrajectoryBuilder`."""

    model_config = ConfigDict(frozen=False)
    component_kind = "trajectory builder"
    reward: RewardFunctionConfig | None = None  # set from finetuning.reward_function


class TrainerAdapterConfig(ComponentConfig):
    """A `TrainerAdapter`."""

    model_config = ConfigDict(frozen=False)
    component_kind = "trainer adapter"
    reward: RewardFunctionConfig | None = None  # set from finetuning.reward_function


class TrainerConfig(ComponentConfig):
    """A `Trainer`."""

    model_config = ConfigDict(frozen=False)
    component_kind = "trainer"
    reward: RewardFunctionConfig | None = None  # set from finetuning.reward_function


KINDS: tuple[type[ComponentConfig], ...] = (
    LLMConfig,
    WorkflowConfig,
    EvaluatorConfig,
    DatasetConfig,
    TrajectoryBuilderConfig,
    TrainerAdapterConfig,
    TrainerConfig,
)

Factory = Callable[[Any, Any], AsyncIterator[Any]]
"""An async generator function `(config, builder)` that yields the instance once."""

F = TypeVar("F", bound=Factory)


class Component(NamedTuple):
    """A registered factory and where it was written."""

    config_type: type[ComponentConfig]
    factory: Factory
    file: str
    qualname: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.qualname} ({self.file}:{self.line})"


class Registry:
    """Components by kind and name."""

    def __init__(self) -> None:
        self._components: dict[tuple[str, str], Component] = {}

    def add(self, base: type[ComponentConfig], config_type: type[ComponentConfig], factory: Factory) -> None:
        """Registers a factory for a config class of the kind `base`.

        The same function of the same line may come again (a module that is reloaded, or imported under a second name);
        the newer one then counts.

        Raises:
            TypeError: not a config class of that kind, a class without a name, or not an async generator function.
            ConfigError: another factory has the name.
        """
        if not issubclass(config_type, base):
            raise TypeError(f"config_type is {config_type.__name__}, which is no {base.__name__}")
        if config_type.type_name is None:
            raise TypeError(
                f"{config_type.__name__} has no name: write class {config_type.__name__}({base.__name__}, name='...')"
            )
        if not inspect.isasyncgenfunction(factory):
            raise TypeError(
                f"{factory} is no factory: write it as `async def factory(config, builder)` with one `yield`"
            )
        code = factory.__code__
        new = Component(config_type, factory, code.co_filename, factory.__qualname__, code.co_firstlineno)
        key = (base.component_kind, config_type.type_name)
        old = self._components.get(key)
        if old is not None and old.place != new.place:
            raise ConfigError(
                [f"two {base.component_kind}s are named '{key[1]}': {old.place} and {new.place}: rename one"]
            )
        self._components[key] = new

    def find(self, base: type[ComponentConfig], name: str) -> Component:
        """The component of that kind and name.

        Raises:
            ConfigError: there is none; the message names those there are.
        """
        if (base.component_kind, name) not in self._components:
            names = self.names(base)
            listed = f"; registered: {', '.join(names) or 'none'}"
            near = did_you_mean(name, names, what="registered")
            raise ConfigError([f"no {base.component_kind} is named '{name}'{near}{'' if near == listed else listed}"])
        return self._components[base.component_kind, name]

    def packages(self) -> set[str]:
        """The top-level names of the modules that registered components."""
        return {component.factory.__module__.partition(".")[0] for component in self._components.values()}

    def names(self, base: type[ComponentConfig]) -> list[str]:
        """The registered names of a kind, sorted."""
        return sorted(name for kind, name in self._components if kind == base.component_kind)


registry = Registry()
"""All components of this process."""


def _decorator(base: type[ComponentConfig]) -> Callable[..., Callable[[F], F]]:
    def register(*, config_type: type[ComponentConfig]) -> Callable[[F], F]:
        def decorate(factory: F) -> F:
            registry.add(base, config_type, factory)
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
