"""An evaluation run: episodes of the workflow over examples, some at once, each judged by the evaluators.

One episode that fails is one failed outcome; the others never notice. Only what a group evaluator says is said of all
episodes of an example at once, when the last of them has ended. Outcomes come in the order of (example, generation),
whatever order they ended in.
"""

import asyncio
import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jaxft.errors import ConfigError, PolicyError, UserCodeError, user_code
from jaxft.harness.config_types import at_json_path
from jaxft.harness.data_models import EvalInput, EvalInputItem, EvalOutput, EvalOutputItem, EvaluationRunOutput
from jaxft.harness.evaluators import (
    SECTION,
    BoundEvaluator,
    Evaluator,
    GroupBarrier,
    Score,
    Scores,
    WeightedSum,
    run_evaluators,
    to_scalar,
    weighted_sum_faults,
)
from jaxft.harness.supervision import Supervisor, is_async, named
from jaxft.rollout.recorder import VALIDATION, Episode, outside_calls, recording

Workflow = Callable[[dict[str, Any]], Any]
"""From a row to an output. An async one runs on the event loop; a plain function, which may block, in a thread."""


@dataclass(frozen=True)
class EpisodeOutcome:
    """How one episode went.

    Attributes:
        item: the example, with the workflow's output.
        episode: what its language models were asked and answered.
        scores: by evaluator.
        reasonings: by evaluator, of those that gave one.
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
    reasonings: dict[str, Any] = field(default_factory=dict)
    reward: float | None = None
    named_rewards: dict[str, float] | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """Which attempt at the example it was."""
        return self.episode.generation

    def judged(self, judgement: Scores, seconds: float) -> "EpisodeOutcome":
        """The outcome with what evaluators said, which took them so long."""
        return replace(
            self,
            scores=self.scores | judgement.scores,
            reasonings=self.reasonings | judgement.reasonings,
            error=judgement.error,
            traceback=judgement.traceback,
            seconds=self.seconds | {"reward": self.seconds["reward"] + seconds},
        )


class Evaluation:
    """A workflow with its evaluators, ready to run.

    Attributes:
        reward_name: the evaluator that gives the reward; None for no reward.
        num_validations: how often `validate` was called, here or by those counted with it; the next rollout index.
        supervisor: runs what the user wrote, and counts what had to be abandoned.
        num_outside_calls: calls of language models that were made outside of any episode while episodes ran.
    """

    def __init__(
        self,
        workflow: Workflow,
        evaluators: Mapping[str, Evaluator | BoundEvaluator | WeightedSum],
        reward_name: str | None,
        max_concurrency: int,
        seed: int,
        *,
        timeout_seconds: float | None = None,
        result_json_path: str | None = None,
        counted_with: "Evaluation | None" = None,
        show_progress: Callable[[Callable[[], str]], None] = lambda progress: None,
        log: Callable[[str], None] = lambda sentence: print(sentence, file=sys.stderr, flush=True),
    ) -> None:
        """Checks the evaluators and the reward's name.

        Args:
            workflow: called with a copy of the example's row.
            evaluators: by name; a function judges one episode and may take for ever, a `BoundEvaluator` says otherwise.
            reward_name: one of the evaluators, or None.
            max_concurrency: episodes that run at once, over all runs of this object, and groups judged at once.
            seed: the run's.
            timeout_seconds: how long the workflow may take for an episode.
            result_json_path: where in the workflow's output the result is; None: all of it.
            counted_with: another evaluation of the same run, with which this one shares the count of validations, so
                that no two of them draw the same random numbers.
            show_progress: is given a function whenever episodes are started, which says how far they have come.
            say: shows a sentence, as of an episode that was abandoned; called from any thread.

        Raises:
            ValueError: the reward's name is not among the evaluators, or a weighted sum adds up what is not there.
        """
        if reward_name is not None and reward_name not in evaluators:
            raise ValueError(f"reward_name is '{reward_name}'; the evaluators are {', '.join(evaluators) or 'none'}")
        self._workflow = workflow
        self._names = list(evaluators)
        self._sums = {name: each for name, each in evaluators.items() if isinstance(each, WeightedSum)}
        faults = weighted_sum_faults(evaluators)
        if faults:
            raise ConfigError([f"{SECTION}.{name}.weights: {message}" for name, message in faults])
        judges = {
            name: each if isinstance(each, BoundEvaluator) else BoundEvaluator(each)
            for name, each in evaluators.items()
            if not isinstance(each, WeightedSum)
        }
        self._judges = {name: each for name, each in judges.items() if not each.is_group}
        self._group_judges = {name: each for name, each in judges.items() if each.is_group}
        self.reward_name = reward_name
        self._slots = asyncio.Semaphore(max_concurrency)
        self._judging_slots = asyncio.Semaphore(max_concurrency)
        self._seed = seed
        self._timeout_seconds = timeout_seconds
        self._episodes: set[asyncio.Task[Any]] = set()
        self._judgings: set[asyncio.Task[Any]] = set()
        self._result_json_path = result_json_path
        self._counter = self if counted_with is None else counted_with
        self._show_progress = show_progress
        self.num_validations = 0
        self.num_outside_calls = 0
        self.supervisor = Supervisor(log)
        self._log = log

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
        cancellation, and the `PolicyError` of a policy that cannot go on.

        Args:
            items: the examples.
            stream: `TRAINING` or `VALIDATION`.
            rollout_index: of this collection in its stream.
            num_generations: episodes per example.
            temperature: replaces that of every language-model call (0.0: greedy).
        """
        episodes, _ = self._start(items, stream, rollout_index, num_generations, temperature)
        return episodes

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
        episodes, judgings = self._start(items, stream, rollout_index, num_generations, temperature)
        try:
            return await asyncio.gather(*episodes)
        finally:
            await _cancel(episodes, judgings)

    async def validate(
        self, items: Sequence[EvalInputItem], *, temperature: float | None = 0.0, num_generations: int = 1
    ) -> list[EpisodeOutcome]:
        """`run` on the validation stream, greedy by default, each time with the next rollout index."""
        index = self._counter.num_validations
        self._counter.num_validations += 1
        return await self.run(
            items, stream=VALIDATION, rollout_index=index, num_generations=num_generations, temperature=temperature
        )

    async def close(self) -> None:
        """Cancels every episode that still runs, and waits for its end."""
        await _cancel(list(self._episodes), list(self._judgings))

    def _start(
        self,
        items: Sequence[EvalInputItem],
        stream: int,
        rollout_index: int,
        num_generations: int,
        temperature: float | None,
    ) -> tuple[list[asyncio.Task[EpisodeOutcome]], list[asyncio.Task[Any]]]:
        """The tasks of the episodes, and those that judge groups, which end when their episodes do."""
        episodes: list[asyncio.Task[EpisodeOutcome]] = []
        judgings: list[asyncio.Task[Any]] = []
        records: list[Episode] = []
        for item in items:
            group = GroupBarrier(num_generations, self._judge_together) if self._group_judges else None
            record = partial(Episode, self._seed, stream, rollout_index, item.id, temperature=temperature)
            own = [record(generation=generation) for generation in range(num_generations)]
            tasks = [
                asyncio.create_task(
                    self._run_episode(item, episode, group), name=f"episode {item.id}/{episode.generation}"
                )
                for episode in own
            ]
            records += own
            episodes += tasks
            if group is not None:
                group.wait_for(tasks)
                judgings.append(group.judging)
        for known, tasks in ((self._episodes, episodes), (self._judgings, judgings)):
            known.update(tasks)
            for task in tasks:
                task.add_done_callback(known.discard)
        what = "validating: " if stream == VALIDATION else ""
        self._show_progress(partial(_progress, what, episodes, records, time.perf_counter()))
        self._count_outside_calls(episodes)
        return episodes, judgings

    def _count_outside_calls(self, episodes: Sequence[asyncio.Task[Any]]) -> None:
        """Counts what is asked outside of any episode until the last of these has ended, and says so."""
        before, running = outside_calls(), set(episodes)

        def leave(task: asyncio.Task[Any]) -> None:
            running.discard(task)
            count = outside_calls() - before
            if running or not count:
                return
            self.num_outside_calls += count
            self._log(
                f"{count} calls of language models were made outside of any episode while episodes ran, as by threads "
                "that an agent started: they are not trained, and cannot be repeated; hand such a thread "
                "jaxft.in_episode(function) in the place of function"
            )

        for task in episodes:
            task.add_done_callback(leave)

    async def _run_episode(
        self, item: EvalInputItem, episode: Episode, group: GroupBarrier[EpisodeOutcome] | None
    ) -> EpisodeOutcome:
        async with self._slots:
            outcome = await self._roll_out(item, episode)
            if outcome.error is None:
                (outcome,) = await self._judged(self._judges, [outcome])
        # The slot is free while the episode waits for the others of its group: they may need it.
        if group is not None and outcome.error is None:
            outcome = await group.judged(outcome.generation, outcome)
        return outcome if outcome.error is not None else self._rewarded(outcome)

    async def _roll_out(self, item: EvalInputItem, episode: Episode) -> EpisodeOutcome:
        started = time.perf_counter()
        error = traceback = None
        try:
            with user_code(), recording(episode):
                # Copies: what one episode does to its row must not reach the next.
                episode.input_obj = copy.deepcopy(item.input_obj)
                output = await self.supervisor.run(
                    self._workflow,
                    copy.deepcopy(item.full_dataset_entry),
                    name=named(episode),
                    run_in_thread=not is_async(self._workflow),
                    seconds=self._timeout_seconds,
                    late="the workflow gave no output",
                )
                if self._result_json_path is not None:
                    output = at_json_path(output, self._result_json_path)
            item = item.model_copy(update={"output_obj": output})
        except UserCodeError as failure:
            if isinstance(failure.error, PolicyError):
                raise failure.error from None  # no episode is to blame, and the next would end likewise
            error, traceback = failure.summary, failure.traceback
        finally:
            episode.end()
        seconds = {"rollout": time.perf_counter() - started, "reward": 0.0}
        return EpisodeOutcome(item, episode, error=error, traceback=traceback, seconds=seconds)

    async def _judge_together(self, group: list[EpisodeOutcome]) -> list[EpisodeOutcome]:
        async with self._judging_slots:
            return await self._judged(self._group_judges, group)

    async def _judged(
        self, judges: Mapping[str, BoundEvaluator], outcomes: list[EpisodeOutcome]
    ) -> list[EpisodeOutcome]:
        started = time.perf_counter()
        with recording(None):  # a judge that is a language model is asked outside of the episode
            judgements = await run_evaluators(judges, [outcome.item for outcome in outcomes], self.supervisor)
        seconds = (time.perf_counter() - started) / len(outcomes)
        return [outcome.judged(judgement, seconds) for outcome, judgement in zip(outcomes, judgements, strict=True)]

    def _rewarded(self, outcome: EpisodeOutcome) -> EpisodeOutcome:
        """The outcome with the weighted sums of its scores, and with its reward."""
        scores = outcome.scores | {name: weighted(outcome.scores) for name, weighted in self._sums.items()}
        score = None if self.reward_name is None else scores[self.reward_name]
        reward = to_scalar(score)
        named_rewards = score if isinstance(score, dict) and reward is not None else None
        return replace(outcome, scores=scores, reward=reward, named_rewards=named_rewards)

    def summarize(self, outcomes: Sequence[EpisodeOutcome]) -> EvaluationRunOutput:
        """What the outcomes amount to: averages over what is usable, and counts of what is not."""
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        return EvaluationRunOutput(
            eval_input=EvalInput(eval_input_items=[outcome.item for outcome in outcomes]),
            evaluation_results=[(name, _verdicts(name, outcomes)) for name in self._names],
            average_reward=sum(rewards) / len(rewards) if rewards else None,
            num_episodes=len(outcomes),
            num_failed=len(failed),
            num_unscorable=len(outcomes) - len(failed) - len(rewards) if self.reward_name is not None else 0,
            first_error=failure_report(failed[0]) if failed else None,
        )


