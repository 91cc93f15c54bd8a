"""GRPO: groups of episodes, and a training job on them in every epoch.

In an epoch `GRPOTrainer.run_epoch` lets `GRPOTrajectoryBuilder` collect a group of episodes per example, applies the
curriculum, and submits what remains to the trainer adapter. With `max_staleness` the episodes of later epochs are
sampled beside the job (`jaxft.components.schedule`).
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

from jaxft.components.configs import EarlyStopConfig, GRPOTrainerConfig, GRPOTrajectoryBuilderConfig
from jaxft.components.example_order import ExampleOrder
from jaxft.components.local_adapter import LocalTrainerAdapter
from jaxft.components.rollout_builder import (
    RolloutBuilder,
    named_reward_means,
    reward_metrics,
    task_metrics,
    to_messages,
)
from jaxft.components.schedule import GroupStream, NextCollection, Schedule
from jaxft.components.trainer import LoggedTrainer
from jaxft.errors import ConfigError, NothingToTrain
from jaxft.harness.contracts import TrainerAdapter, TrajectoryBuilder
from jaxft.harness.data_models import (
    EpisodeIdentity,
    FinetuneConfig,
    TrainingJobRef,
    TrainingJobStatus,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.outcomes import EpisodeOutcome
from jaxft.harness.tasks import tasks_of
from jaxft.hosts.group import process_group
from jaxft.rollout.sequences import token_sequences
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.training.rows import HOW_TO_REWARD, check_rewards, why_no_calls


class GRPOTrajectoryBuilder(RolloutBuilder):
    """Makes one trajectory per episode, and one group per example."""

    def __init__(self, trajectory_builder_config: GRPOTrajectoryBuilderConfig) -> None:
        config = trajectory_builder_config
        super().__init__(config, config.num_generations, config.failed_reward)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Return the trajectories of a collection, a group per example in the order of `start_run`.

        Failed and dropped episodes are left out; `metrics` counts them, and `failures` has a report of each failed one.

        Raises:
            ValueError: no collection of this name is in progress.
            ConfigError: the episodes called language models, but never where training is aimed at.
        """
        outcomes, about = await self.finish_run(run_id)
        groups: dict[tuple[int, str], list[Trajectory]] = {}
        for outcome in outcomes:
            groups.setdefault(outcome.group, []).append(await self._trajectory(run_id, outcome, meta))
        collection = TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id, **about)

        trajectories = [trajectory for group in groups.values() for trajectory in group]
        lengths = [sum(sum(row.completion_mask) for row in trajectory.sequences or ()) for trajectory in trajectories]
        unscorable = sum(not trajectory.scorable for trajectory in trajectories)
        answers = [{str([row.tokens for row in each.sequences or ()]) for each in group} for group in groups.values()]
        metrics = {
            "varied_groups": sum(len(of_group) > 1 for of_group in answers),
            "unscorable_trajectories": unscorable,
            "completion_tokens_mean": sum(lengths) / len(lengths) if lengths else 0.0,
            "completion_tokens_max": max(lengths, default=0),
            **named_reward_means(trajectories),
            # The evaluator gave them no usable reward, but `compute_reward` did.
            "priced_trajectories": sum(each.reward is None and each.error is None for each in outcomes) - unscorable,
        }
        speed = {"tokens_per_second": sum(lengths) / collection.timings["seconds_rollout"]} if lengths else {}
        return collection.model_copy(
            update={"metrics": collection.metrics | metrics, "timings": collection.timings | speed}
        )

    async def _trajectory(self, run_id: str, outcome: EpisodeOutcome, meta: dict[str, Any] | None) -> Trajectory:
        """Return the trajectory of an episode; without a reward it is not scorable."""
        assert self.evaluation is not None
        name = self.evaluation.reward_of(outcome.item) or ""
        verdict, reasoning = outcome.verdict(name), outcome.reasonings.get(name)
        reward = await self.compute_reward(verdict, meta) if outcome.error is None else self.failed_reward
        is_priced = outcome.reward is None and reward is not None
        remote_calls = outcome.episode.remote_calls
        return Trajectory(
            episode=to_messages(outcome),
            reward=0.0 if reward is None else reward,
            shaped_rewards=outcome.episode.shaped_rewards,
            metadata={
                "id": outcome.item.id,
                "generation": outcome.generation,
                "run_id": run_id,
                "score": outcome.reward,
                "reasoning": reasoning,
                **({} if verdict.reasoning == reasoning else {"fault": verdict.reasoning}),
                "finish_reasons": [call.reply.completion.finish_reason for call in outcome.episode.calls],
                **({} if outcome.error is None else {"error": outcome.error}),
                # For people who read `trajectories/samples.jsonl`; nothing is trained on them.
                **({"remote_calls": [asdict(call) for call in remote_calls]} if remote_calls else {}),
            },
            scorable=reward is not None,
            named_rewards={} if is_priced else outcome.named_rewards,
            example_id=outcome.item.id,
            generation=outcome.generation,
            rollout_index=outcome.episode.rollout_index,
            sequences=token_sequences(outcome.episode.calls, self.is_target),
        )


