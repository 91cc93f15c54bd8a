"""The toolkit's dataset, workflow and evaluators as components of jaxft, which runs them.

Each of them is built once per run; the toolkit builds them anew in every pass over the dataset.
"""

import asyncio
import contextlib
import inspect
import json
import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from jsonpath_ng import parse
from langchain_core.outputs import ChatGeneration
from nat.builder.context import Context
from nat.data_models.config import Config as ToolkitConfig
from nat.data_models.evaluator import EvalInput, EvalInputItem
from nat.data_models.intermediate_step import IntermediateStep
from nat.plugins.eval.dataset_handler.dataset_handler import DatasetHandler
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator
from nat.plugins.eval.runtime.builder import WorkflowEvalBuilder
from nat.runtime.session import SessionManager
from pydantic import BaseModel, Field

import jaxft
from jaxft import DatasetConfig, Episode, EvaluatorConfig, WorkflowConfig, episode
from jaxft.errors import ComponentError, DatasetError
from jaxft.harness import REGISTRY, config_secrets
from jaxft.redaction import map_texts
from jaxft.rollout import recording

T = TypeVar("T")

MASK = "**********"
"""Text in place of a secret, as pydantic writes it."""


class ToolkitDatasetConfig(DatasetConfig, name="nat_dataset"):
    """The dataset of a toolkit configuration, or a file with the fields of that dataset."""

    toolkit: Any = Field(exclude=True)
    file: str | None = None


class ToolkitWorkflowConfig(WorkflowConfig, name="nat_workflow"):
    """The workflow of a toolkit configuration; `described` is that configuration, for the record."""

    toolkit: Any = Field(exclude=True)
    result_json_path: str = "$"
    described: Any = None


class ToolkitEvaluatorConfig(EvaluatorConfig, name="nat_evaluator"):
    """An evaluator of a toolkit configuration."""

    evaluator: str


def read_dataset(toolkit: ToolkitConfig, file: str | None = None) -> list[jaxft.EvalInputItem]:
    """Return the examples of a toolkit configuration, as its own evaluation reads them.

    Args:
        toolkit: the configuration.
        file: a file that replaces its dataset; the fields are read as configured.

    Raises:
        DatasetError: there is no dataset, or the toolkit cannot read it.
    """
    general = toolkit.eval.general
    if general.dataset is None:
        raise DatasetError("eval.general.dataset: is missing: finetuning needs examples")
    output = general.output
    handler = DatasetHandler(
        dataset_config=general.dataset,
        reps=1,
        concurrency=general.max_concurrency,
        custom_pre_eval_process_function=output.custom_pre_eval_process_function if output else None,
    )
    try:
        given = handler.get_eval_input_from_dataset(file).eval_input_items
    except Exception as error:  # its parsers raise whatever pandas and the file system raise
        raise DatasetError(f"{file or 'eval.general.dataset'}: the toolkit cannot read it: {error}") from error
    return [
        jaxft.EvalInputItem(
            id=str(item.id),
            input_obj=item.input_obj,
            expected_output_obj=item.expected_output_obj,
            full_dataset_entry=item.full_dataset_entry
            if isinstance(item.full_dataset_entry, dict)
            else {"entry": item.full_dataset_entry},
        )
        for item in given
    ]


@dataclass(frozen=True)
class Output:
    """Output of a run of the toolkit's workflow, with its intermediate steps for the evaluators."""

    value: Any
    steps: list[IntermediateStep]


@dataclass(frozen=True)
class ToolkitWorkflow:
    """The toolkit's workflow as a function of a dataset row.

    Attributes:
        builder: the toolkit's builder, which has the evaluators, too.
        sessions: the sessions that run the workflow.
        result_json_path: the part of a result that is the output.
        one_user: True if all episodes have the same user.
    """

    builder: WorkflowEvalBuilder
    sessions: SessionManager
    result_json_path: str
    one_user: bool

    async def __call__(self, example: dict[str, Any]) -> Output:
        """Run the workflow on the input of the present episode, as the toolkit's evaluation does."""
        current = episode()
        user = "jaxft" if self.one_user else f"jaxft {current.id}"
        try:
            return await self._run(current, user)
        finally:
            if self.sessions.is_workflow_per_user and not self.one_user:
                # The toolkit would keep the workflow of each user, so of each episode, until it is idle for long.
                made = self.sessions._per_user_builders.pop(user, None)
                if made is not None:
                    await made.builder.__aexit__(None, None, None)

    async def _run(self, current: Episode, user: str) -> Output:
        async with self.sessions.session(user_id=user) as session, session.run(current.input_obj) as runner:
            steps: list[IntermediateStep] = []
            Context.get().intermediate_step_manager.subscribe(on_next=steps.append)
            # The runner restored the context that the workflow was built in, which may be another episode's.
            with recording(current):
                result = await runner.result()
            with contextlib.suppress(ValueError):  # it has no text form
                result = runner.convert(result, to_type=str)
        return Output(self._extract_result(result), [_plain(step) for step in steps])

    def _extract_result(self, result: Any) -> Any:
        """Return the part of a result that `--result_json_path` names."""
        if isinstance(result, BaseModel):
            return result.model_dump_json(indent=2)
        if self.result_json_path == "$":
            return result
        found = parse(self.result_json_path).find(result)
        if not found:
            raise ValueError(f"'{self.result_json_path}' matches nothing in the output, {repr(result)[:100]}")
        return found[0].value


def _plain(step: IntermediateStep) -> IntermediateStep:
    """Return a step whose answer of a chat model is plain data, as the toolkit's own evaluation has it."""
    data = step.payload.data
    if data is not None and isinstance(data.payload, ChatGeneration):
        generation = data.payload
        # The metadata holds the log-probabilities, which are plain already, and long.
        data.payload = generation.model_dump(exclude={"message": {"response_metadata"}})
        data.payload["message"]["response_metadata"] = generation.message.response_metadata
    return step


