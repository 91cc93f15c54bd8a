"""The loggers that come with jaxft: their configurations and factories.

    finetuning:
      loggers: [tensorboard, {_type: wandb, project: agents, mode: offline}]

A factory says at the start of a run which package or key is missing; what fails later only switches its logger off.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import Field

from jaxft.harness.registry import LoggerConfig, register_logger
from jaxft.runs.loggers import RunLogger
from jaxft.runs.weights_and_biases import WandbLogger, import_wandb


class TensorBoardLoggerConfig(LoggerConfig, name="tensorboard"):
    """Metrics and timings in files that TensorBoard shows, in the folder `tensorboard` of the run directory."""


class WandbLoggerConfig(LoggerConfig, name="wandb"):
    """Metrics, tables of sample episodes, configuration and artifacts in a run of Weights & Biases."""

    project: str | None = Field(
        default=None, min_length=1, description="Project of the run; null: WANDB_PROJECT, or the default of W&B."
    )
    entity: str | None = Field(
        default=None, min_length=1, description="User or team of the project; null: WANDB_ENTITY, or your own."
    )
    group: str | None = Field(
        default=None,
        min_length=1,
        description="Group of runs that W&B shows together, such as the seeds of one setting.",
    )
    name: str | None = Field(
        default=None, min_length=1, description="Name of the run; null: the name of the run directory."
    )
    tags: tuple[str, ...] = Field(default=(), description="Tags of the run.")
    mode: Literal["online", "offline"] | None = Field(
        default=None,
        description="online: sent while the run goes on. offline: written to the folder `wandb` of the run directory, "
        "for `wandb sync`. null: WANDB_MODE, or online.",
    )
    samples_per_epoch: int = Field(
        default=32,
        ge=0,
        description="Largest number of episodes in the table of an epoch, the first of those that "
        "trajectories/samples.jsonl gets; 0: no tables.",
    )
    log_model: bool = Field(
        default=False, description="Upload the trained model as an artifact; false: only plot and report."
    )


@register_logger(config_type=TensorBoardLoggerConfig)
async def tensorboard_logger(config: TensorBoardLoggerConfig, builder: Any) -> AsyncIterator[RunLogger]:
    """Yield the logger of TensorBoard."""
    # Imported here, as tensorboardX takes long to import, and configurations are read without it.
    from jaxft.runs.tensorboard import TensorBoardLogger

    yield TensorBoardLogger(builder.directory)


@register_logger(config_type=WandbLoggerConfig)
async def wandb_logger(config: WandbLoggerConfig, builder: Any) -> AsyncIterator[RunLogger]:
    """Yield the logger of Weights & Biases.

    Raises:
        ComponentError: its package is not installed, or a run that is sent has no API key.
    """
    # In a thread, as importing takes long, and the package's own loop must not run in this one.
    wandb = await asyncio.to_thread(import_wandb, config.mode)
    options = {name: dict(config)[name] for name in ("project", "entity", "group", "name", "tags", "mode")}
    yield WandbLogger(
        wandb,
        builder.directory,
        builder.console.message,
        options,
        samples_per_epoch=config.samples_per_epoch,
        log_model=config.log_model,
        timeout_seconds=config.timeout_seconds,
    )
