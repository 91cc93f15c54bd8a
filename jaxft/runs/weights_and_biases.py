"""The logger of Weights & Biases: one W&B run per run directory, which a resumed run goes on with.

Epochs are an axis of their own (`epoch`), not the step of W&B, which can only grow: a run that is resumed from an
earlier checkpoint repeats epochs. The file `wandb/jaxft.json` of the run directory holds the id of the W&B run, and the
last epoch that it was given of each metric. Rows that it has already are not sent again.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import wandb

from jaxft.errors import ComponentError
from jaxft.runs.directory import RunDirectory
from jaxft.runs.loggers import CALL_SECONDS, LoggedEpisode, LoggedRun, RunLogger, Status

STATE_FILE = "wandb/jaxft.json"
SAMPLES_PER_EPOCH = 32
"""Largest number of episodes in the table of an epoch."""


async def wandb_logger(config: Any, builder: Any) -> AsyncIterator[RunLogger]:
    """Yield the logger of Weights & Biases.

    Raises:
        ComponentError: a run that is sent has no API key. Nobody is asked for it.
    """

    def lacks_key() -> bool:
        # With WANDB_MODE=offline the package looks for no key.
        return wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False)

    if await asyncio.to_thread(lacks_key):  # in a thread, as the package's own loop must not run in this one
        raise ComponentError(
            "finetuning.loggers: the logger wandb has no API key: run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline"
        )
    yield WandbLogger(config, builder)


class WandbLogger(RunLogger):
    """Gives a W&B run the metrics, samples and artifacts of a run."""

    def __init__(self, config: Any, builder: Any) -> None:
        """Make the logger; nothing is sent before `begin`."""
        self._directory: RunDirectory = builder.directory
        self._show = builder.console.message
        self._project = config.project
        self._run: Any = None
        self._logged: dict[str, int] = {}  # the last epoch by metric

    def begin(self, run: LoggedRun) -> None:
        """Begin a W&B run, or go on with that of the run directory."""
        run_id, self._logged = secrets.token_hex(4), {}
        if run.is_resumed and self._directory.holds(STATE_FILE):
            state = self._directory.read_json(STATE_FILE)
            run_id, self._logged = state["id"], state["logged"]
        self._run = wandb.init(
            project=self._project,
            name=run.name,
            id=run_id,
            resume="allow",
            dir=str(run.directory),
            config={**run.config, "environment": run.environment},
            reinit="create_new",  # beside a W&B run of the agent's own
            settings=wandb.Settings(
                console="off",
                silent=True,
                x_disable_meta=True,  # as it has the command line, which may hold secrets
                init_timeout=0.9 * CALL_SECONDS,  # the package gives up a little earlier than its caller
                finish_timeout=0.9 * CALL_SECONDS,
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric("*", step_metric="epoch")
        self._save()
        last = max((epoch for name, epoch in self._logged.items() if not name.startswith("validation/")), default=-1)
        again = f"; it keeps what it has of epochs {run.first_epoch} to {last}" if last >= run.first_epoch else ""
        synced = f"offline: send it with wandb sync {self._directory.path / 'wandb' / 'offline-run-*'}"
        self._show(f"wandb: run {run_id}, {synced if self._run.offline else self._run.url}{again}")

    def metrics(self, epoch: int, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """Send the metrics of an epoch that the W&B run does not have yet."""
        new = {name: value for name, value in {**metrics, **timings}.items() if epoch > self._logged.get(name, -1)}
        if new:
            self._run.log({"epoch": epoch, **new})
            self._logged |= dict.fromkeys(new, epoch)
            self._save()

    def samples(self, episodes: Sequence[LoggedEpisode]) -> None:
        """Send the first episodes as a table."""
        rows = [list(each) for each in episodes[:SAMPLES_PER_EPOCH]]
        self.metrics(episodes[0].epoch, {"samples": wandb.Table(columns=list(LoggedEpisode._fields), data=rows)}, {})

    def artifact(self, name: Literal["model", "reward_plot", "report"], path: Path) -> None:
        """Send plot and report as artifacts."""
        if name != "model":
            artifact = wandb.Artifact(f"{name}-{self._run.id}", type=name)
            artifact.add_file(str(path))
            self._run.log_artifact(artifact)

    def end(self, status: Status, result: Mapping[str, Any]) -> None:
        """Put status and result into the summary, and wait until everything is sent or written."""
        self._run.summary.update({"status": status, "result": dict(result)})
        self._run.finish(exit_code=0 if status == "completed" else 1)

    def _save(self) -> None:
        self._directory.write_json(STATE_FILE, {"id": self._run.id, "logged": self._logged})