def failure_report(outcome: EpisodeOutcome) -> str:
    """A failed episode in words: example, error and traceback."""
    return f"example '{outcome.item.id}', generation {outcome.generation}: {outcome.error}\n{outcome.traceback}"


def _progress(what: str, episodes: Sequence[asyncio.Task[Any]], records: Sequence[Episode], started: float) -> str:
    """The number of episodes that have ended, and the tokens per second of the answers that are complete."""
    ended = sum(episode.done() for episode in episodes)
    tokens = sum(len(call.token_ids) for record in records for call in record.calls)
    speed = tokens / max(time.perf_counter() - started, 1e-9)
    return f"{what}{ended} of {len(episodes)} episodes, {speed:,.0f} tokens/s"


def _verdicts(name: str, outcomes: Sequence[EpisodeOutcome]) -> EvalOutput:
    items = [_verdict(name, outcome) for outcome in outcomes]
    scores = [item.score for item in items if item.score is not None]
    return EvalOutput(average_score=sum(scores) / len(scores) if scores else None, eval_output_items=items)


def _verdict(name: str, outcome: EpisodeOutcome) -> EvalOutputItem:
    given = outcome.scores.get(name)
    score = to_scalar(given)
    not_usable = None if score is not None or outcome.error is not None else f"not usable: {given}"
    return EvalOutputItem(
        id=outcome.item.id,
        score=score,
        reasoning=outcome.reasonings.get(name, not_usable),
        error=outcome.error,
        generation=outcome.generation,
        named_scores=given if isinstance(given, dict) and score is not None else None,
    )


