"""Checkpoints of one run, each with a manifest: what does not verify does not count.

    checkpoints/12/arrays/...       written by orbax, in the background
                   state/...        JSON
                   manifest.json    sha256 and size of every file, written last

A step is there when its manifest is and verifies. Orbax alone would call an empty directory the newest step and restore
flipped bits without a word. The steps before go only when the new one has been read back and is good.
"""

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jaxft.files import (
    MANIFEST,
    DiskFull,
    ManifestError,
    NewerFormatError,
    disk_errors,
    read_manifest,
    sync_folder,
    verify_manifest,
    write_manifest,
)
from jaxft.runs.directory import CheckpointError, RestoreError, RunDirectory

FOLDER = "checkpoints"
FORMAT_VERSION = 1
"""Of the state and the arrays; a newer program restores every older one."""
DAMAGED, OLD = ".damaged", ".old"
"""What step directories end in that were set aside, or are being removed."""


class Checkpoint(NamedTuple):
    """A step that verifies, its JSON, and how many seconds the run had taken by then."""

    step: int
    state: dict[str, Any]
    seconds: float = 0.0


class Checkpoints:
    """Saves and restores steps of one run; one save at a time runs in the background.

    `save` and `arrays` are called where nothing changes the arrays meanwhile, the rest from any thread.

    Attributes:
        saved_step: the newest step that this object has finished; None before the first.
    """

    def __init__(self, directory: RunDirectory, *, max_to_keep: int = 2, keep_best: bool = True) -> None:
        """`max_to_keep` are the newest steps kept; with `keep_best` that of the best score stays, too."""
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._directory = directory
        self.folder = directory.file(f"{FOLDER}/step").parent
        self._max_to_keep, self._keep_best = max_to_keep, keep_best
        self._finishing: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begun: int | None = None
        self.saved_step: int | None = None
        # orbax logs what it raises as well, with a traceback per thread, some of them later than it raises.
        logging.getLogger("absl").addFilter(_is_no_orbax_error)
        self._manager = self._new_manager()

    def _new_manager(self) -> Any:
        options = self._ocp.CheckpointManagerOptions(max_to_keep=None, enable_async_checkpointing=True)
        return self._ocp.CheckpointManager(self.folder, options=options)

    def steps(self) -> list[int]:
        """The numbers of all step directories, good or not, ascending."""
        names = [entry.name for entry in self.folder.iterdir() if entry.is_dir() and not entry.is_symlink()]
        return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)

    def newest(self, log: Callable[[str], None]) -> Checkpoint | None:
        """The newest step that verifies; None when no save was ever finished. What is passed over is said.

        Raises:
            RestoreError: steps were finished, and not one of them verifies; or the newest is of a newer format.
        """
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
                return Checkpoint(step, self._state(step), manifest.get("seconds", 0.0))
            except NewerFormatError as error:  # it is good: nothing may take its place
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

    def set_aside(self, after: int) -> None:
        """Renames the steps after one, which a run that goes on from it makes again; they go when it has."""
        for step in self.steps():
            if step > after:
                aside = self.folder / f"{step}{DAMAGED}"
                if aside.is_symlink() or aside.is_file():
                    raise RestoreError(f"'{aside}' is in the way of checkpoint {step}: move it elsewhere")
                shutil.rmtree(aside, ignore_errors=True)
                (self.folder / str(step)).rename(aside)
        self._manager.reload()

    def _state(self, step: int) -> dict[str, Any]:
        args = self._ocp.args.Composite(state=self._ocp.args.JsonRestore())
        return self._manager.restore(step, args=args).state

    def arrays(self, checkpoint: Checkpoint, like: Any) -> Any:
        """The arrays of a step, placed like those of `like`, a tree of arrays that are given up: both would not fit.

        Raises:
            RestoreError: names, shapes or dtypes are not the same.
        """
        saved, old = checkpoint.state["layout"], _with_old_names(like)
        differences = _differences(saved, layout(like))
        has_old_names = bool(differences) and not _differences(saved, layout(old))
        if has_old_names:
            like = old
        elif differences:
            listed = "\n  ".join(differences[:20])
            raise RestoreError(
                f"checkpoint {checkpoint.step} does not fit this run ({len(differences)} differences): continue it "
                f"with the configuration it was made with\n  {listed}"
            )
        if not jax.tree.leaves(like):
            return like
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        jax.tree.map(lambda x: x.delete(), like)
        args = self._ocp.args.Composite(arrays=self._ocp.args.StandardRestore(target))
        restored = self._manager.restore(checkpoint.step, args=args).arrays
        return _with_new_names(restored) if has_old_names else restored

    def save(
        self, step: int, state: dict[str, Any], arrays: Any, *, score: float | None = None, seconds: float = 0.0
    ) -> None:
        """Begins to write a step and returns when the arrays may change again.

        Args:
            step: larger than all before; that of the save before is left as it is.
            state: for JSON.
            arrays: a tree of arrays; none is fine.
            score: for `keep_best`.
            seconds: that the run has taken. They stand in the manifest: state and arrays are equal in equal runs.

        Raises:
            CheckpointError, DiskFull: the save before did not come to its end.
        """
        self.wait()
        if step == self._begun:  # by a caller that was cancelled while it waited for this
            return
        place = self.folder / str(step)
        if os.path.lexists(place):  # orbax would remove a file that somebody put there
            raise CheckpointError(f"'{place}' is no checkpoint of this run and in the way of one: move it elsewhere")
        args = self._ocp.args
        items = {"state": args.JsonSave({**state, "layout": layout(arrays)})}
        if jax.tree.leaves(arrays):
            items["arrays"] = args.StandardSave(arrays)
        with self._failing(step):
            # Forced: it would leave out a step below a name such as 20 that somebody put there.
            self._manager.save(step, args=args.Composite(**items), force=True)
        self._begun = step
        self._finishing = threading.Thread(target=self._finish, args=(step, score, seconds), name=f"checkpoint {step}")
        self._finishing.start()

    def _finish(self, step: int, score: float | None, seconds: float) -> None:
        folder = self.folder / str(step)
        about = {"checkpoint_format": FORMAT_VERSION, "step": step, "score": score, "seconds": seconds}
        try:
            with self._failing(step):
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
                write_manifest(folder, about)
                sync_folder(self.folder)
                verify_manifest(folder)
                self.saved_step = step
                self._directory.commit()
                self._drop_old(step)
        except BaseException as error:  # it belongs to whoever waits
            self._error = error

    @contextlib.contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        """Raises every error of a save as `DiskFull` or `CheckpointError`, and makes room for the next save."""
        try:
            with disk_errors(self.folder / str(step)):
                yield
        except Exception as error:
            self._give_up(step)
            if isinstance(error, DiskFull | CheckpointError):
                raise
            raise CheckpointError(f"a checkpoint could not be written to {self.folder}: {error}") from error

    def _give_up(self, step: int) -> None:
        """Removes what was written of a step that has no manifest."""
        with contextlib.suppress(Exception):  # a manager raises the failure of a save again, whatever it is asked
            self._manager.close()
        for entry in self.folder.glob(f"{step}*"):
            is_unfinished = entry.name == str(step) and not (entry / MANIFEST).exists()
            if entry.is_dir() and (is_unfinished or entry.name.startswith(f"{step}.orbax-checkpoint-tmp")):
                shutil.rmtree(entry, ignore_errors=True)
        self._manager = self._new_manager()

    def _drop_old(self, newest: int) -> None:
        """Removes the finished steps that need not be kept; what cannot be read stays."""
        scores = {}
        for step in reversed(self.steps()):
            with contextlib.suppress(ManifestError):
                scores[step] = read_manifest(self.folder / str(step))["score"]
        kept = {newest, *list(scores)[: self._max_to_keep]}
        scored = {step: score for step, score in scores.items() if score is not None}
        if self._keep_best and scored:
            kept.add(max(scored, key=lambda step: (scored[step], step)))
        for step in scores.keys() - kept:
            (self.folder / str(step)).rename(self.folder / f"{step}{OLD}")  # at once: half a step is none
        for entry in self.folder.iterdir():
            name, dot, _ = entry.name.partition(".")
            is_folder = entry.is_dir() and not entry.is_symlink()
            is_ours = dot and name.isdecimal() and entry.suffix in (OLD, DAMAGED) and is_folder
            if is_ours and (entry.suffix == OLD or int(name) <= newest):
                shutil.rmtree(entry)

    def wait(self) -> None:
        """Waits for the save in the background.

        Raises:
            CheckpointError, DiskFull: it did not come to its end.
        """
        if self._finishing is not None:
            self._finishing.join()
            self._finishing = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits for the save in the background and lets orbax go; errors of that save are raised by `wait` alone."""
        if self._finishing is not None:
            self._finishing.join()
        self._manager.close()


def _is_no_orbax_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def layout(arrays: Any) -> dict[str, str]:
    """Name, dtype and shape of every array of a tree.

    >>> import numpy as np
    >>> layout({"params": {"head": np.zeros((2, 3), np.float32)}, "ref": None})
    {'params/head': 'float32[2,3]'}
    """
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in leaves
    }


def _with_old_names(tree: Any) -> Any:
    """The tree with the `embed`, `final_norm` and `lm_head` of decoders under `ends`, as in the first checkpoints."""

    def is_new(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() >= {"embed", "final_norm", "layers"}

    def rename(node: Any) -> Any:
        if not is_new(node):
            return node
        head = {"lm_head": node["lm_head"]} if "lm_head" in node else {}
        return {"ends": {"embedding": node["embed"], "norm": node["final_norm"], **head}, "layers": node["layers"]}

    return jax.tree.map(rename, tree, is_leaf=is_new)


def _with_new_names(tree: Any) -> Any:
    """The inverse of `_with_old_names`."""

    def is_old(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == {"ends", "layers"}

    def rename(node: Any) -> Any:
        if not is_old(node):
            return node
        ends = dict(node["ends"])
        return {"embed": ends.pop("embedding"), "final_norm": ends.pop("norm"), "layers": node["layers"], **ends}

    return jax.tree.map(rename, tree, is_leaf=is_old)


def _differences(saved: dict[str, str], wanted: dict[str, str]) -> list[str]:
    names = [*saved, *(name for name in wanted if name not in saved)]
    return [
        f"{name}: {saved.get(name, 'nothing')} in the checkpoint, {wanted.get(name, 'nothing')} here"
        for name in names
        if saved.get(name) != wanted.get(name)
    ]
