"""Base class of the trajectory builders: runs the episodes of a collection and counts their outcomes."""

import asyncio
import difflib
import statistics
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from jaxft.components.health import num_trajectories
from jaxft.errors import ConfigError, did_you_mean
from jaxft.harness.contracts import TrajectoryBuilder
from jaxft.harness.data_models import EpisodeItem, EpisodeItemRole, FinetuneConfig, Trajectory
from jaxft.harness.outcomes import EpisodeOutcome
from jaxft.harness.registry import TrajectoryBuilderConfig
from jaxft.rollout.calls import CARRIED, Call, Completion
from jaxft.rollout.messages import comparison_key, readable_text
from jaxft.rollout.recorder import TRAINING, WORKFLOW
from jaxft.rollout.sequences import conversations, is_targeted

ROLES = {role.value: role for role in EpisodeItemRole}


class CarriedGroup(NamedTuple):
    """A group of which an answer had its tokens of a collection: the next one begins it again, with these answers.

    Attributes:
        rollout_index: number of the collection that began it, on which its random numbers depend.
        example_id: the example.
        collections: number of collections that it has been in.
        answers: `Episode.answers` of each generation.
    """

    rollout_index: int
    example_id: str
    collections: int
    answers: list[dict[str, Completion]]


CARRIED_GROUPS = TypeAdapter(list[CarriedGroup])
"""Form of carried groups in JSON."""


