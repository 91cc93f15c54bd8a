"""Checkpoints of a run between its epochs, their restoration, and the check that a resumed run is the same run.

A checkpoint holds all state that the rest of a run depends on: the adapter's arrays and counters, the state of trainer,
builder and curriculum, the number of validations, the notes of a script, and the length of each log. Checkpoints are
taken between epochs only; an interrupted epoch is repeated with the same random numbers.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxft import runs
from jaxft.errors import CheckpointError, ConfigError, RestoreError
from jaxft.harness.config import Config, resolved_yaml
from jaxft.harness.config_merge import OUTPUT_DIR
from jaxft.harness.config_types import walk
from jaxft.harness.contracts import Trainer
from jaxft.harness.data_models import CheckpointConfig, EvalInputItem
from jaxft.harness.functions import Function
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.redaction import redacted
from jaxft.runs.directory import RunDirectory
from jaxft.runs.files import CONFIG_FILE, METRICS_FILE, RESUMES_FILE

if TYPE_CHECKING:
    from jaxft.runs.checkpoint import Checkpoint, Checkpoints

TRAINED = ("result.json", "model")
"""Files that only a run that has trained has."""


class Checkpointing:
    """Saves and restores the components of one run.

    Attributes:
        notes: JSON values of a script, saved with every checkpoint and restored with a resumed run.
        now: time of the run, when it was begun, likewise.
        found: the checkpoint that the run continues from; None for a new run.
        when_restored: called once, after the run was restored.
        log: shows a message.
    """

    def __init__(
        self, directory: RunDirectory, config: CheckpointConfig, log: Callable[[str], None], shared: Path | None = None
    ) -> None:
        """Open nothing yet.

        Args:
            directory: the run directory.
            config: when checkpoints are made, and how many are kept.
            log: shows a message.
            shared: the run directory of process 0, for another one, whose own directory holds no checkpoints.
        """
        self.notes: dict[str, Any] = {}
        self.now = datetime.now()
        self.found: Checkpoint | None = None
        self.when_restored: Callable[[], None] = lambda: None
        self.log = log
        self._directory, self._config = directory, config
        self._shared = shared
        self._checkpoints: Checkpoints | None = None
        self._dataset_sha256: str | None = None
        self._boundary: dict[str, Any] | None = None
        self._score: float | None = None
        self._is_restored = self._is_saved = False
        self._begun: dict[str, Any] = {}  # the state of the last save, or of the checkpoint that was restored
        self._started, self._seconds_before = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        """Seconds of this session and the earlier ones, each up to the checkpoint that the next one resumed."""
        return self._seconds_before + time.perf_counter() - self._started

    async def find(self) -> None:
        """Find the newest checkpoint that verifies. If the run has none yet, empty its logs, as it starts again.

        Raises:
            RestoreError: checkpoints exist but none verifies, or the run was trained but has no checkpoint.
        """
        checkpoints = await asyncio.to_thread(self._open)
        self.found = await asyncio.to_thread(checkpoints.newest, self.log)
        if self.found is not None:
            self.notes = dict(self.found.state["notes"])
            if self.found.now is not None:
                self.now = datetime.fromisoformat(self.found.now)
            self._seconds_before = self.found.seconds
            self.log(f"continuing from checkpoint {self.found.step}")
            return
        # The first checkpoint is finished before the second epoch ends, so a run without one has at most one row.
        metrics = self._directory.path / METRICS_FILE
        num_rows = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
        if any(map(self._directory.holds, TRAINED)) or num_rows > 1:
            raise RestoreError(
                f"'{self._directory.path}' holds trained files, but no finished checkpoint to continue from: put "
                "checkpoints/ back, or start anew with --overwrite"
            )
        self.log("no checkpoint was finished: the run starts from its beginning")
        await asyncio.to_thread(checkpoints.set_aside, -1)
        self._directory.cut_logs({})

    async def check_dataset(self, items: Sequence[EvalInputItem]) -> str:
        """Record the digest of the examples, compare it to that of the checkpoint, and return it.

        Raises:
            RestoreError: the checkpoint was made with other examples, or another order of them.
        """
        self._dataset_sha256 = await asyncio.to_thread(dataset_digest, items)
        if self.found is not None and (before := self.found.state["dataset_sha256"]) != self._dataset_sha256:
            raise RestoreError(
                f"eval.general.dataset: the examples are not those of checkpoint {self.found.step}: their sha256 was "
                f"{before} and is {self._dataset_sha256}: put the dataset back as it was, or start another run, with "
                "--overwrite or another output_dir"
            )
        return self._dataset_sha256

    async def restore(self, trainer: Trainer) -> None:
        """Restore trainer, builder and adapter from the checkpoint; do nothing without one, or in a second call.

        Raises:
            RestoreError: the checkpoint does not fit the run, which stays unchanged.
        """
        if self.found is None or self._is_restored:
            return
        found, checkpoints, state = self.found, self._open(), self.found.state
        builder, adapter = trainer.trajectory_builder, trainer.trainer_adapter
        if state["trainer_type"] != type(trainer).__name__:
            raise RestoreError(
                f"checkpoint {found.step} is that of a {state['trainer_type']}; this run has a {type(trainer).__name__}"
            )
        await adapter.restore_state(state["adapter"], lambda like: checkpoints.arrays(found, like))
        for warning in self._directory.cut_logs(state["logs"]):
            self.log(f"warning: {warning}")
        builder.restore_state(state["builder"])
        if builder.evaluation is not None:
            builder.evaluation.num_validations = state["num_validations"]
            builder.evaluation.num_rollouts = state["num_rollouts"]
        trainer.restore_curriculum_state(state["curriculum"])
        trainer.restore_state(state["trainer"])
        for component, saved in ((trainer, state["trainer"]), (adapter, state["adapter"])):
            if not saved:
                self.log(f"warning: {type(component).__name__} saved no state: it continues in its initial state")
        await asyncio.to_thread(checkpoints.set_aside, found.step)
        self._begun, self._is_restored = state, True
        self.when_restored()

    async def boundary(
        self, trainer: Trainer, step: int, *, score: float | None = None, is_last: bool, is_written: bool = True
    ) -> None:
        """Capture the state between two epochs, and save it if a checkpoint is due and `is_written`.

        Raises:
            CheckpointError, DiskFull: this checkpoint, or the previous one, could not be written.
        """
        if self._config.every is None:
            return
        builder, adapter = trainer.trajectory_builder, trainer.trainer_adapter
        state = {
            "step": step,
            "trainer_type": type(trainer).__name__,
            "trainer": trainer.state(),
            "curriculum": trainer.get_curriculum_state(),
            "num_validations": 0 if builder.evaluation is None else builder.evaluation.num_validations,
            **trainer.collection_state(),
            "notes": self.notes,
            "dataset_sha256": self._dataset_sha256,
            "logs": self._directory.log_sizes(),
            "adapter": await adapter.save_state(lambda values, arrays: values),
        }
        self._boundary, self._score = _plain(state), score
        # A step that was saved before its validation is saved again, with the score.
        self._is_saved = all(self._boundary[name] == self._begun.get(name) for name in ("step", "trainer"))
        is_due = is_written and (is_last or step % self._config.every == 0)
        if is_due and await self.save_boundary(trainer) is None:
            raise CheckpointError(f"checkpoint {step} was not made: the adapter changed between two epochs")
        # The first checkpoint is finished before a second row is written: `find` relies on it.
        if is_last or (self.saved_step is None and self._begun.get("step") != step):
            await self.wait()

    async def save_boundary(self, trainer: Trainer) -> int | None:
        """Save the latest captured state if needed, and return its step; None if the adapter has changed since."""
        if self._boundary is None:
            return None
        state, checkpoints = self._boundary, await asyncio.to_thread(self._open)
        step: int = state["step"]

        def save(values: dict[str, Any], arrays: Any) -> bool:
            if _plain(values) != state["adapter"]:
                return False
            now, is_again = self.now.isoformat(), step == self._begun.get("step")
            checkpoints.save(step, state, arrays, score=self._score, seconds=self.seconds, now=now, is_again=is_again)
            return True

        if not self._is_saved:
            self._is_saved = await trainer.trainer_adapter.save_state(save)
        if not self._is_saved:
            return None
        self._begun = state
        return step

    @property
    def saved_step(self) -> int | None:
        """Step of the newest finished checkpoint of this run; None before the first."""
        saved = None if self._checkpoints is None else self._checkpoints.saved_step
        if saved is None and self._is_restored and self.found is not None:
            return self.found.step
        return saved

    async def wait(self) -> None:
        """Wait for the last save to finish, without blocking the event loop.

        Raises:
            CheckpointError, DiskFull: it could not be written.
        """
        if self._checkpoints is not None:
            await asyncio.to_thread(self._checkpoints.wait)

    def close(self) -> None:
        """Wait for the background save; its errors are raised by `wait` only."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _open(self) -> "Checkpoints":
        if self._checkpoints is None:
            self._checkpoints = runs.Checkpoints(
                self._directory, max_to_keep=self._config.max_to_keep, shared=self._shared
            )
        return self._checkpoints


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy as JSON would read it back: keys become strings, tuples become lists."""
    try:
        return json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of the run cannot be written as JSON ({error}): give finite plain values"
        ) from error


IMMUTABLE = (
    "finetuning.seed",
    "finetuning.trainer",
    "finetuning.trajectory_builder",
    "finetuning.trainer_adapter",
    "llms.*._type",
    "llms.*.path",
    "llms.*.preset",
    "llms.*.tokenizer",
    "llms.*.dtype",
    "llms.*.sampling_dtype",
    "llms.*.quantize_head",
    "llms.*.kv_cache_dtype",
    "llms.*.lora",
    "llms.*.lora.*",
    "llms.*.snapshot_of",
    "llms.*.adapter",
    "trainers.*._type",
    "trajectory_builders.*._type",
    "trainer_adapters.*._type",
    "trainer_adapters.*.llm",
    "trainer_adapters.*.loss.reference.path",
    "trainer_adapters.*.optimizer.name",
)
"""Configuration paths that a resume must not change: another model, optimizer or seed makes another run."""

Changes = dict[str, tuple[Any, Any]]
"""`(old, new)` values by dotted path."""


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return the differences between two trees of plain values, `(old, new)` by path; None is a missing value.

    >>> find_changes({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 3}, "b": [1]})
    {'a.y': (2, 3), 'b': (None, [1])}
    """
    changes: Changes = {}
    for name in [*before, *(name for name in now if name not in before)]:
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= {f"{name}.{path}": values for path, values in find_changes(old, new).items()}
        elif old != new:
            changes[name] = (old, new)
    return changes


