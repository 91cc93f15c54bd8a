"""What the processes of a run decide together: before each job, whether all go on or, after a signal to one, all stop.

A job is computed on the devices of all processes. If one of them left it out, the others would wait in it for ever.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from jaxft.errors import HostsError
from jaxft.hosts.ring import Ring

Digests = Mapping[str, Sequence[str]]
"""Digests of the parts of a job's input, by what they are, such as `row`."""


class Accord:
    """The decisions of one process, in the same order in all.

    Attributes:
        is_stopped: True as soon as one process has stopped; nothing is decided any more.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring, self._number = ring, 0
        self._deciding: asyncio.Future[bool] | None = None
        self.is_stopped = False

    async def begin(self, name: str, digests: Digests) -> bool:
        """Return True if all processes begin a job now, and False if one stops instead.

        Args:
            name: name of the job.
            digests: of its input, which has to be the same in all processes.

        Raises:
            HostsError: a process has ended, or the job's input differs from that of process 0.
        """
        self._deciding = asyncio.ensure_future(self._decide((name, digests)))
        try:
            return await asyncio.shield(self._deciding)
        finally:
            if self._deciding.done():
                self._deciding = None

    async def settled(self) -> None:
        """Wait for a decision that is under way: a job that all begin is computed before a run can stop."""
        if self._deciding is not None:
            await asyncio.wait({self._deciding})

    async def stop(self) -> None:
        """Tell the others, which ask the same or begin a job, that this process begins none.

        Raises:
            HostsError: a process has ended.
        """
        if not self.is_stopped:
            await self._decide(None)

    async def gather(self, name: str, value: Any) -> list[Any]:
        """Return the value that each process gives under this name; see `Ring.gather`."""
        return await asyncio.to_thread(self._ring.gather, name, value)

    async def _decide(self, job: tuple[str, Digests] | None) -> bool:
        self._number += 1
        answers = await asyncio.to_thread(self._ring.gather, f"decision {self._number}", job)
        if None in answers:
            self.is_stopped = True
            return False
        (first, first_digests), *_ = answers
        for index, (name, digests) in enumerate(answers):
            if name != first:
                raise HostsError(f"process {index} begins job {name}, and process 0 {first}: they have diverged")
            for what, of_first in first_digests.items():
                own = digests.get(what, ())
                place = next((i for i, pair in enumerate(zip(of_first, own, strict=False)) if len({*pair}) > 1), None)
                if len(own) != len(of_first):
                    raise HostsError(f"job {name} has {len(own)} {what}s in process {index}, and {len(of_first)} in 0")
                if place is not None:
                    raise HostsError(f"job {name}: {what} {place} differs between process {index} and process 0")
        return True
