"""The sequences of a job as `[B T]` tables: laid out once, filled in on the way to the loss, cut into microbatches.

Letters: `N` sequences, `B` rows of a table, `T` tokens of a row.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxft.core.advantages import (
    estimate_advantages,
    gae,
    normalize_then_sum,
    outcome_rewards,
    reward_to_go,
    step_advantages,
    whiten,
)
from jaxft.core.packing import Packing, pack, plan_packing, plan_padding, segments, token_index
from jaxft.core.types import Batch, Scored
from jaxft.rollout.sequences import TokenSequence
from jaxft.training.config import LossConfig

RECORDED = {
    "tokens": np.int32,
    "completion_mask": np.bool_,
    "temperatures": np.float32,
    "sampler_logprobs": np.float32,
    "behavior_logprobs": np.float32,
}
"""Fields of a batch that are recorded with a sequence, and their types."""

Shapes = tuple[tuple[int, int], ...]
"""Rows and width of each microbatch."""


Scorer = Callable[[Batch], Scored]
"""Scores the tokens of a microbatch."""


class Row(NamedTuple):
    """A token sequence to train on, and the number of its trajectory in the job."""

    sequence: TokenSequence
    trajectory: int


class CollectedRewards(NamedTuple):
    """Rewards of the trajectories of a job, one row of each array per trajectory; NaN where one is not scorable.

    Attributes:
        rewards: one per trajectory, the penalty for length taken off.
        group_ids: the group of each trajectory.
        named_rewards: a column per entry of `reward_weights`, when those are normalised one by one.
        step_rewards: a column per turn, NaN behind the last one, when there are shaped rewards.
        metrics: the mean penalty for length.
    """

    rewards: np.ndarray
    group_ids: np.ndarray
    named_rewards: np.ndarray | None
    step_rewards: np.ndarray | None
    metrics: dict[str, float]


class TrainingBatch(NamedTuple):
    """The sequences of a job, or of one of its minibatches, in tables.

    Attributes:
        batch: `[B T]` numpy tables. Scores and advantages are filled in once they are known; padding holds 0.
        packing: where each sequence lies in the tables.
        microbatch_shapes: rows and width of each microbatch, first rows first.
        trajectories: `[N]` the number of each sequence's trajectory in the job.
        tokens: the index (row, column) of every token in the tables, sequence by sequence.
        places: the index (sequence, position) of every token in a table of one sequence a row, in the same order.
        turns: `[B T]` the turn that a token belongs to, -1 where none.
        is_cut: `[N]` True where a length limit cut the episode off behind the sequence.
        bootstrap_values: `[N]` the value behind each sequence, 0 where the episode ended by itself; None but for ppo.
    """

    batch: Batch
    packing: Packing
    microbatch_shapes: Shapes
    trajectories: np.ndarray
    tokens: tuple[np.ndarray, np.ndarray]
    places: tuple[np.ndarray, np.ndarray]
    turns: np.ndarray
    is_cut: np.ndarray
    bootstrap_values: np.ndarray | None = None

    def microbatches(self) -> list[Batch]:
        """Slices of the tables, each as wide as its own rows need."""
        ends = list(itertools.accumulate(rows for rows, _ in self.microbatch_shapes))
        return [
            _cut(self.batch, slice(end - rows, end), width)
            for end, (rows, width) in zip(ends, self.microbatch_shapes, strict=True)
        ]

    def counts(self) -> dict[str, int]:
        """Numbers of trained tokens, of sequences and trajectories with some, of pairs, and of updates (1)."""
        mask = np.asarray(self.batch.completion_mask)[self.tokens]
        tokens = np.bincount(self.places[0][mask], minlength=len(self.trajectories))
        return {
            "tokens": int(tokens.sum()),
            "sequences": int((tokens > 0).sum()),
            "trajectories": len(np.unique(self.trajectories[tokens > 0])),
            "pairs": len(tokens) // 2,
            "updates": 1,
        }


def _cut(batch: Batch, rows: slice, width: int) -> Batch:
    return jax.tree.map(lambda table: table[rows, :width], batch)


def padded_width(tokens: int) -> int:
    """The width of a table whose longest sequence has so many tokens: 16, 32, 48, 64, 96, 128, 192, 256, ...

    >>> [padded_width(n) for n in (5, 80, 97, 300, 513)]
    [16, 96, 128, 384, 768]
    """
    power = max(16, 1 << (tokens - 1).bit_length())
    return power * 3 // 4 if power >= 64 and tokens <= power * 3 // 4 else power


@dataclass(frozen=True)
class BatchPlanner:
    """Decides where sequences lie and how rows are divided into microbatches.

    Widths and heights of microbatches are a few round numbers, so that jobs of any size share compiled programs.

    Attributes:
        microbatch_tokens: most tokens of a microbatch, padding included; a microbatch has at least one row.
        packed: several short sequences may share a row.
        pairs: sequences `2 i` and `2 i + 1` lie in neighbouring rows of one microbatch; not for packed rows.
        row_shards: shards of a mesh that the rows of a microbatch divide over.
    """

    microbatch_tokens: int
    packed: bool = False
    pairs: bool = False
    row_shards: int = 1

    def plan(self, lengths: Sequence[int]) -> tuple[Packing, Shapes]:
        """Where sequences of these lengths lie, and the shapes of the microbatches.

        Without packing the longest come first, so that the microbatches of short ones are narrow.
        """
        width = padded_width(max(lengths))
        if self.packed:
            packing = plan_packing(lengths, width)
            row_lengths = [width] * packing.height
        else:
            unit = 2 if self.pairs else 1
            longest = np.repeat(np.reshape(lengths, (-1, unit)).max(axis=1), unit)
            order = np.argsort(-longest, kind="stable")
            packing = plan_padding(lengths, width)._replace(rows=np.argsort(order))
            row_lengths = longest[order].tolist()
        shapes = self.shapes(row_lengths)
        return packing._replace(height=sum(rows for rows, _ in shapes)), shapes

    def shapes(self, row_lengths: Sequence[int]) -> Shapes:
        """Rows and width of the microbatches of rows with these lengths, which descend; the last may hold filling rows.

        >>> [BatchPlanner(256).shapes([16] * n) for n in (3, 9, 17)]
        [((4, 16),), ((8, 16), (2, 16)), ((16, 16), (2, 16))]
        >>> BatchPlanner(256).shapes([64] + [16] * 20)
        ((4, 64), (16, 16), (2, 16))
        """
        shapes: list[tuple[int, int]] = []
        done = 0
        while done < len(row_lengths):
            width = padded_width(row_lengths[done])
            heights = self.heights(width)
            left = -(-(len(row_lengths) - done) // heights[-1]) * heights[-1]
            rows = next(height for height in heights if height <= left)
            shapes.append((rows, width))
            done += rows
        return tuple(shapes)

    def heights(self, width: int) -> list[int]:
        """Rows that a microbatch of this width may have: as many as its tokens allow, a half, a quarter, an eighth.

        >>> [BatchPlanner(1000).heights(width) for width in (16, 96, 4096)]
        [[32, 16, 8, 4], [8, 4, 2, 1], [1]]
        """
        unit = math.lcm(2 if self.pairs else 1, self.row_shards)
        allowed = max(1, self.microbatch_tokens // width // unit)
        largest = 1 << (allowed.bit_length() - 1)  # a power of two, so that it can be halved
        return [unit * rows for rows in sorted({max(1, largest // part) for part in (1, 2, 4, 8)}, reverse=True)]

    def all_shapes(self, longest: int) -> Shapes:
        """Every shape that a microbatch of sequences of up to `longest` tokens can have."""
        widths = sorted({padded_width(tokens) for tokens in range(1, longest + 1)})
        return tuple((rows, width) for width in widths for rows in self.heights(width))


def make_batch(rows: list[Row], planner: BatchPlanner) -> TrainingBatch:
    """The tables of these rows. Filling rows train nothing.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("there are no rows to make a batch of")
    packing, shapes = planner.plan([len(row.sequence.tokens) for row in rows])
    recorded: dict[str, Any] = {
        name: pack(packing, [getattr(row.sequence, name) for row in rows], dtype) for name, dtype in RECORDED.items()
    }
    if planner.packed:
        recorded["segment_ids"], recorded["positions"] = segments(packing)
    return TrainingBatch(
        Batch(**recorded),
        packing,
        shapes,
        np.array([row.trajectory for row in rows]),
        *token_index(packing),
        turns=pack(packing, [row.sequence.turns or -1 for row in rows], np.int32, fill=-1),
        is_cut=np.array([row.sequence.episode_truncated for row in rows]),
    )


