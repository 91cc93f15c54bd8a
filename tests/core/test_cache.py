"""The cache: pages, tables that say which pages a row has, and copies of pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxft.core.cache import (
    PAGE_TOKENS,
    SHARING_ROWS,
    copy_pages,
    find_shared_pages,
    init_cache,
    own_tables,
    page_axes,
    row_shards,
)
from jaxft.core.sharding import AXES, Sharding
from jaxft.models.paged import LayerPages, init_pages


@pytest.mark.parametrize(("rows", "columns", "shards"), [(1, 1, 1), (5, 3, 1), (6, 2, 3), (8, 4, 8)])
def test_rows_share_no_page_and_leave_none_of_their_shard_unused(rows, columns, shards):
    tables = own_tables(rows, columns, shards)
    assert (tables.shape, tables.dtype) == ((rows, columns), np.int32)
    np.testing.assert_array_equal(np.sort(tables.reshape(shards, -1)), np.arange(rows * columns).reshape(shards, -1))


# --- The axis of the pages.


def drawn_tables(seed, shards, rows, columns=6):
    """Tables of rows that begin like an earlier row of their shard, or anew, and the number of whole pages of each."""
    draws, numbers = np.random.default_rng(seed), iter(range(1, 10**6))
    tables, each = np.zeros((rows, columns), np.int32), rows // shards
    for row in range(rows):
        begun = draws.integers(0, columns) if row % each and draws.random() < 0.8 else 0
        like = row // each * each + draws.integers(0, max(1, row % each))
        tables[row, :begun] = tables[like, :begun]
        tables[row, begun:] = [next(numbers) for _ in range(columns - begun)]
    return tables, draws.integers(0, columns + 1, rows)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_set_begin_with_the_same_whole_pages(seed, shards):
    rows = 64
    tables, whole = drawn_tables(seed, shards, rows)
    shared = find_shared_pages(tables, whole, shards)
    assert [x.shape for x in shared] == [(rows // 2, SHARING_ROWS), (rows // 2,), (rows,)]
    seen, each = [], rows // shards
    for number, (members, columns) in enumerate(zip(shared.rows, shared.columns, strict=True)):
        real = members[members < each] + number * shards // (rows // 2) * each
        assert (len(real) >= 2) == (columns > 0) == bool(len(real))
        assert (members[: len(real)] < each).all()  # padding comes last
        for row in real:
            assert tables[row, :columns].tolist() == tables[real[0], :columns].tolist()
            assert shared.own[row] == columns <= whole[row]
        seen += real.tolist()
    assert sorted(seen) == np.flatnonzero(shared.own).tolist()
    assert find_shared_pages(own_tables(rows, 6, shards), whole, shards) is None


def test_groups_of_a_prompt_read_less_than_half_of_the_keys_and_values():
    """128 rows of 768 tokens in 16 groups that share 512: Qwen3-0.6B reads 4.7 GB a step in place of 11.3."""
    tables = own_tables(128, 768 // PAGE_TOKENS)
    for row in range(128):
        tables[row, : 512 // PAGE_TOKENS] = tables[row // 8 * 8, : 512 // PAGE_TOKENS]
    shared = find_shared_pages(tables, np.full(128, 767 // PAGE_TOKENS))
    of_page = 28 * 2 * 8 * 128 * PAGE_TOKENS * 2  # bytes in all layers
    own = tables.shape[1] - shared.own
    assert tables.size * of_page == pytest.approx(11.3e9, rel=0.01)
    assert (shared.columns.sum() + own.sum()) * of_page == pytest.approx(4.7e9, rel=0.01)


def test_page_axes_are_found_by_their_size(bigram, tiny):
    model = bigram._replace(
        init_cache=lambda pages, dtype: {
            "first": jnp.zeros((pages, 64)),
            "second": init_pages(pages, 2, 16, dtype, "gpu"),
            "last": jnp.zeros((1, 1, pages)),
        }
    )
    assert page_axes(model) == {"first": 0, "second": LayerPages(1, 1), "last": 2}
    assert page_axes(tiny[0]) == (LayerPages(0, 0),) * tiny[0].config.num_layers  # the layout on CPUs
    assert page_axes(bigram) == {}


@pytest.mark.parametrize(
    ("init", "shapes"),
    [
        (lambda pages, dtype: {"kept": jnp.zeros((pages, 64)), "length": jnp.zeros(3)}, r"\[3\].*\[3\]"),
        (lambda pages, dtype: jnp.zeros((-(-pages // 2) * 2, 64)), r"\[2, 64\].*\[2, 64\]"),
        (lambda pages, dtype: jnp.zeros((2 * pages, 4)), r"\[2, 4\].*\[4, 4\]"),
        (lambda pages, dtype: jnp.zeros(()), r"\[\].*\[\]"),
    ],
    ids=["counter", "rounded up", "twice", "scalar"],
)
def test_an_array_without_an_axis_of_pages_is_refused_by_its_shapes(bigram, init, shapes):
    with pytest.raises(ValueError, match=rf"init_cache .*{shapes}"):
        page_axes(bigram._replace(init_cache=init))


# --- Copies.


@pytest.fixture(scope="module")
def both_axes(bigram):
    """A model whose cache has pages on axis 0 and on axis 1."""
    return bigram._replace(init_cache=lambda pages, dtype: (jnp.zeros((pages, 2)), jnp.zeros((3, pages, 2))))


jitted_copy = jax.jit(copy_pages, static_argnums=0)


CACHE = np.arange(10, dtype=np.float32).reshape(5, 2), np.arange(30, dtype=np.float32).reshape(3, 5, 2)


def test_pages_are_copied_along_their_axis_and_others_stay(both_axes):
    cache = CACHE
    first, second = jitted_copy(
        both_axes, cache, np.array([[4, 4, 0]]), np.array([[1, 2, 5]])
    )  # 5 is beyond the last page
    kept = np.array([0, 4, 4, 3, 4])
    np.testing.assert_array_equal(first, cache[0][kept])
    np.testing.assert_array_equal(second, cache[1][:, kept])


def test_pages_may_change_places(both_axes):
    """All sources are read before a target is written."""
    first, _ = jitted_copy(both_axes, CACHE, np.array([[0, 1]]), np.array([[1, 0]]))
    np.testing.assert_array_equal(np.asarray(first)[:, 0], [2, 0, 4, 6, 8])


def test_a_copied_page_holds_every_bit(tiny):
    """Also those of NaN, which a page that was never written may hold."""
    model = tiny[0]

    def filled(leaf):
        pages = np.full(leaf.shape, np.nan, np.float32)
        pages[1] = 0.1
        return pages

    cache = jax.tree.map(filled, jax.eval_shape(lambda: model.init_cache(3, jnp.float32)))
    copied = jitted_copy(model, cache, np.array([[1, 2]]), np.array([[0, 1]]))
    for leaf in jax.tree.leaves(copied):
        pages = np.asarray(leaf)
        assert (pages[0] == np.float32(0.1)).all() and np.isnan(pages[1:]).all()


def test_on_a_mesh_each_shard_of_the_rows_has_pages_of_its_own(bigram):
    assert row_shards(bigram) == 1
    model = bigram._replace(sharding=Sharding(AbstractMesh((2, 2, 2), AXES)))  # rows are divided over two of the axes
    assert row_shards(model) == 4
    _, tables = init_cache(model, 8, 65, jnp.float32)
    np.testing.assert_array_equal(tables, own_tables(8, 2, 4))
