"""What a trainer leaves behind of a run, and shows of it: metrics, histories, curriculum, plot, progress line."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxft.harness.data_models import EpisodeItem, Trajectory, TrajectoryCollection
from jaxft.redaction import redacted_tokens, redacted_values
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.runs.metrics import MetricsLog
from jaxft.runs.plots import plot_rewards

REWARD_HISTORY_FILE = "reward_history.json"
VALIDATION_HISTORY_FILE = "validation_history.json"
CURRICULUM_FILE = "curriculum_state.json"
SAMPLES_FILE = "trajectories/samples.jsonl"
PAIRS_FILE = "trajectories/pairs.jsonl"
SAVE_EVERY = 10

SHOWN = {
    "reward_mean": "reward",
    "entropy": "entropy",
    "kl": "kl",
    "clip_high_fraction": "clip",
    "preference_accuracy": "preferred",
    "sampler_logprob_diff_max": "sampler diff",
    "failed_episodes": "failed",
    "curriculum_percentile": "curriculum",
    "tokens_per_second": "tok/s",
    "seconds": "seconds",
}
"""The figures of the progress line, by the names they are logged under."""


class RunLog:
    """The logs of one run, open from the first epoch to `close`.

    Attributes:
        console: where it shows itself.
        metrics, timings: the figures of each epoch, by run id: those that another run would repeat, those of the clock.
        validations: a row per validation.
        decode: the text of token ids, by the name of the language model that they are of, where it is known.
    """

    def __init__(self, directory: RunDirectory, console: Console) -> None:
        self.console = console
        self.metrics: dict[str, dict[str, Any]] = {}
        self.timings: dict[str, dict[str, Any]] = {}
        self.validations: list[dict[str, Any]] = []
        self.decode: dict[str, Callable[[Sequence[int]], str]] = {}
        self._rewards: list[dict[str, Any]] = []
        self._directory = directory
        self._log: MetricsLog | None = None

    def start(self, num_epochs: int, done: int = 0) -> None:
        """Opens the files and shows the progress bar; so many epochs are logged already."""
        self._log = MetricsLog(self._directory, first_epoch=done)
        self.console.start(num_epochs, done)

    def state(self) -> dict[str, Any]:
        """The histories, for JSON."""
        return {"rewards": self._rewards, "validations": self.validations}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state`."""
        self._rewards, self.validations = list(state["rewards"]), list(state["validations"])
        self.save()

    def figures(self, run_id: str) -> dict[str, Any]:
        """All figures of an epoch.

        Raises:
            ValueError: no such epoch has been run.
        """
        if run_id not in self.metrics:
            raise ValueError(f"no epoch '{run_id}' was run; epochs: {', '.join(self.metrics) or 'none'}")
        return {**self.metrics[run_id], **self.timings[run_id]}

    def epoch(self, epoch: int, run_id: str, shown: Mapping[str, Any]) -> None:
        """Writes the rows of an epoch, which counts from 0, and shows it; histories and plot every tenth epoch."""
        if self._log is not None:
            self._log.log(epoch, self.metrics[run_id], self.timings[run_id])
        self.console.epoch(epoch + 1, {SHOWN[name]: shown[name] for name in SHOWN if shown.get(name) is not None})
        if epoch % SAVE_EVERY == SAVE_EVERY - 1:
            self.save()

    def rewards(self, epoch: int, figures: Mapping[str, Any]) -> None:
        """Adds an epoch to the reward history."""
        names = ("reward_mean", "reward_min", "reward_max", "group_reward_q25", "group_reward_q75")
        row = {name: figures.get(name) for name in names}
        chosen = {name: figures[name] for name in ("reward_mean_chosen", "curriculum_percentile") if name in figures}
        self._rewards.append({"epoch": epoch, **row, **chosen})

    def validation(self, row: Mapping[str, Any]) -> None:
        """Adds a validation to its history, and shows it: its failures as failures, never as a reward."""
        self.validations.append(dict(row))
        reward, failed = row["avg_reward"], row["num_failed"]
        found = f"reward {reward:.4g}, {row['num_examples']} episodes" if reward is not None else "failed"
        lost = f"; {failed} episodes failed, the first: {row['first_error']}" if failed else ""
        if row["num_unscorable"]:
            lost += f"; {row['num_unscorable']} rewards were not usable"
        self.console.message(f"validation after {row['epoch']} epochs: {found}{lost}")
        self.save()

    def curriculum(self, state: Mapping[str, Any]) -> None:
        """Writes the state of the curriculum."""
        self._directory.write_json(CURRICULUM_FILE, state)

    def sample(self, epoch: int, trajectory: Trajectory) -> None:
        """Shows an episode."""
        messages = [
            {"role": item.role.value, "content": item.content}
            for item in trajectory.episode
            if isinstance(item, EpisodeItem)
        ]
        title = f"after {epoch} epochs, example {trajectory.example_id}, reward {trajectory.reward:g}"
        self.console.episode(title, messages)

    def keep(self, epoch: int, trajectories: Sequence[Trajectory], failures: Sequence[str]) -> None:
        """Writes down episodes with their tokens, then what is said of failed ones: example, error and traceback."""
        for trajectory in trajectories:
            self._directory.append_jsonl(SAMPLES_FILE, {"epoch": epoch, **self._without_secret_ids(trajectory)})
        for failure in failures:
            self._directory.append_jsonl(SAMPLES_FILE, {"epoch": epoch, "failure": failure})

    def pairs(self, collection: TrajectoryCollection) -> None:
        """Keeps the pairs of a collection."""
        pairs = [pair for group in collection.trajectories for pair in group]
        rows = [self._without_secret_ids(pair) for pair in pairs]
        for row in rows:
            self._directory.append_jsonl(PAIRS_FILE, row)
        masked = sum(row["sequences"] is None for row in rows) - sum(pair.sequences is None for pair in pairs)
        if masked:
            self.console.message(f"{masked} pairs hold secrets and are kept masked: a resumed run trains them so")

    def read_pairs(self) -> list[Trajectory]:
        """The pairs of all collections of the run."""
        path = self._directory.file(PAIRS_FILE)
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
        return [Trajectory.model_validate(json.loads(line)) for line in lines if line]

    def save(self) -> None:
        """Writes the histories and the plot as they stand."""
        if self._rewards:
            self._directory.write_json(REWARD_HISTORY_FILE, self._rewards)
        if self.validations:
            self._directory.write_json(VALIDATION_HISTORY_FILE, self.validations)
        if self._rewards or self.validations:
            plot_rewards(self._directory, self._rewards, self.validations)

    def _without_secret_ids(self, trajectory: Trajectory) -> dict[str, Any]:
        """A trajectory for JSON; without token ids when its texts hold a secret, or when the ids spell one."""
        row = trajectory.model_dump(mode="json")
        holds_secret = redacted_values(row["episode"]) != row["episode"] or any(
            redacted_tokens(sequence.tokens, decode) != sequence.tokens
            for sequence in trajectory.sequences or ()
            for llm, decode in self.decode.items()
            if sequence.llm in (None, llm)
        )
        return row | {"sequences": None} if holds_secret else row

    def close(self) -> None:
        """Closes the files; a second call does nothing."""
        if self._log is not None:
            self._log.close()
            self.save()
            self._log = None


def mean(values: Sequence[float]) -> float:
    """The mean, 0 of nothing.

    >>> mean([1.0, 2.0]), mean([])
    (1.5, 0.0)
    """
    return sum(values) / len(values) if values else 0.0


def reward_metrics(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Mean, least and greatest reward, and the quartiles of the groups' mean rewards; nothing of nothing.

    Where rewards are 0 or 1, the least and the greatest are 0 and 1. The quartiles say how much examples differ.

    >>> reward_metrics([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # doctest: +NORMALIZE_WHITESPACE
    {'reward_mean': 0.5, 'reward_min': 0.0, 'reward_max': 1.0, 'group_reward_q25': 0.25, 'group_reward_q75': 0.75}
    """
    rewards = [reward for group in groups for reward in group]
    if not rewards:
        return {}
    means = [mean(group) for group in groups if group]
    # One group has no quartiles of its own, and the library's function wants two values.
    low, _, high = statistics.quantiles(means, n=4, method="inclusive") if len(means) > 1 else means * 3
    return {
        "reward_mean": mean(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "group_reward_q25": low,
        "group_reward_q75": high,
    }
