"""Components of a user who needs no model: a run of them takes a moment, and imports jax after this module."""

import logging
import sys
import threading

from jaxft.harness.contracts import Trainer, TrainerAdapter, TrajectoryBuilder
from jaxft.harness.data_models import TrainingJobRef, TrainingJobStatus, TrajectoryCollection
from jaxft.harness.registry import (
    EvaluatorConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
    WorkflowConfig,
    register_evaluator,
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
    register_workflow,
)

log = logging.getLogger(__name__)
log.info("imported, jax: %s", "jax" in sys.modules)


class AgentConfig(WorkflowConfig, name="cli_agent"):
    pass


@register_workflow(config_type=AgentConfig)
async def agent(config, builder):
    async def answer(example):
        return example["question"]

    yield answer


class BuilderConfig(TrajectoryBuilderConfig, name="cli_builder"):
    pass


class Builder(TrajectoryBuilder):
    async def start_run(self, run_id, meta=None):
        self.output = await self.run_eval()

    async def finalize(self, run_id, meta=None):
        return TrajectoryCollection(trajectories=[], run_id=run_id)

    def log_progress(self, run_id, metrics, output_dir=None):
        pass


@register_trajectory_builder(config_type=BuilderConfig)
async def builder(config, builder):
    yield Builder(config)


class AdapterConfig(TrainerAdapterConfig, name="cli_adapter"):
    pass


class Adapter(TrainerAdapter):
    async def is_healthy(self):
        return True

    async def submit(self, trajectories):
        return TrainingJobRef(run_id=trajectories.run_id, backend="cli")

    async def status(self, ref):
        return TrainingJobStatus(run_id=ref.run_id, backend="cli", status="completed")

    async def wait_until_complete(self, ref, poll_interval=10.0):
        return await self.status(ref)

    def log_progress(self, ref, metrics, output_dir=None):
        pass

    async def export_model(self, folder):
        folder.mkdir()
        return folder


@register_trainer_adapter(config_type=AdapterConfig)
async def adapter(config, builder):
    yield Adapter(config)


class LoopConfig(TrainerConfig, name="cli_trainer"):
    pass


class Loop(Trainer):
    async def run_epoch(self, epoch, run_id):
        await self.trajectory_builder.start_run(run_id)
        return await self.trainer_adapter.submit(await self.trajectory_builder.finalize(run_id))

    async def run(self, num_epochs):
        return [
            await self.trainer_adapter.wait_until_complete(await self.run_epoch(epoch, f"e{epoch}"))
            for epoch in range(num_epochs)
        ]

    async def get_metrics(self, run_id):
        return {}

    async def cleanup(self):
        pass

    def log_progress(self, epoch, metrics, output_dir=None):
        pass


@register_trainer(config_type=LoopConfig)
async def loop(config, builder):
    yield Loop(config)


class LengthConfig(EvaluatorConfig, name="cli_length"):
    pass


@register_evaluator(config_type=LengthConfig)
async def length(config, builder):
    yield lambda item: len(item.output_obj)


class TalkativeConfig(WorkflowConfig, name="cli_talkative"):
    pass


@register_workflow(config_type=TalkativeConfig)
async def talkative(config, builder):
    import quiet_library  # which the test has put into a folder of installed packages

    async def answer(example):
        log.debug("asked %s", example["question"])
        quiet_library.work()
        thread = threading.Thread(target=log.info, args=("the key is sk-3141592653",))
        thread.start()
        thread.join()
        return "a"

    yield answer
