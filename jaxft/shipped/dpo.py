"""`_type: dpo_trainer`: collect pairs first, then train on them, a job per epoch."""

import math
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxft.errors import (
    ConfigError,
    NoLearningSignal,
    PolicyError,
    RestoreError,
    TooManyFailures,
    UserCodeError,
    user_code,
)
from jaxft.harness.data_models import (
    DPOItem,
    FinetuneConfig,
    OpenAIMessage,
    TrainingJobRef,
    TrainingJobStatus,
    Trajectory,
    TrajectoryCollection,
)
from jaxft.harness.evaluation import EpisodeOutcome
from jaxft.rollout.recorder import Call
from jaxft.rollout.sequences import token_sequences
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.shipped.configs import DPOTrainerConfig, DPOTrajectoryBuilderConfig
from jaxft.shipped.rollout_builder import RolloutBuilder
from jaxft.shipped.run_log import PAIRS_FILE, mean, reward_metrics
from jaxft.shipped.trainer import LoggedTrainer
from jaxft.training.rows import dropped_episodes, why_no_calls


class Candidate(NamedTuple):
    """An answer that was one of several."""

    call: Call
    score: float


class Turn(NamedTuple):
    """A decision: which one of its example, and the candidates for it."""

    number: int
    candidates: list[Candidate]


class DPOTrajectoryBuilder(RolloutBuilder):
    """A pair is a trajectory of two sequences, the chosen one first; an example's pairs are a group."""

    trajectory_builder_config: DPOTrajectoryBuilderConfig

    def __init__(self, trajectory_builder_config: DPOTrajectoryBuilderConfig) -> None:
        super().__init__(trajectory_builder_config, trajectory_builder_config.num_generations)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """The pairs of a collection, a group per example that has any, in the order of `start_run`.

        `metrics` has, beside the counts of episodes, the rewards of the episodes themselves and what became of the
        candidates: `decisions`, `lone_candidates` (decisions that had but one) and `pairs`.

        Raises:
            ValueError: no collection of this name is in progress.
            ConfigError: the episodes asked their language models, but never where training is aimed at.
        """
        outcomes, about = await self.finished(run_id)
        by_example: dict[str, list[EpisodeOutcome]] = {}
        for outcome in outcomes:
            by_example.setdefault(outcome.item.id, []).append(outcome)
        turns = {example: self._turns(episodes) for example, episodes in by_example.items()}
        groups = {example: list(self._pairs(example, of_example)) for example, of_example in turns.items()}
        about["metrics"] |= reward_metrics(
            [[outcome.reward for outcome in group if outcome.reward is not None] for group in by_example.values()]
        )
        about["metrics"] |= {
            "decisions": sum(map(len, turns.values())),
            "lone_candidates": sum(len(turn.candidates) == 1 for of_example in turns.values() for turn in of_example),
            "pairs": sum(map(len, groups.values())),
        }
        return TrajectoryCollection(trajectories=[pairs for pairs in groups.values() if pairs], run_id=run_id, **about)

    def _turns(self, outcomes: Iterable[EpisodeOutcome]) -> list[Turn]:
        decisions = []
        for outcome in outcomes:
            for calls, scores in outcome.episode.candidates:
                listed = [Candidate(call, score) for call, score in zip(calls, scores, strict=True)]
                decisions.append([candidate for candidate in listed if self.is_target(candidate.call)])
        if not self.trajectory_builder_config.require_multiple_candidates:
            decisions = _by_prompt(decisions)
        return [Turn(number, candidates) for number, candidates in enumerate(decisions) if candidates]

    def _pairs(self, example_id: str, turns: Sequence[Turn]) -> Iterator[Trajectory]:
        config = self.trajectory_builder_config
        count = 0
        for turn in turns:
            pairs = pairs_of(turn.candidates, exhaustive=config.exhaustive_pairs, min_score_diff=config.min_score_diff)
            for chosen, rejected in pairs[: config.max_pairs_per_turn]:
                reward = chosen.score - rejected.score if config.reward_from_score_diff else chosen.score
                yield make_pair(chosen, rejected, reward, example_id=example_id, number=count, turn=turn.number)
                count += 1


def pairs_of(
    candidates: Sequence[Candidate], *, exhaustive: bool = True, min_score_diff: float = 0.0
) -> list[tuple[Candidate, Candidate]]:
    """(better, worse) pairs of candidates, those that differ most first.

    Equal scores are never a pair, nor are two answers of the same tokens.
    """
    ranked = sorted(candidates, key=lambda candidate: -candidate.score)
    pairs = (
        [(better, worse) for place, better in enumerate(ranked) for worse in ranked[place + 1 :]]
        if exhaustive
        else [(ranked[0], ranked[-1])]
        if ranked
        else []
    )
    kept = [
        (better, worse)
        for better, worse in pairs
        if _is_enough(better.score - worse.score, min_score_diff) and better.call.token_ids != worse.call.token_ids
    ]
    return sorted(kept, key=lambda pair: pair[1].score - pair[0].score)


