"""The records of a run, read from its directory. Nothing is locked or written.

A run may be going on while it is read, so the last line of a log may be incomplete; it is left out.
"""

import contextlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, TypeAdapter, ValidationError

from jaxft.errors import RunDirectoryError
from jaxft.runs.files import (
    CONFIG_FILE,
    CURRICULUM_FILE,
    ENVIRONMENT_FILE,
    EPISODE_REWARDS_FILE,
    LOG_FILE,
    METRICS_FILE,
    RESULT_FILE,
    RESUMES_FILE,
    REWARD_HISTORY_FILE,
    SAMPLES_FILE,
    TIMINGS_FILE,
    TOKEN_SCORES_FILE,
    VALIDATION_HISTORY_FILE,
    is_locked,
)
from jaxft.runs.metrics import NAMED_REWARD, REWARD

Row = dict[str, Any]


def _check_epoch(row: Row) -> Row:
    if not isinstance(row.get("epoch"), int):
        raise ValueError("a row has no number as its 'epoch'")
    return row


# Not `Row`, as pydantic takes no text with half of a character for a `str`.
_Epoch = Annotated[dict[Any, Any], AfterValidator(_check_epoch)]
_ROW, _EPOCH, _EPOCHS = TypeAdapter(dict[Any, Any]), TypeAdapter(_Epoch), TypeAdapter(list[_Epoch])

# The parser in C reads a configuration ten times faster.
_YAML_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


@dataclass(frozen=True)
class RunRecords:
    """The records of a run up to now; a file that is not there yet is an empty list or mapping.

    Attributes:
        path: the run directory.
        config: the resolved configuration: every field with its value, secrets masked.
        environment: versions, devices, command, `chosen` settings, and `differences` to the defaults by dotted path.
        metrics: a row per epoch, with `epoch` from 0.
        timings: a row per epoch: seconds by phase, rates, memory.
        rewards: a row per epoch: mean, minimum, maximum and quartiles of the rewards.
        episode_rewards: a row per epoch: `rewards`, a list of each example's rewards by example id.
        validations: a row per validation, with the number of `epoch`s before it and `avg_reward`.
        curriculum: state of the curriculum after the last epoch.
        resumes: a row per resume: the checkpoint it went on from, and changes of the configuration.
        result: the figures that the run ended with; None while it goes on.
    """

    path: Path
    config: Row
    environment: Row
    metrics: list[Row]
    timings: list[Row]
    rewards: list[Row]
    episode_rewards: list[Row]
    validations: list[Row]
    curriculum: Row
    resumes: list[Row]
    result: Row | None

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.path.resolve().name

    @property
    def warm_timings(self) -> list[Row]:
        """Timings without the epochs in which a process begins, as those compile; all of a run that has no others."""
        begins = {self.timings[0]["epoch"] if self.timings else 0, *(row.get("checkpoint") for row in self.resumes)}
        return [row for row in self.timings if row["epoch"] not in begins] or self.timings

    @property
    def named_rewards(self) -> dict[str, list[float | None]]:
        """Mean of each named reward by epoch; none if they all are the reward, as one function's is."""
        named = dict.fromkeys(name for row in self.metrics for name in row if name.startswith(NAMED_REWARD))
        if all(row.get(name) in (None, row.get(REWARD)) for row in self.metrics for name in named):
            return {}
        return {name.removeprefix(NAMED_REWARD): [row.get(name) for row in self.metrics] for name in named}

    @property
    def config_text(self) -> str:
        """The resolved configuration as the run wrote it."""
        return (self.path / CONFIG_FILE).read_text("utf-8", "backslashreplace")

    @property
    def state(self) -> Literal["running", "ended", "stopped", "unknown"]:
        """State of the run: `stopped` has no result and no process; `unknown` is a process that is not seen here."""
        if self.result is not None:
            return "ended"
        is_held = is_locked(self.path)
        return "unknown" if is_held is None else "running" if is_held else "stopped"

    def log_lines(self) -> Iterator[str]:
        """Yield the lines of `run.log`, without their line feeds."""
        with contextlib.suppress(FileNotFoundError), (self.path / LOG_FILE).open("rb") as stream:
            for line in stream:
                yield line.rstrip(b"\n").decode("utf-8", "backslashreplace")

    def log_tail(self, count: int) -> list[str]:
        """Return the last lines of `run.log`."""
        return list(deque(self.log_lines(), maxlen=count))

    def episodes(self) -> Iterator[Row]:
        """Yield the episodes of `trajectories/samples.jsonl`, in the order of the file.

        A row is a `Trajectory` with its `epoch`, or a `failure`: the report of an episode that failed. `sequences` has
        the tokens of each training row; `token_texts`, `advantages` and `entropies` have a value per token of each
        sequence, or are None where that is not known, as for an episode that was not trained.
        """
        scores = {episode_key(row): row for row in _lines(self.path / TOKEN_SCORES_FILE)}
        for row in _lines(self.path / SAMPLES_FILE):
            found = scores.get(episode_key(row), {})
            yield {"token_texts": None, **row, **{name: found.get(name) for name in ("advantages", "entropies")}}


