"""Evaluation: episodes of the workflow over examples, many at once, each scored by the evaluators.

An episode that fails is one failed outcome and does not affect the others. Group evaluators score all episodes of an
example together, when the last of them has ended. Outcomes are in the order of (example, generation), not of time.
"""

import asyncio
import copy
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxft.errors import ConfigError, PolicyError, UserCodeError, did_you_mean, user_code
from jaxft.harness.config_types import at_json_path
from jaxft.harness.data_models import EvalInput, EvalInputItem, EvalOutput, EvaluationRunOutput
from jaxft.harness.evaluation_scores import ScoredEpisode, evaluation_scores
from jaxft.harness.evaluators import (
    BaseEvaluator,
    BoundEvaluator,
    Evaluator,
    EvaluatorInfo,
    GroupBarrier,
    WeightedSum,
    bind_evaluators,
    run_evaluators,
    to_scalar,
)
from jaxft.harness.outcomes import EpisodeOutcome, SharedOutcomes, part_of_process
from jaxft.harness.steps import EpisodeSteps
from jaxft.harness.supervision import GRACE_SECONDS, Supervisor, is_async, named
from jaxft.harness.tasks import Tasks, workflow_of
from jaxft.rollout.calls import Completion
from jaxft.rollout.current import outside_calls, recording
from jaxft.rollout.recorder import ENDPOINT, VALIDATION, Episode

Workflow = Callable[[dict[str, Any]], Any]
"""Function from a row to an output; async functions run on the event loop, plain ones in a thread, and may block."""


