"""An evaluation run: episodes of the workflow over examples, some at once, each judged by the evaluators.

One episode that fails is one failed outcome; the others never notice. Outcomes come in the order of (example,
generation), whatever order they ended in.
"""

import asyncio
import copy
import inspect
import math
import numbers
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxft.harness.data_models import EvalInput, EvalInputItem, EvalOutput, EvalOutputItem, EvaluationRunOutput
from jaxft.harness.errors import UserCodeError, user_code
from jaxft.policy.recorder import VALIDATION, Episode, recording

Workflow = Callable[[dict[str, Any]], Awaitable[Any]]
Evaluator = Callable[[EvalInputItem], Any]
Score = float | dict[str, float] | None
"""What an evaluator gave: a number, named numbers (their sum counts) or nothing. It may hold NaN or an infinity."""


@dataclass(frozen=True)
class EpisodeOutcome:
    """How one episode went.

    Attributes:
        item: the example, with the workflow's output.
        episode: what its language models were asked and answered.
        scores: by evaluator.
        reward: the reward function's score; None without one, for a failed episode, and for a score that is None or
            not finite.
        named_rewards: the parts of the reward when the evaluator gave a dict and the reward is usable.
        error: type and message of what the workflow or an evaluator raised, in one line; None when all went well.
        traceback: the whole traceback of that error.
        seconds: `rollout` and `reward`.
    """

    item: EvalInputItem
    episode: Episode
    scores: dict[str, Score] = field(default_factory=dict)
    reward: float | None = None
    named_rewards: dict[str, float] | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """Which attempt at the example it was."""
        return self.episode.generation


class Evaluation:
    """A workflow with its evaluators, ready to run.

    Attributes:
        reward_name: the evaluator that gives the reward; None for no reward.
        num_validations: how often `validate` was called; the next one's rollout index.
    """

    def __init__(
        self,
        workflow: Workflow,
        evaluators: Mapping[str, Evaluator],
        reward_name: str | None,
        max_concurrency: int,
        seed: int,
    ) -> None:
        """Checks the reward's name.

        Args:
            workflow: called with a copy of the example's row.
            evaluators: by name; sync ones run on the event loop.
            reward_name: one of the evaluators, or None.
            max_concurrency: episodes that run at once, over all runs of this object.
            seed: the run's.
        """
        if reward_name is not None and reward_name not in evaluators:
            raise ValueError(f"reward_name is '{reward_name}'; the evaluators are {', '.join(evaluators) or 'none'}")
        self._workflow = workflow
        self._evaluators = dict(evaluators)
        self.reward_name = reward_name
        self._slots = asyncio.Semaphore(max_concurrency)
        self._seed = seed
        self._tasks: set[asyncio.Task[EpisodeOutcome]] = set()
        self.num_validations = 0

    def start(
        self,
        items: Sequence[EvalInputItem],
        *,
        stream: int,
        rollout_index: int,
        num_generations: int = 1,
        temperature: float | None = None,
    ) -> list[asyncio.Task[EpisodeOutcome]]:
        """Starts an episode per (example, generation) and returns their tasks in that order.

        The caller awaits them; those that nobody awaited are cancelled by `close`. A task raises nothing but
        cancellation.

        Args:
            items: the examples.
            stream: `TRAINING` or `VALIDATION`.
            rollout_index: of this collection in its stream.
            num_generations: episodes per example.
            temperature: replaces that of every language-model call (0.0: greedy).
        """
        tasks = [
            asyncio.create_task(
                self._run_episode(
                    item, Episode(self._seed, stream, rollout_index, item.id, generation, temperature=temperature)
                ),
                name=f"episode {item.id}/{generation}",
            )
            for item in items
            for generation in range(num_generations)
        ]
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return tasks

    async def run(
        self,
        items: Sequence[EvalInputItem],
        *,
        stream: int,
        rollout_index: int,
        num_generations: int = 1,
        temperature: float | None = None,
    ) -> list[EpisodeOutcome]:
        """`start`, and the outcomes in the same order. When it is cancelled, so are its episodes."""
        tasks = self.start(
            items,
            stream=stream,
            rollout_index=rollout_index,
            num_generations=num_generations,
            temperature=temperature,
        )
        try:
            return await asyncio.gather(*tasks)
        finally:
            await _cancel(tasks)

    async def validate(
        self, items: Sequence[EvalInputItem], *, temperature: float | None = 0.0, num_generations: int = 1
    ) -> list[EpisodeOutcome]:
        """`run` on the validation stream, greedy by default, each time with the next rollout index."""
        index = self.num_validations
        self.num_validations += 1
        return await self.run(
            items, stream=VALIDATION, rollout_index=index, num_generations=num_generations, temperature=temperature
        )

    async def close(self) -> None:
        """Cancels every episode that still runs, and waits for its end."""
        await _cancel(list(self._tasks))

    async def _run_episode(self, item: EvalInputItem, episode: Episode) -> EpisodeOutcome:
        async with self._slots:
            started = time.perf_counter()
            try:
                with user_code(), recording(episode):
                    # A copy: what one episode does to its row must not reach the next.
                    output = await _own_cancellation(self._workflow(copy.deepcopy(item.full_dataset_entry)))
            except UserCodeError as failure:
                seconds = {"rollout": time.perf_counter() - started, "reward": 0.0}
                return EpisodeOutcome(
                    item, episode, error=failure.summary, traceback=failure.traceback, seconds=seconds
                )
            item = item.model_copy(update={"output_obj": output})
            return await self._judge(item, episode, rollout_seconds=time.perf_counter() - started)

    async def _judge(self, item: EvalInputItem, episode: Episode, rollout_seconds: float) -> EpisodeOutcome:
        started = time.perf_counter()
        scores: dict[str, Score] = {}
        error = error_traceback = None
        for name, evaluator in self._evaluators.items():
            try:
                with user_code():
                    given = evaluator(item)
                    value = await _own_cancellation(given) if inspect.isawaitable(given) else given
                    scores[name] = _score(value, item.id)
            except UserCodeError as failure:
                error, error_traceback = f"evaluator '{name}': {failure.summary}", failure.traceback
                break
        score = scores[self.reward_name] if error is None and self.reward_name is not None else None
        reward = usable(score)
        return EpisodeOutcome(
            item,
            episode,
            scores,
            reward,
            named_rewards=score if isinstance(score, dict) and reward is not None else None,
            error=error,
            traceback=error_traceback,
            seconds={"rollout": rollout_seconds, "reward": time.perf_counter() - started},
        )

    def summarize(self, outcomes: Sequence[EpisodeOutcome]) -> EvaluationRunOutput:
        """What the outcomes amount to: averages over what is usable, and counts of what is not."""
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        return EvaluationRunOutput(
            eval_input=EvalInput(eval_input_items=[outcome.item for outcome in outcomes]),
            evaluation_results=[(name, _verdicts(name, outcomes)) for name in self._evaluators],
            average_reward=sum(rewards) / len(rewards) if rewards else None,
            num_episodes=len(outcomes),
            num_failed=len(failed),
            num_unscorable=len(outcomes) - len(failed) - len(rewards) if self.reward_name is not None else 0,
            first_error=failure_report(failed[0]) if failed else None,
        )


