"""What stands between the epochs of a trainer and the disk: when a run is saved, of what, and how it goes on.

A checkpoint holds everything that decides the future of a run: the adapter's arrays and counters, the trainer's and the
builder's state, the curriculum, how often was validated, the notes of a script, and how long each log was. It is taken
at the boundaries between epochs only; an epoch that was cut off is repeated, from the same random numbers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxft.harness.data_models import CheckpointConfig
from jaxft.runs.directory import RestoreError, RunDirectory

if TYPE_CHECKING:
    from jaxft.harness.interfaces import Trainer
    from jaxft.runs.checkpoint import Checkpoint, Checkpoints


class Checkpointing:
    """Saves the parts of one run, and restores them.

    Attributes:
        notes: what a script wants to know again after a resume; for JSON, saved with every checkpoint.
        found: the step that the run goes on from; None for a run from its beginning.
        say: shows a sentence.
    """

    def __init__(self, directory: RunDirectory, config: CheckpointConfig, say: Callable[[str], None]) -> None:
        self.notes: dict[str, Any] = {}
        self.found: Checkpoint | None = None
        self._directory, self._config, self.say = directory, config, say
        self._checkpoints: Checkpoints | None = None
        self._boundary: dict[str, Any] | None = None
        self._score: float | None = None
        self._is_saved = True
        self._saved_step: int | None = None

    def find(self) -> bool:
        """Looks for the step to go on from, and cuts the logs back to it; to nothing where there is none.

        Raises:
            RestoreError: steps are there, but none verifies, or a log has lost lines.
        """
        self.found = self._open().newest(self.say)
        if self.found is None:
            self.say("no checkpoint was finished: the run starts from its beginning")
            self._open().set_aside(after=-1)
            self._directory.cut_logs({})
            return False
        self.notes = dict(self.found.state["notes"])
        self._directory.cut_logs(self.found.state["logs"])
        self.say(f"going on from checkpoint {self.found.step}")
        return True

    async def restore(self, trainer: "Trainer") -> None:
        """Puts a trainer, with its parts, into the state that was found; nothing for a run from its beginning.

        Raises:
            RestoreError: the checkpoint does not fit the run.
        """
        if self.found is None:
            return
        found, checkpoints, state = self.found, self._open(), self.found.state
        builder, adapter = _parts(trainer)
        if state["trainer_type"] != type(trainer).__name__:
            raise RestoreError(
                f"checkpoint {found.step} is of a {state['trainer_type']}; this run has a {type(trainer).__name__}"
            )
        await adapter.restore_state(state["adapter"], lambda like: checkpoints.arrays(found, like))
        builder.restore_state(state["builder"])
        if builder.evaluation is not None:
            builder.evaluation.num_validations = state["num_validations"]
        trainer.restore_curriculum_state(state["curriculum"])
        trainer.restore_state(state["trainer"])
        checkpoints.set_aside(after=found.step)
        self._saved_step = found.step

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
            "logs": self._directory.log_sizes(),
            "adapter": await adapter.save_state(lambda values, arrays: values),
        }
        self._boundary, self._score, self._is_saved = json.loads(json.dumps(state)), score, step == self._saved_step
        if is_last or step % self._config.every == 0:
            await self.save_boundary(trainer)
        if is_last:
            await self.wait()

    async def save_boundary(self, trainer: "Trainer") -> int | None:
        """Saves the latest boundary unless it is saved; its step, or None when the parameters have changed since."""
        if self._boundary is None:
            return None
        state, checkpoints = self._boundary, self._open()

        def save(values: dict[str, Any], arrays: Any) -> bool:
            if json.loads(json.dumps(values)) != state["adapter"]:
                return False
            checkpoints.save(state["step"], state, arrays, score=self._score)
            return True

        if not self._is_saved:
            self._is_saved = await _parts(trainer)[1].save_state(save)
            self._saved_step = state["step"]
        return state["step"] if self._is_saved else None

    async def wait(self) -> None:
        """Waits until what was saved is on the disk.

        Raises:
            CheckpointError, DiskFull: it could not be written.
        """
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def close(self) -> None:
        """Waits for the save in the background; its errors are those of `wait`."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    @property
    def folder(self) -> Path:
        """Where the steps are."""
        return self._open().folder

    def _open(self) -> "Checkpoints":
        if self._checkpoints is None:
            from jaxft.runs.checkpoint import Checkpoints

            config = self._config
            self._checkpoints = Checkpoints(self._directory, max_to_keep=config.max_to_keep, keep_best=config.keep_best)
        return self._checkpoints


def _parts(trainer: "Trainer") -> tuple[Any, Any]:
    assert trainer.trajectory_builder is not None and trainer.trainer_adapter is not None
    return trainer.trajectory_builder, trainer.trainer_adapter
