"""Checkpoints of one run, written by orbax in the background, each with a manifest to verify it.

    checkpoints/12/arrays/...       written by orbax, in the background
                   state/...        JSON
                   manifest.json    sha256 and size of every file, written last

Only a step whose manifest verifies is restored: orbax alone would accept an empty directory as the newest step, and
flipped bits. Earlier steps are removed after the new one was read back and verified.
"""

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from jaxft.errors import CheckpointError, DiskFull, HostsError, ManifestError, NewerFormatError, RestoreError
from jaxft.files import MANIFEST, disk_errors, read_manifest, sync_folder, verify_manifest, write_manifest
from jaxft.hosts.group import process_group
from jaxft.runs.directory import RunDirectory

FOLDER = "checkpoints"
FORMAT_VERSION = 1
"""Version of state and arrays; a newer program restores every older version, but none from before 0.9.0."""
DAMAGED, OLD, REPLACED = ".damaged", ".old", ".replaced"
"""Suffixes of step directories that are set aside, being removed, or kept until their step is saved again."""


class Checkpoint(NamedTuple):
    """A verified step: its number and JSON state, the seconds that the run had taken, and the time it was begun at.

    The time is in ISO format; None in a checkpoint of an earlier version.
    """

    step: int
    state: dict[str, Any]
    seconds: float = 0.0
    now: str | None = None


