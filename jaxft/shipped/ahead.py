"""Collections that are sampled ahead of the jobs that train them, so that neither waits for the other.

`NextCollection` samples one collection beside each job: a fixed schedule, which a resumed run repeats bit for bit.
`GroupStream` samples groups for several jobs and hands them over as they end: slow ones are carried over, and which
group is in which job depends on the clock.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from jaxft.harness.data_models import TrajectoryCollection
from jaxft.shipped.rollout_builder import join_metrics

Collect = Callable[[int], Awaitable[TrajectoryCollection]]


class NextCollection:
    """The collection of the next epoch, sampled while the job of this one trains (`max_staleness: 1`).

    Attributes:
        before: state of builder and counters before the collection that is sampled now; None without one.
    """

    def __init__(self, collect: Collect, state: Callable[[], dict[str, Any]]) -> None:
        """Sample nothing yet.

        Args:
            collect: collects the episodes of an epoch.
            state: returns the state that `collect` starts from, which a resumed run restores.
        """
        self.before: dict[str, Any] | None = None
        self._collect, self._state = collect, state
        self._task: asyncio.Task[TrajectoryCollection] | None = None

    def begin(self, epoch: int) -> None:
        """Start the episodes of an epoch."""
        self.before = self._state()
        self._task = asyncio.create_task(_run(self._collect, epoch), name=f"collection of epoch {epoch}")

    async def take(self, epoch: int) -> TrajectoryCollection:
        """Return the collection of an epoch, which is sampled now if it was not begun, as in a resumed run."""
        if self._task is None:
            return await self._collect(epoch)
        task, self._task, self.before = self._task, None, None
        return await task

    async def wait(self) -> None:
        """Wait for the episodes that were begun; their errors are raised by `take`."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Cancel the episodes that were begun."""
        await _cancelled([] if self._task is None else [self._task])
        self._task = self.before = None


class GroupStream:
    """Groups that are sampled for up to `max_staleness` jobs ahead, and trained in the order in which they end.

    A quarter more groups are open than a job takes. It takes the first `size` that have ended, and waits for those that
    would otherwise grow older than `max_staleness` versions. The others are left to later jobs: none is dropped.

    Attributes:
        has_begun: True once groups were begun.

    >>> async def collect(number):  # group 0 is slow
    ...     await asyncio.sleep(0.05 * (number == 0))
    ...     return TrajectoryCollection(trajectories=[], run_id=str(number))
    >>> async def jobs():
    ...     stream, trained = GroupStream(collect, size=1, total=4, max_staleness=2), []
    ...     for epoch in range(4):
    ...         stream.begin(epoch)
    ...         trained.append((await stream.take(epoch, f"epoch {epoch}"))[0])
    ...     return trained
    >>> asyncio.run(jobs())  # it is carried over twice
    [[1], [2], [0], [3]]
    """

    def __init__(self, collect: Collect, *, size: int, total: int, max_staleness: int) -> None:
        """Begin no group yet.

        Args:
            collect: collects one group, given its number.
            size: groups of a job.
            total: groups of the whole run.
            max_staleness: number of versions that a group may be behind when it is trained.
        """
        self._collect = collect
        self._size, self._total, self._max_staleness = size, total, max_staleness
        self.has_begun = False
        self._next = 0
        self._lost: list[int] = []
        self._begun: dict[int, int] = {}  # version at which a group that is not trained yet was begun
        self._running: dict[int, asyncio.Task[TrajectoryCollection]] = {}
        self._ended: dict[int, TrajectoryCollection] = {}  # in the order in which they ended
        self._taken_at = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Return the numbers of the next group and of those that were begun but not trained, for JSON."""
        return {"next": self._next, "open": sorted([*self._begun, *self._lost])}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state`: the groups that were open begin again."""
        self._next, self._lost = state["next"], list(state["open"])

    def begin(self, version: int) -> None:
        """Begin the groups that are missing for the next job, now that this version samples."""
        self.has_begun = True
        missing = self._size + -(-self._size // 4) - len(self._begun) - len(self._lost)
        last = min(self._total, self._next + max(0, missing))
        numbers, self._lost = [*self._lost, *range(self._next, last)], []
        self._next = last
        for number in numbers:
            self._begun[number] = version
            task = asyncio.create_task(_run(self._collect, number), name=f"group {number}")
            self._running[number] = task

    async def take(self, version: int, run_id: str) -> tuple[list[int], TrajectoryCollection]:
        """Wait for the groups of the job that makes the next version; return their numbers and one collection of all.

        Args:
            version: number of jobs so far.
            run_id: name of the collection.
        """
        due = {number for number, begun in self._begun.items() if begun <= version - self._max_staleness}
        wanted = min(self._size, len(self._begun))
        while not (due <= self._ended.keys() and len(self._ended) >= wanted):
            done, _ = await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
            for number in [number for number, task in self._running.items() if task in done]:
                self._ended[number] = await self._running.pop(number)
        # A stable sort: those that are due, then the others as they ended.
        chosen = sorted(sorted(self._ended, key=lambda number: number not in due)[:wanted])
        for number in chosen:
            del self._begun[number]
        seconds, self._taken_at = time.perf_counter() - self._taken_at, time.perf_counter()
        return chosen, _joined([self._ended.pop(number) for number in chosen], run_id, seconds)

    async def close(self) -> None:
        """Cancel the groups that were begun."""
        await _cancelled(self._running.values())
        self._running.clear()


async def _run(collect: Collect, number: int) -> TrajectoryCollection:
    return await collect(number)  # begun with its task: one that is cancelled at once leaves no coroutine behind


async def _cancelled(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


def _joined(collections: list[TrajectoryCollection], run_id: str, seconds: float) -> TrajectoryCollection:
    """Return one collection of all groups, which took so many seconds since the last one."""
    timings = join_metrics([dict(collection.timings) for collection in collections])
    timings |= {"seconds_rollout": seconds}
    tokens = sum(
        sum(row.completion_mask)
        for collection in collections
        for group in collection.trajectories
        for trajectory in group
        for row in trajectory.sequences or ()
    )
    if "tokens_per_second" in timings:
        timings["tokens_per_second"] = tokens / max(seconds, 1e-9)
    return TrajectoryCollection(
        trajectories=[group for collection in collections for group in collection.trajectories],
        run_id=run_id,
        metrics=join_metrics([dict(collection.metrics) for collection in collections]),
        timings=timings,
        failures=[failure for collection in collections for failure in collection.failures],
    )
