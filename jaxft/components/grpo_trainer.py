"""`_type: grpo_trainer`: the loop. Collect episodes, train on them, log; once per epoch."""

import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field

from jaxft.harness.data_models import (
    EpisodeItem,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.errors import JobFailed, NoLearningSignal, NothingToTrain, TooManyFailures
from jaxft.harness.interfaces import Trainer
from jaxft.harness.registry import TrainerConfig, register_trainer
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.runs.metrics import MetricsLog
from jaxft.runs.plots import plot_rewards

REWARD_HISTORY_FILE = "reward_history.json"

SHOWN = {
    "reward_mean": "reward",
    "entropy": "entropy",
    "kl": "kl",
    "clip_high_share": "clip",
    "sampler_logprob_diff_max": "sampler diff",
    "failed_episodes": "failed",
    "tokens_per_second": "tok/s",
    "seconds": "seconds",
}
"""The figures of the progress line, by the names they are logged under."""


class GRPOTrainerConfig(TrainerConfig, name="grpo_trainer"):
    """One collection and one job per epoch."""

    examples_per_update: int | None = Field(
        default=None, ge=1, description="Examples of one epoch, drawn in an order of their own each pass; null: all."
    )
    show_episodes_every: int = Field(
        default=10, ge=0, description="Epochs between sample episodes shown; 0 shows none."
    )
    max_failed_share: float = Field(
        default=0.5, gt=0.0, le=1.0, description="The run stops when more of an epoch's episodes than this fail."
    )
    max_bad_updates: int = Field(
        default=3, ge=1, description="The run stops after so many non-finite updates in a row."
    )


class GRPOTrainer(Trainer):
    """Runs the epochs of one run; all it writes goes to the run directory."""

    trainer_config: GRPOTrainerConfig

    def __init__(self, trainer_config: GRPOTrainerConfig, *, directory: RunDirectory, console: Console) -> None:
        super().__init__(trainer_config)
        self._directory = directory
        self._console = console
        self._log: MetricsLog | None = None
        self._metrics: dict[str, dict[str, Any]] = {}
        self._timings: dict[str, dict[str, Any]] = {}
        self._reward_history: list[dict[str, float | None]] = []

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """All epochs; the last status of each job. Stops at the first job that fails.

        Raises:
            TooManyFailures: too many episodes of an epoch failed.
            NoLearningSignal: not one epoch had anything to learn from.
            JobFailed: `max_bad_updates` updates in a row were not finite.
        """
        assert self.trainer_adapter is not None
        self._log = MetricsLog(self._directory)
        self._console.start(num_epochs)
        statuses: list[TrainingJobStatus] = []
        bad_updates = learned_epochs = 0
        for epoch in range(num_epochs):
            started = time.perf_counter()
            run_id = f"epoch_{epoch:05d}"
            ref = await self.run_epoch(epoch, run_id)
            if ref is not None:
                status = await self.trainer_adapter.wait_until_complete(ref)
                statuses.append(status)
                if status.status is not TrainingStatusEnum.COMPLETED:
                    break
                self._add_job_figures(run_id, status)
                if self._metrics[run_id].get("applied_updates", 1) == 0:
                    self._console.message(f"{run_id}: {status.message}")
            self._timings[run_id]["seconds"] = time.perf_counter() - started
            figures = await self.get_metrics(run_id)
            self.log_progress(epoch, figures)
            # A backend that does not count its updates is believed to have made one.
            learned_epochs += ref is not None and figures.get("applied_updates", 1) > 0
            bad_updates = bad_updates + 1 if figures.get("nonfinite_updates", 0) else 0
            if bad_updates >= self.trainer_config.max_bad_updates:
                raise JobFailed(
                    f"loss or gradient were not finite in {bad_updates} updates in a row, the last in {run_id}"
                )
        self._save_history()
        is_finished = len(statuses) == 0 or statuses[-1].status is TrainingStatusEnum.COMPLETED
        if is_finished and not learned_epochs:
            raise NoLearningSignal(
                f"nothing could be learned in {num_epochs} epochs: the rewards of every group were equal or not "
                "usable; make the task easier, raise num_generations, or give partial rewards"
            )
        return statuses

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collects episodes and submits them; None when nothing in them can be trained."""
        assert self.trajectory_builder is not None and self.trainer_adapter is not None
        await self.trajectory_builder.start_run(run_id, self._choice_of_examples(epoch))
        collection = await self.trajectory_builder.finalize(run_id)
        self._check_failures(collection)
        self._metrics[run_id], self._timings[run_id] = collection_figures(collection)
        unscorable = self._metrics[run_id]["unscorable_trajectories"]
        if unscorable:
            self._console.message(
                f"{run_id}: {unscorable} rewards were None, NaN or infinite; their episodes train nothing"
            )
        self.trajectory_builder.log_progress(run_id, self._metrics[run_id])
        self._remember_rewards(epoch, self._metrics[run_id])
        self._show_episodes(epoch, collection)
        chosen = self.apply_curriculum_learning(collection, epoch)
        if not any(trajectory.scorable for group in chosen.trajectories for trajectory in group):
            self._console.message(f"{run_id}: no trajectory has a usable reward; nothing was trained")
            return None
        try:
            return await self.trainer_adapter.submit(chosen)
        except NothingToTrain as error:
            self._console.message(f"{run_id}: {error}; nothing was trained")
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

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """The figures of one epoch: those that another run would repeat, then those of the clock.

        Raises:
            ValueError: no such epoch has been run.
        """
        if run_id not in self._metrics:
            raise ValueError(f"no epoch '{run_id}' was run; epochs: {', '.join(self._metrics) or 'none'}")
        return {**self._metrics[run_id], **self._timings[run_id]}

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Writes one step of the logs and the progress line; the reward plot every tenth epoch."""
        run_id = f"epoch_{epoch:05d}"
        if self._log is not None:
            self._log.log(epoch, self._metrics[run_id], self._timings[run_id])
        figures = {shown: metrics[name] for name, shown in SHOWN.items() if metrics.get(name) is not None}
        self._console.epoch(epoch + 1, figures)
        if epoch % 10 == 9:
            self._save_history()

    async def cleanup(self) -> None:
        """Closes the logs."""
        if self._log is not None:
            self._log.close()
            self._save_history()
            self._log = None

    def _add_job_figures(self, run_id: str, status: TrainingJobStatus) -> None:
        metadata = status.metadata or {}
        self._metrics[run_id] |= metadata.get("metrics", {})
        self._timings[run_id] |= metadata.get("timings", {})

    def _check_failures(self, collection: TrajectoryCollection) -> None:
        failed, episodes = len(collection.failures), collection.metrics.get("episodes", 0)
        if not failed:
            return
        if failed > self.trainer_config.max_failed_share * episodes:
            raise TooManyFailures(f"{failed} of {episodes:.0f} episodes failed; the last: {collection.failures[-1]}")
        first = collection.failures[0].splitlines()[0]
        self._console.message(
            f"{collection.run_id}: {failed} of {episodes:.0f} episodes failed and are left out; {first}"
        )

    def _remember_rewards(self, epoch: int, metrics: dict[str, Any]) -> None:
        names = ("reward_mean", "reward_min", "reward_max")
        self._reward_history.append({"epoch": epoch, **{name: metrics.get(name) for name in names}})

    def _save_history(self) -> None:
        if self._reward_history:
            self._directory.write_json(REWARD_HISTORY_FILE, self._reward_history)
            plot_rewards(self._directory, self._reward_history)

    def _show_episodes(self, epoch: int, collection: TrajectoryCollection) -> None:
        every = self.trainer_config.show_episodes_every
        if not every or epoch % every or not collection.trajectories:
            return
        trajectory = collection.trajectories[0][0]
        messages = [
            {"role": item.role.value, "content": item.content}
            for item in trajectory.episode
            if isinstance(item, EpisodeItem)
        ]
        title = f"epoch {epoch + 1}, example {trajectory.example_id}, reward {trajectory.reward:g}"
        self._console.episode(title, messages)
        row = trajectory.model_dump(mode="json")
        self._directory.append_jsonl("trajectories/samples.jsonl", {"epoch": epoch, **row})


def collection_figures(collection: TrajectoryCollection) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a collection says of itself, its rewards and lengths; and, by the clock, how fast it was sampled."""
    trajectories = [trajectory for group in collection.trajectories for trajectory in group]
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.scorable]
    lengths = [sum(sum(row.completion_mask) for row in trajectory.sequences) for trajectory in trajectories]
    metrics = {
        **collection.metrics,
        "unscorable_trajectories": len(trajectories) - len(rewards),
        "completion_tokens_mean": mean(lengths),
        "completion_tokens_max": max(lengths, default=0),
        **{f"reward/{name}": value for name, value in named_reward_means(trajectories).items()},
    }
    if rewards:
        metrics |= {"reward_mean": mean(rewards), "reward_min": min(rewards), "reward_max": max(rewards)}
    timings = dict(collection.timings)
    if timings.get("seconds_rollout"):
        timings["tokens_per_second"] = sum(lengths) / timings["seconds_rollout"]
    return metrics, timings


def named_reward_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each named part of the rewards, over the trajectories that have it."""
    parts: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in (trajectory.named_rewards or {}).items():
            parts.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(parts.items())}


def mean(values: Sequence[float]) -> float:
    """The mean, 0 of nothing.

    >>> mean([1.0, 2.0]), mean([])
    (1.5, 0.0)
    """
    return sum(values) / len(values) if values else 0.0


@register_trainer(config_type=GRPOTrainerConfig)
async def grpo_trainer(config: GRPOTrainerConfig, builder: Any) -> AsyncIterator[GRPOTrainer]:
    """The trainer of a run; it is closed by `cleanup`."""
    yield GRPOTrainer(config, directory=builder.directory, console=builder.console)
