"""Several tasks in one run: which task a row is of, its evaluator, and datasets and workflows put together.

The tasks are the entries of `finetuning.per_task`, and a column of the dataset says which one a row is of. The dataset
`mixture` joins one dataset for each task, and the workflow `per_task` runs the workflow of the row's task.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxft.errors import ConfigError, did_you_mean
from jaxft.harness.data_models import EvalInputItem, FinetuneConfig, TaskConfig


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
                raise ConfigError([f"finetuning.task_key: is '{self.key}', a column that {place} does not have{near}"])
            if task not in self.configs:
                near = did_you_mean(str(task), self.configs, what="tasks") + "; add it, with {} if nothing is its own"
                raise ConfigError([f"finetuning.per_task: has no '{task}', of which {place} is{near}"])


def tasks_of(config: FinetuneConfig) -> Tasks:
    """Return the tasks of a configuration."""
    return Tasks(config.task_key, config.per_task)
