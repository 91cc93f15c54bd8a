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
from typing import Any, NamedTuple, SupportsFloat

import numpy as np

from jaxft.harness.data_models import EvalInputItem, EvalOutputItem
from jaxft.harness.errors import UserCodeError, user_code
from jaxft.runs.json_text import json_bytes

Evaluator = Callable[[Any], Any]
"""From an `EvalInputItem`, or from a list of them, to a `Score` or an `EvalOutputItem`, or to a list; sync or async."""

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
    """What was said of one episode: scores by evaluator, up to the one that failed; then `error` and `traceback`.

    `reasonings` holds the reasons of the evaluators that gave one, by evaluator.
    """

    scores: dict[str, Score]
    reasonings: dict[str, Any]
    error: str | None = None
    traceback: str | None = None


async def judge(judges: Mapping[str, Judge], items: Sequence[EvalInputItem]) -> list[Judgement]:
    """What the evaluators, asked one after the other, say of each of the items; when one fails, it fails for all.

    Args:
        judges: by name; all of them group evaluators, unless there is one item.
        items: finished episodes of one example, at least one.
    """
    judgements = [Judgement({}, {}) for _ in items]
    for name, evaluator in judges.items():
        try:
            with user_code():
                given = await _scores(evaluator, items)
        except UserCodeError as failure:
            error = f"evaluator '{name}': {failure.summary}"
            return [known._replace(error=error, traceback=failure.traceback) for known in judgements]
        for known, (score, reasoning) in zip(judgements, given, strict=True):
            known.scores[name] = score
            if reasoning is not None:
                known.reasonings[name] = reasoning
    return judgements


def usable(score: Score) -> float | None:
    """The score as one finite number (the sum of named ones); None when it, or one of its parts, is not.

    >>> usable({"win": 1.0, "speed": 0.5}), usable(float("nan")), usable(None)
    (1.5, None, None)
    """
    parts = [] if score is None else list(score.values()) if isinstance(score, dict) else [score]
    return sum(parts) if parts and math.isfinite(sum(parts)) else None


async def _scores(evaluator: Judge, items: Sequence[EvalInputItem]) -> list[tuple[Score, Any]]:
    """The score of each item, with the evaluator's reasoning (None without one)."""
    example_id = items[0].id
    if not evaluator.is_group:
        return [_scored(await _given(evaluator, items[0]), example_id)]
    given = await _given(evaluator, list(items))
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(
            f"it gave {_shown(given)} for example '{example_id}': wanted is a list with a score for each of its "
            f"{len(items)} episodes"
        )
    if len(given) != len(items):
        raise ValueError(f"it gave {len(given)} scores for the {len(items)} episodes of example '{example_id}'")
    return [_scored(value, example_id) for value in given]


async def _given(evaluator: Judge, argument: Any) -> Any:
    async def ask() -> Any:
        is_blocking = evaluator.timeout_seconds is not None and not inspect.iscoroutinefunction(evaluator.function)
        given = await in_thread(evaluator.function, argument) if is_blocking else evaluator.function(argument)
        return await given if inspect.isawaitable(given) else given

    return await within(evaluator.timeout_seconds, ask(), late="no score")


def _scored(value: Any, example_id: str) -> tuple[Score, Any]:
    """The score and the reasoning of what an evaluator gave for one episode."""
    # The toolkit's items as plain dicts; a dict whose `reasoning` is a number has two named numbers.
    if isinstance(value, Mapping) and {"score", "reasoning"} <= value.keys() and not _is_number(value["reasoning"]):
        value = EvalOutputItem.model_validate({**value, "id": example_id})
    if not isinstance(value, EvalOutputItem):
        return _score(value, example_id), None
    if value.error is not None:
        raise RuntimeError(value.error)
    score = value.score if value.named_scores is None else value.named_scores
    return _score(score, example_id), _as_json(value.reasoning)


def _as_json(reasoning: Any) -> Any:
    """The reasoning, or its `repr` where JSON has no word for it: it must not keep the scores from being written."""
    try:
        json_bytes(reasoning)
    except (TypeError, ValueError):
        return repr(reasoning)
    return reasoning


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
    wanted = "wanted is a number, a dict of named numbers, an EvalOutputItem, or None"
    raise TypeError(f"it gave {_shown(value)} for example '{example_id}': {wanted}{wrong}")


def _is_number(value: Any) -> bool:
    """Whether it is one real number: a number or a bool of Python or numpy, or an array of any library without axes.

    >>> _is_number(True), _is_number(np.array(0.5)), _is_number(np.array([0.5])), _is_number("0.5"), _is_number(1j)
    (True, True, False, False, False)
    """
    is_convertible = isinstance(value, SupportsFloat)
    if isinstance(value, numbers.Real) or not is_convertible:
        return is_convertible
    # The kinds of numpy's dtypes: bool, int, unsigned, float, and V for the bfloat16 of JAX.
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biufV"


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
