"""Outcomes of episodes, and their exchange between the processes of a run, each of which runs those of its examples.

What goes from one process to another is JSON: the calls that an episode recorded, its output and its scores. The rest
of an outcome, its example above all, every process has.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from jaxft.errors import HostsError, PolicyError, UserCodeError, user_code
from jaxft.harness.data_models import EvalInputItem, EvalOutputItem
from jaxft.harness.evaluators import Score, ScoresByEvaluator, to_scalar
from jaxft.harness.steps import EpisodeSteps
from jaxft.hosts.group import ProcessGroup, process_group
from jaxft.rollout.calls import Call, RemoteCall
from jaxft.rollout.recorder import Candidates, Episode

CALLS, REMOTE_CALLS = TypeAdapter(list[Call]), TypeAdapter(list[RemoteCall])
"""Forms of the calls of an episode in JSON."""

RESULTS = ("scores", "reasonings", "reward", "named_rewards", "error", "traceback", "has_agent_failed", "seconds")
"""Fields of an outcome that go to other processes as they are."""


@dataclass(frozen=True)
class EpisodeOutcome:
    """Result of one episode.

    Attributes:
        item: the example, with the workflow's output.
        episode: the record of the episode's model calls.
        scores: score by evaluator.
        reasonings: reasoning by evaluator, for the evaluators that gave one.
        reward: score of the reward function; None without one, for a failed episode, and for a score that is None or
            not finite.
        named_rewards: the named scores that the reward is the sum of, if the evaluator gave any and the reward is
            usable; None for names that do not judge this episode.
        error: type and message of the exception of the workflow or an evaluator, on one line; None without one.
        traceback: the whole traceback of that error.
        has_agent_failed: True if the workflow raised that error, other than by a time-out.
        seconds: durations of `rollout` and `reward`.
    """

    item: EvalInputItem
    episode: Episode
    scores: dict[str, Score] = field(default_factory=dict)
    reasonings: dict[str, Any] = field(default_factory=dict)
    reward: float | None = None
    named_rewards: dict[str, float | None] | None = None
    error: str | None = None
    traceback: str | None = None
    has_agent_failed: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """Index of this episode among those of its example, from 0."""
        return self.episode.generation

    @property
    def group(self) -> tuple[int, str]:
        """Number of the collection that began its group, and the example's id; one may have groups of several."""
        return self.episode.rollout_index, self.item.id

    @property
    def failure_report(self) -> str:
        """Report of a failed episode: example, error and traceback."""
        return f"example '{self.item.id}', generation {self.generation}: {self.error}\n{self.traceback}"

    def verdict(self, name: str) -> EvalOutputItem:
        """Return the score that the evaluator `name` gave, with its reasoning or why the score is not usable."""
        given = self.scores.get(name)
        score = to_scalar(given)
        is_unusable = name in self.scores and score is None and self.error is None
        not_usable = f"not usable: {given}" if is_unusable else None
        return EvalOutputItem(
            id=self.item.id,
            score=score,
            reasoning=self.reasonings.get(name, not_usable),
            error=self.error,
            generation=self.generation,
            named_scores=given if isinstance(given, dict) and score is not None else None,
            evaluator=name,
        )

    def scored(self, scores: ScoresByEvaluator, seconds: float) -> "EpisodeOutcome":
        """Return the outcome with further scores, and the seconds that the evaluators took."""
        return replace(
            self,
            scores=self.scores | scores.scores,
            reasonings=self.reasonings | scores.reasonings,
            error=scores.error,
            traceback=scores.traceback,
            seconds=self.seconds | {"reward": self.seconds["reward"] + seconds},
        )


