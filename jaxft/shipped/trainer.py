"""What the shipped trainers have in common: one epoch with its job, figures in a run directory, and what is saved."""

import time
from collections.abc import Mapping
from typing import Any

from jaxft.errors import ConfigError, JobFailed, NoLearningSignal
from jaxft.harness.contracts import Trainer
from jaxft.harness.data_models import TrainingJobStatus, TrainingStatusEnum
from jaxft.harness.registry import TrainerConfig
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.shipped.local_adapter import LocalTrainerAdapter
from jaxft.shipped.run_log import RunLog


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


class LoggedTrainer(Trainer):
    """A trainer without its loop: `run` of a class below calls `validate`, `save` and `train_epoch` by turns.

    Attributes:
        log: what it writes and shows.
        progress: its counters.
    """

    def __init__(self, trainer_config: TrainerConfig, max_bad_updates: int, directory: RunDirectory, console: Console):
        super().__init__(trainer_config)
        self.log, self.progress = RunLog(directory, console), Progress()
        self._max_bad_updates = max_bad_updates
        self._seconds_checkpoint = 0.0
        self._is_warm = False
        self._why_nothing_was_learned = ""
        self._lacks_signal = False

    def start(self, num_epochs: int) -> None:
        """Opens the logs.

        Raises:
            ConfigError: more epochs are trained already.
        """
        if self.progress.epoch > num_epochs:
            raise ConfigError(
                [f"finetuning.num_epochs: is {num_epochs}, but {self.progress.epoch} epochs are trained already"]
            )
        adapter = self.trainer_adapter
        if isinstance(adapter, LocalTrainerAdapter):
            self.log.decode[adapter.adapter_config.llm] = adapter.policy.tokenizer.decode
        self.log.start(num_epochs, self.progress.epoch)

    async def validate(self, num_epochs: int) -> float | None:
        """The validation reward before this epoch; None when it is not due, known already, or not usable."""
        epoch = self.progress.epoch
        if self.is_stopping or self.progress.validated_epoch == epoch:
            return None
        row = await self.validate_if_due(epoch, num_epochs)
        if row is None:
            return None
        self.progress.validated_epoch = epoch
        self.log.validation(row)
        return row["avg_reward"]

    async def save(self, step: int, score: float | None, *, is_last: bool) -> None:
        """`checkpoint`, with the seconds that it held up the loop."""
        started = time.perf_counter()
        self.log.console.status("saving")
        await self.checkpoint(step, score=score, is_last=is_last)
        self._seconds_checkpoint = time.perf_counter() - started

    async def train_epoch(self) -> dict[str, Any] | None:
        """One `run_epoch` with its job and its logs; its figures, or None when the job did not complete.

        Raises:
            JobFailed: too many updates in a row were not finite, or something was compiled that must not be.
        """
        assert self.trainer_adapter is not None
        started, status = time.perf_counter(), None
        epoch = self.progress.epoch
        run_id = f"epoch_{epoch:05d}"
        ref = await self.run_epoch(epoch, run_id)
        metrics, timings = self.log.metrics[run_id], self.log.timings[run_id]
        if ref is not None:
            self.log.console.status("training")
            status = await self.trainer_adapter.wait_until_complete(ref)
            metadata = status.metadata or {}
            metrics |= metadata.get("metrics", {})
            timings |= metadata.get("timings", {})
            if metrics.get("applied_updates", 1) == 0:
                self.nothing_was_learned(
                    run_id, str(status.message), lacks_signal=metrics.get("nothing_to_learn", 0) > 0
                )
            self._check_compiled(run_id, metadata.get("compiled", []))
            self.trainer_adapter.log_progress(ref, metrics)
        timings |= {"seconds_checkpoint": self._seconds_checkpoint, "seconds": time.perf_counter() - started}
        figures = await self.get_metrics(run_id)
        self.log_progress(epoch, figures)
        return figures if self.progress.count(status, figures, self._max_bad_updates) else None

    def _check_compiled(self, run_id: str, compiled: list[str]) -> None:
        """The first job of a process may compile: what jobs do beside their updates is not warmed up."""
        is_first, self._is_warm = not self._is_warm, True
        if compiled and not is_first and self.run_config is not None and self.run_config.strict_compile:
            raise JobFailed(
                f"{run_id} compiled {len(compiled)} programs although finetuning.strict_compile is on: "
                f"{', '.join(dict.fromkeys(compiled))}"
            )

    def nothing_was_learned(self, run_id: str, why: str, *, lacks_signal: bool = False) -> None:
        """Says so, and remembers the reason; `lacks_signal`: the rewards tell nothing, and other rewards would."""
        self._why_nothing_was_learned, self._lacks_signal = why, lacks_signal
        self.log.console.message(f"{run_id}: {why}")

    def check_learned(self, advice: str = "") -> None:
        """Called at the end of a run; `advice` is for rewards that tell nothing.

        Raises:
            NoLearningSignal: not one epoch made an update.
        """
        if not self.progress.learned_epochs:
            raise NoLearningSignal(
                f"nothing could be learned in {self.progress.epoch} epochs; of the last: "
                f"{self._why_nothing_was_learned}{advice if self._lacks_signal else ''}"
            )

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The figures of one epoch: those that another run would repeat, then those of the clock.

        Raises:
            ValueError: no such epoch has been run since the process began.
        """
        return self.log.figures(run_id)

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Writes the rows of an epoch and its line; the reward plot every tenth epoch."""
        self.log.epoch(epoch, f"epoch_{epoch:05d}", metrics)

    async def cleanup(self) -> None:
        """Closes the logs."""
        self.log.close()

    def state(self) -> dict[str, Any]:
        """Counters and histories."""
        return {
            "progress": self.progress.state(),
            "log": self.log.state(),
            "why_nothing_was_learned": self._why_nothing_was_learned,
            "lacks_signal": self._lacks_signal,
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Goes on between two epochs."""
        self.progress.restore(state["progress"])
        self.log.restore(state["log"])
        self._why_nothing_was_learned = state["why_nothing_was_learned"]
        self._lacks_signal = state.get("lacks_signal", True)  # earlier checkpoints do not say
