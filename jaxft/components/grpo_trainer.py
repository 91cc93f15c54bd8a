"""`_type: grpo_trainer`: the loop. Collect episodes, choose, train on them, log; once per epoch."""

import random
from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import Field

from jaxft.components.collecting import check_rewards, dropped_episodes, why_no_calls
from jaxft.components.early_stop import EarlyStop, EarlyStopConfig
from jaxft.components.logged_trainer import LoggedTrainer
from jaxft.components.run_log import mean, reward_figures
from jaxft.harness.data_models import TrainingJobRef, TrainingJobStatus, TrajectoryCollection
from jaxft.harness.errors import NothingToTrain, TooManyFailures
from jaxft.harness.registry import TrainerConfig, register_trainer
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory


class GRPOTrainerConfig(TrainerConfig, name="grpo_trainer"):
    """One collection and one job per epoch."""

    examples_per_update: int | None = Field(
        default=None, ge=1, description="Examples of one epoch, drawn in an order of their own each pass; null: all."
    )
    early_stop: EarlyStopConfig = Field(default=EarlyStopConfig(), description="What ends the run before its time.")
    show_episodes_every: int = Field(
        default=10, ge=0, description="Epochs between sample episodes shown; 0 shows none."
    )
    save_episodes: Literal["shown", "all"] = Field(
        default="shown",
        description="Which episodes trajectories/samples.jsonl keeps: those that are shown, or all of every epoch, "
        "failed ones included.",
    )
    max_failed_share: float = Field(
        default=0.5, gt=0.0, le=1.0, description="The run stops when more of an epoch's episodes than this fail."
    )
    max_bad_updates: int = Field(
        default=3, ge=1, description="The run stops after so many non-finite updates in a row."
    )


