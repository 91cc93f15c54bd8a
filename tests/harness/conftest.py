"""Toy components: an agent without a language model, and a trainer that trains nothing."""

import asyncio
from typing import Any

import pytest
from pydantic import Field, SecretStr

from jaxft.errors import TrajectoryError
from jaxft.harness.config_types import LLMRef
from jaxft.harness.contracts import Trainer, TrainerAdapter, TrajectoryBuilder
from jaxft.harness.data_models import (
    EvalInputItem,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.registry import (
    DatasetConfig,
    EvaluatorConfig,
    LLMConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
    WorkflowConfig,
    register_dataset_loader,
    register_evaluator,
    register_llm,
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
    register_workflow,
)
from jaxft.rollout.recorder import TRAINING

events: list[str] = []


class ToyLLMConfig(LLMConfig, name="toy_llm"):
    api_key: SecretStr | None = None


@register_llm(config_type=ToyLLMConfig)
async def toy_llm(config, builder):
    events.append("llm opened")
    yield object()
    events.append("llm closed")


class ToyAgentConfig(WorkflowConfig, name="toy_agent"):
    llm: LLMRef | None = None
    fail_on: tuple[str, ...] = ()


@register_workflow(config_type=ToyAgentConfig)
async def toy_agent(config, builder):
    if config.llm is not None:
        await builder.get_llm(config.llm)
    events.append("agent opened")

    async def answer(example: dict) -> str:
        if example["question"] in config.fail_on:
            raise ValueError(f"cannot answer {example['question']}")
        return example["question"].upper()

    yield answer
    events.append("agent closed")


class ToyMatchConfig(EvaluatorConfig, name="toy_match"):
    pass


@register_evaluator(config_type=ToyMatchConfig)
async def toy_match(config, builder):
    async def score(item: EvalInputItem) -> float:
        return float(item.output_obj == item.expected_output_obj)

    yield score


class ToyRowsConfig(DatasetConfig, name="toy_rows"):
    questions: tuple[str, ...] = ("a", "b", "c")


@register_dataset_loader(config_type=ToyRowsConfig)
async def toy_rows(config, builder):
    rows = [{"question": question, "answer": question.upper()} for question in config.questions]
    yield [
        EvalInputItem(id=f"{i}", input_obj=r["question"], expected_output_obj=r["answer"], full_dataset_entry=r)
        for i, r in enumerate(rows)
    ]


class ToyBuilderConfig(TrajectoryBuilderConfig, name="toy_builder"):
    num_generations: int = 2


class ToyBuilder(TrajectoryBuilder):
    async def start_run(self, run_id: str, meta: dict | None = None) -> None:
        generations = self.trajectory_builder_config.num_generations
        self.tasks = self.evaluation.start(self.examples, stream=TRAINING, rollout_index=0, num_generations=generations)

    async def finalize(self, run_id: str, meta: dict | None = None) -> TrajectoryCollection:
        outcomes = [await task for task in self.tasks]
        groups = {outcome.item.id: [] for outcome in outcomes}
        for outcome in outcomes:
            groups[outcome.item.id].append(
                Trajectory(episode=[], reward=outcome.reward or 0.0, scorable=outcome.reward is not None)
            )
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict, output_dir: str | None = None) -> None:
        pass


@register_trajectory_builder(config_type=ToyBuilderConfig)
async def toy_builder(config, builder):
    yield ToyBuilder(config)


class ToyAdapterConfig(TrainerAdapterConfig, name="toy_adapter"):
    status: TrainingStatusEnum = TrainingStatusEnum.COMPLETED
    metrics: dict[str, float] = Field(default_factory=dict)
    refuses: bool = False
    memory: dict[str, float] = Field(default_factory=dict)
    disk: dict[str, int] = Field(default_factory=dict)
    advice: str | None = None


class ToyAdapter(TrainerAdapter):
    async def is_healthy(self) -> bool:
        return True

    async def memory(self) -> dict[str, float]:
        return self.adapter_config.memory

    def memory_advice(self, memory: dict[str, float]) -> str | None:
        return self.adapter_config.advice

    async def disk_bytes(self) -> dict[str, int]:
        return self.adapter_config.disk

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        if self.adapter_config.refuses:
            raise TrajectoryError("the toy refuses them")
        return TrainingJobRef(run_id=trajectories.run_id, backend="toy")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        status, metadata = self.adapter_config.status, {"metrics": self.adapter_config.metrics}
        return TrainingJobStatus(
            run_id=ref.run_id, backend="toy", status=status, message="the toy said so", metadata=metadata
        )

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        return await self.status(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict, output_dir: str | None = None) -> None:
        pass


