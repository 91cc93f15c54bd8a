"""The figures of a run, one row per epoch: what is reproducible apart from what the clock says."""

from collections.abc import Mapping

from jaxft.runs.directory import RunDirectory
from jaxft.runs.tensorboard import EventFile

METRICS_FILE = "training_metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"


class MetricsLog:
    """Writes each epoch to `training_metrics.jsonl`, `timings.jsonl` and TensorBoard, all with the same number.

    Epochs count from 0. The metrics file of two equal runs is equal to the byte; everything that a clock measured goes
    to the timings.
    """

    def __init__(self, directory: RunDirectory, *, first_epoch: int = 0) -> None:
        """A run that is continued logs from `first_epoch` on; TensorBoard hides what earlier writers said of it."""
        self._directory = directory
        self._tensorboard = EventFile(directory, first_step=first_epoch)

    def log(
        self,
        epoch: int,
        metrics: Mapping[str, float | int | str],
        timings: Mapping[str, float | int | str],
    ) -> None:
        """Writes one epoch.

        Args:
            epoch: the first key of both rows and the step axis of TensorBoard.
            metrics: figures that the same run would give again. Slashes in names group them in TensorBoard. NaN and
                infinities are written as `RunDirectory.append_jsonl` says.
            timings: seconds, rates and other wall-clock figures.

        Raises:
            ValueError: a name occurs twice, or is `epoch`; nothing was written.
            DiskFull: there is no room for a row.
        """
        doubled = sorted((metrics.keys() & timings.keys()) | ({"epoch"} & (metrics.keys() | timings.keys())))
        if doubled:
            raise ValueError(f"epoch {epoch} has more than one figure called {', '.join(doubled)}: rename all but one")
        self._directory.append_jsonl(METRICS_FILE, {"epoch": epoch, **metrics})
        self._directory.settle()
        self._directory.append_jsonl(TIMINGS_FILE, {"epoch": epoch, **timings})
        self._tensorboard.add(epoch, {**metrics, **timings})

    def close(self) -> None:
        """Ends TensorBoard's writer; the run directory stays open."""
        self._tensorboard.close()