def make_pair(
    chosen: Candidate, rejected: Candidate, reward: float, *, example_id: str, number: int, turn: int
) -> Trajectory:
    """A pair as a trajectory."""
    prompt = [OpenAIMessage(role=said["role"], content=said["content"]) for said in chosen.call.messages]
    item = DPOItem(prompt=prompt, chosen_response=chosen.call.content, rejected_response=rejected.call.content)
    return Trajectory(
        episode=[item],
        reward=reward,
        metadata={"turn": turn, "chosen_score": chosen.score, "rejected_score": rejected.score},
        example_id=example_id,
        generation=number,
        sequences=[*token_sequences([chosen.call]), *token_sequences([rejected.call])],
    )


def _is_enough(diff: float, least: float) -> bool:
    # Scores of 0.3 and 0.2 differ by 0.1, whatever floats make of it.
    return diff > 0 and (diff >= least or math.isclose(diff, least, rel_tol=1e-9))


def _by_prompt(decisions: Sequence[Sequence[Candidate]]) -> list[list[Candidate]]:
    """The candidates by what they answer."""
    joined: dict[tuple[str, tuple[int, ...]], list[Candidate]] = {}
    for candidates in decisions:
        for candidate in candidates:
            joined.setdefault((candidate.call.llm, candidate.call.prompt_ids), []).append(candidate)
    return list(joined.values())


async def dpo_trajectory_builder(
    config: DPOTrajectoryBuilderConfig, builder: Any
) -> AsyncIterator[DPOTrajectoryBuilder]:
    """The builder; the run's evaluation and examples are bound to it by whoever asked for it."""
    yield DPOTrajectoryBuilder(config)