async def _cancel(episodes: Sequence[asyncio.Task[Any]], judgings: Sequence[asyncio.Task[Any]]) -> None:
    for task in episodes:
        task.cancel()
    # The judgings are cancelled by their groups: once, or it would reach into how an evaluator cleans up.
    await asyncio.gather(*episodes, *judgings, return_exceptions=True)


@dataclass(frozen=True)
class Validation:
    """A validation set, ready to run.

    Attributes:
        evaluation: the workflow and what judges it; its calls draw from the validation stream.
        examples: the held-out ones.
        interval: epochs between two passes.
        temperature: of all calls; None: each keeps its own.
        num_generations: episodes per example.
    """

    evaluation: Evaluation
    examples: list[EvalInputItem]
    interval: int = 5
    temperature: float | None = 0.0
    num_generations: int = 1

    def is_due(self, epoch: int, num_epochs: int) -> bool:
        """Whether there is a pass after so many epochs: before the first, every `interval`, and after the last.

        >>> async def nothing(example): ...
        >>> validation = Validation(Evaluation(nothing, {}, None, 1, 0), [], interval=3)
        >>> [epoch for epoch in range(8) if validation.is_due(epoch, 7)]
        [0, 3, 6, 7]
        """
        return epoch % self.interval == 0 or epoch == num_epochs

    async def run(self) -> EvaluationRunOutput:
        """One pass."""
        outcomes = await self.evaluation.validate(
            self.examples, temperature=self.temperature, num_generations=self.num_generations
        )
        return self.evaluation.summarize(outcomes)
