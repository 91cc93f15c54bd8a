"""Rows as tables: padding, packing, microbatches of few shapes, and minibatches."""

from dataclasses import replace
from itertools import chain

import jax
import numpy as np
import pytest

from jaxft.core.checks import check_batch
from jaxft.core.packing import Branches
from jaxft.models.config import ExpertTable
from jaxft.rollout.calls import encode_experts, encode_support
from jaxft.training.batch import RECORDED, BatchPlanner, Row, divide, make_batch, select_sequences


def test_rows_are_padded_and_filled_up(make_sequence):
    rows = [Row(make_sequence(number), number) for number in range(5)]
    made = make_batch(rows, BatchPlanner(2 * 16 + 1))
    batch = made.batch
    assert made.microbatch_shapes == ((2, 16), (2, 16), (1, 16))
    assert batch.tokens.shape == batch.completion_mask.shape == (5, 16)
    assert batch.tokens[4].tolist() == [3, 14, 20, 25, 22, 1] + [0] * 10
    assert batch.completion_mask.sum(1).tolist() == [4, 4, 4, 4, 4]
    assert made.trajectories.tolist() == [0, 1, 2, 3, 4]
    assert (made.turns == -1).all() and not made.is_cut.any()
    assert batch.temperatures[0, :6].tolist() == [1.0] * 6
    assert batch.sampler_logprobs[0, :6].tolist() == batch.behavior_logprobs[0, :6].tolist() == [0.0] * 2 + [-5.0] * 4
    assert {np.asarray(each).dtype.name for each in batch if each is not None} == {"int32", "bool", "float32"}


@pytest.mark.parametrize(
    ("rows", "microbatch_tokens", "expected"),
    [
        (3, 1, (1, 1, 1)),  # at least a row
        (3, 10_000, (128,)),  # at least a quarter
        (4, 32, (2, 2)),
        (5, 48, (2, 2, 1)),  # three rows would fit, but powers of two have quarters
        (37, 256, (16, 16, 4, 4)),
    ],
)
def test_microbatches_are_of_a_few_sizes(make_sequence, rows, microbatch_tokens, expected):
    placed = make_batch([Row(make_sequence(n), 0) for n in range(rows)], BatchPlanner(microbatch_tokens))
    parts = placed.microbatches()
    assert expected == tuple(len(part.tokens) for part in parts)
    assert placed.microbatch_shapes == tuple(part.tokens.shape for part in parts)
    for name in ("tokens", "completion_mask", "temperatures"):
        whole = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(whole, getattr(placed.batch, name))
    assert parts[0].segment_ids is None
    assert sum(part.completion_mask.any(axis=1).sum() for part in parts) == rows


def test_short_sequences_share_rows(make_sequence):
    rows = [Row(make_sequence(number, turns=[-1, -1, 0, 0, 1, 1]), number) for number in range(5)]
    made = make_batch(rows, BatchPlanner(16, packed=True))
    batch, packing, shapes, turns = made.batch, made.packing, made.microbatch_shapes, made.turns
    assert (shapes, batch.tokens.shape, packing.rows.tolist()) == (((1, 16),) * 3, (3, 16), [0, 0, 1, 1, 2])
    assert batch.segment_ids[0].tolist() == [1] * 6 + [2] * 6 + [0] * 4
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5] * 2 + [0] * 4
    assert turns[1].tolist() == [-1, -1, 0, 0, 1, 1] * 2 + [-1] * 4


