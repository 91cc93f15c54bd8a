"""A run of the toolkit as a run of jaxft: its configuration, its open session, and the policies of this process.

Every part that jaxft registers works on the one run that is open. With jaxft's trainer that is a whole run, with
checkpoints. With a foreign trainer only jaxft's parts are made; it stays open until the event loop ends.
"""

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nat.cli.cli_utils.config_override import load_and_override_config
from nat.data_models.config import Config as ToolkitConfig
from nat.data_models.finetuning import FinetuneConfig as ToolkitFinetuneConfig
from nat.data_models.finetuning import FinetuneRunConfig
from nat.runtime.loader import PluginTypes, discover_and_register_plugins, load_config
from nat.utils.data_models.schema_validator import validate_schema
from pydantic import BaseModel

from jaxft import (
    ChatClient,
    Config,
    EvaluatorConfig,
    FinetuneConfig,
    LLMConfig,
    RewardFunctionConfig,
    Session,
    open_session,
)
from jaxft.errors import ComponentError, ConfigError, RunDirectoryError
from jaxft.harness import EvalConfig, EvalGeneralConfig, ValidationConfig, open_models, prepare_process
from jaxft.nat.chat_model import PolicyChatModel
from jaxft.nat.configs import FINETUNING, OWN, PolicyConfig, own_config
from jaxft.nat.foreign import ForeignAdapterConfig, ForeignBuilderConfig
from jaxft.nat.live import live_policy, published, toolkit_episodes
from jaxft.nat.workflow import (
    ToolkitDatasetConfig,
    ToolkitEvaluatorConfig,
    ToolkitWorkflowConfig,
    described,
    in_one_task,
)

FOLDER = "jaxft"
"""Folder in `finetuning.output_dir` that is jaxft's run directory; the toolkit's own files stand beside it."""


@dataclass
class ToolkitRun:
    """The open run.

    Attributes:
        toolkit: the toolkit's configuration.
        options: the settings of the toolkit's command line.
        session: jaxft's session.
    """

    toolkit: ToolkitConfig
    options: FinetuneRunConfig
    session: Session


_run: ToolkitRun | None = None


def open_run_or_none() -> ToolkitRun | None:
    """Return the run that is open; None if there is none."""
    return _run


@asynccontextmanager
async def open_run(
    run_config: ToolkitFinetuneConfig,
    *,
    trainer: BaseModel | None = None,
    trajectory_builder: Any = None,
    trainer_adapter: Any = None,
) -> AsyncIterator[ToolkitRun]:
    """Open the run of jaxft for a run of the toolkit, until the block ends.

    Args:
        run_config: the section `finetuning`, with the command line in `run_configuration`.
        trainer: configuration of jaxft's trainer; None with a foreign one, for which only jaxft's parts are made.
        trajectory_builder, trainer_adapter: with jaxft's trainer, the parts that it is bound to.

    Raises:
        ComponentError: another run is open.
    """
    global _run
    if _run is not None:
        raise ComponentError("another run of jaxft is open in this process: end it first (Trainer.cleanup)")
    options = run_config.run_configuration
    if options is None:
        raise ConfigError("finetuning.run_configuration: is missing: `nat finetune` and run_finetuning set it")
    if options.endpoint is not None:
        raise ConfigError(
            "--endpoint: an agent behind an endpoint cannot be trained: its tokens are not recorded in this process"
        )
    toolkit, finetuning = _resolve_options(options, run_config)
    is_whole = trainer is not None
    if is_whole:  # version 1.8 makes the trainer before it reads the overrides
        resolved = toolkit.trainers.get(finetuning.trainer or "")
        if type(resolved) is not type(trainer):
            raise ConfigError(
                f"finetuning.trainer: '{finetuning.trainer}' was chosen too late by -o: name it in the file"
            )
        trainer = resolved
    config = _config(toolkit, finetuning, options, trainer, trajectory_builder, trainer_adapter)
    _prepare_process()
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(_open_session(config, run_config.trainer, trainer))
        for name, llm in toolkit.llms.items():
            if isinstance(llm, PolicyConfig):
                client = await session.builder.get_llm(name)
                stack.enter_context(published(llm.model_name, client))
        stack.enter_context(toolkit_episodes.recording(config.finetuning.seed, await session.builder.get_dataset()))
        if config.eval.validation is not None and options.validation_config_file is not None:
            file = options.validation_config_file
            session.builder.validation = _validation_config(config, file, options.result_json_path)
        _run = ToolkitRun(toolkit, options, session)
        try:
            yield _run
        except asyncio.CancelledError:
            if is_whole:
                raise
            # The event loop ends: nothing else tells the end of a run under a foreign trainer.
        finally:
            _run = None
        if not is_whole and config.finetuning.trainer_adapter is not None:
            model = await session.export_model()
            session.write_result({"model": None if model is None else str(model.relative_to(session.directory.path))})


