"""The toolkit's dataset, workflow and evaluators as components of jaxft, which runs them.

Each of them is built once per run; the toolkit builds them anew in every pass over the dataset.
"""

import asyncio
import contextlib
import inspect
import json
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

from jaxft.errors import ComponentError, DatasetError
from jaxft.harness import data_models
from jaxft.harness.registry import DatasetConfig, EvaluatorConfig, WorkflowConfig, registry
from jaxft.rollout.recorder import episode

T = TypeVar("T")


class ToolkitDatasetConfig(DatasetConfig, name="nat_dataset"):
    """The dataset of a toolkit configuration, or a file with the fields of that dataset."""

    toolkit: Any = Field(exclude=True)
    file: str | None = None
    described: Any = None


class ToolkitWorkflowConfig(WorkflowConfig, name="nat_workflow"):
    """The workflow of a toolkit configuration; `described` is that configuration, for the record."""

    toolkit: Any = Field(exclude=True)
    result_json_path: str = "$"
    described: Any = None


class ToolkitEvaluatorConfig(EvaluatorConfig, name="nat_evaluator"):
    """An evaluator of a toolkit configuration."""

    evaluator: str


def read_dataset(toolkit: ToolkitConfig, file: str | None = None) -> list[data_models.EvalInputItem]:
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
        data_models.EvalInputItem(
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


class ToolkitWorkflow:
    """The toolkit's workflow as a function of a dataset row.

    Attributes:
        builder: the toolkit's builder, which has the evaluators, too.
    """

    def __init__(
        self, builder: WorkflowEvalBuilder, sessions: SessionManager, result_json_path: str, *, one_user: bool
    ) -> None:
        """Take the parts of the toolkit; `one_user` is True if all episodes have the same user."""
        self.builder = builder
        self._sessions = sessions
        self._one_user = one_user
        self._result_path = None if result_json_path == "$" else parse(result_json_path)
        self._result_json_path = result_json_path

    async def __call__(self, example: dict[str, Any]) -> Output:
        """Run the workflow on the input of the present episode, as the toolkit's evaluation does."""
        current = episode()
        async with (
            self._sessions.session(user_id="jaxft" if self._one_user else f"jaxft {current.id}") as session,
            session.run(current.input_obj) as runner,
        ):
            steps: list[IntermediateStep] = []
            Context.get().intermediate_step_manager.subscribe(on_next=steps.append)
            result = await runner.result()
            with contextlib.suppress(ValueError):  # it has no text form
                result = runner.convert(result, to_type=str)
        return Output(self._extracted(result), [_plain(step) for step in steps])

    def _extracted(self, result: Any) -> Any:
        """Return the part of a result that `--result_json_path` names."""
        if isinstance(result, BaseModel):
            return result.model_dump_json(indent=2)
        if self._result_path is None:
            return result
        found = self._result_path.find(result)
        if not found:
            raise ValueError(f"'{self._result_json_path}' matches nothing in the output, {repr(result)[:100]}")
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
                yield ToolkitWorkflow(toolkit, sessions, config.result_json_path, one_user=one_user)
            finally:
                await sessions.shutdown()

    async with in_one_task(opened()) as workflow:
        yield workflow


async def toolkit_evaluator(config: ToolkitEvaluatorConfig, builder: Any) -> AsyncIterator[Any]:
    """Yield a function that scores one episode by an evaluator of the toolkit."""
    workflow = await builder.get_workflow()
    evaluator = workflow.builder.get_evaluator(config.evaluator)

    async def score(item: data_models.EvalInputItem) -> data_models.EvalOutputItem:
        output: Output = item.output_obj
        given = EvalInputItem(
            id=item.id,
            input_obj=item.input_obj,
            expected_output_obj=item.expected_output_obj,
            output_obj=output.value,
            trajectory=output.steps,
            full_dataset_entry=item.full_dataset_entry,
        )
        verdict = await evaluate(evaluator, given)
        return data_models.EvalOutputItem(
            id=item.id, score=verdict.score, reasoning=verdict.reasoning, error=verdict.error
        )

    yield score


async def evaluate(evaluator: Any, item: EvalInputItem) -> Any:
    """Return the verdict of one of the toolkit's evaluators on one item.

    Raises:
        ComponentError: the evaluator has no function that this version of the toolkit calls, or returned no verdict.
    """
    function = inspect.getattr_static(type(evaluator), "evaluate_atif_fn", None) or vars(evaluator).get(
        "evaluate_atif_fn"
    )
    if function is not None:
        # Only the toolkit's later versions have it.
        from nat.plugins.eval.runtime.atif_adapter import EvalAtifAdapter

        samples = EvalAtifAdapter().build_samples(EvalInput(eval_input_items=[item]))
        result = await evaluator.evaluate_atif_fn(samples)
    elif evaluator.evaluate_fn is None:
        raise ComponentError(f"the evaluator '{evaluator.config.type}' has no evaluate_fn")
    else:
        owner = getattr(evaluator.evaluate_fn, "__self__", None)  # functions have no owner
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


async def toolkit_dataset(config: ToolkitDatasetConfig, builder: Any) -> AsyncIterator[list[data_models.EvalInputItem]]:
    """Yield the examples."""
    yield await asyncio.to_thread(partial(read_dataset, config.toolkit, config.file))


def described(config: BaseModel) -> Any:
    """Return a toolkit configuration as JSON, its secrets masked."""
    return json.loads(config.model_dump_json(by_alias=True, exclude_unset=True))


registry.add(DatasetConfig, ToolkitDatasetConfig, toolkit_dataset)
registry.add(WorkflowConfig, ToolkitWorkflowConfig, toolkit_workflow)
registry.add(EvaluatorConfig, ToolkitEvaluatorConfig, toolkit_evaluator)
