"""The component builder: makes each component of a configuration once, on first use, and closes them in reverse order.

Factories receive the `Builder` and ask it for other components by their names in the configuration.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from datetime import datetime
from enum import Enum
from typing import Any

from jaxft import harness, rollout
from jaxft.errors import (
    ComponentError,
    ConfigError,
    DatasetError,
    DiskFull,
    JaxftError,
    ToolsUnsupportedError,
    UserCodeError,
    WorkerError,
    user_code,
)
from jaxft.harness.addresses import ServeConfig, reachable_url
from jaxft.harness.config import Config, validation_config
from jaxft.harness.config_builder import ConfigBuilder
from jaxft.harness.contracts import Trainer, TrainerAdapter, TrajectoryBuilder
from jaxft.harness.data_models import EvalInputItem, RewardFunctionConfig
from jaxft.harness.datasets import checked_items
from jaxft.harness.evaluation import Evaluation, Validation, Workflow
from jaxft.harness.evaluators import SECTION, BoundEvaluator, Evaluator, WeightedSum, WeightedSumConfig, as_evaluator
from jaxft.harness.registry import (
    KINDS,
    REGISTRY,
    ComponentConfig,
    DatasetConfig,
    EvaluatorConfig,
    GroupEvaluatorConfig,
    LLMConfig,
    LoggerConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
    WorkflowConfig,
)
from jaxft.harness.tasks import Tasks, tasks_of
from jaxft.plugins import plugin
from jaxft.rollout.recorder import ENDPOINT
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.runs.loggers import Loggers, RunLogger

# Paths of the components whose factories are running, outermost first; each runs in a task, so a context, of its own.
_being_made: ContextVar[tuple[str, ...]] = ContextVar("jaxft_components_being_made", default=())


class Builder(ConfigBuilder):
    """Makes components by name, inside `async with`. What is added to its configuration is not written to files.

    Attributes:
        config: the whole configuration.
        directory: the run directory.
        console: the console of the run.
        devices: descriptions of the devices that the components compute on.
        chosen: values of fields that may be `auto`, as components found them for their devices, by path.
        validation: configuration of the validation's workflow and evaluators that a program gives; None for that of
            `eval.validation`.
        now: time of the run, which chat templates that write a date write in all its prompts; None: the present time.
        make_app: makes the app of the server of the models by their names; None: that of the entry point.
    """

    def __init__(
        self, config: Config, directory: RunDirectory, console: Console, lender: "Builder | None" = None
    ) -> None:
        """Make a builder; language models that are also in the configuration of `lender` are taken from `lender`."""
        super().__init__()
        self.config = config
        self._lender = lender
        self.directory = directory
        self.console = console
        self.devices: list[str] = [] if lender is None else lender.devices
        self.chosen: dict[str, str] = {} if lender is None else lender.chosen
        self.validation: Config | None = None
        self.now: datetime | None = None if lender is None else lender.now
        self.make_app: Callable[[Any], Any] | None = None
        self._components: dict[str, asyncio.Task[Any]] = {}
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> "Builder":
        return self

    async def __aexit__(self, *exception: Any) -> None:
        for task in self._components.values():
            task.cancel()
        await asyncio.gather(*self._components.values(), return_exceptions=True)
        await self._closing.aclose()

    @property
    def is_served(self) -> bool:
        """True if the language models are served at an address."""
        return "server" in self._components

    def add_devices(self, devices: Sequence[str]) -> None:
        """Record devices for `environment.json`; called by factories of components that compute in this process.

        Args:
            devices: descriptions, as in `cpu (cpu 0)`.
        """
        self.devices.extend(device for device in dict.fromkeys(devices) if device not in self.devices)

    def add_choices(self, path: str, values: Mapping[str, str]) -> None:
        """Record, for `environment.json`, the values of fields of a component that may be `auto`.

        Args:
            path: path of the component, as in `llms.policy`.
            values: the chosen values by field.
        """
        self.chosen.update({f"{path}.{field}": value for field, value in values.items()})

    async def get_llm(self, name: str, wrapper_type: str | Enum | None = None) -> Any:
        """Return the language model `llms.<name>`.

        Args:
            name: its name in the configuration.
            wrapper_type: framework whose client of the model is returned, such as `openai` or `langchain` (the keys of
                `jaxft.rollout.frameworks.WRAPPERS`); None for the model itself.

        Raises:
            ComponentError: the framework is unknown or not installed.
        """
        if self._lender is not None and name in self._lender.config.llms:
            return await self._lender.get_llm(name, wrapper_type)
        llm = await self._language_model(name)
        return llm if wrapper_type is None else rollout.framework_client(llm, wrapper_type)

    async def _language_model(self, name: str) -> Any:
        return await self._get(LLMConfig, object, name)

    async def get_server_url(self, default: ServeConfig | None = None, port: int | None = None) -> str:
        """Return the address of the server of this run's language models, which is started if it does not run yet.

        It serves all those of this process, by their names. The base URL of an episode begins with this address.

        Args:
            default: the address to serve at if no `llms.<name>.serve` says one; None: a free port of this machine.
            port: takes the place of the address's own; None: that.

        Raises:
            ConfigError: entries of `llms` ask for different addresses, or theirs cannot be listened on.
            ComponentError: the packages of the server are not installed.
        """
        if self._lender is not None:
            return await self._lender.get_server_url(default, port)
        return await self._make_shared("server", lambda: self._serve(default, port))

    async def _serve(self, default: ServeConfig | None, port: int | None) -> str:
        asked = {name: config.served_at for name, config in self.config.llms.items() if config.served_at is not None}
        first = next(iter(asked), "")
        others = [name for name, config in asked.items() if config != asked[first]]
        if others:
            raise ConfigError(
                f"llms.{others[0]}.serve: differs from llms.{first}.serve: a run has one address, for all its llms"
            )
        config = asked.get(first) or default or ServeConfig(port=0)
        if port is not None:
            config = config.model_copy(update={"port": port})
        try:
            make_app = self.make_app or plugin("jaxft.endpoint", "app")
            make_server = plugin("jaxft.endpoint", "server")
        except ImportError as error:
            raise ComponentError(f'the server of llms needs packages ({error}): pip install "jaxft[serve]"') from None
        made = {name: await self.get_llm(name) for name in self.config.llms}
        llms = {name: llm for name, llm in made.items() if isinstance(llm, rollout.LanguageModel)}
        if not llms:
            raise ConfigError(
                "llms: none of them is of this process, such as one of type local_policy: nothing to serve"
            )
        try:
            server = make_server(make_app(llms), llms=llms, **config.server_arguments())
        except (OSError, UnicodeError) as error:  # the second for a name that DNS cannot hold
            place = f"{config.host}:{config.port}"
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"llms.{first or '<name>'}.serve: cannot listen on {place}: {reason}") from None
        self._closing.push_async_callback(server.close)
        self.console.message(f"serving {', '.join(llms)} at {server.url}" + "/v1" * (self.make_app is None))
        return config.url or reachable_url(server.url, config.host)

    async def get_workflow(self) -> Workflow:
        """Return the workflow: the agent."""
        return await self._get(WorkflowConfig, Callable)

    def _put(self, base: type[ComponentConfig], config: ComponentConfig, name: str = "") -> None:
        path = ".".join(KINDS[base].path(name))
        made = "evaluation" if base is EvaluatorConfig else path
        if made in self._components:
            raise ComponentError(f"{path}: {made} is made already: set it before")
        super()._put(base, config, name)

    async def get_evaluator(self, name: str) -> Evaluator:
        """Return the evaluator `eval.evaluators.<name>`."""
        made = await self._get(EvaluatorConfig, object, name)
        is_group = isinstance(self.get_evaluator_config(name), GroupEvaluatorConfig)
        return _check_kind(f"{SECTION}.{name}", as_evaluator(made, is_group=is_group), Callable)

    async def get_dataset(self) -> list[EvalInputItem]:
        """Return the examples of `eval.general.dataset`: at least one, with unique ids."""
        made = checked_items(await self._get(DatasetConfig, object), section := KINDS[DatasetConfig].section)
        self._tasks.check(made, section)
        return made

    async def make(self, name: str, config: ComponentConfig) -> Any:
        """Return a component within the one that is being made, such as a dataset of a mixture.

        Args:
            name: its path from there, as in `datasets.words`.
            config: its configuration.
        """
        return await self._once(f"{_being_made.get()[-1]}.{name}", config)

    async def open(self) -> None:
        """Make the components of every run: first the datasets, which are quick, then workflow and evaluators."""
        await self.get_dataset()
        if any(config.served_at is not None for config in self.config.llms.values()):
            await self.get_server_url()
        if self.config.eval.validation is not None and self.config.finetuning.enabled:
            await self._make_shared("validation examples", self._read_validation)
        await self.get_evaluation()

    async def get_trajectory_builder(self, name: str) -> TrajectoryBuilder:
        """Return the builder `trajectory_builders.<name>`, with evaluation and examples bound to it."""
        made = await self._get(TrajectoryBuilderConfig, TrajectoryBuilder, name)
        if made.evaluation is None:
            await made.bind_evaluation(await self.get_evaluation(), await self.get_dataset())
            validation = await self.get_validation()
            if validation is not None:
                await made.bind_validation(validation)
        return made

    async def get_trainer_adapter(self, name: str) -> TrainerAdapter:
        """Return the adapter `trainer_adapters.<name>`."""
        return await self._get(TrainerAdapterConfig, TrainerAdapter, name)

    async def get_trainer(
        self,
        name: str,
        trajectory_builder: TrajectoryBuilder | None = None,
        trainer_adapter: TrainerAdapter | None = None,
    ) -> Trainer:
        """Return the trainer `trainers.<name>`, with the other two bound to it if they are given."""
        trainer = await self._get(TrainerConfig, Trainer, name)
        if trajectory_builder is not None and trainer_adapter is not None:
            await trainer.bind_components(trajectory_builder, trainer_adapter)
        return trainer

    async def get_loggers(self) -> Loggers:
        """Return the loggers of `finetuning.loggers`."""
        return await self._make_shared("finetuning.loggers", self._make_loggers)

    async def _make_loggers(self) -> Loggers:
        loggers = Loggers(self.console)
        for number, config in enumerate(self.config.finetuning.loggers):
            place = f"finetuning.loggers.{number}"
            made = _check_kind(place, await self._once(place, config), RunLogger)
            loggers.add(f"{place} ({config.type_name})", made)
        return loggers

    async def get_validation(self) -> Validation | None:
        """Return the validation of `eval.validation`; None without that section."""
        return await self._make_shared("validation", self._make_validation)

    async def _read_validation(self) -> "tuple[Builder, list[EvalInputItem]]":
        """Return the examples of `eval.validation`, and the component builder of the validation's configuration."""
        section, source = self.config.eval.validation, self
        config = self.validation or validation_config(self.config)
        assert section is not None
        if config is not self.config:
            source = Builder(config, self.directory, self.console, lender=self)
            await self._closing.enter_async_context(source)
        if section.dataset is None:
            return source, await source.get_dataset()
        made = await self._once("eval.validation.dataset", section.dataset)
        examples = checked_items(made, "eval.validation.dataset")
        source._tasks.check(examples, "eval.validation.dataset")
        return source, examples

    @property
    def _tasks(self) -> Tasks:
        """The tasks of the run, which the configuration of a validation may leave out."""
        own = self.config.finetuning
        return tasks_of(own if own.per_task or self._lender is None else self._lender.config.finetuning)

    async def _make_validation(self) -> Validation | None:
        section = self.config.eval.validation
        if section is None:
            return None
        source, examples = await self._make_shared("validation examples", self._read_validation)
        reward = source.config.finetuning.reward_function or self.config.finetuning.reward_function
        return Validation(
            await source.make_evaluation(reward, counted_with=await self.get_evaluation()),
            examples,
            section.interval,
            section.temperature,
            section.num_generations,
        )

    async def get_evaluation(self) -> Evaluation:
        """Return the workflow with all evaluators and the reward of `finetuning.reward_function`."""
        reward = self.config.finetuning.reward_function
        return await self._make_shared("evaluation", lambda: self.make_evaluation(reward))

    async def make_evaluation(
        self, reward: RewardFunctionConfig | None, counted_with: Evaluation | None = None
    ) -> Evaluation:
        """Make a new evaluation of the workflow with all evaluators; see `Evaluation` for `counted_with`."""
        general = self.config.eval.general
        timeout_seconds = general.timeout_seconds
        if general.isolation == "process":
            workflow = await self._in_worker(None, timeout_seconds, "the workflow gave no output")
            timeout_seconds = None  # which the workers have
        else:
            workflow = await self.get_workflow()
        evaluation = Evaluation(
            workflow,
            await self._evaluators(),
            None if reward is None else reward.name,
            general.max_concurrency,
            self.config.finetuning.seed,
            timeout_seconds=timeout_seconds,
            result_json_path=general.result_json_path,
            pass_threshold=general.pass_threshold,
            breakdown_by=general.breakdown_by,
            tasks=self._tasks,
            counted_with=counted_with,
            server_url=await self.get_server_url() if (self._lender or self).is_served else ENDPOINT,
            show_progress=self.console.status,
            log=self.console.message,
        )
        self._closing.push_async_callback(evaluation.close)
        return evaluation

    async def _evaluators(self) -> dict[str, BoundEvaluator | WeightedSum]:
        """Return all evaluators with their settings."""
        evaluators: dict[str, BoundEvaluator | WeightedSum] = {}
        is_isolated = self.config.eval.general.judge_isolation == "process"
        for name, config in self.config.eval.evaluators.items():
            made: Any
            if is_isolated and not isinstance(config, WeightedSumConfig):
                made, seconds = await self._in_worker(name, config.timeout_seconds, "no score"), None
            else:
                made, seconds = await self.get_evaluator(name), config.timeout_seconds
            is_group = isinstance(config, GroupEvaluatorConfig)
            evaluators[name] = made if isinstance(made, WeightedSum) else BoundEvaluator(made, is_group, seconds)
        return evaluators

    async def _in_worker(self, name: str | None, seconds: float | None, late: str) -> Callable[..., Any]:
        """Return the workflow, for None, or an evaluator as a function that runs in workers; see `WorkerPool`."""
        pool = await self._make_shared("workers", self._make_pool)
        return pool.function(name, seconds, late)

    async def _make_pool(self) -> Any:
        pool = harness.WorkerPool(self)
        self._closing.push_async_callback(pool.close)
        try:
            await pool.check()
        except UserCodeError as failure:
            raise _failure("eval.general.isolation", failure) from failure.error
        except WorkerError as error:
            raise ComponentError(f"eval.general.isolation: {error}") from error
        return pool

    async def _get(self, base: type[ComponentConfig], kind: Any, name: str = "") -> Any:
        """Return a component, whose factory must yield an instance of `kind`; see `_find_config`."""
        place = ".".join(KINDS[base].path(name))
        return _check_kind(place, await self._once(place, self._find_config(base, name)), kind)

    async def _once(self, place: str, config: ComponentConfig) -> Any:
        return await self._make_shared(place, lambda: self._make(place, config))

    async def _make_shared(self, place: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, called once per path, however many callers wait for it.

        Raises:
            ComponentError: the component depends on itself, directly or through others.
        """
        chain = _being_made.get()
        if place in chain:
            circle = " -> ".join((*chain[chain.index(place) :], place))
            raise ComponentError(f"components depend on each other in a circle: {circle}")
        if place not in self._components:
            token = _being_made.set((*chain, place))
            self._components[place] = asyncio.create_task(make(), name=place)
            _being_made.reset(token)
        # A caller that is cancelled must not take the component from the others.
        return await asyncio.shield(self._components[place])

    async def _make(self, place: str, config: ComponentConfig) -> Any:
        what, base = f"{place} ({config.type_name})", next(base for base in KINDS if isinstance(config, base))
        self.console.status(f"making {what}")
        try:
            with user_code():
                component = asynccontextmanager(REGISTRY.find(base, config.type_name or "").load(what))(config, self)
                instance = await component.__aenter__()
        except UserCodeError as failure:
            raise _failure(what, failure) from failure.error
        self.console.status("")
        self._closing.push_async_callback(self._close, what, component, is_logger=base is LoggerConfig)
        return instance

    async def _close(self, what: str, component: AbstractAsyncContextManager[Any], *, is_logger: bool) -> None:
        """Run the code after the factory's `yield`."""
        try:
            with user_code():
                await component.__aexit__(None, None, None)
        except UserCodeError as failure:
            fault = f"{what}: closing it failed:\n{failure.tail}"
            if not is_logger:  # which ends no run
                raise ComponentError(fault) from failure.error
            self.console.message(fault)


KEPT_ERRORS = (ComponentError, ConfigError, DatasetError, DiskFull, ToolsUnsupportedError)
"""Errors of a factory that keep their class, message and exit code."""


def _failure(what: str, failure: UserCodeError) -> JaxftError:
    if isinstance(failure.error, KEPT_ERRORS):
        return failure.error
    # A wrong value or file is explained by the message alone; any other error is a bug and needs its traceback.
    is_input = isinstance(failure.error, JaxftError | ValueError | OSError)
    told = failure.summary if is_input else f"\n{failure.tail}"
    return ComponentError(f"{what}: {told}")


def _check_kind(place: str, made: Any, kind: Any) -> Any:
    if not isinstance(made, kind):
        wanted = "a function" if kind is Callable else f"a {kind.__name__}"
        raise ComponentError(f"{place}: its factory must yield {wanted}, not {type(made).__name__}")
    return made