class Evaluation:
    """A workflow with its evaluators, ready to run.

    Attributes:
        reward_name: the evaluator that gives the reward; None for no reward. Tasks may have others: `reward_of`.
        tasks: the tasks of the examples.
        scores: `evaluation_scores` with the settings of this evaluation.
        num_rollouts: number of runs on the training stream, here or in evaluations counted with this one; it is the
            rollout index of the next run that is given none.
        num_validations: the same for the validation stream.
        supervisor: runs the user's code, and counts calls that it had to abandon.
        num_outside_calls: number of model calls made outside of any episode while episodes ran.
        num_abandoned_elsewhere: number of calls that other processes had to abandon.
        log: shows a message.
    """

    def __init__(
        self,
        workflow: Workflow,
        evaluators: Mapping[str, Evaluator | EvaluatorInfo | BaseEvaluator | BoundEvaluator | WeightedSum],
        reward_name: str | None,
        max_concurrency: int,
        seed: int,
        *,
        timeout_seconds: float | None = None,
        result_json_path: str | None = None,
        pass_threshold: float = 1.0,
        breakdown_by: str | None = None,
        tasks: Tasks | None = None,
        counted_with: "Evaluation | None" = None,
        server_url: str = ENDPOINT,
        show_progress: Callable[[Callable[[], str]], None] = lambda progress: None,
        log: Callable[[str], None] = lambda sentence: print(sentence, file=sys.stderr, flush=True),
    ) -> None:
        """Check the evaluators and the reward's name.

        Args:
            workflow: called with a copy of the example's row.
            evaluators: by name; one that is no `BoundEvaluator` scores one episode without a time limit.
            reward_name: one of the evaluators, or None for no reward.
            max_concurrency: maximum number of episodes that run at once, over all runs of this object, and of groups
                scored at once; the processes of a run divide it, as they do the examples.
            seed: seed of the run.
            timeout_seconds: time limit of the workflow per episode; None: no limit.
            result_json_path: JSON path of the result in the workflow's output; None: the whole output.
            pass_threshold: the least reward of an episode that passes, for pass@k and maj@k.
            breakdown_by: a column of the dataset, for each of whose values a summary has scores; None: that of the
                tasks, if there are any.
            tasks: the tasks of the examples, whose evaluators score no others; None for one task.
            counted_with: another evaluation of the same run with common counts, so that no two runs on a stream draw
                the same random numbers.
            server_url: address of the server that reaches the language models of episodes.
            show_progress: called when episodes start, with a function that returns their progress as text.
            log: shows a message, such as a warning; called from any thread.

        Raises:
            ValueError: the reward's name is not among the evaluators.
            ConfigError: a weighted sum names an unknown evaluator.
        """
        self.tasks = Tasks() if tasks is None else tasks
        self._rewards = self.tasks.evaluators(reward_name)
        for name in self._rewards.values():
            if name is not None and name not in evaluators:
                raise ValueError(f"reward_name is '{name}'; the evaluators are {', '.join(evaluators) or 'none'}")
        breakdown_by = breakdown_by or (self.tasks.key if self.tasks.configs else None)
        self._workflow = workflow
        self._names = list(evaluators)
        self._sums = {name: each for name, each in evaluators.items() if isinstance(each, WeightedSum)}
        bound = bind_evaluators(evaluators)
        self._evaluators = {name: each for name, each in bound.items() if not each.is_group}
        self._group_evaluators = {name: each for name, each in bound.items() if each.is_group}
        self.reward_name = reward_name
        self.pass_threshold = pass_threshold
        self.scores = partial(evaluation_scores, pass_threshold=pass_threshold, breakdown_by=breakdown_by)
        self._breakdown_by = breakdown_by
        self._slots = asyncio.Semaphore(part_of_process(max_concurrency))
        self._group_slots = asyncio.Semaphore(part_of_process(max_concurrency))
        self._seed = seed
        self._timeout_seconds = timeout_seconds
        self._episodes: set[asyncio.Task[Any]] = set()
        self._group_tasks: set[asyncio.Task[Any]] = set()
        self._result_json_path = result_json_path
        self._counter = self if counted_with is None else counted_with
        self._server_url = server_url
        self._show_progress = show_progress
        self.num_rollouts = 0
        self.num_validations = 0
        self.num_outside_calls = self.num_abandoned_elsewhere = 0
        self._counted_calls = 0  # of `outside_calls`: each is counted once, beside however many runs
        self.supervisor = Supervisor(log)
        self.log = log
        self._num_shared = 0

    def start(
        self,
        items: Sequence[EvalInputItem],
        *,
        stream: int,
        rollout_index: int | None = None,
        num_generations: int = 1,
        temperature: float | None = None,
        answers: Sequence[dict[str, Completion]] = (),
        answer_tokens: int | None = None,
    ) -> list[asyncio.Task[EpisodeOutcome]]:
        """Start an episode per (example, generation) and return their tasks in that order.

        The caller awaits them; `close` cancels the rest. A task raises cancellation and `PolicyError` only.

        Args:
            items: the examples.
            stream: `TRAINING` or `VALIDATION`.
            rollout_index: number of this run in its stream; None: the next one, which checkpoints save.
            num_generations: episodes per example.
            temperature: of every model call (0.0: greedy); None: each call keeps its own.
            answers, answer_tokens: `Episode.answers` of each generation, of every example the same, and
                `Episode.answer_tokens`; none for episodes that cannot be carried over.
        """
        rollout_index = self._counter._count(stream, rollout_index)
        episodes: list[asyncio.Task[EpisodeOutcome]] = []
        group_tasks: list[asyncio.Task[Any]] = []
        records: list[Episode] = []
        own_tasks: dict[tuple[int, int], asyncio.Task[EpisodeOutcome]] = {}
        shared = SharedOutcomes()
        for number, item in enumerate(items):
            identity = self._seed, stream, rollout_index, item.id
            record = partial(Episode, *identity, temperature=temperature, server_url=self._server_url)
            own = [record(generation=generation) for generation in range(num_generations)]
            for episode, begun in zip(own, answers, strict=False):
                episode.answers, episode.answer_tokens = dict(begun), answer_tokens
            if not shared.is_own(number):
                episodes += [asyncio.create_task(shared.outcome(number, item, episode)) for episode in own]
                continue
            group = GroupBarrier(num_generations, self._score_group) if self._applied(item, is_group=True) else None
            tasks = [
                asyncio.create_task(
                    self._run_episode(item, episode, group, partial(shared.encode, number)),
                    name=f"episode {item.id}/{episode.generation}",
                )
                for episode in own
            ]
            records += own
            episodes += tasks
            own_tasks |= {(number, generation): task for generation, task in enumerate(tasks)}
            if group is not None:
                group.wait_for(tasks)
                group_tasks.append(group.evaluating)
        if shared.is_needed:
            self._num_shared += 1
            name = f"episodes {stream}, {rollout_index}, {self._num_shared}"
            before = self.supervisor.num_abandoned, outside_calls()
            group_tasks.append(asyncio.create_task(self._share(name, own_tasks, shared, before)))
        for known, tasks in ((self._episodes, episodes), (self._group_tasks, group_tasks)):
            known.update(tasks)
            for task in tasks:
                task.add_done_callback(known.discard)
        what = "validating: " if stream == VALIDATION else ""
        self._show_progress(partial(_progress, what, list(own_tasks.values()), records, time.perf_counter()))
        self._count_outside_calls(episodes)
        return episodes

    async def run(
        self,
        items: Sequence[EvalInputItem],
        *,
        stream: int,
        rollout_index: int | None = None,
        num_generations: int = 1,
        temperature: float | None = None,
    ) -> list[EpisodeOutcome]:
        """Start episodes like `start`, and return their outcomes in the same order. Cancelling it cancels them."""
        before = set(self._group_tasks)
        episodes = self.start(
            items, stream=stream, rollout_index=rollout_index, num_generations=num_generations, temperature=temperature
        )
        group_tasks = self._group_tasks - before
        try:
            return await asyncio.gather(*episodes)
        finally:
            await _cancel(episodes, group_tasks)

    async def validate(
        self, items: Sequence[EvalInputItem], *, temperature: float | None = 0.0, num_generations: int = 1
    ) -> list[EpisodeOutcome]:
        """`run` on the validation stream, greedy by default; each call takes the next rollout index.

        Raises:
            ConfigError: no example has the column of `breakdown_by`, or one is of no task.
        """
        self.tasks.check(items, "the examples")
        columns = dict.fromkeys(name for item in items for name in item.full_dataset_entry)
        if self._breakdown_by is not None and self._breakdown_by not in columns:
            hint = did_you_mean(self._breakdown_by, columns, what="columns")
            raise ConfigError(f"eval.general.breakdown_by: no example has '{self._breakdown_by}'{hint}")
        return await self.run(items, stream=VALIDATION, num_generations=num_generations, temperature=temperature)

    @property
    def num_abandoned(self) -> int:
        """Number of calls so far, in all processes, that did not end when cancelled."""
        return self.supervisor.num_abandoned + self.num_abandoned_elsewhere

    async def close(self) -> None:
        """Cancel every running episode, and wait for its end."""
        await _cancel(list(self._episodes), list(self._group_tasks))

    async def _share(
        self,
        name: str,
        own_tasks: Mapping[tuple[int, int], "asyncio.Task[EpisodeOutcome]"],
        shared: SharedOutcomes,
        before: tuple[int, int],
    ) -> None:
        """Give the other processes the outcomes of the episodes here, with the calls abandoned or outside of episodes.

        `before` has the numbers of such calls before. Nothing is given if episodes were cancelled: this process ends,
        and the others hear of that.
        """
        ended = await asyncio.gather(*own_tasks.values(), return_exceptions=True)
        counts = [self.supervisor.num_abandoned - before[0], outside_calls() - before[1]]
        outcomes = dict(zip(own_tasks, ended, strict=True))
        for abandoned, outside in await shared.share(name, outcomes, counts):
            self.num_abandoned_elsewhere += abandoned
            self.num_outside_calls += outside

    def _count_outside_calls(self, episodes: Sequence[asyncio.Task[Any]]) -> None:
        """Count the model calls outside of any episode until all episodes have ended; warn if there are any."""
        running = set(episodes)
        if self._episodes == running:
            self._counted_calls = outside_calls()

        def leave(task: asyncio.Task[Any]) -> None:
            running.discard(task)
            count = outside_calls() - self._counted_calls
            if running or not count:
                return
            self._counted_calls += count
            self.num_outside_calls += count
            self.log(
                f"{count} calls of language models were made outside of any episode while episodes ran, as by threads "
                "that an agent started: they are not trained, and cannot be repeated; give such a thread "
                "jaxft.in_episode(function) instead of function, or give its OpenAI client base_url or api_key of "
                "jaxft.episode()"
            )

        for task in episodes:
            task.add_done_callback(leave)

    def _count(self, stream: int, rollout_index: int | None) -> int:
        """Count a run and return its rollout index; later runs that are given none take higher ones."""
        if stream == VALIDATION:
            index = self.num_validations if rollout_index is None else rollout_index
            self.num_validations = max(self.num_validations, index + 1)
        else:
            index = self.num_rollouts if rollout_index is None else rollout_index
            self.num_rollouts = max(self.num_rollouts, index + 1)
        return index

    async def _run_episode(
        self,
        item: EvalInputItem,
        episode: Episode,
        group: GroupBarrier[EpisodeOutcome] | None,
        encode: Callable[[EpisodeOutcome], EpisodeOutcome],
    ) -> EpisodeOutcome:
        async with self._slots:
            outcome = await self._roll_out(item, episode)
            if outcome.error is None:
                (outcome,) = await self._score_outcomes(self._applied(item), [outcome])
        # The concurrency slot is free while the episode waits for its group, whose episodes may need it.
        if group is not None and outcome.error is None:
            outcome = await group.result(outcome.generation, outcome)
        return encode(outcome if outcome.error is not None else self._add_reward(outcome))

    async def _roll_out(self, item: EvalInputItem, episode: Episode) -> EpisodeOutcome:
        started = time.perf_counter()
        output = error = traceback = None
        has_agent_failed = False
        try:
            with user_code(), recording(episode):
                workflow = workflow_of(self._workflow, item.full_dataset_entry)
                # A copy, as an episode that changes its row must not change the row of another episode.
                episode.input_obj = copy.deepcopy(item.input_obj)
                running = asyncio.create_task(
                    self.supervisor.run(
                        workflow,
                        copy.deepcopy(item.full_dataset_entry),
                        name=named(episode),
                        run_in_thread=not is_async(workflow),
                        seconds=self._timeout_seconds,
                        late="the workflow gave no output",
                    )
                )
                loop = asyncio.get_running_loop()
                end = partial(loop.call_later, GRACE_SECONDS, running.cancel)  # if it does not end by itself
                episode.on_carried = partial(loop.call_soon_threadsafe, end)
                output = await running
                if self._result_json_path is not None:
                    output = at_json_path(output, self._result_json_path)
        except asyncio.CancelledError:
            if not episode.is_carried or (task := asyncio.current_task()) is None or task.cancelling():
                raise
        except UserCodeError as failure:
            # Not the fault of the episode: all others would fail, too.
            if isinstance(failure.error, PolicyError):
                raise failure.error from None
            if episode.policy_error is not None:
                raise episode.policy_error from None
            output, error, traceback = None, failure.summary, failure.traceback
            has_agent_failed = not isinstance(failure.error, TimeoutError)
        finally:
            episode.end()
        if episode.is_carried:  # whatever the agent made of an answer that it did not get
            output, error, traceback, has_agent_failed = None, "goes on in the next collection", None, False
        item = item.model_copy(update={"output_obj": output, "trajectory": EpisodeSteps(episode, output)})
        seconds = {"rollout": time.perf_counter() - started, "reward": 0.0}
        return EpisodeOutcome(
            item, episode, error=error, traceback=traceback, has_agent_failed=has_agent_failed, seconds=seconds
        )

    async def _score_group(self, group: list[EpisodeOutcome]) -> list[EpisodeOutcome]:
        async with self._group_slots:
            return await self._score_outcomes(self._applied(group[0].item, is_group=True), group)

    def reward_of(self, item: EvalInputItem) -> str | None:
        """Return the evaluator that gives the reward of an example; None for no reward."""
        return self._rewards[self.tasks.of(item)]

    def _applied(self, item: EvalInputItem, *, is_group: bool = False) -> dict[str, BoundEvaluator]:
        """Return the evaluators that score an example: all but those of the rewards of other tasks."""

        def needed(reward: str | None) -> set[str | None]:
            return {reward, *(self._sums[reward].weights if reward in self._sums else ())}

        rewards = set().union(*map(needed, self._rewards.values()))
        elsewhere = rewards - needed(self.reward_of(item))
        evaluators = self._group_evaluators if is_group else self._evaluators
        return {name: each for name, each in evaluators.items() if name not in elsewhere}

    async def _score_outcomes(
        self, evaluators: Mapping[str, BoundEvaluator], outcomes: list[EpisodeOutcome]
    ) -> list[EpisodeOutcome]:
        started = time.perf_counter()
        with recording(None):  # the calls of an evaluator that asks a language model are no part of the episode
            scores = await run_evaluators(evaluators, [outcome.item for outcome in outcomes], self.supervisor)
        seconds = (time.perf_counter() - started) / len(outcomes)
        return [outcome.scored(each, seconds) for outcome, each in zip(outcomes, scores, strict=True)]

    def _add_reward(self, outcome: EpisodeOutcome) -> EpisodeOutcome:
        """Return the outcome with the weighted sums of its scores, and its reward."""
        sums = {name: each for name, each in self._sums.items() if each.weights.keys() <= outcome.scores.keys()}
        scores = outcome.scores | {name: weighted(outcome.scores) for name, weighted in sums.items()}
        reward_name = self.reward_of(outcome.item)
        score = None if reward_name is None else scores[reward_name]
        reward = to_scalar(score)
        named_rewards = score if isinstance(score, dict) and reward is not None else None
        usable = {name: each for name, each in sums.items() if to_scalar(scores[name]) is not None}
        said = {name: each.reasoning(outcome.reasonings) for name, each in usable.items()}
        reasonings = outcome.reasonings | {name: text for name, text in said.items() if text}
        return replace(outcome, scores=scores, reasonings=reasonings, reward=reward, named_rewards=named_rewards)

    def summarize(self, outcomes: Sequence[EpisodeOutcome]) -> EvaluationRunOutput:
        """Summarise outcomes: averages over usable scores, and counts of failed and unscorable episodes."""
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        judged = outcomes if any(self._rewards.values()) else []
        return EvaluationRunOutput(
            eval_input=EvalInput(eval_input_items=[outcome.item for outcome in outcomes]),
            evaluation_results=[(name, _verdicts(name, outcomes)) for name in self._names],
            average_reward=sum(rewards) / len(rewards) if rewards else None,
            num_episodes=len(outcomes),
            num_failed=len(failed),
            num_unscorable=len(outcomes) - len(failed) - len(rewards) if judged else 0,
            first_error=failed[0].failure_report if failed else None,
            rewards=[outcome.reward for outcome in judged],
            scores=self.scores([ScoredEpisode(each.item, each.reward, each.named_rewards) for each in judged]),
        )