@asynccontextmanager
async def _open_session(config: Config, name: str | None, trainer: BaseModel | None) -> AsyncIterator[Session]:
    """Open the session of a run as the options of its trainer say; with a foreign one, which has none, in any case."""
    chosen = {"resume": False, "overwrite": True} if trainer is None else dict(trainer)
    opening = open_session(config, resume=chosen["resume"], overwrite=chosen["overwrite"])
    async with AsyncExitStack() as stack:
        try:
            session = await stack.enter_async_context(opening)
        except RunDirectoryError as error:
            option = f"-o trainers.{name}"
            raise RunDirectoryError(
                f"{error}; for nat finetune these are {option}.overwrite true and, to continue it, {option}.resume true"
            ) from None
        yield session


async def open_parts(run_config: ToolkitFinetuneConfig) -> ToolkitRun:
    """Open the run of jaxft's parts under a foreign trainer, until the event loop ends, if none is open yet."""
    async with _lock():
        if _run is not None:
            return _run
        return await _closing_with_the_loop.enter_async_context(in_one_task(open_run(run_config)))


_closing_with_the_loop = AsyncExitStack()
"""Never closed itself: the tasks in it end with their event loop."""


def _prepare_process() -> None:
    """Do what jaxft's own programs do when they start."""
    prepare_process()
    # The toolkit shows the records of all libraries from info on: dozens for each checkpoint.
    logging.getLogger("absl").setLevel(logging.WARNING)


def _resolve_options(
    options: FinetuneRunConfig, run_config: ToolkitFinetuneConfig
) -> tuple[ToolkitConfig, ToolkitFinetuneConfig]:
    """Return the toolkit's configuration with the overrides of the command line, and its section `finetuning`.

    Version 1.8 of the toolkit leaves overrides to whoever reads the file.
    """
    if isinstance(options.config_file, BaseModel):
        assert isinstance(options.config_file, ToolkitConfig)
        # `run_configuration` holds the configuration that holds it: nobody could walk through it, or print it.
        finetuning = run_config.model_copy(update={"run_configuration": None})
        return options.config_file.model_copy(update={"finetuning": finetuning}), finetuning
    if not options.override:
        return load_config(options.config_file), run_config
    discover_and_register_plugins(PluginTypes.CONFIG_OBJECT)
    config = validate_schema(load_and_override_config(options.config_file, options.override), ToolkitConfig)
    return config, config.finetuning


def _config(
    toolkit: ToolkitConfig,
    finetuning: ToolkitFinetuneConfig,
    options: FinetuneRunConfig,
    trainer: BaseModel | None,
    trajectory_builder: Any,
    trainer_adapter: Any,
) -> Config:
    """Return jaxft's configuration of the run."""
    llms: dict[str, LLMConfig] = {
        name: own_config(llm, OWN[PolicyConfig])  # type: ignore[misc]
        for name, llm in toolkit.llms.items()
        if isinstance(llm, PolicyConfig)
    }
    builders = _part(
        toolkit.trajectory_builders, finetuning.trajectory_builder, trajectory_builder, ForeignBuilderConfig
    )
    adapters = _part(toolkit.trainer_adapters, finetuning.trainer_adapter, trainer_adapter, ForeignAdapterConfig)
    trainers: dict[str, Any] = {}
    if trainer is not None and finetuning.trainer is not None:
        trainers[finetuning.trainer] = own_config(trainer, OWN[type(trainer)])
    kept = {} if trainer is None else dict(trainer)
    if kept.get("examples_per_update") and any(isinstance(each, ForeignBuilderConfig) for each in builders.values()):
        raise ConfigError(
            f"trainers.{finetuning.trainer}.examples_per_update: the builder '{finetuning.trajectory_builder}' "
            "runs the whole dataset in every epoch: leave it out, or use a jaxft_trajectory_builder"
        )
    reward = finetuning.reward_function
    return Config(
        llms=llms,
        workflow=_workflow(toolkit, options.result_json_path),
        eval=_eval(toolkit, options, is_whole=trainer is not None),
        trajectory_builders=builders,
        trainer_adapters=adapters,
        trainers=trainers,
        finetuning=FinetuneConfig(
            enabled=trainer is not None,
            trainer=finetuning.trainer if trainers else None,
            trajectory_builder=finetuning.trajectory_builder if builders else None,
            trainer_adapter=finetuning.trainer_adapter if adapters else None,
            reward_function=None if reward is None else {"name": reward.name},  # type: ignore[arg-type]
            num_epochs=finetuning.num_epochs,
            seed=_seed(toolkit, finetuning),
            output_dir=Path(finetuning.output_dir) / FOLDER,
            target_functions=tuple(finetuning.target_functions),
            target_model=_llm_name(toolkit, finetuning.target_model),
            curriculum_learning=finetuning.curriculum_learning.model_dump(),
            **{name: kept[name] for name in FINETUNING if name in kept},
        ),
    )


