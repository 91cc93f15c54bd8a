"""Where packed and padded sequences stand in a table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.core.packing import (
    Branches,
    Family,
    find_families,
    pack,
    plan_branches,
    plan_packing,
    plan_padding,
    segments,
    token_index,
    unpack,
)

lengths_in = st.lists(st.integers(1, 12), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_in, spare=st.integers(0, 6))
def test_packed_sequences_neither_overlap_nor_stick_out(lengths, spare):
    packing = plan_packing(lengths, max(lengths) + spare)
    numbers = [np.arange(length) + 100 * i + 1 for i, length in enumerate(lengths)]
    table = pack(packing, numbers, int)
    assert np.count_nonzero(table) == sum(lengths)
    assert packing.height <= len(lengths)
    for got, put in zip(unpack(packing, table), numbers, strict=True):
        np.testing.assert_array_equal(got, put)
    ids, positions = segments(packing._replace(height=packing.height + 1))
    assert ids.shape == positions.shape == (packing.height + 1, packing.width)
    for i, (row, start, length) in enumerate(zip(packing.rows, packing.starts, lengths, strict=True)):
        span = slice(start, start + length)
        assert len(set(ids[row, span])) == 1 and np.count_nonzero(ids[row] == ids[row, start]) == length
        np.testing.assert_array_equal(positions[row, span], np.arange(length), err_msg=str(i))
    assert np.all((ids[: packing.height] == 0) == (table == 0)) and not ids[-1].any()


@settings(max_examples=50, deadline=None)
@given(lengths=lengths_in, spare=st.integers(0, 6), seed=st.integers(0, 9))
def test_sequences_that_are_moved_stay_whole(lengths, spare, seed):
    packed, alone = plan_packing(lengths, max(lengths) + spare), plan_padding(lengths, max(lengths))
    numbers = [np.arange(length) + 100 * i + 1 for i, length in enumerate(lengths)]
    table = pack(packed, numbers, int)
    index = token_index(packed)
    np.testing.assert_array_equal(table[index.tokens], np.concatenate(numbers))
    np.testing.assert_array_equal(pack(alone, numbers, int)[index.places], np.concatenate(numbers))
    moved = np.full((alone.height, alone.width), -1)
    moved[index.places] = table[index.tokens]
    np.testing.assert_array_equal(moved, pack(alone, numbers, int, fill=-1))


@settings(max_examples=50, deadline=None)
@given(lengths=lengths_in, spare=st.integers(0, 20), most=st.integers(1, 4))
def test_rows_have_at_most_so_many_sequences(lengths, spare, most):
    limited, free = (plan_packing(lengths, max(lengths) + spare, each) for each in (most, None))
    counts = np.bincount(limited.rows, minlength=limited.height)
    assert counts.max() <= most and counts.min() > 0 and free.height <= limited.height <= len(lengths)
    for row in range(limited.height):  # the sequences of a row follow each other
        members = np.flatnonzero(limited.rows == row)
        order = members[np.argsort(limited.starts[members])]
        assert limited.starts[order].tolist() == [0, *np.cumsum(limited.lengths[order])[:-1]]
        assert limited.lengths[order].sum() <= limited.width


def test_rows_that_are_too_short_are_refused():
    for make in (plan_padding, plan_packing):
        with pytest.raises(ValueError, match="a sequence has 5 tokens and rows have 4"):
            make([2, 5], 4)


@settings(max_examples=100, deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=9), min_size=1, max_size=12),
    seed=st.integers(0, 9),
    count=st.integers(2, 4),
)
def test_sequences_that_begin_alike_share_a_row(sequences, seed, count):
    draw = np.random.default_rng(seed)
    untrained = [int(draw.integers(0, len(each) + 1)) for each in sequences]
    families = find_families(sequences, untrained)
    assert sorted(i for family in families for i in family.members) == list(range(len(sequences)))
    for members, shared in families:
        owner, *others = members
        assert all(sequences[i][:shared] == sequences[owner][:shared] for i in others)
        assert all(shared < len(sequences[i]) for i in members if shared)
        assert all(shared <= untrained[i] for i in others)
    lengths = [len(each) for each in sequences]
    branches = Branches(max(1, *(family.shared for family in families)), count)
    packing = plan_branches(families, lengths, branches, max(lengths))
    table, index = pack(packing, sequences, int), token_index(packing)
    assert [each.tolist() for each in unpack(packing, table)] == sequences
    np.testing.assert_array_equal(table[index.tokens], np.concatenate(sequences))
    assert np.count_nonzero(table) == index.is_own.sum()  # each token is in the table once
    ids, positions = segments(packing)
    np.testing.assert_array_equal(ids != 0, table != 0)
    np.testing.assert_array_equal(positions[index.tokens], index.places[1])
    own = index.tokens[0][index.is_own], index.tokens[1][index.is_own]
    for i in range(len(sequences)):  # of one id, and adjacent
        span = own[1][index.places[0][index.is_own] == i]
        assert np.all(np.diff(span) == 1) and len(set(ids[packing.rows[i], span])) == 1


def test_an_earlier_turn_that_is_trained_once_is_shared():
    first, second = [1, 2, 7, 8, 3, 9], [1, 2, 7, 8, 4, 9]  # an answer (7, 8), then other messages
    assert find_families([second, first], [5, 2]) == [Family([1, 0], 4)]
    assert find_families([second, first], [2, 2]) == [Family([0, 1], 2)]  # both train it: it has two advantages
    assert find_families([[1], [1], [5, 6]], [1, 1, 1])[0].shared == 0  # nothing would be left of them


def test_branches_that_are_too_short_are_refused():
    for prefix, tokens in ((1, 9), (2, 1)):
        with pytest.raises(ValueError, match=f"2 tokens in the prefix and 2 in a branch.*{prefix} and {tokens}"):
            plan_branches([Family([0, 1], 2)], [4, 4], Branches(prefix, 2), tokens)