def test_batches_of_any_size_share_a_few_shapes(make_sequence):
    def shapes(count, **options):
        placed = make_batch([Row(make_sequence(), n // 2) for n in range(count)], BatchPlanner(256, **options))
        return {part.tokens.shape for part in placed.microbatches()}

    for packed, expected in ((False, {(16, 16), (4, 16)}), (True, {(4, 64), (1, 64)})):
        found = set.union(*(shapes(count, packed=packed) for count in range(1, 100)))
        assert found == expected <= set(BatchPlanner(256, packed).all_shapes(16))
    found = set.union(*(shapes(count, pairs=True) for count in range(2, 100, 2)))
    assert found == {(16, 16), (4, 16)}


def longer(sequence, times):
    return sequence.model_copy(update={name: values * times for name, values in sequence if isinstance(values, list)})


@pytest.mark.parametrize("pairs", [False, True])
def test_microbatches_of_short_rows_are_narrow(make_sequence, pairs):
    times = [1, 1, 7, 1, 1, 1, 2, 3]
    rows = [Row(longer(make_sequence(n), k), n) for n, k in enumerate(times)]
    placed = make_batch(rows, BatchPlanner(96, pairs=pairs))
    assert placed.microbatch_shapes == (((2, 48), (2, 32), (4, 16)) if pairs else ((2, 48), (4, 16), (1, 16), (1, 16)))
    parts = placed.microbatches()
    assert [part.tokens.shape for part in parts] == list(placed.microbatch_shapes)
    assert sum(int(part.completion_mask.sum()) for part in parts) == 4 * sum(times)
    for place, row in zip(placed.packing.rows, rows, strict=True):
        tokens = row.sequence.tokens
        assert placed.batch.tokens[place, : len(tokens)].tolist() == tokens
    if pairs:
        assert (placed.packing.rows[1::2] == placed.packing.rows[::2] + 1).all()


def test_pairs_stay_together(make_sequence):
    rows = [Row(make_sequence(n), n // 2) for n in range(6)]
    for tokens, expected in ((1, (2, 2, 2)), (5 * 16, (4, 2)), (128, (2, 2, 2))):
        shapes = make_batch(rows, BatchPlanner(tokens, pairs=True)).microbatch_shapes
        assert tuple(count for count, _ in shapes) == expected


def test_packed_rows_are_as_wide_as_wastes_least():
    planner = BatchPlanner(1024, packed=True)
    for lengths, expected in (
        ([80, 48, 64, 64], (2, 128)),  # in 80 tokens each would lie alone
        ([80] * 4, (4, 80)),
        ([128, 100, 28], (2, 128)),
        ([600, 300, 120], (1, 1024)),
        ([80, 80, 80, 80, 48], (4, 128)),  # five rows of 80 are computed as six
        ([80, 48], (2, 80)),  # one row of 128 is computed as two
    ):
        packing, shapes = planner.plan(lengths)
        assert (int(packing.rows.max()) + 1, packing.width) == expected
        assert set(shapes) <= set(planner.all_shapes(max(lengths)))
    assert planner.plan([80, 48, 64, 64], job_width=96)[0].width == 96
    assert BatchPlanner(16384, packed=True).plan([80] * 33 + [48] * 24)[0].width == 80  # 33 rows of 128 mean 64
    assert BatchPlanner(100, packed=True).widths(80) == [80]  # no microbatch has 128 tokens
    assert BatchPlanner(512, packed=True, row_shards=8).widths(80) == [80]
    assert BatchPlanner(1024, packed=True, row_shards=8).widths(80) == [80, 128]


def test_rows_of_a_kernel_with_a_limit_have_no_more_sequences():
    free, limited = (
        BatchPlanner(1024, packed=True, most_segments=most).plan([128] + [10] * 30)[0] for most in (None, 7)
    )
    assert (np.bincount(free.rows).max(), np.bincount(limited.rows).max()) == (12, 7)


def test_jobs_of_other_lengths_have_packed_rows_of_one_width():
    planner = BatchPlanner(1024, packed=True)
    for longest in (10, 30, 48, 64):
        assert planner.plan([longest, *range(4, 10)] * 20)[0].width == 64
    assert planner.plan([43] * 20)[0].width == 48  # one row each, of 64 tokens a third more


def test_nothing_is_no_batch():
    with pytest.raises(ValueError, match="there are no rows"):
        make_batch([], BatchPlanner(64))


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"pairs": True}])
def test_selected_sequences_are_laid_out_as_if_they_were_alone(make_sequence, options):
    times, planner = [1, 1, 7, 1, 1, 1, 2, 2], BatchPlanner(96, **options)
    turns = [-1, -1, 0, 0, 1, 1]
    rows = [Row(longer(make_sequence(n, turns=turns, episode_truncated=n == 3), k), n) for n, k in enumerate(times)]
    job, chosen = make_batch(rows, planner), np.array([0, 2, 3, 6] if "pairs" not in options else [2, 3, 6, 7])
    got, expected = select_sequences(job, chosen, planner), make_batch([rows[i] for i in chosen], planner)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    short = select_sequences(job, np.array([0, 1]), planner).packing.width
    assert short == (48 if planner.packed else 16)  # packed parts of a job share its programs


@pytest.mark.parametrize("packed", [False, True])
def test_supports_go_where_their_tokens_go(make_sequence, packed):
    """Each text stands for bits; a part of a job and its microbatches have those of their tokens."""
    texts = ["", *(encode_support(np.array([bits], np.uint32)) for bits in (5, 6, 7))]
    rows = [Row(make_sequence(n), n) for n in range(4)]
    for row in rows[1:]:
        row.sequence.supports = ["", "", *(texts[row.trajectory] for _ in row.sequence.tokens[2:])]
    planner = BatchPlanner(32, packed=packed)
    job = make_batch(rows, planner, has_supports=True)
    for part in (job, select_sequences(job, np.array([0, 2, 3]), planner)):
        words = np.concatenate([np.ravel(each.supports) for each in part.microbatches()])
        counts = {bits: int((words == bits).sum()) for bits in (5, 6, 7)}
        lengths = {n + 4: len(rows[n].sequence.tokens) - 2 for n in part.trajectories if n}
        assert counts == {5: 0, 6: 0, 7: 0} | lengths
    plain = make_batch(rows, planner)
    assert plain.supports is None and all(each.supports is None for each in plain.microbatches())


ROUTING = ExpertTable(layers=2, chosen=2, experts=4)


def with_experts(row):
    """A row whose experts tell its tokens: 1 + the token modulo 4 first; the last token has none."""
    tokens = np.array(row.sequence.tokens[:-1])[:, None, None]
    experts = (1 + (tokens + np.array([[0, 1], [2, 3]])) % 4).astype(np.uint8)
    return row._replace(sequence=row.sequence.model_copy(update={"experts": [*encode_experts(experts), ""]}))


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"packed": True, "shared_tokens": 8192}])
def test_experts_go_where_their_tokens_go(make_sequence, options):
    is_shared = "shared_tokens" in options
    rows = group(make_sequence, 1200, [300] * 8) if is_shared else [Row(make_sequence(n), n) for n in range(5)]
    rows[1:] = map(with_experts, rows[1:])
    planner = BatchPlanner(16384 if is_shared else 32, **options)
    job = make_batch(rows, planner, routing=ROUTING)
    assert (job.packing.branches is not None) == is_shared
    for part in (job, select_sequences(job, np.array([0, 2, 3]), planner)):
        check_batch(part.batch._replace(advantages=part.batch.temperatures))
        for each in part.microbatches():
            is_known = each.experts.any(axis=(2, 3))
            wanted = 1 + (np.asarray(each.tokens)[:, :, None, None] + np.array([[0, 1], [2, 3]])) % 4
            np.testing.assert_array_equal(np.asarray(each.experts)[is_known], wanted[is_known])
        assert is_known.any() and part.batch.experts.dtype == np.uint8
    assert make_batch(rows, planner).batch.experts is None


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([[[1, 2]]], "token 1 .*2 bytes, wanted 4.* 2 layers with 2 of 4 experts.*routing_replay: false"),
        ([[[1, 2], [3, 5]]], "token 1 .*expert 5"),
        ([[[1, 2], [3, 0]]], "token 1 .*expert 3"),
    ],
)
def test_experts_of_another_model_are_refused(make_sequence, experts, message):
    (text,) = encode_experts(np.array(experts, np.uint8))
    row = Row(make_sequence(experts=["", text, *[""] * 4]), 0)
    with pytest.raises(ValueError, match=message):
        make_batch([row], BatchPlanner(32), routing=ROUTING)
    logged = Row(make_sequence(experts=["", text, *[""] * 4], is_logged=True), 0)
    assert not make_batch([logged], BatchPlanner(32), routing=ROUTING).batch.experts.any()