def saved_config(folder: Path) -> dict[str, Any]:
    """Return the configuration that a run directory records, as plain values.

    Raises:
        ConfigError: it cannot be read.
    """
    file = folder / CONFIG_FILE
    try:
        return parse_yaml(file.read_text("utf-8"), str(file))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}), and no run can be resumed without it") from None


def changed_settings(folder: Path, config: Config) -> Changes:
    """Return the differences between the configuration that a run directory records and `config`.

    Raises:
        ConfigError: the recorded configuration cannot be read.
    """
    changes = find_changes(saved_config(folder), parse_yaml(resolved_yaml(config), "the configuration"))
    changes.pop(OUTPUT_DIR, None)  # the same directory by another name, or moved
    return changes


def check_changes(directory: RunDirectory, config: Config) -> Changes:
    """Return the differences between the recorded configuration of a run and `config`.

    Raises:
        ConfigError: a path of `IMMUTABLE` differs, a function has changed and its new digest is not given, or the
            recorded configuration cannot be read.
    """
    changes = changed_settings(directory.path, config)
    faults = [
        f"{path}: was {_show_value(old)} and is {_show_value(new)}: a resumed run keeps the value it was started with"
        for path, (old, new) in changes.items()
        if any(fnmatchcase(path, pattern) for pattern in IMMUTABLE)
    ]
    faults += [
        f"{path}: was {changes[path][0]} and is {function}: to go on with it as it is now, add --set {path}={function} "
        f"or, in a program, overrides={{{path!r}: '{function}'}}"
        for path, function in walk(config)
        if isinstance(function, Function)
        and path in changes
        and "@" in str(changes[path][0])
        and not function.is_pinned
    ]
    if faults:
        raise ConfigError(faults, f"the resumed run '{directory.path}'")
    return changes