def _eval(toolkit: ToolkitConfig, options: FinetuneRunConfig, *, is_whole: bool) -> EvalConfig:
    """Return dataset, validation and evaluators; a foreign trainer, whose run is not a whole one, validates itself."""
    validation = None
    if options.validation_dataset is not None and is_whole:
        dataset = ToolkitDatasetConfig(toolkit=toolkit, file=str(options.validation_dataset))
        validation = ValidationConfig(dataset=dataset, interval=options.validation_interval)
    file = None if options.dataset is None else str(options.dataset)
    general = EvalGeneralConfig(
        max_concurrency=max(toolkit.eval.general.max_concurrency, 1),
        dataset=ToolkitDatasetConfig(toolkit=toolkit, file=file),
    )
    return EvalConfig(general=general, validation=validation, evaluators=_evaluators(toolkit))


def _part(given: dict[str, Any], name: str | None, instance: Any, foreign: Any) -> dict[str, Any]:
    """Return the configuration of a builder or an adapter, by its name; empty if it is left to a foreign trainer."""
    config = given[name or ""]
    if type(config) in OWN:
        return {name or "": own_config(config, OWN[type(config)])}
    return {} if instance is None else {name or "": foreign(instance=instance, described=described(config))}


def _seed(toolkit: ToolkitConfig, finetuning: ToolkitFinetuneConfig) -> int:
    """Return the seed of the policy that the adapter trains or, with a foreign adapter, of the first policy."""
    adapter = toolkit.trainer_adapters[finetuning.trainer_adapter or ""]
    if type(adapter) in OWN:
        llm = dict(adapter)["llm"]
        if not isinstance(toolkit.llms.get(llm), PolicyConfig):
            known = ", ".join(name for name, each in toolkit.llms.items() if isinstance(each, PolicyConfig))
            raise ConfigError(
                f"trainer_adapters.{finetuning.trainer_adapter}.llm: '{llm}' is no jaxft_policy; there: {known}"
            )
        return toolkit.llms[llm].seed
    return next((llm.seed for llm in toolkit.llms.values() if isinstance(llm, PolicyConfig)), 0)


def _llm_name(toolkit: ToolkitConfig, model: str | None) -> str | None:
    """Return the entry of `llms` whose model name, or whose own name, this is."""
    names = [name for name, llm in toolkit.llms.items() if isinstance(llm, PolicyConfig) and llm.model_name == model]
    return names[0] if names else model


def _validation_config(config: Config, file: Path, result_json_path: str) -> Config:
    """Return the configuration of a validation with the workflow and the evaluators of another file of the toolkit."""
    toolkit, reward = load_config(file), config.finetuning.reward_function
    for name, llm in toolkit.llms.items():
        if isinstance(llm, PolicyConfig) and live_policy(llm.model_name) is None:
            fault = f"'{llm.model_name}' is no policy of this run: give it the model_name of the policy in training"
            raise ConfigError(f"{file}: llms.{name}.model_name: {fault}")
    other = toolkit.finetuning.reward_function
    if other is not None:
        reward = RewardFunctionConfig(name=other.name)
    if reward is None or reward.name not in toolkit.eval.evaluators:
        raise ConfigError(f"{file}: eval.evaluators has no '{reward and reward.name}', the reward")
    return config.model_copy(
        update={
            "workflow": _workflow(toolkit, result_json_path),
            "eval": config.eval.model_copy(update={"evaluators": _evaluators(toolkit)}),
            "finetuning": config.finetuning.model_copy(update={"reward_function": reward}),
        }
    )


def _workflow(toolkit: ToolkitConfig, result_json_path: str) -> ToolkitWorkflowConfig:
    return ToolkitWorkflowConfig(toolkit=toolkit, result_json_path=result_json_path, described=described(toolkit))


def _evaluators(toolkit: ToolkitConfig) -> dict[str, EvaluatorConfig]:
    return {name: ToolkitEvaluatorConfig(evaluator=name) for name in toolkit.eval.evaluators}


def chat_model(config: Any) -> PolicyChatModel:
    """Return LangChain's chat model of a policy."""
    names = ("temperature", "top_p", "top_k", "max_tokens", "chat_template_kwargs")
    defaults = {name: dict(config)[name] for name in names}
    return PolicyChatModel(model_name=config.model_name, find_policy=partial(find_policy, config), defaults=defaults)


async def find_policy(config: Any) -> ChatClient:
    """Return the live policy of a configuration; `nat run` and `nat eval` have it made until their loop ends."""
    if live_policy(config.model_name) is None:
        async with _lock():
            if live_policy(config.model_name) is None:
                await _closing_with_the_loop.enter_async_context(in_one_task(_policy_alone(config)))
    live = live_policy(config.model_name)
    assert live is not None
    return live


_locks: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]" = weakref.WeakKeyDictionary()


def _lock() -> asyncio.Lock:
    """Return the lock of the running event loop, under which policies and runs are opened."""
    return _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())


@asynccontextmanager
async def _policy_alone(config: Any) -> AsyncIterator[None]:
    """Make a policy without a run."""
    name = config.model_name
    _prepare_process()
    own = Config.model_construct(llms={name: own_config(config, OWN[PolicyConfig])})
    async with open_models(own, seed=config.seed) as builder:
        with published(name, await builder.get_llm(name), is_alone=True):
            yield
