"""The current episode and the current `named_function`: context variables, so that concurrent episodes never mix.

A thread that an agent starts has neither; `in_episode` passes them on.
"""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from jaxft.rollout.recorder import WORKFLOW, Episode

P = ParamSpec("P")
T = TypeVar("T")

# Threads use it, too; each holds it for a few microseconds.
_lock = threading.Lock()

_current: ContextVar[Episode | None] = ContextVar("jaxft_episode")
"""The current episode; None in code that runs outside of episodes on purpose, as evaluators do; unset elsewhere."""


def episode() -> Episode:
    """Return the episode that the calling code runs in.

    Raises:
        RuntimeError: called outside an episode.
    """
    current = find_episode()
    if current is None:
        raise RuntimeError(
            "there is no current episode: jaxft.episode() works inside a workflow that jaxft runs, and in its threads "
            "that run a function wrapped by jaxft.in_episode(function)"
        )
    return current


def find_episode() -> Episode | None:
    """Return the current episode; None outside one, where `llm.chat` records nothing."""
    return _current.get(None)


def in_episode(wrapped: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it runs in the current episode, in any thread or task.

    A thread that an agent starts is in no episode: its calls would not be trained on, and their random numbers would
    depend on the order of threads. `executor.submit(jaxft.in_episode(search), query)` passes on the episode and the
    names of its functions.

    Raises:
        RuntimeError: called outside an episode, as by a decorator at module level.
    """
    episode()
    context = contextvars.copy_context()
    if inspect.iscoroutinefunction(wrapped):

        @functools.wraps(wrapped)
        async def carried_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await asyncio.get_running_loop().create_task(wrapped(*args, **kwargs), context=context.copy())

        return cast("Callable[P, T]", carried_async)

    @functools.wraps(wrapped)
    def carried(*args: P.args, **kwargs: P.kwargs) -> T:
        return context.copy().run(wrapped, *args, **kwargs)  # a context is entered by one thread at a time

    return carried


@contextlib.contextmanager
def recording(current: Episode | None) -> Iterator[Episode | None]:
    """Make `current` the episode of this task and of the tasks that it starts.

    None marks them as outside of episodes on purpose: `outside_calls` does not count their calls.
    """
    if current is not None:
        current.use_loop()
    token = _current.set(current)
    try:
        yield current
    finally:
        _current.reset(token)


_UNSET: Any = object()
_outside_calls = 0


def note_outside_call() -> None:
    """Count a call of a language model outside of any episode, unless `recording(None)` allows it."""
    global _outside_calls
    if _current.get(_UNSET) is _UNSET:
        with _lock:
            _outside_calls += 1


def add_outside_calls(count: int) -> None:
    """Count calls of language models outside of any episode that another process made."""
    global _outside_calls
    with _lock:
        _outside_calls += count


def outside_calls() -> int:
    """Return the number of language-model calls outside of any episode, in the whole process."""
    return _outside_calls


_functions: ContextVar[tuple[str, ...]] = ContextVar("jaxft_functions", default=())


class named_function:
    """Name the code that runs under it, as a context manager or as a decorator of a function, async or not.

    `finetuning.target_functions` trains only on the calls made under given names. Names nest: a call under "search"
    under "planner" belongs to both.

    >>> with named_function("planner"):
    ...     with named_function("search"):
    ...         current_functions()
    ('planner', 'search')
    >>> @named_function("writer")
    ... def write():
    ...     return current_functions()
    >>> write()
    ('writer',)
    """

    def __init__(self, name: str) -> None:
        if not name or name == WORKFLOW:
            raise ValueError(f"a function's name is {name!r}; wanted one of your own, and not empty")
        self.name = name

    def __enter__(self) -> None:
        _functions.set((*_functions.get(), self.name))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No token is stored: several tasks, each with a context of its own, may enter one object at once.
        _functions.set(_functions.get()[:-1])

    def __call__(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(wrapped) or inspect.isgeneratorfunction(wrapped):
            raise TypeError(f"{wrapped} is a generator, which runs in its caller's context: name the code inside it")
        if inspect.iscoroutinefunction(wrapped):

            @functools.wraps(wrapped)
            async def named_async(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await wrapped(*args, **kwargs)

            return named_async

        @functools.wraps(wrapped)
        def named(*args: Any, **kwargs: Any) -> Any:
            with self:
                return wrapped(*args, **kwargs)

        return named


@contextlib.contextmanager
def named_functions(names: tuple[str, ...]) -> Iterator[None]:
    """Run the block under these names, outermost first, as code of another process ran."""
    token = _functions.set(names)
    try:
        yield
    finally:
        _functions.reset(token)


def current_functions() -> tuple[str, ...]:
    """Return the names that the calling code runs under (`named_function`), outermost first."""
    return _functions.get()
