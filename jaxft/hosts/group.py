"""The process group of a run: what its processes share, agree upon and end together.

A validation, a job and a checkpoint need all processes. If one of them left one out, the others would wait in it for
ever. So all agree before each, in the same order, and a stop takes effect at one agreement in all. A run of one process
has a group, too, which agrees with itself at once.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from jaxft.errors import HostsError

Digests = Mapping[str, Sequence[str]]
"""Digests of the parts of a job's input, by what they are, such as `row`."""


def _alone(name: str, value: Any) -> list[Any]:
    return [value]


def _nothing() -> None:
    pass


class ProcessGroup:
    """One process among those of its run.

    Attributes:
        process_id: number of this process, from 0. Process 0 writes the files.
        num_processes: number of processes.
        share: function `(name, value)` that blocks until all processes have called it with this name, and returns the
            values of all in their order; a value is one that JSON has.
        expect_end: called when this process is about to end with an error, which it still has to show.
        wants_stop: True from a signal on; the next agreement tells the others.
        is_stopping: True as soon as an agreement has told of a stop: no validation and no job begins any more.
        is_over: True as soon as a process has left out an agreement, or a job was not begun: nothing begins any more.
        on_stopping: called when `is_stopping` becomes True.
    """

    def __init__(
        self,
        process_id: int = 0,
        num_processes: int = 1,
        share: Callable[[str, Any], list[Any]] = _alone,
        expect_end: Callable[[], object] = _nothing,
    ) -> None:
        """Make the group of one process, or of several that a `share` connects."""
        self.process_id, self.num_processes = process_id, num_processes
        self.share, self.expect_end = share, expect_end
        self._number, self._running = 0, 0
        self.wants_stop = self.is_stopping = self.is_over = False
        self.on_stopping: Callable[[], object] = _nothing

    @property
    def is_first(self) -> bool:
        """True in process 0, which writes the files."""
        return self.process_id == 0

    @property
    def is_alone(self) -> bool:
        """True if the run has one process."""
        return self.num_processes == 1

    @property
    def is_busy(self) -> bool:
        """True while the processes agree, and while what they agreed upon is computed."""
        return self._running > 0

    async def gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes, as `share`, without blocking the event loop."""
        return [value] if self.is_alone else await asyncio.to_thread(self.share, name, value)

    async def allows(self, name: str) -> bool:
        """Return True if all processes begin something that they may leave out, such as a validation."""
        await self._agree(name)
        if self.is_over:
            await _forever()
        return not self.is_stopping

    @contextlib.asynccontextmanager
    async def agree(
        self, name: str, digests: Callable[[], Digests] = dict, *, is_last: bool = False
    ) -> AsyncIterator[None]:
        """Run a block that is computed by all processes, unless the run stops; it then waits to be cancelled.

        Args:
            name: name of the block.
            digests: returns those of its input, which has to be the same in all processes.
            is_last: True if the block is also run when the run is about to stop, as a checkpoint is.

        Raises:
            HostsError: a process has ended, or the input differs from that of process 0.
        """
        await self._agree(name, digests)
        if not is_last:
            self.is_over |= self.is_stopping
        if self.is_over:
            await _forever()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def stop(self) -> None:
        """Leave out the next agreement, and wait until the others know.

        Raises:
            HostsError: a process has ended.
        """
        if not self.is_over:
            await self._agree(None)

    async def _agree(self, name: str | None, digests: Callable[[], Digests] = dict) -> None:
        """Share what this process begins, and whether it wants to stop; a name of None if it begins nothing."""
        if self.is_alone:
            return
        self._running += 1
        try:
            self._number += 1
            own = digests()
            begun = None if name is None else [name, hashlib.sha256(repr(own).encode()).hexdigest()]
            # Shielded: the others count on what was said, also if the caller is cancelled.
            answers = await asyncio.shield(self.gather(f"agreement {self._number}", [begun, self.wants_stop]))
        finally:
            self._running -= 1
        self.is_over = any(begun is None for begun, _ in answers)
        if (self.is_over or any(stops for _, stops in answers)) and not self.is_stopping:
            self.is_stopping = True
            self.on_stopping()
        if not self.is_over:
            await self._check_alike([begun for begun, _ in answers], own)

    async def _check_alike(self, begun: Sequence[tuple[str, str]], own: Digests) -> None:
        """Raise unless all processes begin the same, of which `begun` has names, and hashes of their digests.

        Raises:
            HostsError: they do not; the message names the first difference.
        """
        name, of_first = begun[0]
        for index, (other, _) in enumerate(begun):
            if other != name:
                raise HostsError(f"process {index} begins {other}, and process 0 {name}: they have diverged")
        if all(each == of_first for _, each in begun):
            return
        first, *others = await self.gather(f"digests {self._number}", {kind: list(own[kind]) for kind in own})
        for index, digests in enumerate(others, 1):
            for kind, given in first.items():
                found = digests[kind]
                if len(found) != len(given):
                    raise HostsError(
                        f"{name} has {len(found)} {kind}s in process {index}, and {len(given)} in process 0"
                    )
                for place, (mine, theirs) in enumerate(zip(found, given, strict=True)):
                    if mine != theirs:
                        raise HostsError(f"{name}: {kind} {place} differs between process {index} and process 0")


async def _forever() -> None:
    """Wait for the end of this process."""
    await asyncio.Event().wait()


_current = ProcessGroup()


def process_group() -> ProcessGroup:
    """Return the group of this run, which is that of one process until several have joined."""
    return _current


def use_group(group: ProcessGroup) -> None:
    """Make a group that of this run."""
    global _current
    _current = group
