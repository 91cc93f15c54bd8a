"""Schedules: which episodes are sampled when, and with which weights.

With `Schedule` a collection and its job take turns. `NextCollection` samples one collection beside each job: a fixed
schedule, which a resumed run repeats bit for bit. `GroupStream` samples groups for several jobs and hands them over as
they end: slow ones are carried over, and which group is in which job depends on the clock.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from jaxft.components.rollout_builder import join_metrics, named_reward_means
from jaxft.harness.data_models import TrajectoryCollection

Collect = Callable[[int], Awaitable[TrajectoryCollection]]


@runtime_checkable
class Sampler(Protocol):
    """Switches between the weights that requests are answered with: present ones, held, or newest ones."""

    async def hold(self) -> None:
        """Sample with the present weights until the next call."""
        ...

    async def release(self) -> None:
        """Sample with the newest weights, whatever is trained."""
        ...


class Schedule:
    """A collection, then its job (`max_staleness: 0`); the other schedules are derived from it.

    Attributes:
        before: state of builder and counters before a collection that is being sampled, which a resumed run repeats;
            None without one.
    """

    before: dict[str, Any] | None = None

    def __init__(self, collect: Collect, sampler: Sampler) -> None:
        """Sample nothing yet; `collect` collects the episodes of an epoch."""
        self._collect, self._sampler = collect, sampler

    async def start(self) -> None:
        """Sample with the newest weights, also after the checkpoint of a run that held others."""
        await self._sampler.release()

    async def take(self, epoch: int, run_id: str) -> TrajectoryCollection:
        """Return the episodes that the job of an epoch trains; `run_id` names their collection."""
        return await self._collect(epoch)

    async def begin(self, epoch: int) -> None:
        """Begin the episodes that are sampled beside the job of this epoch, with the weights before it."""

    async def prepare_validation(self, epoch: int) -> None:
        """See to it that episodes that begin next, before this epoch, are sampled with the newest weights."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run goes on from, for JSON."""
        return {}

    async def close(self) -> None:
        """Cancel the episodes that were begun."""


class NextCollection(Schedule):
    """The collection of the next epoch is sampled while the job of this one trains (`max_staleness: 1`)."""

    def __init__(
        self, collect: Collect, sampler: Sampler, *, num_epochs: int, get_state: Callable[[], dict[str, Any]]
    ) -> None:
        """Sample nothing yet.

        Args:
            collect: collects the episodes of an epoch.
            sampler: samples them.
            num_epochs: number of epochs of the whole run.
            get_state: returns the state that `collect` starts from, which a resumed run restores.
        """
        super().__init__(collect, sampler)
        self._num_epochs, self._get_state = num_epochs, get_state
        self._task: asyncio.Task[TrajectoryCollection] | None = None

    async def start(self) -> None:
        """Keep the weights of a checkpoint, with which a resumed run repeats its collection."""

    async def take(self, epoch: int, run_id: str) -> TrajectoryCollection:
        """Return the collection of an epoch, which is sampled now if it was not begun, as in a resumed run."""
        if self._task is None:
            return await self._collect(epoch)
        task, self._task, self.before = self._task, None, None
        return await task

    async def begin(self, epoch: int) -> None:
        """Begin the next epoch's episodes; before the last job the sampler only holds what a prolonged run needs."""
        await self._sampler.hold()
        self._begin_collection(epoch + 1)

    def _begin_collection(self, epoch: int) -> None:
        if epoch < self._num_epochs:
            self.before = self._get_state()
            self._task = asyncio.create_task(_run(self._collect, epoch), name=f"collection of epoch {epoch}")

    async def prepare_validation(self, epoch: int) -> None:
        """Wait for the episodes that were begun, whose errors `take` raises, and let go of their weights.

        A run that was stopped before this validation repeats them first, with the weights of its checkpoint.
        """
        if self._task is None and epoch > 0:
            self._begin_collection(epoch)
        if self._task is not None:
            await asyncio.wait({self._task})
        await self._sampler.release()

    async def close(self) -> None:
        """Cancel the episodes that were begun."""
        await _cancel_tasks([] if self._task is None else [self._task])
        self._task = self.before = None