class GRPOTrainer(LoggedTrainer):
    """Runs the epochs of one run; all it writes goes to the run directory.

    Of a trajectory it reads the reward and whether that is usable, and shows some to the user.
    """

    trainer_config: GRPOTrainerConfig

    def __init__(self, trainer_config: GRPOTrainerConfig, *, directory: RunDirectory, console: Console) -> None:
        super().__init__(trainer_config, trainer_config.max_bad_updates, directory, console)
        self._early_stop = EarlyStop(trainer_config.early_stop)
        self._stop_reason: str | None = None

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """All epochs; the last status of each job. Stops at the first job that fails, or when `early_stop` says so.

        Raises:
            TooManyFailures: too many episodes of an epoch failed.
            NoLearningSignal: not one epoch had anything to learn from, and no target was reached.
            JobFailed: `max_bad_updates` updates in a row were not finite.
        """
        assert self.trajectory_builder is not None
        is_validated = self.trajectory_builder.validation is not None
        progress = self.progress
        self.start(num_epochs)
        while True:
            validations = len(self.log.validations)
            score = await self.validate(num_epochs)
            if len(self.log.validations) > validations:
                self._stop_reason = self._early_stop.reason(score)
            is_last = self._stop_reason is not None or progress.epoch >= num_epochs
            await self.save(progress.epoch, score, is_last=is_last)
            if is_last or self.is_stopping:
                break
            figures = await self.train_epoch()
            if figures is None:
                return progress.statuses
            if not is_validated:
                self._stop_reason = self._early_stop.reason(figures.get("reward_mean"))
        if self.is_stopping:
            return progress.statuses
        if self._stop_reason is not None:
            self.log.console.message(f"stopped early after {progress.epoch} epochs: {self._stop_reason}")
        self.needs_no_training = self._early_stop.is_target_reached
        if not self.needs_no_training:
            self.check_learned("; make the task easier, raise num_generations, or give partial rewards")
        return progress.statuses

    def state(self) -> dict[str, Any]:
        """Counters, histories, and what early stopping has seen."""
        return {**super().state(), "early_stop": self._early_stop.state()}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Goes on between two epochs."""
        super().restore_state(state)
        self._early_stop.restore(state["early_stop"])
        self._stop_reason = self._early_stop.verdict()  # by what the configuration says now

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collects episodes and submits those that the curriculum keeps; None when nothing in them can be trained."""
        assert self.trajectory_builder is not None and self.trainer_adapter is not None
        await self.trajectory_builder.start_run(run_id, self._choice_of_examples(epoch))
        collection = await self.trajectory_builder.finalize(run_id)
        self._check_failures(collection)
        check_rewards(trajectory for group in collection.trajectories for trajectory in group)
        rewards = [[t.reward for t in group if t.scorable] for group in collection.trajectories]
        metrics = {**collection.metrics, **reward_figures(rewards)}
        self.log.metrics[run_id], self.log.timings[run_id] = metrics, dict(collection.timings)
        unscorable = metrics.get("unscorable_trajectories")
        if unscorable:
            self._message(
                f"{run_id}: {unscorable:.0f} rewards were None, NaN or infinite; their episodes train nothing"
            )
        if dropped := dropped_episodes(metrics):
            self._message(f"{run_id}: {dropped}")
        self._show_and_keep(epoch, collection)
        chosen = self.apply_curriculum_learning(collection, epoch)
        metrics |= self._curriculum_figures(collection, chosen)
        self.trajectory_builder.log_progress(run_id, metrics)
        self.log.rewards(epoch, metrics)
        if not _rewards(chosen):
            lacks_signal = bool(_rewards(collection))
            why = (
                "no group's rewards differ by min_reward_diff" if lacks_signal else "no trajectory has a usable reward"
            )
            cause = why_no_calls(metrics)
            self.nothing_was_learned(
                run_id,
                f"{why}; nothing was trained{'' if cause is None else f'; {cause}'}",
                lacks_signal=lacks_signal and cause is None,
            )
            return None
        try:
            return await self.trainer_adapter.submit(chosen)
        except NothingToTrain as error:
            self.nothing_was_learned(run_id, f"{error}; nothing was trained")
            return None

    def _choice_of_examples(self, epoch: int) -> dict[str, Any] | None:
        """Which examples an epoch works on: the next ones of an order that is shuffled anew whenever it is used up."""
        assert self.run_config is not None and self.trajectory_builder is not None
        ids = [item.id for item in self.trajectory_builder.examples]
        count = self.trainer_config.examples_per_update
        if count is None or count >= len(ids):
            return None
        chosen: list[str] = []
        place = epoch * count
        while len(chosen) < count:
            order = list(ids)
            random.Random(f"order of examples {self.run_config.seed} {place // len(ids)}").shuffle(order)
            taken = order[place % len(ids) :][: count - len(chosen)]
            chosen += [example_id for example_id in taken if example_id not in chosen]
            place += len(taken)
        return {"example_ids": chosen}

    def _check_failures(self, collection: TrajectoryCollection) -> None:
        failed = len(collection.failures)
        episodes = collection.metrics.get("episodes", failed + sum(map(len, collection.trajectories)))
        if not failed:
            return
        if failed > self.trainer_config.max_failed_share * episodes:
            raise TooManyFailures(f"{failed} of {episodes:.0f} episodes failed; the last: {collection.failures[-1]}")
        first = collection.failures[0].splitlines()[0]
        self._message(f"{collection.run_id}: {failed} of {episodes:.0f} episodes failed and are left out; {first}")

    def _curriculum_figures(self, collection: TrajectoryCollection, chosen: TrajectoryCollection) -> dict[str, Any]:
        if self.curriculum_config is None or not self.curriculum_config.enabled:
            return {}
        state = self.get_curriculum_state()
        self.log.curriculum(state)
        rewards = _rewards(chosen)
        return {
            "curriculum_percentile": state["current_percentile"],
            "curriculum_groups": len(chosen.trajectories),
            "curriculum_dropped_groups": len(state["dropped_groups"]),
            **({"reward_mean_chosen": mean(rewards)} if rewards else {}),
        }

    def _show_and_keep(self, epoch: int, collection: TrajectoryCollection) -> None:
        every = self.trainer_config.show_episodes_every
        trajectories = [trajectory for group in collection.trajectories for trajectory in group]
        shown = trajectories[:1] if every and epoch % every == 0 else []
        for trajectory in shown:
            self.log.sample(epoch, trajectory)
        is_all = self.trainer_config.save_episodes == "all"
        self.log.keep(epoch, trajectories if is_all else shown, collection.failures if is_all else [])

    def _message(self, text: str) -> None:
        self.log.console.message(text)


def _rewards(collection: TrajectoryCollection) -> list[float]:
    return [t.reward for group in collection.trajectories for t in group if t.scorable]


@register_trainer(config_type=GRPOTrainerConfig)
async def grpo_trainer(config: GRPOTrainerConfig, builder: Any) -> AsyncIterator[GRPOTrainer]:
    """The trainer of a run; it is closed by `cleanup`."""
    yield GRPOTrainer(config, directory=builder.directory, console=builder.console)
