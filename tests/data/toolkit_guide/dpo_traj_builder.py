"""A trajectory builder for DPO: pairs of the candidates that steps of one name report."""

import asyncio
from collections import defaultdict
from itertools import combinations
from typing import Any

from pydantic import Field

from jaxft import (
    DPOItem,
    EvaluationRunOutput,
    IntermediateStepType,
    OpenAIMessage,
    Trajectory,
    TrajectoryBuilder,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
    TTCEventData,
    register_trajectory_builder,
)


class MyDPOTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="guide_dpo_traj_builder"):
    ttc_step_name: str = Field(default="dpo_candidate_move", description="Name of the TTC steps to collect")


class MyDPOTrajectoryBuilder(TrajectoryBuilder):
    def __init__(self, trajectory_builder_config: MyDPOTrajectoryBuilderConfig):
        super().__init__(trajectory_builder_config=trajectory_builder_config)
        self.evaluation_runs: dict[str, asyncio.Task[EvaluationRunOutput]] = {}

    async def start_run(self, run_id: str, meta: dict | None = None) -> None:
        self.evaluation_runs[run_id] = asyncio.create_task(self.run_eval())

    async def finalize(self, run_id: str, meta: dict | None = None) -> TrajectoryCollection:
        result = await self.evaluation_runs.pop(run_id)
        candidates: dict[tuple[str, str], list[TTCEventData]] = defaultdict(list)
        for item in result.eval_input.eval_input_items:
            for step in item.trajectory:
                is_candidate = step.event_type == IntermediateStepType.TTC_END
                if is_candidate and step.payload.name == self.trajectory_builder_config.ttc_step_name:
                    data = step.payload.data
                    if not isinstance(data, TTCEventData):
                        data = TTCEventData(**data.model_dump())
                    candidates[item.id, data.turn_id].append(data)
        groups = defaultdict(list)
        for (example_id, turn_id), turn in candidates.items():
            ranked = sorted(turn, key=lambda data: data.score, reverse=True)
            for chosen, rejected in combinations(ranked, 2):
                item = DPOItem(
                    prompt=[OpenAIMessage(**message) for message in chosen.input],
                    chosen_response=str(chosen.output),
                    rejected_response=str(rejected.output),
                )
                metadata = {"example_id": example_id, "turn_id": turn_id}
                reward = chosen.score - rejected.score
                groups[example_id].append(Trajectory(episode=[item], reward=reward, metadata=metadata))
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


@register_trajectory_builder(config_type=MyDPOTrajectoryBuilderConfig)
async def my_dpo_trajectory_builder(config: MyDPOTrajectoryBuilderConfig, builder):
    yield MyDPOTrajectoryBuilder(trajectory_builder_config=config)
