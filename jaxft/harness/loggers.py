"""Configurations of the loggers that come with jaxft.

    finetuning:
      loggers: [tensorboard, {_type: wandb, project: agents}]

A factory says at the start of a run which package or key is missing; what fails later only switches its logger off.
"""

from pydantic import Field

from jaxft.harness.registry import REGISTRY, LoggerConfig


class TensorBoardLoggerConfig(LoggerConfig, name="tensorboard"):
    """Metrics and timings in files that TensorBoard shows, in the folder `tensorboard` of the run directory."""


class WandbLoggerConfig(LoggerConfig, name="wandb"):
    """Metrics, tables of sample episodes, configuration and artifacts in a run of Weights & Biases.

    All else is decided by the environment variables of W&B, such as WANDB_MODE, WANDB_ENTITY and WANDB_TAGS.
    """

    project: str | None = Field(
        default=None, min_length=1, description="Project of the run; null: WANDB_PROJECT, or the default of W&B."
    )


REGISTRY.add(LoggerConfig, TensorBoardLoggerConfig, "jaxft.runs.tensorboard:tensorboard_logger")
REGISTRY.add(LoggerConfig, WandbLoggerConfig, "jaxft.runs.weights_and_biases:wandb_logger", extra="wandb")
