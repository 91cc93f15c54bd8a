"""Trouble of a run, recognised in the metrics of its epochs: collapse, growth, hacked rewards, stale or missing signal.

Each trouble is a function from the metrics of an epoch, and those at the run's start, to a sentence. It is said when it
has been seen in `PATIENCE` epochs in a row (in one, where one is proof), with the settings that help. It is called over
when `PATIENCE` epochs are without it.
"""

from collections.abc import Callable, Mapping
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple

FIRST_EPOCHS = 3
"""Epochs at the start whose means later ones are compared with."""
PATIENCE = 3
"""Epochs in a row that a trouble is seen in before it is said, and is not seen in before it is over."""
ANSWER_TOKENS = "answer_tokens"
"""Trained tokens per answer, which is computed here: an episode has several answers, of which it may play more."""
MAX_SAMPLER_DIFF = {"float32": 1e-3}
"""Nats per token between a healthy sampler and the trainer, on average, by the dtype of products."""
MAX_ROUNDED_DIFF = 0.05
"""The same for narrower dtypes: on GPUs 0.01 was healthy in bfloat16, and 0.01 on a CPU with kernels in int8."""
COMPARED = ("entropy", "reward_mean", "reward_min", "truncated_fraction", ANSWER_TOKENS)
"""Metrics that are compared with those of the first epochs; named rewards are, too."""

Metrics = Mapping[str, float]


class Baseline(NamedTuple):
    """The numbers that an epoch is compared with.

    Attributes:
        means: means of the metrics over the first epochs.
        best_reward: highest reward of any episode so far.
        max_sampler_diff: largest healthy difference of sampler and trainer, in nats per token.
    """

    means: Metrics
    best_reward: float
    max_sampler_diff: float


def is_named_reward(metric: str) -> bool:
    """Return True for the mean of a named reward."""
    return metric.startswith("reward/")


def is_near_best(reward: float, baseline: Baseline) -> bool:
    """Return True if a mean reward has made four fifths of the way from the first epochs to the best reward."""
    before = baseline.means.get("reward_mean", reward)
    return baseline.best_reward > before and reward >= before + 0.8 * (baseline.best_reward - before)


Detect = Callable[[Metrics, Baseline], str | None]


class Trouble(NamedTuple):
    """A kind of trouble.

    Attributes:
        detect: returns a sentence about an epoch with the trouble, None about one without.
        advice: settings that help.
        patience: epochs in a row that it is seen in before it is said.
    """

    detect: Detect
    advice: str
    patience: int


TROUBLES: dict[str, Trouble] = {}


def _trouble(name: str, advice: str, *, patience: int = PATIENCE) -> Callable[[Detect], Detect]:
    """Add the function below to `TROUBLES`."""

    def add(detect: Detect) -> Detect:
        TROUBLES[name] = Trouble(detect, advice, patience)
        return detect

    return add


@_trouble("entropy collapse", "lower optimizer.learning_rate, or set loss.beta or loss.entropy_coef")
def collapsed_entropy(metrics: Metrics, baseline: Baseline) -> str | None:
    """Return a sentence if entropy has fallen to a tenth while the mean reward is not near the best; else None."""
    entropy, reward, first = metrics["entropy"], metrics["reward_mean"], baseline.means.get("entropy", 0.0)
    if first <= 0 or entropy >= 0.1 * first or is_near_best(reward, baseline):
        return None
    return (
        f"entropy {entropy:.2g} nats, {entropy / first:.1%} of the first epochs', and the mean reward {reward:.3g} is "
        f"below {baseline.best_reward:.3g}, the best so far: little is tried any more"
    )


@_trouble("length growth", "set loss.max_completion_tokens and loss.overlong_buffer_tokens, or reward brevity")
def growing_length(metrics: Metrics, baseline: Baseline) -> str | None:
    """Return a sentence if answers have twice their first length and eight tokens more, or far more are cut."""
    tokens, first = metrics[ANSWER_TOKENS], baseline.means.get(ANSWER_TOKENS, 0.0)
    cut, cut_first = metrics["truncated_fraction"], baseline.means.get("truncated_fraction", 0.0)
    if not first or (tokens < max(2 * first, first + 8) and cut < cut_first + 0.25):
        return None
    return f"{tokens:.3g} tokens an answer, {tokens / first:.2g} times the first epochs'; a limit cuts {cut:.0%}"


@_trouble(
    "cut answers",
    "raise max_tokens of the agent, let a reasoning model think less, or see whether the model has an end token",
    patience=1,
)
def cut_answers(metrics: Metrics, baseline: Baseline) -> str | None:
    """Return a sentence if a limit has cut all answers of several tokens since the first epochs; else None."""
    cut = min(metrics["truncated_fraction"], baseline.means.get("truncated_fraction", 0.0))
    if cut < 0.99 or metrics[ANSWER_TOKENS] <= 1 or is_near_best(metrics["reward_mean"], baseline):
        return None
    return f"a limit has cut {cut:.0%} of the answers since the first epoch, {metrics[ANSWER_TOKENS]:.3g} tokens each"