def episode_key(row: Row) -> tuple[str, ...]:
    """Return the values that a row of an episode and the row of its tokens' scores have in common."""
    return tuple(str(row.get(name)) for name in ("epoch", "example_id", "generation", "rollout_index"))


def read_run(path: Path) -> RunRecords:
    """Read the records in a run directory.

    Raises:
        RunDirectoryError: the folder holds no run, or a file of it cannot be read; the message names the file.
    """
    if not (path / CONFIG_FILE).is_file():
        raise RunDirectoryError(f"'{path}' holds no run: it has no {CONFIG_FILE}; give the directory of a run")
    metrics = list(_lines(path / METRICS_FILE, _EPOCH))
    # The history is written every tenth epoch, the metrics after each.
    rewards = _json(path / REWARD_HISTORY_FILE, [], _EPOCHS)
    return RunRecords(
        path=path,
        config=_yaml(path / CONFIG_FILE),
        environment=_json(path / ENVIRONMENT_FILE, {}),
        metrics=metrics,
        timings=list(_lines(path / TIMINGS_FILE, _EPOCH)),
        rewards=metrics if len(metrics) > len(rewards) else rewards,
        episode_rewards=list(_lines(path / EPISODE_REWARDS_FILE, _EPOCH)),
        validations=_json(path / VALIDATION_HISTORY_FILE, [], _EPOCHS),
        curriculum=_json(path / CURRICULUM_FILE, {}),
        resumes=list(_lines(path / RESUMES_FILE)),
        result=_json(path / RESULT_FILE, None),
    )


def flat(config: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a nested configuration by dotted path; lists are values.

    >>> flat({"finetuning": {"seed": 1, "checkpoints": {}}, "imports": ["a"]})
    {'finetuning.seed': 1, 'finetuning.checkpoints': {}, 'imports': ['a']}
    """
    if not isinstance(config, dict) or not config:
        return {path: config}
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= flat(value, f"{path}.{name}" if path else str(name))
    return found


def _yaml(file: Path) -> Row:
    try:
        return _ROW.validate_python(yaml.load(file.read_text("utf-8"), Loader=_YAML_LOADER) or {})
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise unreadable(file, error) from error


def _json(file: Path, missing: Any, kind: TypeAdapter[Any] = _ROW) -> Any:
    try:
        return kind.validate_python(json.loads(file.read_bytes()))
    except FileNotFoundError:
        return missing
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error


def _lines(file: Path, kind: TypeAdapter[Any] = _ROW) -> Iterator[Row]:
    return (row for _, _, row in numbered_rows(file, kind))


def numbered_rows(file: Path, kind: TypeAdapter[Any] = _ROW) -> Iterator[tuple[int, tuple[int, int], Row]]:
    """Yield number, span (first byte and length) and value of each line that ends with its line feed."""
    offset = 0
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    return  # it is being written
                yield number, (offset, len(line)), parse_row(file, number, line, kind)
                offset += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(file, error) from error


def parse_row(file: Path, number: int | None, line: bytes, kind: TypeAdapter[Any] = _ROW) -> Row:
    """Return the value of a line of a file, whose place is for the error."""
    try:
        return kind.validate_python(json.loads(line))
    except ValueError as error:
        raise unreadable(file, error, number) from error


def unreadable(file: Path, error: Exception, line: int | None = None) -> RunDirectoryError:
    """Return the error for a file of a run, or a line of it, that cannot be read."""
    where = f"{file}" if line is None else f"{file}:{line}"
    fault = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
    return RunDirectoryError(
        f"{where} cannot be read ({fault}): the run's files are damaged; copy them back, or leave the run out"
    )
