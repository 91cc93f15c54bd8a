"""Batches of a training job: token sequences as `[B T]` tables, their scores, and microbatches.

The tables are laid out once per job. Log-probabilities of policy and reference, then advantages, are added to them.
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

from jaxft.core.packing import (
    Branches,
    Packing,
    find_families,
    pack,
    plan_branches,
    plan_packing,
    plan_padding,
    segments,
    token_index,
    unpack,
)
from jaxft.core.sharding import to_host
from jaxft.core.types import Batch, HostStates, Scored
from jaxft.models.config import ExpertTable
from jaxft.rollout.calls import PENALIZED, decode_experts, decode_support
from jaxft.rollout.sequences import TokenSequence
from jaxft.training.config import LossConfig

RECORDED = {
    "tokens": np.int32,
    "completion_mask": np.bool_,
    "temperatures": np.float32,
    "sampler_logprobs": np.float32,
    "behavior_logprobs": np.float32,
}
"""Batch fields copied from the recorded sequences, and their dtypes."""

PACKED_WIDTH, MORE_TOKENS = 64, 1.1
"""Tokens that packed rows have at least, unless that makes microbatches of more than so many times the tokens.

Jobs whose longest sequences differ then have rows of one width, and share programs: one takes longer to compile than
many jobs take for a tenth more tokens.
"""

MOST_OF_TOKENS, LEAST_SAVED = 0.9, 4096
"""Rows that share prefixes take the place of others if they have at most this fraction of their tokens, padding
included, and so many fewer: programs for less take longer to compile than many jobs take without them."""

Shapes = tuple[tuple[int, int], ...]
"""Pairs (rows, width), one per microbatch."""


Scorer = Callable[[Batch], Scored]
"""Function from a microbatch to the log-probabilities, and with a value head the values, of its tokens."""


class Row(NamedTuple):
    """A token sequence to train on, the index of its trajectory in the job, and its answers as a teacher reads them.

    The teacher's sequence, of a teacher with a prompt of its own, has the same trained tokens behind that prompt.
    """

    sequence: TokenSequence
    trajectory: int
    teacher: TokenSequence | None = None


class CollectedRewards(NamedTuple):
    """Rewards of the trajectories of a job: arrays with one row per trajectory, NaN where it is not scorable.

    A scorable trajectory has either an outcome or, where its group has shaped rewards, step rewards; the other is NaN.

    Attributes:
        rewards: one outcome per trajectory, after the length penalty.
        group_ids: group of each trajectory.
        named_rewards: one column per name of `names`, where the estimator reads each separately; else None.
        step_rewards: one column per turn, NaN after the last turn; None without shaped rewards.
        metrics: mean length penalty.
        names: names of the columns of `named_rewards`.
        tasks: task of each trajectory; empty if all are of one.
    """

    rewards: np.ndarray
    group_ids: np.ndarray
    named_rewards: np.ndarray | None
    step_rewards: np.ndarray | None
    metrics: dict[str, float]
    names: tuple[str, ...] = ()
    tasks: tuple[str | None, ...] = ()


class TrainingBatch(NamedTuple):
    """The batch of a job, or of one of its minibatches, and the position of every sequence in it.

    Attributes:
        batch: `[B T]` numpy tables, 0 in padding; scores and advantages are None until they are computed.
        packing: row, start and length of each sequence in the tables.
        microbatch_shapes: rows and width of each microbatch, in the order of the rows.
        trajectories: `[N]` index of each sequence's trajectory in the job.
        tokens: index (row, column) of every token in the tables, sequence by sequence.
        places: index (sequence, position) of every token in a table with one sequence per row, in the same order.
        is_own: for every token in the same order, False where it stands in the tables as that of another sequence.
        turns: `[B T]` turn that a token belongs to, -1 for none.
        is_cut: `[N]` True where a length limit ended the episode at the end of the sequence.
        bootstrap_values: `[N]` value after the last token of each sequence, 0 where the episode ended by itself; None
            unless the loss is ppo.
        teacher_logprobs: `[B T]` log-probabilities of the tokens under the teacher of a distillation by sampled tokens;
            None without one.
        sum_pi_squared: `[B T]` sums of squared probabilities under the policy; None unless the estimator reads them.
        support_ids: `[B T]` index into `supports` of the tokens that each token could be drawn from; None if all tokens
            of the job are trained over the whole vocabulary.
        supports: `[U W]` packed supports, each of them once; the first is that of the whole vocabulary.
        teacher_ids: `[B T]` index into `teacher_states` of each token; None without a teacher of the whole vocabulary
            that has a prompt of its own.
        teacher_states: `[U E]` its hidden states before the tokens that it teaches; the first, for others, is 0.
    """

    batch: Batch
    packing: Packing
    microbatch_shapes: Shapes
    trajectories: np.ndarray
    tokens: tuple[np.ndarray, np.ndarray]
    places: tuple[np.ndarray, np.ndarray]
    is_own: np.ndarray
    turns: np.ndarray
    is_cut: np.ndarray
    bootstrap_values: np.ndarray | None = None
    teacher_logprobs: Any = None
    sum_pi_squared: Any = None
    support_ids: np.ndarray | None = None
    supports: np.ndarray | None = None
    teacher_ids: np.ndarray | None = None
    teacher_states: np.ndarray | None = None

    def microbatches(self) -> list[Batch]:
        """Return the microbatches: consecutive rows of the tables, each cut to the width of its longest row."""
        ends = list(itertools.accumulate(rows for rows, _ in self.microbatch_shapes))
        parts = []
        for end, (rows, width) in zip(ends, self.microbatch_shapes, strict=True):
            part = _cut_batch(self.batch, slice(end - rows, end), width)
            if self.support_ids is not None and self.supports is not None:
                words: Any = self.supports[self.support_ids[end - rows : end, :width]]
                part = part._replace(supports=words)
            if self.teacher_ids is not None and self.teacher_states is not None:
                states: Any = HostStates(self.teacher_states, self.teacher_ids[end - rows : end, :width])
                part = part._replace(teacher_hidden=states)
            parts.append(part)
        return parts

    def per_token(self, table: Any, shared: float = 0, dtype: Any = None) -> np.ndarray:
        """Return the entries of a table for every token, sequence by sequence; `shared` for another one's tokens."""
        values = np.asarray(table, dtype)[self.tokens]
        return np.where(self.is_own, values, values.dtype.type(shared))

    def table(self, values: np.ndarray, fill: float = 0) -> np.ndarray:
        """Return the table of the entries of every token, sequence by sequence; `fill` in padding."""
        return _table(self.packing, self.tokens, self.is_own, values, fill)

    def counts(self) -> dict[str, int]:
        """Count trained tokens, observed ones, sequences and trajectories that are trained, pairs, and updates (1)."""
        mask, seen = self.per_token(self.batch.completion_mask), self.batch.observation_mask
        tokens = np.bincount(self.places[0][mask], minlength=len(self.trajectories))
        return {
            "tokens": int(tokens.sum()),
            "observations": 0 if seen is None else int(np.sum(seen)),
            "sequences": int((tokens > 0).sum()),
            "trajectories": len(np.unique(self.trajectories[tokens > 0])),
            "pairs": len(tokens) // 2,
            "updates": 1,
        }