class Checkpoints:
    """Saves and restores steps of one run; at most one save runs in the background.

    Nothing may change the arrays during `save` and `arrays`; the other methods may be called from any thread.

    Attributes:
        saved_step: the newest step that this object has saved; None before the first.
    """

    def __init__(self, directory: RunDirectory, *, max_to_keep: int = 2, shared: Path | None = None) -> None:
        """Open the folder `checkpoints` of a run.

        Args:
            directory: the run directory.
            max_to_keep: number of the newest steps that are kept, beside the one of the best score.
            shared: the run directory of all processes, for one that has a directory of its own.
        """
        self._directory, self._group, self._num_together = directory, process_group(), 0
        self.folder = directory.file(f"{FOLDER}/step").parent if shared is None else shared / FOLDER
        self._max_to_keep = max_to_keep
        self._finishing: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begun: int | None = None
        self.saved_step: int | None = None
        _hush_orbax()
        self._manager = self._new_manager()

    def _new_manager(self) -> Any:
        together: dict[str, Any] = {}
        if not self._group.is_alone:
            # Named processes meet through JAX's coordinator; all without names do so by a program on their devices, in
            # another thread than the one that computes.
            processes = set(range(self._group.num_processes))
            together["multiprocessing_options"] = ocp.options.MultiprocessingOptions(active_processes=processes)
            self._together(lambda: self.folder.mkdir(exist_ok=True) if self._group.is_first else None)
            self._together(self._check_shared)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None, enable_async_checkpointing=True, create=self._group.is_alone, **together
        )
        # Compression would save a fifth of the bytes, for ten times the CPU time.
        arrays = ocp.PyTreeCheckpointHandler(use_compression=False, **together)
        handlers = {"state": ocp.JsonCheckpointHandler(**together), "arrays": arrays}
        return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def _check_shared(self) -> None:
        if not self.folder.is_dir():
            raise CheckpointError(
                f"process {self._group.process_id} does not find '{self.folder}': several processes need an output_dir "
                "that all of them reach"
            )

    def _together(self, step: Callable[[], object]) -> None:
        """Make a step, and wait until all processes have; if it fails in one of them, raise in all."""
        fault: Exception | None = None
        try:
            step()
        except Exception as error:
            fault = error
        self._num_together += 1
        said = None if fault is None else f"{type(fault).__name__}: {fault}"
        answers = self._group.share(f"checkpoints {self._num_together}", said)
        if fault is not None:
            raise fault
        for index, each in enumerate(answers):
            if each is not None:
                raise CheckpointError(f"process {index} failed: {each}")

    def steps(self) -> list[int]:
        """Return the numbers of all step directories, verified or not, ascending."""
        names = [entry.name for entry in self.folder.iterdir() if entry.is_dir() and not entry.is_symlink()]
        return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)

    def newest(self, log: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest step that verifies; None if no save was ever finished. Steps that do not verify are logged.

        Raises:
            RestoreError: finished steps exist but none verifies, or the newest has a newer format.
        """
        found = self._newest_verified(log) if self._group.is_first else None
        found, *_ = self._group.share("newest checkpoint", found)  # each file is read once
        if found is None:
            return None
        step, seconds, now = found
        return Checkpoint(step, self._state(step), seconds, now)

    def _newest_verified(self, log: Callable[[str], None]) -> tuple[int, float, str | None] | None:
        """Return the newest step that verifies, the seconds that the run had taken, and the time it was begun at."""
        self._put_back()
        faults = []
        for step in reversed(self.steps()):
            folder = self.folder / str(step)
            try:
                manifest = verify_manifest(folder)
                if manifest["checkpoint_format"] > FORMAT_VERSION:
                    raise NewerFormatError(
                        f"{folder} is of checkpoint_format {manifest['checkpoint_format']}, newer than this program "
                        f"knows ({FORMAT_VERSION}): update jaxft"
                    )
                return step, manifest.get("seconds", 0.0), manifest.get("now")
            except NewerFormatError as error:  # it is not damaged, so no older step may replace it
                raise RestoreError(str(error)) from error
            except ManifestError as error:
                is_unfinished = not (folder / MANIFEST).exists()
                log(f"checkpoint {step} is {'unfinished' if is_unfinished else 'damaged'} and is passed over: {error}")
                faults += [] if is_unfinished else [str(error)]
        if faults:
            listed = "\n  ".join(faults)
            raise RestoreError(
                f"no checkpoint in {self.folder} verifies: put one back from a backup, or start anew with --overwrite\n"
                f"  {listed}"
            )
        return None

    def _put_back(self) -> None:
        """Rename steps back that were to be saved again, but were not."""
        for entry in self.folder.glob(f"*{REPLACED}"):
            place = entry.with_suffix("")
            if _is_ours(entry) and not (place / MANIFEST).exists():
                shutil.rmtree(place, ignore_errors=True)
                entry.rename(place)

    def set_aside(self, after: int) -> None:
        """Rename all steps after `after`; the run saves them again, and each renamed step is removed then."""
        self._together(lambda: self._rename_aside(after) if self._group.is_first else None)
        self._manager.reload()

    def _rename_aside(self, after: int) -> None:
        for step in self.steps():
            if step > after:
                aside = self.folder / f"{step}{DAMAGED}"
                if aside.is_symlink() or aside.is_file():
                    raise RestoreError(f"'{aside}' is in the way of checkpoint {step}: move it elsewhere")
                shutil.rmtree(aside, ignore_errors=True)
                (self.folder / str(step)).rename(aside)

    def _state(self, step: int) -> dict[str, Any]:
        args = ocp.args.Composite(state=ocp.args.JsonRestore())
        return self._manager.restore(step, args=args).state

    def arrays(self, checkpoint: Checkpoint, like: Any) -> Any:
        """Return the arrays of a step, placed like those of `like`, which are deleted first as both may not fit.

        Raises:
            RestoreError: names, shapes or dtypes differ.
        """
        if differences := _differences(checkpoint.state["layout"], layout(like)):
            listed = "\n  ".join(differences[:20])
            raise RestoreError(
                f"checkpoint {checkpoint.step} does not fit this run ({len(differences)} differences): continue it "
                f"with the configuration it was made with\n  {listed}"
            )
        if not jax.tree.leaves(like):
            return like
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        jax.tree.map(lambda x: x.delete(), like)
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.Composite(arrays=ocp.args.PyTreeRestore(target, restore_args=restore_args))
        return self._manager.restore(checkpoint.step, args=args).arrays

    def save(
        self,
        step: int,
        state: dict[str, Any],
        arrays: Any,
        *,
        score: float | None = None,
        seconds: float = 0.0,
        now: str | None = None,
        is_again: bool = False,
    ) -> None:
        """Start to write a step in the background, and return when the arrays may change again.

        Args:
            step: number of the step, larger than all before; the step of the last save is not written again.
            state: plain values for JSON.
            arrays: a tree of arrays; it may be empty.
            score: score of the step; the one of the best score is kept.
            seconds: time that the run has taken. The manifest has it, as state and arrays are equal in equal runs.
            now: time at which the run was begun, likewise.
            is_again: True to replace the step that the run was restored from.

        Raises:
            CheckpointError, DiskFull, HostsError: the previous save failed.
        """
        self.wait()
        if step == self._begun:  # left by a caller that was cancelled while it waited for this save
            return
        place = self.folder / str(step)
        if is_again:
            self._together(lambda: _replace(place) if self._group.is_first else None)
            self._manager.reload()
        if os.path.lexists(place):  # orbax would remove a foreign file
            raise CheckpointError(f"'{place}' is no checkpoint of this run and in the way of one: move it elsewhere")
        args = ocp.args
        items = {"state": args.JsonSave({**state, "layout": layout(arrays)})}
        if jax.tree.leaves(arrays):
            items["arrays"] = args.PyTreeSave(arrays)
        with self._failing(step):
            # Forced: orbax would skip a step below a foreign directory with a larger number.
            self._manager.save(step, args=args.Composite(**items), force=True)
        self._begun = step
        about = {"checkpoint_format": FORMAT_VERSION, "step": step, "score": score, "seconds": seconds, "now": now}
        self._finishing = threading.Thread(target=self._finish, args=(step, about), name=f"checkpoint {step}")
        self._finishing.start()

    def _finish(self, step: int, about: dict[str, Any]) -> None:
        folder = self.folder / str(step)
        try:
            with self._failing(step):
                self._together(self._wait_for_arrays)
                self._together(lambda: self._complete(folder, about) if self._group.is_first else None)
                self.saved_step = step
                if self._group.is_first:
                    self._drop_old(step)
        except BaseException as error:  # raised by `wait`
            self._error = error

    def _wait_for_arrays(self) -> None:
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def _complete(self, folder: Path, about: dict[str, Any]) -> None:
        write_manifest(folder, about)
        sync_folder(self.folder)
        verify_manifest(folder)

    @contextlib.contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        """Raise errors of a save as `DiskFull`, `HostsError` or `CheckpointError`, and clean up for the next save."""
        try:
            with disk_errors(self.folder / str(step)):
                yield
        except Exception as error:
            self._give_up(step)
            if isinstance(error, DiskFull | CheckpointError | HostsError):
                raise
            raise CheckpointError(f"a checkpoint could not be written to {self.folder}: {error}") from error

    def _give_up(self, step: int) -> None:
        """Remove the files of an unfinished step."""
        with contextlib.suppress(Exception):  # a manager raises the error of a failed save again from every method
            self._manager.close()
        for entry in self.folder.glob(f"{step}*") if self._group.is_first else ():
            is_unfinished = entry.name == str(step) and not (entry / MANIFEST).exists()
            if entry.is_dir() and (is_unfinished or entry.name.startswith(f"{step}.orbax-checkpoint-tmp")):
                shutil.rmtree(entry, ignore_errors=True)
        if self._group.is_alone:  # several processes end with the error
            self._manager = self._new_manager()

    def _drop_old(self, newest: int) -> None:
        """Remove finished steps but the newest `max_to_keep`, the best, and those without a readable manifest."""
        scores = {}
        for step in reversed(self.steps()):
            with contextlib.suppress(ManifestError):
                scores[step] = read_manifest(self.folder / str(step))["score"]
        kept = {newest, *list(scores)[: self._max_to_keep]}
        scored = {step: score for step, score in scores.items() if score is not None}
        if scored:
            kept.add(max(scored, key=lambda step: (scored[step], step)))
        for step in scores.keys() - kept:
            (self.folder / str(step)).rename(self.folder / f"{step}{OLD}")  # one step: no half checkpoint
        for entry in self.folder.iterdir():
            if _is_ours(entry) and (entry.suffix == OLD or int(entry.stem) <= newest):
                shutil.rmtree(entry)

    def wait(self) -> None:
        """Wait for the background save.

        Raises:
            CheckpointError, DiskFull, HostsError: the save failed.
        """
        if self._finishing is not None:
            self._finishing.join()
            self._finishing = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait for the background save, whose errors only `wait` raises, and close orbax's manager."""
        if self._finishing is not None:
            self._finishing.join()
        with contextlib.nullcontext() if self._group.is_alone else contextlib.suppress(Exception):
            self._manager.close()


def _is_ours(entry: Path) -> bool:
    """Return True if an entry of the folder is a step directory that was renamed."""
    is_folder = entry.is_dir() and not entry.is_symlink()
    return entry.stem.isdecimal() and entry.suffix in (DAMAGED, OLD, REPLACED) and is_folder


def _replace(place: Path) -> None:
    aside = place.with_suffix(REPLACED)
    shutil.rmtree(aside, ignore_errors=True)
    place.rename(aside)


@functools.cache
def _hush_orbax() -> None:
    """Keep from the terminal the tracebacks that orbax shows beside the error that it raises.

    It logs one per thread, some of them later. With the first write that fails it closes its event loop, before the
    others have ended: each of them then finds the loop closed, or fails with nobody to wait for it.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_no_orbax_error)
    show = sys.unraisablehook
    sys.unraisablehook = lambda error: None if _is_of_a_late_write(error) else show(error)


def _is_no_orbax_error(record: logging.LogRecord) -> bool:
    _, error, traceback = record.exc_info or (None, None, None)
    paths = record.pathname if traceback is None else record.pathname + traceback.tb_frame.f_code.co_filename
    # The error of a write that nobody waits for has no traceback; it names the folder.
    return record.levelno < logging.ERROR or ("orbax" not in paths and ".orbax-checkpoint-tmp" not in str(error))


def _is_of_a_late_write(error: "sys.UnraisableHookArgs") -> bool:
    """Return True if a thread without Python code of its own has found an event loop closed."""
    if error.exc_traceback is None or not isinstance(error.exc_value, RuntimeError):
        return False
    frame = error.exc_traceback.tb_frame
    return frame.f_code is asyncio.BaseEventLoop.call_soon_threadsafe.__code__ and frame.f_back is None


def layout(arrays: Any) -> dict[str, str]:
    """Return dtype and shape of every array of a tree, by path.

    >>> import numpy as np
    >>> layout({"params": {"head": np.zeros((2, 3), np.float32)}, "ref": None})
    {'params/head': 'float32[2,3]'}
    """
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in leaves
    }


def _differences(saved: dict[str, str], wanted: dict[str, str]) -> list[str]:
    names = [*saved, *(name for name in wanted if name not in saved)]
    return [
        f"{name}: {saved.get(name, 'nothing')} in the checkpoint, {wanted.get(name, 'nothing')} here"
        for name in names
        if saved.get(name) != wanted.get(name)
    ]