class GroupStream(Schedule):
    """Groups that are sampled for up to `max_staleness` jobs ahead, and trained in the order in which they end.

    A quarter more groups are open than a job takes. It takes the first `size` that have ended, and waits for those that
    would otherwise grow older than `max_staleness` versions. The others are left to later jobs: none is dropped.

    >>> class NoWeights:
    ...     async def hold(self): pass
    ...     release = hold
    >>> async def collect(number):  # group 0 is slow
    ...     await asyncio.sleep(0.05 * (number == 0))
    ...     return TrajectoryCollection(trajectories=[], run_id=str(number), metrics={"number": number})
    >>> async def jobs():
    ...     stream, trained = GroupStream(collect, NoWeights(), size=1, total=4, max_staleness=2), []
    ...     for epoch in range(4):
    ...         await stream.begin(epoch)
    ...         trained.append(int((await stream.take(epoch, f"epoch {epoch}")).metrics["number"]))
    ...     return trained
    >>> asyncio.run(jobs())  # it is carried over twice
    [1, 2, 0, 3]
    """

    def __init__(
        self,
        collect: Collect,
        sampler: Sampler,
        *,
        size: int,
        total: int,
        max_staleness: int,
        epoch: int = 0,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Begin no group yet.

        Args:
            collect: collects one group, given its number.
            sampler: samples them.
            size: groups of a job.
            total: groups of the whole run.
            max_staleness: number of versions that a group may be behind when it is trained.
            epoch: number of the next job.
            state: the `groups` of a `state` to go on from; those that were open begin again. With jobs of another size
                numbers mean other examples, and the stream begins at `epoch`.
        """
        if state is None or state.get("size", size) != size:
            state = {"next": size * epoch, "open": []}
        super().__init__(collect, sampler)
        self._size, self._total, self._max_staleness = size, total, max_staleness
        self._has_begun = False
        self._next: int = state["next"]
        self._lost: list[int] = list(state["open"])
        self._begun: dict[int, int] = {}  # version at which a group that is not trained yet was begun
        self._running: dict[int, asyncio.Task[TrajectoryCollection]] = {}
        self._ended: dict[int, TrajectoryCollection] = {}  # in the order in which they ended
        self._taken_at = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Return, as `groups`, the next group, those that were begun but not trained, and the size of a job."""
        return {"groups": {"next": self._next, "open": sorted([*self._begun, *self._lost]), "size": self._size}}

    async def begin(self, epoch: int) -> None:
        """Begin the groups that are missing for the next job, now that this epoch's weights sample."""
        await self._sampler.hold()
        self._has_begun = True
        missing = self._size + -(-self._size // 4) - len(self._begun) - len(self._lost)
        last = min(self._total, self._next + max(0, missing))
        numbers, self._lost = [*self._lost, *range(self._next, last)], []
        self._next = last
        for number in numbers:
            self._begun[number] = epoch
            task = asyncio.create_task(_run(self._collect, number), name=f"group {number}")
            self._running[number] = task

    async def take(self, epoch: int, run_id: str) -> TrajectoryCollection:
        """Wait for the groups of the job that makes the next version, and return one collection of all."""
        if not self._has_begun:
            await self.begin(epoch)
        due = {number for number, begun in self._begun.items() if begun <= epoch - self._max_staleness}
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
        return _join_collections([self._ended.pop(number) for number in chosen], run_id, seconds)

    async def prepare_validation(self, epoch: int) -> None:
        """Let the groups that are open go on with the newest weights."""
        await self._sampler.hold()

    async def close(self) -> None:
        """Cancel the groups that were begun."""
        await _cancel_tasks(self._running.values())
        self._running.clear()


async def _run(collect: Collect, number: int) -> TrajectoryCollection:
    return await collect(number)  # begun with its task: one that is cancelled at once leaves no coroutine behind


async def _cancel_tasks(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


def _join_collections(collections: list[TrajectoryCollection], run_id: str, seconds: float) -> TrajectoryCollection:
    """Return one collection of all groups, which took so many seconds since the last one."""
    timings = join_metrics([dict(collection.timings) for collection in collections])
    timings |= {"seconds_rollout": seconds}
    groups = [group for collection in collections for group in collection.trajectories]
    trajectories = [trajectory for group in groups for trajectory in group]
    tokens = sum(sum(row.completion_mask) for trajectory in trajectories for row in trajectory.sequences or ())
    if "tokens_per_second" in timings:
        timings["tokens_per_second"] = tokens / max(seconds, 1e-9)
    return TrajectoryCollection(
        trajectories=groups,
        run_id=run_id,
        metrics=join_metrics([dict(each.metrics) for each in collections]) | named_reward_means(trajectories),
        timings=timings,
        failures=[failure for collection in collections for failure in collection.failures],
    )
