"""How evaluators are asked, and what counts as a score: one episode or a whole group at a time, under a deadline.

What is user code's fault (it raises, it hangs, it gives no number) becomes an error that names the evaluator; what is
not a finite number is a score all the same, which is not usable.
"""

import asyncio
import functools
import math
import numbers
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NamedTuple, SupportsFloat, TypeVar

import numpy as np
from pydantic import Field, field_validator

from jaxft.core import LARGEST_FLOAT32
from jaxft.errors import UserCodeError, did_you_mean, user_code
from jaxft.files import json_bytes
from jaxft.harness.config_types import check_reference, config_error
from jaxft.harness.data_models import EvalInputItem, EvalOutputItem
from jaxft.harness.registry import EvaluatorConfig, register_evaluator
from jaxft.harness.supervision import Supervisor, is_async

T = TypeVar("T")


class GroupBarrier(Generic[T]):
    """Tasks of which each brings something, and gets what is made of it in view of what the others brought.

    A task that ends, or is cancelled, without bringing anything drops out. When all have ended, so does the judging:
    nobody is left to wait for it.

    Attributes:
        judging: the task that waits for what is brought and judges it.
    """

    def __init__(self, size: int, run_evaluators: Callable[[list[T]], Coroutine[Any, Any, list[T]]]) -> None:
        """Starts to wait.

        Args:
            size: how many tasks there will be.
            judge: called once with what was brought, in the order of the tasks; gives as many things.
        """
        loop = asyncio.get_running_loop()
        self._brought: list[asyncio.Future[T]] = [loop.create_future() for _ in range(size)]
        self._num_open = size
        self._judge = run_evaluators
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


Evaluator = Callable[[Any], Any]
"""From an `EvalInputItem`, or from a list of them, to a `Score` or an `EvalOutputItem`, or to a list; sync or async."""

Score = float | dict[str, float] | None
"""What an evaluator gave: a number, named numbers (their sum counts) or nothing. It may hold NaN or an infinity."""


@dataclass(frozen=True)
class BoundEvaluator:
    """An evaluator and how it is asked.

    Attributes:
        function: sync or async; a sync one runs on the event loop, or, under a deadline, in a thread of its own.
        is_group: whether it is given all episodes of an example at once, and gives a score for each.
        timeout_seconds: how long it may take.
    """

    function: Evaluator
    is_group: bool = False
    timeout_seconds: float | None = None


class Scores(NamedTuple):
    """The scores of one episode by evaluator, up to the one that failed; then `error` and `traceback`.

    `reasonings` holds the reasons of the evaluators that gave one, by evaluator.
    """

    scores: dict[str, Score]
    reasonings: dict[str, Any]
    error: str | None = None
    traceback: str | None = None


async def run_evaluators(
    judges: Mapping[str, BoundEvaluator], items: Sequence[EvalInputItem], supervisor: Supervisor
) -> list[Scores]:
    """What the evaluators, asked one after the other, say of each of the items; when one fails, it fails for all.

    Args:
        judges: by name; all of them group evaluators, unless there is one item.
        items: finished episodes of one example, at least one.
        supervisor: runs the evaluators.
    """
    judgements = [Scores({}, {}) for _ in items]
    for name, evaluator in judges.items():
        try:
            with user_code():
                given = await _scores(name, evaluator, items, supervisor)
        except UserCodeError as failure:
            error = f"evaluator '{name}': {failure.summary}"
            return [known._replace(error=error, traceback=failure.traceback) for known in judgements]
        for known, (score, reasoning) in zip(judgements, given, strict=True):
            known.scores[name] = score
            if reasoning is not None:
                known.reasonings[name] = reasoning
    return judgements


def to_scalar(score: Score) -> float | None:
    """The score as one number (the sum of named ones); None when it is not finite, or too large for float32.

    >>> usable({"win": 1.0, "speed": 0.5}), usable(float("nan")), usable(None)
    (1.5, None, None)
    """
    parts = [] if score is None else list(score.values()) if isinstance(score, dict) else [score]
    return sum(parts) if parts and abs(sum(parts)) <= LARGEST_FLOAT32 else None