@register_trainer_adapter(config_type=ToyAdapterConfig)
async def toy_adapter(config, builder):
    yield ToyAdapter(config)


class ToyTrainerConfig(TrainerConfig, name="toy_trainer"):
    pass


class ToyTrainer(Trainer):
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        await self.trajectory_builder.start_run(run_id)
        return await self.trainer_adapter.submit(await self.trajectory_builder.finalize(run_id))

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        refs = [await self.run_epoch(epoch, f"epoch-{epoch}") for epoch in range(num_epochs)]
        return [await self.trainer_adapter.wait_until_complete(ref) for ref in refs]

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return {}

    async def cleanup(self) -> None:
        events.append("trainer cleaned up")

    def log_progress(self, epoch: int, metrics: dict, output_dir: str | None = None) -> None:
        pass


@register_trainer(config_type=ToyTrainerConfig)
async def toy_trainer(config, builder):
    yield ToyTrainer(config)


@pytest.fixture
def toy_events() -> list[str]:
    """What the toys report, from now on."""
    events.clear()
    return events


@pytest.fixture
def toy_run(tmp_path) -> dict[str, Any]:
    """The sections of a run of the toys; every test may change its own copy."""
    return {
        "llms": {"policy": {"_type": "toy_llm"}},
        "workflow": {"_type": "toy_agent", "llm": "policy"},
        "eval": {
            "general": {"max_concurrency": 2, "dataset": {"_type": "toy_rows"}},
            "evaluators": {"match": {"_type": "toy_match"}},
        },
        "trajectory_builders": {"rollouts": {"_type": "toy_builder"}},
        "trainer_adapters": {"local": {"_type": "toy_adapter"}},
        "trainers": {"loop": {"_type": "toy_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "loop",
            "trajectory_builder": "rollouts",
            "trainer_adapter": "local",
            "reward_function": {"name": "match"},
            "num_epochs": 2,
            "output_dir": str(tmp_path / "run"),
        },
    }


@pytest.fixture
def make_trainer():
    """Makes toy trainers, their parts bound, that train nothing."""

    def make():
        trainer = ToyTrainer(ToyTrainerConfig())
        asyncio.run(trainer.bind_components(ToyBuilder(ToyBuilderConfig()), ToyAdapter(ToyAdapterConfig())))
        return trainer

    return make


class IdleTrainerConfig(TrainerConfig, name="idle_trainer"):
    pass


class IdleTrainer(ToyTrainer):
    """Submits nothing."""

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        return []


@register_trainer(config_type=IdleTrainerConfig)
async def idle_trainer(config, builder):
    yield IdleTrainer(config)


class ValidatingTrainerConfig(TrainerConfig, name="validating_trainer"):
    pass


class ValidatingTrainer(ToyTrainer):
    """Validates, and trains nothing."""

    def __init__(self, config, console):
        super().__init__(config)
        self.console = console

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        found = await self.run_validation_evaluation(0, "validation")
        reward, count, failed = found["avg_reward"], found["num_examples"], found["num_failed"]
        self.console.message(f"validated: {reward} of {count}, {failed} failed")
        self.needs_no_training = True
        return []


@register_trainer(config_type=ValidatingTrainerConfig)
async def validating_trainer(config, builder):
    yield ValidatingTrainer(config, builder.console)


class LeakyAgentConfig(WorkflowConfig, name="leaky_agent"):
    headers: dict[str, SecretStr]


@register_workflow(config_type=LeakyAgentConfig)
async def leaky_agent(config, builder):
    """Says its secrets aloud: as its output, and in what it raises."""
    secrets = [secret.get_secret_value() for secret in config.headers.values()]

    async def answer(example: dict) -> str:
        if example["question"] == "b":
            raise PermissionError(f"401 with headers {secrets}")
        return " ".join(secrets)

    yield answer