def test_minibatches_take_every_trajectory_once_in_an_iteration(make_sequence):
    def divided(owners, seed="4 0"):
        planner = BatchPlanner(64)
        job = make_batch([Row(make_sequence(number), owner) for number, owner in enumerate(owners)], planner)
        return divide(job, planner, num_minibatches=3, num_iterations=2, seed=seed)

    minibatches = [each.trajectories.tolist() for each in divided(range(4))]
    assert [len(each) for each in minibatches] == [2, 1, 1] * 2
    assert sorted(chain(*minibatches[:3])) == sorted(chain(*minibatches[3:])) == [0, 1, 2, 3]
    assert minibatches[:3] != minibatches[3:]
    assert [each.trajectories.tolist() for each in divided(range(4))] == minibatches
    several = divided([0, 0, 1, 2, 2])
    assert sorted(len(each.trajectories) for each in several) == [1, 1, 2, 2, 2, 2]  # whole trajectories


def test_microbatches_divide_over_a_mesh(make_sequence):
    rows = [Row(make_sequence(number), number) for number in range(11)]
    for shares, pairs in ((4, False), (6, False), (4, True)):
        count = 10 if pairs else 11
        placed = make_batch(rows[:count], BatchPlanner(64, pairs=pairs, row_shards=shares))
        assert all(height % shares == 0 for height, _ in placed.microbatch_shapes)
        assert sum(height for height, _ in placed.microbatch_shapes) == placed.batch.tokens.shape[0] >= count
        assert placed.batch.completion_mask.any(axis=1).sum() == count