async def toolkit_workflow(config: ToolkitWorkflowConfig, builder: Any) -> AsyncIterator[ToolkitWorkflow]:
    """Yield the workflow of the toolkit."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[ToolkitWorkflow]:
        async with WorkflowEvalBuilder.from_config(config=config.toolkit) as toolkit:
            # Concurrency is limited by the evaluation that calls the workflow.
            sessions = await SessionManager.create(config=config.toolkit, shared_builder=toolkit, max_concurrency=0)
            try:
                if not sessions.is_workflow_per_user and not sessions.workflow.has_single_output:
                    raise ComponentError("workflow: it only streams: finetuning needs a workflow with a single output")
                one_user = not config.toolkit.eval.general.per_input_user_id
                yield ToolkitWorkflow(toolkit, sessions, config.result_json_path, one_user)
            finally:
                await sessions.shutdown()

    async with in_one_task(opened()) as workflow:
        yield workflow


def toolkit_item(item: jaxft.EvalInputItem) -> EvalInputItem:
    """Return an episode as the toolkit's evaluators get it; one that failed has no output and no steps."""
    output = item.output_obj if isinstance(item.output_obj, Output) else Output(None, [])
    return EvalInputItem(
        id=item.id,
        input_obj=item.input_obj,
        expected_output_obj=item.expected_output_obj,
        output_obj=output.value,
        trajectory=output.steps,
        full_dataset_entry=item.full_dataset_entry,
    )


async def toolkit_evaluator(config: ToolkitEvaluatorConfig, builder: Any) -> AsyncIterator[Any]:
    """Yield a function that scores one episode by an evaluator of the toolkit."""
    workflow = await builder.get_workflow()
    evaluator = workflow.builder.get_evaluator(config.evaluator)

    async def score(item: jaxft.EvalInputItem) -> jaxft.EvalOutputItem:
        verdict = await evaluate(evaluator, toolkit_item(item))
        named = verdict.score if isinstance(verdict.score, dict) else None
        is_number = isinstance(verdict.score, int | float) and math.isfinite(verdict.score)
        if not is_number and named is None and not isinstance(verdict.score, float | None):
            raise TypeError(f"the score is {verdict.score!r}; wanted a number, named numbers, or None")
        return jaxft.EvalOutputItem(
            id=item.id,
            score=verdict.score if is_number else None,
            named_scores=named,
            reasoning=verdict.reasoning,
            error=verdict.error,
        )

    yield score


def reads_atif(evaluator: Any) -> bool:
    """Return whether an evaluator reads trajectories in the ATIF format, which the toolkit's later versions have."""
    return "evaluate_atif_fn" in dir(evaluator)


async def evaluate(evaluator: Any, item: EvalInputItem) -> Any:
    """Return the verdict of one of the toolkit's evaluators on one item.

    Raises:
        ComponentError: the evaluator has no function that this version of the toolkit calls, or returned no verdict.
    """
    if reads_atif(evaluator):
        from nat.plugins.eval.runtime.atif_adapter import EvalAtifAdapter

        samples = EvalAtifAdapter().build_samples(EvalInput(eval_input_items=[item]))
        result = await evaluator.evaluate_atif_fn(samples)
    elif evaluator.evaluate_fn is None:
        raise ComponentError(f"the evaluator '{evaluator.config.type}' has no evaluate_fn")
    else:
        owner = evaluator.evaluate_fn.__self__ if inspect.ismethod(evaluator.evaluate_fn) else None
        if isinstance(owner, BaseEvaluator) and type(owner).evaluate is BaseEvaluator.evaluate:
            # Its `evaluate` would draw a progress bar per episode, and give an evaluator that raises the score 0.
            return await owner.evaluate_item(item)
        result = await evaluator.evaluate_fn(EvalInput(eval_input_items=[item]))
    if len(result.eval_output_items) != 1:
        raise ComponentError(f"it gave {len(result.eval_output_items)} verdicts on one item")
    return result.eval_output_items[0]


@asynccontextmanager
async def in_one_task(manager: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a context manager in one task of its own, as the cancel scopes of the toolkit's clients demand.

    When the event loop ends it cancels that task, which then leaves the context manager.
    """
    entered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    leaving = asyncio.Event()

    async def hold() -> None:
        try:
            async with manager as value:
                entered.set_result(value)
                await leaving.wait()
        except BaseException as error:
            if entered.done():
                raise
            entered.set_exception(error)

    holding = asyncio.create_task(hold(), name="toolkit")
    try:
        yield await entered
    finally:
        leaving.set()
        await asyncio.wait({holding})
        if not holding.cancelled() and holding.exception() is not None and entered.exception() is None:
            await holding


async def toolkit_dataset(config: ToolkitDatasetConfig, builder: Any) -> AsyncIterator[list[jaxft.EvalInputItem]]:
    """Yield the examples."""
    yield await asyncio.to_thread(partial(read_dataset, config.toolkit, config.file))


def described(config: BaseModel) -> Any:
    """Return a toolkit configuration as JSON, its secrets masked: some of the toolkit's secret types show theirs."""
    secrets = config_secrets(config)
    plain = json.loads(config.model_dump_json(by_alias=True, exclude_unset=True))
    return map_texts(plain, lambda text: MASK if text in secrets else text)


REGISTRY.add(ToolkitDatasetConfig, toolkit_dataset)
REGISTRY.add(ToolkitWorkflowConfig, toolkit_workflow)
REGISTRY.add(ToolkitEvaluatorConfig, toolkit_evaluator)