def with_scores(job: TrainingBatch, loss: LossConfig, policy: Scorer | None, reference: Scorer | None) -> TrainingBatch:
    """The job with the tables `old_logprobs`, `old_values` and `ref_logprobs` that advantages and loss read.

    Args:
        job: as `make_batch` gives it.
        loss: decides what stands behind an episode that was cut.
        policy: scores a microbatch before the first update; None where nothing reads its scores.
        reference: likewise, with the policy that the KL is measured from.
    """
    batch, behind = job.batch, None
    if policy is not None:
        old = _scores(job, policy)
        batch = batch._replace(old_logprobs=old.logprobs, old_values=old.values)
        if old.next_values is not None:
            rows, starts, lengths = job.packing[:3]
            at_end = old.next_values[rows, starts + lengths - 1]
            behind = np.where(job.is_cut & (loss.bootstrap == "value"), at_end, np.float32(0))
    if reference is not None:
        batch = batch._replace(ref_logprobs=_scores(job, reference).logprobs)
    return job._replace(batch=batch, bootstrap_values=behind)


def _scores(job: TrainingBatch, score: Scorer) -> Scored:
    """Scores `[B T]` of all tokens of the job, 0 in padding."""
    scored = [score(microbatch) for microbatch in job.microbatches()]

    def joined(*tables: np.ndarray) -> np.ndarray:
        wide = [np.pad(table, ((0, 0), (0, job.packing.width - table.shape[1]))) for table in tables]
        scores = np.zeros(job.turns.shape, np.float32)
        scores[job.tokens] = np.concatenate(wide)[job.tokens]
        return scores

    return jax.tree.map(joined, *jax.device_get(scored))