def group(make_sequence, prompt, answers, first=0):
    """Rows of a group, whose prompts are of one id."""
    rows = []
    for i, answer in enumerate(answers):
        tokens = [40 + first] * prompt + [100 * (first + i) + n for n in range(answer)]
        mask, zeros = [False] * prompt + [True] * answer, [0.0] * len(tokens)
        recorded = {"sampler_logprobs": zeros, "behavior_logprobs": zeros, "temperatures": [1.0] * len(tokens)}
        turns, versions = [-1] * prompt + [0] * answer, [0] * len(tokens)
        fields = {"tokens": tokens, "completion_mask": mask, "turns": turns, "policy_versions": versions}
        rows.append(Row(make_sequence(**fields, **recorded), first + i))
    return rows


SHARING = BatchPlanner(16384, packed=True, shared_tokens=8192)


def test_a_prompt_is_in_the_tables_once(make_sequence):
    rows = group(make_sequence, 1536, [512] * 8)
    job, plain = make_batch(rows, SHARING), make_batch(rows, replace(SHARING, shared_tokens=0))
    assert job.microbatch_shapes == ((1, 1536 + 8 * 512),) and plain.microbatch_shapes == ((8, 2048),)
    assert job.batch.branches == Branches(1536, 8) and plain.batch.branches is None
    assert job.counts() == plain.counts()
    for name in RECORDED:  # the numbers of every token, sequence by sequence
        np.testing.assert_array_equal(
            job.per_token(getattr(job.batch, name)) * job.is_own,
            plain.per_token(getattr(plain.batch, name)) * job.is_own,
        )
    check_batch(job.batch._replace(advantages=job.batch.temperatures))


@pytest.mark.parametrize(
    ("prompts", "answers", "changes", "branches"),
    [
        ([900, 900], [100] * 4, {}, Branches(1024, 4)),
        ([900], [100] * 9, {}, Branches(1024, 16)),
        ([900, 3], [100] * 9, {"shared_tokens": 2048}, Branches(1024, 8)),  # the width of a row
        ([900], [100] * 9, {"shared_tokens": 1024}, None),  # no two branches fit
        ([900] * 9, [100], {}, None),  # groups of one
        ([20] * 9, [900] * 8, {}, None),  # saves less than a tenth
        ([60], [4] * 8, {}, None),  # saves too little for programs of its own
        ([900], [100] * 9, {"row_shards": 8}, None),  # seven of eight devices would have nothing to do
    ],
)
def test_prefixes_are_shared_where_that_saves(make_sequence, prompts, answers, changes, branches):
    rows = [row for g, prompt in enumerate(prompts) for row in group(make_sequence, prompt, answers, 10 * g)]
    assert make_batch(rows, replace(SHARING, **changes)).batch.branches == branches


def test_parts_of_a_job_share_prefixes_of_their_own(make_sequence):
    rows = group(make_sequence, 1200, [300] * 8) + group(make_sequence, 1000, [200, 300] * 4, first=20)
    turns = [-1] * 1190 + [0] * 10 + [-1] * 100 + [1] * 200
    trained = {"completion_mask": [turn >= 0 for turn in turns], "turns": turns}
    rows[2] = Row(rows[2].sequence.model_copy(update=trained), 2)  # its first answer is in the prefix of the others
    job = make_batch(rows, SHARING)
    owner = job.packing.rows == job.packing.rows[2]
    assert job.packing.shared[2] == 0 and (job.packing.shared[:8][owner[:8]] > 0).sum() == owner.sum() - 1
    for chosen in (np.arange(8), np.array([0, 1, 3, 4, 5, 6, 7]), np.array([0, 2, 9])):
        got = select_sequences(job, chosen, SHARING)
        expected = make_batch([rows[i] for i in chosen], SHARING)
        assert (got.batch.branches is None) == (len(chosen) == 3)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
