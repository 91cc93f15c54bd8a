"""Evaluators: functions that score one episode, or all episodes of an example, under a time limit.

Evaluators in the toolkit's form, from an `EvalInput` to an `EvalOutput`, become such functions. An evaluator that
raises, exceeds its time limit or returns no score causes an error that names it. NaN and infinities are valid but
unusable scores.
"""

import asyncio
import functools
import json
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NamedTuple, SupportsFloat, TypeVar

import numpy as np
from pydantic import BeforeValidator, Field, field_validator

from jaxft.core import LARGEST_FLOAT32
from jaxft.errors import ConfigError, UserCodeError, did_you_mean, one_line, user_code
from jaxft.files import json_bytes
from jaxft.harness.config_types import config_error, no_bool
from jaxft.harness.data_models import EvalInput, EvalInputItem, EvalOutput, EvalOutputItem
from jaxft.harness.registry import EvaluatorConfig, register_evaluator
from jaxft.harness.supervision import Supervisor, is_async

T = TypeVar("T")


class GroupBarrier(Generic[T]):
    """Barrier for the tasks of a group: collects an item from each, evaluates all, and gives each task its result.

    A task that ends, or is cancelled, without an item leaves the group. When all tasks have ended, the evaluation is
    cancelled, as nothing waits for it.

    Attributes:
        evaluating: the task that waits for the items and evaluates them.
    """

    def __init__(self, size: int, evaluate: Callable[[list[T]], Coroutine[Any, Any, list[T]]]) -> None:
        """Start the task that waits for the items.

        Args:
            size: number of tasks in the group.
            evaluate: called once with the items in the order of the tasks; returns a result for each.
        """
        loop = asyncio.get_running_loop()
        self._items: list[asyncio.Future[T]] = [loop.create_future() for _ in range(size)]
        self._num_open = size
        self._evaluate = evaluate
        self.evaluating = asyncio.create_task(self._evaluate_all())

    def wait_for(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Set the tasks of the group, any of which may be cancelled before it starts."""
        for task, item in zip(tasks, self._items, strict=True):
            task.add_done_callback(functools.partial(self._leave, item))

    async def result(self, index: int, item: T) -> T:
        """Submit the item of the task of this index, and wait for its result; called by that task."""
        self._items[index].set_result(item)
        # A cancelled task must not cancel the evaluation for the others.
        return (await asyncio.shield(self.evaluating))[index]

    def _leave(self, item: asyncio.Future[T], _: asyncio.Task[Any]) -> None:
        item.cancel()  # no effect on an item that was submitted
        self._num_open -= 1
        if self._num_open == 0:
            self.evaluating.cancel()  # no effect once it is done

    async def _evaluate_all(self) -> dict[int, T]:
        await asyncio.wait(self._items)
        items = {index: item.result() for index, item in enumerate(self._items) if not item.cancelled()}
        results = await self._evaluate(list(items.values())) if items else []
        return dict(zip(items, results, strict=True))


Evaluator = Callable[[Any], Any]
"""Function of an `EvalInputItem` that returns a `Score` or an `EvalOutputItem`, or of a list that returns a list.

It may be sync or async. An exception in the place of a score, in the list of a group, fails that episode alone.
"""

Score = float | dict[str, float | None] | None
"""A number, named numbers or None; NaN and infinities are allowed.

The sum of named numbers counts. A name with None does not judge the episode, and is left out of the sum.
"""


class BaseEvaluator(ABC):
    """An evaluator in the toolkit's form; a subclass scores one episode in `evaluate_item`.

    Attributes:
        max_concurrency: maximum number of episodes that are scored at once.
        semaphore: has a slot for each of them.
        tqdm_desc: a label, which is not shown.
    """

    def __init__(self, max_concurrency: int = 4, tqdm_desc: str = "Evaluating") -> None:
        self.max_concurrency = max_concurrency
        self.semaphore = asyncio.Semaphore(max_concurrency)
        self.tqdm_desc = tqdm_desc

    @abstractmethod
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Return the score of an episode, with its reasoning; one that raises fails the episode."""

    async def evaluate(self, eval_input: EvalInput) -> EvalOutput:
        """Score all episodes at once; return their scores in order, and the mean of those that are not None."""

        async def evaluate_item(item: EvalInputItem) -> EvalOutputItem:
            async with self.semaphore:
                try:
                    return await self.evaluate_item(item)
                except Exception as error:
                    if len(eval_input.eval_input_items) == 1:
                        raise
                    return EvalOutputItem(id=item.id, score=None, reasoning=None, error=one_line(error))

        tasks = [asyncio.create_task(evaluate_item(item)) for item in eval_input.eval_input_items]
        try:
            items = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        scores = [item.score for item in items if item.score is not None]
        return EvalOutput(average_score=sum(scores) / len(scores) if scores else None, eval_output_items=items)


@dataclass(frozen=True, kw_only=True)
class EvaluatorInfo:
    """An evaluator as the toolkit's factories yield it.

    Attributes:
        config: its configuration.
        evaluate_fn: async; called with one episode or, of a `GroupEvaluatorConfig`, with all episodes of an example.
        description: a text for people.
    """

    config: EvaluatorConfig
    evaluate_fn: Callable[[EvalInput], Awaitable[EvalOutput]]
    description: str


def as_evaluator(made: Any, *, is_group: bool = False) -> Any:
    """Return an `EvaluatorInfo` or a `BaseEvaluator` as a function of an episode, or of a list; all else unchanged.

    >>> class Length(BaseEvaluator):
    ...     async def evaluate_item(self, item):
    ...         return EvalOutputItem(id=item.id, score=len(item.output_obj), reasoning="its length")
    >>> item = EvalInputItem(id="a", output_obj="four", full_dataset_entry={})
    >>> asyncio.run(as_evaluator(Length())(item)).score
    4.0
    """
    if not isinstance(made, EvaluatorInfo | BaseEvaluator):
        return made
    evaluate_fn = made.evaluate_fn if isinstance(made, EvaluatorInfo) else made.evaluate

    async def evaluate(given: Any) -> Any:
        episodes = given if is_group else [given]
        output = await evaluate_fn(EvalInput(eval_input_items=episodes))
        if not isinstance(output, EvalOutput) or len(output.eval_output_items) != len(episodes):
            wanted = f"an EvalOutput with {len(episodes)} items"
            raise TypeError(f"it gave {_show_value(output)} for example '{episodes[0].id}': wanted is {wanted}")
        return output.eval_output_items if is_group else output.eval_output_items[0]

    return evaluate


@dataclass(frozen=True)
class BoundEvaluator:
    """An evaluator with its settings.

    Attributes:
        function: sync or async; a sync one runs on the event loop or, with a time limit, in a thread of its own.
        is_group: True if it is called once with all episodes of an example, and returns a score for each.
        timeout_seconds: time limit of a call; None: no limit.
    """

    function: Evaluator
    is_group: bool = False
    timeout_seconds: float | None = None


class EpisodeScore(NamedTuple):
    """The score that an evaluator gave one episode, and its reasoning or None."""

    score: Score
    reasoning: Any


class ScoresByEvaluator(NamedTuple):
    """Scores and reasonings of one episode by evaluator; error and traceback of the first evaluator that failed."""

    scores: dict[str, Score]
    reasonings: dict[str, Any]
    error: str | None = None
    traceback: str | None = None


async def run_evaluators(
    evaluators: Mapping[str, BoundEvaluator], items: Sequence[EvalInputItem], supervisor: Supervisor
) -> list[ScoresByEvaluator]:
    """Run evaluators one after the other on all items; the first that fails on an item ends its evaluation.

    Args:
        evaluators: evaluators by name; all of them group evaluators, unless there is one item.
        items: finished episodes of one example, at least one.
        supervisor: runs the evaluators.
    """
    scores = [ScoresByEvaluator({}, {}) for _ in items]
    for name, evaluator in evaluators.items():
        left = [index for index, known in enumerate(scores) if known.error is None]
        if not left:
            break
        try:
            with user_code():
                given = await _scores(name, evaluator, [items[index] for index in left], supervisor)
        except UserCodeError as failure:
            given = [failure] * len(left)
        for index, value in zip(left, given, strict=True):
            if isinstance(value, UserCodeError):
                error = f"evaluator '{name}': {value.summary}"
                scores[index] = scores[index]._replace(error=error, traceback=value.traceback)
                continue
            scores[index].scores[name], reasoning = value
            if reasoning is not None:
                scores[index].reasonings[name] = reasoning
    return scores


def to_scalar(score: Score) -> float | None:
    """Return the score as one number (the sum of named ones); None if it is not finite, or too large for float32.

    >>> to_scalar({"win": 1.0, "speed": 0.5, "style": None}), to_scalar(float("nan")), to_scalar({"style": None})
    (1.5, None, None)
    """
    parts = [part for part in (score.values() if isinstance(score, dict) else [score]) if part is not None]
    return sum(parts) if parts and abs(sum(parts)) <= LARGEST_FLOAT32 else None


async def _scores(
    name: str, evaluator: BoundEvaluator, items: Sequence[EvalInputItem], supervisor: Supervisor
) -> list[EpisodeScore | UserCodeError]:
    """Return score and reasoning (or None) of each item, or the error of that item alone."""
    given = await supervisor.run(
        evaluator.function,
        list(items) if evaluator.is_group else items[0],
        name=f"evaluator '{name}' of example '{items[0].id}'",
        run_in_thread=evaluator.timeout_seconds is not None and not is_async(evaluator.function),
        seconds=evaluator.timeout_seconds,
        late="no score",
    )
    return scored_values(given, items, is_group=evaluator.is_group)


def scored_values(given: Any, items: Sequence[EvalInputItem], *, is_group: bool) -> list[EpisodeScore | UserCodeError]:
    """Return the scores in what an evaluator returned for an item or a group, or the error of a wrong value alone.

    Raises:
        TypeError, ValueError: there is not one value for each item.
    """
    example_id = items[0].id
    if not is_group:
        return [_scored_alone(given, example_id)]
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(
            f"it gave {_show_value(given)} for example '{example_id}': wanted is a list with a score for each of its "
            f"{len(items)} episodes"
        )
    if len(given) != len(items):
        raise ValueError(f"it gave {len(given)} scores for the {len(items)} episodes of example '{example_id}'")
    return [_scored_alone(value, example_id) for value in given]


def _scored_alone(value: Any, example_id: str) -> EpisodeScore | UserCodeError:
    """Return `_read_score`, or the error of this episode: one that the evaluator returned, or of a wrong value."""
    try:
        with user_code():
            if isinstance(value, Exception):
                raise value
            return _read_score(value, example_id)
    except UserCodeError as failure:
        return failure


def _read_score(value: Any, example_id: str) -> EpisodeScore:
    """Return score and reasoning from the value that an evaluator returned for one episode."""
    if isinstance(value, EpisodeScore):  # that of a worker
        return value
    # An item of the toolkit as a plain dict. If `reasoning` is a number, the dict holds two named scores instead.
    if isinstance(value, Mapping) and {"score", "reasoning"} <= value.keys() and not is_number(value["reasoning"]):
        value = EvalOutputItem.model_validate({**value, "id": example_id})
    if not isinstance(value, EvalOutputItem):
        return EpisodeScore(_score(value, example_id), None)
    if value.error is not None:
        raise RuntimeError(value.error)
    score = value.score if value.named_scores is None else value.named_scores
    return EpisodeScore(_score(score, example_id), _as_json(value.reasoning))


def _as_json(reasoning: Any) -> Any:
    """Return the reasoning, or its `repr` if JSON cannot hold it, so that scores can always be written."""
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
        known = [name for name, part in value.items() if isinstance(name, str) and (part is None or is_number(part))]
        odd = [name for name in value if name not in known]
        if known and not odd:
            return {name: None if (part := value[name]) is None else _float(part, example_id) for name in known}
        wrong = f"; what is wrong: {odd[0]!r}: {_show_value(value[odd[0]])}" if odd else ""
    elif is_number(value):
        return _float(value, example_id)
    wanted = "wanted is a number, a dict of named numbers, an EvalOutputItem, or None"
    raise TypeError(f"it gave {_show_value(value)} for example '{example_id}': {wanted}{wrong}")


def _float(value: Any, example_id: str) -> float:
    number = float(value)
    if LARGEST_FLOAT32 < abs(number) < math.inf:
        raise ValueError(f"it gave {number:g} for example '{example_id}': wanted is a number that fits float32")
    return number


def is_number(value: Any) -> bool:
    """True for one real number: a number or bool of Python or numpy, or an array of any library without axes.

    >>> is_number(True), is_number(np.array(0.5)), is_number(np.array([0.5])), is_number("0.5"), is_number(1j)
    (True, True, False, False, False)
    """
    is_convertible = isinstance(value, SupportsFloat)
    if isinstance(value, numbers.Real) or not is_convertible:
        return is_convertible
    # The kinds of numpy's dtypes: bool, int, unsigned, float, and V for the bfloat16 of JAX.
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biufV"


def _show_value(value: Any) -> str:
    return f"{repr(value)[:100]} ({type(value).__name__})"


SECTION = "eval.evaluators"


class WeightedSumConfig(EvaluatorConfig, name="weighted_sum"):
    """Weighted sum of the scores of other evaluators, as named rewards; unusable if one of the scores is."""

    weights: dict[str, Annotated[float, BeforeValidator(no_bool), Field(allow_inf_nan=False)]] = Field(min_length=1)
    """Weight of each score in the sum, by its name: another entry of eval.evaluators."""

    @field_validator("timeout_seconds")
    @classmethod
    def _takes_no_time(cls, seconds: float | None) -> float | None:
        if seconds is not None:
            raise config_error("a weighted sum only adds up: limit the evaluators that it is made of")
        return seconds


@dataclass(frozen=True)
class WeightedSum:
    """Weighted sum of the scores of other evaluators, with weights by name."""

    weights: Mapping[str, float]

    def __call__(self, scores: Mapping[str, Score]) -> dict[str, float | None]:
        """Return `{name: weight * score}`; named scores are summed first, and an unusable score becomes NaN.

        >>> WeightedSum({"win": 2.0, "style": 0.5})({"win": 1.0, "style": {"short": 1.0, "kind": 3.0}, "other": None})
        {'win': 2.0, 'style': 2.0}
        """
        numbers = {name: to_scalar(scores[name]) for name in self.weights}
        return {name: math.nan if number is None else self.weights[name] * number for name, number in numbers.items()}

    def reasoning(self, reasonings: Mapping[str, Any]) -> str | None:
        """Return the reasonings of the evaluators that it adds up, as text; None without any."""
        given = [reasonings[name] for name in self.weights if name in reasonings]
        texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in given]
        return "\n".join(texts) or None


def weighted_sum_faults(evaluators: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the errors of weighted sums that name an unknown evaluator or another sum: pairs (name, message).

    Args:
        evaluators: all evaluators, or their configurations.
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


def bind_evaluators(evaluators: Mapping[str, Any]) -> dict[str, BoundEvaluator]:
    """Return all evaluators but weighted sums, bound: those that are not score one episode without a time limit.

    Raises:
        ConfigError: a weighted sum names an unknown evaluator or another sum.
    """
    faults = weighted_sum_faults(evaluators)
    if faults:
        raise ConfigError([f"{SECTION}.{name}.weights: {message}" for name, message in faults])
    return {
        name: each if isinstance(each, BoundEvaluator) else BoundEvaluator(as_evaluator(each))
        for name, each in evaluators.items()
        if not isinstance(each, WeightedSum)
    }


@register_evaluator(config_type=WeightedSumConfig)
async def weighted_sum(config: WeightedSumConfig, builder: Any) -> AsyncIterator[WeightedSum]:
    """Yield the weighted sum, which the evaluation applies."""
    yield WeightedSum(config.weights)
