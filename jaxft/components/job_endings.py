"""What the local adapter says of a job at its end."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxft.harness.data_models import TrainingStatusEnum
from jaxft.harness.errors import UserCodeError

if TYPE_CHECKING:
    from jaxft.components.local_adapter import LocalTrainerAdapterConfig
    from jaxft.policy.engine import Engine

STAY = "parameters and optimiser state stay as they were"


def ending(config: "LocalTrainerAdapterConfig", metrics: dict[str, float], kept: list[str]) -> dict[str, Any]:
    """Status and message of a job that raised nothing; `kept` are the files with its bad batches."""
    where = f"; the batch of each is kept: {', '.join(kept)}" if kept else ""
    refusal = _refusal(config, metrics)
    if refusal is not None:
        return {"status": TrainingStatusEnum.FAILED, "message": refusal + where}
    return {"status": TrainingStatusEnum.COMPLETED, "progress": 100.0, "message": _outcome(metrics) + where}


def why_failed(config: "LocalTrainerAdapterConfig", engine: "Engine", failure: UserCodeError) -> str:
    """What stopped a job, in one line, and what to lower when the device was too small for it."""
    from jaxft.policy.device import is_out_of_memory

    return what_to_lower(config, engine, failure.error) if is_out_of_memory(failure.error) else failure.summary


@contextlib.contextmanager
def memory_errors(config: "LocalTrainerAdapterConfig", engine: "Engine") -> Iterator[None]:
    """Turns what says that the device has too little memory into a `DeviceMemoryError` that says what to lower."""
    from jaxft.policy.device import is_out_of_memory
    from jaxft.policy.faults import DeviceMemoryError

    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(what_to_lower(config, engine, error)) from error


def what_to_lower(config: "LocalTrainerAdapterConfig", engine: "Engine", error: BaseException) -> str:
    """A sentence for a device that has too little memory."""
    from jaxft.policy.device import first_line

    return (
        "the device has too little memory for the job: lower trainer_adapters.<name>.microbatch_tokens (now "
        f"{config.microbatch_tokens}), or of llms.{config.llm} slots (now {engine.slots}), stored_prompts (now "
        f"{engine.stored_prompts}) or max_context_tokens (now {engine.max_context_tokens}); it said: "
        f"{first_line(error)}"
    )


def _refusal(config: "LocalTrainerAdapterConfig", metrics: dict[str, float]) -> str | None:
    stale, disagreeing = metrics.get("stale_trajectory_share", 0.0), metrics.get("sampler_disagreement_share", 0.0)
    if stale > config.max_stale_share:
        return f"refused: another version of the policy sampled {stale:.0%} of the trajectories; {STAY}"
    if metrics.get("refused_updates"):
        return (
            f"refused: the log-probabilities recorded with {disagreeing:.0%} of the sequences are more than "
            f"{config.max_logprob_diff:g} nats (on average) from the policy's own: another policy sampled them, or "
            f"they were recorded wrongly; {metrics['refused_updates']:.0f} updates were not made"
        )
    return None


def _outcome(metrics: dict[str, float]) -> str:
    if metrics["nonfinite_updates"]:
        count, applied = metrics["nonfinite_updates"], metrics["applied_updates"]
        what = STAY if not applied else f"these {count:.0f} updates were not made, {applied:.0f} others were"
        return f"loss, gradient or new parameters were not finite; {what}"
    if metrics["nothing_to_learn"] and not metrics["applied_updates"]:
        is_without_signal = metrics.get("groups") == metrics.get("no_signal_groups", -1)
        why = ", as the rewards of every group are equal" if is_without_signal else ""
        return f"nothing to learn: the gradient is exactly zero{why}; {STAY}"
    return "updated"