def divide(
    job: TrainingBatch, planner: BatchPlanner, num_minibatches: int, num_iterations: int, seed: str
) -> list[TrainingBatch]:
    """The minibatch of each update: whole trajectories, shuffled anew in each iteration."""
    if num_minibatches == 1:
        return [job] * num_iterations
    minibatches = []
    for iteration in range(num_iterations):
        order = np.unique(job.trajectories).tolist()
        random.Random(f"{seed} {iteration}").shuffle(order)
        for members in np.array_split(np.array(order), min(num_minibatches, len(order))):
            minibatches.append(select_sequences(job, np.flatnonzero(np.isin(job.trajectories, members)), planner))
    return minibatches


def select_sequences(job: TrainingBatch, chosen: np.ndarray, planner: BatchPlanner) -> TrainingBatch:
    """The tables of some sequences of a job, laid out anew as they alone need; the job itself if they are all of it.

    Args:
        job: with all its scores and advantages.
        chosen: numbers of the sequences, ascending.
        planner: that of the job.
    """
    if len(chosen) == len(job.trajectories):
        return job
    packing, shapes = planner.plan(job.packing.lengths[chosen].tolist())
    index, is_chosen = token_index(packing), np.isin(job.places[0], chosen)
    source = tuple(each[is_chosen] for each in job.tokens)

    def moved(table: Any, fill: int = 0) -> Any:
        result = np.full((packing.height, packing.width), fill, table.dtype)
        result[index.tokens] = table[source]
        return result

    batch: Batch = jax.tree.map(moved, job.batch)
    if planner.packed:
        ids: Any = segments(packing)[0]  # counted from 1 in each row
        batch = batch._replace(segment_ids=ids)
    turns = moved(job.turns, fill=-1)
    return TrainingBatch(batch, packing, shapes, job.trajectories[chosen], *index, turns, job.is_cut[chosen])


def compute_advantages(
    job: TrainingBatch, credit: CollectedRewards, loss: LossConfig
) -> tuple[TrainingBatch, dict[str, float]]:
    """The job with the tables `advantages`, for ppo `returns`, and for losses that are averaged over trajectories
    `trajectory_tokens`; and the metrics of the KL in the reward.

    It computes in float64, and sums over tokens in the order of the sequences, so that layouts do not change a bit.

    Args:
        job: with `old_logprobs` and `ref_logprobs` for a KL in the reward; with `old_values` and `bootstrap_values` for
            ppo.
        credit: the rewards of the job's trajectories.
        loss: decides the estimator and what else enters a reward.
    """
    trajectories, metrics = job.trajectories[job.places[0]], {}  # of every token
    mask = np.asarray(job.batch.completion_mask)[job.tokens]
    k1 = np.zeros(len(mask))
    if loss.kl_weight and loss.kl == "k1_in_reward":
        scores = (job.batch.old_logprobs, job.batch.ref_logprobs)
        old, ref = (np.asarray(table, np.float64)[job.tokens] for table in scores)
        k1 = np.where(mask, old - ref, 0.0)
        trained = k1[mask]
        metrics = {"kl": float(np.mean(np.expm1(-trained) + trained)), "kl_k1": float(trained.mean())}
    computed: dict[str, np.ndarray] = {}
    if loss.estimator in ("gae", "reinforce_pp"):
        computed = _advantages_per_token(job, credit, mask, k1, loss)
    elif credit.step_rewards is not None:
        computed["advantages"] = _advantages_per_step(job, credit.step_rewards, credit.group_ids, k1, loss)
    else:
        computed["advantages"] = _advantages_per_trajectory(job, credit, k1, loss)[trajectories]
    if loss.averaged_over == "trajectories":
        computed["trajectory_tokens"] = np.bincount(trajectories[mask], minlength=len(credit.rewards))[trajectories]
    tables: dict[str, Any] = {}
    for name, values in computed.items():
        tables[name] = np.zeros(job.turns.shape, np.float32)
        tables[name][job.tokens] = values
    return job._replace(batch=job.batch._replace(**tables)), metrics


