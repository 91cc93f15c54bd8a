"""`_type: grpo_trainer`: the loop. Collect episodes, choose, train on them, log; once per epoch."""

import random
from collections.abc import AsyncIterator
from typing import Any

from jaxft.errors import NothingToTrain, TooManyFailures
from jaxft.harness.data_models import (
    EvalOutputItem,
    TrainingJobRef,
    TrainingJobStatus,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.evaluation import EpisodeOutcome
from jaxft.rollout.sequences import token_sequences
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.shipped.configs import EarlyStopConfig, GRPOTrainerConfig, GRPOTrajectoryBuilderConfig
from jaxft.shipped.rollout_builder import RolloutBuilder, to_messages
from jaxft.shipped.run_log import mean, reward_metrics
from jaxft.shipped.trainer import LoggedTrainer
from jaxft.training.rows import check_rewards, dropped_episodes, why_no_calls


class GRPOTrajectoryBuilder(RolloutBuilder):
    """An episode is a trajectory, an example a group."""

    def __init__(self, trajectory_builder_config: GRPOTrajectoryBuilderConfig) -> None:
        super().__init__(trajectory_builder_config, trajectory_builder_config.num_generations)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """The trajectories of a collection, a group per example in the order of `start_run`, without failed episodes.

        `metrics`, `timings` and `failures` of the collection say what was left out and how long it took.

        Raises:
            ValueError: no collection of this name is in progress.
            ConfigError: the episodes asked their language models, but never where training is aimed at.
        """
        outcomes, about = await self.finished(run_id)
        groups: dict[str, list[Trajectory]] = {}
        for outcome in outcomes:
            groups.setdefault(outcome.item.id, []).append(await self._trajectory(outcome))
        collection = with_metrics(TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id, **about))
        # The evaluator gave them no usable reward, but `compute_reward` did.
        missing = sum(outcome.reward is None for outcome in outcomes)
        priced = {"priced_trajectories": missing - collection.metrics["unscorable_trajectories"]}
        return collection.model_copy(update={"metrics": collection.metrics | priced})

    async def _trajectory(self, outcome: EpisodeOutcome) -> Trajectory:
        """An episode that ended well; without a reward it is not scorable."""
        assert self.evaluation is not None
        given = outcome.scores.get(self.evaluation.reward_name or "")
        verdict = EvalOutputItem(
            id=outcome.item.id,
            score=outcome.reward,
            reasoning=f"not usable: {given}" if outcome.reward is None else None,
            generation=outcome.generation,
            named_scores=outcome.named_rewards,
        )
        reward = await self.compute_reward(verdict)
        is_priced = outcome.reward is None and reward is not None
        return Trajectory(
            episode=to_messages(outcome),
            reward=0.0 if reward is None else reward,
            shaped_rewards=outcome.episode.shaped_rewards,
            metadata={"example_id": outcome.item.id, "generation": outcome.generation, "score": outcome.reward},
            scorable=reward is not None,
            named_rewards={} if is_priced else outcome.named_rewards,
            example_id=outcome.item.id,
            generation=outcome.generation,
            sequences=token_sequences(outcome.episode.calls, self.is_target),
        )


def with_metrics(collection: TrajectoryCollection) -> TrajectoryCollection:
    """The collection with what there is to say of lengths, of named rewards, and of how fast it was sampled."""
    trajectories = [trajectory for group in collection.trajectories for trajectory in group]
    lengths = [sum(sum(row.completion_mask) for row in trajectory.sequences or ()) for trajectory in trajectories]
    parts: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in (trajectory.named_rewards or {}).items():
            parts.setdefault(name, []).append(value)
    metrics = {
        "unscorable_trajectories": sum(not trajectory.scorable for trajectory in trajectories),
        "completion_tokens_mean": sum(lengths) / len(lengths) if lengths else 0.0,
        "completion_tokens_max": max(lengths, default=0),
        **{f"reward/{name}": sum(values) / len(values) for name, values in sorted(parts.items())},
    }
    speed = {"tokens_per_second": sum(lengths) / collection.timings["seconds_rollout"]} if lengths else {}
    return collection.model_copy(
        update={"metrics": collection.metrics | metrics, "timings": collection.timings | speed}
    )


async def grpo_trajectory_builder(
    config: GRPOTrajectoryBuilderConfig, builder: Any
) -> AsyncIterator[GRPOTrajectoryBuilder]:
    """The builder; the run's evaluation and examples are bound to it by whoever asked for it."""
    yield GRPOTrajectoryBuilder(config)


class EarlyStop:
    """Watches the rewards of one run.

    Attributes:
        is_target_reached: whether the last reason was the target, and not a plateau.

    >>> stop = EarlyStop(EarlyStopConfig(patience=2, min_gain=0.01))
    >>> [stop.reason(reward) for reward in (0.1, 0.5, 0.505)]
    [None, None, None]
    >>> stop.reason(0.5)
    'the mean reward has not risen by more than 0.01 above 0.5 for 2 times'
    """

    def __init__(self, config: EarlyStopConfig) -> None:
        self._config = config
        self._best: float | None = None
        self._last: float | None = None
        self._without_gain = 0
        self._is_fresh = True  # no reward yet
        self.is_target_reached = False

    def state(self) -> dict[str, Any]:
        """For JSON."""
        return {"best": self._best, "without_gain": self._without_gain, "last": self._last, "is_fresh": self._is_fresh}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a `state`."""
        self._best, self._without_gain = state["best"], state["without_gain"]
        self._last, self._is_fresh = state["last"], state["is_fresh"]

    def reason(self, reward: float | None) -> str | None:
        """Why the run ends after this reward, in words; None when it goes on. A reward of None (nothing usable) is no
        gain."""
        self._last, self._is_fresh = reward, False
        if reward is not None and (self._best is None or reward > self._best + self._config.min_gain):
            self._best, self._without_gain = reward, 0
        else:
            self._without_gain += 1
        return self.verdict()

    def verdict(self) -> str | None:
        """The same for the last reward, when it has been heard already."""
        target, patience, gain = self._config.target_reward, self._config.patience, self._config.min_gain
        if self._is_fresh:
            return None
        self.is_target_reached = self._last is not None and target is not None and self._last >= target
        if self.is_target_reached:
            return f"the mean reward {self._last:.4g} has reached {target:g}"
        if patience is not None and self._without_gain >= patience:
            best = "nothing" if self._best is None else f"{self._best:.4g}"
            return f"the mean reward has not risen by more than {gain:g} above {best} for {patience} times"
        return None


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
        metrics = {**collection.metrics, **reward_metrics(rewards)}
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
        if failed > self.trainer_config.max_failed_fraction * episodes:
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


async def grpo_trainer(config: GRPOTrainerConfig, builder: Any) -> AsyncIterator[GRPOTrainer]:
    """The trainer of a run; it is closed by `cleanup`."""
    yield GRPOTrainer(config, directory=builder.directory, console=builder.console)