def masked_paths(config: Config) -> list[str]:
    """Return the paths of fields with a secret, alone or inside a longer text, which a run directory never stores."""
    texts = [(path, value) for path, value in walk(config.model_dump(mode="json")) if isinstance(value, str) and value]
    return [path for path, text in texts if not text.strip("*") or redacted(text) != text]


def record(directory: RunDirectory, checkpoint: int | None, changes: Changes, now: Mapping[str, Any]) -> list[str]:
    """Append a line about this resume to `resumes.jsonl`, and return a warning per package whose version has changed.

    Args:
        directory: the run directory.
        checkpoint: the step that the run continues from; None for a start from the beginning.
        changes: changes of the configuration.
        now: the `environment` of this process.
    """
    try:
        before = directory.read_json("environment.json").get("versions", {})
    except (OSError, ValueError):
        before = {}
    row = {"checkpoint": checkpoint, "changes": {path: list(values) for path, values in changes.items()}, **now}
    directory.append_jsonl(RESUMES_FILE, row)
    return [
        f"{name} was {before[name]} when the run was begun and is {version}: metrics may differ in the last digits"
        for name, version in now["versions"].items()
        if name in before and before[name] != version
    ]


def _show_value(value: Any) -> str:
    return "not set" if value is None else repr(value)


def dataset_digest(items: Iterable[EvalInputItem]) -> str:
    """Return the sha256 of examples in order; of a value that JSON cannot hold, only the type counts.

    >>> item = EvalInputItem(id="0", input_obj="1+1", full_dataset_entry={"question": "1+1"})
    >>> dataset_digest([item])[:8], dataset_digest([item.model_copy(update={"id": "1"})])[:8]
    ('c72295e1', '597b8800')
    """
    digest = hashlib.sha256()
    for item in items:
        fields = [item.id, item.input_obj, item.expected_output_obj, item.full_dataset_entry]
        digest.update(json.dumps(fields, default=lambda value: type(value).__name__, skipkeys=True).encode() + b"\n")
    return digest.hexdigest()
