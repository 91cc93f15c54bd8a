"""The runs of a sweep with their states, kept in `sweep.json` in the folder of the sweep.

The file is replaced whenever a run begins or ends. So the sweep may be killed at any moment: the same command goes on.
"""

import contextlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from jaxft.errors import RunDirectoryError
from jaxft.files import MANIFEST, disk_errors, json_bytes, replace_file
from jaxft.redaction import MASK
from jaxft.report.sweep_grid import Overrides
from jaxft.runs.environment import is_secret_name, masked_command
from jaxft.runs.files import holds_run

STATE_FILE = "sweep.json"
LOCK_FILE = "sweep.lock"
LOG_FOLDER = "logs"
FORMAT_VERSION = 1

State = Literal["waiting", "running", "done", "failed", "interrupted"]


@dataclass
class SweepRun:
    """A run of a sweep.

    Attributes:
        name: what differs from the other runs, as in `loss.name=grpo,seed=0`.
        directory: its run directory.
        log: file of its output.
        overrides: its settings beside those of all runs.
        command: its command line, without `--resume` and `--overwrite`.
        shown_program: the first words of that command as a person types them, and how many words they replace.
        num_epochs: epochs that it trains for.
        state: how it is; `interrupted` runs were stopped or died with the sweep.
        exit_code: that of its last process; None before.
        seconds: those of all its processes.
        num_cpus: CPUs that its last process computed with; None before, and with a GPU.
        started_by: the command line of its last process, for a person; empty before.
        begins_anew: True to replace what an earlier start has left; False to continue from its checkpoint.
    """

    name: str
    directory: Path
    log: Path
    overrides: Overrides
    command: tuple[str, ...]
    shown_program: tuple[tuple[str, ...], int]
    num_epochs: int = 0
    state: State = "waiting"
    exit_code: int | None = None
    seconds: float = 0.0
    num_cpus: int | None = None
    started_by: str = ""
    begins_anew: bool = False

    def take_up(self, entry: dict[str, Any]) -> None:
        """Take the state of an entry of `sweep.json`; a run that was running has died with its sweep."""
        self.state = "interrupted" if entry["state"] == "running" else entry["state"]
        self.exit_code, self.seconds, self.num_cpus = entry["exit_code"], entry["seconds"], entry["num_cpus"]
        self.started_by = entry["command"]

    def arguments(self) -> list[str]:
        """Return the command line of its next process: it continues from a checkpoint if there is one."""
        can_resume = not self.begins_anew and any(self.directory.glob(f"checkpoints/*/{MANIFEST}"))
        flag = ["--resume"] if can_resume else ["--overwrite"] if holds_run(self.directory) else []
        return [*self.command, *flag]

    def shown(self) -> str:
        """Return that command line for a shell, secrets masked."""
        program, replaced = self.shown_program
        return shlex.join(masked_command([*program, *self.arguments()[replaced:]]))


@dataclass
class Sweep:
    """A sweep in its folder.

    Attributes:
        folder: the folder with `sweep.json`, the logs and the comparison.
        config_file: name of the configuration file.
        program: the program of its runs, as a person types it.
        command: the command line that goes on with the sweep.
        runs: the runs of this command.
        others: entries of `sweep.json` of runs that an earlier command made, which stay there.
    """

    folder: Path
    config_file: str
    program: str
    command: str
    runs: list[SweepRun]
    others: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        """Replace `sweep.json`.

        Raises:
            DiskFull: there is no room for it; the old one stays.
        """
        runs = {run.name: _entry(run) for run in self.runs}
        content = {
            "format_version": FORMAT_VERSION,
            "config_file": self.config_file,
            "program": self.program,
            "command": self.command,
            "runs": {**self.others, **runs},
        }
        replace_file(self.folder / STATE_FILE, json_bytes(content, indent=2))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and lock it for this process.

        Raises:
            RunDirectoryError: another sweep has locked it, or it cannot be written.
        """
        lock = FileLock(self.folder / LOCK_FILE, timeout=0)
        try:
            with disk_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                lock.acquire()
        except Timeout:
            raise RunDirectoryError(
                f"the sweep in '{self.folder}' is running in another process: wait for it, or give another --sweep-dir"
            ) from None
        except OSError as error:
            raise RunDirectoryError(
                f"the folder '{self.folder}' cannot be written ({error}): give another --sweep-dir"
            ) from error
        try:
            yield
        finally:
            lock.release()


def _entry(run: SweepRun) -> dict[str, Any]:
    return {
        "directory": str(run.directory),
        "overrides": {path: MASK if is_secret_name(path) else text for path, text in run.overrides},
        "command": run.started_by or run.shown(),
        "log": str(run.log),
        "state": run.state,
        "exit_code": run.exit_code,
        "seconds": round(run.seconds, 1),
        "num_cpus": run.num_cpus,
    }


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of `sweep.json` in a folder; empty if there is none.

    Raises:
        RunDirectoryError: the file cannot be read, or no sweep of this version wrote it.
    """
    file = folder / STATE_FILE
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"'{file}' cannot be read ({error}): put it back, or give another --sweep-dir"
        ) from error
    is_ours = isinstance(content, dict) and isinstance(content.get("runs"), dict)
    if not is_ours or content.get("format_version") != FORMAT_VERSION:
        raise RunDirectoryError(
            f"'{file}' is no record of a sweep that this version of jaxft reads: give another --sweep-dir"
        )
    return content