def _advantages_per_step(
    job: TrainingBatch, step_rewards: np.ndarray, group_ids: np.ndarray, k1: np.ndarray, loss: LossConfig
) -> np.ndarray:
    turns, trajectories = job.turns[job.tokens], job.trajectories[job.places[0]]
    has_turn, steps = turns >= 0, step_rewards.copy()
    np.subtract.at(steps, (trajectories[has_turn], turns[has_turn]), loss.kl_weight * k1[has_turn])
    per_step = np.asarray(step_advantages(steps, group_ids, loss.estimator, gamma=loss.gamma))
    return np.where(has_turn, per_step[trajectories, turns], 0.0)


def _advantages_per_trajectory(
    job: TrainingBatch, credit: CollectedRewards, k1: np.ndarray, loss: LossConfig
) -> np.ndarray:
    if credit.named_rewards is not None and loss.reward_weights is not None:
        weights = list(loss.reward_weights.values())
        return np.asarray(normalize_then_sum(credit.named_rewards, credit.group_ids, weights))
    divergence = np.zeros(len(credit.rewards))
    np.add.at(divergence, job.trajectories, [span.sum() for span in _split(job, k1)])
    rewards = credit.rewards - loss.kl_weight * divergence
    return np.asarray(estimate_advantages(rewards, credit.group_ids, loss.estimator))


def _advantages_per_token(
    job: TrainingBatch, credit: CollectedRewards, mask: np.ndarray, k1: np.ndarray, loss: LossConfig
) -> dict[str, np.ndarray]:
    """Whitened advantages, and the returns of GAE, of every token; computed in tables of one sequence a row."""

    def rows(values: np.ndarray) -> np.ndarray:
        table = np.zeros((len(job.trajectories), job.packing.lengths.max()), values.dtype)
        table[job.places] = values
        return table

    trained = rows(mask)
    if credit.step_rewards is None:
        rewards = np.asarray(outcome_rewards(credit.rewards[job.trajectories], trained))
    else:
        turns, steps = _split(job, job.turns[job.tokens]), credit.step_rewards[job.trajectories]
        rewards = rows(np.concatenate([_step_rewards(*each) for each in zip(turns, steps, strict=True)]))
    rewards, found = rewards - loss.kl_weight * rows(k1), {}
    if loss.estimator == "reinforce_pp":
        advantages = reward_to_go(rewards, trained, gamma=loss.gamma)
    else:
        values, behind = rows(np.asarray(job.batch.old_values)[job.tokens]), job.bootstrap_values
        advantages, returns = gae(
            rewards, values, trained, gamma=loss.gamma, lam=loss.gae_lambda, bootstrap_values=behind
        )
        found["returns"] = np.asarray(returns)[job.places]
    return {"advantages": np.asarray(whiten(advantages, trained))[job.places], **found}


def _split(job: TrainingBatch, values: np.ndarray) -> list[np.ndarray]:
    """The values of each sequence."""
    return np.split(values, np.cumsum(job.packing.lengths)[:-1])


def _step_rewards(turns: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The reward of each turn on its last token; that of a turn in another row on the turn before it, which helped."""
    own, rewards = np.unique(turns[turns >= 0]), np.zeros(len(turns))
    for turn in np.flatnonzero(~np.isnan(steps)):
        before = own[own <= turn]
        if before.size:
            rewards[np.flatnonzero(turns == before[-1])[-1]] += steps[turn]
    return rewards


def empty_batch(loss: LossConfig, rows: int, width: int, *, packed: bool, has_old: bool) -> Batch:
    """A microbatch of zeros with the fields that the update of `loss` is given.

    Args:
        loss: decides which fields there are.
        rows: height of its tables.
        width: width of its tables.
        packed: it has segments and positions.
        has_old: a job makes several updates, and so keeps the log-probabilities of before the first.
    """
    floats: Any = np.zeros((rows, width), np.float32)
    whole: Any = np.zeros((rows, width), np.int32)
    is_ppo = loss.name == "ppo"
    return Batch(
        tokens=whole,
        completion_mask=whole.astype(np.bool_),
        advantages=floats if loss.is_policy_loss else None,
        temperatures=floats,
        sampler_logprobs=floats,
        behavior_logprobs=floats,
        old_logprobs=floats if has_old and loss.is_policy_loss else None,
        ref_logprobs=floats if loss.needs_reference else None,
        old_values=floats if is_ppo else None,
        returns=floats if is_ppo else None,
        positions=whole if packed else None,
        segment_ids=whole if packed else None,
        trajectory_tokens=floats if loss.averaged_over == "trajectories" else None,
    )
