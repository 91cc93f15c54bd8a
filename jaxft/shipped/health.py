"""Trouble of a run, recognised in the metrics of its epochs: collapse, growth, hacked rewards, stale or missing signal.

Each trouble is a function from the metrics of an epoch, and those at the run's start, to a sentence. It is said when it
has been seen in `PATIENCE` epochs in a row, with the settings that help, and called over when as many are without it.
"""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NamedTuple

FIRST = 3
"""Epochs at the start whose means later ones are compared with."""
PATIENCE = 3
"""Epochs in a row that a trouble is seen in before it is said, and is not seen in before it is over."""
ANSWER_TOKENS = "answer_tokens"
"""Trained tokens per answer, which is computed here: an episode has several answers, of which it may play more."""
COMPARED = ("entropy", "reward_mean", "truncated_fraction", ANSWER_TOKENS)
"""Metrics that are compared with those of the first epochs; named rewards are, too."""

Metrics = Mapping[str, float]


class Start(NamedTuple):
    """What an epoch is compared with.

    Attributes:
        means: means of the metrics over the first epochs.
        best_reward: highest reward of any episode so far.
    """

    means: Metrics
    best_reward: float


def is_named_reward(metric: str) -> bool:
    """Return True for the mean of a named reward."""
    return metric.startswith("reward/")


def collapsed_entropy(metrics: Metrics, start: Start) -> str | None:
    """Entropy has fallen to a tenth, and the mean reward is not near the best that an episode had."""
    entropy, reward = metrics.get("entropy"), metrics.get("reward_mean")
    first, before = start.means.get("entropy", 0.0), start.means.get("reward_mean")
    if entropy is None or reward is None or before is None or entropy >= 0.1 * first:
        return None
    if reward >= before + 0.8 * (start.best_reward - before):
        return None
    return (
        f"entropy {entropy:.2g} nats, {entropy / first:.1%} of the first epochs', and the mean reward {reward:.3g} is "
        f"below {start.best_reward:.3g}, the best so far: little is tried any more"
    )


def growing_length(metrics: Metrics, start: Start) -> str | None:
    """Answers have grown to twice their first length, and by eight tokens, or a limit cuts a quarter more of them."""
    tokens, first = metrics.get(ANSWER_TOKENS, 0.0), start.means.get(ANSWER_TOKENS, 0.0)
    cut, cut_first = metrics.get("truncated_fraction", 0.0), start.means.get("truncated_fraction", 0.0)
    if not first or (tokens < max(2 * first, first + 8) and cut < cut_first + 0.25):
        return None
    return f"{tokens:.3g} tokens an answer, {tokens / first:.2g} times the first epochs'; a limit cuts {cut:.0%}"


def hacked_reward(metrics: Metrics, start: Start) -> str | None:
    """A named reward has lost a quarter of what it was, while their sum has risen."""
    reward, before = metrics.get("reward_mean"), start.means.get("reward_mean")
    if reward is None or before is None or reward <= before:
        return None
    for name, value in metrics.items():
        first = start.means.get(name, 0.0)
        if is_named_reward(name) and value < first - 0.25 * abs(first):
            of_name = f"{name.removeprefix('reward/')!r} falls, from {first:.3g} to {value:.3g}"
            return f"the mean reward rises from {before:.3g} to {reward:.3g} while {of_name}"
    return None


def stale_samples(metrics: Metrics, start: Start) -> str | None:
    """Importance weights leave less than half of the sample."""
    fraction = metrics.get("effective_sample_fraction", 1.0)
    if fraction >= 0.5:
        return None
    behind = metrics.get("staleness_mean", 0.0)
    return f"the importance weights leave {fraction:.0%} of the sample (on average {behind:.2g} versions behind)"


def missing_signal(metrics: Metrics, start: Start) -> str | None:
    """Nine of ten groups have equal rewards, and these are not the best."""
    groups, without = metrics.get("groups", 0.0), metrics.get("no_signal_groups", 0.0)
    reward = metrics.get("reward_mean")
    if reward is None or not groups or without < 0.9 * groups:
        return None
    before = start.means.get("reward_mean", reward)
    if start.best_reward > before and reward >= before + 0.8 * (start.best_reward - before):
        return None
    return f"the rewards of {without:.0f} of {groups:.0f} groups are equal, which teaches nothing (mean {reward:.3g})"


