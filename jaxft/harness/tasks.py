"""Several tasks in one run: which task a row is of, its evaluator, and datasets and workflows put together.

The tasks are the entries of `finetuning.per_task`, and a column of the dataset says which one a row is of. The dataset
`mixture` joins one dataset for each task, and the workflow `per_task` runs the workflow of the row's task.
"""

import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field, SerializeAsAny

from jaxft.errors import ConfigError, DatasetError, did_you_mean
from jaxft.harness.data_models import EvalInputItem, FinetuneConfig, TaskConfig
from jaxft.harness.datasets import checked_items
from jaxft.harness.registry import (
    DatasetConfig,
    WorkflowConfig,
    chosen_by_type,
    register_dataset_loader,
    register_workflow,
)


class Tasks(NamedTuple):
    """The tasks of a run: their column, and their settings by name; without any no row has a task."""

    key: str = ""
    configs: Mapping[str, TaskConfig] = {}

    def of(self, item: EvalInputItem) -> str | None:
        """Return the task of an example; None without tasks."""
        return str(item.full_dataset_entry.get(self.key)) if self.configs else None

    def evaluators(self, default: str | None) -> dict[str | None, str | None]:
        """Return the evaluator that gives the reward by task; `default` is that of tasks without one of their own."""
        return {task: self.configs[task].evaluator or default if task else default for task in self.configs or (None,)}

    def check(self, items: Sequence[EvalInputItem], source: str) -> None:
        """Raise a `ConfigError` unless each example of a dataset is of one of the tasks."""
        for item in items if self.configs else ():
            row, task, place = item.full_dataset_entry, self.of(item), f"row '{item.id}' of {source}"
            if self.key not in row:
                near = did_you_mean(self.key, row, what="columns")
                raise ConfigError(f"finetuning.task_key: is '{self.key}', a column that {place} does not have{near}")
            if task not in self.configs:
                near = did_you_mean(str(task), self.configs, what="tasks") + "; add it, with {} if nothing is its own"
                raise ConfigError(f"finetuning.per_task: has no '{task}', of which {place} is{near}")


def tasks_of(config: FinetuneConfig) -> Tasks:
    """Return the tasks of a configuration."""
    return Tasks(config.task_key, config.per_task)


AnyDataset = Annotated[SerializeAsAny[DatasetConfig], chosen_by_type(DatasetConfig)]
AnyWorkflow = Annotated[SerializeAsAny[WorkflowConfig], chosen_by_type(WorkflowConfig)]


class MixtureConfig(DatasetConfig, name="mixture"):
    """The rows of several datasets, each with its task in the column `finetuning.task_key`; ids are TASK/ID."""

    datasets: dict[str, AnyDataset] = Field(min_length=1)
    """The datasets, by the name of their task."""


@register_dataset_loader(config_type=MixtureConfig)
async def mixture(config: MixtureConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the examples of all datasets.

    Raises:
        DatasetError: rows have another value in the column of the task.
    """
    key, joined = builder.config.finetuning.task_key, list[EvalInputItem]()
    for task, dataset in config.datasets.items():
        made = await _builder_of(builder, task).make(f"datasets.{task}", dataset)
        for item in checked_items(made, f"datasets.{task}"):
            row = {key: task} | item.full_dataset_entry
            if str(row[key]) != task:
                fault = (
                    f"row '{item.id}' has a column '{key}' with another value: give finetuning.task_key another name"
                )
                raise DatasetError(f"datasets.{task}: {fault}")
            entry = row | {key: task}  # a number, such as a level, as text
            joined.append(item.model_copy(update={"id": f"{task}/{item.id}", "full_dataset_entry": entry}))
    yield joined


class WorkflowPerTaskConfig(WorkflowConfig, name="per_task"):
    """The workflow of the task that a row is of."""

    workflows: dict[str, AnyWorkflow] = Field(min_length=1)
    """The workflows, by the name of their task."""


class WorkflowPerTask(NamedTuple):
    """The workflows of several tasks, by the value in the column `key` of a row."""

    key: str
    workflows: Mapping[str, Callable[[dict[str, Any]], Any]]

    def __call__(self, row: dict[str, Any]) -> Any:
        """Return what the workflow of the row's task returns."""
        return workflow_of(self, row)(row)


def workflow_of(workflow: WorkflowPerTask | Callable[..., Any], row: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the workflow that runs a row: that of its task if there are several.

    Raises:
        ConfigError: the row's task has none.
    """
    if not isinstance(workflow, WorkflowPerTask):
        return workflow
    if (task := str(row.get(workflow.key))) not in workflow.workflows:
        near = did_you_mean(task, workflow.workflows, what="there are")
        raise ConfigError(f"workflow.workflows: has no '{task}', which the row's column '{workflow.key}' names{near}")
    return workflow.workflows[task]


@register_workflow(config_type=WorkflowPerTaskConfig)
async def workflow_per_task(config: WorkflowPerTaskConfig, builder: Any) -> AsyncIterator[WorkflowPerTask]:
    """Yield the workflows of all tasks.

    Raises:
        ConfigError: a task of the run has none.
    """
    finetuning = builder.config.finetuning
    if missing := [name for name in finetuning.per_task if name not in config.workflows]:
        raise ConfigError(f"workflow.workflows: has no '{missing[0]}', a task of finetuning.per_task: add it")
    made = {
        task: await _builder_of(builder, task).make(f"workflows.{task}", each)
        for task, each in config.workflows.items()
    }
    yield WorkflowPerTask(finetuning.task_key, made)


def _builder_of(builder: Any, task: str) -> Any:
    """Return the builder with the workflow and the dataset of one task as those of its configuration.

    A dataset may ask who plays it, and a workflow for its taskset.
    """
    config = builder.config
    agent, data = config.workflow, config.eval.general.dataset
    agent = agent.workflows.get(task, agent) if isinstance(agent, WorkflowPerTaskConfig) else agent
    data = data.datasets.get(task, data) if isinstance(data, MixtureConfig) else data
    general = config.eval.general.model_copy(update={"dataset": data})
    own = copy.copy(builder)
    own.config = config.model_copy(
        update={"workflow": agent, "eval": config.eval.model_copy(update={"general": general})}
    )
    return own
