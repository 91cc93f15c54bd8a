"""A training job of the local adapter: its learner, its input and status, the limits of it, and its end in words."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxft.components.configs import LocalTrainerAdapterConfig
from jaxft.core.types import Model
from jaxft.harness.data_models import TrainingJobStatus
from jaxft.rollout.weights import Weights
from jaxft.training.batch import CollectedRewards
from jaxft.training.job_records import BadUpdate, KeptTokens
from jaxft.training.learner import Learner
from jaxft.training.rows import JobRows

MAX_STALE_FRACTION = 0.1
"""Largest fraction of a job's trajectories from versions that are further behind than max_staleness."""

MAX_LOGPROB_DIFF = 0.1
"""Mean difference, in nats, above which the recorded log-probabilities of a sequence disagree with the policy's."""

MAX_DISAGREEING_FRACTION = 0.1
"""Largest fraction of an update's sequences that may disagree."""

STAY = "parameters and optimiser state stay as they were"


@dataclass
class Job:
    """A submitted job: its last status, and its task."""

    status: TrainingJobStatus
    task: "asyncio.Task[None] | None" = None

    @property
    def has_ended(self) -> bool:
        """True once nothing of it runs any more."""
        return self.task is not None and self.task.done()

    def report(self, **changes: Any) -> None:
        """Replace the status by a changed copy, as others may hold the old one."""
        self.status = self.status.model_copy(update=changes)


class JobInput(NamedTuple):
    """The input of a job, with what its updates add for people to read."""

    data: JobRows
    rewards: CollectedRewards | None
    scores: KeptTokens
    bad_updates: list[BadUpdate]


def make_learner(
    config: LocalTrainerAdapterConfig,
    model: Model,
    seed: int,
    weights: Mapping[str, Weights],
    *,
    max_staleness: int = 0,
) -> Learner:
    """Make the learner of an adapter; `weights` has its `reference` and `teacher`, errors are those of `Learner`."""
    return Learner(
        model,
        config.loss,
        config.optimizer,
        max_staleness=max_staleness,
        microbatch_tokens=config.microbatch_tokens,
        num_minibatches=config.num_minibatches,
        num_iterations=config.num_iterations,
        packing=config.packing,
        routing_replay=config.routing_replay,
        max_sampler_diff=MAX_LOGPROB_DIFF,
        max_disagreeing_fraction=MAX_DISAGREEING_FRACTION,
        seed=seed,
        reference=weights.get("reference"),
        teacher=weights.get("teacher"),
    )


def is_too_stale(metrics: dict[str, float]) -> bool:
    """Return True if a job is refused, as too many of its trajectories are of versions that are not allowed."""
    return stale_fraction(metrics) > MAX_STALE_FRACTION


def stale_fraction(metrics: dict[str, float]) -> float:
    """Return the fraction of trajectories of versions that are not allowed, from the metrics of a job."""
    return metrics.get("too_stale_fraction", metrics.get("stale_trajectory_fraction", 0.0))


def why_refused(metrics: dict[str, float]) -> str | None:
    """Return why a job, or some of its updates, was refused although no error was raised; None if it was not."""
    stale = stale_fraction(metrics)
    if is_too_stale(metrics):
        return f"refused: another version of the policy sampled {stale:.0%} of the trajectories; {STAY}"
    if metrics.get("refused_updates"):
        disagreeing = metrics.get("sampler_disagreement_fraction", 0.0)
        return (
            f"refused: the log-probabilities recorded with {disagreeing:.0%} of the sequences are more than "
            f"{MAX_LOGPROB_DIFF:g} nats (on average) from the policy's own: another policy sampled them, or "
            f"they were recorded wrongly; {metrics['refused_updates']:.0f} updates were not made"
        )
    return None


def outcome(metrics: dict[str, float]) -> str:
    """Describe, in words, the effect of a job on the parameters."""
    if metrics["nonfinite_updates"]:
        count, applied = metrics["nonfinite_updates"], metrics["applied_updates"]
        effect = STAY if not applied else f"these {count:.0f} updates were not made, {applied:.0f} others were"
        return f"loss, gradient or new parameters were not finite; {effect}"
    if metrics["nothing_to_learn"] and not metrics["applied_updates"]:
        is_without_signal = metrics.get("groups") == metrics.get("no_signal_groups", -1)
        why = ", as every advantage is 0: the rewards of each group are equal" if is_without_signal else ""
        return f"nothing to learn: the gradient is exactly zero{why}; {STAY}"
    return "updated"