def sampler_mismatch(metrics: Metrics, start: Start) -> str | None:
    """Sampler and trainer disagree by more than a thousandth of a nat per token."""
    difference = metrics.get("sampler_logprob_diff_mean", 0.0)
    if difference <= 0.001 or metrics.get("staleness_mean", 0.0):  # earlier weights differ, and should
        return None
    return f"the sampler's log-probabilities are {difference:.2g} nats from the trainer's, on average per token"


class Trouble(NamedTuple):
    """A kind of trouble: how it is seen, and the settings that help."""

    seen: Callable[[Metrics, Start], str | None]
    advice: str


TROUBLES: Mapping[str, Trouble] = {
    "entropy collapse": Trouble(collapsed_entropy, "lower learning_rate, or set loss.entropy_coef or loss.beta"),
    "length growth": Trouble(
        growing_length, "set loss.overlong_buffer_tokens, or take loss.name dr_grpo, or reward brevity"
    ),
    "reward hacking": Trouble(
        hacked_reward, "change loss.reward_weights, or set loss.multi_objective_aggregation to normalize_then_sum"
    ),
    "off-policy": Trouble(stale_samples, "lower max_staleness or the learning rate"),
    "no signal": Trouble(
        missing_signal, "raise num_generations, give partial rewards, or make the examples easier (curriculum_learning)"
    ),
    "sampler mismatch": Trouble(sampler_mismatch, "set compute_dtype to float32, or loss.correction to token_truncate"),
}


class Health:
    """Follows the epochs of a run.

    >>> health = Health()
    >>> epochs = [{"groups": 8, "no_signal_groups": 8, "reward_mean": 0.0, "reward_max": 0.0}] * PATIENCE
    >>> [line.partition(":")[0] for metrics in epochs for line in health.lines(metrics)]
    ['no signal']
    """

    def __init__(self) -> None:
        self._first: list[dict[str, float]] = []
        self._best_reward = float("-inf")
        self._in_a_row = dict.fromkeys(TROUBLES, 0)  # epochs with a trouble up to now, or minus those without
        self._said: list[str] = []

    def lines(self, metrics: Mapping[str, Any]) -> list[str]:
        """Take the metrics of the next epoch, and return a line for each trouble that begins or ends with it."""
        finite = {name: value for name, value in metrics.items() if isinstance(value, int | float) and isfinite(value)}
        if finite.get("calls"):
            tokens = finite.get("completion_tokens_mean", 0.0) * finite.get("episodes", 0.0)
            finite[ANSWER_TOKENS] = tokens / finite["calls"]
        if len(self._first) < FIRST:
            self._first.append({name: finite[name] for name in finite if name in COMPARED or is_named_reward(name)})
        self._best_reward = max(self._best_reward, finite.get("reward_max", float("-inf")))
        start = Start(means_of(self._first), self._best_reward)
        lines = []
        for name, trouble in TROUBLES.items():
            seen = trouble.seen(finite, start)
            before = self._in_a_row[name]
            self._in_a_row[name] = min(before, 0) - 1 if seen is None else max(before, 0) + 1
            if seen is None and self._in_a_row[name] == -PATIENCE and name in self._said:
                self._said.remove(name)
                lines.append(f"{name}: over")
            elif seen is not None and self._in_a_row[name] == PATIENCE and name not in self._said:
                self._said.append(name)
                lines.append(f"{name}: {seen}. What helps: {trouble.advice}")
        return lines

    def state(self) -> dict[str, Any]:
        """Return what the next lines depend on, for JSON."""
        best = None if self._best_reward == float("-inf") else self._best_reward
        return {"first": self._first, "best_reward": best, "in_a_row": self._in_a_row, "said": self._said}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._first, self._said = list(state["first"]), list(state["said"])
        self._best_reward = float("-inf") if state["best_reward"] is None else state["best_reward"]
        self._in_a_row |= state["in_a_row"]


def means_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the rows that have it.

    >>> means_of([{"entropy": 1.0}, {"entropy": 3.0, "kl": 1.0}])
    {'entropy': 2.0, 'kl': 1.0}
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: sum(column) / len(column) for name, column in columns.items()}
