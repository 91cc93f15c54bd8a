"""How evaluators are asked, and what counts as a score: one episode or a whole group at a time, under a deadline.

What is user code's fault (it raises, it hangs, it gives no number) becomes an error that names the evaluator; what is
not a finite number is a score all the same, which is not usable.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.errors import UserCodeError, user_code
from jaxft.harness.supervision import Supervisor, is_async
from jaxft.policy.recorder import MAX_REWARD

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


async def judge(judges: Mapping[str, Judge], items: Sequence[EvalInputItem], supervisor: Supervisor) -> list[Judgement]:
    """What the evaluators, asked one after the other, say of each of the items; when one fails, it fails for all.

    Args:
        judges: by name; all of them group evaluators, unless there is one item.
        items: finished episodes of one example, at least one.
        supervisor: runs the evaluators.
    """
    scores: list[dict[str, Score]] = [{} for _ in items]
    for name, evaluator in judges.items():
        try:
            with user_code():
                given = await _scores(name, evaluator, items, supervisor)
        except UserCodeError as failure:
            error = f"evaluator '{name}': {failure.summary}"
            return [Judgement(known, error, failure.traceback) for known in scores]
        for known, score in zip(scores, given, strict=True):
            known[name] = score
    return [Judgement(known) for known in scores]


def usable(score: Score) -> float | None:
    """The score as one number (the sum of named ones); None when it is not finite, or too large for float32.

    >>> usable({"win": 1.0, "speed": 0.5}), usable(float("nan")), usable(None)
    (1.5, None, None)
    """
    parts = [] if score is None else list(score.values()) if isinstance(score, dict) else [score]
    return sum(parts) if parts and abs(sum(parts)) <= MAX_REWARD else None


async def _scores(name: str, evaluator: Judge, items: Sequence[EvalInputItem], supervisor: Supervisor) -> list[Score]:
    example_id = items[0].id
    given = await supervisor.run(
        evaluator.function,
        list(items) if evaluator.is_group else items[0],
        name=f"evaluator '{name}' of example '{example_id}'",
        in_thread=evaluator.timeout_seconds is not None and not is_async(evaluator.function),
        seconds=evaluator.timeout_seconds,
        late="no score",
    )
    if not evaluator.is_group:
        return [_score(given, example_id)]
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(
            f"it gave {_shown(given)} for example '{example_id}': wanted is a list with a score for each of its "
            f"{len(items)} episodes"
        )
    if len(given) != len(items):
        raise ValueError(f"it gave {len(given)} scores for the {len(items)} episodes of example '{example_id}'")
    return [_score(value, example_id) for value in given]


def _score(value: Any, example_id: str) -> Score:
    wrong = ""
    if value is None:
        return None
    if isinstance(value, Mapping):
        named = {name: math.nan if part is None else part for name, part in value.items()}
        odd = [name for name, part in named.items() if not isinstance(name, str) or not _is_number(part)]
        if named and not odd:
            return {name: _float(part, example_id) for name, part in named.items()}
        wrong = f"; what is wrong: {odd[0]!r}: {_shown(named[odd[0]])}" if odd else ""
    elif _is_number(value):
        return _float(value, example_id)
    wanted = "wanted is a number, a dict of named numbers, or None"
    raise TypeError(f"it gave {_shown(value)} for example '{example_id}': {wanted}{wrong}")


def _float(value: Any, example_id: str) -> float:
    number = float(value)
    if MAX_REWARD < abs(number) < math.inf:
        raise ValueError(f"it gave {number:g} for example '{example_id}': wanted is a number that fits float32")
    return number


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"{repr(value)[:100]} ({type(value).__name__})"
