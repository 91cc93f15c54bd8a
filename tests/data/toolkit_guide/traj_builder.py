"""A trajectory builder: one evaluation run per generation, whose steps are parsed into episodes."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from pydantic import Field

from jaxft import (
    EpisodeItem,
    EpisodeItemRole,
    EvaluationRunOutput,
    IntermediateStep,
    IntermediateStepCategory,
    Trajectory,
    TrajectoryBuilder,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
    parse_to_openai_messages,
    register_trajectory_builder,
)

logger = logging.getLogger(__name__)

ROLES = {
    "user": EpisodeItemRole.USER,
    "assistant": EpisodeItemRole.ASSISTANT,
    "system": EpisodeItemRole.SYSTEM,
    "tool": EpisodeItemRole.TOOL,
}


class MyTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="guide_traj_builder"):
    """Configuration for my custom trajectory builder."""

    num_generations: int = Field(default=2, ge=1, description="Number of trajectory generations per example")
    include_tool_calls: bool = Field(default=True, description="Whether to include tool call messages in trajectories")
    min_episode_length: int = Field(default=2, description="Minimum number of messages for a valid trajectory")


class MyTrajectoryBuilder(TrajectoryBuilder):
    def __init__(self, trajectory_builder_config: MyTrajectoryBuilderConfig):
        super().__init__(trajectory_builder_config=trajectory_builder_config)
        self.evaluation_runs: dict[str, list[asyncio.Task[EvaluationRunOutput]]] = {}

    async def start_run(self, run_id: str, meta: dict | None = None) -> None:
        if run_id in self.evaluation_runs:
            raise ValueError(f"Run {run_id} is already in progress.")
        self.evaluation_runs[run_id] = [
            asyncio.create_task(self.run_eval(), name=f"eval-run-{run_id}-gen-{generation}")
            for generation in range(self.trajectory_builder_config.num_generations)
        ]

    async def finalize(self, run_id: str, meta: dict | None = None) -> TrajectoryCollection:
        if run_id not in self.evaluation_runs:
            raise ValueError(f"No evaluation runs found for run_id: {run_id}")
        results = await asyncio.gather(*self.evaluation_runs.pop(run_id))

        trajectories_by_id: dict[str, list[Trajectory]] = {}
        for generation, result in enumerate(results):
            reward_items = []
            for name, output in result.evaluation_results:
                if name == self.run_config.reward_function.name:
                    reward_items = output.eval_output_items
            input_items = {item.id: item for item in result.eval_input.eval_input_items}
            for reward_item in reward_items:
                steps = self._target_steps(input_items[reward_item.id].trajectory)
                episode = self._parse_episode(steps)
                if len(episode) < self.trajectory_builder_config.min_episode_length:
                    logger.warning("Episode of %s is too short, skipping", reward_item.id)
                    continue
                trajectory = Trajectory(
                    episode=episode,
                    reward=await self.compute_reward(reward_item, meta=meta),
                    metadata={"id": reward_item.id, "reasoning": reward_item.reasoning, "generation": generation},
                )
                trajectories_by_id.setdefault(reward_item.id, []).append(trajectory)
        return TrajectoryCollection(trajectories=list(trajectories_by_id.values()), run_id=run_id)

    def _target_steps(self, steps: list[IntermediateStep]) -> list[IntermediateStep]:
        kept = []
        for step in steps:
            if step.function_ancestry.function_name not in self.run_config.target_functions:
                continue
            is_llm = step.event_category == IntermediateStepCategory.LLM
            if self.run_config.target_model and is_llm and step.payload.name != self.run_config.target_model:
                continue
            kept.append(step)
        return kept

    def _parse_episode(self, steps: list[IntermediateStep]) -> list[EpisodeItem]:
        episode = []
        for message in parse_to_openai_messages(steps):
            role = ROLES.get(message.get("role"), EpisodeItemRole.OTHER)
            logprobs = message.get("logprobs")
            if role == EpisodeItemRole.ASSISTANT and not logprobs:
                continue
            if role == EpisodeItemRole.TOOL and not self.trajectory_builder_config.include_tool_calls:
                continue
            names = ("tool_call_id", "tool_calls", "name")
            metadata = {name: message[name] for name in names if name in message}
            episode.append(
                EpisodeItem(role=role, content=message.get("content", ""), logprobs=logprobs, metadata=metadata or None)
            )
        return episode

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        out_dir = Path(output_dir) if output_dir else self.run_config.output_dir
        with open(out_dir / "guide_traj_builder.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"run_id": run_id, **metrics}) + "\n")


@register_trajectory_builder(config_type=MyTrajectoryBuilderConfig)
async def my_trajectory_builder(config: MyTrajectoryBuilderConfig, builder):
    yield MyTrajectoryBuilder(trajectory_builder_config=config)
