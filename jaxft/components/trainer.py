"""Base class of the trainers: collections, epochs with their training jobs, checkpoints and logs."""

import contextlib
import inspect
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxft.components.configs import LoggedTrainerConfig
from jaxft.components.health import Health
from jaxft.components.local_adapter import LocalTrainerAdapter
from jaxft.components.logged_builder import LoggedTrajectoryBuilder
from jaxft.components.run_log import RunLog
from jaxft.errors import ComponentError, ConfigError, JobFailed, NoLearningSignal, TooManyFailures, user_code
from jaxft.harness.contracts import Trainer
from jaxft.harness.data_models import TrainingJobStatus, TrainingStatusEnum, TrajectoryCollection
from jaxft.harness.evaluators import is_number
from jaxft.harness.functions import Function
from jaxft.harness.opening import freeze_heap
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory


def no_rewards(epoch: int, num_examples: int) -> dict[str, Any]:
    """Return the row of a validation without episodes."""
    row = dict.fromkeys(("avg_reward", "min_reward", "max_reward", "first_error"))
    counts = {"num_examples": num_examples, "num_failed": 0, "num_unscorable": 0}
    return {"epoch": epoch, "dataset_type": "validation", **row, **counts}


class LoggedTrainer(Trainer):
    """A trainer without its loop.

    `run` of a subclass calls `start`, then `validate`, `save` and `train_epoch` by turns. `run_epoch` of a subclass
    calls `collect`, submits a job, and puts the metrics of its epoch into `log.metrics` and `log.timings`.

    Attributes:
        log: log files of the run, and its console output.
        epoch: number of the next epoch, from 0.
        learned_epochs: number of epochs that applied an update.
        statuses: last status of each job.
    """

    trainer_config: LoggedTrainerConfig

    def __init__(self, trainer_config: LoggedTrainerConfig, *, directory: RunDirectory, console: Console) -> None:
        super().__init__(trainer_config)
        self.log = RunLog(directory, console)
        self.epoch = self.learned_epochs = 0
        self.statuses: list[TrainingJobStatus] = []
        self._own: list[tuple[str, str, float]] = []  # numbers of the user's functions: place, name and value
        self._bad_updates = 0  # in a row, up to now
        self._validated_epoch: int | None = None
        self._seconds_checkpoint = 0.0
        self._is_warm = False
        self._health = Health()
        self._has_said_retokenized = False
        self._why_nothing_was_learned, self._lacks_signal = "", False

    def start(self, num_epochs: int) -> None:
        """Open the logs.

        Raises:
            ConfigError: more than `num_epochs` epochs have been trained already.
        """
        if self.epoch > num_epochs:
            raise ConfigError(f"finetuning.num_epochs: is {num_epochs}, but {self.epoch} epochs are trained already")
        adapter = self.trainer_adapter
        if isinstance(adapter, LocalTrainerAdapter):
            llm, policy = adapter.adapter_config.llm, adapter.policy
            dtype = policy.weights.transfer.dtype(policy.trained_params())
            self._health.dtype = policy.model.sampling_dtype or str(dtype)
            self.log.decode[llm], self.log.token_text[llm] = (
                policy.tokenizer.decode,
                policy.template.tokens.decoded_text,
            )
        self.log.start(num_epochs, self.epoch, self.loggers)

    async def validate(self, num_epochs: int) -> float | None:
        """Return the validation reward before this epoch; None if none is due, it is known already, or not usable."""
        validation = self.trajectory_builder.validation
        if self.is_stopping or self._validated_epoch == self.epoch:
            return None
        if validation is None or not validation.is_due(self.epoch, num_epochs):
            return None
        await self.checkpoint(self.step, is_written=False)  # a signal during the validation loses no epoch
        if not await self.begins(f"validation {self.epoch}"):
            return None
        await self.prepare_validation()
        row = no_rewards(self.epoch, len(validation.examples))
        if self.reward is not None:
            with self.collecting():
                row = await self.validate_if_due(self.epoch, num_epochs) or row
        builder, adapter = self.trajectory_builder, self.trainer_adapter
        if isinstance(builder, LoggedTrajectoryBuilder) and isinstance(adapter, LocalTrainerAdapter):
            row |= await adapter.measure(builder.held_out(f"validation_{self.epoch:05d}"))
        self._validated_epoch = self.epoch
        self.log.validation(row)
        return row["avg_reward"]

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Say, in the block, that this trainer waits for episodes."""
        self.is_collecting = True
        try:
            yield
        finally:
            self.is_collecting = False

    async def prepare_validation(self) -> None:
        """See to it that the newest weights are validated; called before each validation."""

    @property
    def step(self) -> int:
        """Number of the checkpoint between the last epoch and the next."""
        return self.epoch

    async def save(self, score: float | None, *, is_last: bool) -> None:
        """Call `checkpoint`, and measure how long it blocked the loop."""
        started = time.perf_counter()
        self.log.console.status("saving")
        await self.checkpoint(self.step, score=score, is_last=is_last)
        self._seconds_checkpoint = time.perf_counter() - started

    async def train_epoch(self) -> dict[str, Any] | None:
        """Run one epoch with its job, and log it; return its metrics, or None if the job did not complete.

        Raises:
            JobFailed: `max_bad_updates` updates in a row were not finite, or a program was compiled under
                strict_compile.
        """
        started, status, device = time.perf_counter(), None, self.trainer_adapter.device_seconds()
        run_id = f"epoch_{self.epoch:05d}"
        ref = await self.run_epoch(self.epoch, run_id)
        self.is_ending_epoch = True
        metrics, timings = self.log.metrics[run_id], self.log.timings[run_id]
        if ref is not None:
            self.log.console.status("training")
            status = await self.trainer_adapter.wait_until_complete(ref)
            metadata = status.metadata or {}
            metrics |= metadata.get("metrics", {})
            timings |= metadata.get("timings", {})
            self.log.token_scores(self.epoch, metadata.pop("token_scores", []))
            if metrics.get("applied_updates", 1) == 0:
                self.nothing_was_learned(
                    run_id, str(status.message), lacks_signal=metrics.get("nothing_to_learn", 0) > 0
                )
            self._check_compiled(run_id, metadata.get("compiled", []))
            if metadata.get("compiled"):
                freeze_heap()  # programs and what they were traced from live as long as the run
            self.trainer_adapter.log_progress(ref, metrics)
        spent = self.trainer_adapter.device_seconds()
        timings |= {f"seconds_device_{name}": spent[name] - device.get(name, 0.0) for name in spent}
        timings |= {"seconds_checkpoint": self._seconds_checkpoint, "seconds": time.perf_counter() - started}
        self._add_own(run_id)
        seen = await self.get_metrics(run_id)
        await self.call_back(self.trainer_config.on_epoch_end, run_id, metrics=seen, epoch=self.epoch)
        self._add_own(run_id)
        logged = await self.get_metrics(run_id)
        for line in self._health.lines({**metrics, **timings}):
            self.log.console.message(f"{run_id}: {line}")
        self.log_progress(self.epoch, logged)
        return logged if self._count_epoch(status, logged) else None

    async def call_back(self, function: Function | None, run_id: str, **given: Any) -> None:
        """Call a function of the user's, and keep the numbers that it returns for the metrics of an epoch.

        Raises:
            UserCodeError: it raised.
            ComponentError: it returned something else than new numbers by name.
        """
        if function is None:
            return
        with user_code():
            returned = function.call(**function.select_keywords(given))
            own = await returned if inspect.isawaitable(returned) else returned
        if own is None:
            return
        known = await self.get_metrics(run_id)
        for name, value in own.items() if isinstance(own, Mapping) else [("", own)]:
            if name in known or not (isinstance(name, str) and name and is_number(value)):
                why = "which the epoch has already" if name in known else "wanted are numbers by name, or None"
                raise ComponentError(f"{function.place} returned {name!r}: {value!r:.50}, {why}")
            self._own.append((function.place, name, float(value)))

    def _add_own(self, run_id: str) -> None:
        """Add the numbers of the user's functions to an epoch, which has all its other metrics and timings.

        Raises:
            ComponentError: it has another value of such a name.
        """
        metrics, timings = self.log.metrics[run_id], self.log.timings[run_id]
        for place, name, value in self._own:
            if name in {*metrics, *timings, "epoch", "logger_failures"}:
                raise ComponentError(f"{place} returned {name!r}: {value!r:.50}, which the epoch has already")
            metrics[name] = value
        self._own.clear()

    async def collect(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Return one collection of the builder; give it to `check_collection` before it is used."""
        await self.trajectory_builder.start_run(run_id, meta)
        return await self.trajectory_builder.finalize(run_id, meta)

    def check_collection(self, collection: TrajectoryCollection) -> None:
        """Show how many episodes of a collection failed or were dropped.

        Raises:
            TooManyFailures: more than `max_failed_fraction` of the episodes failed.
        """
        run_id, failures, message = collection.run_id, collection.failures, self.log.console.message
        episodes = collection.metrics.get("episodes", len(failures) + sum(map(len, collection.trajectories)))
        if len(failures) > self.trainer_config.max_failed_fraction * episodes:
            raise TooManyFailures(f"{len(failures)} of {episodes:.0f} episodes failed; the last: {failures[-1]}")
        if failures:
            first = failures[0].splitlines()[0]
            message(f"{run_id}: {len(failures)} of {episodes:.0f} episodes failed and are left out; {first}")
        if dropped := collection.metrics.get("dropped_episodes", 0):
            message(f"{run_id}: {dropped:.0f} episodes were dropped: a prompt left no room for an answer")
        if (retokenized := collection.metrics.get("retokenized_calls", 0)) and not self._has_said_retokenized:
            self._has_said_retokenized = True
            message(
                f"{run_id}: {retokenized:.0f} calls start a new training row because the chat template or the agent "
                "changed an earlier turn, as a template does that drops reasoning or moves tools (retokenized_calls)"
            )

    def _check_compiled(self, run_id: str, compiled: list[str]) -> None:
        """Raise if `strict_compile` is on and a job other than the first of this process compiled something.

        The first job may compile, as the warm-up does not cover the operations outside of updates.
        """
        is_first, self._is_warm = not self._is_warm, True
        if compiled and not is_first and self.run_config.strict_compile:
            raise JobFailed(
                f"{run_id} compiled {len(compiled)} programs although finetuning.strict_compile is on: "
                f"{', '.join(dict.fromkeys(compiled))}"
            )

    def _count_epoch(self, status: TrainingJobStatus | None, metrics: Mapping[str, Any]) -> bool:
        """Count an epoch and its job, None if nothing was submitted; return True if the run goes on.

        A backend that does not count its updates is assumed to have made one.
        """
        if status is not None:
            self.statuses.append(status)
            if status.status is not TrainingStatusEnum.COMPLETED:
                return False
            self.learned_epochs += metrics.get("applied_updates", 1) > 0
            is_bad = metrics.get("nonfinite_updates", 0) > 0
            self._bad_updates = int(metrics.get("nonfinite_updates_in_a_row", self._bad_updates + 1 if is_bad else 0))
        if self._bad_updates >= self.trainer_config.max_bad_updates:
            said = "" if status is None or status.message is None else f": {status.message}"
            raise JobFailed(
                f"loss, gradient or new parameters were not finite in {self._bad_updates} updates in a row, the last "
                f"in epoch_{self.epoch:05d}{said}"
            )
        self.epoch += 1
        return True

    def nothing_was_learned(self, run_id: str, why: str, *, lacks_signal: bool = False) -> None:
        """Show why an epoch made no update, and remember it for `check_learned`.

        Args:
            run_id: the epoch.
            why: the reason, in words.
            lacks_signal: True if the cause is the rewards, so that other rewards would give a signal.
        """
        self._why_nothing_was_learned, self._lacks_signal = why, lacks_signal
        self.log.console.message(f"{run_id}: {why}")

    def check_learned(self, advice: str = "") -> None:
        """Raise if no epoch of the run has made an update; `advice` is added if the rewards are the cause.

        Raises:
            NoLearningSignal: no epoch has made an update; the message contains the reason of the last epoch.
        """
        if not self.learned_epochs:
            raise NoLearningSignal(
                f"nothing could be learned in {self.epoch} epochs; of the last: "
                f"{self._why_nothing_was_learned}{advice if self._lacks_signal else ''}"
            )

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """Return the metrics of one epoch, then its timings.

        Raises:
            ValueError: this process has not run such an epoch.
        """
        known = self.log.metrics
        if run_id not in known:
            raise ValueError(f"no epoch '{run_id}' was run; epochs: {', '.join(known) or 'none'}")
        return {**known[run_id], **self.log.timings[run_id]}

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Write the rows of an epoch and show its line; draw the reward plot every tenth epoch."""
        self.log.epoch(epoch, f"epoch_{epoch:05d}", metrics)

    async def cleanup(self) -> None:
        """Close the logs."""
        self.log.close()

    def state(self) -> dict[str, Any]:
        """Return counters and histories, for JSON; the metrics of the jobs are in the logs."""
        return {
            "progress": {
                "epoch": self.epoch,
                "learned_epochs": self.learned_epochs,
                "bad_updates": self._bad_updates,
                "validated_epoch": self._validated_epoch,
                "statuses": [status.model_dump(mode="json", exclude={"metadata"}) for status in self.statuses],
            },
            "log": self.log.state(),
            "why_nothing_was_learned": self._why_nothing_was_learned,
            "lacks_signal": self._lacks_signal,
            "health": self._health.state(),
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore the state between two epochs."""
        counters = state["progress"]
        self.epoch, self.learned_epochs = counters["epoch"], counters["learned_epochs"]
        self._bad_updates, self._validated_epoch = counters["bad_updates"], counters["validated_epoch"]
        self.statuses = [TrainingJobStatus(**status) for status in counters["statuses"]]
        self.log.restore(state["log"])
        self._why_nothing_was_learned = state["why_nothing_was_learned"]
        self._lacks_signal = state["lacks_signal"]
        self._health.restore(state["health"])
