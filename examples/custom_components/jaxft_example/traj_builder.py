"""`_type: my_traj_builder`: several episodes of every example, a group of trajectories each."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field

import jaxft

ROLES = {role.value: role for role in jaxft.EpisodeItemRole}
TOOLS = (jaxft.EpisodeItemRole.TOOL, jaxft.EpisodeItemRole.FUNCTION)


class MyTrajectoryBuilderConfig(jaxft.TrajectoryBuilderConfig, name="my_traj_builder"):
    """Which episodes become trajectories, and which messages these hold."""

    num_generations: int = Field(default=4, ge=1, description="Episodes of each example.")
    include_tool_calls: bool = Field(default=True, description="True if messages of tools are in a trajectory.")
    min_episode_length: int = Field(default=2, ge=0, description="Fewest messages of an episode.")


class MyTrajectoryBuilder(jaxft.TrajectoryBuilder):
    """Runs the workflow through the evaluation that jaxft binds to it."""

    trajectory_builder_config: MyTrajectoryBuilderConfig

    def __init__(self, trajectory_builder_config: MyTrajectoryBuilderConfig) -> None:
        super().__init__(trajectory_builder_config)
        self.evaluation_runs: dict[str, list[asyncio.Task[jaxft.EpisodeOutcome]]] = {}
        self.progress: dict[str, dict[str, Any]] = {}
        self._num_collections = 0

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts the episodes and returns; `meta` may choose examples by `example_ids`."""
        if self.evaluation is None:
            raise RuntimeError("no evaluation: call bind_evaluation first")
        if run_id in self.evaluation_runs:
            raise ValueError(f"run '{run_id}' has been started, and not finalized")
        by_id = {item.id: item for item in self.examples}
        ids = by_id if meta is None else meta.get("example_ids", by_id)
        self.evaluation_runs[run_id] = self.evaluation.start(
            [by_id[example_id] for example_id in ids],
            stream=jaxft.episodes.TRAINING,
            rollout_index=self._num_collections,
            num_generations=self.trajectory_builder_config.num_generations,
        )
        # Every collection draws other random numbers: two with one index would sample the same answers.
        self._num_collections += 1

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> jaxft.TrajectoryCollection:
        """A group per example. What is left out is counted: failed episodes, and short ones."""
        if run_id not in self.evaluation_runs:
            raise ValueError(f"run '{run_id}' has not been started")
        outcomes = await asyncio.gather(*self.evaluation_runs.pop(run_id))
        groups: dict[str, list[jaxft.Trajectory]] = {}
        failures, num_short = [], 0
        for outcome in outcomes:
            messages = jaxft.episodes.episode_messages(outcome.episode.calls)
            if outcome.error is not None:
                failures.append(f"{outcome.episode.id}: {outcome.error}\n{outcome.traceback}")
            elif len(messages) < self.trajectory_builder_config.min_episode_length:
                num_short += 1
            else:
                groups.setdefault(outcome.item.id, []).append(await self._trajectory(outcome))
        metrics: dict[str, float] = {
            "episodes": len(outcomes),
            "failed_episodes": len(failures),
            "short_episodes": num_short,
            "unscorable_trajectories": sum(not each.scorable for group in groups.values() for each in group),
        }
        return jaxft.TrajectoryCollection(
            trajectories=list(groups.values()), run_id=run_id, metrics=metrics, failures=failures
        )

    async def _trajectory(self, outcome: jaxft.EpisodeOutcome) -> jaxft.Trajectory:
        verdict = jaxft.EvalOutputItem(id=outcome.item.id, score=outcome.reward, generation=outcome.generation)
        calls, reward = outcome.episode.calls, await self.compute_reward(verdict)
        return jaxft.Trajectory(
            episode=to_messages(calls, include_tool_calls=self.trajectory_builder_config.include_tool_calls),
            reward=0.0 if reward is None else reward,
            scorable=reward is not None,
            example_id=outcome.item.id,
            generation=outcome.generation,
            sequences=jaxft.token_sequences(calls, self._is_target),  # what a local adapter trains on
        )

    def _is_target(self, call: jaxft.Call) -> bool:
        if self.run_config is None:
            return True
        return jaxft.episodes.is_targeted(call, self.run_config.target_functions, self.run_config.target_model)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Keeps the figures of a collection in `progress`."""
        self.progress[run_id] = dict(metrics)


def to_messages(calls: Sequence[jaxft.Call], *, include_tool_calls: bool) -> list[jaxft.EpisodeItem]:
    """The conversation; an answer of the policy carries its log-probabilities, anybody else's has an empty list."""
    answers: dict[str, list[list[float]]] = {}
    for call in calls:
        answers.setdefault(call.content, []).append(list(call.sampler_logprobs))
    items = []
    for message in jaxft.episodes.episode_messages(calls):
        role, content = ROLES.get(message["role"], jaxft.EpisodeItemRole.OTHER), message["content"]
        logprobs = None
        if role is jaxft.EpisodeItemRole.ASSISTANT:
            logprobs = answers[content].pop(0) if answers.get(content) else []
        if include_tool_calls or role not in TOOLS:
            items.append(jaxft.EpisodeItem(role=role, content=content, logprobs=logprobs))
    return items


@jaxft.register_trajectory_builder(config_type=MyTrajectoryBuilderConfig)
async def my_traj_builder(config: MyTrajectoryBuilderConfig, builder: Any) -> AsyncIterator[MyTrajectoryBuilder]:
    """The builder; jaxft binds evaluation and examples to it."""
    yield MyTrajectoryBuilder(config)
