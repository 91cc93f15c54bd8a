"""Logs of a trainer: files in the run directory, and output on the console."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxft import runs
from jaxft.harness.data_models import DPOItem, EpisodeItem, OpenAIMessage, Trajectory, TrajectoryCollection
from jaxft.redaction import redacted_tokens, redacted_values
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.runs.files import (
    CURRICULUM_FILE,
    EPISODE_REWARDS_FILE,
    PAIRS_FILE,
    REWARD_HISTORY_FILE,
    SAMPLES_FILE,
    TOKEN_SCORES_FILE,
    VALIDATION_HISTORY_FILE,
)
from jaxft.runs.loggers import LoggedEpisode, Loggers
from jaxft.runs.metrics import log_metrics

SAVE_EVERY = 10

COLUMNS = {
    "reward_mean": "reward",
    "entropy": "entropy",
    "kl": "kl",
    "preference_accuracy": "preferred",
    "curriculum_percentile": "curriculum",
    "tokens_per_second": "tok/s",
    "train_tokens_per_second": "train tok/s",
    "train_mfu": "MFU",
    "decode_bandwidth_share": "bandwidth",
    "seconds": "seconds",
}
"""Metrics of the progress line, and the words they are shown under."""
SHOWN_FROM = {
    "truncated_fraction": ("cut", 0.01),
    "clip_high_fraction": ("clip", 0.01),
    "sampler_logprob_diff_max": ("sampler diff", 0.1),
    "failed_episodes": ("failed", 1.0),
}
"""Metrics behind those, their words, and the values from which on they are shown."""


VALIDATION_COLUMNS = {"loss": "loss", "preference_accuracy": "preferred"}
"""Metrics of a validation on logged rows, and their words."""


class RunLog:
    """The logs of one run, open from `start` to `close`.

    Attributes:
        console: shows messages and progress.
        metrics: metrics of each epoch, by run id; equal in equal runs.
        timings: measured times of each epoch, by run id.
        validations: one row per validation.
        decode: functions from token ids to text, by name of the language model; empty if unknown.
        token_text: functions from one token id to its text, by name of the language model; empty if unknown.
    """

    def __init__(self, directory: RunDirectory, console: Console) -> None:
        self.console = console
        self.metrics: dict[str, dict[str, Any]] = {}
        self.timings: dict[str, dict[str, Any]] = {}
        self.validations: list[dict[str, Any]] = []
        self.decode: dict[str, Callable[[Sequence[int]], str]] = {}
        self.token_text: dict[str, Callable[[int], str]] = {}
        self._rewards: list[dict[str, Any]] = []
        self._drawn_rows = 0, 0  # of the rewards and of the validations, in the picture on disk
        self._directory = directory
        self._loggers = Loggers()
        self._is_open = False
        self._columns: set[str] = set()  # that an epoch of this process had a value for

    def start(self, num_epochs: int, done: int = 0, loggers: Loggers | None = None) -> None:
        """Begin to log, to `loggers` too, and show the progress bar; `done` epochs are logged already."""
        self._loggers, self._is_open = Loggers() if loggers is None else loggers, True
        self._loggers.begin(done)
        for row in self.validations:
            if row["epoch"] == done:  # which loggers that drop what is repeated have dropped, and which is not repeated
                self._log_validation(row)
        self.console.start(num_epochs, done)

    def state(self) -> dict[str, Any]:
        """Return the histories of rewards and validations, for JSON."""
        return {"rewards": self._rewards, "validations": self.validations}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._rewards, self.validations = list(state["rewards"]), list(state["validations"])
        self.save()

    def epoch(self, epoch: int, run_id: str, shown: Mapping[str, Any]) -> None:
        """Write the rows of an epoch, which counts from 0, and show its line; save the histories every tenth epoch."""
        if self._is_open:
            metrics, timings = self.metrics[run_id], self.timings[run_id]
            timings["logger_failures"] = self._loggers.failures
            log_metrics(self._directory, epoch, metrics, timings)
            self._loggers.metrics(epoch, metrics, timings)
        self._columns |= {name for name in COLUMNS if shown.get(name) is not None}
        columns = {word: shown.get(name) for name, word in COLUMNS.items() if name in self._columns}
        if "reward_mean" not in self._columns and "loss" in shown:  # of logged rows without rewards
            columns = {"loss": shown["loss"], **columns}
        for name, (word, least) in SHOWN_FROM.items():
            if name in shown and shown[name] >= least:
                columns[word] = shown[name]
        self.console.epoch(epoch + 1, columns)
        if epoch % SAVE_EVERY == SAVE_EVERY - 1:
            self.save()

    def rewards(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Add an epoch to the reward history."""
        names = ("reward_mean", "reward_min", "reward_max", "group_reward_q25", "group_reward_q75")
        row = {name: metrics.get(name) for name in names}
        chosen = {name: metrics[name] for name in ("reward_mean_chosen", "curriculum_percentile") if name in metrics}
        self._rewards.append({"epoch": epoch, **row, **chosen})

    def episode_rewards(self, epoch: int, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Write the reward of every episode of an epoch, by example; null for one without a usable reward."""
        rewards: dict[str, list[float | None]] = {}
        for trajectory in (trajectory for group in groups for trajectory in group):
            of_example = rewards.setdefault(str(trajectory.example_id), [])
            of_example.append(trajectory.reward if trajectory.scorable else None)
        self._directory.append_jsonl(EPISODE_REWARDS_FILE, {"epoch": epoch, "rewards": rewards})

    def token_scores(self, epoch: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write advantages and entropies of the tokens of kept episodes."""
        for row in rows:
            self._directory.append_jsonl(TOKEN_SCORES_FILE, {"epoch": epoch, **row})

    def validation(self, row: Mapping[str, Any]) -> None:
        """Add a validation to its history, and show its reward and its failures."""
        self.validations.append(dict(row))
        self._log_validation(row)
        reward, failed = row["avg_reward"], row["num_failed"]
        result = f"reward {reward:.4g}, {row['num_examples']} episodes" if reward is not None else "failed"
        at_k = {name.partition("@")[0]: name for name in row if name.startswith(("pass@", "maj@"))}  # the largest k
        result += "".join(f", {name} {row[name]:.4g}" for name in at_k.values())
        if "loss" in row:
            measured = ", ".join(f"{word} {row[name]:.4g}" for name, word in VALIDATION_COLUMNS.items() if name in row)
            result = f"{measured}, {row['num_examples']} rows" if reward is None else f"{result}; {measured}"
        lost = f"; {failed} episodes failed, the first: {row['first_error']}" if failed else ""
        if row["num_unscorable"]:
            lost += f"; {row['num_unscorable']} rewards were not usable"
        self.console.message(f"validation after {row['epoch']} epochs: {result}{lost}")
        self.save()

    def _log_validation(self, row: Mapping[str, Any]) -> None:
        numbers = {f"validation/{name}": value for name, value in row.items() if isinstance(value, int | float)}
        self._loggers.metrics(row["epoch"], {name: numbers[name] for name in numbers if name != "validation/epoch"}, {})

    def curriculum(self, state: Mapping[str, Any]) -> None:
        """Write the state of the curriculum."""
        self._directory.write_json(CURRICULUM_FILE, state)

    def sample(self, epoch: int, trajectory: Trajectory) -> None:
        """Show an episode, and how the trained answers in it ended."""
        messages = [
            {"role": item.role.value, "content": item.content}
            for item in trajectory.episode
            if isinstance(item, EpisodeItem)
        ]
        reasons = (trajectory.metadata or {}).get("finish_reasons", [])
        # An opponent's answers are those of another model; without rows every answer counts.
        rows = [row for row in trajectory.sequences or () if row.llm in (None, *(self.decode or [row.llm]))]
        turns = {turn for row in rows for turn, is_own in zip(row.turns, row.completion_mask, strict=False) if is_own}
        reasons = [reason for turn, reason in enumerate(reasons) if turn in turns or not turns]
        ended = f", finish_reason {', '.join(reasons)}" if reasons else ""
        title = f"after {epoch} epochs, example {trajectory.example_id}, reward {trajectory.reward:g}{ended}"
        self.console.episode(title, messages)

    def keep(self, epoch: int, trajectories: Sequence[Trajectory], failures: Sequence[str]) -> None:
        """Write episodes with their tokens, then the reports of failed ones: example, error and traceback."""
        for trajectory in trajectories:
            row = self._without_secret_ids(trajectory)
            texts = self._token_texts(trajectory) if row["sequences"] is not None else None
            self._directory.append_jsonl(SAMPLES_FILE, {"epoch": epoch, **row, "token_texts": texts})
        for failure in failures:
            self._directory.append_jsonl(SAMPLES_FILE, {"epoch": epoch, "failure": failure})
        self._loggers.samples([_sample_row(epoch, trajectory) for trajectory in trajectories])

    def pairs(self, collection: TrajectoryCollection) -> None:
        """Write the pairs of a collection."""
        pairs = [pair for group in collection.trajectories for pair in group]
        rows = [self._without_secret_ids(pair) for pair in pairs]
        for row in rows:
            self._directory.append_jsonl(PAIRS_FILE, row)
        self._loggers.samples([_sample_row(0, pair) for pair in pairs])
        masked = sum(row["sequences"] is None for row in rows) - sum(pair.sequences is None for pair in pairs)
        if masked:
            self.console.message(f"{masked} pairs hold secrets and are kept masked: a resumed run trains them so")

    def read_pairs(self) -> list[Trajectory]:
        """Return the pairs of all collections of the run."""
        path = self._directory.file(PAIRS_FILE)
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
        return [Trajectory.model_validate(json.loads(line)) for line in lines if line]

    def save(self) -> None:
        """Write the current histories and the reward plot."""
        if self._rewards:
            self._directory.write_json(REWARD_HISTORY_FILE, self._rewards)
        if self.validations:
            self._directory.write_json(VALIDATION_HISTORY_FILE, self.validations)
        rows = len(self._rewards), len(self.validations)
        if any(rows) and rows != self._drawn_rows:
            runs.plot_rewards(self._directory, self._rewards, self.validations)
            self._drawn_rows = rows

    def _without_secret_ids(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return a trajectory for JSON, without its token ids if its texts hold a secret or the ids spell one."""
        row = trajectory.model_dump(mode="json")
        holds_secret = redacted_values(row["episode"]) != row["episode"] or any(
            redacted_tokens(sequence.tokens, decode) != sequence.tokens
            for sequence in trajectory.sequences or ()
            for llm, decode in self.decode.items()
            if sequence.llm in (None, llm)
        )
        return row | {"sequences": None} if holds_secret else row

    def _token_texts(self, trajectory: Trajectory) -> list[list[str]] | None:
        """Return the text of each token, per sequence; None if the tokenizer of one is not known.

        Bytes that are no whole character are lone surrogates, which JSON writes as escapes.
        """
        sequences, known = trajectory.sequences or (), self.token_text
        if not sequences or any(sequence.llm not in known for sequence in sequences):
            return None
        return [[known[str(sequence.llm)](token) for token in sequence.tokens] for sequence in sequences]

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        if self._is_open:
            self.save()
            self._is_open = False


def _sample_row(epoch: int, trajectory: Trajectory) -> LoggedEpisode:
    """Return a trajectory for a table of samples."""
    said: list[tuple[str, str]] = []
    for item in trajectory.episode:
        if isinstance(item, EpisodeItem):
            said.append((item.role.value, item.content))
        elif isinstance(item, DPOItem):
            prompt = [OpenAIMessage(role="user", content=item.prompt)] if isinstance(item.prompt, str) else item.prompt
            said += [(message.role, message.content) for message in prompt]
            said += [("chosen", item.chosen_response), ("rejected", item.rejected_response)]
    reward = trajectory.reward if trajectory.scorable else None
    text = "\n\n".join(f"{role}: {content}" for role, content in said)
    return LoggedEpisode(epoch, str(trajectory.example_id), reward, text)