@_trouble("reward collapse", "lower optimizer.learning_rate, set loss.beta, or go on from the best checkpoint")
def collapsed_reward(metrics: Metrics, baseline: Baseline) -> str | None:
    """Return a sentence if the mean reward has lost three quarters of its distance to the lowest reward; else None.

    The distance is that of the first epochs, and the loss more than chance explains: two standard errors of an epoch,
    for the largest spread that rewards between the lowest and the best can have.
    """
    reward, first = metrics["reward_mean"], baseline.means.get("reward_mean", -inf)
    lowest = min(metrics["reward_min"], baseline.means.get("reward_min", inf))
    error = sqrt(max(0.0, (baseline.best_reward - first) * (first - lowest)) / max(1.0, metrics["episodes"]))
    if not isfinite(error) or reward > lowest + 0.25 * (first - lowest) or first - reward <= 2 * error:
        return None
    return f"the mean reward is {reward:.3g}, after {first:.3g} in the first epochs; no reward is below {lowest:.3g}"


@_trouble(
    "constant reward",
    "see whether the evaluator reads the answer and the expected one: jaxft eval shows its scores",
    patience=1,
)
def constant_reward(metrics: Metrics, baseline: Baseline) -> str | None:
    """Return a sentence if all rewards of an epoch are equal, but not the answers to an example; else None."""
    reward, varied = metrics["reward_mean"], metrics["varied_groups"]
    has_signal = metrics.get("no_signal_groups") != metrics.get("groups")  # by step rewards
    if metrics["reward_min"] < metrics["reward_max"] or not varied or has_signal or is_near_best(reward, baseline):
        return None
    return f"every reward of the epoch is {reward:.3g}, although the answers to {varied:.0f} of its examples differ"


@_trouble("reward hacking", "set loss.reward_weights")
def hacked_reward(metrics: Metrics, baseline: Baseline) -> str | None:
    """Return a sentence if the mean reward has risen while a named part of it has lost a quarter; else None."""
    reward, before = metrics["reward_mean"], baseline.means.get("reward_mean")
    if before is None or reward <= before:
        return None
    for name, value in metrics.items():
        first = baseline.means.get(name, 0.0)
        if is_named_reward(name) and value < first - max(0.25 * abs(first), 0.05 * (reward - before)):
            of_name = f"{name.removeprefix('reward/')!r} falls, from {first:.3g} to {value:.3g}"
            return f"the mean reward rises from {before:.3g} to {reward:.3g} while {of_name}"
    return None


@_trouble("off-policy", "lower max_staleness or optimizer.learning_rate")
def stale_samples(metrics: Metrics, baseline: Baseline) -> str | None:
    """Return a sentence if importance weights leave less than half of the sample; else None."""
    fraction = metrics["effective_sample_fraction"]
    if fraction >= 0.5:
        return None
    behind = metrics.get("staleness_mean", 0.0)
    return f"the importance weights leave {fraction:.0%} of the sample (on average {behind:.2g} versions behind)"


@_trouble("no signal", "raise num_generations, give partial rewards, or make the examples easier")
def missing_signal(metrics: Metrics, baseline: Baseline) -> str | None:
    """Return a sentence if nine of ten groups have equal rewards, which are not near the best; else None."""
    groups, without, reward = metrics["groups"], metrics["no_signal_groups"], metrics["reward_mean"]
    if without < 0.9 * groups or is_near_best(reward, baseline):
        return None
    return f"the rewards of {without:.0f} of {groups:.0f} groups are equal, which teaches nothing (mean {reward:.3g})"


@_trouble(
    "sampler mismatch",
    "leave sampling_dtype out, set compute_dtype to float32, or loss.correction.name to token_truncate",
)
def sampler_mismatch(metrics: Metrics, baseline: Baseline) -> str | None:
    """Return a sentence if sampler and trainer differ by more than their dtype explains on fresh samples; else None."""
    difference = metrics["sampler_logprob_diff_mean"]
    if difference <= baseline.max_sampler_diff or metrics.get("stale_token_fraction", 0.0):
        return None  # earlier weights differ, and should
    return f"the sampler's log-probabilities are {difference:.2g} nats from the trainer's, on average per token"


