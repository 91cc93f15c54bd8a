"""What is done once for several tasks, when the last of them has come so far: judging the episodes of an example."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Group(Generic[T]):
    """Tasks of which each brings something, and gets what is made of it in view of what the others brought.

    A task that ends, or is cancelled, without bringing anything drops out. When all have ended, so does the judging:
    nobody is left to wait for it.

    Attributes:
        judging: the task that waits for what is brought and judges it.
    """

    def __init__(self, size: int, judge: Callable[[list[T]], Coroutine[Any, Any, list[T]]]) -> None:
        """Starts to wait.

        Args:
            size: how many tasks there will be.
            judge: called once with what was brought, in the order of the tasks; gives as many things.
        """
        loop = asyncio.get_running_loop()
        self._brought: list[asyncio.Future[T]] = [loop.create_future() for _ in range(size)]
        self._num_open = size
        self._judge = judge
        self.judging = asyncio.create_task(self._judge_all())

    def wait_for(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Says which tasks they are; they may be cancelled before they do anything."""
        for task, brought in zip(tasks, self._brought, strict=True):
            task.add_done_callback(functools.partial(self._leave, brought))

    async def judged(self, index: int, thing: T) -> T:
        """What is made of what the task of this index brings; to be awaited by that task."""
        self._brought[index].set_result(thing)
        # A task that is cancelled must not take the judging from the others.
        return (await asyncio.shield(self.judging))[index]

    def _leave(self, brought: asyncio.Future[T], _: asyncio.Task[Any]) -> None:
        brought.cancel()  # of no effect on what was brought
        self._num_open -= 1
        if self._num_open == 0:
            self.judging.cancel()  # of no effect when it is done

    async def _judge_all(self) -> dict[int, T]:
        await asyncio.wait(self._brought)
        things = {index: brought.result() for index, brought in enumerate(self._brought) if not brought.cancelled()}
        judged = await self._judge(list(things.values())) if things else []
        return dict(zip(things, judged, strict=True))
