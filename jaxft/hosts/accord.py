"""Decisions of the processes of a run: whether all of them begin what they compute together or, after a signal, none.

A validation, a job and a checkpoint need all processes. If one of them left one out, the others would wait in it for
ever. So all decide before each, in the same order, and a stop takes effect at one decision in all.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from jaxft.errors import HostsError
from jaxft.hosts.ring import Ring

Digests = Mapping[str, Sequence[str]]
"""Digests of the parts of a job's input, by what they are, such as `row`."""


class Accord:
    """The decisions of one process, which takes the same ones as all others.

    Attributes:
        wants_stop: True from a signal on; the next decision tells the others.
        is_stopping: True as soon as a decision has told of a stop: no validation and no job begins any more.
        is_over: True as soon as a process has left out a decision, or a job was not begun: nothing begins any more.
        on_stopping: called when `is_stopping` becomes True.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring, self._number, self._running = ring, 0, 0
        self.wants_stop = self.is_stopping = self.is_over = False
        self.on_stopping: Callable[[], object] = lambda: None

    @property
    def is_busy(self) -> bool:
        """True during a decision, and while what was decided upon is computed."""
        return self._running > 0

    async def allows(self, name: str) -> bool:
        """Return True if all processes begin something that they may leave out, such as a validation."""
        await self._decide((name, {}))
        if self.is_over:
            await _forever()
        return not self.is_stopping

    @contextlib.asynccontextmanager
    async def job(self, name: str, digests: Digests) -> AsyncIterator[None]:
        """Run a block that is computed by all processes, unless the run stops; it then waits to be cancelled.

        Args:
            name: name of the job.
            digests: of its input, which has to be the same in all processes.

        Raises:
            HostsError: a process has ended, or the job's input differs from that of process 0.
        """
        await self._decide((name, digests))
        self.is_over |= self.is_stopping
        async with self._computing():
            yield

    @contextlib.asynccontextmanager
    async def checkpoint(self, name: str) -> AsyncIterator[None]:
        """Run a block in all processes, also when the run is about to stop."""
        await self._decide((name, {}))
        async with self._computing():
            yield

    async def stop(self) -> None:
        """Leave out the next decision, and wait until the others know.

        Raises:
            HostsError: a process has ended.
        """
        if not self.is_over:
            await self._decide(None)

    @contextlib.asynccontextmanager
    async def _computing(self) -> AsyncIterator[None]:
        if self.is_over:
            await _forever()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _decide(self, what: tuple[str, Digests] | None) -> None:
        """Exchange what this process begins, and whether it wants to stop; None if it begins nothing."""
        self._running += 1
        try:
            self._number += 1
            given = what, self.wants_stop
            # Shielded: the others count on what was said, also if the caller is cancelled.
            answers = await asyncio.shield(asyncio.to_thread(self._ring.all_gather, f"decision {self._number}", given))
        finally:
            self._running -= 1
        self.is_over = any(begun is None for begun, _ in answers)
        if (self.is_over or any(stops for _, stops in answers)) and not self.is_stopping:
            self.is_stopping = True
            self.on_stopping()
        if not self.is_over:
            _check_alike([begun for begun, _ in answers])


def _check_alike(begun: Sequence[tuple[str, Digests]]) -> None:
    """Raise unless all processes begin the same.

    Raises:
        HostsError: they do not; the message names the first difference.
    """
    first, first_digests = begun[0]
    for index, (name, digests) in enumerate(begun):
        if name != first:
            raise HostsError(f"process {index} begins {name}, and process 0 {first}: they have diverged")
        for kind, of_first in first_digests.items():
            own = digests.get(kind, ())
            if len(own) != len(of_first):
                raise HostsError(f"{name} has {len(own)} {kind}s in process {index}, and {len(of_first)} in process 0")
            place = next(
                (i for i, (mine, theirs) in enumerate(zip(own, of_first, strict=True)) if mine != theirs), None
            )
            if place is not None:
                raise HostsError(f"{name}: {kind} {place} differs between process {index} and process 0")


async def _forever() -> None:
    """Wait for the end of this process."""
    await asyncio.Event().wait()
