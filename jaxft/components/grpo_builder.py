"""`_type: grpo_trajectory_builder`: several episodes of every example, a group each."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from jaxft.harness.data_models import (
    EpisodeItem,
    EpisodeItemRole,
    EvalInputItem,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.evaluation import EpisodeOutcome, failure_report
from jaxft.harness.interfaces import TrajectoryBuilder
from jaxft.harness.registry import TrajectoryBuilderConfig, register_trajectory_builder
from jaxft.policy.recorder import TRAINING, episode_messages, token_sequences

ROLES = {role.value: role for role in EpisodeItemRole}


class GRPOTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="grpo_trajectory_builder"):
    """Groups of episodes, one group per example."""

    num_generations: int = Field(default=8, ge=1, description="Episodes of each example, compared with each other.")


class GRPOTrajectoryBuilder(TrajectoryBuilder):
    """Runs the workflow `num_generations` times on every example.

    Attributes:
        evaluation_runs: the episodes of each collection that was started and not yet finalised.
    """

    trajectory_builder_config: GRPOTrajectoryBuilderConfig

    def __init__(self, trajectory_builder_config: GRPOTrajectoryBuilderConfig) -> None:
        super().__init__(trajectory_builder_config)
        self.evaluation_runs: dict[str, list[asyncio.Task[EpisodeOutcome]]] = {}
        self.progress: dict[str, dict[str, Any]] = {}
        self._started: dict[str, float] = {}
        self._collections = 0

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts the episodes of a collection; its rollout index is how many collections there were before.

        Args:
            run_id: names the collection.
            meta: `{"example_ids": [...]}` chooses examples, in that order; without it all take part.

        Raises:
            ValueError: a collection of this name has been started and not finalised, or an id is not in the dataset.
            RuntimeError: no evaluation is bound.
        """
        if run_id in self.evaluation_runs:
            raise ValueError(f"run '{run_id}' is already in progress; finalize it or choose another id")
        if self.evaluation is None:
            raise RuntimeError("the builder has no evaluation: call bind_evaluation first")
        examples = self._chosen(meta)
        self._started[run_id] = time.perf_counter()
        self.evaluation_runs[run_id] = self.evaluation.start(
            examples,
            stream=TRAINING,
            rollout_index=self._collections,
            num_generations=self.trajectory_builder_config.num_generations,
        )
        self._collections += 1

    def _chosen(self, meta: dict[str, Any] | None) -> list[EvalInputItem]:
        if meta is None or "example_ids" not in meta:
            return self.examples
        by_id = {item.id: item for item in self.examples}
        unknown = [example_id for example_id in meta["example_ids"] if example_id not in by_id]
        if unknown:
            raise ValueError(f"no examples have the ids {', '.join(unknown[:5])}; the dataset has {len(by_id)} others")
        return [by_id[example_id] for example_id in meta["example_ids"]]

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """The trajectories of a collection, a group per example in the order of `start_run`, without failed episodes.

        `metrics`, `timings` and `failures` of the collection say what was left out and how long it took.

        Raises:
            ValueError: no collection of this name is in progress.
        """
        if run_id not in self.evaluation_runs:
            known = ", ".join(self.evaluation_runs) or "none"
            raise ValueError(f"run '{run_id}' is not in progress; in progress: {known}")
        try:
            outcomes = await asyncio.gather(*self.evaluation_runs[run_id])
        finally:
            for task in self.evaluation_runs.pop(run_id):
                task.cancel()
            started = self._started.pop(run_id)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        groups: dict[str, list[Trajectory]] = {}
        for outcome in outcomes:
            if outcome.error is None:
                groups.setdefault(outcome.item.id, []).append(make_trajectory(outcome))
        return TrajectoryCollection(
            trajectories=list(groups.values()),
            run_id=run_id,
            metrics={"episodes": len(outcomes), "failed_episodes": len(failed)},
            timings={
                "seconds_rollout": time.perf_counter() - started,
                "seconds_reward": sum(outcome.seconds["reward"] for outcome in outcomes),
            },
            failures=[failure_report(outcome) for outcome in failed],
        )

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Keeps the figures of a collection in `progress`."""
        self.progress[run_id] = dict(metrics)


def make_trajectory(outcome: EpisodeOutcome) -> Trajectory:
    """An episode that ended well as a trajectory; without a usable reward it is not scorable."""
    calls = outcome.episode.calls
    unmatched = list(calls)
    episode = []
    for message in episode_messages(calls):
        role = ROLES.get(message["role"], EpisodeItemRole.OTHER)
        logprobs = None
        if role is EpisodeItemRole.ASSISTANT:
            # An assistant's message that no call answered was written by the agent itself, and is not trained.
            call = next((call for call in unmatched if call.content == message["content"]), None)
            logprobs = [] if call is None else list(call.sampler_logprobs)
            unmatched = [other for other in unmatched if other is not call]
        episode.append(EpisodeItem(role=role, content=message["content"], logprobs=logprobs))
    return Trajectory(
        episode=episode,
        reward=0.0 if outcome.reward is None else outcome.reward,
        shaped_rewards=outcome.episode.shaped_rewards,
        scorable=outcome.reward is not None,
        named_rewards=outcome.named_rewards,
        example_id=outcome.item.id,
        generation=outcome.generation,
        sequences=token_sequences(calls),
    )


@register_trajectory_builder(config_type=GRPOTrajectoryBuilderConfig)
async def grpo_trajectory_builder(
    config: GRPOTrajectoryBuilderConfig, builder: Any
) -> AsyncIterator[GRPOTrajectoryBuilder]:
    """The builder; the run's evaluation and examples are bound to it by whoever asked for it."""
    yield GRPOTrajectoryBuilder(config)
