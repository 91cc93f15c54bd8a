"""`_type: dpo_trajectory_builder`: the scored candidates of an agent's decisions as pairs, a better and a worse one."""

import math
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from jaxft.components.collecting import EpisodeCollector
from jaxft.components.run_log import reward_figures
from jaxft.harness.data_models import DPOItem, OpenAIMessage, Trajectory, TrajectoryCollection
from jaxft.harness.evaluation import EpisodeOutcome
from jaxft.harness.registry import TrajectoryBuilderConfig, register_trajectory_builder
from jaxft.policy.recorder import Call
from jaxft.policy.sequences import token_sequences


class DPOTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="dpo_trajectory_builder"):
    """Pairs of candidates, of what the workflow gave to `jaxft.episode().record_candidates`."""

    num_generations: int = Field(default=1, ge=1, description="Episodes of each example.")
    exhaustive_pairs: bool = Field(
        default=True, description="All pairs of a decision's candidates; false: the best with the worst only."
    )
    min_score_diff: float = Field(
        default=0.0, ge=0.0, allow_inf_nan=False, description="Candidates whose scores differ by less are no pair."
    )
    max_pairs_per_turn: int | None = Field(
        default=None, ge=1, description="Pairs of one decision, those that differ most; null: all."
    )
    reward_from_score_diff: bool = Field(
        default=True, description="A pair's reward is the difference of its scores; false: the better score."
    )
    require_multiple_candidates: bool = Field(
        default=True,
        description="A decision with one candidate makes no pair; false: it is compared with the other decisions of "
        "its example that had the same prompt.",
    )


class Candidate(NamedTuple):
    """An answer that was one of several."""

    call: Call
    score: float


class Turn(NamedTuple):
    """A decision: which one of its example, and the candidates for it."""

    number: int
    candidates: list[Candidate]


class DPOTrajectoryBuilder(EpisodeCollector):
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
        about["metrics"] |= reward_figures(
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
            decisions = _joined(decisions)
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


def _joined(decisions: Sequence[Sequence[Candidate]]) -> list[list[Candidate]]:
    """The candidates by what they answer."""
    joined: dict[tuple[str, tuple[int, ...]], list[Candidate]] = {}
    for candidates in decisions:
        for candidate in candidates:
            joined.setdefault((candidate.call.llm, candidate.call.prompt_ids), []).append(candidate)
    return list(joined.values())


@register_trajectory_builder(config_type=DPOTrajectoryBuilderConfig)
async def dpo_trajectory_builder(
    config: DPOTrajectoryBuilderConfig, builder: Any
) -> AsyncIterator[DPOTrajectoryBuilder]:
    """The builder; the run's evaluation and examples are bound to it by whoever asked for it."""
    yield DPOTrajectoryBuilder(config)
