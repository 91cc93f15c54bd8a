"""A training server inside the process: it fits a table of what answers to questions are worth.

It stands for a server elsewhere, so it knows nothing of jaxft: it has its own words, its own queue and its own key.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Row(NamedTuple):
    """One thing to learn."""

    question: str
    answer: str
    reward: float


@dataclass
class Job:
    """A job; `state` is `queued`, `running`, `done` or `error`, `progress` a share."""

    state: str = "queued"
    progress: float = 0.0
    error: str | None = None
    loss: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryServer:
    """Runs jobs one after the other.

    Attributes:
        table: the worth of each answer, by question.
        jobs: all of them, by name.
    """

    def __init__(self, api_key: str, *, learning_rate: float, batch_size: int) -> None:
        self.table: dict[str, dict[str, float]] = {}
        self.jobs: dict[str, Job] = {}
        self._is_open = bool(api_key)
        self._learning_rate = learning_rate
        self._batch_size = batch_size
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    def ping(self) -> bool:
        """Whether it takes jobs: it has not been closed, and the key is one (any text is)."""
        return self._is_open

    def create_job(self, name: str, rows: Sequence[Row]) -> None:
        """Queues a job."""
        if not self._is_open:
            raise ConnectionError("the server takes no jobs: it is closed, or the key is empty")
        self.jobs[name] = Job()
        self._tasks.append(asyncio.create_task(self._run(self.jobs[name], rows)))

    async def close(self) -> None:
        """Cancels what still runs."""
        self._is_open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, job: Job, rows: Sequence[Row]) -> None:
        try:
            async with self._turn:
                job.state = "running"
                await self._fit(job, rows)
            job.state = "done"
        except FloatingPointError as error:
            job.state, job.error = "error", str(error)
        finally:
            job.ended.set()

    async def _fit(self, job: Job, rows: Sequence[Row]) -> None:
        """Moves the worth of every answer towards its reward; the loss is the mean squared error before that."""
        for start in range(0, len(rows), self._batch_size):
            for question, answer, reward in rows[start : start + self._batch_size]:
                worths = self.table.setdefault(question, {})
                error = reward - worths.get(answer, 0.0)
                worths[answer] = worths.get(answer, 0.0) + self._learning_rate * error
                job.loss += error * error / len(rows)
                if not math.isfinite(worths[answer] + job.loss):
                    raise FloatingPointError("the fit diverged: lower the learning rate")
            job.progress = min(1.0, (start + self._batch_size) / len(rows))
            await asyncio.sleep(0)  # whoever asks for the status gets a word in