class RolloutBuilder(TrajectoryBuilder):
    """Runs the workflow `num_generations` times on every example.

    A subclass turns the episodes that `finish_run` returns into trajectories.

    Attributes:
        num_generations: episodes per example.
        failed_reward: reward of an episode whose agent raised an error after an answer; None leaves it out.
        evaluation_runs: tasks of the episodes of each collection that was started and not yet finalised.
        carry_over: tokens that an answer gets in a collection, and the number of collections that its group may then go
            on in, with all tokens that it needs in the last; None for answers that end in their collection. Collections
            take turns with it.
    """

    def __init__(
        self,
        trajectory_builder_config: TrajectoryBuilderConfig,
        num_generations: int,
        failed_reward: float | None = None,
    ) -> None:
        super().__init__(trajectory_builder_config)
        self.evaluation_runs: dict[str, list[asyncio.Task[EpisodeOutcome]]] = {}
        self.num_generations = num_generations
        self.failed_reward = failed_reward
        self._started: dict[str, float] = {}
        self._counted = 0, 0  # calls abandoned and outside of episodes that collections have reported, or came before
        self.carry_over: tuple[int, int] | None = None
        self._carried: list[CarriedGroup] = []

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Start the episodes of a collection, on the next rollout index of the training stream.

        Args:
            run_id: name of the collection.
            meta: `{"example_ids": [...]}` selects examples, in that order; without it all are run.

        Raises:
            ValueError: a collection of this name is in progress, or an id is not in the dataset.
            RuntimeError: no evaluation is bound.
        """
        if run_id in self.evaluation_runs:
            raise ValueError(f"run '{run_id}' is already in progress; finalize it or choose another id")
        if self.evaluation is None:
            raise RuntimeError("the builder has no evaluation: call bind_evaluation first")
        by_id = {item.id: item for item in self.examples}
        wanted = meta["example_ids"] if meta is not None and "example_ids" in meta else list(by_id)
        unknown = [each for each in (*wanted, *(group.example_id for group in self._carried)) if each not in by_id]
        if unknown:
            raise ValueError(f"no examples have the ids {', '.join(unknown[:5])}; the dataset has {len(by_id)} others")
        examples = [by_id[example_id] for example_id in wanted]
        if not self.evaluation_runs:
            self._counted = self.evaluation.num_abandoned, self.evaluation.num_outside_calls
        self._started[run_id] = time.perf_counter()
        start = partial(self.evaluation.start, stream=TRAINING, num_generations=self.num_generations)
        tasks = self.evaluation_runs[run_id] = []
        answer_tokens, most = self.carry_over or (None, 0)
        for index, example_id, collections, answers in self._carried:
            tokens = answer_tokens if collections < most else None
            tasks += start([by_id[example_id]], rollout_index=index, answers=answers, answer_tokens=tokens)
        nothing: list[dict[str, Completion]] = [{}] * (self.num_generations if self.carry_over else 0)
        tasks += start(examples, answers=nothing, answer_tokens=answer_tokens)

    async def finish_run(self, run_id: str) -> tuple[list[EpisodeOutcome], dict[str, Any]]:
        """Wait for the episodes of a collection.

        Returns:
            The successful episodes and those that `failed_reward` is for, by (example, generation), and the fields
            `metrics`, `timings` and `failures` of the `TrajectoryCollection`; the metrics count all episodes, and
            `failures` are those left out.

        Raises:
            ValueError: no collection of this name is in progress.
            ConfigError: the episodes called language models, but never where training is aimed at; or a target
                function made no call, and one with nearly its name did.
        """
        if run_id not in self.evaluation_runs:
            known = ", ".join(self.evaluation_runs) or "none"
            raise ValueError(f"run '{run_id}' is not in progress; in progress: {known}")
        try:
            outcomes = await asyncio.gather(*self.evaluation_runs[run_id])
        finally:
            for task in self.evaluation_runs.pop(run_id):
                task.cancel()
            started = self._started.pop(run_id)
        assert self.evaluation is not None
        abandoned, outside = self._counted
        self._counted = self.evaluation.num_abandoned, self.evaluation.num_outside_calls
        outcomes, carried = self._set_aside(outcomes)
        finished: list[EpisodeOutcome] = []
        unfinished: list[EpisodeOutcome] = []
        for outcome in outcomes:
            is_trained = outcome.error is None or self._is_penalized(outcome)
            (finished if is_trained else unfinished).append(outcome)
        penalized = [outcome for outcome in finished if outcome.error is not None]
        failed = [outcome for outcome in unfinished if not outcome.episode.is_dropped]
        # The number of calls of a failed episode may depend on the clock, on which metrics must not depend.
        calls = [call for outcome in finished for call in outcome.episode.calls]
        targeted = sum(map(self.is_target, calls))
        if calls:
            _check_targets(calls, targeted, self._finetuning)
        return finished, {
            "metrics": {
                "episodes": len(outcomes),
                "failed_episodes": len(failed) + len(penalized),
                "penalized_episodes": len(penalized),
                "dropped_episodes": len(unfinished) - len(failed),
                "truncated_prompts": sum(call.prompt.truncated_tokens > 0 for call in calls),
                "abandoned_episodes": self._counted[0] - abandoned,
                "calls": len(calls),
                "tool_calls": sum(len(call.reply.tool_calls) for call in calls),
                "malformed_tool_calls": sum(call.reply.has_malformed_tool_call for call in calls),
                "retokenized_calls": sum(call.prompt.is_retokenized for call in calls),
                "untargeted_calls": len(calls) - targeted,
                "remote_calls": sum(len(outcome.episode.remote_calls) for outcome in finished),
                "outside_calls": self._counted[1] - outside,
                **carried,
            },
            "timings": {
                "seconds_rollout": time.perf_counter() - started,
                "seconds_reward": sum(outcome.seconds["reward"] for outcome in outcomes),
                "seconds_episode_max": max((outcome.seconds["rollout"] for outcome in outcomes), default=0.0),
            },
            "failures": [outcome.failure_report for outcome in failed],
        }

    def _set_aside(self, outcomes: list[EpisodeOutcome]) -> tuple[list[EpisodeOutcome], dict[str, int]]:
        """Keep the groups that go on in the next collection; return the episodes of the others, and metrics."""
        if self.carry_over is None and not self._carried:
            return outcomes, {}
        before = {group[:2]: group.collections for group in self._carried}
        cut = [outcome for outcome in outcomes if outcome.episode.is_carried]
        going_on = sorted({outcome.group for outcome in cut})
        ended = [outcome for outcome in outcomes if outcome.group not in going_on]
        self._carried = [
            CarriedGroup(*key, before.get(key, 0) + 1, [o.episode.answers or {} for o in outcomes if o.group == key])
            for key in going_on
        ]
        begun = [a for each in cut for a in (each.episode.answers or {}).values() if a.finish_reason == CARRIED]
        repeated = [outcome.episode for outcome in ended if outcome.group in before and outcome.error is None]
        return ended, {
            "carried_groups": len(self._carried),
            "carried_answers": len(begun),
            "carried_tokens": sum(len(answer.token_ids) for answer in begun),
            "carried_collections_max": max((group.collections for group in self._carried), default=0),
            # An agent that chooses at random may not have asked for them again.
            "lost_answers": sum(len(episode.answers or ()) - len(episode.calls) for episode in repeated),
        }

    def _is_penalized(self, outcome: EpisodeOutcome) -> bool:
        """Return True if an episode failed in a way that `failed_reward` is for."""
        is_left_out = self.failed_reward is None or outcome.episode.is_dropped
        return outcome.has_agent_failed and any(map(self.is_target, outcome.episode.calls)) and not is_left_out

    def is_target(self, call: Call) -> bool:
        """Return True if a call is a training target, by `finetuning.target_functions` and `target_model`."""
        return is_targeted(call, self._finetuning.target_functions, self._finetuning.target_model)

    @property
    def _finetuning(self) -> FinetuneConfig:
        return FinetuneConfig() if self.run_config is None else self.run_config

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore the groups that go on."""
        self._carried = CARRIED_GROUPS.validate_python(state.get("carried", []))

    def state(self) -> dict[str, Any]:
        """Return the groups that the next collection goes on with, for JSON."""
        return {"carried": CARRIED_GROUPS.dump_python(self._carried, mode="json")} if self._carried else {}

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Do nothing: the trainer logs the metrics."""


def to_messages(outcome: EpisodeOutcome) -> list[EpisodeItem]:
    """Return the conversation of an episode; answers of a language model carry their log-probabilities.

    The `metadata` of an item have what its text does not say: calls of tools, the call that a result is of, and the
    number of the conversation and the language model that answered if an episode has several.
    """
    unmatched = list(outcome.episode.calls)
    has_several = len({call.llm for call in unmatched}) > 1
    items = []
    talks = conversations(outcome.episode.calls)
    for number, message in ((number, message) for number, talk in enumerate(talks) for message in talk):
        role = ROLES.get(message["role"], EpisodeItemRole.OTHER)
        logprobs = call = None
        if role is EpisodeItemRole.ASSISTANT:
            # The agent itself wrote an assistant's message that no call answered; it is not trained.
            call = next(
                (call for call in unmatched if comparison_key(call.answer_message) == comparison_key(message)), None
            )
            logprobs = [] if call is None else list(call.sampler_logprobs)
            unmatched = [other for other in unmatched if other is not call]
        text = readable_text(message) if call is None else call.full_text
        beside = {name: message[name] for name in ("tool_calls", "tool_call_id") if message.get(name)}
        beside |= {"content": message["content"]} if "tool_calls" in beside else {}
        beside |= {"conversation": number} if number else {}
        beside |= {"llm": call.llm} if call is not None and has_several else {}
        items.append(EpisodeItem(role=role, content=text, logprobs=logprobs, metadata=beside or None))
    return items


def reward_metrics(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return mean, minimum and maximum reward, and the quartiles of the groups' means; empty without rewards.

    Minimum and maximum say little if rewards are 0 or 1; the quartiles show how much the examples differ.

    >>> reward_metrics([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # doctest: +NORMALIZE_WHITESPACE
    {'reward_mean': 0.5, 'reward_min': 0.0, 'reward_max': 1.0, 'group_reward_q25': 0.25, 'group_reward_q75': 0.75}
    >>> reward_metrics([[]])
    {}
    """
    rewards = [reward for group in groups for reward in group]
    if not rewards:
        return {}
    means = [sum(group) / len(group) for group in groups if group]
    # One group has no quartiles, and `statistics.quantiles` takes two values at least.
    low, _, high = statistics.quantiles(means, n=4, method="inclusive") if len(means) > 1 else means * 3
    return {
        "reward_mean": sum(rewards) / len(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "group_reward_q25": low,
        "group_reward_q75": high,
    }


def named_reward_means(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Return the mean of each named reward over the trajectories that it judges, by its metric.

    >>> a, b = ({"kind": 1.0, "right": 0.5}, {"kind": None, "right": 1.0})
    >>> named_reward_means(Trajectory(episode=[], reward=1.0, named_rewards=each) for each in (a, b))
    {'reward/kind': 1.0, 'reward/right': 0.75}
    """
    named: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, reward in (trajectory.named_rewards or {}).items():
            if reward is not None:
                named.setdefault(name, []).append(reward)
    return {f"reward/{name}": sum(rewards) / len(rewards) for name, rewards in sorted(named.items())}


def task_metrics(groups: Sequence[Sequence[Trajectory]], pass_threshold: float) -> dict[str, float]:
    """Return counts and means of the groups of one task; means of nothing are left out.

    Args:
        groups: the groups of an epoch.
        pass_threshold: the least reward of a trajectory that solves its example.

    >>> task_metrics([[Trajectory(episode=[], reward=None)]], 1.0)
    {'episodes': 1, 'equal_reward_groups': 0, 'completion_tokens_mean': 0.0}
    """
    rewards = [[trajectory.reward for trajectory in group if trajectory.scorable] for group in groups]
    episodes = [trajectory.sequences or [] for group in groups for trajectory in group]
    known = [reward for group in rewards for reward in group]
    means: dict[str, list[float]] = {
        "reward_mean": known,
        "solved_fraction": [reward >= pass_threshold for reward in known],
        "truncated_fraction": [row.truncated for rows in episodes for row in rows],
        "completion_tokens_mean": [sum(sum(row.completion_mask) for row in rows) for rows in episodes],
    }
    return {
        "episodes": len(episodes),
        "equal_reward_groups": sum(max(group) == min(group) for group in rewards if group),
        **{name: sum(values) / len(values) for name, values in means.items() if values},
    }


def join_metrics(collections: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of several collections into those of one.

    Means and quartiles, and those of named rewards, are averaged, weighted by the episodes with a trajectory (use
    `named_reward_means` where these are known); counts are summed; minima and maxima are taken over all collections.

    >>> join_metrics([{"episodes": 1, "reward_mean": 0.0, "reward_max": 0.0}, {"episodes": 3, "reward_mean": 1.0}])
    {'episodes': 4, 'reward_mean': 0.75, 'reward_max': 0.0}
    >>> failed = {"episodes": 8, "failed_episodes": 8}
    >>> of_penalized = failed | {"penalized_episodes": 8, "completion_tokens_mean": 100.0}
    >>> of_none, of_all = failed | {"completion_tokens_mean": 0.0}, {"episodes": 8, "completion_tokens_mean": 10.0}
    >>> [join_metrics([each, of_all])["completion_tokens_mean"] for each in (of_penalized, of_none)]
    [55.0, 10.0]
    """
    joined: dict[str, float] = {}
    for name in {name: None for metrics in collections for name in metrics}:
        having = [metrics for metrics in collections if name in metrics]
        values = [metrics[name] for metrics in having]
        if name.endswith(("_mean", "_q25", "_q75")) or name.startswith("reward/"):
            finished = [num_trajectories(metrics) for metrics in having]
            whole = max(1, sum(finished))
            # Divided first: a single collection has the weight 1, which changes no bit of its mean.
            joined[name] = sum(value * (count / whole) for value, count in zip(values, finished, strict=True))
        elif name.endswith("_min"):
            joined[name] = min(values)
        else:
            joined[name] = max(values) if name.endswith("_max") else sum(values)
    return joined


def _check_targets(calls: Sequence[Call], targeted: int, config: FinetuneConfig) -> None:
    """Raise a ConfigError if no call was a training target; `targeted` counts the calls that were."""
    functions = sorted({name for call in calls for name in call.functions})
    for name in config.target_functions:
        if name in (WORKFLOW, *functions):
            continue
        # A function without calls may have some later, but one that is nearly another's name is misspelt.
        others = [function for function in functions if function not in config.target_functions]
        if not targeted or difflib.get_close_matches(name, others):
            hint = did_you_mean(name, others, what="functions that made calls")
            raise ConfigError(f"finetuning.target_functions: no call was made in '{name}'{hint}")
    if not targeted:
        models = ", ".join(sorted({call.llm for call in calls}))
        fault = f"'{config.target_model}' was not asked in the functions aimed at; asked: {models}"
        raise ConfigError(f"finetuning.target_model: {fault}")
