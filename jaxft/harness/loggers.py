"""The loggers that come with jaxft: their configurations and factories.

    finetuning:
      loggers: [tensorboard, {_type: wandb, project: agents}]

A factory says at the start of a run which package or key is missing; what fails later only switches its logger off.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from jaxft.harness.registry import LoggerConfig, register_logger
from jaxft.runs.loggers import RunLogger
from jaxft.runs.weights_and_biases import WandbLogger, import_wandb


class TensorBoardLoggerConfig(LoggerConfig, name="tensorboard"):
    """Metrics and timings in files that TensorBoard shows, in the folder `tensorboard` of the run directory."""


class WandbLoggerConfig(LoggerConfig, name="wandb"):
    """Metrics, tables of sample episodes, configuration and artifacts in a run of Weights & Biases.

    All else is decided by the environment variables of W&B, such as WANDB_MODE, WANDB_ENTITY and WANDB_TAGS.
    """

    project: str | None = Field(
        default=None, min_length=1, description="Project of the run; null: WANDB_PROJECT, or the default of W&B."
    )
    group: str | None = Field(
        default=None,
        min_length=1,
        description="Group of runs that W&B shows together, such as the seeds of one setting.",
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
    wandb = await asyncio.to_thread(import_wandb)
    options = {"project": config.project, "group": config.group}
    yield WandbLogger(wandb, builder.directory, builder.console.message, options)