def _progress(what: str, episodes: Sequence[asyncio.Task[Any]], records: Sequence[Episode], started: float) -> str:
    """Return the progress as text: number of ended episodes, and tokens per second of complete replies."""
    ended = sum(episode.done() for episode in episodes)
    tokens = sum(len(call.token_ids) for record in records for call in record.calls)
    speed = tokens / max(time.perf_counter() - started, 1e-9)
    return f"{what}{ended} of {len(episodes)} episodes, {speed:,.0f} tokens/s"


def _verdicts(name: str, outcomes: Sequence[EpisodeOutcome]) -> EvalOutput:
    items = [outcome.verdict(name) for outcome in outcomes]
    scores = [item.score for item in items if item.score is not None]
    return EvalOutput(average_score=sum(scores) / len(scores) if scores else None, eval_output_items=items)


async def _cancel(episodes: Iterable[asyncio.Task[Any]], group_tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in episodes:
        task.cancel()
    # Their barriers cancel the group tasks, once: a second time would interrupt an evaluator that cleans up.
    await asyncio.gather(*episodes, *group_tasks, return_exceptions=True)


@dataclass(frozen=True)
class Validation:
    """A validation set with its evaluation and settings.

    Attributes:
        evaluation: the workflow and its evaluators.
        examples: the held-out examples.
        interval: epochs between two validations.
        temperature: of every model call; None: each call keeps its own.
        num_generations: episodes per example.
    """

    evaluation: Evaluation
    examples: list[EvalInputItem]
    interval: int = 5
    temperature: float | None = 0.0
    num_generations: int = 1

    def is_due(self, epoch: int, num_epochs: int) -> bool:
        """True if a validation runs after `epoch` epochs: before the first, every `interval`, and after the last.

        >>> async def nothing(example): ...
        >>> validation = Validation(Evaluation(nothing, {}, None, 1, 0), [], interval=3)
        >>> [epoch for epoch in range(8) if validation.is_due(epoch, 7)]
        [0, 3, 6, 7]
        """
        return epoch % self.interval == 0 or epoch == num_epochs

    async def run(self, num_generations: int | None = None) -> EvaluationRunOutput:
        """Evaluate the policy on the examples once, with `num_generations` of this set or of the caller."""
        outcomes = await self.evaluation.validate(
            self.examples,
            temperature=self.temperature,
            num_generations=self.num_generations if num_generations is None else num_generations,
        )
        return self.evaluation.summarize(outcomes)
