"""The logger of Weights & Biases: one W&B run per run directory, which a resumed run goes on with.

Epochs are an axis of their own (`epoch`), not the step of W&B, which can only grow: a run that is resumed from an
earlier checkpoint repeats epochs. The file `wandb/jaxft.json` of the run directory holds the id of the W&B run, and the
last epoch that it was given of each metric. Rows that it has already are not sent again.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from jaxft.errors import ComponentError
from jaxft.runs.directory import RunDirectory
from jaxft.runs.loggers import CALL_SECONDS, LoggedEpisode, LoggedRun, RunLogger, Status

STATE_FILE = "wandb/jaxft.json"

SAMPLES_PER_EPOCH = 32
"""Largest number of rows in the table of an epoch."""


def import_wandb() -> ModuleType:
    """Return the package; if runs are sent, check that there is an API key, without asking anybody for it.

    Raises:
        ComponentError: the package is not installed, or there is no key.
    """
    try:
        import wandb  # here, as only an extra has it
    except ImportError as error:
        raise ComponentError(
            f'finetuning.loggers: the logger wandb needs a package ({error}): pip install "jaxft[wandb]"'
        ) from error

    # With WANDB_MODE=offline the package looks for no key.
    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
        raise ComponentError(
            "finetuning.loggers: the logger wandb has no API key: run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline"
        )
    return wandb


class WandbLogger(RunLogger):
    """Gives a W&B run the metrics, samples and artifacts of a run."""

    def __init__(
        self,
        wandb: ModuleType,
        directory: RunDirectory,
        show: Callable[[str], None],
        options: Mapping[str, Any],
    ) -> None:
        """Make the logger; nothing is sent before `begin`.

        Args:
            wandb: the package.
            directory: the run directory.
            show: shows a message.
            options: arguments of `wandb.init`: project and group.
        """
        self._wandb, self._directory, self._show = wandb, directory, show
        self._options = dict(options)
        self._run: Any = None
        self._run_id = ""
        self._logged: dict[str, int] = {}  # the last epoch by metric

    def begin(self, run: LoggedRun) -> None:
        """Begin a W&B run, or go on with that of the run directory."""
        self._run_id, self._logged = secrets.token_hex(4), {}
        if run.is_resumed and self._directory.holds(STATE_FILE):
            state = self._directory.read_json(STATE_FILE)
            self._run_id, self._logged = state["id"], state["logged"]
        self._run = self._wandb.init(
            **self._options,
            name=run.name,
            id=self._run_id,
            resume="allow",
            dir=str(run.directory),
            config={**run.config, "environment": run.environment},
            reinit="create_new",  # beside a W&B run of the agent's own
            settings=self._wandb.Settings(
                console="off",
                silent=True,
                x_disable_meta=True,  # as it has the command line, which may hold secrets
                init_timeout=0.9 * CALL_SECONDS,
                finish_timeout=0.9 * CALL_SECONDS,
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric("*", step_metric="epoch")
        self._save()
        last = max((epoch for name, epoch in self._logged.items() if not name.startswith("validation/")), default=-1)
        again = f"; it keeps what it has of epochs {run.first_epoch} to {last}" if last >= run.first_epoch else ""
        self._show(f"wandb: run {self._run_id}, {self._place()}{again}")

    def metrics(self, epoch: int, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """Send the metrics of an epoch that the W&B run does not have yet."""
        self._log(epoch, {**metrics, **timings})

    def samples(self, episodes: Sequence[LoggedEpisode]) -> None:
        """Send the first episodes as a table."""
        chosen = episodes[:SAMPLES_PER_EPOCH]
        if chosen:
            table = self._wandb.Table(columns=list(LoggedEpisode._fields), data=[list(each) for each in chosen])
            self._log(chosen[0].epoch, {"samples": table})

    def artifact(self, name: Literal["model", "reward_plot", "report"], path: Path) -> None:
        """Send plot or report as an artifact; the model stays in the run directory."""
        if name == "model":
            return
        artifact = self._wandb.Artifact(f"{name}-{self._run_id}", type=name)
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def end(self, status: Status, result: Mapping[str, Any]) -> None:
        """Put status and result into the summary, and wait until everything is sent or written."""
        self._run.summary.update({"status": status, "result": dict(result)})
        self._run.finish(exit_code=0 if status == "completed" else 1)

    def _log(self, epoch: int, values: Mapping[str, Any]) -> None:
        new = {name: value for name, value in values.items() if epoch > self._logged.get(name, -1)}
        if new:
            self._run.log({"epoch": epoch, **new})
            self._logged |= dict.fromkeys(new, epoch)
            self._save()

    def _save(self) -> None:
        self._directory.write_json(STATE_FILE, {"id": self._run_id, "logged": self._logged})

    def _place(self) -> str:
        if self._run.offline:
            return f"offline: send it with wandb sync {self._directory.path / 'wandb' / 'offline-run-*'}"
        return str(self._run.url)
