"""DPO: pairs of answers are collected first, then trained on, with one job per epoch.

`DPOTrajectoryBuilder` makes pairs of the candidates that a workflow recorded; `DPOTrainer` collects them and submits
all of them in every epoch.
"""

import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from jaxft.components.configs import DPOTrainerConfig, DPOTrajectoryBuilderConfig
from jaxft.components.rollout_builder import RolloutBuilder, join_metrics, reward_metrics
from jaxft.components.trainer import LoggedTrainer
from jaxft.errors import (
    ConfigError,
    HostsError,
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
from jaxft.rollout.calls import Call
from jaxft.rollout.messages import readable_text
from jaxft.rollout.sequences import token_sequences
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory
from jaxft.runs.files import PAIRS_FILE
from jaxft.training.rows import why_no_calls


class Candidate(NamedTuple):
    """One of several answers to a prompt, with its score and its number among them."""

    call: Call
    score: float
    number: int = 0


class DPOTrajectoryBuilder(RolloutBuilder):
    """Makes one trajectory per pair, with two sequences, the chosen one first. The pairs of an example are a group."""

    trajectory_builder_config: DPOTrajectoryBuilderConfig

    def __init__(self, trajectory_builder_config: DPOTrajectoryBuilderConfig) -> None:
        super().__init__(trajectory_builder_config, trajectory_builder_config.num_generations)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Return the pairs of a collection, a group per example that has any, in the order of `start_run`.

        `metrics` holds, beside the counts of episodes, the metrics of their rewards, `decisions`, `lone_candidates`
        (decisions with a single candidate) and `pairs`.

        Raises:
            ValueError: no collection of this name is in progress.
            ConfigError: the episodes called language models, but never where training is aimed at.
        """
        outcomes, about = await self.finish_run(run_id)
        by_example: dict[str, list[EpisodeOutcome]] = {}
        for outcome in outcomes:
            by_example.setdefault(outcome.item.id, []).append(outcome)
        decisions = {example: self._decisions(episodes) for example, episodes in by_example.items()}
        candidates = [each for made in decisions.values() for each in made]
        groups = {example: self._pairs(example, made) for example, made in decisions.items()}
        about["metrics"] |= reward_metrics(
            [[outcome.reward for outcome in group if outcome.reward is not None] for group in by_example.values()]
        )
        about["metrics"] |= {
            "decisions": sum(map(bool, candidates)),
            "lone_candidates": sum(len(each) == 1 for each in candidates),
            "pairs": sum(map(len, groups.values())),
        }
        return TrajectoryCollection(trajectories=[pairs for pairs in groups.values() if pairs], run_id=run_id, **about)

    def _decisions(self, outcomes: Sequence[EpisodeOutcome]) -> list[list[Candidate]]:
        """Return the candidates of each decision of an example's episodes that is a training target."""
        decisions = []
        for outcome in outcomes:
            for calls, scores in outcome.episode.candidates:
                candidates = [
                    Candidate(call, score, number)
                    for number, (call, score) in enumerate(zip(calls, scores, strict=True))
                ]
                decisions.append([candidate for candidate in candidates if self.is_target(candidate.call)])
        if not self.trajectory_builder_config.require_multiple_candidates:
            by_prompt: dict[tuple[str, tuple[int, ...]], list[Candidate]] = {}
            for candidate in (candidate for candidates in decisions for candidate in candidates):
                by_prompt.setdefault((candidate.call.llm, candidate.call.prompt_ids), []).append(candidate)
            decisions = list(by_prompt.values())
        return decisions

    def _pairs(self, example_id: str, decisions: Sequence[Sequence[Candidate]]) -> list[Trajectory]:
        """Return the pairs of an example as trajectories, numbered by `generation`."""
        config = self.trajectory_builder_config
        trajectories: list[Trajectory] = []
        for turn, candidates in enumerate(decisions):
            pairs = ranked_pairs(candidates, exhaustive=config.exhaustive_pairs, min_score_diff=config.min_score_diff)
            for chosen, rejected in pairs[: config.max_pairs_per_turn]:
                prompt = [
                    OpenAIMessage(role=said["role"], content=readable_text(said)) for said in chosen.call.messages
                ]
                item = DPOItem(
                    prompt=prompt, chosen_response=chosen.call.full_text, rejected_response=rejected.call.full_text
                )
                score_diff = chosen.score - rejected.score
                trajectories.append(
                    Trajectory(
                        episode=[item],
                        reward=score_diff if config.reward_from_score_diff else chosen.score,
                        metadata={
                            "dpo_type": "preference_pair",
                            "example_id": example_id,
                            "turn_id": str(turn),
                            "chosen_score": chosen.score,
                            "rejected_score": rejected.score,
                            "score_diff": score_diff,
                            "chosen_index": chosen.number,
                            "rejected_index": rejected.number,
                        },
                        example_id=example_id,
                        generation=len(trajectories),
                        sequences=[*token_sequences([chosen.call]), *token_sequences([rejected.call])],
                    )
                )
        return trajectories


def ranked_pairs(
    candidates: Sequence[Candidate], *, exhaustive: bool = True, min_score_diff: float = 0.0
) -> list[tuple[Candidate, Candidate]]:
    """Return the (better, worse) pairs of candidates, by descending difference of their scores.

    Candidates of equal scores, or with the same tokens, are never a pair.

    Args:
        candidates: candidates of one decision.
        exhaustive: True for all pairs, False for only the best candidate with the worst.
        min_score_diff: minimum difference of the scores of a pair.
    """
    ranked = sorted(candidates, key=lambda candidate: -candidate.score)
    if exhaustive:
        pairs = [(better, worse) for rank, better in enumerate(ranked) for worse in ranked[rank + 1 :]]
    else:
        pairs = [(ranked[0], ranked[-1])] if ranked else []

    def is_enough(diff: float) -> bool:
        # Scores of 0.3 and 0.2 must differ by 0.1, although floats round the difference.
        return diff > 0 and (diff >= min_score_diff or math.isclose(diff, min_score_diff, rel_tol=1e-9))

    kept = [
        (better, worse)
        for better, worse in pairs
        if is_enough(better.score - worse.score) and better.call.token_ids != worse.call.token_ids
    ]
    return sorted(kept, key=lambda pair: pair[1].score - pair[0].score)


async def dpo_trajectory_builder(
    config: DPOTrajectoryBuilderConfig, builder: Any
) -> AsyncIterator[DPOTrajectoryBuilder]:
    """Yield the builder; its evaluation and examples are bound by the component builder."""
    yield DPOTrajectoryBuilder(config)


class DPOTrainer(LoggedTrainer):
    """Collects pairs with the policy as it is, then trains on them."""

    trainer_config: DPOTrainerConfig

    def __init__(self, trainer_config: DPOTrainerConfig, *, directory: RunDirectory, console: Console) -> None:
        super().__init__(trainer_config, directory=directory, console=console)
        self._collections: list[dict[str, Any]] = []  # the metrics of each, or its error
        self._collected: list[Trajectory] = []
        self._pairs: list[list[Trajectory]] = []
        self._metrics: dict[str, Any] = {}

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Initialise trainer, builder and adapter.

        Raises:
            ConfigError: curriculum learning is enabled, which chooses among the groups of an epoch, or tasks have
                weights.
        """
        if run_config.curriculum_learning.enabled:
            raise ConfigError(
                "finetuning.curriculum_learning.enabled: dpo_trainer collects before its epochs: set it to false"
            )
        if any(task.weight != 1.0 or task.curriculum_learning for task in run_config.per_task.values()):
            raise ConfigError("finetuning.per_task: dpo_trainer has no weights or curricula of tasks: take them out")
        await super().initialize(run_config)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Run all collections, then all epochs, and return the last status of each job.

        The run ends early at the first job that does not complete.

        Raises:
            TooManyFailures: too many episodes of a collection failed, or every collection did.
            NoLearningSignal: no decision had two candidates of different scores, or no epoch made an update.
            JobFailed: `max_bad_updates` updates in a row were not finite.
        """
        self.start(num_epochs)
        await self._collect_pairs(num_epochs)
        while self._pairs:  # a signal may have come before there were any
            is_last = self.epoch >= num_epochs
            await self.save(await self.validate(num_epochs), is_last=is_last)
            if self.is_stopping:
                break
            if is_last:
                self.check_learned()
                break
            if await self.train_epoch() is None:
                break
        return self.statuses

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef:
        """Submit all pairs that were collected."""
        # The metrics of the collections belong to no epoch; the first one carries them.
        self.log.metrics[run_id] = dict(self._metrics) if epoch == 0 else {}
        self.log.timings[run_id] = {}
        seen = self._pairs
        await self.call_back(self.trainer_config.on_trajectories, run_id, trajectories=seen, epoch=epoch)
        return await self.trainer_adapter.submit(TrajectoryCollection(trajectories=self._pairs, run_id=run_id))

    async def _collect_pairs(self, num_epochs: int) -> None:
        """Run the collections, with a checkpoint before each: they may take longer than the training."""
        while len(self._collections) < self.trainer_config.num_runs and not self.is_stopping:
            await self.save(await self.validate(num_epochs), is_last=False)
            if self.is_stopping:
                return
            number = len(self._collections)
            run_id = f"collection_{number:05d}"
            meta = {"run_number": number, "run_id": run_id, "trainer_config": self.trainer_config.model_dump()}
            try:
                with user_code():
                    with self.collecting():
                        collection = await self.collect(run_id, meta)
                    self.check_collection(collection)
                    self.trajectory_builder.log_progress(run_id, collection.metrics)
            except UserCodeError as failure:
                is_hopeless = isinstance(
                    failure.error, ConfigError | HostsError | PolicyError
                )  # the next collection would fail, too
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
        self._pairs = self._choose_pairs()
        self._metrics = join_metrics(metrics) | {"pairs_trained": len(self._pairs)}
        if not self._pairs:
            cause = why_no_calls(self._metrics) or (
                "record at least two candidates of different scores for a decision "
                "(jaxft.episode().record_candidates), or lower min_score_diff"
            )
            raise NoLearningSignal(f"no pairs were found: {cause}")
        if not self.log.state()["rewards"]:  # or they were logged before the run was resumed
            self.log.rewards(0, self._metrics)
            self.log.console.message(f"{len(self._pairs)} pairs from {self._metrics.get('episodes', 0):.0f} episodes")

    @property
    def step(self) -> int:
        """Number of the collections and epochs so far, which names the next checkpoint."""
        return len(self._collections) + self.epoch

    def _choose_pairs(self) -> list[list[Trajectory]]:
        """Return the pairs to train, each in a group of its own, as pairs are not compared with each other."""
        pairs = self._collected
        if self.trainer_config.deduplicate_pairs:
            unique: dict[str, Trajectory] = {}
            for pair in pairs:
                texts = "".join(item.model_dump_json() for item in pair.episode if isinstance(item, DPOItem))
                unique.setdefault(texts, pair)
            pairs = list(unique.values())
        if self.trainer_config.max_pairs is not None:
            pairs = sorted(pairs, key=lambda pair: -pair.reward)[: self.trainer_config.max_pairs]
        return [[pair] for pair in pairs]

    def state(self) -> dict[str, Any]:
        """Return counters and histories, for JSON; the pairs are in a log of their own."""
        return {**super().state(), "collections": self._collections, "collected_pairs": len(self._collected)}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Go on between two collections or epochs."""
        super().restore_state(state)
        self._collections = list(state["collections"])
        self._collected = self.log.read_pairs()
        if len(self._collected) != state["collected_pairs"]:
            raise RestoreError(
                f"{PAIRS_FILE} holds {len(self._collected)} pairs, but held {state['collected_pairs']} when the "
                "checkpoint was made: put it back, or start anew with --overwrite"
            )


async def dpo_trainer(config: DPOTrainerConfig, builder: Any) -> AsyncIterator[DPOTrainer]:
    """Yield the trainer of a run."""
    yield DPOTrainer(config, directory=builder.directory, console=builder.console)
