"""The workers of a run: processes that run agents and evaluators, one at a time each, and that may be killed.

A worker that takes too long, breaks a limit or ends is replaced. What it did costs its episode and nothing else: the
calls of an episode are recorded here, and its random numbers depend on nothing but the episode.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from jaxft.errors import UserCodeError
from jaxft.harness.config import Config
from jaxft.harness.isolation import messages
from jaxft.harness.isolation.answering import RunSide
from jaxft.harness.isolation.messages import Identity, Work
from jaxft.harness.isolation.processes import WorkerProcess, ZygoteProcess
from jaxft.rollout.recorder import Episode, find_episode

MAX_EPISODES = 1000
"""Episodes and evaluations after which a worker is replaced."""

MAX_OUTPUT_BYTES = 2**20
"""Size of what an episode or evaluation may write to its standard output."""


class WorkerPool:
    """Workers of one configuration, started as they are needed.

    Attributes:
        num_started: workers started so far.
    """

    def __init__(
        self,
        config: Config,
        max_workers: int,
        run: RunSide,
    ) -> None:
        """Make a pool; nothing is started yet.

        Args:
            config: the configuration, whose workflow and evaluators the workers make.
            max_workers: maximum number of workers.
            run: the functions of the run that serve workers.
        """
        self._config = config
        self._run = run
        self._free = asyncio.Semaphore(max_workers)
        self._idle: list[WorkerProcess] = []
        self._running: set[WorkerProcess] = set()
        self._zygote: ZygoteProcess | None = None
        self._starting = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()
        self.num_started = 0

    async def check(self, name: str | None) -> None:
        """Make a component in a worker.

        Args:
            name: name of an evaluator; None for the workflow.

        Raises:
            UserCodeError: its factory raised an error.
        """
        async with self._free, self._taken(name):
            pass

    def function(self, name: str | None, seconds: float | None, late: str) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        """Return a component as a function that calls it in a worker, in the current episode if there is one.

        Args:
            name: name of an evaluator; None for the workflow.
            seconds: time limit of a call; None: no limit.
            late: first words of the message of the `TimeoutError`.
        """

        async def call(argument: Any) -> Any:
            episode = find_episode()
            task = asyncio.current_task()
            label = "" if task is None else task.get_name()
            identity = None if episode is None else _identity(episode)
            try:
                work = messages.pack(Work(name, argument, identity, label))
            except Exception as error:  # of a user's class
                raise TypeError(
                    f"what it is given cannot be handed to another process ({error}): use plain values, or set "
                    f"{'isolation' if name is None else 'judge_isolation'} to none"
                ) from None
            async with self._free, self._taken(name) as process:
                result = await process.do(work, episode, seconds, late)
                process.num_done += 1
            if isinstance(result, UserCodeError):
                raise result
            return result

        return call

    async def close(self) -> None:
        """End all workers."""
        for process in self._idle:
            self._retire(process)
        self._idle = []
        await asyncio.gather(*self._retiring)
        if self._zygote is not None:
            await self._zygote.close()
        # Those of a call that was cancelled twice.
        await asyncio.gather(*(process.has_ended() for process in self._running))

    @contextlib.asynccontextmanager
    async def _taken(self, name: str | None) -> AsyncIterator[WorkerProcess]:
        """Yield a worker that has made a component; afterwards it is idle, or is replaced if it cannot go on."""
        process = None
        while self._idle and process is None:
            process = self._idle.pop()
            if not process.is_fit:  # a thread that an agent left behind has ended it, or flooded its output
                self._retire(process)
                process = None
        process = await self._start() if process is None else process
        try:
            if name not in process.made:
                modules = await process.make(name)
                if modules and self._zygote is not None:
                    self._zygote.preload(modules)
            yield process
        finally:
            if not process.is_usable:
                process.kill()
                await process.has_ended()
            elif process.num_done < MAX_EPISODES:
                self._idle.append(process)
            else:
                self._retire(process)

    async def _start(self) -> WorkerProcess:
        async with self._starting:
            if self._zygote is not None and self._zygote.has_ended:
                await self._zygote.close()
                self._zygote = None
            if self._zygote is None:
                self._zygote = await ZygoteProcess.start(self._config)
            self.num_started += 1
            memory = self._config.eval.general.worker_memory_mb
            process = await WorkerProcess.start(
                self._zygote, None if memory is None else memory * 2**20, MAX_OUTPUT_BYTES, self._run
            )
        self._running.add(process)
        process.on_end(self._running.discard)
        return process

    def _retire(self, process: WorkerProcess) -> None:
        task = asyncio.create_task(process.close())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


def _identity(episode: Episode) -> Identity:
    return Identity(
        episode.run_seed,
        episode.stream,
        episode.rollout_index,
        episode.example_id,
        episode.generation,
        episode.temperature,
        episode.input_obj,
        episode.server_url,
        episode.api_key if episode.is_served else None,
    )
