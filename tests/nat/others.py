"""Parts for `nat finetune` as a user of the toolkit writes them, and an evaluator: no word of jaxft."""

import json

from nat.builder.evaluator import EvaluatorInfo
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import (
    register_evaluator,
    register_function,
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
)
from nat.data_models.component_ref import FunctionRef
from nat.data_models.evaluator import EvaluatorBaseConfig
from nat.data_models.finetuning import (
    DPOItem,
    EpisodeItem,
    EpisodeItemRole,
    OpenAIMessage,
    TrainerAdapterConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)
from nat.data_models.function import FunctionBaseConfig
from nat.finetuning.interfaces.finetuning_runner import Trainer
from nat.finetuning.interfaces.trainer_adapter import TrainerAdapter
from nat.finetuning.interfaces.trajectory_builder import TrajectoryBuilder
from nat.finetuning.utils.parsers.base_parser import parse_to_openai_messages
from nat.plugins.eval.data_models.evaluator_io import EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator


class DigitsConfig(EvaluatorBaseConfig, name="digits"):
    fails_on: str | None = None


class Digits(BaseEvaluator):
    """Scores the fraction of digits; fails on one example if it is told to."""

    def __init__(self, fails_on):
        super().__init__()
        self.fails_on = fails_on

    async def evaluate_item(self, item):
        if str(item.id) == self.fails_on:
            raise RuntimeError("no score today")
        text = str(item.output_obj)
        score = sum(character.isdigit() for character in text) / max(len(text), 1)
        return EvalOutputItem(id=item.id, score=score, reasoning=f"{len(item.trajectory)} steps")


@register_evaluator(config_type=DigitsConfig)
async def digits(config, builder):
    yield EvaluatorInfo(config=config, evaluate_fn=Digits(config.fails_on).evaluate, description="digits")


class TwoStepsConfig(FunctionBaseConfig, name="two_steps"):
    first: FunctionRef
    second: FunctionRef


@register_function(config_type=TwoStepsConfig)
async def two_steps(config, builder):
    first, second = await builder.get_function(config.first), await builder.get_function(config.second)

    async def ask(question: str) -> str:
        plan = await first.ainvoke(question, to_type=str)
        return await second.ainvoke(f"plan {len(plan)}", to_type=str)

    yield FunctionInfo.from_fn(ask, description="Asks twice.")


class UserBuilderConfig(TrajectoryBuilderConfig, name="user_traj_builder"):
    num_generations: int = 2


class UserBuilder(TrajectoryBuilder):
    def __init__(self, trajectory_builder_config):
        super().__init__(trajectory_builder_config)
        self.evaluation_runs = {}

    async def start_run(self, run_id, meta=None):
        import asyncio

        count = self.trajectory_builder_config.num_generations
        self.evaluation_runs[run_id] = [asyncio.create_task(self.run_eval()) for _ in range(count)]

    async def finalize(self, run_id, meta=None):
        groups = {}
        for generation, task in enumerate(self.evaluation_runs.pop(run_id)):
            output = await task
            items = {item.id: item for item in output.eval_input.eval_input_items}
            for name, result in output.evaluation_results:
                if name != self.run_config.reward_function.name:
                    continue
                for verdict in result.eval_output_items:
                    episode = [
                        EpisodeItem(
                            role=EpisodeItemRole(message["role"]),
                            content=message["content"],
                            logprobs=message.get("logprobs"),
                        )
                        for message in parse_to_openai_messages(items[verdict.id].trajectory)
                    ]
                    reward = await self.compute_reward(verdict, meta)
                    metadata = {"id": verdict.id, "generation": generation}
                    trajectory = Trajectory(episode=episode, reward=reward, metadata=metadata)
                    groups.setdefault(verdict.id, []).append(trajectory)
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id)

    def log_progress(self, run_id, metrics, output_dir=None):
        pass


@register_trajectory_builder(config_type=UserBuilderConfig)
async def user_traj_builder(config, builder):
    yield UserBuilder(config)


class PairsBuilderConfig(TrajectoryBuilderConfig, name="pairs_traj_builder"):
    pass


class PairsBuilder(TrajectoryBuilder):
    """Prefers answers that are digits, whatever the policy says."""

    async def start_run(self, run_id, meta=None):
        pass

    async def finalize(self, run_id, meta=None):
        pairs = [
            DPOItem(
                prompt=[OpenAIMessage(role="user", content=f"number {number}?")],
                chosen_response=str(number),
                rejected_response="no idea",
            )
            for number in range(4)
        ]
        groups = [[Trajectory(episode=[pair], reward=1.0, metadata={"id": str(n)})] for n, pair in enumerate(pairs)]
        return TrajectoryCollection(trajectories=groups, run_id=run_id)

    def log_progress(self, run_id, metrics, output_dir=None):
        pass


@register_trajectory_builder(config_type=PairsBuilderConfig)
async def pairs_traj_builder(config, builder):
    yield PairsBuilder(config)


class UserAdapterConfig(TrainerAdapterConfig, name="user_trainer_adapter"):
    file: str


class UserAdapter(TrainerAdapter):
    """Appends what it is given to a file, and trains nothing."""

    async def is_healthy(self):
        return True

    async def submit(self, trajectories):
        with open(self.adapter_config.file, "a") as file:
            file.write(trajectories.model_dump_json() + "\n")
        return TrainingJobRef(run_id=trajectories.run_id, backend="file")

    async def status(self, ref):
        return TrainingJobStatus(run_id=ref.run_id, backend="file", status=TrainingStatusEnum.COMPLETED)

    async def wait_until_complete(self, ref, poll_interval=10.0):
        return await self.status(ref)

    def log_progress(self, ref, metrics, output_dir=None):
        pass


@register_trainer_adapter(config_type=UserAdapterConfig)
async def user_trainer_adapter(config, builder):
    yield UserAdapter(config)


class UserTrainerConfig(TrainerConfig, name="user_trainer"):
    file: str


class UserTrainer(Trainer):
    """The shortest loop; writes the statuses of its jobs to a file."""

    async def run_epoch(self, epoch, run_id):
        await self.trajectory_builder.start_run(run_id, {"epoch": epoch})
        collection = await self.trajectory_builder.finalize(run_id, {"epoch": epoch})
        return await self.trainer_adapter.submit(collection)

    async def run(self, num_epochs):
        statuses = []
        for epoch in range(num_epochs):
            ref = await self.run_epoch(epoch, "user_run")
            statuses.append(await self.trainer_adapter.wait_until_complete(ref))
        with open(self.trainer_config.file, "w") as file:
            json.dump([status.model_dump(mode="json") for status in statuses], file)
        return statuses

    async def get_metrics(self, run_id):
        return {"run_id": run_id}

    async def cleanup(self):
        pass

    def log_progress(self, epoch, metrics, output_dir=None):
        pass


@register_trainer(config_type=UserTrainerConfig)
async def user_trainer(config, builder):
    yield UserTrainer(config)
