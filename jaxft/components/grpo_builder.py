"""`_type: grpo_trajectory_builder`: several episodes of every example, a group each."""

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from jaxft.components.collecting import EpisodeCollector, episode_items
from jaxft.harness.data_models import EvalOutputItem, Trajectory, TrajectoryCollection
from jaxft.harness.evaluation import EpisodeOutcome
from jaxft.harness.registry import TrajectoryBuilderConfig, register_trajectory_builder
from jaxft.policy.sequences import token_sequences


class GRPOTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="grpo_trajectory_builder"):
    """Groups of episodes, one group per example."""

    num_generations: int = Field(default=8, ge=1, description="Episodes of each example, compared with each other.")


class GRPOTrajectoryBuilder(EpisodeCollector):
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
        collection = with_figures(TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id, **about))
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
            episode=episode_items(outcome),
            reward=0.0 if reward is None else reward,
            shaped_rewards=outcome.episode.shaped_rewards,
            metadata={"example_id": outcome.item.id, "generation": outcome.generation, "score": outcome.reward},
            scorable=reward is not None,
            named_rewards={} if is_priced else outcome.named_rewards,
            example_id=outcome.item.id,
            generation=outcome.generation,
            sequences=token_sequences(outcome.episode.calls, self.is_target),
        )


def with_figures(collection: TrajectoryCollection) -> TrajectoryCollection:
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


@register_trajectory_builder(config_type=GRPOTrajectoryBuilderConfig)
async def grpo_trajectory_builder(
    config: GRPOTrajectoryBuilderConfig, builder: Any
) -> AsyncIterator[GRPOTrajectoryBuilder]:
    """The builder; the run's evaluation and examples are bound to it by whoever asked for it."""
    yield GRPOTrajectoryBuilder(config)