def failure_report(outcome: EpisodeOutcome) -> str:
    """A failed episode in words: example, error and traceback."""
    return f"example '{outcome.item.id}', generation {outcome.generation}: {outcome.error}\n{outcome.traceback}"


def usable(score: Score) -> float | None:
    """The score as one finite number (the sum of named ones); None when it, or one of its parts, is not.

    >>> usable({"win": 1.0, "speed": 0.5}), usable(float("nan")), usable(None)
    (1.5, None, None)
    """
    parts = [] if score is None else list(score.values()) if isinstance(score, dict) else [score]
    return sum(parts) if parts and math.isfinite(sum(parts)) else None


def _score(value: Any, example_id: str) -> Score:
    if value is None:
        return None
    if isinstance(value, Mapping):
        named = {name: math.nan if part is None else part for name, part in value.items()}
        if named and all(isinstance(name, str) and _is_number(part) for name, part in named.items()):
            return {name: float(part) for name, part in named.items()}
    elif _is_number(value):
        return float(value)
    raise TypeError(
        f"it gave {repr(value)[:100]} ({type(value).__name__}) for example '{example_id}': "
        "wanted is a number, a dict of named numbers, or None"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _verdicts(name: str, outcomes: Sequence[EpisodeOutcome]) -> EvalOutput:
    items = [_verdict(name, outcome) for outcome in outcomes]
    scores = [item.score for item in items if item.score is not None]
    return EvalOutput(average_score=sum(scores) / len(scores) if scores else None, eval_output_items=items)


def _verdict(name: str, outcome: EpisodeOutcome) -> EvalOutputItem:
    given = outcome.scores.get(name)
    score = usable(given)
    return EvalOutputItem(
        id=outcome.item.id,
        score=score,
        reasoning=None if score is not None or outcome.error is not None else f"not usable: {given}",
        error=outcome.error,
        generation=outcome.generation,
        named_scores=given if isinstance(given, dict) and score is not None else None,
    )


async def _own_cancellation(awaitable: Awaitable[Any]) -> Any:
    """What user code gives. A cancellation that nobody asked of this task is that code's error, not the run's end."""
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("it let the cancellation of a task of its own escape") from error


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
