"""What stands between the epochs of a trainer and the disk: when a run is saved, of what, and how it goes on.

A checkpoint holds everything that decides the future of a run: the adapter's arrays and counters, the trainer's and the
builder's state, the curriculum, how often was validated, the notes of a script, and how long each log was. It is taken
at the boundaries between epochs only; an epoch that was cut off is repeated, from the same random numbers.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxft.harness.data_models import CheckpointConfig, EvalInputItem
from jaxft.harness.datasets import digest_of
from jaxft.runs.directory import CheckpointError, RestoreError, RunDirectory
from jaxft.runs.disk import DiskFull
from jaxft.runs.metrics import METRICS_FILE

if TYPE_CHECKING:
    from jaxft.harness.interfaces import Trainer
    from jaxft.runs.checkpoint import Checkpoint, Checkpoints

TRAINED = ("result.json", "model")
"""Files that exist only after training."""


class Checkpointing:
    """Saves the parts of one run, and restores them.

    Attributes:
        notes: what a script wants to know again after a resume; for JSON, saved with every checkpoint.
        found: the step that the run goes on from; None for a run from its beginning.
        when_restored: called once the run goes on from what was found.
        say: shows a sentence.
    """

    def __init__(self, directory: RunDirectory, config: CheckpointConfig, say: Callable[[str], None]) -> None:
        self.notes: dict[str, Any] = {}
        self.found: Checkpoint | None = None
        self.when_restored: Callable[[], None] = lambda: None
        self.say = say
        self._directory, self._config = directory, config
        self._checkpoints: Checkpoints | None = None
        self._dataset_sha256: str | None = None
        self._boundary: dict[str, Any] | None = None
        self._score: float | None = None
        self._is_restored = self._is_saved = False
        self._begun_step: int | None = None
        self._started, self._seconds_before = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        """Seconds of this session, and of those before it up to the checkpoints that the next went on from."""
        return self._seconds_before + time.perf_counter() - self._started

    async def find(self) -> None:
        """Looks for the step to go on from; changes nothing but the logs of a run that has nothing to go on from.

        Raises:
            RestoreError: steps are there, but none verifies, or what was trained has no checkpoint.
        """
        self.found = await asyncio.to_thread(self._open().newest, self.say)
        if self.found is not None:
            self.notes = dict(self.found.state["notes"])
            self._seconds_before = self.found.seconds
            self.say(f"going on from checkpoint {self.found.step}")
            return
        # The first checkpoint is finished before the second epoch ends: without one there is at most one row.
        if any(map(self._directory.holds, TRAINED)) or self._directory.log_sizes(lines=True).get(METRICS_FILE, 0) > 1:
            raise RestoreError(
                f"'{self._directory.path}' holds what was trained, but no finished checkpoint to go on from: put "
                "checkpoints/ back, or start anew with --overwrite"
            )
        self.say("no checkpoint was finished: the run starts from its beginning")
        self._open().set_aside(after=-1)
        self._directory.cut_logs({})

    async def check_dataset(self, items: Sequence[EvalInputItem]) -> None:
        """Remembers the examples of the run, for its checkpoints.

        Raises:
            RestoreError: those of the checkpoint that was found were others, or in another order.
        """
        self._dataset_sha256 = await asyncio.to_thread(digest_of, items)
        # Checkpoints of earlier versions do not have it.
        before = None if self.found is None else self.found.state.get("dataset_sha256")
        if self.found is not None and before not in (None, self._dataset_sha256):
            raise RestoreError(
                f"eval.general.dataset: the examples are not those of checkpoint {self.found.step}: their sha256 was "
                f"{before} and is {self._dataset_sha256}: put the data set back as it was, or begin another run, with "
                "--overwrite or another output_dir"
            )

    async def restore(self, trainer: "Trainer") -> None:
        """Puts a trainer, with its parts, into the state that was found; once, and not for a run from its beginning.

        Raises:
            RestoreError: the checkpoint does not fit the run, which is then left as it was.
        """
        if self.found is None or self._is_restored:
            return
        found, checkpoints, state = self.found, self._open(), self.found.state
        builder, adapter = _parts(trainer)
        if state["trainer_type"] != type(trainer).__name__:
            raise RestoreError(
                f"checkpoint {found.step} is of a {state['trainer_type']}; this run has a {type(trainer).__name__}"
            )
        await adapter.restore_state(state["adapter"], lambda like: checkpoints.arrays(found, like))
        for warning in self._directory.cut_logs(state["logs"]):
            self.say(f"warning: {warning}")
        builder.restore_state(state["builder"])
        if builder.evaluation is not None:
            builder.evaluation.num_validations = state["num_validations"]
        trainer.restore_curriculum_state(state["curriculum"])
        trainer.restore_state(state["trainer"])
        for part, saved in ((trainer, state["trainer"]), (adapter, state["adapter"])):
            if not saved:
                self.say(f"warning: {type(part).__name__} saved no state: it goes on as it was made")
        checkpoints.set_aside(after=found.step)
        self._begun_step, self._is_restored = found.step, True
        self.when_restored()

    async def boundary(self, trainer: "Trainer", step: int, *, score: float | None = None, is_last: bool) -> None:
        """Remembers the state between two epochs, and saves it when it is due.

        Raises:
            CheckpointError, DiskFull: it, or the one before, could not be written.
        """
        if self._config.every is None:
            return
        builder, adapter = _parts(trainer)
        state = {
            "step": step,
            "trainer_type": type(trainer).__name__,
            "trainer": trainer.state(),
            "curriculum": trainer.get_curriculum_state(),
            "builder": builder.state(),
            "num_validations": 0 if builder.evaluation is None else builder.evaluation.num_validations,
            "notes": self.notes,
            "dataset_sha256": self._dataset_sha256,
            "logs": self._directory.log_sizes(),
            "adapter": await adapter.save_state(lambda values, arrays: values),
        }
        self._boundary, self._score, self._is_saved = _plain(state), score, step == self._begun_step
        if (is_last or step % self._config.every == 0) and await self.save_boundary(trainer) is None:
            raise CheckpointError(f"checkpoint {step} was not made: the adapter changed between two epochs")
        # The first checkpoint is finished before a second row is written: `find` relies on it.
        if is_last or (self.saved_step is None and self._begun_step != step):
            await self.wait()

    async def save_boundary(self, trainer: "Trainer") -> int | None:
        """Saves the latest boundary unless it is saved; its step, or None when the parameters have changed since."""
        if self._boundary is None:
            return None
        state, checkpoints = self._boundary, self._open()

        def save(values: dict[str, Any], arrays: Any) -> bool:
            if _plain(values) != state["adapter"]:
                return False
            with self._tolerant():
                checkpoints.wait()
            with self._tolerant():
                checkpoints.save(state["step"], state, arrays, score=self._score, seconds=self.seconds)
            return True

        if not self._is_saved:
            self._is_saved = await _parts(trainer)[1].save_state(save)
        if not self._is_saved:
            return None
        self._begun_step = state["step"]
        return self._begun_step

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Lets a checkpoint that cannot be written end the run, or says so, as `when_unwritable` wants it."""
        try:
            yield
        except (CheckpointError, DiskFull) as error:
            if self._config.when_unwritable == "stop":
                raise
            self.say(f"warning: {error}; the run goes on without this checkpoint")

    @property
    def saved_step(self) -> int | None:
        """The newest checkpoint to go on from; None when none is finished."""
        saved = None if self._checkpoints is None else self._checkpoints.saved_step
        if saved is None and self._is_restored and self.found is not None:
            return self.found.step
        return saved

    async def wait(self) -> None:
        """Waits until what was saved is on the disk, without holding up the event loop.

        Raises:
            CheckpointError, DiskFull: it could not be written, and `when_unwritable` is `stop`.
        """
        if self._checkpoints is not None:
            with self._tolerant():
                await asyncio.to_thread(self._checkpoints.wait)

    def close(self) -> None:
        """Waits for the save in the background; its errors are those of `wait`."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _open(self) -> "Checkpoints":
        if self._checkpoints is None:
            from jaxft.runs.checkpoint import Checkpoints

            config = self._config
            self._checkpoints = Checkpoints(self._directory, max_to_keep=config.max_to_keep, keep_best=config.keep_best)
        return self._checkpoints


def _parts(trainer: "Trainer") -> tuple[Any, Any]:
    assert trainer.trajectory_builder is not None and trainer.trainer_adapter is not None
    return trainer.trajectory_builder, trainer.trainer_adapter


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """A copy as JSON gives it back: strings for keys, lists for tuples."""
    try:
        return json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of the run has no form in JSON ({error}): give finite plain values"
        ) from error