class DPOTrainer(LoggedTrainer):
    """Collects on the policy as it is, then trains; all it writes goes to the run directory."""

    trainer_config: DPOTrainerConfig

    def __init__(self, trainer_config: DPOTrainerConfig, *, directory: RunDirectory, console: Console) -> None:
        super().__init__(trainer_config, trainer_config.max_bad_updates, directory, console)
        self._collections: list[dict[str, Any]] = []  # the metrics of each, or its error
        self._collected: list[Trajectory] = []
        self._pairs: list[list[Trajectory]] = []
        self._figures: dict[str, Any] = {}

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """As every trainer's.

        Raises:
            ConfigError: curriculum learning is enabled, which chooses among the collections of epochs.
        """
        if run_config.curriculum_learning.enabled:
            raise ConfigError(
                ["finetuning.curriculum_learning.enabled: dpo_trainer collects before its epochs: set it to false"]
            )
        await super().initialize(run_config)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Collections, then epochs; the last status of each job. Stops at the first job that fails.

        Raises:
            TooManyFailures: too many episodes of a collection failed, or every collection did.
            NoLearningSignal: no decision had two candidates of different scores, or no epoch made an update.
            JobFailed: `max_bad_updates` updates in a row were not finite.
        """
        self.start(num_epochs)
        await self._collect(num_epochs)
        while self._pairs:  # a signal may have come before there were any
            is_last = self.progress.epoch >= num_epochs
            await self._save(await self.validate(num_epochs), is_last=is_last)
            if self.is_stopping:
                break
            if is_last:
                self.check_learned()
                break
            if await self.train_epoch() is None:
                break
        return self.progress.statuses

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef:
        """Submits all pairs that were collected."""
        assert self.trainer_adapter is not None
        # The figures of the collections belong to no epoch; the first one carries them.
        self.log.metrics[run_id] = dict(self._figures) if epoch == 0 else {}
        self.log.timings[run_id] = {}
        return await self.trainer_adapter.submit(TrajectoryCollection(trajectories=self._pairs, run_id=run_id))

    async def _collect(self, num_epochs: int) -> None:
        """All collections, with a checkpoint before each: they may take longer than the training."""
        while len(self._collections) < self.trainer_config.num_runs and not self.is_stopping:
            await self._save(await self.validate(num_epochs), is_last=False)
            if self.is_stopping:
                return
            run_id = f"collection_{len(self._collections):05d}"
            try:
                with user_code():
                    collection = await self._collection(run_id)
            except UserCodeError as failure:
                is_hopeless = isinstance(failure.error, ConfigError | PolicyError)  # the next would fail likewise
                if is_hopeless or not self.trainer_config.continue_on_collection_error:
                    raise failure.error from None
                self.log.console.message(f"{run_id} failed and is left out: {failure.summary}")
                self._collections.append({"error": failure.traceback})
            else:
                self.log.pairs(collection)
                self._collected += [pair for group in collection.trajectories for pair in group]
                self._collections.append({"metrics": collection.metrics})
        if self.is_stopping or self._pairs:
            return
        metrics = [collection["metrics"] for collection in self._collections if "metrics" in collection]
        if not metrics:
            raise TooManyFailures(f"every collection failed; the last:\n{self._collections[-1]['error']}")
        self._pairs = self._unique_pairs(self._collected)
        self._figures = _added(metrics) | {"pairs_trained": len(self._pairs)}
        if not self._pairs:
            cause = why_no_calls(self._figures) or (
                "record at least two candidates of different scores for a decision "
                "(jaxft.episode().record_candidates), or lower min_score_diff"
            )
            raise NoLearningSignal(f"no pairs were found: {cause}")
        if not self.log.state()["rewards"]:  # or they were logged before the run was resumed
            self.log.rewards(0, self._figures)
            episodes = sum(figures.get("episodes", 0) for figures in metrics)
            self.log.console.message(f"{len(self._pairs)} pairs from {episodes:.0f} episodes")

    async def _save(self, score: float | None, *, is_last: bool) -> None:
        await self.save(len(self._collections) + self.progress.epoch, score, is_last=is_last)

    async def _collection(self, run_id: str) -> TrajectoryCollection:
        assert self.trajectory_builder is not None
        await self.trajectory_builder.start_run(run_id)
        collection = await self.trajectory_builder.finalize(run_id)
        failed = len(collection.failures)
        episodes = collection.metrics.get("episodes", failed + sum(map(len, collection.trajectories)))
        if failed > self.trainer_config.max_failed_fraction * episodes:
            raise TooManyFailures(f"{failed} of {episodes:.0f} episodes failed; the last: {collection.failures[-1]}")
        if failed:
            first = collection.failures[0].splitlines()[0]
            self.log.console.message(f"{run_id}: {failed} of {episodes:.0f} episodes failed and are left out; {first}")
        if dropped := dropped_episodes(collection.metrics):
            self.log.console.message(f"{run_id}: {dropped}")
        self.trajectory_builder.log_progress(run_id, collection.metrics)
        return collection

    def _unique_pairs(self, pairs: list[Trajectory]) -> list[list[Trajectory]]:
        """One group per pair: pairs are not compared with each other."""
        if self.trainer_config.deduplicate_pairs:
            unique: dict[str, Trajectory] = {}
            for pair in pairs:
                unique.setdefault(_identity(pair), pair)
            pairs = list(unique.values())
        if self.trainer_config.max_pairs is not None:
            pairs = sorted(pairs, key=lambda pair: -pair.reward)[: self.trainer_config.max_pairs]
        return [[pair] for pair in pairs]

    def state(self) -> dict[str, Any]:
        """Counters and histories; the pairs are in a log of their own."""
        return {**super().state(), "collections": self._collections, "collected_pairs": len(self._collected)}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Goes on between two collections or epochs."""
        super().restore_state(state)
        self._collections = list(state["collections"])
        self._collected = self.log.read_pairs()
        if len(self._collected) != state["collected_pairs"]:
            raise RestoreError(
                f"{PAIRS_FILE} holds {len(self._collected)} pairs, but held {state['collected_pairs']} when the "
                "checkpoint was made: put it back, or start anew with --overwrite"
            )


def _identity(pair: Trajectory) -> str:
    return "".join(item.model_dump_json() for item in pair.episode if isinstance(item, DPOItem))


def _added(collections: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of all collections in one: means of means and quartiles, extremes of extremes, sums of counts."""
    names = {name: None for metrics in collections for name in metrics}
    return {name: _aggregated(name, [metrics[name] for metrics in collections if name in metrics]) for name in names}


def _aggregated(name: str, values: list[float]) -> float:
    if name.endswith(("_mean", "_q25", "_q75")):
        return mean(values)
    return min(values) if name.endswith("_min") else max(values) if name.endswith("_max") else sum(values)


async def dpo_trainer(config: DPOTrainerConfig, builder: Any) -> AsyncIterator[DPOTrainer]:
    """The trainer of a run; it is closed by `cleanup`."""
    yield DPOTrainer(config, directory=builder.directory, console=builder.console)