def _table(packing: Packing, tokens: Any, is_own: np.ndarray, values: np.ndarray, fill: float = 0) -> np.ndarray:
    table = np.full((packing.height, packing.width, *values.shape[1:]), fill, values.dtype)
    table[tokens[0][is_own], tokens[1][is_own]] = values[is_own]
    return table


def _cut_batch(batch: Batch, rows: slice, width: int) -> Batch:
    return jax.tree.map(lambda table: table[rows, :width], batch)


def padded_width(tokens: int) -> int:
    """Round a sequence length up to a table width: a multiple of 16 up to 128, then 192, 256, 384, 512, 768, ...

    >>> [padded_width(n) for n in (5, 70, 97, 300, 513)]
    [16, 80, 112, 384, 768]
    """
    power = power_of_two(tokens)
    if power <= 128:
        return -(-tokens // 16) * 16
    return power * 3 // 4 if tokens <= power * 3 // 4 else power


def power_of_two(tokens: int) -> int:
    """Return the least power of two, from 16 on, that is not below `tokens`."""
    return max(16, 1 << (tokens - 1).bit_length())


@dataclass(frozen=True)
class BatchPlanner:
    """Assigns sequences to rows, and rows to microbatches.

    Microbatches have few distinct shapes, so that jobs of any size share compiled programs.

    Attributes:
        microbatch_tokens: maximum tokens per microbatch, padding included; a microbatch has at least one row.
        packed: True if several short sequences may share a row.
        pairs: True to put sequences `2 i` and `2 i + 1` into adjacent rows of one microbatch; excludes `packed`.
        row_shards: number of mesh shards that the rows of a microbatch are divided over.
        most_segments: most sequences of a packed row; None for any number.
        shared_tokens: most tokens of a row whose sequences share a prefix; 0 if the model takes no such rows.
    """

    microbatch_tokens: int
    packed: bool = False
    pairs: bool = False
    row_shards: int = 1
    most_segments: int | None = None
    shared_tokens: int = 0

    def plan_sequences(
        self, sequences: Sequence[Sequence[int] | np.ndarray], untrained: Sequence[int], job_width: int = 0
    ) -> tuple[Packing, Shapes]:
        """Return the rows of these sequences and the shapes of the microbatches, with prefixes shared if that saves.

        All rows of a job have one layout: that of the fewest tokens, padding and unused branches included.

        Args:
            sequences: token ids of each sequence.
            untrained: number of tokens of each sequence before its first trained one.
            job_width: width of the job's rows, for a part of a job.
        """
        lengths = [len(each) for each in sequences]
        packing, shapes = self.plan(lengths, job_width)
        if not self.shared_tokens:
            return packing, shapes
        families = find_families(sequences, untrained)
        longest, most = (max(each) for each in zip(*((f.shared, len(f.members)) for f in families), strict=True))
        if most == 1:
            return packing, shapes
        alone = sum(math.prod(shape) for shape in shapes)
        prefix, fewest = padded_width(longest), min(MOST_OF_TOKENS * alone, alone - LEAST_SAVED)
        own = [
            lengths[i] - (family.shared if len(family.members) > 1 else max(0, min(prefix, lengths[i] - 1)))
            for family in families
            for i in family.members
        ]
        for count in (2**power for power in range(1, (most - 1).bit_length() + 1)):
            branches, branch_tokens = Branches(prefix, count), padded_width(max(own))
            width = branches.width(branch_tokens)
            if width * self.row_shards > max(self.shared_tokens, padded_width(max(lengths)) * self.row_shards):
                break  # a microbatch has a row for each shard of the mesh
            height = sum(-(-len(family.members) // count) for family in families)
            found = self.shapes([width] * height, is_exact=True)
            if (tokens := sum(math.prod(shape) for shape in found)) <= fewest:
                packing, shapes, fewest = plan_branches(families, lengths, branches, branch_tokens), found, tokens
        return packing._replace(height=sum(rows for rows, _ in shapes)), shapes

    def plan(self, lengths: Sequence[int], job_width: int = 0) -> tuple[Packing, Shapes]:
        """Return the rows of sequences of these lengths, and the shapes of the microbatches.

        Packed rows have the widest of `widths` whose microbatches have few more tokens than the fewest, empty rows
        included (`MORE_TOKENS`). Those of a part of a job are as wide as the job, `job_width`, so that it shares the
        programs. Without packing, rows are sorted by descending length, so that microbatches of short sequences are
        narrow.
        """
        longest = max(lengths)
        if self.packed:
            widths = [max(padded_width(longest), job_width)] if job_width else self.widths(longest)
            plans = [plan_packing(lengths, each, self.most_segments) for each in widths]
            tokens = [self._computed_tokens([plan.width] * plan.height) for plan in plans]
            packing = [plan for plan, each in zip(plans, tokens, strict=True) if each <= MORE_TOKENS * min(tokens)][-1]
            row_lengths = [packing.width] * packing.height
        else:
            unit = 2 if self.pairs else 1
            of_units = np.repeat(np.reshape(lengths, (-1, unit)).max(axis=1), unit)
            order = np.argsort(-of_units, kind="stable")
            packing = plan_padding(lengths, padded_width(longest))._replace(rows=np.argsort(order))
            row_lengths = of_units[order].tolist()
        shapes = self.shapes(row_lengths)
        return packing._replace(height=sum(rows for rows, _ in shapes)), shapes

    def _computed_tokens(self, row_lengths: Sequence[int]) -> int:
        return sum(math.prod(shape) for shape in self.shapes(row_lengths))

    def shapes(self, row_lengths: Sequence[int], *, is_exact: bool = False) -> Shapes:
        """Return the microbatch shapes for rows of these descending lengths; the last may include empty rows.

        Microbatches are as wide as their longest row if `is_exact`, else as `padded_width` of that.

        >>> [BatchPlanner(256).shapes([16] * n) for n in (3, 9, 17)]
        [((4, 16),), ((4, 16), (4, 16), (4, 16)), ((16, 16), (4, 16))]
        >>> BatchPlanner(256).shapes([64] + [16] * 20)
        ((4, 64), (16, 16), (4, 16))
        """
        shapes: list[tuple[int, int]] = []
        done = 0
        while done < len(row_lengths):
            width = row_lengths[done] if is_exact else padded_width(row_lengths[done])
            buckets = self.row_buckets(width)
            left = -(-(len(row_lengths) - done) // buckets[-1]) * buckets[-1]
            rows = next(bucket for bucket in buckets if bucket <= left)
            shapes.append((rows, width))
            done += rows
        return tuple(shapes)

    def widths(self, longest: int) -> list[int]:
        """Return the widths that a table whose longest sequence has so many tokens may have, in ascending order.

        A packed one may be wider: in 80 tokens, sequences of 80 and of 48 lie alone, in 128 together.

        >>> BatchPlanner(1024, packed=True).widths(80), BatchPlanner(1024).widths(80)
        ([80, 128], [80])
        """
        narrow, wide = padded_width(longest), max(power_of_two(longest), PACKED_WIDTH)
        has_room = wide * self.row_shards <= self.microbatch_tokens  # a microbatch has a row for each shard of the mesh
        return [narrow, wide] if self.packed and narrow < wide and has_room else [narrow]

    def row_buckets(self, width: int) -> list[int]:
        """Return the allowed numbers of rows at this width: the maximum, and a quarter of it for what is left.

        Each is a program per width, which takes longer to compile than a few empty rows to compute.

        >>> [BatchPlanner(1000).row_buckets(width) for width in (16, 96, 4096)]
        [[32, 8], [8, 2], [1]]
        """
        unit = math.lcm(2 if self.pairs else 1, self.row_shards)
        allowed = max(1, self.microbatch_tokens // width // unit)
        largest = 1 << (allowed.bit_length() - 1)  # a power of two, so that it can be halved
        return [unit * rows for rows in sorted({max(1, largest // part) for part in (1, 4)}, reverse=True)]

    def all_shapes(self, longest: int) -> Shapes:
        """Return every microbatch shape that sequences of up to `longest` tokens can lead to."""
        widths = {width for tokens in range(1, longest + 1) for width in self.widths(tokens)}
        return tuple((rows, width) for width in sorted(widths) for rows in self.row_buckets(width))


def make_batch(
    rows: list[Row],
    planner: BatchPlanner,
    *,
    has_supports: bool = False,
    has_observations: bool = False,
    routing: ExpertTable | None = None,
) -> TrainingBatch:
    """Return the batch of these rows, without scores and advantages. Empty rows train nothing.

    Args:
        rows: rows to train.
        planner: divides them into microbatches.
        has_supports: True to take probabilities over the tokens that each token could be drawn from. What was recorded
            over the whole vocabulary is replaced by what the token was drawn with. Penalties are left out of both.
        has_observations: True to add the mask of the results of tools.
        routing: table of the policy's experts, to add those recorded; None to leave them out. Those of a log are.

    Raises:
        ValueError: `rows` is empty, or recorded experts are those of another model.
    """
    if not rows:
        raise ValueError("there are no rows to make a batch of")
    masks = [row.sequence.completion_mask for row in rows]
    if has_observations:  # which the loss has for each sequence, as trained tokens
        observed = [row.sequence.observations or mask for row, mask in zip(rows, masks, strict=True)]
        masks = [[*map(max, *each)] for each in zip(masks, observed, strict=True)]
    untrained = [[*mask, True].index(True) for mask in masks]
    packing, shapes = planner.plan_sequences([row.sequence.tokens for row in rows], untrained)
    recorded: dict[str, Any] = {
        name: pack(packing, [getattr(row.sequence, name) for row in rows], dtype) for name, dtype in RECORDED.items()
    }
    if planner.packed:
        recorded["segment_ids"], recorded["positions"] = segments(packing)
    if has_observations:
        recorded["observation_mask"] = pack(packing, [row.sequence.observations or False for row in rows], np.bool_)
    ids = supports = None
    texts = [[text.removeprefix(PENALIZED) for text in row.sequence.supports] for row in rows]
    each = list(dict.fromkeys(itertools.chain([""], *texts)))
    if has_supports and len(each) > 1:
        index = {text: number for number, text in enumerate(each)}
        ids = pack(packing, [[index[text] for text in of_row] or 0 for of_row in texts], np.int32)
        decoded = [decode_support(text) for text in each[1:]]
        supports = np.stack([np.zeros_like(decoded[0]), *decoded])
        penalized = [[text.startswith(PENALIZED) for text in row.sequence.supports] or False for row in rows]
        is_drawn_with = (ids > 0) & ~pack(packing, penalized, np.bool_)
        recorded["sampler_logprobs"] = np.where(
            is_drawn_with, recorded["behavior_logprobs"], recorded["sampler_logprobs"]
        )
    places = token_index(packing)
    if routing is not None:
        recorded["experts"] = _table(packing, places.tokens, places.is_own, _recorded_experts(rows, routing))
    return TrainingBatch(
        Batch(**recorded, branches=packing.branches),
        packing,
        shapes,
        np.array([row.trajectory for row in rows]),
        *places,
        turns=pack(packing, [row.sequence.turns or -1 for row in rows], np.int32, fill=-1),
        is_cut=np.array([row.sequence.episode_truncated for row in rows]),
        support_ids=ids,
        supports=supports,
    )


def _recorded_experts(rows: Sequence[Row], routing: ExpertTable) -> np.ndarray:
    """Return the experts `[n L k]` of every token, sequence by sequence."""
    sequences = [row.sequence for row in rows]
    no_experts = [[""] * len(each.tokens) if each.is_logged or not each.experts else each.experts for each in sequences]
    return np.concatenate([decode_experts(texts, routing) for texts in no_experts])


def with_scores(job: TrainingBatch, loss: LossConfig, policy: Scorer | None, reference: Scorer | None) -> TrainingBatch:
    """Add `old_logprobs`, `old_values` and `ref_logprobs` to a job's batch, as far as the loss reads them.

    Args:
        job: result of `make_batch`.
        loss: its `bootstrap` sets the value after an episode that a length limit cut.
        policy: scores with the policy before the first update; None to skip.
        reference: scores with the reference policy of the KL; None to skip.
    """
    batch, behind, squares = job.batch, None, None
    if policy is not None:
        old = score_tokens(job, policy)
        squares = old.sum_pi_squared
        batch = batch._replace(old_logprobs=old.logprobs, old_values=old.values)
        if old.next_values is not None:
            last = np.cumsum(job.packing.lengths) - 1
            at_end = old.next_values[job.tokens][last]
            behind = np.where(job.is_cut & (loss.bootstrap == "value"), at_end, np.float32(0))
    if reference is not None:
        # The reference routes by itself, in the program of the policy.
        own = job if batch.experts is None else job._replace(batch=batch._replace(experts=0 * batch.experts))
        batch = batch._replace(ref_logprobs=score_tokens(own, reference).logprobs)
    return job._replace(batch=batch, bootstrap_values=behind, sum_pi_squared=squares)


def before_scoring(batch: Batch) -> Batch:
    """Return what a batch has before anything is computed of it, so that all scores are of one program."""
    kept = (*RECORDED, "positions", "segment_ids", "branches", "experts")
    return Batch(**{name: table for name, table in batch._asdict().items() if name in kept})


def score_tokens(job: TrainingBatch, score: Scorer) -> Scored:
    """Return the scores `[B T]` of the trained tokens of a job, as numpy tables, 0 elsewhere.

    Args:
        job: result of `make_batch`, or some sequences of it.
        score: scores one microbatch.
    """
    parts = job._replace(batch=before_scoring(job.batch)).microbatches()
    scored = [score(microbatch)._replace(routers=None) for microbatch in parts]

    def joined(*tables: np.ndarray) -> np.ndarray:
        wide = [np.pad(table, ((0, 0), (0, job.packing.width - table.shape[1]))) for table in tables]
        return job.table(np.concatenate(wide)[job.tokens])

    return jax.tree.map(joined, *to_host(scored))


def with_signal(job: TrainingBatch, planner: BatchPlanner) -> tuple[TrainingBatch, int]:
    """Return the trajectories that have an advantage other than 0, or all if none has, and the number left out.

    Args:
        job: the job, with advantages.
        planner: planner of the job.
    """
    moves = job.per_token(job.batch.completion_mask & (job.batch.advantages != 0))
    kept = np.unique(job.trajectories[job.places[0][moves]])
    chosen = np.isin(job.trajectories, kept)
    if chosen.all() or not kept.size:
        return job, 0
    return select_sequences(job, np.flatnonzero(chosen), planner), len(np.unique(job.trajectories[~chosen]))


def divide(
    job: TrainingBatch, planner: BatchPlanner, num_minibatches: int, num_iterations: int, seed: str
) -> list[TrainingBatch]:
    """Split a job into one minibatch per update: whole trajectories, reshuffled in each iteration."""
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
    """Return a batch of some sequences of a job, in tables of their own.

    Args:
        job: the job, with scores and advantages.
        chosen: indices of the sequences, ascending.
        planner: divides them into microbatches.
    """
    masks = (job.batch.completion_mask, job.batch.observation_mask)
    mask = np.any([job.per_token(each) for each in masks if each is not None], axis=0)
    sequences = unpack(job.packing, job.batch.tokens)
    lengths, job_width = job.packing.lengths, 0 if job.packing.branches else job.packing.width
    untrained = [[*each, True].index(True) for each in np.split(mask, np.cumsum(lengths)[:-1])]
    packing, shapes = planner.plan_sequences([sequences[i] for i in chosen], [untrained[i] for i in chosen], job_width)
    index, is_chosen = token_index(packing), np.isin(job.places[0], chosen)

    def moved(values: np.ndarray, fill: int = 0) -> Any:
        return _table(packing, index.tokens, index.is_own, values[is_chosen], fill)

    def of_tokens(table: Any) -> Any:  # a mask holds for a sequence's own tokens
        return moved(job.per_token(table) if table.dtype == np.bool_ else table[job.tokens])

    batch: Batch = jax.tree.map(of_tokens, job.batch)._replace(branches=packing.branches)
    if planner.packed:
        segment_ids: Any = segments(packing)[0]  # counted from 1 in each row
        batch = batch._replace(segment_ids=segment_ids)
    turns = moved(job.per_token(job.turns, shared=-1), fill=-1)
    ids = None if job.support_ids is None else moved(job.support_ids[job.tokens])
    teacher_ids = None if job.teacher_ids is None else moved(job.teacher_ids[job.tokens])
    of_sequences = job.trajectories[chosen], *index, turns, job.is_cut[chosen]
    selected = TrainingBatch(batch, packing, shapes, *of_sequences, support_ids=ids, supports=job.supports)
    return selected._replace(teacher_ids=teacher_ids, teacher_states=job.teacher_states)


def empty_batch(
    loss: LossConfig, rows: int, width: int, *, packed: bool, has_old: bool, routing: ExpertTable | None = None
) -> Batch:
    """Return a microbatch of zeros with the fields that an update of `loss` takes, to compile it.

    Args:
        loss: the loss, which sets the fields.
        rows: number of rows.
        width: tokens per row.
        packed: True to include `segment_ids` and `positions`.
        has_old: True to include `old_logprobs`, as jobs of several updates do.
        routing: table of the policy's experts, to include them.
    """
    experts: Any = None if routing is None else np.zeros((rows, width, *routing[:2]), routing.dtype)
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
        ref_logprobs=floats if loss.scores_reference else None,
        old_values=floats if is_ppo else None,
        returns=floats if is_ppo else None,
        positions=whole if packed else None,
        segment_ids=whole if packed else None,
        trajectory_tokens=floats if loss.averaged_over == "trajectories" else None,
        selected=whole.astype(np.bool_) if loss.selects_tokens else None,
        observation_mask=whole.astype(np.bool_) if loss.observation_coef else None,
        experts=experts,
        **dict.fromkeys(loss.task_tables, floats),
    )