class SharedOutcomes:
    """The outcomes of one collection of episodes, from all processes."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """Share with the processes of a group, by default the run's; each runs the episodes of every n-th example."""
        self._group = process_group() if group is None else group
        self._given: asyncio.Future[dict[tuple[int, int], str]] = asyncio.get_running_loop().create_future()
        self._own: dict[tuple[int, int], str] = {}

    @property
    def is_needed(self) -> bool:
        """True if there are other processes."""
        return not self._group.is_alone

    def is_own(self, number: int) -> bool:
        """Return True if this process runs the episodes of an example."""
        return number % self._group.num_processes == self._group.process_id

    def encode(self, number: int, outcome: EpisodeOutcome) -> EpisodeOutcome:
        """Return the outcome of an episode here as all processes get it: as failed if JSON does not have its values."""
        if self.is_needed:
            try:
                with user_code():  # an output's own methods
                    self._own[number, outcome.generation] = _to_json(outcome)
            except UserCodeError as failure:
                outcome = _without_values(outcome, failure)
                self._own[number, outcome.generation] = _to_json(outcome)
        return outcome

    async def share(
        self, name: str, ended: Mapping[tuple[int, int], EpisodeOutcome | BaseException], counts: list[int]
    ) -> list[list[int]]:
        """Give the other processes the outcomes of this one, take theirs, and return the counts of the others.

        Args:
            name: name of the collection, the same in all processes.
            ended: encoded outcomes, or the errors in their place, by number of the example and generation.
            counts: numbers for the others.
        """
        if any(isinstance(outcome, asyncio.CancelledError) for outcome in ended.values()):
            self._given.cancel()
            return []
        for place, outcome in ended.items():
            if isinstance(outcome, BaseException):
                self._own[place] = json.dumps({"policy_error": str(outcome)})
        own = [[*place, text] for place, text in self._own.items()]
        sharing = asyncio.create_task(self._group.gather(name, [own, counts]))
        self._given.add_done_callback(lambda _: sharing.cancel())  # does nothing unless the episodes are cancelled
        try:
            parts = await sharing
        except HostsError as error:
            self._given.set_exception(error)
            return []
        self._given.set_result({(number, place): text for given, _ in parts for number, place, text in given})
        return [theirs for index, (_, theirs) in enumerate(parts) if index != self._group.process_id]

    async def outcome(self, number: int, item: EvalInputItem, episode: Episode) -> EpisodeOutcome:
        """Return the outcome of an episode of another process, or raise what ended it there.

        Args:
            number: number of the example.
            item: the example.
            episode: a record of that episode without calls, which this completes.
        """
        given = json.loads((await self._given)[number, episode.generation])
        if "policy_error" in given:
            raise PolicyError(given["policy_error"])
        episode.end()
        episode.input_obj = item.input_obj
        episode.calls = CALLS.validate_python(given["calls"])
        episode.remote_calls = REMOTE_CALLS.validate_python(given["remote_calls"])
        episode.step_rewards = {int(index): reward for index, reward in given["step_rewards"].items()}
        calls = {call.index: call for call in episode.calls}
        episode.candidates = [
            Candidates(tuple(calls[index] for index in indices), tuple(scores))
            for indices, scores in given["candidates"]
        ]
        episode.is_dropped = given["is_dropped"]
        episode.texts_of_tokens = {
            llm: {int(token): text for token, text in texts.items()}.__getitem__
            for llm, texts in given["texts"].items()
        }
        output = given["output"]
        item = item.model_copy(update={"output_obj": output, "trajectory": EpisodeSteps(episode, output)})
        return EpisodeOutcome(item, episode, **{name: given[name] for name in RESULTS})


def part_of_process(number: int) -> int:
    """Return the part of a number of episodes, rounded up, that each process of the run has."""
    return -(-number // process_group().num_processes)


def _without_values(outcome: EpisodeOutcome, failure: UserCodeError) -> EpisodeOutcome:
    """Return an outcome that cannot be sent as a failed one, without what user code gave it, and empty its record."""
    episode = outcome.episode
    for record in (episode.calls, episode.remote_calls, episode.candidates, episode.step_rewards):
        record.clear()
    return EpisodeOutcome(
        outcome.item.model_copy(update={"output_obj": None, "trajectory": EpisodeSteps(episode, None)}),
        episode,
        error=outcome.error or f"the outcome cannot be sent to the other processes: {failure.summary}",
        traceback=outcome.traceback or failure.traceback,
        seconds=outcome.seconds,
    )


def _to_json(outcome: EpisodeOutcome) -> str:
    """Return an outcome as JSON.

    Raises:
        Exception: the output, a conversation, or what an evaluator said, has no such form.
    """
    episode = outcome.episode
    given = {name: vars(outcome)[name] for name in RESULTS} | {
        "output": outcome.item.output_obj,
        "calls": episode.calls,
        "remote_calls": episode.remote_calls,
        "step_rewards": episode.step_rewards,
        "candidates": [([call.index for call in calls], scores) for calls, scores in episode.candidates],
        "is_dropped": episode.is_dropped,
        "texts": {
            llm: {token: decoded_text(token) for call in episode.calls if call.llm == llm for token in call.token_ids}
            for llm, decoded_text in episode.texts_of_tokens.items()
        },
    }
    values = to_jsonable_python(given, inf_nan_mode="constants", fallback=lambda value: value.tolist())  # of numpy
    return json.dumps(values)  # which refuses integers of thousands of digits
