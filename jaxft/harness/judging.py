"""How evaluators are asked, and what counts as a score: one episode or a whole group at a time, under a deadline.

What is user code's fault (it raises, it hangs, it gives no number) becomes an error that names the evaluator; what is
not a finite number is a score all the same, which is not usable.
"""

import asyncio
import contextlib
import contextvars
import inspect
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.errors import UserCodeError, user_code

Evaluator = Callable[[Any], Any]
"""From an `EvalInputItem`, or from a list of them, to what `Score` stands for, or to a list of that; sync or async."""

Score = float | dict[str, float] | None
"""What an evaluator gave: a number, named numbers (their sum counts) or nothing. It may hold NaN or an infinity."""


@dataclass(frozen=True)
class Judge:
    """An evaluator and how it is asked.

    Attributes:
        function: sync or async; a sync one runs on the event loop, or, under a deadline, in a thread of its own.
        is_group: whether it is given all episodes of an example at once, and gives a score for each.
        timeout_seconds: how long it may take.
    """

    function: Evaluator
    is_group: bool = False
    timeout_seconds: float | None = None


class Judgement(NamedTuple):
    """What was said of one episode: scores by evaluator, up to the one that failed; then `error` and `traceback`."""

    scores: dict[str, Score]
    error: str | None = None
    traceback: str | None = None


async def judge(judges: Mapping[str, Judge], items: Sequence[EvalInputItem]) -> list[Judgement]:
    """What the evaluators, asked one after the other, say of each of the items; when one fails, it fails for all.

    Args:
        judges: by name; all of them group evaluators, unless there is one item.
        items: finished episodes of one example, at least one.
    """
    scores: list[dict[str, Score]] = [{} for _ in items]
    for name, evaluator in judges.items():
        try:
            with user_code():
                given = await _scores(evaluator, items)
        except UserCodeError as failure:
            error = f"evaluator '{name}': {failure.summary}"
            return [Judgement(known, error, failure.traceback) for known in scores]
        for known, score in zip(scores, given, strict=True):
            known[name] = score
    return [Judgement(known) for known in scores]


def usable(score: Score) -> float | None:
    """The score as one finite number (the sum of named ones); None when it, or one of its parts, is not.

    >>> usable({"win": 1.0, "speed": 0.5}), usable(float("nan")), usable(None)
    (1.5, None, None)
    """
    parts = [] if score is None else list(score.values()) if isinstance(score, dict) else [score]
    return sum(parts) if parts and math.isfinite(sum(parts)) else None


async def _scores(evaluator: Judge, items: Sequence[EvalInputItem]) -> list[Score]:
    example_id = items[0].id
    if not evaluator.is_group:
        return [_score(await _given(evaluator, items[0]), example_id)]
    given = await _given(evaluator, list(items))
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(
            f"it gave {_shown(given)} for example '{example_id}': wanted is a list with a score for each of its "
            f"{len(items)} episodes"
        )
    if len(given) != len(items):
        raise ValueError(f"it gave {len(given)} scores for the {len(items)} episodes of example '{example_id}'")
    return [_score(value, example_id) for value in given]


async def _given(evaluator: Judge, argument: Any) -> Any:
    async def ask() -> Any:
        is_blocking = evaluator.timeout_seconds is not None and not inspect.iscoroutinefunction(evaluator.function)
        given = await in_thread(evaluator.function, argument) if is_blocking else evaluator.function(argument)
        return await given if inspect.isawaitable(given) else given

    return await within(evaluator.timeout_seconds, ask(), late="no score")


def _score(value: Any, example_id: str) -> Score:
    wrong = ""
    if value is None:
        return None
    if isinstance(value, Mapping):
        named = {name: math.nan if part is None else part for name, part in value.items()}
        odd = [name for name, part in named.items() if not isinstance(name, str) or not _is_number(part)]
        if named and not odd:
            return {name: float(part) for name, part in named.items()}
        wrong = f"; what is wrong: {odd[0]!r}: {_shown(named[odd[0]])}" if odd else ""
    elif _is_number(value):
        return float(value)
    wanted = "wanted is a number, a dict of named numbers, or None"
    raise TypeError(f"it gave {_shown(value)} for example '{example_id}': {wanted}{wrong}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"{repr(value)[:100]} ({type(value).__name__})"


async def within(seconds: float | None, awaitable: Awaitable[Any], *, late: str) -> Any:
    """What user code gives in so many seconds (None: whenever it does). What it gives or raises later is dropped.

    Only what awaits can be stopped, and only by a cancellation: code that blocks the event loop blocks this as well.

    Raises:
        TimeoutError: it took longer; the message begins with `late`. One that user code raises itself is passed on.
    """
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            given = await _own_cancellation(awaitable)
    except Exception as error:
        if not timer.expired():
            raise
        raise TimeoutError(f"{late} within {seconds:g} s") from error
    if timer.expired():  # it caught the cancellation, and gave something after all
        raise TimeoutError(f"{late} within {seconds:g} s")
    return given


async def in_thread(function: Callable[[Any], Any], argument: Any) -> Any:
    """What a blocking function gives, from a thread of its own that sees the caller's context variables.

    When the caller stops waiting, the thread is left behind, and what it gives is dropped. It is a daemon: one that
    hangs does not keep the process from ending, as a thread of asyncio's executor would.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result((value, error))
        elif inspect.iscoroutine(value):
            value.close()  # or it would complain that nobody awaits it

    def work() -> None:
        value, error = None, None
        try:
            value = function(argument)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has been closed in the meantime
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="evaluator", daemon=True).start()
    value, error = await answer
    if error is not None:
        raise error
    return value


async def _own_cancellation(awaitable: Awaitable[Any]) -> Any:
    """What user code gives. A cancellation that nobody asked of this task is that code's error, not the run's end."""
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("it let the cancellation of a task of its own escape") from error