@_trouble("slow device", "see docs/accelerators.md#a-slow-step")
def slow_device(metrics: Metrics, baseline: Baseline) -> str | None:
    """Return a sentence if updates or decoding reach less than a tenth of the device's ceiling; else None."""
    ceilings = {"updates": ("train_mfu", "arithmetic"), "decoding": ("decode_bandwidth_share", "bandwidth")}
    shares = {work: (metrics[name], limit) for work, (name, limit) in ceilings.items() if name in metrics}
    if min(metrics["train_mfu"], *(share for share, _ in shares.values())) >= 0.1:
        return None
    said = ", ".join(f"{work} {share:.1%} of its {limit}" for work, (share, limit) in shares.items())
    return f"less than a tenth of what the device can do: {said}"


class Health:
    """Follows the epochs of a run.

    Attributes:
        dtype: the policy's `sampling_dtype`, or that of products: it decides how far sampler and trainer may differ.

    >>> health = Health()
    >>> epochs = [{"groups": 8, "no_signal_groups": 8, "reward_mean": 0.0, "reward_max": 0.0}] * PATIENCE
    >>> [line.partition(":")[0] for metrics in epochs for line in health.lines(metrics)]
    ['no signal']
    """

    def __init__(self) -> None:
        self.dtype = "bfloat16"
        self._first: list[dict[str, float]] = []
        self._best_reward = float("-inf")
        self._in_a_row = dict.fromkeys(TROUBLES, 0)  # epochs with a trouble up to now, or minus those without
        self._active: list[str] = []

    def lines(self, metrics: Mapping[str, Any]) -> list[str]:
        """Take the metrics of the next epoch, and return a line for each trouble that begins or ends with it."""
        finite = {name: value for name, value in metrics.items() if isinstance(value, int | float) and isfinite(value)}
        finite |= answer_tokens(finite)
        # Where the loss weighs rewards, these are what is trained.
        finite |= {name.removeprefix("trained_"): finite[name] for name in finite if name.startswith("trained_reward_")}
        if len(self._first) < FIRST_EPOCHS:
            self._first.append({name: finite[name] for name in finite if name in COMPARED or is_named_reward(name)})
        self._best_reward = max(self._best_reward, finite.get("reward_max", float("-inf")))
        largest_diff = MAX_SAMPLER_DIFF.get(self.dtype, MAX_ROUNDED_DIFF)
        baseline = Baseline(metric_means(self._first), self._best_reward, largest_diff)
        lines = []
        for name, trouble in TROUBLES.items():
            try:
                sentence, before = trouble.detect(finite, baseline), self._in_a_row[name]
            except KeyError:  # an epoch without a metric that it reads says nothing about the trouble
                continue
            self._in_a_row[name] = min(before, 0) - 1 if sentence is None else max(before, 0) + 1
            if self._in_a_row[name] == -PATIENCE and name in self._active:
                self._active.remove(name)
                lines.append(f"{name}: over")
            elif self._in_a_row[name] == trouble.patience and name not in self._active:
                self._active.append(name)
                lines.append(f"{name}: {sentence}. Advice: {trouble.advice}")
        return lines

    def state(self) -> dict[str, Any]:
        """Return the counters that the next lines depend on, for JSON."""
        best = None if self._best_reward == float("-inf") else self._best_reward
        return {"first": self._first, "best_reward": best, "in_a_row": self._in_a_row, "active": self._active}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._first, self._active = list(state["first"]), list(state["active"])
        self._best_reward = float("-inf") if state["best_reward"] is None else state["best_reward"]
        self._in_a_row |= state["in_a_row"]


def answer_tokens(metrics: Metrics) -> dict[str, float]:
    """Return the mean number of trained tokens per answer, by its name; empty if no answer can be trained.

    >>> answer_tokens({"completion_tokens_mean": 6.0, "episodes": 4, "failed_episodes": 1, "calls": 9})
    {'answer_tokens': 2.0}
    """
    calls = metrics.get("calls", 0) - metrics.get("untargeted_calls", 0)
    if not calls or "completion_tokens_mean" not in metrics:
        return {}
    return {ANSWER_TOKENS: metrics["completion_tokens_mean"] * num_trajectories(metrics) / calls}


def num_trajectories(metrics: Metrics) -> float:
    """Return the number of episodes with a trajectory: those that ended, and failed ones that have a reward.

    >>> num_trajectories({"episodes": 8, "failed_episodes": 4, "penalized_episodes": 1, "dropped_episodes": 2})
    3
    """
    lost = metrics.get("failed_episodes", 0) - metrics.get("penalized_episodes", 0) + metrics.get("dropped_episodes", 0)
    return metrics.get("episodes", 1) - lost


def metric_means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the rows that have it.

    >>> metric_means([{"entropy": 1.0}, {"entropy": 3.0, "kl": 1.0}])
    {'entropy': 2.0, 'kl': 1.0}
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: sum(column) / len(column) for name, column in columns.items()}
