"""Running the episodes of a collection: what the shipped trajectory builders have in common."""

import asyncio
import difflib
import time
from typing import Any, NamedTuple

from jaxft.errors import ConfigError, did_you_mean
from jaxft.harness.contracts import TrajectoryBuilder
from jaxft.harness.data_models import (
    EpisodeItem,
    EpisodeItemRole,
    EvalInputItem,
    FinetuneConfig,
)
from jaxft.harness.evaluation import EpisodeOutcome, failure_report
from jaxft.harness.registry import TrajectoryBuilderConfig
from jaxft.rollout.recorder import TRAINING, WORKFLOW, Call
from jaxft.rollout.sequences import episode_messages, is_targeted

ROLES = {role.value: role for role in EpisodeItemRole}


class _Start(NamedTuple):
    """The clock, and the evaluation's counts, when a collection was started."""

    seconds: float
    abandoned: int
    outside_calls: int


class RolloutBuilder(TrajectoryBuilder):
    """Runs the workflow `num_generations` times on every example; what episodes become is a matter of the subclass.

    Attributes:
        evaluation_runs: the episodes of each collection that was started and not yet finalised.
        progress: what `log_progress` was told, by run.
    """

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig, num_generations: int) -> None:
        super().__init__(trajectory_builder_config)
        self.evaluation_runs: dict[str, list[asyncio.Task[EpisodeOutcome]]] = {}
        self.progress: dict[str, dict[str, Any]] = {}
        self._num_generations = num_generations
        self._started: dict[str, _Start] = {}
        self._collections = 0

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts the episodes of a collection; its rollout index is how many collections there were before.

        Args:
            run_id: names the collection.
            meta: `{"example_ids": [...]}` chooses examples, in that order; without it all take part.

        Raises:
            ValueError: a collection of this name has been started and not finalised, or an id is not in the dataset.
            RuntimeError: no evaluation is bound.
        """
        if run_id in self.evaluation_runs:
            raise ValueError(f"run '{run_id}' is already in progress; finalize it or choose another id")
        if self.evaluation is None:
            raise RuntimeError("the builder has no evaluation: call bind_evaluation first")
        examples = self._chosen(meta)
        counts = self.evaluation.supervisor.num_abandoned, self.evaluation.num_outside_calls
        self._started[run_id] = _Start(time.perf_counter(), *counts)
        self.evaluation_runs[run_id] = self.evaluation.start(
            examples,
            stream=TRAINING,
            rollout_index=self._collections,
            num_generations=self._num_generations,
        )
        self._collections += 1

    def _chosen(self, meta: dict[str, Any] | None) -> list[EvalInputItem]:
        if meta is None or "example_ids" not in meta:
            return self.examples
        by_id = {item.id: item for item in self.examples}
        unknown = [example_id for example_id in meta["example_ids"] if example_id not in by_id]
        if unknown:
            raise ValueError(f"no examples have the ids {', '.join(unknown[:5])}; the dataset has {len(by_id)} others")
        return [by_id[example_id] for example_id in meta["example_ids"]]

    async def finished(self, run_id: str) -> tuple[list[EpisodeOutcome], dict[str, Any]]:
        """The episodes of a collection that ended well, in the order of (example, generation), and what a
        `TrajectoryCollection` says of all of them: `metrics`, `timings`, `failures`.

        Raises:
            ValueError: no collection of this name is in progress.
            ConfigError: the episodes asked their language models, but never where training is aimed at, or never in a
                function aimed at while they did in one that is called almost so.
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
        dropped = [outcome for outcome in outcomes if outcome.error is not None and outcome.episode.is_dropped]
        failed = [outcome for outcome in outcomes if outcome.error is not None and not outcome.episode.is_dropped]
        finished = [outcome for outcome in outcomes if outcome.error is None]
        # How many calls an episode makes before it fails may depend on the clock, and metrics do not.
        calls = [call for outcome in finished for call in outcome.episode.calls]
        targeted = sum(map(self.is_target, calls))
        if calls:
            _check_targets(calls, targeted, self._targets())
        return finished, {
            "metrics": {
                "episodes": len(outcomes),
                "failed_episodes": len(failed),
                "dropped_episodes": len(dropped),
                "truncated_prompts": sum(call.truncated_tokens > 0 for call in calls),
                "abandoned_episodes": self.evaluation.supervisor.num_abandoned - started.abandoned,
                "calls": len(calls),
                "untargeted_calls": len(calls) - targeted,
                "outside_calls": self.evaluation.num_outside_calls - started.outside_calls,
            },
            "timings": {
                "seconds_rollout": time.perf_counter() - started.seconds,
                "seconds_reward": sum(outcome.seconds["reward"] for outcome in outcomes),
            },
            "failures": [failure_report(outcome) for outcome in failed],
        }

    def is_target(self, call: Call) -> bool:
        """Whether training is aimed at a call: `finetuning.target_functions` and `target_model`."""
        config = self._targets()
        return is_targeted(call, config.target_functions, config.target_model)

    def _targets(self) -> FinetuneConfig:
        return FinetuneConfig() if self.run_config is None else self.run_config

    def state(self) -> dict[str, Any]:
        """How many collections there were: the rollout index of the next."""
        return {"collections": self._collections}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Goes on counting."""
        self._collections = state["collections"]

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Keeps the figures of a collection in `progress`."""
        self.progress[run_id] = dict(metrics)


def to_messages(outcome: EpisodeOutcome) -> list[EpisodeItem]:
    """The conversation of an episode; log-probabilities go with the messages that the policy answered."""
    calls = outcome.episode.calls
    unmatched = list(calls)
    items = []
    for message in episode_messages(calls):
        role = ROLES.get(message["role"], EpisodeItemRole.OTHER)
        logprobs = None
        if role is EpisodeItemRole.ASSISTANT:
            # An assistant's message that no call answered was written by the agent itself, and is not trained.
            call = next((call for call in unmatched if call.content == message["content"]), None)
            logprobs = [] if call is None else list(call.sampler_logprobs)
            unmatched = [other for other in unmatched if other is not call]
        items.append(EpisodeItem(role=role, content=message["content"], logprobs=logprobs))
    return items


def _check_targets(calls: list[Call], targeted: int, config: FinetuneConfig) -> None:
    functions = sorted({name for call in calls for name in call.functions})
    for name in config.target_functions:
        if name in (WORKFLOW, *functions):
            continue
        # One that is not called yet may be later; one that is nearly another's name is misspelt.
        others = [function for function in functions if function not in config.target_functions]
        if not targeted or difflib.get_close_matches(name, others):
            hint = did_you_mean(name, others, what="functions that made calls")
            raise ConfigError([f"finetuning.target_functions: no call was made in '{name}'{hint}"])
    if not targeted:
        models = ", ".join(sorted({call.llm for call in calls}))
        fault = f"'{config.target_model}' was not asked in the functions aimed at; asked: {models}"
        raise ConfigError([f"finetuning.target_model: {fault}"])
