"""How far a run has come: what trainers count from epoch to epoch, and save."""

from collections.abc import Mapping
from typing import Any

from jaxft.harness.data_models import TrainingJobStatus, TrainingStatusEnum
from jaxft.harness.errors import JobFailed


class Progress:
    """The counters of one run.

    Attributes:
        epoch: the next one, from 0 on.
        learned_epochs: with an update that was applied.
        bad_updates: that were not finite, in a row, up to now.
        validated_epoch: before which there was a validation last.
        statuses: the last status of each job.
    """

    def __init__(self) -> None:
        self.epoch = self.learned_epochs = self.bad_updates = 0
        self.validated_epoch: int | None = None
        self.statuses: list[TrainingJobStatus] = []

    def count(self, status: TrainingJobStatus | None, figures: Mapping[str, Any], max_bad_updates: int) -> bool:
        """Counts an epoch with its job, None when nothing was submitted; whether the run goes on.

        A backend that does not count its updates is believed to have made one.

        Raises:
            JobFailed: `max_bad_updates` updates in a row were not finite.
        """
        if status is not None:
            self.statuses.append(status)
            if status.status is not TrainingStatusEnum.COMPLETED:
                return False
            self.learned_epochs += figures.get("applied_updates", 1) > 0
            is_bad = figures.get("nonfinite_updates", 0) > 0
            self.bad_updates = int(figures.get("nonfinite_updates_in_a_row", self.bad_updates + 1 if is_bad else 0))
        if self.bad_updates >= max_bad_updates:
            said = "" if status is None or status.message is None else f": {status.message}"
            raise JobFailed(
                f"loss, gradient or new parameters were not finite in {self.bad_updates} updates in a row, the last in "
                f"epoch_{self.epoch:05d}{said}"
            )
        self.epoch += 1
        return True

    def state(self) -> dict[str, Any]:
        """For JSON; the figures of the jobs are in the logs."""
        return vars(self) | {
            "statuses": [status.model_dump(mode="json", exclude={"metadata"}) for status in self.statuses]
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`."""
        vars(self).update(state)
        self.statuses = [TrainingJobStatus(**status) for status in state["statuses"]]