async def grpo_trajectory_builder(
    config: GRPOTrajectoryBuilderConfig, builder: Any
) -> AsyncIterator[GRPOTrajectoryBuilder]:
    """Yield the builder; its evaluation and examples are bound by the component builder."""
    yield GRPOTrajectoryBuilder(config)


class GRPOTrainer(LoggedTrainer):
    """Trainer that collects groups, selects by the curriculum and trains, once per epoch."""

    trainer_config: GRPOTrainerConfig

    def __init__(self, trainer_config: GRPOTrainerConfig, *, directory: RunDirectory, console: Console) -> None:
        super().__init__(trainer_config, directory=directory, console=console)
        self._early_stop = EarlyStop(trainer_config.early_stop)
        self._schedule = Schedule(self._collect_epoch, self)  # until `run` makes that of its max_staleness
        self._restored_groups: dict[str, Any] | None = None

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        """Store the builder and the adapter, and tell them about `max_staleness` and `partial_rollout_tokens`.

        Raises:
            ConfigError: the adapter cannot sample beside its jobs, or they cannot carry answers over.
        """
        await super().bind_components(trajectory_builder, trainer_adapter)
        if self.trainer_config.max_staleness:
            trainer_adapter.allow_staleness(self.trainer_config.max_staleness)
        if (tokens := self.trainer_config.partial_rollout_tokens) is None:
            return
        fault = None
        if not (isinstance(trainer_adapter, LocalTrainerAdapter) and isinstance(trajectory_builder, RolloutBuilder)):
            given = f"{type(trajectory_builder).__name__} with {type(trainer_adapter).__name__}"
            fault = f"{given} cannot carry answers over: take grpo_trajectory_builder and local_trainer_adapter"
        elif not process_group().is_alone:
            fault = "the processes of a run do not share what is carried over: start one process, or set it to null"
        elif tokens >= (context := trainer_adapter.policy.engine.max_context_tokens):
            fault = f"no answer is longer than max_context_tokens, {context}: lower it, or set it to null"
        else:
            trainer_adapter.samples_beside = False
            trajectory_builder.carry_over = tokens, self.trainer_config.max_staleness
        if fault is not None:
            raise ConfigError(f"partial_rollout_tokens: is {tokens}, but {fault}")

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Run all epochs and return the last status of each job.

        The run ends early at the first job that does not complete, or by the conditions of `early_stop`.

        Raises:
            TooManyFailures: too many episodes of an epoch failed.
            NoLearningSignal: no epoch made an update, and no target was reached.
            JobFailed: `max_bad_updates` updates in a row were not finite.
        """
        self.start(num_epochs)
        self._schedule = self._make_schedule(num_epochs)
        try:
            await self._schedule.start()
            return await self._run_epochs(num_epochs, is_validated=self.trajectory_builder.validation is not None)
        finally:
            await self._schedule.close()

    def _make_schedule(self, num_epochs: int) -> Schedule:
        staleness = self.trainer_config.max_staleness
        if staleness == 0 or self.trainer_config.partial_rollout_tokens is not None:
            return Schedule(self._collect_epoch, self)
        if staleness == 1:
            get_state = super().collection_state
            return NextCollection(self._collect_epoch, self, num_epochs=num_epochs, get_state=get_state)
        self.log.console.message(
            f"max_staleness is {staleness}: which groups a job trains depends on the clock, so that equal runs differ"
        )
        size = self._order.count
        options = {"size": size, "total": size * num_epochs, "max_staleness": staleness, "epoch": self.epoch}
        return GroupStream(self._collect_group, self, **options, state=self._restored_groups)

    async def _run_epochs(self, num_epochs: int, *, is_validated: bool) -> list[TrainingJobStatus]:
        while True:
            validations = len(self.log.validations)
            score = await self.validate(num_epochs)
            if len(self.log.validations) > validations:
                self._early_stop.count(score)
            is_last = self._early_stop.reason is not None or self.epoch >= num_epochs
            await self.save(score, is_last=is_last)
            if is_last or self.is_stopping:
                break
            metrics = await self.train_epoch()
            if metrics is None:
                return self.statuses
            if not is_validated and metrics.get("episodes") != 0:  # 0: all groups go on in the next collection
                self._early_stop.count(metrics.get("reward_mean"))
        if self.is_stopping:
            return self.statuses
        await self._schedule.close()  # an early stop leaves episodes that nobody trains
        await self.trainer_adapter.release_weights()
        if self._early_stop.reason is not None:
            self.log.console.message(f"stopped early after {self.epoch} epochs: {self._early_stop.reason}")
        self.needs_no_training = self._early_stop.is_target_reached
        if not self.needs_no_training:
            self.check_learned("; make the task easier, raise num_generations, or give partial rewards")
        return self.statuses

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collect episodes and submit the groups that the curriculum keeps; None if nothing in them can be trained."""
        message = self.log.console.message
        with self.collecting():
            collection = await self._schedule.take(epoch, run_id)
        self.check_collection(collection)
        if self.run_config.per_task:
            collection = self._with_tasks(collection)
        # A reward beyond float32 must not enter the metrics. Groups that are not chosen never reach the adapter.
        check_rewards(trajectory for group in collection.trajectories for trajectory in group)
        rewards = [[t.reward for t in group if t.scorable] for group in collection.trajectories]
        metrics = {**collection.metrics, **reward_metrics(rewards)}
        self.log.metrics[run_id], self.log.timings[run_id] = metrics, dict(collection.timings)
        seen = collection.trajectories
        await self.call_back(self.trainer_config.on_trajectories, run_id, trajectories=seen, epoch=epoch)
        if unscorable := metrics.get("unscorable_trajectories"):
            message(f"{run_id}: {unscorable:.0f} rewards were None, NaN or infinite; their episodes train nothing")
        self.log.episode_rewards(epoch, collection.trajectories)
        kept = self._keep_episodes(epoch, collection)

        chosen = self.apply_curriculum_learning(collection, epoch)
        chosen_rewards = [t.reward for group in chosen.trajectories for t in group if t.scorable]
        if self.has_curriculum:
            state = self.get_curriculum_state()
            self.log.curriculum(state)
            metrics |= {
                "curriculum_percentile": state["current_percentile"],
                "curriculum_groups": len(chosen.trajectories),
                "curriculum_dropped_groups": len(state["dropped_groups"]),
            }
            tasks, chosen_of = tasks_of(self.run_config), Counter(group[0].task for group in chosen.trajectories)
            metrics |= {f"{tasks.key}={name}/curriculum_groups": chosen_of[name] for name in tasks.configs}
            if chosen_rewards:
                metrics["reward_mean_chosen"] = sum(chosen_rewards) / len(chosen_rewards)
        self.trajectory_builder.log_progress(run_id, metrics)
        self.log.rewards(epoch, metrics)

        await self._schedule.begin(epoch)
        if not chosen_rewards and not collection.metrics.get("logged_rows"):
            lacks_signal = any(rewards)
            why = (
                "no group's rewards differ by min_reward_diff" if lacks_signal else "no trajectory has a usable reward"
            )
            cause = why_no_calls(metrics) or ("" if lacks_signal else HOW_TO_REWARD)
            said = "; ".join(filter(None, [why, "nothing was trained", cause]))
            self.nothing_was_learned(run_id, said, lacks_signal=lacks_signal and not cause)
            return None
        try:
            return await self.trainer_adapter.submit(chosen.model_copy(update={"kept_episodes": kept}))
        except NothingToTrain as error:
            self.nothing_was_learned(run_id, f"{error}; nothing was trained")
            return None

    def _with_tasks(self, collection: TrajectoryCollection) -> TrajectoryCollection:
        """Return the collection with the task of each trajectory, and metrics of each task."""
        tasks, evaluation = tasks_of(self.run_config), self.trajectory_builder.evaluation
        by_id = {item.id: tasks.of(item) for item in self.trajectory_builder.examples}
        groups = [
            [trajectory.model_copy(update={"task": by_id.get(str(trajectory.example_id))}) for trajectory in group]
            for group in collection.trajectories
        ]
        least = 1.0 if evaluation is None else evaluation.pass_threshold
        metrics = dict(collection.metrics)
        for task in tasks.configs:
            own = [group for group in groups if group and group[0].task == task]
            metrics |= {f"{tasks.key}={task}/{name}": value for name, value in task_metrics(own, least).items()}
        return collection.model_copy(update={"trajectories": groups, "metrics": metrics})

    async def prepare_validation(self) -> None:
        """Let the sampler have the newest weights.

        Episodes that are sampled ahead end first, with the weights that they began with; those of a `GroupStream` go on
        with the newest.
        """
        await self._schedule.prepare_validation(self.epoch)

    async def hold(self) -> None:
        """Let the adapter sample with the present weights until the next call, whatever is trained."""
        await self.trainer_adapter.pin_weights(finishes_requests=self.trainer_config.in_flight == "finish")

    async def release(self) -> None:
        """Let the adapter sample with the newest weights."""
        await self.trainer_adapter.release_weights()

    async def _collect_epoch(self, epoch: int) -> TrajectoryCollection:
        run_id = f"epoch_{epoch:05d}"
        return await self.collect(run_id, self._meta(epoch, run_id) | self._next_examples(epoch))

    async def _collect_group(self, number: int) -> TrajectoryCollection:
        """Collect the group of this number; groups are numbered from 0 in the order of the epochs' examples."""
        epoch, place = divmod(number, self._order.count)
        run_id = f"group_{number:06d}"
        examples = self._next_examples(epoch).get("example_ids") or self._example_ids
        return await self.collect(run_id, self._meta(epoch, run_id) | {"example_ids": [examples[place]]})

    def _meta(self, epoch: int, run_id: str) -> dict[str, Any]:
        return {"epoch": epoch, "run_id": run_id, "trainer_config": self.trainer_config.model_dump()}

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Store the run's configuration, and initialise the builder and the adapter.

        Raises:
            ConfigError: a task has fewer examples than its share of an epoch.
        """
        await super().initialize(run_config)
        if run_config.per_task:
            _ = self._order

    @cached_property
    def _order(self) -> ExampleOrder:
        tasks, weights = tasks_of(self.run_config), dict[str | None, float]({None: 1.0})
        if tasks.configs:
            weights = {name: config.weight for name, config in tasks.configs.items()}
        ids: dict[str | None, list[str]] = {task: [] for task in weights}
        for item in self.trajectory_builder.examples:
            ids[tasks.of(item)].append(item.id)
        return ExampleOrder(ids, weights, self.trainer_config.examples_per_update, self.run_config.seed)

    @property
    def _example_ids(self) -> list[str]:
        return [item.id for item in self.trajectory_builder.examples]

    def _next_examples(self, epoch: int) -> dict[str, Any]:
        """Return the ids of an epoch's examples, for the `meta` of `start_run`; empty for all examples."""
        is_whole = self._order.count == len(self._example_ids) and not self.run_config.per_task
        return {} if is_whole else {"example_ids": self._order.examples(epoch)}

    def _keep_episodes(self, epoch: int, collection: TrajectoryCollection) -> list[EpisodeIdentity]:
        """Show a sample episode if one is due, write the episodes that `save_episodes` selects, and name these."""
        every, saved = self.trainer_config.show_episodes_every, self.trainer_config.save_episodes
        trajectories = [trajectory for group in collection.trajectories for trajectory in group]
        shown = trajectories[:1] if every and epoch % every == 0 else []
        for trajectory in shown:
            self.log.sample(epoch, trajectory)
        kept = {"all": trajectories, "some": lowest_median_highest(trajectories), "shown": shown}[saved]
        self.log.keep(epoch, kept, {"all": collection.failures, "some": collection.failures[:1], "shown": []}[saved])
        return [trajectory.identity for trajectory in kept]

    def collection_state(self) -> dict[str, Any]:
        """Return the state before the collection that is sampled ahead, which a resumed run repeats."""
        before = self._schedule.before
        return super().collection_state() if before is None else before

    def state(self) -> dict[str, Any]:
        """Return counters, histories, the rewards that early stopping compares, and open groups, for JSON."""
        return {**super().state(), "early_stop": self._early_stop.state(), **self._schedule.state()}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore the state between two epochs; the configuration of early stopping may have changed."""
        super().restore_state(state)
        self._early_stop.restore(state["early_stop"])
        self._restored_groups = state.get("groups")  # those of a run with max_staleness of 2 or more


def lowest_median_highest(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories of lowest, median and highest reward, in their order; fewer if there are fewer.

    >>> rewards = [0.5, 1.0, 0.0, 0.25]
    >>> [t.reward for t in lowest_median_highest([Trajectory(episode=[], reward=reward) for reward in rewards])]
    [0.5, 1.0, 0.0]
    """
    order = sorted(range(len(trajectories)), key=lambda i: (trajectories[i].scorable, trajectories[i].reward))
    chosen = {order[0], order[len(order) // 2], order[-1]} if order else set()
    return [trajectories[i] for i in sorted(chosen)]


class EarlyStop:
    """Decides, from the mean rewards of a run, when it ends early.

    >>> stop = EarlyStop(EarlyStopConfig(patience=2))
    >>> for reward in (0.1, 0.5, 0.5, 0.4):
    ...     stop.count(reward)
    >>> stop.reason
    'the mean reward has not risen above 0.5 for 2 times'
    """

    def __init__(self, config: EarlyStopConfig) -> None:
        self._config = config
        self._best: float | None = None
        self._last: float | None = None
        self._without_gain = 0

    def state(self) -> dict[str, Any]:
        """Return the rewards that the next decisions depend on, for JSON."""
        return {"best": self._best, "without_gain": self._without_gain, "last": self._last}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state`."""
        self._best, self._without_gain, self._last = state["best"], state["without_gain"], state["last"]

    def count(self, reward: float | None) -> None:
        """Count a mean reward; None stands for episodes without a usable reward, which are no gain."""
        has_gained = reward is not None and (self._best is None or reward > self._best)
        self._best, self._last = reward if has_gained else self._best, reward
        self._without_gain = 0 if has_gained else self._without_gain + 1

    @property
    def is_target_reached(self) -> bool:
        """True if the last reward has reached the target."""
        target = self._config.target_reward
        return self._last is not None and target is not None and self._last >= target

    @property
    def reason(self) -> str | None:
        """Why the run ends now, in words; None if it goes on."""
        if self.is_target_reached:
            return f"the mean reward {self._last:.4g} has reached {self._config.target_reward:g}"
        if self._config.patience is not None and self._without_gain >= self._config.patience:
            best = "nothing" if self._best is None else f"{self._best:.4g}"
            return f"the mean reward has not risen above {best} for {self._config.patience} times"
        return None


async def grpo_trainer(config: GRPOTrainerConfig, builder: Any) -> AsyncIterator[GRPOTrainer]:
    """Yield the trainer of a run."""
    yield GRPOTrainer(config, directory=builder.directory, console=builder.console)