async def _scores(
    name: str, evaluator: BoundEvaluator, items: Sequence[EvalInputItem], supervisor: Supervisor
) -> list[tuple[Score, Any]]:
    """The score of each item, with the evaluator's reasoning (None without one)."""
    example_id = items[0].id
    given = await supervisor.run(
        evaluator.function,
        list(items) if evaluator.is_group else items[0],
        name=f"evaluator '{name}' of example '{example_id}'",
        run_in_thread=evaluator.timeout_seconds is not None and not is_async(evaluator.function),
        seconds=evaluator.timeout_seconds,
        late="no score",
    )
    if not evaluator.is_group:
        return [_scored(given, example_id)]
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(
            f"it gave {_shown(given)} for example '{example_id}': wanted is a list with a score for each of its "
            f"{len(items)} episodes"
        )
    if len(given) != len(items):
        raise ValueError(f"it gave {len(given)} scores for the {len(items)} episodes of example '{example_id}'")
    return [_scored(value, example_id) for value in given]


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
            return {name: _float(part, example_id) for name, part in named.items()}
        wrong = f"; what is wrong: {odd[0]!r}: {_shown(named[odd[0]])}" if odd else ""
    elif _is_number(value):
        return _float(value, example_id)
    wanted = "wanted is a number, a dict of named numbers, an EvalOutputItem, or None"
    raise TypeError(f"it gave {_shown(value)} for example '{example_id}': {wanted}{wrong}")


def _float(value: Any, example_id: str) -> float:
    number = float(value)
    if LARGEST_FLOAT32 < abs(number) < math.inf:
        raise ValueError(f"it gave {number:g} for example '{example_id}': wanted is a number that fits float32")
    return number


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


SECTION = "eval.evaluators"


class WeightedSumConfig(EvaluatorConfig, name="weighted_sum"):
    """Named rewards, `{name: weight * score}`; not usable when one of the scores is not."""

    weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        min_length=1, description="Weight of each score in the sum, by its name: another entry of eval.evaluators."
    )

    # `values`: before pydantic makes 1.0 of true. `info` is its ValidationInfo.
    @field_validator("weights", mode="before")
    @classmethod
    def _true_is_no_weight(cls, values: Any) -> Any:
        for name, weight in values.items() if isinstance(values, Mapping) else ():
            if isinstance(weight, bool):
                raise config_error(f"the weight of '{name}' must be a number (holds a bool)")
        return values

    @field_validator("weights")
    @classmethod
    def _are_evaluators(cls, weights: dict[str, float], info: Any) -> dict[str, float]:
        for name in weights:
            check_reference(SECTION, name, info)
        return weights

    @field_validator("timeout_seconds")
    @classmethod
    def _takes_no_time(cls, seconds: float | None) -> float | None:
        if seconds is not None:
            raise config_error("a weighted sum only adds up: limit the evaluators that it is made of")
        return seconds


@dataclass(frozen=True)
class WeightedSum:
    """Weights of the scores of other evaluators, by name."""

    weights: Mapping[str, float]

    def __call__(self, scores: Mapping[str, Score]) -> dict[str, float]:
        """The weighted scores; that of a dict is its sum, that of what is not usable is NaN.

        >>> WeightedSum({"win": 2.0, "style": 0.5})({"win": 1.0, "style": {"short": 1.0, "kind": 3.0}, "other": None})
        {'win': 2.0, 'style': 2.0}
        """
        numbers = {name: to_scalar(scores[name]) for name in self.weights}
        return {name: math.nan if number is None else self.weights[name] * number for name, number in numbers.items()}


def weighted_sum_faults(evaluators: Mapping[str, object]) -> list[tuple[str, str]]:
    """Sums of what is not there, and of sums: the name of the sum, and what is wrong with its weights.

    Args:
        evaluators: all of them, or all of their configurations.
    """
    sums = {name: each for name, each in evaluators.items() if isinstance(each, WeightedSum | WeightedSumConfig)}
    faults = []
    for own, weighted in sums.items():
        for name in weighted.weights:
            if name not in evaluators:
                hint = did_you_mean(name, [known for known in evaluators if known not in sums], what="there")
                faults.append((own, f"'{name}' is not in '{SECTION}'{hint}"))
            elif name in sums:
                what = "this weighted sum itself" if name == own else "a weighted sum, too"
                faults.append((own, f"'{name}' is {what}: name the evaluators that it is made of"))
    return faults


@register_evaluator(config_type=WeightedSumConfig)
async def weighted_sum(config: WeightedSumConfig, builder: Any) -> AsyncIterator[WeightedSum]:
    """The weights; the evaluation applies them."""
    yield WeightedSum(config.weights)
