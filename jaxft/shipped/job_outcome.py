"""Describes the end of a training job in words: updated, refused, not finite, or nothing to learn."""

MAX_STALE_FRACTION = 0.1
"""Largest fraction of a job's trajectories from versions that are further behind than max_staleness."""

MAX_LOGPROB_DIFF = 0.1
"""Mean difference, in nats, above which the recorded log-probabilities of a sequence disagree with the policy's."""

MAX_DISAGREEING_FRACTION = 0.1
"""Largest fraction of an update's sequences that may disagree."""

STAY = "parameters and optimiser state stay as they were"


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
